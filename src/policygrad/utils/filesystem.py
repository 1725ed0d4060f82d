"""Files that are on the disk, and that others may read: what checkpoints and published weights share."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import re
import shlex
import shutil
import socket
import stat
import sys
import time
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import IO, Any

from policygrad.errors import RunError


def fsync_path(path: Path) -> None:
    """Wait until a file, or the names in a directory, are on the disk. Raises OSError."""
    if path.is_dir() and os.name == "nt":  # Windows cannot open a directory; NTFS journals its names itself
        return
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def apply_default_permissions(folder: Path) -> None:
    """Gives every file below a folder the mode that any new file gets there: safetensors makes its own 0600, whatever the umask.

    Raises OSError.
    """
    probe = folder / ".tmp-mode"
    probe.touch()  # the only way to learn the umask that changes it for no other thread, and a folder's default ACL with it
    mode = stat.S_IMODE(probe.stat().st_mode)
    probe.unlink()
    for path in folder.rglob("*"):
        if path.is_file() and stat.S_IMODE(path.stat().st_mode) != mode:
            with contextlib.suppress(
                PermissionError
            ):  # a mount that has modes and lets nobody change them: no reason to lose a file
                path.chmod(mode)


# Reads files that somebody else may have written: bounded in size, depth and range of numbers, and without waiting for anybody.

MAX_CONFIG_BYTES = 2**20
"""Bytes of a configuration: a hundred times a run's, and what is parsed in no time."""
MAX_LINE_BYTES = 2**26
"""Bytes of one JSON line, a completion of millions of tokens among them."""
MAX_DEPTH = 100
"""Brackets in brackets: a run's files have six, and Python's own parsers and writers fail near 1,000."""
_LONG_NUMBER = re.compile(rb"\d{100}|[eE]\+?\d{3}")
"""Without one of these a number is below 1e200; inside of text it means nothing, and the numbers are looked at one by one."""


class UnusableDataError(ValueError):
    """A file that is well formed and cannot be used: nested too deeply, or with a number that no float holds."""


def open_regular(path: Path) -> IO[bytes]:
    """Open a regular file for reading.

    Raises:
        OSError: it cannot be read, or is a pipe, a device or a folder, which might be waited for, or read, without an end.
    """
    descriptor = _open(path)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is no regular file", str(path))
    return os.fdopen(descriptor, "rb")


def read_text_bounded(path: Path, largest: int = MAX_CONFIG_BYTES) -> str:
    """Read the text of a file, or of a pipe such as a shell's `<(…)`.

    Raises:
        OSError: it cannot be read, is larger than `largest`, as a device without an end is, or is a pipe that nobody writes to.
        UnicodeDecodeError: it is not UTF-8.
    """
    descriptor = _open(path)
    with os.fdopen(descriptor, "rb") as file:
        if hasattr(os, "O_NONBLOCK"):
            os.set_blocking(descriptor, True)
        data = file.read(largest + 1)
        if len(data) > largest:
            raise OSError(errno.EFBIG, f"it is larger than {largest >> 20} MiB; is it the right file?")
        if not data and stat.S_ISFIFO(os.fstat(descriptor).st_mode):
            raise OSError(errno.EPIPE, "it is a pipe that nobody writes to")
    return data.decode("utf-8-sig")


def read_lines(path: Path) -> Iterator[bytes]:
    """Yield the lines of a regular file. Raises OSError: it cannot be read, is no regular file, or see `iter_lines`."""
    with open_regular(path) as file:
        yield from iter_lines(file)


def iter_lines(file: IO[bytes]) -> Iterator[bytes]:
    """Yield the lines from here on. Raises OSError for a line of more than `MAX_LINE_BYTES` bytes."""
    while line := file.readline(MAX_LINE_BYTES + 1):
        if len(line) > MAX_LINE_BYTES:
            raise OSError(errno.EFBIG, f"a line of it is longer than {MAX_LINE_BYTES >> 20} MiB; is it the right file?")
        yield line


def read_json(path: Path, largest: int = MAX_LINE_BYTES) -> Any:
    """Parse a file that holds one JSON value.

    Raises:
        OSError: as `read_text_bounded`.
        ValueError: it is not UTF-8 or no JSON. Unusable: see `parse_json`.
    """
    return parse_json(read_text_bounded(path, largest))


def parse_json(text: str | bytes) -> Any:
    """Parse JSON that other programs can hold too.

    Raises:
        ValueError: no JSON. Unusable: NaN, an infinity, a number that no float holds, or brackets nested deeper than `MAX_DEPTH`.
    """
    data = text if isinstance(text, bytes) else text.encode(errors="surrogatepass")
    hooks: dict[str, Any] = {"parse_int": _integer, "parse_float": _number} if _LONG_NUMBER.search(data) else {}
    try:
        value = json.loads(text, parse_constant=_number, **hooks)
    except RecursionError:
        raise UnusableDataError(f"brackets in brackets, deeper than {MAX_DEPTH}") from None
    if data.count(b"[") + data.count(b"{") > MAX_DEPTH:
        _check_depth(value)
    return value


