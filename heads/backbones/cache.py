"""A key-value cache whose rows may stand at different lengths: preallocated, written in place, rolled back by a number.

Slot number = position id, so a query at position P sees exactly the slots 0..P of its own row and nothing stale: what
lies beyond a row's length is overwritten before a later query can reach it. No padding is ever visible.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

BLOCK = 1024
"""Slots a static cache is read by."""


@dataclass
class Window:
    """Where a forward writes, and how much of the cache it reads."""

    capacity: int
    write: Tensor | slice
    """Slots: the same for all rows, or (R, L) of each."""
    seen: int


class _Layer(CacheLayerMixin):
    """One layer's keys and values, (R, heads, capacity, head_dim)."""

    def __init__(self, window: Window) -> None:
        super().__init__()
        self.window = window

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        room = ((*x.shape[:2], self.window.capacity, x.shape[-1]) for x in (key_states, value_states))
        self.keys, self.values = map(key_states.new_zeros, room)
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None and self.values is not None
        write, seen = self.window.write, self.window.seen
        if isinstance(write, slice):
            self.keys[:, :, write] = key_states
            self.values[:, :, write] = value_states
        else:
            write = write.to(key_states.device)  # layers may lie on several devices
            rows = torch.arange(write.shape[0], device=write.device)[:, None]
            self.keys[rows, :, write] = key_states.transpose(1, 2)
            self.values[rows, :, write] = value_states.transpose(1, 2)
        return self.keys[:, :, :seen], self.values[:, :, :seen]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.window.seen, 0

    def get_seq_length(self) -> int:
        return self.window.seen

    def get_max_length(self) -> int:
        return self.window.capacity


class RaggedCache(Cache):
    """Call `aim` before each forward: it says where the coming tokens are written and how many slots are read.

    `turn` counts the pictures it has served: a static one is used again, for graphs know its address.
    """

    def __init__(self, layers: int, capacity: int, static: bool = False) -> None:
        """`static`: read whole blocks and write by index, so that few shapes occur from step to step."""
        # Layers know the window and not the cache: a cycle would keep gigabytes until Python looks for cycles.
        self.window = Window(capacity, slice(0, 0), 0)
        self.static, self.turn = static, 0
        super().__init__(layers=[_Layer(self.window) for _ in range(layers)])

    @property
    def capacity(self) -> int:
        return self.window.capacity

    @property
    def seen(self) -> int:
        return self.window.seen

    def aim(self, first: list[int], length: int, device: torch.device) -> Tensor:
        """Rows write `length` slots from `first[r]` on. Returns position ids (R or 1, length)."""
        seen = max(first) + length
        if seen > self.capacity:
            raise ValueError(f"the cache holds {self.capacity} slots, the window ends at {seen}")
        if self.static:
            seen = min(self.capacity, -(-seen // BLOCK) * BLOCK)
        self.window.seen = seen
        if len(set(first)) == 1 and not self.static:
            self.window.write = slice(first[0], first[0] + length)
            return torch.arange(first[0], first[0] + length, device=device)[None]
        self.window.write = torch.tensor(first, device=device)[:, None] + torch.arange(length, device=device)
        return self.window.write

    def mask(self, positions: Tensor, dtype: torch.dtype) -> Tensor | None:
        """Additive (R or 1, 1, L, seen) mask: slot <= position. None where a single query sees every slot read."""
        if positions.shape == (1, 1) and not self.static:
            return None
        hidden = torch.arange(self.seen, device=positions.device) > positions[:, None, :, None]
        return torch.zeros_like(hidden, dtype=dtype).masked_fill_(hidden, torch.finfo(dtype).min)
