"""1D multi-token prediction: heads to the right draft a chain from the newest state, and one forward verifies it.

The baseline SSD is compared with, in its strict form: plain speculative sampling (arXiv 2211.17192), so it is exact.
"""

import torch
from torch import Tensor

from draftgrid.common.settings import whole
from draftgrid.eval.decoders.engine import Canvas
from draftgrid.eval.decoders.jacobi import SJD
from draftgrid.heads.offsets import OffsetHeads


class MTP1D(SJD):
    """Up to `length` drafts by the right heads from the newest committed cell, never across a row end.

    Every step drafts from scratch; what is left of the last drafts is dropped.
    """

    name = "mtp1d"
    drafts_with = ("offsets",)

    def __init__(self, length: int = 5) -> None:
        super().__init__()
        self.length = whole("length", length, 1)

    def begin(self, canvas: Canvas) -> None:
        assert isinstance(canvas.heads, OffsetHeads)
        reach = canvas.heads.config.right
        if not reach:
            raise ValueError("decoder mtp1d drafts with heads to the right; these have none (heads.right is 0)")
        self.length = min(self.length, reach)
        self.initial = "right"

    def lengths(self, canvas: Canvas) -> list[int]:
        W = canvas.grid.width
        return [min(self.length, (W - n % W) % W) for n in canvas.committed]

    def carried(self, canvas: Canvas) -> list[int]:
        return [0] * len(canvas.committed)

    def propose(self, canvas: Canvas, rows: slice, start: int, count: int) -> tuple[Tensor, Tensor]:
        assert canvas.heads is not None
        h = canvas.hidden[:, rows, start - 1 : start]
        e = canvas.backbone.embed(canvas.tokens[rows, start - 1 : start])
        predicted = torch.cat([canvas.heads(h, e, (0, k)) for k in range(1, count + 1)], dim=2)
        q = canvas.sampling.probabilities(canvas.heads.logits(canvas.backbone, predicted))
        return self.first_token(canvas, q, rows, start), q
