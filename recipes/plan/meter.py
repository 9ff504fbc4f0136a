"""Counting what code does without doing it: bytes alive, FLOPs and weights read, on tensors with shapes and no data.

The training code itself is run, on fake tensors: what is counted is what will run, whatever heads and losses it has.
"""

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

aten = torch.ops.aten
ROWS_ONLY = (aten.embedding, aten.index, aten.index_select)
"""What reads as much of its first argument as it returns."""


class Meter(TorchDispatchMode):
    """Counts what happens under it. Works on real and on fake tensors alike.

    `live` and `peak` are bytes of storages made under it; what was there before does not count. `flops` are those of
    matrix products and attention (a causal one in full), a multiply-add being two. A yes-or-no question to a fake
    tensor's data is answered with yes.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = self.flops = 0
        self._made: dict[int, int] = {}
        self._outside: dict[int, int] = {}
        """Storages that were there before -> the most elements of it one operation has read."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        packet = func._overloadpacket
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        for tensor in given:
            key = tensor.untyped_storage()._cdata
            if key not in self._made and key not in self._outside:
                self._outside[key] = 0
                weakref.finalize(tensor.untyped_storage(), self._outside.pop, key, None)
        if packet is aten._local_scalar_dense and isinstance(given[0], FakeTensor) and given[0].dtype == torch.bool:
            return True  # what code asks about data: is all of it finite?
        out = func(*args, **kwargs)
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                self._hold(tensor.untyped_storage())
        if func.namespace == "aten" and not func.is_view:  # others ask for shapes and devices
            for tensor in given:
                key = tensor.untyped_storage()._cdata
                if key in self._outside:
                    read = out.numel() if packet in ROWS_ONLY and tensor is given[0] else tensor.numel()
                    self._outside[key] = max(self._outside[key], read)
        self.flops += _flops(packet, args, kwargs, out)
        return out

    def _hold(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._made or key in self._outside:
            return
        self._made[key] = storage.nbytes()
        self.live += self._made[key]
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._release, key)

    def _release(self, key: int) -> None:
        self.live -= self._made.pop(key)

    def read(self, parameters: Iterable[Tensor]) -> int:
        """Elements of these tensors that were read, each counted once however often it was read."""
        return sum(self._outside.get(key, 0) for key in {p.untyped_storage()._cdata for p in parameters})


def _flops(packet: Any, args: Any, kwargs: Any, out: Any) -> int:
    if packet is aten._scaled_dot_product_flash_attention_for_cpu:  # torch's own table knows only the GPU's
        return sdpa_flop_count(*(x.shape for x in args[:3]))
    if packet is aten._scaled_dot_product_flash_attention_for_cpu_backward:
        return sdpa_backward_flop_count(*(x.shape for x in args[:4]))
    count = flop_registry.get(packet)
    return count(*args, **kwargs, out_val=out) if count else 0


def fakes() -> FakeTensorMode:
    """The mode fake tensors are made in. Leave it before they are used, so that indices stay real."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def make_fake(module: nn.Module, dtype: torch.dtype, mode: FakeTensorMode) -> None:
    """Give a module built on the meta device fake CPU parameters of a dtype, on which autocast and autograd work."""
    known: dict[int, nn.Parameter] = {}
    with mode:
        for part in module.modules():
            for name, p in part._parameters.items():
                if p is not None:
                    if id(p) not in known:
                        known[id(p)] = nn.Parameter(torch.empty(p.shape, dtype=dtype), p.requires_grad)
                    part._parameters[name] = known[id(p)]
            for name, buffer in part._buffers.items():
                if buffer is not None and buffer.is_meta:
                    part._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype)


@contextmanager
def fake_gradients(parameters: Iterable[nn.Parameter], mode: FakeTensorMode) -> Iterator[None]:
    """Gradients that are there already, so that a backward adds to them and a meter does not count them."""
    parameters = list(parameters)
    with mode:
        for p in parameters:
            p.grad = torch.empty_like(p)
    try:
        yield
    finally:
        for p in parameters:
            p.grad = None
