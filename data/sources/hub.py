"""What the library `datasets` reads."""

import hashlib
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from draftgrid.common.packages import need
from draftgrid.common.settings import one_of
from draftgrid.data.sources.base import CAPTIONS, Item, Source, drawn


class HubSource(Source):
    """Whatever `datasets` reads: a name on the hub, a folder of parquet files or the like, a set saved to disk.

    `hf:NAME@SPLIT` names one of its own splits (also a slice, train[:90%], where it is not streamed); without
    one it is the split called `split`. Sets on the hub are streamed, in their own order, unless told otherwise.
    """

    licence = "that of the dataset"

    def __init__(self, name: str, image: str = "", caption: str = "", streaming: str = "auto") -> None:
        self.dataset, _, self.part = name.partition("@")
        self.name = f"hf:{Path(self.dataset).name if Path(self.dataset).exists() else self.dataset}"
        self.image, self.caption = image, caption
        one_of("streaming", streaming, ("auto", "true", "false"))
        path = Path(self.dataset)
        self.saved = any((path / name).is_file() for name in ("state.json", "dataset_dict.json"))
        self.sequential = streaming == "true" or (streaming == "auto" and not path.exists())
        if self.sequential and self.saved:
            raise ValueError(f"streaming is {streaming}, but {path} is a set saved to disk, which is read in place")
        self._opened: dict[str, Any] = {}

    def _open(self, split: str) -> Any:
        """The split with its pictures left encoded, checked for both columns."""
        if split not in self._opened:
            datasets = need("datasets", use="source=hf:")
            try:
                found = self._load(datasets, self.part or split)
            except Exception as error:  # datasets raises its own kinds, the hub's, and pyarrow's
                reason = str(error).replace("\n", " ") or type(error).__name__
                where = f"hf:{self.dataset}@{self.part or split}"
                raise ValueError(f"source {where} cannot be opened: {reason}") from None
            columns = list(found.column_names or next(iter(found.take(1)), {}))
            image = self._column("image", self.image, ("image", "jpg", "png", "webp"), columns)
            caption = self._column("caption", self.caption, CAPTIONS, columns)
            self.columns = image, caption
            try:
                found = found.select_columns([image, caption]).cast_column(image, datasets.Image(decode=False))
            except (NotImplementedError, TypeError, KeyError, ValueError) as error:  # pyarrow's are such too
                reason = str(error).replace("\n", " ")
                raise ValueError(f"source {self.name} has no pictures in column {image!r}: {reason}") from None
            self._opened[split] = found
        return self._opened[split]

    def _load(self, datasets: Any, split: str) -> Any:
        path = Path(self.dataset)
        if self.saved:
            found = datasets.load_from_disk(path)
            if isinstance(found, datasets.DatasetDict):
                if split not in found:
                    raise ValueError(f"it has {', '.join(found)}")
                found = found[split]
            elif found.split is not None and str(found.split) != split:
                raise ValueError(f"it is {found.split}")
            return found
        if path.is_file():
            kind = {".arrow": "arrow", ".json": "json", ".jsonl": "json", ".csv": "csv"}.get(path.suffix, "parquet")
            files = {split.partition("[")[0]: str(path)}
            return datasets.load_dataset(kind, data_files=files, split=split, streaming=self.sequential)
        return datasets.load_dataset(self.dataset, split=split, streaming=self.sequential)

    def _column(self, what: str, named: str, usual: Sequence[str], columns: list[str]) -> str:
        for name in [named] if named else usual:
            if name in columns:
                return name
        wrong = f"{what}_column is {named!r}, but" if named else f"{what}_column is not set, and"
        raise ValueError(f"{wrong} source {self.name} has the columns {', '.join(columns)}; set {what}_column=NAME")

    def count(self, split: str, limit: int = 0) -> int:
        found = self._open(split)
        known = (found.info.splits or {}).get(self.part or split)
        count = len(found) if not self.sequential else known.num_examples if known else 0
        if not count and not limit:
            raise ValueError(f"source {self.name} does not say how many rows it has; set limit=N to encode the first N")
        return min(count or limit, limit or count)

    def take(self, split: str, numbers: Sequence[int]) -> Iterator[Item]:
        found = self._open(split)
        if self.sequential and numbers:
            first, wanted = numbers[0], set(numbers)
            stream = zip(range(first, numbers[-1] + 1), found.skip(first), strict=False)
            rows = ((i, row) for i, row in stream if i in wanted)
        else:
            rows = ((i, found[i]) for i in numbers)
        image, caption_column = self.columns
        given = 0
        for i, row in rows:
            given += 1
            picture = row[image] or {}
            data, file = picture.get("bytes"), picture.get("path")
            load = partial(_read, file) if file and "://" in file else None  # in a zip, or on the hub
            if data or not file:
                load = partial(lambda data: data, data)
            caption = drawn(row[caption_column], f"{i:08d}") or ""
            if not isinstance(caption, str):
                raise ValueError(f"source {self.name} row {i}: {caption_column} is {caption!r}; it must be text")
            path = Path(f"{self.name} row {i}" if load else str(file))
            yield Item(f"{i:08d}", caption.strip(), path, load=load)
        if given < len(numbers):
            raise ValueError(f"source {self.name} ends before row {numbers[given]}; set a smaller limit")

    def identity(self, split: str) -> str:
        found = self._open(split)
        image, caption = self.columns
        if self.sequential:
            text = str(found.info.version)
        else:
            import pyarrow.compute as pc

            sizes = pc.binary_length(pc.struct_field(found.data.column(image), "bytes"))  # type: ignore[attr-defined]
            text = "\n".join(map(str, [*found[caption], *sizes.to_pylist()]))
        return hashlib.sha256(f"{self.name}@{self.part or split} {self.columns}\n{text}".encode()).hexdigest()


def _read(file: str) -> bytes:
    import fsspec

    with fsspec.open(file, "rb") as stream:
        return stream.read()
