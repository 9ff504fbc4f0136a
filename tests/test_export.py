"""`draftgrid export`: any checkpoint, in one process, becomes the folder that from_pretrained loads."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from draftgrid.common.cli import main
from draftgrid.heads.backbones import load_backbone
from draftgrid.heads.mtp import MTPHeads
from draftgrid.training.checkpoint import pick_checkpoint, read_checkpoint, step_file
from draftgrid.training.export import ExportConfig, export, run
from tests.conftest import World
from tests.test_train import fit


@pytest.fixture(scope="module")
def trained(world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("trained") / "run"
    fit(world.overrides(out, **{"trainer.save_every": 2, "trainer.validate_every": 2, "trainer.keep": 9}))
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


class TestWhatIsRefused:
    def test_a_folder_without_checkpoints(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match=rf"{tmp_path} holds no last checkpoint; name a run folder"):
            run(ExportConfig(checkpoint=str(tmp_path)))

    def test_a_file_cut_short_names_itself_and_leaves_nothing(self, trained: Path, tmp_path: Path) -> None:
        data = pick_checkpoint(trained).read_bytes()
        (tmp_path / step_file(4)).write_bytes(data[: len(data) // 2])
        with pytest.raises(ValueError, match=r"step-00000004\.ckpt cannot be read .*; delete it to go on from the one"):
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
        with pytest.raises(ValueError, match="which is 'first'; use last or best"):
            run(ExportConfig(checkpoint=str(trained), which="first"))
