"""The option tables of docs/coming-from-*.md, from the answers that the command line gives."""

from __future__ import annotations

import re

from pages.markdown import table
from policygrad.commands.foreign_options import load_foreign_options

_OPTION = re.compile(r"--[\w.-]*\w(?: (?:[A-Z]\w+|[\w./]+(?::[\w./]+)+|\w+=\S+|bf16|[\d.]+ [\d.]+)\b)?")
"""An option, and a value that stands behind it: a part, a file and its function, settings, a precision, two numbers."""


def options(library: str) -> str:
    """Two tables: what has a name here, and what has none."""
    names = load_foreign_options()[0][library]
    there = [(f"`{name}`", _coded(ours.flag), _coded(ours.note)) for name, ours in names.items() if ours.flag]
    not_there = [(f"`{name}`", _coded(ours.note)) for name, ours in names.items() if not ours.flag]
    none = table((library, "no such option here"), not_there)
    return f"{table((library, 'policygrad', 'what differs'), there)}\n\n{none}"


def supervised(library: str) -> str:
    """The names for which `policygrad sft` and `reward-model` have another answer than `train`."""
    own = {name: ours for name, ours in load_foreign_options()[1].items() if name in load_foreign_options()[0][library]}
    rows = [(f"`{name}`", _coded(ours.flag), _coded(ours.note)) for name, ours in own.items()]
    return table((library, "`policygrad sft`, `reward-model`", "what differs"), rows)


def _coded(text: str) -> str:
    """Options between backticks, where they are not already."""
    pieces = text.split("`")
    pieces[::2] = [_OPTION.sub(lambda found: f"`{found[0]}`", piece) for piece in pieces[::2]]
    return "`".join(pieces)
