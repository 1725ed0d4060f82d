"""Reward functions written for verl, OpenRLHF and TRL run unchanged."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import policygrad as pg
from doubles.files import rows
from policygrad.errors import ConfigError, RewardError
from policygrad.rewards.base import TrainerState
from policygrad.rewards.resolve import find_code, resolve_reward
from policygrad.rewards.workers.pool import RewardPool
from policygrad.rewards.workers.worker import RewardCaller

VERL = """
import asyncio

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    assert data_source == "openai/gsm8k" and extra_info == {"index": 3}
    return {"score": float(solution_str == ground_truth), "acc": 0.5}

def plain(data_source, solution_str, ground_truth, extra_info=None):
    return len(solution_str) / 100

def older(data_source, solution_str, ground_truth, extra_info=None):
    return {"reward": 0.25}

async def later(data_source, solution_str, ground_truth, extra_info=None):
    await asyncio.sleep(0)
    return {"score": float(solution_str == ground_truth)}
"""
BATCHED = """
def compute_score(data_sources, solution_strs, ground_truths, extra_infos, **kwargs):
    assert data_sources == ["a", None] and extra_infos == [{"index": 3}, None]
    right = [text == truth for text, truth in zip(solution_strs, ground_truths, strict=True)]
    return [{"score": float(right[0]), "acc": True}, float(right[1])]

async def later(data_sources, solution_strs, ground_truths, extra_infos):
    import numpy
    return numpy.full(len(solution_strs), 0.5)

def no_score(data_source, solution_str, ground_truth, extra_info=None):
    return {"acc": 1.0}
"""
TRL = """
import numpy as np
import asyncio
def chat(completions, **kwargs): return [float(len(c[0]["content"])) for c in completions]
def text(prompts, completions, **kwargs): return [float(len(c)) for c in completions]
def ids(completions, completion_ids, **kwargs): return [float(sum(c)) for c in completion_ids]
def state(completions, trainer_state=None): return [float(trainer_state.global_step)] * len(completions)
def total(completions, trainer_state): return [trainer_state.max_steps]
def logs(completions, log_extra, log_metric=None, **kwargs):
    log_metric("length", np.array(len(completions[0])))
    log_metric("nothing", float("nan"))
    log_extra("y", completions)
    return [0.5 for _ in completions]
async def logs_later(completions, log_metric):
    await asyncio.sleep(0)
    for completion in completions:
        log_metric("a's", completion.count("a"))
    return [0.5 for _ in completions]
def logs_text(completions, log_metric):
    log_metric("x", "1")
def logs_names(completions, log_metric):
    log_metric("", 1)
async def column(completions, answer, **kwargs):
    return [float(sorted(kwargs) == ["completion_ids", "log_extra", "log_metric", "prompts", "trainer_state"])]
def worlds(completions, environments): return [0.0]
"""
OPENRLHF = """
import torch

def reward_func(queries, prompts, labels):
    found = torch.tensor([float(q[len(p):] == a) for q, p, a in zip(queries, prompts, labels, strict=True)])
    return {"rewards": found, "scores": found, "extra_logs": {"dummy": found}}

def as_tensor(queries, prompts, labels, **kwargs):
    return torch.tensor([float(len(p)) for p in prompts])
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "from_verl.py").write_text(VERL)
    (tmp_path / "from_openrlhf.py").write_text(OPENRLHF)
    (tmp_path / "batched.py").write_text(BATCHED)
    (tmp_path / "from_trl.py").write_text(TRL)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def total(name: str, prompts: list[object], texts: list[str], **columns: list[object]) -> list[float | None]:
    with RewardPool([name], num_workers=1) as pool:
        result = pool.score(prompts, texts, columns)
    assert None in result.total or not result.messages
    return result.total


def test_verl(here: Path) -> None:
    columns: dict[str, list[object]] = {
        "data_source": ["openai/gsm8k"] * 2,
        "reward_model": [{"style": "rule", "ground_truth": "4"}] * 2,
        "extra_info": [{"index": 3}] * 2,
        "answer": ["another"] * 2,  # verl's own column wins
    }
    assert total("verl:from_verl.py", ["", ""], ["4", "5"], **columns) == [1.0, 0.0]
    assert total("0.5*verl:from_verl.py:later if format:4", ["", ""], ["4", "5"], **columns) == [0.5, 0.0]
    assert total("verl:from_verl.py:older", [""], ["x"], answer=["4"]) == [0.25]
    assert total("verl:from_verl.plain*10", [""], ["xyz"], answer=["4"]) == [pytest.approx(0.3)]
    assert total("verl:from_verl.py:plain", [""], ["xyz"]) == [None]  # no ground truth


@pytest.mark.full
def test_openrlhf(here: Path) -> None:
    chat = ({"role": "system", "content": "Sum."}, {"role": "user", "content": "2+2"})
    assert total("openrlhf:from_openrlhf.py", ["2+2=", chat], ["4", "5"], answer=["4", "4"]) == [1.0, 0.0]
    assert total("openrlhf:from_openrlhf.py:as_tensor", ["2+2=", chat], ["", ""]) == [4.0, 9.0]


def test_files_count_as_code(here: Path) -> None:
    assert find_code("verl:from_verl.py") == find_code("verl:from_verl.py:plain") == ("from_verl.py",)
    assert find_code("openrlhf:package.module.f*2") == ("package.module",)
    with pytest.raises(ConfigError, match="there is no function 'compute_score'"):
        resolve_reward("verl:from_openrlhf.py")
    with pytest.raises(ConfigError, match=r"names no function: openrlhf:mine\.py"):
        resolve_reward("openrlhf:")


