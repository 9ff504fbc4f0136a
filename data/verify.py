"""Check a shard set.

    draftgrid verify dir=runs/data/emoji/train

Looks at every hash, every sample and the counts.
"""

from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from draftgrid.common.cli import key, main
from draftgrid.common.files import sha256
from draftgrid.data.shards import Broken, read_manifest
from draftgrid.data.stream import ShardSet


@dataclass
class VerifyConfig:
    dir: str = key("runs/data/emoji/train", "folder of a shard set")
    smoke: bool = key(False, "the first shard only")


def verify(folder: str | Path, limit: int | None = None) -> list[str]:
    """What is wrong with the first `limit` shards (None = all), one sentence each; empty if nothing is."""
    shards = ShardSet(str(folder), read_manifest(folder))
    wrong = []
    for shard in tqdm(shards.manifest.shards[:limit], desc="verify", unit="shard"):
        path = Path(folder) / shard.file
        if not path.is_file():
            wrong.append(f"{path} is missing")
            continue
        if sha256(path) != shard.sha256:
            wrong.append(f"{path}: sha256 differs from the manifest's")
        samples = shards.read(shard, range(shard.samples), metadata=True)
        wrong += [f"{s.where}: {s.reason}" for s in samples if isinstance(s, Broken)]
    return wrong


def run(config: VerifyConfig) -> None:
    wrong = verify(config.dir, 1 if config.smoke else None)
    if wrong:
        raise ValueError("; ".join(wrong[:5]) + (f"; and {len(wrong) - 5} more" if len(wrong) > 5 else ""))
    manifest = read_manifest(config.dir)
    print(f"{config.dir}: {manifest.samples} samples in {len(manifest.shards)} shards, all hashes and samples right")


if __name__ == "__main__":
    main(run, VerifyConfig, __doc__)
