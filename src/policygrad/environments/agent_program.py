"""Agents that are programs: anything that talks to OpenAI's or Anthropic's API, started once for each episode.

A program needs to know nothing of policygrad. It finds the policy at `OPENAI_BASE_URL` or `ANTHROPIC_BASE_URL`, its prompt in the
text file `POLICYGRAD_PROMPT`, the whole example in the JSON file `POLICYGRAD_EXAMPLE`, and may write {"reward": 1.0, "answer": "…",
"metrics": {…}} to `POLICYGRAD_RESULT`.
"""

from __future__ import annotations

import json
import math
import os
import queue
import secrets
import shlex
import shutil
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from policygrad.environments.agent_host import EXIT_SECONDS, NO_ISOLATION, SANDBOX, remove_tree
from policygrad.environments.reward_files import WrittenReward, read_reward_file
from policygrad.errors import ConfigError, EngineError
from policygrad.proxy.server import Proxy
from policygrad.rewards.workers.messages import replace_control_characters
from policygrad.rollout.environment import RESERVED_METRICS, STOP_METRIC_PREFIX, Capabilities, is_finite_number
from policygrad.sandbox.backends import find_bwrap, list_interpreter_paths
from policygrad.tasks.base import Example, Prompt
from policygrad.utils.child_environment import check_variable_names, explain_missing_variable, filter_environment
from policygrad.utils.filesystem import parse_json, read_untrusted
from policygrad.utils.message_parts import content_text, to_plain
from policygrad.utils.processes import list_descendants

if TYPE_CHECKING:
    from policygrad.rollout.runners import EpisodeContext, EpisodeRunner

