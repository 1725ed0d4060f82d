"""Which of a task's columns a reward function takes, read from its signature; and what functions of TRL are given to log with."""

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from policygrad.errors import RewardError
from policygrad.rewards.base import EPISODE_COLUMNS, TRAINER_STATE, LoggedRewards
from policygrad.rewards.workers.messages import MAX_METRIC_NAME, Samples, is_metric_name, to_number

LOG_METRIC, LOG_EXTRA = "log_metric", "log_extra"
LOG_FUNCTIONS = frozenset({LOG_METRIC, LOG_EXTRA})
"""Arguments that TRL calls a reward function with."""
_OTHER_LIBRARIES = {"verl": {"ground_truth", "ground_truths"}, "openrlhf": {"labels"}}
"""Required arguments by which a function of this library is known, after the two that are prompts and completions here."""


def log_nothing(name: str, value: Any) -> None:
    """Stand in for TRL's `log_extra`, a column of its table of completions, which is not logged here."""


class MetricLog(list[tuple[str, float]]):
    """TRL's `log_metric`: the (name, value) of each call."""

    def __call__(self, name: str, value: Any) -> None:
        """Add a number, or a tensor of one. NaN is left out, as TRL leaves it out of its means, and so is an infinite one."""
        number, reason = to_number(value)
        if reason == "type" or (number is None and reason is None):
            raise TypeError(f"log_metric({name!r}, …) takes a number, not {type(value).__name__}")
        if not is_metric_name(name):
            raise ValueError(f"log_metric takes a name of at most {MAX_METRIC_NAME} printable characters, not {name!r}")
        if number is not None:
            self.append((name, number))


def with_logged(returned: Any, logged: MetricLog) -> Any:
    """Return what a function returned, or will return, with what it has logged."""
    if not inspect.isawaitable(returned):
        return LoggedRewards(returned, tuple(logged))

    async def wait() -> LoggedRewards:
        return LoggedRewards(await returned, tuple(logged))

    return wait()


@dataclass(frozen=True)
class Signature:
    """The arguments that a reward function takes: it need not name every column of the task."""

    keywords: bool  # prompts and completions by keyword, else as the first two positional arguments
    accepted: frozenset[str] | None  # None: any column, it has **kwargs
    required: frozenset[str]  # columns without a default, and those that the attribute `required_columns` names
    episode: frozenset[str] = frozenset()
    """Columns of EPISODE_COLUMNS among the arguments, or in the attribute `episode_columns` of a function that calls others."""
    takes_state: bool = False  # an argument `trainer_state`, which is one for all samples of a call
    logs: frozenset[str] = frozenset()  # of LOG_FUNCTIONS among the arguments

    @classmethod
    def from_function(cls, function: Callable[..., Any]) -> "Signature":
        try:
            parameters = inspect.signature(function).parameters.values()
        except (ValueError, TypeError):  # a builtin without a signature
            return cls(False, None, frozenset())
        named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        names = frozenset(p.name for p in named)
        positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        open_ended = any(p.kind is p.VAR_KEYWORD for p in parameters)
        keywords = "completions" in names or (open_ended and not positional)
        columns = names - {"prompts", "completions"} if keywords else names - {p.name for p in positional[:2]}
        required = {p.name for p in named if p.name in columns and p.default is p.empty}
        required |= set(getattr(function, "required_columns", ()))
        episode = EPISODE_COLUMNS & (columns | set(getattr(function, "episode_columns", ())))
        accepted = None if open_ended else names
        logs = LOG_FUNCTIONS & columns
        return cls(
            keywords, accepted, frozenset(required - EPISODE_COLUMNS - logs), episode, TRAINER_STATE in columns, logs
        )

    def check_columns(self, reward: str, given: Iterable[str]) -> None:
        """Raise RewardError for a column that the function of this reward requires and that is not given."""
        names = [name for name in given if name not in EPISODE_COLUMNS]
        if missing := sorted(self.required - set(names)):
            raise RewardError(
                f"reward {reward!r} needs the column {missing[0]!r}, and the task has: {', '.join(names) or 'none'}; "
                f"rename or add the column, or choose another reward{self._suggest_prefix()}"
            )

    def _suggest_prefix(self) -> str:
        """Say which prefix functions with such arguments take; "" for anybody's."""
        kinds = [kind for kind, names in _OTHER_LIBRARIES.items() if not self.required.isdisjoint(names)]
        return "".join(f". A function of {kind} is {kind}:FILE.py:NAME" for kind in kinds)

    def call(self, function: Callable[..., Any], samples: Samples) -> Any:
        prompts, completions, columns = samples
        logged = MetricLog()
        logs = {LOG_METRIC: logged, LOG_EXTRA: log_nothing}
        chosen: dict[str, Any] = {name: log for name, log in logs.items() if name in self.logs} | {
            k: v
            for k, v in columns.items()
            if (k in self.episode if k in EPISODE_COLUMNS else self.accepted is None or k in self.accepted)
        }
        if self.takes_state and chosen.get(TRAINER_STATE):
            chosen[TRAINER_STATE] = chosen[TRAINER_STATE][0]
        if not self.keywords:
            returned = function(prompts, completions, **chosen)
        else:
            if self.accepted is None or "prompts" in self.accepted:
                chosen["prompts"] = prompts
            returned = function(completions=completions, **chosen)
        return with_logged(returned, logged) if LOG_METRIC in self.logs else returned
