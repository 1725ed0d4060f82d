"""What a task is: prompts for training, and fixed held-out prompts to measure with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
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
    def eval_on_train(self) -> bool:
        """Too few prompts to hold any out: evaluation is on the training prompts."""
        ...

    @property
    def rows(self) -> Sequence[Example]:
        """All of them where they are in memory, so that they can be checked before training; else ()."""
        ...

    def train_example(self, index: int) -> Example:
        """The training example with this number (0, 1, 2, ... without end), a pure function of (seed, index)."""
        ...

    def eval_examples(self, count: int) -> list[Example]:
        """Evaluation examples, the same for every seed, disjoint from training by a hash of the prompt."""
        ...


# The one rule that separates held-out prompts from training prompts.

EVAL_ONE_IN = 16


def is_eval_prompt(prompt: str) -> bool:
    """Say whether a question belongs to the held-out split.

    The rule looks only at the question's own text (without the newline that
    closes a model prompt), so the split needs no list on disk, does not depend
    on seeds or on the order of generation, and is the same for the text that
    the base model was trained on, for the RL prompts and for evaluation.
    """
    return int(sha256(prompt.encode("utf-8")).hexdigest(), 16) % EVAL_ONE_IN == 0


# Draws from a hash, for which there is no generator's state to save.


def hash_int(text: str, bound: int) -> int:
    """In [0, bound), the same for the same text."""
    return int.from_bytes(sha256(text.encode()).digest()[:16], "big") % bound


def hash_choice(salt: str, index: int, weights: Sequence[float]) -> int:
    """A place among the weights, each as often as its weight says; a pure function of salt and index."""
    point = hash_int(f"{salt}:{index}", 1 << 53) / (1 << 53) * sum(weights)
    for number, weight in enumerate(weights):
        point -= weight
        if point < 0:
            return number
    return max(number for number, weight in enumerate(weights) if weight)


# The number of an example of a task that has levels of difficulty says at which it is made.

LEVEL_STRIDE = 1 << 40
"""Examples of a level."""


def encode_level_index(index: int, level: int) -> int:
    """The number of a level's example with this index; of level 0, the index."""
    return level * LEVEL_STRIDE + index


def decode_level_index(place: int) -> tuple[int, int]:
    """(level, index) of an example's number."""
    return divmod(place, LEVEL_STRIDE)