HOST = Path(__file__).with_name("agent_host.py")
MAX_METRICS = 64
"""Metrics that an episode may report."""
MAX_NAME = 100  # characters of a metric's name
POLICY_VARIABLES = (
    *("OPENAI_BASE_URL", "OPENAI_API_BASE", "OPENAI_API_KEY", "ANTHROPIC_BASE_URL", "ANTHROPIC_API_KEY"),
    *("POLICYGRAD_MODEL", "POLICYGRAD_PROMPT", "POLICYGRAD_EXAMPLE", "POLICYGRAD_RESULT"),
)
"""Variables that a program is given, which nothing of the user's replaces."""
_KEYS = ("OPENAI_API_KEY", "ANTHROPIC_API_KEY")
_RESULT_KEYS = ("reward", "answer", "metrics")
_LOOPBACK = "127.0.0.1,localhost"  # what no client may send by way of a proxy of the network


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
    """A command that runs in the episode's folder after the program: exit code 0 is the reward 1, any other 0. Python in it imports
    nothing from the folder that it runs in, unless it is told to."""
    reward_file: str = ""
    """A file in the episode's folder with the reward, such as `logs/reward.json`: a number, or a JSON object with `reward`, perhaps
    `feedback` and other numbers, which are metrics. The reward command writes it, if there is one, whose exit code then counts for
    nothing; else the program. It takes the place of any other reward, and an episode without it has failed."""
    restored: Sequence[str] = ()
    """Names in `folder` that are for the reward command what they were at the beginning, such as `("tests", "conftest.py")`: what
    the program has changed or put there is undone."""
    columns: Sequence[str] | None = None
    """The example's columns that the program is given beside the prompt; None = all, the right answer included."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Further environment variables, by name and value."""
    environment: Sequence[str] = ()
    """Names of this process's environment variables that are passed on, beside those of a list without secrets
    (docs/isolation.md)."""
    max_seconds: float | None = None
    """Seconds of an episode, not counting those in which the program waits for completions; likewise of the reward command. None =
    those of --environment.timeout."""
    max_calls: int = 64
    """Completions that an episode may request."""
    max_processes: int = 64
    """Processes that an episode may have at once."""
    max_output: int = 16 * 2**20
    """Bytes that a program may print."""
    max_disk: int = 2 * 2**30
    """Bytes that an episode may write to its folder, files that are deleted and still open included."""
    concurrency: int = 64
    """Programs that run at once."""
    sandbox: bool = False
    """Run the command in bubblewrap: it writes to its folder alone, sees no home folder, no sockets and no other processes. The
    network stays, since it reaches the policy by it."""
    isolated: bool = True
    """Hide other episodes and the run from each episode as well as this system can, also without a sandbox. False = for a program
    that needs sudo, or another program with the rights of its owner."""
    failure_reward: float | None = None
    """Reward of an episode whose program failed or exceeded a limit; None = it is counted and not trained on."""
    batch_seconds: float = 2.0
    """How long the local sampler waits for slow programs, after the last request, before it samples for those that wait. Engines
    are asked at once."""

    def __post_init__(self) -> None:
        if bool(self.command) is bool(self.function):
            raise ConfigError("AgentProgram needs either command or function, and not both")
        for name, minimum in (
            ("max_calls", 1),
            ("max_processes", 1),
            ("max_output", 1),
            ("max_disk", 1),
            ("concurrency", 1),
        ):
            if getattr(self, name) < minimum:
                raise ConfigError(f"AgentProgram: {name} must be at least {minimum}, not {getattr(self, name)}")
        seconds = 1.0 if self.max_seconds is None else self.max_seconds
        if not 0 < seconds < math.inf or not 0 <= self.batch_seconds < math.inf:
            raise ConfigError("AgentProgram: max_seconds must be above 0, batch_seconds at least 0, and both finite")
        check_variable_names(self.environment, "AgentProgram: environment")
        if taken := [name for name in (*self.variables, *self.environment) if name in POLICY_VARIABLES]:
            raise ConfigError(
                f"AgentProgram: {taken[0]} is set for each episode, to reach the policy, and cannot be given. A program that asks "
                "another model as well needs another name for that one's key"
            )
        if self.restored and not (self.folder and self.reward_command):
            raise ConfigError("AgentProgram: restored is for a reward_command, and names what is in folder")
        for name in self.restored:
            if not _is_below(name):
                raise ConfigError(f"AgentProgram: restored has {name!r}, which is no name below folder")
        if self.reward_file and not _is_below(self.reward_file):
            raise ConfigError(
                f"AgentProgram: reward_file is {self.reward_file!r}, which is no name below the episode's folder: give one such as "
                "reward.json"
            )
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
    def capabilities(self) -> Capabilities:
        """What a run must know of programs: which of them wait together is a matter of time."""
        stays = f"the program {self.name} runs on the machine of the trainer"
        return Capabilities(is_repeatable=False, stays_because=stays)

    def runner(self, context: EpisodeContext) -> EpisodeRunner:
        """Return what runs the programs and samples for them."""
        from policygrad.environments.agent_episodes import run_agent_episodes

        return partial(
            run_agent_episodes,
            sampler=context.sampler,
            encoder=context.tokenizer,
            program=self,
            timeout=context.timeout,
            progress=context.progress,
        )

    @property
    def has_judge(self) -> bool:
        """True if another command runs after the program, and gives the reward."""
        return bool(self.reward_command)

    def with_variables(self, names: Sequence[str]) -> AgentProgram:
        """Return it with further names of environment variables that are passed on."""
        return replace(self, environment=(*self.environment, *names))

    @property
    def name(self) -> str:
        """The program in messages."""
        return self.function or Path(split_command(self.command)[0]).name

    @cached_property
    def host(self) -> AgentHost:
        """The process that starts the programs. Raises EngineError if the function cannot be imported."""
        inherited = filter_environment(os.environ, self.environment)
        try:
            return AgentHost(self.function, self.python, {**inherited, **self.variables})
        except EngineError as error:
            raise EngineError(f"{error}{self.explain_missing(str(error))}") from error

    @property
    def isolation(self) -> str | None:
        """How its episodes are kept from others; None = as well as this system can."""
        if not self.sandbox:
            return None if self.isolated else NO_ISOLATION
        program = find_bwrap()  # with the rights of its owner it cannot start where rights are given up
        return NO_ISOLATION if program is None or os.stat(program).st_mode & stat.S_ISUID else SANDBOX

    def explain_missing(self, message: str) -> str:
        """Return the remedy where a program's message names a variable that it was not given; else ""."""
        given = (*self.environment, *self.variables, *POLICY_VARIABLES)
        return explain_missing_variable(message, given, "programs", "--environment.env")

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

        Raises:
            OSError: Its folder cannot be made.
        """
        if self.host.has_ended:  # a program has killed it, which cost the episodes that it ran
            self.close()
        base = self.host.make_folder()
        try:
            self.fill(base, example)
            for name in ("tmp", "home"):
                (base / name).mkdir()
            names = example.columns if self.columns is None else self.columns
            columns = {name: example.columns.get(name) for name in names}
            text = json.dumps({"prompt": to_plain(example.prompt), **columns}, default=str)
            (base / "example.json").write_text(text)
            (base / "prompt.txt").write_text(write_prompt(example.prompt), encoding="utf-8", errors="replace")
        except BaseException:
            remove_tree(str(base))
            raise
        inherited = filter_environment(os.environ, self.environment)
        if self.sandbox:
            inherited |= {"HOME": str(base / "work"), "LANG": "C.UTF-8"}
        environment = {
            **inherited,
            **dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(base / "tmp")),
            **self.variables,
            **variables,
            **bypass_proxies({**inherited, **self.variables}),
            "POLICYGRAD_PROMPT": str(base / "prompt.txt"),
            "POLICYGRAD_EXAMPLE": str(base / "example.json"),
            "POLICYGRAD_RESULT": str(base / "result.json"),
        }
        return self.launch(base, key, environment, example)

    def fill(self, base: Path, example: Example) -> None:
        """Make the folder `work` that an episode begins in. Raises OSError."""
        if self.folder:
            shutil.copytree(self.folder, base / "work", symlinks=True)
        else:
            (base / "work").mkdir()

    def launch(self, base: Path, key: str, environment: Mapping[str, str], example: Example) -> RunningProgram:
        """Start the program in a folder that is filled."""
        return RunningProgram(self, base, key, environment)


def _is_below(name: str) -> bool:
    """Return whether a name is one below a folder."""
    return not os.path.isabs(name) and {"..", "."}.isdisjoint(Path(name).parts) and name not in ("", ".")


def use_function(name: str) -> AgentProgram:
    """Return the program of `--environment agent:FILE.py:NAME`."""
    return AgentProgram(function=name)


def write_prompt(prompt: Prompt) -> str:
    """Return a prompt as text: of messages their contents, one after another."""
    if isinstance(prompt, str):
        return prompt
    return "\n\n".join(content_text(message.get("content") or "") for message in prompt)


@cache
def shared_proxy() -> Proxy:
    """Return the proxy of this process."""
    return Proxy()


def bypass_proxies(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables by which clients send nothing for this machine to a proxy of the network."""
    given = {name: environment.get(name, "") for name in ("NO_PROXY", "no_proxy")}
    return {name: ",".join(filter(None, (value, _LOOPBACK))) for name, value in given.items()}


