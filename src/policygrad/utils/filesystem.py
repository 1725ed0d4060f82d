"""Files and folders: durable and atomic writes, bounded reads of files that others may have written, and locks."""

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
from itertools import takewhile
from pathlib import Path
from typing import IO, Any, NoReturn

from policygrad.errors import RunError

# Durable and atomic writes.


def fsync_path(path: Path) -> None:
    """Flush a file, or the names in a directory, to the disk. Raises OSError."""
    if path.is_dir() and os.name == "nt":  # Windows cannot open a directory; NTFS journals its names itself
        return
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def apply_default_permissions(folder: Path) -> None:
    """Give every file in a folder the mode of a new file there: safetensors makes its own 0600. Raises OSError."""
    probe = folder / ".tmp-mode"
    probe.touch()  # reads the umask without changing it for other threads, and applies the folder's default ACL
    mode = stat.S_IMODE(probe.stat().st_mode)
    probe.unlink()
    for path in folder.rglob("*"):
        if path.is_file() and stat.S_IMODE(path.stat().st_mode) != mode:
            with contextlib.suppress(PermissionError):  # some mounts do not allow it, which is no reason to lose a file
                path.chmod(mode)


def install_folder(temporary: Path, final: Path) -> Path:
    """Rename a folder into place. An existing one is first renamed to `.old`, which can be loaded as well; return that path."""
    old = final.with_name(final.name + ".old")
    if final.exists():
        shutil.rmtree(old, ignore_errors=True)  # left by a process that was killed before it could delete it
        os.replace(final, old)
    try:
        os.replace(temporary, final)
    except OSError:
        if old.exists():
            os.replace(old, final)
        raise
    fsync_path(final.parent)
    return old


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write a file completely, or leave it as it was. Raises RunError with the file's name."""
    temporary = path.with_name(f".tmp-{path.name}")
    try:
        with temporary.open("wb") as file:
            file.write(content if isinstance(content, bytes) else content.encode())
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except (OSError, UnicodeError) as error:  # UnicodeError: a lone surrogate, which a command line may contain
        temporary.unlink(missing_ok=True)
        raise RunError(f"{path} was not written: {getattr(error, 'strerror', None) or error}") from error


def is_disk_full(error: Exception) -> bool:
    """Return True if a write failed for lack of space; safetensors wraps the OSError in its own error."""
    full = getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT)
    return full or re.search(r"os error (28|122)\b", str(error)) is not None


def explain_write_error(error: Exception) -> tuple[str, str]:
    """Return why a write failed, and the remedy."""
    return ("the disk is full", "free some space") if is_disk_full(error) else (str(error), "fix the cause")


# Reads of files that others may have written: bounded in size, depth and range of numbers, and never blocking.

MAX_CONFIG_BYTES = 2**20  # maximum size of a configuration: a hundred times a run's, and fast to parse
MAX_LINE_BYTES = 2**26  # maximum size of one JSON line, enough for a completion of millions of tokens
MAX_DEPTH = 100
"""Maximum nesting of brackets: a run's files have six, and Python's own parsers and writers fail near 1,000."""
_LONG_NUMBER = re.compile(rb"\d{100}|[eE]\+?\d{3}")
"""A number without such a part is below 1e200. Inside a string a match means nothing; it only makes parsing check every number."""


class UnusableDataError(ValueError):
    """Well-formed data that cannot be used: nested too deeply, or with a number outside the range of a float."""


def open_regular(path: Path, *, follow: bool = True) -> IO[bytes]:
    """Open a regular file for reading. Raises OSError also for a pipe, a device or a folder, which could block for ever.

    follow: a symbolic link in its place stands for the file that it names; False = it is an OSError.
    """
    descriptor = _open_nonblocking(path, 0 if follow else getattr(os, "O_NOFOLLOW", 0))
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return os.fdopen(descriptor, "rb")


def read_untrusted(path: Path, max_bytes: int) -> bytes:
    """Read a file in a folder where somebody else's program may have put anything in its place.

    Raises:
        FileNotFoundError: It is not there.
        OSError: It is a link, also a hard one, a pipe, a device or a folder, or larger than `max_bytes`.
    """
    with open_regular(path, follow=False) as file:
        if os.fstat(file.fileno()).st_nlink != 1:
            raise OSError(errno.EMLINK, "it is a link to another file", str(path))
        data = file.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise OSError(errno.EFBIG, f"it is larger than {max_bytes} bytes", str(path))
    return data


def read_text_bounded(path: Path, max_bytes: int = MAX_CONFIG_BYTES) -> str:
    """Read the text of a file, or of a pipe such as a shell's `<(…)`. Raises OSError if it cannot be read, is larger
    than `max_bytes` (as an endless device is), or is a pipe without a writer; UnicodeDecodeError if it is not UTF-8."""
    descriptor = _open_nonblocking(path)
    with os.fdopen(descriptor, "rb") as file:
        if hasattr(os, "O_NONBLOCK"):
            os.set_blocking(descriptor, True)
        data = file.read(max_bytes + 1)
        if len(data) > max_bytes:
            raise OSError(errno.EFBIG, f"it is larger than {max_bytes >> 20} MiB; is it the right file?")
        if not data and stat.S_ISFIFO(os.fstat(descriptor).st_mode):
            raise OSError(errno.EPIPE, "it is a pipe without a writer")
    return data.decode("utf-8-sig")


