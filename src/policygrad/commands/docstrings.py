"""What the source says of a class: the first paragraph and the source in its docstring, and the text at each of its fields."""

from __future__ import annotations

import ast
import inspect
import linecache
import sys
from functools import lru_cache
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
        body, lines = _read_class(base)
        for node, after in pairwise([*body, ast.Pass()]):
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                text = after.value if isinstance(after, ast.Expr) else None
                doc = text.value if isinstance(text, ast.Constant) and isinstance(text.value, str) else ""
                comment = lines[(node.end_lineno or node.lineno) - 1].rstrip().partition("  # ")[2] if comments else ""
                result[node.target.id] = " ".join(doc.split()) or comment
    return result


def _read_class(kind: type) -> tuple[list[ast.stmt], list[str]]:
    """Return (statements of a class, lines of its file); nothing of a class without a file, as a built-in is."""
    try:
        file = inspect.getsourcefile(kind) or ""
    except (OSError, TypeError):  # OSError: a class of `__main__` in a notebook or at a prompt
        return [], []
    lines = linecache.getlines(file, vars(sys.modules[kind.__module__]))
    return _read_classes("".join(lines)).get(kind.__qualname__, []), lines


@lru_cache(maxsize=64)
def _read_classes(source: str) -> dict[str, list[ast.stmt]]:
    """Return the statements of each class of a module, by qualified name; `inspect` would parse the module for each class."""
    result: dict[str, list[ast.stmt]] = {}

    def visit(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef):
                result[prefix + child.name] = child.body
                visit(child, f"{prefix}{child.name}.")
            elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                visit(child, f"{prefix}{child.name}.<locals>.")
            else:
                visit(child, prefix)

    visit(ast.parse(source), "")
    return result
