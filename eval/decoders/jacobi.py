"""Jacobi windows: draft a window of tokens, test all at once, commit the accepted run, redraw what is right of it.

Every drafted position carries its token y and its proposal q, the exact distribution of y given everything to its left.
A forward yields p for the whole window. Position by position y is kept with min(1, p / q); the first that fails takes
the residual and ends the run; right of it tokens are redrawn and their proposal becomes p. This is exact for any
drafts: a position's proposal, and everything that decides about it, look only to its left, and its randomness is its
own.

SJD (Speculative Jacobi Decoding) redraws afresh. SCD (Speculative Coupled Decoding) redraws by a coupling that keeps
the token as often as it can.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from draftgrid.common.settings import one_of, whole
from draftgrid.eval.decoders.engine import Canvas, Policy, Sliding, in_step, windows
from draftgrid.eval.decoders.kernels import gumbel_argmax, keep, redraw
from draftgrid.heads.distributions import at_least_fp32

INITIAL = ("uniform", "onehot", "left", "above")
COUPLINGS = ("maximal", "gumbel")
SPARE = 32
"""Positions whose Gumbel noise is made ahead of time, all in one call."""


class SJD(Policy):
    """Feeds `window` tokens a forward: the newest final one and window - 1 drafts.

    `initial` is how a position that enters the window gets its first token: uniform (drawn from the uniform
    distribution), onehot (the same, but with a one-hot proposal), left (the newest token to the left) or above (the
    token in the row above; in row 0, left), both with a one-hot proposal.
    """

    name = "sjd"
    exact = True

    def __init__(self, window: int = 16, initial: str = "uniform") -> None:
        self.window, self.initial = whole("window", window, 1), one_of("initial", initial, INITIAL)
        self.proposal = torch.empty(0)
        """(B, A + 1, V) of the window's A drafts, zero where a sample has none; empty before the first forward."""

    # Test the window, commit the run ---------------------------------------------------------------------------------

    def verify(self, canvas: Canvas, p: Tensor) -> None:
        n, a = self.n, self.a = canvas.committed, canvas.ahead
        B, S, _ = p.shape
        if not self.proposal.numel():  # the first forward tests nothing
            self.proposal, self.fresh = torch.zeros_like(p), [0] * B
        self.p, y = p, windows(canvas.tokens, n, S)
        # After the drafts comes one position without a draft: its proposal is zero, so its residual is p itself.
        inside = [min(d + 1, canvas.grid.positions - m) for d, m in zip(a, n, strict=True)]
        columns = torch.arange(S, device=p.device)
        limits = torch.tensor([a, inside], device=p.device)[..., None]
        kept = self.test(canvas, y) & (columns < limits[0])
        run = kept.cumprod(1).sum(1, keepdim=True)
        tokens = self.move(canvas, y, kept, columns - run, columns < limits[1])
        for rows, (start, drafts, end, fresh) in in_step(n, a, inside, self.fresh):
            canvas.tokens[rows, start : start + end] = tokens[rows, :end]
            if fresh < drafts:
                canvas.stats.count_drafts(self.initial, kept[rows, fresh:drafts], start + fresh)
        canvas.commit([min(r + 1, m) for r, m in zip(run.flatten().tolist(), inside, strict=True)])

    def test(self, canvas: Canvas, y: Tensor) -> Tensor:
        """Which tokens y (B, S) pass."""
        return keep(y, self.proposal, self.p, canvas.source, canvas.where(self.n, y.shape[1]))

    def move(self, canvas: Canvas, y: Tensor, kept: Tensor, beyond: Tensor, inside: Tensor) -> Tensor:
        """Tokens (B, S) with proposal p: the run as it is, the residual where it ends, fresh draws from p right of it.

        beyond (B, S) counts columns from the run's end; not `inside` fills up a batch that is not in step.
        """
        self.proposal.masked_fill_((beyond > 0)[..., None], 0)
        weights = self.proposal.sub_(self.p).neg_().clamp_min_(0)
        return redraw(y, kept & (beyond < 0), weights, canvas.source, canvas.where(self.n, y.shape[1]), inside)[0]

    # Shift the window, fill it up ------------------------------------------------------------------------------------

    def draft(self, canvas: Canvas) -> None:
        n = canvas.committed
        a = canvas.ahead = self.lengths(canvas)
        carried = self.carried(canvas)
        self.proposal = self.p.new_zeros(len(n), max(a) + 1, self.p.shape[-1])
        self.fresh = carried
        for rows, (old, new, c, d) in in_step(self.n, n, carried, a):
            self.proposal[rows, :c] = self.p[rows, new - old : new - old + c]
            if c < d:
                y, self.proposal[rows, c:d] = self.propose(canvas, rows, new + c, d - c)
                canvas.tokens[rows, new + c : new + d] = y

    def lengths(self, canvas: Canvas) -> list[int]:
        """(B,) drafts of the coming window; the picture's last position never needs one."""
        return [max(0, min(self.window, canvas.grid.positions - n) - 1) for n in canvas.committed]

    def carried(self, canvas: Canvas) -> list[int]:
        """(B,) positions of the coming window that the last forward has read: they keep their token and proposal p."""
        ends = [m + b + 1 for m, b in zip(self.n, self.a, strict=True)]
        return [max(0, min(d, end - n)) for d, end, n in zip(canvas.ahead, ends, canvas.committed, strict=True)]

    def propose(self, canvas: Canvas, rows: slice, start: int, count: int) -> tuple[Tensor, Tensor]:
        """First tokens (R, K) of the positions from `start` on, and their proposal, (R, K, V) or what expands to it."""
        V, W = self.p.shape[-1], canvas.grid.width
        R = len(canvas.samples[rows])
        if self.initial in ("uniform", "onehot"):
            uniform = self.p.new_full((1, 1, 1), 1 / V).expand(R, count, V)
            y = self.first_token(canvas, uniform, rows, start)
            if self.initial == "uniform":
                return y, uniform
        else:
            y = canvas.tokens[rows, start - 1 : start].repeat(1, count)
            for i in range(start, start + count) if self.initial == "above" else ():
                if i >= W:  # above it may stand another initial token, made a moment ago
                    y[:, i - start] = y[:, i - start - W] if i - W >= start else canvas.tokens[rows, i - W]
        return y, torch.nn.functional.one_hot(y, V).to(self.p.dtype)

    def first_token(self, canvas: Canvas, q: Tensor, rows: slice, start: int) -> Tensor:
        """Tokens (R, K) ~ q (R, K, V) of the positions from `start` on, all in the coming window."""
        R, K, _ = q.shape
        return canvas.source.draw(q, canvas.where([start] * R, K, rows))


