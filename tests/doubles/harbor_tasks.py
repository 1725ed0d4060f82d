"""Small tasks in Harbor's format, written by the tests: each a folder with task.toml, instruction.md and tests/test.sh."""

from __future__ import annotations

from pathlib import Path

TOML = """version = "1.0"

[metadata]
difficulty = "easy"
category = "files"

[agent]
timeout_sec = 60.0

[verifier]
timeout_sec = 60.0
"""
WRITTEN = """#!/bin/bash
if [ "$(cat /app/answer.txt)" = "42" ]; then echo 1 > /logs/verifier/reward.txt; else echo 0 > /logs/verifier/reward.txt; fi
"""
COUNTED = """#!/bin/bash
right=$(grep -c right /app/lines.txt)
echo "{\\"reward\\": 0.$right, \\"lines\\": $right, \\"feedback\\": \\"$right of 9 lines\\"}" > /logs/verifier/reward.json
"""
BROKEN = """#!/bin/bash
echo "no such module: answers" >&2
exit 3
"""


def write_task(
    folder: Path,
    *,
    verifier: str = WRITTEN,
    dockerfile: str | None = "FROM ubuntu:24.04\nWORKDIR /app\nCOPY data/ /app/\n",
    toml: str = TOML,
    instruction: str = "Write 42 to /app/answer.txt.",
) -> Path:
    """Write a task whose Dockerfile needs files alone."""
    for name in ("environment/data", "tests", "solution"):
        (folder / name).mkdir(parents=True)
    (folder / "task.toml").write_text(toml)
    (folder / "instruction.md").write_text(f"{instruction}\n")
    (folder / "environment" / "data" / "lines.txt").write_text("wrong\n" * 4)
    if dockerfile is not None:
        (folder / "environment" / "Dockerfile").write_text(dockerfile)
    (folder / "tests" / "test.sh").write_text(verifier)
    (folder / "solution" / "solve.sh").write_text("echo 42 > /app/answer.txt\n")
    return folder


def write_tasks(top: Path) -> Path:
    """Write the three tasks: one that a single command solves, one with a fraction, one whose verifier fails."""
    write_task(top / "answer")
    write_task(top / "lines", verifier=COUNTED, instruction="Write right into lines of lines.txt.")
    write_task(top / "broken", verifier=BROKEN, instruction="Do what nobody can check.")
    return top
