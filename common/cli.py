"""One command line for all commands: `key=value`, composed by Hydra onto a typed schema, with errors one can act on.

A value runs to the end of its argument, so a prompt may hold commas, brackets and equals signs unquoted. Keys are the
schema's; a wrong one is answered with the nearest right name before anything is loaded.
"""

import dataclasses
import difflib
import math
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from draftgrid.common.packages import missing

T = TypeVar("T")
Keys = dict[str, tuple[Any, Any, str]]
"""{dotted key: (type, default, help)}"""


def key(default: Any, help: str, *, least: Any = None, most: Any = None, above: Any = None, items: str = "") -> Any:
    """A dataclass field with a default and the line that --help prints; mutable defaults are copied.

    `least`, `most` (inclusive) and `above` (exclusive) are the range that `check_ranges` holds a number, every number
    of a list, and every value of a mapping to; without them it must be finite. `items` says what a list holds unless it
    is empty: "rows, columns".
    """
    metadata = {"help": help, "least": least, "most": most, "above": above, "items": items}
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
        if (items := field.metadata.get("items")) and value and len(value) != len(items.split(",")):
            raise ValueError(f"{name} is {value}; use [{items}]")


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


def suggest(name: str, known: Sequence[str]) -> str:
    """' Did you mean X?' or the list of known names."""
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    if not close and "." not in name:
        ends = {k.rsplit(".", 1)[-1]: k for k in known}
        close = [ends[end] for end in difflib.get_close_matches(name, list(ends), n=1, cutoff=0.6)]
    return f"Did you mean {close[0]!r}?" if close else f"Known: {', '.join(known)}."


def split_overrides(arguments: Sequence[str], known: Keys) -> dict[str, str]:
    """['a=b', ...] -> {'a': 'b'}; the last part of a key is enough where it is the only one that ends so.

    Raises ValueError for an argument without '=', an unknown key, or one that may mean several.
    """
    pairs: dict[str, str] = {}
    for argument in arguments:
        name, equals, value = argument.partition("=")
        if not equals:
            raise ValueError(f"argument {argument!r} is not key=value. {suggest(argument, list(known))}")
        found = [k for k in known if k == name or ("." not in name and k.endswith(f".{name}"))]
        if not found:
            raise ValueError(f"unknown key {name!r}. {suggest(name, list(known))}")
        if len(found) > 1 and name not in found:
            raise ValueError(f"key {name!r} is short for several: {', '.join(found)}; write one of them")
        pairs[name if name in found else found[0]] = value
    return pairs


def compose(schema: type[T], arguments: Sequence[str], recipes: Path | None = None, default_recipe: str = "") -> T:
    """The schema's defaults, the recipe's values over them, the command line's over both; typed and checked.

    `recipes` is the folder of NAME.yaml files that `recipe=NAME` picks from; `recipe=PATH.yaml` is a file of one's own.
    Raises ValueError.
    """
    try:
        from hydra import compose as hydra_compose
    except ModuleNotFoundError:
        if recipes is None:
            return compose_plain(schema, arguments)
        raise
    from hydra import initialize
    from hydra.core.config_store import ConfigStore
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    known = leaves(schema)
    pairs = split_overrides(arguments, known)
    store = ConfigStore.instance()
    store.store(name="schema", node=schema)
    defaults: list[Any] = ["schema"]
    if recipes is not None:
        path = _recipe_file(pairs.pop("recipe", default_recipe), recipes, Path())
        recipe, node = path.stem, _recipe(path, recipes, schema, known)
        store.store(group="recipe", name=recipe, package="_global_", node=node)
        defaults.append({"recipe": recipe})
    text = {n: pairs.pop(n) for n in list(pairs) if _is_text(known[n][0], pairs[n])}
    maps = {n: _mapping(n, pairs.pop(n), known) for n in list(pairs) if get_origin(known[n][0]) is dict}
    store.store(name="main", node={"defaults": [*defaults, "_self_"]})
    try:
        with initialize(version_base=None, config_path=None):
            config = hydra_compose("main", overrides=[f"{n}={v}" for n, v in pairs.items()])
        value: Any = OmegaConf.to_object(config)
    except (HydraException, OmegaConfBaseException) as error:
        raise ValueError(_plain(error, pairs, known)) from None
    for name, given in (text | maps).items():
        *groups, last = name.split(".")
        setattr(reduce(getattr, groups, value), last, given)
    if recipes is not None:
        value.recipe = recipe
    check_ranges(value)
    return value


def compose_plain(schema: type[T], arguments: Sequence[str]) -> T:
    """The same of a flat schema without a recipe, on a machine that lacks Hydra. Raises ValueError.

    Values are numbers, true or false, [lists] and text.
    """
    import json

    known = leaves(schema)
    value = schema()
    for name, text in split_overrides(arguments, known).items():
        kind = known[name][0]
        try:
            found = text if kind is str else json.loads(text)
        except ValueError:
            found = None
        if type(found) is not (get_origin(kind) or kind) and not (kind is float and type(found) is int):
            raise ValueError(_wrong(name, text, known))
        setattr(value, name, found)
    check_ranges(value)
    return value


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


