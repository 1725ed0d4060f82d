"""Procedural tasks from reasoning-gym; this file and curricula.py alone import it in tasks, and only when a task is used."""

from __future__ import annotations

import contextlib
import copy
import difflib
import os
import random
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from itertools import count as count_from
from itertools import cycle, islice
from typing import Any

from policygrad.errors import DataError
from policygrad.tasks.base import EVAL_ONE_IN, Example, decode_level_index, hash_choice, hash_int, is_eval_prompt

# The task mix that goes with the embedded base model, as data.
#
# Every component names a reasoning-gym dataset and the configuration to create
# it with. Questions, reference answers and scoring are all reasoning-gym's own;
# nothing in this module imports it, so that listing the mix stays cheap.


@dataclass(frozen=True)
class Component:
    """One reasoning-gym dataset in a mix: its name, its share, its settings."""

    name: str
    weight: float
    config: dict[str, Any] = field(default_factory=dict)


EMBEDDED_MIX: tuple[Component, ...] = (
    # Arithmetic: "... 98 - 35 =", two numbers of two digits.
    Component("chain_sum", 1.0, {"min_terms": 2, "max_terms": 2, "min_digits": 2, "max_digits": 2}),
    # Algebra: "Solve for e: 5 - 8*e = -51", with a solution between 1 and 9.
    Component(
        "simple_equations",
        1.0,
        {
            "min_terms": 2,
            "max_terms": 2,
            "min_value": 1,
            "max_value": 9,
            "operators_weights": [0.5, 0.5, 0.0],
        },
    ),
    # Text: "Spell this word backward (example: sun -> nus): splat".
    Component("spell_backward", 1.0, {"min_word_len": 3, "max_word_len": 5}),
)

# What is worked out in several steps.
EMBEDDED_STEPS_MIX: tuple[Component, ...] = tuple(
    c for c in EMBEDDED_MIX if c.name in ("chain_sum", "simple_equations")
)

# Enough for the longest worked-out answer that the base model knows.
MAX_NEW_TOKENS = 32


def prompt_text(question: str) -> str:
    """Turn a question into the text handed to the model: the question and a newline.

    The base model has seen every question closed by exactly one newline, and
    its chat template renders a single user message the same way.
    """
    return question + "\n"


# Right answers to the problems of the embedded tasks, worked out the way the embedded model works: what a demonstration shows.


def extract_final_answer(entry: Mapping[str, Any]) -> str | None:
    """The reference answer of a reasoning-gym item where a reward looks for it; None where many answers are right."""
    return None if entry["answer"] is None else f"<answer>{entry['answer']}</answer>"


def worked_solution(dataset: str, entry: Mapping[str, Any]) -> str | None:
    """The same after its steps (tens and ones apart, the variable's term first, the word from its end), where they are known."""
    answer, steps = extract_final_answer(entry), _STEPS.get(dataset)
    return answer if answer is None or steps is None else f"Step by step: {', '.join(steps(entry))}. {answer}"


def _sum(entry: Mapping[str, Any]) -> list[str]:
    """90 - 10 = 80, 2 - 8 = -6: tens and ones, each added up."""
    first, *rest = entry["metadata"]["expression"].split()
    signs, numbers = rest[::2], [int(n) for n in (first, *rest[1::2])]
    said = []
    for digits in ([n - n % 10 for n in numbers], [n % 10 for n in numbers]):
        total = digits[0] + sum(n if sign == "+" else -n for sign, n in zip(signs, digits[1:], strict=True))
        left = " ".join([str(digits[0]), *(f"{sign} {n}" for sign, n in zip(signs, digits[1:], strict=True))])
        said.append(f"{left} = {total}")
    return said


def _equation(entry: Mapping[str, Any]) -> list[str]:
    """7*q = 35, q = 5: the variable's term, then the variable."""
    variable, solution = entry["metadata"]["variable"], int(entry["answer"])
    found = re.search(rf"(\d+)\*{variable}\b", entry["metadata"]["equation"])
    term = [f"{found.group(1)}*{variable} = {int(found.group(1)) * solution}"] if found else []
    return [*term, f"{variable} = {solution}"]


def _spelled(entry: Mapping[str, Any]) -> list[str]:
    """n-i-c-u-m: the word from its end."""
    return ["-".join(entry["answer"])]


_STEPS = {"chain_sum": _sum, "simple_equations": _equation, "spell_backward": _spelled}


