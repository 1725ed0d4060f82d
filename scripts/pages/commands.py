"""What the command line prints of the package's own: its help, from the parsers, and what `show` and `algorithms` say."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, make_dataclass
from importlib import import_module
from typing import Any

from policygrad.algorithms import ALGORITHMS, DAPO
from policygrad.commands import COMMANDS
from policygrad.commands.describe import (
    describe_benchmark,
    describe_part,
    describe_reward,
    group_by_family,
    list_everything,
    reward_to_dict,
    subject_to_dict,
)
from policygrad.commands.help import ALGORITHM, HelpRequest, Option, Page, Section
from policygrad.commands.json_output import to_plain
from policygrad.commands.options import TYRO_REGISTRY, build_option_type, name_parts
from policygrad.commands.parsing import read_page
from policygrad.commands.render import build_matrix_row, describe_algorithm
from policygrad.commands.show import DEFINITION
from policygrad.commands.styled import TextRow
from policygrad.core.algorithm import Algorithm
from policygrad.core.validation import ROLES
from policygrad.rewards.resolve import REWARDS, list_rewards
from policygrad.tasks.benchmarks import load_benchmarks
from policygrad.training.config.serialization import list_parts, load_part_class

COMMAND_LINES = (*((name,) for name in COMMANDS), ("lab", "control"))
"""Commands that have a help of their own."""


def help_file() -> str:
    """Return the content of commands/help.json: every command's page, and each algorithm's parts as options of `train`.

    `parts` has each kind of part once, with its options' names, values and texts; `rows` says of each algorithm which it has, and
    their defaults in the same order.
    """
    parts = dict[str, Any]()
    rows = {name: _store_parts(a, parts) for name, a in ALGORITHMS.items()}
    pages = [read_command_page(*words) for words in COMMAND_LINES]
    content = {"commands": {page.command: _store_page(page) for page in pages}, "parts": parts, "rows": rows}
    return format_json(to_plain(content)) + "\n"


def show_file() -> str:
    """Return the content of commands/show.json: the matrix, and rows of text and JSON of each algorithm, part and benchmark."""
    families = group_by_family()
    names = [name for members in families.values() for name in members]
    matrix = {
        "families": families,
        "full": {name: build_matrix_row(ALGORITHMS[name]) for name in names},
        "short": {name: build_matrix_row(ALGORITHMS[name], changed=True) for name in names},
    }
    fields = {place: list(list_parts(place)) for place in ROLES}
    everything = {"kind": "list", "algorithms": families, "parts": fields, "rewards": list_rewards()}
    algorithms = {
        name: {"rows": _store_rows(describe_algorithm(a)), **_choose(subject_to_dict(a), "equation", "parts")}
        for name, a in ALGORITHMS.items()
    }
    kinds = {name: load_part_class(name, "show", "part") for name in list_parts()}
    parts = {
        name: {
            "file": f"{kind.__module__.removeprefix('policygrad.').replace('.', '/')}.py",
            "rows": _store_rows(describe_part(kind, DEFINITION)),
            "json": subject_to_dict(kind),
        }
        for name, kind in kinds.items()
    }
    benchmarks = {
        name: {"rows": _store_rows(describe_benchmark(b)), "json": {"kind": "benchmark", **asdict(b)}}
        for name, b in load_benchmarks().items()
    }
    content = {
        "matrix": matrix,
        "everything": {"rows": _store_rows(list_everything()), "json": everything},
        "algorithms": algorithms,
        "parts": parts,
        "benchmarks": benchmarks,
        "rewards": {
            name: {"rows": _store_rows(describe_reward(name)), "json": reward_to_dict(name)} for name in REWARDS
        },
    }
    return format_json(to_plain(content)) + "\n"


def read_command_page(command: str, *words: str) -> Page:
    """Return the help of a command, as its parser has it."""
    module, _, function = COMMANDS[command].partition(":")
    try:
        getattr(import_module(module), function)([*words, "--help"])
    except HelpRequest as request:
        return request.page
    raise AssertionError(f"{command} has no --help")


def read_part_sections(a: Algorithm) -> tuple[Section, ...]:
    """Return the sections of an algorithm's parts in the help of `train`."""
    parts = build_option_type(a)
    shape = make_dataclass("Train", [(ALGORITHM, parts)], frozen=True)
    return read_page(shape, "train", default=shape(parts()), registry=TYRO_REGISTRY).sections


def format_json(value: Any, indent: str = "") -> str:
    """Format JSON so that a difference between two versions can be read: a list that holds a text or a number is one line."""
    items, inner = value if isinstance(value, list) else [], indent + " "
    if isinstance(value, dict) and value:
        lines = [f"{json.dumps(key, ensure_ascii=False)}: {format_json(item, inner)}" for key, item in value.items()]
        return f"{{\n{inner}" + f",\n{inner}".join(lines) + f"\n{indent}}}"
    if items and all(isinstance(item, dict | list) for item in items):
        return f"[\n{inner}" + f",\n{inner}".join(format_json(item, inner) for item in items) + f"\n{indent}]"
    return json.dumps(value, ensure_ascii=False)


def _store_page(page: Page) -> dict[str, Any]:
    is_train = page.command == "train"
    sections = [s for s in page.sections if not (is_train and s.name.partition(".")[0] == ALGORITHM)]
    stored = {s.name: {"text": s.text, "options": list(map(_store_option, s.options))} for s in sections}
    return {"texts": page.texts, **({"row": DAPO.name} if is_train else {}), "sections": stored}


def _store_option(option: Option) -> list[Any]:
    return [list(option.flags), option.value, option.text, option.default]


def _store_parts(a: Algorithm, parts: dict[str, Any]) -> dict[str, list[str]]:
    """Return place -> [kind of part, default, …], and add the kinds that are not yet among `parts`."""
    row = {}
    for section in read_part_sections(a):
        place = section.name.removeprefix(f"{ALGORITHM}.")
        options = [[o.flags[0].removeprefix(f"--{section.name}."), o.value, o.text] for o in section.options]
        stored = {"text": section.text, "options": options}
        name = kind = type(_find_part(a, place)).__name__
        number = 1
        while parts.setdefault(name, stored) != stored:  # a switch that is on has another flag than one that is off
            number += 1
            name = f"{kind} {number}"
        row[place] = [name, *(o.default for o in section.options)]
    return row


def _find_part(a: Algorithm, place: str) -> Any:
    part: Any = a
    for name in place.replace("-", "_").split("."):
        part = dict(name_parts(part))[name] if isinstance(part, tuple) else getattr(part, name)
    return part


def _store_rows(rows: Iterable[TextRow]) -> list[list[Any]]:
    return [list(row) for row in rows]


def _choose(value: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value[name] for name in names}
