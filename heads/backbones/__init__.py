"""Backbones: a frozen autoregressive image model behind one small interface, one adapter per family."""

from draftgrid.heads.backbones.base import Backbone, DecodeState
from draftgrid.heads.backbones.loading import load_backbone, resolve_checkpoint

__all__ = ["Backbone", "DecodeState", "load_backbone", "resolve_checkpoint"]
