"""The guard against divergence: a step's numbers against the steps before it, and what is then done with its updates."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from policygrad.checkpoint.format import load_latest
from policygrad.checkpoint.manager import Checkpointer
from policygrad.errors import ConfigError, RunError
from policygrad.learners.base import Learner
from policygrad.training.config.run import GuardConfig, SupervisedGuardConfig
from policygrad.training.loop import Progress, StepResult

METRIC_OPTIONS = {"grad_norm": "grad_norm", "kl": "kl", "kl_old": "kl", "entropy": "entropy", "loss": "loss"}
"""Metric, and the field of `GuardConfig` or `SupervisedGuardConfig` with its factor."""
FLOORS = {"grad_norm": 1.0, "kl": 0.1, "kl_old": 0.1, "entropy": 1.0, "loss": 1.0}
"""Below these no value is a spike: a norm that clipping leaves alone, the others in nats."""
COLLAPSE = 0.3
"""Nats: an entropy whose median is below has nothing left to lose."""


RestoreFn = Callable[[Mapping[str, Tensor], Mapping[str, Any]], object]
"""Gives what learns the state of a checkpoint: its tensors, its values."""
ACTION_MESSAGES = {
    "warn": "the run goes on; --guard.action does something about it",
    "skip": "its updates are undone",
    "rollback": "the run goes back to the last checkpoint",
    "stop": "its updates are undone, and the run stops",
}
"""What is done, in words."""


@dataclass(frozen=True)
class GuardHistory:
    """What the guard remembers: data in, data out, and a checkpoint holds it."""

    recent: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    """Of each metric the last values that were no spike, oldest first."""
    alarm_streak: int = 0
    """Steps in a row with an alarm."""
    lr_factor: float = 1.0
    """What rollbacks have made of the learning rate, as a factor."""

    def to_dict(self) -> dict[str, Any]:
        return {
            "recent": {k: list(v) for k, v in self.recent.items()},
            "row": self.alarm_streak,
            "scale": self.lr_factor,
        }

    @classmethod
    def from_dict(cls, said: Mapping[str, Any]) -> GuardHistory:
        return cls({k: tuple(v) for k, v in said["recent"].items()}, said["row"], said["scale"])


@dataclass(frozen=True)
class GuardDecision:
    """On one step. spikes, flat: what is odd, in words by name; `flat` is that no reward tells one answer from another."""

    spikes: Mapping[str, str] = field(default_factory=dict)
    constant_rewards: str | None = None
    action: str = "warn"

    @property
    def metrics(self) -> dict[str, float]:
        """For the log: how many alarms, and one entry for each; whether the step's updates were undone."""
        names = [*self.spikes, *(["no_spread"] if self.constant_rewards else [])]
        undone = {"guard/undone": 1.0} if self.action != "warn" else {}
        return {"guard/alarms": float(len(names))} | {f"guard/{name}": 1.0 for name in names} | undone

    @property
    def message(self) -> str:
        return "; ".join([*self.spikes.values(), *([self.constant_rewards] if self.constant_rewards else [])])


AnyGuard = GuardConfig | SupervisedGuardConfig


def assess_step(
    watched: GuardHistory, values: Mapping[str, float], flat: bool, guard: AnyGuard
) -> tuple[GuardDecision, GuardHistory]:
    """The verdict on a step of these metrics, and what is remembered of it. A pure function.

    A value that is undone is not remembered; one that is only warned of is, so that a new level is not a spike for ever.
    """
    spikes = {name: said for name in METRIC_OPTIONS if (said := _spike(name, watched.recent, values, guard))}
    alarm = bool(spikes) or flat
    row = watched.alarm_streak + 1 if alarm else 0
    action = "warn"
    if alarm and guard.action != "warn":
        undoes = guard.action != "stop" and bool(
            values.get("updates/taken")
        )  # where none was taken there is nothing to undo
        action = guard.action if spikes else "skip" if undoes else "warn"
        action = "stop" if guard.max_consecutive_alarms and row >= guard.max_consecutive_alarms else action
    kept = {}
    for name in METRIC_OPTIONS:
        before, value = watched.recent.get(name, ()), values.get(name)
        new = value is not None and math.isfinite(value) and action == "warn"
        kept[name] = ((*before, float(value)) if new and value is not None else before)[-guard.window :]
    words = "no reward tells one answer from another: all are equal where they are compared" if flat else None
    scale = watched.lr_factor * (guard.lr_factor if action == "rollback" else 1.0)
    row = 0 if action == "stop" else row  # which is resumed with other settings
    return GuardDecision(spikes, words, action), GuardHistory({k: v for k, v in kept.items() if v}, row, scale)


def _spike(
    name: str, recent: Mapping[str, tuple[float, ...]], values: Mapping[str, float], guard: AnyGuard
) -> str | None:
    factor, before, value = getattr(guard, METRIC_OPTIONS[name], 0.0), recent.get(name, ()), values.get(name)
    if not factor or value is None or len(before) < guard.window:
        return None
    usual = statistics.median(before)
    if value > max(factor * usual, FLOORS[name]) or not math.isfinite(value):
        return f"{name} is {value:.3g}, after {usual:.3g} in the steps before"
    if name == "entropy" and usual >= COLLAPSE and value < usual / factor:
        return f"{name} has fallen to {value:.3g}, after {usual:.3g} in the steps before"
    return None


