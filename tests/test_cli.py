"""The command line: what a value may hold, which value wins, and what an error says."""

import errno
import re
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from draftgrid.common.cli import compose, key, main


@dataclass
class Inner:
    rate: float = key(0.5, "how fast")
    name: str = key("x", "what it is called")


@dataclass
class Outer:
    inner: Inner = field(default_factory=Inner)
    depth: int = key(2, "how deep")


@dataclass
class Config:
    recipe: str = key("", "name of a recipe")
    prompt: str = key("a cat", "what to draw")
    note: str | None = key(None, "free text")
    steps: int = key(3, "how many")
    flag: bool = key(False, "whether")
    scales: list[float] = key([1.0, 3.0], "guidance scales")
    words: list[str] = key(list, "some words")
    inner: Inner = field(default_factory=Inner)
    outer: Outer = field(default_factory=Outer)


TEXTS = [
    "a cat, a dog, and a bird",
    "[a] [b",
    "(a) b)",
    "{a: b} }",
    "a=b=c",
    "# a # b",
    'it\'s a "cat"',
    "'quoted'",
    '"quoted"',
    "'",
    "''",
    "  spaces around  ",
    "tab\tand\nnewline",
    "",
    "back\\slash",
    "\\",
    "ends in two \\\\",
    "\\'",
    "a\\\\'b",
    "${steps}",
    "${oc.env:HOME}",
    "\\${x}",
    "open ${",
    "???",
    "null",
    "None",
    "true",
    "1",
    "1.50",
    "1e3",
    "~",
    "-",
    "- a",
    "*",
    "!x &y",
    "50% @ 3:00",
    "choice(1,2)",
    "[1,2]",
    "prompt=prompt=",
    "пёс 🐕 été",
]


@pytest.mark.parametrize("text", TEXTS)
def test_a_text_value_arrives_as_it_was_typed(text: str) -> None:
    config = compose(Config, [f"prompt={text}", f"outer.inner.name={text}", "steps=4"])
    assert config.prompt == text
    assert config.outer.inner.name == text
    assert config.steps == 4


def test_an_optional_text_is_text_or_null() -> None:
    assert compose(Config, ["note=a, b"]).note == "a, b"
    assert compose(Config, ["note=null"]).note is None
    assert compose(Config, []).note is None


def test_numbers_booleans_lists_and_nested_keys_are_typed() -> None:
    config = compose(
        Config,
        ["steps=7", "flag=true", "scales=[1,2.5]", "words=[a,'b, c']", "inner.rate=1e-3", "outer.inner.rate=2"],
    )
    assert (config.steps, config.flag, config.scales, config.words) == (7, True, [1.0, 2.5], ["a", "b, c"])
    assert (config.inner.rate, config.outer.inner.rate, config.outer.depth) == (1e-3, 2.0, 2)
    assert [type(s) for s in config.scales] == [float, float]


def test_without_arguments_the_defaults_hold_and_are_not_shared() -> None:
    first, second = compose(Config, []), compose(Config, [])
    assert first == Config()
    first.scales.append(9.0)
    assert second.scales == Config().scales == [1.0, 3.0]


@pytest.mark.parametrize(
    ("argument", "wrong", "right"),
    [
        ("stepz=3", "stepz", "steps"),
        ("promt=a", "promt", "prompt"),
        ("inner.rat=1", "inner.rat", "inner.rate"),
        ("outer.iner.name=a", "outer.iner.name", "outer.inner.name"),
        ("dept=1", "dept", "outer.depth"),
        ("+steps=3", "+steps", "steps"),
    ],
)
def test_an_unknown_key_is_answered_with_the_nearest(argument: str, wrong: str, right: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"unknown key {wrong!r}. Did you mean {right!r}?")):
        compose(Config, [argument])


def test_a_key_like_no_other_is_answered_with_all() -> None:
    with pytest.raises(ValueError, match=r"unknown key 'qqqqqq'\. Known: .*steps.*outer\.inner\.rate"):
        compose(Config, ["qqqqqq=1"])


