"""Relaxed acceptance: SJD's loop with a test that lets look-alikes pass. Lossy, by design.

GSD (Grouped Speculative Decoding, ICCV 2025) tests a group of tokens instead of one; LANTERN (ICLR 2025) lends a token
the probability of its neighbours in the codebook. Both take the residual relu(p - q) where a token fails.
"""

import torch
from torch import Tensor

from draftgrid.common.settings import number, whole
from draftgrid.eval.decoders.engine import Canvas
from draftgrid.eval.decoders.jacobi import SJD


class GSD(SJD):
    """Keep y with min(1, sum of p / sum of q) over its group: the `group` tokens nearest to it in probability rank.

    A token whose p differs from p(y) by `delta` or more does not belong to the group. group=0 is SJD.
    """

    name = "gsd"
    exact = False

    def __init__(self, window: int = 16, initial: str = "uniform", group: int = 10, delta: float = 0.15) -> None:
        super().__init__(window, initial)
        self.group, self.delta = whole("group", group, 0), number("delta", delta, 0)

    def test(self, canvas: Canvas, y: Tensor) -> Tensor:
        order = self.p.argsort(dim=-1, descending=True, stable=True)
        rank = (order == y[..., None]).int().argmax(-1, keepdim=True)
        near = rank + torch.arange(-(self.group // 2), self.group - self.group // 2 + 1, device=y.device)
        inside = (near >= 0) & (near < order.shape[-1])
        ids = order.gather(-1, near.clamp(0, order.shape[-1] - 1))
        p, own = self.p.gather(-1, ids), self.p.gather(-1, y[..., None])
        inside &= ((p - own).abs() < self.delta) | (ids == y[..., None])
        ratio = (p * inside).sum(-1) / (self.proposal.gather(-1, ids) * inside).sum(-1)
        return canvas.source.accept(ratio, canvas.where(self.n, y.shape[1]).to("accept"))


class Lantern(SJD):
    """Keep y with min(1, (p(y) + S) / q(y)): S sums p over y's nearest neighbours in the codebook, nearest first.

    As many of the `neighbours` as keep S within `delta` (delta <= 1: a budget of total variation) or within
    (delta - 1) p(y) (delta > 1: a factor, as in LANTERN++). neighbours=0 is SJD. Needs the image tokenizer's codebook.
    """

    name = "lantern"
    exact = False

    def __init__(self, window: int = 16, initial: str = "uniform", neighbours: int = 100, delta: float = 0.2) -> None:
        super().__init__(window, initial)
        self.neighbours, self.delta = whole("neighbours", neighbours, 0), number("delta", delta, 0)

    def begin(self, canvas: Canvas) -> None:
        if canvas.tokenizer is None:
            raise ValueError("decoder lantern needs the codebook; give tokenizer=load_tokenizer(folder)")
        self.table = canvas.tokenizer.neighbours(self.neighbours).to(canvas.backbone.device)

    def test(self, canvas: Canvas, y: Tensor) -> Tensor:
        own, near = self.p.gather(-1, y[..., None]), self.p.gather(-1, self.table[y])
        lent = near.cumsum(-1)
        lent = (near * (lent <= (self.delta if self.delta <= 1 else (self.delta - 1) * own))).sum(-1, keepdim=True)
        ratio = ((own + lent) / self.proposal.gather(-1, y[..., None])).squeeze(-1)
        return canvas.source.accept(ratio, canvas.where(self.n, y.shape[1]).to("accept"))
