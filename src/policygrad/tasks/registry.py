"""Prompts and datasets: a task provides training examples by index and a fixed set of evaluation examples.

A task is named by "embedded" (the mix that the shipped model knows), "embedded_steps" (its multi-step part), "shapes"
(questions about pictures, for the shipped vision-language model), reasoning-gym datasets ("gcd+2*chain_sum:max_digits=1"), the
same with their curricula ("curriculum:gcd"), a verifiers taskset ("verifiers:ID"), or data: a JSONL, Parquet or Arrow file, a
folder saved by `datasets`, a hub dataset, or a mixture of those ("0.7*a.jsonl+0.3*b.jsonl"). A list of rows or a
`datasets.Dataset` is a task without a name.
"""

import difflib
from collections.abc import Mapping, Sequence
from typing import Any

from policygrad.errors import DataError
from policygrad.tasks.base import Example, Prompt, Task
from policygrad.tasks.mixtures import MixturePart, RowsTask
from policygrad.tasks.reasoning_gym import CURRICULUM_PREFIX, EMBEDDED, CurriculumTask, ReasoningGymTask, dataset_names
from policygrad.tasks.rows import RowOptions, explain_data, load_examples, open_rows
from policygrad.tasks.shapes import ShapesTask
from policygrad.tasks.sources import parse_components, parse_data_mixture
from policygrad.tasks.verifiers import VERIFIERS_PREFIX, load_verifiers_task

__all__ = ["EMBEDDED", "Example", "Prompt", "Task", "list_tasks", "load_task"]


def list_tasks() -> list[str]:
    """Return the names of all built-in tasks, sorted. Any data file is a task as well."""
    return sorted([*EMBEDDED, ShapesTask.name, *dataset_names()])


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
    options = row_options or RowOptions()
    title = name if isinstance(name, str) else "rows"
    parts = _load_parts(name, "row", options)
    if not parts:
        if options != RowOptions():
            raise DataError("row_map, skip_bad_rows and decontaminate need data; this task generates its examples")
        return _load_generated_task(name, seed, eval_data)
    eval_parts = None if eval_data is None else _load_parts(eval_data, "held-out row", options)
    if eval_parts == []:
        got = repr(eval_data) if isinstance(eval_data, str) else f"of type {type(eval_data).__name__}"
        raise DataError(
            f"eval_data={got} is not data: {explain_data(eval_data) or 'give rows or a file such as eval.jsonl'}"
        )
    return RowsTask.from_parts(title, parts, seed, eval_parts, options.decontaminate)


def _load_parts(data: Any, kind: str, options: RowOptions) -> list[MixturePart]:
    """Load the parts of a mixture, or the single part that other data is; none if it is not data.

    kind: the name of in-memory rows in messages.
    """
    parts = list[MixturePart]()
    for weight, part in parse_data_mixture(data) or ((1.0, data),):
        if (source := open_rows(part, kind)) is not None:
            name = part if isinstance(part, str) else "rows" if kind == "row" else "eval_data"
            parts.append(MixturePart(weight, name, load_examples(source, options, name)))
    return parts


def _load_generated_task(task: Any, seed: int, eval_data: object) -> Task:
    """Return the named task that generates its examples, or a Task as it is, after checking it."""
    if not isinstance(task, str):
        needed = ("name", "rewards", "steps", "eval_on_train", "rows", "train_example", "eval_examples")
        if missing := [attribute for attribute in needed if not hasattr(task, attribute)]:
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
    if task == ShapesTask.name:
        return ShapesTask(seed)
    if task.startswith(VERIFIERS_PREFIX):
        return load_verifiers_task(task, seed)
    components = parse_components(task.removeprefix(CURRICULUM_PREFIX))
    for name in (component.name for component in components):
        if name in EMBEDDED or name == ShapesTask.name:
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
