"""The Gumbel couplings by enumeration: with two codes a position's noise is one number, and it can be walked in boxes.

Of two exponential clocks the second rings first, weighted by p, exactly if c < p(1) for a uniform c of the position.
So a path is a list of choices and an interval of c per position; whenever the production decoder compares a p(1) inside
the interval, the path splits there. Nothing is sampled.
"""

from collections.abc import Callable, Iterator
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from draftgrid.eval.decoders import Policy, Sampling, jacobi, make_policy
from draftgrid.eval.decoders.coupled import CoupledSSD
from draftgrid.eval.decoders.engine import Canvas, run
from draftgrid.eval.decoders.jacobi import INITIAL, SCD
from draftgrid.eval.decoders.kernels import gumbel_argmax
from draftgrid.eval.decoders.randomness import Where
from draftgrid.heads.config import HeadsConfig
from draftgrid.heads.mtp import MTPHeads
from tests.tiny import (
    ArbitraryHeads,
    Path,
    Replay,
    TableBackbone,
    TwistedHeads,
    random_chain_heads,
    reversed_logits,
    total_variation,
    zero_at_the_mode,
)

pytestmark = pytest.mark.slow
PLAIN = Sampling()
Boxes = dict[int, tuple[float, float]]
"""Per position the interval its number lies in."""


class BoxedPath(Path):
    def __init__(self, choices: list[int], boxes: Boxes) -> None:
        super().__init__(choices)
        self.boxes, self.begun = dict(boxes), dict(boxes)
        self.split: list[tuple[list[int], Boxes]] = []

    def choose(self, options: list[tuple[int, float]]) -> int:
        value = super().choose(options)
        self.split += [(choices, dict(self.boxes)) for choices in self.open]
        self.open = []
        return value

    def number(self, position: int) -> float:
        """A number that stands for the box the path began with; every later comparison keeps it inside."""
        return sum(self.begun.get(position, (0.0, 1.0))) / 2

    def compare(self, position: int, p: float) -> None:
        low, high = self.boxes.get(position, (0.0, 1.0))
        if low < p < high:
            below = self.number(position) < p
            other = (p, high) if below else (low, p)
            # What fills up a batch that is not in step may be compared while old choices are still followed.
            choices = list(max(self.choices, self.taken, key=len))
            self.split.append((choices, {**self.boxes, position: other}))
            self.boxes[position] = (low, p) if below else (p, high)

    @property
    def chance(self) -> float:
        chance = self.weight
        for low, high in self.boxes.values():
            chance *= high - low
        return chance


class BoxedReplay(Replay):
    """Noise that stands for a path's boxes. Its scale, which no argmax sees, says whose it is, so that `argmax`, put in
    the place of the production function around it, knows which number is compared."""

    paths: list[BoxedPath]  # type: ignore[assignment]

    def __init__(self, paths: list[tuple[list[int], Boxes]], positions: int, undrafted: int | None) -> None:
        super().__init__([], undrafted)
        self.paths = [BoxedPath(list(choices), boxes) for choices, boxes in paths]
        self.positions = positions

    def gumbel(self, like: Tensor, where: Where) -> Tensor:
        assert like.shape[-1] == 2 and like.dtype == torch.float64
        first = torch.as_tensor(where.position).expand(like.shape[:2]).tolist()
        noise = []
        for sample, row in zip(where.sample, first, strict=True):
            for position in row:
                c, owner = self.paths[sample].number(position), 1.0 + sample * 1000 + position
                noise.append([owner, owner * (1 - c) / c])
        return torch.tensor(noise, dtype=torch.float64).view(like.shape)

    def argmax(self, p: Tensor, noise: Tensor) -> Tensor:
        p = p.expand_as(noise)
        for owner, chance in zip(noise[..., 0].flatten().tolist(), p[..., 1].flatten().tolist(), strict=True):
            sample, position = divmod(round(owner) - 1, 1000)
            if position < self.positions:
                self.paths[sample].compare(position, chance)
        return gumbel_argmax(p, noise)


def walk(
    backbone: TableBackbone, make: Callable[[], Policy], heads: MTPHeads | None = None, sampling: Sampling = PLAIN
) -> Iterator[tuple[tuple[int, ...], float]]:
    """Every path of a decoder with Gumbel noise, as (picture, chance)."""
    T = backbone.grid.positions
    pending: list[tuple[list[int], Boxes]] = [([], {})]
    while pending:
        policy = make()
        undrafted = T - 1 if isinstance(policy, CoupledSSD) else None
        source = BoxedReplay([pending.pop() for _ in range(min(400, len(pending)))], T, undrafted)
        with (
            patch("draftgrid.eval.decoders.jacobi.gumbel_argmax", source.argmax),
            patch("draftgrid.eval.decoders.coupled.gumbel_argmax", source.argmax),
        ):
            result = run(backbone, ["x"] * len(source.paths), policy, sampling, heads, source=source)
        for path, picture in zip(source.paths, result.tokens.flatten(1).tolist(), strict=True):
            pending += path.split
            yield tuple(picture), path.chance


def distance(
    backbone: TableBackbone, decoder: str, heads: MTPHeads | None = None, sampling: Sampling = PLAIN, **settings: object
) -> float:
    return total_variation(
        walk(backbone, lambda: make_policy(decoder, **settings), heads, sampling), backbone.law(sampling)
    )


