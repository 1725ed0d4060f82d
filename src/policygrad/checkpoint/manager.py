"""Decides when a run's progress is saved: every so many steps, at its end, and when a step fails."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from policygrad.checkpoint import format as checkpoints
from policygrad.errors import CheckpointError, NumericsError
from policygrad.utils.async_runner import start_thread
from policygrad.utils.spans import span

if TYPE_CHECKING:
    from policygrad.checkpoint.shards import ShardFile

SavedState = tuple[dict[str, Tensor], dict[str, Any]]  # tensors by name, and JSON values


class HasStep(Protocol):
    """A run's progress."""

    @property
    def step(self) -> int:
        """Number of finished steps."""


P = TypeVar("P", bound=HasStep)
MAX_SNAPSHOT_BYTES = 2**30


@dataclass(frozen=True)
class ShardedState(Generic[P]):
    """How to save a state that is sharded over processes, in the background and without gathering it."""

    pack: Callable[[P], SavedState]  # returns what is not sharded
    start_save: Callable[[Path], Callable[[], Sequence[ShardFile]]]
    """Makes every process copy its shard and write the copy into the folder. The result waits until all have, and raises OSError
    or CheckpointError if one could not."""
    is_sharded: Callable[[str], bool]  # whether the processes read a checkpoint's tensor, by its name


