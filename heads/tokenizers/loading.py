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
from draftgrid.heads.tokenizers.learned import LearnedTokenizer
from draftgrid.heads.tokenizers.patch_vq import PatchVQ
from draftgrid.heads.weights import read_config

LEARNED: tuple[type[LearnedTokenizer], ...] = (Emu3VQ, ChameleonVQ, JanusVQ)


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
    if (path / "config.json").is_file():
        model_type = read_config(path).get("model_type")
        for learned in LEARNED:
            if model_type in learned.model_types:
                return learned.from_pretrained(path).to(device)
    if path.is_file() or (path / CHECKPOINT).is_file():
        return ChameleonVQ.from_pretrained(path).to(device)
    where = f"{path}/tokenizer_config.json: image_tokenizer"
    kind = read_json(path / "tokenizer_config.json").get("image_tokenizer")
    if isinstance(kind, str) and ":" in kind:
        return find_named(kind, where).from_pretrained(path).to(device)
    known: dict[str, type[ImageTokenizer]] = {"patch_vq": PatchVQ} | {kind.model_types[0]: kind for kind in LEARNED}
    if kind not in known:
        raise ValueError(f"{where} is {kind!r}; known: {', '.join(known)}, or package.module:Class")
    return known[kind].from_pretrained(path).to(device)
