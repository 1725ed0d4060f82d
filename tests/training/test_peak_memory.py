"""The memory a run has taken is its own."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest

from policygrad.training.trainer import measure_peak_memory

PROGRAM = """
import sys
from pathlib import Path
from types import SimpleNamespace

MIB = 2**20
torch = SimpleNamespace(cuda=SimpleNamespace(is_available=lambda: False))

"""
END = "print(measure_peak_memory()['peak_memory_mib'] * MIB)"


@pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="elsewhere the system counts from the start of a process"
)
def test_the_parents_memory_is_not_counted() -> None:
    """getrusage counts it: a process begins as a copy of the one that starts it.

    (The function's own text is run, since importing its module takes seconds.)
    """
    function = inspect.getsource(measure_peak_memory)
    held = bytearray(2**30)
    result = subprocess.run([sys.executable, "-c", PROGRAM + function + END], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert len(held) == 2**30
    assert 2**22 < float(result.stdout) < 0.5 * 2**30


@pytest.mark.full
def test_released_memory_is_counted() -> None:
    before = measure_peak_memory()["peak_memory_mib"]
    size = int(before + 64) * 2**20
    held = bytearray(size)
    del held
    assert measure_peak_memory()["peak_memory_mib"] >= size / 2**20