@pytest.mark.parametrize("initial", INITIAL)
def test_scd_and_the_fixed_point_are_lossless_with_every_initial_token(initial: str) -> None:
    backbone = TableBackbone((1, 5), 2) if initial != "above" else TableBackbone((2, 2), 2)
    assert distance(backbone, "scd", window=3, initial=initial, coupling="gumbel") < 1e-10
    assert distance(backbone, "gumbel_fixed_point", window=4, initial=initial) < 1e-10


@pytest.mark.parametrize("window", [1, 2, 9])
def test_shortest_windows_and_one_longer_than_the_picture_are_lossless(window: int) -> None:
    backbone = TableBackbone((1, 5), 2)
    assert distance(backbone, "scd", window=window, coupling="gumbel") < 1e-10


@pytest.mark.parametrize("sweeps,grid,window", [(0, (2, 3), 4), (1, (3, 2), 3), (2, (2, 3), 4), (5, (3, 2), 9)])
@pytest.mark.parametrize("kind", ["offsets", "chain"])
def test_coupled_ssd_is_lossless_for_any_number_of_sweeps(
    kind: str, sweeps: int, grid: tuple[int, int], window: int
) -> None:
    backbone = TableBackbone(grid, 2, normed=kind == "chain")
    settings = {"coupling": "gumbel", "window": window, "sweeps": sweeps, "uniform": 0.05 * (sweeps == 1)}
    assert distance(backbone, "ssd_coupled", heads_of(kind, backbone), **settings) < 1e-10


@pytest.mark.parametrize("refresh,decay", [(0.0, 1.0), (0.5, 0.3), (1.0, 1.0)])
@pytest.mark.parametrize("kind", ["offsets", "chain"])
def test_coupled_ssd_is_lossless_for_any_refresh(kind: str, refresh: float, decay: float) -> None:
    backbone = TableBackbone((3, 2), 2, normed=kind == "chain")
    settings = {"coupling": "gumbel", "window": 3, "refresh": refresh, "decay": decay}
    sampling = PLAIN if refresh == 0.5 else Sampling(temperature=0.7, top_p=0.9)
    assert distance(backbone, "ssd_coupled", heads_of(kind, backbone), sampling, **settings) < 1e-10


@pytest.mark.parametrize("twist", [reversed_logits, zero_at_the_mode])
def test_the_worst_heads_cost_steps_and_not_the_law(twist: Callable[[Tensor], Tensor]) -> None:
    backbone = TableBackbone((3, 2), 2)
    heads = TwistedHeads(backbone, HeadsConfig(right=1, down=1), twist)
    assert distance(backbone, "ssd_coupled", heads, coupling="gumbel", window=3) < 1e-10


def heads_of(kind: str, backbone: TableBackbone) -> MTPHeads:
    if kind == "chain":
        return random_chain_heads(backbone)
    config = HeadsConfig(right=backbone.grid.width - 1, down=min(1, backbone.grid.height - 1))
    return ArbitraryHeads(backbone, config)


@pytest.mark.parametrize("codes", [2048, 4096, 5003, 32768])
def test_a_large_vocabulary_is_searched_in_blocks_with_the_plain_argmax(codes: int) -> None:
    generator = torch.Generator().manual_seed(0)
    p = torch.rand(3, 4, codes, generator=generator) * (torch.rand(3, 4, codes, generator=generator) < 0.1)
    noise = 1 / torch.empty(3, 4, codes).exponential_(generator=generator)
    assert torch.equal(gumbel_argmax(p, noise), (p.log() + noise.log()).argmax(-1))


class TestMutants:
    def far(self, mutant: Callable[[], Policy]) -> float:
        backbone = TableBackbone((1, 5), 2)
        return total_variation(walk(backbone, mutant, heads_of("offsets", backbone)), backbone.law(PLAIN))

    def test_the_noise_again_where_the_run_ends_is_seen(self) -> None:
        """The drafts tested there came from that noise; only fresh numbers may decide about them."""

        class Again(SCD):
            def move(self, canvas: Canvas, y: Tensor, kept: Tensor, beyond: Tensor, inside: Tensor) -> Tensor:
                tokens = super().move(canvas, y, kept, beyond, inside)
                (noise,) = self.noise.take(self.n, y.shape[1])
                return torch.where(beyond == 0, jacobi.gumbel_argmax(self.p, noise), tokens)

        assert self.far(lambda: Again(4, coupling="gumbel")) > 1e-3

    def test_a_wrong_record_is_seen(self) -> None:
        class Uniform(SCD):
            def draft(self, canvas: Canvas) -> None:
                super().draft(canvas)
                self.proposal = torch.where(self.proposal.sum(-1, keepdim=True) > 0, 0.5, self.proposal)

        assert self.far(lambda: Uniform(4, coupling="gumbel")) > 1e-3

    def test_one_number_for_two_positions_is_seen(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The noise table that is not moved on: positions 1 and 2 share their numbers."""
        honest = BoxedReplay.gumbel

        def shared(self: BoxedReplay, like: Tensor, where: Where) -> Tensor:
            position = torch.as_tensor(where.position)
            return honest(self, like, Where(where.sample, torch.where(position == 2, 1, position).numpy(), where.visit))

        monkeypatch.setattr(BoxedReplay, "gumbel", shared)
        assert self.far(lambda: SCD(4, coupling="gumbel")) > 1e-3
        backbone = TableBackbone((1, 5), 2)
        assert distance(backbone, "gumbel_fixed_point", window=4) > 1e-3
