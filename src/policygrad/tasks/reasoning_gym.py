"""Procedural tasks from reasoning-gym, which is imported when such a task is used."""

from __future__ import annotations

import copy
import difflib
import os
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from itertools import count as count_from
from itertools import islice
from typing import Any

from policygrad.errors import DataError
from policygrad.tasks.base import (
    EVAL_ONE_IN,
    Example,
    IsolatedRandom,
    decode_level_index,
    hash_choice,
    hash_int,
    is_eval_prompt,
)

CURRICULUM_PREFIX = "curriculum:"


@dataclass(frozen=True)
class Component:
    """One reasoning-gym dataset in a mix: its name, weight and settings."""

    name: str
    weight: float
    config: dict[str, Any] = field(default_factory=dict)


# The task mix of the embedded base model. Questions, reference answers and scoring are reasoning-gym's.

EMBEDDED_MIX: tuple[Component, ...] = (
    # Arithmetic: "... 98 - 35 =", two numbers of two digits.
    Component("chain_sum", 1.0, {"min_terms": 2, "max_terms": 2, "min_digits": 2, "max_digits": 2}),
    # Algebra: "Solve for e: 5 - 8*e = -51", with a solution between 1 and 9.
    Component(
        "simple_equations",
        1.0,
        {"min_terms": 2, "max_terms": 2, "min_value": 1, "max_value": 9, "operators_weights": [0.5, 0.5, 0.0]},
    ),
    # Text: "Spell this word backward (example: sun -> nus): splat".
    Component("spell_backward", 1.0, {"min_word_len": 3, "max_word_len": 5}),
)
EMBEDDED = {"embedded": EMBEDDED_MIX, "embedded_steps": EMBEDDED_MIX[:2]}
"""The embedded tasks: the mix, and its part whose answers take several steps."""
MAX_NEW_TOKENS = 32  # enough for the longest answer with steps that the base model knows

PAGE_SIZE = 2048  # items per dataset object: a few datasets build all their items when they are created
MAX_TRIES = 64  # neighbouring items tried for one training example; all are held out with probability 16^-64
_EVAL_SEED = "held-out"  # in place of the run's seed: every run is evaluated on the same problems
_RESERVED_SETTINGS = ("seed", "size")  # set by the task
# Datasets that iterate over sets of strings, so their items depend on PYTHONHASHSEED (measured with reasoning-gym 0.1.25).
_HASH_ORDERED = frozenset(
    ("isomorphic_strings", "knight_swap", "polynomial_multiplication", "ransom_note", "word_ladder")
)


def prompt_text(question: str) -> str:
    """Append the newline that followed every question in the base model's training, and that its chat template adds too."""
    return question + "\n"


# Demonstrations: correct answers in the form that the embedded model uses.


def final_answer(entry: Mapping[str, Any]) -> str | None:
    """Return a reasoning-gym item's reference answer, in answer tags; None when many answers are correct."""
    return None if entry["answer"] is None else f"<answer>{entry['answer']}</answer>"


def worked_solution(dataset: str, entry: Mapping[str, Any]) -> str | None:
    """Return the reference answer preceded by its steps, for the datasets of the embedded tasks."""
    answer = final_answer(entry)
    if answer is None:
        return None
    steps = list[str]()
    match dataset:
        case "chain_sum":  # 90 - 10 = 80, 2 - 8 = -6: add up the tens and the ones separately
            first, *rest = entry["metadata"]["expression"].split()
            signs, numbers = rest[::2], [int(n) for n in (first, *rest[1::2])]
            for digits in ([n - n % 10 for n in numbers], [n % 10 for n in numbers]):
                terms = list(zip(signs, digits[1:], strict=True))
                total = digits[0] + sum(n if sign == "+" else -n for sign, n in terms)
                steps.append(" ".join([str(digits[0]), *(f"{sign} {n}" for sign, n in terms), f"= {total}"]))
        case "simple_equations":  # 7*q = 35, q = 5: find the variable's term, then the variable
            variable, solution = entry["metadata"]["variable"], int(entry["answer"])
            if match := re.search(rf"(\d+)\*{variable}\b", entry["metadata"]["equation"]):
                steps.append(f"{match[1]}*{variable} = {int(match[1]) * solution}")
            steps.append(f"{variable} = {solution}")
        case "spell_backward":  # n-i-c-u-m: spell the word from its end
            steps.append("-".join(entry["answer"]))
    return f"Step by step: {', '.join(steps)}. {answer}" if steps else answer


@lru_cache(maxsize=1)
def dataset_names() -> tuple[str, ...]:
    """Return the names of all reasoning-gym datasets, sorted, without `composite` (use a mix instead)."""
    return tuple(sorted(set(load_dataset_table()) - {"composite"}))


@lru_cache(maxsize=1)
def load_dataset_table() -> Mapping[str, Any]:
    """Return reasoning-gym's table of datasets. Importing it uses the global generators, whose states are restored."""
    with IsolatedRandom(0)():
        from reasoning_gym.factory import DATASETS

    table: Mapping[str, Any] = DATASETS
    return table


