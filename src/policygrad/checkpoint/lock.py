"""A file that one process at a time holds, for as long as it lives: the operating system lets go of it, however a process ends."""

from __future__ import annotations

import errno
import json
import os
import shlex
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import IO

from policygrad.contents import parse_json
from policygrad.errors import RunError

try:
    import fcntl
except ImportError:  # not a Unix: what the file says is then nobody's promise, and nobody is refused
    fcntl = None  # type: ignore[assignment]

LOCKS = fcntl is not None
"""Whether this system has such locks."""
LOOK = 0.2
"""Seconds between tries for a lock that is waited for."""
SHOWN = 200
"""Characters of another process's command that are shown."""
WAIT = "wait for it, or stop it; two would do everything twice"
_LARGEST = 2**20
"""Bytes of a lock's file that are read: a command line has as many at most."""
_NONE_HERE = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP)


@contextmanager
def locked(path: Path, *, way_out: str = WAIT, wait: Callable[[], bool] = lambda: False) -> Iterator[IO[bytes]]:
    """Holds the file, for which it waits as long as `wait` says so. A child that is given the descriptor holds it too.

    Raises:
        RunError: another process holds it, or it cannot be opened or written.
    """
    try:
        file = take(path, way_out=way_out, wait=wait)
    except OSError as error:
        raise RunError(f"{path} cannot be locked: {error.strerror}; see to it, or delete it") from error
    with file:
        try:
            sign(file)
        except OSError as error:
            raise RunError(f"{path} cannot be written: {error.strerror}; see to it") from error
        yield file


def take(
    path: Path,
    *,
    way_out: str = WAIT,
    wait: Callable[[], bool] = lambda: False,
    note: Callable[[str], None] = lambda text: None,
) -> IO[bytes]:
    """The open file, held until it is closed. note: hears that a file system (some NFS) has no locks; one goes on.

    Raises:
        RunError: another process holds it, named as far as it is known, with the way out; or it is no file that can be held.
        OSError: the file cannot be opened or written.
    """
    while True:
        if path.exists() and not path.is_file():
            raise RunError(f"{path} is no regular file, and a lock has to be one: move it elsewhere, or delete it")
        file = path.open("a+b", buffering=0)  # nothing is left to write when it is closed, on a full disk say
        try:
            while not _taken(file, path, note):
                if not wait():
                    raise RunError(f"another process is at work on {path.parent}{_words(file)}: {way_out}")
                time.sleep(LOOK)
            if _is(file, path):
                return file
        except BaseException:
            file.close()
            raise
        file.close()  # whoever held it has deleted it with its folder


def _taken(file: IO[bytes], path: Path, note: Callable[[str], None]) -> bool:
    if not LOCKS:
        return True
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):  # the second: as some file systems of a network say it
        return False
    except OSError as error:
        if error.errno not in _NONE_HERE:
            raise
        note(f"{path} cannot be locked ({error.strerror}): nothing keeps a second process out of {path.parent}")
    return True


def _is(file: IO[bytes], path: Path) -> bool:
    """Whether the name still stands for the file that is open."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def sign(file: IO[bytes]) -> None:
    """Writes who holds it, for others to read; it means nothing once this process is gone. Raises OSError."""
    program = Path(sys.argv[0])
    command = shlex.join([program.parent.name if program.name == "__main__.py" else program.name, *sys.argv[1:]])
    who = {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "since": datetime.now().astimezone().isoformat(timespec="seconds"),
        "command": command,
    }
    file.truncate(0)
    file.write(json.dumps(who).encode() + b"\n")
    file.flush()


def _words(file: IO[bytes]) -> str:
    """Who holds it, in brackets; nothing where the file does not say (it is being written, say)."""
    file.seek(0)
    try:
        who = parse_json(file.read(_LARGEST))
        command = str(who["command"])
        command = command if len(command) <= SHOWN else f"{command[:SHOWN]} …"
        return f" (pid {who['pid']} on {who['host']}, since {who['since']}: {command})"
    except (ValueError, KeyError, TypeError):
        return ""
