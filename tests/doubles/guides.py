"""Pages whose blocks are entered from top to bottom at a small size: files are written, and commands are run."""

from __future__ import annotations

import json
import re
import runpy
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema

from doubles.comparison import forking_runs
from doubles.small_task import write_task
from policygrad.commands.json_schemas import build_schema

SMALL = {  # what makes seconds of a minute; an option that is given twice is the last
    "train": "--prompts-per-step 2 --samples-per-prompt 4 --max-tokens 12 --evaluation.problems 2 "
    "--evaluation.samples-per-prompt 1 --rewards.num-workers 1",
    "eval": "--problems 2 --samples 2",
}
SMALL_COMPARISON = {"--seeds": "1", "--tokens": "60", "--lr-grid": "1e-3", "--jobs": "1"}
OWN_TASK = "--task small_sums.jsonl --reward exact_match"
"""Where a line names none: reasoning-gym's, the default, takes seconds to import in every reward worker."""
COMPARED = f"-- {SMALL['train']} {OWN_TASK} --samples-per-prompt 2"
Command = Callable[..., tuple[int, str, str]]


def list_blocks(page: str) -> list[tuple[str, str]]:
    """(head, text) of every block of code: `sh`, or `python NAME`, a file."""
    return re.findall(r"```(sh|python \S+)\n(.*?)```", page, re.DOTALL)


def enter_page(page: str, run_command: Command) -> list[tuple[str, list[Any]]]:
    """Enter the blocks; return each line of a policygrad command with the JSON that it printed."""
    entered = list[tuple[str, list[Any]]]()
    for head, text in list_blocks(page):
        if head != "sh":
            Path(head.split()[1]).write_text(text, encoding="utf-8")
            continue
        for line in text.replace("\\\n", " ").splitlines():
            line, _, remark = line.partition("  # ")
            entered.append((line.strip(), enter_line(line, run_command, expected=2 if "exit code 2" in remark else 0)))
    return entered


def enter_line(line: str, run_command: Command, expected: int = 0) -> list[Any]:
    """Enter a line, and return the JSON of its output, which is checked against the command's schema."""
    program, *argv = shlex.split(line)
    write_own_task()
    if program == "python":
        runpy.run_path(argv[0], run_name="__main__")
        return []
    if program != "policygrad":
        subprocess.run([program, *argv], check=True)
        return []
    with forking_runs():
        code, out, err = run_command(*shrink(argv))
    assert code == expected, err
    if "--json" not in argv:
        return []
    lines = [json.loads(text) for text in out.splitlines()]
    assert lines, line
    for value in lines:
        jsonschema.validate(value, build_schema(argv[0]))
    return lines


def shrink(argv: list[str]) -> list[str]:
    if argv[0] == "compare":
        small = [SMALL_COMPARISON.get(before, word) for before, word in zip(["", *argv], argv, strict=False)]
        return [*small, *COMPARED.split()] if "--preregister" in argv else small
    given, more = {*argv}, SMALL.get(argv[0], "").split()
    if argv[0] == "train" and not {"--steps", "--config"} & given:
        more += ["--steps", "2"]
    if argv[0] == "train" and not {"--task", "--config", "--environment"} & given:
        more += OWN_TASK.split()
    return [*argv, *more]


def write_own_task() -> None:
    """Write the file that `OWN_TASK` names into the current folder."""
    write_task(Path(), "small_sums.jsonl")
