"""AGENTS.md, docs/reference/json.md: commands run, paths exist, and the files are as short as they promise."""

from __future__ import annotations

import json
import os
import re
import runpy
import shlex
import sys
from pathlib import Path

import pytest

from doubles.forked import Forked
from doubles.guides import SMALL, Command, enter_line, enter_page
from doubles.small_task import write_task
from policygrad.cli import HELP

ROOT = Path(__file__).parents[2]
AGENTS = (ROOT / "AGENTS.md").read_text(encoding="utf-8")
PAGE = (ROOT / "docs" / "reference" / "json.md").read_text(encoding="utf-8").partition("## What each command prints")[0]
COMPARE = (ROOT / "docs" / "compare.md").read_text(encoding="utf-8")
COMMANDS = "".join(re.findall(r"```sh\n(.*?)```", AGENTS, re.DOTALL)).splitlines()


def test_agents_md_is_short_and_every_path_in_it_exists() -> None:
    assert len(AGENTS.splitlines()) <= 80
    paths = {text.partition("#")[0] for text in re.findall(r"\]\(([^)]+)\)", AGENTS)}
    paths |= {
        text for text in re.findall(r"`([\w./-]+)`", AGENTS) if "/" in text or text.endswith((".md", ".txt", ".py"))
    }
    paths |= {word for line in COMMANDS for word in shlex.split(line)[1:] if re.match(r"(src|tests|scripts)\b", word)}
    short = {"algorithms.py": "src/policygrad/algorithms.py"}  # named with its room elsewhere on the page
    assert len(paths) > 20
    for path in paths:
        assert (ROOT / short.get(path, path)).exists(), path


def run_program(argv: list[str]) -> None:
    """Run `python ARGV` in this process, from the repository."""
    os.chdir(ROOT)
    if argv[0] == "-m":
        sys.argv = argv[1:]
        runpy.run_module(argv[1], run_name="__main__")
    else:
        sys.argv = argv
        runpy.run_path(argv[0], run_name="__main__")


def read_help(argv: list[str], forked: Forked, output: Path) -> str:
    """Return what `python ARGV --help` prints."""
    with output.open("wb") as stdout:
        code = forked.exit_code(run_program, [*argv, "--help"], stdout=stdout.fileno())
    text = output.read_text(encoding="utf-8")
    assert code == 0, text
    return text


@pytest.mark.parametrize(
    "line", [pytest.param(line, marks=pytest.mark.full if "pytest" in line else ()) for line in COMMANDS]
)
def test_a_command_of_agents_md_runs(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run_command: Command, forked: Forked
) -> None:
    program, *argv = shlex.split(line.replace("/tmp/policygrad-try", str(tmp_path / "try")))
    assert program.startswith(".venv/bin/")
    tool = program.removeprefix(".venv/bin/")
    if tool == "policygrad":
        monkeypatch.chdir(tmp_path)
        enter_line(shlex.join([tool, *argv]), run_command)
    elif tool == "python" and argv[:2] == ["-m", "pytest"]:
        assert forked.exit_code(run_program, [*argv, "--collect-only", "-p", "no:cacheprovider"]) == 0
    else:  # what they find on the code as it is, `make lint` tells
        module = {
            "ruff": ["-m", "ruff", *argv[:1]],
            "mypy": ["-m", "mypy"],
            "lint-imports": ["-m", "importlinter.cli"],
            "python": argv[:1],
        }
        shown = read_help(module[tool], forked, tmp_path / "help.txt")
        assert all(word in shown for word in argv if word.startswith("--"))


@pytest.mark.parametrize(
    "page",
    [PAGE.partition("## Results that can be trusted")[0], pytest.param(PAGE, marks=pytest.mark.full)],
    ids=["start", "all"],
)
def test_the_commands_of_the_page_run(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run_command: Command
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(SMALL, "train", " ".join([SMALL["train"], *write_task(tmp_path)]))
    entered = dict(enter_page(page, run_command))
    [shown] = re.findall(r"```json\n(.*?)```", PAGE, re.DOTALL)
    assert entered["policygrad train gpro --json"] == [json.loads(shown)]
    assert Path(".agents/skills/policygrad-debug-run/SKILL.md").is_file()
    if page == PAGE:
        assert entered["policygrad verify run --json"][0]["status"] == "holds"


@pytest.mark.full
def test_the_preregistration_of_the_page_on_comparisons_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run_command: Command
) -> None:
    monkeypatch.chdir(tmp_path)
    enter_page(COMPARE.partition("## Preregistration")[2], run_command)
    report = json.loads(Path("comparison/comparison.json").read_text(encoding="utf-8"))
    assert report["preregistration"]["deviations"] == []


def test_the_page_is_two_screens_and_has_every_exit_code() -> None:
    assert len(PAGE.splitlines()) <= 100
    codes = re.findall(r"^\| (\d+) \|", PAGE, re.MULTILINE)
    documented = HELP.partition("Exit codes:")[2].partition("Documentation")[0]
    assert sorted(codes) == sorted(set(re.findall(r"\b\d+\b", documented.replace("Ctrl-C", ""))))
