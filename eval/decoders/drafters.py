"""Draft distributions for a window of positions, from either kind of heads.

A drafter says, for positions left to right, the distribution q of the next token from what lies above and to the left.
It never looks at a position itself or to its right: that is what makes q a valid proposal.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from draftgrid.eval.decoders.engine import Canvas, Sliding, in_step
from draftgrid.heads.chain import ChainHeads
from draftgrid.heads.chain_tables import chain_tables
from draftgrid.heads.distributions import at_least_fp32
from draftgrid.heads.grid import Offset
from draftgrid.heads.offsets import OffsetHeads


class Drafter(ABC):
    reach: int
    """Positions that may be opened at once: what lies further needs tokens that are only drafted in this window."""
    serial: bool
    """Whether q depends on the left token, so that positions are asked for one by one."""

    @abstractmethod
    def open(self, canvas: Canvas, first: Sequence[int], count: int) -> None:
        """Get ready for the positions first[b] .. first[b] + count - 1 of every sample."""

    @abstractmethod
    def q(self, columns: slice, left: Tensor) -> Tensor:
        """Draft distributions (B, K, V) of these of the opened columns.

        left (B, K + 1) are the tokens to their left: first the second token to the left of the first column.
        """


class ChainDrafter(Drafter):
    """Chain heads: the trunk for all opened positions at once, then one position after the other.

    The trunk of a position whose cells above are committed never changes again, so it is kept while the window moves.
    Where the cells up and to the right are still to be drawn, they count as missing, as they do at a row's end.

    Shapes: G guidance branches, N cells above that the trunk reads, r units of the late layer, D numbers a state, and
    V codes.
    """

    serial = True

    def __init__(self, canvas: Canvas, heads: ChainHeads) -> None:
        self.canvas, self.heads, self.tables = canvas, heads, chain_tables(heads, canvas.backbone)
        grid = canvas.grid
        self.reach = grid.width
        self.lasting = grid.width - max(x for _, x in heads.above)
        # (T, N) each: which cells stand above every position, and which of them are in the picture.
        self.around = grid.around(torch.arange(grid.positions, device=canvas.backbone.device), heads.above)
        self.no_left = canvas.backbone.image_vocab_size
        self.kept = Sliding(self._trunk)

    def _trunk(self, first: Sequence[int], count: int, near: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """What the tables add the left token's part to: (B, K, G, V + D), or (B, K, G, D), and (B, K, G, 2 r)."""
        canvas = self.canvas
        T = canvas.grid.positions
        if len(set(first)) == 1 and first[0] + count <= T:
            index, inside = (x[first[0] : first[0] + count] for x in self.around)  # (K, N)
            inside = inside & (index < self.first[0])
            h, e = canvas.hidden[:, :, index], canvas.backbone.embed(canvas.tokens[:, index])
        else:
            start = torch.tensor(first, device=canvas.tokens.device)[:, None]
            position = (start + torch.arange(count, device=start.device)).clamp_(max=T - 1)  # (B, K)
            index, inside = (x[position] for x in self.around)  # (B, K, N)
            inside = inside & (index < torch.tensor(self.first, device=start.device)[:, None, None])
            rows = torch.arange(len(first), device=start.device)[:, None, None]
            h, e = canvas.hidden[:, rows, index], canvas.backbone.embed(canvas.tokens[rows, index])
        cells = self.heads.squeeze(h, e)  # h (G, B, K, N, D), e (B, K, N, D) -> (G, B, K, N, cell)
        t, c = self.heads.look(cells, inside, near)  # (G, B, K, D), (G, B, K, 2 r)
        return self.tables.base(t).movedim(0, 2), c.movedim(0, 2)

    def _near(self, first: Sequence[int], count: int) -> tuple[Tensor, Tensor]:
        """The same for the first positions after the committed ones, which read the newest committed cell too."""
        canvas, W = self.canvas, self.canvas.grid.width
        newest = torch.tensor(first, device=canvas.tokens.device) - 1  # (B,)
        distance = torch.arange(1, count + 1, device=newest.device)
        distance = distance * (newest[:, None] % W + distance < W)  # (B, K), never across a row's end
        rows = torch.arange(len(first), device=newest.device)
        h, e = canvas.hidden[:, rows, newest], canvas.backbone.embed(canvas.tokens[rows, newest])  # (G, B, D), (B, D)
        return self._trunk(first, count, self.heads.newest(h[:, :, None], e[:, None], distance))

    def open(self, canvas: Canvas, first: Sequence[int], count: int) -> None:
        self.first = list(first)
        if self.first == canvas.committed:
            self.base, self.c = self.kept.take(first, count, self.lasting)
            if recent := min(self.heads.config.recent, count):
                both = zip(self._near(first, recent), (self.base, self.c), strict=True)
                self.base, self.c = (torch.cat([near, rest[:, recent:]], dim=1) for near, rest in both)
        else:
            self.base, self.c = self._trunk(first, count)
        columns = torch.arange(count, device=canvas.tokens.device)
        x = (torch.tensor(first, device=columns.device)[:, None] + columns) % canvas.grid.width
        self.beyond = [x < 1, x < 2]
        """(B, count): columns with no left token in their row, and with no second one."""

    def q(self, columns: slice, left: Tensor) -> Tensor:
        base, c = self.base[:, columns], self.c[:, columns]
        B, K, G, _ = c.shape
        u = c.flatten(0, 2)  # (B K G, 2 r)
        for table, beyond, back in zip(self.tables.left, self.beyond, (1, 2), strict=False):
            token = left[:, 2 - back : 2 - back + K].masked_fill(beyond[:, columns], self.no_left)  # (B, K)
            u = u + table.index_select(0, token[..., None].expand(-1, -1, G).reshape(-1))
        logits = self.tables.logits(base.flatten(0, 2), self.heads.gate(u))  # (B K G, V)
        return self.canvas.sampling.probabilities(logits.view(B, K, G, -1).movedim(2, 0))