PAGE_SIZE = 2048  # items per dataset object: a few datasets build all their items when they are created
MAX_TRIES = 64  # neighbouring items tried for one training example; all of them are held out with probability 16^-64
_HELD_OUT_SEED = "held-out"  # instead of the run's seed: every run is measured on the same problems
_UNSET = ("seed", "size")  # settings of reasoning-gym's own that the task decides
_HASH_ORDERED = frozenset(
    ("isomorphic_strings", "knight_swap", "polynomial_multiplication", "ransom_note", "word_ladder")
)  # they walk over sets of strings, so their items depend on PYTHONHASHSEED (measured with reasoning-gym 0.1.25)


@lru_cache(maxsize=1)
def dataset_names() -> tuple[str, ...]:
    """Names of every reasoning-gym dataset, sorted, without `composite` (a mix does that here)."""
    return tuple(sorted(set(load_dataset_table()) - {"composite"}))


@lru_cache(maxsize=1)
def load_dataset_table() -> Mapping[str, Any]:
    """reasoning-gym's own table of them. Importing it draws from the global generators, whose states are put back."""
    with _own_randomness(0):
        from reasoning_gym.factory import DATASETS

    table: Mapping[str, Any] = DATASETS
    return table


class ReasoningGymTask:
    """A weighted mix of reasoning-gym datasets, without end.

    Columns: `dataset` (reasoning-gym's name), `entry` (its whole item, what its scorer needs), `answer` (its reference
    answer, None where many answers are right) and `demonstration`, that answer as a completion (`worked`: after its steps).
    """

    rewards: tuple[str, ...] = ("reasoning_gym",)
    eval_on_train = False
    rows: tuple[Example, ...] = ()

    def __init__(
        self,
        name: str,
        components: Sequence[Component],
        *,
        seed: int = 0,
        steps: tuple[str, ...] = (),
        worked: bool = False,
    ) -> None:
        self.name = name
        self.worked = worked
        self.seed = seed
        self.steps = steps
        self._components = tuple(components)
        self._weights = tuple(component.weight for component in components)
        self._items = lru_cache(maxsize=4 * len(self._components))(self._create)
        self._pattern = lru_cache(maxsize=None)(self._find_pattern)
        for number, component in enumerate(self._components):
            check_component(component)
            self._items(number, 0, 0)  # so that a bad value is an error now, not at step 900

    def train_example(self, index: int) -> Example:
        if index < 0:
            raise IndexError(f"training examples are numbered from 0, got {index}")
        number = hash_choice(f"{self.seed}", index, self._weights)
        base = hash_int(f"{self.seed}/{number}", 1 << 31)
        for item in range(index * EVAL_ONE_IN, index * EVAL_ONE_IN + MAX_TRIES):
            entry = self._entry(number, base, item)
            if not is_eval_prompt(entry["question"]):
                return self._example(number, entry)
        raise DataError(
            f"task {self._components[number].name!r} has too few different problems: {MAX_TRIES} in a row were held-out "
            "ones; widen its settings (more terms, more digits), or write its problems to a .jsonl file"
        )

    def eval_examples(self, count: int) -> list[Example]:
        """`count` different held-out problems; fewer problems are the first of more. Raises DataError if too few."""
        found: list[Example] = []
        for number, entry in islice(self._held_out(set()), count):
            if entry is None:
                raise DataError(
                    f"task {self._components[number].name!r} has too few held-out problems: asked for {count}, found "
                    f"{len(found)} before it ran dry; ask for at most {len(found)}, or widen its settings"
                )
            found.append(self._example(number, entry))
        return found

    def iterate_unseen(self, seen: set[str]) -> Iterator[Example]:
        """Held-out problems one by one, none whose question is in `seen`, which they join; ends where a data set runs dry."""
        for number, entry in self._held_out(seen):
            if entry is None:
                return
            yield self._example(number, entry)

    def _held_out(self, seen: set[str]) -> Iterator[tuple[int, dict[str, Any] | None]]:
        """(component, its next held-out item or None), without end."""
        scans = [self._scan_held_out(number, seen) for number in range(len(self._components))]
        for draw in count_from():
            number = hash_choice(_HELD_OUT_SEED, draw, self._weights)
            yield number, next(scans[number], None)

    def _scan_held_out(self, number: int, seen: set[str]) -> Iterator[dict[str, Any]]:
        """Held-out items of one component that are not `seen` yet; ends when a long stretch brings nothing new."""
        base, dry = hash_int(f"{_HELD_OUT_SEED}/{self._components[number].name}", 1 << 31), 0
        for item in count_from():
            entry = self._entry(number, base, item)
            if is_eval_prompt(entry["question"]) and entry["question"] not in seen:
                seen.add(entry["question"])
                dry = 0
                yield entry
            elif (dry := dry + 1) > 128 * EVAL_ONE_IN:
                return

    def _example(self, number: int, entry: dict[str, Any]) -> Example:
        name = self._components[number].name
        shown = worked_solution(name, entry) if self.worked else extract_final_answer(entry)
        columns = {"dataset": name, "entry": entry, "answer": entry["answer"], "demonstration": shown}
        return Example(prompt_text(entry["question"]), columns)

    def _entry(self, number: int, base: int, item: int) -> dict[str, Any]:
        page, offset = divmod(item, PAGE_SIZE)
        dataset = self._items(number, base, page)
        with _own_randomness(base + item):
            entry: dict[str, Any] = dataset[offset]
            return entry

    def _create(self, number: int, base: int, page: int) -> Any:
        """The dataset of a page: a copy of the component's pattern with the page's seed, or made anew where it has none."""
        seed, pattern = (base + page * PAGE_SIZE) % (1 << 31), self._pattern(number)
        if pattern is None:
            return self._make(number, seed, PAGE_SIZE)
        dataset = copy.deepcopy(pattern)
        dataset.seed = seed
        dataset.config = replace(dataset.config, seed=seed)
        return dataset

    def _find_pattern(self, number: int) -> Any:
        """A dataset that nobody draws from; None where more than its seed hangs on its seed, so that a copy would not do."""
        one, other = (self._make(number, seed, 16) for seed in (0, 1))
        return self._make(number, 0, PAGE_SIZE) if _alike(one, other) else None

    def _make(self, number: int, seed: int, size: int) -> Any:
        import reasoning_gym

        component = self._components[number]
        try:
            with _own_randomness(seed):
                return reasoning_gym.create_dataset(component.name, seed=seed, size=size, **component.config)
        except (AssertionError, TypeError, ValueError) as error:
            raise DataError(f"task {component.name!r}: bad settings {component.config}: {error}") from error


