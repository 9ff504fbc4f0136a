"""WebDataset tars of pictures and captions."""

import json
import os
from collections.abc import Iterator
from functools import partial
from glob import glob
from itertools import groupby
from pathlib import Path
from typing import IO

from draftgrid.data.shards import members
from draftgrid.data.sources.base import CAPTIONS, Item, ListedSource, by_hash, caption_of, check_split, short_key


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
        self.root = os.path.commonpath([p.parent for p in self.paths])

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
                row = json.loads(_span(file, *parts["json"]))
                named = [name for name in CAPTIONS if name in row]
                caption = "" if named and row[named[0]] is None else caption_of(row)
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(f"{path} sample {key}: .json holds no caption: {error!r}") from None
        load = partial(_span_of, path, *picture)
        name = f"{path.relative_to(self.root).as_posix()}/{key}"
        yield Item(short_key(name), caption, path / key, load=load, size=picture[1])


def _span(file: IO[bytes], offset: int, size: int) -> bytes:
    return os.pread(file.fileno(), size, offset)


def _span_of(path: Path, offset: int, size: int) -> bytes:
    with open(path, "rb") as file:
        return _span(file, offset, size)
