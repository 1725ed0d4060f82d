"""What a configuration's file holds, whatever kind of file it is: read without waiting for ever, and not without an end."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

LARGEST = 2**20
"""Bytes: a hundred times a run's whole configuration, and what is parsed in no time."""


def text_of(path: Path) -> str:
    """The text of a file, or of a pipe such as a shell's `<(…)`.

    Raises:
        OSError: it cannot be read, is larger than `LARGEST`, as a device without an end is, or is a pipe that nobody writes to.
        UnicodeDecodeError: it is not UTF-8.
    """
    # a named pipe would be waited for until somebody writes to it
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    with os.fdopen(descriptor, "rb") as file:
        if hasattr(os, "O_NONBLOCK"):
            os.set_blocking(descriptor, True)
        data = file.read(LARGEST + 1)
        if len(data) > LARGEST:
            raise OSError(errno.EFBIG, f"it is larger than {LARGEST >> 20} MiB; is it the right file?")
        if not data and stat.S_ISFIFO(os.fstat(descriptor).st_mode):
            raise OSError(errno.EPIPE, "it is a pipe that nobody writes to")
    return data.decode("utf-8-sig")
