"""A training checkpoint: one file, the same whatever the strategy and the number of ranks that wrote it.

It holds the trained weights and AdamW's moments (whole, fp32), schedule, place in the data, random state of every rank,
and what an export needs: the heads' config, the backbone they belong to, the recipe and the last figures. Never the
backbone. Written whole or not at all.
"""

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from draftgrid.common.files import atomic, read_fields
from draftgrid.common.settings import number, whole
from draftgrid.heads.weights import check_tensors

FORMAT = 1
BEST = "best.ckpt"
MOMENTS = ("exp_avg", "exp_avg_sq")
HELD = {"state_dict": dict, "global_step": int, "figures": dict, "origin": dict, "heads": (dict, None)}
RESUMED = {"optimizer_states": [dict, 1], "lr_schedulers": [dict, 1], "rng": [list, None], "world": int}
RESUMED |= dict.fromkeys(("loops", "callbacks", "TokenDataModule"), dict)
COUNTS = {"broken": int, "skipped": int, "samples": dict}
"""Fields and types that read_fields checks: of every checkpoint, of one that a run resumes from, and of its counts."""


def write_checkpoint(checkpoint: dict[str, Any], path: str | Path) -> None:
    """Raises ValueError if a weight is not finite: such a checkpoint would only bury the last good one."""
    for name, tensor in checkpoint["state_dict"].items():
        if not torch.isfinite(tensor).all():
            raise ValueError(
                f"{name} is not finite at step {checkpoint['global_step']}; nothing is saved, the last checkpoint "
                "stands: resume from it with a lower optim.lr or with trainer.clip set"
            )
    with atomic(path) as temporary:
        torch.save({"format": FORMAT, **checkpoint}, temporary)


def read_checkpoint(path: str | Path) -> dict[str, Any]:
    """Tensors stay in the file until they are used. Raises ValueError for a file that is no checkpoint of ours."""
    try:
        found = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except OSError as error:
        raise ValueError(f"checkpoint {path} cannot be read: {error.strerror or error}") from None
    except Exception as error:  # torch raises what its unpickler and its zip reader raise
        raise ValueError(
            f"checkpoint {path} cannot be read ({str(error).splitlines()[0]}); delete it to resume from the one before"
        ) from None
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise ValueError(f"{path} is no checkpoint of this version (format {FORMAT})")
    read_fields(found, path, HELD)
    whole(f"{path}: global_step", found["global_step"], 0)
    for name, value in found["figures"].items():
        number(f"{path}: figures: {name}", value, -math.inf)
    return found


def read_resumable(path: str | Path, trained: Mapping[str, Sequence[int]]) -> dict[str, Any]:
    """A checkpoint that a run with weights of these names and shapes can resume from. Raises ValueError."""
    found = read_checkpoint(path)
    read_fields(found, path, RESUMED | {"rng": [list, found.get("world")]})
    if found.get("heads"):
        read_fields(read_fields(found, path, {"counts": dict})["counts"], f"{path}: counts", COUNTS)
    (adam,) = found["optimizer_states"]
    read_fields(adam, f"{path}: optimizer_states", {"step": float, "moments": dict, "groups": [dict, 2]})
    read_fields(adam["moments"], f"{path}: moments", dict.fromkeys(MOMENTS, dict))
    check_tensors(f"{path}: state_dict", found["state_dict"], trained)
    for name in MOMENTS if adam["step"] else ():
        check_tensors(f"{path}: {name}", adam["moments"][name], trained)
    return found


def step_file(step: int) -> str:
    return f"step-{step:08d}.ckpt"


def saved_steps(folder: str | Path) -> list[Path]:
    """The step-N.ckpt files of a folder, oldest first."""
    found = [p for p in Path(folder).glob("step-*.ckpt") if re.fullmatch(r"step-\d{8,}\.ckpt", p.name)]
    return sorted(found, key=lambda p: int(p.stem.removeprefix("step-")))


def pick_checkpoint(place: str | Path, which: str = "last") -> Path:
    """A checkpoint file, the newest or best of a folder of them, or those of a run folder. Raises ValueError."""
    place = Path(place)
    if place.is_file():
        return place
    for folder in (place, place / "checkpoints"):
        found = [folder / BEST] if which == "best" else saved_steps(folder)
        if found and found[-1].is_file():
            return found[-1]
    raise ValueError(f"{place} holds no {which} checkpoint; name a run folder, its checkpoints/ or a .ckpt file")
