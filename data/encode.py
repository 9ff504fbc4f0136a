"""Pictures + captions -> token shards, with an image tokenizer; the language model is never loaded.

    draftgrid encode source=emoji out=runs/data/emoji/train split=train shards=16
    torchrun --nproc_per_node=8 -m draftgrid.data.encode source=hf:NAME@train tokenizer=DIR out=DIR shards=64

Safe to stop at any moment: finished shards are kept, and the same command resumes to the same bytes, whatever the
number of processes. They share the folder and nothing else: process r of n encodes shards r, r + n, ...
"""

import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, astuple, dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from tqdm import tqdm

from draftgrid.common.cli import key, main
from draftgrid.common.files import read_json, write_json, write_text
from draftgrid.common.settings import one_of, whole
from draftgrid.data.shards import MANIFEST, MAX_BROKEN, Manifest, Sample, Shard, read_manifest, shard_name, write_shard
from draftgrid.data.sources import Item, Source, open_picture, open_source, pixels
from draftgrid.data.sources.base import ABSENT, FITS, NO_CAPTION
from draftgrid.heads.tokenizers import ImageTokenizer, load_tokenizer

T = TypeVar("T")
PLAN = "plan.json"
SKIPPED = "skipped.jsonl"
PARTS = ".parts"
"""Folder with the notes on each finished shard, until the manifest is written."""
OLD = ".old"
"""Folder within `out` that keeps what an overwriting encode found there until the new manifest is written."""
GIVE_UP = 900.0
"""Seconds without any sign of the other processes after which this one stops waiting."""


@dataclass
class EncodeConfig:
    source: str = key("emoji", "emoji; folder:PATH; wds:TARS (folder, *.tar, {0..63}.tar, pipe:...); hf:NAME[@SPLIT]")
    out: str = key("runs/data/emoji/train", "folder for the shards and their manifest")
    split: str = key("train", "train, validation or test; also all, if the source has no splits of its own")
    shards: int = key(16, "number of shard files", least=1)
    tokenizer: str = key("emoji", "folder of an image tokenizer; emoji is the demo's own")
    size: str = key("0", "pictures in pixels, HEIGHTxWIDTH or a square's side; 0 = what the tokenizer was made for")
    fit: str = key("crop", "how a picture is fitted to this shape: crop (from the centre) or pad (with white)")
    limit: int = key(0, "the first N pictures only; 0 = all", least=0)
    image_column: str = key("", "hf: the column of pictures; '' = image, jpg, png or webp")
    caption_column: str = key("", "hf: the column of captions; '' = caption, text or prompt")
    streaming: str = key("auto", "hf: true reads rows as they arrive, false from disk; auto = true on the hub")
    copies: int = key(1, "emoji only: pictures for each training picture, itself and mirrored, shifted copies", least=1)
    batch_size: int = key(64, "pictures encoded at once", least=1)
    device: str = key("auto", "of the tokenizer: auto (a GPU for each process, if there is one), cpu, cuda:1, ...")
    seed: int = key(0, "order of the samples over the shards", least=0)
    overwrite: bool = key(False, "replace what another encode left in out, which is kept until the new one is finished")
    smoke: bool = key(False, "16 pictures only")


@dataclass(frozen=True)
class Skipped:
    key: str
    reason: str


