"""Agents that are programs: anything that talks to OpenAI's or Anthropic's API, started once for each episode.

A program needs to know nothing of policygrad. It finds the policy at `OPENAI_BASE_URL` or `ANTHROPIC_BASE_URL`, its example in the
JSON file `POLICYGRAD_EXAMPLE`, and may write {"reward": 1.0, "answer": "…", "metrics": {…}} to `POLICYGRAD_RESULT`.
"""

from __future__ import annotations

import json
import math
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from itertools import count
from pathlib import Path
from typing import Any, Self

from policygrad.environments.agent_host import kill_group
from policygrad.environments.base import RESERVED_METRICS, STOP_METRIC_PREFIX, is_finite_number
from policygrad.errors import ConfigError, EngineError
from policygrad.sandbox.backends import find_bwrap, list_interpreter_paths
from policygrad.tasks.base import Example
from policygrad.utils.pictures import to_plain

HOST = Path(__file__).with_name("agent_host.py")
EPISODE_VARIABLE = "POLICYGRAD_EPISODE"
"""Marks all processes of an episode, so that none of them outlives it."""
LOG_TAIL = 400  # characters of a program's output that a message shows
_RESULT_KEYS = ("reward", "answer", "metrics")


@dataclass(frozen=True)
class AgentProgram:
    """Episodes of a program that was written without policygrad: `pg.AgentProgram("./run_agent.sh")`, or `--environment
    program:./run_agent.sh`; a Python function by `pg.AgentProgram(function="mine.py:main")`, or `--environment agent:mine.py:main`.

    Each episode runs in an empty folder of its own, which is deleted. Existing files that the command names are found from the
    folder that the run was started in.

    Raises:
        ConfigError: Neither or both of command and function, a limit out of range, or a sandbox that cannot be had.
    """

    command: str | Sequence[str] = ()
    """The program and its arguments, as a shell splits them; no shell is involved. A container is one: `docker run …`."""
    function: str = ""
    """FILE.py:NAME or MODULE:NAME, called with the example as a dictionary. It may be async, and returns a reward, an answer as
    text, or a dictionary as in `POLICYGRAD_RESULT`. Its file is imported once for all episodes."""
    python: str = ""
    """The Python that imports function, such as `agent-venv/bin/python`; "" = the run's. It need not have policygrad."""
    folder: str = ""
    """A folder that each episode begins with a copy of, such as a repository to repair; "" = an empty one."""
    reward_command: str | Sequence[str] = ()
    """A command that runs in the episode's folder after the program: exit code 0 is the reward 1, any other 0."""
    columns: Sequence[str] | None = None
    """The example's columns that the program is given beside the prompt; None = all, the right answer included."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Further environment variables."""
    max_seconds: float | None = None
    """Seconds of an episode, not counting those in which the program waits for completions; likewise of the reward command. None =
    those of --environment.timeout."""
    max_calls: int = 64
    """Completions that an episode may request."""
    max_processes: int = 64
    """Processes that an episode may have at once."""
    max_output: int = 16 * 2**20
    """Bytes that a program may print."""
    concurrency: int = 64
    """Programs that run at once."""
    sandbox: bool = False
    """Run the command in bubblewrap: it writes to its folder alone, sees no home folder and no other processes. The network stays,
    since it reaches the policy by it."""
    failure_reward: float | None = None
    """Reward of an episode whose program failed or exceeded a limit; None = it is counted and not trained on."""
    batch_seconds: float = 2.0
    """How long the local sampler waits for slow programs, after the last request, before it samples for those that wait. Engines
    are asked at once."""

    def __post_init__(self) -> None:
        if bool(self.command) is bool(self.function):
            raise ConfigError("AgentProgram needs either command or function, and not both")
        for name, minimum in (("max_calls", 1), ("max_processes", 1), ("max_output", 1), ("concurrency", 1)):
            if getattr(self, name) < minimum:
                raise ConfigError(f"AgentProgram: {name} must be at least {minimum}, not {getattr(self, name)}")
        seconds = 1.0 if self.max_seconds is None else self.max_seconds
        if not 0 < seconds < math.inf or not 0 <= self.batch_seconds < math.inf:
            raise ConfigError("AgentProgram: max_seconds must be above 0, batch_seconds at least 0, and both finite")
        if self.function and not self.function.rpartition(":")[0]:
            raise ConfigError(f"AgentProgram: function {self.function!r} must be FILE.py:NAME or MODULE:NAME")
        if self.python and not self.function:
            raise ConfigError("AgentProgram: python is for function; a command begins with its own Python")
        if self.python and shutil.which(self.python) is None:
            raise ConfigError(f"AgentProgram: python names {self.python!r}, which is no program that can be run here")
        if self.folder and not Path(self.folder).is_dir():
            raise ConfigError(f"AgentProgram: there is no folder {self.folder!r}")
        if self.sandbox and (self.function or find_bwrap() is None):
            reason = "function shares a process with others" if self.function else "bubblewrap (bwrap) is not installed"
            raise ConfigError(
                f"AgentProgram: sandbox=True is not possible: {reason}. Use command, with bwrap installed"
            )
        if self.command:
            program = split_command(self.command)[0]
            if shutil.which(program) is None:
                raise ConfigError(
                    f"--environment program:… names {program!r}, which is no program that can be run here"
                )

    @property
    def name(self) -> str:
        """The program in messages."""
        return self.function or Path(split_command(self.command)[0]).name

    @cached_property
    def host(self) -> AgentHost:
        """The process that starts the programs. Raises EngineError if the function cannot be imported."""
        return AgentHost(self.function, self.python)

    def __enter__(self) -> Self:
        self.host  # noqa: B018  a function that cannot be imported is an error now
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """End the process that starts programs, and all of them. It is made anew when it is needed."""
        host = self.__dict__.pop("host", None)
        if host is not None:
            host.close()

    def start(self, example: Example, key: str, variables: Mapping[str, str]) -> RunningProgram:
        """Start the program for an episode.

        Args:
            key: Names the episode; also its API key.
            variables: Where it finds the policy.
        """
        base = Path(tempfile.mkdtemp(prefix="policygrad-agent-"))
        folder = base / "work"
        if self.folder:
            shutil.copytree(self.folder, folder, symlinks=True)
        else:
            folder.mkdir()
        file = base / "example.json"
        names = example.columns if self.columns is None else self.columns
        columns = {name: example.columns.get(name) for name in names}
        file.write_text(json.dumps({"prompt": to_plain(example.prompt), **columns}, default=str))
        inherited = (
            {"PATH": os.environ.get("PATH", os.defpath), "LANG": "C.UTF-8"} if self.sandbox else dict(os.environ)
        )
        environment = {
            **inherited,
            **({"HOME": str(folder)} if self.sandbox else {}),
            **variables,
            **self.variables,
            "POLICYGRAD_EXAMPLE": str(file),
            "POLICYGRAD_RESULT": str(base / "result.json"),
            EPISODE_VARIABLE: key,
        }
        return RunningProgram(self, base, key, environment)


