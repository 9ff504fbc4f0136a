"""Training on streams that are mixed, that fail, and that are taken up again by another number of ranks."""

import csv
import json
import os
import shutil
import time
from multiprocessing import get_context
from pathlib import Path

import pytest
from PIL import Image

from draftgrid.common.cli import compose
from draftgrid.data.shards import Sample, read_manifest
from draftgrid.recipes.launch.build import open_sources, prepare_data
from draftgrid.recipes.launch.schema import DEFAULT, RECIPES, TrainConfig
from draftgrid.training.checkpoint import pick_checkpoint, read_checkpoint
from tests.conftest import World
from tests.data_fixtures import codes_by_hand, files, read_shard, tiny_tokenizer, write_pictures
from tests.test_train import fit, last_step, spawn, wait_for_step
from tests.tiny import tiny_emu3


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
    assert "the checkpoint is of 2 ranks x 2 workers and batches of 2" in output and "is divided again" in output


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that draws 4x6 codes of 4 pixels, whose tokenizer by itself takes pictures of 16x16."""
    folder = tmp_path_factory.mktemp("wide") / "backbone"
    tiny_emu3((4, 6), codes=32).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder / "image_tokenizer")
    return folder


def test_pictures_are_encoded_at_the_size_the_backbone_draws(wide: Path, world: World, tmp_path: Path) -> None:
    pictures = write_pictures(tmp_path / "pictures", 40, size=24)
    keys = {
        "backbone.checkpoint": wide,
        "data.dir": tmp_path / "data",
        "data.source": f"folder:{pictures}",
        "data.copies": 1,
    }
    fit(world.overrides(tmp_path / "run", **keys))
    for split in ("train", "validation"):
        assert read_manifest(tmp_path / "data" / split).grid == (4, 6)
    codebook = tiny_tokenizer().codebook.numpy()
    shard = read_manifest(tmp_path / "data" / "train").shards[0]
    for sample in read_shard(tmp_path / "data" / "train" / shard.file):
        assert isinstance(sample, Sample)
        with Image.open(pictures / sample.metadata["file"]) as picture:
            picture.crop((0, 4, 24, 20)).save(tmp_path / "cut.png")
        assert sample.tokens.tolist() == codes_by_hand(tmp_path / "cut.png", codebook).tolist()


def test_every_rank_encodes_its_share_of_a_runs_pictures(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pictures = write_pictures(tmp_path / "pictures", 40)

    def prepare(name: str) -> None:
        """Tells in NAME.RANK how many pictures this rank has encoded."""
        tokenizer, seen = tiny_tokenizer(), []
        plain = tokenizer.encode
        tokenizer.encode = lambda images: seen.extend(images) or plain(images)  # type: ignore[method-assign]
        keys = {"data.dir": tmp_path / name, "data.source": f"folder:{pictures}", "data.copies": 1, "data.shards": 4}
        config = compose(TrainConfig, world.overrides(tmp_path, **keys), RECIPES, DEFAULT)
        prepare_data(config, open_sources(config), tokenizer, (4, 4), "cpu")
        (tmp_path / f"{name}.{os.environ.get('RANK', '0')}").write_text(str(len(seen)))

    prepare("alone")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    other = get_context("fork").Process(target=prepare, args=("both",))
    other.start()
    monkeypatch.setenv("RANK", "0")
    prepare("both")
    other.join(60)
    assert other.exitcode == 0
    for split in ("train", "validation"):
        assert files(tmp_path / "both" / split) == files(tmp_path / "alone" / split)
    whole, mine, others = (int((tmp_path / name).read_text()) for name in ("alone.0", "both.0", "both.1"))
    assert whole == mine + others and abs(mine - others) <= 2