def _alike(one: Any, other: Any) -> bool:
    """Whether two datasets differ in nothing but their seed, as far as `==` can tell."""
    mine, others = vars(one), vars(other)
    try:
        same = replace(one.config, seed=other.seed) == other.config and all(
            bool(mine[name] == others[name]) for name in mine.keys() - {"seed", "config"}
        )
    except (TypeError, ValueError):  # no dataclass; an array
        return False
    return same and mine.keys() == others.keys()


def check_component(component: Component) -> None:
    """Refuse settings that the dataset does not have, and say when its problems cannot be repeated."""
    keys = [f.name for f in fields(load_dataset_table()[component.name][1]) if f.name not in _UNSET]
    for key in component.config:
        if key in _UNSET:
            raise DataError(f"task {component.name!r}: {key!r} is not a setting of the task; the run's seed decides")
        if key not in keys:
            near = difflib.get_close_matches(key, keys, n=1, cutoff=0.0)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise DataError(f"task {component.name!r} has no setting {key!r}; {hint}It has {', '.join(keys) or 'none'}")
    if component.name in _HASH_ORDERED and not os.environ.get("PYTHONHASHSEED", "random").isdigit():
        warnings.warn(
            f"task {component.name!r}: reasoning-gym builds its problems in the order of Python's string hashes, so a "
            "resumed run and another run's evaluation see other problems; set PYTHONHASHSEED=0 to repeat them",
            stacklevel=4,
        )


@contextlib.contextmanager
def _own_randomness(seed: int) -> Iterator[None]:
    """Some datasets draw from, or seed, the global generators: give them their own and put the caller's back."""
    import numpy

    python_state, numpy_state = random.getstate(), numpy.random.get_state()
    random.seed(seed)
    numpy.random.seed(seed % (1 << 32))
    try:
        yield
    finally:
        random.setstate(python_state)
        numpy.random.set_state(numpy_state)


# Tasks whose difficulty has levels: data sets of reasoning-gym, at the settings that its own curricula give each level.

