"""Draftgrid: what has weights (backbones, image tokenizers, drafting heads) and how heads are trained and exported."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from heads.backbones import Backbone, load_backbone
    from heads.config import HeadsConfig
    from heads.grid import TokenGrid
    from heads.mtp import MTPHeads, OffsetHeads
    from heads.tokenizers import ImageTokenizer, load_tokenizer

_HOME = {
    "Backbone": "heads.backbones",
    "load_backbone": "heads.backbones",
    "TokenGrid": "heads.grid",
    "HeadsConfig": "heads.config",
    "MTPHeads": "heads.mtp",
    "OffsetHeads": "heads.mtp",
    "ImageTokenizer": "heads.tokenizers",
    "load_tokenizer": "heads.tokenizers",
}

__all__ = [
    "Backbone",
    "HeadsConfig",
    "ImageTokenizer",
    "MTPHeads",
    "OffsetHeads",
    "TokenGrid",
    "load_backbone",
    "load_tokenizer",
]


def __getattr__(name: str) -> Any:
    """Import on first use, so that a command that only reads files does not wait for transformers."""
    if name not in _HOME:
        raise AttributeError(f"module 'heads' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)
