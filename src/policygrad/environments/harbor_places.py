"""Where an episode of a Harbor task happens: a folder that bubblewrap shows at the task's own paths, or a container."""

from __future__ import annotations

import os
import posixpath
import secrets
import shutil
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Protocol

from policygrad.environments.agent_host import measure_disk, remove_tree
from policygrad.environments.reward_files import MAX_BYTES, WrittenReward, parse_reward, read_reward_file
from policygrad.sandbox.commands import CommandLimits, CommandResult, CommandRunner, confine_command
from policygrad.sandbox.containers import Container
from policygrad.tasks.harbor import HarborTask

TESTS, LOGS, VERIFIER = "/tests", "/logs", "/logs/verifier"
REWARD_FILES = ("reward.txt", "reward.json")
"""In the order in which Harbor looks for them."""
VERIFY = ("bash", f"{TESTS}/test.sh")
_IN_CONTAINER = "rm -rf {0} && mkdir -p {0} && chmod 777 {0}"


class Place(Protocol):
    """An episode's files, in which commands run."""

    def open(self) -> None:
        """Make them as the task begins. Raises OSError."""

    def run(self, command: str, limits: CommandLimits) -> CommandResult:
        """Run a command of a shell in the task's folder. Raises OSError."""

    def verify(self, limits: CommandLimits) -> tuple[CommandResult, WrittenReward | None]:
        """Run the task's verifier; return how it ended, and what it wrote: None = nothing.

        Raises:
            OSError: It cannot be run.
            ValueError: It wrote no reward.
        """

    def close(self) -> None:
        """End what runs, and delete all files."""


class FolderPlace:
    """A folder of this machine, in bubblewrap."""

    def __init__(self, task: HarborTask) -> None:
        self.task = task
        self.base = Path()
        self._runner = CommandRunner(self._measure)

    def open(self) -> None:
        self.base = Path(tempfile.mkdtemp(prefix="policygrad-harbor-"))
        try:
            fill_root(self.task, self.base)
        finally:
            if self._runner.is_closed:  # meanwhile
                remove_tree(str(self.base))

    def run(self, command: str, limits: CommandLimits) -> CommandResult:
        mounts = list_mounts(self.base)
        variables = self.task.variables
        argv = confine_command(["bash", "-c", command], mounts, self.task.work_folder, limits, variables)
        return self._runner.run(argv, limits)

    def verify(self, limits: CommandLimits) -> tuple[CommandResult, WrittenReward | None]:
        mounts = add_verifier(self.task, self.base)
        variables = {**self.task.variables, **self.task.verifier_variables}
        argv = confine_command(VERIFY, mounts, self.task.work_folder, limits, variables)
        result = self._runner.run(argv, limits)
        return result, read_written(self.base)

    def close(self) -> None:
        self._runner.close()
        if self.base != Path():
            remove_tree(str(self.base))

    def _measure(self) -> int:
        return measure_disk(str(self.base), ())


def fill_root(task: HarborTask, base: Path) -> None:
    """Make the folder `root` in an episode's folder, as the task's Dockerfile makes that of a container. Raises OSError."""
    root = base / "root"
    for name in ("tmp", task.work_folder.lstrip("/")):
        (root / name).mkdir(parents=True, exist_ok=True)
    for source, target in task.recipe.copies:
        path = root / target.lstrip("/")
        context = task.folder / "environment"
        origin = context / source
        _check_inside(context, context / posixpath.dirname(source.rstrip("/")))
        if origin.is_dir() and not origin.is_symlink():
            _copy_folder(origin, path, root)
            continue
        if target.endswith("/") or path.is_dir():
            path = path / posixpath.basename(source)
        _check_inside(root, path)
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(origin, path, follow_symlinks=False)


def _copy_folder(source: Path, target: Path, root: Path) -> None:
    """Copy a folder's files into a folder that may have some, among them links that an earlier COPY has made."""

    def check_folder(folder: str | os.PathLike[str], names: list[str]) -> set[str]:
        _check_inside(root, target / Path(folder).relative_to(source))
        return set()

    def copy(file: str, path: str) -> None:
        _check_inside(root, Path(path))
        shutil.copy2(file, path)

    shutil.copytree(source, target, symlinks=True, dirs_exist_ok=True, ignore=check_folder, copy_function=copy)


def _check_inside(top: Path, path: Path) -> None:
    """Raise OSError for a path that a link of the task's leads out of a folder."""
    if not path.resolve().is_relative_to(top.resolve()):
        raise OSError(f"the Dockerfile copies through a link that leads elsewhere: {path.relative_to(top)}")


def list_mounts(base: Path) -> dict[str, Path]:
    """Return the folders at the root that an episode has of its own, by their path there."""
    return {f"/{name}": base / "root" / name for name in sorted(os.listdir(base / "root"))}


def add_verifier(task: HarborTask, base: Path) -> dict[str, Path]:
    """Put the task's tests and an empty folder for its reward beside an episode's files; return all that is mounted."""
    for name in ("tests", "logs", "verifier"):
        remove_tree(str(base / name))
    shutil.copytree(task.folder / "tests", base / "tests", symlinks=True)
    for name in ("verifier", "agent", "artifacts"):
        (base / "logs" / name).mkdir(parents=True)
    (base / "verifier").mkdir()
    return {**list_mounts(base), TESTS: base / "tests", LOGS: base / "logs", VERIFIER: base / "verifier"}


def read_written(base: Path) -> WrittenReward | None:
    """Return what a verifier has written. Raises ValueError for a file without a reward."""
    for name in REWARD_FILES:
        try:
            return read_reward_file(base / "verifier", name)
        except FileNotFoundError:
            continue
    return None


class ContainerPlace:
    """A container, which has the image's programs."""

    def __init__(self, task: HarborTask, engine: str, image: str, limits: CommandLimits) -> None:
        self.task, self._limits = task, limits
        folder = "" if not task.recipe.folder and task.work_folder == "/app" else task.work_folder
        self._container = Container(engine, f"policygrad-{secrets.token_hex(8)}", image, folder)

    def open(self) -> None:
        task = self.task
        self._container.start(
            task.memory, task.cpus, self._limits.processes, network=task.network, variables=task.variables
        )

    def run(self, command: str, limits: CommandLimits) -> CommandResult:
        return self._container.run(["bash", "-c", command], limits)

    def verify(self, limits: CommandLimits) -> tuple[CommandResult, WrittenReward | None]:
        run = partial(self._container.run, limits=replace(limits, seconds=60.0, output=MAX_BYTES + 1))
        run(["sh", "-c", _IN_CONTAINER.format(VERIFIER)])
        self._container.copy_in(self.task.folder / "tests", TESTS)
        result = self._container.run(VERIFY, limits, self.task.verifier_variables)
        for name in REWARD_FILES:
            if run(["test", "-e", f"{VERIFIER}/{name}"]).code:
                continue
            written = run(["cat", f"{VERIFIER}/{name}"])
            if written.exceeded:
                raise ValueError(f"its reward file {name} is larger than {MAX_BYTES:,} bytes")
            if written.code:
                raise ValueError(f"its reward file {name} cannot be read")
            return result, parse_reward(written.output.encode(), name)
        return result, None

    def close(self) -> None:
        self._container.close()


def limit_commands(task: HarborTask, limits: CommandLimits, seconds: float) -> CommandLimits:
    """Return limits of this many seconds, and no more memory and files than the task asks for."""
    return replace(limits, seconds=seconds, memory=min(limits.memory, task.memory), disk=min(limits.disk, task.disk))
