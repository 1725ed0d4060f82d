"""The wall of bubblewrap (bwrap): a file system, a network and process ids of its own, as a user of no rights."""

import os
import shutil
from collections.abc import Sequence

_NOBODY = "65534"


def program() -> str | None:
    """Where bwrap is; None = not installed."""
    return shutil.which("bwrap")


def folder(readable: Sequence[str]) -> str:
    """Where the process may write: /tmp, unless that is to be read."""
    return "/run/tmp" if "/tmp" in readable else "/tmp"


def command(inner: Sequence[str], readable: Sequence[str], files: int) -> list[str]:
    """`inner` behind the wall: it sees `readable`, unchangeable, and an empty `folder` of `files` bytes, gone with it."""
    words = [program() or "bwrap", "--unshare-user", "--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts"]
    words += ["--unshare-cgroup-try", "--uid", _NOBODY, "--gid", _NOBODY, "--cap-drop", "ALL"]
    words += ["--new-session", "--die-with-parent", "--hostname", "sandbox"]
    words += ["--dev", "/dev", "--proc", "/proc", "--size", str(max(files, 4096)), "--tmpfs", folder(readable)]
    for path in sorted(readable, key=len):  # what is inside another after it
        if os.path.islink(path):
            words += ["--symlink", os.readlink(path), path] if os.path.dirname(path) == "/" else []
        words += ["--ro-bind-try", path, path] if not os.path.islink(path) or os.path.dirname(path) != "/" else []
    return [*words, "--remount-ro", "/dev", "--remount-ro", "/", "--chdir", folder(readable), "--", *inner]
