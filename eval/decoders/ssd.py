"""Spatially Speculative Decoding (SSD, arXiv 2606.20543): draft a row from the row above, verify and correct r times.

Lossy: after r rounds a block is committed whatever happened. `stats.change_rate` says how much the last round still
changed; its expectation bounds the distance from the backbone's distribution. A round is one causal forward over the
drafts; every column keeps its token with min(1, p / proposal) or takes the residual, and p becomes its proposal (a new
one each round: keeping the heads' q instead makes more rounds worse).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from draftgrid.common.settings import whole
from draftgrid.eval.decoders.engine import Canvas, Policy
from draftgrid.eval.decoders.kernels import transport
from draftgrid.heads.grid import Offset, offset_name
from draftgrid.heads.offsets import OffsetHeads

Run = tuple[Offset, int, int]
"""(offset, from, to): positions drafted by one head."""


@dataclass
class Segment:
    """Positions up to `end` that are committed together, and what is still to be done for them."""

    runs: list[Run]
    end: int
    left: int
    """Rounds left."""
    tested: bool = False


class SSD(Policy):
    """A block is a token drawn from p and drafts after it: up to `right` cells in row 0, then `rows` rows at a time.

    A block costs 1 + `rounds` forwards: (ceil(W / (right + 1)) + ceil((H - 1) / rows)) * (1 + rounds) in all, prefill
    counted. The one beyond its rounds reads the finished block once more for its keys, values and states, and yields
    the next block's first token. `staged` verifies both rows `rounds` times, commits the first, and gives the second
    `staged` rounds more.

    `rows_in_flight` > 1 is pipelined SSD: the next block is drafted from this one's unfinished states and tokens, so
    that a forward carries a band of blocks, each some rounds older than the next: about (1 + rounds) / rows_in_flight
    forwards a block. Every block still gets its rounds; what it loses is that it was drafted from, and first verified
    under, a row that was still changing.
    """

    name = "ssd"
    exact = False
    drafts_with = ("offsets",)

    def __init__(self, rounds: int = 2, rows: int = 1, staged: int = 0, rows_in_flight: int = 1) -> None:
        self.rounds, self.rows = whole("rounds", rounds, 0), whole("rows", rows, 1)
        self.staged, self.in_flight = whole("staged", staged, 0), whole("rows_in_flight", rows_in_flight, 1)
        if rows > 2:
            raise ValueError(f"rows is {rows}; a block has 1 or 2 rows")
        if staged and (rows != 2 or rounds == 0):
            raise ValueError(f"staged is {staged}; it adds rounds to the second row, so it needs rows=2 and rounds>=1")
        if rows_in_flight > 1 and (rows != 1 or rows_in_flight > rounds + 1):
            right = f"with rows=1 and rounds={rounds} use 1 to {rounds + 1}, a row's forwards, and with rows=2 use 1"
            raise ValueError(f"rows_in_flight is {rows_in_flight}; {right}")

    def begin(self, canvas: Canvas) -> None:
        assert isinstance(canvas.heads, OffsetHeads)
        self.right, self.down = canvas.heads.config.right, canvas.heads.config.down
        if self.rows > max(self.down, 1):
            raise ValueError(f"rows is {self.rows}, but the heads reach {self.down} row(s) down")
        self.parts: list[Segment] = []
        self.q = torch.empty(0)
        """(B, K, V): proposals of the positions that are drafted and not committed."""
        self.end = 0  # drafted so far

    def verify(self, canvas: Canvas, p: Tensor) -> None:
        """A round for every position in flight; p may have one column more, for the next block's first token."""
        n, self.read = canvas.committed[0], canvas.committed[0]
        self.p = p
        count = self.end - n
        if not count:
            return
        p = p[:, :count]
        y, kept = transport(canvas.tokens[:, n : self.end], self.q, p, canvas.source, canvas.where([n] * len(p), count))
        canvas.tokens[:, n : self.end], self.q = y, p
        start = n
        for part in self.parts:
            part.left -= 1
            if not part.tested:
                part.tested = True
                for offset, low, high in part.runs:
                    canvas.stats.count_drafts(offset_name(offset), kept[:, low - n : high - n], low)
            if part.left == 0:
                canvas.stats.count_changed(kept[:, start - n : part.end - n])
            start = part.end

    def draft(self, canvas: Canvas) -> None:
        T = canvas.grid.positions
        self._commit(canvas)
        # In flight in the coming forward: what is not committed, and what is but has not been read since.
        unread = canvas.committed[0] > self.read and self.end > self.read
        if self.end < T and len(self.parts) + unread < self.in_flight and self.p.shape[1] > self.end - self.read:
            self._enter(canvas)
            self._commit(canvas)
        n = canvas.committed[0]
        # The last draft is fed only if its successor's p is wanted.
        last = self.in_flight > 1 and self.end < T
        canvas.ahead = [max(0, self.end - n - (not last))] * len(canvas.committed)
        canvas.cached = [max(0, min(self.read, n - 1))] * len(canvas.committed)

    def _enter(self, canvas: Canvas) -> None:
        """Draft the next block: its first token from p, the rest by the heads."""
        start, B = self.end, len(canvas.committed)
        q = self.p[:, -1:]
        canvas.tokens[:, start : start + 1] = canvas.source.draw(q, canvas.where([start] * B, 1))
        runs = self._plan(canvas, start)
        self.end = runs[-1][2] if runs else start + 1
        drafted = q[:, :0]
        if runs:
            assert canvas.heads is not None
            predicted = torch.cat([canvas.predict(*run) for run in runs], dim=2)
            drafted = canvas.sampling.probabilities(canvas.heads.logits(canvas.backbone, predicted))
            where = canvas.where([start + 1] * B, self.end - start - 1)
            canvas.tokens[:, start + 1 : self.end] = canvas.source.draw(drafted, where)
        if canvas.committed[0] == start:  # everything before it is final and read: the token is exact
            canvas.committed, self.q = [start + 1] * B, drafted
        else:
            self.q = torch.cat([self.q, q, drafted], dim=1)
        if not runs and canvas.committed[0] == self.end:
            return
        middle = runs[0][2] if self.staged and len(runs) > 1 and runs[0][0][0] else self.end
        self.parts.append(Segment([r for r in runs if r[2] <= middle], middle, self.rounds))
        if middle < self.end:
            self.parts.append(Segment(runs[1:], self.end, self.rounds + self.staged))

    def _plan(self, canvas: Canvas, start: int) -> list[Run]:
        """The drafts after the first token of the block at `start`."""
        W, first = canvas.grid.width, start + 1
        y, x = start // W, start % W
        if y == 0 or not self.down:
            ahead = min(self.right, W - 1 - x)
            return [((0, k), start + k, start + k + 1) for k in range(1, ahead + 1)]
        rows = min(self.rows, canvas.grid.height - y)
        runs = [((r + 1, 0), max(first, (y + r) * W), (y + r + 1) * W) for r in range(rows)]
        return [(offset, low, high) for offset, low, high in runs if low < high]

    def _commit(self, canvas: Canvas) -> None:
        while self.parts and self.parts[0].left == 0:
            end = self.parts.pop(0).end
            self.q = self.q[:, end - canvas.committed[0] :]
            canvas.committed = [end] * len(canvas.committed)
