"""The training stream: which sample comes when, for any number of ranks and workers, and at any point of a run.

An epoch's order is a pure function: shards in an order of (seed, epoch), the samples of each in an order of (seed,
epoch, shard), one shard after the other. Every reader (worker of a rank) reads an equal, contiguous part of it: it
opens few shards and keeps none in memory, all ranks make equal steps, and the rest that nobody reads is smaller than
the number of readers. What a stream has consumed is therefore known without asking anyone: a few intervals of the order
of the epochs it is in. A resumed run jumps there; with other ranks or workers what is left is divided again.
"""

import hashlib
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain, count, islice
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info

from draftgrid.data.places import Cache, join, open_shard
from draftgrid.data.shards import MAX_BROKEN, Broken, Index, Manifest, Sample, Shard, read_index, read_sample
from draftgrid.heads.prompts import Unconditional

GOLDEN = (5**0.5 - 1) / 2

Spans = list[tuple[int, int]]
"""Half-open intervals of an epoch's order."""


@dataclass
class Batch:
    tokens: Tensor
    """(B, H, W) codes; fewer than the batch size where samples are broken, but never none."""
    captions: list[str | Unconditional]
    """A dropped caption is replaced by its unconditional prompt."""
    keys: list[str]
    origins: list[str] = field(default_factory=list)
    """Name of the shard set each sample comes from."""
    broken: int = 0
    """Samples that should have been here and could not be read."""

    def to(self, device: Any, **_: Any) -> "Batch":
        return Batch(self.tokens.to(device), self.captions, self.keys, self.origins, self.broken)


@dataclass
class ShardSet:
    """A shard set to read from, at a folder or URL."""

    place: str
    manifest: Manifest
    weight: float = 1.0
    """Its share of the stream is its weight over the sum of all weights."""
    cache: Cache | None = None

    def __post_init__(self) -> None:
        self.place = str(self.place)
        self.shards = [s for s in self.manifest.shards if s.samples]
        self._indices: dict[str, Index] = {}

    @property
    def size(self) -> int:
        return self.manifest.samples

    @cached_property
    def digest(self) -> str:
        """Changes when any sample does."""
        return hashlib.sha256("".join(s.sha256 for s in self.shards).encode()).hexdigest()

    def order(self, spans: Spans, seed: int, epoch: int) -> Iterator[tuple[Shard, np.ndarray]]:
        """(shard, numbers of samples in it) of these intervals of the epoch's order."""
        order = np.random.default_rng((seed, epoch)).permutation(len(self.shards))
        ends = np.cumsum([self.shards[i].samples for i in order]).tolist()
        for low, high in spans:
            while low < high:
                place = bisect_right(ends, low)
                index, start = int(order[place]), ends[place] - self.shards[order[place]].samples
                # index + 1: numpy takes (seed, epoch, 0) for (seed, epoch)
                numbers = np.random.default_rng((seed, epoch, index + 1)).permutation(self.shards[index].samples)
                yield self.shards[index], numbers[low - start : high - start]
                low = min(high, ends[place])

    def read(
        self, shard: Shard, numbers: Sequence[int] | np.ndarray, metadata: bool = False
    ) -> Iterator[Sample | Broken]:
        """Samples of one shard by their numbers; one that does not fit the manifest is Broken.

        Raises ValueError naming the shard if it cannot be opened at all.
        """
        place, manifest = join(self.place, shard.file), self.manifest
        with open_shard(place, shard.bytes, shard.sha256, self.cache) as file:
            if shard.file not in self._indices:
                self._indices[shard.file] = read_index(file)
            index = self._indices[shard.file]
            for i in map(int, numbers):
                sample = read_sample(file, place, index, i, metadata)
                if isinstance(sample, Sample):
                    where, tokens = f"{place} sample {sample.key}", sample.tokens
                    if tokens.shape != manifest.grid:
                        sample = Broken(where, f"tokens are {tokens.shape}, not {manifest.grid}")
                    elif tokens.dtype.kind not in "iu" or not 0 <= tokens.min() <= tokens.max() < manifest.codes:
                        reach = f"tokens reach from {tokens.min()} to {tokens.max()}"
                        sample = Broken(where, f"{reach}, not below {manifest.codes} codes")
                yield sample

    def in_file_order(self, first: int, last: int, step: int = 1) -> Iterator[Sample | Broken]:
        """Every step-th sample from number `first` on, up to `last` (not included), over all shards."""
        start = 0
        for shard in self.shards:
            low = max(first - start, (first - start) % step)
            numbers = range(low, min(shard.samples, last - start), step)
            if numbers:
                yield from self.read(shard, numbers)
            start += shard.samples


