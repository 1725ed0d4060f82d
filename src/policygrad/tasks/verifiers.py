"""Tasksets of the verifiers library (`verifiers.v1`) as rows; `environments/verifiers.py` scores them.

A taskset is data with scoring, which verifiers' own harness runs against a model's endpoint. Here its rows are prompts, its
rewards are called, and the episodes are policygrad's, so that training uses the tokens that were sampled. Whatever needs more
of verifiers is refused by name.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

from policygrad.errors import ConfigError, DataError, import_optional
from policygrad.tasks.base import Example
from policygrad.tasks.mixtures import MixturePart, RowsTask
from policygrad.tasks.registry import VERIFIERS_PREFIX
from policygrad.utils.user_code import add_cwd_to_path

TASKSET_COLUMN, INDEX_COLUMN = "taskset", "taskset_index"  # the columns of a row: its taskset, and its index there


def load_verifiers_task(name: str, seed: int) -> RowsTask:
    """Load the task `verifiers:ID`, where ID is an installed package or a module in the current folder.

    Raises:
        ConfigError: verifiers or the taskset is not installed, or the taskset needs something unsupported.
        DataError: A task without a text prompt.
    """
    identity, examples = name.removeprefix(VERIFIERS_PREFIX), list[Example]()
    for index, task in enumerate(load_taskset_tasks(identity)):
        where, data, messages = f"{name}, task {index}", task.data, list[dict[str, str]]()
        if data.system_prompt:
            messages.append({"role": "system", "content": data.system_prompt})
        if data.prompt is None:
            raise DataError(f"{where} has no prompt: verifiers' simulated user would begin, and there is none here")
        if isinstance(data.prompt, str):
            messages.append({"role": "user", "content": data.prompt})
        for message in () if isinstance(data.prompt, str) else data.prompt:
            content = message.content
            if not isinstance(content, str):
                if any(part.type != "text" for part in content or ()):
                    raise DataError(f"{where}: a message contains more than text")
                content = "\n".join(part.text for part in content or ())
            if message.role == "tool" or getattr(message, "tool_calls", None):
                raise DataError(f"{where}: its prompt contains tool calls, which cannot be rendered here")
            messages.append({"role": message.role, "content": content})
        examples.append(Example(tuple(messages), {TASKSET_COLUMN: identity, INDEX_COLUMN: index}, where))
    if not examples:
        raise DataError(f"{name}: the taskset has no tasks")
    return RowsTask.from_parts(name, [MixturePart(1.0, name, examples)], seed)


def taskset_module(identity: str) -> str:
    """Return the module of a taskset, as verifiers does: `owner/word-count@1` is in word_count."""
    return identity.rpartition("/")[2].partition("@")[0].replace("-", "_").lower()


@lru_cache(maxsize=4)
def load_taskset_tasks(identity: str) -> tuple[Any, ...]:
    """Return the tasks of a taskset in order, loaded once per process.

    Raises:
        ConfigError: See `load_verifiers_task`; also features that would otherwise be ignored silently.
    """
    taskset, name = load_taskset(identity), f"{VERIFIERS_PREFIX}{identity}"
    if not taskset.bounded:
        raise ConfigError(f"{name} is endless: write a taskset that takes a part of it, with an islice in `load`")
    tasks = tuple(taskset)
    if not tasks:
        return tasks
    checked = set[tuple[type, int]]()
    for task in tasks:
        if needs := list(_list_data_needs(task.data)):
            raise _unsupported(name, task, needs)
        if (key := (type(task), id(task.config))) not in checked:  # what a task's class and configuration ask for
            checked.add(key)
            try:
                _check_hooks(name, task)
            except (
                ImportError,
                AttributeError,
                TypeError,
            ) as error:  # a function or judge that its configuration names
                raise ConfigError(
                    f"{name}: verifiers cannot load what {type(task).__name__} is configured with: {error}"
                ) from error
    return tasks


def _check_hooks(name: str, task: Any) -> None:
    """Raise ConfigError for what a task needs of verifiers' own rollouts, by decorators or by its configuration."""
    from verifiers.v1.task import Task
    from verifiers.v1.utils.decorators import discover_decorated

    kind = type(task)
    needs = [hook for hook in ("setup", "finalize", "stage_verifier") if getattr(kind, hook) is not getattr(Task, hook)]
    signals = [(f"the {kind} {fn.__name__}", fn) for kind in ("reward", "metric") for fn in task.hooks(kind)]
    signals += [(f"the judge {judge.reward_name}", judge.score) for judge in task.plugged_judges()]
    for what, function in signals:  # verifiers would leave them out
        runtime = inspect.signature(function).parameters.get("runtime")
        if runtime is not None and runtime.default is inspect.Parameter.empty:
            needs.append(what)
    if task.NEEDS_CONTAINER or needs:
        raise _unsupported(name, task, needs)
    if hooks := [fn.__name__ for fn in (*task.hooks("stop"), *discover_decorated(task, "intercept"))]:
        raise ConfigError(
            f"{name}: {kind.__name__} has hooks into verifiers' rollouts ({', '.join(hooks)}), which are unsupported"
        )


def _list_data_needs(data: Any) -> Iterator[str]:
    """Yield what a task's data asks of a runtime."""
    for field in ("image", "skills", "artifacts"):
        if getattr(data, field, None):
            yield f"{field} of task {data.idx}"


def _unsupported(name: str, task: Any, needs: Sequence[str]) -> ConfigError:
    what = ", ".join(needs) or "a container"
    return ConfigError(f"{name}: {type(task).__name__} needs a runtime ({what}), which is unsupported")


@lru_cache(maxsize=4)
def load_taskset(identity: str) -> Any:
    """Load a taskset with its default configuration.

    Raises:
        ConfigError: See `load_verifiers_task`.
    """
    name = f"{VERIFIERS_PREFIX}{identity}"
    import_optional("verifiers.v1.utils.loaders", "verifiers:…", "verifiers")
    import verifiers.v1.utils.loaders as loaders

    add_cwd_to_path(taskset_module(identity))
    try:
        taskset = loaders.taskset_class(identity)(loaders.taskset_config_type(identity)(id=identity))
        environment = loaders.environment_class(identity)
    except ImportError as error:
        raise ConfigError(f"{name}: {error}") from error
    except (AttributeError, TypeError, ValueError) as error:  # no taskset in it; settings without a default
        raise ConfigError(f"{name}: verifiers cannot load it with its defaults: {error}") from error
    if environment is not loaders.SingleAgentEnv:
        raise ConfigError(
            f"{name} has its own Env, {environment.__name__}, and episodes here are policygrad's: use a "
            "taskset of prompts, rewards and tools, or write an environment for it (docs/extending.md)"
        )
    return taskset
