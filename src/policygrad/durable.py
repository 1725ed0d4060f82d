"""Files that are on the disk, and that others may read: what checkpoints and published weights share."""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path


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
