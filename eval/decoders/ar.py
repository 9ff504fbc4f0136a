"""Autoregressive decoding: one token a forward. What every other decoder is measured against."""

from torch import Tensor

from eval.decoders.engine import Canvas, Policy


class AR(Policy):
    name = "ar"
    exact = True

    def verify(self, canvas: Canvas, p: Tensor) -> None:
        n = canvas.committed[0]
        canvas.tokens[:, n : n + 1] = canvas.source.draw(p, canvas.where(n, n + 1))
        canvas.cached = [n] * len(canvas.committed)
        canvas.committed = [n + 1] * len(canvas.committed)
