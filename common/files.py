"""Files that are either whole or absent: written under a temporary name in the same folder, then renamed."""

import hashlib
import json
import math
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def atomic(path: str | Path) -> Iterator[Path]:
    """Yield a temporary path beside `path`; on success it is flushed and renamed over `path`, else removed."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        yield temporary
        _flush(temporary)
        os.replace(temporary, path)
    except OSError as error:
        if error.filename is None:  # a failed write does not say where
            error.filename = str(path)
        raise
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def atomic_folder(path: str | Path) -> Iterator[Path]:
    """The same for a folder of files; an existing folder is replaced only once the new one is complete."""
    path = Path(path).resolve()  # a symbolic link stays, and the folder it points to is replaced
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary, old = (path.with_name(f".{path.name}.{os.getpid()}.{end}") for end in ("part", "old"))
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        yield temporary
        for file in temporary.rglob("*"):
            if file.is_file():
                _flush(file)
        if path.exists():
            os.replace(path, old)
        try:
            os.replace(temporary, path)
        except BaseException:
            if old.exists():
                os.replace(old, path)
            raise
        shutil.rmtree(old, ignore_errors=True)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _flush(path: Path) -> None:
    """Some file systems report a full disk only here."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def write_text(path: str | Path, text: str) -> None:
    with atomic(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: str | Path, value: Any) -> None:
    write_text(path, json.dumps(value, indent=2) + "\n")


def read_json(path: str | Path) -> Any:
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"{path} does not exist")
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON ({error}); it may be cut short") from None


def read_lines(path: str | Path) -> list[str]:
    """Lines of a UTF-8 text file; LF, CRLF and CR end one and nothing else does. Raises ValueError if not UTF-8."""
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8-sig")  # universal newlines: all three arrive as LF
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text (byte {error.start}); save it as UTF-8") from None
    lines = text.split("\n")
    return lines[:-1] if not lines[-1] else lines


NAMES = {str: "text", int: "a whole number", float: "a number", dict: "a group of keys", list: "a list", bool: "a bool"}


def read_fields(held: Any, where: str | Path, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a JSON object with the types `fields` names: a type, a tuple of types, or [type, length or None].

    None among a tuple's types makes a field optional. Other fields of the object are passed over. Raises ValueError
    naming file, field, value and what would be right.
    """
    if not isinstance(held, dict):
        raise ValueError(f"{where} holds {_short(held)}; it must be an object of fields")
    found = {}
    for name, kind in fields.items():
        kinds = kind if isinstance(kind, tuple) else (kind,)
        value = held.get(name)
        if not any(_is_a(value, k) for k in kinds):
            right = " or ".join(_describe(k) for k in kinds if k is not None)
            raise ValueError(f"{where}: {name} is {_short(value) if name in held else 'missing'}; it must be {right}")
        found[name] = value
    return found


def _is_a(value: Any, kind: Any) -> bool:
    if kind is None:
        return value is None
    if isinstance(kind, list):
        one, length = kind
        return isinstance(value, list) and length in (None, len(value)) and all(_is_a(v, one) for v in value)
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return isinstance(value, kind) and (kind is bool or not isinstance(value, bool))


def _describe(kind: Any) -> str:
    if isinstance(kind, list):
        one, length = kind
        return f"a list of {'' if length is None else f'{length} items, each '}{_describe(one)}"
    return NAMES[kind]


def _short(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else text[:57] + "..."


def sha256(path: str | Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