def test_an_argument_without_equals_is_named() -> None:
    with pytest.raises(ValueError, match="'--steps' is not key=value"):
        compose(Config, ["--steps", "3"])


@pytest.mark.parametrize(
    ("argument", "kind"),
    [
        ("steps=abc", "int"),
        ("steps=1.5", "int"),
        ("steps=1e3", "int"),
        ("steps=", "int"),
        ("steps=null", "int"),
        ("steps=1,2", "int"),
        ("steps=(", "int"),
        ("steps=[1]", "int"),
        ("steps=${flag}", "int"),
        ("flag=maybe", "bool"),
        ("inner.rate=fast", "float"),
        ("outer.inner.rate=fast", "float"),
        ("scales=3", "list[float]"),
        ("scales=1,2", "list[float]"),
        ("scales=[a]", "list[float]"),
    ],
)
@pytest.mark.parametrize("before", [[], ["prompt="], ["flag=true", "inner.name=steps"]])
def test_a_value_of_the_wrong_type_is_one_sentence_with_field_value_and_type(
    argument: str, kind: str, before: list[str]
) -> None:
    name, _, value = argument.partition("=")
    with pytest.raises(ValueError) as error:
        compose(Config, [*(b for b in before if not b.startswith(name)), argument])
    assert str(error.value) == f"{name} is {value!r}; it must be of type {kind}"


@pytest.fixture
def recipes(tmp_path: Path) -> Path:
    (tmp_path / "emoji_ssd.yaml").write_text("steps: 10\ninner:\n  rate: 0.1\nprompt: from the recipe\n")
    (tmp_path / "emu3_ssd.yaml").write_text("# nothing but defaults\n")
    return tmp_path


def test_the_command_line_wins_over_the_recipe_and_the_recipe_over_defaults(recipes: Path) -> None:
    config = compose(Config, ["recipe=emoji_ssd", "inner.rate=0.9", "prompt=typed, here"], recipes)
    assert (config.recipe, config.steps, config.inner.rate, config.inner.name) == ("emoji_ssd", 10, 0.9, "x")
    assert config.prompt == "typed, here"
    assert compose(Config, ["recipe=emoji_ssd"], recipes).prompt == "from the recipe"


def test_a_recipe_leaves_no_trace_in_the_next_compose(recipes: Path) -> None:
    assert compose(Config, [], recipes, "emoji_ssd").steps == 10
    assert compose(Config, [], recipes, "emu3_ssd") == Config(recipe="emu3_ssd")
    assert compose(Config, []) == Config()


def test_an_unknown_recipe_is_answered_with_the_nearest(recipes: Path) -> None:
    with pytest.raises(ValueError, match=r"unknown recipe 'emoji_sdd'\. Did you mean 'emoji_ssd'\?"):
        compose(Config, ["recipe=emoji_sdd"], recipes)
    with pytest.raises(ValueError, match=r"unknown recipe 'zzz'\. Known: emoji_ssd, emu3_ssd\."):
        compose(Config, ["recipe=zzz"], recipes)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("stepz: 3", "bad.yaml: unknown key 'stepz'. Did you mean 'steps'?"),
        ("inner: {rat: 1}", "bad.yaml: unknown key 'inner.rat'. Did you mean 'inner.rate'?"),
        ("steps: many", "bad.yaml: steps is 'many'; it must be of type int"),
        ("scales: [1, x]", "bad.yaml: scales is [1, 'x']; it must be of type list[float]"),
        ("steps: {a: 1}", "bad.yaml: steps is {'a': 1}; it must be of type int"),
        ("inner: 3", "bad.yaml: inner is 3; it must be a group of keys"),
        ("inner:", "bad.yaml: inner is None; it must be a group of keys"),
        ("- steps", "bad.yaml: the recipe is ['steps']; it must be a group of keys"),
        ("steps: 1\nprompt: [", "bad.yaml line 2 is not valid YAML: expected the node content"),
    ],
)
def test_a_wrong_recipe_is_told_by_file_and_key(recipes: Path, text: str, said: str) -> None:
    (recipes / "bad.yaml").write_text(text)
    with pytest.raises(ValueError) as error:
        compose(Config, ["recipe=bad", "flag=true"], recipes)
    assert str(error.value).startswith(said)


