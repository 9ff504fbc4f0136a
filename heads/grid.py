"""TokenGrid: where image tokens, structure tokens and hidden states sit in a raster sequence.

Pure geometry, no model. Every index that training, drafting or decoding uses comes from here, so that the shift
between a token and the state that predicts it is decided in one place.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

Index = TypeVar("Index", int, Tensor)
Offset = tuple[int, int]
"""(dy, dx): a head reads the cell (y, x) and predicts the state of the cell (y + dy, x + dx)."""


@dataclass(frozen=True)
class TokenGrid:
    """H x W image tokens in raster order, each row followed by `row_end` structure tokens.

    A *position* i counts image tokens: i = y * W + x. A *slot* counts sequence positions after the prompt, structure
    tokens included: slot = y * stride + x. The state h[y, x], whose LM-head output is the distribution of the token
    at (y, x), sits at the slot just before it; h[0, 0] sits at the prompt's last token, slot -1.
    """

    height: int
    width: int
    row_end: int = 0

    def __post_init__(self) -> None:
        if self.height < 1 or self.width < 1 or self.row_end < 0:
            given = f"{self.height}, {self.width}, {self.row_end}"
            raise ValueError(f"grid needs height >= 1, width >= 1, row_end >= 0; got {given}")

    @property
    def stride(self) -> int:
        return self.width + self.row_end

    @property
    def positions(self) -> int:
        return self.height * self.width

    @property
    def slots(self) -> int:
        """Slots up to and including the last image token (the last row's structure tokens are never needed)."""
        return self.height * self.stride - self.row_end

    def slot(self, position: Index) -> Index:
        return position // self.width * self.stride + position % self.width

    def image_slots(self) -> Tensor:
        """(H*W,) slot of every image token."""
        return self.slot(torch.arange(self.positions))

    def is_structure(self, slot: Tensor) -> Tensor:
        return slot % self.stride >= self.width

    def pairs(self, offset: Offset) -> tuple[Tensor, Tensor]:
        """Positions (source, target), (N,) each: every pair of cells the offset connects inside the grid.

        A pair never crosses a row end, so the source cell (y, x) has its target at (y + dy, x + dx) of the picture.
        """
        dy, dx = offset
        if dy < 0 or (dy == 0 and dx <= 0):
            raise ValueError(f"offset {offset} points to a known token; use dy > 0, or dy = 0 and dx > 0")
        cells = torch.arange(self.positions)
        target, inside = (found[:, 0] for found in self.around(cells, [offset]))
        return cells[inside], target[inside]

    def around(self, position: Tensor, cells: Sequence[Offset]) -> tuple[Tensor, Tensor]:
        """Positions (...,) -> (index, inside), (..., N) each: the N cells (dy, dx) away, and which are in the picture.

        A cell outside has index 0; what is read there has to be replaced by zeros.
        """
        dy, dx = torch.tensor(cells, device=position.device).unbind(-1)
        y, x = position[..., None] // self.width + dy, position[..., None] % self.width + dx
        inside = (y >= 0) & (y < self.height) & (x >= 0) & (x < self.width)
        return torch.where(inside, y * self.width + x, 0), inside


def offset_name(offset: Offset) -> str:
    """'right3', 'down2', or 'down1right-1' for a diagonal."""
    dy, dx = offset
    return (f"down{dy}" if dy else "") + (f"right{dx}" if dx else "")
