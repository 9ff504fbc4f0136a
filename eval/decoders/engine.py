"""The one loop all decoders run on: forward, verify, draft, until the canvas is full.

A decoder is a Policy. The loop owns the backbone's state, the distributions, the bookkeeping and the clock; the policy
decides what is drawn, what is committed and what is drafted, and asks the random source for every decision.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from eval.decoders.kernels import Sampling
from eval.decoders.randomness import RandomSource, SeededSource, Where
from heads.backbones.base import Backbone
from heads.grid import Offset, offset_name
from heads.mtp import MTPHeads
from heads.timing import settle

RowCallback = Callable[[int, Tensor], None]
"""Called with (rows finished in every sample, tokens (B, H, W)); cells not yet drawn hold drafts or 0."""


@dataclass
class Stats:
    """What decoding cost and how its drafts fared. Counts are of image tokens; a batched forward is one call."""

    nfe: int = 0
    """Forwards of the backbone, the prefill included (AR: H * W)."""
    tokens_forwarded: int = 0
    """Image tokens fed, summed over forwards, per sample."""
    seconds_forward: float = 0.0
    seconds_verify: float = 0.0
    seconds_draft: float = 0.0
    drafted: dict[str, list[int]] = field(default_factory=dict)
    """Per offset: [drafts accepted at their first test, drafts tested]."""
    cells: Tensor = field(default_factory=lambda: torch.zeros(0))
    """(2, H, W): accepted and tested drafts per grid cell."""
    changed: list[int] = field(default_factory=lambda: [0, 0])
    """[tokens changed in their last round before being committed, tokens committed after a round]."""

    @property
    def acceptance(self) -> dict[str, float]:
        return {name: hits / tests for name, (hits, tests) in self.drafted.items() if tests}

    @property
    def acceptance_map(self) -> Tensor:
        """(H, W) acceptance at the first test; NaN where nothing was drafted."""
        return self.cells[0] / self.cells[1]

    @property
    def change_rate(self) -> float | None:
        """Share of tokens that still changed in their final round. None where no round tested them: exact, or r = 0."""
        return self.changed[0] / self.changed[1] if self.changed[1] else None

    @contextmanager
    def clock(self, name: str, device: torch.device) -> Iterator[None]:
        settle(device)
        begun = time.perf_counter()
        yield
        settle(device)
        setattr(self, name, getattr(self, name) + time.perf_counter() - begun)


@dataclass
class DecodeResult:
    tokens: Tensor
    """(B, H, W) codes."""
    stats: Stats
    exact: bool
    """True if the decoder's law is the backbone's, for any heads."""


class Canvas:
    """Everything known about the pictures being drawn. Positions count image tokens in raster order."""

    def __init__(
        self,
        backbone: Backbone,
        heads: MTPHeads | None,
        sampling: Sampling,
        source: RandomSource,
        samples: Sequence[int],
    ) -> None:
        B, T = len(samples), backbone.grid.positions
        self.backbone, self.heads, self.sampling, self.source = backbone, heads, sampling, source
        self.samples = samples
        self.tokens = torch.zeros(B, T, dtype=torch.long, device=backbone.device)
        self.committed = [0] * B
        """(B,) tokens that are final."""
        self.cached = [0] * B
        """(B,) tokens the backbone's cache holds in their final form; the next forward feeds on from here."""
        self.ahead = [0] * B
        """(B,) drafted tokens behind the committed ones that the next forward feeds."""
        self.hidden: Tensor | None = None
        """(G, B, T, D) newest state of every position; kept only for heads."""
        self.step = 0
        grid = backbone.grid
        self.stats = Stats(cells=torch.zeros(2, grid.height, grid.width))

    @property
    def done(self) -> bool:
        return min(self.committed) == self.backbone.grid.positions

    def where(self, start: int, end: int) -> Where:
        """Key of the numbers for the positions start .. end - 1 of every sample at this step."""
        return Where(self.samples, np.arange(start, end), self.step)

    def predict(self, offset: Offset, start: int, end: int) -> Tensor:
        """States the heads predict for positions start .. end - 1 from the cells `offset` before them: (G, B, K, D)."""
        assert self.heads is not None and self.hidden is not None
        back = offset[0] * self.backbone.grid.width + offset[1]
        source = slice(start - back, end - back)
        return self.heads(self.hidden[:, :, source], self.backbone.embed(self.tokens[:, source]), offset)

    def count_drafts(self, kept: Tensor, offsets: Sequence[tuple[Offset, int, int]], start: int) -> None:
        """Note which drafts (B, K) from position `start` on passed their first test; offsets: (offset, from, to)."""
        hits, tests = kept.sum(0).cpu(), kept.shape[0]
        width = self.backbone.grid.width
        for offset, low, high in offsets:
            entry = self.stats.drafted.setdefault(offset_name(offset), [0, 0])
            entry[0] += int(hits[low - start : high - start].sum())
            entry[1] += tests * (high - low)
        for i, hit in enumerate(hits.tolist(), start):
            self.stats.cells[0, i // width, i % width] += hit
            self.stats.cells[1, i // width, i % width] += tests


class Policy(ABC):
    """One decoder. `verify` reads the distributions of a forward and commits; `draft` proposes what comes next."""

    name: str
    exact: bool
    needs_heads: bool = False

    def begin(self, canvas: Canvas) -> None:  # noqa: B027 - optional
        """Called once before the first step. Raises ValueError if the heads do not fit the settings."""

    @abstractmethod
    def verify(self, canvas: Canvas, p: Tensor) -> None:
        """p (B, S, V): targets of the S positions from canvas.committed on. Sets tokens, committed and cached."""

    def draft(self, canvas: Canvas) -> None:  # noqa: B027 - optional
        """Write drafts behind the committed tokens and set canvas.ahead."""


@torch.inference_mode()
def run(
    backbone: Backbone,
    prompts: Sequence[str],
    policy: Policy,
    sampling: Sampling,
    heads: MTPHeads | None = None,
    seed: int = 0,
    samples: Sequence[int] | None = None,
    source: RandomSource | None = None,
    callback: RowCallback | None = None,
) -> DecodeResult:
    """Draw one picture per prompt. `samples` are the pictures' numbers in a larger job (default 0, 1, ...).

    Raises ValueError if there is no prompt, if the policy needs heads and has none, or if they are another backbone's.
    """
    if isinstance(prompts, str):
        raise ValueError(f"prompts is the text {prompts!r}; give a list of prompts")
    if samples is not None and len(samples) != len(prompts):
        raise ValueError(f"samples has {len(samples)} numbers for {len(prompts)} prompts")
    if not prompts:
        raise ValueError("no prompt to draw")
    if policy.needs_heads and heads is None:
        raise ValueError(
            f"decoder {policy.name} drafts with heads; give heads=MTPHeads.from_pretrained(folder, backbone)"
        )
    if heads is not None:
        heads.check(backbone)
        weight = next(heads.parameters(), None)
        if weight is not None and (weight.device, weight.dtype) != (backbone.device, backbone.dtype):
            raise ValueError(
                f"the heads are {weight.dtype} on {weight.device}, the backbone {backbone.dtype} on {backbone.device}; "
                "load them with MTPHeads.from_pretrained(folder, backbone)"
            )
    grid, device = backbone.grid, backbone.device
    numbers = list(range(len(prompts)) if samples is None else samples)
    canvas = Canvas(backbone, heads if policy.needs_heads else None, sampling, source or SeededSource(seed), numbers)
    stats = canvas.stats
    policy.begin(canvas)
    with stats.clock("seconds_forward", device):
        state, h = backbone.start(prompts, sampling.guidance)
    stats.nfe = 1
    rows = 0
    first = [-1] * len(prompts)
    while True:
        if canvas.heads is not None:
            _remember(canvas, h, first)
        with stats.clock("seconds_verify", device):
            p = sampling.probabilities(backbone.logits(_window(h, canvas.committed, first)))
            policy.verify(canvas, p)
        with stats.clock("seconds_draft", device):
            policy.draft(canvas)
        if callback is not None and min(canvas.committed) // grid.width > rows:
            rows = min(canvas.committed) // grid.width
            callback(rows, canvas.tokens.view(-1, grid.height, grid.width).clone())
        if canvas.done:
            break
        canvas.step += 1
        first = list(canvas.cached)
        length = max(n + a - f for n, a, f in zip(canvas.committed, canvas.ahead, first, strict=True))
        with stats.clock("seconds_forward", device):
            backbone.rollback(state, first)
            h = backbone.forward(state, _gather(canvas.tokens, first, length), first)
        stats.nfe += 1
        stats.tokens_forwarded += length
    return DecodeResult(canvas.tokens.view(-1, grid.height, grid.width), stats, policy.exact)


def _gather(tokens: Tensor, first: list[int], length: int) -> Tensor:
    """(B, T) -> (B, length) from first[b] on; behind the end the last token is repeated (never committed)."""
    if len(set(first)) == 1 and first[0] + length <= tokens.shape[1]:
        return tokens[:, first[0] : first[0] + length]
    start = torch.tensor(first, device=tokens.device)[:, None]
    return tokens.gather(1, (start + torch.arange(length, device=tokens.device)).clamp(max=tokens.shape[1] - 1))


def _window(h: Tensor, committed: list[int], first: list[int]) -> Tensor:
    """States (G, B, L, D) of positions first + 1 ... -> those from `committed` on, (G, B, S, D)."""
    skip = [n - f - 1 for n, f in zip(committed, first, strict=True)]
    if len(set(skip)) == 1:
        return h[:, :, skip[0] :]
    G, _, L, D = h.shape
    index = torch.tensor(skip, device=h.device)[:, None] + torch.arange(L - min(skip), device=h.device)
    return h.gather(2, index.clamp(max=L - 1)[None, :, :, None].expand(G, -1, -1, D))


def _remember(canvas: Canvas, h: Tensor, first: list[int]) -> None:
    G, B, L, D = h.shape
    T = canvas.tokens.shape[1]
    if canvas.hidden is None:
        canvas.hidden = h.new_zeros(G, B, T, D)
    for b in range(B):
        count = min(L, T - 1 - first[b])
        canvas.hidden[:, b, first[b] + 1 : first[b] + 1 + count] = h[:, b, :count]
