"""Decode with exported heads, and measure what it costs and gives."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from eval.decoders import DecodeResult, decode

__all__ = ["DecodeResult", "decode"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'eval' has no attribute {name!r}")
    import eval.decoders

    return getattr(eval.decoders, name)
