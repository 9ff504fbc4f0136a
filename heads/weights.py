"""Published checkpoints: where the files of a hub id are, their weights in a model, and single tensors out of them."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from draftgrid.common.files import read_json

INDEX = "model.safetensors.index.json"
HUB_ID = re.compile(r"(?P<id>[\w.-]+/[\w.-]+)(@(?P<revision>[\w./-]+))?")
"""org/name or org/name@revision."""


def fetch(
    name: str | Path,
    revision: str | None = None,
    local_files_only: bool = False,
    part: str | None = "",
    also: Sequence[str] = (),
) -> Path:
    """A folder itself, or the folder a hub id's files lie in, downloaded if need be.

    Of weights in several files only those that hold a tensor with `part` in its name; None = no weights. `also` names
    files beside weights, JSON and templates. Raises ValueError, one sentence, if the hub has no such repository or
    revision, cannot be reached, or may not be asked.
    """
    if Path(name).is_dir():
        return Path(name)
    from huggingface_hub import snapshot_download

    def get(patterns: list[str], revision: str | None) -> Path:
        try:
            return Path(
                snapshot_download(
                    str(name), revision=revision, local_files_only=local_files_only, allow_patterns=patterns
                )
            )
        except Exception as error:  # its own kinds, and those of the HTTP library below it
            raise ValueError(_why(str(name), revision, local_files_only, error)) from None

    folder = get(["*.json", "*.jinja", *also], revision)
    if part is None:
        return folder
    files = ["*.safetensors"]
    if part and (folder / INDEX).is_file():
        files = sorted({file for tensor, file in read_json(folder / INDEX)["weight_map"].items() if part in tensor})
    return get(files, folder.name) if files else folder


def _why(name: str, revision: str | None, local_files_only: bool, error: Exception) -> str:
    from huggingface_hub import errors

    begin, at = f"{name!r} is no folder, and", f" at revision {revision!r}" if revision else ""
    if isinstance(error, errors.GatedRepoError):
        return f"{begin} the hub asks for consent: accept its terms at huggingface.co/{name} and run `hf auth login`"
    if isinstance(error, errors.RepositoryNotFoundError):
        return f"{begin} the hub has no repository of that name, or a private one: look at the name, or `hf auth login`"
    if isinstance(error, errors.RevisionNotFoundError):
        return f"{begin} the repository of that name on the hub has no revision {revision!r}"
    if isinstance(error, errors.LocalEntryNotFoundError | errors.IncompleteSnapshotError):
        where = "nothing but the cache may be asked" if local_files_only else "the hub cannot be reached"
        return f"{begin} no files of that hub id{at} are in the cache, while {where}: give the folder it lies in"
    reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
    return f"{begin} no files of that hub id{at} are to be had: {reason}"


def load_model(model_class: Any, folder: Path, what: str, dtype: Any = None, device_map: Any = None) -> "Loaded":
    """A transformers model from a folder, and what of its weights did not fit. Raises ValueError if there are none.

    `what` names the family in errors, `dtype` None is the checkpoint's own.
    """
    from safetensors import SafetensorError
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging._tqdm_active
    logging.set_verbosity_error()  # what it would warn of is in what is returned
    logging._tqdm_active = False  # its disable_progress_bar would reach the hub's bars too
    settings: dict[str, Any] = {} if device_map is None else {"device_map": device_map}
    try:
        model, info = model_class.from_pretrained(
            folder,
            dtype=dtype or "auto",
            output_loading_info=True,
            local_files_only=True,
            ignore_mismatched_sizes=True,
            **settings,
        )
    except (OSError, SafetensorError) as error:
        raise ValueError(f"no {what} checkpoint in {folder}: {str(error).splitlines()[0]}") from None
    except (ValueError, ImportError) as error:
        if device_map is None:
            raise
        raise ValueError(f"device_map is {device_map!r}: {' '.join(str(error).split())}") from None
    finally:
        logging.set_verbosity(verbosity)
        logging._tqdm_active = bars
    misshapen = sorted(name for name, *_ in info["mismatched_keys"])
    return Loaded(model, sorted(info["missing_keys"]), sorted(map(str, info["unexpected_keys"])), misshapen)


@dataclass
class Loaded:
    """A model, and the names of its weights that were not there, not known, or of another shape."""

    model: Any
    missing: list[str]
    unknown: list[str]
    misshapen: list[str]

    def check(self, folder: Path, ignore: str | None = None) -> Any:
        """The model. Raises ValueError naming the first weights that do not fit and do not begin with `ignore`."""
        missing, wrong = (
            [n for n in names if ignore is None or not n.startswith(ignore)]
            for names in (self.missing, sorted([*self.unknown, *self.misshapen]))
        )
        if missing or wrong:
            raise ValueError(
                f"{folder}: weights lack {missing[:3] or 'nothing'} and have unknown or misshapen {wrong[:3]}"
            )
        return self.model


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
