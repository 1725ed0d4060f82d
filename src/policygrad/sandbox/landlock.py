"""Which files a process may open: Landlock, by ctypes system calls. It needs no privileges, only Linux 5.13 or later with it.

Numbers and structures: include/uapi/linux/landlock.h; what each version (ABI) added: Documentation/userspace-api/landlock.rst.
"""

import ctypes
import os
import resource
import signal
import struct
from collections.abc import Sequence

_CREATE, _ADD, _RESTRICT = 444, 445, 446  # system calls, the same on every machine
_VERSION, _PATH_BENEATH = 1, 1
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
_REMOVE_DIR, _REMOVE_FILE, _MAKE_DIR, _MAKE_REGULAR = 1 << 4, 1 << 5, 1 << 7, 1 << 8
_REFER, _TRUNCATE, _IOCTL = 1 << 13, 1 << 14, 1 << 15
_OF_FILES = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | _IOCTL  # rights that a file that is no folder can have
_RIGHTS = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 5: (1 << 16) - 1}  # from which version on
_NETWORK, _SCOPES = 0b11, 0b11  # binding and connecting (version 4); abstract sockets and signals (version 6)


def get_abi_version() -> int:
    """Of the kernel's Landlock; 0 = it has none."""
    found = _libc().syscall(_CREATE, None, ctypes.c_size_t(0), ctypes.c_uint32(_VERSION))
    return max(int(found), 0)


def restrict(readable: Sequence[str], writable: Sequence[str], *, folders: bool = False) -> None:
    """Let this process, and all that it starts, read below `readable` and below `writable` write too, and nothing else, for good.

    What is not there is left out. folders: below `writable` folders may be made. It needs no_new_privs. Raises OSError.
    """
    abi = get_abi_version()
    if not abi:
        raise OSError("the kernel has no Landlock")
    handled = next(rights for since, rights in sorted(_RIGHTS.items(), reverse=True) if abi >= since)
    attributes = struct.pack("QQQ", handled, _NETWORK if abi >= 4 else 0, _SCOPES if abi >= 6 else 0)
    size = 24 if abi >= 6 else 16 if abi >= 4 else 8
    rules = _checked(_libc().syscall(_CREATE, attributes, ctypes.c_size_t(size), ctypes.c_uint32(0)), "no ruleset")
    read = _EXECUTE | _READ_FILE | _READ_DIR
    write = read | _WRITE_FILE | _REMOVE_FILE | _MAKE_REGULAR | _TRUNCATE
    if folders:
        write |= _MAKE_DIR | _REMOVE_DIR | _REFER
    try:
        for paths, rights in ((readable, read), (writable, write)):
            for path in paths:
                _allow(rules, path, rights & handled)
        _checked(_libc().syscall(_RESTRICT, ctypes.c_int(rules), ctypes.c_uint32(0)), "not restricted")
    finally:
        os.close(rules)


def _allow(rules: int, path: str, rights: int) -> None:
    try:
        place = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return
    try:
        if not os.path.isdir(path):
            rights &= _OF_FILES
        rule = struct.pack("=Qi", rights, place)
        added = _libc().syscall(_ADD, ctypes.c_int(rules), ctypes.c_int(_PATH_BENEATH), rule, ctypes.c_uint32(0))
        _checked(added, f"no rule for {path}")
    finally:
        os.close(place)


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _checked(result: int, said: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"Landlock: {said}: {os.strerror(number)}")
    return int(result)


# What a confined process gives up before anything of a stranger's runs: capabilities, and what it may take of the machine.

_PR_SET_PDEATHSIG, _PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS, _PR_CAP_AMBIENT = 1, 24, 38, 47
_CLEAR_ALL = 4
_VERSION_3 = 0x20080522  # of capset's structures: two 32-bit halves of three sets
_HIGHEST = 64
MAX_OPEN_FILES = 64  # files of a confined process, at once


def drop_capabilities() -> None:
    """No capabilities, and none to be had from any program that is started: what a user of no rights has, root too."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "no_new_privs cannot be set")
    libc.prctl(_PR_CAP_AMBIENT, _CLEAR_ALL, 0, 0, 0)
    for capability in range(_HIGHEST):
        libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0)  # fails without the right to, and then there is none to drop
    if libc.capset(struct.pack("Ii", _VERSION_3, 0), bytes(24)) != 0:
        raise OSError(ctypes.get_errno(), "capabilities cannot be dropped")


def set_parent_death_signal() -> None:
    """Whoever kills the parent, kills this process too."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def set_limits(*, memory: int | None, seconds: float, file_size: int) -> None:
    """Bytes of address space, seconds of CPU, bytes of one file; and few open files, no dumps, no locked memory."""
    if memory is not None:
        _set(resource.RLIMIT_AS, memory)
    cpu = int(seconds) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (cpu, cpu + 1))
    _set(resource.RLIMIT_FSIZE, file_size)
    _set(resource.RLIMIT_NOFILE, MAX_OPEN_FILES)
    _set(resource.RLIMIT_CORE, 0)
    _set(resource.RLIMIT_MEMLOCK, 0)


def _set(which: int, most: int) -> None:
    hard = resource.getrlimit(which)[1]
    most = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(which, (most, most))
