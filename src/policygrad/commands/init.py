"""`policygrad init [ALGORITHM] > run.toml`: print a configuration for `train --config`, with a comment for each option.

Texts and defaults are those of the stored help, so that nothing heavy is imported for an algorithm of the package's own.
"""

from __future__ import annotations

import json
import math
import re
import shlex
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple, TypedDict

import tomli_w
import tyro

from policygrad.commands.help import ALGORITHM, GENERAL, NO_DEFAULT, Option, Page, load_page
from policygrad.commands.json_output import print_json, prints
from policygrad.commands.parsing import parse_arguments
from policygrad.commands.show import load_shown
from policygrad.samplers.engines.registry import list_engine_names

DEFAULT = "dapo"  # the algorithm of `policygrad train` without a name
WIDTH = 100  # columns of a comment


class Entry(NamedTuple):
    """A line of the file."""

    key: str  # in its table
    example: str = ""  # a TOML value: the line is a comment, and the option is left open


class Table(NamedTuple):
    """A table of the file, with what it holds of the section of the same name."""

    name: str  # empty: the keys above all tables
    entries: tuple[Entry, ...]
    sections: tuple[str, ...]  # of the help, which hold the others


TABLES = (
    Table(
        "",
        (
            Entry("model"),
            Entry("task"),
            Entry("eval_data", '"held_out.jsonl"'),
            Entry("reward", '["mine.py:reward", "0.1*format"]'),
            Entry("environment", '"mine.py:Environment"'),
            Entry("steps"),
            Entry("prompts_per_step"),
            Entry("samples_per_prompt"),
            Entry("lr", "1e-6"),
            Entry("seed"),
            Entry("output", '"runs/first"'),
            Entry("track", '["wandb"]'),
        ),
        (GENERAL, "tokenizer", "task", "environment", "rewards", "guard", "teacher-server"),
    ),
    Table("sampling", (Entry("max_tokens"), Entry("temperature"), Entry("stop", '["</answer>"]')), ("sampling",)),
    Table("sampler", (Entry("engine", f'"{list_engine_names()[0]}"'),), ("sampler",)),
    Table(
        "learner",
        (
            Entry("dtype"),
            Entry("lora", '"rank=16,alpha=32,targets=all-linear"'),
            Entry("gradient_checkpointing", "true"),
            Entry("world_size", "2"),
        ),
        ("learner",),
    ),
    Table("optimizer", (Entry("warmup"), Entry("schedule"), Entry("clip")), ("optimizer",)),
    Table(
        "evaluation",
        (Entry("problems"), Entry("samples_per_prompt"), Entry("every"), Entry("benchmarks", '["gsm8k"]')),
        ("evaluation",),
    ),
    Table("checkpoint", (Entry("every"), Entry("keep"), Entry("keep_best", '"eval/reward"')), ("checkpoint",)),
)
PARTS = ("gate", "terms", "update_rule")
"""Fields of the algorithm whose settings are shown."""


@dataclass(frozen=True)
class InitOptions:
    """Print a configuration with a comment for each option that people set: policygrad init grpo > run.toml, then policygrad train
    --config run.toml. It runs as it is, on the model and the task inside the package."""

    algorithm: Annotated[
        tyro.conf.Positional[str], tyro.conf.arg(metavar="[ALGORITHM]", help_behavior_hint=f"(default: {DEFAULT})")
    ] = DEFAULT
    """An algorithm, or your own as mine.py:NAME or mine:NAME."""
    json: bool = False
    """Print one JSON object."""


class InitOutput(TypedDict):
    """The configuration."""

    toml: str
    """For train --config."""


@prints(InitOutput)
def init(args: list[str]) -> int:
    """Run `policygrad init [ALGORITHM]`."""
    options = parse_arguments(InitOptions, args, "init")
    text = format_example(options.algorithm)
    if options.json:
        print_json({"toml": text})
    else:
        print(text, end="")
    return 0