def split_command(command: str | Sequence[str]) -> list[str]:
    """Return a command's arguments, existing files with their full path."""
    arguments = shlex.split(command) if isinstance(command, str) else list(command)
    if not arguments:
        raise ConfigError("AgentProgram: the command is empty")
    first = [] if os.sep in arguments[0] else arguments[:1]  # `python` is found in PATH, even if a file is named so
    return [*first, *(os.path.abspath(word) if os.path.isfile(word) else word for word in arguments[len(first) :])]


def confine(
    argv: Sequence[str],
    base: Path,
    mounts: Mapping[str, Path] | None = None,
    folder: str = "",
    own: Sequence[Path] = (),
    secret: Sequence[str] = (),
) -> list[str]:
    """Return the command that runs another one in bubblewrap, with an episode's folder as the only place to write to.

    Args:
        mounts: Folders of the episode's that are seen elsewhere too, by the path there.
        folder: Where it begins; "" = `work` in the episode's folder.
        own: What it sees of the episode's folder; () = all.
        secret: Further folders that it does not see.
    """
    readable = {*list_interpreter_paths(), sys.prefix}
    readable |= {str(Path(word).parent) for word in argv if os.path.isabs(word) and os.path.isfile(word)}
    confined = [find_bwrap() or "bwrap", *(_show_system(mounts) if mounts else ("--ro-bind", "/", "/"))]
    confined += ["--dev", "/dev", "--proc", "/proc"]
    hidden = {str(Path(name).resolve()) for name in _HIDDEN_FOLDERS} | {str(Path.home().resolve())}
    hidden = {name for name in hidden if name != "/" and os.path.isdir(name)}
    for name in sorted(hidden, key=len):
        confined += ["--tmpfs", name]
    for path, source in (mounts or {}).items():
        confined += ["--bind", str(source), path]
    hidden |= set(mounts or {})
    for file in _RESOLVER_FILES:
        if os.path.isfile(file):
            confined += ["--ro-bind", os.path.realpath(file), os.path.realpath(file)]
    for path in sorted(readable, key=len):
        if os.path.exists(path) and any(Path(path).is_relative_to(name) for name in hidden):
            confined += ["--ro-bind", path, path]
    for path in _list_sockets():
        if not any(Path(path).is_relative_to(name) for name in hidden):
            confined += ["--ro-bind", "/dev/null", path]
    for name in secret:
        confined += ["--tmpfs", name]
    confined += ["--tmpfs", str(base.parent)]
    for source in own or (base,):
        confined += ["--bind", str(source), str(source)]
    confined += [*(["--remount-ro", "/"] if mounts else []), "--chdir", folder or str(base / "work")]
    confined += ["--unshare-user", "--unshare-pid", "--unshare-ipc", "--unshare-uts", "--cap-drop", "ALL"]
    return [*confined, "--new-session", "--die-with-parent", "--", *argv]


