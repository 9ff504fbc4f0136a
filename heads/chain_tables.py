"""What drafting with a chain head needs of head and backbone together, computed once: the left tokens' part for every
code and, where the LM head is linear, its product with the late layer, so that a drafted position costs two small
products."""

import torch
from torch import Tensor

from draftgrid.heads.backbones.base import Backbone
from draftgrid.heads.chain import ChainHeads, check_linear, linear_part


class ChainTables:
    """For an LM head that is no linear map (Janus-Pro's is an MLP): each drafted position goes through final norm and
    head as a whole, and only the left tokens' part is computed ahead."""

    def __init__(self, heads: ChainHeads, backbone: Backbone) -> None:
        self.heads, self.backbone = heads, backbone
        codes = torch.arange(backbone.image_vocab_size, device=backbone.device)
        entering = [layer(heads.scaled(backbone.embed(codes))) for layer in heads.late()]
        self.left = [torch.cat([a, torch.zeros_like(a[:1])]) for a in entering]
        """(V + 1, 2 r) for the left token, then the second to the left; row V stands for none in this row."""

    def base(self, t: Tensor) -> Tensor:
        """Trunk outputs t (..., D) -> what `logits` needs of them: t itself."""
        return t

    def logits(self, base: Tensor, u: Tensor) -> Tensor:
        """base (R, ...) of one position and its gated units u (R, r) -> (R, V): the backbone's logits of t + M u."""
        return self.heads.logits(self.backbone, base + self.heads.late_down(u))


class LinearTables(ChainTables):
    """For a linear LM head after a plain RMS norm: L t comes with the trunk, L M is computed once."""

    def __init__(self, heads: ChainHeads, backbone: Backbone) -> None:
        """Raises ValueError for a backbone whose final norm is no RMS norm."""
        super().__init__(heads, backbone)
        check_linear(backbone, heads.config.target)
        self.normed = heads.config.target != "h_post"
        down = heads.late_down.weight.T  # (r, D)
        # Far above the norm's epsilon, which a column of M alone might not be.
        self.down = torch.cat([self._linear(1e3 * down) / 1e3, down], dim=-1)
        """(r, V + D): L M, then M."""

    def _linear(self, h: Tensor) -> Tensor:
        return linear_part(self.backbone, h, self.heads.config.target)

    def base(self, t: Tensor) -> Tensor:
        """(..., D) -> (..., V + D): L t and t."""
        return torch.cat([self._linear(t), t], dim=-1)

    def logits(self, base: Tensor, u: Tensor) -> Tensor:
        both = torch.addmm(base, u, self.down)
        V = self.backbone.image_vocab_size
        return both[:, :V] / torch.linalg.vector_norm(both[:, V:], dim=-1, keepdim=True) if self.normed else both[:, :V]


def chain_tables(heads: ChainHeads, backbone: Backbone) -> ChainTables:
    """Raises ValueError for a backbone with a linear head whose final norm is no RMS norm."""
    return (LinearTables if backbone.linear_head else ChainTables)(heads, backbone)
