"""Episodes on tasks in Harbor's format: the policy works by a shell or through an agent's program, and a task's verifier scores."""

from __future__ import annotations

import time
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Self

from policygrad.environments.agent_program import AgentProgram, RunningProgram, confine
from policygrad.environments.harbor_places import (
    VERIFY,
    ContainerPlace,
    FolderPlace,
    Place,
    add_verifier,
    fill_root,
    limit_commands,
    list_mounts,
    read_written,
)
from policygrad.environments.reward_files import WrittenReward
from policygrad.environments.tools import Tool, ToolUse
from policygrad.errors import ConfigError, DataError, EngineError
from policygrad.rewards.workers.messages import replace_control_characters
from policygrad.rollout.environment import Action, Capabilities, Environment, Observation, Step
from policygrad.sandbox.commands import CommandLimits, CommandResult, confine_command
from policygrad.sandbox.containers import ENGINES, build_image, explain_engine, pull_image
from policygrad.tasks.base import Example
from policygrad.tasks.harbor import (
    FOLDER_COLUMN,
    HarborTask,
    choose_engine,
    explain_unusable,
    find_task,
    read_tasks,
    split_harbor_name,
)
from policygrad.utils.async_runner import run_in_daemon_thread

GRACE_SECONDS = 30.0
"""Beyond a command's own limit, until its call is given up."""
_SHOWN = 300  # characters of a verifier's output in a message
VERIFIER_METRIC_PREFIX = "verifier_"
"""Before the names of the numbers that a verifier writes beside its reward."""


@dataclass(frozen=True)
class Harbor:
    """Episodes on `--task harbor:FOLDER`: `--environment harbor:FOLDER` with that task, or with options
    `--environment mine.py:TASKS` and `TASKS = Harbor("FOLDER", max_turns=50)`.

    The policy has one tool, `bash`, whose commands run in the task's own files; a turn without a call ends the episode, and the
    task's `tests/test.sh` then writes the reward. Whatever a command or a verifier does costs its episode alone.

    Raises:
        ConfigError: No such folder, an engine that does not work, or a limit out of range.
    """

    folder: str
    """A task's folder, or one of several such folders."""
    engine: str = "auto"
    """docker, podman, auto for the first that works, or none: bubblewrap and this machine's programs, for tasks that need files
    alone."""
    max_turns: int = 32
    """Maximum turns of the policy. The run's `max_tokens` limits the tokens of all turns together."""
    command_seconds: float = 60.0
    """Seconds of one command; all of an episode together have those of the task's `[agent] timeout_sec`."""
    max_output_chars: int = 8000
    """Longer outputs of a command are shortened in the middle."""
    network: bool | None = None
    """Whether containers reach the internet; None = those whose task.toml says so (Harbor itself lets all that say nothing)."""
    limits: CommandLimits = field(default_factory=lambda: CommandLimits(60.0))
    """Of each command and of the verifier, beside the task's own; its seconds are not read."""

    def __post_init__(self) -> None:
        split_harbor_name(f"{self.folder},engine={self.engine}")
        if self.max_turns < 1 or not self.command_seconds > 0 or self.max_output_chars < 1:
            raise ConfigError("Harbor: max_turns and max_output_chars must be at least 1, and command_seconds above 0")
        if self.engine in ENGINES and (reason := explain_engine(self.engine)):
            raise ConfigError(f"harbor:{self.folder},engine={self.engine} cannot be had: {reason}. Leave engine out")

    @property
    def capabilities(self) -> Capabilities:
        """What a run must know of its episodes."""
        return Capabilities(has_known_columns=True, stays_because="tasks in Harbor's format run where the trainer does")

    @cached_property
    def _images(self) -> dict[str, str]:
        """Names of images by the task's folder; those that cannot be built are left out."""
        return {}

    def __enter__(self) -> Self:
        """Begin a run: images are built or downloaded, which a later run finds."""
        _require_any(self.folder, self.engine)
        engine, failures = choose_engine(self.engine), list[str]()
        tasks = [task for task in read_tasks(self.folder) if isinstance(task, HarborTask) and task.has_image]
        for task in tasks if engine is not None else ():
            assert engine is not None
            try:
                self._images[str(task.folder)] = (
                    pull_image(engine, task.image, task.build_seconds)
                    if task.image
                    else build_image(engine, task.folder / "environment", task.build_seconds)
                )
            except EngineError as error:
                failures.append(str(error))
        if failures and not self._images:
            raise EngineError(f"no image of harbor:{self.folder} can be had: {failures[0]}")
        if failures:
            warnings.warn(
                f"{len(failures)} of {len(tasks)} images cannot be had, so that these tasks' episodes fail: {failures[0]}",
                stacklevel=2,
            )
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def opening(self, example: Example) -> Observation | None:
        """Return what an episode begins with. Raises DataError for a task that cannot be run."""
        _require_task(self.folder, example, self.engine)
        return Observation(example.prompt, (_describe_bash().schema,))

    def __call__(self, example: Example) -> Environment:
        task = _require_task(self.folder, example, self.engine)
        return _Episode(self, example, task)

    def make_place(self, task: HarborTask) -> Place:
        """Return where an episode of a task happens. Raises ValueError for one without an image."""
        engine = choose_engine(self.engine)
        if engine is None or not task.has_image:
            return FolderPlace(task)
        if (image := self._images.get(str(task.folder))) is None:
            raise ValueError(f"the image of {task.name} could not be had")
        network = task.network if self.network is None else self.network
        return ContainerPlace(replace(task, network=network), engine, image, self.limits)


