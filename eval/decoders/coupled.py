"""Coupled SSD: heads draft, SCD's coupling keeps the law exactly the backbone's, whatever the heads are.

The heads' q is a position's birth record; then the window goes on as in SCD. What trained heads add is the refresh: to
the right of the run's end p was computed under a left neighbour that has just changed, so a position does not move to p
but to r = (1 - w) p + w q, q the heads' fresh word with the new left token. That is a transport like any other as long
as w looks only to the left; positions that are committed always go by p itself.
"""

import torch
from torch import Tensor

from eval.decoders.drafters import ChainDrafter, Drafter, OffsetDrafter
from eval.decoders.engine import Canvas, in_step
from eval.decoders.jacobi import COUPLINGS, SJD, Noise
from eval.decoders.kernels import gumbel_argmax, keep, redraw
from eval.decoders.settings import number, one_of
from heads.chain import ChainHeads
from heads.mtp import OffsetHeads


class CoupledSSD(SJD):
    """Feeds `window` tokens a forward. The weight of q at the k-th position right of the run's end is
    refresh * decay^(k - 1); a birth is drawn from q mixed with `uniform` parts of the uniform distribution."""

    name = "ssd_coupled"
    drafts_with = ("chain", "offsets")

    def __init__(
        self,
        window: int = 16,
        coupling: str = "maximal",
        refresh: float = 0.9,
        decay: float = 0.7,
        uniform: float = 0.05,
    ) -> None:
        super().__init__(window)
        self.coupling = one_of("coupling", coupling, COUPLINGS)
        self.refresh, self.decay = number("refresh", refresh, 0, 1), number("decay", decay, 0, 1)
        self.uniform = number("uniform", uniform, 0, 1)
        self.noise = Noise()
        self.birth = "heads"

    def begin(self, canvas: Canvas) -> None:
        if isinstance(canvas.heads, ChainHeads):
            self.drafter: Drafter = ChainDrafter(canvas, canvas.heads)
        else:
            assert isinstance(canvas.heads, OffsetHeads)
            self.drafter = OffsetDrafter(canvas, canvas.heads)
        weights = self.refresh * self.decay ** torch.arange(self.window, dtype=torch.float64)
        self.weights = weights.to(canvas.backbone.device)[:, None]

    def move(self, canvas: Canvas, y: Tensor, kept: Tensor, beyond: Tensor, inside: Tensor) -> Tensor:
        """The residual where the run ends. Right of it nothing moves yet: `draft` does that, left to right."""
        assert self.record is not None
        where = canvas.where(self.n, y.shape[1])
        weights = (self.p - self.record).clamp_min_(0)
        return redraw(y, beyond != 0, weights, canvas.source, where, inside)[0]

    def draft(self, canvas: Canvas) -> None:
        n, V = canvas.committed, self.p.shape[-1]
        a = canvas.ahead = self.lengths(canvas)
        self.fresh = carried = self.carried(canvas)
        B, A = len(n), max(a)
        assert self.record is not None
        old, self.record = self.record, self.p.new_zeros(B, A + 1, V)
        if not A:
            return
        # Per column: the old token and record, where both go on to (births: the uniform), and q's weight.
        q_old = self.p.new_zeros(B, A, V)
        p = self.p.new_full((B, A, V), 1 / V)
        w = self.p.new_full((B, A, 1), 1 - self.uniform)
        for rows, (m, new, c) in in_step(self.n, n, carried):
            q_old[rows, :c], p[rows, :c] = old[rows, new - m : new - m + c], self.p[rows, new - m : new - m + c]
            w[rows, :c] = self.weights[:c]
        y = canvas.window(n, A).clone()
        known = torch.arange(A, device=y.device) < torch.tensor(carried, device=y.device)[:, None]
        where = canvas.where(n, A)
        noise = self.noise.take(canvas, n, A + 1, p) if self.coupling == "gumbel" else None
        left = canvas.window([m - 1 for m in n], 1)[:, 0]
        for low in range(0, A, self.drafter.reach):
            high = min(low + self.drafter.reach, A)
            self.drafter.open(canvas, [m + low for m in n], high - low)
            for part in self.drafter.parts():
                here = slice(part.start + low, part.stop + low)
                r = torch.lerp(p[:, here], self.drafter.q(part, left), w[:, here])
                if noise is not None:
                    moved = gumbel_argmax(r, noise[:, here])
                elif here.start >= max(carried):
                    moved = canvas.source.draw(r, where.at(here))
                else:
                    kept = keep(y[:, here], q_old[:, here], r, canvas.source, where.at(here)) & known[:, here]
                    moved, _ = redraw(
                        y[:, here], kept, (r - q_old[:, here]).clamp_min_(0), canvas.source, where.at(here)
                    )
                self.record[:, here], y[:, here], left = r, moved, moved[:, -1]
            for rows, (m, d) in in_step(n, a):
                canvas.tokens[rows, m + low : m + min(high, d)] = y[rows, low : min(high, d)]
        for rows, (d,) in in_step(a):
            self.record[rows, d:] = 0
