"""docs/own_model.md, followed to the letter: a model that is none of the three families, to heads of its own."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = (Path(__file__).parent.parent / "docs" / "own_model.md").read_text()


def blocks(kind: str) -> list[str]:
    return re.findall(rf"```{kind}\n(.*?)```", PAGE, re.DOTALL)


def test_the_reader_writes_at_most_80_lines_and_six_commands() -> None:
    _, adapter, _ = blocks("python")
    (recipe,), (commands,) = blocks("yaml"), blocks("bash")
    assert len([*adapter.splitlines(), *recipe.splitlines()]) <= 80
    assert len(commands.splitlines()) <= 6


@pytest.mark.slow
def test_the_page_goes_the_whole_way(tmp_path: Path) -> None:
    model, adapter, use = blocks("python")
    (recipe,), (commands,) = blocks("yaml"), blocks("bash")
    (tmp_path / "my_model").mkdir()
    files = {"model.py": model, "mine.py": adapter, "mine.yaml": recipe, "use.py": use}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    environment = os.environ | {"OMP_NUM_THREADS": "1"}

    def run(*words: str) -> str:
        done = subprocess.run(
            [sys.executable, *words], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=280
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    run("model.py")
    short = {"encode": ["limit=64"], "train": ["trainer.steps=20", "trainer.validate_every=20", "sheet.images=1"]}
    said = []
    for command in commands.splitlines():
        words = re.sub(r'"(.*?)"', lambda m: m[1].replace(" ", "\0"), command).split()
        said.append(run("-m", *(w.replace("\0", " ") for w in words), *short.get(words[1], [])))
    assert "all 9 lines hold" in said[0] and "FAILED" not in said[0]
    assert 'adapter="mine:PictureGPTBackbone"' in said[3]
    run("use.py")
    assert (tmp_path / "runs" / "pictures" / "sheet.png").is_file()
    assert 'adapter="mine:PictureGPTBackbone"' in (tmp_path / "my_heads" / "README.md").read_text()
    plan = run("-m", "draftgrid", "train", "recipe=mine.yaml", "plan=true")
    assert "2 layers" in plan and "ssd_coupled" in plan
    # With a card beside the weights no adapter is named.
    (tmp_path / "my_model" / "draftgrid.json").write_text('{"adapter": "mine:PictureGPTBackbone", "grid": [16, 16]}')
    run("-c", "from draftgrid import load_backbone; assert load_backbone('my_model').adapter.startswith('mine:')")
