"""TRL's environments: objects with `reset` and methods that the policy may call as tools."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from policygrad.trl.data import Row

RESERVED = ("reset", "get_reward")
"""Methods of an environment that are no tools."""
_ONLY = ""  # the name of an environment that all rows have


class Environments:
    """The environments of a trainer: one for each row of a generation, made once and reset often.

    Args:
        factory: Makes an environment; or several by name, which the rows' column `environment` chooses from.

    Raises:
        ValueError: One has no `reset`.
    """

    def __init__(self, factory: Callable[[], Any] | Mapping[str, Callable[[], Any]]) -> None:
        self.is_named = isinstance(factory, Mapping)
        self.factories: Mapping[str, Callable[[], Any]] = factory if isinstance(factory, Mapping) else {_ONLY: factory}
        self.pools = {name: [make()] for name, make in self.factories.items()}
        self.current = list[Any]()
        """Those of the rows of the last generation, in their order."""
        for pool in self.pools.values():
            if not callable(getattr(pool[0], "reset", None)):
                raise ValueError(
                    f"{type(pool[0]).__name__}, an environment that `environment_factory` makes, must define a callable `reset`"
                )

    @property
    def first_of_each(self) -> list[Any]:
        """One environment of each name."""
        return [pool[0] for pool in self.pools.values()]

    def reset(self, rows: Sequence[Row], prompts: Sequence[Any]) -> list[Any]:
        """Choose an environment for each row, reset it, and return the prompts with what each has said.

        Raises:
            ValueError: A row names an environment that there is not.
        """
        names = [row.get("environment") if self.is_named else _ONLY for row in rows]
        for name in dict.fromkeys(names):
            if name not in self.factories:
                raise ValueError(
                    f"a row has environment={name!r}, which is not among the environments of `environment_factory`: "
                    f"{', '.join(self.factories)}"
                )
        used = dict.fromkeys(self.factories, 0)
        self.current = []
        for name in names:
            assert name is not None
            pool = self.pools[name]
            if used[name] == len(pool):
                pool.append(self.factories[name]())
            self.current.append(pool[used[name]])
            used[name] += 1
        opened = list[Any]()
        for row, prompt, environment in zip(rows, prompts, self.current, strict=True):
            arguments = {k: v for k, v in row.items() if not (self.is_named and k == "environment")}
            observation = environment.reset(**arguments)
            opened.append(prompt if observation is None else _append(prompt, observation))
        return opened

    def methods(self, row: int) -> list[Callable[..., Any]]:
        """Return the tools of a row's environment."""
        return list_methods(self.current[row])


def list_methods(environment: Any) -> list[Callable[..., Any]]:
    """Return the methods of an environment that the policy may call."""
    members = inspect.getmembers(type(environment), predicate=inspect.isfunction)
    return [getattr(environment, name) for name, _ in members if name not in RESERVED and not name.startswith("_")]


def make_reward(kind: Any) -> Callable[..., Any]:
    """Return the reward function of the environments of a class: what their `get_reward` says; None for others."""
    if inspect.iscoroutinefunction(kind.get_reward):

        async def get_reward(environments: Sequence[Any], **_: Any) -> list[float | None]:
            return [await each.get_reward() if type(each) is kind else None for each in environments]

        return get_reward

    def read_reward(environments: Sequence[Any], **_: Any) -> list[float | None]:
        return [each.get_reward() if type(each) is kind else None for each in environments]

    return read_reward


def _append(prompt: Any, observation: Any) -> Any:
    """Return messages whose last goes on with what an environment says: text, or parts with pictures."""
    content = prompt[-1]["content"]
    if isinstance(observation, list) and isinstance(content, str):
        content = [{"type": "text", "text": content}]
    if isinstance(observation, str) and isinstance(content, list):
        observation = [{"type": "text", "text": observation}]
    return [*prompt[:-1], {**prompt[-1], "content": content + observation}]
