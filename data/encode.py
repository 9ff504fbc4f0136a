"""Pictures + captions -> token shards, with an image tokenizer; the language model is never loaded.

    python -m data.encode source=emoji out=runs/data/emoji/train split=train shards=16

Safe to stop at any moment: finished shards are kept, and the same command goes on to the same bytes.
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tqdm import tqdm

from data.shards import (
    MANIFEST,
    Manifest,
    Sample,
    Shard,
    describe_shard,
    read_manifest,
    read_shard,
    shard_name,
    write_shard,
)
from data.sources import Item, Source, open_picture, open_source, pixels
from heads.cli import key, main
from heads.files import read_json, write_json
from heads.tokenizers import ImageTokenizer, load_tokenizer

PLAN = "encode.json"
MAX_BROKEN = 0.01


@dataclass
class EncodeConfig:
    source: str = key("emoji", "emoji, or folder:PATH with captions in metadata.jsonl or .txt files")
    out: str = key("runs/data/emoji/train", "folder for the shards and their manifest")
    split: str = key("train", "train, validation or test; for a folder also all")
    shards: int = key(16, "number of shard files")
    tokenizer: str = key("emoji", "folder of an image tokenizer; emoji is the demo's own")
    copies: int = key(1, "emoji only: mirrored and shifted copies of a training picture, the original included")
    batch_size: int = key(64, "pictures encoded at once")
    seed: int = key(0, "order of the samples over the shards")
    overwrite: bool = key(False, "delete what another encode left in out")
    smoke: bool = key(False, "16 pictures only")


def encode(
    source: Source,
    tokenizer: ImageTokenizer,
    out: str | Path,
    split: str,
    *,
    shards: int = 16,
    batch_size: int = 64,
    seed: int = 0,
    limit: int | None = None,
    overwrite: bool = False,
    advice: str = "choose another out, or overwrite=true",
) -> Manifest:
    """Encode one split of a source into `out`. Returns the manifest.

    Raises ValueError if another encode lies in `out`, if a picture list is empty, or if no picture or over 1 % of them
    (and more than one) cannot be read.
    """
    out = Path(out)
    if shards < 1:
        raise ValueError(f"shards is {shards}; at least 1 is needed")
    items = source.items(split)[:limit]
    if not items:
        raise ValueError(f"source {source.name} has no picture in split {split!r}")
    order = np.random.default_rng(seed).permutation(len(items))
    chunks = [[items[i] for i in part] for part in np.array_split(order, min(shards, len(items)))]
    plan = {
        "source": source.name,
        "split": split,
        "tokenizer": tokenizer.fingerprint,
        "image_size": tokenizer.image_size,
        "shards": len(chunks),
        "items": hashlib.sha256("\n".join(_identity(i) for c in chunks for i in c).encode()).hexdigest(),
    }
    claim(out, plan, overwrite, advice)
    if (out / MANIFEST).is_file():
        return read_manifest(out)
    grid = (tokenizer.image_size // tokenizer.patch,) * 2
    done: list[Shard] = []
    broken: list[str] = []
    skipped = 0
    with tqdm(total=len(items), desc=f"encode {source.name} {split}", unit="img") as bar:
        for index, chunk in enumerate(chunks):
            path = out / shard_name(index)
            ready = path.is_file()
            samples = [s for s in read_shard(path) if isinstance(s, Sample)] if ready else []
            if not ready:
                samples = list(_encode(source.name, chunk, tokenizer, batch_size, broken))
            skipped += len(chunk) - len(samples)
            # Before the shard is written: with the pictures repaired, the same command goes on.
            if skipped > max(1, MAX_BROKEN * len(items)) or skipped == len(items):
                last = f"; last: {broken[-1]}" if broken else ""
                raise ValueError(f"{skipped} of {len(items)} pictures cannot be read, more than 1 %{last}")
            done.append(
                describe_shard(path, len(samples)) if ready else write_shard(path, samples, tokenizer.codebook_size)
            )
            bar.update(len(chunk))
    for line in broken:
        tqdm.write(f"skipped: {line}")
    manifest = Manifest(
        grid, tokenizer.fingerprint, tokenizer.codebook_size, source.name, source.licence, split, tuple(done), skipped
    )
    manifest.save(out)
    return manifest


def _identity(item: Item) -> str:
    """What tells one picture to encode from another without opening it."""
    size = item.path.stat().st_size if item.path.is_file() else -1
    return f"{item.key} {item.caption} {size} {item.shift} {item.mirror}"


def claim(out: Path, plan: dict, overwrite: bool, advice: str) -> None:
    """Mark `out` as the place of this plan. Raises ValueError, ending with `advice`, if it is the place of another."""
    theirs = read_json(out / PLAN) if (out / PLAN).is_file() else {}
    if theirs == plan:
        return
    # Shards without a plan (drawn by a model, or of another program) are somebody else's too.
    held = [path for path in (out / MANIFEST, *sorted(out.glob("shard-*.tar"))) if path.is_file()]
    if held and not overwrite:
        others = ((k, theirs.get(k), v) for k, v in plan.items() if theirs.get(k) != v)
        differing = ", ".join(f"{k}: {there!r} there, {here!r} here" for k, there, here in others)
        raise ValueError(f"{out} holds another encode ({differing}); {advice}")
    for path in held:
        path.unlink()
    write_json(out / PLAN, plan)


def _encode(
    source: str, chunk: Sequence[Item], tokenizer: ImageTokenizer, batch: int, broken: list[str]
) -> Iterator[Sample]:
    for start in range(0, len(chunk), batch):
        kept, pictures, sizes = [], [], []
        for item in chunk[start : start + batch]:
            try:
                picture = open_picture(item, tokenizer.image_size)
            except ValueError as error:
                broken.append(str(error))
                continue
            kept.append(item)
            sizes.append(picture.info["original_size"])
            pictures.append(picture)
        if not kept:
            continue
        tokens = tokenizer.encode(pixels(pictures))
        for item, size, codes in zip(kept, sizes, tokens.cpu().numpy(), strict=True):
            yield Sample(item.key, codes, item.caption, {"source": source, "file": item.path.name, "size": size})


def run(config: EncodeConfig) -> None:
    source = open_source(config.source, config.copies)
    manifest = encode(
        source,
        load_tokenizer(config.tokenizer),
        config.out,
        config.split,
        shards=config.shards,
        batch_size=config.batch_size,
        seed=config.seed,
        limit=16 if config.smoke else None,
        overwrite=config.overwrite,
    )
    print(f"{manifest.samples} samples in {len(manifest.shards)} shards ({manifest.skipped} skipped): {config.out}")


if __name__ == "__main__":
    main(run, EncodeConfig, __doc__)
