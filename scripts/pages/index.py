"""docs/algorithms/index.md: the matrix, the family tree, links; and the families in README."""

from __future__ import annotations

from pages.markdown import block, page, table
from policygrad.algorithms import ALGORITHMS
from policygrad.catalog import CATALOG
from policygrad.commands.render import NO_DEVIATIONS, build_matrix_row
from policygrad.commands.show import group_by_family


def matrix(folder: str) -> str:
    """The matrix as a Markdown table; names link to their pages in `folder`."""
    rows = {name: build_matrix_row(a) for name, a in ALGORITHMS.items()}
    head = ["algorithm", *next(iter(rows.values()))]
    return table(head, ([f"[`{name}`]({folder}{name}.md)", *map(" ".join, row.values())] for name, row in rows.items()))


def by_family(folder: str) -> str:
    """Every name, by what its credit comes from and how it looks at old samples."""
    rows = (
        (kind, " ".join(f"[`{name}`]({folder}{name}.md)" for name in names))
        for kind, names in group_by_family().items()
    )
    return f"{table(('what it compares', 'algorithms'), rows)}\n\n[The whole matrix, part by part]({folder}index.md)."


DEPARTS = (
    "Every row is compared with a literal transcription of its paper's objective, and where a row is not what was published it "
    "says so here. Group and batch sizes are for small machines throughout: the papers' are on the pages, with each default's "
    "source."
)


def departures() -> str:
    """Row by row, what is not as published."""
    rows = (
        (f"[`{name}`]({name}.md)", CATALOG[name].source, CATALOG[name].deviations or NO_DEVIATIONS) for name in ALGORITHMS
    )
    return table(("algorithm", "published", "where our row departs"), rows)


def tree(name: str | None = None, indent: str = "") -> list[str]:
    """Names under their parents."""
    children = [child for child in ALGORITHMS if CATALOG[child].parent == name]
    lines = []
    for child in children:
        last = child == children[-1]
        branch = "" if name is None else "└─ " if last else "├─ "
        lines.append(f"{indent + branch + child:<28}  {CATALOG[child].title}")
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
        f"## Where it departs\n\n{DEPARTS}\n\n{departures()}",
        f"## The family\n\nEach algorithm under the one it was derived from:\n\n{block(chr(10).join(tree()))}",
        "## More\n\n"
        "- [Tables](../tables.md): model states, models in memory, what bounds a step, units and lengths\n"
        "- [Measured](../measured.md): every algorithm at its best learning rate, five seeds, equal tokens, updates or seconds\n"
        "- [Where sources disagree](../where-sources-disagree.md): what papers print, what policygrad does, and a check\n"
        "- [Your own algorithm](../your-own-algorithm.md) in 15 lines",
    )
