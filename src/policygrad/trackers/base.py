"""What follows a run and tells others of it: the run's files, a terminal, a notebook, a service.

One protocol for reinforcement learning, fine-tuning, reward models and control. The calls of a run, in this order:

    start, (phase | log_evaluation | log | note)*, finish, close

`phase` and `note` may also come before `start`, such as while the model is loaded; `finish` is left out when the run fails; `close`
comes always.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Self

from policygrad.errors import ConfigError


@dataclass(frozen=True)
class RunInfo:
    """A run, for those who have not seen it yet: it ends with its last step, or with its token budget if that is first."""

    title: str
    facts: Mapping[str, str] = field(default_factory=dict)
    """Name and value, for people: the model, the batch."""
    steps: int = 1
    """The last one's number."""
    first_step: int = 1
    """The first that this process does."""
    history: Sequence[tuple[int, float]] = ()
    """(step, reward) of those before it."""
    token_budget: int | None = None
    """Sampled tokens after which the run ends; None = no such budget."""
    sampled_tokens: int = 0
    """Tokens sampled before the first step."""
    step_unit: str = "step"
    """What is counted, in one word: a step of training, an update of a controller."""
    token_unit: str = "tokens"
    """What the budget counts, where there is one; the metric of how many a step took is `tokens/sampled` whatever they are."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """The configuration as resolved, nested, of plain values."""
    folder: Path | None = None
    """Where the run keeps its files."""


@dataclass(frozen=True)
class Sample:
    """One completion to look at."""

    prompt: str
    completion: str
    reward: float | None = None


class Tracker:
    """Does nothing at every call: override those that matter. One call at a time, all from the thread that trains.

    A tracker that raises is dropped with a warning and the run goes on, unless it is `essential`. `with tracker:` closes it.
    """

    essential: ClassVar[bool] = False
    """Whether the run ends with the error when this tracker raises; its own files are essential, a service is not."""

    def start(self, info: RunInfo) -> None:
        """What the run sets out to do, before its first step."""

    def log(self, step: int, metrics: Mapping[str, float], completions: Sequence[Mapping[str, Any]] = ()) -> None:
        """Step number `step` (from 1) is done.

        metrics: all there are of this step; any may be absent, or not finite.
        completions: a row each, with `prompt` (text, or messages with `role` and `content`), `completion` and `reward` (None where
            every reward function failed), and where it is known `advantage`, `tokens`, `truncated` and more.
        """

    def log_evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """What was measured on held-out data with the weights after step `step` (0 = before training); `log` does not repeat it."""

    def note(self, text: str) -> None:
        """A warning or a remark that has to stay readable."""

    def phase(self, text: str, done: int = 0, total: int = 0) -> None:
        """What happens now, such as an evaluation or a part of a long step, and how far it is where `total` is not 0.

        It is over at `done == total > 0`, at the next `log`, and when the text is "".
        """

    def finish(self, summary: Mapping[str, str]) -> None:
        """The run is over, or stopped resumably; `summary` is name and value, such as `change(before, after)`."""

    def close(self) -> None:
        """Gives back what is held, such as the terminal or a file; also after an error, and twice does no harm."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def choose_sample(step: int, completions: Sequence[Mapping[str, Any]]) -> Sample | None:
    """The completion of this step that people are shown, another one of the policy's own at each step; None without any."""
    rows = [row for row in completions if not row.get("demonstration")]
    if not rows:
        return None
    row = rows[step % len(rows)]
    return Sample(format_prompt(row.get("prompt", "")), str(row.get("completion", "")), row.get("reward"))


def format_prompt(prompt: str | Iterable[Mapping[str, Any]]) -> str:
    """A prompt for people: chat messages as `role: content`."""
    if isinstance(prompt, str):
        return prompt
    return "\n".join(f"{message['role']}: {message['content']}" for message in prompt)


# Several trackers as one: what a run talks to.


class CompositeTracker(Tracker):
    """Calls each tracker in the order given: first those whose word must be on the disk before others show it.

    One that raises is closed and dropped, with a warning through the others and Python's `warnings`; the run goes on. What an
    essential one raises goes through, as do Ctrl-C and exit. `with Trackers(...)` closes all.

    Raises:
        ConfigError: something that is no tracker, such as a class in the place of an instance.
    """

    essential = True  # what it raises itself was raised by an essential one

    def __init__(self, trackers: Iterable[Tracker] = ()) -> None:
        self._trackers = list(trackers)
        for tracker in self._trackers:
            if not isinstance(tracker, Tracker):
                raise ConfigError(f"{tracker!r} is no tracker: pass instances of subclasses of policygrad.Tracker")

    def add(self, tracker: Tracker) -> None:
        """Puts it before all others: what it is told is on the disk when others show it."""
        self._trackers.insert(0, tracker)

    def start(self, info: RunInfo) -> None:
        self._each("start", lambda tracker: tracker.start(info))

    def log(self, step: int, metrics: Mapping[str, float], completions: Sequence[Mapping[str, Any]] = ()) -> None:
        self._each("log", lambda tracker: tracker.log(step, metrics, completions))

    def log_evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        self._each("log_evaluation", lambda tracker: tracker.log_evaluation(step, metrics))

    def note(self, text: str) -> None:
        self._each("note", lambda tracker: tracker.note(text))

    def phase(self, text: str, done: int = 0, total: int = 0) -> None:
        self._each("phase", lambda tracker: tracker.phase(text, done, total))

    def finish(self, summary: Mapping[str, str]) -> None:
        self._each("finish", lambda tracker: tracker.finish(summary))

    def close(self) -> None:
        """Closes all, the last first, whatever one of them raises; an essential one's error is raised at the end."""
        with ExitStack() as stack:
            for tracker in self._trackers:
                stack.callback(self._call, tracker, "close", lambda tracker: tracker.close())

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        try:
            self.close()
        except Exception as failure:
            if error is None:
                raise
            error.add_note(
                f"afterwards, closing what follows the run failed: {_describe_error(failure)}"
            )  # the first error says more

    def _each(self, method: str, call: Callable[[Tracker], None]) -> None:
        for tracker in tuple(self._trackers):
            if any(tracker is other for other in self._trackers):  # not dropped meanwhile, by a note that failed
                self._call(tracker, method, call)

    def _call(self, tracker: Tracker, method: str, call: Callable[[Tracker], None]) -> None:
        try:
            call(tracker)
        except Exception as error:
            if tracker.essential:
                raise
            self._drop(
                tracker,
                f"{type(tracker).__name__}.{method} failed ({_describe_error(error)})",
                closing=method == "close",
            )

    def _drop(self, tracker: Tracker, failure: str, *, closing: bool) -> None:
        self._trackers = [other for other in self._trackers if other is not tracker]
        message = f"{failure}; the run goes on without this tracker"
        if not closing:
            try:
                tracker.close()
            except Exception as error:
                message += f", and closing it failed too ({_describe_error(error)})"
        self.note(message)
        warnings.warn(message, stacklevel=2)


def _describe_error(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
