"""Encoding with several processes and through kills: one process's bytes, nothing left over, nothing silently lost."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
from PIL import Image
from torch import Tensor
from tqdm import tqdm

from draftgrid.data import encode as encode_module
from draftgrid.data.encode import EncodeConfig, encode, wait_for_plan
from draftgrid.data.shards import MANIFEST, Manifest, Sample, read_manifest
from draftgrid.data.sources import FolderSource
from draftgrid.heads.tokenizers import PatchVQ
from tests.data_fixtures import files, read_shard, tiny_tokenizer, write_pictures

ROOT = Path(__file__).parents[1]
FORK = get_context("fork")
PICTURES, SHARDS = 60, 12


def slow_tokenizer() -> PatchVQ:
    """So slow that a kill lands before, between and after shards."""
    tokenizer = tiny_tokenizer()
    plain = tokenizer.encode

    def slow(images: Tensor) -> Tensor:
        time.sleep(0.015)
        return plain(images)

    tokenizer.encode = slow  # type: ignore[method-assign]
    return tokenizer


def run(pictures: Path, out: Path, tokenizer: PatchVQ | None = None, **settings) -> Manifest | None:
    settings = {"shards": SHARDS, "batch_size": 3, **settings}
    return encode(FolderSource(pictures), tokenizer or tiny_tokenizer(), out, "all", **settings)


def start(function: Callable[[], object]) -> BaseProcess:
    """Run in a forked child; returns once it runs."""
    ready = FORK.Event()

    def child() -> None:
        tqdm.set_lock(threading.RLock())  # the parent's is shared, and would stay locked if this child dies with it
        ready.set()
        function()

    process = FORK.Process(target=child)
    process.start()
    assert ready.wait(30)
    return process


def ended(process: BaseProcess, seconds: float = 30) -> int | None:
    process.join(seconds)
    if process.is_alive():
        process.kill()
        process.join()
        pytest.fail(f"still running after {seconds:.0f} s")
    return process.exitcode


def killed(process: BaseProcess, after: float) -> bool:
    """Kill it after so many seconds; False if it had ended well before that."""
    process.join(after)
    process.kill()
    code = ended(process)
    assert code in (0, -signal.SIGKILL), code
    return code != 0


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pictures(tmp_path_factory.mktemp("scale") / "pictures", PICTURES)


@pytest.fixture(scope="module")
def whole(pictures: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The files of an uninterrupted encode by one process."""
    out = tmp_path_factory.mktemp("whole") / "out"
    run(pictures, out)
    found = files(out)
    assert sorted(found) == ["manifest.json", "plan.json", *(f"shard-{i:06d}.tar" for i in range(12)), "skipped.jsonl"]
    return found


def test_two_processes_at_once_give_the_bytes_of_one(pictures: Path, tmp_path: Path, whole: dict[str, bytes]) -> None:
    out = tmp_path / "out"

    def share(rank: int) -> None:
        tokenizer, seen = slow_tokenizer(), 0
        plain = tokenizer.encode

        def counted(images: Tensor) -> Tensor:
            nonlocal seen
            seen += len(images)
            return plain(images)

        tokenizer.encode = counted  # type: ignore[method-assign]
        manifest = run(pictures, out, tokenizer, rank=rank, world=2)
        assert (manifest is None) == (rank == 1)
        assert seen == PICTURES // 2

    both = [start(lambda rank=rank: share(rank)) for rank in (1, 0)]
    assert [ended(p) for p in both] == [0, 0]
    assert files(out) == whole


def test_more_processes_than_shards_give_the_bytes_of_one(pictures: Path, tmp_path: Path) -> None:
    run(pictures, tmp_path / "one", shards=2)
    three = [
        start(lambda rank=rank: run(pictures, tmp_path / "three", shards=2, rank=rank, world=3)) for rank in range(3)
    ]
    assert [ended(p) for p in three] == [0, 0, 0]
    assert files(tmp_path / "three") == files(tmp_path / "one")


