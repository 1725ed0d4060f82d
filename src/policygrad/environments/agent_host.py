"""Starts agents' programs and functions, each in a process of its own; run as a script, with nothing but the standard library.

    python agent_host.py [FILE.py:NAME | MODULE:NAME]

Any Python from 3.10 on runs it. It reads jobs as lines of JSON, {"id", "argv" or null, "env", "folder", "log"}, forks for each, and
writes {"id", "pid"} and later {"id", "code"}. The file of a function is imported once, before any fork, so that an episode starts
in milliseconds. When its input ends, because the run has ended in whatever way, it kills all that it has started.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import importlib
import importlib.util
import inspect
import json
import os
import select
import signal
import sys
import traceback
from typing import Any

PR_SET_PDEATHSIG = 1


def main() -> None:
    """Serve jobs until the input ends."""
    jobs, reports = os.dup(0), os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)  # what the file prints while it is imported
    try:
        function = load_function(sys.argv[1]) if len(sys.argv) > 1 else None
    except BaseException as error:
        lines = traceback.format_exception_only(error)
        send(reports, {"error": "".join(lines).strip()})
        return
    send(reports, {"ready": True})
    wake, wakes = os.pipe()
    os.set_blocking(wakes, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wakes)
    running, unread = dict[int, int](), b""  # by process: its job
    try:
        while True:
            readable, _, _ = select.select([jobs, wake], [], [])
            if wake in readable:
                os.read(wake, 4096)
                for pid, code in iter_ended():
                    send(reports, {"id": running.pop(pid), "code": code})
            if jobs in readable:
                piece = os.read(jobs, 1 << 16)
                if not piece:
                    return
                *complete, unread = (unread + piece).split(b"\n")
                for line in complete:
                    job = json.loads(line)
                    pid = start(job, function, (jobs, reports.fileno(), wake, wakes))
                    running[pid] = job["id"]
                    send(reports, {"id": job["id"], "pid": pid})
    finally:
        for pid in running:
            kill_group(pid)


def send(stream: Any, values: dict[str, Any]) -> None:
    stream.write(json.dumps(values) + "\n")
    stream.flush()


def kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def iter_ended() -> Any:
    """Yield (process, exit code) of the children that have ended; −n for signal n."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if not pid:
            return
        yield pid, os.waitstatus_to_exitcode(status)


def load_function(name: str) -> Any:
    """Import FILE.py:NAME or MODULE:NAME."""
    place, _, attribute = name.rpartition(":")
    # in place of this script's folder, whose gymnasium.py is not the package that an agent imports
    sys.path[0] = os.getcwd()
    if place.endswith(".py"):
        sys.path.insert(0, os.path.dirname(os.path.abspath(place)))
        spec = importlib.util.spec_from_file_location(os.path.basename(place)[:-3], place)
        if spec is None or spec.loader is None or not os.path.exists(place):
            raise FileNotFoundError(f"there is no file {place}")
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
    else:
        module = importlib.import_module(place)
    function = getattr(module, attribute)
    if not callable(function):
        raise TypeError(f"{name} is no function")
    return function


def start(job: dict[str, Any], function: Any, private: tuple[int, ...]) -> int:
    """Fork; in the child, become the program or call the function."""
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    code = 127
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setsid()
        libc = ctypes.CDLL(None, use_errno=True)
        if hasattr(libc, "prctl"):
            libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != parent:
                os._exit(1)
        for descriptor in private:
            os.close(descriptor)
        log = os.open(job["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.chdir(job["folder"])
        os.environ.clear()
        os.environ.update(job["env"])
        if job["argv"] is None:
            call(function)
            code = 0
        else:
            os.execvpe(job["argv"][0], job["argv"], job["env"])
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def call(function: Any) -> None:
    """Call an agent's function with its example, and write down what it returns."""
    with open(os.environ["POLICYGRAD_EXAMPLE"], encoding="utf-8") as file:
        value = function(json.load(file))
    if inspect.isawaitable(value):

        async def wait() -> Any:
            return await value

        value = asyncio.run(wait())
    if value is None:
        return
    if isinstance(value, str):
        value = {"answer": value}
    elif not isinstance(value, dict):
        value = {"reward": float(value)}
    with open(os.environ["POLICYGRAD_RESULT"], "w", encoding="utf-8") as file:
        json.dump(value, file)


if __name__ == "__main__":
    main()
