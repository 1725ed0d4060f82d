"""Agents that others wrote, each in a virtual environment without policygrad: make test-agents."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import measure_repair
import pytest
import torch

import policygrad as pg
from doubles.files import rows
from doubles.scripted_sampler import ScriptedSampler
from policygrad.environments.agent_episodes import run_agent_episodes
from policygrad.environments.agent_program import AgentProgram
from policygrad.learners.base import LearnerSpec
from policygrad.learners.local.learner import LocalLearner
from policygrad.models.chat.rendering import render_ids
from policygrad.models.loading import load_model
from policygrad.models.tokenizer import Tokenizer, load_tokenizer
from policygrad.proxy.formats import ChatRequest
from policygrad.rollout.batching import batch_groups
from policygrad.rollout.conversation_tree import ConversationTree, OpenTurn
from policygrad.rollout.trajectory import TRAIN, EpisodeGroup, EpisodeSpec

HOME = os.environ.get("POLICYGRAD_AGENTS", "")
"""The folder of the virtual environments `smolagents` and `mini-swe-agent`."""
FOLDER = Path(HOME).resolve()  # before a test changes the working directory
EXAMPLES = Path(__file__).parents[2] / "examples"
PRODUCTS = EXAMPLES / "smolagents_products.py"
pytestmark = [
    pytest.mark.agents,
    pytest.mark.skipif(not HOME, reason="agents have environments of their own: make test-agents"),
]


def python_of(agent: str) -> str:
    return str(FOLDER / agent / "bin" / "python")


def smolagents(**options: Any) -> AgentProgram:
    return AgentProgram(function=f"{PRODUCTS}:main", python=python_of("smolagents"), **options)


def mini_swe_agent(folder: Path, **options: Any) -> AgentProgram:
    """The agent in a copy of a folder, with its settings elsewhere than in the home folder."""
    folder.mkdir()
    (folder / "hello.py").write_text("print('helo')\n")
    variables = {"MSWEA_SILENT_STARTUP": "1", "MSWEA_GLOBAL_CONFIG_DIR": str(folder.parent / "settings")}
    return AgentProgram(
        function=f"{EXAMPLES / 'mini_swe_agent.py'}:main",
        python=python_of("mini-swe-agent"),
        folder=str(folder),
        variables=variables,
        **options,
    )


@cache
def tiny() -> tuple[Any, Tokenizer]:
    model = load_model("tiny")
    return model, load_tokenizer("tiny", model)


def play(
    program: AgentProgram, example: pg.Example, *, samples: int = 1, max_tokens: int = 128, sampler: Any = None
) -> EpisodeGroup:
    model, encoder = tiny()
    sampler = sampler or pg.LocalSampler.from_tokenizer(model, encoder)
    spec, sampling = EpisodeSpec(example, (0, TRAIN, 1, 0), max_tokens), pg.SamplingParams(max_tokens=max_tokens)
    try:
        work = run_agent_episodes([spec], samples, sampling, sampler=sampler, encoder=encoder, program=program)
        (group,) = asyncio.run(work)
    finally:
        program.close()
    return group


@pytest.fixture
def turns(monkeypatch: pytest.MonkeyPatch) -> list[tuple[ChatRequest, OpenTurn]]:
    """What programs send, and what the policy reads for it."""
    noted, open_turn = list[tuple[ChatRequest, OpenTurn]](), ConversationTree.open_turn

    def note(tree: ConversationTree, request: ChatRequest) -> OpenTurn:
        turn = open_turn(tree, request)
        noted.append((request, turn))
        return turn

    monkeypatch.setattr(ConversationTree, "open_turn", note)
    return noted


def check_logp(group: EpisodeGroup) -> None:
    """A learner that reads the batch thinks of every sampled token what was recorded."""
    batch = batch_groups([group])
    learner = LocalLearner(tiny()[0], LearnerSpec(pg.DR_GRPO, lr=0.0, steps=1))
    recomputed = learner.evaluate(batch, frozenset({"logp_old"})).logp_old
    assert recomputed is not None
    assert batch.logp_sampler is not None
    assert int(batch.mask.sum()) == sum(t.num_sampled_tokens for t in group.trajectories)
    torch.testing.assert_close(recomputed[batch.mask], batch.logp_sampler[batch.mask], atol=1e-4, rtol=0)


def test_the_policy_reads_what_the_template_makes_of_smolagents_messages_token_by_token(
    turns: list[tuple[ChatRequest, OpenTurn]],
) -> None:
    """smolagents changes every reply that it repeats: it closes the code, and adds the calls to the same message."""
    encoder = tiny()[1]
    group = play(smolagents(), pg.Example("23 * 45", {"answer": 1035}), samples=6)
    assert len(turns) == sum(t.metrics["calls"] for t in group.trajectories) > 6
    for request, turn in turns:
        assert turn.context_ids.tolist() == render_ids(encoder, request.prompt, generation_prompt=True)  # type: ignore[arg-type]
    for trajectory in group.trajectories:
        assert trajectory.failure == ""
        assert trajectory.num_branches == trajectory.metrics["calls"]  # each text is read by itself
    check_logp(group)


def test_its_turns_end_at_the_stop_texts_and_continue_with_what_python_computed(
    turns: list[tuple[ChatRequest, OpenTurn]],
) -> None:
    replies = ["<code>\nx = 23 * 45\nprint(x)\n</code> and on", "<code>\nfinal_answer(x)\n</code>"]
    sampler = ScriptedSampler(tiny()[1], lambda key, context: replies[key[5] if len(key) > 5 else 0])
    (trajectory,) = play(smolagents(), pg.Example("23 * 45", {"answer": 1035}), sampler=sampler).trajectories
    assert (trajectory.reward, trajectory.stop_reason, trajectory.text) == (1.0, "finished", "1035")
    assert trajectory.metrics == {"calls": 2.0}
    sampled = [tiny()[1].hf.decode(s.tokens) for s in trajectory.segments if s.is_sampled]
    assert [text.rstrip() for text in sampled] == ["<code>\nx = 23 * 45\nprint(x)\n</code>", replies[1]]
    assert "Execution logs:\n1035" in turns[1][0].prompt[-1]["content"]  # type: ignore[index]


def test_a_model_is_shown_the_agents_text_and_trained_with_it(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    run_command: Callable[..., tuple[int, str, str]],
    turns: list[tuple[ChatRequest, OpenTurn]],
) -> None:
    """The commands of the example, at a small size."""
    monkeypatch.chdir(tmp_path)
    subprocess.run([python_of("smolagents"), str(PRODUCTS)], check=True)
    program = f"pg.AgentProgram(function={f'{PRODUCTS}:main'!r}, python={python_of('smolagents')!r})"
    Path("environment.py").write_text(f"import policygrad as pg\n\nPRODUCTS = {program}\n")
    short = ("--steps", "1", "--prompts-per-step", "2", "--samples-per-prompt", "2", "--max-tokens", "64")
    evaluated = ("--evaluation.problems", "2", "--evaluation.samples-per-prompt", "1")
    environment = ("--environment", "environment.py:PRODUCTS", "--output", "trained")
    shown = rows(Path("demonstrations.jsonl"))
    Path("few.jsonl").write_text("\n".join(Path("demonstrations.jsonl").read_text().splitlines()[:64]))
    for argv in (
        ("sft", "--model", "tiny", "--data", "few.jsonl", "--epochs", "1", "--output", "demonstrated"),
        (
            "train",
            "grpo",
            "--model",
            "demonstrated/model",
            "--task",
            "products.jsonl",
            *short,
            *evaluated,
            *environment,
        ),
    ):
        code, _, err = run_command(*argv)
        assert code == 0, err
    first = [r.prompt for r, _ in turns if len(r.prompt) == 2 and r.prompt[0]["content"]]  # type: ignore[index]
    prompts = [tuple(row["messages"][:2]) for row in shown]
    assert first
    assert all(prompt in prompts for prompt in first)
    _, step, _ = rows(Path("trained/metrics.jsonl"))  # between two evaluations
    assert step["environment/calls"] >= 1


def test_mini_swe_agent_calls_bash_and_submits(tmp_path: Path, turns: list[tuple[ChatRequest, OpenTurn]]) -> None:
    encoder = tiny()[1]
    commands = ["sed -i s/helo/hello/ hello.py", "cat hello.py", "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"]
    calls = [f'<tool_call>\n{{"name": "bash", "arguments": {{"command": "{c}"}}}}\n</tool_call>' for c in commands]
    sampler = ScriptedSampler(encoder, lambda key, context: calls[key[5] if len(key) > 5 else 0])
    program = mini_swe_agent(tmp_path / "repository", reward_command="grep -q hello hello.py")
    group = play(program, pg.Example("Correct the spelling.", {}), sampler=sampler, max_tokens=600)
    (trajectory,) = group.trajectories
    assert (trajectory.reward, trajectory.stop_reason) == (1.0, "finished")
    assert trajectory.metrics == {"calls": 3.0, "steps": 3.0, "submitted": 1.0}
    assert "print('hello')" in encoder.decode(turns[2][1].context_ids)
    sampled = [encoder.decode(s.tokens) for s in trajectory.segments if s.is_sampled]
    assert sampled == calls
    assert trajectory.num_branches == 1  # it repeats replies as it received them: one text


@pytest.mark.parametrize(
    ("options", "max_tokens", "reasons"),
    [({}, 400, {"finished"}), ({"max_calls": 1}, 400, {"calls"}), ({}, 6, {"tokens", "finished"})],
    ids=["its own", "max_calls", "max_tokens"],
)
def test_mini_swe_agent_ends_by_its_limits_and_by_those_of_the_run(
    tmp_path: Path, options: dict[str, Any], max_tokens: int, reasons: Sequence[str]
) -> None:
    """The small model knows no tool: the agent gives up after three replies without a call."""
    program = mini_swe_agent(tmp_path / "repository", reward_command="grep -q hello hello.py", **options)
    group = play(program, pg.Example("Correct the spelling.", {}), samples=2, max_tokens=max_tokens)
    for trajectory in group.trajectories:
        assert trajectory.stop_reason in reasons, trajectory.failure
        assert trajectory.reward == 0.0
        assert 1 <= trajectory.metrics["calls"] <= 3
    check_logp(group)


def test_mini_swe_agent_is_trained_on_bugs_of_a_repository(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run_command: Callable[..., tuple[int, str, str]]
) -> None:
    """The commands that docs/repair.md measures, at a small size: demonstrations, a step, and its verification."""
    monkeypatch.chdir(tmp_path)
    for path in (EXAMPLES / "repair").glob("*.py"):
        shutil.copy(path, tmp_path)
    Path("agents").symlink_to(FOLDER / "mini-swe-agent")
    *_, write_tasks, make_model, teach = measure_repair.PREPARE
    for command in (write_tasks, make_model):
        subprocess.run([sys.executable, *shlex.split(command)[1:]], check=True)
    data = Path("repair-tasks/demonstrations.jsonl")
    data.write_text("\n".join(data.read_text().splitlines()[:640]))
    train, verify = (text.format(seed=0) for text in (measure_repair.TRAIN, measure_repair.VERIFY))
    short = ("--steps", "1", "--prompts-per-step", "2", "--samples-per-prompt", "2", "--evaluation.problems", "2")
    for command, options in ((teach, ("--epochs", "1")), (train, (*short, "--evaluation.samples-per-prompt", "1"))):
        code, _, err = run_command(*shlex.split(command)[1:], *options)
        assert code == 0, err
    before, step, after = rows(Path("repaired-0/metrics.jsonl"))
    assert step["environment/calls"] >= 1
    if "environment/ended_tokens" not in step:  # a model that was taught this little may talk on
        assert step["environment/calls"] == step["environment/steps"]
    assert step.get("environment/ended_failed", 0) == 0
    assert 0 <= before["eval/reward"] <= 1
    assert 0 <= after["eval/reward"] <= 1
    first = json.loads(Path("repaired-0/completions.jsonl").read_text().splitlines()[0])
    assert first["prompt"] in [row["prompt"] for row in rows(Path("repair-tasks/train.jsonl"))]
    code, out, _ = run_command(*shlex.split(verify)[1:])
    assert code == 0, out