def has_constant_rewards(done: StepResult, values: Mapping[str, float]) -> bool:
    """Whether no reward of a step tells one answer from another, whatever the algorithm compares: within groups where that is all
    it looks at (Ψ is 0 everywhere), else in the whole rollout."""
    if (
        not done.algorithm.reads_reward
        or values.get("completions/failed_ratio") == 1.0
        or "value_pretraining" in values
    ):
        return False
    batch = done.batch
    rewards = batch.reward[batch.counted]
    equal = len(rewards) > 1 and bool((rewards == rewards[0]).all())
    still = values.get("frac_reward_zero_std") == 1.0 and not bool((done.psi[batch.mask] != 0).any())
    return values.get("frac_reward_zero_std") == 1.0 and (equal or still)


class DivergenceGuard:
    """The guard of one process's share of a run. note: hears of an alarm, and with a kind only once of its kind."""

    def __init__(self, guard: AnyGuard, note: Callable[[str, str | None], None]) -> None:
        self.guard, self.history, self.decision = guard, GuardHistory(), GuardDecision()
        self._note, self._next = note, self.history
        self._undone, self._parts = False, None
        """Whether the step at hand was undone, and what the algorithm's parts remembered where it went back to."""

    def restore(self, said: Mapping[str, Any] | None, learner: object) -> None:
        """What a checkpoint says; the rate of what learns, its `lr`, as rollbacks have left it."""
        self.history = GuardHistory() if said is None else GuardHistory.from_dict(said)
        if self.history.lr_factor != 1:
            scale_lr(learner, self.history.lr_factor)

    def assess(self, step: int, values: Mapping[str, float], flat: bool = False) -> dict[str, float]:
        """The verdict on a step, which is told; its metrics. flat: no reward tells one answer from another."""
        verdict, watched = assess_step(self.history, values, flat, self.guard)
        if (
            verdict.action != "warn" and "reference/refreshed" in values
        ):  # a state of before has not the reference of before
            self._note("a step in which the reference was taken anew is not undone (guard.action)", None)
            verdict, watched = replace(verdict, action="warn"), replace(watched, lr_factor=self.history.lr_factor)
        if verdict.spikes:
            self._note(f"step {step}: {'; '.join(verdict.spikes.values())} ({ACTION_MESSAGES[verdict.action]})", None)
        if verdict.constant_rewards and values.get("updates/taken"):
            self._note(f"step {step}: {verdict.constant_rewards}; {ACTION_MESSAGES[verdict.action]}", "no spread")
        self.decision, self._next = verdict, watched
        return verdict.metrics

    @property
    def stop_reason(self) -> str | None:
        """Why the run is to end, resumably."""
        if self.decision.action != "stop":
            return None
        stopped = "The run was stopped (guard.action, guard.max_consecutive_alarms), and the step is saved without its updates"
        return f"{self.decision.message}. {stopped}"

    def check(self, step: int, resume: str) -> None:
        """Raises RunError where the verdict on the last step has ended the run. resume: the command that goes on."""
        if self.stop_reason:
            raise RunError(f"step {step}: {self.stop_reason}: {resume} goes on, at a lower --lr say")

    def apply(self, step: int, learner: object, put_back: RestoreFn, checkpointer: Checkpointer[Any]) -> bool:
        """The step is logged: what learns is put back before it, or at the newest intact checkpoint, where the verdict says so;
        whether it was. learner: has the rate, `lr`.

        Raises:
            CheckpointError: a rollback, and none of the checkpoints intact.
        """
        self.history = self._next
        if self.decision.action == "warn":
            return False
        rollback = self.decision.action == "rollback"
        saved = None
        if rollback:
            checkpointer.wait_for_save()
            saved = load_latest(checkpointer.folder, warn=lambda text: self._note(text, None))
        self._undone, self._parts = True, None
        if saved is not None:
            put_back(saved.tensors, saved.state)
            self._parts = saved.state.get("parts")
            self._note(f"step {step}: back to the weights of step {saved.step}, at a lower rate", None)
        else:
            assert checkpointer.snapshot is not None  # an action other than warn keeps it
            put_back(*checkpointer.snapshot)
        if rollback:
            scale_lr(learner, self.guard.lr_factor)
        return True

    def settle(self, before: Progress, after: Progress) -> tuple[Progress, bool]:
        """(the progress that holds: of a step that was undone its parts remember nothing; whether it went back further, and what
        waits is of weights that are gone)."""
        undone, self._undone = self._undone, False
        if not undone:
            return after, False
        if self._parts is None:
            return replace(after, state=before.state), False
        return replace(after, state=self._parts, leftover_groups=(), queued_rollouts=()), True


def check_rollback_lr(learner: Learner, guard: GuardConfig) -> None:
    """Raises ConfigError where a rollback is to lower a rate that the learner does not show."""
    if guard.action == "rollback" and getattr(learner, "lr", None) is None:
        raise ConfigError(
            f"guard.action rollback lowers the learning rate, and {type(learner).__name__} has no `lr` to be set: take skip or stop"
        )


def scale_lr(learner: Any, by: float) -> None:
    """The policy's peak rate times `by`; a critic keeps its own."""
    learner.lr = learner.lr * by
