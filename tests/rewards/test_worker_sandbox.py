"""Reward workers in a sandbox: what a reward reaches, that it works, is killed, and runs programs."""

import os
import threading
from typing import get_args

import pytest

from policygrad.errors import ConfigError
from policygrad.rewards.base import Reward
from policygrad.rewards.config import RewardConfig, SandboxChoice
from policygrad.rewards.workers.pool import RewardPool
from policygrad.rewards.workers.process import SANDBOX_CHOICES
from policygrad.sandbox import BACKENDS, find_backend


def stands(name):
    try:
        find_backend(name)
    except ConfigError:
        return False
    return True


behind = pytest.mark.parametrize("wall", [name for name in BACKENDS if stands(name)])


def reaches(prompts, completions):
    """Return a bit for each attempt that succeeds."""
    import os
    import socket

    path, parent = prompts[0]

    def read(place, how="r"):
        with open(place, how) as file:
            return file.write("x") if how == "a" else file.read()

    tries = (
        lambda: socket.create_connection(("127.0.0.1", 9), 1),
        lambda: read(path),
        lambda: read(path, "a"),
        lambda: os.remove(path),
        lambda: read(f"/proc/{parent}/environ"),
        lambda: os.kill(parent, 0),
        lambda: read("/etc/shadow"),
        lambda: read(os.__file__, "a"),
    )
    result = 0
    for place, attempt in enumerate(tries):
        try:
            attempt()
            result |= 1 << place
        except OSError:
            pass
    return [float(result)]


def works(prompts, completions):
    """Use what a reward needs: a writable folder, threads, processes, an event loop, its memory size."""
    import asyncio
    import os
    import subprocess
    import tempfile
    import threading

    with tempfile.TemporaryDirectory() as folder:
        open(os.path.join(folder, "x"), "w").close()
    thread = threading.Thread(target=len, args=("",))
    thread.start()
    thread.join()
    asyncio.run(asyncio.sleep(0))
    from policygrad.rewards.workers.limits import get_resident_bytes

    return [float(subprocess.run(["true"]).returncode == 0 and get_resident_bytes() > 0)]


def hangs(prompts, completions):
    import subprocess

    if completions[0] == "hang":
        subprocess.Popen(["sleep", "1000"], start_new_session=True)
        while True:
            pass
    return [1.0]


@behind
def test_a_sandboxed_reward_reaches_only_what_it_needs(wall, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("hunter2")
    with RewardPool([reaches, works], num_workers=1, sandbox=wall) as pool:
        scores = pool.score([(str(secret), os.getpid())], [""], {})
    assert scores.parts == {"reaches": [0.0], "works": [1.0]}, scores.messages
    assert secret.read_text() == "hunter2"


@pytest.mark.full
@behind
def test_a_hanging_sandboxed_worker_is_killed_with_its_children(wall, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with RewardPool([Reward("hangs", hangs, timeout=1.0)], num_workers=1, sandbox=wall) as pool:
        scores = pool.score([""] * 3, ["a", "hang", "b"], {})
    assert (scores.total, scores.failures) == ([1.0, None, 1.0], {"timeout": 1})
    assert list(tmp_path.iterdir()) == []


@behind
def test_programs_run_inside_a_sandboxed_worker(wall):
    with RewardPool(["code"], num_workers=1, sandbox=wall) as pool:
        assert pool.score([""], ["print(5)"], {"inputs": [["x"]], "outputs": [["5"]]}).total == [1.0]


@behind
def test_the_disk_limit_holds_inside_a_sandboxed_worker(wall):
    """Its supervisor, restricted by Landlock itself, cannot list what the program has open."""
    program = """
kept = []
for number in range(32):
    kept.append(open(str(number), "w+b"))
    kept[-1].write(bytes(4 << 20))
    kept[-1].flush()
    __import__("os").remove(str(number))
import time
time.sleep(1)
print(5)
"""
    with RewardPool(["code"], num_workers=1, sandbox=wall) as pool:
        assert pool.score([""], [program], {"inputs": [["x"]], "outputs": [["5"]]}).total == [0.0]


def test_unpicklable_functions_are_refused_with_a_sandbox():
    if not any(stands(name) for name in BACKENDS):
        pytest.skip("no sandbox works on this machine")
    lock = threading.Lock()
    with pytest.raises(ConfigError, match=r"so --rewards\.sandbox cannot contain it"):
        RewardPool([Reward("locked", lambda prompts, completions: [float(lock.locked())])], sandbox="auto")


def test_sandbox_choices():
    assert get_args(SandboxChoice) == SANDBOX_CHOICES
    assert RewardConfig().sandbox == "none"
    with pytest.raises(ConfigError, match="choose none, auto, bubblewrap, landlock"):
        RewardPool(["exact_match"], sandbox="paper")
