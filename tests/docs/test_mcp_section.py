"""docs/environments.md, on MCP servers: every block and every command of it runs, at a small size, and does what the page says."""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import policygrad as pg
from doubles.files import rows
from doubles.scripted_sampler import conversation
from policygrad.models.loading import load_model
from policygrad.models.tokenizer import load_tokenizer
from policygrad.utils.user_code import load_object

TEXT = (Path(__file__).parents[2] / "docs" / "environments.md").read_text(encoding="utf-8")
PAGE = TEXT.partition("## Tools of MCP servers")[2].partition("## Self-play")[0]
BLOCKS: dict[str, str] = dict(re.findall(r"```(?:python|json) ([\w-]+)\n(.*?)```", PAGE, re.DOTALL))
COMMANDS = [shlex.split(line) for line in re.findall(r"^    (policygrad .*)$", PAGE, re.MULTILINE)]
FEWER = ["--prompts-per-step", "2", "--samples-per-prompt", "2", "--max-tokens", "16", "--evaluation.problems", "2"]
FEWER += ["--rewards.num-workers", "1"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the page's files, in which `python` is this one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:/usr/bin:/bin")
    for name, block in {"server.py": "server", "tools.py": "tools", "own.py": "rows-of-their-own"}.items():
        Path(name).write_text(BLOCKS[block])
    lines = BLOCKS["rows"].splitlines()
    questions = [{"prompt": [{"role": "user", "content": f"{i} times 3 ="}], "answer": str(3 * i)} for i in range(8)]
    Path("products.jsonl").write_text("\n".join([*lines, *map(json.dumps, questions)]))
    return tmp_path


@pytest.mark.full
def test_the_commands_run(folder: Path, run_command: Callable[..., tuple[int, str, str]]) -> None:
    by_name, by_file, resumed = COMMANDS
    steps = ["--steps", "2", *FEWER]
    code, _, err = run_command(*by_name[1:], *steps, "--output", "trained", "--stop-after", "1")
    assert code == 0, err
    assert run_command("train", "--resume", "trained")[0] == pg.ConfigError.code
    assert run_command(*resumed[1:])[0] == 0
    assert run_command(*by_file[1:], *steps, "--output", "other")[0] == 0
    for run in ("trained", "other"):
        assert [row["step"] for row in rows(Path(run, "metrics.jsonl")) if "environment/calls" in row] == [1, 2]


@pytest.mark.parametrize("name", ["tools.py:TOOLS", pytest.param("own.py:TOOLS", marks=pytest.mark.full)])
def test_the_tools_of_a_file_are_those_of_its_server(folder: Path, name: str) -> None:
    question = pg.Example(({"role": "user", "content": "12 times 34 ="},), {"answer": "408"})
    turns = ["<tool_call>multiply(12, 34)</tool_call>", "It is 408"]
    with load_object(str(folder / name.partition(":")[0]) + ":TOOLS", "page") as environment:
        group, _ = conversation(load_tokenizer("tiny", load_model("tiny")), environment, question, turns)
    (trajectory,) = group.trajectories
    assert "<tool_response>\n408\n</tool_response>" in trajectory.text
    assert trajectory.reward == (1.0 if name.startswith("tools") else None)
