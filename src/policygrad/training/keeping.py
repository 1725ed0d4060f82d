"""When a run's progress is saved: every so many steps, at its end, and when a step fails."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from policygrad.checkpoint.format import CheckpointError
from policygrad.learners.base import Learner
from policygrad.trackers import RunFiles
from policygrad.training.config.run import Run
from policygrad.training.loop import Progress
from policygrad.training.saving import save_progress


class Keeper:
    """Saves what outlives a step. `extra`: what a session wants to find again beside it."""

    def __init__(
        self,
        folder: Path,
        run: Run,
        learner: Learner,
        files: RunFiles,
        progress: Progress,
        extra: Callable[[], dict[str, Any]],
        note: Callable[[str], None],
    ) -> None:
        self.folder, self.run, self.learner, self.files, self.extra, self.note = (
            folder,
            run,
            learner,
            files,
            extra,
            note,
        )
        self.saved = progress.step
        self._whole(progress)

    def keep(self, progress: Progress, *, final: bool) -> None:
        """A step is done: a checkpoint, if it is time for one.

        Raises:
            CheckpointError: the final one cannot be written; that another cannot is a note.
        """
        every = self.run.checkpoint.every
        if final or progress.step % every == 0:
            try:
                self._save(progress, self.run.checkpoint.keep)
            except CheckpointError as error:
                if final:
                    raise
                self.note(f"{error}. Training goes on, the next try is in {every} steps")
        self._whole(progress)

    def _whole(self, progress: Progress) -> None:
        """Remembers where the last whole step ended."""
        self.last, self.version = progress, self.learner.version

    def _save(self, progress: Progress, keep: int) -> None:
        self.files.sync()
        run = replace(self.run, checkpoint=replace(self.run.checkpoint, keep=keep))
        save_progress(self.folder, run, self.learner, progress, self.extra())
        self.saved = progress.step

    @contextmanager
    def rescuing(self) -> Iterator[None]:
        """An error in the midst of a step leaves a checkpoint of the last whole one, and a note that says how to go on.

        Updates of the failed step that were taken before it failed are in the weights that are saved; a resumed run samples
        that step anew, from them. A second Ctrl-C is not an error: it ends the run at once.
        """
        try:
            yield
        except CheckpointError:  # it says itself what is left
            raise
        except Exception as error:
            said = self._rescue(isinstance(error, FloatingPointError))
            error.add_note(said)
            self.note(said)
            raise

    def _rescue(self, by_numbers: bool) -> str:
        last, moved = self.last, self.learner.version - self.version
        said = f"step {last.step + 1} failed"
        try:
            if last.step > self.saved:
                self._save(
                    last, max(2, self.run.checkpoint.keep)
                )  # the one before stays, should this lead to the same end
                said += f"; step {last.step} is saved"
                said += f", with {moved} update{'s' * (moved > 1)} of the failed step in its weights" if moved else ""
        except (RuntimeError, OSError) as failure:
            said += f", and step {last.step} could not be saved ({failure})"
        said += f": policygrad train --resume {self.folder} goes on from step {self.saved}"
        return said + ("; the same samples would have the same gradient, so lower --lr or change --seed" * by_numbers)
