"""Files that are whole or absent, and whose folder a run's folder is."""

import json
import os
import shutil
import signal
from multiprocessing import get_context
from pathlib import Path

import pytest

from draftgrid.common.files import atomic, atomic_folder, read_json, sha256, write_json, write_text
from draftgrid.training.checkpoint import step_file
from draftgrid.training.run_folder import RunFolder
from tests.data_fixtures import files

FULL = Path("/dev/full")
"""A device whose every write fails with ENOSPC."""


def test_a_file_is_replaced_only_once_the_new_one_is_written(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "a.txt"
    write_text(path, "old")
    with atomic(path) as temporary:
        temporary.write_text("new")
        assert path.read_text() == "old"
        assert temporary.parent == path.parent
    assert files(tmp_path) == {"deep/a.txt": b"new"}


@pytest.mark.parametrize("error", [RuntimeError("x"), KeyboardInterrupt()])
def test_an_exception_leaves_the_old_file_and_nothing_else(tmp_path: Path, error: BaseException) -> None:
    path = tmp_path / "a.txt"
    with pytest.raises(type(error)), atomic(path) as temporary:
        temporary.write_text("half")
        raise error
    assert files(tmp_path) == {}
    write_text(path, "old")
    with pytest.raises(type(error)), atomic(path) as temporary:
        temporary.write_text("half")
        raise error
    assert files(tmp_path) == {"a.txt": b"old"}


@pytest.mark.skipif(not FULL.exists(), reason="needs /dev/full")
def test_a_full_disk_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_json(path, {"old": 1})
    before = files(tmp_path)
    with pytest.raises(OSError, match="No space left"), atomic(path) as temporary:
        temporary.symlink_to(FULL)
        temporary.write_text("new" * 10000)
    assert files(tmp_path) == before
    assert FULL.exists()


def test_a_disk_found_full_at_the_flush_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.txt"
    write_text(path, "old")
    with atomic_folder(tmp_path / "folder") as temporary:
        (temporary / "b.txt").write_text("old")
    before = files(tmp_path)

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_text(path, "new")
    with pytest.raises(OSError, match="No space left"), atomic_folder(tmp_path / "folder") as temporary:
        (temporary / "b.txt").write_text("new")
    assert files(tmp_path) == before


def test_a_killed_writer_leaves_no_file_under_the_final_name(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"

    def write_and_die() -> None:
        with atomic(path) as temporary:
            temporary.write_text("half")
            os.kill(os.getpid(), signal.SIGKILL)

    writer = get_context("fork").Process(target=write_and_die)
    writer.start()
    writer.join()
    assert writer.exitcode == -signal.SIGKILL
    assert not path.exists()
    write_text(path, "whole")
    assert path.read_text() == "whole"


def test_a_folder_is_replaced_as_a_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "heads"
    with atomic_folder(path) as temporary:
        (temporary / "config.json").write_text("1")
        (temporary / "stale.txt").write_text("1")
        assert not path.exists()
    with pytest.raises(RuntimeError), atomic_folder(path) as temporary:
        (temporary / "config.json").write_text("half")
        raise RuntimeError
    assert files(tmp_path) == {"heads/config.json": b"1", "heads/stale.txt": b"1"}
    with atomic_folder(path) as temporary:
        (temporary / "config.json").write_text("2")
        (temporary / "sub").mkdir()
        (temporary / "sub" / "w.bin").write_bytes(b"\0")
    assert files(tmp_path) == {"heads/config.json": b"2", "heads/sub/w.bin": b"\0"}
    assert [p.name for p in tmp_path.iterdir()] == ["heads"]


def test_json_errors_name_the_file(tmp_path: Path) -> None:
    path = tmp_path / "manifest.json"
    with pytest.raises(ValueError, match=r"manifest\.json does not exist"):
        read_json(path)
    write_json(path, {"a": [1, 2], "b": "é"})
    assert read_json(path) == {"a": [1, 2], "b": "é"}
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(ValueError, match=r"manifest\.json is not valid JSON"):
        read_json(path)
    path.write_bytes(b'{"a": "\xff"}')
    with pytest.raises(ValueError, match=r"manifest\.json is not valid JSON"):
        read_json(path)


def test_text_is_written_as_utf8_and_its_hash_is_of_its_bytes(tmp_path: Path) -> None:
    write_text(tmp_path / "a.txt", "é")
    assert (tmp_path / "a.txt").read_bytes() == b"\xc3\xa9"
    # printf '\303\251' | sha256sum
    assert sha256(tmp_path / "a.txt") == "4a99557e4033c3539de2eb65472017cad5f9557f7a0625a09f1c3f6e2ba69c4c"


RECIPE = "seed: 0\nsteps: 10\n"


def test_the_same_recipe_goes_on_and_a_finished_run_says_so(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    assert folder.claim(RECIPE, "auto", False) is False
    assert (tmp_path / "run" / "config.yaml").read_text() == RECIPE
    (folder.checkpoints).mkdir()
    for step in (90, 100, 1_000_000_000):
        (folder.checkpoints / step_file(step)).write_bytes(b"weights")
    (folder.checkpoints / "best.ckpt").write_bytes(b"weights")
    assert RunFolder(tmp_path / "run").claim(RECIPE, "auto", False) is False
    assert folder.last_checkpoint() == tmp_path / "run" / "checkpoints" / "step-1000000000.ckpt"
    folder.finish({"acceptance": 0.5})
    assert folder.claim(RECIPE, "auto", False) is True
    assert read_json(folder.path / "metrics.json") == {"acceptance": 0.5}


def test_a_run_of_another_recipe_is_refused_with_the_difference(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.claim(RECIPE, "auto", False)
    folder.checkpoints.mkdir()
    with pytest.raises(
        ValueError, match=r"holds a run of another recipe \(- steps: 10, \+ steps: 20\).*overwrite=true"
    ):
        folder.claim("seed: 0\nsteps: 20\n", "auto", False)
    assert (tmp_path / "run" / "config.yaml").read_text() == RECIPE


def test_resume_never_refuses_the_folder_of_any_run(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    assert folder.claim(RECIPE, "never", False) is False
    folder.checkpoints.mkdir()
    with pytest.raises(ValueError, match="resume=never"):
        folder.claim(RECIPE, "never", False)


def test_a_start_that_made_nothing_leaves_the_folder_to_the_next_recipe(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.claim("seed: 9\n", "auto", False)
    assert folder.claim(RECIPE, "never", False) is False
    assert (tmp_path / "run" / "config.yaml").read_text() == RECIPE


@pytest.mark.parametrize("recipe", [RECIPE, "seed: 1\n"])
def test_overwrite_starts_anew_and_forgets_the_old_run(tmp_path: Path, recipe: str) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.claim(RECIPE, "auto", False)
    folder.checkpoints.mkdir()
    (folder.checkpoints / step_file(1)).write_bytes(b"weights")
    folder.finish({"acceptance": 0.5})
    assert folder.claim(recipe, "auto", True) is False
    folder.keep()
    assert files(tmp_path) == {"run/config.yaml": recipe.encode()}
    assert folder.last_checkpoint() is None


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_folder_with_foreign_files_is_refused_and_left_alone(tmp_path: Path, overwrite: bool) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(ValueError, match="other files in it"):
        RunFolder(tmp_path).claim(RECIPE, "auto", overwrite)
    assert files(tmp_path) == {"thesis.tex": b"years of work"}


def test_an_empty_folder_a_log_and_a_killed_claim_are_no_hindrance(tmp_path: Path) -> None:
    (tmp_path / "nohup.log").write_text("")
    (tmp_path / ".config.yaml.123.part").write_text("half")
    assert RunFolder(tmp_path).claim(RECIPE, "auto", False) is False
    assert (tmp_path / "config.yaml").read_text() == RECIPE


def test_what_made_a_run_is_recorded_with_and_without_git(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.record()
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    import torch

    assert record["versions"]["torch"] == torch.__version__
    assert isinstance(record["command"], list)
    git = shutil.which("git")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert shutil.which("git") is None
    folder.record()
    assert read_json(tmp_path / "run" / "run.json")["revision"] is None
    assert git is None or record["revision"] is None or len(record["revision"]) == 40