def use_harbor(name: str) -> Harbor | HarborProgram:
    """Return the environment of `--environment harbor:FOLDER[,engine=ENGINE][,agent=COMMAND]`."""
    parts = split_harbor_name(name)
    if not parts.agent:
        return Harbor(parts.folder, parts.engine)
    if parts.engine not in ("auto", "none"):
        raise ConfigError(
            f"harbor:{name}: an agent's program runs in bubblewrap, without a container: leave engine out"
        )
    return HarborProgram(parts.agent, sandbox=True, tasks=parts.folder, columns=("name", "difficulty", "category"))


def list_harbor_code(name: str) -> list[str]:
    """Return what `harbor:NAME` runs: scripts of a folder's tasks, and an agent's program."""
    folder, _, agent = name.partition(",agent=")
    return [f"harbor:{folder.partition(',engine=')[0]}", *([f"program:{agent}"] if agent else [])]


def _require_task(folder: str, example: Example, engine: str = "auto", *, agent: bool = False) -> HarborTask:
    """Return an example's task. Raises ConfigError for one of another folder, DataError for one that cannot be run."""
    task = find_task(folder, example.columns.get(FOLDER_COLUMN))
    if task is None:
        raise ConfigError(
            f"--environment harbor:{folder} needs the tasks of that folder: give --task harbor:{folder} too"
        )
    if reason := explain_unusable(task, engine, agent=agent):
        raise DataError(f"{task.folder}: {reason}. --task.skip-bad-rows leaves such tasks out")
    return task


def _require_any(folder: str, engine: str = "auto", *, agent: bool = False) -> None:
    """Raise ConfigError if none of a folder's tasks can be run, before a model is loaded for them."""
    tasks = [task for task in read_tasks(folder) if isinstance(task, HarborTask)]
    reasons = [explain_unusable(task, engine, agent=agent) for task in tasks]
    if reasons and all(reasons):
        raise ConfigError(f"none of the {len(tasks)} tasks of harbor:{folder} can be run: {reasons[0]}")


def bash(command: str) -> str:
    """Runs a command in a shell, in the task's folder. Each command is a shell of its own; files stay.

    Args:
        command: What to run, such as: ls -l && cat notes.txt
    """
    raise NotImplementedError  # each episode has its own


@cache
def _describe_bash() -> Tool:
    return Tool.from_function(bash)


