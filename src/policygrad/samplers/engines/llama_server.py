"""A native llama.cpp server that follows a folder of versions: a program of its own, of Python's standard library and `xllamacpp`.

llama.cpp loads weights only when it starts, so that every version has a process of its own: `watch` ends one and starts the next
under the same address whenever the folder names another version, and when the one that serves has died.

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

CURRENT, FILE = "current.json", "model.gguf"
_LOOK = 0.02
"""Seconds between two looks at the folder."""
_AGAIN = 0.5
"""Seconds before what has died is started again."""
SERVED = ("host", "port", "parallel", "context", "threads", "device_layers")


def main(args: list[str]) -> int:
    """Until it is ended, or whoever started it is gone."""
    options = _parser().parse_args(args)
    return _serve(options) if options.what == "serve" else _watch(options)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="a llama.cpp server that follows a folder of weights")
    parser.add_argument("what", choices=("watch", "serve"))
    parser.add_argument("--folder", type=Path, help="where versions are published: the run's sampler.folder")
    parser.add_argument("--file", help="serve: the GGUF file")
    parser.add_argument("--name", help="serve: what the server calls its model")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8080)
    parser.add_argument("--parallel", type=int, default=16, help="requests at a time")
    parser.add_argument("--context", type=int, default=2048, help="tokens of a prompt and its completion")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument(
        "--device-layers", type=int, default=-1, help="layers on a GPU, where the build has one; -1 = all"
    )
    parser.add_argument("--parent", type=int, default=0, help="ends when this process does")
    return parser


def _watch(options: argparse.Namespace) -> int:
    name, child, started = "", None, 0.0
    try:
        while _alive(options.parent):
            wanted = read_current_name(options.folder)
            died = child is not None and child.poll() is not None
            if wanted and (wanted != name or (died and time.monotonic() - started > _AGAIN)):
                _end(child)
                name, started = wanted, time.monotonic()
                child = _started(options, name)
            time.sleep(_LOOK)
    finally:
        _end(child)
    return 0


def read_current_name(folder: Path) -> str:
    """The name of the version to serve; empty before there is one."""
    try:
        return str(json.loads((folder / CURRENT).read_text(encoding="utf-8"))["name"])
    except (OSError, ValueError, KeyError):
        return ""


def _started(options: argparse.Namespace, name: str) -> subprocess.Popen[bytes]:
    words = [f"--{key.replace('_', '-')}={getattr(options, key)}" for key in SERVED]
    file = f"--file={options.folder / name / FILE}"
    serve = [sys.executable, "-P", __file__, "serve", file, f"--name={name}", f"--parent={os.getpid()}"]
    return subprocess.Popen([*serve, *words])


def _end(child: subprocess.Popen[bytes] | None) -> None:
    if child is not None and child.poll() is None:
        child.kill()  # it holds nothing that has to be written; its own way of ending waits for connections
        child.wait()


def _alive(parent: int) -> bool:
    """Whether the process that asked for this one is still there."""
    return not parent or os.getppid() == parent


def _serve(options: argparse.Namespace) -> int:
    import xllamacpp

    p = xllamacpp.CommonParams()
    p.model.path, p.model_alias = options.file, {options.name}
    p.hostnames, p.port = [options.host], options.port
    # as exact as float32 is: no half precision in the cache, and attention as it is written
    p.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    p.cache_type_k = p.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    p.n_parallel, p.n_ctx = options.parallel, options.parallel * options.context
    p.n_gpu_layers = options.device_layers
    p.cpuparams.n_threads = p.cpuparams_batch.n_threads = options.threads
    p.n_threads_http = options.parallel + 2
    p.cache_ram_mib, p.warmup, p.fit_params, p.ui, p.verbosity = 0, False, False, False, -1
    try:
        server = xllamacpp.Server(p)
    except RuntimeError as error:
        print(f"llama.cpp does not start with {options.file} at port {options.port}: {error}", file=sys.stderr)
        return 1
    print(f"{server.listening_address} serves {options.name}", flush=True)
    while _alive(options.parent):
        time.sleep(_AGAIN)
    os._exit(0)  # the server's threads wait for connections to end


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(main(sys.argv[1:]))
