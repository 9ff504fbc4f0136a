"""Look at a shard set.

    draftgrid show dir=runs/data/emoji/train out=runs/show

Prints what it holds and writes a contact sheet decoded from its codes.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tqdm import tqdm

from draftgrid.common.cli import check_ranges, key, main
from draftgrid.common.files import atomic
from draftgrid.common.sheet import contact_sheet
from draftgrid.data.shards import Broken, Sample, check_manifest, read_manifest
from draftgrid.data.stream import ShardSet, stack
from draftgrid.heads.tokenizers import load_tokenizer


@dataclass
class ShowConfig:
    dir: str = key("runs/data/emoji/train", "folder of a shard set")
    tokenizer: str = key("emoji", "folder of the image tokenizer that made it")
    out: str = key("runs/show", "folder for sheet.png")
    images: int = key(48, "pictures on the sheet", least=1)
    smoke: bool = key(False, "8 pictures only")


def run(config: ShowConfig) -> None:
    check_ranges(config)
    images = min(config.images, 8) if config.smoke else config.images
    folder, tokenizer = Path(config.dir), load_tokenizer(config.tokenizer)
    manifest = check_manifest(folder, tokenizer.fingerprint, read_manifest(folder).grid)
    codes = np.zeros(manifest.codes, np.int64)
    words: list[int] = []
    shown: list[Sample] = []
    every = max(1, manifest.samples // images)
    samples = ShardSet(str(folder), manifest).in_file_order(0, manifest.samples)
    for sample in tqdm(samples, total=manifest.samples, desc="read", unit="sample"):
        if isinstance(sample, Broken):
            continue
        if len(words) % every == 0 and len(shown) < images:
            shown.append(sample)
        codes += np.bincount(sample.tokens.reshape(-1), minlength=manifest.codes)
        words.append(len(sample.caption.split()))
    if not words:
        raise ValueError(f"{folder} holds no readable sample")
    words.sort()
    print(f"{folder}: {len(words)} samples in {len(manifest.shards)} shards, {manifest.skipped} skipped")
    print(f"  source {manifest.source}, split {manifest.split}; licence: {manifest.licence}")
    print(f"  grid {manifest.grid[0]}x{manifest.grid[1]}, tokenizer {manifest.tokenizer[:12]}, {manifest.codes} codes")
    print(f"  words a caption: {words[0]} to {words[-1]}, median {words[len(words) // 2]}")
    order, shares = codes.argsort()[::-1], codes / codes.sum()
    frequent = ", ".join(f"{c} {shares[c]:.1%}" for c in order[:5])
    print(f"  {np.count_nonzero(codes)} codes used; most frequent: {frequent}")
    thirds = ", ".join(f"{shares[third].sum():.1%}" for third in np.array_split(order, 3))
    print(f"  codes by thirds of the codebook, most frequent first: {thirds}")
    if manifest.sampling:
        settings = (f"{k} {v}" for k, v in manifest.sampling.items() if k not in ("backbone", "heads"))
        print(f"  drawn by {', '.join(settings)}")
    pictures = tokenizer.pil(stack(shown))
    path = Path(config.out) / "sheet.png"
    with atomic(path) as temporary:
        contact_sheet([pictures[i : i + 8] for i in range(0, len(pictures), 8)]).save(temporary, "PNG")
    print(f"  contact sheet: {path}")


if __name__ == "__main__":
    main(run, ShowConfig, __doc__)
