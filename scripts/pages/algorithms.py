"""docs/algorithms/NAME.md: one page per named algorithm."""

from __future__ import annotations

import ast
import inspect
import re
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any

from pages.figures import gate_section
from pages.markdown import block, page, table
from pages.measured import row_of, summary_sentence
from pages.tables import comparison_sections
from policygrad import algorithms
from policygrad.algorithms import ALGORITHMS
from policygrad.catalog import CATALOG, DEFAULT_SOURCES, EQUATION, RECIPE_FIELDS
from policygrad.commands.describe import group_by_family
from policygrad.commands.render import (
    NO_DEVIATIONS,
    build_matrix_row,
    diff_algorithms,
    format_part,
    list_settings,
    shorten_number,
)
from policygrad.compare.plan import OVERRIDES
from policygrad.core.advantages import OptimalValue
from policygrad.core.algorithm import Algorithm
from policygrad.core.terms import ExactEntropy, policy_share
from policygrad.core.vine import Vine

LAB = Path(__file__).resolve().parents[2] / "docs" / "lab.md"


def lab_section(name: str) -> str:
    """Compare an algorithm's gradient with the true one, on- and off-policy, by the numbers of docs/lab.md."""
    _, head, sides = _parse_lab_table(LAB.read_text(encoding="utf-8"))
    measured = {side: dict(zip(head, cells[name], strict=True)) for side, cells in sides.items() if name in cells}
    if not measured:
        return "[The lab](../lab.md#what-is-measured) does not measure it."
    sentences = (
        f"{side}: " + ", ".join(f"{column} {cells[column]}" for column in LAB_COLUMNS)
        for side, cells in measured.items()
    )
    return (
        f"Its gradient against the true one ([what is measured](../lab.md#what-is-measured)). {'. '.join(sentences)}."
    )


LAB_COLUMNS = ("scale", "bias", "variance", "SNR")


def _parse_lab_table(text: str) -> tuple[str, list[str], dict[str, dict[str, list[str]]]]:
    """Return (the setting, the columns, side -> algorithm -> cells)."""
    (block,) = re.findall(r"<!-- table: begin -->\n(.*?)<!-- table: end -->", text, re.DOTALL)
    world, *parts = re.split(r"\n\n(?=O(?:n|ff)-policy)", block.strip())
    sides: dict[str, dict[str, list[str]]] = {}
    head: list[str] = []
    for part in parts:
        side, _, lines = part.partition(":\n\n")
        head, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines.splitlines())
        sides[side] = {row[0].strip("`"): row[1:] for row in rows}
    return world, head[1:], sides


def read_finding(name: str) -> tuple[bool, str, str]:
    """Return (whether the claim holds, the claim, the result) of an experiment.

    Raises:
        SystemExit: the page has no such finding.
    """
    text = LAB.read_text(encoding="utf-8")
    match = re.search(rf"^- ([✓✗]) \*\*(.+?)\*\* (.+?)  \n  `policygrad lab --experiment {name}`$", text, re.MULTILINE)
    if match is None:
        raise SystemExit(f"{LAB}: there is no finding {name!r}: make lab")
    return match[1] == "✓", match[2], match[3]


def quote_finding(name: str, folder: str) -> str:
    """Write a finding as a paragraph below its picture in `folder`."""
    holds, claim, sentence = read_finding(name)
    return (
        f"![What was measured]({folder}/{name}.svg)\n\n"
        f"{'✓' if holds else '✗'} **{claim}** {sentence} (`policygrad lab --experiment {name}`)"
    )


OURS = "our choice"


def algorithm_page(name: str) -> str:
    """Write the page of an algorithm."""
    a, about = ALGORITHMS[name], CATALOG[name]
    return page(
        f"# {name}: {about.title}",
        f"{about.source}. " + _parent_link(about.parent),
        _command(name),
        f"**Addresses.** {about.addresses}",
        f"**How it fails.** {about.failure_modes}",
        "## The equation",
        block("\n".join([_equation(a), "", *_symbols(a)]), "formula"),
        f"As published:\n\n{block(CATALOG[name].objective, 'formula')}",
        f"**Where this row differs from it:** {CATALOG[name].deviations or NO_DEVIATIONS}.",
        gate_section(name),
        "## Step by step",
        block("\n".join(pseudo_code(a))),
        f"## The code\n\n{block(source(name), 'python')}",
        _difference(a),
        f"## Where the defaults come from\n\n{_defaults(a)}",
        f"## Measured\n\n{_measured(name)}",
        "[All algorithms](index.md)",
    )