def read_toml(path: Path) -> dict[str, Any]:
    """Parse a TOML file.

    Raises:
        OSError, UnicodeDecodeError: as `read_text_bounded`. tomllib.TOMLDecodeError: no TOML.
        ValueError: an integer of thousands of digits. Unusable: tables or brackets nested deeper than `MAX_DEPTH`.
    """
    try:
        data = tomllib.loads(read_text_bounded(path))
    except RecursionError:
        raise UnusableDataError("brackets in brackets, too deep") from None
    _check_depth(data)
    return data


def _open(path: Path) -> int:
    # a named pipe would be waited for until somebody writes to it
    try:
        return os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    except ValueError as error:
        raise OSError(errno.EINVAL, "its name holds a NUL character") from error


def _integer(text: str) -> int:
    _number(text)
    return int(text)


def _number(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        shown = text if len(text) <= 20 else f"{text[:20]}… ({len(text)} digits)"
        raise UnusableDataError(f"{shown} is no finite number, or none that a float holds")
    return value


def _check_depth(value: Any) -> None:
    level, depth = [value], 0
    while level := [item for item in level if isinstance(item, dict | list)]:
        depth += 1
        if depth > MAX_DEPTH:
            raise UnusableDataError(f"brackets in brackets, deeper than {MAX_DEPTH}")
        level = [x for item in level for x in (item.values() if isinstance(item, dict) else item)]


# Files and folders that are whole on the disk, or as they were.


def install_folder(temporary: Path, final: Path) -> Path:
    """Rename a folder into place. One of the same name is first moved to `.old`, which loads just as well; its path."""
    old = final.with_name(final.name + ".old")
    if final.exists():
        shutil.rmtree(old, ignore_errors=True)  # of a process killed before it could delete it
        os.replace(final, old)
    try:
        os.replace(temporary, final)
    except OSError:
        if old.exists():
            os.replace(old, final)
        raise
    fsync_path(final.parent)
    return old


def is_disk_full(error: Exception) -> bool:
    """Whether it was for want of space that something could not be written; safetensors wraps the OSError in its own."""
    full = getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT)
    return full or re.search(r"os error (28|122)\b", str(error)) is not None


def write_atomically(path: Path, text: str) -> None:
    """The file whole, or as it was. Raises RunError with the file's name."""
    temporary = path.with_name(f".tmp-{path.name}")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except (OSError, UnicodeError) as error:  # the second: half a character, which a command line may hold
        temporary.unlink(missing_ok=True)
        raise RunError(f"{path} was not written: {getattr(error, 'strerror', None) or error}") from error


# A file that one process at a time holds, for as long as it lives: the operating system lets go of it, however a process ends.

try:
    import fcntl
except ImportError:  # not a Unix: what the file says is then nobody's promise, and nobody is refused
    fcntl = None  # type: ignore[assignment]

HAS_FILE_LOCKS = fcntl is not None
"""Whether this system has such locks."""
LOCK_POLL_SECONDS = 0.2
"""Seconds between tries for a lock that is waited for."""
MAX_SHOWN_COMMAND = 200
"""Characters of another process's command that are shown."""
WAIT_HINT = "wait for it, or stop it; two would do everything twice"
_LARGEST = 2**20
"""Bytes of a lock's file that are read: a command line has as many at most."""
_NONE_HERE = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP)


@contextmanager
def hold_lock(path: Path, *, hint: str = WAIT_HINT, wait: Callable[[], bool] = lambda: False) -> Iterator[IO[bytes]]:
    """Holds the file, for which it waits as long as `wait` says so. A child that is given the descriptor holds it too.

    Raises:
        RunError: another process holds it, or it cannot be opened or written.
    """
    try:
        file = acquire_lock(path, hint=hint, wait=wait)
    except OSError as error:
        raise RunError(f"{path} cannot be locked: {error.strerror}; see to it, or delete it") from error
    with file:
        try:
            write_lock_owner(file)
        except OSError as error:
            raise RunError(f"{path} cannot be written: {error.strerror}; see to it") from error
        yield file


def acquire_lock(
    path: Path,
    *,
    hint: str = WAIT_HINT,
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
                    raise RunError(f"another process is at work on {path.parent}{_words(file)}: {hint}")
                time.sleep(LOCK_POLL_SECONDS)
            if _is(file, path):
                return file
        except BaseException:
            file.close()
            raise
        file.close()  # whoever held it has deleted it with its folder


def _taken(file: IO[bytes], path: Path, note: Callable[[str], None]) -> bool:
    if not HAS_FILE_LOCKS:
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


def write_lock_owner(file: IO[bytes]) -> None:
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
        command = command if len(command) <= MAX_SHOWN_COMMAND else f"{command[:MAX_SHOWN_COMMAND]} …"
        return f" (pid {who['pid']} on {who['host']}, since {who['since']}: {command})"
    except (ValueError, KeyError, TypeError):
        return ""
