"""A wheel, installed, and used from a project that has folders and files of the same names as ours."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
THEIRS = ("common", "data", "eval", "heads", "recipes", "tests", "training")


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of site-packages that holds the wheel; the libraries it needs are those of this environment."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    ignored = shutil.ignore_patterns(".git", "*.egg-info", "build", "__pycache__", "tests", "docs", "runs", ".*cache")
    shutil.copytree(ROOT, source, ignore=ignored)
    build = "import setuptools.build_meta as b, sys; b.build_wheel(sys.argv[1])"
    subprocess.run([sys.executable, "-c", build, str(folder)], cwd=source, check=True, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    site = folder / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    return site


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A research project with its own data/, eval/, heads/, ..., train.py and utils.py."""
    for name in THEIRS:
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(f"mine = {name!r}\n")
    for name in ("train", "utils"):
        (tmp_path / f"{name}.py").write_text(f"mine = {name!r}\n")
    return tmp_path


def python(site: Path, folder: Path, *arguments: str) -> str:
    """Run as installed: only this wheel is found under the name draftgrid (-P would hide the project's own)."""
    found = [p for p in sys.path if p.endswith("site-packages")]
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    environment |= {"PYTHONPATH": os.pathsep.join([str(site), *found]), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-S", *arguments]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_nothing_but_draftgrid_lies_in_site_packages(installed: Path) -> None:
    names = {p.name for p in installed.iterdir()}
    assert names == {"draftgrid", "draftgrid-0.1.0.dist-info"}
    top = {p.name for p in (installed / "draftgrid").iterdir()} - {"__init__.py", "__main__.py", "train.py"}
    assert top == {"common", "data", "eval", "heads", "recipes", "training"}


def test_a_project_with_the_same_names_imports_both(installed: Path, project: Path) -> None:
    theirs = "; ".join(f"import {name}; assert {name}.mine == {name!r}" for name in (*THEIRS, "train", "utils"))
    ours = "from draftgrid import ChainHeads, MTPHeads, OffsetHeads, decode, load_backbone, load_tokenizer"
    more = (
        "import draftgrid.data.stream, draftgrid.eval.bench, draftgrid.recipes, draftgrid.train as t; print(t.__file__)"
    )
    out = python(installed, project, "-c", f"{theirs}\n{ours}\n{more}")
    assert Path(out.strip()) == installed / "draftgrid" / "train.py"


@pytest.mark.slow
def test_the_console_command_trains_and_decodes_there(installed: Path, project: Path) -> None:
    """From its own assets and recipes, none of which lie in the project."""
    from draftgrid.__main__ import COMMANDS

    usage = python(installed, project, "-m", "draftgrid")
    assert all(f"\n  {name} " in usage for name in COMMANDS)
    python(installed, project, "-m", "draftgrid", "train", "recipe=emoji_ssd", "smoke=true")
    python(installed, project, "-m", "draftgrid", "generate", "heads=runs/emoji_ssd/heads", "smoke=true")
    assert list((project / "runs").rglob("*.png"))
    assert (project / "train.py").read_text() == "mine = 'train'\n"
