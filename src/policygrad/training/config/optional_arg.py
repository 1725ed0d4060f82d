"""The description of an option that may be left open."""

from __future__ import annotations

from typing import Any

import tyro


def optional_arg(metavar: str, default_text: str = "", kind: Any = None) -> Any:
    """Describe an option that may be left open; the help shows `default_text` as its default.

    `kind` is its type on the command line, where Python may give an object.
    """

    def hint(default: str) -> str:
        name = default.strip("[]'")
        return f"(default: {default_text if name in ('None', '') else name})"

    return tyro.conf.arg(metavar=metavar, constructor=kind, help_behavior_hint=hint)
