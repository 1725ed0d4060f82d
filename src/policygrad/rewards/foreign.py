"""Reward functions with the signatures of verl and OpenRLHF, as they are: `verl:mine.py`, `openrlhf:reward_func.py`.

Sources: verl, docs/preparation/reward_function.rst ("Customized"), and its reward managers for what may be returned; OpenRLHF,
README, "Single-Turn Agent: Reinforced Fine-tuning with Custom Rewards" (--remote_rm_url FILE).
"""

import asyncio
import inspect
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from policygrad.errors import ConfigError, RewardError
from policygrad.rewards.imports import FileFunction, imported
from policygrad.rewards.types import RewardFunction

USUAL = {"verl": "compute_score", "openrlhf": "reward_func"}
"""What each looks for in a file."""


@dataclass(frozen=True)
class Verl:
    """`compute_score(data_source, solution_str, ground_truth, extra_info)` → a number, or a dict with `score` (older: `reward`).

    ground_truth is the column `reward_model`'s, or `answer`; data_source and extra_info are the columns of these names, or None.
    It may be async.
    """

    function: RewardFunction

    @property
    def reward_prepare(self) -> Any:
        return getattr(self.function, "reward_prepare", None)

    def __call__(self, prompts: Any, completions: Sequence[str], **columns: Sequence[Any]) -> Any:
        rows = [{name: values[i] for name, values in columns.items()} for i in range(len(completions))]
        found: list[Any] = [
            self.function(
                data_source=row.get("data_source"),
                solution_str=text,
                ground_truth=_truth(row),
                extra_info=row.get("extra_info"),
            )
            for text, row in zip(completions, rows, strict=True)
        ]
        if any(inspect.isawaitable(said) for said in found):
            return _awaited(found)
        return [_score(said) for said in found]


@dataclass(frozen=True)
class OpenRLHF:
    """`reward_func(queries, prompts, labels)` → a tensor or list of rewards, or a dict with `rewards`.

    queries are prompts with their completions behind them, labels the column `answer` (--label_key there), lists of one. The prompt
    of a chat is what its messages say, a line each: the model's template is not known here.
    """

    function: RewardFunction

    @property
    def reward_prepare(self) -> Any:
        return getattr(self.function, "reward_prepare", None)

    def __call__(self, prompts: Sequence[Any], completions: Sequence[str], **columns: Sequence[Any]) -> Any:
        asked = [_text(prompt) for prompt in prompts]
        queries = [prompt + text for prompt, text in zip(asked, completions, strict=True)]
        labels = list(columns.get("answer", [None] * len(queries)))
        said: Any = self.function(queries=queries, prompts=asked, labels=labels)
        return said["rewards"] if isinstance(said, Mapping) else said


def foreign(kind: str, name: str) -> RewardFunction:
    """The adapter around `FILE.py`, `FILE.py:NAME` or `package.module.NAME`. Raises ConfigError."""
    if not name:
        raise ConfigError(f"reward '{kind}:' names no function: {kind}:mine.py, {kind}:mine.py:{USUAL[kind]}")
    file, function = place(kind, name)
    found = FileFunction.load(str(Path(file).resolve()), function) if file.endswith(".py") else imported(name)
    return Verl(found) if kind == "verl" else OpenRLHF(found)


def place(kind: str, name: str) -> tuple[str, str]:
    """(file or module, function)."""
    if name.endswith(".py"):
        return name, USUAL[kind]
    file, colon, function = name.rpartition(":")
    return (file, function) if colon else (name.rpartition(".")[0], name.rpartition(".")[2])


def _truth(row: Mapping[str, Any]) -> Any:
    model = row.get("reward_model")
    if isinstance(model, Mapping) and "ground_truth" in model:
        return model["ground_truth"]
    if "answer" not in row:
        raise RewardError("verl's functions are given a ground_truth, and the task has neither reward_model nor answer")
    return row["answer"]


async def _awaited(found: Sequence[Awaitable[Any] | Any]) -> list[Any]:
    return [_score(said) for said in await asyncio.gather(*(_one(said) for said in found))]


async def _one(said: Any) -> Any:
    return await said if inspect.isawaitable(said) else said


def _score(said: Any) -> Any:
    if not isinstance(said, Mapping):
        return said
    return said["score"] if "score" in said else said["reward"]


def _text(prompt: Any) -> str:
    return prompt if isinstance(prompt, str) else "".join(f"{message.get('content') or ''}\n" for message in prompt)
