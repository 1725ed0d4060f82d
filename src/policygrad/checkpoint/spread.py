"""A state of which several processes hold a share each: how it is saved, and a checkpoint that is being written."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from torch import Tensor

from policygrad.checkpoint.pieces import Share

Saved = tuple[dict[str, Tensor], dict[str, Any]]
"""Tensors by name, and values that JSON can hold."""
P = TypeVar("P")


@dataclass(frozen=True)
class Spread(Generic[P]):
    """How a state is saved of which several processes hold a share each: nobody gathers it, and training goes on meanwhile."""

    pack: Callable[[P], Saved]
    """What is not spread."""
    begin: Callable[[Path], Callable[[], Sequence[Share]]]
    """Each process copies its share, and writes the copy into the folder; what it returns waits until all have, and raises
    OSError or CheckpointError where one could not."""
    leave: Callable[[str], bool]
    """Whether a tensor of a checkpoint is for the processes to read, by its name."""


class Pending:
    """A checkpoint that a thread finishes."""

    def __init__(self, step: int, finish: Callable[[], object]) -> None:
        self.step, self._finish = step, finish
        self._raised: BaseException | None = None
        self._thread = threading.Thread(target=self._work, name=f"checkpoint {step}", daemon=True)
        self._thread.start()

    def _work(self) -> None:
        try:
            self._finish()
        except BaseException as error:  # raised where it is waited for
            self._raised = error

    @property
    def done(self) -> bool:
        """Whether nobody would have to wait."""
        return not self._thread.is_alive()

    def wait(self) -> None:
        """Until it is written. Raises what writing it raised."""
        self._thread.join()
        if self._raised is not None:
            raise self._raised
