"""Reward functions written for verl and OpenRLHF run unchanged."""

from __future__ import annotations

from pathlib import Path

import pytest

from policygrad.errors import ConfigError
from policygrad.rewards.resolve import find_code, resolve_reward
from policygrad.rewards.workers.pool import RewardPool

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