def _show_system(mounts: Mapping[str, Path]) -> list[str]:
    """Return what shows the files of this machine, read-only, in a root where `mounts` can be made."""
    argv = ["--tmpfs", "/"]
    for name in sorted(os.listdir("/")):
        path = f"/{name}"
        if path in mounts or name in ("dev", "proc"):
            continue
        argv += ["--symlink", os.readlink(path), path] if os.path.islink(path) else ["--ro-bind-try", path, path]
    return argv


_HIDDEN_FOLDERS = ("/tmp", "/var/tmp", "/run", "/var/run", "/home", "/root")
_RESOLVER_FILES = ("/etc/resolv.conf", "/etc/hosts")  # which may be links to files below /run


def _list_sockets() -> list[str]:
    """Return the files of this machine behind which a service listens, such as a container engine's (Linux)."""
    try:
        lines = Path("/proc/net/unix").read_text(errors="surrogateescape").splitlines()[1:]
    except OSError:
        return []
    paths = {fields[7] for line in lines if len(fields := line.split(maxsplit=7)) == 8 and fields[7].startswith("/")}
    return sorted(path for path in paths if _is_socket(path))


def _is_socket(path: str) -> bool:
    with suppress(OSError):
        return stat.S_ISSOCK(os.lstat(path).st_mode)
    return False


