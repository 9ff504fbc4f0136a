"""ChainHeads: one head that predicts every cell from the cells above it and the token to its left.

A trunk reads states and embeddings of three cells of the row above (right above and the two to its right, whose states
depend on what lies left of them), with rows=2 also of two in the row above that, each projected to `cell` numbers, for
a whole window in one call. With `recent` it also reads the newest drawn cell, whose state depends on all tokens before
it, if that is at most `recent` cells to the left. The left token (with lefts=2 also the second to the left) enters last
and cheaply, through a gated layer of `rank` units whose input is a part per position plus one per token:

    z = [P (h; e) of each cell],    t = W0 z + SwiGLU(RMSNorm(W0 z)),    u = GLU(C RMSNorm(t) + A e_left),
    h_hat = t + M u

So positions can be drafted left to right, each with its newest left token, for two small products a position: the
final norm only scales (with target=h_post there is none) and the LM head is linear, so
logits(h_hat) = (L t + L M u) / rms(t + M u) with L the linear part of norm and head; L t comes with the trunk, and L M
is computed once. An LM head that is not linear is run in full at each position. Missing neighbours are zeros. The head
never looks right of the left token, so a decoder may record its distribution as that of a token drawn from it.
"""

import torch
from torch import Tensor, nn

from draftgrid.heads.backbones.base import Backbone
from draftgrid.heads.blocks import OffsetHead, RMSNorm
from draftgrid.heads.config import HeadsConfig
from draftgrid.heads.grid import TokenGrid
from draftgrid.heads.mtp import MTPHeads, TrainedOn

ABOVE = ((-1, 0), (-1, 1), (-1, 2))
"""Cells the trunk reads, (dy, dx) from the cell that is predicted."""
FURTHER = ((-2, 0), (-2, 1))
"""Those it reads too with two rows of context."""
NAME = "chain"