# Dividing an epoch among readers -------------------------------------------------------------------------------------


def total(spans: Spans) -> int:
    return sum(high - low for low, high in spans)


def cut(spans: Spans, first: int, last: int) -> Spans:
    """The part from place `first` to `last` of these intervals laid end to end."""
    found = []
    for low, high in spans:
        n = high - low
        a, b = max(first, 0), min(last, n)
        if a < b:
            found.append((low + a, low + b))
        first, last = first - n, last - n
    return found


def share(spans: Spans, reader: int, readers: int) -> Spans:
    """The reader's equal part; the last samples, fewer than there are readers, are no reader's."""
    each = total(spans) // readers
    return cut(spans, reader * each, (reader + 1) * each)


@dataclass(frozen=True)
class Split:
    """How a stream is divided among readers, and where it starts."""

    world: int = 1
    workers: int = 1
    batch_size: int = 1
    left: tuple[dict[int, Spans], ...] = ()
    """Per set {epoch: intervals not consumed} of the epochs begun; later ones are whole. () = from the beginning."""

    @property
    def readers(self) -> int:
        return self.world * self.workers

    def epochs(self, number: int, size: int) -> Iterator[tuple[int, Spans]]:
        """(epoch, what is left of it) of set `number` of `size` samples, without end."""
        left = self.left[number] if self.left else {}
        begun = sorted(left)
        yield from ((epoch, left[epoch]) for epoch in begun)
        yield from ((epoch, [(0, size)]) for epoch in count(begun[-1] + 1 if begun else 0))

    def parts(self, number: int, size: int, reader: int, skip: int) -> Iterator[tuple[int, Spans]]:
        """(epoch, intervals) that a reader reads after its first `skip` samples."""
        for epoch, spans in self.epochs(number, size):
            mine = share(spans, reader, self.readers)
            if skip < total(mine):
                yield epoch, cut(mine, skip, total(mine))
            skip = max(0, skip - total(mine))

    def had(self, worker: int, batches: int) -> int:
        """Batches of a worker among the first `batches` of its rank: they are taken from the workers in turn."""
        return (batches - worker + self.workers - 1) // self.workers

    def after(self, batches: int, sets: Sequence[ShardSet]) -> tuple[dict[int, Spans], ...]:
        """What is left of the epochs begun after every rank has had so many batches."""
        weights = [s.weight for s in sets]
        counts = [
            np.bincount(picks(0, self.had(w, batches) * self.batch_size, weights), minlength=len(sets))
            for w in range(self.workers)
        ]
        return tuple(
            self._after([int(counts[r % self.workers][i]) for r in range(self.readers)], i, s.size)
            for i, s in enumerate(sets)
        )

    def _after(self, had: list[int], number: int, size: int) -> dict[int, Spans]:
        found: dict[int, Spans] = {}
        last = max(self.left[number]) if self.left else 0
        for epoch, spans in self.epochs(number, size):
            rest: Spans = []
            for reader in range(self.readers):
                mine = share(spans, reader, self.readers)
                used = min(had[reader], total(mine))
                had[reader] -= used
                rest += cut(mine, used, total(mine))
            if rest:  # what no reader had is divided again; of a finished epoch it is lost
                each = total(spans) // self.readers
                found[epoch] = rest + cut(spans, each * self.readers, total(spans))
            if epoch >= last and not any(had):
                return found or {epoch + 1: [(0, size)]}
        raise AssertionError


def picks(first: int, last: int, weights: Sequence[float]) -> np.ndarray:
    """The set each of a reader's samples comes from: multiples of the golden ratio, as even as a pattern can be."""
    if len(weights) == 1:
        return np.zeros(last - first, np.int64)
    borders = np.cumsum(weights)[:-1] / sum(weights)
    return np.searchsorted(borders, np.arange(first + 1, last + 1) * GOLDEN % 1.0, side="right")


# Reading it ----------------------------------------------------------------------------------------------------------


