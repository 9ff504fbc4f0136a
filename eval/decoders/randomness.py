"""The one door randomness comes through: `accept` and `draw`, keyed by (seed, sample, position, purpose, visit).

Counter-based: every number is a hash of its key, so a sample does not depend on what else is in its batch, and a test
can put an enumerating source in the same place. `visit` is the step: without it a position's accept number would be
used again at every visit, which breaks the law of the decoder.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
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
    position: np.ndarray
    """(K,) or (B, K) image positions."""
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
    """Uniform numbers from a 64-bit mix (splitmix64's finalizer) of the key.

    Keys are known on the host, so the numbers are made there, a few microseconds a window, and copied to the device;
    nothing is read back.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def uniform(self, where: Where) -> np.ndarray:
        """(B, K) in [0, 1), multiples of 2^-40."""
        turn = where.visit * 8 + PURPOSES[where.purpose]
        keys = [_mix_int(_mix_int(_mix_int(self.seed) ^ s * GOLDEN) ^ turn * GOLDEN) for s in where.sample]
        position = np.asarray(where.position, np.int64).view(np.uint64) * np.uint64(GOLDEN)
        mixed = _mix(np.array(keys, np.uint64)[:, None] ^ position)
        return (mixed >> np.uint64(24)) * 2.0**-40

    def accept(self, probability: Tensor, where: Where) -> Tensor:
        return torch.from_numpy(self.uniform(where)).to(probability.device) < probability

    def draw(self, weights: Tensor, where: Where, needed: Tensor | None = None) -> Tensor:
        """Inverse of the cumulative sum: the first index whose cumulative weight exceeds u times the total.

        In fp64, where a u of 40 bits times the total stays below the total: the index always has weight.
        """
        cumulative = weights.cumsum(-1, dtype=torch.float64)
        u = torch.from_numpy(self.uniform(where)).to(weights.device)[..., None]
        index = torch.searchsorted(cumulative, u * cumulative[..., -1:], right=True)
        return index.squeeze(-1).clamp_(max=weights.shape[-1] - 1)


def _mix_int(x: int) -> int:
    """splitmix64's finalizer on the low 64 bits of a Python integer: a sample's key is one number."""
    x &= MASK
    x = (x ^ x >> 30) * MIX[0] & MASK
    x = (x ^ x >> 27) * MIX[1] & MASK
    return x ^ x >> 31


def _mix(x: np.ndarray) -> np.ndarray:
    """The same on an array of uint64, whose products wrap: a window's positions are many."""
    x = (x ^ x >> np.uint64(30)) * np.uint64(MIX[0])
    x = (x ^ x >> np.uint64(27)) * np.uint64(MIX[1])
    return x ^ x >> np.uint64(31)