class SCD(SJD):
    """SJD whose redraws are coupled to the tokens they replace.

    `maximal`: keep with min(1, p / q), else the residual, at every position, so testing and redrawing are one: no
    coupling keeps more in one step. `gumbel`: argmax(log p + g), g fixed per position: coupled to every earlier p.
    """

    name = "scd"

    def __init__(self, window: int = 32, initial: str = "uniform", coupling: str = "maximal") -> None:
        super().__init__(window, initial)
        self.coupling = one_of("coupling", coupling, COUPLINGS)

    def begin(self, canvas: Canvas) -> None:
        dtype = at_least_fp32(canvas.backbone.logits(canvas.backbone.embed(canvas.tokens[:1, :1]))).dtype

        def make(first: Sequence[int], count: int) -> tuple[Tensor]:
            shape = (len(first), count, canvas.backbone.image_vocab_size)
            like = torch.empty(shape, dtype=dtype, device=canvas.tokens.device)
            return (canvas.source.gumbel(like, canvas.where(first, count)),)

        self.noise = Sliding(make, spare=SPARE, end=canvas.grid.positions)
        """The Gumbel vectors of the window's positions, (B, K, V)."""

    def move(self, canvas: Canvas, y: Tensor, kept: Tensor, beyond: Tensor, inside: Tensor) -> Tensor:
        where = canvas.where(self.n, y.shape[1])
        if self.coupling == "maximal":
            weights = self.proposal.sub_(self.p).neg_().clamp_min_(0)
            return redraw(y, kept, weights, canvas.source, where, inside)[0]
        # Up to the run's end fresh numbers decide, never the noise, which the drafts tested there came from.
        tokens = super().move(canvas, y, kept, beyond, inside & (beyond <= 0))
        (noise,) = self.noise.take(self.n, y.shape[1])
        return torch.where(beyond > 0, gumbel_argmax(self.p, noise), tokens)

    def first_token(self, canvas: Canvas, q: Tensor, rows: slice, start: int) -> Tensor:
        if self.coupling == "maximal":
            return super().first_token(canvas, q, rows, start)
        (noise,) = self.noise.take(canvas.committed, max(canvas.ahead) + 1)
        column = start - canvas.committed[rows.start]
        return gumbel_argmax(q, noise[rows, column : column + q.shape[1]])


class GumbelFixedPoint(SCD):
    """Jacobi iteration on the map noise -> picture: the tokens are those AR sampling takes with the same Gumbel noise.

    Every position takes argmax(log p + g); the run goes up to the first token that changed, whose context is final.
    """

    name = "gumbel_fixed_point"

    def __init__(self, window: int = 32, initial: str = "uniform") -> None:
        super().__init__(window, initial, "gumbel")

    def test(self, canvas: Canvas, y: Tensor) -> Tensor:
        (noise,) = self.noise.take(self.n, y.shape[1])
        self.taken = gumbel_argmax(self.p, noise)
        return self.taken == y

    def move(self, canvas: Canvas, y: Tensor, kept: Tensor, beyond: Tensor, inside: Tensor) -> Tensor:
        return self.taken
