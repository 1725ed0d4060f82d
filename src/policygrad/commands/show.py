"""`policygrad algorithms` and `policygrad show`: list algorithms and parts, and explain each."""

from __future__ import annotations

import inspect
import re
import shutil
import sys
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import MISSING, asdict, dataclass, fields, is_dataclass
from itertools import zip_longest
from typing import Annotated, Any

import tyro

import policygrad
from policygrad.algorithms import ALGORITHMS, get_algorithm
from policygrad.catalog import CATALOG
from policygrad.commands.json_output import print_json
from policygrad.commands.options import parse_arguments
from policygrad.commands.render import (
    EQUATION,
    EQUATION_COLUMNS,
    HEAD,
    NAME,
    QUIET,
    StyledLine,
    build_matrix_row,
    describe_algorithm,
    format_part,
    get_page_width,
    print_lines,
    read_field_docs,
    shorten_number,
    summarise_docstring,
    wrap_styled,
)
from policygrad.core.algorithm import Algorithm, append_link
from policygrad.core.base import Advantage, Part
from policygrad.core.gates import Clip
from policygrad.core.ratios import Token
from policygrad.core.validation import ROLES, frozen_problem
from policygrad.core.vine import Vine
from policygrad.errors import ConfigError
from policygrad.tasks.benchmarks import Benchmark, load_benchmarks
from policygrad.trackers.glossary import MetricDoc, find_metric_doc
from policygrad.training.config.optional_arg import optional_arg
from policygrad.training.config.serialization import (
    algorithm_to_dict,
    list_parts,
    load_algorithm,
    load_part_class,
    suggest_name,
)
from policygrad.utils.user_code import find_assignment, find_definition, import_path, is_user_reference, load_object

FAMILIES = (
    "one sample at a time",
    "values of every token: a critic, or sampled",
    "samples of one prompt compared, on-policy",
    "samples of one prompt compared, a ratio per token, clipped",
    "samples of one prompt compared, a ratio per token, another gate",
    "samples of one prompt compared, a ratio per completion",
)


def classify_family(a: Algorithm) -> str:
    """Return the family of an algorithm, from its parts: where it takes credit from and how it weighs old samples."""
    single, values, group, clipped, gated, completion = FAMILIES
    if a.critic is not None or any(link.samples_values or isinstance(link, Vine) for link in a.advantage):
        return values
    if not any(link.uses_group_statistics for link in a.advantage):
        return single
    if a.ratio is None:
        return group
    if not isinstance(a.ratio, Token):
        return completion
    return clipped if isinstance(a.gate, Clip) else gated


def group_by_family() -> dict[str, list[str]]:
    """Return the names of the matrix by family, without empty families."""
    result: dict[str, list[str]] = {name: [] for name in FAMILIES}
    for name, a in ALGORITHMS.items():
        result[classify_family(a)].append(name)
    return {name: members for name, members in result.items() if members}


_TIED = "\u00a0"  # separator of the words of one part, which stay on one line if possible
Cells = dict[str, tuple[str, ...]]  # column -> parts in the cell


def format_matrix(width: int | None) -> list[StyledLine]:
    """Format the matrix in the most detailed form that fits, grouped by family.

    The forms are: one line per algorithm; without values that are defaults; one line per part; a few labelled lines per algorithm.

    Args:
        width: None = one line per algorithm of any length, for grep and spreadsheets.
    """
    grouped = group_by_family()
    names = [name for members in grouped.values() for name in members]
    full = {name: build_matrix_row(ALGORITHMS[name]) for name in names}
    short = {name: build_matrix_row(ALGORITHMS[name], changed=True) for name in names}
    if width is None:
        return _table(_joined(full), {})
    for rows in (_joined(full), _joined(short), short):
        lines = _table(rows, grouped)
        if max(sum(len(text) for text, _ in line) for line in lines) <= width:
            return lines
    # Lines such as `grpo  Ψ GroupMean GroupStd   r Token   w Clip …`, wrapped between cells, without empty cells.
    lead = max(map(len, names)) + 2 if width >= 72 else 4

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


_SYMBOLS = {"ratio": "r", "gate": "w", "corrections": "ρ", "aggregation": "c", "terms": "k", "critic": "V"}


