"""Weights for servers: one folder per version, whole or not there, with a file beside them that names the one to serve.

One folder per version, because a server that reads the same path again may read what it has read before.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from policygrad.durable import as_others, sync
from policygrad.errors import EngineError
from policygrad.weight_sync.base import Published

CURRENT = "current.json"
"""Names the version to serve: {"name": …, "version": …}; servers that watch the folder read it."""
LOG = "server.log"
"""What a server that was started here has said."""
_NAME = re.compile(r"(\.tmp-)?v\d{8,}-[0-9a-f]{8}")
Write = Callable[[Mapping[str, Tensor], Path], None]
"""Puts a policy's parameters into an empty folder, as an engine reads them."""


@dataclass(frozen=True)
class Publication:
    """One version as it lies on the disk."""

    name: str
    """Of its folder: the version, and what no other run's publication has."""
    version: int
    path: Path
    bytes: int


class VersionFolder:
    """The folder that servers read from; they see it under the same path."""

    def __init__(self, root: Path, write: Write) -> None:
        self.root, self.write = root, write

    def publish(self, weights: Published) -> Publication:
        """Writes a version and names it as the current one; older ones stay until `sweep`.

        Raises:
            EngineError: a disk that is full, say.
        """
        name = f"v{weights.version:08d}-{uuid.uuid4().hex[:8]}"
        temporary, final = self.root / f".tmp-{name}", self.root / name
        try:
            temporary.mkdir(parents=True)
            self.write(weights.tensors, temporary)
            as_others(temporary)  # a server may be another user's
            for file in _files(temporary):  # before its name is
                sync(file)
            os.replace(temporary, final)
            _replace(self.root / CURRENT, json.dumps({"name": name, "version": weights.version}))
        except OSError as error:
            shutil.rmtree(temporary, ignore_errors=True)
            raise EngineError(
                f"{final}: the weights for the engine cannot be written: {error}. See to it, or put them elsewhere, "
                "--sampler.folder DIR"
            ) from error
        return Publication(name, weights.version, final, sum(file.stat().st_size for file in _files(final)))

    def sweep(self, current: Publication) -> None:
        """Removes every version but this one, and what a killed process has left."""
        for path in self._versions():
            if path.name != current.name:
                shutil.rmtree(path, ignore_errors=True)

    def remove(self) -> None:
        """All that was published, and the folder where nothing else is in it: the run is over, and its model saved elsewhere."""
        for path in self._versions():
            shutil.rmtree(path, ignore_errors=True)
        for name in (CURRENT, LOG):
            (self.root / name).unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            self.root.rmdir()

    def _versions(self) -> list[Path]:
        """Folders that `publish` has made; what else is there is somebody's."""
        return [path for path in self.root.glob("*") if path.is_dir() and _NAME.fullmatch(path.name)]


def _files(folder: Path) -> list[Path]:
    """Below it too: a tokenizer with several chat templates has a folder for them."""
    return [path for path in folder.rglob("*") if path.is_file()]


def _replace(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)
