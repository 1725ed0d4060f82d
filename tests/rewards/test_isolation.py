"""A reward function can cost a run its own samples, and no more."""

from __future__ import annotations

import os
import pickle
import re
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from policygrad.errors import ConfigError, RewardError
from policygrad.rewards.base import Reward, reward
from policygrad.rewards.workers import process
from policygrad.rewards.workers.limits import format_size, parse_size
from policygrad.rewards.workers.pool import RewardPool

HELD: list[bytearray] = []
MIB = 1 << 20
linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has it")


def score(rewards: Sequence[Any], completions: list[str], **options: Any) -> Any:
    with RewardPool(rewards, **options) as pool:
        return pool.score(["p"] * len(completions), completions, {})


# --- replies


class Bomb:
    """Runs a shell command when it is unpickled."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, (self.command,)


def everywhere(data: bytes) -> None:
    """Write to every open file, as an attacker would who does not know which is the pipe."""
    for fd in map(int, os.listdir("/proc/self/fd")):
        if fd > 2:
            try:
                os.write(fd, data)
            except OSError:
                continue


@linux
def test_a_pickle_in_the_pipe_is_not_executed(tmp_path: Path) -> None:
    mark = tmp_path / "executed"
    bomb = pickle.dumps(Bomb(f"touch {mark}"))

    def throws(prompts: Any, completions: Any, **_: Any) -> list[float]:
        if completions[0] == "bomb":
            everywhere(struct.pack(">Q", len(bomb)) + bomb)
        return [1.0]

    scores = score([throws], ["a", "bomb", "b", "bomb", "c"], num_workers=1)
    assert not mark.exists()
    assert scores.total == [1.0, None, 1.0, None, 1.0]
    assert scores.failures == {"crashed": 2}
    (output,) = {re.sub(r" \(completion.*", "", message) for message in scores.messages}
    assert output.startswith("reward 'throws' sent an invalid reply (wrong nonce)")
    pickle.loads(bomb)  # which is one
    assert mark.exists()


def test_endless_bytes_do_not_block_other_workers() -> None:
    def floods(prompts: Any, completions: Any, **_: Any) -> list[float]:
        while completions[0] == "flood":
            everywhere(b"\0" * 65536)
        return [1.0]

    scores = score([floods], ["a", "flood", "b"], num_workers=2)
    assert scores.total == [1.0, None, 1.0]
    assert scores.failures == {"crashed": 1}


def test_a_forged_reply_counts_for_its_own_call_only() -> None:
    """A function can find the nonce in the worker's memory; its second reply is to the next call."""

    def forges(prompts: Any, completions: Any, **_: Any) -> list[float]:
        if completions[0] == "forge":
            frame: Any = sys._getframe()
            while frame.f_code.co_name != "serve":
                frame = frame.f_back
            service = frame.f_locals["self"]
            from policygrad.rewards.workers.messages import PendingCall, SampleResult, encode_reply

            os.write(service.sink, encode_reply(service.nonce, PendingCall(service.calls, (5,)), [SampleResult(9.0)]))
        return [1.0]

    scores = score([forges], ["a", "forge", "b", "c"], num_workers=1)
    assert scores.total == [1.0, 9.0, None, 1.0]
    assert "reply to call 1 instead of call 2" in scores.messages[0]


@linux
def test_child_programs_do_not_inherit_the_pipes() -> None:
    def looks(prompts: Any, completions: Any, **_: Any) -> list[float]:
        result = subprocess.run(["ls", "/proc/self/fd"], capture_output=True, text=True, close_fds=False)
        own = [fd for fd in map(int, os.listdir("/proc/self/fd")) if fd > 2]
        assert any(fd > 500 for fd in own)  # the pipes have high numbers
        return [float(max(map(int, result.stdout.split())))]

    assert 0 < score([looks], ["a"]).total[0] < 100


