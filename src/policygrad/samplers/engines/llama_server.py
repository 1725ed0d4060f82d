"""A program that runs a native llama.cpp server on the newest version in a folder. It needs only the standard library and
`xllamacpp`.

llama.cpp loads weights only when it starts, so every version has its own process: `watch` stops one and starts the next at the same
address when the folder names another version, or when the server has died.

    python llama_server.py watch --folder DIR --port PORT
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

CURRENT_FILE, MODEL_FILE = "current.json", "model.gguf"
_POLL_SECONDS = 0.02  # seconds between reads of the folder
_MAX_FAILURES = 3  # exits of a server with an error, on one version, after which it is not started again
_RESTART_SECONDS = 0.5  # seconds before a server that died is started again
KEY_VARIABLE = "SAMPLER_API_KEY"
"""What it holds, clients have to send as a bearer token; without it, none is asked for."""
_SERVE_OPTIONS = ("host", "port", "max_concurrency", "context_length", "threads", "device_layers")


def main(args: list[str]) -> int:
    """Run until terminated, or until the parent process is gone."""
    parser = argparse.ArgumentParser(description="a llama.cpp server that follows a folder of weights")
    parser.add_argument("mode", choices=("watch", "serve"))
    parser.add_argument("--folder", type=Path, help="watch: where versions are published, the run's sampler.folder")
    parser.add_argument("--file", help="serve: the GGUF file")
    parser.add_argument("--name", help="serve: the model's name")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8080)
    parser.add_argument("--max-concurrency", type=int, default=16, help="maximum concurrent requests")
    parser.add_argument("--context-length", type=int, default=2048, help="maximum tokens of prompt and completion")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument(
        "--device-layers", type=int, default=-1, help="layers on a GPU, if the build supports one; -1 = all"
    )
    parser.add_argument("--parent", type=int, default=0, help="exit when this process is gone")
    options = parser.parse_args(args)
    return _serve(options) if options.mode == "serve" else _watch(options)


def _watch(options: argparse.Namespace) -> int:
    name, child, started, failures = "", None, 0.0, 0
    try:
        while _is_parent_alive(options.parent):
            current = read_current_name(options.folder)
            died = child is not None and child.poll() is not None
            failures = failures if current == name else 0
            if current and (current != name or (died and time.monotonic() - started > _RESTART_SECONDS)):
                failures += child is not None and died and child.returncode > 0
                if failures == _MAX_FAILURES:
                    return 1
                _kill(child)
                name, started = current, time.monotonic()
                serve = [sys.executable, "-P", __file__, "serve", f"--file={options.folder / name / MODEL_FILE}"]
                argv = [f"--{key.replace('_', '-')}={getattr(options, key)}" for key in _SERVE_OPTIONS]
                # the same server, with the variables that this process was given
                child = subprocess.Popen([*serve, f"--name={name}", f"--parent={os.getpid()}", *argv])
            time.sleep(_POLL_SECONDS)
    finally:
        _kill(child)
    return 0


def read_current_name(folder: Path) -> str:
    """Return the name of the version to serve; empty if there is none yet."""
    try:
        return str(json.loads((folder / CURRENT_FILE).read_text(encoding="utf-8"))["name"])
    except (OSError, ValueError, KeyError):
        return ""


def _kill(child: subprocess.Popen[bytes] | None) -> None:
    if child is not None and child.poll() is None:
        child.kill()  # it has nothing to write, and a graceful exit would wait for connections
        child.wait()


def _is_parent_alive(parent: int) -> bool:
    return not parent or os.getppid() == parent


def _serve(options: argparse.Namespace) -> int:
    import xllamacpp

    p = xllamacpp.CommonParams()
    p.model.path, p.model_alias = options.file, {options.name}
    p.hostnames, p.port = [options.host], options.port
    p.api_keys = list(filter(None, [os.environ.get(KEY_VARIABLE)]))
    # exact to float32: no half precision in the cache, no flash attention
    p.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    p.cache_type_k = p.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    p.n_parallel, p.n_ctx = options.max_concurrency, options.max_concurrency * options.context_length
    p.n_gpu_layers = options.device_layers
    p.cpuparams.n_threads = p.cpuparams_batch.n_threads = options.threads
    p.n_threads_http = options.max_concurrency + 2
    p.cache_ram_mib, p.warmup, p.fit_params, p.ui, p.verbosity = 0, False, False, False, -1
    try:
        server = xllamacpp.Server(p)
    except RuntimeError as error:
        print(f"llama.cpp does not start with {options.file} at port {options.port}: {error}", file=sys.stderr)
        return 1
    print(f"{server.listening_address} serves {options.name}", flush=True)
    while _is_parent_alive(options.parent):
        time.sleep(_RESTART_SECONDS)
    os._exit(0)  # the server's threads wait for connections to close


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(main(sys.argv[1:]))
