"""Pages whose code is run: each ```python block is followed by a ```text block with what it prints."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path
from typing import Any

import torch

_LINES = r"(?:(?!```).*\n)*"
BLOCK = re.compile(rf"^```python\n(?P<code>{_LINES})```\n\n```text\n(?P<output>{_LINES})```$", re.MULTILINE)
"""Code, a blank line, its output."""


def run(code: str, where: str, names: dict[str, Any]) -> str:
    """What the code prints; `names` is what it knows, and what it leaves behind."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(compile(code, where, "exec"), names)
    return out.getvalue()


def executed(text: str, where: str = "page") -> str:
    """The page with the outputs that its code prints now; its blocks run one after the other and share their names."""
    names: dict[str, Any] = {"__name__": "checked"}

    def renewed(match: re.Match[str]) -> str:
        line = text[: match.start()].count("\n") + 1
        return f"```python\n{match['code']}```\n\n```text\n{run(match['code'], f'{where}:{line}', names)}```"

    precision = torch.get_default_dtype()
    try:
        return BLOCK.sub(renewed, text)
    finally:
        torch.set_default_dtype(precision)  # a page may ask for float64


def renew(path: Path) -> None:
    """Writes the outputs into the page."""
    path.write_text(executed(path.read_text(encoding="utf-8"), path.name), encoding="utf-8")
