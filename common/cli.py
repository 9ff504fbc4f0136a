"""One command line for all commands: `key=value` on top of a recipe on top of a dataclass, with errors one can act on.

A value runs to the end of its argument, so a prompt may hold commas, brackets and equals signs unquoted. Keys are the
schema's; a wrong one is answered with the nearest right name before anything is loaded.
"""

import dataclasses
import difflib
import math
import os
import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import reduce
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

import yaml

from draftgrid.common.packages import missing

T = TypeVar("T")
Keys = dict[str, tuple[Any, Any, str]]
"""{dotted key: (type, default, help)}"""
BOOLEANS = dict.fromkeys(("true", "yes", "on", "1"), True) | dict.fromkeys(("false", "no", "off", "0"), False)


def key(
    default: Any, help: str, least: float | None = None, most: float | None = None, above: float | None = None
) -> Any:
    """A dataclass field with a default and the line that --help prints; mutable defaults are copied.

    `least`, `most` (inclusive) and `above` (exclusive) are the range that `check_ranges` holds a number, every number
    of a list, and every value of a mapping to. Without them a number must still be finite.
    """
    metadata = {"help": help, "least": least, "most": most, "above": above}
    factory = default.copy if isinstance(default, list) else default
    if callable(factory):
        return dataclasses.field(default_factory=factory, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def check_ranges(config: Any, prefix: str = "") -> None:
    """Every number of a nested dataclass is finite and in its key's range. Raises ValueError naming key and range."""
    for field in dataclasses.fields(config):
        value, name = getattr(config, field.name), prefix + field.name
        if dataclasses.is_dataclass(value):
            check_ranges(value, f"{name}.")
            continue
        given = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else [value]
        for number in given:
            if isinstance(number, int | float) and not isinstance(number, bool):
                _check_range(name, number, field.metadata, value)


def _check_range(name: str, number: float, allowed: Mapping[str, Any], value: Any) -> None:
    least, most, above = (allowed.get(bound) for bound in ("least", "most", "above"))
    low = least is None or number >= least
    if math.isfinite(number) and low and (most is None or number <= most) and (above is None or number > above):
        return
    right = "a finite number" if above is None else f"a finite number above {above:g}"
    if least is not None:
        right = f"a finite number of at least {least:g}" if most is None else f"a number from {least:g} to {most:g}"
    elif most is not None:
        right += f" and at most {most:g}"
    raise ValueError(f"{name} is {value}; use {right}")


def leaves(schema: type, prefix: str = "") -> Keys:
    """All keys of a nested dataclass."""
    found: Keys = {}
    defaults, hints = schema(), get_type_hints(schema)
    for field in dataclasses.fields(schema):
        kind, name = hints[field.name], prefix + field.name
        if dataclasses.is_dataclass(kind):
            found |= leaves(kind, f"{name}.")  # type: ignore[arg-type]
        else:
            found[name] = (kind, getattr(defaults, field.name), field.metadata.get("help", ""))
    return found


def suggest(name: str, known: Collection[str]) -> str:
    """' Did you mean X?' or the list of known names."""
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    if not close and "." not in name:
        ends = {k.rsplit(".", 1)[-1]: k for k in known}
        close = [ends[end] for end in difflib.get_close_matches(name, list(ends), n=1, cutoff=0.6)]
    return f"Did you mean {close[0]!r}?" if close else f"Known: {', '.join(known)}."


def split_overrides(arguments: Sequence[str], known: Keys) -> dict[str, str]:
    """['a=b', ...] -> {'a': 'b'}; the last part of a key is enough where only one key ends in it: strategy for
    trainer.strategy.

    Raises ValueError for an argument without '=', an unknown key, or one that may mean several.
    """
    pairs: dict[str, str] = {}
    for argument in arguments:
        name, equals, value = argument.partition("=")
        if not equals:
            raise ValueError(f"argument {argument!r} is not key=value. {suggest(argument, known)}")
        found = [k for k in known if k == name or ("." not in name and k.endswith(f".{name}"))]
        if not found:
            raise ValueError(f"unknown key {name!r}. {suggest(name, known)}")
        if len(found) > 1 and name not in found:
            raise ValueError(f"key {name!r} is short for several: {', '.join(found)}; write one of them")
        pairs[name if name in found else found[0]] = value
    return pairs


class Loader(yaml.SafeLoader):
    """Refuses a key that comes twice; YAML would silently keep the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        names = [key.value for key, _ in node.value]
        if twice := [key for key in names if names.count(key) > 1]:
            raise yaml.constructor.ConstructorError(None, None, f"key {twice[0]!r} comes twice", node.start_mark)
        return super().construct_mapping(node, deep)


def compose(schema: type[T], arguments: Sequence[str], recipes: Path | None = None, default_recipe: str = "") -> T:
    """The schema's defaults, the recipe's values over them, the command line's over both; typed and checked.

    `recipes` is the folder of NAME.yaml files that `recipe=NAME` picks from; `recipe=PATH.yaml` is a file of one's own.
    Raises ValueError.
    """
    known = leaves(schema)
    pairs = split_overrides(arguments, known)
    values: dict[str, Any] = {}
    if recipes is not None:
        path = _recipe_file(pairs.pop("recipe", default_recipe), recipes, Path())
        values = _recipe(path, recipes, known) | {"recipe": path.stem}
    values |= {name: _typed(name, text, known, parse=True) for name, text in pairs.items()}
    config = schema()
    for name, value in values.items():
        *groups, last = name.split(".")
        setattr(reduce(getattr, groups, config), last, value)
    check_ranges(config)
    return config


def _recipe_file(name: str, recipes: Path, beside: Path) -> Path:
    """The file of a recipe: a shipped NAME, or a path that ends in .yaml, seen from `beside`. Raises ValueError."""
    if name.endswith((".yaml", ".yml")):
        path = beside / name
        if not path.is_file():
            raise ValueError(f"recipe {name!r} is no file: {path} does not exist")
        return path
    names = sorted(p.stem for p in recipes.glob("*.yaml"))
    if name not in names:
        raise ValueError(f"unknown recipe {name!r}. {suggest(name, names)}")
    return recipes / f"{name}.yaml"


def _recipe(path: Path, recipes: Path, known: Keys, above: tuple[Path, ...] = ()) -> dict[str, Any]:
    """{dotted key: value} of the recipe on top of its `base`, typed.

    A recipe for another kind of heads than its base's takes nothing of the base's `heads`. Raises ValueError that names
    the file, also for bases in a circle.
    """
    try:
        held = yaml.load(path.read_text(encoding="utf-8"), Loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" line {mark.line + 1}" if mark else ""
        raise ValueError(f"{path.name}{where} is not valid YAML: {getattr(error, 'problem', error)}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path.name} cannot be read: {error}") from None
    name = held.pop("base", None) if isinstance(held, dict) else None
    try:
        values = dict(_flat({} if held is None else held, known))
    except ValueError as error:
        raise ValueError(f"{path.name}: {error}") from None
    if name is None:
        return values
    above = (*above, path.resolve())
    file = _recipe_file(str(name), recipes, path.parent)
    if file.resolve() in above:
        raise ValueError(f"{path.name}: base is {name!r}, whose own base leads back here; one must have no base")
    base = _recipe(file, recipes, known, above)
    if values.get("heads.kind") not in (None, base.get("heads.kind")):
        base = {key: value for key, value in base.items() if not key.startswith("heads.")}
    return base | {key: base.get(key, {}) | v if isinstance(v, dict) else v for key, v in values.items()}


def _flat(held: Any, known: Keys, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, typed value) of everything in nested groups. Raises ValueError for a key or value that is wrong."""
    if not isinstance(held, dict):
        raise ValueError(f"{prefix[:-1] or 'the recipe'} is {held!r}; it must be a group of keys")
    for name, value in held.items():
        full = f"{prefix}{name}"
        if any(key.startswith(f"{full}.") for key in known):
            yield from _flat(value, known, f"{full}.")
        elif full in known:
            yield full, _typed(full, value, known)
        else:
            raise ValueError(f"unknown key {full!r}. {suggest(full, known)}")


def _typed(name: str, value: Any, known: Keys, parse: bool = False) -> Any:
    """The value of a key in its type. `parse` says that a list or a mapping is still YAML text. Raises ValueError.

    Text stays as it was typed: quotes, brackets, `${x}` and `???` are just words of a prompt.
    """
    kind = known[name][0]
    origin = get_origin(kind)
    try:
        return _convert(yaml.load(value, Loader) if parse and origin in (list, dict) else value, kind)
    except (ValueError, TypeError, KeyError, yaml.YAMLError):
        right = "{place: number, ...}" if origin is dict else f"of type {kind if origin else kind.__name__}"
        raise ValueError(f"{name} is {value!r}; it must be {right}") from None


def _convert(value: Any, kind: Any) -> Any:
    """Raises ValueError, TypeError or KeyError if it is not of that kind."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin is dict and isinstance(value, dict):
        return {str(key): _convert(v, inner[1]) for key, v in value.items()}
    if origin is list and isinstance(value, list):
        return [_convert(v, inner[0]) for v in value]
    if type(None) in inner:
        return None if value in (None, "null") else _convert(value, inner[0])
    if kind is bool:
        return BOOLEANS[str(value).lower()]
    if kind is str and isinstance(value, str | int | float):
        return str(value)
    if kind in (int, float) and (isinstance(value, str) or type(value) in (int, kind)):
        return kind(value)
    raise TypeError


def show_help(schema: type, doc: str | None) -> str:
    lines = [(doc or "").strip(), "", "Keys (key=value, in any order):"]
    for name, (_, default, text) in leaves(schema).items():
        shown = "" if default in ("", None) else f"  [{default}]"
        lines.append(f"  {name:<26} {text}{shown}")
    return "\n".join(lines)


def _sentence(error: Exception) -> str:
    """One sentence for an error that the user can fix, '' for any other; a loader process sends its sentence at the
    end of a traceback."""
    if isinstance(error, ValueError):
        text = str(error)
        return text.rpartition("\nValueError: ")[2].strip() if text.startswith("Caught ValueError in ") else text
    if isinstance(error, OSError):
        return f"{error.filename or 'output'}: {error.strerror}" if error.errno is not None else ""
    if isinstance(error, ModuleNotFoundError):
        return missing(error.name, error) if error.name and not error.name.startswith("draftgrid") else ""
    if isinstance(error, MemoryError) or re.search("out of memory|can't allocate memory|not enough memory", str(error)):
        said = next(iter(str(error).splitlines()), "")
        return f"memory does not suffice ({said}); use a smaller batch_size, or smaller heads"
    return ""


def main(
    run: Callable[[Any], None],
    schema: type,
    doc: str | None,
    recipes: Path | None = None,
    default_recipe: str = "",
    arguments: Sequence[str] | None = None,
) -> None:
    """Compose and run a command; an error that a user can fix ends it with one sentence and exit code 2."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if any(a in ("-h", "--help", "help") for a in arguments):
        print(show_help(schema, doc))
        return
    try:
        run(compose(schema, arguments, recipes, default_recipe))
    except (ValueError, OSError, ModuleNotFoundError, MemoryError, RuntimeError) as error:
        said = _sentence(error)
        if not said or os.environ.get("DRAFTGRID_TRACEBACK"):
            raise
        print(f"error: {said}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
