"""The one door randomness comes through: `accept`, `draw`, `gumbel`, keyed by (seed, sample, position, purpose, visit).

Counter-based: every number is a hash of its key, so a sample does not depend on what else is in its batch, and a test
can put an enumerating source in the same place. `visit` counts the phases of decoding: without it a position's accept
number would be used again at every visit, which changes the decoder's distribution. Only a position's Gumbel vector is
drawn once for all visits: that is what couples them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

PURPOSES = {"initial": 1, "accept": 2, "residual": 3, "gumbel": 4}
MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15
MIX = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
SMALL = 2048
"""Rows up to this length are searched in one go, longer ones in blocks."""


@dataclass(frozen=True, eq=False)
class Where:
    """Which numbers are asked for."""

    sample: Sequence[int]
    """(B,) number of each sample in the whole job, not in the batch."""
    position: np.ndarray
    """(K,) or (B, K) image positions."""
    visit: int
    """Two a step: even while verifying, odd while drafting; prefill = step 0."""
    purpose: str = "initial"

    def to(self, purpose: str) -> "Where":
        return replace(self, purpose=purpose)


class RandomSource(Protocol):
    def accept(self, probability: Tensor, where: Where) -> Tensor:
        """(B, K) probabilities (1 or more = certain) -> (B, K) bool."""

    def draw(self, weights: Tensor, where: Where, needed: Tensor | None = None) -> Tensor:
        """(B, K, V) weights >= 0, not necessarily summing to 1 -> (B, K) indices; where not `needed`, anything."""

    def gumbel(self, like: Tensor, where: Where) -> Tensor:
        """exp(g), g standard Gumbel noise of the shape of `like` (B, K, V): one vector a position for all visits."""


class SeededSource:
    """Uniform numbers from a 64-bit mix (splitmix64's finalizer) of the key.

    Keys are known on the host, so the numbers are made there, a few microseconds a window, and copied to the device;
    nothing is read back. Gumbel vectors are as long as the vocabulary and are hashed on the device.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self._places: Tensor | None = None

    def keys(self, where: Where) -> np.ndarray:
        """(B, K) uint64: the hash of everything but the place in the vocabulary."""
        visit = 0 if where.purpose == "gumbel" else where.visit
        turn = visit * 8 + PURPOSES[where.purpose]
        keys = [_mix(_mix(_mix(self.seed) ^ s * GOLDEN) ^ turn * GOLDEN) for s in where.sample]
        position = np.asarray(where.position, np.int64).view(np.uint64) * np.uint64(GOLDEN)
        return _mix(np.array(keys, np.uint64)[:, None] ^ position)

    def uniform(self, where: Where) -> np.ndarray:
        """(B, K) in [0, 1), multiples of 2^-40."""
        return (self.keys(where) >> np.uint64(24)) * 2.0**-40

    def _numbers(self, where: Where, device: torch.device) -> Tensor:
        return torch.from_numpy(self.uniform(where)).to(device)

    def accept(self, probability: Tensor, where: Where) -> Tensor:
        return self._numbers(where, probability.device) < probability

    def draw(self, weights: Tensor, where: Where, needed: Tensor | None = None) -> Tensor:
        """Inverse of the cumulative sum: the first index whose cumulative weight exceeds u times the total.

        Cumulated in fp64, where a u of 40 bits times the total stays below the total: the index always has weight. A
        large vocabulary is cut into N blocks of S: one pass sums them, and only the block that is hit is cumulated.
        """
        u = self._numbers(where, weights.device)[..., None]  # (B, K, 1), as all targets and found indices are
        V = weights.shape[-1]
        if weights.stride(-1) == 0:  # one number expanded: all alike
            return (u[..., 0] * V).long()
        if V <= SMALL:
            return _search(weights, u).squeeze(-1)
        size = block_size(V)
        blocks = weights.unflatten(-1, (V // size, size))  # (B, K, N, S)
        cumulative = blocks.sum(-1).cumsum(-1, dtype=torch.float64)  # (B, K, N)
        target = u * cumulative[..., -1:]
        block = _first_above(cumulative, target)
        upper = cumulative.gather(-1, block)
        before = torch.where(block > 0, cumulative.gather(-1, (block - 1).clamp_(min=0)), 0.0)
        share = ((target - before) / (upper - before)).clamp_(max=1 - 2.0**-40)
        inside = blocks.gather(-2, block[..., None].expand(*block.shape, size)).squeeze(-2)  # (B, K, S)
        return (block * size + _search(inside, share)).squeeze(-1)

    def gumbel(self, like: Tensor, where: Where) -> Tensor:
        key = torch.from_numpy(self.keys(where.to("gumbel")).view(np.int64)).to(like.device)  # (B, K)
        V = like.shape[-1]
        if self._places is None or self._places.shape[0] != V or self._places.device != key.device:
            self._places = torch.arange(V, device=key.device) * _signed(GOLDEN)
        x = _mix_torch(key[..., None] ^ self._places)  # (B, K, V)
        # exp(g) = 1 / E with E ~ Exp(1) = -log u. u is half a step above a multiple of 2^-bits: never 0 and never 1.
        bits = 52 if like.dtype == torch.float64 else 23
        u = (x >> (64 - bits)).to(like.dtype).add_(2.0 ** (bits - 1) + 0.5).mul_(2.0**-bits)
        return u.log_().neg_().reciprocal_()


def block_size(V: int) -> int:
    """The largest divisor of V up to 256: a long row is searched block first, then inside one."""
    return next(n for n in range(256, 0, -1) if V % n == 0)


def _search(weights: Tensor, u: Tensor) -> Tensor:
    """(..., V) weights, (..., 1) in [0, 1) -> (..., 1) first index whose cumulative weight exceeds that share."""
    cumulative = weights.cumsum(-1, dtype=torch.float64)
    return _first_above(cumulative, u * cumulative[..., -1:])


def _first_above(cumulative: Tensor, target: Tensor) -> Tensor:
    """(..., V) cumulative weights, (..., 1) targets below the total -> (..., 1) first index above its target."""
    return torch.searchsorted(cumulative, target, right=True).clamp_(max=cumulative.shape[-1] - 1)


def _mix(x: Any) -> Any:
    """splitmix64's finalizer on the low 64 bits of a Python integer, or on each number of an array of uint64."""
    x = x & MASK
    x = (x ^ x >> 30) * MIX[0] & MASK
    x = (x ^ x >> 27) * MIX[1] & MASK
    return x ^ x >> 31


def _mix_torch(x: Tensor) -> Tensor:
    """The same in place on a tensor of int64, whose products wrap and whose shifts carry the sign, masked off."""
    x.bitwise_xor_(_shift(x, 30)).mul_(_signed(MIX[0]))
    x.bitwise_xor_(_shift(x, 27)).mul_(_signed(MIX[1]))
    return x.bitwise_xor_(_shift(x, 31))


def _shift(x: Tensor, bits: int) -> Tensor:
    return (x >> bits).bitwise_and_((1 << (64 - bits)) - 1)


def _signed(x: int) -> int:
    """The 64-bit pattern of x as a signed integer."""
    return x - (1 << 64) if x >> 63 else x
