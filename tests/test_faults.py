"""What goes wrong in the middle of a run: states that are not numbers, signals, a full disk, hours that are up."""

import json
import os
import signal
from pathlib import Path

import pytest
import torch
from lightning.pytorch.callbacks import Callback

from draftgrid.heads.backbones import load_backbone
from draftgrid.heads.mtp import MTPHeads
from draftgrid.recipes.launch import build
from draftgrid.training.checkpoint import pick_checkpoint, read_checkpoint, saved_steps
from draftgrid.training.module import HeadsModule
from tests.conftest import World
from tests.test_train import fit

LONG = {"trainer.steps": 12, "trainer.validate_every": 12, "trainer.save_every": 100}


def spoil(monkeypatch: pytest.MonkeyPatch, when, samples: slice = slice(None)) -> None:
    """States of these samples become NaN in the training steps `when` says."""
    states = HeadsModule.states

    def spoilt(self, batch):
        h, e = states(self, batch)
        if when(self.trainer.global_step):
            h = h.clone()
            h[:, samples] = torch.nan
        return h, e

    monkeypatch.setattr(HeadsModule, "states", spoilt)


class TestSamplesThatAreNotFinite:
    def test_one_is_left_out_and_the_gradient_is_that_of_the_others(self, world: World, monkeypatch) -> None:
        from draftgrid.data.stream import Batch
        from draftgrid.heads.config import HeadsConfig, OptimConfig
        from draftgrid.heads.mtp import new_heads

        backbone = load_backbone(world.backbone)
        module = HeadsModule(backbone, new_heads(HeadsConfig(right=2, down=1), backbone), OptimConfig())
        monkeypatch.setattr(HeadsModule, "log", lambda *_, **__: None)
        trainer = type("T", (), {"global_step": 0, "accumulate_grad_batches": 1, "global_rank": 0, "world_size": 1})()
        monkeypatch.setattr(HeadsModule, "trainer", property(lambda _: trainer))
        tokens = torch.randint(24, (4, 4, 4), generator=torch.Generator().manual_seed(0))
        captions = ["a", None, "b", "c"]

        def gradients(rows: list[int]) -> list[torch.Tensor]:
            module.zero_grad()
            batch = Batch(tokens[rows], [captions[r] for r in rows], [str(r) for r in rows], ["x"] * len(rows))
            module.training_step(batch, 0).backward()
            return [p.grad.clone() for p in module.heads.parameters() if p.grad is not None]

        expected = gradients([0, 2, 3])
        spoil(monkeypatch, lambda _: True, slice(1, 2))
        found = gradients([0, 1, 2, 3])
        assert module.skipped == 1 and len(found) == len(list(module.heads.parameters()))
        for a, b in zip(expected, found, strict=True):
            torch.testing.assert_close(a, b)

    def test_a_whole_batch_is_skipped_and_counted(self, world: World, tmp_path: Path, monkeypatch) -> None:
        spoil(monkeypatch, lambda step: step == 5)
        fit(world.overrides(tmp_path / "run", **LONG))
        assert json.loads((tmp_path / "run" / "metrics.json").read_text())["skipped_samples"] == 4
        heads = MTPHeads.from_pretrained(tmp_path / "run" / "heads")
        assert all(t.isfinite().all() for t in heads.state_dict().values())

    def test_too_many_stop_the_run_and_name_the_step(self, world: World, tmp_path: Path, monkeypatch) -> None:
        spoil(monkeypatch, lambda step: step >= 5)
        keys = LONG | {"trainer.save_every": 2}
        with pytest.raises(ValueError, match=r"step 6: 8 of 28 samples gave no finite .* trainer.max_skipped=0.01"):
            fit(world.overrides(tmp_path / "run", **keys))
        assert read_checkpoint(pick_checkpoint(tmp_path / "run"))["global_step"] == 6

    def test_weights_that_are_not_finite_are_never_saved(self, world: World, tmp_path: Path, monkeypatch) -> None:
        step = HeadsModule.on_before_zero_grad

        def broken(self, optimizer):
            if self.trainer.global_step == 5:
                with torch.no_grad():
                    next(self.heads.parameters()).fill_(torch.inf)
            return step(self, optimizer)

        monkeypatch.setattr(HeadsModule, "on_before_zero_grad", broken)
        keys = LONG | {"trainer.save_every": 2, "trainer.max_skipped": 1.0}
        with pytest.raises(ValueError, match=r"right1\.project\.weight is not finite at step 6; nothing is saved"):
            fit(world.overrides(tmp_path / "run", **keys))
        assert read_checkpoint(pick_checkpoint(tmp_path / "run"))["global_step"] == 4


