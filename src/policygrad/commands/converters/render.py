"""Writes a conversion as a `run.toml`, with where each line comes from, and checks it by building the run."""

from __future__ import annotations

import json
import re
import textwrap
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from policygrad.commands.converters.base import CASCADES, Conversion, Left, Line
from policygrad.errors import ConfigError

if TYPE_CHECKING:
    from policygrad.training.config.run import Run

WIDTH = 120  # columns of a line with its comment
_FIRST = (
    "model",
    "tokenizer",
    "task",
    "eval_data",
    "reward",
    "environment",
    "steps",
    "prompts_per_step",
    "samples_per_prompt",
    "lr",
)
_LOUD = ("model", "task", "eval_data", "reward")
"""Keys that are written with a variable that nothing sets, so that the run ends with an error instead of beginning without them."""
_TABLES = ("sampling", "sampler", "learner", "optimizer", "evaluation", "checkpoint")


def format_conversion(done: Conversion, origin: str) -> str:
    """Return the file's text. origin: what was converted, for its first line."""
    lines, left = _merge(done)
    head = (
        f"From {origin}, a configuration of {done.library}. A comment beside a line says what it is made of. "
        "Start it with policygrad train --config FILE; --dry-run shows all that it sets."
    )
    out = [*_comment(head, "## ")]
    if done.needs:
        out += ["##", "## What only you know:"]
        for need in done.needs:
            out += _comment(need.text, "## - ")
    tables = dict.fromkeys(("", *(_find_table(line.key) for line in lines)))
    for table in sorted(tables, key=lambda name: ["", *_TABLES, name].index(name)):
        if table == "algorithm":
            continue
        out += ["", *([f"[{table}]"] if table else [])]
        entries = [line for line in lines if _find_table(line.key) == table]
        entries.sort(key=lambda line: _FIRST.index(line.key) if line.key in _FIRST else len(_FIRST))
        for line in entries:
            out += _write_line(done, line, line.key.rpartition(".")[2], line.value)
        out += _write_open(done, lines) if not table else []
    out += _write_algorithm(done, [line for line in lines if line.key.startswith("algorithm.")])
    out += _write_left(done, left)
    return "\n".join(out) + "\n"


def build_run(text: str, done: Conversion) -> Run:
    """Return the run that a converted file describes. Raises ConfigError, with the option that a wrong value comes from."""
    from policygrad.training.config.run import Run
    from policygrad.training.config.serialization import from_dict

    try:
        run: Run = from_dict(tomllib.loads(text), Run(), f"what {done.library}'s options become")
        return run
    except ConfigError as error:
        lines, _ = _merge(done)
        known = [(line, name) for line in lines for name in line.sources if name in done.options.given]
        culprits = [done.options.given[name].place for line, name in known if _is_about(str(error), line.key)]
        hint = f" (from {'; '.join(dict.fromkeys(culprits))})" if culprits else ""
        raise ConfigError(f"{error}{hint}") from error


def _is_about(message: str, key: str) -> bool:
    """Return whether an error is about a key, or the setting of a part that it names."""
    names = {key, re.sub(r"^(algorithm\.\w+)\.[A-Z]\w+\.", r"\1.", key)}
    return any(re.search(rf"(?<![\w.]){re.escape(name)}(?![\w.])", message) for name in names)


def _merge(done: Conversion) -> tuple[list[Line], list[Left]]:
    """Return a line for each key, the first one, and what is left out with the others."""
    lines: dict[str, Line] = {}
    left = list(done.left)
    for line in done.lines:
        if (first := lines.get(line.key)) is None:
            lines[line.key] = line
        elif first.value == line.value:
            lines[line.key] = first._replace(sources=tuple(dict.fromkeys((*first.sources, *line.sources))))
        else:
            left += [Left(name, f"{line.key} is made of {', '.join(first.sources)}") for name in line.sources]
    return list(lines.values()), left


def _write_open(done: Conversion, lines: Sequence[Line]) -> Iterator[str]:
    """Yield a comment for each of the first keys that has no line, and that only the user knows."""
    keys = {line.key for line in lines}
    for key in _FIRST:
        if key not in keys and any(re.match(rf"{key}\b", need.text) for need in done.needs):
            yield f"# {key} =  # to complete, as said above"


def _find_table(key: str) -> str:
    table, dot, _ = key.partition(".")
    return table if dot else ""


def _write_line(done: Conversion, line: Line, key: str, value: Any) -> Iterator[str]:
    text = f"{key} = {format_value(value)}"
    if "$" in text and key not in _LOUD:
        text = f"# {text}"
    comment = _drop_controls(" – ".join(part for part in (done.cite(line.sources), line.note) if part))
    if not comment:
        yield text
    elif len(text) + len(comment) + 4 <= WIDTH:
        yield f"{text}  # {comment}"
    else:
        yield from _comment(comment, "# ")
        yield text


def _write_algorithm(done: Conversion, lines: Sequence[Line]) -> Iterator[str]:
    yield from ("", "[algorithm]")
    fields = dict.fromkeys(line.key.split(".")[1] for line in lines)
    tables = []  # fields that need a table of their own
    for field in fields:
        own = [line for line in lines if line.key == f"algorithm.{field}"]
        nested = [line for line in lines if line.key.startswith(f"algorithm.{field}.")]
        if nested:
            tables.append(field)
        else:
            yield from _write_line(done, own[0], field, own[0].value)
    for field in tables:
        nested = [line for line in lines if line.key.startswith(f"algorithm.{field}.")]
        if field not in CASCADES:
            yield from ("", f"[algorithm.{field}]")
            for line in lines:
                if line.key == f"algorithm.{field}":
                    yield from _write_line(done, line, "part", line.value)
        part = ""
        for line in nested:
            _, _, *path = line.key.split(".")
            if field in CASCADES and path[0] != part:
                part = path[0]
                first = next((x for x in nested if x.key == f"algorithm.{field}.{part}"), line)
                yield from ("", f"[[algorithm.{field}]]")
                name = part.partition("#")[0]  # the second of a kind is MismatchMask#2
                yield from _write_line(
                    done, first._replace(note=first.note if first is not line else line.note), "part", name
                )
            if len(path) > 1 or field not in CASCADES:
                yield from _write_line(done, line, path[-1], line.value)


def _write_left(done: Conversion, left: Sequence[Left]) -> Iterator[str]:
    reasons: dict[str, list[str]] = {}
    for item in left:
        if item.name in done.options.given:
            reasons.setdefault(item.reason, []).append(done.options.given[item.name].text)
    if reasons:
        yield from ("", f"## Left out of {done.library}'s options:")
        for reason, names in reasons.items():
            yield from _comment(f"{', '.join(dict.fromkeys(names))}: {reason}", "## - ")
    if done.unknown:
        yield from ("", "## Unknown, and left out:")
        yield from _comment(", ".join(done.options.given[name].text for name in done.unknown), "## - ")


def format_value(value: Any) -> str:
    """Return a value as TOML has it."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(format_value, value))}]"
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f") if isinstance(value, str) else str(value)


def _drop_controls(text: str) -> str:
    """Return a text for a comment, which holds no end of a line and no control character."""
    return re.sub(r"[\x00-\x1f\x7f]+", " ", text)


def _comment(text: str, start: str) -> Iterable[str]:
    indent = "#" * start.count("#") + " " * (len(start) - start.count("#"))
    return textwrap.wrap(
        _drop_controls(text),
        WIDTH,
        initial_indent=start,
        subsequent_indent=indent,
        break_on_hyphens=False,
        break_long_words=False,
    )
