"""docs/environments.md, on tasks in Harbor's format: its task is one, its command runs, and its task is solved as it says."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from doubles.files import rows
from doubles.scripted_sampler import conversation
from policygrad.environments.harbor import Harbor
from policygrad.errors import ConfigError
from policygrad.models.loading import load_model
from policygrad.models.tokenizer import load_tokenizer
from policygrad.sandbox.backends import find_backend
from policygrad.tasks.registry import load_task

TEXT = (Path(__file__).parents[2] / "docs" / "environments.md").read_text(encoding="utf-8")
PAGE = TEXT.partition("## Tasks in Harbor's format")[2].partition("\n## ")[0]
BLOCKS: dict[str, str] = dict(re.findall(r"```python (\w+)\n(.*?)```", PAGE, re.DOTALL))
COMMANDS = [shlex.split(line) for line in re.findall(r"^(policygrad .*)$", PAGE, re.MULTILINE)]


def run_block(name: str) -> dict[str, Any]:
    names: dict[str, Any] = {"__name__": "page"}
    exec(compile(BLOCKS[name], name, "exec", dont_inherit=True), names)
    return names


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the page's task, on a machine with bubblewrap."""
    try:
        find_backend("bubblewrap")
    except ConfigError as error:
        pytest.skip(str(error))
    monkeypatch.chdir(tmp_path)
    run_block("task")
    return tmp_path


@pytest.mark.full
def test_the_command_runs(folder: Path, run_command: Callable[..., tuple[int, str, str]]) -> None:
    (argv,) = COMMANDS
    fewer = ["--prompts-per-step", "1", "--samples-per-prompt", "2", "--evaluation.problems", "1"]
    code, _, err = run_command(*argv[1:], *fewer)
    assert code == 0, err
    measured = rows(folder / "harbor-run" / "metrics.jsonl")
    assert [row["step"] for row in measured if "environment/calls" in row] == [1, 2]


@pytest.mark.parametrize(("command", "reward"), [("wc -l < words.txt > answer.txt", 1.0), ("ls", 0.0)])
def test_the_task_of_the_page_is_solved_by_a_command(folder: Path, command: str, reward: float) -> None:
    environment = run_block("options")["TASKS"]
    assert isinstance(environment, Harbor)
    (example,) = load_task("harbor:tasks").rows
    call = "<tool_call>" + json.dumps({"name": "bash", "arguments": {"command": command}}) + "</tool_call>"
    tokenizer = replace(load_tokenizer("tiny", load_model("tiny")), context_length=100_000)
    group, _ = conversation(tokenizer, replace(environment, engine="none"), example, [call, "done"])
    (trajectory,) = group.trajectories
    assert (trajectory.failure, trajectory.reward) == ("", reward)
