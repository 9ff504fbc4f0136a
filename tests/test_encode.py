"""Pictures -> shards: right codes, same bytes whatever interrupts, and nothing half-written."""

import errno
import hashlib
import io
import json
import os
import shutil
import signal
import tarfile
import time
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from draftgrid.common.cli import main
from draftgrid.data import encode as encode_module
from draftgrid.data import show, verify
from draftgrid.data.encode import EncodeConfig, encode
from draftgrid.data.shards import Broken, Manifest, Sample, check_manifest, read_manifest, write_shard
from draftgrid.data.sources import FolderSource
from draftgrid.heads.tokenizers import PatchVQ
from tests.data_fixtures import TOKENIZER, codes_by_hand, files, read_shard, tiny_tokenizer, write_pictures, write_set


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    return write_pictures(tmp_path / "pictures", 20)


def run(pictures: Path, out: Path, tokenizer: PatchVQ | None = None, **settings) -> Manifest:
    settings = {"shards": 4, "batch_size": 3, **settings}
    return encode(FolderSource(pictures), tokenizer or tiny_tokenizer(), out, "all", **settings)


def samples_of(out: Path) -> list[Sample]:
    manifest = read_manifest(out)
    samples = [s for shard in manifest.shards for s in read_shard(out / shard.file, shard.samples)]
    assert all(isinstance(s, Sample) for s in samples)
    return samples  # type: ignore[return-value]


