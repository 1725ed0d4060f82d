"""Files and folders that are whole on the disk, or as they were."""

from __future__ import annotations

import errno
import os
import re
import shutil
from pathlib import Path

from policygrad.durable import sync
from policygrad.errors import RunError


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