def split_command(command: str | Sequence[str]) -> list[str]:
    """Return a command's arguments, existing files with their full path."""
    arguments = shlex.split(command) if isinstance(command, str) else list(command)
    if not arguments:
        raise ConfigError("AgentProgram: the command is empty")
    first = [] if os.sep in arguments[0] else arguments[:1]  # `python` is found in PATH, even if a file is named so
    return [*first, *(os.path.abspath(word) if os.path.isfile(word) else word for word in arguments[len(first) :])]


def _confine(argv: Sequence[str], base: Path) -> list[str]:
    """Return the command that runs another one in bubblewrap, with an episode's folder as the only place to write to."""
    home, readable = Path.home(), {*list_interpreter_paths(), sys.prefix}
    readable |= {str(Path(word).parent) for word in argv if os.path.isabs(word) and os.path.isfile(word)}
    confined = [find_bwrap() or "bwrap", "--ro-bind", "/", "/", "--dev", "/dev", "--proc", "/proc", "--tmpfs", "/tmp"]
    confined += ["--tmpfs", str(home)] if home != Path("/") else []
    for path in sorted(readable, key=len):
        if Path(path).exists() and (Path(path).is_relative_to(home) or Path(path).is_relative_to("/tmp")):
            confined += ["--ro-bind", path, path]
    confined += ["--bind", str(base), str(base), "--chdir", str(base / "work")]
    confined += ["--unshare-user", "--unshare-pid", "--unshare-ipc", "--unshare-uts", "--die-with-parent", "--"]
    return [*confined, *argv]


