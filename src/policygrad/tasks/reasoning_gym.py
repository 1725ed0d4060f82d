"""Procedural tasks from reasoning-gym; this file and curricula.py alone import it in tasks, and only when a task is used."""

import contextlib
import copy
import difflib
import os
import random
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from functools import lru_cache
from itertools import count as count_from
from itertools import islice
from typing import Any

from policygrad.errors import DataError
from policygrad.tasks.choice import choose, integer
from policygrad.tasks.embedded import Component, prompt_text
from policygrad.tasks.split import HELD_OUT_ONE_IN, is_held_out
from policygrad.tasks.types import Example
from policygrad.tasks.worked import plain_answer, worked_answer

PAGE = 2048  # items per dataset object: a few datasets build all their items when they are created
TRIES = 64  # neighbouring items tried for one training example; all of them are held out with probability 16^-64
_HELD_OUT_SEED = "held-out"  # instead of the run's seed: every run is measured on the same problems
_UNSET = ("seed", "size")  # settings of reasoning-gym's own that the task decides
_HASH_ORDERED = frozenset(
    ("isomorphic_strings", "knight_swap", "polynomial_multiplication", "ransom_note", "word_ladder")
)  # they walk over sets of strings, so their items depend on PYTHONHASHSEED (measured with reasoning-gym 0.1.25)


@lru_cache(maxsize=1)
def dataset_names() -> tuple[str, ...]:
    """Names of every reasoning-gym dataset, sorted, without `composite` (a mix does that here)."""
    return tuple(sorted(set(datasets()) - {"composite"}))


@lru_cache(maxsize=1)
def datasets() -> Mapping[str, Any]:
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
    held_out_is_train = False
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
            check_config(component)
            self._items(number, 0, 0)  # so that a bad value is an error now, not at step 900

    def train(self, index: int) -> Example:
        if index < 0:
            raise IndexError(f"training examples are numbered from 0, got {index}")
        number = choose(f"{self.seed}", index, self._weights)
        base = integer(f"{self.seed}/{number}", 1 << 31)
        for item in range(index * HELD_OUT_ONE_IN, index * HELD_OUT_ONE_IN + TRIES):
            entry = self._entry(number, base, item)
            if not is_held_out(entry["question"]):
                return self._example(number, entry)
        raise DataError(
            f"task {self._components[number].name!r} has too few different problems: {TRIES} in a row were held-out "
            "ones; widen its settings (more terms, more digits), or write its problems to a .jsonl file"
        )

    def held_out(self, count: int) -> list[Example]:
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

    def unseen(self, seen: set[str]) -> Iterator[Example]:
        """Held-out problems one by one, none whose question is in `seen`, which they join; ends where a data set runs dry."""
        for number, entry in self._held_out(seen):
            if entry is None:
                return
            yield self._example(number, entry)

    def _held_out(self, seen: set[str]) -> Iterator[tuple[int, dict[str, Any] | None]]:
        """(component, its next held-out item or None), without end."""
        scans = [self._scan_held_out(number, seen) for number in range(len(self._components))]
        for draw in count_from():
            number = choose(_HELD_OUT_SEED, draw, self._weights)
            yield number, next(scans[number], None)

    def _scan_held_out(self, number: int, seen: set[str]) -> Iterator[dict[str, Any]]:
        """Held-out items of one component that are not `seen` yet; ends when a long stretch brings nothing new."""
        base, dry = integer(f"{_HELD_OUT_SEED}/{self._components[number].name}", 1 << 31), 0
        for item in count_from():
            entry = self._entry(number, base, item)
            if is_held_out(entry["question"]) and entry["question"] not in seen:
                seen.add(entry["question"])
                dry = 0
                yield entry
            elif (dry := dry + 1) > 128 * HELD_OUT_ONE_IN:
                return

    def _example(self, number: int, entry: dict[str, Any]) -> Example:
        name = self._components[number].name
        shown = worked_answer(name, entry) if self.worked else plain_answer(entry)
        columns = {"dataset": name, "entry": entry, "answer": entry["answer"], "demonstration": shown}
        return Example(prompt_text(entry["question"]), columns)

    def _entry(self, number: int, base: int, item: int) -> dict[str, Any]:
        page, offset = divmod(item, PAGE)
        dataset = self._items(number, base, page)
        with _own_randomness(base + item):
            entry: dict[str, Any] = dataset[offset]
            return entry

    def _create(self, number: int, base: int, page: int) -> Any:
        """The dataset of a page: a copy of the component's pattern with the page's seed, or made anew where it has none."""
        seed, pattern = (base + page * PAGE) % (1 << 31), self._pattern(number)
        if pattern is None:
            return self._make(number, seed, PAGE)
        dataset = copy.deepcopy(pattern)
        dataset.seed = seed
        dataset.config = replace(dataset.config, seed=seed)
        return dataset

    def _find_pattern(self, number: int) -> Any:
        """A dataset that nobody draws from; None where more than its seed hangs on its seed, so that a copy would not do."""
        one, other = (self._make(number, seed, 16) for seed in (0, 1))
        return self._make(number, 0, PAGE) if _alike(one, other) else None

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


def check_config(component: Component) -> None:
    """Refuse settings that the dataset does not have, and say when its problems cannot be repeated."""
    keys = [f.name for f in fields(datasets()[component.name][1]) if f.name not in _UNSET]
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