def _recipe(path: Path, recipes: Path, schema: type, known: Keys, above: tuple[Path, ...] = ()) -> Any:
    """The recipe's YAML on top of its `base`, every key known and every value of its field's type.

    A recipe for another kind of heads than its base's takes nothing of the base's `heads`. Raises ValueError that names
    the file, also for bases in a circle.
    """
    from omegaconf import DictConfig, OmegaConf

    node = _recipe_keys(path, schema, known)
    name = node.pop("base", None) if isinstance(node, DictConfig) else None
    if name is None:
        return node
    above = (*above, path.resolve())
    file = _recipe_file(str(name), recipes, path.parent)
    if file.resolve() in above:
        raise ValueError(f"{path.name}: base is {name!r}, whose own base leads back here; one must have no base")
    base = _recipe(file, recipes, schema, known, above)
    mine, theirs = (OmegaConf.select(n, "heads.kind") for n in (node, base))
    if mine is not None and mine != theirs:
        base.pop("heads", None)
    return OmegaConf.merge(base, node)


def _recipe_keys(path: Path, schema: type, known: Keys) -> Any:
    """One file's keys, checked."""
    from omegaconf import DictConfig, OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    try:
        node = OmegaConf.load(path)
    except YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" line {mark.line + 1}" if mark else ""
        raise ValueError(f"{path.name}{where} is not valid YAML: {getattr(error, 'problem', error)}") from None
    except OSError as error:
        raise ValueError(f"{path.name} cannot be read: {error}") from None

    def walk(branch: Any, prefix: str) -> None:
        if not isinstance(branch, DictConfig):
            raise ValueError(f"{path.name}: {prefix[:-1] or 'the recipe'} is {branch!r}; it must be a group of keys")
        for name in branch:
            full = prefix + str(name)
            if full == "base":
                continue
            if any(k.startswith(full + ".") for k in known):
                walk(branch[name], full + ".")
            elif full not in known:
                raise ValueError(f"{path.name}: unknown key {full!r}. {suggest(full, list(known))}")

    walk(node, "")
    try:
        OmegaConf.merge(OmegaConf.structured(schema), {k: v for k, v in node.items() if k != "base"})
    except OmegaConfBaseException as error:
        full = _field(getattr(error, "full_key", None), known)
        if full is None:
            raise ValueError(f"{path.name}: {str(error).splitlines()[0]}") from None
        raise ValueError(f"{path.name}: {_wrong(full, OmegaConf.select(node, full), known)}") from None
    return node


def _is_text(kind: Any, value: str) -> bool:
    """Text never passes Hydra's grammar or OmegaConf's: quotes, `${x}` and `???` are just words of a prompt."""
    return kind is str or (str in get_args(kind) and get_origin(kind) not in (list, dict) and value != "null")


def _mapping(name: str, value: str, known: Keys) -> dict[str, float]:
    """'{a/b: 0.5}', whose keys are places, which Hydra's grammar has no words for. Raises ValueError."""
    import yaml

    try:
        found = yaml.safe_load(value)
    except yaml.YAMLError:
        found = None
    if not isinstance(found, dict) or any(
        isinstance(v, bool) or not isinstance(v, int | float) for v in found.values()
    ):
        raise ValueError(f"{name} is {value!r}; it must be {{place: number, ...}}")
    return {str(k): float(v) for k, v in found.items()}


def _field(full: str | None, known: Keys) -> str | None:
    """The known key that OmegaConf's `key` or `key[0]` belongs to."""
    name = (full or "").partition("[")[0]
    return name if name in known else None


def _wrong(name: str, value: Any, known: Keys) -> str:
    kind = known[name][0]
    return f"{name} is {value!r}; it must be of type {kind.__name__ if isinstance(kind, type) else kind}"


def _plain(error: Exception, pairs: dict[str, str], known: Keys) -> str:
    """One sentence for what Hydra tells in many: the override it quotes, else the key it names."""
    quoted = [name for name, value in pairs.items() if f"{name}={value}" in str(error)]
    full = max(quoted, key=len, default=None) or _field(getattr(error, "full_key", None), known)
    if full in pairs:
        return _wrong(full, pairs[full], known)
    return (f"{full}: " if full else "") + str(error).splitlines()[0]


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
    arguments: Sequence[str] | None = None,
) -> None:
    """Entry of every command: compose, run; what a user can mend ends it with one sentence and exit code 2."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if any(a in ("-h", "--help", "help") for a in arguments):
        print(show_help(schema, doc))
        return
    try:
        run(compose(schema, arguments, *getattr(schema, "recipes", ())))
    except (ValueError, OSError, ModuleNotFoundError, MemoryError, RuntimeError) as error:
        said = _sentence(error)
        if not said or os.environ.get("DRAFTGRID_TRACEBACK"):
            raise
        print(f"error: {said}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
