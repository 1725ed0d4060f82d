"""What the tests of several hosts share: they are skipped, and say why, where namespaces are not allowed."""

from __future__ import annotations

import pytest

from hosts import why_not


@pytest.fixture(autouse=True, scope="session")
def _allowed() -> None:
    if reason := why_not():
        pytest.skip(reason)
