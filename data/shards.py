"""The token-shard format: WebDataset tars of (codes, caption, metadata) beside a manifest that says what they are.

A shard set is a folder: `shard-000000.tar` ... and `manifest.json`. A sample KEY is `KEY.tokens.npy` (H, W; uint16 or
uint32), `KEY.txt` and `KEY.json`. Shards are written under temporary names; the manifest comes last.
"""

import io
import json
import math
import os
import tarfile
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import IO, Any, get_type_hints

import numpy as np

from draftgrid.common.files import atomic, read_fields, sha256, write_json
from draftgrid.data.places import is_url, join, read_bytes

FORMAT = 1
MANIFEST = "manifest.json"
MAX_BROKEN = 0.01
"""Share of a set that may be unreadable before reading or writing it stops."""


@dataclass(frozen=True)
class Sample:
    key: str
    tokens: np.ndarray
    """(H, W) integer codes."""
    caption: str
    metadata: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Shard:
    file: str
    samples: int
    bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    grid: tuple[int, int]
    tokenizer: str
    """Fingerprint of the image tokenizer that made the codes."""
    codes: int
    """Size of its codebook."""
    source: str
    licence: str
    split: str
    shards: tuple[Shard, ...]
    skipped: int = 0
    """Pictures that could not be read."""
    sampling: dict[str, Any] | None = None
    """How the backbone was sampled, if the pictures are its own."""
    format: int = FORMAT

    @property
    def samples(self) -> int:
        return sum(s.samples for s in self.shards)

    def save(self, folder: Path) -> None:
        write_json(folder / MANIFEST, asdict(self))


FIELDS = get_type_hints(Manifest) | {"grid": [int, 2], "shards": [dict, None], "sampling": (dict, None)}
"""What read_fields holds manifest.json to."""


def shard_name(index: int) -> str:
    return f"shard-{index:06d}.tar"


def write_shard(path: Path, samples: Sequence[Sample], codes: int) -> Shard:
    """Write one tar, whole or not at all; equal samples give equal bytes (no times, no owners)."""
    dtype = np.uint16 if codes <= 1 << 16 else np.uint32
    with atomic(path) as temporary, tarfile.open(temporary, "w", format=tarfile.USTAR_FORMAT) as tar:
        for sample in samples:
            array = io.BytesIO()
            np.save(array, sample.tokens.astype(dtype))
            metadata = json.dumps(sample.metadata, sort_keys=True).encode()
            files = (("tokens.npy", array.getvalue()), ("txt", sample.caption.encode()), ("json", metadata))
            for suffix, content in files:
                info = tarfile.TarInfo(f"{sample.key}.{suffix}")
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))
    return Shard(path.name, len(samples), path.stat().st_size, sha256(path))


def read_manifest(place: str | Path) -> Manifest:
    """The manifest of a shard set at a folder or URL.

    Raises ValueError if there is no finished shard set, or one of another format version.
    """
    name = join(place, MANIFEST)
    try:
        text = read_bytes(name, "manifest")
    except FileNotFoundError:
        folder = Path(place)
        parts = len(list(folder.glob("shard-*.tar"))) if not is_url(place) and folder.is_dir() else 0
        state = f"holds {parts} shards of an unfinished encode" if parts else "holds no token shards"
        raise ValueError(f"{place} {state} (no {MANIFEST}); run: draftgrid encode source=... out={place}") from None
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{name} is not valid JSON ({error}); it may be cut short") from None
    if isinstance(value, dict) and value.get("format") != FORMAT:
        raise ValueError(f"{name}: format is {value.get('format')!r}; this version reads {FORMAT}")
    held = read_fields(value, name, FIELDS)
    if unknown := value.keys() - FIELDS.keys():
        raise ValueError(f"{name}: unknown field {min(unknown)!r}; this version knows {', '.join(FIELDS)}")
    kinds = get_type_hints(Shard)
    shards = tuple(Shard(**read_fields(s, f"{name} shard {i}", kinds)) for i, s in enumerate(held.pop("shards")))
    return Manifest(shards=shards, grid=tuple(held.pop("grid")), **held)


def check_manifest(place: str | Path, tokenizer: str, grid: tuple[int, int]) -> Manifest:
    """The manifest, if its codes come from this tokenizer and fill this grid, and every local shard file is there.

    Raises ValueError that names both sides otherwise.
    """
    manifest = read_manifest(place)
    if manifest.tokenizer != tokenizer:
        raise ValueError(
            f"{place} was encoded by tokenizer {manifest.tokenizer[:12]}, but this run uses {tokenizer[:12]}; "
            "encode the data again or name the right tokenizer"
        )
    if tuple(manifest.grid) != tuple(grid):
        raise ValueError(
            f"{place} holds {manifest.grid[0]}x{manifest.grid[1]} grids, but the backbone draws {grid[0]}x{grid[1]}"
        )
    for shard in manifest.shards:
        path = Path(place) / shard.file
        if not is_url(place) and not path.is_file():
            raise ValueError(f"{path} is missing, but {MANIFEST} lists it")
    if not manifest.samples:
        raise ValueError(f"{place} holds no sample")
    return manifest


