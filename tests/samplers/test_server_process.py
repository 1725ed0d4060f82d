"""Servers that are started here: they end with their owner in every way, and nothing that they started is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from policygrad.samplers.engines import server_process
from policygrad.samplers.engines.server_process import ServerProcess

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are found by /proc")
SERVER = """
import os, signal, subprocess, sys, time
if {ignores}:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
detached = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
double = os.fork()
if double == 0:
    if os.fork():
        os._exit(0)
    os.setsid()
    open({folder!r} + "/orphan", "w").write(str(os.getpid()))
    time.sleep(600)
os.waitpid(double, 0)
while not os.path.exists({folder!r} + "/orphan") or not open({folder!r} + "/orphan").read():
    time.sleep(0.01)
print("serving", flush=True)
open({folder!r} + "/pids.new", "w").write(f"{{os.getpid()}} {{detached.pid}} " + open({folder!r} + "/orphan").read())
os.rename({folder!r} + "/pids.new", {folder!r} + "/pids")
time.sleep(600)
"""


def make_process(folder: Path, ignores: bool = False) -> ServerProcess:
    program = textwrap.dedent(SERVER).format(folder=str(folder), ignores=ignores)
    return ServerProcess(folder / "server.log", lambda: ({}, [sys.executable, "-c", program]))


def wait_for_pids(folder: Path) -> list[int]:
    """Return the server and the two processes that it has started, one by a double fork."""
    while not (folder / "pids").exists():
        time.sleep(0.01)
    pids = [int(pid) for pid in (folder / "pids").read_text().split()]
    (folder / "pids").unlink()
    (folder / "orphan").unlink()
    return pids


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def wait_until_gone(pids: list[int]) -> None:
    while any(is_running(pid) for pid in pids):
        time.sleep(0.01)


def test_stop_ends_the_server_and_all_that_it_started(tmp_path: Path) -> None:
    process = make_process(tmp_path)
    assert process.ensure_running() == ""
    pids = wait_for_pids(tmp_path)
    assert process.ensure_running() == ""  # it runs
    process.stop()
    assert not any(is_running(pid) for pid in pids)
    process.stop()  # a second time


def test_a_server_that_ignores_sigterm_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_process, "_EXIT_SECONDS", 0.2)
    process = make_process(tmp_path, ignores=True)
    process.ensure_running()
    pids = wait_for_pids(tmp_path)
    process.stop()
    assert not any(is_running(pid) for pid in pids)


def test_a_killed_server_takes_its_processes_along_and_is_started_again(tmp_path: Path) -> None:
    process = make_process(tmp_path)
    process.ensure_running()
    pids = wait_for_pids(tmp_path)
    process.is_starting = False  # it has answered
    os.kill(pids[0], signal.SIGKILL)
    assert process.guard is not None
    assert process.guard.wait() == 128 + signal.SIGKILL
    assert not any(is_running(pid) for pid in pids)
    assert process.ensure_running() == ""
    assert process.is_starting
    again = wait_for_pids(tmp_path)
    assert again[0] != pids[0]
    process.stop()


def test_a_killed_guard_takes_the_server_along(tmp_path: Path) -> None:
    process = make_process(tmp_path)
    process.ensure_running()
    server = wait_for_pids(tmp_path)[0]
    assert process.guard is not None
    process.guard.kill()
    process.guard.wait()
    wait_until_gone([server])
    process.stop()


def test_no_orphan_is_left_when_the_owner_is_killed(tmp_path: Path) -> None:
    program = f"""
        import sys, time
        from pathlib import Path
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        from test_server_process import make_process
        make_process(Path({str(tmp_path)!r})).ensure_running()
        time.sleep(600)
    """
    owner = subprocess.Popen([sys.executable, "-c", textwrap.dedent(program)])
    pids = wait_for_pids(tmp_path)
    owner.kill()
    owner.wait()
    wait_until_gone(pids)


def test_a_server_that_ends_before_it_answers_is_reported_with_the_end_of_its_log(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    log.write_text("of an earlier start\n")
    program = "import sys; print('loading'); print('no such model: x', file=sys.stderr); sys.exit(3)"
    process = ServerProcess(log, lambda: ({}, [sys.executable, "-c", program]))
    assert process.ensure_running() == ""
    assert process.guard is not None
    process.guard.wait()
    failure = process.ensure_running()
    assert failure.startswith("it ended with exit code 3 before it answered.")
    assert "no such model: x" in failure
    assert "earlier" not in failure
    assert process.ensure_running() == ""  # it is tried again
    process.stop()


def test_a_program_that_does_not_exist_is_named(tmp_path: Path) -> None:
    process = ServerProcess(tmp_path / "server.log", lambda: ({}, [str(tmp_path / "vllm"), "serve"]))
    process.ensure_running()
    assert process.guard is not None
    process.guard.wait()
    assert f"{tmp_path}/vllm cannot be started" in process.ensure_running()


def test_variables_of_this_environment_stay_out_of_another_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/of/this/process")
    program = "import os; print(os.environ.get('PYTHONPATH'), os.environ['MODE'], os.environ['PYTHONSAFEPATH'])"
    process = ServerProcess(tmp_path / "server.log", lambda: ({"MODE": "dev"}, [sys.executable, "-c", program]))
    process.ensure_running()
    assert process.guard is not None
    process.guard.wait()
    assert process.log.read_text() == "None dev 1\n"
    process.stop()
