"""How fast shards stream, next to a plain loop over the same tars, and whether an epoch is divided as promised.

    draftgrid data-bench dir=runs/bench_data samples=60000 shards=64 ranks=2 workers=2

Makes the shards if the folder has none: the demo's pictures as 90x90 codes, shifted and mirrored as often as needed.
"""

import io
import itertools
import multiprocessing
import os
import tarfile
import time
import warnings
from collections import Counter, deque
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader
from tqdm import tqdm

from draftgrid.common.cli import check_ranges, key, main
from draftgrid.common.files import write_json
from draftgrid.common.table import table
from draftgrid.common.timing import timed
from draftgrid.data.shards import MANIFEST, Manifest, Sample, read_manifest, shard_name, write_shard
from draftgrid.data.sources import open_picture, open_source, pixels
from draftgrid.data.stream import ShardSet, Split, TokenStream
from draftgrid.data.verify import verify
from draftgrid.heads.tokenizers import load_tokenizer

FORWARD = 2 * 8.5e9 * 8200 + 2 * 32 * 8200**2 * 4096
"""FLOP of Emu3-8B's forward: 2 x weights x tokens, and attention in 32 layers of width 4,096."""
HEADS = 6 * 7 * 5 * 4096**2 * 8100
"""FLOP of training seven heads of 5 x 4,096^2 weights on 8,100 cells."""
CONSUMED = 8 * 0.45 * 989e12 / (FORWARD + HEADS)
"""Pictures a second that training these heads takes in on 8 H200, at 45 % of 989e12 FLOP/s (dense bf16) each."""
PICTURES = 430
"""Distinct pictures to encode; all other samples are variants of their codes."""


@dataclass
class BenchConfig:
    dir: str = key("runs/bench_data", "folder of the shards, which are made if it holds none")
    samples: int = key(60000, "samples when making them", least=1)
    shards: int = key(64, "shard files when making them", least=1)
    grid: int = key(90, "rows and columns of codes", least=1)
    ranks: int = key(2, "processes of the epoch that is streamed and counted", least=1)
    workers: int = key(2, "loader workers of each", least=1)
    batch_size: int = key(8, "samples a batch", least=1)
    repeats: int = key(3, "passes for the rates; medians are reported", least=1)
    out: str = key("runs/bench_data.json", "JSON file for the figures")
    smoke: bool = key(False, "64 samples of 9x9 codes in 8 shards, in another folder")


