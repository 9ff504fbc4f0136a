"""What all commands keep to: numbers have ranges, and the caller's settings stay as they were."""

import copy
import dataclasses
import json
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from draftgrid.common.cli import main
from draftgrid.data import bench as data_bench
from draftgrid.data import encode, show, verify
from draftgrid.eval import bench, generate, latency
from draftgrid.recipes.launch.schema import TrainConfig
from draftgrid.recipes.plan.loss_memory import MemoryConfig
from tests.conftest import World

SCHEMAS = {
    "bench": bench.BenchConfig,
    "generate": generate.GenerateConfig,
    "latency": latency.LatencyConfig,
    "encode": encode.EncodeConfig,
    "show": show.ShowConfig,
    "verify": verify.VerifyConfig,
    "data-bench": data_bench.BenchConfig,
    "loss-memory": MemoryConfig,
    "train": TrainConfig,
}
ANY_SIGN = {"guidance", "guidances", "decoding.guidance", "loss.guidance"}
"""Below 0, guidance leads away from the prompt."""


def numbers(config: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, default) of every key that takes numbers."""
    for field in fields(config):
        value, name = getattr(config, field.name), prefix + field.name
        if is_dataclass(value):
            yield from numbers(value, f"{name}.")
        elif not isinstance(value, bool | str):
            yield name, value


CASES = [(command, name, value) for command, schema in SCHEMAS.items() for name, value in numbers(schema())]


def test_there_are_numbers_to_test() -> None:
    assert len(CASES) > 90 and {command for command, *_ in CASES} == SCHEMAS.keys() - {"verify"}


@pytest.mark.parametrize(("command", "name", "default"), CASES, ids=[f"{c}-{n}" for c, n, _ in CASES])
def test_a_number_that_cannot_be_meant_is_one_sentence_before_anything_is_done(
    command: str, name: str, default: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    form = "[{}]" if isinstance(default, list) else "{{x: {}}}" if isinstance(default, dict) else "{}"
    endless = [".nan", ".inf", "-.inf"] if isinstance(default, dict) else ["nan", "inf", "-inf"]
    whole = isinstance(default, int) or name.endswith("grid")
    for value in [*(["-1"] if name not in ANY_SIGN else []), *([] if whole else endless)]:
        with pytest.raises(SystemExit) as ended:
            main(lambda _: pytest.fail("run"), SCHEMAS[command], None, [f"{name}={form.format(value)}"])
        said = capsys.readouterr().err
        assert ended.value.code == 2 and said.startswith(f"error: {name} is ") and "; use a" in said, said
        assert said.count("\n") == 1


def smoke(command: str, world: World, tmp_path: Path) -> Any:
    """(run, its settings): smoke=true, which changes most of them on the way."""
    drawing = {"backbone": str(world.backbone), "prompts": str(world.prompts), "heads": "", "device": "cpu"}
    drawing |= {"smoke": True, "out": str(tmp_path / "out")}
    return {
        "bench": (bench.run, bench.BenchConfig(decoders="scd:window=4", guidances=[1.0, 2.0], **drawing)),  # type: ignore[arg-type]
        "calibrate": (bench.run, bench.BenchConfig(calibrate=True, decoders="scd", **drawing)),  # type: ignore[arg-type]
        "generate": (generate.run, generate.GenerateConfig(decoder="scd", **drawing)),  # type: ignore[arg-type]
        "shards": (generate.run, generate.GenerateConfig(decoder="scd", save="shards", **drawing)),  # type: ignore[arg-type]
        "latency": (
            latency.run,
            latency.LatencyConfig(backbones="janus_pro", device="cpu", smoke=True, out=str(tmp_path)),
        ),
        "show": (
            show.run,
            show.ShowConfig(str(world.data / "train"), str(world.backbone), str(tmp_path), images=9, smoke=True),
        ),
        "data-bench": (
            data_bench.run,
            data_bench.BenchConfig(dir=str(tmp_path / "data"), out=str(tmp_path / "figures.json"), smoke=True),
        ),
    }[command]


def test_data_bench_runs_without_loader_processes_too(tmp_path: Path) -> None:
    threads = torch.get_num_threads()
    config = data_bench.BenchConfig(dir=str(tmp_path / "data"), out=str(tmp_path / "figures.json"), smoke=True)
    data_bench.run(dataclasses.replace(config, ranks=1, workers=1))
    torch.set_num_threads(threads)
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert figures["seen once, more, never"] == [64, 0, 0] and figures["steps of each rank"] == [8]


@pytest.mark.parametrize("command", ["bench", "calibrate", "generate", "shards", "latency", "show", "data-bench"])
def test_a_command_leaves_its_callers_settings_alone(command: str, world: World, tmp_path: Path) -> None:
    threads = torch.get_num_threads()
    run, config = smoke(command, world, tmp_path)
    before = copy.deepcopy(config)
    run(config)
    torch.set_num_threads(threads)
    assert config == before
