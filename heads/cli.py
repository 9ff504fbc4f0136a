"""One command line for all commands: `key=value`, composed by Hydra onto a typed schema, with errors one can act on.

A value runs to the end of its argument, so a prompt may hold commas, brackets and equals signs unquoted. Keys are the
schema's; a wrong one is answered with the nearest right name before anything is loaded.
"""

import dataclasses
import difflib
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

T = TypeVar("T")


def key(default: Any, help: str) -> Any:
    """A dataclass field with a default and the line that --help prints; mutable defaults are copied."""
    metadata = {"help": help}
    if isinstance(default, type) or (callable(default) and not isinstance(default, str)):
        return dataclasses.field(default_factory=default, metadata=metadata)
    if isinstance(default, list):
        return dataclasses.field(default_factory=lambda: list(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def leaves(schema: type, prefix: str = "") -> dict[str, tuple[Any, Any, str]]:
    """{dotted key: (type, default, help)} of a nested dataclass."""
    found: dict[str, tuple[Any, Any, str]] = {}
    hints = get_type_hints(schema)
    for field in dataclasses.fields(schema):
        kind = hints[field.name]
        if dataclasses.is_dataclass(kind):
            found |= leaves(kind, f"{prefix}{field.name}.")  # type: ignore[arg-type]
            continue
        factory = field.default_factory
        default = field.default if factory is dataclasses.MISSING else factory()
        found[prefix + field.name] = (kind, default, field.metadata.get("help", ""))
    return found


def nearest(name: str, known: Sequence[str]) -> str:
    """' Did you mean X?' or the list of known names."""
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    if not close and "." not in name:
        close = [k for k in known if k.rsplit(".", 1)[-1] == name][:1]
    return f"Did you mean {close[0]!r}?" if close else f"Known: {', '.join(known)}."


def split_overrides(arguments: Sequence[str], known: dict[str, tuple[Any, Any, str]]) -> dict[str, str]:
    """['a=b', ...] -> {'a': 'b'}; raises ValueError for an argument without '=' or with an unknown key."""
    pairs: dict[str, str] = {}
    for argument in arguments:
        name, equals, value = argument.partition("=")
        if not equals:
            raise ValueError(f"argument {argument!r} is not key=value. {nearest(argument, list(known))}")
        if name not in known:
            raise ValueError(f"unknown key {name!r}. {nearest(name, list(known))}")
        pairs[name] = value
    return pairs


def compose(schema: type[T], arguments: Sequence[str], recipes: Path | None = None, default_recipe: str = "") -> T:
    """The schema's defaults, the recipe's values over them, the command line's over both; typed and checked.

    `recipes` is the folder of NAME.yaml files that `recipe=NAME` picks from. Raises ValueError.
    """
    from hydra import compose as hydra_compose
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
        names = sorted(p.stem for p in recipes.glob("*.yaml"))
        recipe = pairs.pop("recipe", default_recipe)
        if recipe not in names:
            raise ValueError(f"unknown recipe {recipe!r}. {nearest(recipe, names)}")
        store.store(group="recipe", name=recipe, package="_global_", node=_recipe(recipes / f"{recipe}.yaml", known))
        defaults.append({"recipe": recipe})
    store.store(name="main", node={"defaults": [*defaults, "_self_"]})
    try:
        with initialize(version_base=None, config_path=None):
            config = hydra_compose("main", overrides=[_quoted(n, v, known[n][0]) for n, v in pairs.items()])
        value = OmegaConf.to_object(config)
    except (HydraException, OmegaConfBaseException) as error:
        raise ValueError(_plain(error, pairs, known)) from None
    if recipes is not None:
        value.recipe = recipe  # type: ignore[union-attr]
    return value  # type: ignore[return-value]


def _recipe(path: Path, known: dict[str, tuple[Any, Any, str]]) -> Any:
    from omegaconf import OmegaConf

    node = OmegaConf.load(path)

    def walk(branch: Any, prefix: str) -> None:
        for name in branch:
            full = prefix + str(name)
            if any(k.startswith(full + ".") for k in known):
                walk(branch[name], full + ".")
            elif full not in known:
                raise ValueError(f"{path.name}: unknown key {full!r}. {nearest(full, list(known))}")

    walk(node, "")
    return node


def _quoted(name: str, value: str, kind: Any) -> str:
    """A Hydra override. Text is quoted, so that Hydra's own grammar never sees it; '' and null stay special."""
    if "str" in str(kind) and "list" not in str(kind) and value != "null":
        escaped = value.replace("\\", "\\\\").replace("'", "\\'")
        return f"{name}='{escaped}'"
    return f"{name}={value}"


def _plain(error: Exception, pairs: dict[str, str], known: dict[str, tuple[Any, Any, str]]) -> str:
    full = getattr(error, "full_key", None) or getattr(error.__cause__, "full_key", None)
    if full in known:
        kind = getattr(known[full][0], "__name__", str(known[full][0]))
        return f"{full} is {pairs.get(full, '?')!r}; it must be of type {kind}"
    for name, value in pairs.items():
        if name in str(error) or value in str(error):
            return f"{name}={value} cannot be read: {str(error).splitlines()[0]}"
    return str(error).splitlines()[0]


def show_help(schema: type, doc: str | None) -> str:
    lines = [(doc or "").strip(), "", "Keys (key=value, in any order):"]
    for name, (_, default, text) in leaves(schema).items():
        shown = "" if default in ("", None, dataclasses.MISSING) else f"  [{default}]"
        lines.append(f"  {name:<26} {text}{shown}")
    return "\n".join(lines)


def main(
    run: Callable[[Any], None],
    schema: type,
    doc: str | None,
    recipes: Path | None = None,
    default_recipe: str = "",
    arguments: Sequence[str] | None = None,
) -> None:
    """Entry of every command: compose, run; a ValueError or a full disk ends it with one sentence and exit code 2."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if any(a in ("-h", "--help", "help") for a in arguments):
        print(show_help(schema, doc))
        return
    try:
        run(compose(schema, arguments, recipes, default_recipe))
    except ValueError as error:
        if os.environ.get("DRAFTGRID_TRACEBACK"):
            raise
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except OSError as error:
        if error.errno is None or os.environ.get("DRAFTGRID_TRACEBACK"):
            raise
        print(f"error: {error.filename or 'output'}: {error.strerror}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
