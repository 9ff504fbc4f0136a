"""How likely pictures are under the backbone that drew them."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from draftgrid.eval.decoders.kernels import Sampling
from draftgrid.heads.backbones.base import Backbone
from draftgrid.heads.distributions import entropy
from draftgrid.heads.prompts import unconditional_prompts


@torch.inference_mode()
def likelihood(
    backbone: Backbone, tokens: Tensor, prompts: Sequence[str], sampling: Sampling, chunk: int = 1024
) -> tuple[Tensor, Tensor]:
    """tokens (B, H, W) -> (negative log-likelihood, excess NLL), (B,) each, nats a token.

    Both under p at the given sampling settings, teacher-forced. Excess NLL is NLL minus entropy, the mean of
    -log p(x) - H(p): its expectation is 0 for every exact decoder, negative for pictures that are too bland, positive
    for too wild ones. Logits exist for about `chunk` positions of the batch at a time.
    """
    branches = [backbone.states(tokens, prompts)[0]]
    if sampling.guidance != 1:
        branches.append(backbone.states(tokens, unconditional_prompts(prompts))[0])
    size = max(1, chunk // len(tokens))
    found = []
    states = torch.stack(branches).flatten(2, 3).split(size, 2)  # (G, B, chunk, D) each
    for h, drawn in zip(states, tokens.flatten(1).split(size, 1), strict=True):
        p = sampling.probabilities(backbone.logits(h))
        chosen = p.gather(-1, drawn[..., None]).squeeze(-1)
        # A lossy decoder may emit a token outside the target's top-k; the floor keeps its NLL finite.
        nll = -chosen.clamp_min(torch.finfo(p.dtype).tiny).log()
        found.append(torch.stack([nll, nll - entropy(p)]))
    nll, excess = torch.cat(found, 2).mean(2)
    return nll, excess


def bootstrap(values: Sequence[float], seed: int = 0, draws: int = 2000) -> list[float]:
    """[mean, low, high]: the mean and its 95 % interval over resampled pictures."""
    data = np.asarray(values, dtype=np.float64)
    means = data[np.random.default_rng(seed).integers(0, len(data), (draws, len(data)))].mean(1)
    return [float(data.mean()), *(float(v) for v in np.quantile(means, [0.025, 0.975]))]
