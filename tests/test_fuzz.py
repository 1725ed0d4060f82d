"""Whatever words, TOML and JSON Lines say, they come to a run or to a refusal with a way out; never to a traceback."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from hypothesis import given, settings
from hypothesis import strategies as st

from doubles.files import read_examples
from policygrad import cli
from policygrad.algorithms import ALGORITHMS
from policygrad.commands.help import list_command_flags
from policygrad.commands.train import parse_run
from policygrad.core.algorithm import Algorithm
from policygrad.errors import PolicygradError
from policygrad.tasks.preferences import read_demonstrations, read_preferences
from policygrad.training.config.run import Run, RunOptions, UncheckedRun
from policygrad.training.config.serialization import from_dict, list_parts, load_config
from policygrad.training.config.supervised import SFTConfig


def examples(few: int, many: int) -> pytest.MarkDecorator:
    """`number` = few in the fast tier; the same and more in the full one."""
    return pytest.mark.parametrize("number", [few, pytest.param(many, marks=pytest.mark.full)])


def tried(number: int, **drawn: st.SearchStrategy[Any]) -> Callable[[Callable[..., None]], None]:
    """Call the decorated function with that many examples."""

    def call(check: Callable[..., None]) -> None:
        settings(max_examples=number, derandomize=True, deadline=None)(given(**drawn)(check))()

    return call


ODD: list[Any] = [
    *(
        0,
        -1,
        1,
        3,
        2**31,
        2**63,
        -(2**70),
        10**30,
        0.0,
        -0.5,
        0.5,
        1.0,
        1e-300,
        1e300,
        float("nan"),
        float("inf"),
        -float("inf"),
    ),
    *(
        "",
        "none",
        "None",
        "tiny",
        "x" * 300,
        "a\0b",
        "\ud7ff",
        "../..",
        "(",
        "[0-9",
        "math*0.5",
        "0*math",
        "model:",
        "model:tiny",
    ),
    *(
        "mine:Gate",
        "no.py:X",
        ":",
        "a:",
        ":b",
        "format:(",
        "os.system",
        "Clip",
        "GroupStd",
        "DropZeroVariance",
        "cosine",
        "-1",
    ),
    *(
        [],
        [0.9, 2],
        [0.9, 0.99],
        ["exact_match"],
        [[]],
        True,
        False,
        {},
        {"part": "Clip"},
        {"part": 3},
        {"part": "GroupStd", "eps": -1},
    ),
]
values = st.sampled_from(ODD) | st.floats() | st.integers() | st.text(max_size=8)
OPTIONS = [f.name for f in fields(RunOptions)]
GROUPS = {
    name: [f.name for f in fields(getattr(UncheckedRun(), name))]
    for name in ("sampling", "optimizer", "learner", "rewards", "evaluation")
}
FIELDS = [f.name for f in fields(Algorithm)]


def ends_well(make: Callable[[], Any], expected: Any = object) -> None:
    """The refusal is a message; anything else that is raised fails the test."""
    output, result = "", None
    try:
        result = make()
    except PolicygradError as error:
        output = str(error).strip() or "nothing"
    assert output != "nothing"
    assert output or isinstance(result, expected)


flags = st.sampled_from(
    [
        *(f"--{name.replace('_', '-')}" for name in OPTIONS if name not in GROUPS),
        *(
            f"--{group}.{name.replace('_', '-')}"
            for group, names in GROUPS.items()
            for name in names
            if group != "sampling"
        ),
        *(f"--algorithm.{name.replace('_', '-')}" for name in FIELDS),
        *(
            "--temperature",
            "--top-p",
            "--max-tokens",
            "--allow-code",
            "--config",
            "--resume",
            "--stop-after",
            "--teacher",
            "--nonesuch",
        ),
    ]
)
argv = st.one_of(
    st.sampled_from([str(value) for value in ODD if not isinstance(value, dict | list)]),
    st.sampled_from([*ALGORITHMS, *list_parts(), "GroupMean,GroupStd", "a,b", "grpo:x", "--", "-", "--reward"]),
    st.text(max_size=6),
)
lines = st.lists(st.tuples(flags, argv, st.booleans()), max_size=4)


@examples(8, 40)
def test_words(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    @tried(number, line=lines, first=st.sampled_from(["grpo", "ppo", "", "GRPO", "mine.py:X"]))
    def check(line: list[tuple[str, str, bool]], first: str) -> None:
        args = [first] if first else []
        for flag, word, together in line:
            args += [f"{flag}={word}"] if together else [flag, word]

        def parsed() -> Any:
            try:
                return parse_run(args)[0]
            except SystemExit as end:  # tyro's own message for what is no option, or its help
                return Run() if end.code in (0, 2) else end

        ends_well(parsed, Run)


COMMANDS = {
    "sft": ("--data", "missing.jsonl"),
    "reward-model": ("--data", "missing.jsonl"),
    "eval": ("missing",),
    "export": ("missing",),
    "report": ("missing",),
    "compare": ("grpo", "--dry-run"),
    "plan": ("--model", "tiny", "--gpus", "cpu:1"),
    "engine": ("vllm", "--print", "--model", "tiny"),
}
"""With so much, each comes to an end at once, whatever else is said."""


@cache
def flags_of(command: str) -> list[str]:
    return list_command_flags(command)


@examples(16, 60)
def test_words_of_other_commands(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole command; a refusal is one message, and exit code 2."""
    monkeypatch.chdir(tmp_path)

    @tried(number, data=st.data(), command=st.sampled_from(sorted(COMMANDS)))
    def check(data: st.DataObject, command: str) -> None:
        line = data.draw(st.lists(st.tuples(st.sampled_from(flags_of(command)), argv), min_size=1, max_size=2))
        assert cli.main([command, *COMMANDS[command], *(word for pair in line for word in pair)]) in (0, 2)


