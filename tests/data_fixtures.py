"""Small pictures, tokenizers and shard sets that the data tests share."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from draftgrid.data.shards import Broken, Manifest, Sample, read_index, read_sample, shard_name, write_shard
from draftgrid.heads.tokenizers import PatchVQ

TOKENIZER = "f" * 64
"""Fingerprint that `write_set` puts into its manifests."""


def tiny_tokenizer(codes: int = 32, patch: int = 4, image_size: int = 16, seed: int = 0) -> PatchVQ:
    """A codebook of random patches: 16x16 pictures become 4x4 codes."""
    generator = torch.Generator().manual_seed(seed)
    return PatchVQ(torch.rand(codes, 3 * patch * patch, generator=generator), patch, image_size)


def write_pictures(folder: Path, count: int, size: int = 16, seed: int = 0) -> Path:
    """`count` PNGs of noise, with captions in metadata.jsonl."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    rows = []
    for i in range(count):
        Image.fromarray(rng.integers(0, 256, (size, size, 3), dtype=np.uint8)).save(folder / f"{i:03d}.png")
        rows.append(json.dumps({"file_name": f"{i:03d}.png", "text": f"picture number {i}"}))
    (folder / "metadata.jsonl").write_text("\n".join(rows) + "\n")
    return folder


def codes_by_hand(path: Path, codebook: np.ndarray, patch: int = 4) -> np.ndarray:
    """(H, W) nearest codes of a picture file, patch by patch in float64."""
    pixels = np.asarray(Image.open(path).convert("RGB")).astype(np.float64) / 255
    H, W = pixels.shape[0] // patch, pixels.shape[1] // patch
    codes = np.zeros((H, W), dtype=np.int64)
    for y in range(H):
        for x in range(W):
            part = pixels[y * patch : (y + 1) * patch, x * patch : (x + 1) * patch]
            vector = np.concatenate([part[:, :, c].reshape(-1) for c in range(3)])
            codes[y, x] = ((codebook - vector) ** 2).sum(1).argmin()
    return codes


def sample(shard: int, index: int, grid: tuple[int, int] = (4, 4), codes: int = 64) -> Sample:
    """Every sample's codes differ from every other's; its key says where it lies."""
    H, W = grid
    tokens = (np.arange(H * W).reshape(H, W) * (2 * index + 1) + 7 * shard) % codes
    return Sample(f"s{shard}-{index:03d}", tokens, f"caption {shard} {index}", {"file": "x.png"})


def read_shard(path: Path, expected: int | None = None) -> Iterator[Sample | Broken]:
    """Samples of a tar in file order; what cannot be read comes as Broken, a truncated end included (to `expected`)."""
    with open(path, "rb") as file:
        index = read_index(file)
        for i in range(len(index.keys) if expected is None else expected):
            yield read_sample(file, str(path), index, i)


def write_set(folder: Path, sizes: Sequence[int], grid: tuple[int, int] = (4, 4), codes: int = 64) -> Manifest:
    """A finished shard set with shards of the given sizes."""
    folder.mkdir(parents=True, exist_ok=True)
    shards = tuple(
        write_shard(folder / shard_name(s), [sample(s, i, grid, codes) for i in range(size)], codes)
        for s, size in enumerate(sizes)
    )
    manifest = Manifest(grid, TOKENIZER, codes, "folder:x", "none", "train", shards)
    manifest.save(folder)
    return manifest


def all_keys(sizes: Sequence[int]) -> list[str]:
    return [f"s{s}-{i:03d}" for s, size in enumerate(sizes) for i in range(size)]


def files(folder: Path) -> dict[str, bytes]:
    """{name: content} of everything in a folder, hidden files included."""
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}
