"""Decoders: policies on one engine loop. `decode` is the way in."""

import inspect
from collections.abc import Sequence
from typing import Any

from draftgrid.common.cli import nearest
from draftgrid.eval.decoders.ar import AR
from draftgrid.eval.decoders.chain import Chain
from draftgrid.eval.decoders.coupled import CoupledSSD
from draftgrid.eval.decoders.engine import DecodeResult, Policy, RowCallback, Stats, run
from draftgrid.eval.decoders.jacobi import SCD, SJD, GumbelFixedPoint
from draftgrid.eval.decoders.kernels import Sampling
from draftgrid.eval.decoders.randomness import RandomSource, SeededSource
from draftgrid.eval.decoders.relaxed import GSD, Lantern
from draftgrid.eval.decoders.ssd import SSD
from draftgrid.heads.backbones.base import Backbone
from draftgrid.heads.mtp import MTPHeads
from draftgrid.heads.tokenizers import ImageTokenizer

__all__ = [
    "DECODERS",
    "DecodeResult",
    "Policy",
    "RandomSource",
    "Sampling",
    "SeededSource",
    "Stats",
    "decode",
    "make_policy",
]

DECODERS: dict[str, type[Policy]] = {
    kind.name: kind for kind in (AR, SJD, SCD, GumbelFixedPoint, Chain, CoupledSSD, SSD, GSD, Lantern)
}


def make_policy(decoder: str, **settings: Any) -> Policy:
    """A fresh decoder by name. Raises ValueError for an unknown name or setting, naming the nearest right one."""
    if decoder not in DECODERS:
        raise ValueError(f"unknown decoder {decoder!r}. {nearest(decoder, list(DECODERS))}")
    kind = DECODERS[decoder]
    known = list(inspect.signature(kind).parameters) if kind.__init__ is not object.__init__ else []
    for name in settings:
        if name not in known:
            hint = nearest(name, known) if known else "It has no settings."
            raise ValueError(f"decoder {decoder} has no setting {name!r}. {hint}")
    return kind(**settings)


def decode(
    backbone: Backbone,
    prompts: Sequence[str],
    heads: MTPHeads | None = None,
    *,
    decoder: str = "ssd",
    guidance: float = 1.0,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
    samples: Sequence[int] | None = None,
    tokenizer: ImageTokenizer | None = None,
    callback: RowCallback | None = None,
    **settings: Any,
) -> DecodeResult:
    """Draw one picture per prompt: tokens (B, H, W) and what it cost.

    `settings` are the decoder's own (ssd: rounds, rows, staged). A picture depends on (seed, its number in `samples`,
    its prompt) and not on the rest of the batch. `callback(rows, tokens)` is called whenever a row is finished.
    Raises ValueError for a setting out of range, missing heads, or heads of another backbone.
    """
    sampling = Sampling(guidance, temperature, top_k, top_p)
    policy = make_policy(decoder, **settings)
    return run(backbone, prompts, policy, sampling, heads, seed, samples, None, tokenizer, callback)
