"""Training through the real entry point: what it writes, what it never touches, and going on after a kill."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from safetensors.torch import load_file

from draftgrid import train
from draftgrid.common.cli import compose
from draftgrid.heads.backbones import load_backbone
from draftgrid.heads.mtp import MTPHeads
from draftgrid.recipes.launch.schema import DEFAULT, RECIPES, TrainConfig
from draftgrid.training.checkpoint import pick_checkpoint, read_checkpoint, saved_steps
from tests.conftest import World

ROOT = Path(__file__).parent.parent
FINISHED = {
    "trainer.steps": 40,
    "trainer.validate_every": 20,
    "trainer.precision": "bf16-mixed",
    "data.workers": 2,
    "optim.lr": 3e-3,
    "optim.warmup": 5,
    "sheet.images": 2,
}


def fit(arguments: list[str]) -> None:
    train.run(compose(TrainConfig, arguments, RECIPES, DEFAULT))


def spawn(arguments: list[str], torchrun: int = 0, **environment: str) -> subprocess.Popen:
    command = [sys.executable, "train.py"]
    if torchrun:
        command = [sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={torchrun}", "train.py"]
    return subprocess.Popen(
        [*command, *arguments],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.fixture(scope="module")
def finished(world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 40 steps with bf16 autocast, two loader workers and a sheet at the end."""
    out = tmp_path_factory.mktemp("run") / "run"
    fit(world.overrides(out, **FINISHED))
    return out


class TestFinishedRun:
    def test_folder_holds_all_a_run_promises(self, finished: Path) -> None:
        names = {p.name for p in finished.iterdir()}
        assert {"config.yaml", "run.json", "metrics.json", "logs", "checkpoints", "heads", "sheet.png"} <= names
        assert list((finished / "logs").rglob("events.out*")) and list((finished / "logs").rglob("metrics.csv"))

    def test_metrics_have_a_value_for_every_offset_and_second(self, finished: Path) -> None:
        metrics = json.loads((finished / "metrics.json").read_text())
        for kind in ("acceptance", "acceptance_uncertain", "acceptance_table", "smooth_l1", "cosine", "top1"):
            assert set(metrics[kind]) == {"right1", "right2", "down1", "down2"}, kind
        assert set(metrics["seconds"]) == {"total", "per_step", "frozen_forward", "heads_step"}
        assert all(value > 0 for value in metrics["seconds"].values())
        assert all(0 <= a <= 1 for a in metrics["acceptance"].values()) and metrics["backbone_nll"] > 0
        assert set(metrics["acceptance_guidance3"]) == set(metrics["acceptance"])

    def test_validation_loss_fell(self, finished: Path) -> None:
        (file,) = (finished / "logs").rglob("metrics.csv")
        header, *lines = file.read_text().splitlines()
        column = header.split(",").index("smooth_l1/right1")
        values = [float(line.split(",")[column]) for line in lines if line.split(",")[column]]
        assert len(values) == 2 and values[1] < values[0]

    def test_exported_offsets_are_the_heads_that_learned(self, finished: Path, world: World) -> None:
        from draftgrid.heads.mtp import HeadsConfig, new_heads

        heads = MTPHeads.from_pretrained(finished / "heads", load_backbone(world.backbone))
        start = new_heads(HeadsConfig(right=2, down=2), load_backbone(world.backbone)).state_dict()
        moved = {k.split(".")[0] for k, v in heads.state_dict().items() if not torch.equal(v, start[k])}
        config = json.loads((finished / "heads" / "config.json").read_text())
        assert moved == set(config["offsets"]) == {"right1", "right2", "down1", "down2"}

    def test_checkpoint_holds_heads_and_optimizer_and_no_backbone(self, finished: Path) -> None:
        file = pick_checkpoint(finished)
        checkpoint = read_checkpoint(file)
        exported = load_file(finished / "heads" / "model.safetensors")
        assert {k.removeprefix("heads.") for k in checkpoint["state_dict"]} == set(exported)
        heads = sum(v.numel() * v.element_size() for v in exported.values())
        (adam,) = checkpoint["optimizer_states"]
        assert set(adam["moments"]["exp_avg"]) == set(checkpoint["state_dict"]) and adam["step"] == 40
        assert file.stat().st_size < 1.2 * 3 * heads
        for name, tensor in exported.items():
            assert torch.equal(tensor, checkpoint["state_dict"]["heads." + name])

    def test_run_again_says_it_is_finished_and_changes_nothing(self, finished: Path, world: World, capsys) -> None:
        before = (finished / "metrics.json").read_bytes()
        fit(world.overrides(finished, **FINISHED))
        assert "finished before" in capsys.readouterr().out
        assert (finished / "metrics.json").read_bytes() == before

    def test_a_run_of_another_recipe_is_not_overwritten(self, finished: Path, world: World) -> None:
        with pytest.raises(ValueError, match=r"holds a run of another recipe .*lr.*overwrite=true"):
            fit(world.overrides(finished, **{"trainer.steps": 40}))


