"""The divergence guard: compare a step's metrics with those of the steps before it, and decide what happens to its updates."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from policygrad.training.config.guard import GuardConfig, SupervisedGuardConfig
from policygrad.training.loop import StepResult

METRIC_OPTIONS = {"grad_norm": "grad_norm", "kl": "kl", "kl_old": "kl", "entropy": "entropy", "loss": "loss"}
"""Metric → the field of `GuardConfig` or `SupervisedGuardConfig` that holds its factor."""
FLOORS = {"grad_norm": 1.0, "kl": 0.1, "kl_old": 0.1, "entropy": 1.0, "loss": 1.0}
"""No value up to this is a spike: a norm that clipping leaves alone, and nats for the rest."""
COLLAPSE = 0.3  # Nats. A median entropy below this cannot collapse any further.
ACTION_MESSAGES = {
    "warn": "training continues; --guard.action changes that",
    "skip": "its updates are undone",
    "rollback": "the run returns to the last checkpoint",
    "stop": "its updates are undone and the run stops",
}


@dataclass(frozen=True)
class GuardHistory:
    """The guard's memory, which a checkpoint holds."""

    recent: Mapping[str, list[float]] = field(default_factory=dict)
    """The last values of each metric, oldest first, without those of undone steps."""
    alarm_streak: int = 0  # consecutive steps with an alarm
    lr_factor: float = 1.0  # product of the factors by which rollbacks have lowered the learning rate


@dataclass(frozen=True)
class GuardDecision:
    """The guard's decision on one step."""

    spikes: Mapping[str, str] = field(default_factory=dict)  # metric → description of its spike
    constant_rewards: str | None = None  # description, where no reward distinguishes one completion from another
    action: str = "warn"

    @property
    def metrics(self) -> dict[str, float]:
        """The number of alarms, an entry for each of them, and whether the step's updates are undone."""
        names = [*self.spikes, *(["constant_rewards"] if self.constant_rewards else [])]
        undone = {"guard/undone": 1.0} if self.action != "warn" else {}
        return {"guard/alarms": float(len(names))} | {f"guard/{name}": 1.0 for name in names} | undone

    @property
    def stop_reason(self) -> str | None:
        """Why the run ends, resumably; None = it continues."""
        if self.action != "stop":
            return None
        alarms = "; ".join([*self.spikes.values(), *([self.constant_rewards] if self.constant_rewards else [])])
        return (
            f"{alarms}. The guard stopped the run (guard.action, guard.max_consecutive_alarms); the step is saved without its "
            "updates"
        )


AnyGuardConfig = GuardConfig | SupervisedGuardConfig


class DivergenceGuard:
    """Assesses every step of a run. `note` gets a message and its kind (None = the message); one message per kind is shown."""

    def __init__(self, config: AnyGuardConfig, note: Callable[[str, str | None], None]) -> None:
        self.config, self.history, self.decision = config, GuardHistory(), GuardDecision()
        self._note = note

    def restore(self, saved: Mapping[str, Any] | None, learner: Any) -> None:
        """Load the history of a checkpoint, and lower the learner's rate as earlier rollbacks did."""
        self.history = GuardHistory(**(saved or {}))
        if self.history.lr_factor != 1:
            learner.lr *= self.history.lr_factor

    def assess(self, step: int, values: Mapping[str, float], constant_rewards: bool = False) -> GuardDecision:
        """Decide on a step from its metrics, note its alarms, and remember them."""
        decision, history = assess_step(self.history, values, constant_rewards, self.config)
        if decision.action != "warn" and "reference/refreshed" in values:  # the earlier state lacks the new reference
            self._note("a step that refreshed the reference is not undone (guard.action)", None)
            decision, history = replace(decision, action="warn"), replace(history, lr_factor=self.history.lr_factor)
        action = ACTION_MESSAGES[decision.action]
        if decision.spikes:
            self._note(f"step {step}: {'; '.join(decision.spikes.values())} ({action})", None)
        if decision.constant_rewards and values.get("updates/taken"):
            self._note(f"step {step}: {decision.constant_rewards}; {action}", "constant rewards")
        self.decision, self.history = decision, history
        return decision


def assess_step(
    history: GuardHistory, values: Mapping[str, float], constant_rewards: bool, config: AnyGuardConfig
) -> tuple[GuardDecision, GuardHistory]:
    """Return the decision on a step with these metrics, and the history after it. A pure function.

    The values of an undone step are forgotten. Those of a step that is only warned of are kept, so that a new level does not
    remain a spike for ever.
    """
    spikes = {}
    for name, option in METRIC_OPTIONS.items():
        factor, before, value = getattr(config, option, 0.0), history.recent.get(name, []), values.get(name)
        if not factor or value is None or len(before) < config.window:
            continue
        median = statistics.median(before)
        if value > max(factor * median, FLOORS[name]) or not math.isfinite(value):
            spikes[name] = f"{name} is {value:.3g}, after {median:.3g} in the steps before"
        elif name == "entropy" and median >= COLLAPSE and value < median / factor:
            spikes[name] = f"{name} has fallen to {value:.3g}, after {median:.3g} in the steps before"
    alarm = bool(spikes) or constant_rewards
    streak = history.alarm_streak + 1 if alarm else 0
    action = "warn"
    if alarm and config.action != "warn":
        if spikes:
            action = config.action
        elif config.action != "stop" and values.get("updates/taken"):  # a step without updates has none to undo
            action = "skip"
        if 0 < config.max_consecutive_alarms <= streak:
            action = "stop"
    recent = {}
    for name in METRIC_OPTIONS:
        before, value = history.recent.get(name, []), values.get(name)
        if value is not None and math.isfinite(value) and action == "warn":
            before = [*before, float(value)]
        recent[name] = before[-config.window :]
    text = "no reward distinguishes one completion from another: all compared rewards are equal"
    lr_factor = history.lr_factor * (config.lr_factor if action == "rollback" else 1.0)
    streak = 0 if action == "stop" else streak  # a resumed run starts counting again
    decision = GuardDecision(spikes, text if constant_rewards else None, action)
    return decision, GuardHistory({name: v for name, v in recent.items() if v}, streak, lr_factor)


def has_constant_rewards(result: StepResult, values: Mapping[str, float]) -> bool:
    """Return whether no reward of a step distinguishes one completion from another: within groups if the algorithm compares only
    there (every Ψ is 0), otherwise in the whole rollout."""
    if (
        not result.algorithm.reads_reward
        or values.get("completions/failed_ratio") == 1.0
        or "value_pretraining" in values
        or values.get("frac_reward_zero_std") != 1.0
    ):
        return False
    batch = result.batch
    rewards = batch.reward[batch.counted]
    all_equal = len(rewards) > 1 and bool((rewards == rewards[0]).all())
    return all_equal or not bool((result.psi[batch.mask] != 0).any())
