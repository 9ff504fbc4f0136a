"""What drafting costs against a forward of the backbone, and how much faster that should make decoding.

Weights read and FLOPs are counted by running backbone and heads on tensors without data (`meter`); a call is taken to
last as long as the longer of reading and computing on the stated machine. All speed-ups are estimates.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from draftgrid.heads.backbones.base import Backbone
from draftgrid.heads.backbones.cache import RaggedCache
from draftgrid.heads.grid import TokenGrid
from draftgrid.heads.mtp import MTPHeads
from draftgrid.recipes.launch.schema import AssumeConfig
from draftgrid.recipes.plan.meter import Meter, fakes, make_fake

SSD = ((1, 1, 1), (1, 2, 1), (1, 2, 2), (2, 1, 1), (2, 2, 1))
"""(rows, rounds, rows_in_flight) that are planned for."""


@dataclass(frozen=True)
class Work:
    """Weights read (each once, bf16) and FLOPs of one call."""

    bytes: float
    flops: float

    def seconds(self, a: AssumeConfig) -> float:
        """The longer of reading and computing: a roofline."""
        return max(self.bytes / a.bandwidth, self.flops / (a.flops * a.utilisation))


@dataclass(frozen=True)
class Decoding:
    """Costs of decoding one picture in bf16 with `branches` guidance branches."""

    grid: TokenGrid
    branches: int
    trunk: Work
    """Over one token, without attention to the cache."""
    lm_head: Work
    """Final norm and image rows of the LM head, at one position."""
    heads: dict[str, Work]
    """Each head at one position, without the LM head."""
    common: float
    """Bytes of the weights that all heads read."""
    attention: float
    """FLOPs of one token's attention to one other, all layers."""
    cache: float
    """Bytes of keys and values of one token, all layers."""
    serial: float
    """Bytes and half the FLOPs of what a chain head does for each position: all of a head that is not linear."""

    def forward(self, length: int) -> Work:
        """A forward over `length` tokens with half of the picture in the cache: the mean over a picture."""
        past = self.grid.slots / 2
        flops = length * (self.trunk.flops + self.lm_head.flops + self.attention * past)
        read = self.trunk.bytes + self.lm_head.bytes + self.branches * self.cache * past
        return Work(read, self.branches * flops)

    def draft(self, names: list[str], positions: int) -> Work:
        """These heads at so many positions in all, and the LM head at each."""
        per = sum(self.heads[n].flops for n in names) / len(names)
        read = sum(self.heads[n].bytes for n in names) - (len(names) - 1) * self.common
        read += self.lm_head.bytes + positions * self.serial
        return Work(read, self.branches * positions * (per + self.lm_head.flops + self.serial))


def count_decoding(backbone: Backbone, heads: MTPHeads, branches: int) -> Decoding:
    """Run trunk, LM head and heads once on fake bf16 weights and count. Backbone and heads are left with these."""
    mode = fakes()
    make_fake(backbone, torch.bfloat16, mode)
    make_fake(heads, torch.bfloat16, mode)
    D, V, grid = backbone.hidden_size, backbone.image_vocab_size, backbone.grid
    with mode:
        one = torch.empty(1, 1, D, dtype=torch.bfloat16)
        picture = torch.empty(1, grid.positions, D, dtype=torch.bfloat16)

    def work(call: Any, module: nn.Module, times: int = 1) -> Work:
        with Meter() as meter, torch.no_grad():
            call()
        return Work(2 * meter.read(module.parameters()), meter.flops / times)

    pairs = heads.train_pairs(grid)

    def draft(*names: str) -> Work:
        positions = sum(len(pairs[n][1]) for n in names)
        return work(lambda: [heads.predict(picture, picture, n) for n in names], heads, positions)

    each = {name: draft(name) for name in pairs}
    two = list(pairs)[:2]
    lm_head = work(lambda: backbone.logits(one), backbone)
    rank = getattr(heads, "rank", 0)
    serial = 2 * rank * (V + D) if backbone.linear_head or not rank else 2 * rank * D + lm_head.bytes

    def cached(place: int) -> tuple[Work, RaggedCache]:
        """One token at a place of the cache."""
        cache = RaggedCache(backbone.num_layers, place + 1)
        positions = cache.aim([place], 1, torch.device("cpu"))
        return work(lambda: backbone.trunk(one, positions, None, cache), backbone), cache

    (near, cache), (far, _) = cached(0), cached(grid.width)
    kept = [layer.keys.shape for layer in cache.layers]  # type: ignore[union-attr]
    return Decoding(
        grid,
        branches,
        trunk=work(lambda: backbone.trunk(one, torch.zeros(1, 1, dtype=torch.long), None, None), backbone),
        lm_head=lm_head,
        heads=each,
        common=sum(each[n].bytes for n in two) - draft(*two).bytes,
        attention=(far.flops - near.flops) / grid.width,
        cache=2 * sum(2 * heads * head_dim for _, heads, _, head_dim in kept),
        serial=serial,
    )


