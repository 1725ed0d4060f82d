"""The task protocol: prompts for training by index, and a fixed set of evaluation prompts."""

from __future__ import annotations

import contextlib
import json
import random
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any, Protocol, runtime_checkable

from policygrad.utils.message_parts import to_plain

Message = Mapping[str, Any]
"""`role` and `content`, text, `tool_calls` and what else its template reads. A content with pictures is a tuple of parts:
`{"type": "text", "text": ...}` and `{"type": "image", "image": Picture}`."""
Prompt = str | tuple[Message, ...]


@dataclass(frozen=True)
class Example:
    """A prompt, and the data needed to score a completion of it.

    `prompt` is plain text, used verbatim, or chat messages (dicts with `role` and `content`) that the tokenizer's chat
    template renders later. `columns` holds everything else and reaches the reward functions as keyword lists. The column
    `demonstration` is read by algorithms that learn from given answers: see `rollout/demonstrations.py`.
    """

    prompt: Prompt
    columns: Mapping[str, Any] = field(default_factory=dict)
    source: str = field(default="", compare=False)
    """Location, e.g. `sums.jsonl:12`, for error messages."""
    part: str = field(default="", compare=False)
    """Name of the part of a mixture that the example comes from, for metrics."""
    tools: Sequence[Mapping[str, Any]] = ()
    """Functions' schemas that the chat template shows, from the column `tools`. An environment shows its own."""


class Task(Protocol):
    """A source of prompts by index. It keeps no state, so a resumed run needs only the next index."""

    @property
    def name(self) -> str: ...
    @property
    def rewards(self) -> tuple[str, ...]:
        """Names of the rewards that fit this task; () when the user must choose."""

    @property
    def steps(self) -> tuple[str, ...]:
        """Names of the process rewards that fit this task, for algorithms that use step rewards; () = none."""

    @property
    def eval_on_train(self) -> bool:
        """True when there are too few prompts to hold any out, so that evaluation uses the training prompts."""

    @property
    def rows(self) -> Sequence[Example]:
        """All examples when they are known in advance, so that they can be checked before training; else ()."""

    def train_example(self, index: int) -> Example:
        """Return the training example with this index (0, 1, 2, … without end), a pure function of (seed, index)."""

    def eval_examples(self, count: int) -> list[Example]:
        """Return evaluation examples: the same for every seed, and disjoint from training by a hash of the prompt."""


@runtime_checkable
class LeavesRowsOut(Protocol):
    """A task of data, from which rows can be left out."""

    def without_bad_rows(self, check: Callable[[Example], object]) -> Task:
        """Return the task without the rows for which `check` raises; they are counted in a warning."""


EVAL_ONE_IN = 16


def is_eval_prompt(prompt: str) -> bool:
    """Return True when a question belongs to the evaluation split.

    The rule reads only the question's own text (without the newline that closes a model prompt). The split therefore needs
    no list on disk, does not depend on seeds or on the order of generation, and is the same for the text that the base
    model was trained on, for the RL prompts and for evaluation.
    """
    return int(sha256(prompt.encode("utf-8")).hexdigest(), 16) % EVAL_ONE_IN == 0


def prompt_key(prompt: Prompt) -> str:
    """Return the text that decides whether a prompt is an evaluation prompt: itself, or its messages, pictures by digest."""
    return prompt if isinstance(prompt, str) else json.dumps(to_plain(prompt), sort_keys=True, ensure_ascii=False)


# Random choices come from a hash, so there is no generator state to save.


def hash_int(text: str, bound: int) -> int:
    """Map a text to an integer in [0, bound)."""
    return int.from_bytes(sha256(text.encode()).digest()[:16], "big") % bound


def hash_choice(salt: str, index: int, weights: Sequence[float]) -> int:
    """Choose an index into `weights` with probability proportional to the weight; a pure function of salt and index."""
    point = hash_int(f"{salt}:{index}", 1 << 53) / (1 << 53) * sum(weights)
    for number, weight in enumerate(weights):
        point -= weight
        if point < 0:
            return number
    return max(number for number, weight in enumerate(weights) if weight)


class IsolatedRandom:
    """States of Python's and numpy's global generators for code that uses them, such as reasoning-gym's and TextArena's."""

    _lock = threading.Lock()

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self._states: tuple[Any, Any] | None = None

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        """Activate the states for the duration of the context, then restore the previous ones."""
        import numpy

        with self._lock:
            before = random.getstate(), numpy.random.get_state()
            if self._states is None:
                random.seed(self.seed)
                numpy.random.seed(self.seed % (1 << 32))
            else:
                random.setstate(self._states[0])
                numpy.random.set_state(self._states[1])
            try:
                yield
            finally:
                self._states = random.getstate(), numpy.random.get_state()
                random.setstate(before[0])
                numpy.random.set_state(before[1])


# In a task with difficulty levels, an example's index encodes its level.

LEVEL_STRIDE = 1 << 40  # examples per level


def encode_level_index(index: int, level: int) -> int:
    """Return the task index of example `index` at `level`; at level 0 it is `index` itself."""
    return level * LEVEL_STRIDE + index


def decode_level_index(number: int) -> tuple[int, int]:
    """Split a task index into (level, index)."""
    return divmod(number, LEVEL_STRIDE)