class OffsetDrafter(Drafter):
    """Offset heads: the mean of what the head above (or two above) and a head to the right say, uniform if none does.

    Heads to the right read the newest committed cell; heads below read the row above, drafts included. Nothing here
    looks at left drafts, so all positions are drafted at once.
    """

    serial = False

    def __init__(self, canvas: Canvas, heads: OffsetHeads) -> None:
        self.canvas, self.heads = canvas, heads
        self.reach = canvas.grid.width

    def open(self, canvas: Canvas, first: Sequence[int], count: int) -> None:
        V = canvas.backbone.image_vocab_size
        dtype = at_least_fp32(canvas.hidden[:0]).dtype
        self.mean = canvas.hidden.new_full((len(first), count, V), 1 / V, dtype=dtype)  # (B, count, V)
        for rows, (f, n, known) in in_step(first, canvas.committed, canvas.known):
            runs = self._runs(canvas, f, min(f + count, canvas.grid.positions), n, known)
            if not runs:
                continue
            # M votes of all heads, run after run: states (G, R, M, D) -> q (R, M, V).
            states = torch.cat([canvas.predict(o, low, high, rows) for o, low, high in runs], dim=2)
            q = canvas.sampling.probabilities(self.heads.logits(canvas.backbone, states)).to(dtype)
            votes = [0] * count
            for vote, i in enumerate(i - f for _, low, high in runs for i in range(low, high)):
                # The running mean: the k-th vote has weight 1 / k, the first replaces the uniform.
                votes[i] += 1
                self.mean[rows, i].lerp_(q[:, vote], 1 / votes[i])

    def _runs(self, canvas: Canvas, first: int, end: int, n: int, known: int) -> list[tuple[Offset, int, int]]:
        """(offset, from, to): the positions each head drafts. n - 1 is the newest committed cell."""
        W, config = canvas.grid.width, self.heads.config
        x = (n - 1) % W
        runs = [((0, k), n - 1 + k, n + k) for k in range(1, min(config.right, W - 1 - x) + 1)]
        # The row above drafts where its states are known; further on the row above that.
        if config.down >= 1:
            runs.append(((1, 0), W, known + W))
        if config.down >= 2:
            runs.append(((2, 0), max(2 * W, known + W), known + 2 * W))
        cut = [(offset, max(low, first), min(high, end)) for offset, low, high in runs]
        return [run for run in cut if run[1] < run[2]]

    def q(self, columns: slice, left: Tensor) -> Tensor:
        return self.mean[:, columns]
