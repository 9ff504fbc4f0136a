"""Autoregressive decoding: one token a forward. What every other decoder is measured against."""

from torch import Tensor

from draftgrid.eval.decoders.engine import Canvas, Policy


class AR(Policy):
    name = "ar"
    exact = True

    def verify(self, canvas: Canvas, p: Tensor) -> None:
        n = canvas.committed
        canvas.tokens[:, n[0] : n[0] + 1] = canvas.source.draw(p, canvas.where(n, 1))
        canvas.commit([1] * len(n))
