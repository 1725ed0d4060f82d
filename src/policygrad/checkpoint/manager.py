"""When a run's progress is saved: every so many steps, at its end, and when a step fails."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

from policygrad.checkpoint import format as checkpoints
from policygrad.checkpoint.shards import BackgroundSave, SavedState, ShardedState
from policygrad.errors import CheckpointError, NumericsError


class HasStep(Protocol):
    """What outlives a step."""

    @property
    def step(self) -> int:
        """Steps done."""
        ...


P = TypeVar("P", bound=HasStep)
MAX_SNAPSHOT_BYTES = 2**30
"""Bytes."""


class Checkpointer(Generic[P]):
    """Saves what `pack` makes of the progress, the global random state beside it."""

    def __init__(
        self,
        folder: Path,
        *,
        every: int,
        keep: int,
        pack: Callable[[P], SavedState],
        version: Callable[[], int],
        sync: Callable[[], None],
        note: Callable[[str], None],
        resume_command: str,
        max_snapshot_bytes: int = MAX_SNAPSHOT_BYTES,
        check: Callable[[checkpoints.Checkpoint], None] = lambda saved: None,
        sharded: ShardedState[P] | None = None,
    ) -> None:
        """folder: the run's. version: of the weights, which counts updates. sync: waits until the run's logs are on the disk.
        resume: the command that goes on, for messages. keeps: bytes of state, at most, of which a copy is
        kept at every step, so that what fails can be undone. check: raises CheckpointError for a checkpoint that lacks
        something, so that the one before it is taken. spread: how several processes save what they share;
        None = `pack` has it all."""
        self._max_snapshot_bytes, self._check, self._sharded = max_snapshot_bytes, check, sharded
        self._pending: BackgroundSave | None = None
        self.folder, self.every, self.keep = folder / "checkpoints", every, keep
        self._pack, self._version, self._sync, self._note, self._resume_command = (
            pack,
            version,
            sync,
            note,
            resume_command,
        )

    def restore(self) -> checkpoints.Checkpoint | None:
        """The newest intact checkpoint; the global random state is then its own.

        Raises:
            CheckpointError: checkpoints, and none of them intact.
        """
        keep_on_meta = self._sharded.is_sharded if self._sharded is not None else lambda name: False
        saved = checkpoints.load_latest(
            self.folder, warn=self._note, check=self._check_complete, keep_on_meta=keep_on_meta
        )
        if saved is not None:
            checkpoints.prune_quietly(self.folder, saved.step, self.keep, self.every)
            torch.set_rng_state(saved.tensors.pop("rng/torch"))
        return saved

    def _check_complete(self, saved: checkpoints.Checkpoint) -> None:
        random, current = saved.tensors.get("rng/torch"), torch.get_rng_state()
        if random is None or (random.dtype, random.shape) != (current.dtype, current.shape):
            raise CheckpointError(f"{saved.path} lacks the random state that a run goes on with")
        try:
            self._check(saved)
        except (KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{saved.path} lacks what a run goes on with: {error}") from error
        except CheckpointError as error:
            raise CheckpointError(f"{saved.path}: {error}") from error

    def start(self, progress: P) -> None:
        """The run goes on from here, and this much is saved, or is where it began."""
        self.saved = progress.step
        self._take_snapshot(progress)

    def on_step(self, progress: P, *, final: bool) -> None:
        """A step is done: a checkpoint, if it is time for one. Where several processes write it, the final one alone is waited for.

        Raises:
            CheckpointError: the final one cannot be written; that another cannot is a note.
        """
        if self._pending is not None and self._pending.done:
            self.wait_for_save()
        if final or progress.step % self.every == 0:
            try:
                self._save(progress, self.keep)
                if final:
                    self._wait_pending()
            except CheckpointError as error:
                if final:
                    raise
                self._note_failure(error)
        self._take_snapshot(progress)

    def _note_failure(self, error: CheckpointError) -> None:
        self._note(f"{error}. Training goes on, the next try is in {self.every} steps")

    def _wait_pending(self) -> None:
        """Waits for the checkpoint that is being written. Raises CheckpointError where it could not be."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.wait()
            self.saved = pending.step

    def wait_for_save(self) -> None:
        """Waits for it; that it could not be written is a note."""
        try:
            self._wait_pending()
        except CheckpointError as error:
            self._note_failure(error)

    def finish(self) -> None:
        """The run is over: checkpoints that stops have left between those of every so many steps are deleted."""
        checkpoints.prune_quietly(self.folder, self.saved, self.keep, self.every, finished=True)

    def rewind(self) -> P:
        """The last whole step's progress, saved: the one after it was broken off before it changed anything.

        Raises:
            CheckpointError: it cannot be written.
        """
        self.wait_for_save()
        if self.last.step > self.saved:
            self._sync()
            self._save_last(self.keep)
        return self.last

    def _take_snapshot(self, progress: P) -> None:
        """Remembers where the last whole step ended, and its state where that is not too large for it."""
        self.last, self.version, self.random = progress, self._version(), torch.get_rng_state()
        self.snapshot: SavedState | None = None
        if self._max_snapshot_bytes:
            tensors, values = self._pack(progress)
            if sum(t.nbytes for t in tensors.values()) <= self._max_snapshot_bytes:
                self.snapshot = {n: t.detach().to("cpu", copy=True) for n, t in tensors.items()}, deepcopy(values)

    def _save(self, progress: P, keep: int) -> None:
        self._sync()
        if self._sharded is None:
            self._write(progress, self._pack(progress), torch.get_rng_state(), keep)
        else:
            self.wait_for_save()
            self._start_sharded_save(self._sharded, progress, torch.get_rng_state(), keep)

    def _save_last(self, keep: int) -> None:
        """The last whole step bit for bit, whatever has come after it.

        Raises:
            CheckpointError: it cannot be written; its weights have moved on, and there is no copy of them.
        """
        if self.snapshot is None and self._version() != self.version:
            raise CheckpointError("the weights have moved since, and its state is too large for a copy to be kept")
        if self.snapshot is None and self._sharded is not None:
            self._start_sharded_save(self._sharded, self.last, self.random, keep)
            self._wait_pending()
        else:
            self._write(self.last, self.snapshot or self._pack(self.last), self.random, keep)

    def _start_sharded_save(self, spread: ShardedState[P], progress: P, random: Tensor, keep: int) -> None:
        """Every process copies its share; a thread here waits until they are on the disk, and writes the rest."""
        tensors, values = spread.pack(progress)
        local = {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}
        mark = f"-{secrets.token_hex(4)}"  # a process that has outlived its run may still write to another
        state = local | {"rng/torch": random}
        writer = checkpoints.CheckpointWriter(self.folder, progress.step, state, values, keep, mark, self.every)
        writer.begin()
        try:
            wait_for_shards = spread.start_save(writer.folder)
        except BaseException:
            writer.abandon()
            raise
        self._pending = BackgroundSave(progress.step, lambda: writer.finish(wait_for_shards))

    def _write(self, progress: P, saved: SavedState, random: Tensor, keep: int) -> None:
        tensors, values = saved
        state = tensors | {"rng/torch": random}
        checkpoints.save_checkpoint(self.folder, progress.step, state, values, keep=keep, every=self.every)
        self.saved = progress.step

    @contextmanager
    def save_on_error(self) -> Iterator[None]:
        """An error in the midst of a step leaves a checkpoint of the last whole one, and a note that says how to go on.

        Updates of the failed step that were taken before it failed are not in it: a resumed run does that step anew, from its
        beginning. Where the state is too large for a copy (`keeps`), it goes on from the checkpoint before. A second Ctrl-C is not
        an error: it ends the run at once.
        """
        try:
            yield
        except CheckpointError:  # it says itself what is left
            raise
        except Exception as error:
            message = self._rescue(error)
            error.add_note(message)
            self._note(message)
            raise

    def _rescue(self, error: Exception) -> str:
        last = self.last
        message = f"step {last.step + 1} failed"
        try:
            self.wait_for_save()
            if last.step > self.saved:
                # The logs are not waited for: it may be they that failed. The one before stays, should this lead to the same end.
                self._save_last(max(2, self.keep))
                message += f"; step {last.step} is saved"
        except Exception as failure:  # whatever a learner's state may raise: the first error is the one to see
            message += f", and step {last.step} could not be saved ({failure})"
        message += f": {self._resume_command} goes on from step {self.saved}"
        if not isinstance(error, NumericsError):
            return message
        remedy = f"correct {error.part} first" if error.part else "lower --lr or change --seed"
        return f"{message}; the same samples would have the same gradient, so {remedy}"
