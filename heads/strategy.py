"""How a job is spread over processes, and what rank 0 does alone before the process group exists."""

import os
import time
from pathlib import Path
from typing import Any

from heads.files import atomic


def rank_zero() -> bool:
    """True in the process that prepares files: rank 0, or the only one."""
    return int(os.environ.get("RANK", os.environ.get("LOCAL_RANK", "0"))) == 0


def wait_for(path: Path, seconds: float = 3600) -> None:
    """Ranks other than 0 wait until rank 0 has written `path`; torchrun ends them if rank 0 fails."""
    deadline = time.monotonic() + seconds
    while not path.exists():
        if rank_zero():
            raise AssertionError(f"rank 0 was to write {path}")
        if time.monotonic() > deadline:
            raise ValueError(f"rank 0 has not written {path} in {seconds:.0f} s")
        time.sleep(0.2)


def choose_devices(accelerator: str, devices: int) -> tuple[str, int]:
    """(accelerator, processes on this machine); under torchrun its LOCAL_WORLD_SIZE wins.

    Raises ValueError if GPUs are asked for that are not there.
    """
    import torch

    if accelerator not in ("auto", "cpu", "gpu"):
        raise ValueError(f"trainer.accelerator is {accelerator!r}; use auto, cpu or gpu")
    found = torch.cuda.device_count()
    if accelerator == "auto":
        accelerator = "gpu" if found else "cpu"
    devices = int(os.environ.get("LOCAL_WORLD_SIZE", devices))
    if accelerator == "gpu" and devices > found:
        raise ValueError(
            f"this run needs {devices} GPU(s), but the machine has {found}; "
            "set trainer.devices, or trainer.accelerator=cpu"
        )
    return accelerator, devices


def choose_strategy(devices: int) -> Any:
    """DDP for several processes. Buffers are constants here; broadcasting them would tie ranks whose counts differ."""
    from lightning.pytorch.strategies import DDPStrategy

    world = int(os.environ.get("WORLD_SIZE", devices))
    return DDPStrategy(broadcast_buffers=False) if world > 1 else "auto"


def whole_checkpoints() -> Any:
    """Lightning's checkpoint writer, made atomic on any file system: its own goes through a move from /tmp."""
    import torch
    from lightning.pytorch.plugins.io import TorchCheckpointIO

    class WholeCheckpoints(TorchCheckpointIO):
        def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
            with atomic(path) as temporary:
                torch.save(checkpoint, temporary)

    return WholeCheckpoints()


def choose_precision(precision: str, accelerator: str) -> str:
    """auto: bf16-mixed on a GPU and on CPUs with bf16 matrix units; 32-true on others, where bf16 is emulated."""
    import torch

    if precision != "auto":
        return precision
    return "bf16-mixed" if accelerator == "gpu" or torch.cpu._is_amx_tile_supported() else "32-true"
