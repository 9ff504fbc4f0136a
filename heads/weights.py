"""Published checkpoints: where the files of a hub id are, and single tensors out of safetensors in one file or many."""

from collections.abc import Callable
from pathlib import Path

from torch import Tensor

from heads.files import read_json

INDEX = "model.safetensors.index.json"


def fetch(name: str | Path, revision: str | None = None, local_files_only: bool = False) -> Path:
    """A folder itself, or the folder a hub id's files lie in, downloaded if need be. Raises ValueError without them."""
    if Path(name).is_dir():
        return Path(name)
    from huggingface_hub import snapshot_download

    patterns = ["*.json", "*.jinja", "*.safetensors"]
    settings = {"revision": revision, "local_files_only": local_files_only, "allow_patterns": patterns}
    try:
        return Path(snapshot_download(str(name), **settings))  # type: ignore[arg-type]
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(f"{str(name)!r} is no folder, and no files of that hub id are to be had: {reason}") from None


def read_tensors(folder: Path, keep: Callable[[str], bool]) -> dict[str, Tensor]:
    """The tensors whose names `keep` wants, as they are stored. Raises ValueError for damaged or missing files."""
    from safetensors import SafetensorError, safe_open

    files = sorted(folder.glob("*.safetensors"))
    found: dict[str, Tensor] = {}
    try:
        if (folder / INDEX).is_file():
            files = sorted(
                {folder / file for name, file in read_json(folder / INDEX)["weight_map"].items() if keep(name)}
            )
        for file in files:
            with safe_open(file, "pt") as held:
                found |= {name: held.get_tensor(name) for name in held.keys() if keep(name)}  # noqa: SIM118 - no dict
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{folder} holds damaged weights: {error}") from None
    return found
