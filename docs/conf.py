"""The documentation as a site: `make site`. The pages are the Markdown files as they are; this says where each one stands, and
what becomes of links that lead out of docs/."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parent
sys.path.insert(0, str(DOCS.parent / "scripts"))
NAV = {
    "Start": ("first-day", "own-model-and-data", "from-other-libraries", "extras", "troubleshooting"),
    "Guides": (
        "rewards",
        "isolation",
        "watching",
        "evaluation",
        "compare",
        "trust",
        "environments",
        "agents",
        "repair",
        "images",
        "rlhf",
        "distillation",
        "engines",
        "scaling",
        "planning",
        "large-runs",
        "memory",
        "serve",
        "extending",
    ),
    "Understand": (
        "primer",
        "algorithms/index",
        "lab",
        "where-sources-disagree",
        "measured",
        "benchmarks",
        "small-models",
    ),
    "Reference": ("reference/index", "metrics", "models"),
    "Contribute": ("architecture",),
}
"""Groups of the sidebar. A page that no group names comes last, under `LAST`; a missing page is left out."""
LAST = "More"

WIDE = ("algorithms/index", "benchmarks", "large-runs", "measured")
"""Pages whose tables need the room where furo puts the page's own table of contents."""

project = "policygrad"
extensions = ["myst_parser"]
source_suffix = {".md": "markdown"}
html_theme = "furo"
html_title = "policygrad"
html_static_path = ["site"]
html_css_files = ["site.css"]
mathjax_path = "tex-svg.js"  # copied from the package sphinx-mathjax-offline by `_finished`: one file, without fonts
mathjax3_config = {"svg": {"displayAlign": "left"}}
html_copy_source = html_show_sphinx = html_show_copyright = html_use_index = False
html_domain_indices = False
smartquotes = False  # -- is an option here, and no dash
highlight_language = "none"  # a block without a language is a formula or a terminal
suppress_warnings = ["misc.highlighting_failure"]  # JSON of several lines is none
myst_heading_anchors = 4

FORMULA = re.compile(r"^```formula\n(.*?)^```$", re.MULTILINE | re.DOTALL)
"""A block that the page holds as a line of Unicode, and the site typesets."""
LEAVING = re.compile(r"(?<!!)\[((?:[^\[\]]|\[[^\[\]]*\])*)\]\((\.\./[^)\s]*)\)")
"""A link that goes up: its text, its target."""
DATA = re.compile(r"\[([^\[\]]*)\]\((results/[^)\s]*)\)")
"""A link to what a measurement has written."""


def setup(app: Any) -> None:
    """Called by Sphinx."""
    app.connect("source-read", _read)
    app.connect("html-page-context", _side, priority=100)  # before the theme asks
    app.connect("build-finished", _finished)


def _side(app: Any, page: str, template: str, context: dict[str, Any], doctree: Any) -> None:
    """At the side stand the pages below the one that is shown, and not those below all others: 48 algorithms on 100 pages."""
    tree = context.get("toctree")
    if tree is not None:
        context["toctree"] = lambda **options: tree(**{**options, "collapse": True})


def _read(app: Any, page: str, source: list[str]) -> None:
    """The page as the site has it."""
    text = LEAVING.sub(lambda found: _inside(page, found), source[0])
    text = FORMULA.sub(_typeset, text)
    text = DATA.sub(lambda found: f'<a href="{found[2].removesuffix(".gz")}">{found[1].removesuffix(".gz")}</a>', text)
    head = ["---\nhide-toc: true\n---"] if page in WIDE else []
    source[0] = "\n\n".join([*head, text, *_trees(page)])


def _typeset(block: re.Match[str]) -> str:
    from pages.latex import to_latex

    return f"```{{math}}\n{to_latex(block[1])}\n```"


def _inside(page: str, found: re.Match[str]) -> str:
    """A link as it is, or, where it leaves docs/, its text and the file's place in the repository."""
    label, target = found[1], found[2].partition("#")[0]
    path = (DOCS / page).parent.joinpath(target).resolve()
    if path.is_relative_to(DOCS):
        return found[0]
    place = f"`{path.relative_to(DOCS.parent).as_posix()}`"
    return label if label.startswith("`") else f"{label} ({place})"


def _trees(page: str) -> Iterator[str]:
    """What stands below a page at the side: all groups below the first, a folder's pages below its index, lab/'s below lab.md."""
    if page == "index":
        for caption, names in _groups():
            yield _tree(names, f":caption: {caption}\n")
        return
    here = (DOCS / page).parent
    folder = here if page.endswith("/index") else DOCS / page
    below = sorted(path.relative_to(here).with_suffix("") for path in folder.glob("*.md") if path.stem != "index")
    if below:
        short = page.startswith("algorithms")  # their titles are long
        yield _tree([f"{name} <{name}>" if short else name for name in (path.as_posix() for path in below)])


def _groups() -> Iterator[tuple[str, list[str]]]:
    named = {name for names in NAV.values() for name in names}
    others = sorted(path.stem for path in DOCS.glob("*.md") if path.stem not in (*named, "index"))
    for caption, names in {**NAV, LAST: others}.items():
        if there := [name for name in names if (DOCS / f"{name}.md").is_file()]:
            yield caption, there


def _tree(names: list[str], caption: str = "") -> str:
    return "\n".join(["```{toctree}", f":hidden:\n{caption}", *names, "```"])


def _finished(app: Any, error: Exception | None) -> None:
    """What measurements have written is part of the site, and a browser opens it."""
    if error is None and app.builder.name == "html":
        from results import unpack_results

        package = find_spec("sphinx-mathjax-offline")
        if package is None or package.origin is None:
            raise ImportError("sphinx-mathjax-offline is not installed")
        shutil.copy(Path(package.origin).parent / "static" / "mathjax" / "tex-svg.js", Path(app.outdir) / "_static")
        unpack_results(DOCS / "results", Path(app.outdir) / "results")
