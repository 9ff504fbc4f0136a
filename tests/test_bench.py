"""What bench and generate write, and the likelihood figures against sums written out."""

import json
import math
from pathlib import Path

import pytest
import torch
from PIL import Image

from eval.bench import BenchConfig, interpolate
from eval.bench import run as bench
from eval.decoders import Sampling
from eval.generate import GenerateConfig
from eval.generate import run as generate
from eval.metrics.likelihood import bootstrap, surprise
from heads.backbones import load_backbone
from heads.mtp import HeadsConfig, new_heads
from tests.conftest import World
from tests.tiny import TableBackbone, tiny_emu3


@pytest.fixture(scope="module")
def heads(world: World) -> Path:
    backbone = load_backbone(world.backbone)
    folder = world.root / "heads"
    new_heads(HeadsConfig(right=3, down=2), backbone).save_pretrained(folder)
    return folder


def settings(world: World, heads: Path) -> dict[str, object]:
    return {"heads": str(heads), "backbone": str(world.backbone), "prompts": str(world.prompts)}


def test_bench_writes_the_schema_with_ar_first(world: World, heads: Path, tmp_path: Path, capsys) -> None:
    decoders = "ssd:rounds=2,ssd:rounds=1:rows=2"
    bench(
        BenchConfig(**settings(world, heads), decoders=decoders, images=3, repeats=1, guidance=2.0, out=str(tmp_path))
    )
    report = json.loads((tmp_path / "bench.json").read_text())
    assert {"backbone", "heads", "grid", "machine", "rows", "step_cost", "draft_row"} <= set(report)
    assert report["grid"] == [4, 4] and "1" in report["step_cost"] and report["sampling"]["guidance"] == 2.0
    assert [(r["decoder"], r["settings"], r["exact"]) for r in report["rows"]] == [
        ("ar", {}, True),
        ("ssd", {"rounds": 2}, False),
        ("ssd", {"rounds": 1, "rows": 2}, False),
    ]
    assert [r["nfe"] for r in report["rows"]] == [16, 12, 6]
    fields = "decoder settings exact images nfe tokens_forwarded seconds_per_image seconds_draft seconds_forward"
    fields += " seconds_verify speedup nll excess_surprise acceptance change_rate"
    for row in report["rows"]:
        assert set(fields.split()) <= set(row)
        low, high = row["excess_surprise"][1:]
        assert row["images"] == 3 and low <= row["excess_surprise"][0] <= high
    assert set(report["rows"][2]["acceptance"]) == {"right1", "right2", "right3", "down1", "down2"}
    printed = capsys.readouterr().out
    assert "ssd rounds=1 rows=2" in printed and "lossy" in printed and "exact" in printed
    # 3 rows of 3 pictures of 128 pixels, and text beside and above them
    with Image.open(tmp_path / "sheet.png") as sheet:
        width, height = sheet.size
    assert width > 3 * 128 and height > 3 * 128


def test_generate_writes_a_picture_per_prompt_that_decodes_from_its_tokens(
    world: World, heads: Path, tmp_path: Path
) -> None:
    from eval import decode
    from heads.tokenizers import load_tokenizer

    generate(GenerateConfig(**settings(world, heads), images=2, decoder="ar", seed=3, scale=2, out=str(tmp_path)))
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "0000-blue.png",
        "0001-a-red-apple.png",
        "pictures.json",
        "sheet.png",
    ]
    tokens = decode(load_backbone(world.backbone), ["a red apple"], decoder="ar", seed=3, samples=[1]).tokens
    (expected,) = load_tokenizer(world.backbone).pil(tokens, scale=2)
    with Image.open(tmp_path / "0001-a-red-apple.png") as picture:
        assert picture.tobytes() == expected.tobytes()


