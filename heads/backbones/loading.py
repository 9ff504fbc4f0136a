"""Loading a backbone from a folder, from the hub, or the demo's, with the adapter it needs."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from draftgrid.common.files import read_fields, read_json
from draftgrid.common.settings import whole
from draftgrid.heads.backbones.base import CARD, Backbone
from draftgrid.heads.backbones.registry import adapter_of, find_class
from draftgrid.heads.weights import HUB_ID, fetch, read_config

GRID = {"grid": ([int, 2], None)}
ASSETS = Path(__file__).parent.parent / "assets"


def shipped() -> list[str]:
    """Names of the checkpoints that come with the package."""
    return sorted(p.parent.name for p in ASSETS.glob(f"*/{CARD}"))


def resolve_checkpoint(name: str | Path) -> Path:
    """A folder, or the name of one shipped with the package (`emoji`). Raises ValueError if there is neither."""
    for path in (Path(name), ASSETS / str(name)):
        if path.is_dir():
            return path
    known = ", ".join(shipped()) or "none"
    raise ValueError(f"{str(name)!r} is neither a folder nor a shipped checkpoint ({known}) nor a hub id like org/name")


def find_checkpoint(
    name: str | Path, revision: str | None = None, local_files_only: bool = False, part: str | None = ""
) -> Path:
    """The same, or the folder of a hub id, `org/name` or `org/name@revision`; revision, local_files_only and part as in
    `weights.fetch`. Raises ValueError if there is no such folder, shipped checkpoint or hub id."""
    hub = HUB_ID.fullmatch(str(name))
    if hub is None or Path(name).is_dir():
        return resolve_checkpoint(name)
    return fetch(hub["id"], revision or hub["revision"], local_files_only, part)


def read_card(folder: Path) -> dict[str, Any]:
    """draftgrid.json, or the adapter that a published checkpoint's config.json needs; empty if there is neither file.

    Raises ValueError, naming file, field and value, for a field of the wrong type.
    """
    file = folder / CARD
    if file.is_file():
        card = read_fields(read_json(file), file, dict.fromkeys(("adapter", "unconditional"), (str, None)) | GRID)
        for side in card["grid"] or ():
            whole(f"{file}: a side of the grid", side, 1)
        return card
    config = read_config(folder) if (folder / "config.json").is_file() else {}
    adapter = adapter_of(config.get("model_type"))
    return {} if adapter is None else {"adapter": adapter}


def adapter_class(adapter: str | None, where: str) -> type[Backbone]:
    """`registry.find_class`. Raises ValueError also for a class that is no complete adapter."""
    found = find_class(adapter, where)
    if not issubclass(found, Backbone):
        raise ValueError(f"adapter is {adapter!r}, but it is no subclass of draftgrid.heads.backbones.Backbone")
    if missing := sorted(found.__abstractmethods__):
        raise ValueError(f"adapter is {adapter!r}, but it lacks {', '.join(missing)}")
    return found


def load_backbone(
    checkpoint: str | Path = "emoji",
    *,
    adapter: str | None = None,
    grid: Sequence[int] | None = None,
    dtype: torch.dtype | None = None,
    device: str | torch.device = "cpu",
    device_map: Any = None,
    revision: str | None = None,
    local_files_only: bool = False,
) -> Backbone:
    """Load a frozen backbone from a folder or a hub id (org/name, org/name@revision); `emoji` is the demo's.

    `adapter` and `grid` default to what the checkpoint says, else to its family's; `dtype` to fp32 on a CPU and bf16
    elsewhere. `device_map` is transformers' own ("auto", "cuda:1", {module: device}), for a model larger than one GPU;
    it replaces `device` and needs the package accelerate. Raises ValueError for an unknown adapter, a place without a
    checkpoint, and weights that are missing or unknown.
    """
    if dtype is None:
        dtype = torch.float32 if device_map is None and torch.device(device).type == "cpu" else torch.bfloat16
    path = find_checkpoint(checkpoint, revision, local_files_only)
    card = read_card(path)
    settings = {"grid": (grid and tuple(grid)) or card.get("grid"), "unconditional": card.get("unconditional")}
    given = {k: v for k, v in settings.items() if v is not None}
    kind = adapter_class(adapter or card.get("adapter"), f"{path}/config.json")
    backbone = kind.from_pretrained(path, dtype=dtype, device_map=device_map, **given)
    if path != Path(checkpoint) and HUB_ID.fullmatch(str(checkpoint)):
        backbone.name, backbone.revision = str(checkpoint).partition("@")[0], path.name
    return (backbone if device_map is not None else backbone.to(device)).freeze()
