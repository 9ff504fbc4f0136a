"""Spatially Speculative Decoding (SSD, arXiv 2606.20543): draft a row from the row above, verify and correct r times.

Lossy: after r rounds the block is committed whatever happened. `stats.change_rate` says how much the last round still
changed; its expectation bounds the distance from the backbone's law. A round is one causal forward over the drafts;
every column keeps its token with min(1, p / record) or takes the residual, and p becomes its record (a new record each
round: keeping the heads' q instead makes more rounds worse).
"""

from torch import Tensor, cat

from eval.decoders.engine import Canvas, Policy
from eval.decoders.kernels import transport
from heads.grid import Offset


class SSD(Policy):
    """A block is one exact token and the drafts behind it: up to `right` cells in row 0, then `rows` rows at a time.

    The forward that reads a finished block once more (for its keys, values and states) also yields the next block's
    first token, so a block with drafts costs 1 + r forwards: (ceil(W / (right + 1)) + ceil((H - 1) / rows)) * (1 + r)
    in all, the prefill standing for the first block's; a block that is one token long, at a row's end, costs 1.
    `staged` verifies both rows `rounds` times, commits the first, and gives the second `staged` rounds more.
    """

    name = "ssd"
    exact = False
    needs_heads = True

    def __init__(self, rounds: int = 2, rows: int = 1, staged: int = 0) -> None:
        for name, value in (("rounds", rounds), ("rows", rows), ("staged", staged)):
            if not isinstance(value, int):
                raise ValueError(f"{name} is {value!r}; use a whole number")
        if rounds < 0:
            raise ValueError(f"rounds is {rounds}; use 0 (draft only) or more")
        if rows not in (1, 2):
            raise ValueError(f"rows is {rows}; a block has 1 or 2 rows")
        if staged < 0 or (staged and (rows != 2 or rounds == 0)):
            raise ValueError(
                f"staged is {staged}; it counts extra rounds of the second row, so it needs rows=2, rounds>=1"
            )
        self.rounds, self.rows, self.staged = rounds, rows, staged

    def begin(self, canvas: Canvas) -> None:
        assert canvas.heads is not None
        offsets = canvas.heads.offsets
        self.right = max((dx for dy, dx in offsets if dy == 0), default=0)
        self.down = max((dy for dy, dx in offsets if dx == 0), default=0)
        if self.rows > max(self.down, 1):
            raise ValueError(f"rows is {self.rows}, but the heads reach {self.down} row(s) down")
        self.stages: list[tuple[int, int]] = []  # (rounds, end): after so many rounds commit up to there
        # open: the block's first token was just drawn from fresh states, so the rest can be drafted
        self.open = False

    def _plan(self, canvas: Canvas) -> list[tuple[Offset, int, int]]:
        """The drafts behind the first token of a block: (offset, from, to) runs of positions."""
        W, n = canvas.backbone.grid.width, canvas.committed[0]
        y, x = (n - 1) // W, (n - 1) % W
        if y == 0 or not self.down:
            ahead = min(self.right, W - 1 - x)
            return [((0, k), n + k - 1, n + k) for k in range(1, ahead + 1)]
        rows = min(self.rows, canvas.backbone.grid.height - y)
        runs = [((r + 1, 0), max(n, (y + r) * W), (y + r + 1) * W) for r in range(rows)]
        return [(offset, low, high) for offset, low, high in runs if low < high]

    def draft(self, canvas: Canvas) -> None:
        if not self.open:
            return
        self.open = False
        self.runs = self._plan(canvas)
        if not self.runs:
            return
        start, end = self.runs[0][1], self.runs[-1][2]
        predicted = [canvas.predict(offset, low, high) for offset, low, high in self.runs]
        self.q = canvas.sampling.probabilities(canvas.backbone.logits(cat(predicted, dim=2)))
        canvas.tokens[:, start:end] = canvas.source.draw(self.q, canvas.where(start, end))
        first_row = self.runs[0][2]
        staged = self.staged and first_row < end and self.runs[0][0][0] > 0
        self.stages = [(self.rounds, first_row), (self.staged, end)] if staged else [(self.rounds, end)]
        self.round, self.end, self.tested = 0, end, False
        self._commit(canvas)

    def verify(self, canvas: Canvas, p: Tensor) -> None:
        n, B = canvas.committed[0], len(canvas.committed)
        if not self.stages:  # the block before was read once more: its cache is final, its last state gives a token
            canvas.tokens[:, n : n + 1] = canvas.source.draw(p[:, -1:], canvas.where(n, n + 1))
            canvas.cached, canvas.committed, canvas.ahead = [n] * B, [n + 1] * B, [0] * B
            self.open = True
            return
        y, where = canvas.tokens[:, n : self.end], canvas.where(n, self.end)
        y, kept = transport(y, self.q, p, canvas.source, where)
        canvas.tokens[:, n : self.end] = y
        self.q = p
        self.round += 1
        canvas.cached = [n - 1] * B
        if not self.tested:
            canvas.count_drafts(kept, self.runs, n)
            self.tested = True
        rounds, end = self.stages[0]
        if self.round == rounds:
            canvas.stats.changed[0] += int((~kept[:, : end - n]).sum())
            canvas.stats.changed[1] += B * (end - n)
        self._commit(canvas)

    def _commit(self, canvas: Canvas) -> None:
        """Commit the stage if its rounds are over, and say what the next forward feeds: all but the last draft."""
        B = len(canvas.committed)
        if self.stages[0][0] == self.round:
            end = self.stages.pop(0)[1]
            self.q = self.q[:, end - canvas.committed[0] :]
            canvas.committed = [end] * B
            self.round = 0
        canvas.ahead = [max(0, self.end - canvas.committed[0] - 1)] * B
