"""Curriculum tasks: levels of difficulty from reasoning-gym's own curricula, encoded in an example's index."""

from __future__ import annotations

import re

import pytest

import policygrad as pg
from policygrad.tasks.base import LEVEL_STRIDE, decode_level_index, encode_level_index, is_eval_prompt
from policygrad.tasks.reasoning_gym import CurriculumTask

NAME = "curriculum:chain_sum"


@pytest.fixture(scope="module")
def task() -> CurriculumTask:
    task = pg.load_task(NAME)
    assert isinstance(task, CurriculumTask)
    return task


def numbers(example: pg.Example) -> list[str]:
    """Return the terms of a sum."""
    return re.findall(r"\d+", str(example.prompt).partition("problem: ")[2])


def test_an_index_encodes_level_and_number() -> None:
    assert encode_level_index(7, 0) == 7
    assert encode_level_index(7, 3) == 3 * LEVEL_STRIDE + 7
    assert decode_level_index(encode_level_index(7, 3)) == (3, 7)


def test_levels_are_reasoning_gym_s(task: CurriculumTask) -> None:
    """chain_sum: 2 to 12 terms in 11 levels, 1 to 10 digits in 10."""
    assert task.levels == 11
    for level in (0, 3, 10, 99):
        result = [task.train_example(encode_level_index(i, level)) for i in range(60)]
        here = min(level, 10)
        assert {(e.columns["level"], e.columns["levels"]) for e in result} == {(here, 11)}
        terms, digits = {len(numbers(e)) for e in result}, {len(n) for e in result for n in numbers(e)}
        assert max(terms) <= 2 + here
        assert max(digits) <= min(1 + here, 10)
        assert (max(terms) > 2) is (here > 0)


def test_a_training_example_is_a_pure_function_of_its_index_and_never_an_eval_prompt(task: CurriculumTask) -> None:
    second = pg.load_task(NAME)
    for place in (0, 5, encode_level_index(5, 4)):
        assert second.train_example(place) == task.train_example(place)
        assert second.train_example(place).columns == task.train_example(place).columns
    assert task.train_example(5) != task.train_example(encode_level_index(5, 4))
    assert not any(
        is_eval_prompt(task.train_example(encode_level_index(i, 2)).columns["entry"]["question"]) for i in range(200)
    )
    assert pg.load_task(NAME, seed=1).train_example(encode_level_index(5, 4)) != task.train_example(
        encode_level_index(5, 4)
    )
    with pytest.raises(IndexError):
        task.train_example(-1)


@pytest.mark.full
def test_eval_examples_cycle_through_all_levels_and_are_the_same_for_every_seed(task: CurriculumTask) -> None:
    result = task.eval_examples(44)
    assert [e.columns["level"] for e in result[:11]] == list(range(11))
    assert len({e.prompt for e in result}) == 44
    assert all(is_eval_prompt(e.columns["entry"]["question"]) for e in result)
    assert pg.load_task(NAME, seed=5).eval_examples(11) == result[:11]
    many = task.eval_examples(200)  # the first level has about twelve
    assert len({e.prompt for e in many}) == 200
    assert sum(e.columns["level"] == 0 for e in many) < 200 // 11


def test_a_mix_has_the_most_levels_of_its_parts_and_keeps_settings() -> None:
    mix = pg.load_task("curriculum:gcd+chain_sum:allow_negation=true")
    assert mix.levels == 11
    result = [mix.train_example(encode_level_index(i, 10)) for i in range(40)]
    assert {e.columns["dataset"] for e in result} == {"gcd", "chain_sum"}
    assert any("-" in str(e.columns["answer"]) for e in result)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("curriculum:chain_sum:max_terms=3", "'max_terms' is set by its levels"),
        ("curriculum:nothing_such", "unknown task 'nothing_such'"),
        ("curriculum:chain_sum:no_such=3", "no_such"),
    ],
)
def test_invalid_names_are_refused(name: str, message: str) -> None:
    with pytest.raises(pg.DataError, match=message):
        pg.load_task(name)


def test_a_dataset_without_a_curriculum_is_refused() -> None:
    from reasoning_gym.factory import DATASETS, has_curriculum

    without = [name for name in sorted(DATASETS) if not has_curriculum(name) and name != "composite"]
    for name in without[:1]:
        with pytest.raises(pg.DataError, match=f"no curriculum for '{name}'"):
            pg.load_task(f"curriculum:{name}")
