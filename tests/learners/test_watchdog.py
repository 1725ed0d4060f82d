"""Hang detection: which rank hangs, by hand-written heartbeats and by the frames of a thread that sleeps."""

from __future__ import annotations

import os
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any, cast

import pytest
import torch

import policygrad as pg
from policygrad.learners.fsdp import watchdog as module
from policygrad.learners.fsdp.watchdog import (
    BEAT_SECONDS,
    MIN_CPU_FRACTION,
    SHORTAGE_KEY,
    STACK_AFTER_BEATS,
    Heartbeat,
    HeartbeatThread,
    ThreadMonitor,
    Watchdog,
    describe_location,
    diagnose_hang,
    heartbeat_key,
    is_in_collective,
)

LIMIT = 5
ACTIVE, WAITS = Heartbeat(9, 0, False, "a (x.py:1)"), Heartbeat(9, 50, True, "b (x.py:2)")
THERE, AWAY = (replace(ACTIVE, host=f"host{i}") for i in range(2))
HANGS, BELOW_LIMIT = Heartbeat(9, 5, False, "c (x.py:3)"), Heartbeat(9, 4, False, "c (x.py:3)")


@pytest.mark.parametrize(
    ("beats", "missed", "ranks", "message"),
    [
        ([ACTIVE, ACTIVE], [0, 0], None, ""),
        ([WAITS, ACTIVE], [0, 0], None, ""),  # rank 1 computes a long update
        ([ACTIVE, WAITS], [0, 0], None, ""),  # rank 0 computes alone
        ([WAITS, BELOW_LIMIT], [0, 0], None, ""),
        ([WAITS, None], [0, 4], None, ""),  # rank 1 is starting
        ([WAITS, HANGS], [0, 0], (1,), "rank 1 hung in c (x.py:3): no progress and no CPU time for 5 seconds"),
        ([WAITS, HANGS, WAITS, HANGS], [0] * 4, (1, 3), "rank 1 and rank 3 hung in c (x.py:3), c (x.py:3): "),
        ([HANGS, WAITS], [0, 0], (0,), "rank 0 hung in c"),
        ([WAITS, ACTIVE], [0, 5], (1,), "rank 1 did not answer for 5 seconds"),
        ([WAITS, None], [0, 5], (1,), "rank 1 did not answer for 5 seconds"),
        ([WAITS, WAITS, WAITS], [0] * 3, (1, 2), "all processes waited for each other for 5 seconds: rank 0 in b"),
        ([WAITS, WAITS, ACTIVE], [0] * 3, None, ""),
        ([THERE, THERE, AWAY], [0, 0, 5], (2,), "rank 2 on host1 did not answer for 5 seconds"),
    ],
)
def test_a_hang_is_diagnosed_with_its_ranks(
    beats: list[Heartbeat | None], missed: list[int], ranks: tuple[int, ...] | None, message: str
) -> None:
    diagnosis = diagnose_hang(beats, missed, LIMIT)
    assert (diagnosis and diagnosis.ranks) == ranks
    assert message in (diagnosis.message if diagnosis else "")


def stack(*files: str) -> FrameType:
    """A stack of functions in these files, the innermost first."""
    frame = None
    for i, file in reversed(list(enumerate(files))):
        code = SimpleNamespace(co_filename=file, co_name=f"f{i}")
        frame = SimpleNamespace(f_code=code, f_back=frame, f_lineno=i, f_lasti=0)
    return cast(FrameType, frame)


TORCH = str(Path(torch.__file__).parent) + os.sep
GLOO, MODULE, OPS = (TORCH + name for name in ("distributed/c10d.py", "nn/modules/module.py", "_ops.py"))


def test_a_collective_has_only_torch_frames_inside() -> None:
    assert is_in_collective(stack(GLOO, "/home/me/mine.py"))
    assert is_in_collective(stack(OPS, GLOO, MODULE, "/home/me/mine.py"))
    assert not is_in_collective(stack("/home/me/mine.py", GLOO, MODULE))  # a user's hook
    assert not is_in_collective(stack(MODULE, "/home/me/mine.py", GLOO))
    assert not is_in_collective(stack(MODULE, OPS))
    assert not is_in_collective(None)


def test_the_location_is_outside_libraries() -> None:
    library = threading.__file__
    frames = stack(library, GLOO, "/home/me/mine.py", "/home/me/other.py")
    assert describe_location(frames) == "f2 (/home/me/mine.py:2)"
    assert describe_location(stack(library, GLOO)) == f"f0 ({library}:0)"
    assert describe_location(None) == "nowhere"


def sleep_until(started: threading.Event, wake: threading.Event) -> None:
    started.set()
    wake.wait()


