"""Every command and every line of Python in the README runs as written, with smoke=true."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", README, re.DOTALL)
LINES = [line for kind, text in BLOCKS if kind == "bash" for line in text.splitlines()]
COMMANDS = [line for line in LINES if not line.startswith("pip ")]
INSTALL = [line for line in LINES if line.startswith("pip ")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the commands run one after the other; the first is the installation's own `python train.py`."""
    path = tmp_path_factory.mktemp("readme")
    (command,) = [line.split(" && ")[1] for line in INSTALL if "train.py" in line]
    run(command, path)
    return path


def run(command: str, folder: Path) -> str:
    words = [str(ROOT / "train.py") if w == "train.py" else w for w in shlex.split(command)]
    python = [sys.executable]
    starts = {"torchrun": [*python, "-m", "torch.distributed.run"], "draftgrid": [*python, "-m", "draftgrid"]}
    first = starts.get(words[0], python)
    result = subprocess.run(
        [*first, *words[1:], "smoke=true"],
        cwd=folder,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "Warning" not in result.stderr, result.stderr
    return result.stdout


def test_the_two_first_commands_install_and_run() -> None:
    assert INSTALL == ["pip install -e . && python train.py", 'pip install -e ".[dev]" && pytest']


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_command_runs_as_written(command: str, folder: Path) -> None:
    assert run(command, folder).strip()


@pytest.mark.slow
def test_the_python_lines_run_as_written(folder: Path) -> None:
    (code,) = [text for kind, text in BLOCKS if kind == "python"]
    # The smoke run of train.py has exported its heads under the same name.
    check = "\nassert result.tokens.shape == (2, 16, 16) and result.exact\n"
    check += "assert max(result.stats.steps) == result.stats.nfe < 256 and pictures[0].width == 512\n"
    command = [sys.executable, "-c", code + check]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (folder / "apple.png").is_file()


def test_every_recipe_is_listed_and_composes() -> None:
    from draftgrid.common.cli import compose
    from draftgrid.recipes.launch.schema import RECIPES, TrainConfig

    recipes = sorted(p.stem for p in RECIPES.glob("*.yaml"))
    demo = ["emoji_backbone", "emoji_chain", "emoji_mtp1d", "emoji_ssd"]
    families = [f"{family}_{kind}" for family in ("emu3", "janus", "lumina") for kind in ("chain", "mtp1d", "ssd")]
    assert recipes == sorted([*demo, *families])
    for recipe in recipes:
        config = compose(TrainConfig, [f"recipe={recipe}"], RECIPES)
        config.check()
        assert config.recipe == recipe
