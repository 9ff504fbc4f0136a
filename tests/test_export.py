"""`draftgrid export`: any checkpoint, in one process, becomes the folder that from_pretrained loads."""

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from draftgrid.common.cli import main
from draftgrid.heads.backbones import load_backbone
from draftgrid.heads.mtp import MTPHeads
from draftgrid.training.checkpoint import pick_checkpoint, read_checkpoint, step_file
from draftgrid.training.export import ExportConfig, export, run
from tests.conftest import World
from tests.data_fixtures import files
from tests.test_train import fit

KEYS = {"trainer.save_every": 2, "trainer.validate_every": 2, "trainer.keep": 9}


@pytest.fixture(scope="module")
def trained(world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("trained") / "run"
    fit(world.overrides(out, **KEYS))
    return out


def test_the_newest_checkpoint_of_a_run_gives_what_the_run_exported(trained: Path, tmp_path: Path) -> None:
    run(ExportConfig(checkpoint=str(trained), out=str(tmp_path / "heads")))
    for name in ("model.safetensors", "config.json", "README.md", "recipe.yaml"):
        assert (tmp_path / "heads" / name).read_bytes() == (trained / "heads" / name).read_bytes(), name


def test_an_older_checkpoint_and_the_best_give_their_own_weights_and_figures(
    trained: Path, tmp_path: Path, world: World
) -> None:
    for place, which in ((trained / "checkpoints" / step_file(2), "last"), (trained, "best")):
        file = pick_checkpoint(place, which)
        run(ExportConfig(checkpoint=str(place), out=str(tmp_path / which), which=which))
        heads = MTPHeads.from_pretrained(tmp_path / which, load_backbone(world.backbone))
        saved = read_checkpoint(file)
        assert {f"heads.{k}" for k in heads.state_dict()} == saved["state_dict"].keys()
        for name, tensor in heads.state_dict().items():
            assert torch.equal(tensor, saved["state_dict"][f"heads.{name}"])
        assert f"step {saved['global_step']} of recipe" in heads.card
        assert f"{saved['figures']['acceptance/right1']:.3f}" in heads.card
    assert read_checkpoint(pick_checkpoint(trained))["global_step"] == 4


def test_a_tensor_is_there_once_and_none_is_the_backbones(trained: Path) -> None:
    exported = load_file(trained / "heads" / "model.safetensors")
    offsets = json.loads((trained / "heads" / "config.json").read_text())["offsets"]
    assert {name.split(".")[0] for name in exported} == set(offsets)
    assert len({t.data_ptr() for t in exported.values()}) == len(exported)


def test_the_python_of_the_card_loads_the_heads(trained: Path, tmp_path: Path, world: World) -> None:
    """Also where the recipe gives another grid than the checkpoint's own."""
    file = tmp_path / step_file(4)
    shutil.copy(pick_checkpoint(trained), file)
    for grid in ([], [4, 2]):

        def another(held: dict[str, Any], grid: list[int] = grid) -> None:
            held["heads"]["backbone"]["grid"] = grid or [4, 4]
            held["origin"]["recipe"] = held["origin"]["recipe"].replace("  grid: []\n", f"  grid: {grid}\n")

        change(file, another)
        export(file, tmp_path / "heads")
        (code,) = re.findall(r"```python\n(.*?)```", (tmp_path / "heads" / "README.md").read_text(), re.DOTALL)
        assert code.startswith("from draftgrid import ")
        found: dict[str, Any] = {}
        exec(code.replace("this folder", str(tmp_path / "heads")), found)
        assert found["heads"].names == ["right1", "right2", "down1", "down2"]
        assert found["backbone"].fingerprint == load_backbone(world.backbone).fingerprint


class TestOverwriting:
    def overwrite(self, trained: Path, out: Path) -> None:
        run(ExportConfig(checkpoint=str(trained / "checkpoints" / step_file(2)), out=str(out), overwrite=True))

    @pytest.mark.parametrize("moment", ["reading", "writing", "moving"])
    def test_what_fails_leaves_the_old_export(self, trained: Path, tmp_path: Path, moment: str, monkeypatch) -> None:
        shutil.copytree(trained / "heads", tmp_path / "heads")
        before = files(tmp_path)
        replace = os.replace

        def fail(*_: object) -> None:
            raise OSError(28, "No space left on device")

        def fail_at_the_last(source: Path, target: Path) -> None:
            (fail if str(source).endswith(".part") and Path(target).name == "heads" else replace)(source, target)

        if moment == "reading":
            monkeypatch.setattr(MTPHeads, "from_description", fail)
        elif moment == "writing":
            monkeypatch.setattr(os, "fsync", fail)
        else:
            monkeypatch.setattr(os, "replace", fail_at_the_last)
        with pytest.raises(OSError, match="No space left"):
            self.overwrite(trained, tmp_path / "heads")
        assert files(tmp_path) == before
        monkeypatch.undo()
        self.overwrite(trained, tmp_path / "heads")
        assert files(tmp_path).keys() == before.keys() and files(tmp_path) != before

    def test_of_a_link_the_target_is_replaced_and_the_link_stays(self, trained: Path, tmp_path: Path) -> None:
        shutil.copytree(trained / "heads", tmp_path / "disk" / "target")
        (tmp_path / "heads").symlink_to(tmp_path / "disk" / "target")
        self.overwrite(trained, tmp_path / "heads")
        assert (tmp_path / "heads").readlink() == tmp_path / "disk" / "target"
        assert [p.name for p in (tmp_path / "disk").iterdir()] == ["target"]
        assert "step 2 of recipe" in (tmp_path / "disk" / "target" / "README.md").read_text()

    def test_a_file_is_no_folder(self, trained: Path, tmp_path: Path) -> None:
        (tmp_path / "heads").write_text("mine")
        with pytest.raises(ValueError, match=f"out={tmp_path / 'heads'} is a file; name a folder"):
            self.overwrite(trained, tmp_path / "heads")


def change(file: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    held = torch.load(file, weights_only=True)
    edit(held)
    torch.save(held, file)


def renamed(tensors: dict[str, Any]) -> None:
    tensors["heads.right1.typo"] = tensors.pop("heads.right1.norm.weight")


def misshapen(tensors: dict[str, Any]) -> None:
    tensors["heads.right1.norm.weight"] = torch.ones(3)


NAMES = r"missing \['heads\.right1\.norm\.weight'\], unknown \['heads\.right1\.typo'\], misshapen \[\]"
SHAPES = r"missing \[\], unknown \[\], misshapen \['heads\.right1\.norm\.weight is \(3,\), not \(32,\)'\]"
BOTH: list[tuple[Callable[[dict[str, Any]], object], str]] = [
    (lambda held: held.pop("state_dict"), "state_dict is missing; it must be a group of keys"),
    (lambda held: held.pop("figures"), "figures is missing; it must be a group of keys"),
    (lambda held: held.pop("origin"), "origin is missing; it must be a group of keys"),
    (lambda held: held.update(global_step="4"), 'global_step is "4"; it must be a whole number'),
    (lambda held: held.update(heads=[1]), r"heads is \[1\]; it must be a group of keys"),
    (lambda held: held["figures"].update(x="high"), "figures: x is 'high'; use a number"),
    (lambda held: renamed(held["state_dict"]), f"state_dict: {NAMES}"),
    (lambda held: misshapen(held["state_dict"]), f"state_dict: {SHAPES}"),
    (lambda held: held["state_dict"].update({"heads.right1.norm.weight": "x"}), r"norm\.weight is x, not \(32,\)"),
]
EXPORT: list[tuple[Callable[[dict[str, Any]], object], str]] = [
    (lambda held: held["origin"].pop("recipe"), "origin: recipe is missing; it must be text"),
    (lambda held: held["origin"].update(recipe="a: ["), r"origin\.recipe is not valid YAML"),
    (lambda held: held["origin"].update(recipe="- a"), r'origin\.recipe holds \["a"\]; it must be an object of fields'),
    (lambda held: held["origin"].update(recipe="data: x"), 'recipe: data is "x"; it must be a group of keys'),
    (lambda held: held["heads"].update(backbone=1), "backbone is 1; it must be a group of keys"),
]
RESUME: list[tuple[Callable[[dict[str, Any]], object], str]] = [
    (lambda held: held.pop("loops"), "loops is missing; it must be a group of keys"),
    (lambda held: held.pop("optimizer_states"), "optimizer_states is missing; it must be a list of 1 items"),
    (lambda held: held.update(rng=[]), r"rng is \[\]; it must be a list of 1 items, each a list"),
    (lambda held: held.pop("TokenDataModule"), "TokenDataModule is missing; it must be a group of keys"),
    (lambda held: held.pop("counts"), "counts is missing; it must be a group of keys"),
    (lambda held: held["counts"].update(broken="no"), 'counts: broken is "no"; it must be a whole number'),
    (lambda held: held["optimizer_states"][0]["moments"].pop("exp_avg"), "moments: exp_avg is missing"),
    (lambda held: renamed(held["optimizer_states"][0]["moments"]["exp_avg_sq"]), f"exp_avg_sq: {NAMES}"),
    (lambda held: misshapen(held["optimizer_states"][0]["moments"]["exp_avg"]), f"exp_avg: {SHAPES}"),
]


class TestACheckpointThatIsNotWhole:
    """Each lack is one sentence that names file, field or tensor, and value."""

    @pytest.mark.parametrize(("edit", "words"), [*BOTH, *EXPORT])
    def test_is_not_exported(self, trained: Path, tmp_path: Path, edit, words: str, capsys) -> None:
        file = tmp_path / step_file(2)
        shutil.copy(trained / "checkpoints" / step_file(2), file)
        change(file, edit)
        with pytest.raises(SystemExit):
            main(run, ExportConfig, None, arguments=[f"checkpoint={file}", f"out={tmp_path / 'heads'}"])
        (line,) = capsys.readouterr().err.splitlines()
        assert re.match(f"error: {file}(: | holds | )?.*{words}", line), line
        assert not (tmp_path / "heads").exists()

    @pytest.mark.parametrize(("edit", "words"), [*BOTH, *RESUME])
    def test_is_not_taken_up(self, trained: Path, tmp_path: Path, world: World, edit, words: str) -> None:
        out = tmp_path / "run"
        shutil.copytree(trained, out, ignore=shutil.ignore_patterns("metrics.json", "heads", step_file(4), "best.ckpt"))
        file = out / "checkpoints" / step_file(2)
        change(file, edit)
        before = file.read_bytes()
        with pytest.raises(ValueError, match=f"^{file}: [^\n]*{words}[^\n]*$"):
            fit(world.overrides(out, **KEYS))
        assert [p.read_bytes() for p in (out / "checkpoints").iterdir()] == [before]

    def test_whole_it_is_taken_up(self, trained: Path, tmp_path: Path, world: World) -> None:
        """So that what is refused above is refused for its lack alone."""
        out = tmp_path / "run"
        shutil.copytree(trained, out, ignore=shutil.ignore_patterns("metrics.json", "heads", step_file(4), "best.ckpt"))
        change(out / "checkpoints" / step_file(2), lambda held: None)
        fit(world.overrides(out, **KEYS))
        name = "heads/model.safetensors"
        assert (out / name).read_bytes() == (trained / name).read_bytes()


class TestWhatIsRefused:
    def test_a_folder_without_checkpoints(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match=rf"{tmp_path} holds no last checkpoint; name a run folder"):
            run(ExportConfig(checkpoint=str(tmp_path)))

    def test_a_file_cut_short_names_itself_and_leaves_nothing(self, trained: Path, tmp_path: Path) -> None:
        data = pick_checkpoint(trained).read_bytes()
        (tmp_path / step_file(4)).write_bytes(data[: len(data) // 2])
        with pytest.raises(
            ValueError, match=r"step-00000004\.ckpt cannot be read .*; delete it to resume from the one"
        ):
            export(tmp_path / step_file(4), tmp_path / "heads")
        assert not (tmp_path / "heads").exists()

    def test_a_checkpoint_of_something_else(self, tmp_path: Path) -> None:
        torch.save({"state_dict": {}}, tmp_path / step_file(1))
        with pytest.raises(ValueError, match="is no checkpoint of this version"):
            export(tmp_path / step_file(1), tmp_path / "heads")

    def test_a_folder_that_is_there(self, trained: Path, tmp_path: Path, capsys) -> None:
        arguments = [f"checkpoint={trained}", f"out={tmp_path}"]
        (tmp_path / "thesis.tex").write_text("mine")
        with pytest.raises(SystemExit):
            main(run, ExportConfig, None, arguments=[*arguments, "overwrite=true"])
        assert "holds thesis.tex, which is no part of exported heads" in capsys.readouterr().err
        (tmp_path / "thesis.tex").rename(tmp_path / "README.md")
        with pytest.raises(SystemExit):
            main(run, ExportConfig, None, arguments=arguments)
        assert "holds exported heads already; choose another out, or overwrite=true" in capsys.readouterr().err
        main(run, ExportConfig, None, arguments=[*arguments, "overwrite=true"])
        assert (tmp_path / "README.md").read_text().startswith("---")

    def test_neither_last_nor_best(self, trained: Path) -> None:
        with pytest.raises(ValueError, match="which is 'first'; use one of last, best"):
            run(ExportConfig(checkpoint=str(trained), which="first"))
