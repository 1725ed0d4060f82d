"""Denies system calls to a sandboxed process, by a seccomp filter that is installed through ctypes. Standard library only.

It backs up bubblewrap and Landlock, whose hidden files and processes it makes unreachable by other calls, and forbids new
processes and the network. Numbers: Linux's asm/unistd.h (x86_64) and asm-generic/unistd.h (aarch64); the
layout of what a filter sees and returns: include/uapi/linux/seccomp.h, audit.h and bpf_common.h.
"""

import ctypes
import os
import platform
import struct
from collections.abc import Mapping, Sequence

_NEWEST = 470  # from here on calls were not reviewed, and fail as if they did not exist
_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}

_Table = Mapping[str, int | tuple[int, ...]]

# Always denied: (number on x86_64, and on aarch64 where it has the call), or one number for both.
_DENIED: _Table = (
    # other processes
    {"kcmp": (312, 272), "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271)}
    | {"process_madvise": 440, "process_mrelease": 448, "pidfd_send_signal": 424, "pidfd_getfd": 438}
    | {"migrate_pages": (256, 238), "move_pages": (279, 239)}
    # mounts and namespaces
    | {"mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51), "unshare": (272, 97)}
    | {"setns": (308, 268), "open_tree": 428, "move_mount": 429, "fsopen": 430, "fsconfig": 431, "fsmount": 432}
    | {"fspick": 433, "mount_setattr": 442, "open_tree_attr": 467, "name_to_handle_at": (303, 264)}
    | {"open_by_handle_at": (304, 265)}
    # the kernel
    | {"io_uring_setup": 425, "io_uring_enter": 426, "io_uring_register": 427, "bpf": (321, 280)}
    | {"perf_event_open": (298, 241), "userfaultfd": (323, 282), "add_key": (248, 217), "request_key": (249, 218)}
    | {"keyctl": (250, 219), "init_module": (175, 105), "finit_module": (313, 273), "delete_module": (176, 106)}
    | {"kexec_load": (246, 104), "kexec_file_load": (320, 294), "reboot": (169, 142), "swapon": (167, 224)}
    | {"swapoff": (168, 225), "acct": (163, 89), "quotactl": (179, 60), "quotactl_fd": 443}
    | {"settimeofday": (164, 170), "clock_settime": (227, 112), "clock_adjtime": (305, 266), "adjtimex": (159, 171)}
    | {"sethostname": (170, 161), "setdomainname": (171, 162), "personality": (135, 92), "syslog": (103, 116)}
    | {"vhangup": (153, 58)}
    # names of files that others create, which Landlock does not hide
    | {"fanotify_init": (300, 262), "fanotify_mark": (301, 263), "inotify_init1": (294, 26)}
    | {"inotify_add_watch": (254, 27)}
    # network, and memory that no limit counts
    | {"socket": (41, 198), "shmget": (29, 194), "msgget": (68, 186), "semget": (64, 190), "mq_open": (240, 180)}
    | {"iopl": (172,), "ioperm": (173,), "inotify_init": (253,)}
)
# Change files without opening them, which Landlock does not restrict.
_ATTRIBUTES: _Table = (
    {"fchmod": (91, 52), "fchmodat": (268, 53), "fchown": (93, 55), "fchownat": (260, 54), "truncate": (76, 45)}
    | {"setxattr": (188, 5), "lsetxattr": (189, 6), "fsetxattr": (190, 7), "utimensat": (280, 88)}
    | {"removexattr": (197, 14), "lremovexattr": (198, 15), "fremovexattr": (199, 16)}
    | {"fchmodat2": 452, "setxattrat": 463, "removexattrat": 466, "file_setattr": 469}
    | {"chmod": (90,), "chown": (92,), "lchown": (94,), "utime": (132,), "utimes": (235,), "futimesat": (261,)}
)
_ALONE: _Table = (
    {"clone": (56, 220), "setpriority": (141, 140), "ioprio_set": (251, 30), "sched_setscheduler": (144, 119)}
    | {"sched_setparam": (142, 118), "sched_setattr": (314, 274), "memfd_create": (319, 279)}
    | {"sendmsg": (46, 211), "sendmmsg": (307, 269)}  # an open file in a message under way cannot be counted
    | {"memfd_secret": 447}
    | {"fork": (57,), "vfork": (58,)}
)
_CLONE3 = 435
# kill, tkill, tgkill, rt_sigqueueinfo, rt_tgsigqueueinfo
_SIGNALS = ((62, 129), (200, 130), (234, 131), (129, 138), (297, 240))
_PRLIMIT = (302, 261)

_LOAD, _EQUAL, _AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06  # instructions of classic BPF
# offsets in struct seccomp_data; the argument's lower half (little-endian)
_NUMBER, _MACHINE, _FIRST_ARGUMENT = 0, 4, 16
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_EPERM, _ENOSYS = 1, 38
_PR_SET_SECCOMP, _FILTER = 22, 2


def is_supported() -> bool:
    """Return whether there is a filter for this machine."""
    return platform.machine() in _ARCHITECTURES


def install_filter(*, alone: bool, attributes: bool) -> None:
    """Install the filter on this process and all that it starts, for good. Needs no_new_privs.

    Args:
        alone: Deny new processes and threads, and signals except to itself.
        attributes: Deny changes to modes, owners and times of files.

    Raises:
        OSError: The kernel refuses the filter.
    """
    code = build_filter(platform.machine(), os.getpid(), alone=alone, attributes=attributes)
    buffer = ctypes.create_string_buffer(code, len(code))
    header = struct.pack("HxxxxxxP", len(code) // 8, ctypes.addressof(buffer))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_SECCOMP, _FILTER, ctypes.create_string_buffer(header, len(header)), 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "the kernel refuses the seccomp filter")


def build_filter(machine: str, pid: int, *, alone: bool, attributes: bool) -> bytes:
    """Build the filter, as the kernel reads it, for the process with this id."""
    which = list(_ARCHITECTURES).index(machine)
    tables = [_DENIED, *([_ATTRIBUTES] if attributes else []), *([_ALONE] if alone else [])]
    entries = [(entry, entry) if isinstance(entry, int) else entry for table in tables for entry in table.values()]
    lines = [
        _line(_LOAD, _MACHINE),
        _line(_EQUAL, _ARCHITECTURES[machine], 1, 0),
        _line(_RETURN, _KILL),
        _line(_LOAD, _NUMBER),
        _line(_AT_LEAST, _NEWEST, 0, 1),  # also those of x32, which begin at 2³⁰
        _line(_RETURN, _ERRNO | _ENOSYS),
        # clone3's flags are in memory, which a filter cannot read; the C library falls back to clone
        *_deny(_CLONE3, _ENOSYS),
    ]
    for number in sorted({number for entry in entries for number in entry[which : which + 1]}):
        lines += _deny(number, _EPERM)
    if alone:
        for numbers in _SIGNALS:
            lines += _allow_only(numbers[which], (pid,))
    lines += _allow_only(_PRLIMIT[which], (0, pid))
    return b"".join([*lines, _line(_RETURN, _ALLOW)])


def _deny(number: int, error: int) -> list[bytes]:
    return [_line(_EQUAL, number, 0, 1), _line(_RETURN, _ERRNO | error)]


def _allow_only(number: int, first: Sequence[int]) -> list[bytes]:
    """Allow the call only with one of these first arguments."""
    inner = [_line(_LOAD, _FIRST_ARGUMENT)]
    inner += [_line(_EQUAL, value, len(first) - i, 0) for i, value in enumerate(first)]
    inner += [_line(_RETURN, _ERRNO | _EPERM), _line(_RETURN, _ALLOW)]
    return [_line(_EQUAL, number, 0, len(inner)), *inner]


def _line(code: int, value: int, yes: int = 0, no: int = 0) -> bytes:
    return struct.pack("HBBI", code, yes, no, value)
