"""scripts/stress_soak.py: when it kills, what counts as a difference and as not constant, and a small run on the real path."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import stress_processes as watched
import stress_soak as soak
import stress_soak as soaked
from doubles.files import write_rows
from pages import reliability as faults
from policygrad.checkpoint import format as checkpoint

PACE = soak.Pace(start=8.0, step=1.5, end=6.0)
linux = pytest.mark.skipif(sys.platform != "linux", reason="it reads /proc")


def test_kills_cover_the_run_and_all_that_a_run_does() -> None:
    at, found = 0, list[soak.Moment]()
    for number in range(200):
        when = soak.moment(random.Random(f"0 {number}"), at, 2000, 200 - number, PACE, 100)
        assert when.seconds >= 0
        assert when.step is None or at < when.step <= 2000 or at == 2000
        assert when.seconds <= PACE.start + max(PACE.step, PACE.end)
        found.append(when)
        at = at if when.step is None else when.step
    assert at > 1900
    assert 15 < sum(when.saving for when in found) < 70
    assert any(when.step is None and when.seconds < PACE.start / 2 for when in found)  # while it starts and loads
    assert sum(when.step in range(100, 2000, 100) and when.seconds < PACE.step for when in found) > 2  # it evaluates
    assert any(when.step is not None and 0 < when.step < 2000 and when.seconds < PACE.step for when in found)


def test_a_moment_is_the_seeds() -> None:
    one, second, other = (soak.moment(random.Random(seed), 10, 100, 10, PACE, 5) for seed in ("a", "a", "b"))
    assert one == second != other
    done = soak.moment(random.Random(1), 100, 100, 3, PACE, 5)
    assert done.step is None
    assert done.seconds <= PACE.start + PACE.end


def stack(*frames: str) -> str:
    """As faulthandler writes it, the innermost first."""
    lines = [
        f'  File "/x/src/policygrad/{place}.py", line 7 in {name}' for place, name in (f.split(":") for f in frames)
    ]
    return "\n".join(["Stack (most recent call first):", *lines, '  File "<string>", line 9 in <module>', ""])


RUN = ("training/trainer:run", "training/base_trainer:_train", "training/base_trainer:train", "cli:main")


@pytest.mark.parametrize(
    ("text", "phase"),
    [
        ("", "in the kernel"),
        (stack("cli:_command", "cli:main"), "starting"),
        (stack("models/loading:load_model", "training/trainer:build", *RUN), "loading"),
        (stack("checkpoint/format:load", "checkpoint/manager:restore", *RUN), "loading"),
        (
            stack("samplers/local:generate", "rollout/rollouter:evaluate", "training/base_trainer:evaluate_at", *RUN),
            "evaluating",
        ),
        (stack("samplers/local:generate", "rollout/ahead:take", *RUN), "sampling"),
        (stack("samplers/local:generate", "rollout/rollouter:collect", "training/loop:loop", *RUN), "sampling"),
        (stack("rewards/pool:score", "rollout/judge:judged", "training/loop:loop", *RUN), "rewarding"),
        (stack("learners/local/learner:update", "training/loop:loop", *RUN), "updating"),
        (stack("core/advantages:__call__", "training/loop:loop", *RUN), "updating"),
        (
            stack("training/supervised:accumulate", "training/sft:step", "training/supervised:_train", *RUN[1:]),
            "updating",
        ),
        (stack("checkpoint/format:save", "training/base_trainer:keep_going", "training/loop:loop", *RUN), "saving"),
        (stack("checkpoint/model_folder:save_model", "training/base_trainer:_finish", *RUN), "saving"),
        (stack("trackers/jsonl:_append", "training/base_trainer:log", "training/loop:loop", *RUN), "logging"),
    ],
)
def test_what_a_run_is_at_is_read_off_its_stack(text: str, phase: str) -> None:
    assert watched.phase_of(text) == phase


def test_a_stack_that_is_being_written_says_nothing_yet() -> None:
    text = stack("learners/local/learner:update", "training/loop:loop", *RUN)
    found = {watched.phase_of(text[:end]) for end in range(len(text))}
    assert found == {"in the kernel"}
    assert watched.phase_of(text) == "updating"


@pytest.mark.parametrize(
    ("name", "values", "found"),
    [
        ("trainer_mib", [400.0 + 5 * (k % 2) for k in range(100)], False),  # up and down
        ("trainer_mib", [300.0] * 5 + [400.0] * 95, False),  # the warm-up
        ("trainer_mib", [400.0 + 0.05 * k for k in range(100)], False),  # 1 % from the first fifth to the last
        ("trainer_mib", [400.0 + 0.2 * k for k in range(100)], True),
        ("workers_mib", [400.0 - 0.2 * k for k in range(100)], True),
        ("descriptors", [14 + (k % 7 == 0) for k in range(100)], False),  # one that is open for a moment
        ("descriptors", [14 + k // 50 for k in range(100)], True),
        ("processes", [3] * 90 + [4] * 10, True),
        ("processes", [3] * 95 + [4] * 5, False),  # half a fifth at most may be by chance
        ("files", [10] * 80 + [11] * 20, True),
    ],
)
def test_what_is_not_constant_is_found(name: str, values: list[float], found: bool) -> None:
    message = soaked.unsteady({name: soaked.course(values)})
    assert [text.split()[0] for text in message] == [name] * found


def made(folder: Path) -> Path:
    """What two steps leave."""
    for part in ("model", "checkpoints/step-000002"):
        (folder / part).mkdir(parents=True)
    save_file({"w": torch.ones(3), "n": torch.tensor(1)}, folder / "model" / "model.safetensors")
    save_file({"adam": torch.ones(3)}, folder / "checkpoints" / "step-000002" / "tensors.safetensors")
    steps = [{"step": k, "reward": 0.5 * k, "time/rollout": random.random()} for k in (1, 2)]
    write_rows(folder / "metrics.jsonl", [{"step": 0, "eval/reward": 0.1}, *steps])
    write_rows(folder / "completions.jsonl", [{"step": k, "completion": "x"} for k in (1, 2)])
    (folder / "result.json").write_text(json.dumps({"steps": 2, "seconds": random.random()}))
    return folder


def replaced(name: str, old: str, new: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_text((folder / name).read_text().replace(old, new))


def nudged(folder: Path) -> None:
    save_file({"w": torch.tensor([1, 1, 1 + 2**-23]), "n": torch.tensor(1)}, folder / "model" / "model.safetensors")


def doubled(folder: Path) -> None:
    rows = soaked.rows(folder / "metrics.jsonl")
    write_rows(folder / "metrics.jsonl", [*rows, rows[-1]])


@pytest.mark.parametrize(
    ("harm", "says"),
    [
        (nudged, "model/model.safetensors differs"),
        (replaced("metrics.jsonl", "0.5", "0.25"), "metrics.jsonl differs from line 2 on"),
        (replaced("completions.jsonl", "x", "y"), "completions.jsonl differs from line 1 on"),
        (doubled, "not every step is logged once: 3 lines, 2 steps"),
        (replaced("result.json", '"steps": 2', '"steps": 3'), "result.json differs in steps"),
        (lambda folder: (folder / ".tmp-model").write_text(""), "files that only one of the runs has: .tmp-model"),
        (lambda folder: (folder / "result.json").unlink(), "files that only one of the runs has: result.json"),
    ],
)
def test_what_differs_is_found(tmp_path: Path, harm: Callable[[Path], object], says: str) -> None:
    one, other = made(tmp_path / "one"), made(tmp_path / "other")
    assert soaked.differences(one, other, 2) == []
    harm(other)
    assert any(says in text for text in soaked.differences(one, other, 2))


KILL = {"kill": 3, "phase": "saving", "step": 9, "saved": 8}


@pytest.mark.parametrize(
    ("line", "before", "message", "says"),
    [
        ({}, [{"saved": 8}], [], None),
        ({"step": 10}, [], [], None),  # as many as there are between two checkpoints
        ({"step": 11}, [], [], "kill 3 (saving) lost 3 steps"),
        ({}, [{"saved": 10}], [], "kill 3 (saving): checkpoints went back from 10 to 8"),
        (
            {},
            [],
            ["step-000008 is damaged"],
            "kill 3 (saving) left a checkpoint that is not whole: step-000008 is damaged",
        ),
    ],
)
def test_what_a_kill_may_not_cost_is_found(
    line: dict[str, int], before: list[dict[str, int]], message: list[str], says: str | None
) -> None:
    assert soaked.wrong(KILL | line, before, 2, message) == says


def test_a_checkpoint_that_would_be_passed_over_is_found(tmp_path: Path) -> None:
    assert soaked.damaged(tmp_path) == []
    for step in (1, 2):
        checkpoint.save_checkpoint(tmp_path / "checkpoints", step, {"w": torch.ones(3)}, {"a": step}, keep=2)
    assert soaked.damaged(tmp_path) == []
    state = tmp_path / "checkpoints" / "step-000002" / "state.json"
    state.write_bytes(state.read_bytes()[:-1])
    assert "step-000002" in soaked.damaged(tmp_path)[0]
    (tmp_path / "checkpoints" / "step-000001" / "manifest.json").unlink()
    assert soaked.damaged(tmp_path)


def test_many_kills_have_to_fall_into_every_phase() -> None:
    assert soaked.missed(soaked.PHASES, 200) == []
    assert soaked.missed(["saving", "logging"], 99) == []  # of few, none may by chance
    assert soaked.missed(soaked.PHASES[1:], 200) == ["no kill fell into: starting"]


def test_what_did_not_hold_once_is_not_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(one: soak.Soak) -> dict[str, Any]:
        raise soak.Broken(message.pop())

    message = ["again", "once", "once"]
    monkeypatch.setattr(soak.Soak, "watched", broken)
    argv = ["--folder", str(tmp_path / "soak"), "--results", str(tmp_path / "soak.json"), "--steps", "9"]
    monkeypatch.setattr(soak, "adopt", lambda: None)
    monkeypatch.setattr(soak.signal, "signal", lambda *_: None)
    for found in (["once"], ["once"], ["once", "again"]):
        assert soak.main(argv) == 1
        assert json.loads((tmp_path / "soak.json").read_text())["broken"] == found
    monkeypatch.setattr(soaked, "code", lambda: "other")
    with pytest.raises(SystemExit, match="of other code"):
        soak.main(argv)


def test_the_log_is_read_from_its_end(tmp_path: Path) -> None:
    assert soaked.logged(tmp_path) == 0
    long = [{"step": k, "x": "y" * 1000} for k in range(200)]
    write_rows(tmp_path / "metrics.jsonl", long)
    assert soaked.logged(tmp_path) == 199
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 200, "x')  # being written
    assert soaked.logged(tmp_path) == 199
    assert len(soaked.rows(tmp_path / "metrics.jsonl")) == 200


@linux
def test_what_a_process_holds_and_has_started() -> None:
    argv = [sys.executable, "-c", "print('here', flush=True); input()"]
    child = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == "here\n"  # before that it may hold next to nothing
        assert child.pid in watched.below(os.getpid())
        assert watched.memory(child.pid) > 1
        assert watched.descriptors(child.pid) >= 3
    finally:
        child.kill()
        child.communicate()
    assert child.pid not in watched.below(os.getpid())


@pytest.mark.full
@linux
def test_a_run_that_is_killed_ends_as_one_that_is_not(tmp_path: Path) -> None:
    few = ["--prompts-per-step", "2", "--samples-per-prompt", "4", "--evaluation.problems", "2"]
    argv = ["--steps", "6", "--kills", "2", "--watch", "1", "--folder", str(tmp_path / "soak")]
    results = tmp_path / "soak.json"
    script = Path(soak.__file__)
    command = [sys.executable, str(script), *argv, "--results", str(results)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}

    def part(*more: str) -> int:
        child = subprocess.run(
            [*command, *more, "--", *few], env=environment, capture_output=True, text=True, check=False
        )
        assert "Traceback" not in child.stderr, child.stdout + child.stderr
        return child.returncode

    assert part("--only", "watched") == soak.PAUSED
    assert part("--minutes", "0") == soak.PAUSED
    assert not results.exists()
    assert part("--only", "killed") == soak.PAUSED
    assert not results.exists()
    assert part() == 0
    found: dict[str, Any] = json.loads(results.read_text())
    assert (found["kills"], found["broken"], sum(found["phases"].values())) == (2, [], 2)
    assert len((tmp_path / "soak" / "kills.jsonl").read_text().splitlines()) == 2
    text = faults.soak_section(found)
    assert "2 kills" in text
    assert "does not hold" not in text
    (tmp_path / "soak" / "pieces" / "result.json").unlink()  # only the end is done again
    assert part() == 0