class RunningProgram:
    """One episode's program: its folder, its processes, what it has written."""

    def __init__(self, config: AgentProgram, base: Path, key: str, environment: Mapping[str, str]) -> None:
        self.config, self.base, self.key, self._environment = config, base, key, dict(environment)
        self._host = config.host
        self._job = self._start(config.command)

    def _start(self, command: str | Sequence[str]) -> int:
        argv = split_command(command) if command else None
        if argv is not None and self.config.sandbox:
            argv = self.confine(argv)
        limits = {
            "processes": self.config.max_processes,
            "output": self.config.max_output,
            "disk": self.config.max_disk,
        }
        return self._host.start(argv, self._environment, self.base, limits, self.key, self.config.isolation)

    def confine(self, argv: Sequence[str]) -> list[str]:
        """Return the command that runs another one in the sandbox."""
        return confine(argv, self.base)

    @property
    def max_seconds(self) -> tuple[float, str] | None:
        """The seconds that it has for what it does now, and what set them; None = the run's."""
        return None

    def start_reward_command(self) -> None:
        """Run the reward command in the program's place.

        Raises:
            OSError: Something cannot be restored, or the program has put something else in the place of its folder.
        """
        if not stat.S_ISDIR(os.lstat(self.base / "work").st_mode):
            raise NotADirectoryError("the program has replaced the folder that it worked in")
        for name in self.config.restored:
            source, target = Path(self.config.folder, name), self.base / "work" / name
            _clear_way(self.base / "work", target)
            if source.is_symlink() or source.is_file():
                shutil.copy2(source, target, follow_symlinks=False)
            elif source.is_dir():
                shutil.copytree(source, target, symlinks=True)
        if self.config.reward_file:  # what the program has put there is not the reward
            _clear_way(self.base / "work", self.base / "work" / self.config.reward_file)
        environment = {name: value for name, value in self._environment.items() if name not in _KEYS}
        # so that `python -m pytest` is no pytest.py that the program has written, here or in its home folder
        environment |= {"PYTHONSAFEPATH": "1", "PYTHONNOUSERSITE": "1"}
        if self.config.sandbox:
            remove_tree(str(self.base / "home"))
            (self.base / "home").unlink(missing_ok=True)
            (self.base / "home").mkdir()
            environment["HOME"] = str(self.base / "home")
        self._environment = environment
        self._host.forget(self._job)
        self._job = self._start(self.config.reward_command)

    @property
    def writes_reward(self) -> bool:
        """True if the reward is read from a file at the end."""
        return bool(self.config.reward_file)

    def read_reward(self) -> WrittenReward | None:
        """Return what the reward file says; None = it is not there. Raises ValueError for one without a reward."""
        try:
            return read_reward_file(self.base, f"work/{self.config.reward_file}")
        except FileNotFoundError:
            return None

    def poll(self) -> int | None:
        """Return the exit code, −n for signal n; None = it runs."""
        return self._host.poll(self._job)

    @property
    def exceeded(self) -> str:
        """The limit that it was ended for: output, processes or disk; "" = none. Known once it has ended."""
        return self._host.end_of(self._job).exceeded

    def last_output(self) -> str:
        """Return the end of what it has printed, on one line, once it has ended."""
        return replace_control_characters(self._host.end_of(self._job).output)

    def read_result(self) -> dict[str, Any]:
        """Return what the program wrote to `POLICYGRAD_RESULT`; {} = nothing.

        Raises:
            ValueError: It is no JSON object with reward, answer and metrics, or no plain file.
        """
        try:
            data = read_untrusted(Path(self._environment["POLICYGRAD_RESULT"]), self.config.max_output)
        except FileNotFoundError:
            return {}
        except OSError as error:
            raise ValueError(f"its result cannot be read: {error.strerror}") from error
        try:
            values = parse_json(data)
        except ValueError as error:
            raise ValueError(f"its result is no JSON: {error}") from error
        if not isinstance(values, dict) or (unknown := values.keys() - set(_RESULT_KEYS)):
            names = "it is no object" if not isinstance(values, dict) else f"it has {_show(', '.join(sorted(unknown)))}"
            raise ValueError(f"its result must be a JSON object with {', '.join(_RESULT_KEYS)}: {names}")
        if values.get("reward") is not None and not is_finite_number(values["reward"]):
            raise ValueError(f"its reward is {_show(repr(values['reward']))}, which is no finite number")
        if not isinstance(values.get("answer", ""), str | None):
            raise ValueError("its answer is no text")
        if values.get("answer"):
            values["answer"] = values["answer"].encode("utf-8", "replace").decode()  # a lone surrogate is no text
        _check_metrics(values.get("metrics") or {})
        return values

    def close(self) -> None:
        """End it and all that it started, and delete its folder."""
        self._host.end(self._job, self.base)