def test_an_invalid_first_message_names_the_functions() -> None:
    @reward(prepare=lambda: everywhere(b"x" * 100))
    def loud(prompts: Any, completions: Any, **_: Any) -> list[float]:
        return [1.0]

    with pytest.raises(RewardError, match=r"sent an invalid reply .* while it loaded loud"):
        score([loud], ["a"])


# --- the environment


def test_a_missing_variable_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_API_KEY", "secret")

    def needs(prompts: Any, completions: Any, **_: Any) -> list[float]:
        return [float(len(os.environ["MY_API_KEY"]))]

    (output,) = score([needs], ["a"]).messages
    assert "raised KeyError: 'MY_API_KEY'" in output
    assert "do not get the environment variable MY_API_KEY: add --rewards.environment MY_API_KEY" in output
    assert "secret" not in output

    @reward(prepare=lambda: os.environ["MY_API_KEY"])
    def loads(prompts: Any, completions: Any, **_: Any) -> list[float]:
        return [1.0]

    with pytest.raises(RewardError, match=r"KeyError: 'MY_API_KEY'.*--rewards\.environment MY_API_KEY"):
        score([loads], ["a"])


# --- memory


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("4GiB", 4 << 30),
        ("2", 2 << 30),
        ("0.5 gib", 1 << 29),
        ("500MB", 500_000_000),
        ("64MiB", 64 << 20),
        ("none", None),
    ],
)
def test_parse_size(text: str, count: int | None) -> None:
    assert parse_size(text) == count


@pytest.mark.parametrize("text", ["", "much", "4 potatoes", "-1GiB", "1e9", "5B", "0", "inf", "1" * 400, 4])
def test_invalid_sizes(text: Any) -> None:
    with pytest.raises(ConfigError, match=r"not a size|not between|a text such as"):
        parse_size(text)


def test_format_size() -> None:
    assert [format_size(n) for n in (4 << 30, 64 << 20, 3 << 29)] == ["4 GiB", "64 MiB", "1.5 GiB"]


def leaks(prompts: Any, completions: Any, **_: Any) -> list[float]:
    HELD.append(bytearray(os.urandom(1)) * (12 * MIB))
    return [float(os.getpid())]


@pytest.mark.full
@linux
def test_a_leaking_worker_is_replaced() -> None:
    scores = score([leaks], [str(i) for i in range(12)], num_workers=2, memory="64MiB")
    assert scores.failures == {}
    calls = [scores.total.count(pid) for pid in set(scores.total)]
    assert sum(calls) == 12
    assert max(calls) <= 3  # 36 MiB are more than half of the limit


@linux
def test_a_call_beyond_the_memory_limit_names_the_option() -> None:
    def takes(prompts: Any, completions: Any, **_: Any) -> list[float]:
        return [float(len(bytearray(int(completions[0]) * MIB)))]

    scores = score([takes], ["1", "4096", "2"], num_workers=1, memory="64MiB")
    assert scores.total == [MIB, None, 2 * MIB]
    assert scores.failures == {"raised": 1}
    assert "raised MemoryError" in scores.messages[0]
    assert "a worker may use 64 MiB beyond what it has after loading (--rewards.memory)" in scores.messages[0]
    assert score([takes], ["128"], num_workers=1).total == [128 * MIB]  # the default is larger


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise ValueError


def test_memory_errors_of_other_types() -> None:
    def refused(prompts: Any, completions: Any, **_: Any) -> list[float]:
        kinds = {"start": OSError(12, "Cannot allocate memory"), "torch": RuntimeError("Cpu: can't allocate memory: 5")}
        raise kinds.get(completions[0], OSError(2, "No such file"))

    scores = score(
        [Reward("f", refused), Reward("fine", lambda p, c, **_: [1.0])], ["start", "torch", "file"], num_workers=1
    )
    assert ["--rewards.memory" in message for message in scores.messages] == [True, True, False]


