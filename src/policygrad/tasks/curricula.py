"""Tasks whose difficulty has levels: data sets of reasoning-gym, at the settings that its own curricula give each level."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import cycle
from typing import Any

from policygrad.errors import DataError
from policygrad.tasks.embedded import Component
from policygrad.tasks.levels import of_place
from policygrad.tasks.reasoning_gym import ReasoningGymTask, check_config, datasets
from policygrad.tasks.types import Example

PREFIX = "curriculum:"


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
    held_out_is_train = False
    rows: tuple[Example, ...] = ()

    def __init__(self, name: str, components: Sequence[Component], *, seed: int = 0) -> None:
        self.name, self.seed = name, seed
        self._components = tuple(components)
        for component in self._components:
            check_config(component)
        self.levels = max(level_count(component) for component in self._components)
        self._settings = [
            tuple(replace(c, config={**c.config, **at_level(c, level)}) for c in self._components)
            for level in range(self.levels)
        ]
        self._task = lru_cache(maxsize=4)(self._made)
        self._task(0)

    def train(self, index: int) -> Example:
        """index: `levels.placed` of a level and of an example's number there; above the last level it is the last one's."""
        if index < 0:
            raise IndexError(f"training examples are numbered from 0, got {index}")
        level, own = of_place(index)
        return self._example(min(level, self.levels - 1), own)

    def _example(self, level: int, index: int) -> Example:
        return self._told(self._task(level).train(index), level)

    def _told(self, example: Example, level: int) -> Example:
        return replace(example, columns={**example.columns, "level": level, "levels": self.levels})

    def held_out(self, count: int) -> list[Example]:
        """`count` different held-out problems, of the levels in turn; one that has no more of them is passed over.

        Raises:
            DataError: too few of all levels together.
        """
        seen: set[str] = set()
        left: dict[int, Iterator[Example]] = {k: self._made(k).unseen(seen) for k in range(self.levels)}
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


def level_count(component: Component) -> int:
    """How many levels its curriculum has; of several attributes, the most of one."""
    return max((len(a.levels) for a in _curriculum(component).attributes.values()), default=1)


def at_level(component: Component, level: int) -> dict[str, Any]:
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
        config = datasets()[component.name][1](**{**component.config, **found})
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
