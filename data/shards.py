"""The token-shard format: WebDataset tars of (codes, caption, facts) beside a manifest that says what they are.

A shard set is a folder: `shard-000000.tar` ... and `manifest.json`. A sample KEY is `KEY.tokens.npy` (H, W; uint16 or
uint32), `KEY.txt` and `KEY.json`. Shards are written under temporary names; the manifest comes last.
"""

import io
import json
import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from heads.files import atomic, read_json, sha256, write_json

FORMAT = 1
MANIFEST = "manifest.json"


@dataclass(frozen=True)
class Sample:
    key: str
    tokens: np.ndarray
    """(H, W) integer codes."""
    caption: str
    facts: dict[str, Any] = field(default_factory=dict)


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


def shard_name(index: int) -> str:
    return f"shard-{index:06d}.tar"


def write_shard(path: Path, samples: Sequence[Sample], codes: int) -> Shard:
    """Write one tar, whole or not at all; equal samples give equal bytes (no times, no owners)."""
    dtype = np.uint16 if codes <= 1 << 16 else np.uint32
    with atomic(path) as temporary, tarfile.open(temporary, "w", format=tarfile.USTAR_FORMAT) as tar:
        for sample in samples:
            array = io.BytesIO()
            np.save(array, sample.tokens.astype(dtype))
            facts = json.dumps(sample.facts, sort_keys=True).encode()
            files = (("tokens.npy", array.getvalue()), ("txt", sample.caption.encode()), ("json", facts))
            for suffix, content in files:
                info = tarfile.TarInfo(f"{sample.key}.{suffix}")
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))
    return describe_shard(path, len(samples))


def describe_shard(path: Path, samples: int) -> Shard:
    return Shard(path.name, samples, path.stat().st_size, sha256(path))


def read_manifest(folder: str | Path) -> Manifest:
    """Raises ValueError if the folder holds no finished shard set or one of another format version."""
    folder = Path(folder)
    if not (folder / MANIFEST).is_file():
        parts = len(list(folder.glob("shard-*.tar"))) if folder.is_dir() else 0
        state = f"holds {parts} shards of an unfinished encode" if parts else "holds no token shards"
        raise ValueError(f"{folder} {state} (no {MANIFEST}); run: python -m data.encode source=... out={folder}")
    value = read_json(folder / MANIFEST)
    if not isinstance(value, dict):
        raise ValueError(f"{folder / MANIFEST} is not a token-shard manifest: it holds a {type(value).__name__}")
    if value.get("format") != FORMAT:
        raise ValueError(f"{folder / MANIFEST}: format is {value.get('format')!r}; this version reads {FORMAT}")
    try:
        shards = tuple(Shard(**s) for s in value.pop("shards"))
        return Manifest(shards=shards, grid=tuple(value.pop("grid")), **value)
    except (TypeError, KeyError) as error:
        raise ValueError(f"{folder / MANIFEST} is not a token-shard manifest: {error}") from None


def check_manifest(folder: str | Path, tokenizer: str, grid: tuple[int, int]) -> Manifest:
    """The manifest, if its codes come from this tokenizer and fill this grid, and every shard file is there.

    Raises ValueError that names both sides otherwise.
    """
    folder = Path(folder)
    manifest = read_manifest(folder)
    if manifest.tokenizer != tokenizer:
        raise ValueError(
            f"{folder} was encoded by tokenizer {manifest.tokenizer[:12]}, but this run uses {tokenizer[:12]}; "
            "encode the data again or name the right tokenizer"
        )
    if tuple(manifest.grid) != tuple(grid):
        raise ValueError(
            f"{folder} holds {manifest.grid[0]}x{manifest.grid[1]} grids, but the backbone draws {grid[0]}x{grid[1]}"
        )
    for shard in manifest.shards:
        path = folder / shard.file
        if not path.is_file():
            raise ValueError(f"{path} is missing, but {MANIFEST} lists it")
    return manifest


@dataclass
class Broken:
    """A sample that could not be read, in its place in the stream."""

    where: str
    reason: str


def read_shard(path: Path, expected: int | None = None) -> Iterator[Sample | Broken]:
    """Samples in file order; what cannot be read comes as Broken, a truncated end included (up to `expected`)."""
    import webdataset as wds

    count = 0
    reasons: list[str] = []
    try:
        with open(path, "rb") as stream:
            files = _until_broken(wds.tariterators.tar_file_iterator(stream), reasons)
            for group in wds.tariterators.group_by_keys({**f, "__url__": str(path)} for f in files):
                count += 1
                yield _decode(group, path)
    except (OSError, ValueError) as error:
        reasons.append(str(error).replace("\n", " "))
    reason = reasons[-1] if reasons else "missing from the shard"
    for lost in range(count, expected or 0):
        yield Broken(f"{path} sample {lost}", reason)


def _until_broken(files: Iterator[dict[str, Any]], reasons: list[str]) -> Iterator[dict[str, Any]]:
    """End a damaged tar quietly, so that the samples before the damage are not lost with it."""
    try:
        yield from files
    except (tarfile.TarError, EOFError, OSError, ValueError) as error:
        reasons.append(str(error).replace("\n", " ") or type(error).__name__)


def _decode(group: dict[str, Any], path: Path) -> Sample | Broken:
    where = f"{path} sample {group['__key__']}"
    try:
        tokens = np.load(io.BytesIO(group["tokens.npy"]), allow_pickle=False)
        if tokens.ndim != 2 or tokens.size == 0:
            return Broken(where, f"no image tokens: array of shape {tokens.shape}")
        return Sample(group["__key__"], tokens, group["txt"].decode(), json.loads(group["json"]))
    except KeyError as error:
        return Broken(where, f"no {error.args[0]}: no image tokens" if "npy" in str(error) else f"no {error.args[0]}")
    except Exception as error:  # of one flipped byte in a header numpy makes a TokenError, a TypeError or a BadZipFile
        return Broken(where, str(error).replace("\n", " ") or type(error).__name__)
