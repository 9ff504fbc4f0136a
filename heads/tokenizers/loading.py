"""Loading an image tokenizer from a folder or the hub."""

from pathlib import Path

import torch

from draftgrid.common.files import read_json
from draftgrid.heads.backbones.loading import find_checkpoint
from draftgrid.heads.backbones.registry import find_named
from draftgrid.heads.tokenizers.base import ImageTokenizer
from draftgrid.heads.tokenizers.chameleon import CHECKPOINT, ChameleonVQ
from draftgrid.heads.tokenizers.emu3 import Emu3VQ
from draftgrid.heads.tokenizers.janus import JanusVQ
from draftgrid.heads.tokenizers.patch_vq import PatchVQ
from draftgrid.heads.weights import read_config


def load_tokenizer(
    folder: str | Path,
    device: str | torch.device = "cpu",
    revision: str | None = None,
    local_files_only: bool = False,
) -> ImageTokenizer:
    """Load the image tokenizer saved in `folder`, or of a hub id (org/name@revision); `emoji` is the demo's own.

    Of a checkpoint on the hub only the files that hold it are fetched. A folder without a tokenizer of ours but with
    an Emu3, Chameleon or Janus checkpoint gives that checkpoint's own; Meta's vqgan.ckpt, or its folder, Chameleon's.

    Raises ValueError if the folder holds no tokenizer, one of an unknown kind, or a damaged one.
    """
    path = Path(folder)
    if not path.is_file():
        path = find_checkpoint(folder, revision, local_files_only, part="vqmodel.")
    if (path / "image_tokenizer").is_dir():
        path = path / "image_tokenizer"
    kinds: dict[str, type[ImageTokenizer]] = {
        "patch_vq": PatchVQ,
        "emu3": Emu3VQ,
        "chameleon": ChameleonVQ,
        "janus": JanusVQ,
    }
    types = {t: name for name, kind in kinds.items() for t in getattr(kind, "model_types", ())}
    model_type = read_config(path).get("model_type") if (path / "config.json").is_file() else None
    if model_type in types:
        kind = types[model_type]
    elif path.is_file() or (path / CHECKPOINT).is_file():
        kind = "chameleon"
    else:
        kind = read_json(path / "tokenizer_config.json").get("image_tokenizer")
    if isinstance(kind, str) and ":" in kind:
        return find_named(kind, f"{path}/tokenizer_config.json: image_tokenizer").from_pretrained(path).to(device)
    if kind not in kinds:
        raise ValueError(
            f"{path}/tokenizer_config.json: image_tokenizer is {kind!r}; "
            f"known: {', '.join(kinds)}, or package.module:Class"
        )
    return kinds[kind].from_pretrained(path).to(device)
