"""A reward worker behind a wall (`--rewards.sandbox`): no network, nothing to write but a folder of its own, few files to read."""

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from policygrad.errors import ConfigError
from policygrad.rewards.memory import go_first
from policygrad.rewards.types import Reward
from policygrad.sandbox import WALLS, bubblewrap, standing
from policygrad.sandbox.inside import confine
from policygrad.sandbox.walls import interpreter

NONE = "none"
CHOICES = (NONE, "auto", *WALLS)
_FILES = 1 << 30  # bytes of a worker's folder, where the wall makes one of its own
_MACHINE = ("/sys/devices/system/cpu", "/sys/devices/system/node", "/etc/passwd", "/etc/group", "/etc/nsswitch.conf")
_PROC = ("/proc/cpuinfo", "/proc/meminfo", "/proc/self/statm", "/proc/self/task/{pid}/children")
_FIRST = 1  # the process above a worker behind bubblewrap


def check(sandbox: str, rewards: Sequence[Reward] = ()) -> None:
    """Raises ConfigError for a wall that there is not, or that does not stand here, and for rewards that ask servers behind one."""
    if sandbox not in CHOICES:
        raise ConfigError(f"rewards.sandbox {sandbox!r}: choose {', '.join(CHOICES)}")
    if sandbox == NONE:
        return
    asks = [reward.name for reward in rewards if getattr(reward.function, "reward_network", False)]
    if asks:
        raise ConfigError(
            f"reward {asks[0]!r} asks a server, and behind --rewards.sandbox {sandbox} there is no network: set it to none, or "
            "leave the reward away"
        )
    standing(sandbox)


@dataclass(frozen=True)
class Start:
    """How a worker is started, behind a wall or not."""

    command: Sequence[str]
    environment: dict[str, str]
    folder: str | None = None  # of its own, to be taken away after it

    def clear(self) -> None:
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)


def start(sandbox: str, program: str, environment: dict[str, str]) -> Start:
    """The command of an interpreter that runs `program` with three arguments: the import path, the parent's process id, and what
    `enter` is to do."""
    inner = [sys.executable, "-P", "-c", program, json.dumps(sys.path)]
    if sandbox == NONE:
        return Start([*inner, str(os.getpid()), ""], environment)
    wall = standing(sandbox)
    readable = [
        *interpreter(),
        *(path for path in map(os.path.abspath, filter(None, sys.path)) if path != "/"),
        *_MACHINE,
    ]
    folder = tempfile.mkdtemp(prefix="policygrad-worker-") if wall.folder else None
    orders = wall.orders(readable, folder or "", alone=False)
    parent = os.getpid() if folder else _FIRST
    command = wall.command([*inner, str(parent), json.dumps(orders)], readable, _FILES)
    places = dict.fromkeys(("TMPDIR", "TEMP", "TMP"), folder or bubblewrap.folder(readable))
    return Start(command, {**environment, **places}, folder)


def enter(orders: str) -> None:
    """In the worker, before all else: put up what the wall leaves to the process itself. "" = there is none."""
    if not orders:
        return
    go_first()  # afterwards it may not
    wall: dict[str, Any] = json.loads(orders)
    if wall["landlock"] is not None:
        wall["landlock"]["readable"] += [path.format(pid=os.getpid()) for path in _PROC]
    confine(wall, None)