CURRICULUM_PREFIX = "curriculum:"


class CurriculumTask:
    """A weighted mix of reasoning-gym data sets, whose training examples are of the level that is asked for.

    A level is one of all attributes of all data sets together (reasoning-gym's `set_global_level`): each stands at it, or at its
    last one where it has fewer. Ranges include what is easier, as in reasoning-gym (`RangeAttributeMode.INCLUSIVE`). Held-out
    problems are of all levels in turn, the same for every run. Columns: those of `ReasoningGymTask`, `level`, and `levels`, their
    number.

    Raises:
        DataError: a data set without a curriculum, a setting that the curriculum makes itself, a level that is no valid one.
    """

    rewards: tuple[str, ...] = ("reasoning_gym",)
    steps: tuple[str, ...] = ()
    eval_on_train = False
    rows: tuple[Example, ...] = ()

    def __init__(self, name: str, components: Sequence[Component], *, seed: int = 0) -> None:
        self.name, self.seed = name, seed
        self._components = tuple(components)
        for component in self._components:
            check_component(component)
        self.levels = max(count_levels(component) for component in self._components)
        self._settings = [
            tuple(replace(c, config={**c.config, **configure_level(c, level)}) for c in self._components)
            for level in range(self.levels)
        ]
        self._task = lru_cache(maxsize=4)(self._made)
        self._task(0)

    def train_example(self, index: int) -> Example:
        """index: `levels.placed` of a level and of an example's number there; above the last level it is the last one's."""
        if index < 0:
            raise IndexError(f"training examples are numbered from 0, got {index}")
        level, own = decode_level_index(index)
        return self._example(min(level, self.levels - 1), own)

    def _example(self, level: int, index: int) -> Example:
        return self._told(self._task(level).train_example(index), level)

    def _told(self, example: Example, level: int) -> Example:
        return replace(example, columns={**example.columns, "level": level, "levels": self.levels})

    def eval_examples(self, count: int) -> list[Example]:
        """`count` different held-out problems, of the levels in turn; one that has no more of them is passed over.

        Raises:
            DataError: too few of all levels together.
        """
        seen: set[str] = set()
        left: dict[int, Iterator[Example]] = {k: self._made(k).iterate_unseen(seen) for k in range(self.levels)}
        found: list[Example] = []
        for level in cycle(range(self.levels)):
            if len(found) >= count:
                return found
            if not left:
                break
            if level in left:
                example = next(left[level], None)
                if example is None:
                    del left[level]
                else:
                    found.append(self._told(example, level))
        raise DataError(
            f"task {self.name!r} has too few held-out problems: asked for {count}, found {len(found)} before its levels ran dry; "
            f"ask for at most {len(found)}"
        )

    def _made(self, level: int) -> ReasoningGymTask:
        return ReasoningGymTask(f"{self.name} at level {level}", self._settings[level], seed=self.seed)


def count_levels(component: Component) -> int:
    """How many levels its curriculum has; of several attributes, the most of one."""
    return max((len(a.levels) for a in _curriculum(component).attributes.values()), default=1)


def configure_level(component: Component, level: int) -> dict[str, Any]:
    """The settings that reasoning-gym's curriculum gives a data set at a level, from 0 on.

    Raises:
        DataError: a setting that the user has given too, or values that the data set does not take.
    """
    curriculum = _curriculum(component)
    curriculum.set_global_level(level)
    made = curriculum.generate_configuration()
    ends = ("field_name", "lower_field_name", "upper_field_name")
    names = [getattr(a, end) for a in curriculum.attributes.values() for end in ends if hasattr(a, end)]
    if both := [name for name in names if name in component.config]:
        raise DataError(f"task 'curriculum:{component.name}': {both[0]!r} is what its levels set: leave it away")
    found = {name: getattr(made, name) for name in names}
    try:
        config = load_dataset_table()[component.name][1](**{**component.config, **found})
        if hasattr(config, "validate"):
            config.validate()
    except (AssertionError, TypeError, ValueError) as error:
        raise DataError(f"task 'curriculum:{component.name}': level {level} makes {found}: {error}") from error
    return found


def _curriculum(component: Component) -> Any:
    from reasoning_gym.factory import create_curriculum, has_curriculum

    if not has_curriculum(component.name):
        raise DataError(f"reasoning-gym has no curriculum for {component.name!r}: name it without curriculum:")
    return create_curriculum(component.name)
