"""scripts/stress_serve.py, with one kill instead of two hundred."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("tinker", reason="the extra `serve`")

from stress_serve import stress


def test_a_killed_server_goes_on_where_it_was(tmp_path: Path) -> None:
    result = stress(1, 0, tmp_path)
    assert result["kills"] == 1
    assert int(str(result["updates"])) >= 3
    assert int(str(result["checkpoints"])) >= 1