def test_a_sleeping_thread_is_idle_until_it_computes_or_moves() -> None:
    started, wake = threading.Event(), threading.Event()
    clock = {"time": 0.0, "cpu": 0.0}
    thread = threading.Thread(target=sleep_until, args=(started, wake), daemon=True)
    thread.start()
    started.wait()
    thread.join(0.2)  # enough for it to fall asleep
    monitor = ThreadMonitor(thread.ident, lambda: clock["cpu"], lambda: clock["time"])
    beats = []
    for cpu in (0.0, 0.0, MIN_CPU_FRACTION / 2, 0.0, 0.0, 1.0, 0.0):
        clock["time"] += BEAT_SECONDS
        clock["cpu"] += cpu
        beats.append(monitor.beat())
    assert [beat.idle_beats for beat in beats] == [0, 1, 2, 3, 4, 0, 1]
    assert [beat.number for beat in beats] == [1, 2, 3, 4, 5, 6, 7]
    assert [bool(beat.stack) for beat in beats] == [beat.idle_beats >= STACK_AFTER_BEATS for beat in beats]
    assert "in sleep_until\n" in beats[3].stack
    assert beats[3].location.startswith("sleep_until (")
    assert beats[3].pid == os.getpid()
    monitor.watch(threading.get_ident())
    assert monitor.beat().idle_beats == 0
    wake.set()


class _Store:
    """Rank 1 sends a new heartbeat at every check, rank 2 its only one before the first."""

    def __init__(self) -> None:
        self.checks = 0

    def get(self, key: str) -> str | None:
        if key == SHORTAGE_KEY:
            return None
        self.checks += key == heartbeat_key(1)
        return f'{{"number": {self.checks if key == heartbeat_key(1) else 1}, "idle_beats": 0}}'


@pytest.mark.parametrize(("timeout", "message"), [(0.03, "rank 2 did not answer"), (0.0, "")])
def test_missed_heartbeats_are_counted(monkeypatch: pytest.MonkeyPatch, timeout: float, message: str) -> None:
    monkeypatch.setattr("policygrad.learners.fsdp.watchdog.BEAT_SECONDS", 0.01)
    store = _Store()
    watchdog = Watchdog(cast(Any, store), 3, ())
    watchdog.start(timeout, None)  # 0 waits forever
    while store.checks < 6:
        time.sleep(0.01)
    assert watchdog.unresponsive == message
    watchdog.close()


class _StoreWithShortage(_Store):
    """Rank 1 has said that it ran out of memory, and is gone."""

    def get(self, key: str) -> str | None:
        return '{"message": "rank 1: out of memory at 9 tokens"}' if key == SHORTAGE_KEY else super().get(key)


def test_a_rank_0_that_cannot_leave_a_collective_keeps_what_another_ran_out_of_and_exits_resumably(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for name in ("BEAT_SECONDS", "EXIT_SECONDS"):
        monkeypatch.setattr(module, name, 0.01)
    ended, done = list[object](), threading.Event()

    def leave(code: int) -> None:
        ended.append(code)
        done.set()

    monkeypatch.setattr(module.os, "_exit", leave)
    watchdog = Watchdog(cast(Any, _StoreWithShortage()), 2, cast(Any, [SimpleNamespace(kill=lambda: None)]))
    watchdog.before_exit = lambda: ended.append("kept")
    watchdog.start(0.02, tmp_path)
    with watchdog.watch_collective("update"):
        assert done.wait(30)
    watchdog.close()
    assert ended == ["kept", 75]
    assert f"rank 1: out of memory at 9 tokens; --resume {tmp_path} goes on" in capfd.readouterr().err


def test_the_timeout_is_an_option_of_the_learner() -> None:
    assert pg.LearnerConfig().hang_timeout == 45
    with pytest.raises(pg.ConfigError, match=r"learner\.hang_timeout must be at least 0 and finite, not -1"):
        pg.LearnerConfig(hang_timeout=-1)
    assert pg.SFTConfig(data="x.jsonl", learner=pg.LearnerConfig(hang_timeout=3)).learner.hang_timeout == 3


class Unanswered:
    """A store on a machine that answers the first heartbeats, and then nothing more."""

    def __init__(self, answers: int) -> None:
        self.answers, self.healed = answers, threading.Event()

    def contains(self, *keys: str) -> bool:
        return False

    def set(self, key: str, text: str) -> None:
        self.answers -= 1
        if self.answers < 0:
            self.healed.wait()


@pytest.mark.parametrize("timeout", [5 * BEAT_SECONDS, 0.0])
def test_a_rank_whose_rank_0_is_on_a_machine_that_is_gone_ends(
    timeout: float, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """No connection ends when a machine loses its power, or is cut off."""
    codes, ended, left = list[int](), threading.Event(), threading.Event()

    def end(code: int) -> None:
        codes.append(code)
        ended.set()
        left.wait()

    monkeypatch.setattr(module.os, "_exit", end)
    monkeypatch.setattr(module, "BEAT_SECONDS", 0.001)
    store = Unanswered(3)
    monkeypatch.setattr(module, "START_SECONDS", 5 * module.BEAT_SECONDS if timeout else 0.0)
    thread = HeartbeatThread(cast(Any, store), 1, "host0")
    assert ended.wait(60 if timeout else 0.05) is bool(timeout)
    if timeout:
        assert codes == [75]
        assert "has heard nothing of rank 0 on host0 for" in capsys.readouterr().err
    thread.close()
    left.set()
    store.healed.set()


def test_a_rank_of_the_same_machine_waits_for_a_suspended_rank_0() -> None:
    before = threading.active_count()
    store = Unanswered(0)
    thread = HeartbeatThread(cast(Any, store), 1)
    assert threading.active_count() <= before + 1  # the heartbeat alone
    thread.close()
    store.healed.set()
