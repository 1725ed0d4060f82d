"""A Ray cluster of this machine with two CPUs, and who kills one of its actors in the midst of what it does."""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

MARK = "POLICYGRAD_RAY_TEST"
"""In the environment of every process of the cluster, so that no other cluster's is ever killed."""
START, TRIES = 120, 5
"""Seconds, and how often."""
TIMEOUT = 300
"""Seconds that a run may take on a busy machine."""
if find_spec("ray"):  # which reads it once per process, when it is imported
    os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}


@dataclass(frozen=True)
class RayCluster:
    """Where it is."""

    port: int
    client_port: int
    dashboard_port: int
    mark: str

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def client(self) -> str:
        return f"ray://127.0.0.1:{self.client_port}"

    @property
    def dashboard(self) -> str:
        return f"http://127.0.0.1:{self.dashboard_port}"

    def processes(self, title: str) -> list[int]:
        """Those of the cluster whose title begins so: ray::CLASS while idle, ray::CLASS.METHOD while at work."""
        result = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with suppress(OSError):
                    output = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                    if output.startswith(title) and f"{MARK}={self.mark}".encode() in (entry / "environ").read_bytes():
                        result.append(int(entry.name))
        return result

    def empty(self) -> bool:
        """Whether no actor of a run is there."""
        titles = ("TrainerActor", "LearnerActor", "SamplerActor", "RewardActor", "EnvironmentActor")
        return not any(self.processes(f"ray::{title}") for title in titles)

    @staticmethod
    def comes(true: Callable[[], bool]) -> bool:
        """Whether it is so, within the time that a busy machine takes."""
        waiting = threading.Event()
        return any(true() or waiting.wait(0.1) for _ in range(TIMEOUT * 10))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def ray_cluster(log: Path, cpus: int = 2, dashboard: bool = False) -> Iterator[RayCluster]:
    """As `ray start --head` makes it, until the context ends. dashboard: it has one, and takes jobs."""
    result = RayCluster(free_port(), free_port(), free_port(), secrets.token_hex(8))
    ray = Path(sys.executable).with_name("ray")
    options = {
        "--port": result.port,
        "--ray-client-server-port": result.client_port,
        "--num-cpus": cpus,
        "--node-ip-address": "127.0.0.1",
        "--include-dashboard": str(dashboard).lower(),
        "--dashboard-port": result.dashboard_port,
    }
    argv = [str(ray), "start", "--head", "--block", *(f"{name}={value}" for name, value in options.items())]
    environment = os.environ | {MARK: result.mark, "RAY_worker_niceness": "0"}  # 15 stands still on a busy machine
    for attempt in range(TRIES):  # Ray gives itself half a minute, which a busy machine may exceed
        with log.open("w") as out:
            head = subprocess.Popen(argv, stdout=out, stderr=subprocess.STDOUT, env=environment, start_new_session=True)
        ports = (result.port, result.client_port, *([result.dashboard_port] if dashboard else []))
        if all(_listens(head, port) for port in ports):
            break
        head.terminate()
        head.wait()
        assert attempt + 1 < TRIES, log.read_text()
    try:
        yield result
    finally:
        head.terminate()
        head.wait()


def _listens(head: subprocess.Popen[bytes], port: int) -> bool:
    """Whether it comes to listen there, instead of ending."""
    waiting = threading.Event()
    for _ in range(START * 10):
        with suppress(OSError):
            socket.create_connection(("127.0.0.1", port), 1).close()
            return head.poll() is None
        if head.poll() is not None:
            return False
        waiting.wait(0.1)
    return False


class Killer:
    """Kills an actor, as the kernel would, at the first sight of it at `title` after the run's step `after`; once."""

    def __init__(self, cluster: RayCluster, title: str, metrics: Path, after: int) -> None:
        self._cluster, self._title, self._metrics, self._after = cluster, title, metrics, after
        self.killed: int | None = None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Killer:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(0.001):
            with suppress(OSError):
                if self._metrics.read_bytes().count(b"\n") < self._after:
                    continue
                for process in self._cluster.processes(self._title):
                    os.kill(process, signal.SIGKILL)
                    self.killed = process
                    return
