"""A llama.cpp server of our own on this machine, which ends with us and is started again where it dies."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

from policygrad.errors import EngineError, install_command
from policygrad.samplers import llama_server
from policygrad.weight_sync.folder import LOG


class LlamaProcess:
    """`llama_server.py watch` in a process of its own, at a port that was free."""

    def __init__(self, folder: Path, *, parallel: int, context: int, threads: int) -> None:
        """Raises EngineError where the package xllamacpp is missing."""
        if find_spec("xllamacpp") is None:
            raise EngineError(
                "without --sampler.urls a llama.cpp server is started here, which the package xllamacpp brings along: "
                f"{install_command('llama-cpp')}"
            )
        self.folder, self.port = folder, _free_port()
        numbers = {
            "port": self.port,
            "parallel": parallel,
            "context": context,
            "threads": threads,
            "parent": os.getpid(),
        }
        self.words = [f"--{key}={value}" for key, value in numbers.items()]
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def ensure(self) -> None:
        """Starts it, unless it runs."""
        if self.process is not None and self.process.poll() is None:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / LOG).open("ab") as log:
            self.process = subprocess.Popen(
                [
                    sys.executable,
                    "-P",
                    llama_server.__file__,
                    "watch",
                    f"--folder={self.folder.resolve()}",
                    *self.words,
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C is for the run, which goes on to its next checkpoint
            )

    def said(self) -> str:
        """Its last words; empty when it has said nothing."""
        try:
            lines = (self.folder / LOG).read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            return ""
        return next((line.strip() for line in reversed(lines) if line.strip()), "")

    def end(self) -> None:
        """With the server that it watches, which sees it go."""
        if self.process is not None and self.process.poll() is None:
            self.process.terminate()
            self.process.wait()
        self.process = None


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])
