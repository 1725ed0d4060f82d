"""Algorithms and their parts as styled lines of text, printed plain into a pipe and in colour on a terminal."""

from __future__ import annotations

import inspect
import shutil
import sys
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import MISSING, fields, is_dataclass, replace
from typing import Any

from policygrad.algorithms import ALGORITHMS
from policygrad.catalog import CATALOG, AlgorithmInfo
from policygrad.core.algorithm import Algorithm
from policygrad.training.config.run_name import RunName, name_run
from policygrad.utils.user_code import find_definition


def summarise_docstring(part: Any) -> tuple[str, str]:
    """Return (summary, source) of a part: the first paragraph of its docstring, and the text after `Source:` in it."""
    doc = inspect.getdoc(part if isinstance(part, type) else type(part)) or ""
    paragraphs = [" ".join(p.split()) for p in doc.split("\n\n")]
    found = next((p for p in paragraphs if "Source:" in p), "")
    source = found.partition("Source:")[2].strip().rstrip(".")
    return paragraphs[0].partition("Source:")[0].strip(), source


def find_source(part: Any) -> str:
    """Return the origin of a part: the source in its docstring, or the file of a user-defined part."""
    kind = part if isinstance(part, type) else type(part)
    source = summarise_docstring(kind)[1]
    if source or kind.__module__.startswith("policygrad."):
        return source or "this library"
    return f"user-defined, {find_definition(kind) or kind.__module__}"


StyledLine = tuple[tuple[str, str], ...]
"""Pieces (text, rich style) of one line."""
HEAD, NAME, FORMULA, QUIET = "bold", "bold cyan", "green", "dim"
EQUATION_COLUMNS = {  # field of an algorithm -> (symbol in the equation, label)
    "filters": ("", "filters"),
    "shaping": ("", "shaping"),
    "advantage": ("Ψ", "advantage"),
    "ratio": ("r", "ratio"),
    "gate": ("w", "gate"),
    "corrections": ("ρ", "corrections"),
    "aggregation": ("c", "average"),
    "critic": ("V", "critic"),
    "reward_model": ("", "reward r_φ"),
    "terms": ("k", "terms"),
    "update_rule": ("", "update_rule"),
    "reference": ("", "reference"),
}
NO_DEVIATIONS = "nowhere that we know of"
"""Text for an algorithm without known deviations from its paper."""
EQUATION = "∇J = Σ ( c · w · Ψ + k ) ∇log π_θ"


def print_lines(lines: Sequence[StyledLine]) -> None:
    """Print the lines, styled on a terminal."""
    if not sys.stdout.isatty():
        print("\n".join("".join(text for text, _ in line).rstrip() for line in lines))
        return
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False, soft_wrap=True)
    for line in lines:
        console.print(Text.assemble(*line))


def wrap_paragraphs(*texts: str) -> str:
    """Wrap a description for tyro, which keeps lines that begin with a space and wraps no others."""
    lines = [line for text in texts for line in textwrap.wrap(text, get_page_width() - 1, break_on_hyphens=False)]
    return "\n".join(f" {line}" for line in lines)


def describe_command(options: type) -> str:
    """Return a command's description, the docstring of its options."""
    return wrap_paragraphs(" ".join((options.__doc__ or "").split()))


def get_page_width() -> int:
    """Return the columns for running text: the terminal's, at most 100; 80 in a pipe."""
    return max(40, min(100, shutil.get_terminal_size((80, 24)).columns))


def shorten_number(value: Any) -> str:
    """Format a number in the shorter of two notations: 0.28, 3e-4, 5."""
    if not isinstance(value, float):
        return str(value)
    mantissa, _, exponent = f"{value:e}".partition("e")
    return min(f"{value:g}", f"{float(mantissa):g}e{int(exponent or 0)}", key=len)


def list_settings(part: Any) -> list[tuple[str, Any]]:
    """Return (field, value) of a part's settings, without those that are None."""
    values = [(f.name, getattr(part, f.name)) for f in fields(part)]
    return [(name, value) for name, value in values if value is not None]


def format_part(part: Any, *, names: bool = False, changed: bool = False) -> str:
    """Format a part as `Clip(0.2, 0.28)`.

    Args:
        names: write `Clip(low=0.2, high=0.28)`.
        changed: omit the values if all of them are defaults.
    """
    kind = type(part)
    if changed and list_settings(part) == list_settings(replace(part, **_defaults(kind))):
        return kind.__name__
    shown, usual = list_settings(part), _defaults(kind)
    if not names and len(shown) > 3:  # too many to read by position: name those that are not defaults
        names, shown = True, [(name, v) for name, v in shown if v != usual.get(name)]
    written = [
        (f"{name}=" if names else "") + (format_part(v, names=names) if is_dataclass(v) else shorten_number(v))
        for name, v in shown
    ]
    return f"{kind.__name__}({', '.join(written)})" if written else kind.__name__


