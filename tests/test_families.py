"""Every family of models end to end on the CPU, from a tiny checkpoint in its published layout.

Pictures are encoded, its recipes train, heads are exported and loaded, and every decoder that can use them draws a PNG.
A family joins by an entry in FAMILIES.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from PIL import Image

from draftgrid import MTPHeads, load_backbone, train
from draftgrid.common.cli import compose, main
from draftgrid.data.encode import EncodeConfig
from draftgrid.data.encode import run as encode
from draftgrid.eval.decoders import DECODERS
from draftgrid.eval.setup import EvalConfig, load, parse_decoders
from draftgrid.heads.mtp import new_heads
from draftgrid.recipes.launch.build import build, claim
from draftgrid.recipes.launch.schema import DEFAULT, RECIPES, TrainConfig
from draftgrid.training import ranks
from draftgrid.training.run_folder import RunFolder
from tests.data_fixtures import write_pictures
from tests.published_emu3 import write_emu3
from tests.published_janus import write_janus
from tests.published_lumina import write_lumina, write_vqgan

ROOT = Path(__file__).parent.parent
GRID = (4, 4)
KINDS = {"ssd": "offsets", "chain": "chain", "mtp1d": "offsets"}


def lumina(folder: Path) -> tuple[Path, Path]:
    return write_lumina(folder / "model"), write_vqgan(folder / "release")


@dataclass(frozen=True)
class Family:
    write: Callable[[Path], tuple[Path, Path | None]]
    """Into a folder: (checkpoint, picture tokenizer where it comes apart)."""
    patch: int
    """Pixels of a code's side in the tiny picture tokenizer."""


FAMILIES = {
    "emu3": Family(lambda folder: (write_emu3(folder / "model", shards=2), None), 8),
    "janus": Family(lambda folder: (write_janus(folder / "model", side=GRID[0]), None), 16),
    "lumina": Family(lumina, 2),
}


@dataclass(frozen=True)
class Ready:
    name: str
    patch: int
    checkpoint: Path
    tokenizer: Path | None
    data: Path
    prompts: Path

    def keys(self, kind: str, out: Path, **more: object) -> list[str]:
        """A run of recipe FAMILY_KIND, two steps long; what is not set here is the recipe's own."""
        settings: dict[str, object] = {
            "recipe": f"{self.name}_{kind}",
            "out": out,
            "backbone.checkpoint": self.checkpoint,
            "backbone.grid": list(GRID),
            "backbone.tokenizer": self.tokenizer or "",
            "data.dir": self.data,
            "data.batch_size": 2,
            "data.workers": 0,
            "trainer.accelerator": "cpu",
            "trainer.devices": 1,
            "trainer.strategy": "auto",
            "trainer.precision": "32-true",
            "trainer.accumulate": 1,
            "trainer.steps": 2,
            "trainer.validate_every": 2,
            "trainer.save_every": 2,
            "sheet.images": 1,
            "sheet.prompts": self.prompts,
            "sheet.rounds": 1,
        }
        if KINDS[kind] == "offsets":
            settings["heads.right"] = 3  # the recipes' five do not fit into a row of four
        return [f"{k}={v}" for k, v in (settings | more).items()]

    def config(self, kind: str) -> TrainConfig:
        return compose(TrainConfig, self.keys(kind, Path("unused")), RECIPES, DEFAULT)


@pytest.fixture(scope="module")
def ready(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Ready]:
    """A family's checkpoint, and shards of pictures encoded with its own picture tokenizer; made when asked for."""
    made: dict[str, Ready] = {}

    def make(name: str) -> Ready:
        if name not in made:
            family, root = FAMILIES[name], tmp_path_factory.mktemp(name)
            checkpoint, tokenizer = family.write(root)
            side = GRID[0] * family.patch
            pictures, data = write_pictures(root / "pictures", 16, size=side), root / "data"
            for split in ("train", "validation"):
                settings = {"tokenizer": str(tokenizer or checkpoint), "split": "all", "shards": 2, "size": str(side)}
                encode(EncodeConfig(source=f"folder:{pictures}", out=str(data / split), **settings))
            prompts = root / "prompts.txt"
            prompts.write_text("a red apple\n")
            made[name] = Ready(name, family.patch, checkpoint, tokenizer, data, prompts)
        return made[name]

    return make