class ChainHeads(MTPHeads):
    """All cells but the first, each from the row above and its left token."""

    kind = "chain"
    reads_left = True
    fields = ("width", "rank", "cell")
    options = ("rows", "lefts", "recent", "project_rank", "norm_inputs")

    def __init__(self, config: HeadsConfig, trained_on: TrainedOn) -> None:
        super().__init__(config, trained_on)
        D = trained_on.hidden_size
        self.rank = config.rank or max(1, D // 4)
        self.grid = TokenGrid(*trained_on.grid)
        cell = config.cell or max(1, D // 2)
        self.cell = nn.Linear(2 * D, cell, bias=False)
        self.above = ABOVE if config.rows == 1 else ABOVE + FURTHER
        self.recent = nn.Linear(2 * D, cell, bias=False) if config.recent else None
        self.distance = nn.Embedding(config.recent, cell) if config.recent else None
        inputs = cell * (len(self.above) + (self.recent is not None))
        self.trunk = OffsetHead(inputs, D, config.width or D, config.project_rank)
        self.late_norm = RMSNorm(D)
        self.late_trunk = nn.Linear(D, 2 * self.rank, bias=False)
        self.late_left = nn.Linear(D, 2 * self.rank, bias=False)
        self.late_second = nn.Linear(D, 2 * self.rank, bias=False) if config.lefts == 2 else None
        self.late_down = nn.Linear(self.rank, D, bias=False)

    @classmethod
    def check_fit(cls, config: HeadsConfig, backbone: Backbone) -> None:
        """Raises ValueError for a backbone whose logits are not linear in the state, although it says linear_head."""
        if backbone.linear_head:
            check_linear(backbone, config.target)

    @property
    def names(self) -> list[str]:
        return [NAME]

    def train_pairs(self, grid: TokenGrid) -> dict[str, tuple[Tensor, Tensor]]:
        """The left cell of every cell (in column 0 the cell above): the one a count table may look at."""
        target = torch.arange(1, grid.positions)
        source = torch.where(target % grid.width > 0, target - 1, target - grid.width)
        return {NAME: (source, target)}

    def predict(
        self, h: Tensor, e: Tensor, name: str, left: Tensor | None = None, distance: Tensor | None = None
    ) -> Tensor:
        """States and embeddings (B, T, D) of a picture -> predicted states (B, T - 1, D) of all cells but the first.

        `left` (B, T, D) are embeddings to read as left tokens instead of those of the picture, `distance` (B, T - 1)
        says how far to the left the newest drawn cell is; 0, or none given: it is not read.
        """
        position = torch.arange(1, self.grid.positions, device=h.device)
        index, inside = self.grid.around(position, self.above)
        near = None
        if distance is not None and self.recent is not None:
            distance = distance * (distance <= position % self.grid.width)
            source = (position - distance)[..., None]
            near = self.newest(h.take_along_dim(source, 1), e.take_along_dim(source, 1), distance)
        t, c = self.look(self.squeeze(h, e)[:, index], inside, near)
        left = self.scaled(e if left is None else left)
        entering = [layer(self._beside(left, back)) for back, layer in enumerate(self.late(), 1)]
        return t + self.late_down(self.gate(sum(entering, c)))

    def late(self) -> list[nn.Module]:
        """The layers (D -> 2 r) that the left token enters through, and the second to the left if it is read."""
        return [layer for layer in (self.late_left, self.late_second) if layer is not None]

    def _beside(self, e: Tensor, back: int) -> Tensor:
        """(B, T, D) -> (B, T - 1, D): what stands `back` to the left of each cell but the first."""
        position = torch.arange(1, self.grid.positions, device=e.device)
        inside = (position % self.grid.width >= back).to(e.dtype)[:, None]
        return nn.functional.pad(e, (0, 0, back - 1, 0))[:, : self.grid.positions - 1] * inside

    def training_inputs(
        self, branches: int, rows: int, generator: torch.Generator, left: Tensor | None = None
    ) -> tuple[Tensor | None, ...]:
        """(left, distance) as `predict` takes them; both branches of a picture have the same distances."""
        return left, self.distances(rows, generator).repeat(branches, 1) if self.config.recent else None

    def distances(self, rows: int, generator: torch.Generator) -> Tensor:
        """(rows, T - 1) distances to train with: a third are 0, the others 1 .. `recent`."""
        shape, device = (rows, self.grid.positions - 1), generator.device
        found = torch.randint(1, self.config.recent + 1, shape, generator=generator, device=device)
        return found * (torch.rand(shape, generator=generator, device=device) > 1 / 3)

    def squeeze(self, h: Tensor, e: Tensor) -> Tensor:
        """State and embedding (..., D) of cells -> what the trunk reads of each, (..., cell)."""
        return self.cell(self._pair(h, e))

    def _pair(self, h: Tensor, e: Tensor) -> Tensor:
        return torch.cat([self.scaled(h), self.scaled(e).expand_as(h)], dim=-1)

    def newest(self, h: Tensor, e: Tensor, distance: Tensor) -> Tensor:
        """The same (..., cell) of the newest drawn cell, `distance` (...) cells to the left; zeros where that is 0."""
        assert self.recent is not None and self.distance is not None, "only heads with `recent` read it"
        part = self.recent(self._pair(h, e)) + self.distance((distance - 1).clamp_min(0))
        return part * (distance > 0)[..., None].to(h.dtype)

    def look(self, cells: Tensor, inside: Tensor, near: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The cells above as `squeeze` gives them (..., N, cell), which of them there are (..., N), the newest drawn
        cell as `newest` gives it or None -> t (..., D) and C RMSNorm(t) (..., 2 r)."""
        z = (cells * inside[..., None].to(cells.dtype)).flatten(-2)
        if self.recent is not None:
            near = z.new_zeros(1) if near is None else near
            z = torch.cat([z, near.expand(*z.shape[:-1], self.recent.out_features)], dim=-1)
        t = self.trunk(z)
        return t, self.late_trunk(self.late_norm(t))

    def gate(self, u: Tensor) -> Tensor:
        """The sum of the parts of position and left tokens (..., 2 r) -> the gated units (..., r)."""
        return nn.functional.glu(u, dim=-1)


def linear_part(backbone: Backbone, h: Tensor, target: str) -> Tensor:
    """L h (..., V) of states h (..., D), L being the linear part of final norm and LM head.

    It is scaled so that the logits are L h over the plain norm |h|; with target=h_post, where h is normed already, L h.
    """
    if target == "h_post":
        return backbone.project(h)
    return backbone.logits(h) * torch.linalg.vector_norm(h, dim=-1, keepdim=True)


@torch.no_grad()
def check_linear(backbone: Backbone, target: str) -> None:
    """Raises ValueError unless L(a + b) = L a + L b on random states: what drafting computes ahead relies on it."""
    a, b = torch.randn(2, 4, backbone.hidden_size, generator=torch.Generator().manual_seed(0))
    a += 1  # a LayerNorm, which also takes off the mean, shows where means differ
    a, b = a.to(backbone.device, backbone.dtype), b.to(backbone.device, backbone.dtype)
    whole, parts = (linear_part(backbone, h, target) for h in (a + b, torch.cat([a, b])))
    tolerance = 2e-2 if backbone.dtype in (torch.bfloat16, torch.float16) else 1e-3
    if (whole - parts[:4] - parts[4:]).abs().max() > tolerance * whole.abs().max():
        raise ValueError(
            f"chain heads need a backbone with a plain RMS norm at its end and a linear head after it, or with "
            f"linear_head = False; {backbone.name} has neither"
        )
