"""Versions, machine and git revision: what a run or a measurement says it was made with."""

import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Any

PACKAGES = ("torch", "lightning", "transformers", "datasets", "safetensors", "draftgrid")


def environment() -> dict[str, Any]:
    """Versions, machine and git revision, for run.json and bench.json."""
    versions: dict[str, str | None] = dict.fromkeys(PACKAGES)
    for name in PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return {"versions": versions, "machine": machine(), "revision": revision()}


def revision() -> str | None:
    """The git revision of this code; None outside a checkout or without git."""
    if not shutil.which("git"):
        return None
    head = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=Path(__file__).parent)
    return head.stdout.strip() or None


def machine() -> str:
    """'2 cores of Intel Xeon ..., Linux' (and the GPU, if there is one)."""
    import torch

    info = Path("/proc/cpuinfo")
    model = re.search(r"model name\s*: (.*)", info.read_text()) if info.is_file() else None
    name = model[1] if model else platform.processor() or platform.machine()
    text = f"{os.cpu_count()} cores of {name}, {platform.system()}, Python {platform.python_version()}"
    return text + (f", {torch.cuda.get_device_name()}" if torch.cuda.is_available() else "")
