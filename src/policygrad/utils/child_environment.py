"""Environment variables of child processes, one rule for all of them: those that Python, its caches and its devices need, for an
engine's server also those that the engine names, and those that the user names.

Processes that are policygrad itself, ranks and the runs of a comparison, inherit everything.
"""

import os
import re
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

from policygrad.errors import ConfigError

# Name patterns. No token, no key, no proxy (whose address may hold a password).
PASSED_VARIABLES = (
    *("PATH", "HOME", "USER", "LOGNAME", "LANG", "LANGUAGE", "LC_*", "TZ", "TMPDIR", "TEMP", "TMP", "XDG_CACHE_HOME"),
    *("PYTHON*", "VIRTUAL_ENV", "CONDA_PREFIX", "LD_LIBRARY_PATH", "LD_PRELOAD", "DYLD_*"),
    *("OMP_*", "MKL_*", "OPENBLAS_*", "KMP_*", "CUDA_*", "NVIDIA_*", "HIP_*", "ROCR_*", "PYTORCH_*", "TRITON_*"),
    *("HF_HOME", "HF_HUB_*", "HF_ENDPOINT", "HF_*_CACHE", "HF_*_OFFLINE", "HUGGINGFACE_HUB_CACHE", "TRANSFORMERS_*"),
    *("TOKENIZERS_PARALLELISM", "TORCH_HOME", "SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"),
)
DEVICE_VARIABLES = (
    *("CUBLAS*", "CUDNN_*", "CUDAHOSTCXX", "NVCC_*", "NCCL_*", "NVSHMEM_*", "HSA_*", "ROCM_*", "RCCL_*", "MIOPEN_*"),
    *("AMD_*", "GPU_*", "ZE_*", "SYCL_*", "ONEAPI_*", "CCL_*", "ASCEND_*", "HCCL_*", "GLOO_*", "UCX_*", "FI_*"),
    *("CC", "CXX", "CFLAGS", "CXXFLAGS", "LDFLAGS", "CPATH", "C_INCLUDE_PATH", "CPLUS_INCLUDE_PATH", "LIBRARY_PATH"),
    *("LD_*", "CCACHE_*", "CMAKE_*", "MAX_JOBS", "MALLOC_*", "JEMALLOC_*", "TCMALLOC_*", "GLIBC_TUNABLES"),
    *("DNNL_*", "ONEDNN_*", "GOMP_*", "NUMEXPR_*", "NUMBA_*", "RAYON_*", "CONDA_*", "XDG_*", "TERM"),
)
"""What a server needs besides: GPU libraries, compilers, the loader, memory allocators and threads."""
ENGINE_VARIABLES = (
    *DEVICE_VARIABLES,
    *("HF_*", "HF_TOKEN", "HUGGING_FACE_*", "HUGGING_FACE_HUB_TOKEN", "HUGGINGFACE_*", "MODELSCOPE_*", "SAFETENSORS_*"),
    *("TORCH_*", "TORCHINDUCTOR_*", "TORCHDYNAMO_*", "TORCHAO_*", "FLASHINFER_*", "FLASH_ATTENTION_*", "TVM_*"),
    *("TILELANG_*", "CUTE_DSL_*", "DG_*", "RAY_*", "PROMETHEUS_MULTIPROC_DIR", "*_PROXY", "*_proxy"),
    *("NO_COLOR", "DO_NOT_TRACK"),
)
"""What a server on torch needs that may download its model, from behind a proxy and as the hub's user. TORCHELASTIC_* is left out:
under torchrun it makes a server's processes look for the run's own rendezvous."""
_SECRETS = ("*TOKEN", "*SECRET*", "*PASSWORD*", "*_KEY")
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
"""For a process beside many others that compute."""
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
    """Return the variables that a child process gets: those of the list, and those of these names.

    Args:
        names: Names, or patterns such as NCCL_*. A pattern passes no secret: a token or a key has to be named in full.
    """
    return {name: value for name, value in environment.items() if _is_passed(name, names)}


def explain_missing_variable(message: str, names: Sequence[str], children: str, option: str) -> str:
    """Return the remedy where a message names a variable that is set here and not passed to these child processes; else ""."""
    mentioned = set(_NAME.findall(message))
    for name in sorted(mentioned & os.environ.keys()):
        if len(name) >= _MIN_NAME_LENGTH and not _is_passed(name, names):
            return f"; {children} do not get the environment variable {name}: add {option} {name}"
    return ""


def is_secret(name: str) -> bool:
    """Return True for a variable that is named like a token, a key or a password."""
    return any(fnmatchcase(name, pattern) for pattern in _SECRETS)


def _is_passed(name: str, names: Sequence[str]) -> bool:
    return name in names or (
        not is_secret(name) and any(fnmatchcase(name, pattern) for pattern in (*PASSED_VARIABLES, *names))
    )
