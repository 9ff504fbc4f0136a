"""Which class adapts which model, and the metadata of each family, kept in NAME.yaml beside the adapter.

Classes are named as text and imported when asked for, so adapters can import us.
"""

import importlib
import inspect
import os
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml


@dataclass(frozen=True)
class Family:
    """What is known of a published model without its checkpoint. The YAML file names the sources."""

    adapter_class: str
    """Class of the module of the same name."""
    model_types: list[str]
    """`model_type` of the config.json files that are read with this adapter: published checkpoints have no card."""
    hub_id: str
    guidance: float
    top_k: int
    down: int
    """Rows that the heads of the family's recipes reach down."""
    config: dict[str, Any]
    """config.json, as far as the shapes of a model follow from it."""

    def model_config(self) -> dict[str, Any]:
        """A copy of `config`, with the ranges of its vocabulary written out: {template, from, to, id} each."""
        config: dict[str, Any] = yaml.safe_load(yaml.safe_dump(self.config))
        letters = str.maketrans("0123456789", "ABCDEFGHIJ")
        for words in config.pop("vocabulary_ranges", ()):
            for n in range(words["from"], words["to"] + 1):
                number = str(n).translate(letters) if words.get("letters") else n
                config["vocabulary_map"][words["template"].format(number)] = words["id"] + n - words["from"]
        return config


@cache
def families() -> dict[str, Family]:
    """The families this package has adapters for, by adapter."""
    files = sorted(Path(__file__).parent.glob("*.yaml"))
    return {file.stem: Family(**yaml.safe_load(file.read_text(encoding="utf-8"))) for file in files}


def find_family(name: str) -> Family:
    """Raises ValueError for a name there is no family of."""
    if name not in families():
        raise ValueError(f"no family of backbones is named {name!r}; known: {', '.join(families())}")
    return families()[name]


def adapter_of(model_type: object) -> str | None:
    """The adapter for `model_type` of a config.json; None if there is none."""
    return next((name for name, family in families().items() if model_type in family.model_types), None)


def find_class(adapter: str | None, where: str) -> type[Any]:
    """The class of an adapter: one of `families()`, or anyone's `package.module:Class`, also beside the current folder.

    Raises ValueError for one that is not known or cannot be imported; `where` is what would have named it.
    """
    if adapter in families():
        return find_named(f"draftgrid.heads.backbones.{adapter}:{families()[adapter].adapter_class}", "adapter")
    if adapter is not None and ":" in adapter:
        return find_named(adapter, "adapter")
    why = f"{where} names no adapter" if adapter is None else f"adapter is {adapter!r}"
    known = ", ".join(families())
    raise ValueError(f"backbone: {why}; set adapter to one of {known}, or to package.module:Class of your own")


def find_named(name: str, key: str) -> type[Any]:
    """The class `package.module:Class`, also of a module beside the current folder. Raises ValueError naming `key`."""
    module, _, attribute = name.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        found = getattr(importlib.import_module(module), attribute, None)
    except ImportError as error:
        raise ValueError(f"{key} is {name!r}, but {module} cannot be imported: {error}") from None
    if not inspect.isclass(found):
        raise ValueError(f"{key} is {name!r}, but {module} has no class {attribute!r}")
    return found


def family_of(model: Any) -> type[Any]:
    """The adapter of a Hugging Face model, by its config. Raises ValueError for a model of no known family."""
    kind = getattr(getattr(model, "config", None), "model_type", None)
    adapter = adapter_of(kind)
    if adapter is None:
        known = ", ".join(t for family in families().values() for t in family.model_types)
        raise ValueError(f"{type(model).__name__}: config.model_type is {kind!r}; known: {known}")
    return find_class(adapter, type(model).__name__)