def test_frozen_backbone_is_in_eval_mode_and_out_of_the_optimizer_throughout(
    world: World, tmp_path: Path, monkeypatch
) -> None:
    """Dropout .5 in the backbone: any train() mode would show in its states."""
    from draftgrid.training.module import HeadsModule

    modes: list[bool] = []
    groups: list[int] = []
    seen: list[torch.Tensor] = []
    training, validation = HeadsModule.training_step, HeadsModule.validation_step

    def watch(self, batch) -> None:
        modes.append(any(m.training for m in self.backbone.modules()))
        groups.append(sum(len(g["params"]) for g in self.optimizers().param_groups))
        assert not any(p.requires_grad for p in self.backbone.parameters())
        seen[:] = [self.backbone.states(batch.tokens, batch.captions)[0] for _ in range(2)]
        assert torch.equal(*seen)

    def train_step(self, batch, index):
        watch(self, batch)
        return training(self, batch, index)

    def validate_step(self, batch, index):
        watch(self, batch)
        return validation(self, batch, index)

    config = json.loads((world.backbone / "config.json").read_text())
    dropping = tmp_path / "backbone"
    shutil.copytree(world.backbone, dropping)
    config["text_config"]["attention_dropout"] = 0.5
    (dropping / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr(HeadsModule, "training_step", train_step)
    monkeypatch.setattr(HeadsModule, "validation_step", validate_step)
    keys = {"backbone.checkpoint": dropping, "trainer.validate_every": 2, "data.validation_samples": 8}
    keys |= {"trainer.max_hours": 1e-9}
    with pytest.raises(SystemExit):
        fit(world.overrides(tmp_path / "run", **keys))
    assert modes == [False]  # one step, and the hours are up
    keys["trainer.max_hours"] = 0
    fit(world.overrides(tmp_path / "run", **keys))
    heads = MTPHeads.from_pretrained(tmp_path / "run" / "heads")
    batches = 4 + 2 * 2
    assert modes == [False] * batches and groups == [len(list(heads.parameters()))] * batches


def test_accumulated_gradients_are_the_mean_over_all_batches_of_a_step(world: World, tmp_path: Path) -> None:
    """Three batches a step, against one loss over the three by hand; the last step as the first."""
    from lightning.pytorch.callbacks import Callback

    from tests import rank_worker

    class Catch(Callback):
        found: ClassVar[list] = []

        def on_before_optimizer_step(self, trainer, module, optimizer) -> None:
            weights = {n: p.detach().clone() for n, p in module.heads.named_parameters()}
            self.found.append((weights, [p.grad.clone() for p in module.heads.parameters()], module))

    keys = {"trainer.steps": 4, "trainer.accumulate": 3, "trainer.clip": 0, "data.validation_samples": 2}
    rank_worker.run(world.overrides(tmp_path / "run", **keys), extra=[Catch()])
    data = rank_worker.batches(0, 1)
    assert len(Catch.found) == 4
    for step, (weights, gradients, module) in enumerate(Catch.found):
        module.heads.load_state_dict(weights)
        module.zero_grad()
        three = data[3 * step : 3 * step + 3]
        h, e = module.backbone.states(torch.cat([b.tokens for b in three]), [c for b in three for c in b.captions])
        module.loss(h[None], e, torch.cat([b.tokens for b in three])).backward()
        for found, p in zip(gradients, module.heads.parameters(), strict=True):
            torch.testing.assert_close(found, p.grad, rtol=1e-4, atol=1e-7)


def test_learning_rate_falls_to_its_share_at_the_last_step(world: World, tmp_path: Path) -> None:
    """The stream has no length; the schedule has: the steps."""
    keys = {"trainer.steps": 30, "optim.warmup": 10, "optim.lr": 1e-3, "optim.final": 0.1, "trainer.keep": 9}
    fit(world.overrides(tmp_path / "run", **keys, **{"trainer.save_every": 10}))
    rates = [
        read_checkpoint(f)["optimizer_states"][0]["groups"][0]["lr"]
        for f in saved_steps(tmp_path / "run" / "checkpoints")
    ]
    # At the peak behind the warm-up, half way down the cosine, and at the bottom.
    assert rates == pytest.approx([1e-3, 1e-3 * (0.1 + 0.9 / 2), 1e-4], rel=1e-6)


def test_save_every_five_saves_five_ten_fifteen(world: World, tmp_path: Path) -> None:
    """And the end, wherever it is."""
    keys = {"trainer.steps": 16, "trainer.save_every": 5, "trainer.keep": 9, "trainer.validate_every": 20}
    fit(world.overrides(tmp_path / "run", **keys))
    files = saved_steps(tmp_path / "run" / "checkpoints")
    assert [read_checkpoint(f)["global_step"] for f in files] == [5, 10, 15, 16]


@pytest.mark.slow
def test_killed_in_mid_epoch_and_run_again_ends_with_the_same_weights(world: World, tmp_path: Path) -> None:
    """Kill -9 early in 120 steps; two loader workers, captions dropped at random. Bit for bit."""
    keys = {"trainer.steps": 120, "trainer.validate_every": 60, "trainer.save_every": 2, "data.workers": 2}
    keys |= {"data.caption_dropout": 0.5, "trainer.threads": 1}  # bits depend on the number of threads
    fit(world.overrides(tmp_path / "whole", **keys))
    out = tmp_path / "killed"
    process = spawn(world.overrides(out, **keys))
    wait_for_step(process, out, 4)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    assert not (out / "metrics.json").exists() and 4 <= last_step(out) < 120
    fit(world.overrides(out, **keys))
    assert_same_export(tmp_path / "whole", out)


@pytest.mark.slow
def test_zero_2_goes_on_bit_for_bit_when_one_of_two_ranks_was_killed(world: World, tmp_path: Path) -> None:
    """torchrun ends the other within seconds and names the dead one; the same command goes on from what was saved."""
    keys = {
        "trainer.steps": 150,
        "trainer.validate_every": 150,
        "trainer.save_every": 5,
        "trainer.accelerator": "cpu",
        "trainer.strategy": "deepspeed_2",
        "data.workers": 2,
        "data.batch_size": 2,
        "data.validation_samples": 4,
        "data.caption_dropout": 0.5,
    }
    whole, out = tmp_path / "whole", tmp_path / "killed"
    process = spawn(world.overrides(out, **keys), torchrun=2)
    wait_for_step(process, out, 5)
    os.kill(children(process.pid)[1], signal.SIGKILL)
    begun = time.monotonic()
    output, _ = process.communicate(timeout=60)
    assert process.returncode != 0 and time.monotonic() - begun < 45
    assert "Signal 9 (SIGKILL)" in output and re.search(r"Root Cause.*\n.*\n.*\n.*\n *rank +: 1 ", output), output
    assert not (out / "metrics.json").exists() and 5 <= last_step(out) < 150
    for folder in (out, whole):
        process = spawn(world.overrides(folder, **keys), torchrun=2)
        output, _ = process.communicate(timeout=240)
        assert process.returncode == 0, output
    assert_same_export(whole, out)


def assert_same_export(a: Path, b: Path) -> None:
    whole, resumed = (load_file(p / "heads" / "model.safetensors") for p in (a, b))
    assert whole.keys() == resumed.keys()
    for name in whole:
        assert torch.equal(whole[name], resumed[name]), name


def children(parent: int) -> list[int]:
    """Process ids, oldest first."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:  # it has just ended
            continue
        if int(fields[1]) == parent:
            found.append(int(stat.parent.name))
    return sorted(found)


@pytest.fixture(autouse=True)
def threads_as_before() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def last_step(run: Path) -> int:
    """Of the newest checkpoint; 0 if there is none yet."""
    files = saved_steps(run / "checkpoints")
    return int(files[-1].stem.removeprefix("step-")) if files else 0


def wait_for_step(process: subprocess.Popen, run: Path, step: int, seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while last_step(run) < step and time.monotonic() < deadline:
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.02)


@pytest.mark.slow
def test_two_ranks_train_the_same_job(world: World, tmp_path: Path) -> None:
    """DDP over gloo under torchrun; one rank has 2 validation batches, the other 1. It ends, with one export."""
    keys = {"data.batch_size": 2, "trainer.accelerator": "cpu", "data.validation_samples": 5}
    process = spawn(world.overrides(tmp_path / "run", **keys, **{"trainer.validate_every": 2}), torchrun=2)
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 0, output
    metrics = json.loads((tmp_path / "run" / "metrics.json").read_text())
    heads = MTPHeads.from_pretrained(tmp_path / "run" / "heads", load_backbone(world.backbone))
    assert all(t.isfinite().all() for t in heads.state_dict().values()) and 0 < metrics["acceptance"]["right1"] <= 1


@pytest.mark.slow
def test_a_backbone_is_trained_saved_and_usable_also_in_two_goes(world: World, tmp_path: Path) -> None:
    """Attention dropout draws random numbers: they too go on where they were, bit for bit."""
    keys = {
        "recipe": "emoji_backbone",
        "smoke": True,
        "data.dir": tmp_path / "data",
        "backbone.size.layers": 1,
        "backbone.size.hidden_size": 32,
        "backbone.size.dropout": 0.5,
        "optim.lr": 0.1,
        "optim.warmup": 0,
        "backbone.codes": 32,
    }

    def train_into(out: Path, **more: object) -> None:
        fit([f"{k}={v}" for k, v in (keys | {"out": out} | more).items()])

    train_into(tmp_path / "run")
    backbone = load_backbone(tmp_path / "run" / "backbone")
    assert (backbone.grid.height, backbone.grid.width, backbone.image_vocab_size) == (16, 16, 32)
    assert not any(m.training for m in backbone.modules())
    with pytest.raises(SystemExit):
        train_into(tmp_path / "two", **{"trainer.max_hours": 1e-9})
    assert last_step(tmp_path / "two") == 1
    train_into(tmp_path / "two")
    whole, resumed = (load_file(tmp_path / n / "backbone" / "model.safetensors") for n in ("run", "two"))
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


def test_killed_after_its_last_step_a_run_still_finishes(world: World, tmp_path: Path) -> None:
    keys = {"trainer.save_every": 4}
    fit(world.overrides(tmp_path / "run", **keys))
    whole = json.loads((tmp_path / "run" / "metrics.json").read_text())
    (tmp_path / "run" / "metrics.json").unlink()
    weights = (tmp_path / "run" / "heads" / "model.safetensors").read_bytes()
    fit(world.overrides(tmp_path / "run", **keys))
    again = json.loads((tmp_path / "run" / "metrics.json").read_text())
    assert again["acceptance"] == whole["acceptance"] and again["smooth_l1"] == whole["smooth_l1"]
    assert (tmp_path / "run" / "heads" / "model.safetensors").read_bytes() == weights


def test_validation_figures_equal_a_computation_by_hand(world: World, tmp_path: Path) -> None:
    """Two pictures of the validation set, every figure written out with loops."""
    import numpy as np

    from draftgrid.data.shards import read_manifest
    from draftgrid.heads.distributions import count_table
    from tests.data_fixtures import read_shard

    keys = {"data.validation_samples": 2, "data.batch_size": 2, "decoding.guidance": 1}
    keys |= {"heads.down": 1, "heads.right": 1}
    fit(world.overrides(tmp_path / "run", **keys))
    metrics = json.loads((tmp_path / "run" / "metrics.json").read_text())
    backbone = load_backbone(world.backbone)
    heads = MTPHeads.from_pretrained(tmp_path / "run" / "heads", backbone)
    files = [world.data / "validation" / s.file for s in read_manifest(world.data / "validation").shards]
    samples = list(read_shard(files[0]))[:2]
    train = [s for f in sorted((world.data / "train").glob("*.tar")) for s in read_shard(f)]
    counted = torch.from_numpy(np.stack([s.tokens.astype("int64") for s in train]))
    source, target = backbone.grid.pairs((1, 0))
    table = count_table(counted, source, target, 24)
    accepted, unsure, floor, top, nll = [], [], [], [], []
    for sample in samples:
        tokens = torch.from_numpy(sample.tokens.astype("int64"))[None]
        h, e = backbone.states(tokens, [sample.caption])
        p = backbone.logits(h)[0].softmax(-1)
        q = backbone.logits(heads(h, e, (1, 0)))[0].softmax(-1)
        for y in range(4):
            for x in range(4):
                nll.append(-p[y, x, tokens[0, y, x]].log().item())
                if y == 3:
                    continue
                below = p[y + 1, x]
                accepted.append(sum(min(a, b) for a, b in zip(below.tolist(), q[y, x].tolist(), strict=True)))
                if -(below * below.log()).sum() >= 0.5:
                    unsure.append(accepted[-1])
                row = table[tokens[0, y, x]].tolist()
                floor.append(sum(min(a, b) for a, b in zip(below.tolist(), row, strict=True)))
                top.append(float(below.argmax() == q[y, x].argmax()))
    for kind, values in (("acceptance", accepted), ("acceptance_uncertain", unsure), ("acceptance_table", floor)):
        assert metrics[kind]["down1"] == pytest.approx(sum(values) / len(values), abs=1e-4), kind
    assert metrics["top1"]["down1"] == pytest.approx(sum(top) / len(top), abs=1e-6)
    assert metrics["backbone_nll"] == pytest.approx(sum(nll) / len(nll), abs=1e-4)


class TestBadInput:
    """One sentence, before a step is made, nothing half-written."""

    def test_a_start_that_failed_does_not_take_the_folder(self, world: World, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match="nowhere"):
            fit(world.overrides(tmp_path / "run", **{"backbone.checkpoint": "nowhere"}))
        fit(world.overrides(tmp_path / "run"))
        assert (tmp_path / "run" / "metrics.json").is_file()

    def test_a_truncated_tar_is_skipped_and_counted_and_many_stop_the_run(self, world: World, tmp_path: Path) -> None:
        for cut, fails in ((1, False), (9, True)):
            data = tmp_path / f"data{cut}"
            shutil.copytree(world.data, data)
            shard = sorted((data / "train").glob("*.tar"))[0]
            with tarfile.open(shard) as tar:
                middle = tar.getmembers()[-3 * cut].offset_data + 10  # amid the codes of the (ninth) last sample
            os.truncate(shard, middle)
            keys = {"data.dir": data, "trainer.steps": 15, "trainer.validate_every": 15}
            if fails:
                with pytest.raises(ValueError, match=rf"samples are broken, more than 1 %; last: .*{shard.name}"):
                    fit(world.overrides(tmp_path / f"run{cut}", **keys))
            else:
                fit(world.overrides(tmp_path / f"run{cut}", **keys))
                metrics = json.loads((tmp_path / f"run{cut}" / "metrics.json").read_text())
                assert metrics["broken_samples"] == 1

    @pytest.mark.parametrize(
        "keys,message",
        [
            ({"recipe": "emoji_sd"}, "unknown recipe 'emoji_sd'. Did you mean 'emoji_ssd'"),
            ({"trainer.step": 3}, "unknown key 'trainer.step'. Did you mean 'trainer.steps'"),
            ({"trainer.steps": 0}, "trainer.steps is 0; use a finite number of at least 1"),
            ({"trainer.steps": "many"}, "trainer.steps is 'many'; it must be of type int"),
            ({"trainer.precision": "bf16"}, "trainer.precision is 'bf16'; use one of auto, 32-true"),
            ({"task": "body"}, "task is 'body'; use one of heads, backbone"),
            ({"trainer.accelerator": "gpu"}, "GPU"),
            ({"data.dir": "nowhere"}, "nowhere/train holds no token shards.* data.encode"),
            ({"backbone.checkpoint": "nowhere"}, "'nowhere' is neither a folder nor a shipped checkpoint"),
            ({"backbone.grid": "[4,5]"}, "holds 4x4 grids, but the backbone draws 4x5"),
            ({"heads.input": "x"}, "heads.input is 'x'"),
            ({"heads.right": 4}, "heads.right is 4, but the grid has 4 that way"),
            ({"sheet.images": 2, "sheet.prompts": "nowhere.txt"}, "prompts is 'nowhere.txt'"),
            ({"task": "backbone"}, r"backbone.grid is \[\]; task=backbone needs"),
            ({"sheet.rounds": -1}, "sheet.rounds is -1"),
            ({"data.caption_dropout": 1.5}, "data.caption_dropout is 1.5"),
        ],
    )
    def test_is_told_in_one_sentence(self, world: World, tmp_path: Path, keys: dict, message: str) -> None:
        if keys.get("trainer.accelerator") and torch.cuda.is_available():
            keys = {**keys, "trainer.devices": 1 + torch.cuda.device_count()}
        with pytest.raises(ValueError, match=message) as error:
            fit(world.overrides(tmp_path / "run", **keys))
        assert "\n" not in str(error.value)
        assert not (tmp_path / "run").exists()

    def test_shards_of_another_tokenizer(self, world: World, tmp_path: Path) -> None:
        from draftgrid.heads.tokenizers import PatchVQ

        PatchVQ(torch.rand(24, 48), 4, 16).save_pretrained(tmp_path / "vq")
        with pytest.raises(ValueError, match=r"was encoded by tokenizer .* but this run uses"):
            fit(world.overrides(tmp_path / "run", **{"backbone.tokenizer": tmp_path / "vq"}))

    def test_a_tokenizer_of_another_size(self, world: World, tmp_path: Path) -> None:
        from draftgrid.heads.tokenizers import PatchVQ

        PatchVQ(torch.rand(25, 48), 4, 16).save_pretrained(tmp_path / "vq")
        with pytest.raises(ValueError, match="the tokenizer has 25 codes, the backbone 24"):
            fit(world.overrides(tmp_path / "run", **{"backbone.tokenizer": tmp_path / "vq"}))

    def test_a_folder_with_foreign_files_is_left_alone(self, world: World, tmp_path: Path) -> None:
        (tmp_path / "thesis.tex").write_text("x")
        with pytest.raises(ValueError, match="folder with other files"):
            fit(world.overrides(tmp_path))
        assert [p.name for p in tmp_path.iterdir()] == ["thesis.tex"]

    def test_the_command_exits_2_with_one_line(self, tmp_path: Path) -> None:
        process = spawn([f"out={tmp_path / 'run'}", "recipe=emojissd"])
        output, _ = process.communicate(timeout=60)
        assert process.returncode == 2
        assert output.strip().splitlines() == ["error: unknown recipe 'emojissd'. Did you mean 'emoji_ssd'?"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.*")  # torch's own compiler
def test_compiled_heads_train_to_the_same_weights(world: World, tmp_path: Path) -> None:
    keys = {"heads.right": 1, "heads.down": 0, "data.validation_samples": 4}
    for name, compiled in (("eager", False), ("compiled", True)):
        fit(world.overrides(tmp_path / name, **keys, **{"trainer.compile": compiled}))
    a, b = (load_file(tmp_path / name / "heads" / "model.safetensors") for name in ("eager", "compiled"))
    assert a.keys() == b.keys()
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=1e-3, atol=1e-5)
