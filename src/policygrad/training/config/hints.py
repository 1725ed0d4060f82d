"""How an option that is left open, or may be an object, shows in the help."""

from __future__ import annotations

from typing import Any

import tyro


def optional(metavar: str, words: str) -> Any:
    """For an option that may be left open: its help names what is then taken, in words."""

    def hint(default: str) -> str:
        return f"(default: {words if default in ('None', '') else default})"

    return tyro.conf.arg(metavar=metavar, help_behavior_hint=hint)


def named(metavar: str, kind: Any, words: str = "") -> Any:
    """For what has a name on the command line and may be an object in Python."""

    def hint(default: str) -> str:
        known = default.strip("[]'")
        return f"(default: {words if known in ('None', '') else known})"

    return tyro.conf.arg(metavar=metavar, constructor=kind, help_behavior_hint=hint)