@pytest.mark.slow
def test_the_command_under_torchrun_gives_the_bytes_of_one_process(
    pictures: Path, tmp_path: Path, whole: dict[str, bytes]
) -> None:
    tiny_tokenizer().save_pretrained(tmp_path / "tokenizer")
    keys = {
        "source": f"folder:{pictures}",
        "split": "all",
        "tokenizer": tmp_path / "tokenizer",
        "out": tmp_path / "out",
        "shards": SHARDS,
    }
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "-m", "draftgrid.data.encode"]
    done = subprocess.run(
        [*command, *(f"{k}={v}" for k, v in keys.items())],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("60 samples in 12 shards (0 skipped)") == 1
    assert files(tmp_path / "out") == whole


@pytest.mark.parametrize("seed", range(2))
def test_ten_kills_at_random_moments_leave_no_trace(
    pictures: Path, tmp_path: Path, whole: dict[str, bytes], seed: int
) -> None:
    out, rng, kills = tmp_path / "out", random.Random(seed), 0
    while kills < 10:
        if killed(start(lambda: run(pictures, out, slow_tokenizer())), after=rng.uniform(0, 0.15)):
            kills += 1
        else:
            assert files(out) == whole
            shutil.rmtree(out)
    run(pictures, out)
    assert files(out) == whole


@pytest.mark.parametrize("seed", range(2))
def test_kills_of_either_of_two_processes_leave_no_trace(
    pictures: Path, tmp_path: Path, whole: dict[str, bytes], seed: int
) -> None:
    out, rng, kills = tmp_path / "out", random.Random(seed), 0

    def begin(rank: int) -> BaseProcess:
        return start(lambda: run(pictures, out, slow_tokenizer(), rank=rank, world=2))

    both = [begin(0), begin(1)]
    while kills < 3:
        rank = rng.randrange(2)
        if killed(both[rank], after=rng.uniform(0, 0.1)):
            kills += 1
        both[rank] = begin(rank)
    assert [ended(p) for p in both] == [0, 0]
    assert files(out) == whole


def die(*_: object, **__: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def dies_once(monkeypatch: pytest.MonkeyPatch, pictures: Path, out: Path, name: str, function: Callable) -> None:
    """An encode in another process, in which data.encode's `name` is this function."""
    with monkeypatch.context() as patch:
        patch.setattr(encode_module, name, function)
        assert ended(start(lambda: run(pictures, out))) == -signal.SIGKILL


def test_a_shard_killed_before_it_is_noted_is_made_again(
    pictures: Path, tmp_path: Path, whole: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    out, plain = tmp_path / "out", encode_module.write_json

    def until_third_note(path: Path, value: object) -> None:
        if path.name == "shard-000002.tar.json":
            die()
        plain(path, value)

    dies_once(monkeypatch, pictures, out, "write_json", until_third_note)
    assert sorted(p.name for p in out.glob("shard-*.tar")) == [f"shard-{i:06d}.tar" for i in range(3)]
    assert sorted(p.name for p in (out / ".parts").glob("shard*")) == [f"shard-{i:06d}.tar.json" for i in range(2)]
    run(pictures, out)
    assert files(out) == whole


def test_a_kill_after_the_manifest_leaves_no_notes(
    pictures: Path, tmp_path: Path, whole: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    out, plain = tmp_path / "out", shutil.rmtree

    def once_finished(*arguments, **settings) -> None:
        if (out / MANIFEST).is_file():
            die()
        plain(*arguments, **settings)

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", once_finished)
        assert ended(start(lambda: run(pictures, out))) == -signal.SIGKILL
    assert (out / MANIFEST).is_file() and len(list((out / ".parts").glob("shard*"))) == SHARDS
    run(pictures, out)
    assert files(out) == whole


def test_a_kill_between_the_skipped_list_and_the_manifest_leaves_no_trace(
    pictures: Path, tmp_path: Path, whole: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    dies_once(monkeypatch, pictures, out, "Manifest", die)
    assert (out / "skipped.jsonl").is_file() and not (out / MANIFEST).is_file()
    run(pictures, out)
    assert files(out) == whole


def test_a_half_written_tar_of_a_killed_process_is_removed(
    pictures: Path, tmp_path: Path, whole: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr("tarfile.TarFile.addfile", die)
        assert ended(start(lambda: run(pictures, out))) == -signal.SIGKILL
    assert any(name.endswith(".part") for name in files(out))
    run(pictures, out)
    assert files(out) == whole


def test_a_process_that_is_late_to_see_the_end_does_not_begin_again(
    pictures: Path, tmp_path: Path, whole: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Process 1, restarted with its share done, looks at its notes while process 0 finishes and removes them."""
    out, plain = tmp_path / "out", encode_module._finished
    with monkeypatch.context() as patch:
        patch.setattr(encode_module, "wait_until", die)
        assert ended(start(lambda: run(pictures, out, rank=0, world=2))) == -signal.SIGKILL
    run(pictures, out, rank=1, world=2)
    assert len(list((out / ".parts").glob("shard*"))) == SHARDS

    def other_finishes(folder: Path, index: int) -> object:
        monkeypatch.setattr(encode_module, "_finished", plain)
        run(pictures, out, rank=0, world=2)
        return plain(folder, index)

    monkeypatch.setattr(encode_module, "_finished", other_finishes)
    tokenizer = tiny_tokenizer()
    tokenizer.encode = lambda _: pytest.fail("encoded again")  # type: ignore[method-assign]
    assert run(pictures, out, tokenizer, rank=1, world=2) is None
    assert files(out) == whole


def test_process_1_says_in_one_sentence_that_process_0_claimed_nothing(pictures: Path, tmp_path: Path) -> None:
    out, plan = tmp_path / "out", {"source": "x"}
    with pytest.raises(ValueError) as nobody:
        wait_for_plan(out, plan, seconds=0.3)
    assert str(nobody.value).startswith(f"{out} was not claimed for this encode within ")
    assert str(nobody.value).endswith(" s; see what process 0 says") and "\n" not in str(nobody.value)
    run(pictures, out)
    with pytest.raises(ValueError, match="was not claimed for this encode"):
        wait_for_plan(out, plan, seconds=0.3)
    wait_for_plan(out, json.loads((out / "plan.json").read_text()), seconds=0.3)


def test_process_1_waits_for_process_0(pictures: Path, tmp_path: Path, whole: dict[str, bytes]) -> None:
    out = tmp_path / "out"
    second = start(lambda: run(pictures, out, rank=1, world=2))
    time.sleep(0.3)
    assert second.is_alive() and not list(out.glob("*.tar"))
    run(pictures, out, rank=0, world=2)
    assert ended(second) == 0
    assert files(out) == whole


def test_what_is_skipped_is_listed_counted_and_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_pictures(tmp_path / "pictures", 20)
    (folder / "007.png").write_text("not a picture")
    text = (folder / "metadata.jsonl").read_text()
    for number in (3, 11):
        text = text.replace(f'"picture number {number}"', '""')
    (folder / "metadata.jsonl").write_text(text)
    tiny_tokenizer().save_pretrained(tmp_path / "tokenizer")
    config = EncodeConfig(
        source=f"folder:{folder}",
        out=str(tmp_path / "out"),
        split="all",
        shards=4,
        tokenizer=str(tmp_path / "tokenizer"),
    )
    encode_module.run(config)
    said = capsys.readouterr().out
    assert f"17 samples in 4 shards (3 skipped, see skipped.jsonl): {tmp_path / 'out'}" in said
    rows = [json.loads(line) for line in (tmp_path / "out" / "skipped.jsonl").read_text().splitlines()]
    items = {item.key: item.path.name for item in FolderSource(folder).items("all")}
    found = {items[row["key"]]: row["reason"] for row in rows}
    assert len(rows) == 3 and found.keys() == {"003.png", "007.png", "011.png"}
    assert found["003.png"] == found["011.png"] == "no caption"
    assert found["007.png"].startswith(f"{folder / '007.png'} is not a readable picture: ")
    for row in rows:
        assert f"skipped: {row['key']}: {row['reason']}" in said
    manifest = read_manifest(tmp_path / "out")
    assert (manifest.samples, manifest.skipped) == (17, 3)
    both = [start(lambda rank=rank: run(folder, tmp_path / "two", shards=4, rank=rank, world=2)) for rank in range(2)]
    assert [ended(p) for p in both] == [0, 0]
    assert files(tmp_path / "two") == files(tmp_path / "out")


def test_limit_takes_the_first_items(pictures: Path, tmp_path: Path) -> None:
    manifest = run(pictures, tmp_path / "out", limit=7, shards=2)
    assert manifest and manifest.samples == 7
    samples = [s for shard in manifest.shards for s in read_shard(tmp_path / "out" / shard.file)]
    first = sorted(item.key for item in FolderSource(pictures).items("all")[:7])
    assert sorted(s.key for s in samples if isinstance(s, Sample)) == first


@pytest.mark.parametrize(("first", "second"), [("crop", "pad"), ("pad", "crop")])
def test_the_other_fit_is_another_encode(tmp_path: Path, first: str, second: str) -> None:
    folder = write_pictures(tmp_path / "pictures", 3)
    for path in folder.glob("*.png"):
        Image.open(path).resize((32, 16)).save(path)
    out = tmp_path / "out"
    run(folder, out, shards=1, fit=first)
    before = files(out)
    with pytest.raises(ValueError, match=f"holds another encode \\(fit: '{first}' there, '{second}' here\\)"):
        run(folder, out, shards=1, fit=second)
    assert files(out) == before
    run(folder, tmp_path / "other", shards=1, fit=second)
    assert files(tmp_path / "other")["shard-000000.tar"] != before["shard-000000.tar"]
    with pytest.raises(ValueError, match="fit is 'stretch'; use one of crop, pad"):
        run(folder, tmp_path / "third", fit="stretch")
