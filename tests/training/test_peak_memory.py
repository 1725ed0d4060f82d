"""The memory a run has taken is its own."""

from __future__ import annotations

import subprocess
import sys

import pytest

from policygrad.training.trainer import measure_peak_memory


@pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="elsewhere the system counts from the start of a process"
)
def test_the_parents_memory_is_not_counted() -> None:
    """getrusage counts it: a process begins as a copy of the one that starts it."""
    program = "from policygrad.training.trainer import measure_peak_memory as f; print(f()['peak_memory_mib'] * 2**20)"
    held = bytearray(2**30)
    result = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert len(held) == 2**30
    assert 2**24 < float(result.stdout) < 0.9 * 2**30


def test_released_memory_is_counted() -> None:
    before = measure_peak_memory()["peak_memory_mib"]
    size = int(before + 64) * 2**20
    held = bytearray(size)
    del held
    assert measure_peak_memory()["peak_memory_mib"] >= size / 2**20
