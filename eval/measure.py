"""What decoders cost: the same prompts and seeds drawn by all of them in one process, and a forward's price by length.

Seconds come from `timed` pictures, drawn `repeats` times at `batch_size`, decoders taking turns; counts come from all
pictures, the rest of which is drawn once, in batches: a picture does not depend on its batch.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from draftgrid.common.timing import synchronize, timed
from draftgrid.eval.decoders import DecodeResult, Sampling
from draftgrid.eval.decoders.kernels import gumbel_argmax, transport
from draftgrid.eval.decoders.randomness import SeededSource, Where
from draftgrid.eval.setup import DecoderSpec, Loaded, spread
from draftgrid.heads.grid import TokenGrid
from draftgrid.heads.offsets import OffsetHeads

T = TypeVar("T")
LENGTHS = (1, 2, 4, 8, 16, 24, 32, 48, 64)


@dataclass(frozen=True)
class Plan:
    """How much is measured."""

    timed: int = 0
    """Pictures that are timed, spread evenly over all; 0 = all."""
    repeats: int = 3
    batch_size: int = 1
    quality_batch: int = 8
    seed: int = 0
    warm_up: bool = True
    """Draw once before the clock runs: first calls allocate and choose kernels."""

    def clocked(self, images: int) -> list[int]:
        """Numbers of the timed pictures."""
        return spread(self.timed or images, images)

    def pictures(self, images: int) -> int:
        """Pictures a decoder draws in all, warm-up included."""
        clocked = len(self.clocked(images))
        warm = min(self.batch_size, clocked) if self.warm_up else 0
        return warm + (self.repeats + 1) * clocked + images - clocked


@dataclass
class DrawnBatch:
    """One call of a decoder: the numbers of the pictures it drew, and how long it took."""

    numbers: Sequence[int]
    result: DecodeResult
    seconds: float


@dataclass
class Run:
    """One decoder over all prompts."""

    decoder: DecoderSpec
    passes: list[list[DrawnBatch]] = field(default_factory=list)
    """The timed pictures, once per repeat."""
    phased: list[DrawnBatch] = field(default_factory=list)
    """The timed pictures once more, with the clock on each phase, which slows them down."""
    rest: list[DrawnBatch] = field(default_factory=list)

    @property
    def parts(self) -> list[DrawnBatch]:
        """Every picture once."""
        return [*self.passes[-1], *self.rest]

    @property
    def tokens(self) -> Tensor:
        """(N, H, W) in the order of the prompts."""
        order = torch.tensor([n for part in self.parts for n in part.numbers]).argsort()
        return torch.cat([part.result.tokens for part in self.parts])[order.to(self.parts[0].result.tokens.device)]

    @property
    def steps(self) -> list[int]:
        """Forwards until each picture was finished, in the order of the prompts."""
        found = {n: s for part in self.parts for n, s in zip(part.numbers, part.result.stats.steps, strict=True)}
        return [found[n] for n in sorted(found)]

    def phase(self, name: str) -> float:
        """Seconds of one phase, as `Stats` calls it, summed over the timed pictures."""
        return sum(getattr(part.result.stats, name) for part in self.phased)

    def seconds(self) -> np.ndarray:
        """(repeats, calls) seconds; the calls are the same ones for every decoder."""
        return np.array([[part.seconds for part in once] for once in self.passes])


def draw(loaded: Loaded, decoder: DecoderSpec, numbers: Sequence[int], seed: int, phases: bool = False) -> DrawnBatch:
    """The pictures of these numbers of the prompts, drawn together on the clock."""
    synchronize(loaded.backbone.device)
    begun = time.perf_counter()
    result = loaded.draw(decoder, numbers, seed, phases=phases)
    synchronize(loaded.backbone.device)
    return DrawnBatch(numbers, result, time.perf_counter() - begun)


def measure(loaded: Loaded, decoders: Sequence[DecoderSpec], plan: Plan, bar: tqdm) -> list[Run]:
    """Draw all prompts with every decoder; they take turns, so a slow minute hits all alike."""
    runs = [Run(decoder) for decoder in decoders]
    images = len(loaded.prompts)
    clocked = plan.clocked(images)
    rest = sorted(set(range(images)) - set(clocked))

    def draw_all(run: Run, numbers: Sequence[int], size: int, phases: bool = False) -> list[DrawnBatch]:
        parts = []
        for part in batches(numbers, size):
            parts.append(draw(loaded, run.decoder, part, plan.seed, phases))
            bar.update(len(part))
        return parts

    for run in runs if plan.warm_up else ():
        draw_all(run, clocked[: plan.batch_size], plan.batch_size)
    for _ in range(plan.repeats):
        for run in runs:
            run.passes.append(draw_all(run, clocked, plan.batch_size))
    for run in runs:
        run.phased = draw_all(run, clocked, plan.batch_size, phases=True)
        run.rest = draw_all(run, rest, plan.quality_batch)
    return runs


def batches(items: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    return (items[i : i + size] for i in range(0, len(items), size))


def speedup(ar: Run, run: Run, seed: int = 0, draws: int = 2000) -> tuple[float, list[float]]:
    """AR's seconds over the decoder's: the median of the repeats, and a 95 % interval over resampled pictures."""
    a, b = ar.seconds(), run.seconds()
    picked = np.random.default_rng(seed).integers(0, a.shape[1], (draws, a.shape[1]))
    a_each, b_each = np.median(a, 0), np.median(b, 0)
    ratios = a_each[picked].sum(1) / b_each[picked].sum(1)
    return float(np.median(a.sum(1) / b.sum(1))), [float(v) for v in np.quantile(ratios, [0.025, 0.975])]


def lengths_on(grid: TokenGrid, windows: Sequence[int] = ()) -> list[int]:
    """Lengths of a forward worth timing, as far as half a picture in the cache leaves room for them."""
    half = max(1, grid.height // 2 * grid.width)
    every = sorted({*LENGTHS, grid.width, 2 * grid.width, *windows})
    return [n for n in every if n == 1 or half + n < grid.positions]


@torch.inference_mode()
def step_cost(
    loaded: Loaded, lengths: Sequence[int], batch: int = 1, repeats: int = 15
) -> tuple[dict[int, float], dict[str, float] | None]:
    """{L: median seconds of a forward over L image tokens, the cache half full}, and what drafting a row takes.

    A drafted row is all an offset head costs in decoding: W cells through it, the final norm, LM head, the sampling
    pipeline and the draw; `seconds` repeated alone, as the forwards are, and `seconds_in_loop` right after a forward,
    which has emptied the caches. None without offset heads.
    """
    backbone, sampling = loaded.backbone, loaded.sampling
    heads = loaded.heads.get("offsets")
    grid, device = backbone.grid, backbone.device
    half = max(1, grid.height // 2 * grid.width)
    prompts = loaded.prompts[:batch]
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(backbone.image_vocab_size, (len(prompts), grid.positions), generator=generator).to(device)
    state, _ = backbone.start(prompts, sampling.guidance)
    first, source = [half] * len(prompts), SeededSource(0)
    h = backbone.forward(state, tokens[:, :half], [0] * len(prompts))[:, :, : grid.width]
    h = h if heads is None else heads.states(backbone, h)
    cells = h.shape[2]
    times: dict[int, list[float]] = {n: [] for n in lengths}
    alone: list[float] = []
    in_loop: list[float] = []

    def draft_row() -> None:
        assert isinstance(heads, OffsetHeads)
        predicted = heads(h, backbone.embed(tokens[:, :cells]), heads.offsets[-1])
        q = sampling.probabilities(heads.logits(backbone, predicted))
        source.draw(q, Where(range(len(prompts)), np.arange(cells), 0))

    for _ in range(repeats):
        for n in lengths:  # a forward follows one of its own length, as in decoding
            for _ in range(3):
                backbone.rollback(state, first)
                seconds = timed(partial(backbone.forward, state, tokens[:, half : half + n], first), device)
            times[n].append(seconds)
            if heads is not None and n == grid.width:
                in_loop.append(timed(draft_row, device))
                alone.append([timed(draft_row, device) for _ in range(3)][-1])
    cost = {n: median(t) for n, t in times.items()}
    if heads is None or not alone:
        return cost, None
    share = median(alone) / cost[grid.width]
    return cost, {"seconds": median(alone), "seconds_in_loop": median(in_loop), "share_of_forward": share}


def interpolate(cost: dict[int, float], length: float) -> float:
    """Seconds of a forward over `length` tokens, linear between the measured lengths."""
    known = sorted(cost)
    return float(np.interp(length, known, [cost[n] for n in known]))


@torch.inference_mode()
def accept_cost(device: torch.device, repeats: int = 9) -> dict[str, float]:
    """What testing and redrawing a large window costs apart from the forward, in softmaxes of the same tensor.

    B = 2 samples, L = 96 positions, V = 32,768 codes, fp32: `maximal` is the whole maximal-coupling step, `gumbel` its
    redraw by noise that is there; `top_p` and `top_k` are the sampling pipeline with that filter, its sort included.
    """
    B, L, V = 2, 96, 32768
    generator = torch.Generator().manual_seed(0)
    logits, before = (3 * torch.randn(B, L, V, generator=generator) for _ in range(2))
    logits, before = logits.to(device), (logits + before / 6).to(device)
    p, q, noise = logits.softmax(-1), before.softmax(-1), torch.rand(B, L, V, generator=generator).to(device)
    source, where = SeededSource(0), Where(range(B), np.arange(L), 0)
    y = source.draw(q, where)
    calls = {
        "softmax": lambda: logits.softmax(-1),
        "maximal": lambda: transport(y, q, p, source, where),
        "gumbel": lambda: gumbel_argmax(p, noise),
        "top_k": lambda: Sampling(top_k=1000).probabilities(logits[None]),
        "top_p": lambda: Sampling(top_p=0.9).probabilities(logits[None]),
    }
    seconds = {name: median([timed(call, device) for _ in range(repeats)]) for name, call in calls.items()}
    softmax = seconds.pop("softmax")
    return {"softmax_seconds": softmax} | {name: s / softmax for name, s in seconds.items()}
