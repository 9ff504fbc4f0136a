"""Every strategy trains the same job: two ranks under each, against one process; checkpoints cross between all."""

import itertools
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from draftgrid.training.checkpoint import read_checkpoint, saved_steps, step_file
from draftgrid.training.export import export
from tests import rank_worker
from tests.conftest import World
from tests.rank_worker import HALF, HALVES, STEPS, STRATEGIES

ROOT = Path(__file__).parent.parent
KEYS = {
    "trainer.steps": STEPS,
    "trainer.save_every": HALF,
    "trainer.validate_every": STEPS,
    "trainer.clip": 0.05,  # so low that every step is clipped
    "trainer.accelerator": "cpu",
    "optim.warmup": 3,
    "data.validation_samples": 2,
}
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def one(world: World, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Losses of one process with the whole batch."""
    return rank_worker.run(world.overrides(tmp_path_factory.mktemp("one"), **KEYS)).losses


@pytest.fixture(scope="module")
def two(world: World, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """Two ranks: (folder, {strategy: losses, strategy_resumed: losses of the second half, from DDP's checkpoint})."""
    out = tmp_path_factory.mktemp("two")
    arguments = [a for a in world.overrides(out, **KEYS) if not a.startswith("out=")]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    done = subprocess.run(
        [*command, "-m", "tests.rank_worker", str(out), *arguments],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return out, json.loads((out / "found.json").read_text())


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_losses_of_two_ranks_are_those_of_one_process(strategy: str, one: list[float], two: Any) -> None:
    _, found = two
    assert len(one) == len(found[strategy]) == STEPS
    assert found[strategy] == pytest.approx(one, abs=1e-5)
    assert max(abs(a - b) for a, b in itertools.pairwise(one)) > 1e-4  # a loss that moves


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_checkpoint_of_ddp_is_taken_up_by_every_strategy(strategy: str, two: Any) -> None:
    """Weights and moments come out as they went in, bit for bit, and training goes on as if nothing had happened."""
    out, found = two
    assert found[f"{strategy}_resumed"] == pytest.approx(found["ddp"][HALF:], abs=1e-5)
    before = read_checkpoint(out / "ddp" / "checkpoints" / step_file(HALF))
    after = read_checkpoint(out / f"{strategy}_again.ckpt")
    (adam,), (again,) = before["optimizer_states"], after["optimizer_states"]
    assert adam["step"] == again["step"] == HALF
    pairs = [(before["state_dict"], after["state_dict"])]
    pairs += [(adam["moments"][key], again["moments"][key]) for key in ("exp_avg", "exp_avg_sq")]
    for there, here in pairs:
        assert there.keys() == here.keys() and len(there) > 0
        for name in there:
            assert there[name].dtype == here[name].dtype == torch.float32 and there[name].numel() > 0
            assert torch.equal(there[name], here[name]), name


@pytest.mark.parametrize("strategy", ["deepspeed_2", "deepspeed_3"])
def test_one_process_goes_on_with_a_checkpoint_of_two_ranks(
    strategy: str, two: Any, world: World, tmp_path: Path
) -> None:
    out, found = two
    start = out / strategy / "checkpoints" / step_file(HALF)
    recorder = rank_worker.run(world.overrides(tmp_path, **KEYS), start)
    assert recorder.losses == pytest.approx(found[strategy][HALF:], abs=1e-4)


def test_an_export_of_any_strategy_equals_that_of_one_process(two: Any, tmp_path: Path) -> None:
    out, _ = two
    start = out / "ddp" / "checkpoints" / step_file(HALF)
    expected = load_file(export(start, tmp_path / "ddp") / "model.safetensors")
    weights = read_checkpoint(start)["state_dict"]
    assert {f"heads.{name}" for name in expected} == set(weights)
    for strategy in STRATEGIES:
        found = load_file(export(out / f"{strategy}_again.ckpt", tmp_path / strategy) / "model.safetensors")
        assert found.keys() == expected.keys()
        for name, tensor in found.items():
            assert tensor.numel() and torch.equal(tensor, expected[name]), name


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_checkpoint_weighs_little_more_than_heads_and_optimizer(strategy: str, two: Any) -> None:
    out, _ = two
    (file,) = saved_steps(out / strategy / "checkpoints")[-1:]
    held = sum(t.numel() * t.element_size() for t in read_checkpoint(file)["state_dict"].values())
    assert held > 0 and file.stat().st_size <= 1.2 * 3 * held


@pytest.mark.parametrize("name", HALVES)
def test_half_precision_and_accumulation_train_alike(name: str, two: Any) -> None:
    """Eight batches, two a step, against fp32; a step's losses differ by the rounding of bf16 alone."""
    out, found = two
    assert len(found[name]) == 8 and all(math.isfinite(loss) for loss in found[name])
    assert 2 * found[name][0] == pytest.approx(found["ddp"][0], rel=0.05)  # each counts half
    assert found[name] == pytest.approx(found["ddp/bf16-mixed"], rel=0.05)
    (file,) = saved_steps(out / name / "checkpoints")
    (adam,) = read_checkpoint(file)["optimizer_states"]
    assert adam["step"] == 4 and all(t.dtype == torch.float32 for t in adam["moments"]["exp_avg"].values())


def test_a_signal_to_one_rank_stops_and_saves_all_behind_the_same_step(two: Any) -> None:
    out, found = two
    assert "stopped at step 8 (SIGTERM)" in found["stopped[143, 143]"]
    (file,) = saved_steps(out / "told" / "checkpoints")
    saved = read_checkpoint(file)
    assert saved["global_step"] == 8 and len(saved["rng"]) == 2 and math.isfinite(saved["optimizer_states"][0]["step"])
