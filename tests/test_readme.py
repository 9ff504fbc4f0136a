"""Every command and every line of Python in the README and in docs/ runs as written, with smoke=true.

Blocks marked `bash` and `python` are run; those marked `shell` need weights, and their keys are checked.
"""

import importlib
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import get_type_hints

import pytest

from draftgrid.__main__ import COMMANDS
from draftgrid.common.cli import compose

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted(p for p in (ROOT / "docs").glob("*.md") if p.stem != "own_model")]
"""docs/own_model.md goes its whole way in test_own_model.py."""
BLOCKS = [block for page in PAGES for block in re.findall(r"```(\w+)\n(.*?)```", page.read_text(), re.DOTALL)]


def lines(kind: str) -> list[str]:
    """Each line of the blocks of one kind, once, in the order of the pages."""
    return list(dict.fromkeys(line for k, text in BLOCKS if k == kind for line in text.splitlines() if line))


COMMANDS_RUN = [line for line in lines("bash") if not line.startswith("pip ")]
INSTALL = [line for line in lines("bash") if line.startswith("pip ")]
CODE = [text for kind, text in BLOCKS if kind == "python"]
"""The README's; docs/data.md's is run by test_encode.py, on shards of its own."""


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
@pytest.mark.parametrize("command", COMMANDS_RUN)
def test_command_runs_as_written(command: str, folder: Path) -> None:
    assert run(command, folder).strip()


@pytest.mark.slow
def test_the_python_lines_run_as_written(folder: Path) -> None:
    # The smoke run of train.py has exported its heads under the same name.
    check = "\nassert result.tokens.shape == (2, 16, 16) and result.exact\n"
    check += "assert max(result.stats.steps) == result.stats.nfe < 256 and pictures[0].width == 512\n"
    command = [sys.executable, "-c", CODE[0] + check]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (folder / "apple.png").is_file()


@pytest.mark.parametrize("line", lines("shell"))
def test_keys_of_what_needs_weights_are_right(line: str) -> None:
    """Composed as the command would, up to the moment when it looks for files."""
    words = shlex.split(line)
    assert words[0] == "draftgrid" and words[1] in COMMANDS
    schema = get_type_hints(importlib.import_module(f"draftgrid.{COMMANDS[words[1]][0]}").run)["config"]
    config = compose(schema, words[2:], *getattr(schema, "recipes", ()))
    if hasattr(config, "recipe"):
        config.check()


def test_the_readme_is_short_and_its_links_lead_somewhere() -> None:
    assert len((ROOT / "README.md").read_bytes()) <= 9000
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_every_recipe_is_listed_and_composes() -> None:
    from draftgrid.recipes.launch.schema import RECIPES, TrainConfig

    recipes = sorted(p.stem for p in RECIPES.glob("*.yaml"))
    demo = ["emoji_backbone", "emoji_chain", "emoji_mtp1d", "emoji_ssd"]
    families = [f"{family}_{kind}" for family in ("emu3", "janus", "lumina") for kind in ("chain", "mtp1d", "ssd")]
    assert recipes == sorted([*demo, *families])
    for recipe in recipes:
        config = compose(TrainConfig, [f"recipe={recipe}"], RECIPES)
        config.check()
        assert config.recipe == recipe
