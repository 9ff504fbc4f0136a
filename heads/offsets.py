"""OffsetHeads: the paper's form (SSD, arXiv 2606.20543), one head per offset.

f(z) = W0 z + SwiGLU(RMSNorm(W0 z)) with z = [h; e], where e is the embedding of the token drawn at the source cell.
"""

from functools import partial

import torch
from torch import Tensor

from draftgrid.heads.backbones.base import Backbone
from draftgrid.heads.blocks import OffsetHead, OffsetPart
from draftgrid.heads.config import HeadsConfig
from draftgrid.heads.grid import Offset, TokenGrid, offset_name
from draftgrid.heads.mtp import MTPHeads, TrainedOn


class OffsetHeads(MTPHeads):
    """One head per offset: independent (the paper's form), or with a trunk that all share.

    Shared: t = W0 z + SwiGLU(RMSNorm(W0 z)), and each offset adds M GLU(C RMSNorm(t)) of `rank` units of its own.
    """

    kind = "offsets"
    fields = ("right", "down", "width", "input")
    options = ("shared", "project_rank", "rank", "norm_inputs")

    def __init__(self, config: HeadsConfig, trained_on: TrainedOn) -> None:
        super().__init__(config, trained_on)
        D = trained_on.hidden_size
        inputs = D * len(config.input.split("+"))
        head = partial(OffsetHead, inputs, D, config.width or D, config.project_rank)
        self.trunk = head() if config.shared else None
        for offset in config.offsets:
            own = OffsetPart(D, config.rank or max(1, D // 4)) if config.shared else head()
            self.add_module(offset_name(offset), own)

    @classmethod
    def check_fit(cls, config: HeadsConfig, backbone: Backbone) -> None:
        """Raises ValueError for an offset that leaves the grid everywhere: it could never be trained."""
        grid = backbone.grid
        for name, reach, cells in (("right", config.right, grid.width), ("down", config.down, grid.height)):
            if reach >= cells:
                raise ValueError(f"heads.{name} is {reach}, but the grid has {cells} that way; use at most {cells - 1}")

    @property
    def offsets(self) -> list[Offset]:
        return self.config.offsets

    @property
    def names(self) -> list[str]:
        return [offset_name(o) for o in self.offsets]

    def train_pairs(self, grid: TokenGrid) -> dict[str, tuple[Tensor, Tensor]]:
        """{offset name: (source, target) positions} of one picture; an offset too long for the grid is left out."""
        pairs = {offset_name(o): grid.pairs(o) for o in self.offsets}
        return {name: pair for name, pair in pairs.items() if len(pair[0])}

    def predict(self, h: Tensor, e: Tensor, name: str) -> Tensor:
        offset = self.offsets[self.names.index(name)]
        source, _ = TokenGrid(*self.trained_on.grid).pairs(offset)
        return self(h[:, source], e[:, source], offset)

    def forward(self, h: Tensor, e: Tensor, offset: Offset) -> Tensor:
        """States and embeddings (..., D) of source cells -> predicted states (..., D) of the cells at `offset`."""
        reads = {"h": h, "e": e.expand_as(h)}
        z = torch.cat([self.scaled(reads[name]) for name in self.config.input.split("+")], dim=-1)
        own = getattr(self, offset_name(offset))
        if self.trunk is None:
            return own(z)
        t = self.trunk(z)
        return t + own(t)
