"""Limits of a reward worker: its memory, its rank when the machine runs out of memory, and its environment variables."""

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
MAX_OOM_SCORE = 1000  # the end of the kernel's scale for oom_score_adj


def parse_size(text: str, option: str = "memory") -> int | None:
    """Parse `2GiB`, `500MB` or `2` (GiB) to bytes; `none` is None.

    Raises:
        ConfigError: not a size, or less than 1 MiB.
    """
    if not isinstance(text, str):
        raise ConfigError(f"{option} is a text such as '4GiB', not {text!r}")
    if text.strip().lower() == "none":
        return None
    match = _SIZE.fullmatch(text.strip())
    unit = _UNITS.get(match.group(2).lower()) if match else None
    if not match or not unit:
        raise ConfigError(f"{option} {text!r} is not a size: write 4GiB, 500MB, 4 (GiB), or none for no limit")
    size = float(match.group(1)) * unit
    if not MIN_MEMORY <= size < 1 << 62:
        raise ConfigError(f"{option} {text!r} is not between 1 MiB and 4 EiB: write 4GiB, or none for no limit")
    return int(size)


def format_size(count: int) -> str:
    """Format bytes as 4 GiB or 64 MiB."""
    unit, factor = ("GiB", 1 << 30) if count >= 1000 << 20 else ("MiB", 1 << 20)
    return f"{count / factor:.3g} {unit}"


def raise_oom_score() -> None:
    """On Linux, make the kernel kill this process and its children before any other when memory runs out."""
    with contextlib.suppress(OSError):  # not Linux, or no such file in a container: the memory limit holds all the same
        Path("/proc/self/oom_score_adj").write_text(str(MAX_OOM_SCORE))


def get_resident_bytes() -> int:
    """Return the memory that this process occupies; 0 where it is unknown (elsewhere than on Linux)."""
    return _read_statm(1)


class MemoryLimit:
    """Limits this process to `count` bytes more than it has now; None = no limit. Only Linux enforces it.

    The kernel refuses what exceeds it, and Python raises MemoryError. RLIMIT_DATA counts private writable memory, not address space
    that is only reserved, as CUDA does. A child process has a limit of its own, of the same size.
    """

    def __init__(self, count: int | None) -> None:
        self._start, self._count = get_resident_bytes(), count
        if count is None or not sys.platform.startswith("linux"):
            return
        import resource

        limit = _read_statm(5) + count
        hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
        if hard == resource.RLIM_INFINITY or limit < hard:
            resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))

    def hint(self, error: BaseException) -> str:
        """Return the remedy for an error that this limit may have caused; else ""."""
        try:
            text = str(error)
        except Exception:  # an error whose text cannot be shown
            text = ""
        no_memory = isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM)
        if self._count is None or not (no_memory or "can't allocate memory" in text):  # torch has no class for it
            return ""
        return f"; a worker may use {format_size(self._count)} beyond what it has after loading (--rewards.memory)"

    @property
    def is_half_used(self) -> bool:
        """True once the process has grown by more than half of its limit: what it retains between calls will become too much."""
        return self._count is not None and get_resident_bytes() - self._start > self._count // 2


def _read_statm(field: int) -> int:
    """Return a field of /proc/self/statm in bytes: 1 = resident, 5 = data and stack."""
    try:
        return int(Path("/proc/self/statm").read_bytes().split()[field]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


# Environment variables of a reward worker: those that Python, its caches and its devices need, and those that the user names.

# Name patterns. No token, no key, no proxy (whose address may hold a password).
PASSED_VARIABLES = (
    *("PATH", "HOME", "USER", "LOGNAME", "LANG", "LANGUAGE", "LC_*", "TZ", "TMPDIR", "TEMP", "TMP", "XDG_CACHE_HOME"),
    *("PYTHON*", "VIRTUAL_ENV", "CONDA_PREFIX", "LD_LIBRARY_PATH", "LD_PRELOAD", "DYLD_*"),
    *("OMP_*", "MKL_*", "OPENBLAS_*", "KMP_*", "CUDA_*", "NVIDIA_*", "HIP_*", "ROCR_*", "PYTORCH_*", "TRITON_*"),
    *("HF_HOME", "HF_HUB_*", "HF_ENDPOINT", "HF_*_CACHE", "HF_*_OFFLINE", "HUGGINGFACE_HUB_CACHE", "TRANSFORMERS_*"),
    *("TOKENIZERS_PARALLELISM", "TORCH_HOME", "SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"),
)
_SECRETS = ("*TOKEN", "*SECRET*", "*PASSWORD*", "*_KEY")
_ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
_NAME = re.compile(r"[A-Za-z_]\w*")
_MIN_NAME_LENGTH = 4  # of a variable that is searched for in messages


def parse_names(text: str) -> tuple[str, ...]:
    """Parse `NAME,NAME`; `none` is no name."""
    if text.strip().lower() == "none":
        return ()
    return tuple(name.strip() for name in text.split(",") if name.strip())


def check_variable_names(names: Sequence[str], option: str) -> None:
    """Raise ConfigError for anything that cannot name a variable, such as `NAME=value`."""
    if isinstance(names, str):
        raise ConfigError(f"{option} is a list of names, not the text {names!r}: write ({names!r},)")
    for name in names:
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise ConfigError(f"{option}: {name!r} is not the name of an environment variable; give names, NAME,NAME")


def filter_environment(environment: Mapping[str, str], names: Sequence[str]) -> dict[str, str]:
    """Return the variables that a worker gets. It computes with one thread, as there is a worker for every other."""
    return {name: value for name, value in environment.items() if name in names or _is_passed(name)} | _ONE_THREAD


def explain_missing_variable(message: str, names: Sequence[str]) -> str:
    """Return the remedy where a message names a variable that is set here and not passed to workers; else ""."""
    mentioned = set(_NAME.findall(message))
    for name in sorted(mentioned & os.environ.keys()):
        if len(name) >= _MIN_NAME_LENGTH and name not in names and not _is_passed(name):
            return f"; reward workers do not get the environment variable {name}: add --rewards.environment {name}"
    return ""


def _is_passed(name: str) -> bool:
    secret = any(fnmatchcase(name, pattern) for pattern in _SECRETS)
    return not secret and any(fnmatchcase(name, pattern) for pattern in PASSED_VARIABLES)
