"""What a confined process gives up before anything of a stranger's runs: capabilities, and what it may take of the machine."""

import ctypes
import resource
import signal
import struct

_PR_SET_PDEATHSIG, _PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS, _PR_CAP_AMBIENT = 1, 24, 38, 47
_CLEAR_ALL = 4
_VERSION_3 = 0x20080522  # of capset's structures: two 32-bit halves of three sets
_HIGHEST = 64
MOST_OPEN = 64  # files of a confined process, at once


def drop() -> None:
    """No capabilities, and none to be had from any program that is started: what a user of no rights has, root too."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "no_new_privs cannot be set")
    libc.prctl(_PR_CAP_AMBIENT, _CLEAR_ALL, 0, 0, 0)
    for capability in range(_HIGHEST):
        libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0)  # fails without the right to, and then there is none to drop
    if libc.capset(struct.pack("Ii", _VERSION_3, 0), bytes(24)) != 0:
        raise OSError(ctypes.get_errno(), "capabilities cannot be dropped")


def end_with_parent() -> None:
    """Whoever kills the parent, kills this process too."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def limit(*, memory: int | None, seconds: float, file_size: int) -> None:
    """Bytes of address space, seconds of CPU, bytes of one file; and few open files, no dumps, no locked memory."""
    if memory is not None:
        _set(resource.RLIMIT_AS, memory)
    cpu = int(seconds) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (cpu, cpu + 1))
    _set(resource.RLIMIT_FSIZE, file_size)
    _set(resource.RLIMIT_NOFILE, MOST_OPEN)
    _set(resource.RLIMIT_CORE, 0)
    _set(resource.RLIMIT_MEMLOCK, 0)


def _set(which: int, most: int) -> None:
    hard = resource.getrlimit(which)[1]
    most = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(which, (most, most))