def test_shards_hold_the_codes_and_captions_of_the_pictures(pictures: Path, tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    manifest = run(pictures, tmp_path / "out", tokenizer)
    samples = samples_of(tmp_path / "out")
    assert len(samples) == manifest.samples == 20
    assert len({s.key for s in samples}) == 20
    for sample in samples:
        path = pictures / sample.metadata["file"]
        assert sample.caption == f"picture number {int(path.stem)}"
        assert sample.tokens.dtype == np.uint16
        assert sample.tokens.tolist() == codes_by_hand(path, tokenizer.codebook.numpy()).tolist()
        pixels = torch.from_numpy(np.asarray(Image.open(path)).copy()).permute(2, 0, 1)[None].float() / 255
        assert sample.tokens.tolist() == tokenizer.encode(pixels)[0].tolist()


def test_a_shard_is_a_plain_tar_and_the_manifest_says_its_size_and_hash(pictures: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    manifest = run(pictures, out)
    assert (manifest.grid, manifest.codes, manifest.skipped, manifest.split) == ((4, 4), 32, 0, "all")
    assert manifest.tokenizer == tiny_tokenizer().fingerprint
    assert [s.file for s in manifest.shards] == [f"shard-{i:06d}.tar" for i in range(4)]
    for shard in manifest.shards:
        content = (out / shard.file).read_bytes()
        assert (shard.bytes, shard.sha256) == (len(content), hashlib.sha256(content).hexdigest())
        with tarfile.open(fileobj=io.BytesIO(content)) as tar:
            names = tar.getnames()
            assert len(names) == 3 * shard.samples
            key = names[0].removesuffix(".tokens.npy")
            assert names[:3] == [f"{key}.tokens.npy", f"{key}.txt", f"{key}.json"]
            array = np.load(io.BytesIO(tar.extractfile(names[0]).read()))  # type: ignore[union-attr]
            assert array.shape == (4, 4)
            assert {(m.mtime, m.uid, m.gid) for m in tar.getmembers()} == {(0, 0, 0)}
    assert read_manifest(out) == manifest


def test_a_codebook_over_65536_is_stored_in_32_bits(tmp_path: Path) -> None:
    tokens = np.array([[0, 65536], [70000, 1]])
    write_shard(tmp_path / "a.tar", [Sample("k", tokens, "c")], 1 << 17)
    (sample,) = read_shard(tmp_path / "a.tar")
    assert isinstance(sample, Sample)
    assert sample.tokens.dtype == np.uint32
    assert sample.tokens.tolist() == tokens.tolist()


def test_two_runs_and_any_batch_size_give_the_same_bytes(pictures: Path, tmp_path: Path) -> None:
    run(pictures, tmp_path / "a")
    run(pictures, tmp_path / "b", batch_size=1)
    run(pictures, tmp_path / "b", batch_size=1)  # finished before
    assert files(tmp_path / "a") == files(tmp_path / "b")
    run(pictures, tmp_path / "c", seed=1)
    assert {s.key for s in samples_of(tmp_path / "c")} == {s.key for s in samples_of(tmp_path / "a")}
    assert [s.key for s in samples_of(tmp_path / "c")] != [s.key for s in samples_of(tmp_path / "a")]


def killed(pictures: Path, out: Path, arm: Callable[[PatchVQ], None]) -> int | None:
    """Encode in another process, which `arm` makes kill itself somewhere; its exit code."""

    def child() -> None:
        tokenizer = tiny_tokenizer()
        arm(tokenizer)
        run(pictures, out, tokenizer)

    process = get_context("fork").Process(target=child)
    process.start()
    process.join()
    return process.exitcode


def die_at(count: int, function: Callable) -> Callable:
    """The function, whose call number `count` is the process's last."""
    calls = 0

    def wrapped(*arguments, **settings):
        nonlocal calls
        calls += 1
        if calls == count:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*arguments, **settings)

    return wrapped


def in_encode(count: int) -> Callable[[PatchVQ], None]:
    def arm(tokenizer: PatchVQ) -> None:
        tokenizer.encode = die_at(count, tokenizer.encode)  # type: ignore[method-assign]

    return arm


def in_tar(count: int) -> Callable[[PatchVQ], None]:
    def arm(_: PatchVQ) -> None:
        tarfile.TarFile.addfile = die_at(count, tarfile.TarFile.addfile)  # type: ignore[method-assign]

    return arm


def in_rename(count: int) -> Callable[[PatchVQ], None]:
    def arm(_: PatchVQ) -> None:
        os.replace = die_at(count, os.replace)

    return arm


# 4 shards of 5 pictures in batches of 3: 8 calls of encode, 60 files in tars, 6 renames (plan, 4 shards, manifest).
POINTS = {
    "before the first shard": in_encode(1),
    "between two shards": in_encode(3),
    "in the last shard's pictures": in_encode(8),
    "in the first tar": in_tar(7),
    "in the third tar": in_tar(40),
    "claiming the folder": in_rename(1),
    "renaming the second shard": in_rename(3),
    "renaming the manifest": in_rename(6),
}


@pytest.mark.parametrize("point", POINTS)
def test_an_encode_killed_anywhere_goes_on_to_the_same_bytes(pictures: Path, tmp_path: Path, point: str) -> None:
    out = tmp_path / "out"
    assert killed(pictures, out, POINTS[point]) == -signal.SIGKILL
    with pytest.raises(ValueError, match=r"no manifest\.json"):
        read_manifest(out)
    finished = {name: content for name, content in files(out).items() if name.startswith("shard-")}
    run(pictures, out)
    run(pictures, tmp_path / "uninterrupted")
    left = {name: content for name, content in files(out).items() if not name.endswith(".part")}
    assert left == files(tmp_path / "uninterrupted")
    assert all(left[name] == content for name, content in finished.items())
    assert len(samples_of(out)) == 20


def test_finished_shards_are_not_encoded_again(pictures: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert killed(pictures, out, in_encode(5)) == -signal.SIGKILL
    assert sorted(p.name for p in out.glob("shard-*")) == ["shard-000000.tar", "shard-000001.tar"]
    tokenizer = tiny_tokenizer()
    seen = 0
    plain = tokenizer.encode

    def counted(images: torch.Tensor) -> torch.Tensor:
        nonlocal seen
        seen += len(images)
        return plain(images)

    tokenizer.encode = counted  # type: ignore[method-assign]
    run(pictures, out, tokenizer)
    assert seen == 10


def test_one_broken_picture_is_skipped_and_counted(pictures: Path, tmp_path: Path) -> None:
    (pictures / "007.png").write_text("not a picture")
    manifest = run(pictures, tmp_path / "out")
    assert (manifest.samples, manifest.skipped) == (19, 1)
    assert "007.png" not in {s.metadata["file"] for s in samples_of(tmp_path / "out")}
    assert read_manifest(tmp_path / "out").skipped == 1
    assert verify.verify(tmp_path / "out") == []


def test_two_of_two_hundred_are_one_percent_and_three_are_too_many(tmp_path: Path) -> None:
    folder = write_pictures(tmp_path / "pictures", 200)
    for name in ("000.png", "100.png"):
        (folder / name).write_text("not a picture")
    assert run(folder, tmp_path / "out").skipped == 2
    (folder / "199.png").unlink()  # named by metadata.jsonl
    with pytest.raises(ValueError, match=r"3 of 200 pictures cannot be read, more than 1 %.*(000|100|199)\.png"):
        run(folder, tmp_path / "other")
    assert not (tmp_path / "other" / "manifest.json").exists()


def test_a_single_unreadable_picture_makes_no_empty_shard_set(tmp_path: Path) -> None:
    folder = write_pictures(tmp_path / "pictures", 1)
    (folder / "000.png").write_text("not a picture")
    with pytest.raises(ValueError, match="none of 1 pictures can be used: 1 cannot be read"):
        run(folder, tmp_path / "out")


def test_after_pictures_changed_old_shards_are_not_taken_for_the_new_ones(pictures: Path, tmp_path: Path) -> None:
    whole = files(pictures)
    run(pictures, tmp_path / "uninterrupted")
    # A shard at the end, so that others are finished when the encode stops.
    last = samples_of(tmp_path / "uninterrupted")[-3:]
    for sample in last:
        (pictures / sample.metadata["file"]).write_text("not a picture")
    with pytest.raises(ValueError, match="3 of 20 pictures cannot be read"):
        run(pictures, tmp_path / "out")
    for sample in last:
        (pictures / sample.metadata["file"]).write_bytes(whole[sample.metadata["file"]])
    with pytest.raises(ValueError, match=r"holds another encode .*items.*overwrite=true"):
        run(pictures, tmp_path / "out")
    run(pictures, tmp_path / "out", overwrite=True)
    assert files(tmp_path / "out") == files(tmp_path / "uninterrupted")


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"seed": 1}, "items"),
        ({"shards": 3}, "shards: 4 there, 3 here"),
        ({"tokenizer": tiny_tokenizer(seed=9)}, "tokenizer"),
        ({"limit": 10}, "items"),
    ],
)
@pytest.mark.parametrize("finished", [True, False])
def test_another_encode_in_the_folder_is_refused_until_overwritten(
    pictures: Path, tmp_path: Path, change: dict, named: str, finished: bool
) -> None:
    out = tmp_path / "out"
    run(pictures, out)
    if not finished:
        (out / "manifest.json").unlink()
    before = files(out)
    with pytest.raises(ValueError, match=f"holds another encode .*{named}.*overwrite=true"):
        run(pictures, out, **change)
    assert files(out) == before
    run(pictures, out, overwrite=True, **change)
    run(pictures, tmp_path / "fresh", **change)
    assert files(out) == files(tmp_path / "fresh")


