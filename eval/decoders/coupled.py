"""Coupled SSD: heads draft, SCD's coupling keeps the distribution exactly the backbone's, whatever the heads are.

The heads' q is a position's first proposal; then the window continues as in SCD. What trained heads add is the refresh:
right of the run's end p was computed under tokens some of which have just changed, so a position does not move to p but
to r = (1 - w) p + w q, q the heads' fresh word with the new left token. That is a transport like any other as long as w
looks only to the left; positions that are committed always go by p itself.
"""

import torch
from torch import Tensor

from draftgrid.common.settings import number, one_of, whole
from draftgrid.eval.decoders.drafters import ChainDrafter, Drafter, OffsetDrafter
from draftgrid.eval.decoders.engine import Canvas, in_step
from draftgrid.eval.decoders.jacobi import COUPLINGS, SJD, gumbel_noise
from draftgrid.eval.decoders.kernels import gumbel_argmax, keep, redraw
from draftgrid.eval.decoders.randomness import Where
from draftgrid.heads.chain import ChainHeads
from draftgrid.heads.offsets import OffsetHeads


class CoupledSSD(SJD):
    """Feeds `window` tokens a forward, all but one of them drafts.

    The weight of q is `refresh` right of a token that has changed since p was computed, and `decay` times as much with
    every token further right: the run's end has changed, and the further back the last change, the better p still is.
    An initial token is drawn from q mixed with `uniform` parts of the uniform distribution.

    Positions are drawn from left to right, each q with its new left token. With the Gumbel coupling those that had a
    token move together instead, `sweeps` times (0: one by one), each sweep with the left tokens of the one before. The
    last sweep's r is the proposal of what is drawn from it, and looks only to the left: exact for any number of sweeps.
    """

    name = "ssd_coupled"
    drafts_with = ("chain", "offsets")

    def __init__(
        self,
        window: int = 16,
        coupling: str = "gumbel",
        refresh: float = 1.0,
        decay: float = 0.5,
        uniform: float = 0.0,
        sweeps: int = 2,
    ) -> None:
        super().__init__(window)
        self.coupling = one_of("coupling", coupling, COUPLINGS)
        self.refresh, self.decay = number("refresh", refresh, 0, 1), number("decay", decay, 0, 1)
        self.uniform, self.sweeps = number("uniform", uniform, 0, 1), whole("sweeps", sweeps, 0)
        self.initial = "heads"

    def begin(self, canvas: Canvas) -> None:
        if isinstance(canvas.heads, ChainHeads):
            self.drafter: Drafter = ChainDrafter(canvas, canvas.heads)
        else:
            assert isinstance(canvas.heads, OffsetHeads)
            self.drafter = OffsetDrafter(canvas, canvas.heads)
        self.noise = gumbel_noise(canvas)
        self.columns = torch.arange(self.window, device=canvas.tokens.device)
        weights = [self.refresh * self.decay**k for k in range(self.window)]
        self.weights = torch.tensor(weights, device=self.columns.device)

    def move(self, canvas: Canvas, y: Tensor, kept: Tensor, beyond: Tensor, inside: Tensor) -> Tensor:
        """The residual where the run ends. Right of it nothing moves yet: `draft` does that."""
        assert self.proposal is not None
        where = canvas.where(self.n, y.shape[1])
        weights = (self.p - self.proposal).clamp_min_(0)
        return redraw(y, beyond != 0, weights, canvas.source, where, inside)[0]

    def draft(self, canvas: Canvas) -> None:
        n, V = canvas.committed, self.p.shape[-1]
        a = canvas.ahead = self.lengths(canvas)
        self.fresh = carried = self.carried(canvas)
        B, A = len(n), max(a)
        old, self.proposal = self.proposal, self.p.new_zeros(B, A + 1, V)
        if not A:
            return
        assert old is not None
        # Per column: p of what had a token, and its old proposal or its noise.
        self.target = self.p.new_zeros(B, max(carried), V)
        self.aside = self.noise.take(n, A)[0] if self.coupling == "gumbel" else self.p.new_zeros(B, A, V)
        for rows, (m, new, c) in in_step(self.n, n, carried):
            last = slice(new - m, new - m + c)
            self.target[rows, :c] = self.p[rows, last]
            if self.coupling == "maximal":
                self.aside[rows, :c] = old[rows, last]
        self.before = canvas.window(n, A).clone()
        second = canvas.window([max(m - 2, 0) for m in n], 1)
        # Columns s and s + 1: the two tokens to the left of draft s.
        self.y = torch.cat([second, canvas.window([m - 1 for m in n], A + 1)], dim=1)
        for low in range(0, A, self.drafter.reach):
            high = min(low + self.drafter.reach, A)
            self.drafter.open(canvas, [m + low for m in n], high - low)
            sweeps = self.sweeps if self.coupling == "gumbel" else 0
            for i, here in enumerate(self._pieces(low, min(high, max(carried)), sweeps)):
                weights = self._weights(here) if i or low else self.weights[here, None]  # at first only the run's end
                self._move(canvas, here, slice(here.start - low, here.stop - low), weights)
            for here in self._pieces(max(low, min(carried)), high, 0):
                self._bear(canvas, here, slice(here.start - low, here.stop - low))
            for rows, (m, d) in in_step(n, a):
                canvas.tokens[rows, m : m + min(d, high)] = self.y[rows, 2 : 2 + min(d, high)]
        if len(set(a)) > 1:
            for b, d in enumerate(a):
                self.proposal[b, d:] = 0

    def _pieces(self, low: int, high: int, sweeps: int) -> list[slice]:
        """The columns low .. high - 1 in the pieces they are drawn in."""
        if low >= high:
            return []
        if not self.drafter.serial:
            return [slice(low, high)]
        return [slice(low, high)] * sweeps or [slice(s, s + 1) for s in range(low, high)]

    def _move(self, canvas: Canvas, here: slice, opened: slice, weights: Tensor) -> None:
        """Move what had a token to r = (1 - w) p + w q by its coupling."""
        assert self.proposal is not None
        q = self.drafter.q(opened, self.y[:, here.start : here.stop + 1])
        r = torch.lerp(self.target[:, here], q, weights.to(q))
        if self.coupling == "gumbel":
            moved = gumbel_argmax(r, self.aside[:, here])
        else:
            y, old, where = self.before[:, here], self.aside[:, here], self._where(canvas, here)
            # After the last drafts the forward gave a p but no token: without a proposal, it is drawn from r.
            kept = keep(y, old, r, canvas.source, where) & (old.gather(-1, y[..., None])[..., 0] > 0)
            moved, _ = redraw(y, kept, (r - old).clamp_min_(0), canvas.source, where, self._there(here))
        self.proposal[:, here], self.y[:, here.start + 2 : here.stop + 2] = r, moved

    def _bear(self, canvas: Canvas, here: slice, opened: slice) -> None:
        """Draw initial tokens from q; in a batch out of step some samples have a token here already, and keep it."""
        assert self.proposal is not None
        after = slice(here.start + 2, here.stop + 2)
        r = self.drafter.q(opened, self.y[:, here.start : here.stop + 1])
        if self.uniform:
            r = r * (1 - self.uniform) + self.uniform / r.shape[-1]
        there = self._there(here) if here.start < max(self.fresh) else None
        if self.coupling == "gumbel":
            drawn = gumbel_argmax(r, self.aside[:, here])
        else:
            drawn = canvas.source.draw(r, self._where(canvas, here), None if there is None else ~there)
        if there is not None:
            r = torch.where(there[..., None], self.proposal[:, here], r)
            drawn = torch.where(there, self.y[:, after], drawn)
        self.proposal[:, here], self.y[:, after] = r, drawn

    def _where(self, canvas: Canvas, here: slice) -> Where:
        return canvas.where([n + here.start for n in canvas.committed], here.stop - here.start)

    def _there(self, here: slice) -> Tensor:
        """(B, K): which of these columns had a token."""
        return self.columns[here] < torch.tensor(self.fresh, device=self.columns.device)[:, None]

    def _weights(self, here: slice) -> Tensor:
        """(B, K, 1): the weight of q, by how far to the left the last changed token is."""
        columns = self.columns[: here.stop]
        changed = torch.where(self.y[:, 2 : here.stop + 1] != self.before[:, : here.stop - 1], columns[:-1], -1)
        last = torch.nn.functional.pad(changed, (1, 0), value=-1).cummax(1).values
        return self.weights[columns - 1 - last][:, here.start :, None]
