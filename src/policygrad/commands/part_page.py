"""`policygrad show PART`: one part's settings, equation, text and place in the code; and the list of all of them."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator
from dataclasses import MISSING, Field, fields
from itertools import pairwise
from typing import Any

import policygrad
from policygrad.algorithms import ALGORITHMS
from policygrad.commands.citations import summary
from policygrad.commands.describe import COLUMNS, HEAD, NAME, QUIET, Line, number, part_name, wrapped
from policygrad.commands.families import families
from policygrad.core.equation import linked
from policygrad.core.protocols import Part
from policygrad.core.roles import ROLES
from policygrad.training.config.own import address, location
from policygrad.training.config.parts import part_names

_SYMBOLS = {"ratio": "r", "gate": "w", "corrections": "ρ", "aggregate": "c", "terms": "k", "critic": "V"}


def describe_part(part: Any, width: int = 80) -> list[Line]:
    """A part, or its class: its settings, its equation, its docstring whole, where its code stands and what has it."""
    kind: type = part if isinstance(part, type) else type(part)
    built = _built(kind) if isinstance(part, type) else part
    lines: list[Line] = [((kind.__name__ if built is None else part_name(built, names=True), NAME),)]
    lines += [*_place(kind, width), ()]
    if fields(kind):
        lines += [(("Settings", HEAD),), *_settings(kind, built, width), ()]
    if built is not None and isinstance(built, Part):
        lines += [(("Equation", HEAD),), *_equation(built, width), ()]
    lines += _text(kind, width)
    users = [n for n, a in ALGORITHMS.items() if any(type(p) is kind for _, p in a.parts())]
    return [*lines, *wrapped((("Used by  ", HEAD),), ", ".join(users) or "none of the named algorithms", width)]


def index(width: int = 80) -> list[Line]:
    """Every algorithm by family and every part by the field it goes into, with what it does."""
    lines: list[Line] = [(("Algorithms", HEAD), ("  policygrad show NAME", QUIET))]
    for family, names in families().items():
        lines += [((f"  {family}", ""),), *wrapped((("    ", ""),), ", ".join(names), width, NAME)]
    lines += [(), (("Parts", HEAD), ("  policygrad show PART, policygrad train … --algorithm.FIELD PART", QUIET))]
    longest = max(map(len, part_names())) + 2
    for place, role in ROLES.items():
        symbol = COLUMNS.get(place, ("", place))[0]
        lines += [((f"  {place}", HEAD), (f"  {role.word}{', ' * bool(symbol)}{symbol}", QUIET))]
        for name in part_names(place):
            lines += wrapped(((f"    {name:<{longest}}", NAME),), _first(getattr(policygrad, name)), width)
    own = "your own: policygrad show mine.py:PART, or mine:PART"
    return [*lines, (), ((own, QUIET),)]


def field_docs(kind: type) -> dict[str, str]:
    """Setting -> the text below it in the class, or in the class that it inherits it from."""
    found: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(base)))
        except (OSError, TypeError):  # a builtin, or a class without a file
            continue
        if not (tree.body and isinstance(tree.body[0], ast.ClassDef)):
            continue
        for node, after in pairwise(tree.body[0].body):
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                text = after.value if isinstance(after, ast.Expr) else None
                said = text.value if isinstance(text, ast.Constant) and isinstance(text.value, str) else ""
                found[node.target.id] = " ".join(said.split())
    return found


def _built(kind: type) -> Any:
    """The part with its defaults; None where a setting has none."""
    needed = [f for f in fields(kind) if f.init and f.default is MISSING and f.default_factory is MISSING]
    return None if needed else kind()


def _place(kind: type, width: int) -> Iterator[Line]:
    """What it is, how it is named on the command line, and where its code stands."""
    known = kind.__name__ in part_names() and getattr(policygrad, kind.__name__) is kind
    name = kind.__name__ if known else address(kind)
    for place, role in ROLES.items():
        if issubclass(kind, role.bases):
            yield from wrapped((("  ", ""),), f"{role.word}: --algorithm.{place} {name}", width)
    if where := location(kind):
        yield from wrapped((("  ", ""),), where, width, QUIET)


def _settings(kind: type, built: Any, width: int) -> Iterator[Line]:
    docs, named = field_docs(kind), [(f.name, _signature(f, built)) for f in fields(kind)]
    name, size = (max(len(pair[i]) for pair in named) for i in (0, 1))
    for setting, signature in named:
        lead: Line = ((f"  {setting:<{name}}  ", NAME), (f"{signature:<{size}}  ", ""))
        yield from wrapped(lead, docs.get(setting, ""), max(width, sum(len(t) for t, _ in lead) + 24))


def _signature(f: Field[Any], built: Any) -> str:
    kind = f.type if isinstance(f.type, str) else getattr(f.type, "__name__", str(f.type))
    if built is None and f.default is MISSING:
        return kind
    value = getattr(built, f.name) if built is not None else f.default
    return f"{kind} = {value!r}" if isinstance(value, str) else f"{kind} = {number(value)}"


def _equation(part: Any, width: int) -> Iterator[Line]:
    places = [place for place, role in ROLES.items() if isinstance(part, role.bases)]
    place = places[0] if places else ""
    if place == "psi":
        lead, formula = "  Ψ ← ", linked("R" if part.starts else "Ψ", part)
    else:
        formula, symbol = part.formula, _SYMBOLS.get(place, "")
        lead = "  " if not symbol or re.match(rf"{symbol}(_\w+)? = ", formula) else f"  {symbol} = "
    yield from wrapped(((lead, ""),), formula, width)


def _text(kind: type, width: int) -> Iterator[Line]:
    """The docstring, paragraph by paragraph."""
    for paragraph in re.split(r"\n\n+", inspect.getdoc(kind) or ""):
        rows = paragraph.split("\n")
        if any(re.search(r"\S {2,}\S", row) or row.startswith(" ") for row in rows):  # a table stays a table
            yield from (((f"  {row}", ""),) for row in rows)
        else:
            yield from wrapped((("  ", ""),), " ".join(rows), width)
        yield ()


def _first(kind: type) -> str:
    """The first sentence of what it does."""
    text = summary(kind)[0]
    return re.split(r"(?<=[\w\)\]’”])[.;](?=\s|$)", text)[0].strip().rstrip(".") if text else ""
