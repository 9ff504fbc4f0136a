"""The device of a command that runs in one process: `device=auto|cpu|cuda|cuda:N`."""

import re

import torch


def pick_device(device: str) -> str:
    """'auto' is the GPU if there is one. Raises ValueError for an unknown name, or without a GPU."""
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if not re.fullmatch(r"cpu|cuda(:\d+)?", device):
        raise ValueError(f"device is {device!r}; use auto, cpu, cuda or cuda:N")
    if device != "cpu" and not torch.cuda.is_available():
        raise ValueError(f"device is {device!r}, but this machine has no GPU; use device=cpu")
    return device
