"""The processes that a worker started, wherever they have gone since: found and ended with it.

A child may leave its worker's process group (`setsid`) and its parent (a double fork). On Linux a worker adopts what its children
leave behind (PR_SET_CHILD_SUBREAPER), so that while it lives its family is the tree below it; where it has died, they are known
by a variable in their environment. What gets away: a process of a worker that died by itself, outside of its group and with an
environment of its own. Elsewhere only the process group is known.
"""

import contextlib
import os
import re
import signal
import sys
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from pathlib import Path

TOKEN = "POLICYGRAD_WORKER"
"""The variable by which processes are known; its value is the worker's."""
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_ROUNDS = 50  # searches until nobody new is found: a family that forks faster than that is left
_UNCOLLECTED = 64  # ended processes that nobody waited for, each of which holds a process id


def join(parent: int) -> None:
    """In a worker. On Linux a parent that is killed takes a busy worker along (elsewhere it ends at the next message), and what
    the worker's children leave behind is the worker's."""
    if sys.platform == "linux":
        import ctypes

        prctl = ctypes.CDLL(None).prctl
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        prctl(_PR_SET_CHILD_SUBREAPER, 1)
    if os.getppid() != parent:
        os._exit(0)


def crowded() -> bool:
    """Whether this process has adopted more ended processes than it should hold: its own children are its function's to collect,
    so nobody else may. The kernel gives adopted ones to the first thread, whose number is the process's."""
    try:
        fd = os.open(f"/proc/self/task/{os.getpid()}/children", os.O_RDONLY)
    except OSError:  # no Linux, or a kernel without such files
        return False
    try:
        children = os.read(fd, 1 << 16).split()
    finally:
        os.close(fd)
    return len(children) > _UNCOLLECTED and sum(_ended(int(pid)) for pid in children) > _UNCOLLECTED


@dataclass(frozen=True)
class Family:
    """A worker and what it has started. running: whether it still lives itself."""

    leader: int
    token: str
    running: bool


def end(families: Sequence[Family]) -> None:
    """Kills these workers and all that they have started, by one search among the machine's processes for all of them; the caller
    collects the workers."""
    for family in families:
        if not family.running:
            _end_group(family.leader)  # at once, while nobody else can have its number
        elif sys.platform == "linux":
            _signal(family.leader, signal.SIGSTOP)  # it forks no more, and adopts until all others are gone
    running = [family.leader for family in families if family.running]
    if sys.platform == "linux":
        gone = {os.getpid(), *(family.leader for family in families)}
        tokens = {family.token for family in families}
        for _ in range(_ROUNDS):
            found = ({*_marked(tokens)} | _below(running)) - gone
            if not found:
                break
            for pid in found:
                _signal(pid, signal.SIGKILL)
            gone |= found
    for leader in running:
        _end_group(leader)


def _end_group(leader: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)


def _below(leaders: Sequence[int]) -> set[int]:
    """The processes below these."""
    children: dict[int, list[int]] = {}
    for pid in _processes() if leaders else ():
        if (state := _stat(pid)) is not None:
            children.setdefault(int(state[1]), []).append(pid)
    found, left = set[int](), list(leaders)
    while left:
        new = [pid for pid in children.get(left.pop(), []) if pid not in found]
        found.update(new)
        left += new
    return found


def _marked(tokens: Set[str]) -> Iterator[int]:
    """The processes that began with one of these tokens in their environment, as far as this one may read it."""
    mark = re.compile(rb"(?:^|\0)" + TOKEN.encode() + rb"=([^\0]*)")
    for pid in _processes():
        with contextlib.suppress(OSError):  # another user's, or ended meanwhile
            if any(
                token.decode(errors="replace") in tokens
                for token in mark.findall(Path(f"/proc/{pid}/environ").read_bytes())
            ):
                yield pid


def _processes() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _ended(pid: int) -> bool:
    state = _stat(pid)
    return state is not None and state[0] == "Z"


def _stat(pid: int) -> list[str] | None:
    """State, parent and so on of a process; None where it is gone. Its name, in brackets before them, may hold anything."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None


def _signal(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)