def test_a_changed_caption_or_picture_list_is_another_encode(pictures: Path, tmp_path: Path) -> None:
    run(pictures, tmp_path / "out")
    text = (pictures / "metadata.jsonl").read_text()
    (pictures / "metadata.jsonl").write_text(text.replace("picture number 3", "picture number three"))
    with pytest.raises(ValueError, match="holds another encode"):
        run(pictures, tmp_path / "out")


def test_shards_that_no_encode_made_are_not_taken_for_ours(pictures: Path, tmp_path: Path) -> None:
    out = tmp_path / "drawn"
    write_set(out, [3, 2])
    before = files(out)
    with pytest.raises(ValueError, match="holds another encode"):
        run(pictures, out)
    assert files(out) == before
    (out / "manifest.json").unlink()
    (out / "plan.json").write_text("[1]")
    with pytest.raises(ValueError, match="holds another encode"):
        run(pictures, out)
    run(pictures, out, overwrite=True)
    run(pictures, tmp_path / "fresh")
    assert files(out) == files(tmp_path / "fresh")


def test_a_finished_set_on_a_read_only_disk_needs_no_writing(
    pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = run(pictures, tmp_path / "out")

    def refuse(*_: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(os, "replace", refuse)
    monkeypatch.setattr(os, "fsync", refuse)
    assert run(pictures, tmp_path / "out") == manifest


def full(*_: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("where", ["at the flush", "while writing"])
def test_a_full_disk_leaves_no_half_shard_and_no_manifest(
    pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        calls = 0
        plain = os.fsync if where == "at the flush" else tarfile.TarFile.addfile

        def until_full(*arguments, **settings):
            nonlocal calls
            calls += 1
            # The plan and the first shard still find room.
            if calls > (2 if where == "at the flush" else 17):
                full()
            return plain(*arguments, **settings)

        patch.setattr(*((os, "fsync") if where == "at the flush" else (tarfile.TarFile, "addfile")), until_full)
        with pytest.raises(OSError, match="No space left"):
            run(pictures, out)
    assert sorted(p.name for p in out.iterdir()) == [".parts", "plan.json", "shard-000000.tar"]
    run(pictures, out)  # room again
    run(pictures, tmp_path / "uninterrupted")
    assert files(out) == files(tmp_path / "uninterrupted")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_really_full_device_leaves_no_shard(tmp_path: Path) -> None:
    path = tmp_path / "shard-000000.tar"
    (tmp_path / f".{path.name}.{os.getpid()}.part").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left"):
        write_shard(path, [Sample(f"k{i}", np.zeros((4, 4), dtype=int), "c") for i in range(9)], 16)
    assert list(tmp_path.iterdir()) == []


def test_the_command_on_a_full_disk_ends_in_one_line(
    pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("DRAFTGRID_TRACEBACK", raising=False)
    tiny_tokenizer().save_pretrained(tmp_path / "tokenizer")
    monkeypatch.setattr(os, "fsync", full)
    arguments = [
        f"source=folder:{pictures}",
        f"out={tmp_path / 'out'}",
        f"tokenizer={tmp_path / 'tokenizer'}",
        "split=all",
    ]
    with pytest.raises(SystemExit) as ended:
        main(encode_module.run, EncodeConfig, None, arguments=arguments)
    assert ended.value.code == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith(f"error: {tmp_path}") and last.endswith(": No space left on device")
    assert list((tmp_path / "out").iterdir()) == []


def test_the_command_encodes_what_its_keys_say(
    pictures: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny_tokenizer().save_pretrained(tmp_path / "tokenizer")
    common = [f"source=folder:{pictures}", f"tokenizer={tmp_path / 'tokenizer'}", "split=all", "shards=4"]
    main(encode_module.run, EncodeConfig, None, arguments=[*common, f"out={tmp_path / 'out'}"])
    assert "20 samples in 4 shards (0 skipped)" in capsys.readouterr().out
    run(pictures, tmp_path / "called")
    assert files(tmp_path / "out") == files(tmp_path / "called")
    main(encode_module.run, EncodeConfig, None, arguments=[*common, f"out={tmp_path / 'smoke'}", "smoke=true"])
    assert read_manifest(tmp_path / "smoke").samples == 16


def test_bad_settings_are_refused_by_their_value(pictures: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="shards is 0"):
        run(pictures, tmp_path / "out", shards=0)
    assert len(run(pictures, tmp_path / "many", shards=500).shards) == 20  # never an empty shard


def test_a_missing_manifest_tells_how_to_make_one(pictures: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=rf"holds no token shards.*draftgrid encode .*out={tmp_path}"):
        read_manifest(tmp_path)
    run(pictures, tmp_path / "out")
    (tmp_path / "out" / "manifest.json").unlink()
    with pytest.raises(ValueError, match=r"holds 4 shards of an unfinished encode.*draftgrid encode"):
        read_manifest(tmp_path / "out")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda m: {**m, "format": 99}, ": format is 99; this version reads 1"),
        (
            lambda m: {k: v for k, v in m.items() if k != "grid"},
            ": grid is missing; it must be a list of 2 items, each a whole number",
        ),
        (lambda m: {**m, "surprise": 1}, ": unknown field 'surprise'"),
        (lambda m: [m], r" holds \[.*; it must be an object of fields"),
        (lambda m: 5, " holds 5; it must be an object of fields"),
        (lambda m: {**m, "codes": None}, ": codes is null; it must be a whole number"),
        (lambda m: {**m, "codes": "64"}, ': codes is "64"; it must be a whole number'),
        (lambda m: {**m, "tokenizer": None}, ": tokenizer is null; it must be text"),
        (lambda m: {**m, "grid": [4]}, r": grid is \[4\]; it must be a list of 2 items"),
        (lambda m: {**m, "grid": 4}, ": grid is 4; it must be a list of 2 items"),
        (lambda m: {**m, "sampling": [1]}, r": sampling is \[1\]; it must be a group of keys"),
        (lambda m: {**m, "shards": {}}, ": shards is {}; it must be a list of"),
        (
            lambda m: {**m, "shards": [{**m["shards"][0], "samples": "2"}]},
            ' shard 0: samples is "2"; it must be a whole number',
        ),
    ],
)
def test_a_manifest_of_another_kind_is_refused_by_file(tmp_path: Path, change: Callable, said: str) -> None:
    write_set(tmp_path, [2])
    path = tmp_path / "manifest.json"
    path.write_text(json.dumps(change(json.loads(path.read_text()))))
    for read in (read_manifest, verify.verify, lambda place: check_manifest(place, TOKENIZER, (4, 4))):
        with pytest.raises(ValueError, match=rf"^[^\n]*manifest\.json{said}[^\n]*$"):
            read(tmp_path)


def test_shards_of_another_tokenizer_grid_or_incomplete_are_refused(tmp_path: Path) -> None:
    manifest = write_set(tmp_path, [3, 2])
    assert check_manifest(tmp_path, TOKENIZER, (4, 4)) == manifest
    other = "0123456789ab" + "0" * 52
    with pytest.raises(ValueError) as error:
        check_manifest(tmp_path, other, (4, 4))
    assert TOKENIZER[:12] in str(error.value) and other[:12] in str(error.value)
    with pytest.raises(ValueError, match="4x4 grids, but the backbone draws 2x8"):
        check_manifest(tmp_path, TOKENIZER, (2, 8))
    (tmp_path / "shard-000001.tar").unlink()
    with pytest.raises(ValueError, match=r"shard-000001\.tar is missing"):
        check_manifest(tmp_path, TOKENIZER, (4, 4))


def test_verify_finds_every_flipped_byte_and_missing_file(tmp_path: Path) -> None:
    write_set(tmp_path / "set", [3, 2])
    assert verify.verify(tmp_path / "set") == []
    whole = (tmp_path / "set" / "shard-000001.tar").read_bytes()
    for place in (0, 140, 600, 700, len(whole) - 1):
        damaged = bytearray(whole)
        damaged[place] ^= 1
        (tmp_path / "set" / "shard-000001.tar").write_bytes(damaged)
        wrong = verify.verify(tmp_path / "set")
        assert any("shard-000001.tar" in w and "sha256" in w for w in wrong), place
        assert not any("shard-000000.tar" in w for w in wrong)
    (tmp_path / "set" / "shard-000001.tar").unlink()
    assert verify.verify(tmp_path / "set") == [f"{tmp_path / 'set' / 'shard-000001.tar'} is missing"]


def test_verify_names_samples_that_do_not_fit_the_manifest(tmp_path: Path) -> None:
    from dataclasses import replace

    samples = [
        Sample("fine", np.zeros((4, 4), dtype=int), "c"),
        Sample("wide", np.zeros((4, 5), dtype=int), "c"),
        Sample("high", np.full((4, 4), 64), "c"),
    ]
    shard = write_shard(tmp_path / "shard-000000.tar", samples, 64)
    replace(write_set(tmp_path / "x", [1]), shards=(shard,)).save(tmp_path)
    wrong = verify.verify(tmp_path)
    assert len(wrong) == 2
    assert "sample wide" in wrong[0] and "(4, 5)" in wrong[0]
    assert "sample high" in wrong[1] and "64" in wrong[1]


def test_the_verify_command_says_all_is_right_or_what_is_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("DRAFTGRID_TRACEBACK", raising=False)
    write_set(tmp_path, [3, 2])
    main(verify.run, verify.VerifyConfig, None, arguments=[f"dir={tmp_path}"])
    assert "5 samples in 2 shards, all hashes and samples right" in capsys.readouterr().out
    shutil.copy(tmp_path / "shard-000000.tar", tmp_path / "shard-000001.tar")
    with pytest.raises(SystemExit):
        main(verify.run, verify.VerifyConfig, None, arguments=[f"dir={tmp_path}"])
    assert "shard-000001.tar: sha256 differs" in capsys.readouterr().err


def rewrite(path: Path, change: Callable[[str, bytes], bytes | None]) -> None:
    """Pass every file of a tar through `change`; None leaves it out."""
    content = path.read_bytes()
    with tarfile.open(fileobj=io.BytesIO(content)) as old, tarfile.open(path, "w") as new:
        for member in old.getmembers():
            changed = change(member.name, old.extractfile(member).read())  # type: ignore[union-attr]
            if changed is not None:
                member.size = len(changed)
                new.addfile(member, io.BytesIO(changed))


def npy(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


@pytest.mark.parametrize(
    ("suffix", "content", "reason"),
    [
        ("tokens.npy", None, "no image tokens"),
        ("tokens.npy", npy(np.zeros((0, 4), dtype=np.uint16)), "no image tokens: array of shape (0, 4)"),
        ("tokens.npy", npy(np.zeros(16, dtype=np.uint16)), "no image tokens: array of shape (16,)"),
        ("tokens.npy", b"", ""),
        ("tokens.npy", b"PK\x03\x04 no zip either", ""),
        ("tokens.npy", npy(np.zeros((4, 4), dtype=np.uint16))[:-3], ""),
        ("txt", None, "no txt"),
        ("txt", b"\xff\xfe", ""),
        ("json", b"{", ""),
    ],
)
def test_an_unreadable_sample_is_named_in_its_place(
    tmp_path: Path, suffix: str, content: bytes | None, reason: str
) -> None:
    write_set(tmp_path, [3])
    path = tmp_path / "shard-000000.tar"
    rewrite(path, lambda name, old: content if name == f"s0-001.{suffix}" else old)
    first, broken, third = read_shard(path, 3)
    assert isinstance(first, Sample) and isinstance(third, Sample)
    assert (first.key, third.key) == ("s0-000", "s0-002")
    assert isinstance(broken, Broken)
    assert broken.where == f"{path} sample s0-001"
    assert reason in broken.reason and broken.reason


@pytest.mark.parametrize("seed", range(3))
def test_a_damaged_array_header_never_crashes_a_reader(tmp_path: Path, seed: int) -> None:
    """numpy's own reader answers flipped bytes with ValueError, but also TokenError, SyntaxError and TypeError."""
    rng = np.random.default_rng(seed)

    def flip(name: str, old: bytes) -> bytes:
        damaged = bytearray(old)
        if name.endswith(".npy"):
            for _ in range(2):
                damaged[rng.integers(90)] = rng.integers(256)
        return bytes(damaged)

    write_set(tmp_path, [200])
    rewrite(tmp_path / "shard-000000.tar", flip)
    read = list(read_shard(tmp_path / "shard-000000.tar", 200))
    assert len(read) == 200
    assert sum(isinstance(s, Broken) for s in read) > 100


def test_show_prints_the_counts_and_writes_a_sheet(
    pictures: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (pictures / "007.png").write_text("not a picture")
    tokenizer = tiny_tokenizer()
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    run(pictures, tmp_path / "out", tokenizer)
    arguments = [
        f"dir={tmp_path / 'out'}",
        f"tokenizer={tmp_path / 'tokenizer'}",
        f"out={tmp_path / 'sheet'}",
        "images=3",
    ]
    main(show.run, show.ShowConfig, None, arguments=arguments)
    said = capsys.readouterr().out
    codes = {int(c) for s in samples_of(tmp_path / "out") for c in s.tokens.flatten()}
    assert "19 samples in 4 shards, 1 skipped" in said
    assert "grid 4x4" in said and tokenizer.fingerprint[:12] in said
    assert "words a caption: 3 to 3, median 3" in said
    assert f"{len(codes)} codes used" in said
    # Three cells of 128 pixels in one row; the first is the first sample, enlarged without smoothing.
    assert [p.name for p in (tmp_path / "sheet").iterdir()] == ["sheet.png"]
    sheet = Image.open(tmp_path / "sheet" / "sheet.png").convert("RGB")
    assert sheet.height == 128 + 2 * 6
    first = tokenizer.pil(torch.from_numpy(samples_of(tmp_path / "out")[0].tokens.astype(np.int64))[None])[0]
    for x, y in ((0, 0), (15, 0), (0, 15), (7, 9)):
        # 7: inside the enlarged pixel, with a margin of 6 on the left or without
        assert sheet.getpixel((8 * x + 7, 6 + 8 * y + 4)) == first.getpixel((x, y))


def test_show_refuses_another_tokenizer_and_no_picture(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    write_set(tmp_path / "out", [3])
    config = show.ShowConfig(str(tmp_path / "out"), str(tmp_path / "tokenizer"), str(tmp_path / "sheet"))
    with pytest.raises(ValueError, match=f"{TOKENIZER[:12]}.*{tokenizer.fingerprint[:12]}"):
        show.run(config)
    config.images = 0
    with pytest.raises(ValueError, match="images is 0"):
        show.run(config)


def test_an_overwriting_encode_keeps_the_old_set_until_it_is_finished(pictures: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    run(pictures, out)
    before = files(out)
    with pytest.raises(ValueError, match="fit is 'stretch'"):
        run(pictures, out, overwrite=True, fit="stretch")
    with pytest.raises(ValueError, match="size is 16x6; this tokenizer needs multiples of 4 pixels"):
        run(pictures, out, overwrite=True, size=(16, 6))
    assert files(out) == before
    for last in (3, 5):  # of the second a first is there already, unfinished
        tokenizer = tiny_tokenizer()
        tokenizer.encode = die_at(last, tokenizer.encode)  # type: ignore[method-assign]
        process = get_context("fork").Process(
            target=lambda: run(pictures, out, tokenizer, overwrite=True, seed=last)  # noqa: B023
        )
        process.start()
        process.join()
        assert process.exitcode == -signal.SIGKILL
        assert files(out / ".old") == before and (out / "shard-000000.tar").is_file()
    tokenizer = tiny_tokenizer()
    tokenizer.encode = die_at(5, tokenizer.encode)  # type: ignore[method-assign]  # 2 of 4 shards are kept
    run(pictures, out, tokenizer, seed=5)
    run(pictures, tmp_path / "fresh", seed=5)
    assert files(out) == files(tmp_path / "fresh")


@pytest.mark.parametrize("rename", range(1, 9))
def test_an_overwriting_encode_killed_while_it_moves_the_old_set_loses_nothing(
    pictures: Path, tmp_path: Path, rename: int
) -> None:
    out = tmp_path / "out"
    run(pictures, out)
    before = files(out)
    for _ in range(2):

        def child() -> None:
            os.replace = die_at(rename, os.replace)
            run(pictures, out, overwrite=True, seed=1)

        process = get_context("fork").Process(target=child)
        process.start()
        process.join()
        assert process.exitcode == -signal.SIGKILL
        assert {content for name, content in before.items() if "shard-" in name} <= set(files(out).values())
    run(pictures, out, overwrite=True, seed=1)
    run(pictures, tmp_path / "fresh", seed=1)
    assert files(out) == files(tmp_path / "fresh")


def test_a_linked_folder_is_overwritten_where_it_is(pictures: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.symlink_to(tmp_path / "real")
    run(pictures, out)
    run(pictures, out, overwrite=True, seed=1)
    run(pictures, tmp_path / "fresh", seed=1)
    assert out.is_symlink() and files(tmp_path / "real") == files(tmp_path / "fresh")


@pytest.mark.parametrize("fit", ["crop", "pad"])
def test_pictures_that_are_not_square_fill_a_grid_that_is_not(pictures: Path, tmp_path: Path, fit: str) -> None:
    for path in pictures.glob("*.png"):
        Image.fromarray(np.random.default_rng(int(path.stem)).integers(0, 256, (8, 16, 3), dtype=np.uint8)).save(path)
    tiny_tokenizer().save_pretrained(tmp_path / "tokenizer")
    common = [f"source=folder:{pictures}", f"tokenizer={tmp_path / 'tokenizer'}", "split=all", f"fit={fit}"]
    out = tmp_path / "out"
    main(encode_module.run, EncodeConfig, None, arguments=[*common, f"out={out}", "size=8x16"])
    assert read_manifest(out).grid == (2, 4)
    codebook = tiny_tokenizer().codebook.numpy()
    for sample in samples_of(out):
        assert sample.tokens.tolist() == codes_by_hand(pictures / sample.metadata["file"], codebook).tolist()
    config = EncodeConfig(f"folder:{pictures}", str(out), "all", tokenizer=str(tmp_path / "tokenizer"))
    for size, said in (("8x", "use HEIGHTxWIDTH"), ("8x18", "multiples of 4 pixels"), ("0x8", "multiples of 4 pixels")):
        config.size = size
        with pytest.raises(ValueError, match=f"size is '?{size}'?; .*{said}"):
            encode_module.run(config)


def test_process_0_waits_for_a_living_process_and_not_for_a_dead_one(
    pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encode_module, "GIVE_UP", 1.0)
    out = tmp_path / "out"
    with pytest.raises(ValueError, match=r"shard-000001\.tar is not finished, and the process that makes it .* 1 s"):
        run(pictures, out, world=2)
    tokenizer = tiny_tokenizer()
    plain = tokenizer.encode

    def slow(images: torch.Tensor) -> torch.Tensor:
        time.sleep(0.6)
        return plain(images)

    tokenizer.encode = slow  # type: ignore[method-assign]
    process = get_context("fork").Process(
        target=lambda: run(pictures, out, tokenizer, batch_size=1, rank=1, world=2)  # a shard takes 3 s
    )
    process.start()
    run(pictures, out, batch_size=1, world=2)
    process.join()
    assert process.exitcode == 0
    run(pictures, tmp_path / "alone")
    assert files(out) == files(tmp_path / "alone")