class ReasoningGymTask:
    """An endless weighted mix of reasoning-gym datasets.

    Columns: `dataset` (reasoning-gym's name), `entry` (the complete item, which its scorer needs), `answer` (its reference
    answer, None when many answers are correct) and `demonstration` (that answer as a completion, with its steps if `worked`).
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
        self.name, self.seed, self.steps, self.worked = name, seed, steps, worked
        self._components = tuple(components)
        self._weights = tuple(component.weight for component in components)
        self._pages = lru_cache(maxsize=4 * len(self._components))(self._create_page)
        self._templates = dict[int, Any]()  # by component; None = none can be copied
        for number, component in enumerate(self._components):
            check_component(component)
            self._pages(number, 0, 0)  # a bad value fails now, not at step 900

    def train_example(self, index: int) -> Example:
        if index < 0:
            raise IndexError(f"training examples are numbered from 0, got {index}")
        number = hash_choice(f"{self.seed}", index, self._weights)
        base = hash_int(f"{self.seed}/{number}", 1 << 31)
        for item in range(index * EVAL_ONE_IN, index * EVAL_ONE_IN + MAX_TRIES):
            entry = self._entry(number, base, item)
            if not is_eval_prompt(entry["question"]):
                return self._make_example(number, entry)
        raise DataError(
            f"task {self._components[number].name!r} has too few different problems: {MAX_TRIES} in a row belong to the "
            "evaluation split; widen its settings (more terms, more digits), or write its problems to a .jsonl file"
        )

    def eval_examples(self, count: int) -> list[Example]:
        """Return `count` different evaluation problems; a smaller count gives a prefix. Raises DataError if there are too few."""
        examples = list(islice(self.iterate_unseen(set()), count))
        if len(examples) < count:
            name = self._components[hash_choice(_EVAL_SEED, len(examples), self._weights)].name
            raise DataError(
                f"task {name!r} has too few evaluation problems: {count} requested, "
                f"{len(examples)} found; request at most {len(examples)}, or widen its settings"
            )
        return examples

    def iterate_unseen(self, seen: set[str]) -> Iterator[Example]:
        """Yield evaluation problems whose question is not in `seen`, adding it; ends when a dataset has no more."""
        items = [count_from() for _ in self._components]
        for draw in count_from():
            number = hash_choice(_EVAL_SEED, draw, self._weights)
            base = hash_int(f"{_EVAL_SEED}/{self._components[number].name}", 1 << 31)
            for item in islice(items[number], 128 * EVAL_ONE_IN + 1):  # a long stretch without a new one is the end
                entry = self._entry(number, base, item)
                if is_eval_prompt(entry["question"]) and entry["question"] not in seen:
                    seen.add(entry["question"])
                    yield self._make_example(number, entry)
                    break
            else:
                return

    def _make_example(self, number: int, entry: dict[str, Any]) -> Example:
        name = self._components[number].name
        shown = worked_solution(name, entry) if self.worked else final_answer(entry)
        columns = {"dataset": name, "entry": entry, "answer": entry["answer"], "demonstration": shown}
        return Example(prompt_text(entry["question"]), columns)

    def _entry(self, number: int, base: int, item: int) -> dict[str, Any]:
        page, offset = divmod(item, PAGE_SIZE)
        dataset = self._pages(number, base, page)
        with IsolatedRandom(base + item)():
            entry: dict[str, Any] = dataset[offset]
            return entry

    def _create_page(self, number: int, base: int, page: int) -> Any:
        """Create the dataset of a page: a copy of the component's template with the page's seed, or a new one without template."""
        seed = (base + page * PAGE_SIZE) % (1 << 31)
        if number not in self._templates:  # copies differ if more than the seed attribute depends on the seed
            one, other = (self._create_dataset(number, seed, 16) for seed in (0, 1))
            a, b = vars(one), vars(other)
            try:
                same = replace(one.config, seed=other.seed) == other.config and all(
                    bool(a[name] == b[name]) for name in a.keys() - {"seed", "config"}
                )
            except (TypeError, ValueError):  # not a dataclass; an array
                same = False
            same = same and a.keys() == b.keys()
            self._templates[number] = self._create_dataset(number, 0, PAGE_SIZE) if same else None
        if (template := self._templates[number]) is None:
            return self._create_dataset(number, seed, PAGE_SIZE)
        dataset = copy.deepcopy(template)
        dataset.seed = seed
        dataset.config = replace(dataset.config, seed=seed)
        return dataset

    def _create_dataset(self, number: int, seed: int, size: int) -> Any:
        import reasoning_gym

        component = self._components[number]
        try:
            with IsolatedRandom(seed)():
                return reasoning_gym.create_dataset(component.name, seed=seed, size=size, **component.config)
        except (AssertionError, TypeError, ValueError) as error:
            raise DataError(f"task {component.name!r}: bad settings {component.config}: {error}") from error


def check_component(component: Component) -> None:
    """Refuse settings that the dataset does not have, and warn when its problems are not reproducible."""
    keys = [f.name for f in fields(load_dataset_table()[component.name][1]) if f.name not in _RESERVED_SETTINGS]
    for key in component.config:
        if key in _RESERVED_SETTINGS:
            raise DataError(f"task {component.name!r}: {key!r} is not a setting of the task; the run's seed decides")
        if key not in keys:
            near = difflib.get_close_matches(key, keys, n=1, cutoff=0.0)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise DataError(f"task {component.name!r} has no setting {key!r}; {hint}It has {', '.join(keys) or 'none'}")
    if component.name in _HASH_ORDERED and not os.environ.get("PYTHONHASHSEED", "random").isdigit():
        warnings.warn(
            f"task {component.name!r}: reasoning-gym builds its problems in the order of Python's string hashes, so a resumed "
            "run or another run's evaluation has other problems; set PYTHONHASHSEED=0 to reproduce them",
            stacklevel=4,
        )


class CurriculumTask:
    """A weighted mix of reasoning-gym datasets with difficulty levels, taken from reasoning-gym's own curricula.

    A level applies to all attributes of all datasets together (reasoning-gym's `set_global_level`); a dataset with fewer levels
    stays at its last one. Ranges include easier values, as in reasoning-gym (`RangeAttributeMode.INCLUSIVE`). Evaluation
    problems cycle through all levels and are the same for every run. Columns: those of `ReasoningGymTask`, `level`, and `levels`,
    the number of levels.

    Raises:
        DataError: A dataset without a curriculum, a setting that the curriculum controls, or an invalid level.
    """

    rewards: tuple[str, ...] = ("reasoning_gym",)
    steps: tuple[str, ...] = ()
    eval_on_train = False
    rows: tuple[Example, ...] = ()

    def __init__(self, name: str, components: Sequence[Component], *, seed: int = 0) -> None:
        self.name, self.seed = name, seed
        for component in components:
            check_component(component)
        self.levels = max(count_levels(component) for component in components)
        self._components = [
            tuple(replace(c, config={**c.config, **configure_level(c, level)}) for c in components)
            for level in range(self.levels)
        ]
        self._task = lru_cache(maxsize=4)(self._make_task)
        self._task(0)

    def train_example(self, index: int) -> Example:
        """Return the example of an index from `encode_level_index`; levels above the last one count as the last."""
        if index < 0:
            raise IndexError(f"training examples are numbered from 0, got {index}")
        level, number = decode_level_index(index)
        level = min(level, self.levels - 1)
        return self._add_level(self._task(level).train_example(number), level)

    def eval_examples(self, count: int) -> list[Example]:
        """Return `count` different evaluation problems, cycling through the levels that still have some.

        Raises:
            DataError: All levels together have too few.
        """
        seen: set[str] = set()
        remaining = {level: self._make_task(level).iterate_unseen(seen) for level in range(self.levels)}
        examples: list[Example] = []
        while remaining:
            for level in list(remaining):
                if len(examples) >= count:
                    return examples
                example = next(remaining[level], None)
                if example is None:
                    del remaining[level]
                else:
                    examples.append(self._add_level(example, level))
        raise DataError(
            f"task {self.name!r} has too few evaluation problems: {count} requested, {len(examples)} found on all levels; "
            f"request at most {len(examples)}"
        )

    def _add_level(self, example: Example, level: int) -> Example:
        return replace(example, columns={**example.columns, "level": level, "levels": self.levels})

    def _make_task(self, level: int) -> ReasoningGymTask:
        return ReasoningGymTask(f"{self.name} at level {level}", self._components[level], seed=self.seed)


def count_levels(component: Component) -> int:
    """Return the number of levels of a dataset's curriculum: the most that any of its attributes has."""
    return max((len(a.levels) for a in _create_curriculum(component).attributes.values()), default=1)


def configure_level(component: Component, level: int) -> dict[str, Any]:
    """Return the settings that reasoning-gym's curriculum gives a dataset at a level, counted from 0.

    Raises:
        DataError: The user has given one of these settings too, or the dataset refuses the values.
    """
    curriculum = _create_curriculum(component)
    curriculum.set_global_level(level)
    generated = curriculum.generate_configuration()
    kinds = ("field_name", "lower_field_name", "upper_field_name")
    names = [getattr(a, kind) for a in curriculum.attributes.values() for kind in kinds if hasattr(a, kind)]
    if both := [name for name in names if name in component.config]:
        raise DataError(f"task 'curriculum:{component.name}': {both[0]!r} is set by its levels: leave it out")
    settings = {name: getattr(generated, name) for name in names}
    try:
        config = load_dataset_table()[component.name][1](**{**component.config, **settings})
        if hasattr(config, "validate"):
            config.validate()
    except (AssertionError, TypeError, ValueError) as error:
        raise DataError(f"task 'curriculum:{component.name}': level {level} gives {settings}: {error}") from error
    return settings


def _create_curriculum(component: Component) -> Any:
    from reasoning_gym.factory import create_curriculum, has_curriculum

    if not has_curriculum(component.name):
        raise DataError(f"reasoning-gym has no curriculum for {component.name!r}: leave curriculum: out")
    return create_curriculum(component.name)
