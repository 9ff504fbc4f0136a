"""Decoders: policies on one engine loop. `decode` is the way in."""

import inspect
from collections.abc import Sequence
from typing import Any

from draftgrid.common.cli import suggest
from draftgrid.eval.decoders.ar import AR
from draftgrid.eval.decoders.coupled import CoupledSSD
from draftgrid.eval.decoders.engine import DecodeResult, Policy, RowCallback, Stats, run
from draftgrid.eval.decoders.jacobi import SCD, SJD, GumbelFixedPoint
from draftgrid.eval.decoders.kernels import Sampling
from draftgrid.eval.decoders.mtp1d import MTP1D
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
    "default_decoder",
    "make_policy",
]

DECODERS: dict[str, type[Policy]] = {
    kind.name: kind for kind in (AR, SJD, SCD, GumbelFixedPoint, MTP1D, CoupledSSD, SSD, GSD, Lantern)
}


RENAMED = {"chain": "mtp1d", "birth": "initial"}
"""Former names of decoders and settings; a user of one is told the new one."""


def default_decoder(heads: bool) -> str:
    """The exact decoder with the fewest steps: one that drafts with either kind of heads, or one that needs none."""
    return "ssd_coupled" if heads else "scd"


def make_policy(decoder: str, **settings: Any) -> Policy:
    """A fresh decoder by name. Raises ValueError for an unknown name or setting, naming the nearest right one."""
    if RENAMED.get(decoder) in DECODERS:
        raise ValueError(f"decoder {decoder!r} is now called {RENAMED[decoder]!r}")
    if decoder not in DECODERS:
        raise ValueError(f"unknown decoder {decoder!r}. {suggest(decoder, list(DECODERS))}")
    kind = DECODERS[decoder]
    known = list(inspect.signature(kind).parameters)
    for name in settings:
        if name not in known:
            hint = suggest(name, known) if known else "It has no settings."
            if RENAMED.get(name) in known:
                hint = f"It is now called {RENAMED[name]!r}."
            raise ValueError(f"decoder {decoder} has no setting {name!r}. {hint}")
    return kind(**settings)


def decode(
    backbone: Backbone,
    prompts: Sequence[str],
    heads: MTPHeads | None = None,
    *,
    decoder: str = "",
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

    `decoder` '' is `default_decoder`'s: ssd_coupled with heads of either kind, scd without heads; both are exact.
    `settings` are the decoder's own (ssd: rounds, rows, staged). A picture depends on (seed, its number in `samples`,
    its prompt) and not on the rest of the batch. `callback(rows, tokens)` is called whenever a row is finished.
    Raises ValueError for a setting out of range, missing heads, or heads of another backbone.
    """
    sampling = Sampling(guidance, temperature, top_k, top_p)
    policy = make_policy(decoder or default_decoder(heads is not None), **settings)
    return run(backbone, prompts, policy, sampling, heads, seed, samples, None, tokenizer, callback)
