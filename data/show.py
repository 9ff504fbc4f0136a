"""Look at a shard set.

    python -m data.show dir=runs/data/emoji/train out=runs/show

Prints what it holds and writes a contact sheet decoded from its codes.
"""

from collections import Counter
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch

from data.shards import Sample, check_manifest, read_manifest, read_shard
from heads.cli import key, main
from heads.files import atomic
from heads.sheet import contact_sheet
from heads.tokenizers import load_tokenizer


@dataclass
class ShowConfig:
    dir: str = key("runs/data/emoji/train", "folder of a shard set")
    tokenizer: str = key("emoji", "folder of the image tokenizer that made it")
    out: str = key("runs/show", "folder for sheet.png")
    images: int = key(48, "pictures on the sheet")
    smoke: bool = key(False, "8 pictures only")


def run(config: ShowConfig) -> None:
    if config.smoke:
        config.images = min(config.images, 8)
    folder, tokenizer = Path(config.dir), load_tokenizer(config.tokenizer)
    if config.images < 1:
        raise ValueError(f"images is {config.images}; at least 1 is needed")
    manifest = check_manifest(folder, tokenizer.fingerprint, read_manifest(folder).grid)
    samples = [s for shard in manifest.shards for s in read_shard(folder / shard.file) if isinstance(s, Sample)]
    if not samples:
        raise ValueError(f"{folder} holds no readable sample")
    codes: Counter[int] = Counter()
    for sample in samples:
        codes.update(sample.tokens.flatten().tolist())
    words = sorted(len(s.caption.split()) for s in samples)
    total = sum(codes.values())
    print(f"{folder}: {len(samples)} samples in {len(manifest.shards)} shards, {manifest.skipped} skipped")
    print(f"  source {manifest.source}, split {manifest.split}; licence: {manifest.licence}")
    print(f"  grid {manifest.grid[0]}x{manifest.grid[1]}, tokenizer {manifest.tokenizer[:12]}, {manifest.codes} codes")
    print(f"  words a caption: {words[0]} to {words[-1]}, median {words[len(words) // 2]}")
    frequent = ", ".join(f"{c} {n / total:.1%}" for c, n in codes.most_common(5))
    print(f"  {len(codes)} codes used; most frequent: {frequent}")
    shown = list(islice(samples[:: max(1, len(samples) // config.images)], config.images))
    pictures = tokenizer.pil(torch.stack([torch.from_numpy(s.tokens.astype("int64")) for s in shown]))
    path = Path(config.out) / "sheet.png"
    with atomic(path) as temporary:
        contact_sheet([pictures[i : i + 8] for i in range(0, len(pictures), 8)]).save(temporary, "PNG")
    print(f"  contact sheet: {path}")


if __name__ == "__main__":
    main(run, ShowConfig, __doc__)
