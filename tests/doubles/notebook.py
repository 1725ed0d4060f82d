"""A notebook without a notebook: as much of IPython as a tracker in a kernel meets."""

import sys
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import pytest


@dataclass
class HTML:
    data: str


@dataclass
class Output:
    """One cell's output that can be redrawn, and every state it had."""

    states: list[str] = field(default_factory=list)

    def update(self, html: HTML) -> None:
        self.states.append(html.data)


class ZMQInteractiveShell:
    """What Jupyter's kernel has for a shell."""


class Shell(ZMQInteractiveShell):
    """Colab's."""


class TerminalInteractiveShell:
    """That of `ipython` on a terminal."""


def install(monkeypatch: pytest.MonkeyPatch, shell: Any) -> list[Output]:
    """Puts the double where IPython would be; returns the outputs, as they are made."""
    outputs: list[Output] = []

    def display(html: HTML, *, display_id: bool) -> Output:
        assert display_id, "an output without an id cannot be redrawn"
        outputs.append(Output([html.data]))
        return outputs[-1]

    ipython, module = ModuleType("IPython"), ModuleType("IPython.display")
    ipython.get_ipython = lambda: shell  # type: ignore[attr-defined]
    module.HTML, module.display = HTML, display  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setitem(sys.modules, "IPython.display", module)
    return outputs
