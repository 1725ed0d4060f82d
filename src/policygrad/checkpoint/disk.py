"""Files and folders that are whole on the disk, or as they were."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import stat
from pathlib import Path

from policygrad.errors import RunError


def sync(path: Path) -> None:
    """Wait until a file, or the names in a directory, are on the disk. Raises OSError."""
    if path.is_dir() and os.name == "nt":  # Windows cannot open a directory; NTFS journals its names itself
        return
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def as_others(folder: Path) -> None:
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


def install(temporary: Path, final: Path) -> Path:
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
    sync(final.parent)
    return old


def is_full(error: Exception) -> bool:
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
