"""What the source says of a class: the first paragraph and the source in its docstring, and the text at each of its fields."""

from __future__ import annotations

import ast
import inspect
import textwrap
from itertools import pairwise
from typing import Any


def summarise_docstring(part: Any) -> tuple[str, str]:
    """Return (summary, source) of a part: the first paragraph of its docstring, and the text after `Source:` in it."""
    doc = inspect.getdoc(part if isinstance(part, type) else type(part)) or ""
    paragraphs = [" ".join(p.split()) for p in doc.split("\n\n")]
    found = next((p for p in paragraphs if "Source:" in p), "")
    source = found.partition("Source:")[2].strip().rstrip(".")
    return paragraphs[0].partition("Source:")[0].strip(), source


def read_field_docs(kind: type, *, comments: bool = False) -> dict[str, str]:
    """Return the docstrings of a class's fields, including inherited ones.

    Args:
        comments: Take the comment at the end of its line for a field without a docstring.
    """
    result: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        try:
            source = textwrap.dedent(inspect.getsource(base))
        except (OSError, TypeError):  # a built-in, or a class without a file
            continue
        body, lines = ast.parse(source).body, source.splitlines()
        if not (body and isinstance(body[0], ast.ClassDef)):
            continue
        for node, after in pairwise([*body[0].body, ast.Pass()]):
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                text = after.value if isinstance(after, ast.Expr) else None
                doc = text.value if isinstance(text, ast.Constant) and isinstance(text.value, str) else ""
                comment = lines[(node.end_lineno or node.lineno) - 1].partition("  # ")[2] if comments else ""
                result[node.target.id] = " ".join(doc.split()) or comment
    return result
