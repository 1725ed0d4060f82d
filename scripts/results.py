"""docs/results/, what measured pages are made from: small files as they are, comparisons' reports and their pages compressed.

A report of sixty rows has a megabyte, and every change of it stays in the repository for good.
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parents[1] / "docs" / "results"
PACKED = ".gz"


def find_result(name: str, folder: Path = RESULTS) -> Path | None:
    """Return the path of a result such as `algorithms.json`, compressed or not; None if it is not there."""
    return next((path for path in (folder / f"{name}{PACKED}", folder / name) if path.is_file()), None)


def read_result(name: str, folder: Path = RESULTS) -> str | None:
    """Return the text of a result such as `algorithms.json`; None if it is not there."""
    path = find_result(name, folder)
    if path is None:
        return None
    data = path.read_bytes()
    return (gzip.decompress(data) if path.suffix == PACKED else data).decode()


def load_result(name: str, folder: Path = RESULTS) -> dict[str, Any] | None:
    """Return the value of NAME.json; None if it is not there."""
    text = read_result(f"{name}.json", folder)
    return None if text is None else json.loads(text)


def write_packed_result(name: str, text: str, folder: Path = RESULTS) -> None:
    """Write a result such as `algorithms.json` compressed; equal texts are equal files."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}{PACKED}").write_bytes(gzip.compress(text.encode(), mtime=0))


def unpack_results(folder: Path, to: Path) -> None:
    """Write all results to another folder, none of them compressed, so that a browser opens them."""
    to.mkdir(parents=True, exist_ok=True)
    for path in folder.iterdir():
        name = path.name.removesuffix(PACKED)
        (to / name).write_text(read_result(name, folder) or "", encoding="utf-8")
