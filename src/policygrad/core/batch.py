"""What flows through the equation: a batch of completions, and one forward pass over it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from policygrad.errors import ConfigError

PER_TOKEN = (
    "mask",
    "tokens",
    "positions",
    "logp_old",
    "logp_ref",
    "logp_sampler",
    "values",
    "returns",
    "token_reward",
    "step_end",
    "implicit_reward",
    "weight",
    "version",
    "entropy",
    "turn_state",
    "selected",
)
PER_COMPLETION = (
    "group",
    "reward",
    "bootstrap",
    "truncated",
    "in_statistics",
    "grad_logp_sq_norm",
    "example_id",
    "level",
    "levels",
    "baseline",
    "demonstration",
)
_BOOL = ("step_end", "selected", "truncated", "in_statistics", "demonstration")
_INTEGER = ("positions", "version", "turn_state", "example_id", "level", "levels")


@dataclass(frozen=True, kw_only=True, eq=False)
class Batch:
    """Completions of a rollout, or one update's share of them; right-padded.

    Shapes: B completions, T token positions. A position counts when `mask` is True; what stands elsewhere, NaN
    included, is never read. A completion whose mask is all False (it failed, or was masked as overlong) leaves the
    group statistics and every denominator.

    Raises:
        ConfigError: a field whose shape or dtype does not fit, named.
    """

    mask: Tensor
    """[B, T] bool; True = sampled by the policy (tool output and padding are False)."""
    group: Tensor
    """[B] int64; which prompt a completion answers (an index into `prompts`)."""
    reward: Tensor
    """[B] floating; the completion's terminal reward (float64 stays float64)."""
    tokens: Tensor | None = None
    """[B, T] int64; the completion's token ids."""
    prompts: tuple[Tensor, ...] | None = None
    """One row of token ids per group; with `tokens` it is what a learner needs."""
    positions: Tensor | None = None
    """[B, T] int64; how many tokens stood before each where it was read or sampled, the prompt's included; None = the prompt's and
    all before it in the row. Where it falls back, a chat template wrote the conversation anew: the token follows the last one
    before it of a depth less by one, and what stands between is not seen. Whatever counts completions counts the row once."""
    logp_old: Tensor | None = None
    """[B, T] nats, log π_old; None = the policy itself, so that every ratio is 1."""
    logp_ref: Tensor | None = None
    """[B, T] nats, log π_ref."""
    logp_sampler: Tensor | None = None
    """[B, T] nats, log μ: what the engine that sampled says."""
    values: Tensor | None = None
    """[B, T] critic's value before each token is taken."""
    returns: Tensor | None = None
    """[B, T] the critic's targets."""
    bootstrap: Tensor | None = None
    """[B] value after the last token of an episode that was cut off."""
    token_reward: Tensor | None = None
    """[B, T] rewards at tokens; a completion's total is `reward` plus their sum."""
    step_end: Tensor | None = None
    """[B, T] bool; where process rewards sit."""
    implicit_reward: Tensor | None = None
    """[B, T] nats·β; r_φ(o_t) = β·log(π_φ/π_ref) of a reward model that learns beside the policy."""
    weight: Tensor | None = None
    """[B, T] multiplies the aggregation coefficients: γ^t, reweighting."""
    version: Tensor | None = None
    """[B, T] int64; the version of the weights that drew each token; None = the policy's own, as it is now."""
    truncated: Tensor | None = None
    """[B] bool; stopped by the token budget, not by the policy."""
    in_statistics: Tensor | None = None
    """[B] bool; counts in group statistics. None = the completions whose mask has a True."""
    grad_logp_sq_norm: Tensor | None = None
    """[B] ‖∇_θ log π_θ(o)‖², the squared norm of the completion's score; 0 where the mask is all False."""
    entropy: Tensor | None = None
    """[B, T] nats, of π_old before each token, exact over the vocabulary."""
    selected: Tensor | None = None
    """[B, T] bool; the tokens that a part has chosen among all of an update (`Part.select_tokens`)."""
    turn_state: Tensor | None = None
    """[B, T] int64; the state that a token's turn began in: equal within a group = the same state."""
    example_id: Tensor | None = None
    """[B] int64; which of the task's examples a completion answers, the same whenever it comes again."""
    level: Tensor | None = None
    """[B] int64; how difficult, from 0 on, the task was to make the prompt (`Filter.task_level`)."""
    levels: Tensor | None = None
    """[B] int64; the number of levels that the task has."""
    baseline: Tensor | None = None
    """[B] the reward of the greedy completion of the same prompt."""
    demonstration: Tensor | None = None
    """[B] bool; True = not the policy's own: written by someone else, or sampled long ago. Its `logp_sampler` is what that one
    says, 0 where nobody does. None = all are the policy's."""
    routed_experts: Tensor | None = None
    """[B, T, layers, k] integers; the experts that sampled: where a mixture sent each token when it was read, -1 = not read."""
    prompt_routed_experts: tuple[Tensor, ...] = ()
    """[P, layers, k] of each group's prompt, with `experts`."""
    rewards: Tensor | None = None
    """[B, K] what each reward function said, before its weight; `reward` is their weighted sum."""
    reward_names: tuple[str, ...] = ()
    """K names of `rewards`."""
    reward_weights: tuple[float, ...] = ()
    """K weights of `rewards`."""

    def __post_init__(self) -> None:
        if self.mask.ndim != 2 or self.mask.dtype != torch.bool:
            raise ConfigError(
                f"Batch.mask must be a bool tensor [B, T], not {self.mask.dtype} {list(self.mask.shape)}: "
                "True where the policy sampled the token (mask.bool() converts 0/1)"
            )
        for names, shape, letters in (
            (PER_TOKEN, self.mask.shape, "[B, T]"),
            (PER_COMPLETION, self.mask.shape[:1], "[B]"),
        ):
            for name in names:
                value = getattr(self, name)
                if value is not None and value.shape != shape:
                    raise ConfigError(
                        f"Batch.{name} has shape {list(value.shape)}, expected {letters} = {list(shape)} as in Batch.mask"
                    )
        self._check_types()
        if not self.reward.is_floating_point():
            raise ConfigError(f"Batch.reward must be floating, not {self.reward.dtype}: reward.float() converts it")
        if self.group.is_floating_point() or self.group.dtype == torch.bool:
            raise ConfigError(f"Batch.group must hold integers (which prompt), not {self.group.dtype}")

    def _check_types(self) -> None:
        for names, dtype, word in ((_BOOL, torch.bool, "bool"), (_INTEGER, torch.int64, "int64")):
            for name in names:
                value = getattr(self, name)
                if value is not None and value.dtype != dtype:
                    way_out = "bool() converts 0/1" if dtype == torch.bool else "long() converts it"
                    raise ConfigError(f"Batch.{name} must be {word}, not {value.dtype}: {name}.{way_out}")
        if self.routed_experts is not None and self.routed_experts.shape[:2] != self.mask.shape:
            raise ConfigError(
                f"Batch.routed_experts has shape {list(self.routed_experts.shape)}, expected [B, T, layers, k], [B, T] = {list(self.mask.shape)}"
            )
        if self.rewards is not None:
            named, weighed, shape = len(self.reward_names), len(self.reward_weights), list(self.rewards.shape)
            if shape != [len(self.mask), named] or weighed != named:
                raise ConfigError(
                    f"Batch.rewards has shape {shape}, expected [B, K] with B = {len(self.mask)} and K the number of "
                    f"reward_names ({named}) and of reward_weights ({weighed})"
                )

    @property
    def counted(self) -> Tensor:
        """[B] bool; completions that count in group statistics."""
        return self.mask.any(1) if self.in_statistics is None else self.in_statistics

    @property
    def policy_tokens(self) -> Tensor:
        """[B, T] bool; what the policy itself sampled: the mask without demonstrations."""
        return self.mask if self.demonstration is None else self.mask & ~self.demonstration[:, None]

    @property
    def lengths(self) -> Tensor:
        """[B] int64; sampled tokens per completion."""
        return self.mask.sum(1)

    def select(self, rows: Tensor) -> Batch:
        """The completions at `rows` (indices or a bool mask [B]); `prompts` stays whole, since `group` points into it."""
        return self._map(lambda value: value[rows])

    def to(self, device: torch.device | str) -> Batch:
        """The same batch on another device."""
        moved = self._map(lambda value: value.to(device))
        return moved if self.prompts is None else replace(moved, prompts=tuple(row.to(device) for row in self.prompts))

    def _map(self, f: Callable[[Tensor], Tensor]) -> Batch:
        current = {field.name: getattr(self, field.name) for field in fields(self)}
        changed: dict[str, Any] = {name: f(value) for name, value in current.items() if isinstance(value, Tensor)}
        return replace(self, **changed)


@dataclass(frozen=True, eq=False)
class Forward:
    """What one forward pass yields for the objective; a bare `logp` tensor is accepted in its place."""

    logp: Tensor
    """[B, T] nats, log π_θ of the tokens taken, with its graph."""
    entropy: Tensor | None = None
    """[B, T] nats, exact over the vocabulary; only when a term needs it."""
    values: Tensor | None = None
    """[B, T] the critic's values, with their graph."""
    kl_old: Tensor | None = None
    """[B, T] nats, exact KL(π_old‖π_θ) over the vocabulary."""
    kl_ref: Tensor | None = None
    """[B, T] nats, exact KL(π_θ‖π_ref) over the vocabulary."""


def require_field(value: Tensor | None, part: object, name: str) -> Tensor:
    """The batch field `name`, or an error that says which part asked for it."""
    if value is None:
        raise ConfigError(
            f"{type(part).__name__} needs Batch.{name}, which is None: fill it (a learner's `evaluate` does), or drop the part"
        )
    return value


Coefficients = tuple[Tensor, ...]
"""c [B, T] of the policy term, and of each further term."""
