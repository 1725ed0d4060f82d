"""A server that is killed, and started again, goes on where it was: scripts/stress_serve.py with one kill."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("tinker", reason="the extra `serve`")

from stress_serve import stress


@pytest.mark.full
def test_the_stress_of_kills_finds_nothing_lost(tmp_path: Path) -> None:
    """At a random moment of a client's training: all that was answered is kept, bit for bit what it is undisturbed."""
    result = stress(1, 0, tmp_path)
    assert result["kills"] == 1
    assert int(str(result["updates"])) >= 3
    assert int(str(result["checkpoints"])) >= 1