def test_a_function_of_verl_with_solution_strs_gets_the_full_batch(here: Path) -> None:
    columns: dict[str, list[object]] = {
        "data_source": ["a", None],
        "extra_info": [{"index": 3}, None],
        "answer": ["4", "5"],
    }
    assert total("verl:batched.py", ["", ""], ["4", "4"], **columns) == [1.0, 0.0]
    assert total("verl:batched.py:later", ["", "", ""], ["", "", ""], answer=["", "", ""]) == [0.5] * 3


def test_a_dict_without_score_is_named(here: Path) -> None:
    with RewardPool(["verl:batched.py:no_score"], num_workers=1) as pool:
        scores = pool.score([""], ["x"], {"answer": ["4"]})
    assert scores.total == [None]
    assert "returned {'acc': 1.0} (completion 'x'); it is a dict without 'score'" in scores.messages[0]


def test_a_function_without_its_prefix_is_answered_with_it(here: Path) -> None:
    for kind, name in (("verl", "from_verl.py:compute_score"), ("openrlhf", "from_openrlhf.py:reward_func")):
        with pytest.raises(RewardError, match=rf"A function of {kind} is {kind}:FILE\.py:NAME$"):
            total(name, ["2+2="], ["4"], answer=["4"])


@pytest.mark.full
def test_trl(here: Path) -> None:
    messages = [{"role": "user", "content": "2+2"}]
    rollout: dict[str, list[object]] = {
        "completion_ids": [[1, 2, 3], [4]],
        "trainer_state": [TrainerState(7), TrainerState(7)],
    }
    assert total("trl:from_trl.py:chat", [messages, messages], ["four", "4"], **rollout) == [4.0, 1.0]
    assert total("trl:from_trl.py:text", ["2+2=", "2+2="], ["four", "4"], **rollout) == [4.0, 1.0]
    for kind in ("", "trl:"):  # TRL's arguments reach any function that names them
        assert total(f"{kind}from_trl.py:ids", ["", ""], ["a", "b"], **rollout) == [6.0, 4.0]
        assert total(f"{kind}from_trl.py:state", ["", ""], ["a", "b"], **rollout) == [7.0, 7.0]
        assert total(f"{kind}from_trl.py:logs", ["", ""], ["a", "b"]) == [0.5, 0.5]
    assert total("0.5*trl:from_trl.py:ids if from_trl.py:state", ["", ""], ["a", "b"], **rollout) == [3.0, 2.0]
    assert total("trl:from_trl.py:column", ["", ""], ["a", "b"], **rollout, answer=["", ""]) == [1.0, 1.0]
    with RewardPool(["from_trl.py:chat", "trl:from_trl.py:total"], num_workers=1) as pool:
        scores = pool.score([messages], ["four"], {"trainer_state": [TrainerState(7)]})
    assert "trl:FILE.py:NAME" in scores.messages[0]
    assert "trainer_state has no 'max_steps' here" in scores.messages[1]
    with pytest.raises(
        RewardError, match=r"'trl:from_trl\.py:column' needs the column 'answer', and the task has: none"
    ):
        total("trl:from_trl.py:column", [""], [""], **{k: v[:1] for k, v in rollout.items()})
    with pytest.raises(ConfigError, match="needs the argument 'environments', which is not passed here"):
        resolve_reward("trl:from_trl.py:worlds")
    with pytest.raises(ConfigError, match=r"'trl:from_trl\.py' names no function: trl:mine\.py:my_function"):
        resolve_reward("trl:from_trl.py")


def test_what_a_function_of_trl_logs_reaches_the_scores(here: Path) -> None:
    """NaN is left out, and what gates log counts."""
    assert total("trl:from_trl.py:logs", ["", ""], ["a", "b"]) == [0.5, 0.5]
    names = ["trl:from_trl.py:logs", "exact_match if trl:from_trl.py:logs_later"]
    with RewardPool([*names, "trl:from_trl.py:logs_text", "trl:from_trl.py:logs_names"], num_workers=1) as pool:
        scores = pool.score(["", ""], ["aba", "b"], {"answer": ["", ""]})
    assert scores.logged == {"length": [3.0, 1.0], "a's": [2.0, 0.0]}
    messages = "".join(scores.messages)
    assert "log_metric('x', …) takes a number, not str" in messages
    assert "log_metric takes a name of at most 100 printable characters, not ''" in messages


def test_a_run_logs_what_a_function_of_trl_logs(here: Path, small: pg.Run) -> None:
    run = replace(small, reward=("trl:from_trl.py:logs",), steps=1, output=str(here / "run"))
    pg.train(run, display=False)
    completions = [row["completion"] for row in rows(here / "run" / "completions.jsonl")]
    (metrics,) = (row for row in rows(here / "run" / "metrics.jsonl") if row["step"] == 1)
    assert metrics["rewards/logged/length"] == pytest.approx(sum(map(len, completions)) / len(completions))
    assert "rewards/logged/nothing" not in metrics


def test_returned_values_that_are_no_numbers_are_explained() -> None:
    explained = {
        "1.0": "it is a text, not a number: return one number per completion, such as float('1.0')",
        "good": "it is a text, not a number: return one number per completion",
        "[3]": "it is a list, not a number: return one number per completion: a list of numbers, not of lists",
        "{'score': '1'}": "its 'score' is a text, not a number",
    }
    values: list[Any] = ["1.0", "good", [3], {"score": "1"}]
    for value, text in zip(values, explained.values(), strict=True):
        (result,) = RewardCaller("mine", lambda prompts, completions, value=value: [value])([""], ["x"], {})
        assert text in result.message, result.message
