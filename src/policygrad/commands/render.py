"""Algorithms and their parts as rows of styled text."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import MISSING, fields, is_dataclass, replace
from typing import Any

from policygrad.algorithms import ALGORITHMS
from policygrad.catalog import CATALOG, EQUATION
from policygrad.commands.docstrings import summarise_docstring
from policygrad.commands.styled import FORMULA, HEAD, NAME, QUIET, TextRow
from policygrad.core.algorithm import Algorithm
from policygrad.training.config.run_name import name_run
from policygrad.utils.user_code import find_definition


def find_source(part: Any) -> str:
    """Return the origin of a part: the source in its docstring, or the file of a user-defined part."""
    kind = part if isinstance(part, type) else type(part)
    source = summarise_docstring(kind)[1]
    if source or kind.__module__.startswith("policygrad."):
        return source or "this library"
    return f"user-defined, {find_definition(kind) or kind.__module__}"


EQUATION_COLUMNS = {  # field of an algorithm -> (symbol in the equation, label)
    "filters": ("", "filters"),
    "shaping": ("", "shaping"),
    "advantage": ("Ψ", "advantage"),
    "ratio": ("r", "ratio"),
    "gate": ("w", "gate"),
    "corrections": ("ρ", "corrections"),
    "aggregation": ("c", "aggregation"),
    "critic": ("V", "critic"),
    "reward_model": ("", "reward r_φ"),
    "terms": ("k", "terms"),
    "update_rule": ("", "update_rule"),
    "reference": ("", "reference"),
}
NO_DEVIATIONS = "nowhere that we know of"  # text for an algorithm without known deviations from its paper


def shorten_number(value: Any) -> str:
    """Format a number in the shorter of two notations: 0.28, 3e-4, 5; of several texts their number."""
    if isinstance(value, tuple):
        return f"{len(value)} text{'s' * (len(value) != 1)}"
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
    name, settings = type(part).__name__, list_settings(part)
    if changed and settings == list_settings(replace(part, **_defaults(type(part)))):
        return name
    if not names and len(settings) > 3:  # too many to read by position
        return format_changed_part(part)
    written = [
        (f"{key}=" if names else "") + (format_part(v, names=names) if is_dataclass(v) else shorten_number(v))
        for key, v in settings
    ]
    return f"{name}({', '.join(written)})" if written else name


def format_changed_part(part: Any) -> str:
    """Format a part with the names and values of the settings that are not defaults, as `Reference(refresh_every=100)`."""
    usual = _defaults(type(part))
    values = ", ".join(
        f"{key}={format_part(v, names=True) if is_dataclass(v) else shorten_number(v)}"
        for key, v in list_settings(part)
        if v != usual.get(key)
    )
    return f"{type(part).__name__}({values})" if values else type(part).__name__


def _defaults(kind: type) -> dict[str, Any]:
    return {f.name: f.default for f in fields(kind) if f.default is not MISSING}


def describe_algorithm(a: Algorithm, budget: int | None = None) -> list[TextRow]:
    """Describe an algorithm: equation, parts with sources, differences from its parent, what it fixes and how it fails.

    A user-defined composition is compared with the named algorithm that it was made from. budget: see `name_run`.
    """
    run_name = name_run(a, budget)
    about = CATALOG.get(a.name)
    of = f" ({a.name})" if run_name.part_changes else ""
    # Name and source; for a composition those of the named algorithm, and each change with its source.
    if run_name.part_changes:
        source = f" ({about.source})" if about else ""
        rows = [TextRow(((run_name.name, NAME),)), TextRow((("  ", ""),), run_name.base + source)]
    else:
        rows = [TextRow(((run_name.name, NAME), (f"  {about.title}" if about else "", HEAD)))]
        indent = " " * (len(run_name.name) + 2)
        rows += [TextRow(((indent, ""),), about.source, QUIET)] if about else []
    for swap in run_name.part_changes:
        label = EQUATION_COLUMNS.get(swap.field, ("", swap.field))[1]
        for part in swap.added:
            change = f"{label} = {format_part(part, names=True)} ({find_source(part)})"
            rows.append(TextRow((("  with ", ""),), change))
        if removed := swap.removed[len(swap.added) :]:
            change = f"{label} {', '.join(type(p).__name__ for p in removed)}"
            rows.append(TextRow((("  without ", ""),), change))
    for s in run_name.setting_changes:
        change = f"{shorten_number(s.new_value)} instead of {shorten_number(s.base_value)}"
        rows.append(TextRow((("  with ", ""),), f"{s.part}.{s.name}".lstrip(".") + f" = {change}"))
    # The equation, as it is and as published.
    rows += [
        TextRow(()),
        TextRow((("  ", ""), (EQUATION if a.terms else EQUATION.replace(" + k", ""), HEAD))),
        TextRow(()),
    ]
    equation = a.equation()
    size = max(map(len, equation))
    for symbol, text in equation.items():
        head, equals, tail = text.partition(" = ")
        if equals and head.startswith(f"{symbol}_"):
            symbol, text = head, tail
        equals = " = " if len(symbol) <= 3 else "   "  # a symbol, or a word
        rows.append(TextRow(((f"  {symbol:>{size}}", FORMULA), (equals, "")), text))
    if about:
        rows += [TextRow(()), TextRow(((f"{a.name} as published" if run_name.part_changes else "As published", HEAD),))]
        rows += [TextRow((("  ", ""),), text) for text in about.objective.split("\n")]
        rows += [TextRow(()), TextRow(((f"Departs{of}  ", HEAD),), about.deviations or NO_DEVIATIONS)]
    suffix = " and their settings" if run_name.is_changed else " and their defaults"
    rows += [TextRow(()), TextRow((("Parts", HEAD), (suffix, QUIET))), *_describe_parts(a)]
    parent = a.name if run_name.is_changed else about.parent if about else None
    if parent:
        row = ALGORITHMS[parent] if budget is None or parent != a.name else ALGORITHMS[parent].with_max_tokens(budget)
        rows += [TextRow(()), TextRow((("Differs from ", HEAD), (parent, NAME)))]
        for column, (theirs, mine) in diff_algorithms(row, a).items():
            rows.append(TextRow(((f"  {column:<12}", ""),), f"{theirs} → {mine}"))
    if about:
        rows += [TextRow(()), TextRow(((f"Fixes{of}  ", HEAD),), about.addresses)]
        rows.append(TextRow(((f"Fails{of}  ", HEAD),), about.failure_modes))
    return rows


def _describe_parts(a: Algorithm) -> Iterator[TextRow]:
    before = ""
    for key, part in a.named_parts():
        name = key.partition(".")[0]
        if name == "reference" and "logp_ref" not in a.needs:
            continue
        label = "" if name == before else EQUATION_COLUMNS.get(name, ("", name))[1]
        before = name
        text, source = summarise_docstring(part)
        source = source if type(part).__module__.startswith("policygrad.") else find_source(part)
        yield TextRow(((f"  {label:<12}", ""),), format_part(part, names=True), NAME)
        yield TextRow(((" " * 14, ""),), text)
        if source:
            yield TextRow(((" " * 14, ""),), source, QUIET)
    yield TextRow(((f"  {'samples':<12}", ""), (f"{a.samples_per_prompt}", NAME), (" completions per prompt (G)", "")))


def build_matrix_row(a: Algorithm, *, changed: bool = False) -> dict[str, tuple[str, ...]]:
    """Return one row of the matrix: the algorithm's parts by column, in the order of the equation.

    The last column has the update rule, reference, group size and old policy where they differ from the defaults.
    """
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
    usual = Algorithm()
    also = [format_changed_part(a.update_rule)] if a.update_rule != usual.update_rule else []
    if a.reference is not None and a.reference != usual.reference and "logp_ref" in a.needs:
        also.append(format_changed_part(a.reference))
    also += [f"G = {a.samples_per_prompt}"] if a.samples_per_prompt != usual.samples_per_prompt else []
    also += ["π_old = μ"] if a.old_policy != usual.old_policy else []
    also += ["fp32 head"] if a.head != usual.head else []
    return {**row, "also": tuple(also)}


def diff_algorithms(parent: Algorithm, a: Algorithm) -> dict[str, tuple[str, str]]:
    """Return the fields in which two algorithms differ, as label -> (the parent's, the algorithm's)."""
    changed: dict[str, tuple[str, str]] = {}
    for name, (_, label) in EQUATION_COLUMNS.items():
        theirs, mine = _list_parts(parent, name), _list_parts(a, name)
        kinds, other_kinds = [type(p) for p in mine], [type(p) for p in theirs]
        old, new = [dict(list_settings(p)) for p in theirs], [dict(list_settings(p)) for p in mine]
        if kinds == other_kinds and old == new:
            continue
        if len(mine) == 1 and kinds == other_kinds:  # of many settings only those that differ
            differ = [key for key in {**old[0], **new[0]} if old[0].get(key) != new[0].get(key)]
            if len(differ) < len(new[0]):
                sides = (
                    ", ".join(f"{key}={shorten_number(side.get(key))}" for key in differ) for side in (old[0], new[0])
                )
                before, after = (f"{kinds[0].__name__}({side})" for side in sides)
                changed[label] = (before, after)
                continue
        write = format_changed_part if name in ("update_rule", "critic", "reward_model", "reference") else format_part
        changed[label] = (" ".join(map(write, theirs)) or "–", " ".join(map(write, mine)) or "–")
    if parent.samples_per_prompt != a.samples_per_prompt:
        changed["samples"] = (str(parent.samples_per_prompt), str(a.samples_per_prompt))
    return changed


def _list_parts(a: Algorithm, name: str) -> tuple[Any, ...]:
    """Return the parts of one field, without a reference that no part reads."""
    value = getattr(a, name)
    parts = value if isinstance(value, tuple) else (value,)
    return tuple(p for p in parts if p is not None and (name != "reference" or "logp_ref" in a.needs))