class RunningProgram:
    """One episode's program: its folder, its processes, what it has written."""

    def __init__(self, config: AgentProgram, base: Path, key: str, environment: Mapping[str, str]) -> None:
        self.config, self.base, self.key, self._environment = config, base, key, dict(environment)
        self.log = base / "output.log"
        self._job = self._start(config.command)

    def _start(self, command: str | Sequence[str]) -> int:
        argv = split_command(command) if command else None
        if argv is not None and self.config.sandbox:
            argv = _confine(argv, self.base)
        return self.config.host.start(argv, self._environment, self.base / "work", self.log)

    def start_reward_command(self) -> None:
        """Run the reward command in the program's place."""
        hidden = ("OPENAI_API_KEY", "ANTHROPIC_API_KEY")
        self._environment = {name: value for name, value in self._environment.items() if name not in hidden}
        self._job = self._start(self.config.reward_command)

    def poll(self) -> int | None:
        """Return the exit code, −n for signal n; None = it runs. Raises EngineError if the host has ended."""
        return self.config.host.poll(self._job)

    @property
    def output_bytes(self) -> int:
        """Bytes that it has printed."""
        return self.log.stat().st_size if self.log.exists() else 0

    def last_output(self) -> str:
        """Return the end of what it has printed, on one line."""
        if not self.log.exists():
            return ""
        with self.log.open("rb") as file:
            file.seek(max(0, self.output_bytes - LOG_TAIL))
            return " ".join(file.read().decode("utf-8", "replace").split())

    def read_result(self) -> dict[str, Any]:
        """Return what the program wrote to `POLICYGRAD_RESULT`; {} = nothing.

        Raises:
            ValueError: It is no JSON object with reward, answer and metrics.
        """
        file = Path(self._environment["POLICYGRAD_RESULT"])
        if not file.exists():
            return {}
        if file.stat().st_size > self.config.max_output:
            raise ValueError(f"its result is larger than {self.config.max_output} bytes")
        values = json.loads(file.read_bytes())
        if not isinstance(values, dict) or (unknown := values.keys() - set(_RESULT_KEYS)):
            names = "it is no object" if not isinstance(values, dict) else f"it has {', '.join(sorted(unknown))}"
            raise ValueError(f"its result must be a JSON object with {', '.join(_RESULT_KEYS)}: {names}")
        if values.get("reward") is not None and not is_finite_number(values["reward"]):
            raise ValueError(f"its reward is {values['reward']!r}, which is no finite number")
        if not isinstance(values.get("answer", ""), str | None):
            raise ValueError("its answer is no text")
        metrics = values.get("metrics") or {}
        for name, value in metrics.items():
            if name in RESERVED_METRICS or name.startswith(STOP_METRIC_PREFIX) or not is_finite_number(value):
                raise ValueError(f"its metric {name!r} is reserved, or no finite number")
        return values

    def close(self, processes: Sequence[int]) -> None:
        """Kill it and these processes, and delete its folder."""
        pid = self.config.host.pid(self._job)
        if pid is not None and self.poll() is None:
            kill_group(pid)
        for process in processes:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(process, 9)
        shutil.rmtree(self.base, ignore_errors=True)


def list_episode_processes() -> dict[str, list[int]]:
    """Return the processes of each episode, where the system tells what environment a process began with (Linux)."""
    processes, mark = dict[str, list[int]](), f"{EPISODE_VARIABLE}=".encode()
    if not os.path.isdir("/proc/self"):
        return {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            with suppress(OSError):
                for variable in Path("/proc", name, "environ").read_bytes().split(b"\0"):
                    if variable.startswith(mark):
                        processes.setdefault(variable[len(mark) :].decode(), []).append(int(name))
    return processes


class AgentHost:
    """The handle on `agent_host.py`: start jobs, and learn how they end. It ends with this process.

    Raises:
        EngineError: The function cannot be imported.
    """

    def __init__(self, function: str = "", python: str = "") -> None:
        self._numbers, self._lock = count(), threading.Lock()
        self._pids, self._codes = dict[int, int](), dict[int, int]()
        self._process = subprocess.Popen(
            [python or sys.executable, str(HOST), *([function] if function else [])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C is for the run, which ends the programs
        )
        assert self._process.stdout is not None
        first = json.loads(self._process.stdout.readline() or '{"error": "its process ended"}')
        if "error" in first:
            raise EngineError(f"--environment agent:{function} cannot be loaded: {first['error']}")
        threading.Thread(target=self._read, name="agents", daemon=True).start()

    def start(self, argv: Sequence[str] | None, environment: Mapping[str, str], folder: Path, log: Path) -> int:
        """Start a program, or the function if `argv` is None. Return its number."""
        number = next(self._numbers)
        job = {"id": number, "argv": argv, "env": dict(environment), "folder": str(folder), "log": str(log)}
        assert self._process.stdin is not None
        try:
            with self._lock:
                self._process.stdin.write(json.dumps(job) + "\n")
                self._process.stdin.flush()
        except OSError as error:
            raise EngineError(f"the process that starts agents has ended ({error}): resume the run") from error
        return number

    def poll(self, number: int) -> int | None:
        """Return a job's exit code; None = it runs. Raises EngineError if the host has ended."""
        code = self._codes.get(number)
        if code is None and self._process.poll() is not None:
            raise EngineError("the process that starts agents has ended: resume the run")
        return code

    def pid(self, number: int) -> int | None:
        """Return a job's process; None = not started yet."""
        return self._pids.get(number)

    def close(self) -> None:
        """End the host and all that it has started."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            values = json.loads(line)
            target = self._pids if "pid" in values else self._codes
            target[values["id"]] = values.get("pid", values.get("code"))
