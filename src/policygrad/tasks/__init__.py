"""Prompts and datasets: a task hands out training examples by number and fixed held-out examples.

A task is named by "embedded" (the mix that the shipped model knows), "embedded_steps" (what of it takes several steps),
by reasoning-gym datasets ("gcd+2*chain_sum:max_digits=1"), or by the path of a JSONL file.
"""

import difflib
from pathlib import Path

from policygrad.errors import DataError
from policygrad.tasks.embedded import MIX, STEPS, Component
from policygrad.tasks.jsonl import JsonlTask
from policygrad.tasks.reasoning_gym import ReasoningGymTask, dataset_names
from policygrad.tasks.spec import parse_mix
from policygrad.tasks.types import Example, Prompt, Task

__all__ = ["EMBEDDED", "Component", "Example", "Prompt", "Task", "known_tasks", "load_task"]

EMBEDDED = {"embedded": MIX, "embedded_steps": STEPS}
PROCESS = ("worked_steps",)
"""The reward that knows the steps of both."""


def known_tasks() -> list[str]:
    """Every task that has a name, sorted; any JSONL file is a task too."""
    return sorted([*EMBEDDED, *dataset_names()])


def load_task(name: str, *, seed: int = 0, held_out: str | None = None) -> Task:
    """Build the task called `name`; `seed` orders training, never evaluation.

    `held_out` names a second JSONL file to evaluate on, only for a JSONL task. Raises DataError with
    what is wrong, where, and the way out.
    """
    if name.endswith(".jsonl") or _is_file(name):
        return JsonlTask.load(name, seed=seed, held_out=held_out)
    if held_out is not None:
        raise DataError(
            f"held_out={held_out!r} goes with a JSONL task, but {name!r} generates its own held-out problems; "
            "leave held_out away, or give a path ending in .jsonl as the task"
        )
    if name in EMBEDDED:
        return ReasoningGymTask(name, EMBEDDED[name], seed=seed, steps=PROCESS)
    components = parse_mix(name)
    for component in components:
        _check_name(component.name)
    return ReasoningGymTask(name, components, seed=seed)


def _is_file(name: str) -> bool:
    try:
        return Path(name).is_file()
    except (OSError, ValueError):  # too long for a file name, or a NUL in it
        return False


def _check_name(name: str) -> None:
    if name in dataset_names():
        return
    if name in EMBEDDED:
        raise DataError(f"the task {name!r} is a mix of its own; it takes no settings and joins no other mix")
    if name == "composite":
        raise DataError("the task 'composite' is spelt as a mix here: join datasets with '+', as in gcd+2*chain_sum")
    near = difflib.get_close_matches(name, known_tasks(), n=3, cutoff=0.5)
    hint = f"did you mean {', '.join(near)}?" if near else "policygrad.tasks.known_tasks() lists the names."
    raise DataError(f"unknown task {name!r}: {hint} A file of your own prompts is a task by its path, ending in .jsonl")
