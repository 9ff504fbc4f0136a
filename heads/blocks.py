"""The layers drafting heads are built of: plain modules that know nothing of grids or backbones."""

import torch
from torch import Tensor, nn


class RMSNorm(nn.Module):
    """torch's, with the weight cast to the input: under autocast the two differ, and torch warns and slows down."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.rms_norm(x, x.shape[-1:], self.weight.to(x.dtype), eps=1e-6)


class OffsetHead(nn.Module):
    """(..., k D) -> (..., D): W0 z + SwiGLU(RMSNorm(W0 z)); W0 of rank `rank`, if that is not 0."""

    def __init__(self, inputs: int, hidden: int, width: int, rank: int = 0) -> None:
        super().__init__()
        self.project: nn.Module = nn.Linear(inputs, hidden, bias=False)
        if rank:
            self.project = nn.Sequential(nn.Linear(inputs, rank, bias=False), nn.Linear(rank, hidden, bias=False))
        self.norm = RMSNorm(hidden)
        self.gate_up = nn.Linear(hidden, 2 * width, bias=False)  # one product for both: a draft is a few small calls
        self.down = nn.Linear(width, hidden, bias=False)

    def forward(self, z: Tensor) -> Tensor:
        base = self.project(z)
        gate, up = self.gate_up(self.norm(base)).chunk(2, dim=-1)
        return base + self.down(nn.functional.silu(gate) * up)


class OffsetPart(nn.Module):
    """(..., D) -> (..., D): M GLU(C RMSNorm(t)), what one offset adds to a trunk that all share."""

    def __init__(self, hidden: int, rank: int) -> None:
        super().__init__()
        self.norm = RMSNorm(hidden)
        self.up = nn.Linear(hidden, 2 * rank, bias=False)
        self.down = nn.Linear(rank, hidden, bias=False)

    def forward(self, t: Tensor) -> Tensor:
        return self.down(nn.functional.glu(self.up(self.norm(t)), dim=-1))
