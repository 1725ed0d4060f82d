"""`policygrad algorithms` and `policygrad show`: list algorithms and parts, and explain each.

What they print of the package's own stands in `show.json`, which `scripts/make_docs.py` writes from `describe.py`: algorithms and
parts are code on torch, whose import takes seconds.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from itertools import zip_longest
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypedDict

import tyro

from policygrad.catalog import CATALOG, EQUATION
from policygrad.commands.json_output import print_json, prints
from policygrad.commands.parsing import parse_arguments
from policygrad.commands.styled import (
    HEAD,
    NAME,
    QUIET,
    StyledLine,
    TextRow,
    get_page_width,
    print_lines,
    wrap_rows,
    wrap_styled,
)
from policygrad.errors import ConfigError
from policygrad.utils.plugins import KINDS, find_plugin, list_plugin_names
from policygrad.utils.user_code import is_user_reference, relative_to_cwd

SHOWN_FILE = Path(__file__).with_name("show.json")
DEFINITION = "{definition}"
"""Stands in `SHOWN_FILE` for the file and line of a part's class."""

_TIED = "\u00a0"  # separator of the words of one part, which stay on one line if possible
Cells = dict[str, Sequence[str]]  # column -> parts in the cell


def format_matrix(width: int | None) -> list[StyledLine]:
    """Format the matrix in the most detailed form that fits, grouped by family.

    The forms are: one line per algorithm; without values that are defaults; one line per part; a few labelled lines per algorithm.

    Args:
        width: None = one line per algorithm of any length, for grep and spreadsheets.
    """
    matrix = load_shown()["matrix"]
    grouped, full, short = matrix["families"], matrix["full"], matrix["short"]
    if width is None:
        return _table(_joined(full), {})
    for rows in (_joined(full), _joined(short), short):
        lines = _table(rows, grouped)
        if max(sum(len(text) for text, _ in line) for line in lines) <= width:
            return lines
    # Lines such as `grpo  Ψ GroupMean GroupStd   r Token   w Clip …`, wrapped between cells, without empty cells.
    lead = max(map(len, full)) + 2 if width >= 72 else 4

    def tie(text: str) -> str:
        return text.replace(" ", _TIED) if len(text) <= width - lead else text

    labels = [column.split() for column in next(iter(short.values()))]
    legend = ", ".join(f"{symbol} {' '.join(name)}" for symbol, *name in labels if name)
    lines = [*wrap_styled((), legend, width, QUIET)]
    for family, members in grouped.items():
        lines += [(), *wrap_styled((), family, width, HEAD)]
        for name in members:
            # A cell longer than a line is broken between parts, and a part longer than a line between its settings.
            cells = [(column.split()[0], parts) for column, parts in short[name].items() if parts]
            text = "   ".join(
                tie(" ".join([tie(f"{symbol}{_TIED}{first}"), *map(tie, more)])) for symbol, (first, *more) in cells
            )
            head = name.ljust(max(lead, len(name) + 2))
            wrapped = textwrap.wrap(
                text,
                width,
                initial_indent=head,
                subsequent_indent=" " * lead,
                break_long_words=False,
                break_on_hyphens=False,
            )
            wrapped = [row.replace(_TIED, " ") for row in wrapped]
            lines.append(((head, NAME), (wrapped[0].removeprefix(head), "")))
            lines += [((row, ""),) for row in wrapped[1:]]
    return lines


def _joined(rows: dict[str, Cells]) -> dict[str, Cells]:
    """Put each cell on one line."""
    return {name: {k: (" ".join(v),) if v else () for k, v in row.items()} for name, row in rows.items()}


def _table(rows: dict[str, Cells], grouped: dict[str, list[str]]) -> list[StyledLine]:
    """Format aligned columns, with a family's name above its first row."""
    columns = ["", *next(iter(rows.values()))]
    table = {name: [(name,), *(parts or ("–",) for parts in row.values())] for name, row in rows.items()}
    widths = [
        max(len(text) for cell in [(column,), *cells] for text in cell)
        for column, *cells in zip(columns, *table.values(), strict=True)
    ]

    def format_row(cells: Iterable[str], style: str) -> StyledLine:
        first, *others = [cell.ljust(width) for cell, width in zip(cells, widths, strict=True)]
        return ((first, style or NAME), ("  " + "  ".join(others).rstrip(), style))

    lines: list[StyledLine] = [format_row(columns, HEAD)]
    heads = {names[0]: family for family, names in grouped.items()}
    for name, cells in table.items():
        if name in heads:
            lines += [(), ((heads[name], HEAD),)]
        lines += [format_row(texts, "") for texts in zip_longest(*cells, fillvalue="")]
    return lines