@pytest.mark.parametrize(
    "change,message",
    [
        ({"decoder": "ar,ssd"}, "name one"),
        ({"decoder": "ssd:rounds=-1"}, "rounds is -1"),
        ({"decoder": "ssd:rounds=two"}, "rounds is 'two'; use a whole number"),
        ({"decoder": "ssd:rounds"}, "'rounds' is not setting=value"),
        ({"decoder": "sdd"}, "unknown decoder 'sdd'. Did you mean 'ssd'"),
        ({"heads": ""}, "heads is empty"),
        ({"heads": "no/such/folder"}, "neither a folder nor a hub id"),
        ({"prompts": "nothing.txt"}, "prompts is 'nothing.txt'"),
        ({"images": -1}, "images is -1"),
        ({"device": "gpu"}, "device is 'gpu'; use auto, cpu, cuda"),
        ({"backbone": "nowhere"}, "'nowhere' is neither a folder"),
        ({"scale": 0}, "scale is 0"),
        ({"top_p": 0.0}, "top_p is 0"),
    ],
)
def test_wrong_input_is_told_and_nothing_is_written(
    world: World, heads: Path, tmp_path: Path, change, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        generate(GenerateConfig(**(settings(world, heads) | {"out": str(tmp_path / "out")} | change)))
    assert not (tmp_path / "out").exists()


def test_surprise_equals_sums_over_the_pictures_own_logits() -> None:
    backbone = tiny_emu3((2, 3))
    tokens = torch.randint(24, (2, 2, 3), generator=torch.Generator().manual_seed(0))
    sampling = Sampling(guidance=2.0, temperature=0.7)
    nll, excess = surprise(backbone, tokens, ["blue", "a red apple"], sampling)
    for b, prompt in enumerate(["blue", "a red apple"]):
        c, u = (backbone.logits(backbone.states(tokens[b : b + 1], [p])[0])[0] for p in (prompt, None))
        p = ((u + 2 * (c - u)) / 0.7).softmax(-1).flatten(0, 1).tolist()
        picked = [-math.log(row[t]) for row, t in zip(p, tokens[b].flatten().tolist(), strict=True)]
        entropies = [-sum(v * math.log(v) for v in row if v > 0) for row in p]
        assert nll[b].item() == pytest.approx(sum(picked) / 6, rel=1e-4)
        assert excess[b].item() == pytest.approx((sum(picked) - sum(entropies)) / 6, abs=1e-4)


def test_excess_surprise_of_the_exact_law_is_zero_and_of_a_colder_one_negative() -> None:
    """Expectation over every picture of a table backbone: no sampling."""

    class Table(TableBackbone):
        def states(self, tokens, prompts):
            rows = [[self.state_of(t[:i]) for i in range(len(t))] for t in tokens.flatten(1).tolist()]
            return torch.stack([torch.stack(r) for r in rows]).view(*tokens.shape, -1), None

    backbone = Table((2, 2), 2)
    pictures = torch.tensor(list(backbone.law(Sampling()))).view(-1, 2, 2)
    _, excess = surprise(backbone, pictures, ["x"] * len(pictures), Sampling())
    for temperature, check in ((1.0, lambda v: abs(v) < 1e-9), (0.8, lambda v: v < -0.02)):
        weights = torch.tensor(list(backbone.law(Sampling(temperature=temperature)).values()), dtype=torch.float64)
        assert check(float((weights * excess).sum()))


def test_bootstrap_interval_holds_the_mean_and_shrinks_with_more_pictures() -> None:
    generator = torch.Generator().manual_seed(0)
    few, many = (torch.randn(n, generator=generator).tolist() for n in (20, 2000))
    for values in (few, many):
        mean, low, high = bootstrap(values)
        assert low < mean < high and mean == pytest.approx(sum(values) / len(values))
    assert bootstrap(many)[2] - bootstrap(many)[1] == pytest.approx(2 * 1.96 / math.sqrt(2000), rel=0.15)
    assert bootstrap([2.0, 2.0]) == [2.0, 2.0, 2.0]


def test_cost_between_measured_lengths_is_linear_and_flat_outside() -> None:
    cost = {1: 1.0, 4: 4.0, 8: 6.0}
    assert [interpolate(cost, n) for n in (0.5, 1, 2, 4, 6, 8, 99)] == [1, 1, 2, 4, 5, 6, 6]
