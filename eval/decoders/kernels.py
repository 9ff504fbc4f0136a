"""The arithmetic every decoder shares: logits -> distribution, and moving a token from one distribution to another.

One pipeline serves the target p and every draft q, and the tensor a token was drawn from is the tensor that is kept as
its proposal; nothing is re-applied to a residual. All in fp32 (fp64 stays fp64, for tests).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from draftgrid.eval.decoders.randomness import SMALL, RandomSource, Where, block_size
from draftgrid.heads.distributions import probabilities


@dataclass(frozen=True)
class Sampling:
    """How the backbone is sampled. Raises ValueError for a value out of range."""

    guidance: float = 1.0
    """g in u + g (c - u); 1 = conditional branch only."""
    temperature: float = 1.0
    """0 = greedy."""
    top_k: int = 0
    """Keep the k most likely tokens (ties with the k-th stay); 0 = all."""
    top_p: float = 1.0
    """Keep the smallest set of most likely tokens that holds this much probability."""

    def __post_init__(self) -> None:
        if self.temperature < 0:
            raise ValueError(f"temperature is {self.temperature}; use 0 (greedy) or more")
        if self.top_k < 0:
            raise ValueError(f"top_k is {self.top_k}; use 0 (all tokens) or more")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p}; use a share above 0 and at most 1")

    def probabilities(self, logits: Tensor) -> Tensor:
        """(G, ..., V) logits of the guidance branches -> (..., V): mix, temperature, top-k, top-p, softmax."""
        return probabilities(logits, self.guidance, self.temperature, self.top_k, self.top_p)


def keep(y: Tensor, q: Tensor, p: Tensor, source: RandomSource, where: Where) -> Tensor:
    """Which tokens y (B, K), drawn from q (B, K, V), are kept under p: each with min(1, p / q)."""
    index = y[..., None]
    return source.accept((p.gather(-1, index) / q.gather(-1, index)).squeeze(-1), where.to("accept"))


def redraw(
    y: Tensor, kept: Tensor, weights: Tensor, source: RandomSource, where: Where, needed: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """y (B, K) where kept, else a draw from weights (B, K, V): relu(p - q), which needs no normalising.

    A residual without mass can only be rounding (p = q); what is drawn from it has no weight, and then y stays. Returns
    the tokens and where y stayed.
    """
    drawn = source.draw(weights, where.to("residual"), ~kept if needed is None else needed & ~kept)
    stays = kept | (weights.gather(-1, drawn[..., None]).squeeze(-1) == 0)
    return torch.where(stays, y, drawn), stays


def transport(y: Tensor, q: Tensor, p: Tensor, source: RandomSource, where: Where) -> tuple[Tensor, Tensor]:
    """Move tokens y (B, K) from their proposals q to p (B, K, V) by the maximal coupling; the new proposal is p.

    Keep y with probability min(1, p / q), else draw from relu(p - q). Returns the tokens and which were kept; a
    rejected token always changes. Speculative sampling, arXiv 2211.17192; as a coupling of Jacobi iterates: SCD.
    """
    kept = keep(y, q, p, source, where)
    return redraw(y, kept, (p - q).clamp_min_(0), source, where)


def gumbel_argmax(p: Tensor, noise: Tensor) -> Tensor:
    """(..., V) -> (...): argmax(log p + g) ~ p, with noise = exp(g); two p with the same noise are coupled."""
    scores = p * noise
    V = scores.shape[-1]
    if V <= SMALL:
        return scores.argmax(-1)
    blocks = scores.unflatten(-1, (-1, block_size(V)))  # on a CPU one argmax over all takes 20 times as long
    best = blocks.amax(-1).argmax(-1, keepdim=True)
    inside = blocks.gather(-2, best[..., None].expand(*best.shape, blocks.shape[-1])).squeeze(-2)
    return (best * blocks.shape[-1] + inside.argmax(-1, keepdim=True)).squeeze(-1)