def read_lines(path: Path) -> Iterator[bytes]:
    """Yield the lines of a regular file. Raises OSError as `open_regular` and `iter_lines`."""
    with open_regular(path) as file:
        yield from iter_lines(file)


def iter_lines(file: IO[bytes]) -> Iterator[bytes]:
    """Yield the remaining lines. Raises OSError for a line of more than `MAX_LINE_BYTES`."""
    while line := file.readline(MAX_LINE_BYTES + 1):
        if len(line) > MAX_LINE_BYTES:
            raise OSError(errno.EFBIG, f"it has a line longer than {MAX_LINE_BYTES >> 20} MiB; is it the right file?")
        yield line


def iter_lines_backwards(file: IO[bytes]) -> Iterator[tuple[int, bytes]]:
    """Yield (offset, line) from the last line to the first. Raises OSError for a line of more than `MAX_LINE_BYTES`."""
    start, block, rest = file.seek(0, os.SEEK_END), 1 << 16, b""
    while start:
        size = min(block, start)
        start -= size
        file.seek(start)
        *whole, last = (file.read(size) + rest).split(b"\n")
        first, *others = [*(line + b"\n" for line in whole), *([last] if last else [])]
        at = start + len(first) + sum(map(len, others))
        for line in reversed(others):
            at -= len(line)
            yield at, line
        rest, block = first, 1 << 16 if others else 2 * block  # a long line is not read again and again
        if len(rest) > MAX_LINE_BYTES:
            raise OSError(errno.EFBIG, f"it has a line longer than {MAX_LINE_BYTES >> 20} MiB; is it the right file?")
    if rest:
        yield 0, rest


def read_json(path: Path) -> Any:
    """Parse a file with one JSON value. Raises as `read_text_bounded` and `parse_json`."""
    return parse_json(read_text_bounded(path, MAX_LINE_BYTES))


def parse_json(text: str | bytes) -> Any:
    """Parse JSON that other programs can represent too. Raises ValueError if it is not JSON; UnusableDataError for
    NaN, an infinity, a number outside the range of a float, or brackets nested deeper than `MAX_DEPTH`."""
    data = text if isinstance(text, bytes) else text.encode(errors="surrogatepass")

    def parse_int(number: str) -> int:
        _parse_float(number)  # raises if it is out of range
        return int(number)

    hooks: dict[str, Any] = {"parse_int": parse_int, "parse_float": _parse_float} if _LONG_NUMBER.search(data) else {}
    try:
        value = json.loads(text, parse_constant=_parse_float, **hooks)
    except RecursionError:
        raise UnusableDataError(f"brackets nested deeper than {MAX_DEPTH}") from None
    if data.count(b"[") + data.count(b"{") > MAX_DEPTH:
        check_depth(value)
    return value


def reject_constant(name: str) -> NoReturn:
    """Refuse NaN and Infinity: the `parse_constant` of JSON that other programs can read."""
    raise ValueError(f"{name} is not JSON; write null where there is no number")


