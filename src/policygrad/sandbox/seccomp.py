"""Which system calls a confined process may not make: a seccomp filter, installed by ctypes. Standard library only.

It is a second wall behind both others (what bubblewrap and Landlock hide, it does not let be reached by other ways), and the
one that forbids new processes and the network. Numbers: Linux's asm/unistd.h (x86_64) and asm-generic/unistd.h (aarch64); the
layout of what a filter sees and returns: include/uapi/linux/seccomp.h, audit.h and bpf_common.h.
"""

import ctypes
import os
import platform
import struct
from collections.abc import Iterable

_NEWEST = 470  # numbers from here on are of calls that nobody here has looked at: they do not exist
_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}

_Table = dict[str, int | tuple[int, int]]

_BOTH: _Table = {
    "io_uring_setup": 425,
    "io_uring_enter": 426,
    "io_uring_register": 427,
    "kcmp": (312, 272),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "process_madvise": 440,
    "process_mrelease": 448,
    "pidfd_send_signal": 424,
    "pidfd_getfd": 438,
    "migrate_pages": (256, 238),
    "move_pages": (279, 239),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "unshare": (272, 97),
    "setns": (308, 268),
    "open_tree": 428,
    "move_mount": 429,
    "fsopen": 430,
    "fsconfig": 431,
    "fsmount": 432,
    "fspick": 433,
    "mount_setattr": 442,
    "open_tree_attr": 467,
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "reboot": (169, 142),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "acct": (163, 89),
    "quotactl": (179, 60),
    "quotactl_fd": 443,
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "clock_adjtime": (305, 266),
    "adjtimex": (159, 171),
    "sethostname": (170, 161),
    "setdomainname": (171, 162),
    "personality": (135, 92),
    "fanotify_init": (300, 262),
    "fanotify_mark": (301, 263),
    "inotify_init1": (294, 26),
    "inotify_add_watch": (254, 27),
    "syslog": (103, 116),
    "vhangup": (153, 58),
    "socket": (41, 198),
    "shmget": (29, 194),
    "msgget": (68, 186),
    "semget": (64, 190),
    "mq_open": (240, 180),
}
"""Never: other processes, mounts and namespaces, kernel, network, memory that no limit counts, the names of files that others
create (which inotify tells, and Landlock does not see). (x86_64, aarch64), or both."""
_ONLY_X86 = {"iopl": 172, "ioperm": 173, "inotify_init": 253}
_ATTRIBUTES: _Table = {
    "fchmod": (91, 52),
    "fchmodat": (268, 53),
    "fchmodat2": 452,
    "fchown": (93, 55),
    "fchownat": (260, 54),
    "setxattr": (188, 5),
    "lsetxattr": (189, 6),
    "fsetxattr": (190, 7),
    "setxattrat": 463,
    "removexattr": (197, 14),
    "lremovexattr": (198, 15),
    "fremovexattr": (199, 16),
    "removexattrat": 466,
    "file_setattr": 469,
    "utimensat": (280, 88),
    "truncate": (76, 45),
}
"""What changes files without opening them, which Landlock does not see."""
_ATTRIBUTES_X86 = {"chmod": 90, "chown": 92, "lchown": 94, "utime": 132, "utimes": 235, "futimesat": 261}
_ALONE: _Table = {
    "memfd_create": (319, 279),
    "memfd_secret": 447,
    "sendmsg": (46, 211),  # an open file in a message on its way is nowhere to be counted
    "sendmmsg": (307, 269),
    "clone": (56, 220),
    "setpriority": (141, 140),
    "ioprio_set": (251, 30),
    "sched_setscheduler": (144, 119),
    "sched_setparam": (142, 118),
    "sched_setattr": (314, 274),
}
_ALONE_X86 = {"fork": 57, "vfork": 58}
_CLONE3 = 435
_ITSELF = {
    "kill": (62, 129),
    "tkill": (200, 130),
    "tgkill": (234, 131),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
}
_PRLIMIT = (302, 261)

_LOAD, _EQUAL, _AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06  # instructions of classic BPF
_NUMBER, _MACHINE, _FIRST_ARGUMENT = (
    0,
    4,
    16,
)  # places in struct seccomp_data; the argument's lower half, both being little-endian
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_EPERM, _ENOSYS = 1, 38
_PR_SET_SECCOMP, _FILTER = 22, 2


def is_supported() -> bool:
    """Whether there is a filter for this machine."""
    return platform.machine() in _ARCHITECTURES


def install_filter(*, alone: bool, attributes: bool) -> None:
    """Put the filter on this process and all that it starts, for good; needs no_new_privs.

    alone: it starts neither processes nor threads, and signals only itself. attributes: nor changes modes, owners and times of
    files. Raises OSError.
    """
    code = build_filter(platform.machine(), os.getpid(), alone=alone, attributes=attributes)
    buffer = ctypes.create_string_buffer(code, len(code))
    header = struct.pack("HxxxxxxP", len(code) // 8, ctypes.addressof(buffer))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_SECCOMP, _FILTER, ctypes.create_string_buffer(header, len(header)), 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "the kernel takes no seccomp filter")


def build_filter(machine: str, pid: int, *, alone: bool, attributes: bool) -> bytes:
    """The filter as the kernel reads it, for the process with this id."""
    which = list(_ARCHITECTURES).index(machine)
    tables = [_BOTH, *([_ATTRIBUTES] if attributes else []), *([_ALONE] if alone else [])]
    denied = {_of(entry, which) for table in tables for entry in table.values()}
    if machine == "x86_64":
        extra = [_ONLY_X86, *([_ATTRIBUTES_X86] if attributes else []), *([_ALONE_X86] if alone else [])]
        denied |= {number for table in extra for number in table.values()}
    lines = [
        _line(_LOAD, _MACHINE),
        _line(_EQUAL, _ARCHITECTURES[machine], 1, 0),
        _line(_RETURN, _KILL),
        _line(_LOAD, _NUMBER),
        _line(_AT_LEAST, _NEWEST, 0, 1),  # those of x32 too, which begin at 2³⁰
        _line(_RETURN, _ERRNO | _ENOSYS),
        *_when(_CLONE3, _ENOSYS),  # its flags are in memory, where no filter looks; the C library then uses clone
    ]
    for number in sorted(denied):
        lines += _when(number, _EPERM)
    if alone:
        for entry in _ITSELF.values():
            lines += _only(entry[which], (pid,))
    lines += _only(_PRLIMIT[which], (0, pid))
    return b"".join([*lines, _line(_RETURN, _ALLOW)])


def _of(entry: int | tuple[int, int], which: int) -> int:
    return entry if isinstance(entry, int) else entry[which]


def _when(number: int, error: int) -> list[bytes]:
    """The call fails."""
    return [_line(_EQUAL, number, 0, 1), _line(_RETURN, _ERRNO | error)]


def _only(number: int, first: Iterable[int]) -> list[bytes]:
    """The call succeeds only with one of these first arguments."""
    checks = list(first)
    inner = [_line(_LOAD, _FIRST_ARGUMENT)]
    inner += [_line(_EQUAL, value, len(checks) - place, 0) for place, value in enumerate(checks)]
    inner += [_line(_RETURN, _ERRNO | _EPERM), _line(_RETURN, _ALLOW)]
    return [_line(_EQUAL, number, 0, len(inner)), *inner]


def _line(code: int, value: int, yes: int = 0, no: int = 0) -> bytes:
    return struct.pack("HBBI", code, yes, no, value)
