"""Rewards as TRL computes them: functions and models that are called in this process with all completions of a generation."""

from __future__ import annotations

import asyncio
import inspect
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from policygrad.trl.data import Row, is_conversation

RewardFunction = Any  # a name, a model, or a function, plain or async


@dataclass(eq=False)
class RewardLog:
    """What reward functions log beside their rewards: `log_extra(column, values)` and `log_metric(name, value)`."""

    columns: dict[str, list[Any]] = field(default_factory=lambda: defaultdict(list))
    metrics: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    def log_extra(self, column: str, values: Sequence[Any]) -> None:
        """Add a column to the table of completions."""
        self.columns[column].extend(values)

    def log_metric(self, name: str, value: float) -> None:
        """Log a number, averaged over the steps of a log entry."""
        self.metrics[name].append(float(value))


@dataclass(frozen=True, eq=False)
class Rewards:
    """The reward functions of a trainer."""

    functions: list[Any]
    names: list[str]
    tokenizers: list[Any]
    """The tokenizer of each reward model; None for a function."""
    template_options: Mapping[str, Any]
    """Arguments of the chat template that reward models read conversations in."""

    def score(
        self,
        rows: Sequence[Row],
        prompts: Sequence[Any],
        completions: Sequence[Any],
        completion_ids: Sequence[Sequence[int]],
        extra: Mapping[str, Any],
        run_async: Callable[..., Any],
    ) -> Tensor:
        """Return [B, K], the value of each function; NaN where it returned None.

        Args:
            extra: Further arguments: the trainer's state, and what logs.

        Raises:
            ValueError: A function returned another number of values than there are completions.
        """
        columns = {
            name: [row[name] for row in rows]
            for name in rows[0]
            if name not in ("prompt", "completion", "completion_ids")
        }
        arguments = {"prompts": prompts, "completions": completions, "completion_ids": completion_ids}
        arguments |= columns | dict(extra)
        returned: dict[int, Any] = {}
        pending: dict[int, Any] = {}
        for k, function in enumerate(self.functions):
            if isinstance(function, nn.Module):
                returned[k] = self._score_with_model(function, self.tokenizers[k], prompts, completions)
            elif is_async(function):
                pending[k] = function(**arguments)
            else:
                returned[k] = function(**arguments)
        if pending:

            async def wait() -> list[Any]:
                return await asyncio.gather(*pending.values())

            returned |= dict(zip(pending, run_async(wait()), strict=True))
        return torch.stack([self._to_tensor(k, returned[k], len(prompts)) for k in range(len(self.functions))], 1)

    def _to_tensor(self, k: int, values: Any, count: int) -> Tensor:
        values = [math.nan if value is None else float(value) for value in values]
        if len(values) != count:
            raise ValueError(
                f"The reward function '{self.names[k]}' returned {len(values)} rewards, but {count} were expected (one per "
                "completion): return one number, or None, for each"
            )
        return torch.tensor(values, dtype=torch.float32)

    def _score_with_model(
        self, model: nn.Module, tokenizer: Any, prompts: Sequence[Any], completions: Sequence[Any]
    ) -> list[float]:
        """Return the first logit of each text, read up to its last token."""
        if is_conversation(prompts[0]):
            texts = [
                tokenizer.apply_chat_template([*prompt, *completion], tokenize=False, **self.template_options)
                for prompt, completion in zip(prompts, completions, strict=True)
            ]
        else:
            texts = [prompt + completion for prompt, completion in zip(prompts, completions, strict=True)]
        inputs = tokenizer(
            text=texts, return_tensors="pt", padding=True, padding_side="right", add_special_tokens=False
        ).to(next(model.parameters()).device)
        with torch.inference_mode():
            values: list[float] = model(**inputs).logits[:, 0].float().tolist()
        return values


def is_async(function: Any) -> bool:
    """Return True for an async function, or an object whose call is one."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def name_function(function: Any) -> str:
    """Return what a reward function is called in the log."""
    inner = getattr(function, "func", function)  # functools.partial
    return str(getattr(inner, "__name__", type(inner).__name__))


def sum_rewards(values: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Return the weighted sums [B], and which completions any function has scored [B] bool."""
    scored = ~values.isnan().all(1)
    return (values * weights.to(values)).nansum(1), scored
