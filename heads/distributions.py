"""What heads are trained on and judged by: pure functions of states and distributions."""

import torch
from torch import Tensor, nn


def at_least_fp32(x: Tensor) -> Tensor:
    """Half precision becomes fp32; fp64 stays, for tests."""
    return x if x.dtype == torch.float64 else x.float()


def smooth_l1(predicted: Tensor, target: Tensor, reduction: str = "mean") -> Tensor:
    """Smooth-L1 (beta 1) between states (..., D), in fp32 at least: the paper's loss on h before the final norm."""
    return nn.functional.smooth_l1_loss(at_least_fp32(predicted), at_least_fp32(target), reduction=reduction)


def mix_guidance(logits: Tensor, guidance: float) -> Tensor:
    """(G, ..., V) -> (..., V) fp32: u + g (c - u) of the conditional and unconditional branch; G = 1 passes through."""
    logits = at_least_fp32(logits)
    if logits.shape[0] == 1:
        return logits[0]
    conditional, unconditional = logits
    return unconditional + guidance * (conditional - unconditional)


def truncate(z: Tensor, top_k: int) -> Tensor:
    """(..., V) logits with all but the `top_k` largest at -inf (ties with the k-th stay); 0 = all stay."""
    if not 0 < top_k < z.shape[-1]:
        return z
    kth = z.topk(top_k, dim=-1).values[..., -1:]
    return z.masked_fill(z < kth, -torch.inf)


def probabilities(
    logits: Tensor, guidance: float = 1.0, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0
) -> Tensor:
    """(G, ..., V) logits of the guidance branches -> (..., V): mix, temperature, top-k, top-p, softmax.

    The one pipeline of every p and every q, in training and decoding.
    """
    z = mix_guidance(logits, guidance)
    if temperature == 0:
        return torch.zeros_like(z).scatter_(-1, z.argmax(-1, keepdim=True), 1.0)
    if temperature != 1:
        z = z / temperature
    p = truncate(z, top_k).softmax(-1)
    if top_p < 1:
        ordered, index = p.sort(-1, descending=True)
        outside = ordered.cumsum(-1) - ordered >= top_p
        p = p.masked_fill(torch.zeros_like(outside).scatter_(-1, index, outside), 0.0)
        p = p / p.sum(-1, keepdim=True)
    return p


def divergence(z: Tensor, p: Tensor, tv: float, ce: float, kl: float, top_k: int = 0) -> tuple[Tensor, Tensor]:
    """tv (1 - sum of min(p, q)) + ce (-sum of p log q) + kl KL(p || q), and its gradient to the logits z of q.

    z, p (..., V) -> (...,), (..., V). In tv, q is cut to its own top k, as a decoder's is; in the others it is whole,
    for they would be infinite where p reaches beyond it. Written out, so that no graph keeps tensors of this size:
    dTV/dz = q (Q - [q < p]) with Q the sum of q where q < p, and dCE/dz = dKL/dz = q - p.
    """
    value, gradient = z.new_zeros(z.shape[:-1]), torch.zeros_like(z)
    if tv:
        q = truncate(z, top_k).softmax(-1)
        below = (q < p).to(q)
        value += tv * (1 - torch.minimum(p, q).sum(-1))
        gradient.add_(q * ((q * below).sum(-1, keepdim=True) - below), alpha=tv)
    if ce or kl:
        log_q = z.log_softmax(-1)
        value -= (ce + kl) * (p * log_q).sum(-1)
        gradient.add_(log_q.exp_().sub_(p), alpha=ce + kl)
    if kl:
        value -= kl * entropy(p)
    return value, gradient


def cross_entropy(z: Tensor, token: Tensor) -> tuple[Tensor, Tensor]:
    """-log q(token) of logits z (..., V), and its gradient q - [token] to them."""
    log_q, index = z.log_softmax(-1), token[..., None]
    value = -log_q.gather(-1, index).squeeze(-1)
    return value, log_q.exp_().scatter_add_(-1, index, torch.full_like(value, -1.0)[..., None])


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
