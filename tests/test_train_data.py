"""Training on streams that are mixed, that fail, and that are taken up again by another number of ranks."""

import csv
import json
import shutil
import time
from pathlib import Path

import pytest

from draftgrid.data.shards import read_manifest
from draftgrid.training.checkpoint import pick_checkpoint, read_checkpoint
from tests.conftest import World
from tests.test_train import fit, last_step, spawn, wait_for_step


def logged(run: Path, column: str) -> list[float]:
    (file,) = sorted((run / "logs").rglob("metrics.csv"))[-1:]
    with open(file, newline="") as text:
        return [float(row[column]) for row in csv.DictReader(text) if row.get(column)]


def test_the_origin_of_every_sample_is_counted_also_over_a_resume(world: World, tmp_path: Path) -> None:
    own = tmp_path / "own"
    shutil.copytree(world.data / "train", own)
    keys = {"data.mix": f"{{{own}: 0.5}}", "trainer.steps": 60, "trainer.save_every": 20, "data.batch_size": 2}
    out = tmp_path / "run"
    fit(world.overrides(out, **keys))
    checkpoint = read_checkpoint(pick_checkpoint(out))
    counts = checkpoint["counts"]["samples"]
    assert sum(counts.values()) == 120 and counts[str(own)] == pytest.approx(40, abs=1)
    assert logged(out, f"samples/{own}")[-1] <= counts[str(own)]
    (out / "metrics.json").unlink()
    fit(world.overrides(out, **keys))
    again = read_checkpoint(pick_checkpoint(out))
    assert again["counts"]["samples"] == counts


def test_changed_training_data_is_noticed_when_a_run_is_taken_up(world: World, tmp_path: Path) -> None:
    data, out = tmp_path / "data", tmp_path / "run"
    shutil.copytree(world.data, data)
    keys = {"data.dir": data, "trainer.steps": 4, "trainer.save_every": 2}
    fit(world.overrides(out, **keys))
    (out / "metrics.json").unlink()
    manifest = data / "train" / "manifest.json"
    value = json.loads(manifest.read_text())
    value["shards"][0]["sha256"] = "0" * 64
    manifest.write_text(json.dumps(value))
    with pytest.raises(ValueError, match=r"the checkpoint was reading .*bring that back"):
        fit(world.overrides(out, **keys))


@pytest.mark.slow
def test_a_shard_that_cannot_be_read_ends_all_ranks_with_its_name_and_one_rank_can_go_on(
    world: World, tmp_path: Path
) -> None:
    data, out = tmp_path / "data", tmp_path / "run"
    shutil.copytree(world.data, data)
    shard = data / "train" / read_manifest(data / "train").shards[1].file
    keys = {
        "data.dir": data,
        "data.workers": 2,
        "data.batch_size": 2,
        "trainer.accelerator": "cpu",
        "trainer.steps": 3000,
        "trainer.validate_every": 3000,
        "trainer.save_every": 10,
    }
    process = spawn(world.overrides(out, **keys), torchrun=2)
    wait_for_step(process, out, 10)
    hidden = shard.rename(tmp_path / "hidden.tar")
    begun = time.monotonic()
    output, _ = process.communicate(timeout=60)
    assert time.monotonic() - begun < 60 and process.returncode != 0
    assert f"error: shard {shard} is missing" in output and "60 samples in 4 shards" in output
    hidden.rename(shard)
    step = last_step(out)
    assert step < 2900
    keys["trainer.steps"] = 3000
    process = spawn(world.overrides(out, **keys))
    wait_for_step(process, out, step + 20, 60)
    process.terminate()
    output, _ = process.communicate(timeout=60)
    assert "the checkpoint dealt to 2 ranks x 2 workers in batches of 2" in output and "is dealt anew" in output
