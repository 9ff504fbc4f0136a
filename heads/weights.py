"""Published checkpoints: the files of a hub id, their config, their weights in a model, and single tensors."""

import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from draftgrid.common.files import read_fields, read_json, write_json
from draftgrid.common.settings import whole

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
SHARD = re.compile(r"(.+)-\d{5}-of-(\d{5})\.safetensors")
"""One of several files of weights."""
SIZES = re.findall(
    r"\w+",
    "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim "
    "image_size patch_size codebook_size num_embeddings embed_dim base_channels latent_channels in_channels "
    "out_channels temporal_downsample_factor projection_dim image_token_embed_dim",
)
"""Fields of config.json and of its parts that a model's shapes follow from: whole numbers from 1 on."""
ROPE = {"rope_theta": (float, None), "rope_type": (str, None), "factor": (float, None)}
HUB_ID = re.compile(r"(?P<id>[\w.-]+/[\w.-]+)(@(?P<revision>[\w./-]+))?")
"""org/name or org/name@revision."""


def fetch(
    name: str | Path,
    revision: str | None = None,
    local_files_only: bool = False,
    part: str | None = "",
    also: Sequence[str] = (),
) -> Path:
    """A folder itself, or that of a hub id's files, which are downloaded if the cache lacks them.

    Of weights in several files, only those with a tensor that has `part` in its name are fetched; None = no weights.
    `also` names files to fetch beside weights, JSON and templates. Raises ValueError if the hub does not give them.
    """
    if Path(name).is_dir():
        return Path(name)
    from huggingface_hub import snapshot_download

    def get(patterns: list[str], revision: str | None) -> Path:
        where: dict[str, Any] = {"revision": revision, "local_files_only": local_files_only}
        try:
            return Path(snapshot_download(str(name), allow_patterns=patterns, **where))
        except Exception as error:  # its own kinds, and those of the HTTP library below it
            raise ValueError(_why(str(name), revision, local_files_only, error)) from None

    folder = get(["*.json", "*.jinja", *also], revision)
    if part is None:
        return folder
    files = ["*.safetensors"]
    if part and (folder / INDEX).is_file():
        files = sorted({file for tensor, file in read_index(folder).items() if part in tensor})
    return get(files, folder.name) if files else folder