def ssd_blocks(grid: TokenGrid, right: int, down: int, rows: int) -> list[int]:
    """Cells of each block SSD commits: right + 1 in row 0, `rows` rows below it; without heads down as in row 0."""
    H, W = grid.height, grid.width
    row = [min(right + 1, W - x) for x in range(0, W, right + 1)]
    return row + [W * min(rows, H - y) for y in range(1, H, rows)] if down else row * H


def ssd_steps(blocks: Sequence[int], rounds: int, rows_in_flight: int = 1) -> int:
    """Forwards of SSD, prefill counted. A forward begins at most one block; the block is verified in `rounds` more and
    read in a last one, which may begin the next. A cell alone with nothing else in flight is drawn from p itself."""
    begun, committed = 0, [0] * rows_in_flight
    for cells in blocks:
        begun = max(begun, committed[-rows_in_flight]) + 1
        drafted = cells > 1 or committed[-1] > begun
        committed.append(begun + rounds * drafted)
    return committed[-1]


def tokens_per_forward(acceptance: float, drafts: int) -> float:
    """Expected tokens a forward commits if each of `drafts` in a row is accepted with that chance, the first rejected
    one is redrawn, and one more comes after all: 1 + a + ... + a^k (arXiv 2211.17192)."""
    return sum(acceptance**i for i in range(drafts + 1))


@dataclass(frozen=True)
class Speed:
    decoder: str
    steps: float
    speedup: float
    drafting: float
    """Seconds of drafting over seconds of the forwards."""


def speeds(cost: Decoding, a: AssumeConfig) -> list[Speed]:
    """Expected steps and speed-up over AR at batch 1 on the stated machine."""
    grid, names, found = cost.grid, list(cost.heads), []
    T, W = grid.positions, grid.width
    ar = T * cost.forward(1).seconds(a)
    right, down = ([n for n in names if n.startswith(kind) and n[len(kind) :].isdigit()] for kind in ("right", "down"))

    def add(name: str, steps: float, length: int, drafts: float, draft: Work) -> None:
        forward, drafting = steps * cost.forward(length).seconds(a), drafts * draft.seconds(a)
        found.append(Speed(name, steps, ar / (forward + drafting), drafting / forward))

    for rows, rounds, flight in SSD if right or down else ():
        if rows > max(len(down), 1):
            continue
        name = f"ssd, {rows} row{'s' * (rows > 1)}, {rounds} round{'s' * (rounds > 1)}"
        name += f", {flight} in flight" if flight > 1 else ""
        blocks = ssd_blocks(grid, len(right), len(down), rows)
        draft = cost.draft(down[:rows], rows * W) if down else cost.draft(right, len(right))
        add(name, ssd_steps(blocks, rounds, flight), flight * max(blocks), len(blocks), draft)
    for chance in a.acceptance:
        if right:
            steps = T / tokens_per_forward(chance, len(right))
            add(f"mtp1d, acceptance {chance:g}", steps, len(right) + 1, steps, cost.draft(right, len(right)))
        steps = T / tokens_per_forward(chance, a.window - 1)
        name = f"ssd_coupled, window {a.window}, acceptance {chance:g}"
        add(name, steps, a.window, steps, cost.draft(names, a.window))
    return found
