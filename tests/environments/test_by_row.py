"""Several environments in one run: each row plays in the one that it names, and groups come back in the rows' order."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import policygrad as pg
from policygrad.environments.by_row import RowEnvironments, load_row_environments, split_names
from policygrad.environments.nim import NIM
from policygrad.environments.registry import code_references, resolve_environment
from policygrad.errors import ConfigError, DataError
from policygrad.rollout.environment import Observation, Step, find_capabilities

OPENED = list[str]()


class Echo:
    """Shows the prompt with its name before it; rewards every answer by 1."""

    name = "echo"

    def __init__(self, example: pg.Example) -> None:
        self.example = example

    @classmethod
    def opening(cls, example: pg.Example) -> Observation:
        return Observation(f"{cls.name}: {example.prompt}")

    async def reset(self) -> Observation:
        return self.opening(self.example)

    async def step(self, action: Any) -> Step:
        return Step(reward=1.0, metrics={"words": float(len(action.text.split()))})


class Other(Echo):
    name = "other"

    async def step(self, action: Any) -> Step:
        return Step(reward=0.25)


class Opened:
    """A factory that is entered when a run begins."""

    def __call__(self, example: pg.Example) -> Echo:
        return Echo(example)

    def __enter__(self) -> Opened:
        OPENED.append("in")
        return self

    def __exit__(self, *details: object) -> None:
        OPENED.append("out")


def zero(completions: list[str], **columns: Any) -> list[float]:
    return [0.0 for _ in completions]


def rows(path: Path, *names: str | None) -> str:
    lines = [{"prompt": f"{i} + 1 =\n", "answer": "x", "environment": name} for i, name in enumerate(names)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def test_each_row_plays_in_its_own_environment(random_model: Path, tmp_path: Path) -> None:
    task = rows(tmp_path / "rows.jsonl", "echo", None, "other", "single", "echo", "other", "echo", None)
    run = pg.Run(
        model=str(random_model),
        task=task,
        reward=(zero,),
        steps=1,
        prompts_per_step=8,
        samples_per_prompt=2,
        sampling=pg.SamplingParams(max_tokens=6),
        evaluation=pg.EvaluationConfig(problems=0),
        output=str(tmp_path / "run"),
    )
    kinds = RowEnvironments({"echo": Echo, "other": Other})
    pg.train(run, environment=kinds, display=False)
    logged = [json.loads(line) for line in (tmp_path / "run" / "completions.jsonl").read_text().splitlines()]
    assert len(logged) == 16
    own = {0: 1.0, 4: 1.0, 6: 1.0, 2: 0.25, 5: 0.25}  # the environments' rewards, by the number in the prompt
    for row in logged:
        assert row["reward"] == own.get(int(row["prompt"].split()[0]), 0.0)
    steps = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    (metrics,) = [step for step in steps if "reward" in step]
    assert metrics["environment/echo/reward"] == 1.0
    assert metrics["environment/other/reward"] == 0.25
    assert metrics["environment/echo/words"] == metrics["environment/words"]


def test_an_unknown_name_is_refused_with_its_row(random_model: Path, tmp_path: Path) -> None:
    run = pg.Run(model=str(random_model), task=rows(tmp_path / "rows.jsonl", "echo", "calc"), reward=(zero,))
    says = r"rows.jsonl:2: its environment is 'calc', and the run has echo, single: .* rows:echo\+calc"
    with pytest.raises(DataError, match=says):
        pg.train(run, environment=RowEnvironments({"echo": Echo}), display=False)


def test_what_a_run_asks_of_its_environment_is_asked_of_all() -> None:
    OPENED.clear()
    kinds = RowEnvironments({"a": Opened(), "b": Echo})
    with kinds:
        assert OPENED == ["in"]
    assert OPENED == ["in", "out"]
    assert not find_capabilities(kinds).is_single_answer
    assert kinds.parser is None
    own = SimpleNamespace(parser="its own")
    assert RowEnvironments({"own": own}).parser == "its own"
    assert RowEnvironments({"own": own, "b": Echo}).parser is None
    with pytest.raises(ConfigError, match="no row's environment is one"):
        kinds.with_variables(["KEY"])
    with pytest.raises(ConfigError, match="in the environment nim the policy plays against itself"):
        RowEnvironments({"nim": NIM})


def test_names_are_loaded_and_their_code_is_known() -> None:
    kinds = load_row_environments("calculator")
    assert list(kinds.kinds) == ["calculator"]
    assert isinstance(resolve_environment("rows:calculator"), RowEnvironments)
    assert code_references("rows:mine.py:TOOLS+mcp:server --x+calculator") == [
        "mine.py",
        "mcp:server --x",
        "calculator",
    ]
    for wrong in ("", "a+", "a+a"):
        with pytest.raises(ConfigError, match="has an empty name or one twice"):
            split_names(wrong)
