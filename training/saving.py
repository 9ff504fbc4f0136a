"""When a run saves: every `save_every` steps, when its hours are up, when it is told to stop, at the end, and the best.

All of a step, its validation included, is done before it is saved. When one rank gets a signal or its hours are up, all
ranks stop after the same step.
"""

import copy
import signal
import time
from types import FrameType
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback

from draftgrid.common.files import read_fields
from draftgrid.training import ranks
from draftgrid.training.checkpoint import BEST, saved_steps, step_file
from draftgrid.training.run_folder import RunFolder

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Stopped(Exception):
    """The run was told to stop and has saved; the same command resumes it."""

    def __init__(self, step: int, reason: str, code: int) -> None:
        super().__init__(f"stopped at step {step} ({reason}) and saved; the same command resumes it")
        self.code = code


class Saver(Callback):
    def __init__(self, folder: RunFolder, every: int, keep: int, hours: float, begun: float) -> None:
        """Saves into `folder` and keeps the newest `keep`; `hours` (0 = no end) count from time.monotonic() `begun`."""
        self.folder, self.every, self.keep, self.hours, self.begun = folder, every, keep, hours, begun
        self.best: float | None = None
        self.signal: int | None = None
        self.step, self.saved = 0, 0
        """Last finished and last saved optimizer step."""
        self._loops: dict[str, Any] = {}
        self._rng: list[Any] = []
        self._before: dict[int, Any] = {}

    # When ------------------------------------------------------------------------------------------------------------

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self._before = {s: signal.signal(s, self._told) for s in SIGNALS}

    def on_exception(self, trainer: L.Trainer, module: L.LightningModule, exception: BaseException) -> None:
        self._restore_signals()

    def _restore_signals(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def _told(self, number: int, _: FrameType | None) -> None:
        """The first signal asks for a stop; a second one ends the process at once."""
        self.signal = number
        signal.signal(number, self._before.get(number) or signal.SIG_DFL)

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step > self.step:
            self.step = trainer.global_step
            # Lightning's loops resume from their counters as they stand here, not from those of a later moment.
            self._loops = copy.deepcopy(trainer._checkpoint_connector._get_loops_state_dict())

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        if self._rng:
            _set_rng(self._rng.pop())
        if self.step == self.saved:
            return
        over = 0 < self.hours <= (time.monotonic() - self.begun) / 3600
        stop = ranks.any_rank(over or self.signal is not None)
        if stop or self.step % self.every == 0:
            self.save(trainer)
        if stop:
            number = max(s or 0 for s in ranks.gather(self.signal))
            if number:
                raise Stopped(self.step, signal.Signals(number).name, 128 + number)
            raise Stopped(self.step, f"trainer.max_hours is {self.hours:g}", 0)

    def on_train_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        if self.step > self.saved:
            self.save(trainer)
        self._restore_signals()

    def on_validation_end(self, trainer: L.Trainer, module: Any) -> None:
        score = module.score()
        if trainer.state.fn == "fit" and score is not None and (self.best is None or score > self.best):
            self.best = score
            trainer.save_checkpoint(self.folder.checkpoints / BEST, weights_only=True)

    # What ------------------------------------------------------------------------------------------------------------

    def save(self, trainer: L.Trainer) -> None:
        trainer.save_checkpoint(self.folder.checkpoints / step_file(self.step), weights_only=False)
        self.saved = self.step
        if trainer.is_global_zero:
            for old in saved_steps(self.folder.checkpoints)[: -self.keep]:
                old.unlink()

    def on_save_checkpoint(self, trainer: L.Trainer, module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        checkpoint["loops"] = self._loops
        checkpoint["rng"] = ranks.gather(_rng(trainer.strategy.root_device))
        checkpoint["world"] = trainer.world_size
        checkpoint["strategy"] = trainer.strategy.strategy_name  # type: ignore[attr-defined]

    def on_load_checkpoint(self, trainer: L.Trainer, module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        self.step = self.saved = checkpoint["global_step"]
        there, here = checkpoint["world"], trainer.world_size
        carried = "weights, moments, learning rate, place in the data"
        if there == here:
            self._rng = [checkpoint["rng"][trainer.global_rank]]
            carried += " and random state"
        if trainer.is_global_zero:
            print(f"resuming from step {self.step}: {carried}")
            if there != here:
                print(
                    f"written by {there} ranks, resumed by {here}: a step now has {here}/{there} of the pictures, and "
                    "the random state is not resumed"
                )

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.best = read_fields(state, "checkpoint: callbacks.Saver", {"best": (float, None)})["best"]


def _rng(device: torch.device) -> list[torch.Tensor]:
    found = [torch.get_rng_state()]
    return [*found, torch.cuda.get_rng_state(device)] if device.type == "cuda" else found


def _set_rng(states: list[torch.Tensor]) -> None:
    torch.set_rng_state(states[0])
    if len(states) > 1 and torch.cuda.is_available():
        torch.cuda.set_rng_state(states[1])


class ValidateLast(Callback):
    """Validates after the very last step too, whatever the interval: an export comes with its own figures."""

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        batch = trainer.fit_loop.epoch_loop.batch_progress.current.ready
        if batch == trainer.num_training_batches:
            trainer.val_check_batch = batch
