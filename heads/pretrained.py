"""The folder that exported heads are: config.json, model.safetensors, README.md and recipe.yaml. Files, no networks."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from draftgrid.common.files import atomic_folder, write_json, write_text
from draftgrid.heads.weights import HUB_ID, check_tensors, fetch

CONFIG, WEIGHTS, CARD, RECIPE = "config.json", "model.safetensors", "README.md", "recipe.yaml"
EXPORTED = {CONFIG, WEIGHTS, CARD, RECIPE}


def find_folder(place: str | Path, revision: str | None = None, local_files_only: bool = False) -> Path:
    """A folder of exported heads, or the one a hub id's files lie in, downloaded if need be.

    Raises ValueError if `place` is neither, or holds no exported heads.
    """
    if Path(place).is_dir():
        if not (Path(place) / CONFIG).is_file():
            raise ValueError(f"{place} holds no exported heads (no {CONFIG})")
        return Path(place)
    if not (hub := HUB_ID.fullmatch(str(place))):
        raise ValueError(f"heads {str(place)!r} is neither a folder nor a hub id like org/name or org/name@revision")
    try:
        return fetch(hub["id"], revision or hub["revision"], local_files_only, also=[CARD, RECIPE])
    except ValueError as error:
        raise ValueError(f"heads {error}") from None


def write_folder(
    folder: str | Path, tensors: Mapping[str, Tensor], config: Mapping[str, Any], card: str, recipe: str
) -> None:
    """Write the folder, whole or not at all. Raises ValueError for a tensor without elements."""
    if empty := [k for k, v in tensors.items() if not v.numel()]:
        raise ValueError(f"tensors {empty[:3]} are empty; gather the shards of all ranks before exporting")
    with atomic_folder(folder) as temporary:
        # Through Python's own write: safetensors reports a full disk as an error of no particular kind.
        (temporary / WEIGHTS).write_bytes(save(dict(tensors), metadata={"format": "pt"}))
        write_json(temporary / CONFIG, config)
        write_text(temporary / CARD, card)
        if recipe:
            write_text(temporary / RECIPE, recipe)


def read_weights(folder: Path, wanted: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors, of the names and shapes of `wanted`. Raises ValueError naming those that do not fit."""
    try:
        tensors = load_file(folder / WEIGHTS)
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{folder / WEIGHTS} cannot be read ({error}); it may be cut short") from None
    check_tensors(folder / WEIGHTS, tensors, {name: tensor.shape for name, tensor in wanted.items()})
    return tensors