def _open_choice(metavar: str, default: str) -> Any:
    return tyro.conf.arg(metavar=metavar, help_behavior_hint=f"(default: {default})")


@dataclass(frozen=True)
class MatrixOptions:
    """List the named algorithms as a matrix, with one column per part of the equation."""

    json: bool = False
    """Print one JSON object, with every part's fields."""
    width: Annotated[int | None, _open_choice("COLUMNS", "the terminal's; in a pipe one line per algorithm")] = None
    """Maximum width in columns, such as 80."""

    def __post_init__(self) -> None:
        if self.width is not None and self.width < 40:
            raise ConfigError(f"--width must be at least 40, not {self.width}")


AlgorithmMatrix = Mapping[str, Mapping[str, Any]]
"""Name -> its parts, with their settings."""


@prints(AlgorithmMatrix)
def algorithms(args: list[str]) -> int:
    """Run `policygrad algorithms [--json]`."""
    options = parse_arguments(MatrixOptions, args, "algorithms")
    if options.json:
        rows = load_shown()["algorithms"]
        print_json({name: {**row["parts"], "departs": CATALOG[name].deviations} for name, row in rows.items()})
        return 0
    width = options.width or (shutil.get_terminal_size((80, 24)).columns if sys.stdout.isatty() else None)
    if width is None:
        print_lines(format_matrix(None))
    else:
        more = (("policygrad show NAME", NAME), (" explains one; cells omit defaults", QUIET))
        print_lines([((EQUATION, HEAD),), (), *format_matrix(width), (), more])
    return 0


@dataclass(frozen=True)
class ShowOptions:
    """Explain an algorithm (equation, parts, defaults with sources, what it fixes, how it fails), a part such as Clip (settings,
    equation, docstring, location), a reward such as math, a benchmark, or a metric such as kl. Without a name, list everything."""

    name: Annotated[tyro.conf.Positional[str | None], _open_choice("NAME", "lists all")] = None
    """An algorithm, a part, a reward, a benchmark, a metric, or your own part or algorithm as mine.py:NAME or mine:NAME."""
    json: bool = False
    """Print one JSON object."""


class ShowList(TypedDict):
    """Without a name."""

    kind: Literal["list"]
    algorithms: Mapping[str, list[str]]
    """Family -> names."""
    parts: Mapping[str, list[str]]
    """Field of an algorithm -> names."""
    rewards: list[str]
    """Names of built-in rewards; one that needs something after a colon ends with it."""
    plugins: Mapping[str, list[str]]
    """Kind (algorithm, engine, environment, tracker) -> names that other installed packages add."""


class ShowAlgorithm(TypedDict):
    """An algorithm."""

    kind: Literal["algorithm"]
    name: str
    equation: Mapping[str, str]
    """Symbol -> formula."""
    parts: Mapping[str, Any]
    """Field -> the part and its settings."""
    info: Mapping[str, Any] | None
    """Title, source, what it addresses, failure modes; null for your own."""


class ShowPart(TypedDict):
    """A part."""

    kind: Literal["part"]
    name: str
    places: list[str]
    """Fields of an algorithm that it fits."""
    text: str
    settings: Mapping[str, str]
    """Setting -> its description."""
    used_by: list[str]


class ShowMetric(TypedDict):
    """A metric."""

    kind: Literal["metric"]
    name: str
    unit: str
    text: str
    interpretation: str


class ShowReward(TypedDict):
    """A reward of policygrad's own that has no benchmark's name."""

    kind: Literal["reward"]
    name: str
    text: str
    options: str
    """What may follow its name and a colon; empty = nothing."""
    needs_options: bool


class ShowBenchmark(TypedDict):
    """A known benchmark: its data, prompt, sampling and graders, each with its source."""

    kind: Literal["benchmark"]
    name: str
    title: str
    repository: str
    revision: str
    sources: Mapping[str, str]
    """Choice -> where it is written."""