def make(folder: Path, samples: int, shards: int, grid: int) -> None:
    """Write the synthetic set; the manifest comes last."""
    tokenizer = load_tokenizer("emoji")
    tokenizer.image_size = grid * tokenizer.patch
    source = open_source("emoji")
    items = source.take("train", range(min(PICTURES, samples, source.count("train"))))
    known: list[tuple[str, np.ndarray]] = []
    for item in tqdm(items, desc="encode", unit="img"):
        codes = tokenizer.encode(pixels([open_picture(item, tokenizer.image_size)]))
        known.append((item.caption, codes[0].numpy().astype(np.uint16)))
    done = []
    for index, numbers in enumerate(tqdm(np.array_split(np.arange(samples), shards), desc="write", unit="shard")):
        rows = [_variant(i, known[i % len(known)], i // len(known)) for i in numbers.tolist()]
        done.append(write_shard(folder / shard_name(index), rows, tokenizer.codebook_size))
    origin = ("emoji, shifted and mirrored", source.licence, "train")
    Manifest((grid, grid), tokenizer.fingerprint, tokenizer.codebook_size, *origin, tuple(done)).save(folder)


def _variant(number: int, known: tuple[str, np.ndarray], turn: int) -> Sample:
    caption, codes = known
    codes = np.roll(codes, (7 * turn, 3 * turn), (0, 1))
    return Sample(f"{number:08d}", codes[:, ::-1] if turn % 2 else codes, caption, {"number": number})


def plain(folder: Path, manifest: Manifest) -> int:
    """The loop one would write by hand: tarfile and numpy, file after file. Returns the number of samples."""
    count = 0
    for shard in manifest.shards:
        with tarfile.open(folder / shard.file) as tar:
            for member in tar:
                content = tar.extractfile(member).read()  # type: ignore[union-attr]
                if member.name.endswith(".npy"):
                    torch.from_numpy(np.load(io.BytesIO(content)).astype(np.int64))
                    count += 1
                else:
                    content.decode()
    return count


def streamed(shards: ShardSet, split: Split, rank: int = 0, start: int = 0) -> Iterator[Any]:
    stream = TokenStream([shards], split, rank=rank, start=start)
    workers = split.workers if split.workers > 1 else 0
    return iter(DataLoader(stream, batch_size=None, num_workers=workers))


def memory(pid: int | None) -> float:
    """MB of memory that this process shares with no other (USS)."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith(("Private_Clean", "Private_Dirty"))) / 1024


def epoch_of(folder: Path, split: Split, steps: int, rank: int) -> tuple[list[int], float, list[float]]:
    """Read one rank's epoch. Returns (numbers read, seconds, [largest USS of its workers in MB, over the epoch])."""
    torch.set_num_threads(1)
    batches = streamed(ShardSet(str(folder), read_manifest(folder)), split, rank)
    numbers: list[int] = []
    uss: list[float] = []
    begun = time.perf_counter()
    for step, batch in enumerate(itertools.islice(batches, steps)):
        numbers += map(int, batch.keys)
        if step % max(1, steps // 20) == steps // 40:
            readers = [child.pid for child in multiprocessing.active_children()] or [os.getpid()]
            uss.append(max(map(memory, readers)))
    return numbers, time.perf_counter() - begun, uss


def run(config: BenchConfig) -> None:
    check_ranges(config)
    if config.smoke:
        config = replace(config, dir=f"{config.dir}_smoke", samples=64, shards=8, grid=9, repeats=1)
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", ".*Our suggested max number of worker.*")
    folder = Path(config.dir)
    if not (folder / MANIFEST).is_file():
        make(folder, config.samples, config.shards, config.grid)
    manifest = read_manifest(folder)
    if wrong := verify(folder):
        raise ValueError("; ".join(wrong[:5]))
    print(f"{manifest.samples} samples, {sum(s.bytes for s in manifest.shards) / 1e9:.2f} GB, all verified")
    figures = measure(folder, manifest, config)
    rows = [[name, f"{v:,.2f}" if isinstance(v, float) else str(v)] for name, v in figures.items()]
    print(*table(rows), sep="\n")
    write_json(config.out, {"samples": manifest.samples, "shards": len(manifest.shards)} | figures)
    print(f"figures: {config.out}")


def measure(folder: Path, manifest: Manifest, config: BenchConfig) -> dict[str, Any]:
    size = config.batch_size
    part = replace(manifest, shards=manifest.shards[: max(1, len(manifest.shards) // 8)])
    batches = part.samples // size
    one, shards = Split(1, 1, size), ShardSet(str(folder), part)
    calls: dict[str, tuple[int, Callable[[], Any]]] = {
        "plain": (part.samples, partial(plain, folder, part)),
        "stream": (batches * size, lambda: deque(itertools.islice(streamed(shards, one), batches), 0)),
    }
    rates: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(config.repeats):  # in turn, so that both meet the same state of the machine
        for name, (count, call) in calls.items():
            rates[name].append(count / timed(call, torch.device("cpu")))
    figures: dict[str, Any] = {f"{name} (samples/s, one process)": median(r) for name, r in rates.items()}
    split = Split(config.ranks, config.workers, size)
    steps = manifest.samples // split.readers // size * config.workers
    read = partial(epoch_of, folder, split, steps)
    with ProcessPoolExecutor(config.ranks, multiprocessing.get_context("fork")) as ranks:
        numbers, seconds, uss = zip(*ranks.map(read, range(config.ranks)), strict=True)
    seen = Counter(itertools.chain.from_iterable(numbers))
    once = sum(n == 1 for n in seen.values())
    figures |= {
        "stream / plain": median(s / p for s, p in zip(rates["stream"], rates["plain"], strict=True)),
        "ranks x workers": f"{config.ranks} x {config.workers}",
        "steps of each rank": sorted(len(mine) // size for mine in numbers),
        "seen once, more, never": [once, len(seen) - once, manifest.samples - len(seen)],
        "allowed never": config.ranks * config.workers * size,
        "all ranks (samples/s)": len(seen) / max(seconds),
        "Emu3-8B on 8 H200 takes (samples/s)": CONSUMED,
        "stream / Emu3-8B": figures["stream (samples/s, one process)"] / CONSUMED,
    }
    if all(uss):
        firsts, lasts, most = [u[0] for u in uss], [u[-1] for u in uss], map(max, uss)
        figures["USS of a worker (MB): first, last, most"] = [round(max(x), 1) for x in (firsts, lasts, most)]
    resumed = partial(streamed, ShardSet(str(folder), manifest), Split(1, 2, size), start=manifest.samples // size // 2)
    figures["first batch after 50 % (s)"] = timed(lambda: next(resumed()), torch.device("cpu"))
    return figures


if __name__ == "__main__":
    main(run, BenchConfig, __doc__)
