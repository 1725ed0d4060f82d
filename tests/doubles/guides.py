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

from policygrad.commands.json_schemas import build_schema

SMALL = {  # what makes seconds of a minute; an option that is given twice is the last
    "train": "--prompts-per-step 2 --samples-per-prompt 4 --evaluation.problems 4 --evaluation.samples-per-prompt 1",
    "eval": "--problems 4 --samples 2",
}
SMALL_COMPARISON = {"--seeds": "1", "--tokens": "60", "--lr-grid": "1e-3", "--jobs": "1"}
COMPARED = "-- --prompts-per-step 2 --samples-per-prompt 2 --evaluation.problems 4 --evaluation.samples-per-prompt 1"
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
    if program == "python":
        runpy.run_path(argv[0], run_name="__main__")
        return []
    if program != "policygrad":
        subprocess.run([program, *argv], check=True)
        return []
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
    steps = ["--steps", "2"] if argv[0] == "train" and not {"--steps", "--config"} & {*argv} else []
    return [*argv, *SMALL.get(argv[0], "").split(), *steps]
