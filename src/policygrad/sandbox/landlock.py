"""Restricts which files a process may open, by Landlock through ctypes system calls. No privileges; Linux 5.13 or later.

Numbers and structures: include/uapi/linux/landlock.h; what each version (ABI) added: Documentation/userspace-api/landlock.rst.
"""

import ctypes
import os
import resource
import struct
from collections.abc import Sequence

_CREATE, _ADD, _RESTRICT = 444, 445, 446  # system calls, the same on every machine
_VERSION, _PATH_BENEATH = 1, 1
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
_REMOVE_DIR, _REMOVE_FILE, _MAKE_DIR, _MAKE_REGULAR = 1 << 4, 1 << 5, 1 << 7, 1 << 8
_REFER, _TRUNCATE, _IOCTL = 1 << 13, 1 << 14, 1 << 15
_FILE_RIGHTS = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | _IOCTL  # that something else than a folder can have
_RIGHTS = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 5: (1 << 16) - 1}  # by the version that added the last
_NETWORK, _SCOPES = 0b11, 0b11  # binding and connecting (version 4); abstract sockets and signals (version 6)
_SIGNALS = 0b10


def get_abi_version() -> int:
    """Return the version of the kernel's Landlock; 0 = it has none."""
    version = _load_libc().syscall(_CREATE, None, ctypes.c_size_t(0), ctypes.c_uint32(_VERSION))
    return max(int(version), 0)


def restrict(readable: Sequence[str], writable: Sequence[str], *, folders: bool = False) -> None:
    """Let this process, and all that it starts, only read below `readable`, and read and write below `writable`, for good.

    Paths that do not exist are skipped. folders: folders may be created below `writable`. Needs no_new_privs. Raises OSError.
    """
    abi = get_abi_version()
    if not abi:
        raise OSError("the kernel has no Landlock")
    handled = next(rights for since, rights in sorted(_RIGHTS.items(), reverse=True) if abi >= since)
    attributes = struct.pack("QQQ", handled, _NETWORK if abi >= 4 else 0, _SCOPES if abi >= 6 else 0)
    size = 24 if abi >= 6 else 16 if abi >= 4 else 8
    libc = _load_libc()
    ruleset = _check(libc.syscall(_CREATE, attributes, ctypes.c_size_t(size), ctypes.c_uint32(0)), "no ruleset")
    read = _EXECUTE | _READ_FILE | _READ_DIR
    write = read | _WRITE_FILE | _REMOVE_FILE | _MAKE_REGULAR | _TRUNCATE
    if folders:
        write |= _MAKE_DIR | _REMOVE_DIR | _REFER
    try:
        for paths, rights in ((readable, read), (writable, write)):
            for path in paths:
                _add_rule(ruleset, path, rights & handled)
        _check(libc.syscall(_RESTRICT, ctypes.c_int(ruleset), ctypes.c_uint32(0)), "not restricted")
    finally:
        os.close(ruleset)


REFER_SINCE, SCOPES_SINCE = 2, 6
"""Versions from which `keep_from_others` has no other effect, and from which signals are kept to a process and its children."""


