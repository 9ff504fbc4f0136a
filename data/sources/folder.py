"""A folder of pictures and captions."""

import json
from collections.abc import Iterator
from pathlib import Path

from draftgrid.common.files import read_lines
from draftgrid.data.sources.base import Item, ListedSource, by_hash, caption_of, hidden, short_key


class FolderSource(ListedSource):
    """A folder of pictures with captions in `metadata.jsonl` (file_name, text) or in a .txt beside each picture.

    The captioned pictures are split 90 / 5 / 5 by a hash of the caption, so equal captions stay together.
    """

    licence = "that of the folder's pictures"
    captions = "captions: metadata.jsonl or .txt"
    _suffixes = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tif", ".tiff")

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.name = f"folder:{self.folder.resolve().name}"
        if not self.folder.is_dir():
            raise ValueError(f"source folder {self.folder} does not exist")

    def items(self, split: str) -> list[Item]:
        return by_hash(self._all(), split, "a folder")

    def _all(self) -> Iterator[Item]:
        captions = self._metadata()
        found = {p for p in _files(self.folder, {self.folder.resolve()}) if p.suffix.lower() in self._suffixes}
        # A picture that metadata.jsonl names but that is not there is an item too: opening it tells.
        for path in sorted(found | captions.keys()):
            sidecar = path.with_suffix(".txt")
            caption = captions.get(path)
            if caption is None and sidecar.is_file():
                caption = "\n".join(read_lines(sidecar)).strip()
            if caption is not None:
                yield Item(short_key(path.relative_to(self.folder).as_posix()), caption, path)

    def _metadata(self) -> dict[Path, str]:
        path = self.folder / "metadata.jsonl"
        captions: dict[Path, str] = {}
        for number, line in enumerate(read_lines(path) if path.is_file() else [], 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
                captions[self.folder / row["file_name"]] = caption_of(row, row["file_name"])
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(f"{path} line {number} needs file_name and text: {error!r}") from None
        return captions


def _files(folder: Path, above: set[Path]) -> Iterator[Path]:
    """Files below a folder that are not hidden; links are followed unless they lead to a folder `above`."""
    for path in folder.iterdir():
        if hidden(path.name):
            continue
        if not path.is_dir():
            yield path
        elif (real := path.resolve()) not in above:
            yield from _files(path, above | {real})
