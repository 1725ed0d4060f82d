"""Prompts and datasets: a task provides training examples by index and a fixed set of evaluation examples.

A task is named by "embedded" (the mix that the shipped model knows), "embedded_steps" (its multi-step part), "shapes"
(questions about pictures, for the shipped vision-language model), reasoning-gym datasets ("gcd+2*chain_sum:max_digits=1"), the
same with their curricula ("curriculum:gcd"), a verifiers taskset ("verifiers:ID"), or data: a JSONL, Parquet or Arrow file, a
folder saved by `datasets`, a hub dataset, or a mixture of those ("0.7*a.jsonl+0.3*b.jsonl"). A list of rows or a
`datasets.Dataset` is a task without a name.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from policygrad.errors import DataError
from policygrad.tasks.base import Example, Task
from policygrad.tasks.reasoning_gym import CURRICULUM_PREFIX, EMBEDDED, CurriculumTask, ReasoningGymTask, dataset_names

if TYPE_CHECKING:
    from policygrad.tasks.rows import RowOptions

SHAPES = "shapes"
GENERATED = (*EMBEDDED, SHAPES)
"""Tasks that generate their examples and take no settings."""
VERIFIERS_PREFIX = "verifiers:"


def list_tasks() -> list[str]:
    """Return the names of all built-in tasks, sorted. Any data file is a task as well."""
    return sorted([*GENERATED, *dataset_names()])


def load_task(
    name: str | Task | Sequence[Mapping[str, Any] | Example],
    *,
    seed: int = 0,
    eval_data: str | Sequence[Mapping[str, Any] | Example] | None = None,
    row_options: RowOptions | None = None,
) -> Task:
    """Return the named task, a task made of the given rows, or a Task as it is.

    In a mixture of data, each prompt's part is chosen by weight; columns that a part lacks are None in its rows.

    Args:
        name: A task's name, data, rows, or a Task.
        seed: Orders the training examples; evaluation does not depend on it.
        eval_data: Rows or data to evaluate on, for tasks made of rows or data.
        row_options: Processing applied to each row.

    Raises:
        DataError: Invalid names, files or rows, with their location and a remedy.
        ConfigError: A required library is not installed.
    """
    if isinstance(name, str) and name in GENERATED and eval_data is None and row_options is None:
        return _load_generated_task(name, seed, None)
    from policygrad.tasks.mixtures import load_data_task  # rows, files, pictures, hubs

    task = load_data_task(name, seed, eval_data, row_options)
    return _load_generated_task(name, seed, eval_data) if task is None else task


def _load_generated_task(task: Any, seed: int, eval_data: object) -> Task:
    """Return the named task that generates its examples, or a Task as it is, after checking it."""
    if not isinstance(task, str):
        needed = ("name", "rewards", "steps", "eval_on_train", "rows", "train_example", "eval_examples")
        if missing := [attribute for attribute in needed if not hasattr(task, attribute)]:
            from policygrad.tasks.rows import explain_data

            got = f"{type(task).__name__}, which has no {', '.join(missing)}"
            raise DataError(explain_data(task) or f"a task is a name, a list of rows or a Task, got {got}")
        if eval_data is not None:
            raise DataError(
                f"eval_data needs a task made of rows; the task {task.name!r} has its own evaluation examples"
            )
        checked: Task = task
        return checked
    if eval_data is not None:
        raise DataError(
            f"eval_data={eval_data!r} needs a task made of data, and {task!r} generates its own evaluation problems; "
            "leave eval_data out, or give a path such as rows.jsonl as the task"
        )
    if task in EMBEDDED:
        return ReasoningGymTask(task, EMBEDDED[task], seed=seed, steps=("worked_steps",), worked=True)
    if task == SHAPES:
        from policygrad.tasks.shapes import ShapesTask

        return ShapesTask(seed)
    if task.startswith(VERIFIERS_PREFIX):
        from policygrad.tasks.verifiers import load_verifiers_task

        return load_verifiers_task(task, seed)
    from policygrad.tasks.sources import parse_components

    components = parse_components(task.removeprefix(CURRICULUM_PREFIX))
    for name in (component.name for component in components):
        if name in GENERATED:
            raise DataError(f"the task {name!r} is a fixed mix: it takes no settings and cannot be part of another mix")
        if name == "composite":
            raise DataError(
                "the dataset 'composite' is written as a mix here: join datasets with '+', as in gcd+2*chain_sum"
            )
        if name not in dataset_names():
            near = difflib.get_close_matches(name, list_tasks(), n=3, cutoff=0.5)
            hint = f"did you mean {', '.join(near)}?" if near else "policygrad.tasks.list_tasks() lists the names."
            raise DataError(
                f"unknown task {name!r}: {hint} To use your own prompts, give the path of a file ending in .jsonl"
            )
    if task.startswith(CURRICULUM_PREFIX):
        return CurriculumTask(task, components, seed=seed)
    return ReasoningGymTask(task, components, seed=seed)
