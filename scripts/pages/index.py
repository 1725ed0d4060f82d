"""docs/algorithms/index.md: the matrix, the family tree, links; and the matrix in README."""

from __future__ import annotations

from pages.markdown import block, page, table
from policygrad.about import ABOUT
from policygrad.algorithms import ALGORITHMS
from policygrad.commands.describe import changed_settings, matrix_row
from policygrad.core.algorithm import Algorithm
from policygrad.core.reference import Reference
from policygrad.core.update_rules import FirstOrder


def matrix(folder: str) -> str:
    """The matrix as a Markdown table; names link to their pages in `folder`."""
    rows = {name: {**matrix_row(a), "also": also(a)} for name, a in ALGORITHMS.items()}
    head = ["algorithm", *next(iter(rows.values()))]
    return table(head, ([f"[`{name}`]({folder}{name}.md)", *map(" ".join, row.values())] for name, row in rows.items()))


def also(a: Algorithm) -> tuple[str, ...]:
    """What is not one gradient step, a frozen reference and a group of the usual size."""
    found = [] if a.step == FirstOrder() else [changed_settings(a.step)]
    if a.reference is not None and a.reference != Reference() and "logp_ref" in a.needs:
        found.append(changed_settings(a.reference))
    return (
        *found,
        *([f"G = {a.samples_per_prompt}"] if a.samples_per_prompt != Algorithm().samples_per_prompt else []),
    )


def tree(name: str | None = None, indent: str = "") -> list[str]:
    """Names under their parents."""
    children = [child for child in ALGORITHMS if ABOUT[child].parent == name]
    lines = []
    for child in children:
        last = child == children[-1]
        branch = "" if name is None else "└─ " if last else "├─ "
        lines.append(f"{indent + branch + child:<28}  {ABOUT[child].title}")
        lines += tree(child, indent + ("" if name is None else "   " if last else "│  "))
    return lines


def index_page() -> str:
    """The page."""
    return page(
        "# The algorithms",
        "Each one is a choice of parts in one equation. A row of the matrix is all there is to it; a name leads to its page: "
        "the equation, pseudo-code, the defaults and where they come from, what it fixes, how it fails.",
        f"## The matrix\n\n{matrix('')}",
        "What a cell leaves out is that part's default; `policygrad show NAME` prints all of it.",
        f"## The family\n\nEach algorithm under the one it was derived from:\n\n{block(chr(10).join(tree()))}",
        "## More\n\n"
        "- [Tables](../tables.md): model states, models in memory, what bounds a step, units and lengths\n"
        "- [Measured](../measured.md): every algorithm at its best learning rate, five seeds, equal tokens, updates or seconds\n"
        "- [Where sources disagree](../where-sources-disagree.md): what papers print, what policygrad does, and a check\n"
        "- [Your own algorithm](../your-own-algorithm.md) in 15 lines",
    )
