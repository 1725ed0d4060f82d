"""Which display suits what the run's output goes to."""

import io
import subprocess
import sys

import pytest

from doubles import notebook
from policygrad.trackers import PlainTracker, default_tracker
from policygrad.trackers.notebook import NotebookTracker
from policygrad.trackers.rich_display import TerminalTracker


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


def test_the_default_tracker_depends_on_the_terminal(monkeypatch):
    monkeypatch.delitem(sys.modules, "IPython", raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert isinstance(default_tracker(Terminal()), TerminalTracker)
    assert isinstance(default_tracker(io.StringIO()), PlainTracker)
    assert isinstance(default_tracker(Terminal(), plain=True), PlainTracker)
    assert isinstance(default_tracker(io.StringIO(), plain=False), TerminalTracker)
    monkeypatch.setattr(Terminal, "encoding", "ascii")
    assert isinstance(default_tracker(Terminal()), PlainTracker)
    monkeypatch.setattr(Terminal, "encoding", "UTF8")
    for name, value in (("NO_COLOR", "1"), ("TERM", "dumb")):
        monkeypatch.setenv(name, value)
        assert isinstance(default_tracker(Terminal()), PlainTracker)
        monkeypatch.setenv(name, "xterm" if name == "TERM" else "")


@pytest.mark.parametrize("shell", [notebook.ZMQInteractiveShell(), notebook.Shell()])
def test_a_notebook_gets_the_notebook_display(monkeypatch, shell):
    notebook.install(monkeypatch, shell)
    assert isinstance(default_tracker(), NotebookTracker)
    assert isinstance(default_tracker(plain=False), NotebookTracker)
    assert isinstance(default_tracker(plain=True), PlainTracker)
    assert isinstance(default_tracker(io.StringIO()), PlainTracker)


@pytest.mark.parametrize("shell", [None, notebook.TerminalInteractiveShell()])
def test_ipython_alone_is_not_a_notebook(monkeypatch, shell):
    notebook.install(monkeypatch, shell)
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    assert isinstance(default_tracker(), PlainTracker)


def test_importing_trackers_loads_neither_rich_nor_ipython():
    code = "import sys, policygrad.trackers as t; t.default_tracker(); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = {name.partition(".")[0] for name in done.stdout.split()}
    assert "policygrad" in loaded
    assert not loaded & {"IPython", "rich"}