def keep_from_others(*, sockets: bool = False) -> None:
    """Let this process, and all that it starts, neither trace other processes nor read their variables and memory, for good; from
    version 6 on nor signal them. Files stay as they are. Sets no_new_privs. sockets: nor connect to abstract sockets of others.

    Raises:
        OSError: The kernel has no Landlock of version `REFER_SINCE`.
    """
    abi = get_abi_version()
    if abi < REFER_SINCE:
        raise OSError("the kernel's Landlock is too old")
    libc = _load_libc()
    _check(libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs cannot be set")
    drop_capabilities(_READ_OTHERS)
    # a ruleset must restrict something: before version 6 the right to link between folders, which is then given everywhere
    scopes = struct.pack("QQQ", 0, 0, _SCOPES if sockets else _SIGNALS)
    attributes = scopes if abi >= SCOPES_SINCE else struct.pack("Q", _REFER)
    ruleset = _check(
        libc.syscall(_CREATE, attributes, ctypes.c_size_t(len(attributes)), ctypes.c_uint32(0)), "no ruleset"
    )
    try:
        if abi < SCOPES_SINCE:
            _add_rule(ruleset, "/", _REFER)
        _check(libc.syscall(_RESTRICT, ctypes.c_int(ruleset), ctypes.c_uint32(0)), "not restricted")
    finally:
        os.close(ruleset)


def _add_rule(ruleset: int, path: str, rights: int) -> None:
    try:
        fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return
    try:
        if not os.path.isdir(path):
            rights &= _FILE_RIGHTS
        rule = struct.pack("=Qi", rights, fd)
        added = _load_libc().syscall(_ADD, ctypes.c_int(ruleset), ctypes.c_int(_PATH_BENEATH), rule, ctypes.c_uint32(0))
        _check(added, f"no rule for {path}")
    finally:
        os.close(fd)


def _load_libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _check(result: int, failure: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"Landlock: {failure}: {os.strerror(number)}")
    return int(result)


# Privileges and resources that a sandboxed process gives up before it runs a program.

_PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS, _PR_CAP_AMBIENT = 24, 38, 47
_CLEAR_ALL = 4
_VERSION_3 = 0x20080522  # of capset's structures: two 32-bit halves of three sets
_NUM_CAPABILITIES = 64
MAX_OPEN_FILES = 64


_CHOWN, _DAC_OVERRIDE, _FOWNER, _FSETID, _SETGID, _SETUID = 0, 1, 3, 4, 6, 7
_SYS_PTRACE, _SYS_ADMIN, _PERFMON = 19, 21, 38
_READ_OTHERS = (_SYS_PTRACE, _SYS_ADMIN, _PERFMON)
"""Capabilities by which root reads the memory and variables of any process."""
_USE_FILES = (_CHOWN, _DAC_OVERRIDE, _FOWNER, _FSETID, _SETGID, _SETUID)
SYSTEM_CAPABILITIES = tuple(number for number in range(_NUM_CAPABILITIES) if number not in _USE_FILES)
"""All but those by which root, in its everyday work, uses files of other users and becomes one: with them mounts are taken away,
devices made, and files opened past the folders that hide them."""


def drop_capabilities(dropped: Sequence[int] = range(_NUM_CAPABILITIES)) -> None:
    """Drop capabilities, root's too, and forbid gaining any from a program that is started."""
    libc = _load_libc()
    if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "no_new_privs cannot be set")
    libc.prctl(_PR_CAP_AMBIENT, _CLEAR_ALL, 0, 0, 0)
    for capability in dropped:
        libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0)  # fails without the right to, when there is none to drop
    sets = ctypes.create_string_buffer(24)
    if libc.capget(struct.pack("Ii", _VERSION_3, 0), sets) != 0:
        raise OSError(ctypes.get_errno(), "capabilities cannot be read")
    kept = ~sum(1 << capability for capability in dropped)
    low, high = kept & 0xFFFFFFFF, kept >> 32 & 0xFFFFFFFF
    masks = (low, low, low, high, high, high)  # effective, permitted, inheritable: of the lower half, and of the upper
    remaining = struct.pack(
        "6I", *(held & mask for held, mask in zip(struct.unpack("6I", sets.raw), masks, strict=True))
    )
    if libc.capset(struct.pack("Ii", _VERSION_3, 0), remaining) != 0:
        raise OSError(ctypes.get_errno(), "capabilities cannot be dropped")


def set_limits(*, memory: int | None, seconds: float, file_size: int) -> None:
    """Limit bytes of address space, seconds of CPU and bytes of one file; and open files, core dumps and locked memory."""
    if memory is not None:
        _set_limit(resource.RLIMIT_AS, memory)
    cpu = int(seconds) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (cpu, cpu + 1))
    _set_limit(resource.RLIMIT_FSIZE, file_size)
    _set_limit(resource.RLIMIT_NOFILE, MAX_OPEN_FILES)
    _set_limit(resource.RLIMIT_CORE, 0)
    _set_limit(resource.RLIMIT_MEMLOCK, 0)


def _set_limit(which: int, value: int) -> None:
    hard = resource.getrlimit(which)[1]
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(which, (value, value))
