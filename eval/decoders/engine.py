"""The one loop all decoders run on: forward, verify, draft, until the canvas is full.

A decoder is a Policy. The loop owns the backbone's state, the distributions, the bookkeeping and the clock; the policy
decides what is drawn, what is committed and what is drafted, and asks the random source for every decision.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from draftgrid.common.timing import synchronize
from draftgrid.eval.decoders.kernels import Sampling
from draftgrid.eval.decoders.randomness import RandomSource, SeededSource, Where
from draftgrid.heads.backbones.base import Backbone, DecodeState
from draftgrid.heads.grid import Offset, TokenGrid
from draftgrid.heads.mtp import MTPHeads
from draftgrid.heads.tokenizers import ImageTokenizer

RowCallback = Callable[[int, Tensor], None]
"""Called with (rows finished in every sample, tokens (B, H, W)); cells not yet drawn hold drafts or 0."""


@dataclass
class Stats:
    """What decoding cost and how its drafts fared. Counts are of image tokens; a batched forward is one call."""

    nfe: int = 0
    """Forwards of the backbone, the prefill included (AR: H * W)."""
    steps: list[int] = field(default_factory=list)
    """(B,) forwards until each sample was finished; the slowest one's is `nfe`."""
    tokens_forwarded: int = 0
    """Image tokens fed, summed over forwards, per sample."""
    phases: bool = False
    """Whether the seconds below are taken. Each phase then waits for the device twice, so decoding itself is slower."""
    seconds_forward: float = 0.0
    seconds_verify: float = 0.0
    seconds_draft: float = 0.0
    drafted: dict[str, list[Any]] = field(default_factory=dict)
    """By kind of draft (an offset, a kind of initial token): [drafts accepted at their first test, drafts tested].

    While decoding, accepted and changed tokens are counted on the device: reading a count would make the host wait.
    """
    cells: Tensor = field(default_factory=lambda: torch.zeros(0))
    """(2, H, W): accepted and tested drafts per grid cell."""
    changed: list[Any] = field(default_factory=lambda: [0, 0])
    """[tokens changed in their last round before being committed, tokens committed after a round]."""

    def count_drafts(self, name: str, kept: Tensor, start: int) -> None:
        """kept (B, K) bool: which drafts at the positions from `start` on passed their first test."""
        B, K = kept.shape
        good = kept.sum(0)
        self.cells[0, start : start + K] += good
        self.cells[1, start : start + K] += B
        hits, tests = self.drafted.get(name, (0, 0))
        self.drafted[name] = [hits + good.sum(), tests + B * K]

    def count_changed(self, kept: Tensor) -> None:
        """kept (B, K) bool, of tokens that are committed after this round."""
        self.changed = [self.changed[0] + (~kept).sum(), self.changed[1] + kept.numel()]

    def finish(self, grid: TokenGrid) -> None:
        """Read what was counted on the device."""
        self.cells = self.cells.cpu().view(2, grid.height, grid.width)
        self.drafted = {name: [int(n) for n in pair] for name, pair in self.drafted.items()}
        self.changed = [int(n) for n in self.changed]

    @staticmethod
    def total(parts: Sequence["Stats"]) -> "Stats":
        """What became of the drafts and tokens of several batches."""
        total = Stats()
        for part in parts:
            for name, pair in part.drafted.items():
                before = total.drafted.get(name, [0, 0])
                total.drafted[name] = [a + b for a, b in zip(before, pair, strict=True)]
            total.changed = [a + b for a, b in zip(total.changed, part.changed, strict=True)]
        return total

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
        if not self.phases:
            yield
            return
        synchronize(device)
        begun = time.perf_counter()
        yield
        synchronize(device)
        setattr(self, name, getattr(self, name) + time.perf_counter() - begun)


@dataclass
class DecodeResult:
    tokens: Tensor
    """(B, H, W) codes."""
    stats: Stats
    exact: bool
    """True if pictures have the backbone's own distribution, for any heads."""


def in_step(*numbers: Sequence[int]) -> Iterator[tuple[slice, tuple[int, ...]]]:
    """(rows, their numbers): all rows at once if the samples agree on every number, else one sample at a time."""
    each = list(zip(*numbers, strict=True))
    if all(n == each[0] for n in each):
        yield slice(0, len(each)), each[0]
    else:
        yield from ((slice(b, b + 1), n) for b, n in enumerate(each))


def windows(x: Tensor, first: Sequence[int], count: int) -> Tensor:
    """x (B, N, ...) -> (B, count, ...): the entries from first[b] on; 0 after the end."""
    if len(set(first)) == 1 and first[0] + count <= x.shape[1]:
        return x[:, first[0] : first[0] + count]
    found = x.new_zeros(len(first), count, *x.shape[2:])
    for rows, (f,) in in_step(first):
        inside = x[rows, f : f + count]
        found[rows, : inside.shape[1]] = inside
    return found