def _show(text: str) -> str:
    """Return the beginning of a text that a program wrote, for a message."""
    return replace_control_characters(text if len(text) <= MAX_NAME else f"{text[:MAX_NAME]}…")


def _check_metrics(metrics: Any) -> None:
    if not isinstance(metrics, dict):
        raise ValueError(f"its metrics are {_show(repr(metrics))}, and no object of numbers by name")
    if len(metrics) > MAX_METRICS:
        raise ValueError(f"it has {len(metrics)} metrics, and may have {MAX_METRICS}")
    for name, value in metrics.items():
        if name in RESERVED_METRICS or name.startswith(STOP_METRIC_PREFIX) or not is_finite_number(value):
            raise ValueError(f"its metric {_show(repr(name))} is reserved, or no finite number")
        if not name or len(name) > MAX_NAME or not name.isprintable():
            raise ValueError(f"its metric {_show(repr(name))} has no name of at most {MAX_NAME} printable characters")


def _clear_way(top: Path, target: Path) -> None:
    """Remove what is at `target`, and whatever on the way to it is no folder, so that it can be written. Raises OSError."""
    for parent in reversed(target.relative_to(top).parents[:-1]):
        folder = top / parent
        if folder.is_symlink() or not folder.is_dir():
            folder.unlink(missing_ok=True)
            folder.mkdir()
    if target.is_dir() and not target.is_symlink():
        remove_tree(str(target))
    else:
        target.unlink(missing_ok=True)


@dataclass(frozen=True)
class _End:
    """How a job has ended."""

    code: int
    output: str = ""
    exceeded: str = ""


_KILLED = _End(-9, "the process that starts programs was killed")


