"""The training stream: token shards split over ranks and workers, in an order that is a pure function.

Shard order is a function of (seed, epoch), sample order of (seed, epoch, shard), so the whole state of the stream is
one integer, the batches consumed: a resumed run reads on with the very next sample.
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from data.config import StreamConfig
from data.shards import Broken, Manifest, Sample, Shard, check_manifest, read_shard

MAX_BROKEN = 0.01


@dataclass
class Batch:
    tokens: Tensor
    """(B, H, W) codes."""
    captions: list[str | None]
    """None stands for the unconditional prompt."""
    keys: list[str]
    broken: int = 0
    """Samples skipped since this reader's batch before."""

    def to(self, device: Any, **_: Any) -> "Batch":
        return Batch(self.tokens.to(device), self.captions, self.keys, self.broken)


class TokenStream(IterableDataset):
    """Endless batches of one rank. Iterate it through a DataLoader with batch_size=None."""

    def __init__(
        self,
        folder: str | Path,
        manifest: Manifest,
        batch_size: int,
        seed: int = 0,
        caption_dropout: float = 0.0,
        rank: int = 0,
        world: int = 1,
        start: int = 0,
    ) -> None:
        """`start` counts the batches this rank has already consumed."""
        self.folder, self.manifest, self.batch_size = Path(folder), manifest, batch_size
        self.seed, self.caption_dropout = seed, caption_dropout
        self.rank, self.world, self.start = rank, world, start
        if batch_size < 1:
            raise ValueError(f"batch_size is {batch_size}; at least 1 is needed")
        if not manifest.samples:
            raise ValueError(f"{folder} holds no sample")

    def __iter__(self) -> Iterator[Batch]:
        info = get_worker_info()
        workers, worker = (info.num_workers, info.id) if info else (1, 0)
        # The loader asks worker 0 first; after `start` batches the reader whose turn it is must be worker 0.
        role = (worker + self.start) % workers
        done = (self.start - role + workers - 1) // workers
        samples = self._samples(self.rank * workers + role, self.world * workers)
        yield from islice(self._batches(samples), max(done, 0), None)

    def _batches(self, samples: Iterator[tuple[Sample, int, int]]) -> Iterator[Batch]:
        while True:
            rows = list(islice(samples, self.batch_size))
            tokens = torch.from_numpy(np.stack([s.tokens.astype(np.int64) for s, _, _ in rows]))
            captions = [self._caption(s, epoch) for s, epoch, _ in rows]
            yield Batch(tokens, captions, [s.key for s, _, _ in rows], sum(b for _, _, b in rows))

    def _caption(self, sample: Sample, epoch: int) -> str | None:
        draw = int(hashlib.sha256(f"{self.seed}:{epoch}:{sample.key}".encode()).hexdigest()[:8], 16) / 0xFFFFFFFF
        return None if draw < self.caption_dropout else sample.caption

    def _samples(self, reader: int, readers: int) -> Iterator[tuple[Sample, int, int]]:
        """(sample, epoch, broken samples before it), endless. Raises ValueError if over 1 % of an epoch are broken."""
        pending = 0
        for epoch in range(1 << 62):
            seen = broken = yielded = 0
            for sample in self._epoch(epoch, reader, readers):
                seen += 1
                if isinstance(sample, Broken):
                    broken += 1
                    pending += 1
                    if broken > max(1, MAX_BROKEN * max(seen, self.manifest.samples // readers)):
                        last = f"{sample.where}: {sample.reason}"
                        raise ValueError(f"{broken} of {seen} samples are broken, more than 1 %; last: {last}")
                    continue
                yielded += 1
                yield sample, epoch, pending
                pending = 0
            if not yielded:
                where = f"{self.folder}: reader {reader + 1} of {readers}"
                raise ValueError(f"{where} has no readable sample; use fewer data.workers or ranks, or more data")

    def _epoch(self, epoch: int, reader: int, readers: int) -> Iterator[Sample | Broken]:
        shards = [s for s in self.manifest.shards if s.samples]
        order = np.random.default_rng((self.seed, epoch)).permutation(len(shards))
        by_sample = len(shards) < readers
        mine = order if by_sample else order[reader::readers]
        place = 0
        for index in mine:
            shard = shards[index]
            samples = list(_read(self.folder, shard, self.manifest))
            for i in np.random.default_rng((self.seed, epoch, int(index))).permutation(len(samples)):
                if not by_sample or place % readers == reader:
                    yield samples[i]
                place += 1


def _read(folder: Path, shard: Shard, manifest: Manifest) -> Iterator[Sample | Broken]:
    """The shard's samples; one that does not fit the manifest is Broken."""
    for sample in read_shard(folder / shard.file, shard.samples):
        if isinstance(sample, Broken):
            yield sample
            continue
        where, tokens = f"{folder / shard.file} sample {sample.key}", sample.tokens
        if tokens.shape != manifest.grid:
            yield Broken(where, f"tokens are {tokens.shape}, not {manifest.grid}")
        elif tokens.dtype.kind not in "iu" or not 0 <= tokens.min() <= tokens.max() < manifest.codes:
            yield Broken(where, f"tokens reach from {tokens.min()} to {tokens.max()}, not below {manifest.codes} codes")
        else:
            yield sample


class FiniteStream(IterableDataset):
    """Every sample once over all ranks, in file order: for validation. No collective may depend on its length."""

    def __init__(
        self, folder: str | Path, manifest: Manifest, batch_size: int, rank: int, world: int, limit: int = 0
    ) -> None:
        self.folder, self.manifest, self.batch_size = Path(folder), manifest, batch_size
        self.rank, self.world, self.limit = rank, world, limit or manifest.samples

    def __iter__(self) -> Iterator[Batch]:
        every = (s for shard in self.manifest.shards for s in _read(self.folder, shard, self.manifest))
        mine = islice(every, self.rank, self.limit, self.world)
        broken = total = 0
        while part := list(islice(mine, self.batch_size)):
            rows = [s for s in part if isinstance(s, Sample)]
            broken += len(part) - len(rows)
            total += len(part) - len(rows)
            if total > max(1, MAX_BROKEN * self.manifest.samples):
                last = next(s for s in reversed(part) if isinstance(s, Broken))
                raise ValueError(f"{total} samples are broken, more than 1 %; last: {last.where}: {last.reason}")
            if rows:
                tokens = torch.from_numpy(np.stack([s.tokens.astype(np.int64) for s in rows]))
                yield Batch(tokens, [s.caption for s in rows], [s.key for s in rows], broken)
                broken = 0


class TokenDataModule(L.LightningDataModule):
    """Streams DIR/train and DIR/validation; checks both manifests against the run's tokenizer and grid at once."""

    def __init__(self, config: StreamConfig, tokenizer: str, grid: tuple[int, int], seed: int = 0) -> None:
        """`tokenizer` is the fingerprint of the image tokenizer that belongs to the backbone."""
        super().__init__()
        self.config, self.seed = config, seed
        config.check()
        if config.validation_samples < 0:
            raise ValueError(f"data.validation_samples is {config.validation_samples}; use 0 (all) or more")
        self.folder = Path(config.dir)
        self.train_set = check_manifest(self.folder / "train", tokenizer, grid)
        self.validation_set = check_manifest(self.folder / "validation", tokenizer, grid)

    def _world(self) -> tuple[int, int]:
        return (self.trainer.global_rank, self.trainer.world_size) if self.trainer else (0, 1)

    def train_dataloader(self) -> DataLoader:
        rank, world = self._world()
        progress: Any = self.trainer.fit_loop.epoch_loop.batch_progress.total if self.trainer else None
        start = progress.processed if progress else 0
        c = self.config
        stream = TokenStream(
            self.folder / "train", self.train_set, c.batch_size, self.seed, c.caption_dropout, rank, world, start
        )
        return DataLoader(stream, batch_size=None, num_workers=c.workers)

    def val_dataloader(self) -> DataLoader:
        c = self.config
        stream = FiniteStream(
            self.folder / "validation", self.validation_set, c.batch_size, *self._world(), c.validation_samples
        )
        return DataLoader(stream, batch_size=None, num_workers=0)

    def sample_tokens(self, count: int) -> Tensor:
        """(N, H, W) codes of the first `count` training samples in file order: for count tables."""
        rows: Sequence[Sample] = list(islice(self._training_samples(), count))
        if not rows:
            raise ValueError(f"{self.folder / 'train'} holds no readable sample")
        return torch.from_numpy(np.stack([s.tokens.astype(np.int64) for s in rows]))

    def _training_samples(self) -> Iterator[Sample]:
        for shard in self.train_set.shards:
            yield from (s for s in _read(self.folder / "train", shard, self.train_set) if isinstance(s, Sample))
