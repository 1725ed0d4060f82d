"""Which process hangs: by beats that are written by hand, and by the frames of a thread that stands still."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any, cast

import pytest
import torch

import policygrad as pg
from policygrad.learners.fsdp.watchdog import (
    BEAT_SECONDS,
    MIN_CPU_FRACTION,
    STACK_AFTER_BEATS,
    Heartbeat,
    ThreadMonitor,
    Watchdog,
    describe_location,
    diagnose_hang,
    heartbeat_key,
    is_in_collective,
)

LIMIT = 5
MOVES, WAITS = Heartbeat(9, 0, False, "a (x.py:1)"), Heartbeat(9, 50, True, "b (x.py:2)")
HANGS, SOON = Heartbeat(9, 5, False, "c (x.py:3)"), Heartbeat(9, 4, False, "c (x.py:3)")


@pytest.mark.parametrize(
    ("beats", "silent", "ranks", "words"),
    [
        ([MOVES, MOVES], [0, 0], None, ""),
        ([WAITS, MOVES], [0, 0], None, ""),  # a long update of another
        ([MOVES, WAITS], [0, 0], None, ""),  # rank 0 computes alone
        ([WAITS, SOON], [0, 0], None, ""),
        ([WAITS, None], [0, 4], None, ""),  # it is starting
        ([WAITS, HANGS], [0, 0], (1,), "rank 1 hung in c (x.py:3): it stood there for 5 seconds, and computed nothing"),
        ([WAITS, HANGS, WAITS, HANGS], [0] * 4, (1, 3), "rank 1 and rank 3 hung in c (x.py:3), c (x.py:3): "),
        ([HANGS, WAITS], [0, 0], (0,), "rank 0 hung in c"),
        ([WAITS, MOVES], [0, 5], (1,), "rank 1 did not answer for 5 seconds"),
        ([WAITS, None], [0, 5], (1,), "rank 1 did not answer for 5 seconds"),
        ([WAITS, WAITS, WAITS], [0] * 3, (1, 2), "all processes waited for each other for 5 seconds: rank 0 in b"),
        ([WAITS, WAITS, MOVES], [0] * 3, None, ""),
    ],
)
def test_who_hangs(beats: list[Heartbeat | None], silent: list[int], ranks: tuple[int, ...] | None, words: str) -> None:
    found = diagnose_hang(beats, silent, LIMIT)
    assert (found and found.ranks) == ranks
    assert words in (found.message if found else "")


def frame(*files: str) -> FrameType:
    """A stack of functions in these files, the innermost first."""
    found = None
    for i, file in reversed(list(enumerate(files))):
        code = SimpleNamespace(co_filename=file, co_name=f"f{i}")
        found = SimpleNamespace(f_code=code, f_back=found, f_lineno=i, f_lasti=0)
    return cast(FrameType, found)


TORCH = str(Path(torch.__file__).parent) + os.sep
GLOO, MODULE, OPS = (TORCH + name for name in ("distributed/c10d.py", "nn/modules/module.py", "_ops.py"))


def test_a_collective_is_told_from_what_is_called_below_it() -> None:
    assert is_in_collective(frame(GLOO, "/home/me/mine.py"))
    assert is_in_collective(frame(OPS, GLOO, MODULE, "/home/me/mine.py"))
    assert not is_in_collective(frame("/home/me/mine.py", GLOO, MODULE))  # a hook of one's own
    assert not is_in_collective(frame(MODULE, "/home/me/mine.py", GLOO))
    assert not is_in_collective(frame(MODULE, OPS))
    assert not is_in_collective(None)


def test_the_place_is_in_nobody_s_library() -> None:
    library = threading.__file__
    assert describe_location(frame(library, GLOO, "/home/me/mine.py", "/home/me/other.py")) == "f2 (/home/me/mine.py:2)"
    assert describe_location(frame(library, GLOO)) == f"f0 ({library}:0)"
    assert describe_location(None) == "nowhere"


class Clock:
    """Seconds that pass, and those on a processor."""

    def __init__(self) -> None:
        self.now, self.computed = 0.0, 0.0

    def pass_by(self, seconds: float, computed: float) -> None:
        self.now += seconds
        self.computed += computed


def asleep(begun: threading.Event, wake: threading.Event) -> None:
    begun.set()
    wake.wait()


def test_a_thread_that_sleeps_stands_still_until_it_computes_or_moves() -> None:
    begun, wake, clock = threading.Event(), threading.Event(), Clock()
    thread = threading.Thread(target=asleep, args=(begun, wake), daemon=True)
    thread.start()
    begun.wait()
    thread.join(0.2)  # by when it sleeps
    pulse = ThreadMonitor(thread.ident, lambda: clock.computed, lambda: clock.now)
    found = []
    for computed in (0.0, 0.0, MIN_CPU_FRACTION / 2, 0.0, 0.0, 1.0, 0.0):
        clock.pass_by(BEAT_SECONDS, computed)
        found.append(pulse.beat())
    assert [beat.still for beat in found] == [0, 1, 2, 3, 4, 0, 1]
    assert [beat.number for beat in found] == [1, 2, 3, 4, 5, 6, 7]
    assert [bool(beat.stack) for beat in found] == [beat.still >= STACK_AFTER_BEATS for beat in found]
    assert "in asleep\n" in found[3].stack
    assert found[3].place.startswith("asleep (")
    assert found[3].pid == os.getpid()
    pulse.watch(threading.get_ident())
    assert pulse.beat().idle_beats == 0
    wake.set()


class Said(dict[str, str]):
    """A line."""

    def read(self, key: str) -> str | None:
        return self.get(key)


def test_beats_that_do_not_come_are_counted() -> None:
    line = Said()
    watchdog = Watchdog(cast(Any, line), 3, lambda rank: False)
    watchdog.start(0.0, None)
    watchdog.close()
    watchdog._thread.join()  # type: ignore[union-attr]
    watchdog._missed = [0, 0, 0]
    line[heartbeat_key(1)] = '{"number": 1, "still": 0}'
    watchdog._collect_heartbeats()
    watchdog._collect_heartbeats()
    assert watchdog._missed == [0, 1, 2]
    line[heartbeat_key(1)] = '{"number": 2, "still": 0}'
    watchdog._collect_heartbeats()
    assert watchdog._missed == [0, 0, 3]
    assert watchdog.unresponsive == ""  # nobody is waited for, for ever
    watchdog._limit = 3
    assert watchdog.unresponsive == "rank 2 did not answer"


def test_the_option() -> None:
    assert pg.LearnerConfig().hang_timeout == 45
    with pytest.raises(pg.ConfigError, match=r"learner\.hang_timeout must be at least 0 and finite, not -1"):
        pg.LearnerConfig(hang_timeout=-1)
    assert pg.SFTConfig(data="x.jsonl", learner=pg.LearnerConfig(hang_timeout=3)).learner.hang_timeout == 3