class Sliding:
    """Tensors with one entry a position of the window, made when a position enters and then moved along with it.

    `make(first, count)` gives them for the positions first[b] .. first[b] + count - 1, each (B, count, ...). Up to
    `spare` more are made along, but none from position `end` on: few large calls cost less than many small ones.
    """

    def __init__(self, make: Callable[[Sequence[int], int], tuple[Tensor, ...]], spare: int = 0, end: int = 0) -> None:
        self.make, self.spare, self.end = make, spare, end
        self.first: list[int] = []
        self.lasting = 0
        self.held: tuple[Tensor, ...] = ()
        self.taken: tuple[list[int], int, tuple[Tensor, ...]] = [], 0, ()

    def take(self, first: Sequence[int], count: int, lasting: int | None = None) -> tuple[Tensor, ...]:
        """(B, count, ...) of these positions; only the first `lasting` of them are good for the next time too."""
        first = list(first)
        if self.taken[:2] == (first, count):
            return self.taken[2]
        skip = [f - o for f, o in zip(first, self.first or first, strict=True)]
        good = min(max(0, self.lasting - s) if s >= 0 else 0 for s in skip)
        if good < count:
            size = count + min(self.spare, max(0, self.end - min(first) - count))
            made = self.make([f + good for f in first], size - good)
            if good:
                old = (windows(x, skip, good) for x in self.held)
                made = tuple(torch.cat(pair, dim=1) for pair in zip(old, made, strict=True))
            self.held, self.first, skip = made, first, [0] * len(first)
            self.lasting = size if lasting is None else min(count, lasting)
        self.taken = first, count, tuple(windows(x, skip, count) for x in self.held)
        return self.taken[2]


class Canvas:
    """Everything known about the pictures being drawn. Positions count image tokens in raster order."""

    def __init__(
        self,
        backbone: Backbone,
        heads: MTPHeads | None,
        sampling: Sampling,
        source: RandomSource,
        samples: Sequence[int],
        tokenizer: ImageTokenizer | None = None,
    ) -> None:
        B, T = len(samples), backbone.grid.positions
        self.backbone, self.heads, self.sampling, self.source = backbone, heads, sampling, source
        self.samples, self.tokenizer = samples, tokenizer
        self.grid = backbone.grid
        self.tokens = torch.zeros(B, T, dtype=torch.long, device=backbone.device)
        self.committed = [0] * B
        """(B,) tokens that are final."""
        self.cached = [0] * B
        """(B,) tokens the backbone's cache holds in their final form; the next forward feeds on from here."""
        self.ahead = [0] * B
        """(B,) drafted tokens after the committed ones that the next forward feeds."""
        self.hidden = torch.empty(0)
        """(G, B, T, D) newest state of every position, as the heads read it; empty without heads."""
        self.known = [0] * B
        """(B,) positions whose state some forward has computed."""
        self.visit = 0
        """Key of the random numbers: 2 * step while verifying, one more while drafting."""
        self.stats = Stats(steps=[0] * B, cells=torch.zeros(2, T, device=backbone.device))

    @property
    def done(self) -> bool:
        return min(self.committed) == self.grid.positions

    def where(self, first: Sequence[int], count: int, rows: slice = slice(None)) -> Where:
        """Key of the numbers of this phase for the positions first[b] .. first[b] + count - 1 of the samples `rows`."""
        return Where(self.samples[rows], np.asarray(first)[:, None] + np.arange(count), self.visit)

    def commit(self, counts: Sequence[int]) -> None:
        """counts[b] more tokens are final, and the last forward has read all of them but the newest."""
        self.committed = [n + c for n, c in zip(self.committed, counts, strict=True)]
        self.cached = [max(0, n - 1) for n in self.committed]

    def predict(self, offset: Offset, start: int, end: int, rows: slice = slice(None)) -> Tensor:
        """States the heads predict for positions start .. end - 1 from the cells `offset` before them: (G, B, K, D)."""
        assert self.heads is not None
        back = offset[0] * self.grid.width + offset[1]
        source = slice(start - back, end - back)
        return self.heads(self.hidden[:, rows, source], self.backbone.embed(self.tokens[rows, source]), offset)

    def remember(self, h: Tensor, first: Sequence[int]) -> None:
        """Keep the states h (G, B, L, D) of the positions first[b] + 1 on, as far as they belong to the sample."""
        assert self.heads is not None
        h = self.heads.states(self.backbone, h)
        if not self.hidden.numel():
            self.hidden = h.new_zeros(h.shape[0], *self.tokens.shape, h.shape[-1])
        ends = [min(n + a, self.grid.positions - 1) + 1 for n, a in zip(self.committed, self.ahead, strict=True)]
        for rows, (f, end) in in_step(first, ends):
            self.hidden[:, rows, f + 1 : end] = h[:, rows, : max(0, end - f - 1)]
        self.known = ends


