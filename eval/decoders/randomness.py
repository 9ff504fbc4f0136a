"""The one door randomness comes through: `accept` and `draw`, keyed by (seed, sample, position, purpose, visit).

Counter-based: every number is a hash of its key, so a sample does not depend on what else is in its batch, and a test
can put an enumerating source in the same place. `visit` is the step: without it a position's accept number would be
used again at every visit, which breaks the law of the decoder.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

PURPOSES = {"birth": 1, "accept": 2, "residual": 3, "gumbel": 4}
MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15
MIX = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)


@dataclass(frozen=True)
class Where:
    """Which numbers are asked for."""

    sample: Sequence[int]
    """(B,) number of each sample in the whole job, not in the batch."""
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
        turn = where.visit * 8 + PURPOSES[where.purpose]
        keys = [_mix_int(_mix_int(_mix_int(self.seed) ^ s * GOLDEN) ^ turn * GOLDEN) for s in where.sample]
        key = torch.tensor([_signed(k) for k in keys], device=where.position.device)
        mixed = _mix(key[:, None] ^ where.position * _signed(GOLDEN))
        return _shift(mixed, 11).double() * 2.0**-53

    def accept(self, probability: Tensor, where: Where) -> Tensor:
        return self.uniform(where) < probability

    def draw(self, weights: Tensor, where: Where, needed: Tensor | None = None) -> Tensor:
        """Inverse of the cumulative sum: the first index whose cumulative weight exceeds u times the total."""
        cumulative = weights.cumsum(-1, dtype=torch.float64)
        total = cumulative[..., -1:]
        u = self.uniform(where)[..., None] * total
        index = torch.searchsorted(cumulative, u, right=True)
        # u may round up to the total: the last index with weight is where the total is first reached.
        last = torch.searchsorted(cumulative, total.contiguous())
        return torch.minimum(index, last).squeeze(-1).clamp(max=weights.shape[-1] - 1)


def _signed(value: int) -> int:
    """The int64 with the same bits."""
    return value - (1 << 64) if value >= 1 << 63 else value


def _mix_int(x: int) -> int:
    """splitmix64's finalizer on the 64 low bits of a Python integer."""
    x &= MASK
    x = (x ^ x >> 30) * MIX[0] & MASK
    x = (x ^ x >> 27) * MIX[1] & MASK
    return x ^ x >> 31


def _shift(x: Tensor, bits: int) -> Tensor:
    """Logical right shift of int64."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix(x: Tensor) -> Tensor:
    """The same on a tensor of int64, whose products wrap."""
    x = (x ^ _shift(x, 30)) * _signed(MIX[0])
    x = (x ^ _shift(x, 27)) * _signed(MIX[1])
    return x ^ _shift(x, 31)
