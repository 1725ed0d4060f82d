"""verifiers itself, in a virtual environment of its own: make test-environments."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("verifiers", reason="verifiers has an environment of its own: make test-environments")

import policygrad as pg
from doubles.files import rows, untimed
from policygrad.environments.verifiers import document_parameters

pytestmark = pytest.mark.environments

WORDS = """
import verifiers.v1 as vf

__all__ = ["Words"]


class Data(vf.TaskData):
    answer: str


class Spell(vf.Task[Data, vf.State, vf.TaskConfig]):
    @vf.reward(weight=2.0)
    async def right(self, task, trace) -> float:
        return float(trace.last_reply == task.answer)

    @vf.reward(weight=0.5)
    async def brief(self, trace) -> float:
        if trace.last_reply == "raise":
            raise KeyError("a bug")
        return float(len(trace.last_reply) < 10)

    @vf.metric
    async def turns(self, trace) -> float:
        return float(trace.num_turns)


class Words(vf.Taskset[Spell, vf.TasksetConfig]):
    def load(self):
        for word in ("one", "two", "three", "four") * 10:
            yield Spell(Data(prompt=f"Say {word}", system_prompt="Be brief.", answer=word), self.config.task)
"""
TOOLS = '''
import verifiers.v1 as vf

__all__ = ["Sums"]


class Data(vf.TaskData):
    answer: str


class Arithmetic(vf.Toolset[vf.ToolsetConfig, vf.State]):
    async def setup_task(self, task):
        self.calls = 0

    @vf.tool
    async def add(self, a: int, b: int) -> str:
        """Adds two numbers."""
        self.calls += 1
        return f"{a + b} ({self.calls})"

    @vf.tool
    def fail(self, why: str) -> str:
        """Fails.

        Args:
            why: a reason
        """
        raise ValueError(why)


class Sum(vf.Task[Data, vf.State, vf.TaskConfig]):
    @classmethod
    def toolsets(cls, config):
        return [Arithmetic(vf.ToolsetConfig())]

    @vf.reward
    async def right(self, task, trace) -> float:
        return float(task.answer in trace.last_reply)

    @vf.reward
    async def asked(self, trace) -> float:
        return 0.1 * sum(message.content == "3 (1)" for message in trace.tool_messages)


class Sums(vf.Taskset[Sum, vf.TasksetConfig]):
    def load(self):
        yield Sum(Data(prompt=[vf.UserMessage(content="1 + 2 =")], answer="3"), self.config.task)
'''
REFUSED = {
    "endless": ("INFINITE = True", "is endless"),
    "boxed": ("async def setup(self, trace, runtime): pass", "needs a runtime .setup."),
    "judged": (
        "@vf.reward\n    async def ran(self, trace, runtime) -> float: return 1.0",
        "needs a runtime .the reward ran.",
    ),
    "stopping": (
        "@vf.stop\n    async def enough(self, trace: vf.Trace) -> bool: return True",
        "hooks into verifiers' rollouts .enough.",
    ),
}


PLUGGED = """
async def enough(trace: vf.Trace) -> bool:
    return True


async def ran(trace, runtime) -> float:
    return 1.0


class Configured(vf.TaskConfig):
    stops: dict[str, vf.DecoratedFunctionConfig] = {STOPS}
    metrics: dict[str, vf.DecoratedFunctionConfig] = {METRICS}
