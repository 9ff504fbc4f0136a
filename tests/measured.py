"""What a process really holds while it trains, for comparison with what the plan foretells."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn


def measured(
    module: nn.Module, optimizer: torch.optim.Optimizer | None = None, master: Iterable[Tensor] = ()
) -> dict[str, int]:
    """Bytes this process really holds of a module and its optimizer, each storage once: what `held` foretells.

    Of whole and of split tensors alike what lies here is counted. For DeepSpeed pass torch's optimizer, which lies
    inside its own, and its fp32 shards as `master`; gradients it keeps elsewhere than in `.grad`.
    """
    frozen = [p for p in module.parameters() if not p.requires_grad]
    trained = [p for p in module.parameters() if p.requires_grad]
    states = optimizer.state.values() if optimizer is not None else ()
    return {
        "backbone": _bytes(frozen),
        "heads": _bytes(trained),
        "gradients": _bytes(p.grad for p in trained if p.grad is not None),
        "master": _bytes(master),
        "moments": _bytes(t for state in states for t in state.values() if isinstance(t, Tensor) and t.ndim),
    }


def _local(tensor: Tensor) -> Tensor:
    """The part on this rank: of a DTensor (fully_shard), of a ZeRO-3 parameter, or the tensor itself."""
    if hasattr(tensor, "to_local"):
        return tensor.to_local()
    return getattr(tensor, "ds_tensor", tensor)


def _bytes(tensors: Iterable[Tensor]) -> int:
    storages = [_local(t).untyped_storage() for t in tensors]
    return sum({s._cdata: s.nbytes() for s in storages}.values())
