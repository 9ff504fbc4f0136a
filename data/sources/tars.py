"""WebDataset tars of pictures and captions, read through the library `webdataset`."""

import json
import os
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from glob import glob
from pathlib import Path
from typing import Any

from draftgrid.common.packages import need
from draftgrid.data.shards import members
from draftgrid.data.sources.base import CAPTIONS, Item, ListedSource, by_hash, caption_of, hidden, short_key


class TarSource(ListedSource):
    """WebDataset tars: `KEY.jpg|jpeg|png|webp` with `KEY.txt`, or `KEY.json` that holds the caption.

    Named by a folder of tars, a pattern with *, or what `webdataset` takes: {000..063}, `pipe:COMMAND`, URLs, several
    with `::` between. Plain local tars are read in any order, all others from first to last, once to list
    what they hold and once in every process that encodes them. Split as a folder's pictures are.
    """

    licence = "that of the tars' pictures"
    captions = "captions: .txt or .json"
    _pictures = ("jpg", "jpeg", "png", "webp")

    def __init__(self, pattern: str) -> None:
        self._wds = need("webdataset", use="source=wds:")
        self.name = f"wds:{Path(pattern).name}"
        folder = _local(pattern) and Path(pattern).is_dir()
        try:
            parts = [f"{pattern}/*.tar"] if folder else self._wds.shardlists.expand_urls(pattern)
        except (AssertionError, ValueError) as error:  # an environment variable that is not set, a brace left open
            raise ValueError(f"source wds:{pattern} cannot be expanded: {error}") from None
        local = [p for part in parts if _local(part) for p in (glob(part) if "*" in part else [part])]
        missing = [p for p in local if not Path(p).is_file()]
        self.urls = sorted(local, key=lambda p: Path(os.path.abspath(p))) + [part for part in parts if not _local(part)]
        if missing or not self.urls:
            raise ValueError(f"source wds:{pattern} names {missing[0] if missing else 'no tar file'}; it is not there")
        self.root = os.path.commonpath([os.path.dirname(os.path.abspath(p)) for p in local]) if local else ""
        self.sequential = not all(map(_seekable, self.urls))
        self._url_of: dict[str, str] = {}

    def items(self, split: str) -> list[Item]:
        return by_hash(self._all(), split, "a set of tars")

    def take(self, split: str, numbers: Sequence[int]) -> Iterator[Item]:
        if not self.sequential:
            yield from super().take(split, numbers)
            return
        due = deque(super().take(split, numbers))
        for url in dict.fromkeys(self._url_of[item.key] for item in due):
            for item in self._read(url):
                if due and (item.key, item.identity) == (due[0].key, due[0].identity):
                    due.popleft()
                    yield item
        if due:
            raise ValueError(f"source {self.name} has changed while it was read: {due[0].path} is not what it was")

    def _all(self) -> Iterator[Item]:
        for url in self.urls:
            for item in self._read(url):
                self._url_of[item.key] = url
                yield replace(item, load=None) if self.sequential else item

    def _read(self, url: str) -> Iterator[Item]:
        """Raises ValueError if the tar is damaged, or a sample's files do not lie side by side."""
        seen: set[str] = set()
        try:
            for sample in self._wds.tariterators.group_by_keys(_spans(url) if _seekable(url) else self._stream(url)):
                key = sample["__key__"]
                if key in seen:
                    raise ValueError(
                        f"holds the parts of sample {key} apart, or two samples of this key; a sample's files must "
                        "lie side by side, under a key of their own"
                    )
                seen.add(key)
                yield from self._item(url, key, sample)
        except Exception as error:  # tarfile's, a codec's, a pipe's
            reason = str(error.args[0] if error.args else error).replace("\n", " ") or type(error).__name__
            if "duplicate file name" in reason:
                reason = f"holds two samples of one key side by side: {reason.partition(':')[0]} comes twice"
            said = "" if isinstance(error, ValueError) else "cannot be read: "
            raise ValueError(f"{url} {said}{reason}") from None

    def _stream(self, url: str) -> Iterator[dict[str, Any]]:
        with self._wds.gopen(url) as stream:
            yield from self._wds.tariterators.tar_file_expander(
                [{"url": url, "stream": stream}], select_files=lambda name: not hidden(name)
            )
            while stream.read(1 << 20):  # or the command of a pipe ends with an error
                pass

    def _item(self, url: str, key: str, parts: dict[str, Any]) -> Iterator[Item]:
        picture = next((parts[suffix] for suffix in self._pictures if suffix in parts), None)
        if picture is None:
            return
        name = f"{os.path.relpath(url, self.root) if _local(url) else url}/{key}"
        caption, unique = "", short_key(name)
        try:
            if "txt" in parts:
                caption = _bytes(parts["txt"]).decode("utf-8-sig").strip()
            elif "json" in parts:
                row = json.loads(_bytes(parts["json"]))
                named = [name for name in CAPTIONS if name in row]
                caption = "" if named and row[named[0]] is None else caption_of(row, unique)
        except (ValueError, KeyError, TypeError) as error:
            kind = "txt is not UTF-8 text" if "txt" in parts else "json holds no caption"
            raise ValueError(f"sample {key}: .{kind}: {error!r}") from None
        size = len(picture) if isinstance(picture, bytes) else picture[2]
        yield Item(unique, caption, Path(url) / key, load=partial(_bytes, picture), size=size)


def _local(url: str) -> bool:
    return "://" not in url and not url.startswith(("pipe:", "file:"))


def _seekable(url: str) -> bool:
    return _local(url) and not url.endswith(("gz", "bz2", "xz"))


def _spans(path: str) -> Iterator[dict[str, Any]]:
    """The files of a local tar as `webdataset` groups them, (path, offset, bytes) instead of what they hold."""
    damage: list[str] = []
    with open(path, "rb") as file:
        for key, suffix, offset, size in members(file, damage):
            if not hidden(name := f"{key}.{suffix}"):
                yield {"fname": name, "data": (path, offset, size), "__url__": path}
    if damage:
        raise ValueError(f"is damaged: {damage[0]}")


def _bytes(part: bytes | tuple[str, int, int]) -> bytes:
    if isinstance(part, bytes):
        return part
    path, offset, size = part
    with open(path, "rb") as file:
        return os.pread(file.fileno(), size, offset)
