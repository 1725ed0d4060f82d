"""A real vLLM server, started as `policygrad engine vllm` says: for the tests and measurements that need one."""

from __future__ import annotations

import os
import shlex
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from policygrad.commands.engine import EngineOptions, build_launch_command

START = 300.0
"""Seconds that a server may take to start."""


@contextmanager
def serving(
    venv: str,
    folder: Path,
    without: tuple[str, ...] = (),
    parallel: int = 16,
    transfer: Literal["folder", "nccl"] = "folder",
    lora: str = "",
) -> Iterator[str]:
    """Its address, while it serves the embedded model. venv: the virtual environment that has bin/vllm. folder: for its log.
    without: options that are left away, with their value. transfer: how it gets weights. lora: of the adapters that it is sent;
    "" = whole weights. VLLM_ARGS in the environment are further words."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    told = EngineOptions(
        "vllm",
        model="tiny",
        port=port,
        context_length=512,
        max_concurrency=parallel,
        weight_transport=transfer,
        lora=lora,
    )
    environment, words = build_launch_command(told)
    for option in without:
        at = words.index(option)
        words = [*words[:at], *words[at + 2 :]]
    words = [f"{venv}/bin/{words[0]}", *words[1:], "--enforce-eager", *shlex.split(os.environ.get("VLLM_ARGS", ""))]
    quiet = {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    with (folder / "vllm.log").open("wb") as log:
        process = subprocess.Popen(words, env=clean | quiet | environment, stdout=log, stderr=log)
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait()