def reject_duplicate_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build an object, refusing a repeated key: JSON allows it, and the last value would silently win."""
    row = dict(pairs)
    if len(row) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the key {next(n for n in names if names.count(n) > 1)!r} is there twice; keep one")
    return row


def read_toml(path: Path) -> dict[str, Any]:
    """Parse a TOML file. Raises OSError and UnicodeDecodeError as `read_text_bounded`; ValueError if it is not TOML, or has
    an integer of thousands of digits; UnusableDataError if it is nested deeper than `MAX_DEPTH`."""
    try:
        data = tomllib.loads(read_text_bounded(path))
    except RecursionError:
        raise UnusableDataError(f"brackets nested deeper than {MAX_DEPTH}") from None
    check_depth(data)
    return data


def _open_nonblocking(path: Path, flags: int = 0) -> int:
    # a blocking open of a named pipe waits for a writer
    try:
        return os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0) | flags)
    except ValueError as error:
        raise OSError(errno.EINVAL, "its name contains a NUL character") from error


def _parse_float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        shown = text if len(text) <= 20 else f"{text[:20]}… ({len(text)} digits)"
        raise UnusableDataError(f"{shown} is not a finite number, or outside the range of a float")
    return value


def check_depth(value: Any) -> None:
    """Raise UnusableDataError for lists and tables nested deeper than `MAX_DEPTH`."""
    level, depth = [value], 0
    while level := [item for item in level if isinstance(item, dict | list)]:
        depth += 1
        if depth > MAX_DEPTH:
            raise UnusableDataError(f"brackets nested deeper than {MAX_DEPTH}")
        level = [x for item in level for x in (item.values() if isinstance(item, dict) else item)]


# A lock on a file, held as long as the process lives: the operating system releases it, however the process ends.
#
# The package filelock hides the descriptor, which a comparison's runs inherit, and where there are no locks makes a marker file
# that outlives a killed process.

try:
    import fcntl
except ImportError:  # not Unix: no process is refused
    fcntl = None  # type: ignore[assignment]

HAS_FILE_LOCKS = fcntl is not None  # whether the operating system has such locks
LOCK_POLL_SECONDS = 0.2  # seconds between attempts to acquire a lock
MAX_SHOWN_COMMAND = 200  # characters of another process's command in a message
_UNSUPPORTED = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP)


@contextmanager
def hold_lock(path: Path, *, wait: Callable[[], bool] = lambda: False) -> Iterator[IO[bytes]]:
    """Hold a lock during the context. A child process that inherits the descriptor holds it too. Raises RunError if another
    process holds it, once `wait` returns False, or if the file cannot be opened or written."""
    try:
        file = acquire_lock(path, wait=wait)
    except OSError as error:
        raise RunError(f"{path} cannot be locked: {error.strerror}. Check its permissions, or delete it.") from error
    with file:
        try:
            write_lock_owner(file)
        except OSError as error:
            raise RunError(f"{path} cannot be written: {error.strerror}") from error
        yield file


def acquire_lock(
    path: Path,
    *,
    hint: str = "wait for it, or stop it; two would do everything twice",
    wait: Callable[[], bool] = lambda: False,
    note: Callable[[str], None] = lambda text: None,
) -> IO[bytes]:
    """Return the open file, whose lock is held until it is closed. Raises RunError as `hold_lock`, with pid, host, start and
    command of the process that holds it, or if it is no regular file; OSError if it cannot be opened or written.

    If the file system has no locks (some NFS), `note` is called with a warning, and the file is returned unlocked.
    """
    while True:
        if path.exists() and not path.is_file():
            raise RunError(f"{path} is not a regular file, which a lock has to be: move it elsewhere, or delete it")
        file = path.open("a+b", buffering=0)  # nothing is left to write when it is closed, for example on a full disk
        try:
            while HAS_FILE_LOCKS:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except (BlockingIOError, PermissionError):  # PermissionError: some network file systems
                    if not wait():
                        message = f"another process is at work on {path.parent}{_describe_owner(file)}: {hint}"
                        raise RunError(message) from None
                    time.sleep(LOCK_POLL_SECONDS)
                except OSError as error:
                    if error.errno not in _UNSUPPORTED:
                        raise
                    note(
                        f"{path} cannot be locked ({error.strerror}): a second process in {path.parent} would not be noticed"
                    )
                    break
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(file.fileno()), path.stat()):
                    return file
        except BaseException:
            file.close()
            raise
        file.close()  # the previous owner has deleted it with its folder


def is_locked(path: Path) -> bool:
    """Return whether a process holds the lock on this file. Of a file that cannot be opened, nobody does.

    Where there are no locks, a process that the file names and that lives on this machine counts as holding it.
    """
    try:
        with open_regular(path) as file:
            owner = parse_json(file.read(MAX_CONFIG_BYTES))
            if owner["host"] == socket.gethostname() and not _is_alive(int(owner["pid"])):
                return False  # without trying the lock, which a run that starts just then would find held
            if not HAS_FILE_LOCKS:
                return bool(owner["host"] == socket.gethostname())
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except (BlockingIOError, PermissionError):
                return True
            return False
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:  # another user's
        return True
    return True


def write_lock_owner(file: IO[bytes]) -> None:
    """Write this process's pid, host, time and command for others to read. Raises OSError.

    The file outlives the process: of the command it has the first words, and no option, whose value may be a password.
    """
    program = Path(sys.argv[0])
    words = takewhile(lambda word: not word.startswith("-"), sys.argv[1:3])
    command = shlex.join([program.parent.name if program.name == "__main__.py" else program.name, *words])
    since = datetime.now().astimezone().isoformat(timespec="seconds")
    owner = {"pid": os.getpid(), "host": socket.gethostname(), "since": since, "command": command}
    file.truncate(0)
    file.write(json.dumps(owner).encode() + b"\n")
    file.flush()


def _describe_owner(file: IO[bytes]) -> str:
    """Return the owner in parentheses; empty if the file does not tell (it may be being written)."""
    file.seek(0)
    try:
        owner = parse_json(file.read(MAX_CONFIG_BYTES))
        command = str(owner["command"])
        if len(command) > MAX_SHOWN_COMMAND:
            command = f"{command[:MAX_SHOWN_COMMAND]} …"
        return f" (pid {owner['pid']} on {owner['host']}, since {owner['since']}: {command})"
    except (ValueError, KeyError, TypeError):
        return ""