@pytest.mark.parametrize("flag", ["--help", "-h", "help"])
def test_help_prints_every_key_with_its_default_and_meaning(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    def run(_: Config) -> None:
        raise AssertionError("help must not run the command")

    main(run, Config, "Draws a thing.\n\n    python -m draw", arguments=["steps=1", flag])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "Draws a thing."
    expected = {
        "recipe": "name of a recipe",
        "prompt": "what to draw  [a cat]",
        "note": "free text",
        "steps": "how many  [3]",
        "flag": "whether  [False]",
        "scales": "guidance scales  [[1.0, 3.0]]",
        "words": "some words  [[]]",
        "inner.rate": "how fast  [0.5]",
        "inner.name": "what it is called  [x]",
        "outer.inner.rate": "how fast  [0.5]",
        "outer.inner.name": "what it is called  [x]",
        "outer.depth": "how deep  [2]",
    }
    shown = dict(line.split(maxsplit=1) for line in lines[lines.index("Keys (key=value, in any order):") + 1 :])
    assert shown == expected


def fail(error: BaseException):
    def run(_: Config) -> None:
        raise error

    return run


@pytest.mark.parametrize(
    ("error", "said", "code"),
    [
        (ValueError("prompts.txt holds no prompt"), "error: prompts.txt holds no prompt\n", 2),
        (OSError(errno.ENOSPC, "No space left on device"), "error: output: No space left on device\n", 2),
        (OSError(errno.ENOSPC, "No space left on device", "x/y"), "error: x/y: No space left on device\n", 2),
        (PermissionError(errno.EACCES, "Permission denied", "z"), "error: z: Permission denied\n", 2),
        (KeyboardInterrupt(), "interrupted\n", 130),
    ],
)
def test_a_failure_of_the_users_making_ends_in_one_line_and_an_exit_code(
    error: BaseException, said: str, code: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("DRAFTGRID_TRACEBACK", raising=False)
    with pytest.raises(SystemExit) as ended:
        main(fail(error), Config, None, arguments=[])
    assert ended.value.code == code
    assert capsys.readouterr().err == said


def test_a_failure_of_our_making_keeps_its_traceback() -> None:
    with pytest.raises(AssertionError, match="cache holds"):
        main(fail(AssertionError("cache holds")), Config, None, arguments=[])


class Failing(IterableDataset):
    def __iter__(self):
        yield torch.zeros(1)
        raise ValueError("shard-000001.tar: 7 of 9 samples are broken")


def test_a_failure_in_a_loader_process_is_the_same_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(_: Config) -> None:
        batches = iter(DataLoader(Failing(), batch_size=None, num_workers=1))
        try:
            list(batches)
        finally:
            batches._shutdown_workers()  # else the garbage collector does it some tests later, and waits five seconds

    monkeypatch.delenv("DRAFTGRID_TRACEBACK", raising=False)
    with pytest.raises(SystemExit):
        main(run, Config, None, arguments=[])
    assert capsys.readouterr().err == "error: shard-000001.tar: 7 of 9 samples are broken\n"


def test_a_real_command_ends_with_exit_code_two_and_no_traceback(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "draftgrid.data.verify", f"dir={tmp_path / 'no such, folder'}"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent.parent)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("error: ")
    assert "no such, folder" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_the_last_part_of_a_key_is_enough_where_only_one_ends_so() -> None:
    assert compose(Config, ["depth=4"]).outer.depth == 4
    with pytest.raises(
        ValueError, match=r"key 'rate' is short for several: inner\.rate, outer\.inner\.rate; write one"
    ):
        compose(Config, ["rate=1"])
