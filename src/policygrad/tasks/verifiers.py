"""Tasks of a taskset written for verifiers (`verifiers.v1`), as rows; what they are worth says environments/verifiers.py.

A taskset is data with scoring, and a harness of verifiers' own plays it against a model's endpoint. Here its rows are prompts and
its rewards are called, and the episodes are ours, so that what is trained on are the tokens that were sampled. What needs more of
verifiers than that is refused by name.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

from policygrad.errors import ConfigError, DataError, install_command
from policygrad.tasks.base import Example
from policygrad.tasks.rows import RowsTask

VERIFIERS_PREFIX = "verifiers:"
TASKSET_COLUMN, INDEX_COLUMN = "taskset", "taskset_index"
"""The columns of a row: which taskset it is of, and its place there."""


def load_verifiers_task(name: str, seed: int) -> RowsTask:
    """The task `verifiers:ID`, ID as verifiers takes it: an installed package, or a module of the current folder.

    Raises:
        ConfigError: verifiers, or the taskset, is not installed, or needs what is not here.
        DataError: a task without a prompt of text.
    """
    identity = name.removeprefix(VERIFIERS_PREFIX)
    examples = [_example(identity, task, index) for index, task in enumerate(load_taskset_tasks(identity))]
    if not examples:
        raise DataError(f"{name}: the taskset has no tasks")
    return RowsTask.from_rows(name, examples, seed)


def taskset_module(identity: str) -> str:
    """The module of a taskset: that of `owner/word-count@1` is word_count, as verifiers has it."""
    return identity.rpartition("/")[2].partition("@")[0].replace("-", "_").lower()


@lru_cache(maxsize=4)
def load_taskset_tasks(identity: str) -> tuple[Any, ...]:
    """The tasks of a taskset in its order, once per process."""
    taskset = load_taskset(identity)
    if not taskset.bounded:
        raise ConfigError(
            f"{VERIFIERS_PREFIX}{identity} has no end: write a taskset that takes a part of it, `load` with an islice"
        )
    tasks = tuple(taskset)
    if tasks:
        _check(identity, tasks[0])
    return tasks


@lru_cache(maxsize=4)
def load_taskset(identity: str) -> Any:
    """The taskset, with the configuration that its defaults make."""
    loaders = _loaders()
    _look_here(taskset_module(identity))
    try:
        taskset = loaders.taskset_class(identity)(loaders.taskset_config_type(identity)(id=identity))
        environment = loaders.environment_class(identity)
    except ImportError as error:
        raise ConfigError(f"{VERIFIERS_PREFIX}{identity}: {error}") from error
    except (AttributeError, TypeError, ValueError) as error:  # no taskset in it; settings without a default
        raise ConfigError(
            f"{VERIFIERS_PREFIX}{identity}: verifiers cannot load it with its defaults: {error}"
        ) from error
    if environment is not loaders.SingleAgentEnv:
        raise ConfigError(
            f"{VERIFIERS_PREFIX}{identity} is played by {environment.__name__}, an Env of its own, and episodes here are ours: take a "
            "taskset of prompts, rewards and tools, or write an environment for it (docs/extending.md)"
        )
    return taskset


def _look_here(module: str) -> None:
    """Puts the current folder on the import path if it holds the taskset, as it would be for a script there."""
    here = Path.cwd()
    if str(here) not in sys.path and ((here / f"{module}.py").exists() or (here / module).is_dir()):
        sys.path.append(str(here))


def _check(identity: str, task: Any) -> None:
    """Raises ConfigError for what would be left away in silence."""
    from verifiers.v1.task import Task
    from verifiers.v1.utils.decorators import discover_decorated

    own = type(task)
    needs = [name for name in ("setup", "finalize", "stage_verifier") if getattr(own, name) is not getattr(Task, name)]
    needs += [f"the reward {fn.__name__}" for fn in task.hooks("reward") if _needs_runtime(fn)]
    if task.NEEDS_CONTAINER or task.data.image or needs:
        what = ", ".join(needs) or "a container"
        raise ConfigError(
            f"{VERIFIERS_PREFIX}{identity}: {own.__name__} needs a runtime ({what}), which there is none of here"
        )
    hooks = [fn.__name__ for kind in ("stop", "intercept") for fn in discover_decorated(task, kind)]
    if hooks:
        raise ConfigError(
            f"{VERIFIERS_PREFIX}{identity}: {own.__name__} has hooks in verifiers' own rollouts ({', '.join(hooks)})"
        )


def _needs_runtime(function: Any) -> bool:
    found = inspect.signature(function).parameters.get("runtime")
    return found is not None and found.default is inspect.Parameter.empty


def _example(identity: str, task: Any, index: int) -> Example:
    return Example(
        tuple(_messages(identity, task, index)),
        {TASKSET_COLUMN: identity, INDEX_COLUMN: index},
        f"{VERIFIERS_PREFIX}{identity}, task {index}",
    )


def _messages(identity: str, task: Any, index: int) -> Iterator[dict[str, str]]:
    data = task.data
    if data.system_prompt:
        yield {"role": "system", "content": data.system_prompt}
    if data.prompt is None:
        raise DataError(
            f"{VERIFIERS_PREFIX}{identity}, task {index} has no prompt: in verifiers its user begins, which nobody is here"
        )
    if isinstance(data.prompt, str):
        yield {"role": "user", "content": data.prompt}
        return
    for message in data.prompt:
        content = message.content
        if not isinstance(content, str):
            if any(part.type != "text" for part in content or ()):
                raise DataError(f"{VERIFIERS_PREFIX}{identity}, task {index}: a message has more than text")
            content = "\n".join(part.text for part in content or ())
        if message.role == "tool" or getattr(message, "tool_calls", None):
            raise DataError(
                f"{VERIFIERS_PREFIX}{identity}, task {index}: its prompt has calls of tools in it, which cannot be rendered here"
            )
        yield {"role": message.role, "content": content}


def _loaders() -> Any:
    try:
        import verifiers.v1.utils.loaders
    except ImportError as error:
        raise ConfigError(
            f"verifiers:… needs verifiers, which is not installed: {install_command('verifiers')}"
        ) from error
    return verifiers.v1.utils.loaders
