"""Where pictures and captions come from: the demo's emoji, a folder, WebDataset tars, anything `datasets` reads."""

from pathlib import Path

from draftgrid.common.files import read_json, read_lines
from draftgrid.data.sources.base import Item, Source, check_text, open_picture, pixels
from draftgrid.data.sources.emoji import EmojiSource
from draftgrid.data.sources.folder import FolderSource
from draftgrid.data.sources.hub import HubSource
from draftgrid.data.sources.tars import TarSource
from draftgrid.heads.backbones.loading import ASSETS

__all__ = [
    "EmojiSource",
    "FolderSource",
    "HubSource",
    "Item",
    "Source",
    "TarSource",
    "open_picture",
    "open_source",
    "pixels",
    "read_prompts",
]


def open_source(name: str, copies: int = 1, image: str = "", caption: str = "", streaming: str = "auto") -> Source:
    """`emoji`, `folder:PATH` (or just an existing folder), `wds:TARS`, `hf:NAME[@SPLIT]`.

    `image` and `caption` name the columns of a hf: source. Raises ValueError for anything else.
    """
    kind, _, rest = name.partition(":")
    if (image or caption or streaming != "auto") and kind != "hf":
        raise ValueError(f"image_column, caption_column and streaming belong to hf: sources; source is {name!r}")
    if copies != 1 and name != "emoji":
        raise ValueError(f"copies is {copies}, but only source=emoji makes augmented copies")
    if name == "emoji":
        return EmojiSource(copies)
    if kind == "wds" and rest:
        return TarSource(rest)
    if kind == "hf" and rest:
        return HubSource(rest, image, caption, streaming)
    if kind == "folder" or Path(name).is_dir():
        return FolderSource(rest if kind == "folder" else name)
    raise ValueError(
        f"source is {name!r}; use emoji, folder:PATH with an existing folder, wds:TARS, or hf:NAME[@SPLIT]"
    )


def read_prompts(name: str) -> list[str]:
    """Prompts from a text file (one a line), a .json list, `emoji:SPLIT` (one a picture, in the split's order), or
    `photos`, a few for a model that draws photographs.

    Raises ValueError if the file does not exist, is not UTF-8 text or holds no prompt.
    """
    if name.startswith("emoji:"):
        return [item.caption for item in EmojiSource().items(name.removeprefix("emoji:"))]
    path = ASSETS / "photos.txt" if name == "photos" else Path(name)
    if not path.is_file():
        raise ValueError(f"prompts is {name!r}; it is neither a text file nor emoji:train|validation|test nor photos")
    prompts = read_json(path) if path.suffix == ".json" else read_lines(path)
    if not isinstance(prompts, list) or not all(isinstance(p, str) for p in prompts):
        raise ValueError(f"{path} must hold a list of texts")
    for number, prompt in enumerate(prompts, 1):
        check_text(prompt, f"{path} prompt {number}")
    prompts = [p.strip() for p in prompts if p.strip()]
    if not prompts:
        raise ValueError(f"{path} holds no prompt")
    return prompts
