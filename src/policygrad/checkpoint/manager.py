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
from policygrad.checkpoint.shards import Pending, Saved, Spread
from policygrad.errors import CheckpointError, NumericsError


class Stepped(Protocol):
    """What outlives a step."""

    @property
    def step(self) -> int:
        """Steps done."""
        ...


P = TypeVar("P", bound=Stepped)
KEPT = 2**30
"""Bytes."""


class Checkpointer(Generic[P]):
    """Saves what `pack` makes of the progress, the global random state beside it."""

    def __init__(
        self,
        folder: Path,
        *,
        every: int,
        keep: int,
        pack: Callable[[P], Saved],
        version: Callable[[], int],
        sync: Callable[[], None],
        note: Callable[[str], None],
        resume: str,
        keeps: int = KEPT,
        check: Callable[[checkpoints.Checkpoint], None] = lambda saved: None,
        spread: Spread[P] | None = None,
    ) -> None:
        """folder: the run's. version: of the weights, which counts updates. sync: waits until the run's logs are on the disk.
        resume: the command that goes on, for messages. keeps: bytes of state, at most, of which a copy is
        kept at every step, so that what fails can be undone. check: raises CheckpointError for a checkpoint that lacks
        something, so that the one before it is taken. spread: how several processes save what they share;
        None = `pack` has it all."""
        self._keeps, self._check, self._spread = keeps, check, spread
        self._pending: Pending | None = None
        self.folder, self.every, self.keep = folder / "checkpoints", every, keep
        self._pack, self._version, self._sync, self._note, self._resume = pack, version, sync, note, resume

    def restore(self) -> checkpoints.Checkpoint | None:
        """The newest intact checkpoint; the global random state is then its own.

        Raises:
            CheckpointError: checkpoints, and none of them intact.
        """
        leave = self._spread.leave if self._spread is not None else lambda name: False
        saved = checkpoints.load_latest(self.folder, warn=self._note, check=self._complete, leave=leave)
        if saved is not None:
            checkpoints.tidy(self.folder, saved.step, self.keep, self.every)
            torch.set_rng_state(saved.tensors.pop("rng/torch"))
        return saved

    def _complete(self, saved: checkpoints.Checkpoint) -> None:
        random, own = saved.tensors.get("rng/torch"), torch.get_rng_state()
        if random is None or (random.dtype, random.shape) != (own.dtype, own.shape):
            raise CheckpointError(f"{saved.path} lacks the random state that a run goes on with")
        try:
            self._check(saved)
        except (KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{saved.path} lacks what a run goes on with: {error}") from error
        except CheckpointError as error:
            raise CheckpointError(f"{saved.path}: {error}") from error

    def begin(self, progress: P) -> None:
        """The run goes on from here, and this much is saved, or is where it began."""
        self.saved = progress.step
        self._whole(progress)

    def after(self, progress: P, *, final: bool) -> None:
        """A step is done: a checkpoint, if it is time for one. Where several processes write it, the final one alone is waited for.

        Raises:
            CheckpointError: the final one cannot be written; that another cannot is a note.
        """
        if self._pending is not None and self._pending.done:
            self.settle()
        if final or progress.step % self.every == 0:
            try:
                self._save(progress, self.keep)
                if final:
                    self._end()
            except CheckpointError as error:
                if final:
                    raise
                self._failed(error)
        self._whole(progress)

    def _failed(self, error: CheckpointError) -> None:
        self._note(f"{error}. Training goes on, the next try is in {self.every} steps")

    def _end(self) -> None:
        """Waits for the checkpoint that is being written. Raises CheckpointError where it could not be."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.wait()
            self.saved = pending.step

    def settle(self) -> None:
        """Waits for it; that it could not be written is a note."""
        try:
            self._end()
        except CheckpointError as error:
            self._failed(error)

    def finish(self) -> None:
        """The run is over: checkpoints that stops have left between those of every so many steps are deleted."""
        checkpoints.tidy(self.folder, self.saved, self.keep, self.every, finished=True)

    def back(self) -> P:
        """The last whole step's progress, saved: the one after it was broken off before it changed anything.

        Raises:
            CheckpointError: it cannot be written.
        """
        self.settle()
        if self.last.step > self.saved:
            self._sync()
            self._save_last(self.keep)
        return self.last

    def _whole(self, progress: P) -> None:
        """Remembers where the last whole step ended, and its state where that is not too large for it."""
        self.last, self.version, self.random = progress, self._version(), torch.get_rng_state()
        self.kept: Saved | None = None
        if self._keeps:
            tensors, values = self._pack(progress)
            if sum(t.nbytes for t in tensors.values()) <= self._keeps:
                self.kept = {n: t.detach().to("cpu", copy=True) for n, t in tensors.items()}, deepcopy(values)

    def _save(self, progress: P, keep: int) -> None:
        self._sync()
        if self._spread is None:
            self._write(progress, self._pack(progress), torch.get_rng_state(), keep)
        else:
            self.settle()
            self._begin(self._spread, progress, torch.get_rng_state(), keep)

    def _save_last(self, keep: int) -> None:
        """The last whole step bit for bit, whatever has come after it.

        Raises:
            CheckpointError: it cannot be written; its weights have moved on, and there is no copy of them.
        """
        if self.kept is None and self._version() != self.version:
            raise CheckpointError("the weights have moved since, and its state is too large for a copy to be kept")
        if self.kept is None and self._spread is not None:
            self._begin(self._spread, self.last, self.random, keep)
            self._end()
        else:
            self._write(self.last, self.kept or self._pack(self.last), self.random, keep)

    def _begin(self, spread: Spread[P], progress: P, random: Tensor, keep: int) -> None:
        """Every process copies its share; a thread here waits until they are on the disk, and writes the rest."""
        tensors, values = spread.pack(progress)
        own = {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}
        mark = f"-{secrets.token_hex(4)}"  # a process that has outlived its run may still write to another
        state = own | {"rng/torch": random}
        saving = checkpoints.Saving(self.folder, progress.step, state, values, keep, mark, self.every)
        saving.begin()
        try:
            written = spread.begin(saving.folder)
        except BaseException:
            saving.abandon()
            raise
        self._pending = Pending(progress.step, lambda: saving.finish(written))

    def _write(self, progress: P, saved: Saved, random: Tensor, keep: int) -> None:
        tensors, values = saved
        state = tensors | {"rng/torch": random}
        checkpoints.save(self.folder, progress.step, state, values, keep=keep, every=self.every)
        self.saved = progress.step

    @contextmanager
    def rescuing(self) -> Iterator[None]:
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
            said = self._rescue(error)
            error.add_note(said)
            self._note(said)
            raise

    def _rescue(self, error: Exception) -> str:
        last = self.last
        said = f"step {last.step + 1} failed"
        try:
            self.settle()
            if last.step > self.saved:
                # The logs are not waited for: it may be they that failed. The one before stays, should this lead to the same end.
                self._save_last(max(2, self.keep))
                said += f"; step {last.step} is saved"
        except Exception as failure:  # whatever a learner's state may raise: the first error is the one to see
            said += f", and step {last.step} could not be saved ({failure})"
        said += f": {self._resume} goes on from step {self.saved}"
        if not isinstance(error, NumericsError):
            return said
        remedy = f"correct {error.part} first" if error.part else "lower --lr or change --seed"
        return f"{said}; the same samples would have the same gradient, so {remedy}"
