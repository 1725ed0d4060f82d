"""Which of a task's columns a reward function takes, read from its signature."""

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from policygrad.errors import RewardError
from policygrad.rewards.base import EPISODE_COLUMNS, TRAINER_STATE
from policygrad.rewards.workers.messages import Samples


@dataclass(frozen=True)
class Signature:
    """The arguments that a reward function takes: it need not name every column of the task."""

    keywords: bool  # prompts and completions by keyword, else as the first two positional arguments
    accepted: frozenset[str] | None  # None: any column, it has **kwargs
    required: frozenset[str]  # columns without a default, and those that the attribute `required_columns` names
    episode: frozenset[str] = frozenset()
    """Columns of EPISODE_COLUMNS among the arguments, or in the attribute `episode_columns` of a function that calls others."""
    takes_state: bool = False  # an argument `trainer_state`, which is one for all samples of a call

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
        return cls(keywords, accepted, frozenset(required) - EPISODE_COLUMNS, episode, TRAINER_STATE in columns)

    def check_columns(self, reward: str, given: Iterable[str]) -> None:
        """Raise RewardError for a column that the function of this reward requires and that is not given."""
        names = [name for name in given if name not in EPISODE_COLUMNS]
        if missing := sorted(self.required - set(names)):
            raise RewardError(
                f"reward {reward!r} needs the column {missing[0]!r}, and the task has: {', '.join(names) or 'none'}; "
                "rename or add the column, or choose another reward"
            )

    def call(self, function: Callable[..., Any], samples: Samples) -> Any:
        prompts, completions, columns = samples
        chosen: dict[str, Any] = {
            k: v
            for k, v in columns.items()
            if (k in self.episode if k in EPISODE_COLUMNS else self.accepted is None or k in self.accepted)
        }
        if self.takes_state and chosen.get(TRAINER_STATE):
            chosen[TRAINER_STATE] = chosen[TRAINER_STATE][0]
        if not self.keywords:
            return function(prompts, completions, **chosen)
        if self.accepted is None or "prompts" in self.accepted:
            chosen["prompts"] = prompts
        return function(completions=completions, **chosen)
