"""Check a shard set.

    draftgrid verify dir=runs/data/emoji/train

Looks at every hash, every sample and the counts.
"""

from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tqdm import tqdm

from draftgrid.common.cli import key, main
from draftgrid.common.files import sha256
from draftgrid.data.shards import Broken, read_manifest, read_shard


@dataclass
class VerifyConfig:
    dir: str = key("runs/data/emoji/train", "folder of a shard set")
    smoke: bool = key(False, "the first shard only")


def verify(folder: str | Path, shards: int | None = None) -> list[str]:
    """What is wrong with the first `shards` shards (None = all), one sentence each; empty if nothing is."""
    folder = Path(folder)
    manifest = read_manifest(folder)
    wrong = []
    for shard in tqdm(manifest.shards[:shards], desc="verify", unit="shard"):
        path = folder / shard.file
        if not path.is_file():
            wrong.append(f"{path} is missing")
        elif sha256(path) != shard.sha256:
            wrong.append(f"{path}: sha256 differs from the manifest's")
        if path.is_file():
            for sample in read_shard(path, shard.samples):
                if isinstance(sample, Broken):
                    wrong.append(f"{sample.where}: {sample.reason}")
                elif sample.tokens.shape != manifest.grid or int(sample.tokens.max()) >= manifest.codes:
                    tokens = sample.tokens
                    wrong.append(f"{path} sample {sample.key}: tokens {tokens.shape} up to {tokens.max()}")
    return wrong


def run(config: VerifyConfig) -> None:
    wrong = verify(config.dir, 1 if config.smoke else None)
    if wrong:
        raise ValueError("; ".join(wrong[:5]) + (f"; and {len(wrong) - 5} more" if len(wrong) > 5 else ""))
    manifest = read_manifest(config.dir)
    print(f"{config.dir}: {manifest.samples} samples in {len(manifest.shards)} shards, all hashes and samples right")


command = partial(main, run, VerifyConfig, __doc__)

if __name__ == "__main__":
    command()