@prints(ShowList, ShowAlgorithm, ShowPart, ShowReward, ShowMetric, ShowBenchmark)
def show(args: list[str]) -> int:
    """Run `policygrad show [NAME] [--json]`."""
    options = parse_arguments(ShowOptions, args, "show")
    subject = _look_up(options.name) or _describe_custom(str(options.name))
    if options.json:
        print_json(subject.json)
    else:
        print_lines(wrap_rows(subject.rows, get_page_width()))
    return 0


class Subject(NamedTuple):
    """What `show` says of a name: as rows, and as the object of --json."""

    rows: Iterable[TextRow]
    json: dict[str, Any]


def _look_up(name: str | None) -> Subject | None:
    """Look up a name of the package's own, None = the list of all; None if there is no such name."""
    shown = load_shown()
    if name is None:
        return _with_plugins(_read_subject(shown["everything"]))
    if is_user_reference(name) and not name.endswith(":"):
        return None
    if (part := shown["parts"].get(name)) is not None:
        where = _find_class(part["file"], name)
        rows, json = _read_subject(part)
        return Subject([row._replace(text=where) if row.text == DEFINITION else row for row in rows], json)
    key = name.lower().replace("-", "_")
    if (row := shown["algorithms"].get(key)) is not None:
        facts = {"name": key, "equation": row["equation"], "parts": row["parts"], "info": asdict(CATALOG[key])}
        return Subject(_read_rows(row["rows"]), {"kind": "algorithm", **facts})
    from policygrad.trackers.glossary import find_metric_doc

    if (metric := find_metric_doc(name)) is not None:
        rows = [
            TextRow(((name, NAME), (f"  a metric: {metric.unit}", QUIET))),
            TextRow(()),
            TextRow((("Is     ", HEAD),), metric.text),
        ]
        rows += [TextRow((("Moves  ", HEAD),), metric.interpretation)] if metric.interpretation else []
        return Subject(rows, {"kind": "metric", **asdict(metric), "name": name})
    reward, benchmark = shown["rewards"].get(name.rstrip(":")), shown["benchmarks"].get(name)
    if benchmark is not None and reward is not None:  # gsm8k, ifeval: the reward grades the benchmark
        rows, json = _read_subject(benchmark)
        return Subject([*rows, TextRow(()), *_read_subject(reward).rows], json)
    found = benchmark or reward
    return None if found is None else _read_subject(found)


def _with_plugins(everything: Subject) -> Subject:
    """Return the list with what other packages add, which differs from machine to machine."""
    names = {kind: list_plugin_names(kind) for kind in KINDS}
    rows = [*everything.rows]
    if any(names.values()):
        rows += [TextRow(()), TextRow((("Of other packages", HEAD), ("  policygrad doctor", QUIET)))]
        rows += [TextRow(((f"  {kind}  ", ""),), ", ".join(given), NAME) for kind, given in names.items() if given]
    return Subject(rows, everything.json | {"plugins": names})


def _describe_custom(name: str) -> Subject:
    """Describe a user's own part or algorithm, or another package's algorithm. Raises ConfigError for any other name."""
    from policygrad.commands.describe import describe_subject, resolve_subject, subject_to_dict

    if (plugin := find_plugin("algorithm", name)) is not None:
        name = plugin.target
    subject = resolve_subject(name)
    return Subject(describe_subject(subject, name), subject_to_dict(subject))


@cache
def load_shown() -> dict[str, Any]:
    """Return the contents of `SHOWN_FILE`; `scripts/pages/commands.py` says what it holds."""
    shown: dict[str, Any] = json.loads(SHOWN_FILE.read_text(encoding="utf-8"))
    return shown


def _read_subject(entry: dict[str, Any]) -> Subject:
    return Subject(_read_rows(entry["rows"]), entry["json"])


def _read_rows(rows: list[Any]) -> list[TextRow]:
    return [TextRow(tuple((piece, style) for piece, style in lead), *text) for lead, *text in rows]


def _find_class(file: str, name: str) -> str:
    """Return the place of a class, like `find_definition`, without importing its module."""
    path = Path(__file__).parents[1] / file
    lines = path.read_text(encoding="utf-8").splitlines()
    number = next(i for i, line in enumerate(lines, 1) if re.match(rf"class {name}\b", line))
    return f"{relative_to_cwd(path)}:{number}"
