"""A real vLLM server, started as `policygrad engine vllm` says: for the tests and measurements that need one."""

from __future__ import annotations

import os
import shlex
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from policygrad.commands.engine import EngineOptions, build_launch_command

START = 300.0
"""Seconds that a server may take to start."""


@contextmanager
def serving(
    venv: str,
    folder: Path,
    without: tuple[str, ...] = (),
    max_concurrency: int = 16,
    weight_transport: str = "folder",
    lora: str = "",
) -> Iterator[str]:
    """Serve the embedded model during the context and yield the server's address. VLLM_ARGS in the environment are further options.

    Args:
        venv: A virtual environment with bin/vllm.
        folder: For its log.
        without: Options to leave out, with their values.
        lora: The adapters that it is sent; "" = full weights.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = EngineOptions(
        "vllm",
        model="tiny",
        port=port,
        context_length=512,
        max_concurrency=max_concurrency,
        weight_transport=weight_transport,
        lora=lora,
    )
    environment, argv = build_launch_command(options)
    for option in without:
        at = argv.index(option)
        argv = [*argv[:at], *argv[at + 2 :]]
    argv = [f"{venv}/bin/{argv[0]}", *argv[1:], "--enforce-eager", *shlex.split(os.environ.get("VLLM_ARGS", ""))]
    quiet = {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    with (folder / "vllm.log").open("wb") as log:
        process = subprocess.Popen(argv, env=clean | quiet | environment, stdout=log, stderr=log)
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait()