def describe_part(part: Any, width: int = 80) -> list[StyledLine]:
    """Describe a part or its class: settings, equation, docstring, location of the code, algorithms that use it."""
    kind: type = part if isinstance(part, type) else type(part)
    built = part
    if isinstance(part, type):  # with its defaults, unless a setting has none
        needed = any(f.init and f.default is MISSING and f.default_factory is MISSING for f in fields(kind))
        built = None if needed else kind()
    lines: list[StyledLine] = [((kind.__name__ if built is None else format_part(built, names=True), NAME),)]
    # Its role, the command-line option and the location of the code.
    is_named = kind.__name__ in list_parts() and getattr(policygrad, kind.__name__) is kind
    option = kind.__name__ if is_named else import_path(kind)
    for place, role in ROLES.items():
        if issubclass(kind, role.bases):
            lines += wrap_styled((("  ", ""),), f"{role.noun}: --algorithm.{place} {option}", width)
    if where := find_definition(kind):
        lines += wrap_styled((("  ", ""),), where, width, QUIET)
    lines.append(())
    if fields(kind):
        lines += [(("Settings", HEAD),), *_settings(kind, built, width), ()]
    if built is not None and isinstance(built, Part):
        place = next((place for place, role in ROLES.items() if isinstance(built, role.bases)), "")
        if isinstance(built, Advantage):
            lead, formula = "  Ψ ← ", append_link("R" if built.starts_chain else "Ψ", built)
        else:
            formula, symbol = built.formula, _SYMBOLS.get(place, "")
            lead = "  " if not symbol or re.match(rf"{symbol}(_\w+)? = ", formula) else f"  {symbol} = "
        lines += [(("Equation", HEAD),), *wrap_styled(((lead, ""),), formula, width), ()]
    for paragraph in re.split(r"\n\n+", inspect.getdoc(kind) or ""):
        rows = paragraph.split("\n")
        if any(re.search(r"\S {2,}\S", row) or row.startswith(" ") for row in rows):  # keep tables as they are
            lines += [((f"  {row}", ""),) for row in rows]
        else:
            lines += wrap_styled((("  ", ""),), " ".join(rows), width)
        lines.append(())
    users = [n for n, a in ALGORITHMS.items() if any(type(p) is kind for p in a.parts())]
    return [*lines, *wrap_styled((("Used by  ", HEAD),), ", ".join(users) or "none of the named algorithms", width)]


def list_everything(width: int = 80) -> list[StyledLine]:
    """List every algorithm by family, and every part by its field with a summary."""
    lines: list[StyledLine] = [(("Algorithms", HEAD), ("  policygrad show NAME", QUIET))]
    for family, names in group_by_family().items():
        lines += [((f"  {family}", ""),), *wrap_styled((("    ", ""),), ", ".join(names), width, NAME)]
    lines += [(), (("Parts", HEAD), ("  policygrad show PART, policygrad train … --algorithm.FIELD PART", QUIET))]
    longest = max(map(len, list_parts())) + 2
    for place, role in ROLES.items():
        symbol = EQUATION_COLUMNS.get(place, ("", place))[0]
        lines += [((f"  {place}", HEAD), (f"  {role.noun}{', ' * bool(symbol)}{symbol}", QUIET))]
        for name in list_parts(place):
            text = summarise_docstring(getattr(policygrad, name))[0]
            sentence = re.split(r"(?<=[\w\)\]’”])[.;](?=\s|$)", text)[0].strip().rstrip(".")
            lines += wrap_styled(((f"    {name:<{longest}}", NAME),), sentence, width)
    hint = "user-defined parts: policygrad show mine.py:PART, or mine:PART"
    return [*lines, (), ((hint, QUIET),)]


def _settings(kind: type, built: Any, width: int) -> Iterator[StyledLine]:
    docs, named = read_field_docs(kind), list[tuple[str, str]]()
    for f in fields(kind):
        signature = f.type if isinstance(f.type, str) else getattr(f.type, "__name__", str(f.type))
        if built is not None or f.default is not MISSING:
            value = f.default if built is None else getattr(built, f.name)
            signature += f" = {value!r}" if isinstance(value, str) else f" = {shorten_number(value)}"
        named.append((f.name, signature))
    name, size = (max(len(pair[i]) for pair in named) for i in (0, 1))
    for setting, signature in named:
        lead: StyledLine = ((f"  {setting:<{name}}  ", NAME), (f"{signature:<{size}}  ", ""))
        yield from wrap_styled(lead, docs.get(setting, ""), max(width, sum(len(t) for t, _ in lead) + 24))


@dataclass(frozen=True)
class MatrixOptions:
    """List the named algorithms as a matrix, with one column per part of the equation."""

    json: bool = False
    """Print one JSON object, with every part's fields (docs/json.md)."""
    width: Annotated[int | None, optional_arg("COLUMNS", "the terminal's; in a pipe one line per algorithm")] = None
    """Maximum width in columns, such as 80."""

    def __post_init__(self) -> None:
        if self.width is not None and self.width < 40:
            raise ConfigError(f"--width must be at least 40, not {self.width}")


