"""Coupled SSD: heads draft, SCD's coupling keeps the distribution exactly the backbone's, whatever the heads are.

The heads' q is a position's first proposal; then the window continues as in SCD. What trained heads add is the refresh:
right of the run's end p was computed under tokens some of which have just changed, so a position does not move to p but
to r = (1 - w) p + w q, where q is what the heads say given the new left token. That is a transport like any other as
long as w looks only to the left; a position is only ever committed by p itself.
"""

import torch
from torch import Tensor

from draftgrid.common.settings import number, whole
from draftgrid.eval.decoders.drafters import ChainDrafter, Drafter, OffsetDrafter
from draftgrid.eval.decoders.engine import Canvas, in_step, windows
from draftgrid.eval.decoders.jacobi import SCD
from draftgrid.eval.decoders.kernels import gumbel_argmax, keep, redraw
from draftgrid.eval.decoders.randomness import Where
from draftgrid.heads.chain import ChainHeads
from draftgrid.heads.offsets import OffsetHeads


class CoupledSSD(SCD):
    """Feeds `window` tokens a forward, all but one of them drafts.

    The weight of q is `refresh` right of a token that has changed since p was computed, and `decay` times as much with
    every token further right: the run's end has changed, and the further left the last change, the better p still is.
    An initial token is drawn from q mixed with a share `uniform` of the uniform distribution.

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
        super().__init__(window, coupling=coupling)
        self.refresh, self.decay = number("refresh", refresh, 0, 1), number("decay", decay, 0, 1)
        self.uniform, self.sweeps = number("uniform", uniform, 0, 1), whole("sweeps", sweeps, 0)
        self.initial = "heads"

    def begin(self, canvas: Canvas) -> None:
        super().begin(canvas)
        if isinstance(canvas.heads, ChainHeads):
            self.drafter: Drafter = ChainDrafter(canvas, canvas.heads)
        else:
            assert isinstance(canvas.heads, OffsetHeads)
            self.drafter = OffsetDrafter(canvas, canvas.heads)
        self.columns = torch.arange(self.window, device=canvas.tokens.device)  # (window,), as the weights of q are
        weights = [self.refresh * self.decay**k for k in range(self.window)]
        self.weights = torch.tensor(weights, device=self.columns.device)

    def move(self, canvas: Canvas, y: Tensor, kept: Tensor, beyond: Tensor, inside: Tensor) -> Tensor:
        """Take the residual where the run ends. Right of it nothing moves yet: `draft` does that."""
        where = canvas.where(self.n, y.shape[1])
        weights = (self.p - self.proposal).clamp_min_(0)  # (B, S, V)
        return redraw(y, beyond != 0, weights, canvas.source, where, inside)[0]

    def draft(self, canvas: Canvas) -> None:
        """Fill the coming window of A drafts from left to right, as many columns at a time as the drafter reaches.

        A column that the last forward has read is carried: it has a token, p and a proposal, and moves to r. The others
        get an initial token. In a batch that is not in step a column may be carried in some samples and new in others.
        """
        n, a = canvas.committed, self.lengths(canvas)
        canvas.ahead, A = a, max(a)
        self.fresh = carried = self.carried(canvas)
        old, self.proposal = self.proposal, self.p.new_zeros(len(n), A + 1, self.p.shape[-1])
        if not A:
            return
        self._shift(canvas, old, A)
        for low in range(0, A, self.drafter.reach):
            high = min(low + self.drafter.reach, A)
            self.opened = low
            self.drafter.open(canvas, [m + low for m in n], high - low)
            for here in self._pieces(low, min(high, max(carried)), self.sweeps if self.coupling == "gumbel" else 0):
                self._move(canvas, here)
            for here in self._pieces(max(low, min(carried)), high, 0):
                self._enter(canvas, here)
            for rows, (m, d) in in_step(n, a):
                canvas.tokens[rows, m : m + min(d, high)] = self.y[rows, 2 : 2 + min(d, high)]
        for rows, (d,) in in_step(a):
            self.proposal[rows, d:] = 0

    def _shift(self, canvas: Canvas, old: Tensor, A: int) -> None:
        """Move what the last forward said to the coming window, whose column 0 is the first position not committed.

        With C the most columns that any sample carries, and `old` the last window's proposals, this sets

            y       (B, A + 2)   the two tokens to the window's left, then its drafts: s and s + 1 stand left of draft s
            before  (B, A)       the drafts as the forward read them
            target  (B, C, V)    its p of the carried columns
            aside   (B, A, V)    gumbel: the noise of every position; maximal: the old proposals, zero where none was
        """
        n, V = canvas.committed, self.p.shape[-1]
        self.target = self.p.new_zeros(len(n), max(self.fresh), V)
        self.aside = self.noise.take(n, A)[0] if self.coupling == "gumbel" else self.p.new_zeros(len(n), A, V)
        for rows, (m, new, c) in in_step(self.n, n, self.fresh):
            last = slice(new - m, new - m + c)
            self.target[rows, :c] = self.p[rows, last]
            if self.coupling == "maximal":
                self.aside[rows, :c] = old[rows, last]
        self.before = windows(canvas.tokens, n, A).clone()
        left = [windows(canvas.tokens, [max(m - back, 0) for m in n], 1) for back in (2, 1)]
        self.y = torch.cat([*left, self.before], dim=1)

    def _pieces(self, low: int, high: int, sweeps: int) -> list[slice]:
        """The columns low .. high - 1 in the pieces they are drawn in, one by one if there are no sweeps over all."""
        if low >= high:
            return []
        if not self.drafter.serial:
            return [slice(low, high)]
        return [slice(low, high)] * sweeps or [slice(s, s + 1) for s in range(low, high)]

    def _q(self, here: slice) -> Tensor:
        """(B, K, V): the heads' distribution of the columns `here`, with the newest left tokens."""
        opened = slice(here.start - self.opened, here.stop - self.opened)
        return self.drafter.q(opened, self.y[:, here.start : here.stop + 1])

    def _move(self, canvas: Canvas, here: slice) -> None:
        """Move the K carried columns `here` to r = (1 - w) p + w q by the coupling."""
        q = self._q(here)
        r = torch.lerp(self.target[:, here], q, self._weights(here).to(q))  # (B, K, V)
        if self.coupling == "gumbel":
            moved = gumbel_argmax(r, self.aside[:, here])  # (B, K)
        else:
            y, old, where = self.before[:, here], self.aside[:, here], self._where(canvas, here)
            # After the last drafts the forward gave a p but no token: without a proposal, it is drawn from r.
            kept = keep(y, old, r, canvas.source, where) & (old.gather(-1, y[..., None])[..., 0] > 0)
            moved, _ = redraw(y, kept, (r - old).clamp_min_(0), canvas.source, where, self._there(here))
        self.proposal[:, here], self.y[:, here.start + 2 : here.stop + 2] = r, moved

    def _enter(self, canvas: Canvas, here: slice) -> None:
        """Draw initial tokens of the K columns `here` from q; samples that carry one of them keep its token."""
        after = slice(here.start + 2, here.stop + 2)
        r = self._q(here)
        if self.uniform:
            r = r * (1 - self.uniform) + self.uniform / r.shape[-1]
        there = self._there(here) if here.start < max(self.fresh) else None
        if self.coupling == "gumbel":
            drawn = gumbel_argmax(r, self.aside[:, here])  # (B, K)
        else:
            drawn = canvas.source.draw(r, self._where(canvas, here), None if there is None else ~there)
        if there is not None:
            r = torch.where(there[..., None], self.proposal[:, here], r)
            drawn = torch.where(there, self.y[:, after], drawn)
        self.proposal[:, here], self.y[:, after] = r, drawn

    def _where(self, canvas: Canvas, here: slice) -> Where:
        return canvas.where([n + here.start for n in canvas.committed], here.stop - here.start)

    def _there(self, here: slice) -> Tensor:
        """(B, K) bool: which samples carry which of the columns `here`."""
        return self.columns[here] < torch.tensor(self.fresh, device=self.columns.device)[:, None]

    def _weights(self, here: slice) -> Tensor:
        """(B, K, 1): the weight of q, by how far to the left the last changed token is; the run's end is column -1."""
        columns = self.columns[: here.stop]
        changed = torch.where(self.y[:, 2 : here.stop + 1] != self.before[:, : here.stop - 1], columns[:-1], -1)
        last = torch.nn.functional.pad(changed, (1, 0), value=-1).cummax(1).values  # (B, here.stop)
        return self.weights[columns - 1 - last][:, here.start :, None]
