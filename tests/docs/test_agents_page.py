"""docs/agents.md, docs/proxy.md: their blocks and commands run, at a small size, and do what the page says."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from doubles.files import rows
from policygrad.environments.agent_program import AgentProgram
from policygrad.proxy.formats import FORMATS

PAGE = (Path(__file__).parents[2] / "docs" / "agents.md").read_text(encoding="utf-8")
API = (Path(__file__).parents[2] / "docs" / "proxy.md").read_text(encoding="utf-8")
BLOCKS: dict[str, str] = dict(re.findall(r"```python ([\w-]+)\n(.*?)```", PAGE, re.DOTALL))
COMMANDS = [shlex.split(line) for line in re.findall(r"^    (policygrad .*)$", PAGE, re.MULTILINE)]
FEWER = [
    *("--prompts-per-step", "2", "--samples-per-prompt", "2", "--max-tokens", "16", "--evaluation.problems", "0"),
    *("--rewards.num-workers", "1"),  # each imports reasoning_gym
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the page's agent."""
    monkeypatch.chdir(tmp_path)
    Path("agent.py").write_text(BLOCKS["agent"])
    return tmp_path


@pytest.mark.full
def test_the_agent_is_trained_evaluated_and_resumed(
    folder: Path, run_command: Callable[..., tuple[int, str, str]]
) -> None:
    _, train, evaluate = COMMANDS
    code, _, err = run_command(*train[1:], "--steps", "2", *FEWER)
    assert code == 0, err
    code, _, err = run_command(*train[1:], "--steps", "2", *FEWER, "--stop-after", "1")
    assert code == 0, err
    code, _, err = run_command("train", "--resume", "runs/grpo-2")
    assert code == 0, err
    whole, resumed = (Path("runs", name, "model", "model.safetensors").read_bytes() for name in ("grpo-1", "grpo-2"))
    assert whole == resumed
    steps = [row for row in rows(Path("runs/grpo-1/metrics.jsonl")) if "environment/calls" in row]
    assert [row["step"] for row in steps] == [1, 2]
    assert all(row["environment/calls"] == 1.0 for row in steps)
    code, out, _ = run_command("verify", "runs/grpo-1")
    assert code == 0, out
    code, _, err = run_command(*evaluate[1:], "--problems", "1", "--samples", "1")
    assert code == 0, err


@pytest.mark.full
def test_a_model_alone_is_served_to_the_agent(folder: Path) -> None:
    """In a process of its own: a fork of one that has computed cannot compute in several threads."""
    command = [sys.executable, "-m", *COMMANDS[0], "--json", "--record", "record.jsonl"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            started = json.loads(server.stdout.readline())
            assert "url" in started, started
            environment = {**os.environ, "OPENAI_BASE_URL": f"{started['url']}/v1", "OPENAI_API_KEY": "any"}
            code = "import agent; print(agent.main({'prompt': 'Solve for q: 7*q + 4 = 39'}), end='')"
            done = subprocess.run(
                [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
            )
            server.send_signal(signal.SIGINT)
            assert json.loads(server.stdout.readline()) == {"event": "stopped"}
            assert server.wait() == 0
        finally:
            server.kill()
    assert done.returncode == 0, done.stderr
    (row,) = rows(Path("record.jsonl"))
    assert row["text"] == done.stdout
    assert len(row["token_ids"]) == len(row["logp"])


def test_the_page_s_options_and_paths_are_those_of_the_code(folder: Path) -> None:
    Path("broken-repository").mkdir()
    Path("repository").mkdir()
    Path("examples").symlink_to(Path(__file__).parents[2] / "examples")
    Path("agents/bin").mkdir(parents=True)
    Path("agents/bin/python").symlink_to(sys.executable)
    namespace: dict[str, object] = {}
    for name in ("repair", "smolagents", "codex"):
        exec(BLOCKS[name], namespace)
    assert isinstance(namespace["REPAIR"], AgentProgram)
    defaults = AgentProgram("true")
    for name in ("max_calls", "max_processes"):
        assert re.search(rf"^\| `{name}`.*\| {getattr(defaults, name):g} \|", PAGE, re.MULTILINE)
    assert all(f"`{api.path}`" in API for api in FORMATS)
    assert f"`concurrency` programs ({defaults.concurrency})" in PAGE
    variables = re.findall(r"^\| `([A-Z_`, ]+)` \|", PAGE, re.MULTILINE)
    assert "POLICYGRAD_RESULT" in variables[-1]


def test_the_table_is_of_the_pinned_versions_and_each_did_its_task() -> None:
    root = Path(__file__).parents[2]
    wanted = tomllib.loads((root / "tests" / "agents.toml").read_text(encoding="utf-8"))["agent"]
    found = json.loads((root / "docs" / "results" / "agents.json").read_text(encoding="utf-8"))["agents"]
    packages = {row["name"]: [*row.get("npm", ()), *row.get("pip", ())] for row in wanted}
    assert {row["name"]: row["packages"] for row in found} == packages
    for row in wanted:
        file = next(word for word in row["start"].split() if word.startswith("examples/")).partition(":")[0]
        assert (root / file).is_file()
        assert f"](../{file})" in PAGE
    for row in found:
        assert all(e["reward"] == 1 and not e["failure"] and e["equal"] == e["contexts"] for e in row["episodes"])