def encode(
    source: Source,
    tokenizer: ImageTokenizer,
    out: str | Path,
    split: str,
    *,
    shards: int = 16,
    batch_size: int = 64,
    seed: int = 0,
    size: tuple[int, int] | None = None,
    fit: str = "crop",
    limit: int | None = None,
    overwrite: bool = False,
    advice: str = "choose another out, or overwrite=true",
    rank: int = 0,
    world: int = 1,
) -> Manifest | None:
    """Encode one split of a source into `out`. Returns the manifest (rank 0), or None.

    `size` is the pictures' (height, width) in pixels; None = the square the tokenizer was made for.
    Pictures that cannot be read and those without a caption are left out and listed in skipped.jsonl. Raises ValueError
    if another encode lies in `out`, if there is no picture, or if none or more than 1 % (and more than one) of them
    cannot be read.
    """
    out = Path(out)
    size = size or (tokenizer.image_size,) * 2
    if min(size) < 1 or any(side % tokenizer.patch for side in size):
        raise ValueError(f"size is {size[0]}x{size[1]}; this tokenizer needs multiples of {tokenizer.patch} pixels")
    whole("shards", shards, 1)
    whole("batch_size", batch_size, 1)
    one_of("fit", fit, FITS)
    count = source.count(split, limit or 0)
    order = np.arange(count) if source.sequential else np.random.default_rng(seed).permutation(count)
    chunks = np.array_split(order, min(shards, count))
    plan = {
        "source": source.name,
        "split": split,
        "tokenizer": tokenizer.fingerprint,
        "image_size": size[0] if size[0] == size[1] else f"{size[0]}x{size[1]}",
        "fit": fit,
        "shards": len(chunks),
        "items": f"{count}:{seed}:{source.identity(split)}",
    }
    if rank == 0:
        claim(out, plan, overwrite, advice)
    else:
        wait_for_plan(out, plan)
    if not (out / MANIFEST).is_file():
        _Job(source, tokenizer, out, split, size, fit, batch_size, chunks).encode(range(rank, len(chunks), world))
    if rank > 0:
        return None
    if not (out / MANIFEST).is_file():
        parts = [wait_until(out, partial(_finished, out, i), shard_name(i)) for i in range(len(chunks))]
        skipped = [s for _, mine in parts for s in mine]
        check_skipped(skipped, count)
        write_text(out / SKIPPED, "".join(json.dumps(asdict(s)) + "\n" for s in skipped))
        grid = (size[0] // tokenizer.patch, size[1] // tokenizer.patch)
        done, origin = tuple(shard for shard, _ in parts), (source.name, source.licence, split)
        Manifest(grid, tokenizer.fingerprint, tokenizer.codebook_size, *origin, done, len(skipped)).save(out)
    tidy(out)
    return read_manifest(out)


@dataclass(frozen=True)
class _Job:
    """What every process of an encode knows."""

    source: Source
    tokenizer: ImageTokenizer
    out: Path
    split: str
    size: tuple[int, int]
    fit: str
    batch_size: int
    chunks: Sequence[np.ndarray]
    """Numbers of the items in each shard."""

    def encode(self, share: range) -> None:
        """Make the shards of one process, one after the other, out of one pass over its items. Finished ones stay."""
        finished = {i: part for i in share if (part := _finished(self.out, i))}
        skipped = [s for _, mine in finished.values() for s in mine]
        todo = [i for i in share if i not in finished]
        items = self.source.take(self.split, [n for i in todo for n in self.chunks[i].tolist()])
        total, kept = (sum(len(self.chunks[i]) for i in which) for which in (share, finished))
        count, begun, done = sum(map(len, self.chunks)), 0.0, 0
        of = f", process {share.start + 1} of {share.step}" if share.step > 1 else ""
        with tqdm(total=total, initial=kept, desc=f"encode {self.source.name} {self.split}{of}", unit="img") as bar:
            for index in todo:
                if (self.out / MANIFEST).is_file():  # process 0 finished meanwhile, and has removed the parts
                    return
                mine: list[Skipped] = []
                samples: list[Sample] = []
                chunk = islice(items, len(self.chunks[index]))
                while batch := list(islice(chunk, self.batch_size)):
                    samples += self.samples(batch, mine)
                    bar.update(len(batch))
                    give_sign(self.out, share.start)
                    done += len(batch) if begun else 0
                    begun = begun or time.perf_counter()
                skipped += mine
                # Before the shard is written: with the pictures repaired, the same command resumes.
                check_skipped(skipped, count)
                shard = write_shard(self.out / shard_name(index), samples, self.tokenizer.codebook_size)
                notes = {"shard": asdict(shard), "skipped": list(map(astuple, mine))}
                write_json(self.out / PARTS / f"{shard_name(index)}.json", notes)
            next(items, None)  # reads a stream to its end, where a pipe tells of a failure
        for line in skipped:
            tqdm.write(f"skipped: {line.key}: {line.reason}")
        if done:
            tqdm.write(f"{done / (time.perf_counter() - begun):.1f} pictures a second after the first batch{of}")

    def samples(self, items: Sequence[Item], skipped: list[Skipped]) -> Iterator[Sample]:
        """One batch, encoded; what cannot be used is added to `skipped`."""
        kept, pictures = [], []
        for item in items:
            try:
                if not item.caption:
                    raise ValueError(NO_CAPTION)
                pictures.append(open_picture(item, self.size, self.fit))
                kept.append(item)
            except ValueError as error:
                skipped.append(Skipped(item.key, str(error)))
        if not kept:
            return
        codes = self.tokenizer.encode(pixels(pictures)).cpu().numpy()
        for item, picture, tokens in zip(kept, pictures, codes, strict=True):
            origin = {"source": self.source.name, "file": item.path.name}
            metadata = origin | {"size": picture.info["original_size"]}
            yield Sample(item.key, tokens, item.caption, metadata)


def check_skipped(skipped: Sequence[Skipped], count: int) -> None:
    """Raises ValueError if none of `count` pictures can be used, or too many of them cannot be read."""
    broken = [s for s in skipped if s.reason not in ABSENT]
    if len(broken) > max(1, MAX_BROKEN * count):
        raise ValueError(f"{len(broken)} of {count} pictures cannot be read, more than 1 %; last: {broken[-1].reason}")
    if len(skipped) == count:
        last = f"{count - len(broken)} have no caption or picture; last: {skipped[-1].key}: {skipped[-1].reason}"
        raise ValueError(f"none of {count} pictures can be used: {len(broken)} cannot be read, {last}")


def _finished(out: Path, index: int) -> tuple[Shard, list[Skipped]] | None:
    """A shard and what was left out of it; None if it is not finished."""
    path = out / PARTS / f"{shard_name(index)}.json"
    if not path.is_file():
        return None
    part = read_json(path)
    shard = Shard(**part["shard"])
    tar = out / shard.file
    if not tar.is_file() or tar.stat().st_size != shard.bytes:
        return None
    return shard, [Skipped(*entry) for entry in part["skipped"]]


def wait_until(out: Path, ready: Callable[[], T | None], what: str) -> T:
    """The first result of `ready` that is not empty, while other processes work on `out`.

    Raises ValueError if none of them gives a sign for GIVE_UP seconds.
    """
    told = moved = time.monotonic()
    signs: set[tuple[str, int]] = set()
    while not (found := ready()):
        seen = set()
        for path in (out / PARTS).glob(".alive.*"):
            with suppress(FileNotFoundError):
                seen.add((path.name, path.stat().st_mtime_ns))
        if seen != signs:
            signs, moved = seen, time.monotonic()
        if time.monotonic() - moved > GIVE_UP:
            raise ValueError(
                f"{out / what} is not finished, and the process that makes it has given no sign for {GIVE_UP:.0f} s; "
                "see what it says, and run the same command again to resume"
            )
        if time.monotonic() - told > 60:
            tqdm.write(f"waiting for another process to finish {what}")
            told = time.monotonic()
        time.sleep(0.2)
    return found


def give_sign(out: Path, rank: int) -> None:
    """Tell those who wait for a part of `out` that this process is alive and working."""
    (out / PARTS).mkdir(exist_ok=True)
    (out / PARTS / f".alive.{rank}").touch()


def claim(out: Path, plan: dict, overwrite: bool, advice: str) -> None:
    """Mark `out` as the place of this plan. Raises ValueError, ending with `advice`, if it is the place of another.

    With `overwrite` what is there moves to OLD within `out`, and `tidy` removes it once the new manifest stands.
    """
    theirs = read_json(out / PLAN) if (out / PLAN).is_file() else {}
    if theirs == plan:
        return
    # Shards without a plan (drawn by a model, or written by another program) are not ours either.
    found = (out / MANIFEST, *sorted(out.glob("shard-*.tar")), *sorted((out / PARTS).glob("[!.]*")))
    held = [path for path in found if path.is_file()]
    if held and not overwrite:
        theirs = theirs if isinstance(theirs, dict) else {}
        others = ((k, theirs.get(k), v) for k, v in plan.items() if theirs.get(k) != v)
        differing = ", ".join(f"{k}: {there!r} there, {here!r} here" for k, there, here in others)
        raise ValueError(f"{out} holds another encode ({differing}); {advice}")
    out.resolve().mkdir(parents=True, exist_ok=True)  # also what a link points to
    moving = out / f"{OLD}.moving"  # there if a process was killed while it moved a set
    if held or moving.exists():
        if not moving.exists() and (out / OLD).exists() and not (out / MANIFEST).is_file():
            for path in held:  # unfinished itself: the set it was to replace stays
                path.unlink(missing_ok=True)
            shutil.rmtree(out / PARTS, ignore_errors=True)
        else:
            moving.mkdir(exist_ok=True)
            for path in (out / MANIFEST, *sorted(out.glob("shard-*.tar")), out / PARTS, out / SKIPPED, out / PLAN):
                if path.exists():
                    os.replace(path, moving / path.name)
            shutil.rmtree(out / OLD, ignore_errors=True)
            os.replace(moving, out / OLD)
        tqdm.write(f"{out / OLD} keeps what was in {out} until the new set is finished")
    write_json(out / PLAN, plan)


def tidy(out: Path) -> None:
    """Remove what only an unfinished `out` needs, what it has replaced, and what killed processes were writing."""
    for name in (PARTS, OLD, f"{OLD}.moving"):
        shutil.rmtree(out / name, ignore_errors=True)
    for path in out.glob(".*.part"):
        with suppress(OSError):
            path.unlink()


def wait_for_plan(out: Path, plan: dict, seconds: float = 60.0) -> None:
    """Until process 0 has claimed `out` for this plan. Raises ValueError if it does not."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        with suppress(ValueError):
            if read_json(out / PLAN) == plan:
                return
        time.sleep(0.1)
    raise ValueError(f"{out} was not claimed for this encode within {seconds:.0f} s; see what process 0 says")


def processes() -> tuple[int, int, int]:
    """(rank, world, rank on this machine) as torchrun says."""
    rank, world, local = map(os.environ.get, ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    return int(rank or 0), int(world or 1), int(local or 0)


def _size(text: str) -> tuple[int, int] | None:
    """'512x768' or '512' -> (height, width); '0' -> None."""
    if not re.fullmatch(r"\d+(x\d+)?", text):
        raise ValueError(f"size is {text!r}; use HEIGHTxWIDTH or one number, in pixels")
    sides = [int(side) for side in text.split("x")]
    return None if sides == [0] else (sides[0], sides[-1])


def run(config: EncodeConfig) -> None:
    rank, world, local = processes()
    gpus = torch.cuda.device_count()
    device = config.device if config.device != "auto" else f"cuda:{local % gpus}" if gpus else "cpu"
    columns = config.image_column, config.caption_column
    source = open_source(config.source, config.copies, *columns, config.streaming)
    tokenizer = load_tokenizer(config.tokenizer, device)
    manifest = encode(
        source,
        tokenizer,
        config.out,
        config.split,
        shards=config.shards,
        batch_size=config.batch_size,
        seed=config.seed,
        size=_size(config.size),
        fit=config.fit,
        limit=16 if config.smoke else config.limit or None,
        overwrite=config.overwrite,
        rank=rank,
        world=world,
    )
    if manifest:
        skipped = f"{manifest.skipped} skipped" + (f", see {SKIPPED}" if manifest.skipped else "")
        print(f"{manifest.samples} samples in {len(manifest.shards)} shards ({skipped}): {config.out}")


if __name__ == "__main__":
    main(run, EncodeConfig, __doc__)
