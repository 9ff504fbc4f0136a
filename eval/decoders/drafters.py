"""Draft distributions for a window of positions, from either kind of heads.

A drafter says, for positions left to right, the distribution q of the next token from what lies above and to the left.
It never looks at a position itself or to its right: that is what makes q a lawful record.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from eval.decoders.engine import Canvas, in_step
from heads.chain import ABOVE, ChainHeads
from heads.grid import Offset
from heads.mtp import OffsetHeads
from heads.objective import at_least_fp32


class Drafter(ABC):
    reach: int
    """Positions that may be opened at once: what lies further needs tokens that are only drafted in this window."""

    @abstractmethod
    def open(self, canvas: Canvas, first: Sequence[int], count: int) -> None:
        """Get ready for the positions first[b] .. first[b] + count - 1 of every sample."""

    @abstractmethod
    def parts(self) -> Iterator[slice]:
        """The opened positions' columns, in the pieces `q` gives them in."""

    @abstractmethod
    def q(self, part: slice, left: Tensor) -> Tensor:
        """(B, K, V): draft distributions of these columns. left (B,): newest token before the first of them."""


class ChainDrafter(Drafter):
    """Chain heads: the trunk once for all opened positions, then one position after the other."""

    def __init__(self, canvas: Canvas, heads: ChainHeads) -> None:
        self.canvas, self.heads, self.tables = canvas, heads, heads.tables(canvas.backbone)
        grid = canvas.grid
        self.reach = max(1, grid.width - 1)
        self.around = grid.around(torch.arange(grid.positions, device=canvas.backbone.device), ABOVE)
        self.no_left = canvas.backbone.image_vocab_size

    def open(self, canvas: Canvas, first: Sequence[int], count: int) -> None:
        assert canvas.hidden is not None
        W, T = canvas.grid.width, canvas.grid.positions
        G, B = canvas.hidden.shape[:2]
        if len(set(first)) == 1 and first[0] + count <= T:
            index, inside = (x[first[0] : first[0] + count] for x in self.around)
            h, e = canvas.hidden[:, :, index], canvas.backbone.embed(canvas.tokens[:, index])
        else:
            position = torch.tensor(first, device=canvas.tokens.device)[:, None] + torch.arange(
                count, device=canvas.tokens.device
            )
            index, inside = (x[position.clamp(max=T - 1)] for x in self.around)
            rows = torch.arange(B, device=index.device)[:, None, None]
            h, e = canvas.hidden[:, rows, index], canvas.backbone.embed(canvas.tokens[rows, index])
        t, c = self.heads.look(h, e, inside)
        # One row per branch and sample, one tensor per position: the loop below does nothing but its few products.
        self.base = self.tables.base(t).flatten(0, 1).unbind(1)
        self.c = c.flatten(0, 1).unbind(1)
        self.G, self.B = G, B
        edges = [[b for b, f in enumerate(first) if (f + s) % W == 0] for s in range(count)]
        self.edges = edges

    def parts(self) -> Iterator[slice]:
        return (slice(s, s + 1) for s in range(len(self.base)))

    def q(self, part: slice, left: Tensor) -> Tensor:
        s = part.start
        if self.edges[s]:
            left = left.clone()
            left[self.edges[s]] = self.no_left
        a = self.tables.left[left]
        if self.G > 1:
            a = a.repeat(self.G, 1)
        logits = self.tables.logits(self.base[s], self.heads.enter(self.c[s], a))
        return self.canvas.sampling.probabilities(logits.view(self.G, self.B, 1, -1))


class OffsetDrafter(Drafter):
    """Offset heads: the mean of what the head above (or two above) and a head to the right say, uniform if none does.

    Heads to the right read the newest committed cell; heads below read the row above, drafts included. Nothing here
    looks at left drafts, so all positions are drafted at once.
    """

    def __init__(self, canvas: Canvas, heads: OffsetHeads) -> None:
        self.canvas, self.heads = canvas, heads
        self.right = max((dx for dy, dx in heads.offsets if dy == 0), default=0)
        self.down = max((dy for dy, dx in heads.offsets if dx == 0), default=0)
        self.reach = canvas.grid.width

    def open(self, canvas: Canvas, first: Sequence[int], count: int) -> None:
        assert canvas.hidden is not None
        V = canvas.backbone.image_vocab_size
        found = []
        for rows, (f, n, known) in in_step(first, canvas.committed, canvas.known):
            R = len(canvas.samples[rows])
            mean = canvas.hidden.new_full((R, count, V), 1 / V, dtype=at_least_fp32(canvas.hidden[:0]).dtype)
            runs = self._runs(canvas, f, min(f + count, canvas.grid.positions), n, known)
            if runs:
                states = torch.cat([canvas.predict(o, low, high, rows) for o, low, high in runs], dim=2)
                q = canvas.sampling.probabilities(canvas.backbone.logits(states)).to(mean)
                votes = [0] * count
                at = 0
                for _, low, high in runs:
                    for i in range(low - f, high - f):
                        # The running mean: the k-th vote has weight 1 / k, the first replaces the uniform.
                        votes[i] += 1
                        mean[:, i].lerp_(q[:, at], 1 / votes[i])
                        at += 1
            found.append(mean)
        self.mean = torch.cat(found)

    def _runs(self, canvas: Canvas, first: int, end: int, n: int, known: int) -> list[tuple[Offset, int, int]]:
        """(offset, from, to): the positions each head has a say in. n - 1 is the newest committed cell."""
        W = canvas.grid.width
        x = (n - 1) % W
        runs = [((0, k), n - 1 + k, n + k) for k in range(1, min(self.right, W - 1 - x) + 1)]
        # The row above speaks where its states are known; further on the row above that.
        if self.down >= 1:
            runs.append(((1, 0), W, known + W))
        if self.down >= 2:
            runs.append(((2, 0), max(2 * W, known + W), known + 2 * W))
        cut = [(offset, max(low, first), min(high, end)) for offset, low, high in runs]
        return [run for run in cut if run[1] < run[2]]

    def parts(self) -> Iterator[slice]:
        yield slice(0, self.mean.shape[1])

    def q(self, part: slice, left: Tensor) -> Tensor:
        return self.mean[:, part]
