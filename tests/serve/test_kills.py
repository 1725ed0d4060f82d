"""A server that is killed, and started again, goes on where it was: scripts/stress_serve.py with one kill."""

from __future__ import annotations

import json
import multiprocessing
import socket
import time
import urllib.request
from multiprocessing.synchronize import Event
from pathlib import Path

import pytest

from doubles.forked import Forked
from policygrad import cli

pytest.importorskip("tinker", reason="the extra `serve`")

import policygrad.serve.app  # noqa: F401  # here, and not again in every server below
from stress_serve import compare, stress, train


class Server:
    """`policygrad serve` in a process that is forked from this one."""

    def __init__(self, forked: Forked, model: Path, folder: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.forked, self.folder, self.url = forked, folder, f"http://127.0.0.1:{self.port}"
        self.words = ["serve", "--plain", "--port", str(self.port), "--folder", str(folder), "--model", f"tiny={model}"]
        self.start()

    def start(self) -> None:
        with self.folder.with_suffix(".log").open("ab") as log:
            self.process = self.forked.start(cli.main, [*self.words, "--replay-seconds", "1"], stdout=log.fileno())
        while True:
            assert self.process.is_alive(), self.folder.with_suffix(".log").read_text()
            try:
                with urllib.request.urlopen(f"{self.url}/api/v1/healthz", timeout=60):
                    return
            except OSError:
                time.sleep(0.02)

    def kill(self) -> None:
        self.process.kill()
        self.process.join()


def train_at(first: str, second: str, is_over: Event, results: Path) -> None:
    """Train with the server at `first` until it is over, then as long with the one at `second`."""
    disturbed = train(first, lambda: not is_over.is_set(), 4)
    results.write_text(json.dumps([disturbed, train(second, lambda: False, int(str(disturbed["steps"])))]))


def test_a_killed_server_goes_on_where_it_was(forked: Forked, random_model: Path, tmp_path: Path) -> None:
    """While a client trains, after the first checkpoint: all that was answered is kept, bit for bit what it is undisturbed."""
    disturbed, quiet = (Server(forked, random_model, tmp_path / name) for name in ("disturbed", "quiet"))
    is_over, results = multiprocessing.get_context("fork").Event(), tmp_path / "results.json"
    client = forked.start(train_at, disturbed.url, quiet.url, is_over, results)
    while not any((tmp_path / "disturbed").rglob("step-00003")):
        assert client.is_alive()
        time.sleep(0.01)
    disturbed.kill()
    disturbed.start()
    is_over.set()
    client.join()
    found = compare(disturbed.folder, quiet.folder, *json.loads(results.read_text()))
    assert int(str(found["updates"])) >= 4
    assert int(str(found["checkpoints"])) >= 1


@pytest.mark.full
def test_the_stress_of_kills_finds_nothing_lost(tmp_path: Path) -> None:
    """At a random moment, and the server starts as a user starts it."""
    result = stress(1, 0, tmp_path)
    assert result["kills"] == 1
    assert int(str(result["updates"])) >= 3
    assert int(str(result["checkpoints"])) >= 1