class Policy(ABC):
    """One decoder. `verify` reads the distributions of a forward and commits; `draft` proposes what comes next."""

    name: str
    exact: bool
    drafts_with: tuple[str, ...] = ()
    """Kinds of heads it can draft with; empty = it uses none."""

    def begin(self, canvas: Canvas) -> None:  # noqa: B027 - optional
        """Called once before the first step. Raises ValueError if the heads do not fit the settings."""

    @abstractmethod
    def verify(self, canvas: Canvas, p: Tensor) -> None:
        """p (B, S, V): targets of the positions from canvas.committed on. Sets tokens, committed and cached.

        Sample b's first canvas.ahead[b] + 1 targets are its own; the others fill up a batch that is not in step.
        """

    def draft(self, canvas: Canvas) -> None:  # noqa: B027 - optional
        """Write drafts after the committed tokens and set canvas.ahead."""


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
    tokenizer: ImageTokenizer | None = None,
    callback: RowCallback | None = None,
    phases: bool = False,
) -> DecodeResult:
    """Draw one picture per prompt. `samples` are the pictures' numbers in a larger job (default 0, 1, ...).

    `phases` measures the seconds of forward, verify and draft, for which it waits for the device at each.

    Raises ValueError if there is no prompt, if the policy needs heads and has none, or if they are another backbone's.
    """
    if isinstance(prompts, str):
        raise ValueError(f"prompts is the text {prompts!r}; give a list of prompts")
    if samples is not None and len(samples) != len(prompts):
        raise ValueError(f"samples has {len(samples)} numbers for {len(prompts)} prompts")
    if not prompts:
        raise ValueError("no prompt to draw")
    if policy.drafts_with:
        if heads is None:
            give = "give heads=MTPHeads.from_pretrained(folder, backbone)"
            raise ValueError(f"decoder {policy.name} drafts with heads; {give}")
        if heads.kind not in policy.drafts_with:
            raise ValueError(f"decoder {policy.name} drafts with {policy.drafts_with[0]} heads; these are {heads.kind}")
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
    heads = heads if policy.drafts_with else None
    canvas = Canvas(backbone, heads, sampling, source or SeededSource(seed), numbers, tokenizer)
    canvas.stats.phases = phases
    policy.begin(canvas)
    with canvas.stats.clock("seconds_forward", device):
        state, h = backbone.start(prompts, sampling.guidance)
    rows = 0
    for _ in steps(canvas, policy, state, h):
        if callback is not None and min(canvas.committed) // grid.width > rows:
            rows = min(canvas.committed) // grid.width
            callback(rows, canvas.tokens.view(-1, grid.height, grid.width).clone())
    canvas.stats.finish(grid)
    return DecodeResult(canvas.tokens.view(-1, grid.height, grid.width), canvas.stats, policy.exact)


def steps(canvas: Canvas, policy: Policy, state: DecodeState, h: Tensor) -> Iterator[None]:
    """Step after step until the canvas is full: test what the last forward says, draft, go forward.

    The state has read the committed tokens, and h (G, B, 1, D) are the states after them.
    """
    backbone, heads, stats, device = canvas.backbone, canvas.heads, canvas.stats, canvas.tokens.device
    first = [n - 1 for n in canvas.committed]
    step = 0
    while True:
        stats.nfe += 1
        if heads is not None:
            canvas.remember(h, first)
        with stats.clock("seconds_verify", device):
            canvas.visit = 2 * step
            skip = [n - f - 1 for n, f in zip(canvas.committed, first, strict=True)]
            h = windows(h.movedim(0, 2), skip, max(canvas.ahead) + 1).movedim(2, 0)  # (G, B, S, D)
            policy.verify(canvas, canvas.sampling.probabilities(backbone.logits(h)))
        with stats.clock("seconds_draft", device):
            canvas.visit += 1
            policy.draft(canvas)
        for b, n in enumerate(canvas.committed):
            if n == canvas.grid.positions and not stats.steps[b]:
                stats.steps[b] = stats.nfe
        yield
        if canvas.done:
            return
        step += 1
        first = list(canvas.cached)
        length = max(n + a - f for n, a, f in zip(canvas.committed, canvas.ahead, first, strict=True))
        with stats.clock("seconds_forward", device):
            backbone.rollback(state, first)
            h = backbone.forward(state, windows(canvas.tokens, first, length), first)
        stats.tokens_forwarded += length
