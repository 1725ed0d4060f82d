"""Container engines: which of them works here, images that it builds, and containers in which commands run."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from policygrad.errors import EngineError
from policygrad.sandbox.commands import CommandLimits, CommandResult, CommandRunner

ENGINES = ("docker", "podman")
_ANSWER_SECONDS = 20.0  # for an engine to say its version
_LIFE_SECONDS = 2 * 24 * 3600  # after which a container ends that nobody could remove
_MANAGE_SECONDS = 120.0  # for starting and removing containers


@cache
def find_engine() -> str | None:
    """Return the container engine that works here, docker or podman; None = neither. Each is asked once per process."""
    return next((name for name in ENGINES if explain_engine(name) == ""), None)


@cache
def explain_engine(name: str) -> str:
    """Return why an engine cannot be used; "" = it can."""
    program = shutil.which(name)
    if program is None:
        return "it is not installed"
    try:
        answer = subprocess.run([program, "version"], capture_output=True, timeout=_ANSWER_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"it does not answer: {type(error).__name__}"
    if answer.returncode == 0:
        return ""
    return answer.stderr.decode("utf-8", "replace").strip().rpartition("\n")[2][:200] or "it does not answer"


def build_image(engine: str, folder: Path, seconds: float) -> str:
    """Build the image of a folder with a Dockerfile; return its name.

    Raises:
        EngineError: It cannot be built, with the end of what the engine printed.
    """
    digest = hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:16]
    tag = f"policygrad-harbor:{digest}"
    result = CommandRunner().run([engine, "build", "-t", tag, str(folder)], CommandLimits(seconds, output=16 << 20))
    if result.exceeded or result.code:
        raise EngineError(f"{engine} cannot build {folder}: {result.summary}: {result.output.strip()[-400:]}")
    return tag


def pull_image(engine: str, image: str, seconds: float) -> str:
    """Download an image, unless it is here; return its name. Raises EngineError, with what the engine printed."""
    if CommandRunner().run([engine, "image", "inspect", image], CommandLimits(_MANAGE_SECONDS)).code == 0:
        return image
    result = CommandRunner().run([engine, "pull", image], CommandLimits(seconds, output=16 << 20))
    if result.exceeded or result.code:
        raise EngineError(f"{engine} cannot pull {image}: {result.summary}: {result.output.strip()[-400:]}")
    return image


@dataclass
class Container:
    """A container in which commands run until it is closed.

    Args:
        engine: docker or podman.
        folder: Where commands begin; "" = the image's own.
    """

    engine: str
    name: str
    image: str
    folder: str = ""

    def __post_init__(self) -> None:
        self._runner = CommandRunner()

    def start(self, memory: int, cpus: float, processes: int, *, network: bool, variables: Mapping[str, str]) -> None:
        """Start it, with nothing of this machine in it. Raises OSError with what the engine printed."""
        options = ["--name", self.name, "--network", "bridge" if network else "none", "--init"]
        options += ["--memory", str(memory), "--cpus", f"{cpus:g}", "--pids-limit", str(processes)]
        options += ["--security-opt", "no-new-privileges"]
        for name, value in variables.items():
            options += ["--env", f"{name}={value}"]
        try:
            self._manage("run", "--detach", *options, self.image, "sh", "-c", f"sleep {_LIFE_SECONDS}")
        finally:
            if self._runner.is_closed:  # meanwhile, when there was nothing to remove
                self._remove()

    def copy_in(self, source: Path, target: str) -> None:
        """Copy what a folder holds into a new folder of the container. Raises OSError."""
        self._manage("exec", "--user", "root", self.name, "rm", "-rf", target)
        self._manage("cp", str(source), f"{self.name}:{target}")

    def run(
        self, argv: Sequence[str], limits: CommandLimits, variables: Mapping[str, str] | None = None
    ) -> CommandResult:
        """Run a command in it. One that exceeds a limit is ended with all others that run there; files stay. Raises OSError."""
        options = ["--workdir", self.folder] if self.folder else []
        for name, value in (variables or {}).items():
            options += ["--env", f"{name}={value}"]
        own = CommandLimits(limits.seconds, limits.output)  # of the engine's client; the container has its own
        result = self._runner.run([self.engine, "exec", *options, self.name, *argv], own)
        if result.exceeded:
            self._manage("restart", "-t", "0", self.name)
        return result

    def close(self) -> None:
        """End and remove it."""
        self._runner.close()
        self._remove()

    def _remove(self) -> None:
        CommandRunner().run([self.engine, "rm", "--force", "--volumes", self.name], CommandLimits(_MANAGE_SECONDS))

    def _manage(self, *arguments: str) -> None:
        result = self._runner.run([self.engine, *arguments], CommandLimits(_MANAGE_SECONDS))
        if result.exceeded or result.code:
            raise OSError(f"{self.engine} {arguments[0]}: {result.summary}: {result.output.strip()[-200:]}")
