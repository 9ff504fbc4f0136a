"""Draftgrid: train drafting heads for autoregressive image models, and decode with them.

    from draftgrid import MTPHeads, decode, load_backbone, load_tokenizer

The rest lies in `draftgrid.heads`, `draftgrid.data`, `draftgrid.eval`, ... The checkout's top folder is this package.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from draftgrid.eval.decoders import DecodeResult as DecodeResult
    from draftgrid.eval.decoders import decode as decode
    from draftgrid.heads.backbones import Backbone as Backbone
    from draftgrid.heads.backbones import load_backbone as load_backbone
    from draftgrid.heads.chain import ChainHeads as ChainHeads
    from draftgrid.heads.config import HeadsConfig as HeadsConfig
    from draftgrid.heads.grid import TokenGrid as TokenGrid
    from draftgrid.heads.mtp import MTPHeads as MTPHeads
    from draftgrid.heads.offsets import OffsetHeads as OffsetHeads
    from draftgrid.heads.tokenizers import ImageTokenizer as ImageTokenizer
    from draftgrid.heads.tokenizers import load_tokenizer as load_tokenizer

_HOME = {
    "Backbone": "heads.backbones",
    "ChainHeads": "heads.chain",
    "DecodeResult": "eval.decoders",
    "HeadsConfig": "heads.config",
    "ImageTokenizer": "heads.tokenizers",
    "MTPHeads": "heads.mtp",
    "OffsetHeads": "heads.offsets",
    "TokenGrid": "heads.grid",
    "decode": "eval.decoders",
    "load_backbone": "heads.backbones",
    "load_tokenizer": "heads.tokenizers",
}

__all__ = [*_HOME]


def __getattr__(name: str) -> Any:
    """Import on first use: a command that only reads files does not wait for transformers."""
    if name not in _HOME:
        raise AttributeError(f"module 'draftgrid' has no attribute {name!r}")
    return getattr(importlib.import_module(f"draftgrid.{_HOME[name]}"), name)
