"""Scaled dot-product attention of grouped queries under a mask, without a copy of the keys and values for each group.

torch's fused kernels take no mask together with grouped queries, so transformers repeats keys and values to one per
query head: Emu3 would copy its whole cache fourfold in every layer of every window. Here the queries of a group are
laid out as more rows of one head, which is the same sum. It is registered with transformers, as its own kinds are.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

NAME = "grouped_sdpa"


def grouped_sdpa(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """query (R, heads, L, d), key and value (R, heads / groups, S, d), mask (R or 1, 1, L, S) -> (R, L, heads, d).

    The mask is added to the products of queries and keys. Without a mask it is transformers' own.
    """
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    if attention_mask is None:
        return sdpa_attention_forward(module, query, key, value, None, scaling=scaling, **kwargs)  # type: ignore[return-value]
    R, heads, L, d = query.shape
    groups = heads // key.shape[1]
    rows = query.reshape(R, key.shape[1], groups * L, d)
    mask = attention_mask if L == 1 or groups == 1 else attention_mask.repeat(1, 1, groups, 1)
    out = scaled_dot_product_attention(rows, key, value, attn_mask=mask, scale=scaling)
    return out.reshape(R, heads, L, -1).transpose(1, 2).contiguous(), None


@contextmanager
def own_attention(config: Any) -> Iterator[None]:
    """Within it a transformers text model of this config attends by `grouped_sdpa`, which our masks fit; afterwards as
    its owner set it. Eager attention, which they fit too, stays."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    theirs = config._attn_implementation  # set without its setter, which would reach into the picture tokenizer's too
    AttentionInterface.register(NAME, grouped_sdpa)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    config._attn_implementation_internal = "eager" if theirs == "eager" else NAME
    try:
        yield
    finally:
        config._attn_implementation_internal = theirs