@dataclass
class Broken:
    """A sample that could not be read, in its place in the stream."""

    where: str
    reason: str


SUFFIXES = ("tokens.npy", "txt", "json")


@dataclass(frozen=True)
class Index:
    """Where the samples of a tar lie, found by reading its headers alone."""

    keys: list[str]
    """In file order; a key is a member's name up to the first dot, as in WebDataset."""
    parts: np.ndarray
    """(N, 3, 2) offset and bytes of each of a sample's SUFFIXES; offset 0 if it has none."""
    damage: str = ""
    """Why the tar could not be read to its end."""


def members(file: IO[bytes], damage: list[str]) -> Iterator[tuple[str, str, int, int]]:
    """(key, suffix, offset, bytes) of the files in an open tar, up to the first damage, which is told in `damage`."""
    try:
        file.seek(0)
        with tarfile.open(fileobj=file, mode="r:") as tar:
            while member := tar.next():
                if member.isfile():
                    folder, slash, name = member.name.rpartition("/")
                    key, _, suffix = name.partition(".")
                    yield folder + slash + key, suffix, member.offset_data, member.size
                tar.members = []  # type: ignore[attr-defined]  # or it keeps them all
    except (tarfile.TarError, EOFError, OSError, ValueError) as error:
        damage.append(str(error).replace("\n", " ") or type(error).__name__)


def read_index(file: IO[bytes]) -> Index:
    """The index of an open tar, of what lies before the damage where there is any."""
    keys: list[str] = []
    parts = array("q")  # a shard may hold a million samples
    damage: list[str] = []
    for key, suffix, offset, size in members(file, damage):
        if not keys or keys[-1] != key:
            keys.append(key)
            parts.extend([0] * (2 * len(SUFFIXES)))
        if suffix in SUFFIXES:
            at = len(parts) + 2 * (SUFFIXES.index(suffix) - len(SUFFIXES))
            parts[at], parts[at + 1] = offset, size
    return Index(keys, np.array(parts, np.int64).reshape(-1, len(SUFFIXES), 2), *damage)


def read_sample(file: IO[bytes], where: str, index: Index, i: int, metadata: bool = True) -> Sample | Broken:
    """Sample i of an open tar, or why not; `metadata` says whether its .json is read too."""
    if i >= len(index.keys):
        return Broken(f"{where} sample {i}", index.damage or "missing from the shard")
    where = f"{where} sample {index.keys[i]}"
    spans = index.parts[i, : 3 if metadata else 2].tolist()
    for suffix, (offset, _) in zip(SUFFIXES, spans, strict=False):
        if not offset:
            return Broken(where, f"no {suffix}" + (": no image tokens" if "npy" in suffix else ""))
    try:
        begin, end = min(o for o, _ in spans), max(o + n for o, n in spans)
        held = os.pread(file.fileno(), end - begin, begin)
        if len(held) < end - begin:
            return Broken(where, "unexpected end of data")
        array, caption, *rest = (held[o - begin : o - begin + n] for o, n in spans)
        tokens = _array(array)
        if tokens.ndim != 2 or tokens.size == 0:
            return Broken(where, f"no image tokens: array of shape {tokens.shape}")
        return Sample(index.keys[i], tokens, caption.decode(), json.loads(rest[0]) if metadata else {})
    except Exception as error:  # of one flipped byte in a header numpy makes a TokenError, a TypeError or a BadZipFile
        return Broken(where, str(error).replace("\n", " ") or type(error).__name__)


def _array(data: bytes) -> np.ndarray:
    """np.load of one array without objects; the header, alike in all samples, is parsed once."""
    begin = 10 + int.from_bytes(data[8:10], "little")
    shape, dtype = _header(data[:begin])
    return np.frombuffer(data, dtype, math.prod(shape), begin).reshape(shape)


@lru_cache(maxsize=64)
def _header(data: bytes) -> tuple[tuple[int, ...], np.dtype]:
    stream = io.BytesIO(data)
    if np.lib.format.read_magic(stream) != (1, 0):
        raise ValueError("tokens.npy is not a .npy file of version 1.0")
    shape, fortran, dtype = np.lib.format.read_array_header_1_0(stream)
    if fortran or dtype.hasobject:
        raise ValueError("tokens.npy is in Fortran order or holds objects")
    return shape, dtype
