"""Prompts and datasets: a task hands out training examples by number and fixed held-out examples.

A task is named by "embedded" (the mix that the shipped model knows), "embedded_steps" (what of it takes several steps),
by reasoning-gym datasets ("gcd+2*chain_sum:max_digits=1"), with their curricula ("curriculum:gcd"), by a taskset of verifiers
("verifiers:ID"), or as data: a JSONL, Parquet or Arrow file, a folder of `datasets`, a data set of the hub, or a mix of those
("0.7*a.jsonl+0.3*b.jsonl"). A list of rows, or a `datasets.Dataset`, is a task without a name.
"""

import difflib
from collections.abc import Mapping, Sequence
from typing import Any

from policygrad.errors import DataError
from policygrad.tasks.base import Example, Prompt, Task
from policygrad.tasks.mixtures import MixedTask, MixturePart
from policygrad.tasks.reasoning_gym import (
    CURRICULUM_PREFIX,
    EMBEDDED_MIX,
    EMBEDDED_STEPS_MIX,
    Component,
    CurriculumTask,
    ReasoningGymTask,
    dataset_names,
)
from policygrad.tasks.rows import RowOptions, RowsTask, load_examples, open_rows
from policygrad.tasks.sources import parse_components, parse_data_mixture
from policygrad.tasks.verifiers import VERIFIERS_PREFIX as VERIFIERS
from policygrad.tasks.verifiers import load_verifiers_task

__all__ = ["EMBEDDED", "Component", "Example", "Prompt", "Task", "list_tasks", "load_task"]

EMBEDDED = {"embedded": EMBEDDED_MIX, "embedded_steps": EMBEDDED_STEPS_MIX}
PROCESS_REWARDS = ("worked_steps",)
"""The reward that knows the steps of both."""


def list_tasks() -> list[str]:
    """Every task that has a name, sorted; any JSONL file is a task too."""
    return sorted([*EMBEDDED, *dataset_names()])


def load_task(
    name: str | Task | Sequence[Mapping[str, Any] | Example],
    *,
    seed: int = 0,
    eval_data: str | Sequence[Mapping[str, Any] | Example] | None = None,
    row_options: RowOptions | None = None,
) -> Task:
    """The task called `name`, the rows given in its place, or a Task as it is; `seed` orders training, never evaluation.

    A mix of data draws by weight which part the next prompt is of; a column that a part has not is None in its rows.

    held_out: rows to evaluate on, or other data, only for a task made of rows or of data. reading: what is done with each row.

    Raises:
        DataError: what cannot be used, where, and the way out; ConfigError: a library that is not installed.
    """
    row_options = row_options or RowOptions()
    if _mix(name) or (_mix(eval_data) and open_rows(name) is not None):
        measured = None if eval_data is None else _parts(eval_data, "held-out row", row_options)
        title = name if isinstance(name, str) else "rows"
        return MixedTask.from_parts(title, _parts(name, "row", row_options), seed, measured, row_options.decontaminate)
    source = open_rows(name)
    if source is None:
        if row_options != RowOptions():
            raise DataError(
                "a map, and leaving out rows, are for data, and this task makes its own examples: leave them out"
            )
        return _generated(name, seed, eval_data) if isinstance(name, str) else _own(name, eval_data)  # type: ignore[arg-type]
    title = name if isinstance(name, str) else "rows"
    others = None
    if eval_data is not None:
        [part] = _parts(eval_data, "held-out row", row_options)
        others = part.name, part.rows
    return RowsTask.from_rows(title, load_examples(source, row_options, title), seed, others, row_options.decontaminate)


def _mix(given: object) -> tuple[tuple[float, str], ...]:
    return parse_data_mixture(given) if isinstance(given, str) else ()


def _parts(given: Any, kind: str, reading: RowOptions) -> list[MixturePart]:
    """The parts of a mix, or the one that data without a mix is, read. kind: what rows in memory are called."""
    found = list[MixturePart]()
    for weight, one in _mix(given) or ((1.0, given),):
        source = open_rows(one, kind)
        if source is None:
            raise DataError(f"held_out={one!r} is no data: give a file, such as held_out.jsonl, or rows")
        name = one if isinstance(one, str) else "rows" if kind == "row" else "eval/reward"
        found.append(MixturePart(weight, name, load_examples(source, reading, name)))
    return found


def _own(task: Task, held_out: object) -> Task:
    """An object of somebody's own that is used as a task."""
    needed = ("name", "rewards", "steps", "eval_on_train", "rows", "train", "eval/reward")
    if missing := [attribute for attribute in needed if not hasattr(task, attribute)]:
        raise DataError(
            f"a task is a name, a list of rows, or a Task, got {type(task).__name__}, which has no {', '.join(missing)}"
        )
    if held_out is not None:
        raise DataError(f"held_out goes with rows, and the task {task.name!r} has held-out problems of its own")
    return task


def _generated(name: str, seed: int, held_out: object) -> Task:
    if held_out is not None:
        raise DataError(
            f"held_out={held_out!r} goes with a JSONL task, but {name!r} generates its own held-out problems; "
            "leave held_out away, or give a path ending in .jsonl as the task"
        )
    if name in EMBEDDED:
        return ReasoningGymTask(name, EMBEDDED[name], seed=seed, steps=PROCESS_REWARDS, worked=True)
    if name.startswith(VERIFIERS):
        return load_verifiers_task(name, seed)
    components = parse_components(name.removeprefix(CURRICULUM_PREFIX))
    for component in components:
        _check_name(component.name)
    if name.startswith(CURRICULUM_PREFIX):
        return CurriculumTask(name, components, seed=seed)
    return ReasoningGymTask(name, components, seed=seed)


def _check_name(name: str) -> None:
    if name in dataset_names():
        return
    if name in EMBEDDED:
        raise DataError(f"the task {name!r} is a mix of its own; it takes no settings and joins no other mix")
    if name == "composite":
        raise DataError("the task 'composite' is spelt as a mix here: join datasets with '+', as in gcd+2*chain_sum")
    near = difflib.get_close_matches(name, list_tasks(), n=3, cutoff=0.5)
    hint = f"did you mean {', '.join(near)}?" if near else "policygrad.tasks.list_tasks() lists the names."
    raise DataError(f"unknown task {name!r}: {hint} A file of your own prompts is a task by its path, ending in .jsonl")
