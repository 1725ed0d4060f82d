"""One run in a process of its own: `policygrad train`, or `--resume` where it was stopped."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from threading import Lock
from typing import IO, Protocol

from policygrad.checkpoint.disk import write_atomically
from policygrad.checkpoint.lock import LOCKS, locked
from policygrad.compare.outcomes import cost, finished
from policygrad.compare.words import names, values
from policygrad.errors import RunError
from policygrad.models.trust import FLAG
from policygrad.training.config.allowed import from_words

PROGRAM = (sys.executable, "-P", "-m", "policygrad")
"""-P: without it modules of the current folder would hide the standard library's, as `python -m` puts that folder first."""
SAID = 12
"""Lines of a failed run's log that are shown."""
LEAVES = ("checkpoints", "completions.jsonl", "model")
"""What a run of a tuning seed leaves out when it is done; a reported one only its checkpoints."""


class Runner(Protocol):
    """Does one run. Anything with these two methods can stand in for the processes."""

    def __call__(self, words: Sequence[str], folder: Path) -> None:
        """Begins or goes on with the run of `policygrad WORDS` in `folder`, until it is finished or `stop` is called.

        Raises:
            RunError: it failed; with the end of what it said.
        """
        ...

    def stop(self) -> None:
        """Has whatever is running end soon, so that it can be gone on with."""
        ...


class Processes:
    """A process per run, each with its share of the cores. program: what stands before the words of `policygrad`. allow: code
    that files of the runs may name, besides what their words name."""

    def __init__(self, threads: int, program: Sequence[str] = PROGRAM, allow: Sequence[str] = ()) -> None:
        self.threads, self.program, self.allow = threads, tuple(program), tuple(allow)
        self._live: set[subprocess.Popen[bytes]] = set()
        self._lock, self._stopping = Lock(), False

    def __call__(self, words: Sequence[str], folder: Path) -> None:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with locked(folder.with_name(folder.name + ".lock"), wait=lambda: not self._stopping) as lock:
            if finished(folder):  # by a process that outlived the comparison that began it
                return
            if folder.exists() and not (folder / "run.toml").exists():  # killed before it was anything
                shutil.rmtree(folder)
            go_on = (folder / "run.toml").exists()
            named = (*from_words(words), *values(words, "--sampler.folder")) if go_on else ()
            allow = sorted({*self.allow, *named})  # the run's file permits nothing itself
            permitted = ["--allow", *allow] if allow else []
            if go_on and FLAG in names(words):
                permitted += [FLAG]
            command = ["train", "--resume", str(folder)] if go_on else [*words, "--output", str(folder)]
            command += permitted
            log = folder.with_name(folder.name + ".log")
            code = self._process([*command, "--plain"], folder, log, lock)
        if not finished(folder) and not self._stopping:
            tail = "\n".join(log.read_text(errors="replace").splitlines()[-SAID:])
            how = f"ended with code {code}" if code else "was stopped before its end"
            raise RunError(f"policygrad {shlex.join(command)} {how}:\n{tail}")

    def _process(self, words: Sequence[str], folder: Path, log: Path, lock: IO[bytes]) -> int:
        environment = os.environ | {"OMP_NUM_THREADS": str(self.threads), "OMP_WAIT_POLICY": "PASSIVE"}
        command, began = [*self.program, *words], time.perf_counter()
        with log.open("ab") as said:
            with self._lock:
                if self._stopping:
                    return 0
                process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=said,
                    stderr=subprocess.STDOUT,
                    env=environment,
                    start_new_session=True,  # Ctrl-C is ours to pass on, once
                    pass_fds=(lock.fileno(),)
                    if LOCKS
                    else (),  # held for as long as the run lives, whatever becomes of us
                )
                self._live.add(process)
            try:
                used = _wait(process)
            finally:
                with self._lock:
                    self._live.discard(process)
        _add_cost(folder, used | {"seconds": time.perf_counter() - began}, self.threads)
        return process.returncode

    def stop(self) -> None:
        """The first time runs end after the step at hand, with a checkpoint; the second time at once."""
        with self._lock:
            again, self._stopping = self._stopping, True
            number = getattr(signal, "SIGKILL", signal.SIGTERM) if again else signal.SIGTERM
            for (
                process
            ) in self._live:  # Popen's own terminate would look for its end, which is being waited for elsewhere
                with suppress(ProcessLookupError):
                    os.kill(process.pid, number)


def _wait(process: subprocess.Popen[bytes]) -> dict[str, float]:
    """Waits, and returns this child's own CPU seconds, its reward workers' included, where the system tells."""
    if not hasattr(os, "wait4"):
        process.wait()
        return {}
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    return {"cpu_seconds": usage.ru_utime + usage.ru_stime}


def _add_cost(folder: Path, used: dict[str, float], threads: int) -> None:
    """Of a run that was stopped and gone on with, seconds add up."""
    before = cost(folder)
    rounded = {name: round(before.get(name, 0.0) + value, 1) for name, value in used.items()}
    rounded |= {"threads": threads, "processes": before.get("processes", 0) + 1}
    write_atomically(folder.with_name(folder.name + ".cost.json"), json.dumps(rounded) + "\n")


def tidy(folder: Path, *, tuning: bool) -> None:
    """Takes away what a finished run is not needed for any more: of hundreds of runs it would fill a disk."""
    for name in LEAVES if tuning else LEAVES[:1]:
        path = folder / name
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