def format_changed_part(part: Any) -> str:
    """Format a part with the names and values of the settings that are not defaults, as `Reference(refresh_every=100)`."""
    usual = _defaults(type(part))
    values = ", ".join(
        f"{name}={shorten_number(value)}" for name, value in list_settings(part) if value != usual.get(name)
    )
    return f"{type(part).__name__}({values})" if values else type(part).__name__


def _defaults(kind: type) -> dict[str, Any]:
    return {f.name: f.default for f in fields(kind) if f.default is not MISSING}


def wrap_styled(lead: StyledLine, text: str, width: int, style: str = "") -> Iterator[StyledLine]:
    """Wrap `text` after `lead`, with a hanging indent."""
    indent = sum(len(piece) for piece, _ in lead)
    rows = textwrap.wrap(text, max(24, width - indent), break_long_words=False, break_on_hyphens=False) or [""]
    yield (*lead, (rows[0], style))
    for row in rows[1:]:
        yield ((" " * indent, ""), (row, style))


def describe_algorithm(a: Algorithm, width: int = 80, budget: int | None = None) -> list[StyledLine]:
    """Describe an algorithm: equation, parts with sources, differences from its parent, what it fixes and how it fails.

    A user-defined composition is compared with the named algorithm that it was made from. budget: see `name_run`.
    """
    run_name = name_run(a, budget)
    about = CATALOG.get(a.name)
    lines = _title(run_name, about, width)
    lines += [(), (("  ", ""), (EQUATION if a.terms else EQUATION.replace(" + k", ""), HEAD)), ()]
    equation = a.equation()
    size = max(map(len, equation))
    for symbol, text in equation.items():
        head, equals, tail = text.partition(" = ")
        if equals and head.startswith(f"{symbol}_"):
            symbol, text = head, tail
        equals = " = " if len(symbol) <= 3 else "   "  # a symbol, or a word
        lines += wrap_styled(((f"  {symbol:>{size}}", FORMULA), (equals, "")), text, width)
    if a.name in CATALOG:
        lines += [(), ((f"{a.name} as published" if run_name.part_changes else "As published", HEAD),)]
        lines += [
            row for text in CATALOG[a.name].objective.split("\n") for row in wrap_styled((("  ", ""),), text, width)
        ]
        of = f" ({a.name})" if run_name.part_changes else ""
        lines += [(), *wrap_styled(((f"Departs{of}  ", HEAD),), CATALOG[a.name].deviations or NO_DEVIATIONS, width)]
    lines += [(), (("Parts", HEAD), (" and their settings" if run_name.is_changed else " and their defaults", QUIET))]
    lines += _parts(a, width)
    parent = a.name if run_name.is_changed else about.parent if about else None
    if parent:
        row = ALGORITHMS[parent] if budget is None or parent != a.name else ALGORITHMS[parent].with_max_tokens(budget)
        lines += [(), (("Differs from ", HEAD), (parent, NAME))]
        for column, (theirs, mine) in diff_algorithms(row, a).items():
            lines += wrap_styled(((f"  {column:<12}", ""),), f"{theirs} → {mine}", width)
    if about:
        of = f" ({a.name})" if run_name.part_changes else ""
        lines += [(), *wrap_styled(((f"Fixes{of}  ", HEAD),), about.addresses, width)]
        lines += [*wrap_styled(((f"Fails{of}  ", HEAD),), about.failure_modes, width)]
    return lines


def _title(run_name: RunName, about: AlgorithmInfo | None, width: int) -> list[StyledLine]:
    """Return name and source; for a composition those of the named algorithm, and each changed part with its source."""
    if run_name.part_changes:
        source = f" ({about.source})" if about else ""
        lines: list[StyledLine] = [((run_name.name, NAME),), *wrap_styled((("  ", ""),), run_name.base + source, width)]
    else:
        lines = [((run_name.name, NAME), (f"  {about.title}" if about else "", HEAD))]
        indent = " " * (len(run_name.name) + 2)
        lines += wrap_styled(((indent, ""),), about.source, width, QUIET) if about else []
    for swap in run_name.part_changes:
        label = EQUATION_COLUMNS.get(swap.field, ("", swap.field))[1]
        for part in swap.added:
            lines += wrap_styled(
                (("  with ", ""),), f"{label} = {format_part(part, names=True)} ({find_source(part)})", width
            )
        if removed := swap.removed[len(swap.added) :]:
            lines += wrap_styled(
                (("  without ", ""),), f"{label} {', '.join(type(p).__name__ for p in removed)}", width
            )
    for s in run_name.setting_changes:
        change = (
            f"{s.part}.{s.name}".lstrip(".")
            + f" = {shorten_number(s.new_value)} instead of {shorten_number(s.base_value)}"
        )
        lines += wrap_styled((("  with ", ""),), change, width)
    return lines


