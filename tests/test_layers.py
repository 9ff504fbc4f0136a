"""The house: imports go one way, and an inference machine needs neither deepspeed nor webdataset nor hydra."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ALLOWED = {
    "heads": {"heads"},
    "data": {"heads", "data"},
    "eval": {"heads", "data", "eval"},
    "recipes": {"heads", "data", "eval", "recipes"},
}


@pytest.mark.parametrize("package", ALLOWED)
def test_imports_go_one_way(package: str) -> None:
    ours = {*ALLOWED, "train", "tests"}
    for path in (ROOT / package).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            for name in names:
                top = name.split(".")[0]
                assert top not in ours or top in ALLOWED[package], f"{path.name} imports {name}"


def test_decoding_needs_no_training_library() -> None:
    code = """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"deepspeed", "webdataset", "hydra", "omegaconf", "lightning"}:
            raise ImportError(name)
sys.meta_path.insert(0, Blocked())
import heads, eval, eval.bench, eval.generate
from eval import decode
from heads import MTPHeads, load_backbone, load_tokenizer
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_foreign_package_named_data_is_told_plainly(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "__init__.py").write_text("")
    code = f"import sys; sys.path[:0] = [{str(tmp_path)!r}]; import eval.setup"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert "is not Draftgrid's" in done.stderr.splitlines()[-1] and str(tmp_path) in done.stderr.splitlines()[-1]
