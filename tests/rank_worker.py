"""Started by torchrun in tests/test_strategies.py: one training job under every strategy, on batches known beforehand.

The global batch of a step is the same for any number of ranks; each rank takes its slice. Losses are means over ranks.
"""

import json
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from torch.utils.data import DataLoader

from draftgrid.common.cli import compose
from draftgrid.data.stream import Batch
from draftgrid.recipes.launch.build import build
from draftgrid.recipes.launch.schema import DEFAULT, RECIPES, TrainConfig
from draftgrid.training import ranks
from draftgrid.training.checkpoint import step_file
from draftgrid.training.run_folder import RunFolder
from draftgrid.training.saving import Stopped

STRATEGIES = ranks.STRATEGIES[1:]
STEPS, HALF, PICTURES = 20, 10, 4
HALVES = [f"{strategy}/{precision}" for strategy in STRATEGIES for precision in ("bf16-mixed", "bf16-true")]
Job = tuple[L.Trainer, "Recorder", RunFolder]


def batches(rank: int, world: int, first: int = 0) -> list[Batch]:
    """This rank's slices of the global batches of steps `first` on."""
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(24, (STEPS, PICTURES, 4, 4), generator=generator)
    captions = ["a red apple", None, "blue", "big dog"]
    mine = slice(rank * PICTURES // world, (rank + 1) * PICTURES // world)
    part = captions[mine]
    return [Batch(t[mine], part, ["x"] * len(part), ["y"] * len(part)) for t in tokens[first:]]


class Recorder(Callback):
    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, outputs: dict, *_: object) -> None:
        each = ranks.gather(float(outputs["loss"]))
        self.losses.append(sum(each) / len(each))


def run(arguments: Sequence[str], start: Path | None = None, extra: Sequence[Callback] = ()) -> Recorder:
    config = compose(TrainConfig, arguments, RECIPES, DEFAULT)
    config.check()
    folder = RunFolder(config.out)
    job = build(config, folder)
    recorder = Recorder()
    job.trainer.callbacks += [recorder, *extra]  # type: ignore[attr-defined]
    rank, world = job.trainer.global_rank, job.trainer.world_size
    data = batches(rank, world, 0 if start is None else HALF)
    job.data.train_dataloader = lambda: DataLoader(data, batch_size=None)  # type: ignore[method-assign]
    job.data.load_state_dict = lambda state: None  # type: ignore[method-assign]
    job.trainer.fit(job.module, job.data, ckpt_path=start, weights_only=True)
    return recorder


class SaveAtOnce(Callback):
    """What was loaded is saved again before anything happens to it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        trainer.save_checkpoint(self.path, weights_only=False)


class TellOneRank(Callback):
    """SIGTERM in the middle of a step, to the last rank alone."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_before_zero_grad(self, trainer: L.Trainer, *_: object) -> None:
        if trainer.global_step == self.step and trainer.global_rank == trainer.world_size - 1:
            os.kill(os.getpid(), signal.SIGTERM)


def main(out: Path, arguments: list[str]) -> None:
    found: dict[str, object] = {}
    with ranks.group(gpu=False):
        for strategy in STRATEGIES:
            keys = [*arguments, f"trainer.strategy={strategy}"]
            found[strategy] = run([*keys, f"out={out / strategy}"]).losses
            start = out / STRATEGIES[0] / "checkpoints" / step_file(HALF)
            again = SaveAtOnce(out / f"{strategy}_again.ckpt")
            found[f"{strategy}_resumed"] = run([*keys, f"out={out / strategy}_resumed"], start, [again]).losses
        short = [*arguments, "trainer.steps=4", "trainer.accumulate=2", "trainer.validate_every=4"]
        for name in HALVES:
            strategy, precision = name.split("/")
            keys = [*short, f"trainer.strategy={strategy}", f"trainer.precision={precision}"]
            found[name] = run([*keys, f"out={out / strategy / precision}"]).losses
        try:
            run([*arguments, "trainer.save_every=100", f"out={out / 'told'}"], extra=[TellOneRank(7)])
        except Stopped as stop:
            found[f"stopped{ranks.gather(stop.code)}"] = str(stop)
    if ranks.rank_zero():
        (out / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(
        0
    )  # 18 runs of five strategies in one process: what their threads do while Python ends is not at test here
