"""A run's folder: which recipe it belongs to, whether the run is finished, and what made it.

`config.yaml` (resolved recipe) claims the folder; `run.json` says which versions and command; `metrics.json` marks the
run as finished.
"""

import difflib
import shutil
import sys
from pathlib import Path
from typing import Any

from draftgrid.common.environment import environment
from draftgrid.common.files import write_json, write_text
from draftgrid.training.checkpoint import saved_steps

MADE = ("metrics.json", "checkpoints", "heads", "backbone", "image_tokenizer")
"""What a run leaves once it has begun; a folder with none of them was claimed by a start that failed."""


class RunFolder:
    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.checkpoints = self.path / "checkpoints"

    def claim(self, recipe: str, resume: str, overwrite: bool) -> bool:
        """Take the folder for this resolved recipe. True if the run in it is finished.

        Raises ValueError if a run of another recipe lies there, or any run with resume=never.
        """
        config = self.path / "config.yaml"
        if overwrite and config.is_file():
            self._set_aside()
        if config.is_file() and self._begun():
            theirs = config.read_text(encoding="utf-8")
            if theirs != recipe:
                raise ValueError(
                    f"out={self.path} holds a run of another recipe ({_difference(theirs, recipe)}); "
                    "choose another out, or overwrite=true"
                )
            if resume == "never":
                raise ValueError(f"out={self.path} holds a run and resume=never; choose another out, or overwrite=true")
            return (self.path / "metrics.json").is_file()
        # A start that failed leaves its claim, and one that was killed a .part file: nobody needs either.
        own = {"config.yaml", "run.json", "logs", ".old"}
        held = self.path.iterdir() if self.path.is_dir() else ()
        if any(p.name not in own and p.suffix not in (".log", ".part") for p in held):
            raise ValueError(f"out={self.path} is a folder with other files in it; choose an empty or new one")
        write_text(config, recipe)
        return False

    def _begun(self) -> bool:
        return any((self.path / name).exists() for name in MADE)

    def _set_aside(self) -> None:
        """Move what the folder holds into .old; the folder itself stays, for it may be a link."""
        self.keep()
        self.old.mkdir()
        for item in self.path.iterdir():
            if item != self.old:
                item.rename(self.old / item.name)

    def keep(self) -> None:
        """Once the new run has started: remove the one it replaces."""
        shutil.rmtree(self.old, ignore_errors=True)

    @property
    def old(self) -> Path:
        return self.path / ".old"

    def release(self) -> None:
        """Undo the claim of a start that failed before it made anything, and put back the run set aside for it."""
        if self.old.is_dir():
            for item in self.path.iterdir():
                if item != self.old:
                    shutil.rmtree(item) if item.is_dir() else item.unlink()
            for item in self.old.iterdir():
                item.rename(self.path / item.name)
            self.old.rmdir()
            return
        if not self._begun():
            (self.path / "config.yaml").unlink(missing_ok=True)
            if self.path.is_dir() and not any(self.path.iterdir()):
                self.path.rmdir()

    def record(self) -> None:
        """Write run.json: command, versions, machine and git revision."""
        write_json(self.path / "run.json", {"command": sys.argv, **environment()})

    def finish(self, metrics: dict[str, Any]) -> None:
        write_json(self.path / "metrics.json", metrics)

    def last_checkpoint(self) -> Path | None:
        """The newest checkpoint; None before the first."""
        found = saved_steps(self.checkpoints)
        return found[-1] if found else None


def _difference(theirs: str, mine: str) -> str:
    lines = [d for d in difflib.ndiff(theirs.splitlines(), mine.splitlines()) if d[:1] in "+-"]
    return ", ".join(" ".join(d.split()) for d in lines[:3])