@dataclass(eq=False)
class Checkpointer(Generic[P]):
    """Saves the state that `pack` makes of the progress, with torch's global random state."""

    folder: Path  # the run's `checkpoints`
    _: KW_ONLY
    every: int  # steps between checkpoints
    keep: int  # checkpoints to keep
    pack: Callable[[P], SavedState]  # returns the complete state
    version: Callable[[], int]  # returns the version of the weights, which counts updates
    sync: Callable[[], None]  # waits until the run's logs are on the disk
    note: Callable[[str], None]  # shows a message
    resume_command: str
    max_snapshot_bytes: int = MAX_SNAPSHOT_BYTES  # a state of at most this size is copied after every step
    check: Callable[[checkpoints.Checkpoint], None] = lambda saved: None
    """Raises CheckpointError for a checkpoint that lacks something, so that the one before it is used."""
    sharded: ShardedState[P] | None = None  # how several processes save their shards; None = `pack` has everything
    before_save: Callable[[P], None] = lambda progress: None
    """Called after each step, once its snapshot is taken: writes what a run that resumes from here would not make again."""
    _pending: tuple[int, Future[Path]] | None = field(default=None, init=False)  # a step, whose save a thread finishes

    def restore(self) -> checkpoints.Checkpoint | None:
        """Load the newest intact checkpoint, and set torch's global random state to the saved one. Raises
        CheckpointError if there are checkpoints, and none is intact."""
        keep_on_meta = self.sharded.is_sharded if self.sharded is not None else lambda name: False
        saved = checkpoints.load_latest(
            self.folder, warn=self.note, check=self._check_complete, keep_on_meta=keep_on_meta
        )
        if saved is not None:
            checkpoints.prune_quietly(self.folder, saved.step, self.keep, self.every)
            torch.set_rng_state(saved.tensors.pop("rng/torch"))
        return saved

    def _check_complete(self, saved: checkpoints.Checkpoint) -> None:
        random, current = saved.tensors.get("rng/torch"), torch.get_rng_state()
        if random is None or (random.dtype, random.shape) != (current.dtype, current.shape):
            raise CheckpointError(f"{saved.path} lacks the random state")
        try:
            self.check(saved)
        except (KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{saved.path} lacks a part of the state: {error}") from error
        except CheckpointError as error:
            raise CheckpointError(f"{saved.path}: {error}") from error

    def start(self, progress: P) -> None:
        """Start from a progress that is saved or is the run's beginning."""
        self.saved = progress.step
        self._take_snapshot(progress)

    def on_step(self, progress: P, *, final: bool) -> None:
        """Save after a step if it is time to. With several processes only the final checkpoint is waited for. Raises
        CheckpointError if the final checkpoint cannot be written; a failure of any other is a note."""
        if self._pending is not None and self._pending[1].done():
            self.wait_for_save()
        self._take_snapshot(progress)
        self.before_save(progress)
        if final or progress.step % self.every == 0:
            try:
                with span("checkpoint", step=progress.step):
                    self.sync()
                    self._save(progress, None, torch.get_rng_state(), self.keep)
                    if final:
                        self._wait_pending()
            except CheckpointError as error:
                if final:
                    raise
                self._note_failure(error)

    def wait_for_save(self) -> None:
        """Wait for the checkpoint that is being written; its failure is a note."""
        try:
            self._wait_pending()
        except CheckpointError as error:
            self._note_failure(error)

    def _wait_pending(self) -> None:
        pending, self._pending = self._pending, None
        if pending is not None:
            step, outcome = pending
            outcome.result()
            self.saved = step

    def _note_failure(self, error: CheckpointError) -> None:
        self.note(f"{error}. Training continues, and saves again in {self.every} steps")

    def finish(self) -> None:
        """Delete the checkpoints that stops have left between regular ones: the run is finished."""
        checkpoints.prune_quietly(self.folder, self.saved, self.keep, self.every, finished=True)

    def rewind(self) -> P:
        """Save and return the progress after the last complete step; the next one was interrupted before it changed
        anything. Raises CheckpointError if it cannot be written."""
        self.wait_for_save()
        if self.last.step > self.saved:
            self.sync()
            self._save_last(self.keep)
        return self.last

    def _take_snapshot(self, progress: P) -> None:
        """Remember the progress after a complete step, with a copy of its state unless that is too large."""
        self.last, self._snapshot_version, self.random = progress, self.version(), torch.get_rng_state()
        self.snapshot: SavedState | None = None
        if self.max_snapshot_bytes:
            with span("snapshot"):
                tensors, values = self.pack(progress)
            if sum(t.nbytes for t in tensors.values()) <= self.max_snapshot_bytes:
                self.snapshot = {n: t.detach().to("cpu", copy=True) for n, t in tensors.items()}, deepcopy(values)

    def _save_last(self, keep: int) -> None:
        """Save the state after the last complete step bit for bit, whatever has happened since. Raises CheckpointError
        if it cannot be written; the weights have changed, and there is no copy of them."""
        if self.snapshot is None and self.version() != self._snapshot_version:
            raise CheckpointError("the weights have changed since, and the state is too large for a copy to be kept")
        self._save(self.last, self.snapshot, self.random, keep)
        self._wait_pending()

    def _save(self, progress: P, state: SavedState | None, random: Tensor, keep: int) -> None:
        """Save a state (None = the current one). If it is sharded, every process copies its shard and a thread writes the rest."""
        if self.sharded is None or state is not None:
            tensors, values = state or self.pack(progress)
            tensors = tensors | {"rng/torch": random}
            checkpoints.save_checkpoint(self.folder, progress.step, tensors, values, keep=keep, every=self.every)
            self.saved = progress.step
            return
        self.wait_for_save()
        tensors, values = self.sharded.pack(progress)
        local = {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()} | {"rng/torch": random}
        suffix = f"-{secrets.token_hex(4)}"  # a process that outlived an earlier run may still be writing
        writer = checkpoints.CheckpointWriter(self.folder, progress.step, local, values, keep, suffix, self.every)
        writer.begin()
        try:
            wait_for_shards = self.sharded.start_save(writer.folder)
        except BaseException:
            writer.abandon()
            raise

        def finish() -> Path:
            with span("write checkpoint", step=progress.step):
                return writer.finish(wait_for_shards)

        outcome, _ = start_thread(finish, "checkpoint")
        self._pending = progress.step, outcome

    @contextmanager
    def save_on_error(self) -> Iterator[None]:
        """Enclose the steps: an error during one saves the state after the last complete step and notes how to resume.

        Updates of the failed step are not in it: a resumed run repeats the step from its beginning. If the state is too large for a
        copy (`max_snapshot_bytes`), it resumes from the checkpoint before. A second Ctrl-C is not an error: it ends the run at
        once.
        """
        try:
            yield
        except CheckpointError:  # its message tells what remains
            raise
        except Exception as error:
            message = f"step {self.last.step + 1} failed"
            try:
                self.wait_for_save()
                if self.last.step > self.saved:
                    # Without `sync`, since the logs may be what failed. The previous checkpoint is kept: this one may fail
                    # in the same way.
                    self._save_last(max(2, self.keep))
                    message += f"; step {self.last.step} is saved"
            except Exception as failure:  # whatever a learner's state raises: the first error is the one to show
                message += f", and step {self.last.step} could not be saved ({failure})"
            message += f": {self.resume_command} resumes from step {self.saved}"
            if isinstance(error, NumericsError):
                remedy = f"correct {error.part} first" if error.part else "lower --lr or change --seed"
                message += f"; the same samples would have the same gradient, so {remedy}"
            error.add_note(message)
            self.note(message)
            raise
