"""An agent's function runs in the Python that AgentProgram names, with the packages of that one alone."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from policygrad.environments.agent_program import AgentHost, AgentProgram
from policygrad.errors import ConfigError, EngineError

AGENT = """
import os, sys

assert os.environ["IN_THE_AGENTS_PYTHON"] == "1"
try:
    import gymnasium
except ModuleNotFoundError:
    gymnasium = None
assert gymnasium is None or not gymnasium.__file__.endswith("environments/gymnasium.py"), gymnasium.__file__


def main(example):
    return 1.0
"""


def test_the_function_is_imported_by_the_python_that_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And its imports do not reach the files beside agent_host.py, of which one is called gymnasium.py."""
    (tmp_path / "agent.py").write_text(AGENT)
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nIN_THE_AGENTS_PYTHON=1 exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    function = f"{tmp_path / 'agent.py'}:main"
    program = AgentProgram(function=function, python=str(python))
    try:
        assert isinstance(program.host, AgentHost)
    finally:
        program.close()
    monkeypatch.delenv("IN_THE_AGENTS_PYTHON", raising=False)
    with pytest.raises(EngineError, match="IN_THE_AGENTS_PYTHON"):
        AgentProgram(function=function).host  # noqa: B018


def test_a_python_that_is_not_there_or_not_used_is_refused() -> None:
    with pytest.raises(ConfigError, match="python names 'no/python', which is no program"):
        AgentProgram(function="agent.py:main", python="no/python")
    with pytest.raises(ConfigError, match="python is for function"):
        AgentProgram("true", python=sys.executable)
