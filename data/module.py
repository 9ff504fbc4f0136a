"""The LightningDataModule: the shard sets a recipe names, checked and streamed; a resumed run continues."""

import hashlib
import signal
from dataclasses import asdict
from typing import Any

import lightning as L
from torch import Tensor
from torch.utils.data import DataLoader

from draftgrid.data.config import StreamConfig
from draftgrid.data.places import Cache, join
from draftgrid.data.shards import check_manifest
from draftgrid.data.stream import FiniteStream, ShardSet, Split, TokenStream, readable, stack, total


class TokenDataModule(L.LightningDataModule):
    """Streams DIR/train, mixed with other sets if so told, and DIR/validation.

    All manifests are checked against the run's tokenizer and grid at once.
    """

    def __init__(self, config: StreamConfig, tokenizer: str, grid: tuple[int, int], seed: int = 0) -> None:
        """`tokenizer` is the fingerprint of the image tokenizer that belongs to the backbone."""
        super().__init__()
        self.config, self.seed = config, seed
        config.check()
        cache = Cache(config.cache, int(config.cache_gb * 1e9)) if config.cache else None

        def shard_set(place: str, weight: float = 1.0) -> ShardSet:
            return ShardSet(place, check_manifest(place, tokenizer, grid), weight, cache)

        self.train_sets = [shard_set(join(config.dir, "train"))]
        self.train_sets += [shard_set(place, weight) for place, weight in config.mix.items()]
        self.validation_set = shard_set(join(config.dir, "validation"))
        self.split, self.start, self.seen = Split(), 0, 0
        self.notes: list[str] = []
        """What a resumed run says about its data when training begins."""

    @property
    def digest(self) -> str:
        """sha256 over what is trained on: any sample of any set changes it."""
        return hashlib.sha256("".join(f"{s.digest}{s.weight}" for s in self.train_sets).encode()).hexdigest()

    def _world(self) -> tuple[int, int]:
        return (self.trainer.global_rank, self.trainer.world_size) if self.trainer else (0, 1)

    def _processed(self) -> int:
        """Batches this rank has trained on since the run began."""
        progress: Any = self.trainer.fit_loop.epoch_loop.batch_progress.total if self.trainer else None
        return progress.processed if progress else 0

    def _divide(self, left: tuple[dict, ...] = ()) -> Split:
        return Split(self._world()[1], max(1, self.config.workers), self.config.batch_size, left)

    def train_dataloader(self) -> DataLoader:
        c, (rank, _) = self.config, self._world()
        if not self.split.left:
            self.split = self._divide()
        self.seen = self._processed()
        stream = TokenStream(self.train_sets, self.split, self.seed, c.caption_dropout, rank, self.start)
        if rank == 0 and self.trainer:
            print(*self.notes, *map(self._described, self.train_sets), sep="\n", flush=True)
        self.notes = []
        # A Ctrl-C reaches a terminal's whole process group; the run itself decides when to end.
        return DataLoader(stream, batch_size=None, num_workers=c.workers, worker_init_fn=_ignore_interrupt)

    def val_dataloader(self) -> DataLoader:
        c = self.config
        stream = FiniteStream(self.validation_set, c.batch_size, *self._world(), c.validation_samples)
        return DataLoader(stream, batch_size=None, num_workers=0)

    def _described(self, s: ShardSet) -> str:
        """How a set is divided."""
        split, (each, rest) = self.split, divmod(s.size, self.split.readers)
        weight = s.weight / sum(t.weight for t in self.train_sets)
        steps = each * split.workers / (split.batch_size * weight)
        origin = f", {weight:.0%} of every batch" if len(self.train_sets) > 1 else ""
        return (
            f"data: {s.place}: {s.size} samples in {len(s.shards)} shards{origin}; an epoch is {steps:.1f} steps "
            f"of {split.world} x {split.batch_size}, the same on every rank, and leaves {rest} samples unseen"
        )

    # Resuming a stream takes one thing: which part of the epochs already begun is left -------------------------------

    def state_dict(self) -> dict[str, Any]:
        split = asdict(self.split)
        return split | {
            "left": [{e: [list(span) for span in spans] for e, spans in left.items()} for left in self.split.left],
            "batches": self.start + self._processed() - self.seen,
            "sets": [[s.place, s.weight, s.digest] for s in self.train_sets],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises ValueError if the data is not what the checkpoint's run was reading."""
        for there, here in zip(state["sets"], self.train_sets, strict=False):
            if there != [here.place, here.weight, here.digest]:
                raise ValueError(
                    f"data: the checkpoint was reading {there[0]} (weight {there[1]}, digest {there[2][:12]}), now it "
                    f"is {here.place} (weight {here.weight}, digest {here.digest[:12]}); bring that back"
                )
        left = tuple({int(e): [(a, b) for a, b in spans] for e, spans in part.items()} for part in state["left"])
        old = Split(state["world"], state["workers"], state["batch_size"], left)
        new = self._divide(left)
        if new == old:
            self.split, self.start = old, state["batches"]
            return
        self.split, self.start = self._divide(old.after(state["batches"], self.train_sets)), 0
        rest = sum(total(spans) for spans in self.split.left[0].values())
        self.notes.append(
            f"data: the checkpoint is of {old.world} ranks x {old.workers} workers and batches of {old.batch_size}, "
            f"so what is left of epoch {min(self.split.left[0])} ({rest} samples) is divided again"
        )

    def sample_tokens(self, limit: int) -> Tensor:
        """(N, H, W) codes of the first `limit` training samples in file order: for count tables."""
        return stack(readable(self.train_sets, limit))


def _ignore_interrupt(_: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