def _parent_link(parent: str | None) -> str:
    return f"Derived from [`{parent}`]({parent}.md)." if parent else "The root of the family."


def _equation(a: Algorithm) -> str:
    return EQUATION if a.terms else EQUATION.replace(" + k", "").replace("( c · w · Ψ )", "c · w · Ψ ·")


def _symbols(a: Algorithm) -> list[str]:
    equation = a.equation()
    size = max(map(len, equation))
    lines = []
    for symbol, text in equation.items():
        head, equals, tail = text.partition(" = ")
        if equals and head.startswith(f"{symbol}_"):
            text = tail
        lines.append(f"{symbol:>{size}}  {'=' if len(symbol) <= 3 else ' '} {text}")
    return lines


def pseudo_code(a: Algorithm) -> list[str]:
    """Write one training step as pseudo-code, from the algorithm's parts."""
    lines = [f"sample G = {a.samples_per_prompt} completions of every prompt from π_θ, and score them: R"]
    lines += [
        _note(f"sample {part.samples} completions of every step's prefix, and score them: V", part)
        for part in a.advantage
        if part.samples_values
    ]
    for part in (part for part in a.advantage if isinstance(part, Vine)):
        lines += [
            _note(f"try up to {part.actions} tokens in each of {part.states} states per prompt: the new batch", part),
            _note(f"complete each {part.samples}×, all of a state with the same random numbers, and score: Q̂", part),
        ]
    lines += [_note(f"filter: {_formula(part)}", part) for part in a.filters]
    lines += [f"keep {what}" for field, what in KEPT.items() if field in a.needs]
    lines += [_note(_formula(part), part) for part in a.shaping]
    if not a.advantage:
        lines.append("Ψ ← R")
    for part in a.advantage:
        formula = _formula(part)
        chain = f"Ψ{formula.replace(';', ',')}" if formula[0] in "/;" else formula
        lines.append(_note(f"Ψ ← {chain}", part))
    lines += [_note(f"Ψ ← {shorten_number(policy_share(a.terms))}·Ψ", part) for part in a.terms if part.mixture_weight]
    if a.critic is not None:
        lines.append(_note(f"critic's targets ← GAE(λ = {shorten_number(a.critic.lam)}) + V_old", a.critic))
    inner = _inner(a)
    updates = a.update_rule.updates
    if updates > 1:
        loops = [f"repeat {a.update_rule.epochs} times"] * (a.update_rule.epochs > 1)
        loops += [f"for each of {a.update_rule.minibatches} shares of whole groups"] * (a.update_rule.minibatches > 1)
        head = ", ".join(loops)
        inner = [f"{head}:", *(f"    {line}" for line in inner)]
    lines += inner
    if a.reference is not None and a.reference.refresh_every and "logp_ref" in a.needs:
        lines.append(_note(f"π_ref ← {_formula(a.reference)}", a.reference))
    remembers = [part for part in a.advantage if part.init_state() is not None]
    lines += [_note("remember this rollout's rewards for the next", part) for part in remembers]
    adapts = [part for part in (*a.terms, *a.shaping) if getattr(part, "target", None) is not None]
    for part in adapts:
        coefficient, goal = ("η", "an entropy") if isinstance(part, ExactEntropy) else ("β", "a KL")
        lines.append(_note(f"adapt {coefficient}, for {goal} near {shorten_number(part.target)}", part))
    before = []
    for part in (part for part in a.advantage if isinstance(part, OptimalValue)):
        sampled = f"sample {part.samples} completions from the initial policy, and score them: r_j"
        before += ["for every training prompt:", f"    {sampled}"]
    return _align_comments([*before, "for every step:", *(f"    {line}" for line in lines)])


KEPT = {
    "logp_old": "log π_old of every token",
    "logp_ref": "log π_ref of every token",
    "values": "V of every token",
    "sum_pi_squared": "Σ π² before every token",
    "grad_logp_sq_norm": "‖∇log π(o)‖² of every completion",
    "step_end": "the reward of every step",
}


def _inner(a: Algorithm) -> list[str]:
    lines = [] if a.ratio is None else [_note(_formula(a.ratio).replace(" = ", " ← ", 1), a.ratio)]
    lines.append(_note(f"w ← {_short_formula(a.gate)}", a.gate))
    lines += [_note(f"w ← w {_short_formula(part)}", part) for part in a.corrections]
    lines += [_note(f"k ← {_formula(part)}", part) for part in a.terms]
    lines.append(_note(f"c ← {_formula(a.aggregation)}", a.aggregation))
    lines.append(f"g ← Σ ( c w Ψ{' + c_k k' if a.terms else ''} ) ∇log π_θ")
    first_order = type(a.update_rule).__name__ == "GradientSteps"
    lines.append("θ ← AdamW(θ, g)" if first_order else _note(f"θ ← θ + Δ: {_formula(a.update_rule)}", a.update_rule))
    if a.critic is not None:
        lines.append(_note(f"φ ← AdamW on {_formula(a.critic)}", a.critic))
    return lines


