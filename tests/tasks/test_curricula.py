"""Tasks with levels of difficulty: reasoning-gym's own curricula, by the number of an example."""

from __future__ import annotations

import re

import pytest

import policygrad as pg
from policygrad.tasks.base import SPAN, is_held_out, of_place, placed
from policygrad.tasks.reasoning_gym import CurriculumTask

NAME = "curriculum:chain_sum"


@pytest.fixture(scope="module")
def task() -> CurriculumTask:
    found = pg.load_task(NAME)
    assert isinstance(found, CurriculumTask)
    return found


def numbers(example: pg.Example) -> list[str]:
    """The terms of a sum."""
    asked = str(example.prompt).partition("problem: ")[2]
    return re.findall(r"\d+", asked)


def test_a_number_says_level_and_place() -> None:
    assert placed(7, 0) == 7
    assert placed(7, 3) == 3 * SPAN + 7
    assert of_place(placed(7, 3)) == (3, 7)


def test_levels_are_those_of_the_package(task: CurriculumTask) -> None:
    """chain_sum: 2 to 12 terms in 11 levels, 1 to 10 digits in 10."""
    assert task.levels == 11
    for level in (0, 3, 10, 99):
        found = [task.train(placed(i, level)) for i in range(60)]
        here = min(level, 10)
        assert {(e.columns["level"], e.columns["levels"]) for e in found} == {(here, 11)}
        terms, digits = {len(numbers(e)) for e in found}, {len(n) for e in found for n in numbers(e)}
        assert max(terms) <= 2 + here
        assert max(digits) <= min(1 + here, 10)
        assert (max(terms) > 2) is (here > 0)


def test_an_example_is_a_function_of_its_number_and_never_held_out(task: CurriculumTask) -> None:
    again = pg.load_task(NAME)
    for place in (0, 5, placed(5, 4)):
        assert again.train(place) == task.train(place)
        assert again.train(place).columns == task.train(place).columns
    assert task.train(5) != task.train(placed(5, 4))
    assert not any(is_held_out(task.train(placed(i, 2)).columns["entry"]["question"]) for i in range(200))
    assert pg.load_task(NAME, seed=1).train(placed(5, 4)) != task.train(placed(5, 4))
    with pytest.raises(IndexError):
        task.train(-1)


def test_held_out_problems_are_of_all_levels_and_the_same_for_every_seed(task: CurriculumTask) -> None:
    found = task.held_out(44)
    assert [e.columns["level"] for e in found[:11]] == list(range(11))
    assert len({e.prompt for e in found}) == 44
    assert all(is_held_out(e.columns["entry"]["question"]) for e in found)
    assert pg.load_task(NAME, seed=5).held_out(11) == found[:11]
    many = task.held_out(400)  # the first level has some twelve, and is passed over then
    assert len({e.prompt for e in many}) == 400
    assert sum(e.columns["level"] == 0 for e in many) < 400 // 11


def test_a_mix_has_as_many_levels_as_its_longest_and_settings_stay() -> None:
    mix = pg.load_task("curriculum:gcd+chain_sum:allow_negation=true")
    assert mix.levels == 11
    found = [mix.train(placed(i, 10)) for i in range(40)]
    assert {e.columns["dataset"] for e in found} == {"gcd", "chain_sum"}
    assert any("-" in str(e.columns["answer"]) for e in found)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("curriculum:chain_sum:max_terms=3", "'max_terms' is what its levels set"),
        ("curriculum:nothing_such", "unknown task 'nothing_such'"),
        ("curriculum:chain_sum:no_such=3", "no_such"),
    ],
)
def test_refusals(name: str, says: str) -> None:
    with pytest.raises(pg.DataError, match=says):
        pg.load_task(name)


def test_a_data_set_without_a_curriculum_is_refused() -> None:
    from reasoning_gym.factory import DATASETS, has_curriculum

    without = [name for name in sorted(DATASETS) if not has_curriculum(name) and name != "composite"]
    for name in without[:1]:
        with pytest.raises(pg.DataError, match=f"no curriculum for '{name}'"):
            pg.load_task(f"curriculum:{name}")