@linux
def test_dedicated_workers_have_no_limit_and_all_are_killed_before_the_trainer() -> None:
    def limit(prompts: Any, completions: Any, **_: Any) -> list[float]:
        import resource

        soft = resource.getrlimit(resource.RLIMIT_DATA)[0]
        return [float(soft != resource.RLIM_INFINITY)] * len(completions)

    def turn(prompts: Any, completions: Any, **_: Any) -> list[float]:
        return [float(Path("/proc/self/oom_score_adj").read_text())]

    rewards = [
        Reward("alone", limit, batched=True, dedicated_worker=True),
        Reward("shared", limit),
        Reward("turn", turn),
    ]
    scores = score(rewards, ["a"], num_workers=1, memory="1GiB")
    assert scores.parts == {"alone": [0.0], "shared": [1.0], "turn": [1000.0]}
    assert score([Reward("shared", limit)], ["a"], memory="none").total == [0.0]


# --- processes

DAEMON = """
import os, sys, time
if os.fork(): os._exit(0)
os.setsid()
if os.fork(): os._exit(0)
os.write(int(sys.argv[1]), str(os.getpid()).encode())
os.close(int(sys.argv[1]))
time.sleep(1000)
"""


def daemon(**options: Any) -> int:
    """Start a process that leaves its parent and session; return its id."""
    read, write = os.pipe()
    subprocess.run([sys.executable, "-c", DAEMON, str(write)], pass_fds=[write], check=True, **options)
    os.close(write)
    with os.fdopen(read) as pipe:
        return int(pipe.read())


def plain_daemon(prompts: Any, completions: Any, **_: Any) -> list[float]:
    return [float(daemon())]


def hidden_daemon(prompts: Any, completions: Any, **_: Any) -> list[float]:
    return [float(daemon(env={}))]


def orphaned(prompts: Any, completions: Any, **_: Any) -> list[float]:
    if completions[0] == "die":
        os._exit(1)
    return [float(daemon())]


@linux
@pytest.mark.parametrize("function", [plain_daemon, hidden_daemon])
def test_daemons_end_with_the_pool(function: Callable[..., list[float]]) -> None:
    with RewardPool([function], num_workers=1) as pool:
        (pid,) = pool.score(["p"], ["c"], {}).total
        assert pid is not None
        assert Path(f"/proc/{int(pid)}").exists()
        assert os.getsid(int(pid)) != os.getsid(pool._slots[0].worker.pid)  # type: ignore[union-attr]
    assert _gone(int(pid))


@linux
def test_closing_many_workers_takes_one_search(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looks: list[int] = []
    find = process._find_descendants

    def counted(leaders: Sequence[int], tokens: set[bytes]) -> set[int]:
        looks[-1] += 1
        return find(leaders, tokens)

    monkeypatch.setattr(process, "_find_descendants", counted)
    for workers in (1, 4):
        pool = RewardPool(["exact_match"], num_workers=workers)
        leaders = [slot.worker.pid for slot in pool._slots if slot.worker]
        looks.append(0)
        pool.close()
        assert len(leaders) == workers
        assert not any(Path(f"/proc/{pid}").exists() for pid in leaders)
    assert looks[0] == looks[1] > 0


@linux
def test_daemons_of_a_dead_worker_are_killed() -> None:
    scores = score([orphaned], ["a", "die", "b"], num_workers=1)
    assert scores.failures == {"crashed": 1}
    assert all(_gone(int(pid)) for pid in scores.total if pid is not None)


@linux
def test_a_worker_with_many_zombies_is_replaced() -> None:
    def leaves(prompts: Any, completions: Any, **_: Any) -> list[float]:
        ended = "import os\nfor _ in range(70):\n    if os.fork() == 0: os._exit(0)"  # adopted, and never waited for
        if completions[0] == "leave":
            subprocess.run([sys.executable, "-c", ended], check=True)
        return [float(os.getpid())]

    one, leaver, other = score([leaves], ["a", "leave", "b"], num_workers=1).total
    assert one == leaver != other


def _gone(pid: int) -> bool:
    """Return whether a process has ended, perhaps as a zombie that was not reaped yet."""
    for _ in range(200):
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX":
                return True
        except FileNotFoundError:
            return True
        threading.Event().wait(0.01)
    return False