def draw_with_every_decoder(family: Ready, kind: str, heads: Path, out: Path) -> int:
    """Draw a PNG with each decoder that can use these heads or needs none, as the recipe draws; how many did."""
    fitting = [n for n, d in DECODERS.items() if not d.drafts_with or KINDS[kind] in d.drafts_with]
    decoders = parse_decoders(",".join({"lantern": "lantern:neighbours=5"}.get(name, name) for name in fitting))
    sampling = family.config(kind).decoding
    assert sampling.guidance > 1
    config = EvalConfig(
        heads=str(heads),
        backbone=str(family.checkpoint),
        grid=list(GRID),
        tokenizer=str(family.tokenizer or ""),
        prompts=str(family.prompts),
        images=1,
        guidance=sampling.guidance,
        top_k=sampling.top_k,
    )
    loaded = load(config, decoders)
    for decoder in decoders:
        result = loaded.draw(decoder, [0], seed=1)
        assert result.tokens.shape == (1, *GRID) and 0 <= result.tokens.min() <= result.tokens.max() < 24
        file = out / f"{decoder.name}.png"
        loaded.tokenizer.pil(result.tokens)[0].save(file)
        with Image.open(file) as picture:
            assert picture.size == (GRID[1] * family.patch, GRID[0] * family.patch)
    return len(decoders)


def loaded_heads(family: Ready, kind: str, folder: Path) -> MTPHeads:
    """Exported heads, with their backbone; every one of them has learned."""
    backbone = load_backbone(family.checkpoint, grid=GRID)
    heads = MTPHeads.from_pretrained(folder, backbone)
    start = new_heads(family.config(kind).heads, backbone).state_dict()
    moved = {name for name, tensor in heads.state_dict().items() if not torch.equal(tensor, start[name])}
    assert moved == set(start) and all(t.isfinite().all() for t in heads.state_dict().values())
    return heads


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", FAMILIES)
def test_from_pictures_to_pictures(name: str, kind: str, ready: Callable[[str], Ready], tmp_path: Path) -> None:
    family = ready(name)
    train.run(compose(TrainConfig, family.keys(kind, tmp_path / "run"), RECIPES, DEFAULT))
    metrics = json.loads((tmp_path / "run" / "metrics.json").read_text())
    heads = loaded_heads(family, kind, tmp_path / "run" / "heads")
    assert set(metrics["acceptance"]) == set(heads.names) and (tmp_path / "run" / "sheet.png").is_file()
    assert draw_with_every_decoder(family, kind, tmp_path / "run" / "heads", tmp_path) >= 6


@pytest.mark.slow
def test_two_ranks_train_every_family(ready: Callable[[str], Ready], tmp_path: Path) -> None:
    """One torchrun: offset heads under ZeRO 2, chain heads under DDP."""
    jobs = {}
    for name in FAMILIES:
        for kind, strategy in (("ssd", "deepspeed_2"), ("chain", "ddp")):
            out = tmp_path / f"{name}_{kind}"
            more = {"trainer.strategy": strategy, "sheet.images": 0, "data.batch_size": 1}
            jobs[name, kind] = ready(name).keys(kind, out, **more)
    (tmp_path / "jobs.json").write_text(json.dumps(list(jobs.values())))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    done = subprocess.run(
        [*command, "-m", "tests.test_families", str(tmp_path / "jobs.json")],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for name, kind in jobs:
        heads = tmp_path / f"{name}_{kind}" / "heads"
        loaded_heads(ready(name), kind, heads)
        assert draw_with_every_decoder(ready(name), kind, heads, tmp_path) >= 6


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", FAMILIES)
def test_without_gpu_data_or_checkpoint_one_sentence_says_what_to_set(
    name: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.HfApi.repo_info", lambda *_, **__: pytest.fail("the hub was asked"))
    monkeypatch.chdir(tmp_path)

    def said(*keys: str) -> str:
        with pytest.raises(SystemExit) as end:
            main(train.run, TrainConfig, train.__doc__, [f"recipe={name}_{kind}", *keys])
        assert end.value.code == 2
        text = capsys.readouterr().err
        assert text.startswith(f"error: recipe {name}_{kind} cannot run here: ") and text.count("\n") == 1
        return text

    text = said()
    for part in (
        "8 GPU(s), but the machine has 0",
        "trainer.accelerator=cpu",
        "data.dir=DIR",
        "backbone.checkpoint=DIR",
    ):
        assert part in text
    text = said("trainer.accelerator=cpu", "backbone.checkpoint=nowhere")
    assert "GPU" not in text and "backbone.checkpoint 'nowhere' is neither a folder nor" in text
    text = said("trainer.accelerator=cpu", "data.source=folder:x", "backbone.local_files_only=true")
    assert "data.dir" not in text and "is not on this machine" in text
    assert list(tmp_path.iterdir()) == [], "nothing was begun"


def run_jobs(file: Path) -> None:
    """What `train.run` does, for job after job, in one group of processes."""
    with ranks.group(gpu=False):
        for arguments in json.loads(file.read_text()):
            config = compose(TrainConfig, arguments, RECIPES, DEFAULT)
            config.check()
            folder = RunFolder(config.out)
            assert not ranks.on_rank_zero(lambda folder=folder, config=config: claim(folder, config))
            job = build(config, folder)
            job.trainer.fit(job.module, job.data, weights_only=True)
            job.finish()


if __name__ == "__main__":
    run_jobs(Path(sys.argv[1]))
