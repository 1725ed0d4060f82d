"""What a task is: prompts for training, and fixed held-out prompts to measure with."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

Prompt = str | tuple[dict[str, str], ...]


@dataclass(frozen=True)
class Example:
    """One prompt and what is needed to judge a completion of it.

    `prompt` is plain text, used as it stands, or chat messages (dicts with `role` and `content`) that the tokenizer's
    template renders later. `columns` holds everything else; it reaches the reward functions as keyword lists. The column
    `demonstration` is read by algorithms that learn from answers that others wrote: see `rollout/demonstrations.py`.
    """

    prompt: Prompt
    columns: Mapping[str, Any] = field(default_factory=dict)
    source: str = field(default="", compare=False)
    """Where it stands, e.g. `sums.jsonl:12`, for error messages."""
    part: str = field(default="", compare=False)
    """Of a mix of data, the part that it is of, for metrics."""


class Task(Protocol):
    """Prompts by number. Nothing is drawn and then lost: a resumed run needs only the next index."""

    @property
    def name(self) -> str: ...
    @property
    def rewards(self) -> tuple[str, ...]:
        """Names of the rewards that fit this task; () when the user has to choose."""
        ...

    @property
    def steps(self) -> tuple[str, ...]:
        """Names of the process rewards that fit it, for algorithms that look at steps; () = none."""
        ...

    @property
    def held_out_is_train(self) -> bool:
        """Too few prompts to hold any out: evaluation is on the training prompts."""
        ...

    @property
    def rows(self) -> Sequence[Example]:
        """All of them where they are in memory, so that they can be checked before training; else ()."""
        ...

    def train(self, index: int) -> Example:
        """The training example with this number (0, 1, 2, ... without end), a pure function of (seed, index)."""
        ...

    def held_out(self, count: int) -> list[Example]:
        """Evaluation examples, the same for every seed, disjoint from training by a hash of the prompt."""
        ...