def format_example(algorithm: str) -> str:
    """Return the file for an algorithm. Raises ConfigError for one that does not exist."""
    key = algorithm.lower().replace("-", "_")
    shown = load_shown()["algorithms"].get(key)
    parts = _load_parts(algorithm) if shown is None else shown["parts"]
    name = algorithm if shown is None else key
    page = load_page("train", DEFAULT if shown is None else key)
    assert page is not None
    command = shlex.join(["policygrad", "train", name])
    head = (
        f"A run of {name}: policygrad train --config FILE, and --dry-run to see all that it sets. Flags take precedence. "
        "A line of one # and no text is an option that is left open: remove the # to set it."
    )
    lines = [*_comment(head)]
    if shown is None:  # the name must be a text for the algorithm's code to be found
        lines += ["", *_comment(f"Its equation and parts: policygrad show {name}"), f"algorithm = {json.dumps(name)}"]
    for table in TABLES:
        lines += ["", *([f"[{table.name}]"] if table.name else [])]
        for entry in table.entries:
            lines += _format_entry(page, table, entry, parts)
        first, *others = table.sections
        more = f"; those of {', '.join(others[:-1])} and {others[-1]} in the same way" if others else ""
        lines += _comment(f"Every other option: {command} --help {first}{more}")
    if shown is not None:
        lines += [
            "",
            "[algorithm]",
            *_comment(f"Its equation and parts: policygrad show {key}"),
            f"name = {json.dumps(key)}",
        ]
        lines += _comment(f"Every option of its parts: {command} --help {ALGORITHM}. The main ones, with their values:")
        lines += _format_parts(parts)
    return "\n".join(lines) + "\n"


def _load_parts(algorithm: str) -> Mapping[str, Any]:
    """Return the parts of a user's or another package's algorithm."""
    from policygrad.training.config.serialization import algorithm_to_dict, load_algorithm

    return algorithm_to_dict(load_algorithm(algorithm))


def _format_entry(page: Page, table: Table, entry: Entry, parts: Mapping[str, Any]) -> Iterator[str]:
    option = _find_option(page, table.name, entry.key)
    value = entry.example or _read_default(option)
    if not table.name and entry.key == "samples_per_prompt":
        value = str(parts["samples_per_prompt"])
    text = re.sub(r"[;.] in Python also .*", ".", option.text.partition("\n")[0], flags=re.IGNORECASE)
    is_open = entry.example and option.default not in (*NO_DEFAULT, "")
    yield from _comment(f"{text} {option.default}" if is_open else text)
    yield f"{'# ' if entry.example else ''}{entry.key} = {value}"


def _find_option(page: Page, table: str, key: str) -> Option:
    flag = f"--{key if table in ('', 'sampling') else f'{table}.{key}'}".replace("_", "-")
    return next(option for section in page.sections for option in section.options if flag in option.flags)


def _read_default(option: Option) -> str:
    """Return an option's default as TOML has it."""
    text = option.default.removeprefix("(default: ").removesuffix(")")
    return text if option.value in ("INT", "FLOAT") else json.dumps(text)


def _format_parts(parts: Mapping[str, Any]) -> Sequence[str]:
    given = {name: _restore_infinity(parts[name]) for name in PARTS if parts.get(name) not in (None, "none", [])}
    return [f"# {line}" for line in tomli_w.dumps({"algorithm": given}).splitlines() if line and line != "[algorithm]"]


def _restore_infinity(value: Any) -> Any:
    """Return a part with infinity where the shown one has null: JSON has no infinity, and open fields are "none" in it."""
    if isinstance(value, Mapping):
        return {name: _restore_infinity(x) for name, x in value.items()}
    return [_restore_infinity(x) for x in value] if isinstance(value, list) else math.inf if value is None else value


def _comment(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent="## ", subsequent_indent="## ", break_on_hyphens=False)