def _formula(part: Any) -> str:
    return " ".join(part.formula.split())


def _short_formula(part: Any) -> str:
    """Refer to the equation above where the formula is too long for a line."""
    formula = _formula(part)
    return formula if len(formula) <= 60 else "as in the equation above"


def _note(text: str, part: Any) -> str:
    return f"{text}  # {type(part).__name__}"


def _align_comments(lines: list[str]) -> list[str]:
    """Align the comments."""
    split = [line.partition("  # ") for line in lines]
    width = min(84, max(len(text) for text, mark, _ in split if mark))
    return [f"{text:<{width}}{mark}{note}".rstrip() for text, mark, note in split]


def source(name: str) -> str:
    """Return the lines of algorithms.py that define an algorithm."""
    return _read_definitions()[name]


@cache
def _read_definitions() -> dict[str, str]:
    text = inspect.getsource(algorithms)
    lines, definitions = text.splitlines(), dict[str, str]()
    for node in ast.parse(text).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            value = getattr(algorithms, node.targets[0].id, None)
            if isinstance(value, Algorithm):
                definitions[value.name] = "\n".join(lines[node.lineno - 1 : node.end_lineno])
    return definitions


def _difference(a: Algorithm) -> str:
    parent = CATALOG[a.name].parent
    if parent is None:
        return ""
    changed = diff_algorithms(ALGORITHMS[parent], a)
    rows = [(what, f"`{theirs}`", f"`{mine}`") for what, (theirs, mine) in changed.items()]
    rows = [tuple("–" if cell == "`–`" else cell for cell in row) for row in rows]
    same = f"No part differs from [`{parent}`]({parent}.md); only the intended use does."
    return table(("part", f"[`{parent}`]({parent}.md)", f"`{a.name}`"), rows) if rows else same


def _defaults(a: Algorithm) -> str:
    """Write the origin of every default: a table of those with a source, and sentences for the others."""
    sourced: dict[tuple[str, str], list[str]] = {}
    inherited: dict[str, list[str]] = {}
    for setting, value, where in defaults(a):
        if where == OURS and value == "0 texts":
            continue
        if where == OURS or where.startswith("as ["):
            inherited.setdefault(where, []).append(f"`{setting}` {value}")
        elif where != DEFAULT_SOURCES.get(setting):
            sourced.setdefault((value, _without_value(where, value)), []).append(f"`{setting}`")
    rows = [(", ".join(names), f"`{value}`", where) for (value, where), names in sourced.items()]
    return "\n\n".join(
        [
            *([table(("setting", "default", "source"), rows)] if rows else []),
            *(f"{where[0].upper()}{where[1:]}: {', '.join(names)}." for where, names in inherited.items()),
            "All others are [the same for every algorithm](index.md#defaults-without-a-paper).",
        ]
    )


def _without_value(where: str, value: str) -> str:
    """Drop a source's first word where it only repeats the value."""
    match = re.match(rf"{re.escape(value)}(?:, |: | (?=as ))", where)
    return where[match.end() :] if match else where


def defaults(a: Algorithm) -> list[tuple[str, str, str]]:
    """Return (setting, value, source) of every default."""
    rows = []
    for key, part in a.named_parts():
        if key.partition(".")[0] == "reference" and "logp_ref" not in a.needs:
            continue
        for setting, value in list_settings(part):
            shown = format_part(value, names=True) if hasattr(value, "__dataclass_fields__") else shorten_number(value)
            rows.append((f"{type(part).__name__}.{setting}", shown, origin(a, part, setting, value)))
    samples = origin(a, None, "samples_per_prompt", a.samples_per_prompt)
    return [*rows, ("samples_per_prompt", f"{a.samples_per_prompt}", samples)]


