"""Processes: a fresh interpreter has this one's import path; what is kept of an output."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from policygrad.utils.processes import Tail, last_lines, python_command


def test_a_fresh_interpreter_has_this_import_path_and_its_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path, "/a 'quoted' folder; and more"])
    command = python_command("print(json.dumps([sys.path, sys.argv[1:]]))", "one", "")
    printed = subprocess.run(command, capture_output=True, check=True, text=True).stdout
    assert json.loads(printed) == [sys.path, ["one", ""]]


def test_a_tail_keeps_the_last_bytes_and_counts_all() -> None:
    tail = Tail(4)
    for piece in (b"ab", b"cdefg", b"", b"h"):
        tail.add(piece)
    assert (tail.data, tail.length) == (b"efgh", 8)


def test_last_lines_are_cut_and_blank_ones_left_out() -> None:
    output = b"first\n  second line \r\n\n \xff third\n"
    assert last_lines(output, 2, 8) == ["second l", "\ufffd third"]
    assert last_lines(b" \n", 2, 8) == []
