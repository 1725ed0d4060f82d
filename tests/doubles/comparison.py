"""A comparison without a model: rows as a plan has them, and a runner that writes what a run of theirs would leave.

And runs that are forks of this process, where the comparison itself is what a test is about.
"""

from __future__ import annotations

import json
import math
import os
import random
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any, NoReturn

import pytest

from doubles.forked import forking
from policygrad import cli
from policygrad.compare import runner
from policygrad.compare.plan import FIRST_TUNING_SEED, ComparisonPlan, ComparisonRow
from policygrad.errors import RunError

MEASURE = {"model": "tiny", "task": "embedded", "max_tokens": 32, "problems": 256, "samples": 2}
STEPS, EVERY, TOKENS = 12, 4, 1000
"""Of a run of the stub: steps, steps between evaluations, sampled tokens a step."""


def row(label: str, grid: Sequence[float] = (), updates: int = 1, **changes: Any) -> ComparisonRow:
    settings = {"updates_per_rollout": updates, "samples_per_prompt": 8, "prompts_per_step": 64, "lr": 3e-4}
    given = {"argv": (label,), "algorithm": label, "measure": MEASURE, "settings": settings} | changes
    return ComparisonRow(label=label, tuned_option="--lr" if grid else "", grid=tuple(grid), **given)


def plan(*rows: ComparisonRow, seeds: int = 2, tuning: int = 2, ladder: dict[str, str] | None = None) -> ComparisonPlan:
    """Of the stub's budget."""
    return ComparisonPlan(
        rows=rows,
        tokens=STEPS * TOKENS,
        seeds=tuple(range(seeds)),
        tuning_seeds=tuple(range(FIRST_TUNING_SEED, FIRST_TUNING_SEED + tuning)),
        command="policygrad compare " + " ".join(r.label for r in rows),
        version="0",
        ladder=ladder or {},
    )


@dataclass
class StubRunner:
    """Leaves in every run's folder what `policygrad train` does: scores rise from 0.2 to a height that the words decide.

    heights: by the algorithm's name. fails: words of a run that fails. before: called before a run, with how many ran.
    """

    heights: dict[str, float] = field(default_factory=dict)
    fails: Callable[[Sequence[str]], bool] = lambda words: False
    before: Callable[[int], None] = lambda count: None
    ran: list[Path] = field(default_factory=list)
    stopped: int = 0
    told: threading.Event = field(default_factory=threading.Event)
    """Set when it is told to stop."""

    def __call__(self, words: Sequence[str], folder: Path) -> None:
        self.before(len(self.ran))
        self.ran.append(folder)
        if self.fails(words):
            raise RunError("policygrad train … ended with code 1:\nNaN in the loss")
        if not self.stopped:
            write_run(folder, self.heights.get(words[1], 0.8), _given(words, "--lr"), int(_given(words, "--seed") or 0))

    def stop(self) -> None:
        self.stopped += 1
        self.told.set()


def write_run(folder: Path, height: float, lr: float | None, seed: int, updates: int = 1, steps: int = STEPS) -> None:
    """A finished run whose curve saturates at `height`, lower the further lr is from 1e-3, with some noise by seed."""
    draw = random.Random(f"{height}/{lr}/{seed}")
    height -= 0 if lr is None else 0.1 * abs(math.log10(lr / 1e-3))
    score = [
        0.2 + (height - 0.2) * (1 - math.exp(-4 * step / steps)) + draw.uniform(-0.02, 0.02)
        for step in range(steps + 1)
    ]
    lines: list[dict[str, Any]] = [{"step": 0, "eval/reward": score[0], "eval/reward_stderr": 0.02}]
    for step in range(1, steps + 1):
        signs = {"completions/mean_length": 9.0 + step, "completions/truncated_ratio": 0.1, "entropy": 0.5, "kl": 0.02}
        times = {"time/rollout": 0.5, "time/update": 0.5 * updates, "updates/taken": float(updates)}
        lines.append({"step": step, "tokens/sampled": float(TOKENS), **times, **signs})
        if step % EVERY == 0 or step == steps:
            lines.append({"step": step, "eval/reward": score[step], "eval/reward_stderr": 0.02})
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "result.json").write_text(json.dumps({"steps": steps, "tokens": steps * TOKENS}))
    (folder.with_name(folder.name + ".cost.json")).write_text(json.dumps({"cpu_seconds": 20.0, "seconds": 21.0}))


def _given(words: Sequence[str], option: str) -> float | None:
    return float(words[words.index(option) + 1]) if option in words else None


class ForkedRun:
    """A run of a comparison as `subprocess.Popen` starts it, but forked from this process, which has imported torch."""

    def __init__(self, command: Sequence[str], *, stdout: IO[bytes], env: Mapping[str, str], **_: object) -> None:
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            _enter([*command[len(runner.PROGRAM) :]], stdout.fileno(), env)


def _enter(argv: list[str], output: int, environment: Mapping[str, str]) -> NoReturn:
    code = 1
    try:
        os.setsid()
        os.dup2(output, 1)
        os.dup2(output, 2)
        sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
        os.environ.clear()
        os.environ.update(environment)
        code = cli.main(argv)
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:
        traceback.print_exc(file=sys.__stderr__)
    os._exit(code)


@contextmanager
def forking_runs() -> Iterator[None]:
    """While the block runs, a comparison's runs are forks. That it starts programs is for test_runner.py to show."""
    popen = SimpleNamespace(Popen=ForkedRun, DEVNULL=subprocess.DEVNULL, STDOUT=subprocess.STDOUT)
    with forking(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "subprocess", popen)
        yield