def _why(name: str, revision: str | None, local_files_only: bool, error: Exception) -> str:
    from huggingface_hub import errors

    begin = f"{name!r} is no folder, and"
    files = "no files of that hub id" + (f" at revision {revision!r}" if revision else "")
    if isinstance(error, errors.GatedRepoError):
        return f"{begin} the hub asks for consent: accept its terms at huggingface.co/{name} and run `hf auth login`"
    if isinstance(error, errors.RepositoryNotFoundError):
        return f"{begin} the hub has no repository of that name, or a private one: look at the name, or `hf auth login`"
    if isinstance(error, errors.RevisionNotFoundError):
        return f"{begin} the repository of that name on the hub has no revision {revision!r}"
    if isinstance(error, errors.LocalEntryNotFoundError | errors.IncompleteSnapshotError):
        where = "nothing but the cache may be asked" if local_files_only else "the hub cannot be reached"
        return f"{begin} {files} are in the cache, while {where}: give the folder it lies in"
    reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
    return f"{begin} {files} are to be had: {reason}"


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of a model. Raises ValueError, naming file, field and value, for fields no shape can follow from."""
    file = folder / "config.json"
    config = read_json(file)
    parts = read_fields(config, file, dict.fromkeys(("text_config", "vision_config", "vq_config"), (dict, None)))
    read_fields(config, file, {"architectures": ([str, None], None), "vocabulary_map": (dict, None)})
    for part, held in (("", config), *((f"{name}.", held) for name, held in parts.items() if held)):
        for name in SIZES:
            if held.get(name) is not None:
                whole(f"{file}: {part}{name}", held[name], 1)
        lists = dict.fromkeys(("channel_multiplier", "attn_resolutions"), ([int, None], None))
        ropes = dict.fromkeys(("rope_scaling", "rope_parameters"), (dict, None))
        kinds = lists | ropes | ROPE | {"model_type": (str, None)}
        found = read_fields(held, f"{file}: {part.strip('.')}" if part else file, kinds)
        for name in ropes:
            read_fields(found[name] or {}, f"{file}: {part}{name}", ROPE)
    size = (parts["text_config"] or config).get("vocab_size")
    for word, number in (config.get("vocabulary_map") or {}).items():
        if type(number) is not int or not 0 <= number < (size or number + 1):
            right = f"from 0 to {size - 1}" if size else "of at least 0"
            raise ValueError(f"{file}: vocabulary_map gives {word!r} the id {number!r}; use a whole number {right}")
    return config


def new_model(model_class: Any, config: Mapping[str, Any], where: str | Path, device: str = "meta") -> Any:
    """A transformers model without weights, on the meta device. Raises ValueError if `config` does not describe one."""
    try:
        with torch.device(device):
            return model_class(model_class.config_class.from_dict(dict(config)))
    except Exception as error:  # each of its many fields may be wrong in its own way
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise ValueError(f"{where} makes no {model_class.__name__}: {reason}") from None


def meta_model(config: dict[str, Any], where: str) -> Any:
    """The model that `architectures` names, on the meta device. Raises ValueError unless transformers knows it."""
    import transformers

    name = str((config.get("architectures") or ["?"])[0])
    kind = getattr(transformers, name, None)
    if not hasattr(kind, "config_class"):
        raise ValueError(f"{where}: config.json names no model transformers knows: architectures is {name!r}")
    return new_model(kind, config, f"{where}: config.json").requires_grad_(False)


def read_index(folder: Path) -> dict[str, str]:
    """{tensor: file} of weights in several files. Raises ValueError if that is not what the index says."""
    places = read_fields(read_json(folder / INDEX), folder / INDEX, {"weight_map": dict})["weight_map"]
    return read_fields(places, f"{folder / INDEX}: weight_map", dict.fromkeys(places, str))


def weight_files(folder: Path, keep: Callable[[str], bool] = bool) -> list[Path]:
    """The files of a checkpoint's weights; where an index says, those that hold a tensor whose name `keep` wants.

    Shards without an index are found by their names, N of M. Raises ValueError naming one that is missing.
    """
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS]
    if (folder / INDEX).is_file():
        names = sorted({file for tensor, file in read_index(folder).items() if keep(tensor)})
    else:
        names = sorted(p.name for p in folder.glob("*.safetensors"))
        if shards := [found for name in names if (found := SHARD.fullmatch(name))]:
            stem, count = shards[-1].groups()
            names = [f"{stem}-{n + 1:05d}-of-{count}.safetensors" for n in range(int(count))]
    for name in names:
        if not (folder / name).is_file():
            raise ValueError(f"{folder} lacks {name}, one of the {len(names)} files of its weights")
    return [folder / name for name in names]


def read_tensors(folder: Path, keep: Callable[[str], bool]) -> dict[str, Tensor]:
    """The tensors whose names `keep` wants, as they are stored. Raises ValueError for damaged or missing files."""
    from safetensors import SafetensorError, safe_open

    found: dict[str, Tensor] = {}
    try:
        for file in weight_files(folder, keep):
            with safe_open(file, "pt") as held:
                found |= {name: held.get_tensor(name) for name in held.keys() if keep(name)}  # noqa: SIM118 - no dict
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{folder} holds damaged weights: {error}") from None
    return found


def check_tensors(where: str | Path, found: Mapping[str, Any], wanted: Mapping[str, Sequence[int]]) -> None:
    """Raises ValueError naming what of `found` is not a tensor of the names and shapes `wanted`."""
    shapes = {name: tuple(v.shape) if isinstance(v, Tensor) else v for name, v in found.items()}
    missing, unknown = sorted(wanted.keys() - shapes.keys()), sorted(shapes.keys() - wanted.keys(), key=str)
    wrong = [
        f"{name} is {str(shapes[name])[:60]}, not {tuple(shape)}"
        for name, shape in wanted.items()
        if name in shapes and shapes[name] != tuple(shape)
    ]
    if missing or unknown or wrong:
        raise ValueError(f"{where}: missing {missing[:3]}, unknown {unknown[:3]}, misshapen {wrong[:3]}")


def stored_names(folder: Path) -> dict[str, str]:
    """{tensor: absolute path of its file} of all weights of a folder."""
    from safetensors import safe_open

    places: dict[str, str] = {}
    for file in weight_files(folder):
        with safe_open(file, "pt") as held:
            places |= dict.fromkeys(held.keys(), str(file.resolve()))
    return places


@contextmanager
def indexed(folder: Path) -> Iterator[Path]:
    """The folder itself; if its shards lack an index, a temporary folder with one that points to them."""
    files = weight_files(folder)
    if not files or (folder / INDEX).is_file() or not SHARD.fullmatch(files[0].name):
        yield folder
        return
    with TemporaryDirectory() as temporary:
        for file in folder.glob("*config.json"):
            shutil.copy(file, temporary)
        write_json(Path(temporary) / INDEX, {"metadata": {}, "weight_map": stored_names(folder)})
        yield Path(temporary)


def load_model(model_class: Any, folder: Path, like: str, dtype: Any = None, device_map: Any = None) -> "Loaded":
    """A transformers model from a folder, and what of its weights did not fit.

    `like` is a published checkpoint of its layout; `dtype` None is the checkpoint's own. Raises ValueError for missing
    weights and for a config.json that is of another family or describes no model.
    """
    from safetensors import SafetensorError
    from transformers.utils import logging

    config, wanted = read_config(folder), model_class.config_class.model_type
    if (kind := config.get("model_type")) != wanted:
        raise ValueError(f"{folder}/config.json: model_type is {kind!r}, not {wanted!r}; take files as those of {like}")
    model = new_model(model_class, config, folder / "config.json")
    count = sum(p.numel() for name, p in model.named_parameters() if "vqmodel." not in name)
    size = sum(file.stat().st_size for file in weight_files(folder))
    if size and count > max(8 * size, 10**8):  # or it would make them all before it misses them
        raise ValueError(f"{folder}/config.json describes {count:,} weights, but its files have {size:,} bytes")
    verbosity, bars = logging.get_verbosity(), logging._tqdm_active
    logging.set_verbosity_error()  # what it would warn of is in what is returned
    logging._tqdm_active = False  # its disable_progress_bar would reach the hub's bars too
    try:
        with indexed(folder) as place:
            how = dict.fromkeys(("output_loading_info", "local_files_only", "ignore_mismatched_sizes"), True)
            model, info = model_class.from_pretrained(place, dtype=dtype or "auto", device_map=device_map, **how)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{folder} holds no checkpoint like {like}: {str(error).splitlines()[0]}") from None
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
    """A model, and the names of weights that the checkpoint lacks, has too many, or has in another shape."""

    model: Any
    missing: list[str]
    unknown: list[str]
    misshapen: list[str]

    def check(self, folder: Path, ignore: tuple[str, ...] = ()) -> Any:
        """The model. Raises ValueError naming the first weights that do not fit and do not begin with `ignore`."""
        missing, wrong = (
            [n for n in names if not n.startswith(ignore)]
            for names in (self.missing, sorted([*self.unknown, *self.misshapen]))
        )
        if missing or wrong:
            prefix = missing and self.prefix(list(stored_names(folder)), set(missing))
            raise ValueError(
                f"{folder}: weights lack {missing[:3] or 'nothing'} and have unknown or misshapen {wrong[:3]}"
                + (f"; every name in its files begins with {prefix!r}: without it they fit" if prefix else "")
            )
        return self.model

    def prefix(self, names: list[str], missing: set[str]) -> str:
        """The prefix that all `names` of a checkpoint have, if nothing is `missing` once it is removed; else ''."""
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightRenaming, apply_renamings

        renamings = [r for r in get_model_conversion_mapping(self.model) if isinstance(r, WeightRenaming)]
        for end in (dot.end() for dot in re.finditer(r"\.", names[0])):
            shared = all(name.startswith(names[0][:end]) for name in names)
            if shared and missing <= {apply_renamings(name[end:], renamings) for name in names}:
                return names[0][:end]
        return ""
