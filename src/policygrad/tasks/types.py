"""What a task is: prompts for training, and fixed held-out prompts to measure with."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

Prompt = str | tuple[dict[str, str], ...]


@dataclass(frozen=True)
class Example:
    """One prompt and what is needed to judge a completion of it.

    `prompt` is plain text, used as it stands, or chat messages (dicts with `role` and `content`) that the tokenizer's
    template renders later. `columns` holds everything else; it reaches the reward functions as keyword lists.
    """

    prompt: Prompt
    columns: Mapping[str, Any] = field(default_factory=dict)
    source: str = field(default="", compare=False)
    """Where it stands, e.g. `sums.jsonl:12`, for error messages."""


class Task(Protocol):
    """Prompts by number. Nothing is drawn and then lost: a resumed run needs only the next index."""

    name: str
    rewards: tuple[str, ...]  # names of the rewards that fit this task; () when the user has to choose
    steps: tuple[str, ...]  # names of the process rewards that fit it, for algorithms that look at steps; () = none
    held_out_is_train: bool  # True: too few prompts to hold any out, evaluation is on the training prompts
    rows: Sequence[
        Example
    ]  # all of them where they are in memory, so that they can be checked before training; else ()

    def train(self, index: int) -> Example:
        """The training example with this number (0, 1, 2, ... without end), a pure function of (seed, index)."""
        ...

    def held_out(self, count: int) -> list[Example]:
        """Evaluation examples, the same for every seed, disjoint from training by a hash of the prompt."""
        ...