def origin(a: Algorithm, part: Any, setting: str, value: Any) -> str:
    """Return where a default comes from: the algorithm's source, its parent's if the value is the same, or our choice."""
    kind = type(part).__name__
    key = setting if part is None else f"{kind}.{setting}"
    if key in CATALOG[a.name].defaults:
        return CATALOG[a.name].defaults[key]
    parent = CATALOG[a.name].parent
    if parent is not None and key not in RECIPE_FIELDS:
        theirs = ALGORITHMS[parent]
        values = [getattr(p, setting) for p in theirs.parts() if type(p) is type(part)]
        if value in values if part is not None else value == theirs.samples_per_prompt:
            inherited = origin(theirs, part, setting, value)
            if inherited not in (
                OURS,
                DEFAULT_SOURCES.get(key),
            ):  # its reason is of another publication, and stands on its page
                return inherited if inherited.startswith("as [") else f"as [`{parent}`]({parent}.md)"
    is_default = any(f.name == setting and value == f.default for f in fields(part)) if part is not None else False
    return DEFAULT_SOURCES.get(key, OURS) if is_default else OURS


def _command(name: str) -> str:
    """Write the command that trains with it, and the one for the embedded task if that needs other options."""
    command, override = f"policygrad train {name}", OVERRIDES.get(name)
    if override is None:
        return block(command, "sh")
    other = block(f"{command} {' '.join(override.options)}", "sh")
    return f"{block(command, 'sh')}\n\nOn the embedded task, {override.reason}\n\n{other}"


def _measured(name: str) -> str:
    """Summarise the runs on the embedded task, and the gradient in the lab."""
    row = row_of(name)
    trained = "Its training is not measured yet."
    if row is not None:
        trained = f"{summary_sentence(row)} [All measured runs](../measured.md)."
    return f"{trained}\n\n{lab_section(name)}"


def matrix(folder: str) -> str:
    """Write the matrix as a table; names link to their pages in `folder`."""
    rows = {name: build_matrix_row(a) for name, a in ALGORITHMS.items()}
    head = ["algorithm", *next(iter(rows.values()))]
    return table(head, ([f"[`{name}`]({folder}{name}.md)", *map(" ".join, row.values())] for name, row in rows.items()))


def by_family() -> str:
    """Write all names, by where their credit comes from and how they use old samples."""
    rows = ((kind, " ".join(f"[`{name}`]({name}.md)" for name in names)) for kind, names in group_by_family().items())
    return table(("what it compares", "algorithms"), rows)


def count_algorithms() -> str:
    """Write README's sentences on the named algorithms."""
    return (
        f"An algorithm is a choice of these parts, a few lines of data. There are [{len(ALGORITHMS)} named "
        "algorithms](docs/algorithms/index.md), each its paper's recipe; where one departs from the paper, its page says so."
    )


def default_sources() -> list[tuple[str, str, str]]:
    """Return (setting, default, source) of the defaults that no publication of an algorithm mentions."""
    found: dict[str, str] = {}
    for a in ALGORITHMS.values():
        for setting, value, where in defaults(a):
            if where == DEFAULT_SOURCES.get(setting):
                found.setdefault(setting, value)
    return [(f"`{s}`", f"`{value}`", _without_value(DEFAULT_SOURCES[s], value)) for s, value in sorted(found.items())]


def tree(name: str | None = None, indent: str = "") -> list[str]:
    """Draw the names below their parents."""
    children = [child for child in ALGORITHMS if CATALOG[child].parent == name]
    lines = []
    for child in children:
        last = child == children[-1]
        branch = "" if name is None else "└─ " if last else "├─ "
        lines.append(f"{indent + branch + child:<28}  {CATALOG[child].title}")
        lines += tree(child, indent + ("" if name is None else "   " if last else "│  "))
    return lines


def index_page() -> str:
    """Write docs/algorithms/index.md."""
    return page(
        "# The algorithms",
        "Each algorithm is a choice of parts in one equation, and a row of the matrix defines it completely. Tests compare every "
        "row with a literal transcription of its paper's objective. A name links to a page with the equation, the published "
        "objective and where the row differs from it, pseudo-code, the source of each default, how it fails, and measurements. "
        "Group and batch sizes are for small machines; the pages have the papers' sizes.",
        f"## By what they compare\n\n<!-- matrix: begin -->\n{by_family()}\n<!-- matrix: end -->",
        "To train one, from the command line and from Python:",
        block("policygrad train grpo", "sh"),
        block("import policygrad as pg\n\npg.train(pg.Run(algorithm=pg.get_algorithm('grpo')))", "python"),
        f"## The matrix\n\n{matrix('')}",
        "Cells leave out settings that have their default; `policygrad show NAME` prints all.",
        f"## The family\n\nEach algorithm under the one it was derived from:\n\n{block(chr(10).join(tree()))}",
        *comparison_sections(),
        "## Defaults without a paper",
        "These settings have the same default in every algorithm unless its page gives another.",
        table(("setting", "default", "why"), default_sources()),
    )
