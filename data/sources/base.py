"""What every source is made of: an item, a list of them, and how a picture is opened.

A source knows how many items a split has and hands them out by number, without opening a picture; a picture is opened
once. Every item has a key that never changes, so that an interrupted encode knows what it has done.
"""

import hashlib
import io
import re
from abc import ABC, abstractmethod
from bisect import bisect
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor

from draftgrid.data import SPLITS

NO_CAPTION, NO_PICTURE = ABSENT = "no caption", "no picture"
FITS = ("crop", "pad")
CAPTIONS = ("caption", "text", "prompt")
"""Names under which a caption is looked for, in this order."""


@dataclass(frozen=True)
class Item:
    key: str
    caption: str
    path: Path
    """The picture's file, or a name for it if it is part of another file."""
    shift: tuple[int, int] = (0, 0)
    """Pixels the picture is moved right and down (augmentation)."""
    mirror: bool = False
    load: Callable[[], bytes | None] | None = None
    """The picture's encoded bytes, if it is not a file of its own; None if there is no picture."""
    size: int = -1
    """Bytes, if they are known without reading them."""

    @property
    def identity(self) -> str:
        """What tells one picture to encode from another without opening it."""
        size = self.path.stat().st_size if self.size < 0 and self.path.is_file() else self.size
        return f"{self.key} {self.caption} {size} {self.shift} {self.mirror}"


class Source(ABC):
    name: str
    licence: str
    sequential = False
    """Whether items can only be read in their own order, from a stream."""

    @abstractmethod
    def count(self, split: str, limit: int = 0) -> int:
        """Items of one split, at most `limit` if that is not 0. Raises ValueError if the split does not exist."""

    @abstractmethod
    def take(self, split: str, numbers: Sequence[int]) -> Iterator[Item]:
        """The items of these numbers, ascending where the source is sequential."""

    @abstractmethod
    def identity(self, split: str) -> str:
        """Changes when an item, its caption or the order does."""


class ListedSource(Source):
    """A source whose items are all known at once."""

    captions = ""  # where they are looked for, for the error that finds none

    @abstractmethod
    def items(self, split: str) -> list[Item]:
        """The items of one split, in a fixed order. Raises ValueError if the split does not exist."""

    @cached_property
    def _listed(self) -> dict[str, list[Item]]:
        return {}

    def _list(self, split: str) -> list[Item]:
        if split not in self._listed:
            self._listed[split] = self.items(split)
            if not self._listed[split]:
                raise ValueError(f"source {self.name} has no captioned picture in split {split!r} ({self.captions})")
        return self._listed[split]

    def count(self, split: str, limit: int = 0) -> int:
        count = len(self._list(split))
        return min(count, limit or count)

    def take(self, split: str, numbers: Sequence[int]) -> Iterator[Item]:
        items = self._list(split)
        return (items[i] for i in numbers)

    def identity(self, split: str) -> str:
        return hashlib.sha256("\n".join(item.identity for item in self._list(split)).encode()).hexdigest()


def by_hash(items: Iterable[Item], split: str, kind: str) -> list[Item]:
    """The items of one split, for sources without splits of their own: 90 / 5 / 5 by a hash of the caption, so that
    equal captions stay together; split `all` is everything. Raises ValueError for another split."""
    check_split(split, kind, "all")
    return [item for item in items if split in ("all", split_of(item.caption, 90, 95))]


def split_of(text: str, *borders: int) -> str:
    """The split that the text's hash falls into, by the percentages at which validation and test begin."""
    return SPLITS[bisect(borders, number_of(text) % 100)]


def number_of(text: str) -> int:
    """A whole number below 2^32 that depends on the text alone."""
    return int(hashlib.sha256(text.encode()).hexdigest()[:8], 16)


def check_split(split: str, kind: str, *more: str) -> None:
    if split not in (*SPLITS, *more):
        raise ValueError(f"split is {split!r}; {kind} has {', '.join((*SPLITS, *more))}")


def open_picture(item: Item, size: int | tuple[int, int], fit: str = "crop") -> Image.Image:
    """The picture as RGB of `size`: first frame, EXIF rotation applied, transparency on white, brought to its shape.

    `size` is (height, width) or a square's side, in pixels. `fit` says how: crop cuts off what is too long, in equal
    parts; pad adds white. `info["original_size"]` keeps the picture's own (width, height). Raises ValueError that names
    it if it is missing or not readable.
    """
    try:
        data = item.load() if item.load else b""
        if data is not None:
            with Image.open(io.BytesIO(data) if item.load else item.path) as file:
                picture = _rgba(ImageOps.exif_transpose(file))
    except Exception as error:  # a damaged file makes Pillow raise nearly anything, struct.error and TypeError too
        raise ValueError(f"{item.path} is not a readable picture: {error}") from None
    if data is None:
        raise ValueError(NO_PICTURE)
    original = picture.size
    white = Image.new("RGBA", picture.size, "white")
    picture = Image.alpha_composite(white, picture).convert("RGB")
    shape = (size, size) if isinstance(size, int) else size[::-1]
    resize = ImageOps.fit if fit == "crop" else partial(ImageOps.pad, color="white")
    picture = resize(picture, shape, Image.Resampling.LANCZOS)
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


def short_key(name: str) -> str:
    """Readable, short enough for a tar header, and unique: `a b.png` and `a_b.png` are two pictures."""
    unique = hashlib.sha256(name.encode(errors="surrogateescape")).hexdigest()[:16]
    return re.sub(r"[^A-Za-z0-9-]", "_", name)[:40] + "-" + unique


def caption_of(row: dict[str, Any], key: str) -> str:
    """Of several captions the one that the picture's key draws, always the same.

    Raises KeyError, TypeError or ValueError if there is none, or it is no text.
    """
    name = next((name for name in CAPTIONS if name in row), CAPTIONS[0])
    caption = drawn(row[name], key)
    if not isinstance(caption, str):
        raise TypeError(f"caption is {caption!r}")
    check_text(caption, "caption")
    return caption


def drawn(caption: Any, key: str) -> Any:
    """One of a list, picked by the key; anything else, and an empty list, stays as it is."""
    return caption[number_of(key) % len(caption)] if isinstance(caption, list) and caption else caption


def check_text(text: str, where: str) -> None:
    """Raises ValueError if JSON's escapes have left half a surrogate pair in it, which no UTF-8 file can hold."""
    if half := re.search("[\ud800-\udfff]", text):
        raise ValueError(f"{where} holds {half[0]!r}, half of a surrogate pair; write the whole character")


def hidden(name: str) -> bool:
    """Whether an operating system has left a file there: `.DS_Store`, `._3.png`, `__MACOSX/3.png`."""
    return any(part == "__MACOSX" or (part[:1] == "." and part not in (".", "..")) for part in name.split("/"))