def _parts(a: Algorithm, width: int) -> Iterator[StyledLine]:
    before = ""
    for key, part in a.named_parts():
        name = key.partition(".")[0]
        if name == "reference" and "logp_ref" not in a.needs:
            continue
        label = "" if name == before else EQUATION_COLUMNS.get(name, ("", name))[1]
        before = name
        text, source = summarise_docstring(part)
        source = source if type(part).__module__.startswith("policygrad.") else find_source(part)
        yield from wrap_styled(((f"  {label:<12}", ""),), format_part(part, names=True), width, NAME)
        yield from wrap_styled(((" " * 14, ""),), text, width)
        if source:
            yield from wrap_styled(((" " * 14, ""),), source, width, QUIET)
    yield ((f"  {'samples':<12}", ""), (f"{a.samples_per_prompt}", NAME), (" completions per prompt (G)", ""))


def build_matrix_row(a: Algorithm, *, changed: bool = False) -> dict[str, tuple[str, ...]]:
    """Return one row of the matrix: the algorithm's parts by column, in the order of the equation."""
    row: dict[str, tuple[str, ...]] = {}
    for name in ("advantage", "ratio", "gate", "aggregation", "critic", "terms", "shaping", "filters"):
        value = getattr(a, name)
        parts = value if isinstance(value, tuple) else () if value is None else (value,)
        if name == "gate":
            parts += a.corrections  # they multiply w
        if name == "critic" and a.reward_model is not None:
            parts += (a.reward_model,)  # a second trained model, like V
        symbol, label = EQUATION_COLUMNS[name]
        row[f"{symbol} {label}".strip()] = tuple(format_part(p, changed=changed) for p in parts)
    return {**row, "also": list_other_changes(a)}


def list_other_changes(a: Algorithm) -> tuple[str, ...]:
    """Return the update rule, reference, group size and old policy where they differ from the defaults."""
    usual = Algorithm()
    changes = [format_changed_part(a.update_rule)] if a.update_rule != usual.update_rule else []
    if a.reference is not None and a.reference != usual.reference and "logp_ref" in a.needs:
        changes.append(format_changed_part(a.reference))
    changes += [f"G = {a.samples_per_prompt}"] if a.samples_per_prompt != usual.samples_per_prompt else []
    return (*changes, *(["π_old = μ"] if a.old_policy != usual.old_policy else []))


def diff_algorithms(parent: Algorithm, a: Algorithm) -> dict[str, tuple[str, str]]:
    """Return the fields in which two algorithms differ, as label -> (the parent's, the algorithm's)."""
    changed: dict[str, tuple[str, str]] = {}
    for name, (_, label) in EQUATION_COLUMNS.items():
        theirs, mine = _list_parts(parent, name), _list_parts(a, name)
        if [list_settings(p) for p in theirs] != [list_settings(p) for p in mine] or list(map(type, theirs)) != list(
            map(type, mine)
        ):
            changed[label] = _format_change(
                theirs, mine, names=name in ("update_rule", "critic", "reward_model", "reference")
            )
    if parent.samples_per_prompt != a.samples_per_prompt:
        changed["samples"] = (str(parent.samples_per_prompt), str(a.samples_per_prompt))
    return changed


def _list_parts(a: Algorithm, name: str) -> tuple[Any, ...]:
    """Return the parts of one field, without a reference that no part reads."""
    value = getattr(a, name)
    parts = value if isinstance(value, tuple) else (value,)
    return tuple(p for p in parts if p is not None and (name != "reference" or "logp_ref" in a.needs))


def _format_change(theirs: tuple[Any, ...], mine: tuple[Any, ...], *, names: bool) -> tuple[str, str]:
    """Format both sides; for one part with many settings, only those that differ."""
    if len(theirs) == len(mine) == 1 and type(theirs[0]) is type(mine[0]) and len(list_settings(mine[0])) > 1:
        old, new = dict(list_settings(theirs[0])), dict(list_settings(mine[0]))
        differ = [name for name in {**old, **new} if old.get(name) != new.get(name)]
        if len(differ) < len(new):
            sides = [", ".join(f"{n}={shorten_number(side.get(n))}" for n in differ) for side in (old, new)]
            return f"{type(mine[0]).__name__}({sides[0]})", f"{type(mine[0]).__name__}({sides[1]})"
    write = format_changed_part if names else format_part
    written = [" ".join(map(write, side)) or "–" for side in (theirs, mine)]
    return written[0], written[1]
