"""The tracker protocol: receivers of a run's metrics, such as its files, a terminal, a notebook or a service.

It is the same for reinforcement learning, fine-tuning and reward models. A run calls, in this order:

    start, (phase | log_evaluation | log | note)*, finish, close

`phase` and `note` may also be called before `start`, for example while the model is loaded. `finish` is not called when the run
fails; `close` always is.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Self

from policygrad.errors import ConfigError
from policygrad.utils.message_parts import content_text


@dataclass(frozen=True)
class RunInfo:
    """Description of a run. It ends with its last step, or when its token budget is used up if that is first."""

    title: str
    facts: Mapping[str, str] = field(default_factory=dict)
    """Name and value of facts to display, such as the model."""
    steps: int = 1
    """Number of the last step."""
    first_step: int = 1
    """First step of this process."""
    history: Sequence[tuple[int, float]] = ()
    """(step, reward) of earlier steps."""
    token_budget: int | None = None
    """Sampled tokens after which the run ends; None = no budget."""
    sampled_tokens: int = 0
    """Tokens sampled before the first step."""
    step_unit: str = "step"
    """Word for one step: `step`, or `update` of a controller."""
    token_unit: str = "tokens"
    """Word for what the budget counts. The metric for a step's share is always `tokens/sampled`."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """The resolved configuration as nested plain values."""
    folder: Path | None = None
    """The run's folder."""


@dataclass(frozen=True)
class Sample:
    """One completion to display."""

    prompt: str
    completion: str
    reward: float | None = None


STOP_SUMMARY = ("stopped after", "resume with")
"""What the summary of a stopped run has, and that of a finished one has not."""


class Tracker:
    """Base class whose methods do nothing: override those you need. All calls come from the training thread.

    A tracker that raises an error is dropped with a warning, unless it is `essential`. `with tracker:` closes it.
    """

    essential: ClassVar[bool] = False
    """True if an error of this tracker ends the run, as for the run's own files; False for services."""
    records_spans: ClassVar[bool] = False
    """True if this tracker needs the run's spans (`policygrad.utils.spans`), which are recorded only then."""

    def start(self, info: RunInfo) -> None:
        """Start a run, before its first step."""

    def log(self, step: int, metrics: Mapping[str, float], completions: Sequence[Mapping[str, Any]] = ()) -> None:
        """Log the finished step `step` (from 1).

        Args:
            metrics: All metrics of the step; any of them may be absent or not finite.
            completions: Rows with `prompt` (text, or messages with `role` and `content`), `completion`, `reward` (None if all
                reward functions failed), and where available `advantage`, `tokens`, `truncated` and more.
        """

    def log_evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log evaluation metrics of the weights after step `step` (0 = before training). `log` does not repeat them."""

    def note(self, text: str) -> None:
        """Show a warning or remark that must remain visible."""

    def phase(self, text: str, done: int = 0, total: int = 0) -> None:
        """Show the current activity, such as an evaluation, with its progress if `total` is not 0.

        It ends at `done == total > 0`, at the next `log`, or when the text is "".
        """

    def finish(self, summary: Mapping[str, str]) -> None:
        """End a run that is complete, or was stopped and can be resumed. `summary`: names and values to display."""

    def close(self) -> None:
        """Release resources such as the terminal or a file. Called also after an error; may be called twice."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def choose_sample(step: int, completions: Sequence[Mapping[str, Any]]) -> Sample | None:
    """Choose a completion of the policy to display, a different one at each step; None without any."""
    rows = [row for row in completions if not row.get("demonstration")]
    if not rows:
        return None
    row = rows[step % len(rows)]
    return Sample(format_prompt(row.get("prompt", "")), str(row.get("completion", "")), row.get("reward"))


def format_prompt(prompt: str | Iterable[Mapping[str, Any]]) -> str:
    """Return a prompt as text, chat messages as `role: content`."""
    if isinstance(prompt, str):
        return prompt
    return "\n".join(f"{message['role']}: {content_text(message['content'])}" for message in prompt)


class CompositeTracker(Tracker):
    """Several trackers as one, called in the order given.

    A tracker that raises an error is closed and dropped, with a note to the others and a Python warning. Errors of essential
    trackers, KeyboardInterrupt and SystemExit are raised. `with CompositeTracker(...)` closes all.

    Raises:
        ConfigError: An object is not a tracker, such as a class instead of an instance.
    """

    essential = True  # it raises only errors of essential trackers

    def __init__(self, trackers: Iterable[Tracker] = ()) -> None:
        self._trackers = list(trackers)
        for tracker in self._trackers:
            if not isinstance(tracker, Tracker):
                raise ConfigError(f"{tracker!r} is not a tracker: pass instances of subclasses of policygrad.Tracker")

    def add(self, tracker: Tracker) -> None:
        """Add a tracker before all others, so that its files are written before others display anything."""
        self._trackers.insert(0, tracker)

    def start(self, info: RunInfo) -> None:
        self._each("start", info)

    def log(self, step: int, metrics: Mapping[str, float], completions: Sequence[Mapping[str, Any]] = ()) -> None:
        self._each("log", step, metrics, completions)

    def log_evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        self._each("log_evaluation", step, metrics)

    def note(self, text: str) -> None:
        self._each("note", text)

    def phase(self, text: str, done: int = 0, total: int = 0) -> None:
        self._each("phase", text, done, total)

    def finish(self, summary: Mapping[str, str]) -> None:
        self._each("finish", summary)

    def close(self) -> None:
        """Close all trackers, the last first, even if one raises an error; that of an essential one is raised at the end."""
        with ExitStack() as stack:
            for tracker in self._trackers:
                stack.callback(self._call, tracker, "close")

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        try:
            self.close()
        except Exception as failure:
            if error is None:
                raise
            # the first error is the cause
            error.add_note(f"closing the trackers failed too: {_describe_error(failure)}")

    def _each(self, method: str, *args: Any) -> None:
        for tracker in tuple(self._trackers):
            if any(tracker is other for other in self._trackers):  # it may have been dropped by a failed note
                self._call(tracker, method, *args)

    def _call(self, tracker: Tracker, method: str, *args: Any) -> None:
        try:
            getattr(tracker, method)(*args)
        except Exception as error:
            if tracker.essential:
                raise
            self._trackers = [other for other in self._trackers if other is not tracker]
            failure = f"{type(tracker).__name__}.{method} failed ({_describe_error(error)})"
            message = f"{failure}; the run continues without this tracker"
            if method != "close":
                try:
                    tracker.close()
                except Exception as second:
                    message += f", and closing it failed too ({_describe_error(second)})"
            self.note(message)
            warnings.warn(message, stacklevel=2)


def _describe_error(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
