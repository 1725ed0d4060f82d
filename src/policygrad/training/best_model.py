"""The best model of a run so far, by a metric of its evaluations: `RUN/best`, a model's folder with `best.json`.

A run that is killed and resumed has the same best model as one that was not. A checkpoint may be older than the best model, whose
step is then taken again, perhaps with another result; so the best model as of every checkpoint stays, in `best-earlier/step-N`,
until no checkpoint needs it. The log says which of them count: those whose evaluation it still holds. A model is written before its
evaluation is logged, and appears under a name only when it is complete, so that a kill at any time leaves one of the two states.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from policygrad.errors import ConfigError, RunError
from policygrad.utils.filesystem import fsync_path, write_atomically

BEST, EARLIER, BEST_FILE = "best", "best-earlier", "best.json"
ModelWriter = Callable[[Path, "BestStep"], object]
"""Writes the current model into a folder, atomically, with what `BestStep.add_to` adds."""


@dataclass(frozen=True)
class BestStep:
    """The step of a model, and its evaluation: the contents of `best.json`."""

    step: int
    metric: str
    value: float

    def add_to(self, folder: Path) -> None:
        write_atomically(folder / BEST_FILE, json.dumps(asdict(self), indent=1) + "\n")

    def __str__(self) -> str:
        return f"step {self.step}, {self.metric} {self.value:.4g}"


@dataclass(frozen=True)
class BestModel:
    """Keeps the best model in a run's folder. Of equal ones the first is the best."""

    run: Path
    metric: str
    higher: bool  # whether a higher value is better
    write: ModelWriter
    note: Callable[[str], None]

    def consider(self, step: int, values: Mapping[str, float]) -> None:
        """Write the current model if its evaluation is better than that of the best one. If that fails, or the metric has no
        value, the best one stays, and a note says why."""
        value = values.get(self.metric)
        if value is None or not math.isfinite(value):
            shown = "missing" if value is None else str(value)
            self.note(f"step {step}: {self.metric} is {shown}, so this model is not compared with the best one")
            return
        best, new = self.read(), BestStep(step, self.metric, float(value))
        if best is not None and not self._rank(new) > self._rank(best):
            return
        try:
            self.write(self._path(step), new)
            self._promote(new)
        except (RunError, OSError) as error:
            stays = f"the best model stays that of step {best.step}" if best else "there is no best model yet"
            self.note(f"step {step} has the best {self.metric} so far, {new.value:.4g}, and {error}; {stays}")

    @property
    def path(self) -> Path:
        """The folder of the best model."""
        return self.run / BEST

    def read(self) -> BestStep | None:
        """Return the best model's step and evaluation; None if there is none."""
        return _read(self.path)

    def restore(self, history: Mapping[int, float], logged: Callable[[str], Mapping[int, float]]) -> None:
        """Return to the best model of the log, after it was cut off at the checkpoint that the run resumes from.

        Args:
            history: The metric by step, as far as the log holds it.
            logged: The same of any metric: a run may be resumed with another one.
        """
        for path in (self.run / EARLIER).glob(".tmp-*"):  # a kill while it was written or deleted
            shutil.rmtree(path)
        valid = list[BestStep]()
        for path, candidate in list(self._candidates()):
            if logged(candidate.metric).get(candidate.step) == candidate.value and candidate.step in history:
                valid.append(BestStep(candidate.step, self.metric, history[candidate.step]))
            else:  # of a step that is taken again, or without a value of this metric
                self._delete(path)
        if not valid:
            return
        best, now = max(valid, key=self._rank), self.read()
        if now is None or now.step != best.step:
            self._promote(best)
        if self.read() != best:  # it was the best by another metric
            best.add_to(self.run / BEST)

    def prune(self, checkpoints: Sequence[int]) -> None:
        """Delete the models that were the best ones, except those that a run resumed from one of these checkpoints would need."""
        earlier = [candidate for _, candidate in self._candidates()]
        if len(earlier) < 2:
            return
        needed = {
            max(before, key=self._rank).step for c in checkpoints if (before := [x for x in earlier if x.step <= c])
        }
        for path, candidate in list(self._candidates()):
            if path.name != BEST and candidate.step not in needed:
                with contextlib.suppress(OSError):  # at the next step
                    self._delete(path)

    def _rank(self, model: BestStep) -> tuple[float, int]:
        return (model.value if self.higher else -model.value), -model.step

    def _path(self, step: int) -> Path:
        return self.run / EARLIER / f"step-{step:06d}"

    def _candidates(self) -> Iterator[tuple[Path, BestStep]]:
        for path in (self.run / BEST, *sorted((self.run / EARLIER).glob("step-*"))):
            if (candidate := _read(path)) is not None:
                yield path, candidate

    def _promote(self, new: BestStep) -> None:
        """Move the model of this step to RUN/best, and the one that is there to its own place. A kill in between leaves both in
        theirs, where `restore` finds them."""
        current = self.read()
        if (self.run / BEST).exists() and (current is None or current.step == new.step):
            self._delete(self.run / BEST)  # no model, or one of this step that was evaluated again
        elif current is not None:
            os.replace(self.run / BEST, self._path(current.step))
        os.replace(self._path(new.step), self.run / BEST)
        fsync_path(self.run)
        with contextlib.suppress(OSError):  # it holds an earlier one
            (self.run / EARLIER).rmdir()

    def _delete(self, path: Path) -> None:
        """Delete a model so that a kill midway leaves no half model under a model's name."""
        renamed = self.run / EARLIER / f".tmp-delete-{path.name}"
        renamed.parent.mkdir(exist_ok=True)
        shutil.rmtree(renamed, ignore_errors=True)
        os.replace(path, renamed)
        shutil.rmtree(renamed)


def check_best_metric(metric: str, available: Mapping[str, bool]) -> None:
    """Raise ConfigError if the run's evaluations do not produce the metric, or if it has no better and worse.

    Args:
        available: Whether a higher value is better, of each metric that can be chosen.
    """
    if metric not in available:
        names = ", ".join(available) or "none, as nothing is evaluated"
        raise ConfigError(f"checkpoint.keep_best={metric!r} is no metric of this run's evaluations: it has {names}")


def _read(folder: Path) -> BestStep | None:
    try:
        value: Any = json.loads((folder / BEST_FILE).read_bytes())
        return BestStep(int(value["step"]), str(value["metric"]), float(value["value"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None
