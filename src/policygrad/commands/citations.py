"""What a part's docstring says it does and where it is from."""

from __future__ import annotations

import inspect
from typing import Any

from policygrad.training.config.own import location


def summary(part: Any) -> tuple[str, str]:
    """(what it does, its source): the first paragraph of its docstring, and what follows `Source:` anywhere in it."""
    doc = inspect.getdoc(part if isinstance(part, type) else type(part)) or ""
    paragraphs = [" ".join(p.split()) for p in doc.split("\n\n")]
    found = next((p for p in paragraphs if "Source:" in p), "")
    source = found.partition("Source:")[2].strip().rstrip(".")
    return paragraphs[0].partition("Source:")[0].strip(), source


def cited(part: Any) -> str:
    """Where a part is from: its docstring's source, or the file of one's own."""
    kind = part if isinstance(part, type) else type(part)
    source = summary(kind)[1]
    if source or kind.__module__.startswith("policygrad."):
        return source or "of this library"
    return f"your own, {location(kind) or kind.__module__}"