class Tell(Callback):
    """Sends this process a signal in the middle of step 7."""

    number = signal.SIGTERM

    def on_before_zero_grad(self, trainer, *_) -> None:
        if trainer.global_step == 6:
            os.kill(os.getpid(), self.number)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_the_step_and_the_same_command_goes_on_bit_for_bit(
    world: World, tmp_path: Path, monkeypatch, capsys, number: int
) -> None:
    fit(world.overrides(tmp_path / "whole", **LONG))
    callbacks = build.callbacks
    monkeypatch.setattr(Tell, "number", number)
    monkeypatch.setattr(build, "callbacks", lambda *a: [Tell(), *callbacks(*a)])
    before = signal.getsignal(number)
    with pytest.raises(SystemExit) as stop:
        fit(world.overrides(tmp_path / "run", **LONG))
    assert stop.value.code == 128 + number and signal.getsignal(number) is before
    assert "stopped at step 7" in capsys.readouterr().out
    (file,) = saved_steps(tmp_path / "run" / "checkpoints")
    assert read_checkpoint(file)["global_step"] == 7
    monkeypatch.setattr(build, "callbacks", callbacks)
    fit(world.overrides(tmp_path / "run", **LONG))
    assert "resuming from step 7: weights, moments, learning rate, place in the data" in capsys.readouterr().out
    names = [tmp_path / n / "heads" / "model.safetensors" for n in ("whole", "run")]
    assert names[0].read_bytes() == names[1].read_bytes()


def test_when_the_hours_are_up_a_run_saves_ends_well_and_goes_on(world: World, tmp_path: Path, capsys) -> None:
    keys = LONG | {"trainer.max_hours": 1e-6}
    with pytest.raises(SystemExit) as stop:
        fit(world.overrides(tmp_path / "run", **keys))
    assert stop.value.code == 0 and "trainer.max_hours is 1e-06" in capsys.readouterr().out
    assert len(saved_steps(tmp_path / "run" / "checkpoints")) == 1
    fit(world.overrides(tmp_path / "run", **LONG))
    assert (tmp_path / "run" / "metrics.json").is_file()


def test_keep_leaves_the_newest_and_the_best(world: World, tmp_path: Path) -> None:
    keys = {"trainer.steps": 9, "trainer.save_every": 2, "trainer.keep": 2, "trainer.validate_every": 3}
    fit(world.overrides(tmp_path / "run", **keys))
    folder = tmp_path / "run" / "checkpoints"
    assert sorted(p.name for p in folder.iterdir()) == ["best.ckpt", "step-00000008.ckpt", "step-00000009.ckpt"]
    best, last = read_checkpoint(folder / "best.ckpt"), read_checkpoint(pick_checkpoint(folder))

    def mean(checkpoint) -> float:
        values = [v for k, v in checkpoint["figures"].items() if k.startswith("acceptance/")]
        return sum(values) / len(values)

    assert best["global_step"] in (3, 6, 9) and mean(best) >= mean(last) and "optimizer_states" not in best


def test_a_full_disk_stops_the_run_and_leaves_the_last_good_checkpoint(
    world: World, tmp_path: Path, monkeypatch
) -> None:
    save = torch.save

    def full(value, path, *rest) -> None:
        if value.get("global_step") == 6:
            Path(path).write_bytes(b"half of it")
            raise OSError(28, "No space left on device")
        save(value, path, *rest)

    monkeypatch.setattr(torch, "save", full)
    keys = LONG | {"trainer.save_every": 2}
    with pytest.raises(OSError, match="No space left on device") as error:
        fit(world.overrides(tmp_path / "run", **keys))
    assert str(error.value.filename).endswith("step-00000006.ckpt")
    names = [p.name for p in (tmp_path / "run" / "checkpoints").iterdir()]
    assert sorted(names) == ["step-00000002.ckpt", "step-00000004.ckpt"]
    monkeypatch.setattr(torch, "save", save)
    fit(world.overrides(tmp_path / "run", **keys))
