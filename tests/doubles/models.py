"""Copies of a model's folder in which something is other than it should be."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from torch import nn

OUT = object()
"""Instead of an entry's value: the entry is taken out."""


def changed_copy(model: Path, folder: Path, **files: dict[str, Any]) -> Path:
    """The model with other entries in its JSON files, in `folder`; OUT takes an entry out."""
    shutil.copytree(model, folder, dirs_exist_ok=True)
    for name, changes in files.items():
        path = folder / f"{name}.json"
        known = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps({k: v for k, v in {**known, **changes}.items() if v is not OUT}))
    return folder


class Wrapped(nn.Module):
    """A model of one's own: no configuration."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def get_decoder(self) -> nn.Module:
        return self.inner.get_decoder()  # type: ignore[operator, no-any-return]

    def get_input_embeddings(self) -> nn.Module:
        return self.inner.get_input_embeddings()  # type: ignore[operator, no-any-return]

    def get_output_embeddings(self) -> nn.Module:
        return self.inner.get_output_embeddings()  # type: ignore[operator, no-any-return]

    def forward(self, **inputs: object) -> object:
        return self.inner(**inputs)
