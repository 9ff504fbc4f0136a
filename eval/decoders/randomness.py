"""The one door randomness comes through: `accept` and `draw`, keyed by (seed, sample, position, purpose, visit).

Counter-based: every number is a hash of its key, so a sample does not depend on what else is in its batch, and a test
can put an enumerating source in the same place. `visit` is the step: without it a position's accept number would be
used again at every visit, which breaks the law of the decoder.
"""

from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

PURPOSES = {"birth": 1, "accept": 2, "residual": 3, "gumbel": 4}


@dataclass(frozen=True)
class Where:
    """Which numbers are asked for."""

    sample: Tensor
    """(B,) index of each sample in the whole job, not in the batch."""
    position: Tensor
    """(B, K) image positions."""
    visit: int
    """The step, prefill = 0."""
    purpose: str = "birth"

    def to(self, purpose: str) -> "Where":
        return replace(self, purpose=purpose)


class RandomSource(Protocol):
    def accept(self, probability: Tensor, where: Where) -> Tensor:
        """(B, K) probabilities (1 or more = certain) -> (B, K) bool."""
        ...

    def draw(self, weights: Tensor, where: Where, needed: Tensor | None = None) -> Tensor:
        """(B, K, V) weights >= 0, not necessarily summing to 1 -> (B, K) indices; where not `needed`, anything."""
        ...


class SeededSource:
    """Uniform numbers from a 64-bit mix (splitmix64's finalizer) of the key, on whatever device the key lives."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def uniform(self, where: Where) -> Tensor:
        """(B, K) in [0, 1), fp64, multiples of 2^-53."""
        key = _mix(torch.full_like(where.sample, self.seed))
        turn = torch.full_like(where.sample, where.visit * 8 + PURPOSES[where.purpose])
        for part in (where.sample, turn):
            key = _mix(key ^ (part * _signed(0x9E3779B97F4A7C15)))
        key = _mix(key[:, None] ^ (where.position * _signed(0xD1B54A32D192ED03)))
        return _shift(key, 11).double() * 2.0**-53

    def accept(self, probability: Tensor, where: Where) -> Tensor:
        return self.uniform(where) < probability

    def draw(self, weights: Tensor, where: Where, needed: Tensor | None = None) -> Tensor:
        """Inverse of the cumulative sum: the first index whose cumulative weight exceeds u times the total."""
        cumulative = weights.cumsum(-1)
        total = cumulative[..., -1:]
        u = (self.uniform(where)[..., None] * total.double()).to(weights.dtype)
        index = torch.searchsorted(cumulative, u, right=True)
        # u may round up to the total: the last index with weight is where the total is first reached.
        last = torch.searchsorted(cumulative, total.contiguous())
        return torch.minimum(index, last).squeeze(-1).clamp(max=weights.shape[-1] - 1)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


def _shift(x: Tensor, bits: int) -> Tensor:
    """Logical right shift of int64."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix(x: Tensor) -> Tensor:
    x = (x ^ _shift(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shift(x, 27)) * _signed(0x94D049BB133111EB)
    return x ^ _shift(x, 31)