class TokenStream(IterableDataset):
    """Endless batches of one rank. Iterate it through a DataLoader with batch_size=None."""

    def __init__(
        self,
        sets: Sequence[ShardSet],
        split: Split,
        seed: int = 0,
        caption_dropout: float = 0.0,
        rank: int = 0,
        start: int = 0,
    ) -> None:
        """`start` counts the batches each rank has consumed of this split. Raises ValueError if a set is too small."""
        self.sets, self.split, self.seed, self.caption_dropout = list(sets), split, seed, caption_dropout
        self.rank, self.start = rank, start
        for s in self.sets:
            if s.size < split.readers:
                raise ValueError(
                    f"{s.place} holds {s.size} samples, fewer than the {split.readers} readers ({split.world} ranks x "
                    f"{split.workers} loader workers); use fewer data.workers or ranks, or more data"
                )

    def __iter__(self) -> Iterator[Batch]:
        info = get_worker_info()
        split, (workers, worker) = self.split, (info.num_workers, info.id) if info else (1, 0)
        assert workers == split.workers, f"divided among {split.workers} workers, read by {workers}"
        # The loader asks worker 0 first: the reader whose turn it is plays its part.
        role = (worker + self.start) % workers
        return self._batches(self.rank * workers + role, split.had(role, self.start) * split.batch_size)

    def _batches(self, reader: int, skip: int) -> Iterator[Batch]:
        size, weights = self.split.batch_size, [s.weight for s in self.sets]
        counts = np.bincount(picks(0, skip, weights), minlength=len(self.sets)).tolist()
        readings = [self._read(number, reader, n) for number, n in enumerate(counts)]
        for first in count(skip, size):
            rows = [(self.sets[i], *next(readings[i])) for i in picks(first, first + size, weights).tolist()]
            good = [(shards, epoch, sample) for shards, epoch, sample in rows if isinstance(sample, Sample)]
            broken = size - len(good)
            if not good:  # a batch is never empty
                shards, epoch, _ = rows[0]
                good = [(shards, epoch, readable([shards], 1)[0])]
            yield Batch(
                stack([sample for _, _, sample in good]),
                [self._caption(sample, epoch) for _, epoch, sample in good],
                [sample.key for _, _, sample in good],
                [shards.place for shards, _, _ in good],
                broken,
            )

    def _read(self, number: int, reader: int, skip: int) -> Iterator[tuple[int, Sample | Broken]]:
        """(epoch, sample) of one set. Raises ValueError if over 1 % of a reader's epoch are broken."""
        shards = self.sets[number]
        for epoch, spans in self.split.parts(number, shards.size, reader, skip):
            order = shards.order(spans, self.seed, epoch)
            samples = chain.from_iterable(shards.read(shard, numbers) for shard, numbers in order)
            yield from ((epoch, sample) for sample in mostly_good(samples, shards.size // self.split.readers))

    def _caption(self, sample: Sample, epoch: int) -> str | Unconditional:
        draw = int(hashlib.sha256(f"{self.seed}:{epoch}:{sample.key}".encode()).hexdigest()[:8], 16) / 0xFFFFFFFF
        return Unconditional(sample.caption) if draw < self.caption_dropout else sample.caption


class FiniteStream(IterableDataset):
    """Every sample once over all ranks, in file order: for validation. No collective may depend on its length."""

    def __init__(self, shards: ShardSet, batch_size: int, rank: int, world: int, limit: int = 0) -> None:
        self.shards, self.batch_size, self.rank, self.world = shards, batch_size, rank, world
        self.limit = limit or shards.size

    def __iter__(self) -> Iterator[Batch]:
        samples = mostly_good(self.shards.in_file_order(self.rank, self.limit, self.world), self.shards.size)
        broken = 0
        while part := list(islice(samples, self.batch_size)):
            good = [s for s in part if isinstance(s, Sample)]
            broken += len(part) - len(good)
            if good:
                places = [self.shards.place] * len(good)
                yield Batch(stack(good), [s.caption for s in good], [s.key for s in good], places, broken)
                broken = 0


def mostly_good(samples: Iterable[Sample | Broken], size: int) -> Iterator[Sample | Broken]:
    """The same samples. Raises ValueError once more than one of them, and more than 1 % of `size`, are broken."""
    broken = 0
    for seen, sample in enumerate(samples, 1):
        if isinstance(sample, Broken):
            broken += 1
            if broken > max(1, MAX_BROKEN * size):
                last = f"{sample.where}: {sample.reason}"
                raise ValueError(f"{broken} of {seen} samples are broken, more than 1 %; last: {last}")
        yield sample


def readable(sets: Sequence[ShardSet], limit: int) -> list[Sample]:
    """The first `limit` samples in file order that can be read. Raises ValueError if there are none."""
    every = chain.from_iterable(s.in_file_order(0, s.size) for s in sets)
    found = list(islice((s for s in every if isinstance(s, Sample)), limit))
    if not found:
        raise ValueError(f"{sets[0].place} holds no readable sample")
    return found


def stack(samples: Sequence[Sample]) -> Tensor:
    """(B, H, W) codes."""
    return torch.from_numpy(np.stack([s.tokens for s in samples], dtype=np.int64, casting="unsafe"))