"""
"""What a task is configured with instead of decorated."""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    return tmp_path


@pytest.fixture
def taskset(here: Path, request: pytest.FixtureRequest) -> Callable[[str, str], str]:
    """Writes a module, of a name that no other test has, and gives the name."""

    def write(name: str, text: str) -> str:
        unique = f"{name}_{abs(hash(request.node.nodeid)) % 10**8}"
        (here / f"{unique}.py").write_text(text)
        return unique

    return write


def played(name: str, *turns: str, index: int = 0) -> tuple[Any, list[pg.Step]]:
    task = pg.load_task(f"verifiers:{name}")
    example = next(row for row in task.rows if row.columns["taskset_index"] == index)

    async def play() -> tuple[Any, list[pg.Step]]:
        environment = pg.Verifiers(name)(example)
        seen = await environment.reset()
        return seen, [await environment.step(pg.Action(turn)) for turn in turns]

    return asyncio.run(play())


def test_rows_are_prompts(taskset: Callable[[str, str], str]) -> None:
    name = taskset("words", WORDS)
    task = pg.load_task(f"verifiers:{name}")
    assert len(task.rows) == 40
    first = next(row for row in task.rows if row.columns["taskset_index"] == 0)
    assert first.prompt == ({"role": "system", "content": "Be brief."}, {"role": "user", "content": "Say one"})
    assert task.rewards == ()


def test_rewards_are_the_task_s_weighed_and_named(taskset: Callable[[str, str], str]) -> None:
    name = taskset("words", WORDS)
    seen, (step,) = played(name, "<think>which?</think> two\n", index=1)
    assert seen.content[1]["content"] == "Say two"
    assert (step.observation, step.stop_reason, step.reward) == (None, "answer", 2.5)
    assert step.metrics == {"reward_right": 1.0, "reward_brief": 1.0, "metric_turns": 1.0}
    assert played(name, "three, or rather four", index=1)[1][0].reward == 0.0
    with pytest.raises(KeyError, match="a bug"):  # which the episode reports; verifiers' own error only names the task
        played(name, "raise")
    endless = taskset("endless", WORDS.replace("return float(trace.last_reply == task.answer)", "return float('nan')"))
    with pytest.raises(ValueError, match="the rewards add up to nan, which is not a finite number"):
        played(endless, "one")


def test_tools_are_called_in_this_process(taskset: Callable[[str, str], str]) -> None:
    name = taskset("sums", TOOLS)
    call = json.dumps({"name": "arithmetic_add", "arguments": {"a": 1, "b": 2}})
    wrong = json.dumps({"name": "arithmetic_fail", "arguments": {"why": "because"}})
    seen, steps = played(name, f"<tool_call>{call}</tool_call>", f"<tool_call>{wrong}</tool_call>", "It is 3.")
    add, fail = (tool["function"] for tool in seen.tools)
    assert (add["name"], add["description"]) == ("arithmetic_add", "Adds two numbers.")
    assert add["parameters"]["properties"]["a"] == {"type": "integer", "description": "a"}
    assert fail["parameters"]["properties"]["why"]["description"] == "a reason"
    assert steps[0].observation.content == ({"role": "tool", "content": "3 (1)"},)
    assert steps[1].observation.content[0]["content"] == "error: ValueError: because"
    assert steps[2].reward == pytest.approx(1.1)
    assert steps[0].metrics["calls"] == 1.0


def test_every_parameter_is_documented() -> None:
    assert document_parameters("Adds.", ("a", "to_what")) == "Adds.\n\nArgs:\n    a: a\n    to_what: to what"
    assert document_parameters("Adds.\n\nArgs:\n    a: one", ("a",)) == "Adds.\n\nArgs:\n    a: one"
    assert document_parameters("Says the time.", ()) == "Says the time."


@pytest.mark.parametrize("kind", REFUSED)
def test_unsupported_features_of_verifiers_are_refused(taskset: Callable[[str, str], str], kind: str) -> None:
    more, says = REFUSED[kind]
    place = "class Words(" if kind == "endless" else "class Spell("
    head = next(line for line in WORDS.splitlines() if line.startswith(place))
    name = taskset(kind, WORDS.replace(head, f"{head}\n    {more}"))
    with pytest.raises(pg.ConfigError, match=says):
        pg.load_task(f"verifiers:{name}")


@pytest.mark.parametrize(
    ("field", "function", "says"),
    [
        ("STOPS", "enough", "hooks into verifiers' rollouts .enough."),
        ("METRICS", "ran", "needs a runtime .the metric ran."),
        ("STOPS", "missing", "cannot load what Spell is configured with"),
    ],
)
def test_what_a_configuration_plugs_in_is_refused_likewise(
    taskset: Callable[[str, str], str], here: Path, field: str, function: str, says: str
) -> None:
    name = taskset(f"plugged_{function}", "")
    fields = {"STOPS": "{}", "METRICS": "{}"}
    fields[field] = f'{{"{function}": vf.DecoratedFunctionConfig(fn="{name}:{function}")}}'
    configured = PLUGGED.replace("{STOPS}", fields["STOPS"]).replace("{METRICS}", fields["METRICS"])
    text = WORDS.replace("class Spell(", f"{configured}\n\nclass Spell(").replace(
        "vf.TaskConfig]):\n    @vf.reward(weight=2.0)", "Configured]):\n    @vf.reward(weight=2.0)"
    )
    text = text.replace(
        "class Words(", "class Settings(vf.TasksetConfig):\n    task: Configured = Configured()\n\n\nclass Words("
    )
    (here / f"{name}.py").write_text(text.replace("[Spell, vf.TasksetConfig]", "[Spell, Settings]"))
    with pytest.raises(pg.ConfigError, match=says):
        pg.load_task(f"verifiers:{name}")


def test_what_the_data_of_any_task_asks_of_a_runtime_is_refused(taskset: Callable[[str, str], str]) -> None:
    boxed = 'image="box" if word == "three" else None, answer=word'
    name = taskset("boxed", WORDS.replace("answer=word", boxed))
    with pytest.raises(pg.ConfigError, match=r"needs a runtime \(image of task 2\)"):
        pg.load_task(f"verifiers:{name}")


def test_a_run_says_what_a_reward_raised(taskset: Callable[[str, str], str], tmp_path: Path) -> None:
    name = taskset("words", WORDS.replace('if trace.last_reply == "raise":', "if True:"))
    run = pg.Run(
        algorithm=pg.GRPO,
        task=f"verifiers:{name}",
        environment=f"verifiers:{name}",
        steps=1,
        prompts_per_step=2,
        samples_per_prompt=2,
        sampling=pg.SamplingParams(max_tokens=12),
        evaluation=pg.EvaluationConfig(problems=0),
        output=str(tmp_path / "runs" / "buggy"),
    )
    with pytest.raises(pg.RewardError, match=rf"raised KeyError: 'a bug' at .*{name}\.py:\d+"):
        pg.train(run, display=False)


def test_a_missing_taskset_is_refused(here: Path) -> None:
    with pytest.raises(pg.ConfigError, match="no_such_taskset"):
        pg.load_task("verifiers:no-such-taskset")


def test_the_environment_needs_the_tasks_of_its_taskset(taskset: Callable[[str, str], str]) -> None:
    name = taskset("words", WORDS)
    with pytest.raises(pg.ConfigError, match=f"give --task verifiers:{name} too"):
        pg.Verifiers(name)(pg.Example("1 + 1 ="))


def test_a_run_resumes_bitwise(taskset: Callable[[str, str], str], tmp_path: Path) -> None:
    name = taskset("words", WORDS)
    run = pg.Run(
        algorithm=pg.GRPO,
        task=f"verifiers:{name}",
        environment=f"verifiers:{name}",
        steps=2,
        prompts_per_step=2,
        samples_per_prompt=2,
        sampling=pg.SamplingParams(max_tokens=12),
        evaluation=pg.EvaluationConfig(problems=2, samples_per_prompt=1),
        checkpoint=pg.CheckpointConfig(every=1, keep=3),
        output=str(tmp_path / "runs" / "whole"),
    )
    full = pg.train(run, display=False)
    said = [row for row in rows(full.output / "metrics.jsonl") if "environment/reward_right" in row]
    assert len(said) == 2
    pieces = tmp_path / "runs" / "pieces"
    pg.train(replace(run, output=str(pieces)), stop_after=1, display=False)
    pg.train(resume=pieces, display=False)
    assert untimed(full.output / "metrics.jsonl") == untimed(pieces / "metrics.jsonl")
    assert rows(full.output / "completions.jsonl") == rows(pieces / "completions.jsonl")
