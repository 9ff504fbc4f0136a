"""Which class adapts which model. Classes are named as text and imported when asked for, so adapters can import us."""

import importlib
import inspect
import os
import sys
from typing import Any

ADAPTERS = {
    "emu3": "draftgrid.heads.backbones.emu3:Emu3Backbone",
    "janus_pro": "draftgrid.heads.backbones.janus_pro:JanusProBackbone",
    "lumina_mgpt": "draftgrid.heads.backbones.lumina_mgpt:LuminaBackbone",
}
FAMILIES = {"emu3": "emu3", "janus": "janus_pro", "multi_modality": "janus_pro", "chameleon": "lumina_mgpt"}
"""Adapter by config.json's model_type: published checkpoints have no card. multi_modality is DeepSeek's own layout."""


def find_class(adapter: str | None, where: str) -> type[Any]:
    """The class of an adapter: one of ADAPTERS, or anyone's `package.module:Class`, also beside the current folder.

    Raises ValueError for one that is not known or cannot be imported; `where` is what would have named it.
    """
    if adapter is None or (adapter not in ADAPTERS and ":" not in adapter):
        why = f"{where} says of no family" if adapter is None else f"adapter is {adapter!r}"
        raise ValueError(
            f"backbone: {why}; set adapter to one of {', '.join(ADAPTERS)}, or to package.module:Class of your own"
        )
    module, _, name = ADAPTERS.get(adapter, adapter).partition(":")
    if adapter not in ADAPTERS and os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        found = getattr(importlib.import_module(module), name, None)
    except ImportError as error:
        raise ValueError(f"adapter is {adapter!r}, but {module} cannot be imported: {error}") from None
    if not inspect.isclass(found):
        raise ValueError(f"adapter is {adapter!r}, but {module} has no class {name!r}")
    return found


def family_of(model: Any) -> type[Any]:
    """The adapter of a Hugging Face model, by its config. Raises ValueError for a model of no known family."""
    kind = getattr(getattr(model, "config", None), "model_type", None)
    if kind not in FAMILIES:
        raise ValueError(f"{type(model).__name__}: config.model_type is {kind!r}; known: {', '.join(FAMILIES)}")
    return find_class(FAMILIES[kind], type(model).__name__)
