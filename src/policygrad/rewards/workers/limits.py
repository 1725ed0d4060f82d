"""What a reward worker may take: a limit on its memory, and its place as the first to go when the machine has none left."""

import contextlib
import errno
import os
import re
import sys
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from policygrad.errors import ConfigError

_UNITS = {"": 1 << 30, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_UNITS |= {"kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40}
_SIZE = re.compile(r"(\d+(?:\.\d*)?|\.\d+)\s*([A-Za-z]*)")
MIN_MEMORY = 1 << 20  # bytes
MAX_OOM_SCORE = 1000  # oom_score_adj: the kernel's own scale ends there


def parse_size(text: str, option: str = "memory") -> int | None:
    """`2GiB`, `500MB`, `2` (GiB) as bytes; None for `none`.

    Raises:
        ConfigError: no size, or less than 1 MiB.
    """
    if not isinstance(text, str):
        raise ConfigError(f"{option} is a text such as '4GiB', not {text!r}")
    if text.strip().lower() == "none":
        return None
    found = _SIZE.fullmatch(text.strip())
    unit = _UNITS.get(found.group(2).lower()) if found else None
    if not found or not unit:
        raise ConfigError(f"{option} {text!r} is no size: write 4GiB, 500MB, 4 (GiB), or none for no limit")
    number = float(found.group(1)) * unit
    if not MIN_MEMORY <= number < 1 << 62:
        raise ConfigError(f"{option} {text!r} is not between 1 MiB and 4 EiB: write 4GiB, or none for no limit")
    return int(number)


def format_size(count: int) -> str:
    """Bytes for people: 4 GiB, 64 MiB."""
    unit, factor = ("GiB", 1 << 30) if count >= 1000 << 20 else ("MiB", 1 << 20)
    return f"{count / factor:.3g} {unit}"


def raise_oom_score() -> None:
    """On Linux, where memory runs out the kernel ends this process and its children before any other."""
    with contextlib.suppress(OSError):  # no Linux, or no such file in a container: the limit holds all the same
        Path("/proc/self/oom_score_adj").write_text(str(MAX_OOM_SCORE))


def get_resident_bytes() -> int:
    """Bytes that this process holds in memory; 0 where that is not known (elsewhere than on Linux)."""
    return _statm(1)


class MemoryLimit:
    """This process may take `count` bytes more than it has now. None = as many as there are.

    On Linux what goes beyond it is refused by the kernel, as MemoryError to Python (RLIMIT_DATA: memory that is the process's own
    and can be written; address space that is only reserved, as CUDA does, is not counted). A child process has a limit of its
    own, of the same size. Elsewhere there is no limit.
    """

    def __init__(self, count: int | None) -> None:
        self._start, self._count = get_resident_bytes(), count
        if count is None or not sys.platform.startswith("linux"):
            return
        import resource

        most = _statm(5) + count
        hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
        if hard == resource.RLIM_INFINITY or most < hard:
            resource.setrlimit(resource.RLIMIT_DATA, (most, most))

    def hint(self, error: BaseException) -> str:
        """The way out of an error that this limit may be the reason of; else ""."""
        if self._count is None or not _of_memory(error):
            return ""
        return f"; a worker may take {format_size(self._count)} beyond what it has when it is loaded (--rewards.memory)"

    @property
    def half_used(self) -> bool:
        """Whether this process has grown by more than half of what it may: what it keeps from call to call will be too much."""
        return self._count is not None and get_resident_bytes() - self._start > self._count // 2


def _of_memory(error: BaseException) -> bool:
    """Whether memory was refused: to Python, to a process that was to be started, or to torch, which has no class for it."""
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
        return True
    try:
        return "can't allocate memory" in str(error)
    except Exception:  # an error whose text cannot be shown
        return False


def _statm(field: int) -> int:
    """A field of /proc/self/statm, in bytes: 1 = resident, 5 = data and stack. Read plainly, as it is after every call."""
    try:
        fd = os.open("/proc/self/statm", os.O_RDONLY)
    except OSError:
        return 0
    try:
        return int(os.read(fd, 256).split()[field]) * os.sysconf("SC_PAGE_SIZE")
    finally:
        os.close(fd)


# Which environment variables a reward worker gets: those that Python, its caches and its devices need, and those named.

PASSED_VARIABLES = (
    *("PATH", "HOME", "USER", "LOGNAME", "LANG", "LANGUAGE", "LC_*", "TZ", "TMPDIR", "TEMP", "TMP", "XDG_CACHE_HOME"),
    *("PYTHON*", "VIRTUAL_ENV", "CONDA_PREFIX", "LD_LIBRARY_PATH", "LD_PRELOAD", "DYLD_*"),
    *("OMP_*", "MKL_*", "OPENBLAS_*", "KMP_*", "CUDA_*", "NVIDIA_*", "HIP_*", "ROCR_*", "PYTORCH_*", "TRITON_*"),
    *("HF_HOME", "HF_HUB_*", "HF_ENDPOINT", "HF_*_CACHE", "HF_*_OFFLINE", "HUGGINGFACE_HUB_CACHE", "TRANSFORMERS_*"),
    *("TOKENIZERS_PARALLELISM", "TORCH_HOME", "SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"),
)
"""Names, `*` for anything. No token, no key, no proxy (whose address may hold a password)."""
_SECRET = ("*TOKEN", "*SECRET*", "*PASSWORD*", "*_KEY")
_ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
_NAME = re.compile(r"[A-Za-z_]\w*")
_SHORTEST = 4  # characters of a name that a message is searched for


def parse_names(text: str) -> tuple[str, ...]:
    """`NAME,NAME` as names; `none` is none."""
    if text.strip().lower() == "none":
        return ()
    return tuple(name.strip() for name in text.split(",") if name.strip())


def check_variable_names(names: Sequence[str], option: str) -> None:
    """Raises ConfigError for what is no name of a variable, such as `NAME=value`."""
    if isinstance(names, str):
        raise ConfigError(f"{option} is a list of names, not the text {names!r}: write ({names!r},)")
    for name in names:
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise ConfigError(f"{option}: {name!r} is no name of an environment variable; give names, NAME,NAME")


def filter_environment(environment: Mapping[str, str], names: Sequence[str]) -> dict[str, str]:
    """What a worker gets of this environment: computing with one thread, as there is a worker for every other."""
    return {name: value for name, value in environment.items() if name in names or _is_given(name)} | _ONE_THREAD


def explain_missing_variable(message: str, names: Sequence[str]) -> str:
    """The way out, where a message names a variable that is set and that workers do not get; else ""."""
    words = set(_NAME.findall(message))
    for name in sorted(words & os.environ.keys()):
        if len(name) >= _SHORTEST and name not in names and not _is_given(name):
            return f"; reward workers do not get the environment variable {name}: --rewards.environment {name} gives it"
    return ""


def _is_given(name: str) -> bool:
    secret = any(fnmatchcase(name, pattern) for pattern in _SECRET)
    return not secret and any(fnmatchcase(name, pattern) for pattern in PASSED_VARIABLES)
