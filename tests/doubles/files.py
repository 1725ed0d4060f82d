"""The files of a run, read, and JSON Lines, written."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from policygrad.tasks.base import Example
from policygrad.tasks.rows import EXAMPLE, RowOptions, load_examples
from policygrad.tasks.sources import open_source

if TYPE_CHECKING:  # workers of rewards import what uses this, and are not to wait for torch
    import torch


def write_rows(path: Path, rows: Iterable[Any]) -> str:
    """JSON Lines; the path as a run takes it."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def read_examples(name: str, options: RowOptions | None = None) -> Sequence[Example]:
    """The rows of a file or other data, as a task reads them."""
    return load_examples(open_source(name, EXAMPLE), options or RowOptions(), name)


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().split("\n") if line]  # splitlines would also cut at U+2028


def untimed(path: Path) -> list[dict[str, Any]]:
    """Metrics without what a clock decides."""
    return [{k: v for k, v in row.items() if "time" not in k and "per_second" not in k} for row in rows(path)]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """Those of the model that a run has saved, or of the adapter."""
    from safetensors.torch import load_file

    adapter = folder / "model" / "adapter_model.safetensors"
    return load_file(adapter if adapter.exists() else folder / "model" / "model.safetensors")


def same(a: Mapping[str, torch.Tensor], b: Mapping[str, torch.Tensor]) -> bool:
    """Equal to the bit."""
    import torch

    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)
