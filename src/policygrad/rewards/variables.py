"""Which environment variables a reward worker gets: those that Python, its caches and its devices need, and those named."""

import os
import re
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

from policygrad.errors import ConfigError

GIVEN = (
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


def listed(text: str) -> tuple[str, ...]:
    """`NAME,NAME` as names; `none` is none."""
    if text.strip().lower() == "none":
        return ()
    return tuple(name.strip() for name in text.split(",") if name.strip())


def check_names(names: Sequence[str], option: str) -> None:
    """Raises ConfigError for what is no name of a variable, such as `NAME=value`."""
    if isinstance(names, str):
        raise ConfigError(f"{option} is a list of names, not the text {names!r}: write ({names!r},)")
    for name in names:
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise ConfigError(f"{option}: {name!r} is no name of an environment variable; give names, NAME,NAME")


def chosen(environment: Mapping[str, str], names: Sequence[str]) -> dict[str, str]:
    """What a worker gets of this environment: computing with one thread, as there is a worker for every other."""
    return {name: value for name, value in environment.items() if name in names or _is_given(name)} | _ONE_THREAD


def hint(message: str, names: Sequence[str]) -> str:
    """The way out, where a message names a variable that is set and that workers do not get; else ""."""
    words = set(_NAME.findall(message))
    for name in sorted(words & os.environ.keys()):
        if len(name) >= _SHORTEST and name not in names and not _is_given(name):
            return f"; reward workers do not get the environment variable {name}: --rewards.environment {name} gives it"
    return ""


def _is_given(name: str) -> bool:
    secret = any(fnmatchcase(name, pattern) for pattern in _SECRET)
    return not secret and any(fnmatchcase(name, pattern) for pattern in GIVEN)
