"""A whole small world on disk, made once: a tiny Emu3 checkpoint with its image tokenizer, and token shards for it."""

import os

# Two test processes and what they start share the cores; more threads than cores slow all of them down.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["TOKENIZERS_PARALLELISM"] = "false"

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

LONGEST = ("test_readme", "test_train", "test_plan", "test_families", "test_strategies")
"""Files that take longest begin first: a file is one process's, and none should still run when the other is idle."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    rank = {name: i for i, name in enumerate(LONGEST)}
    items.sort(key=lambda item: rank.get(item.path.stem, len(rank)))


@dataclass(frozen=True)
class World:
    root: Path
    pictures: Path
    backbone: Path
    data: Path
    prompts: Path

    def overrides(self, out: Path, **keys: object) -> list[str]:
        """Arguments of a train.py run in this world, seconds long."""
        settings: dict[str, object] = {
            "recipe": "emoji_ssd",
            "out": out,
            "backbone.checkpoint": self.backbone,
            "data.dir": self.data,
            "data.source": "",
            "data.batch_size": 4,
            "data.workers": 0,
            "heads.right": 2,
            "trainer.steps": 4,
            "trainer.validate_every": 4,
            "trainer.save_every": 2,
            "trainer.precision": "32-true",
            "sheet.images": 0,
            "sheet.prompts": self.prompts,
        }
        return [f"{k}={v}" for k, v in (settings | keys).items()]


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    from draftgrid.data.encode import encode
    from draftgrid.data.sources import open_source
    from draftgrid.heads.tokenizers import PatchVQ
    from tests.tiny import tiny_emu3

    root = tmp_path_factory.mktemp("world")
    pictures = root / "pictures"
    pictures.mkdir()
    rng = np.random.default_rng(0)
    for i in range(60):
        cells = rng.integers(0, 256, (2, 2, 3), dtype=np.uint8)
        Image.fromarray(cells.repeat(8, 0).repeat(8, 1)).save(pictures / f"{i:02d}.png")
        (pictures / f"{i:02d}.txt").write_text(f"picture {i % 30} of squares")
    vq = PatchVQ(torch.rand(24, 48, generator=torch.Generator().manual_seed(0)), patch=4, image_size=16)
    backbone = tiny_emu3((4, 4), spread=3.0)
    backbone.save_pretrained(root / "backbone")
    vq.save_pretrained(root / "backbone" / "image_tokenizer")
    for split in ("train", "validation"):
        encode(open_source(f"folder:{pictures}"), vq, root / "data" / split, "all", shards=4)
    prompts = root / "prompts.txt"
    prompts.write_text("blue\na red apple\n")
    return World(root, pictures, root / "backbone", root / "data", prompts)
