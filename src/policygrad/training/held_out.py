"""The problems a run is measured on, and what their scores are called."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from policygrad.rollout.evaluation import EvaluationResult
from policygrad.rollout.rollouter import Rollouter
from policygrad.tasks.types import Example
from policygrad.trackers import change
from policygrad.training.config.run import Run

Note = tuple[str, str]
"""A text, and its kind: of one kind only the first is shown."""


@dataclass
class HeldOut:
    """Held-out problems; none where nothing is measured."""

    run: Run
    examples: Sequence[Example] = ()
    binary: bool = True
    """Every score so far is 0 or 1."""

    def __bool__(self) -> bool:
        return bool(self.examples)

    def due(self, step: int) -> bool:
        """Whether there is an evaluation after this step, before the run's end."""
        every = self.run.evaluation.every
        return bool(every and 0 < step < self.run.steps and step % every == 0 and self)

    def evaluate(self, rollouter: Rollouter, progress: Callable[[int, int], None]) -> EvaluationResult:
        """Raises RewardError as a rollout does."""
        return rollouter.evaluate(self.examples, self.run.evaluation.samples, self.run.sampling, progress)

    def notes(self, found: EvaluationResult) -> Iterator[Note]:
        """What went wrong with rewards."""
        for message in found.messages:
            yield message, message.partition(" (completion ")[0]
        if found.failed:
            count = len(self.examples) * self.run.evaluation.samples
            text = f"{found.failed} of {count} held-out completions have no reward and count as 0"
            yield text, "held-out completions without a reward"

    def score(self, found: EvaluationResult) -> tuple[float | None, Mapping[str, float]]:
        """(mean, its numbers for the log); None where every reward failed."""
        if not found.scored:
            return None, {}
        self.binary = self.binary and found.binary
        numbers = {"held_out": found.mean, "held_out_stderr": found.standard_error()}
        return found.mean, numbers | self._of_parts(found)

    def _of_parts(self, found: EvaluationResult) -> dict[str, float]:
        """The mean by the part of a mix that a problem is of."""
        means = dict[str, list[float]]()
        for example, mean in zip(self.examples, found.means, strict=True):
            if part := getattr(example, "part", ""):
                means.setdefault(part, []).append(mean)
        return {f"held_out/from/{part}": fmean(each) for part, each in means.items()}

    def summary(self, before: float | None, after: float | None) -> dict[str, str]:
        """The scores before and after, for people."""
        if not self:
            return {}
        if before is None and after is None:
            return {"held-out": "nothing could be scored, before or after: see the notes about the reward functions"}
        name = f"held-out {'accuracy' if self.binary else 'reward'}"
        if before is None or after is None:
            first, last = ("not scored" if score is None else f"{score:.2f}" for score in (before, after))
            return {name: f"{first} -> {last}"}
        return {name: change(before, after)}