def algorithms(args: list[str]) -> int:
    """Run `policygrad algorithms [--json]`."""
    options = parse_arguments(MatrixOptions, args, "algorithms")
    if options.json:
        rows = {
            name: {**algorithm_to_dict(a), "departs": CATALOG[name].deviations if name in CATALOG else ""}
            for name, a in ALGORITHMS.items()
        }
        print_json(rows)
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
    equation, docstring, location), or a metric such as kl. Without a name, list everything."""

    name: Annotated[tyro.conf.Positional[str | None], optional_arg("NAME", "lists all")] = None
    """An algorithm, a part, a metric, or your own part or algorithm as mine.py:NAME or mine:NAME."""
    json: bool = False
    """Print one JSON object (docs/json.md)."""


def show(args: list[str]) -> int:
    """Run `policygrad show [NAME] [--json]`."""
    options = parse_arguments(ShowOptions, args, "show")
    subject = None if options.name is None else resolve_subject(options.name)
    if options.json:
        print_json(subject_to_dict(subject, options.name))
    else:
        print_lines(describe_subject(subject, options.name, get_page_width()))
    return 0


def resolve_subject(name: str) -> Any:
    """Return the algorithm, the part or its class, or the metric of this name. Raises ConfigError without one."""
    if is_user_reference(name):
        custom = load_object(name, f"show {name}", (Algorithm, type))
        if isinstance(custom, Algorithm):
            return load_algorithm(name)
        if not (isinstance(custom, type) or is_dataclass(custom)):
            raise ConfigError(
                f"show {name}: {type(custom).__name__} is neither an algorithm nor a part. An algorithm is a "
                "policygrad.Algorithm(…); a part is a class with @dataclass(frozen=True)."
            )
        if problem := frozen_problem(custom if isinstance(custom, type) else type(custom)):
            raise ConfigError(f"show {name}: {problem}")
        return custom
    if name in list_parts():
        return load_part_class(name, "show", "part")
    if name.lower().replace("-", "_") in ALGORITHMS:
        return get_algorithm(name)
    if (metric := find_metric_doc(name)) is not None:
        return metric
    if name in load_benchmarks():
        return load_benchmarks()[name]
    hint = suggest_name(name, [*ALGORITHMS, *list_parts()])
    hint = hint if hint.startswith("did") else "`policygrad show` lists them; for your own write mine.py:NAME"
    raise ConfigError(f"there is no algorithm, part, metric or benchmark {name!r}: {hint}")


def describe_subject(subject: Any, name: str | None, width: int) -> list[StyledLine]:
    """Describe what `resolve_subject` returned; None = list everything."""
    if name is None:
        return list_everything(width)
    if isinstance(subject, Algorithm):
        lines = describe_algorithm(subject, width)
        if is_user_reference(name):
            lines += [(), (("Code  ", HEAD), (find_assignment(name), QUIET))]
        return lines
    if isinstance(subject, MetricDoc):
        lines = [((name, NAME), (f"  a metric: {subject.unit}", QUIET)), ()]
        lines += wrap_styled((("Is     ", HEAD),), subject.text, width)
        lines += wrap_styled((("Moves  ", HEAD),), subject.interpretation, width) if subject.interpretation else ()
        return lines
    if isinstance(subject, Benchmark):
        return describe_benchmark(subject, width)
    return describe_part(subject, width)


def subject_to_dict(subject: Any, name: str | None) -> dict[str, Any]:
    """Return the object that `show --json` prints."""
    if name is None:
        parts = {place: list(list_parts(place)) for place in ROLES}
        return {"kind": "list", "algorithms": group_by_family(), "parts": parts}
    if isinstance(subject, Algorithm):
        info = CATALOG.get(subject.name)
        return {
            "kind": "algorithm",
            "name": subject.name,
            "equation": dict(subject.equation()),
            "parts": algorithm_to_dict(subject),
            "info": None if info is None else asdict(info),
        }
    if isinstance(subject, MetricDoc):
        return {"kind": "metric", "name": name, **{k: v for k, v in asdict(subject).items() if k != "name"}}
    if isinstance(subject, Benchmark):
        return {"kind": "benchmark", **asdict(subject)}
    kind = subject if isinstance(subject, type) else type(subject)
    docs = read_field_docs(kind)
    return {
        "kind": "part",
        "name": kind.__name__,
        "places": [place for place, role in ROLES.items() if issubclass(kind, role.bases)],
        "text": inspect.getdoc(kind) or "",
        "settings": {f.name: docs.get(f.name, "") for f in fields(kind)},
        "used_by": [n for n, a in ALGORITHMS.items() if any(type(p) is kind for p in a.parts())],
    }


def describe_benchmark(benchmark: Benchmark, width: int) -> list[StyledLine]:
    """Describe a known benchmark: its data, settings, prompt, and where each choice comes from."""
    s = benchmark.sampling
    data = f"{benchmark.repository}{f' ({benchmark.config})' * bool(benchmark.config)}, split {benchmark.split}, "
    facts = {
        "Is": f"{benchmark.title}, {benchmark.problems:,} problems",
        "Data": f"{data}revision {benchmark.revision}; {', '.join(benchmark.columns)}",
        "Licence": benchmark.licence,
        "Sampling": f"{s.samples} per problem, temperature {s.temperature:g}, top-p {s.top_p:g}, up to {s.max_tokens} tokens",
        "Grader": ", ".join([benchmark.reward, *(metric.reward for metric in benchmark.metrics)]),
        "Differs": benchmark.differs,
    }
    lines: list[StyledLine] = [((benchmark.name, NAME), ("  a benchmark", QUIET)), ()]
    for label, text in facts.items():
        lines += wrap_styled(((f"{label:<10}", HEAD),), text, width)
    lines += [
        (),
        (("Prompt", HEAD),),
        *(((f"  {line}", ""),) for line in benchmark.prompt.split("\n")),
        (),
        (("Sources", HEAD),),
    ]
    for name, source in benchmark.sources.items():
        lines += wrap_styled(((f"  {name:<9}", QUIET),), source, width)
    return lines