parts = st.one_of(
    values,
    st.sampled_from(list_parts()),
    st.fixed_dictionaries(
        {"part": st.sampled_from(list_parts())}, optional={"eps": values, "high": values, "ddof": values, "of": values}
    ),
)
algorithms = st.one_of(
    values,
    st.sampled_from(sorted(ALGORITHMS)),
    st.dictionaries(st.sampled_from([*FIELDS, "nonesuch"]), parts | st.lists(parts, max_size=3), max_size=4),
)
groups = st.one_of(
    *(
        st.dictionaries(st.sampled_from(names), values, max_size=3).map(lambda d, g=group: {g: d})
        for group, names in GROUPS.items()
    )
)
tables = st.builds(
    lambda plain, group, algorithm: {**plain, **group, **({} if algorithm is None else {"algorithm": algorithm})},
    st.dictionaries(st.sampled_from([*OPTIONS, "nonesuch"]), values, max_size=3),
    groups,
    st.none() | algorithms,
)


@examples(60, 300)
def test_toml(number: int, tmp_path: Path) -> None:
    """Read as a file is, and as the run it would be."""
    file = tmp_path / "options.toml"

    @tried(number, table=tables)
    def check(table: dict[str, Any]) -> None:
        file.write_text(tomli_w.dumps(table), encoding="utf-8")
        ends_well(lambda: load_config(file, UncheckedRun()), UncheckedRun)
        ends_well(lambda: load_config(file, Run()).resolve(), Run)
        ends_well(lambda: load_config(file, SFTConfig()), SFTConfig)
        ends_well(lambda: from_dict(table, UncheckedRun(), "words"), UncheckedRun)


@examples(60, 200)
def test_what_is_hardly_toml(number: int, tmp_path: Path) -> None:
    file = tmp_path / "options.toml"

    @tried(number, text=st.binary(max_size=60) | st.text(alphabet="[]{}=\"'.\n#1a-", max_size=60).map(str.encode))
    def check(text: bytes) -> None:
        file.write_bytes(text)
        ends_well(lambda: load_config(file, UncheckedRun()), UncheckedRun)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["role", "content", "x"]), inner, max_size=3)
    ),
    max_leaves=6,
)
COLUMNS = [
    "prompt",
    "completion",
    "answer",
    "messages",
    "chosen",
    "rejected",
    "completions",
    "prompts",
    "tools",
    "demonstration",
]
rows = st.lists(
    st.dictionaries(st.sampled_from(COLUMNS), json_values | st.sampled_from(["a", "b"]), max_size=4), max_size=3
)


@examples(60, 300)
def test_json_lines(number: int, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"

    @tried(number, text=rows.map(lambda made: "\n".join(map(json.dumps, made)).encode()) | st.binary(max_size=40))
    def check(text: bytes) -> None:
        file.write_bytes(text)
        for read in (read_examples, read_demonstrations, read_preferences):
            ends_well(lambda read=read: read(str(file)), list)  # type: ignore[misc]


@pytest.mark.parametrize(
    "text",
    ["a=" + "[" * 3000, ".".join("a" * 3000) + "=1", "algorithm." + ".".join("a" * 3000) + "=1", "seed=" + "9" * 5000],
)
def test_toml_that_is_too_deep_or_too_long(text: str, tmp_path: Path) -> None:
    file = tmp_path / "options.toml"
    file.write_text(text)
    with pytest.raises(PolicygradError, match=r"options\.toml"):
        load_config(file, UncheckedRun())
