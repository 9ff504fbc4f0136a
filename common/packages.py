"""Packages that only some commands need: a missing one is named, with the line that installs it."""

import importlib
from types import ModuleType


def need(module: str, package: str = "", use: str = "") -> ModuleType:
    """Import `module`. Raises ValueError saying what needs it and how to install `package` (the module's own name)."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = package or module.partition(".")[0]
        what = f"{use} needs" if use else "this needs"
        raise ValueError(f"{what} the package {package} ({error}); run: pip install {package}") from None
