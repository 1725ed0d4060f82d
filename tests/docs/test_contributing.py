"""CONTRIBUTING.md: the example of a built-in reward is a reward once it has its row."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from policygrad.errors import ConfigError
from policygrad.rewards import resolve
from policygrad.rewards.resolve import RewardRow, list_rewards, resolve_reward

PAGE = (Path(__file__).parents[2] / "CONTRIBUTING.md").read_text(encoding="utf-8")
COLUMNS = {"keyword": ["Sum", "sum", None]}
TEXTS = ["The sum is 3", "It is 3", "3"]


@pytest.fixture
def scores(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`scores("keyword")` -> what the reward of this name gives to three completions."""
    [code] = re.findall(r"```python reward\n(.*?)```", PAGE, re.DOTALL)
    module = ModuleType("example_of_a_reward")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(compile(code, module.__name__, "exec", dont_inherit=True), vars(module))
    [row] = re.findall(r'`"(\w+)": RewardRow\("(\S+)",\s+"(\S+)"\)`', PAGE)
    name, plain, options = (text.replace("policygrad.rewards.builtin", module.__name__) for text in row)
    monkeypatch.setitem(resolve.REWARDS, name, RewardRow(plain, options))
    return lambda reward: resolve_reward(reward).function([""] * 3, TEXTS, **COLUMNS)


def test_the_example_scores_by_its_row(scores: Any) -> None:
    assert scores("keyword") == [1.0, 0.0, None]
    assert scores("keyword:ignore_case=no") == [0.0, 0.0, None]
    assert resolve_reward("0.5*keyword if exact_match").weight == 0.5
    assert "keyword" in list_rewards()


def test_an_option_that_it_does_not_have_is_refused(scores: Any) -> None:
    with pytest.raises(ConfigError, match="has no option 'case'; write keyword:ignore_case=…"):
        scores("keyword:case=no")
