"""The house: imports go down the floors and never in a circle, and decoding needs no training library."""

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FLOORS = {"common": 0, "heads": 1, "data": 2, "training": 2, "eval": 3, "recipes": 4, "train": 5, "__main__": 6}
"""A folder imports from itself and from lower floors."""
LARGEST, MEDIAN, SHARE = 400, 150, 0.35
"""Lines of the longest file and of the median one, and the largest folder's share of all lines."""


def production() -> dict[str, Path]:
    """Dotted name below draftgrid -> file, of everything a wheel holds."""
    out = {}
    for top in FLOORS:
        for path in [ROOT / f"{top}.py"] if (ROOT / f"{top}.py").exists() else sorted((ROOT / top).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            out[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return out


FILES = production()


def imports(path: Path) -> Iterator[str]:
    """Every draftgrid module this file imports, at the top or inside a function: dotted names below draftgrid."""
    for node in ast.walk(ast.parse(path.read_text())):
        names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.module:
            whole = [f"{node.module}.{a.name}" for a in node.names]
            names = [name if name.removeprefix("draftgrid.") in FILES else node.module for name in whole]
        for name in names:
            if name.split(".")[0] == "draftgrid":
                yield name.removeprefix("draftgrid").removeprefix(".")
            assert name.split(".")[0] not in FLOORS, f"{path} imports {name}: write draftgrid.{name}"


@pytest.mark.parametrize("name", FILES)
def test_imports_go_down(name: str) -> None:
    here = name.split(".")[0]
    for target in imports(FILES[name]):
        assert target, f"{name} imports the top package, which imports everything: name the module it needs"
        there = target.split(".")[0]
        assert here == there or FLOORS[here] > FLOORS[there], f"{name} imports {target}"


def circle(graph: dict[str, set[str]]) -> list[str]:
    """One circle of the graph, or []: what is left after taking away, again and again, all that imports nothing."""
    left = dict(graph)
    while free := [name for name, targets in left.items() if not targets & left.keys()]:
        for name in free:
            del left[name]
    return sorted(left)


def test_no_import_circle_even_inside_a_folder() -> None:
    graph = {name: set(imports(path)) & FILES.keys() - {name} for name, path in FILES.items()}
    assert len(graph) > 90 and circle(graph) == []
    assert circle({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": set()}) == ["a", "b", "c"]  # a leads into it


def test_files_and_folders_stay_small() -> None:
    lines = {name: len(path.read_text().splitlines()) for name, path in FILES.items()}
    assert sorted(lines.values())[len(lines) // 2] <= MEDIAN
    assert max(lines.values()) <= LARGEST, max(lines, key=lines.__getitem__)
    for top in FLOORS:
        share = sum(n for name, n in lines.items() if name.split(".")[0] == top) / sum(lines.values())
        assert share < SHARE, f"{top}: {share:.0%} of the code"


def test_the_package_list_is_the_tree() -> None:
    """A new folder cannot be missing from a wheel."""
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    found = {f"draftgrid.{'.'.join(p.relative_to(ROOT).parent.parts)}" for p in FILES.values() if p.parent != ROOT}
    assert sorted(listed) == sorted(found | {"draftgrid"})
    assert all((path.parent / "__init__.py").exists() for path in FILES.values())


def test_every_command_of_the_console_is_one() -> None:
    from draftgrid.__main__ import COMMANDS

    for module, _ in COMMANDS.values():
        assert re.search(r'__main__":\n    main\(run, \w+, __doc__\)\n$', FILES[module].read_text()), module


def test_decoding_needs_no_training_library() -> None:
    code = """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"deepspeed", "webdataset", "hydra", "omegaconf", "lightning"}:
            raise ImportError(name)
sys.meta_path.insert(0, Blocked())
import draftgrid.heads, draftgrid.eval, draftgrid.eval.bench, draftgrid.eval.generate
from draftgrid import ChainHeads, MTPHeads, OffsetHeads, decode, load_backbone, load_tokenizer
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
