"""Several environments in one run: each row of the task names its own, in the column `environment`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field, replace
from typing import Any, Self

from policygrad.errors import ConfigError, DataError
from policygrad.rollout.environment import (
    Capabilities,
    KnowsOpening,
    Observation,
    ParsesCalls,
    SingleTurn,
    find_capabilities,
)
from policygrad.rollout.runners import (
    EnvironmentKind,
    EpisodeContext,
    EpisodeRunner,
    TakesVariables,
    UsesModels,
    make_runner,
)
from policygrad.rollout.trajectory import EpisodeGroup, EpisodeSpec, Trajectory
from policygrad.samplers.base import SamplingParams
from policygrad.tasks.base import Example

COLUMN = "environment"
SINGLE = "single"
"""Names a row's own prompt with one answer, as a row without the column has it."""
SEPARATOR = "+"


@dataclass(eq=False)
class RowEnvironments:
    """Runs each episode in the environment that its row names; a row that names none is its prompt and one answer."""

    kinds: Mapping[str, EnvironmentKind]
    """By name."""
    _open: ExitStack | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        for name, kind in self.kinds.items():
            if find_capabilities(kind).plays_itself:
                raise ConfigError(
                    f"in the environment {name} the policy plays against itself, whose roles are compared among themselves: "
                    "give it a run of its own"
                )

    @property
    def capabilities(self) -> Capabilities:
        """What holds for all of them."""
        each = [find_capabilities(kind) for kind in self.kinds.values()]
        reasons = (x.stays_because for x in each if x.stays_because)
        return Capabilities(is_repeatable=all(x.is_repeatable for x in each), stays_because=next(reasons, ""))

    @property
    def parser(self) -> object:
        """A parser of its own, where all of them have one: else the model's format is needed for some rows."""
        parsers = [kind.parser if isinstance(kind, ParsesCalls) else None for kind in self.kinds.values()]
        return parsers[0] if all(parser is not None for parser in parsers) else None

    def find(self, example: Example) -> tuple[str, EnvironmentKind]:
        """Return a row's environment with its name. Raises DataError for a name that is not among them."""
        name = example.columns.get(COLUMN) or SINGLE
        if name == SINGLE:
            return SINGLE, SingleTurn
        kind = self.kinds.get(name) if isinstance(name, str) else None
        if kind is None:
            known = ", ".join([*self.kinds, SINGLE])
            raise DataError(
                f"{example.source or 'a row'}: its environment is {name!r}, and the run has {known}: add it, --environment "
                f"rows:{SEPARATOR.join([*self.kinds, str(name)])}"
            )
        return name, kind

    def opening(self, example: Example) -> Observation | None:
        """Return the first observation, where the row's environment knows it before an episode."""
        name, kind = self.find(example)
        if name == SINGLE:
            return Observation(example.prompt, example.tools)
        return kind.opening(example) if isinstance(kind, KnowsOpening) else None

    def runner(self, context: EpisodeContext) -> EpisodeRunner:
        """Return what runs the episodes of all environments at the same time."""
        runners = {name: make_runner(kind, context) for name, kind in self.kinds.items()}
        runners[SINGLE] = make_runner(SingleTurn, context)

        async def run(specs: Sequence[EpisodeSpec], samples: int, sampling: SamplingParams) -> list[EpisodeGroup]:
            places = dict[str, list[int]]()
            for place, spec in enumerate(specs):
                places.setdefault(self.find(spec.example)[0], []).append(place)
            results = await asyncio.gather(
                *(runners[name]([specs[i] for i in rows], samples, sampling) for name, rows in places.items())
            )
            groups = dict[int, EpisodeGroup]()
            for (name, rows), played in zip(places.items(), results, strict=True):
                groups |= zip(rows, (_label(group, name) for group in played), strict=True)
            return [groups[place] for place in range(len(specs))]

        return run

    def with_models(self, load: Callable[[str], EpisodeContext]) -> Self:
        """Return them with the models of those that use other models than the policy."""
        return self._with(lambda kind: kind.with_models(load) if isinstance(kind, UsesModels) else kind)

    def with_variables(self, names: Sequence[str]) -> Self:
        """Return them with the variables passed on to those that are programs. Raises ConfigError if none is."""
        if not any(isinstance(kind, TakesVariables) for kind in self.kinds.values()):
            raise ConfigError("--environment.env passes variables to agents' programs, and no row's environment is one")
        return self._with(lambda kind: kind.with_variables(names) if isinstance(kind, TakesVariables) else kind)

    def _with(self, change: Callable[[Any], Any]) -> Self:
        return replace(self, kinds={name: change(kind) for name, kind in self.kinds.items()})

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            for kind in self.kinds.values():
                if isinstance(kind, AbstractContextManager):
                    stack.enter_context(kind)
            self._open = stack.pop_all()
        return self

    def __exit__(self, *details: object) -> None:
        if self._open is not None:
            self._open.close()


def load_row_environments(names: str) -> RowEnvironments:
    """Load the environments of `rows:NAME+NAME`."""
    from policygrad.environments.registry import resolve_environment

    kinds = {name: resolve_environment(name) for name in split_names(names)}
    return RowEnvironments({name: kind for name, kind in kinds.items() if kind is not None})


def split_names(names: str) -> list[str]:
    """Return the names of `rows:NAME+NAME`. Raises ConfigError for an empty one, or one that is there twice."""
    parts = [part.strip() for part in names.split(SEPARATOR)]
    if not all(parts) or len(set(parts)) < len(parts):
        raise ConfigError(
            f"--environment rows:{names} has an empty name or one twice: write rows:calculator+mine.py:TOOLS"
        )
    return parts


def _label(group: EpisodeGroup, name: str) -> EpisodeGroup:
    """Give a group's metrics also under its environment's name."""

    def label(trajectory: Trajectory) -> Trajectory:
        named = {f"{name}/{key}": value for key, value in trajectory.metrics.items()}
        if trajectory.reward is not None:
            named[f"{name}/reward"] = trajectory.reward
        return replace(trajectory, metrics={**trajectory.metrics, **named})

    return replace(group, trajectories=tuple(map(label, group.trajectories)))
