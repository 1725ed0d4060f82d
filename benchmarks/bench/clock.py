"""What a process has used from step to step. Both sides import it, so it needs psutil and the standard library only."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]

MARK = "RESULT "
"""Begins the line of a worker's output that holds its result."""


def cpu_seconds() -> float:
    """CPU time of this process and its living children (reward workers), all threads, in user and system mode."""
    total = time.process_time()
    for child in psutil.Process().children(recursive=True):
        try:
            times = child.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += times.user + times.system
    return total


@dataclass
class Clock:
    """Marks the ends of steps."""

    marks: list[tuple[float, float]] = field(default_factory=list)
    """(wall, CPU) seconds; the first is where the first step begins."""
    left_out: tuple[float, float] = (0.0, 0.0)
    """(wall, CPU) seconds of what is no part of any step."""
    children: float = 0.0
    """MiB that the children held, together, when the last step ended."""

    def mark(self) -> None:
        self.marks.append((time.perf_counter() - self.left_out[0], cpu_seconds() - self.left_out[1]))
        found = 0
        for child in psutil.Process().children(recursive=True):
            try:
                found += child.memory_info().rss
            except psutil.NoSuchProcess:
                continue
        self.children = found / 2**20

    @contextmanager
    def apart(self) -> Iterator[None]:
        """What is done inside is left out."""
        wall, cpu = time.perf_counter(), cpu_seconds()
        yield
        before = self.left_out
        self.left_out = (before[0] + time.perf_counter() - wall, before[1] + cpu_seconds() - cpu)

    def steps(self) -> list[dict[str, float]]:
        """Seconds of every step, the first included."""
        return [{"wall": b[0] - a[0], "cpu": b[1] - a[1]} for a, b in pairwise(self.marks)]


def peak_mib() -> float:
    """The largest resident set that this process has had, everything included: the interpreter, torch, the model.
    VmHWM, not getrusage's, which begins with what the process that started this one held."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(float(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM:"))  # KiB


class Moved:
    """How far one weight matrix has moved since this was made: of one, so that a copy of the model is not part of the peak."""

    def __init__(self, model: Any) -> None:
        self.weight = next(p for n, p in model.named_parameters() if "q_proj" in n and p.ndim == 2)
        self.before = self.weight.detach().float().clone()

    def __call__(self) -> float:
        """Root mean square of the change."""
        return float((self.weight.detach().float() - self.before).pow(2).mean().sqrt())


def sum_turns(facts: dict[str, list[int]], turns: int) -> dict[str, list[int]]:
    """What was seen at every turn, summed over the turns of a step; completions are the same ones in each."""
    found = {name: [sum(seen[i : i + turns]) for i in range(0, len(seen), turns)] for name, seen in facts.items()}
    return {**found, "completions": [count // turns for count in found["completions"]]}


def problems(facts: dict[str, Any], steps: int, completions: int, tokens: int | None) -> list[str]:
    """What is wrong with a worker's run, if it has not done the work: its `facts` are lists with an entry per step, and
    `moved`, `updates`."""
    found = []
    for name, wanted in (("completions", completions), ("tokens", tokens)):
        if wanted is not None and any(got != wanted for got in facts[name]):
            found.append(f"{name} per step {facts[name]}, not {wanted}")
    for name in ("completions", "tokens", "prompt_tokens", "loss", "grad_norm"):
        if len(facts[name]) != steps:
            found.append(f"{len(facts[name])} steps have {name}, not {steps}")
    for name in ("loss", "grad_norm"):
        if not all(map(math.isfinite, facts[name])):
            found.append(f"{name} is not finite: {facts[name]}")
    if facts["updates"] != steps:
        found.append(f"{facts['updates']} optimiser steps, not {steps}")
    if not 0 < facts["moved"] < math.inf:
        found.append(f"the weights have moved by {facts['moved']}")
    return found


def say(clock: Clock, data: str, facts: dict[str, Any], versions: dict[str, str]) -> None:
    """Prints a worker's result; data: where its prompts are from."""
    found = {"data": data, "steps": clock.steps(), "peak_mib": peak_mib(), "children_mib": clock.children}
    print(MARK + json.dumps({**found, "facts": facts, "versions": versions}), flush=True)


def heard(output: str) -> dict[str, Any] | None:
    """The result in a worker's output."""
    lines = [line for line in output.splitlines() if line.startswith(MARK)]
    found: dict[str, Any] | None = json.loads(lines[-1].removeprefix(MARK)) if lines else None
    return found
