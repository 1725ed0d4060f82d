"""The processes that rank 0 starts: they end with it, import nothing from the working directory, and are limited in number."""

from __future__ import annotations

import ipaddress
import os
import select
import socket
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

import policygrad as pg
from doubles.ranked import agree, learned, pair, values
from policygrad.errors import ConfigError
from policygrad.learners.fsdp import processes
from policygrad.learners.fsdp.processes import (
    LOCALHOST,
    MAX_LOCAL_PROCESSES,
    LocalWorker,
    WorkerGroup,
    WorkerLauncher,
    check_devices,
    kill_workers,
)
from policygrad.learners.fsdp.watchdog import ControlStore
from policygrad.utils.rendezvous import GLOO_INTERFACE, serve_store

KEY = b"k" * 32
RANK_0 = """
import sys
from policygrad.learners.fsdp.processes import LocalWorker
print(LocalWorker("127.0.0.1", int(sys.argv[1]), 1, 2, b"k" * 32).pid, flush=True)
sys.stdin.read()
"""


@pytest.mark.full
@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="only Linux reports the end of another process's child")
def test_a_rank_exits_with_rank_0_before_connecting() -> None:
    """It tries to connect for minutes to a port where nothing answers any more."""
    with socket.socket() as closed:
        closed.bind((LOCALHOST, 0))
        command = [sys.executable, "-c", RANK_0, str(closed.getsockname()[1])]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as rank_0:
            assert rank_0.stdout is not None
            worker = os.pidfd_open(int(rank_0.stdout.readline()))
            try:
                assert not select.select([worker], [], [], 0)[0]
                rank_0.kill()
                assert select.select([worker], [], [], 120)[0], "it outlives rank 0"
            finally:
                os.close(worker)


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="only Linux lists its sockets there")
def test_processes_of_one_machine_listen_on_loopback_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(GLOO_INTERFACE, "eth7")  # as for runs on several machines
    ranks = WorkerGroup.start(2)
    try:
        addresses = [listening_addresses(pid) for pid in (os.getpid(), ranks._processes[0].pid)]  # type: ignore[attr-defined]
    finally:
        ranks.close(in_sync=False)
    assert all(addresses)
    assert {address for of_process in addresses for address in of_process} <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}


def listening_addresses(pid: int) -> set[str]:
    """Return the addresses that a process listens at."""
    links = {os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir() if link.is_symlink()}
    addresses = set[str]()
    for table in ("tcp", "tcp6"):
        for line in Path("/proc/net", table).read_text().splitlines()[1:]:
            local, state, inode = (fields := line.split())[1], fields[3], fields[9]
            if state == "0A" and f"socket:[{inode}]" in links:
                words = bytes.fromhex(local.partition(":")[0])  # in the machine's order of bytes, four at a time
                octets = b"".join(words[i : i + 4][::-1] for i in range(0, len(words), 4))
                addresses.add(str(ipaddress.ip_address(octets)))
    return addresses


def test_a_store_is_served_at_the_address_that_was_named() -> None:
    store = serve_store("127.0.0.2", timedelta(seconds=5))  # every address of 127.0.0.0/8 is this machine's
    with pytest.raises(ConnectionRefusedError), socket.create_connection(("127.0.0.3", store.port), 5):
        pass
    with socket.create_connection(("127.0.0.2", store.port), 5):
        pass


def test_values_that_no_rank_has_signed_are_absent() -> None:
    served = dist.HashStore()
    ranks, stranger = (ControlStore(served, key) for key in (b"k" * 32, b"s" * 32))
    ranks.set("heartbeat 1", "alive")
    assert ranks.get("heartbeat 1") == "alive"
    stranger.set("exit 1", "")
    served.set("exit 2", "no base64 \N{BROKEN BAR}")
    served.set("exit 3", "")
    served.set("exit 4", served.get("heartbeat 1"))  # a value of the ranks' own, under another name
    for rank in range(1, 5):
        assert not ranks.contains(f"exit {rank}")
        assert ranks.get(f"exit {rank}") is None
    with pytest.raises(KeyError):
        ranks.pop("exit 1")
    assert ranks.pop("heartbeat 1") == "alive"
    assert not ranks.contains("heartbeat 1")


@pytest.mark.full
def test_a_rank_does_not_import_modules_of_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("json", "os", "tempfile", "torch", "policygrad"):
        (tmp_path / f"{name}.py").write_text(f"import sys; sys.stderr.write('{name} of the folder'); sys.exit(7)\n")
    monkeypatch.chdir(tmp_path)
    with socket.socket() as rank_0:
        rank_0.bind((LOCALHOST, 0))
        rank_0.listen()
        rank = LocalWorker(LOCALHOST, rank_0.getsockname()[1], 1, 2, KEY)
        try:
            while not select.select([rank_0], [], [], 0.1)[0]:  # it connects once its imports are done
                assert rank.poll() is None, "it imported a module of the folder"
        finally:
            kill_workers([rank])


class IdleProcess:
    """A process that does nothing."""

    def __init__(self) -> None:
        self.killed = False

    def poll(self) -> int | None:
        return -9 if self.killed else None

    def wait(self, timeout: float | None = None) -> int:
        assert self.killed
        return -9

    def kill(self) -> None:
        self.killed = True


def test_one_rank_equals_one_process() -> None:
    """And starts no other."""
    ranks = WorkerGroup.start(1)
    local, ranked, _ = pair(ranks, pg.GSPO)
    expected, result = (values(learned(learner, pg.GSPO)) for learner in (local, ranked))
    assert result == pytest.approx(expected, rel=1e-9, abs=1e-12)
    agree(local, ranked)
    ranked.close()


def test_an_interrupted_start_leaves_no_processes() -> None:
    launched = list[IdleProcess]()

    def start(host: str, port: int, rank: int, size: int, key: bytes) -> IdleProcess:
        if rank == 3:
            raise KeyboardInterrupt
        launched.append(IdleProcess())
        return launched[-1]

    with pytest.raises(KeyboardInterrupt):
        WorkerGroup.start(4, WorkerLauncher(start))
    assert [process.killed for process in launched] == [True, True]


def test_more_processes_than_a_machine_can_start_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes.os, "cpu_count", lambda: 2)
    check_devices("cpu", MAX_LOCAL_PROCESSES)
    with pytest.raises(
        ConfigError, match=f"learner.world_size=100000 .* 2 processors. Set it to at most {MAX_LOCAL_PROCESSES}"
    ):
        check_devices("cpu", 100000)
    monkeypatch.setattr(processes.os, "cpu_count", lambda: 2 * MAX_LOCAL_PROCESSES)
    check_devices("cpu", 2 * MAX_LOCAL_PROCESSES)