class AgentHost:
    """The handle on `agent_host.py`: start jobs, and learn how they end. It ends with this process.

    Args:
        variables: The environment of the file of a function while it is imported. The policy's address is added, with a key that
            stands for the episode that uses it.

    Raises:
        EngineError: The function cannot be imported.
    """

    def __init__(self, function: str = "", python: str = "", variables: Mapping[str, str] | None = None) -> None:
        self._numbers = count()
        self._pids, self._keys, self._ends = dict[int, int](), dict[int, str](), dict[int, _End]()
        self._folder = Path(tempfile.mkdtemp(prefix="policygrad-agents-"))
        self._proxy, self._import_key = shared_proxy(), f"pg-import-{secrets.token_hex(16)}"
        given = dict(variables or {})
        policy = self._proxy.environment(self._import_key)
        try:
            self._process = subprocess.Popen(
                [python or sys.executable, str(HOST), str(self._folder), *([function] if function else [])],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env={**given, **bypass_proxies(given), **policy},
                start_new_session=True,  # Ctrl-C is for the run, which ends the programs
            )
        except OSError as error:
            remove_tree(str(self._folder))
            raise EngineError(f"the process that starts agents cannot be started: {error}") from error
        assert self._process.stdout is not None
        first = json.loads(self._process.stdout.readline() or '{"error": "its process ended"}')
        if "error" in first:
            self._process.wait()
            remove_tree(str(self._folder))
            raise EngineError(f"--environment agent:{function} cannot be loaded: {first['error']}")
        self.isolation: str = first["isolation"]
        """How episodes are kept from each other: agent_host.NAMESPACES, LANDLOCK or NO_ISOLATION."""
        self._proxy.resolve(self._import_key, self._find_caller)
        self._messages = queue.SimpleQueue[bytes | None]()
        threading.Thread(target=self._read, name="agents", daemon=True).start()
        threading.Thread(target=self._write, name="agents' jobs", daemon=True).start()

    def make_folder(self) -> Path:
        """Return a new folder for an episode."""
        return Path(tempfile.mkdtemp(dir=self._folder))

    def start(
        self,
        argv: Sequence[str] | None,
        environment: Mapping[str, str],
        folder: Path,
        limits: Mapping[str, int],
        key: str,
        isolation: str | None = None,
    ) -> int:
        """Start a program, or the function if `argv` is None. Return its number. isolation: another than the host's."""
        number = next(self._numbers)
        self._keys[number] = key
        if (isolation or self.isolation) == NO_ISOLATION:
            self._proxy.resolve(key, lambda port: self._find_caller(port) or key)
        job = {"id": number, "argv": argv, "env": dict(environment), "folder": str(folder), "limits": dict(limits)}
        self._send({**job, "isolation": isolation})
        return number

    @property
    def has_ended(self) -> bool:
        """True if somebody has killed it."""
        return self._process.poll() is not None

    def poll(self, number: int) -> int | None:
        """Return a job's exit code, −9 if it went with the host; None = it runs."""
        if number not in self._ends and not self.has_ended:
            return None
        return self.end_of(number).code

    def end_of(self, number: int) -> _End:
        """Return how a job has ended."""
        return self._ends.get(number, _KILLED)

    def forget(self, number: int) -> None:
        """Drop what is known of a job."""
        self._keys.pop(number, None)
        self._ends.pop(number, None)

    def end(self, number: int, folder: Path) -> None:
        """End a job and what it has started, and delete its folder; the host does so while this process goes on."""
        self.forget(number)
        if self.has_ended:
            remove_tree(str(folder))
            return
        self._send({"close": str(folder), "id": number})

    def close(self) -> None:
        """End the host and all that it has started."""
        self._proxy.resolve(self._import_key, None)
        self._messages.put(None)
        try:
            self._process.wait(EXIT_SECONDS + 5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        remove_tree(str(self._folder))

    def _find_caller(self, port: int) -> str | None:
        """Return the key of the episode that has a connection from this port of the loopback; None = no episode's."""
        sockets = {f"socket:[{inode}]" for inode in _find_sockets(port)}
        for number, key in list(self._keys.items()):
            pid = self._pids.get(number)
            if pid is not None and sockets and any(_holds(process, sockets) for process in list_descendants(pid)):
                return key
        return None

    def _send(self, message: Mapping[str, Any]) -> None:
        self._messages.put(json.dumps(message).encode() + b"\n")

    def _write(self) -> None:
        """Write to the host, in a thread, so that one that a program has stopped does not stop the run."""
        assert self._process.stdin is not None
        with suppress(OSError), self._process.stdin as pipe:
            while (message := self._messages.get()) is not None:
                pipe.write(message)
                pipe.flush()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            values = json.loads(line)
            number = values.pop("id")
            if "pid" in values:
                self._pids[number] = values["pid"]
            else:
                self._pids.pop(number, None)
                if number in self._keys:
                    self._ends[number] = _End(**values)


def _find_sockets(port: int) -> list[str]:
    """Return the inodes of this machine's TCP sockets with this local port (Linux)."""
    inodes = []
    for name in ("tcp", "tcp6"):  # a client may use a socket of version 6 for an address of version 4
        with suppress(OSError):
            for line in Path("/proc/net", name).read_text().splitlines()[1:]:
                fields = line.split()
                if int(fields[1].rpartition(":")[2], 16) == port:
                    inodes.append(fields[9])
    return [inode for inode in inodes if inode != "0"]


def _holds(process: int, sockets: set[str]) -> bool:
    with suppress(OSError):
        for name in os.listdir(f"/proc/{process}/fd"):
            with suppress(OSError):
                if os.readlink(f"/proc/{process}/fd/{name}") in sockets:
                    return True
    return False
