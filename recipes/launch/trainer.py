"""The Lightning Trainer of a run: loggers, callbacks and progress bar; libraries' needless warnings are silenced."""

import logging
import os
import time
import warnings
from statistics import median
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Callback, TQDMProgressBar
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

from draftgrid.heads.tokenizers import ImageTokenizer
from draftgrid.recipes.launch.schema import TrainConfig
from draftgrid.training import ranks
from draftgrid.training.run_folder import RunFolder
from draftgrid.training.saving import Saver, ValidateLast
from draftgrid.training.strategy import choose_precision, choose_strategy


def quiet() -> None:
    """Switch off, by name, warnings of libraries that are not true here, or of no use to a user."""
    for message in (
        ".*in eval mode at the start of training.*",  # the frozen backbone: that is the point
        ".*your dataloader is not resumable.*",  # the stream resumes by its batch count, exactly
        ".*treespec, LeafSpec.*",  # Lightning's own use of torch
        ".*smaller than the logging interval.*",
        ".*Checkpoint directory .* exists and is not empty.*",
        ".*does not have many workers.*",
        ".*Our suggested max number of worker.*",
        ".*`broadcast_buffers` is deprecated.*",  # its new name is not known to all versions of torch we run with
        ".*sync_dist=True.*",  # our means are gathered as sums and counts
        ".*`torch.distributed.(all_gather_into|reduce_scatter)_tensor` is deprecated.*",  # DeepSpeed's and FSDP's use
    ):
        warnings.filterwarnings("ignore", message)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # loader workers fork
    for name in ("lightning.pytorch.utilities.rank_zero", "lightning.pytorch.strategies.deepspeed"):
        logging.getLogger(name).setLevel(logging.WARNING)


def make_trainer(
    config: TrainConfig, folder: RunFolder, devices: tuple[str, int], watchers: list[Callback]
) -> L.Trainer:
    t = config.trainer
    loggers = [
        CSVLogger(folder.path / "logs", name="csv"),  # a version per launch: it deletes what it finds in its own
        TensorBoardLogger(folder.path, name="logs", version="tensorboard"),
    ]
    return L.Trainer(
        accelerator=devices[0],
        devices=devices[1],
        num_nodes=max(1, ranks.world() // devices[1]),
        strategy=choose_strategy(t.strategy, devices[0]),
        precision=choose_precision(t.precision, devices[0]),  # type: ignore[arg-type]
        max_steps=t.steps,
        limit_train_batches=t.steps * t.accumulate,
        accumulate_grad_batches=t.accumulate,
        gradient_clip_val=t.clip or None,
        val_check_interval=t.validate_every * t.accumulate,
        check_val_every_n_epoch=None,
        logger=loggers,
        callbacks=[*watchers, Progress(refresh_rate=5)],
        log_every_n_steps=10,
        use_distributed_sampler=False,
        num_sanity_val_steps=0,
        enable_checkpointing=False,
        enable_model_summary=False,
    )


def callbacks(config: TrainConfig, folder: RunFolder, tokenizer: ImageTokenizer, begun: float) -> list[Callback]:
    """Validation at the end of a run, its checkpoints, and pictures on the way."""
    t = config.trainer
    found: list[Callback] = [ValidateLast(), Saver(folder, t.save_every, t.keep, t.max_hours, begun)]
    if config.task == "heads" and config.evaluate.eval_every:
        from draftgrid.eval.callback import Preview

        found.append(Preview(config.evaluate, config.decoding, tokenizer, config.seed))
    return found


class Progress(TQDMProgressBar):
    def get_metrics(self, *args: Any) -> dict[str, Any]:
        found = super().get_metrics(*args)
        found.pop("v_num", None)  # a logger's version, which here is a name
        return found


class StepTimer(Callback):
    """Seconds from the end of one step to the end of the next, data loading included."""

    def __init__(self, begun: float) -> None:
        self.begun = begun
        self.mark: float | None = None
        self.steps: list[float] = []

    def on_train_batch_end(self, *_: Any) -> None:
        now = time.perf_counter()
        if self.mark is not None:
            self.steps.append(now - self.mark)
        self.mark = now

    def on_validation_start(self, *_: Any) -> None:
        self.mark = None

    def on_save_checkpoint(self, *_: Any) -> None:
        self.mark = None

    def median(self) -> float | None:
        return median(self.steps) if self.steps else None

    def total(self) -> float:
        return time.monotonic() - self.begun