class _Episode:
    def __init__(self, config: Harbor, example: Example, task: HarborTask) -> None:
        self.config, self.task = config, task
        self.seconds_left = task.agent_seconds
        self.place = config.make_place(task)
        tool = Tool("bash", self._run, _describe_bash().schema)
        tools = ToolUse(
            (tool,),
            max_turns=config.max_turns,
            timeout=config.command_seconds + GRACE_SECONDS,
            max_output_chars=config.max_output_chars,
        )
        self.conversation = tools(example)

    async def reset(self) -> Observation:
        await run_in_daemon_thread(self.place.open)
        return await self.conversation.reset()

    async def step(self, action: Action) -> Step:
        step = await self.conversation.step(action)
        if step.observation is not None and not action.truncated:
            return step
        _, written = await self._verify()
        metrics = {f"{VERIFIER_METRIC_PREFIX}{name}": value for name, value in written.metrics.items()}
        return Step(
            reward=written.reward,
            metrics={**step.metrics, **metrics},
            stop_reason=step.stop_reason,
            feedback=written.feedback,
        )

    async def on_truncated(self) -> float:
        return (await self._verify())[1].reward

    async def close(self) -> None:
        await run_in_daemon_thread(self.place.close)

    def _run(self, command: str) -> str:
        """Run a command of the policy's; return what it reads of it."""
        seconds = min(self.config.command_seconds, self.seconds_left)
        if seconds <= 0:
            return f"the {self.task.agent_seconds:g} s of this task are used up: no command can be run"
        if "\0" in command:
            return "a command cannot contain a zero byte"
        since = time.monotonic()
        try:
            result = self.place.run(command, limit_commands(self.task, self.config.limits, seconds))
        finally:
            self.seconds_left -= time.monotonic() - since
        ending = [] if result.code == 0 and not result.exceeded else [f"({result.summary})"]
        return "\n".join([*filter(None, [result.output.rstrip("\n")]), *ending])

    async def _verify(self) -> tuple[CommandResult, WrittenReward]:
        """Run the verifier. Raises ValueError where it writes no reward, which ends the episode."""
        limits = limit_commands(self.task, self.config.limits, self.task.verifier_seconds)
        result, written = await run_in_daemon_thread(lambda: self.place.verify(limits))
        if written is None:
            raise ValueError(
                f"the verifier of {self.task.name} wrote no /logs/verifier/reward.txt or reward.json ({result.summary}): "
                f"{replace_control_characters(result.output.strip()[-_SHOWN:]) or 'it printed nothing'}"
            )
        return result, written


# Agents' programs.


@dataclass(frozen=True)
class HarborProgram(AgentProgram):
    """Episodes of an agent's program in the files of Harbor's tasks: `--environment harbor:FOLDER,agent=COMMAND`.

    The program begins in the task's folder, finds the instruction in `POLICYGRAD_PROMPT`, and the policy as any
    program does. It runs in bubblewrap, with this machine's programs, without seeing the tasks' own folders.
    """

    tasks: str = ""
    """The folder of the tasks."""

    def __enter__(self) -> Self:
        _require_any(self.tasks, agent=True)
        return super().__enter__()

    def opening(self, example: Example) -> Observation | None:
        """Return None: what it begins with is the program's. Raises DataError for a task that cannot be run."""
        _require_task(self.tasks, example, agent=True)
        return None

    def fill(self, base: Path, example: Example) -> None:
        (base / "work").mkdir()
        fill_root(_require_task(self.tasks, example, agent=True), base)

    def launch(self, base: Path, key: str, environment: Mapping[str, str], example: Example) -> RunningProgram:
        return _RunningTask(self, base, key, environment, _require_task(self.tasks, example, agent=True))

    @property
    def has_judge(self) -> bool:
        return True


class _RunningTask(RunningProgram):
    """An agent's program in a task's files, and then the task's verifier."""

    def __init__(
        self, config: HarborProgram, base: Path, key: str, environment: Mapping[str, str], task: HarborTask
    ) -> None:
        self.task, self._folder = task, str(Path(config.tasks).resolve())
        self._is_verifying = False
        own = {"HOME": str(base / "home"), "POLICYGRAD_RESULT": str(base / "tmp" / "result.json")}
        super().__init__(config, base, key, {**task.variables, **environment, **own})

    @property
    def max_seconds(self) -> tuple[float, str]:
        table, seconds = (
            ("verifier", self.task.verifier_seconds) if self._is_verifying else ("agent", self.task.agent_seconds)
        )
        return seconds, f"[{table}] timeout_sec of its task.toml"

    @property
    def writes_reward(self) -> bool:
        return True

    def confine(self, argv: Any) -> list[str]:
        if not self._is_verifying:
            # of the episode's folder it sees what it cannot replace: its roots are mounted again for the verifier
            own = [self.base / name for name in ("tmp", "home", "example.json", "prompt.txt")]
            return confine(argv, self.base, list_mounts(self.base), self.task.work_folder, own, [self._folder])
        variables = {**self.task.variables, **self.task.verifier_variables}
        limits = limit_commands(self.task, CommandLimits(self.task.verifier_seconds), self.task.verifier_seconds)
        return confine_command(argv, add_verifier(self.task, self.base), self.task.work_folder, limits, variables)

    def start_reward_command(self) -> None:
        self._is_verifying = True
        self._host.forget(self._job)
        self._job = self._start(VERIFY)

    def read_reward(self) -> WrittenReward | None:
        return read_written(self.base)
