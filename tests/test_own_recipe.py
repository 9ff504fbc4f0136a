"""A recipe, an adapter and a run folder of one's own: found by their place, checked before anything, nothing lost."""

import re
from pathlib import Path

import pytest

from draftgrid.common.cli import compose
from draftgrid.data.sources import read_prompts
from draftgrid.heads.backbones.loading import adapter_class
from draftgrid.recipes.launch.schema import RECIPES, TrainConfig
from draftgrid.training.run_folder import RunFolder


def composed(*arguments: str) -> TrainConfig:
    config = compose(TrainConfig, arguments, RECIPES)
    config.check()
    return config


class TestRecipe:
    def test_a_file_builds_on_a_shipped_recipe_and_on_a_file_beside_it(self, tmp_path: Path) -> None:
        (tmp_path / "lab.yaml").write_text("base: emu3_ssd\ntrainer:\n  devices: 4\nheads:\n  right: 3\n")
        (tmp_path / "mine.yaml").write_text("base: lab.yaml\nheads:\n  down: 1\n")
        config = composed(f"recipe={tmp_path}/mine.yaml", "trainer.steps=7")
        assert config.recipe == "mine" and config.backbone.checkpoint == "BAAI/Emu3-Gen-hf"
        assert (config.heads.right, config.heads.down) == (3, 1)
        assert (config.trainer.devices, config.trainer.accumulate, config.trainer.steps) == (4, 4, 7)

    def test_another_kind_of_heads_takes_nothing_of_its_bases(self, tmp_path: Path) -> None:
        (tmp_path / "mine.yaml").write_text("base: janus_ssd\nheads:\n  kind: chain\n  rank: 5\n")
        heads = composed(f"recipe={tmp_path}/mine.yaml").heads
        assert (heads.kind, heads.rank, heads.down) == ("chain", 5, 2)  # down's default, which chain heads do not read

    @pytest.mark.parametrize(
        "text, words",
        [
            ("base: emu4_ssd", "unknown recipe 'emu4_ssd'. Did you mean 'emu3_ssd'"),
            ("base: other.yaml", "recipe 'other.yaml' is no file: .*other.yaml does not exist"),
            ("base: mine.yaml", "mine.yaml: base is 'mine.yaml', whose own base leads back here"),
            ("base: emu3_ssd\nhead:\n  right: 2", "mine.yaml: unknown key 'head'"),
            ("base: emu3_ssd\nheads:\n  right: many", "mine.yaml: heads.right is 'many'; it must be of type int"),
        ],
    )
    def test_what_is_wrong_is_said_with_the_file(self, text: str, words: str, tmp_path: Path) -> None:
        (tmp_path / "mine.yaml").write_text(text)
        with pytest.raises(ValueError, match=words):
            composed(f"recipe={tmp_path}/mine.yaml")

    @pytest.mark.parametrize("key", ["right=9", "down=1", "input=h", "shared=true"])
    def test_a_chain_head_refuses_what_offset_heads_read(self, key: str) -> None:
        with pytest.raises(ValueError, match=rf"heads.{key.split('=')[0]} is .*heads.kind=chain does not read it"):
            composed("recipe=emoji_chain", f"heads.{key}")

    @pytest.mark.parametrize("key", ["cell=4", "rows=2", "lefts=2", "recent=3"])
    def test_offset_heads_refuse_what_a_chain_head_reads(self, key: str) -> None:
        with pytest.raises(ValueError, match=rf"heads.{key.split('=')[0]} is .*heads.kind=offsets does not read it"):
            composed("recipe=emoji_ssd", f"heads.{key}")


@pytest.mark.parametrize("recipe", sorted(p.stem for p in RECIPES.glob("*.yaml") if not p.stem.startswith("emoji")))
def test_published_models_are_asked_for_photographs(recipe: str) -> None:
    prompts = read_prompts(composed(f"recipe={recipe}").sheet.prompts)
    assert len(prompts) == 8 and all(len(p.split()) > 5 for p in prompts)


class TestNumbers:
    @pytest.mark.parametrize(
        "key",
        [
            *("decoding.guidance=nan", "decoding.guidance=-inf", "optim.final=nan", "optim.final=-1", "optim.lr=inf"),
            *(
                "optim.weight_decay=-1",
                "optim.weight_decay=nan",
                "optim.beta2=1.5",
                "trainer.clip=-1",
                "trainer.clip=nan",
            ),
            *(
                "trainer.threads=-1",
                "loss.state=nan",
                "loss.tv=inf",
                "loss.guidance=[nan]",
                "loss.weights={chain: .nan}",
            ),
            *("optim.lr=0", "data.cache_gb=nan", "assume.utilisation=nan", "seed=-1"),
        ],
    )
    def test_what_cannot_be_meant_is_refused_before_anything_is_read(self, key: str) -> None:
        with pytest.raises(ValueError, match=re.escape(key.split("=")[0]) + " is .*; use a"):
            composed("recipe=emoji_chain", key)


class TestAdapter:
    @pytest.mark.parametrize(
        "adapter, words",
        [
            ("emu4", "set adapter to one of emu3, janus_pro, lumina_mgpt, or to package.module:Class"),
            ("no_such_module:Model", "no_such_module cannot be imported"),
            ("mine_adapter:Absent", "mine_adapter has no class 'Absent'"),
            ("mine_adapter:Plain", "it is no subclass of"),
            ("mine_adapter:Half", "it lacks .*embed.*trunk"),
        ],
    )
    def test_one_that_is_none_is_told(
        self, adapter: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        text = "from draftgrid.heads.backbones import Backbone\nclass Plain: pass\nclass Half(Backbone): pass\n"
        (tmp_path / "mine_adapter.py").write_text(text)
        monkeypatch.syspath_prepend(str(tmp_path))
        with pytest.raises(ValueError, match=words):
            adapter_class(adapter, "here")

    def test_one_beside_the_current_folder_is_found(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        text = "from draftgrid.heads.backbones.emu3 import Emu3Backbone\nclass Mine(Emu3Backbone): pass\n"
        (tmp_path / "beside_adapter.py").write_text(text)
        monkeypatch.chdir(tmp_path)
        assert adapter_class("beside_adapter:Mine", "here").__name__ == "Mine"


class TestOverwrite:
    def made(self, path: Path) -> RunFolder:
        folder = RunFolder(path)
        folder.claim("old recipe", "auto", False)
        (path / "heads").mkdir()
        (path / "heads" / "weights").write_text("precious")
        return folder

    def test_a_start_that_fails_puts_the_old_run_back(self, tmp_path: Path) -> None:
        folder = self.made(tmp_path / "run")
        assert not folder.claim("new recipe", "auto", True)
        assert not (folder.path / "heads").exists()
        folder.release()
        assert (folder.path / "heads" / "weights").read_text() == "precious"
        assert (folder.path / "config.yaml").read_text() == "old recipe" and not folder.old.exists()

    def test_a_start_that_holds_removes_it_and_a_link_stays_a_link(self, tmp_path: Path) -> None:
        self.made(tmp_path / "target")
        (tmp_path / "link").symlink_to(tmp_path / "target")
        folder = RunFolder(tmp_path / "link")
        folder.claim("new recipe", "auto", True)
        folder.keep()
        assert (tmp_path / "link").is_symlink()
        assert [p.name for p in (tmp_path / "target").iterdir()] == ["config.yaml"]
