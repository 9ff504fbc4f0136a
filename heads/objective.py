"""What heads are trained on and judged by: pure functions of states and distributions."""

import torch
from torch import Tensor, nn


def smooth_l1(predicted: Tensor, target: Tensor, reduction: str = "mean") -> Tensor:
    """Smooth-L1 (beta 1) between states (..., D), in fp32: the paper's loss on h before the final norm."""
    return nn.functional.smooth_l1_loss(predicted.float(), target.float(), reduction=reduction)


def at_least_fp32(x: Tensor) -> Tensor:
    """Half precision becomes fp32; fp64 stays, for tests."""
    return x if x.dtype == torch.float64 else x.float()


def mix_guidance(logits: Tensor, guidance: float) -> Tensor:
    """(G, ..., V) -> (..., V) fp32: u + g (c - u) of the conditional and unconditional branch; G = 1 passes through."""
    logits = at_least_fp32(logits)
    if logits.shape[0] == 1:
        return logits[0]
    conditional, unconditional = logits
    return unconditional + guidance * (conditional - unconditional)


def acceptance(p: Tensor, q: Tensor) -> Tensor:
    """(..., V) -> (...): sum of min(p, q) = 1 - TV, the chance that a token drafted from q is accepted under p."""
    return torch.minimum(p, q).sum(-1)


def entropy(p: Tensor) -> Tensor:
    """(..., V) -> (...): nats."""
    return -torch.special.xlogy(p, p).sum(-1)


def count_table(tokens: Tensor, source: Tensor, target: Tensor, codes: int, prior: float = 0.5) -> Tensor:
    """(N, H, W) codes -> (V, V): P(token at the offset | token here), counted over the grid's pairs.

    Smoothed towards the unigram with the weight of `prior` observations. The floor a trained head has to beat.
    """
    flat = tokens.flatten(1)
    unigram = torch.bincount(flat.flatten(), minlength=codes).float() + 1e-3
    unigram /= unigram.sum()
    pair = flat[:, source].flatten() * codes + flat[:, target].flatten()
    table = torch.bincount(pair, minlength=codes * codes).float().view(codes, codes) + prior * unigram
    return table / table.sum(1, keepdim=True)
