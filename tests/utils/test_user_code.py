"""Code of a user's own file."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from policygrad.utils.user_code import load_file


def test_a_file_is_read_as_it_is_now(tmp_path: Path) -> None:
    """Of the same size and second as before, where Python's cache of compiled files takes it for unchanged."""
    file = tmp_path / "mine.py"
    for value in (8, 4):
        file.write_text(f"FACTOR = {value}\n")
        os.utime(file, (1e9, 1e9))
        module = load_file(str(file))
        assert value == module.FACTOR
        del sys.modules[module.__name__]
