"""What a step of reinforcement learning tells the world: numbers, a row per completion, and notes where something is odd."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from policygrad.rollout.trajectory import Trajectory, is_multi_turn
from policygrad.training.loop import StepResult

MAX_LOGP_MISMATCH = 1.0
"""Nats; bfloat16 rounding stays below, a model that decodes otherwise than it is trained does not."""
REWARD_METRICS = ("reward", "reward_std", "frac_reward_zero_std")
"""What there is to say only where somebody asked for a reward."""
Note = tuple[str, str]
"""(what is odd, its kind): of one kind the first is said."""


def compute_step_metrics(done: StepResult, has_rewards: bool = True) -> dict[str, float]:
    """Every metric as a number. scored: whether answers are worth anything; in a distillation without a reward they are not."""
    values = {name: metric.value for name, metric in done.metrics.items() if has_rewards or name not in REWARD_METRICS}
    elapsed = values["time/rollout"] + values["time/update"]
    return values | {"tokens_per_second": values["tokens/sampled"] / elapsed if elapsed else 0.0}


def build_completion_rows(
    done: StepResult, decode: Callable[[Tensor], str], has_rewards: bool = True
) -> list[dict[str, Any]]:
    """A step's completions, for the log: prompt, completion, reward, advantage (of the first token), truncated, tokens, and the
    `group` of the step (from 0) that it was compared in.

    The reward is what was said of the completion, whether it takes part or a filter left it out; None = it could not be judged,
    or nobody asked for that (`scored`). Where several say something of it, `rewards` has each one's, before its weight.
    Where answers are looked at in steps, also each step's [tokens up to its end, advantage]; where an environment answers, `turns`,
    and what `ended` the episode; where the template wrote an episode's conversation anew, the texts that it is read as, `branches`.
    """
    batch, rollout = done.batch, done.rollout
    advantages = done.psi[:, 0].tolist() if done.psi.shape[1] else [0.0] * len(rollout.completions)
    truncated = batch.truncated.tolist() if batch.truncated is not None else [False] * len(rollout.completions)
    episodes = [(number, group, t) for number, group in enumerate(rollout.groups) for t in group.trajectories]
    rows: list[dict[str, Any]] = [
        {
            "prompt": group.spec.example.prompt,
            "completion": t.text,
            "reward": t.reward if has_rewards else None,
            "advantage": advantage,
            "tokens": t.num_sampled_tokens,
            "truncated": cut,
            "group": number,
            **_each(group.reward_weights, t.reward_parts if has_rewards else ()),
            **_turns(t, decode),
        }
        for (number, group, t), advantage, cut in zip(episodes, advantages, truncated, strict=True)
    ]
    if is_multi_turn([t for _, _, t in episodes]):
        for row, (_, _, episode) in zip(rows, episodes, strict=True):
            row["ended"] = episode.stop_reason
    for row, shown in zip(rows, batch.demonstration.tolist(), strict=True) if batch.demonstration is not None else ():
        row["demonstration"] = shown
    for row, end, psi in zip(rows, batch.step_end, done.psi, strict=True) if batch.step_end is not None else ():
        row["steps"] = [[t + 1, float(psi[t])] for t in end.nonzero().flatten().tolist()]
    return rows


def _each(names: tuple[tuple[str, float], ...], parts: tuple[float | None, ...]) -> dict[str, Any]:
    """What every reward says of a completion; of one alone, `reward` says it."""
    return {"rewards": {name: x for (name, _), x in zip(names, parts, strict=True)}} if len(parts) > 1 else {}


def _turns(t: Trajectory, decode: Callable[[Tensor], str]) -> dict[str, Any]:
    """Who said what, where the policy was not alone."""
    if len(t.segments) < 2:
        return {}
    said = {"turns": [["policy" if s.is_sampled else "environment", decode(s.visible_tokens)] for s in t.segments]}
    return said | ({"branches": t.num_branches} if t.num_branches > 1 else {})


def build_step_notes(done: StepResult, values: dict[str, float], waiting: bool, where: str = "") -> list[Note]:
    """What people should know of this step. waiting: in the step before, the policy waited for its critic. where: something was
    not finite, in words."""
    step = done.step
    notes = [(message, message.partition(" (completion ")[0]) for message in done.rollout.messages]
    notes += _pretraining(done.step, values, waiting)
    if values.get("trust_region/nonfinite"):
        kept = "took a shorter step" if values.get("updates/taken") else "left the weights as they were"
        notes += [(f"step {step}: the trust region met numbers that are not finite{where} and {kept}", "nonfinite")]
    elif not values.get("updates/taken") and "value_pretraining" not in values:
        why = _why_nothing(done, values)
        notes += [(f"step {step}: nothing was learned; {why}", why)]
    groups, shares = len(torch.unique(done.batch.group[done.batch.mask.any(1)])), done.algorithm.update_rule.minibatches
    if 0 < groups < shares:
        few = f"the rollout has {groups} group{'s' * (groups > 1)} left for {shares} minibatches of whole groups"
        notes += [(f"step {step}: {few}: one update per group and epoch", "fewer groups than minibatches")]
    if values.get("dynamic/leftover"):
        pass  # a step that begins with groups of the one before is stale by design (DropZeroVariance.keep_leftovers), and the metric says so
    elif values.get("staleness/max"):
        count = values["staleness/max"]
        versions = f"up to {count:.0f} version{'s' * (count > 1)} older than the weights that learn from it"
        notes += [(f"step {step}: the rollout is {versions}; it counts as off-policy (algorithm.old_policy)", "stale")]
    elif values.get("mismatch/logp_max", 0.0) > MAX_LOGP_MISMATCH:
        gap = f"a token's log-probability differs by {values['mismatch/logp_max']:.1f} nats between sampler and learner"
        told = f"step {step}: {gap}; the gradient is not the policy's. Try --learner.dtype fp32"
        notes += [(told, "mismatch")]
    if share := values.get("environment/branched_ratio", 0.0):
        told = f"the chat template writes earlier turns anew in {share:.0%} of the episodes, which are read as several texts each"
        notes += [(f"step {step}: {told} (environment/branches)", "branches")]
    if values.get("completions/truncated_ratio", 0.0) > 0.5:
        cut = f"{values['completions/truncated_ratio']:.0%} of the completions were cut off by the token budget"
        notes += [(f"step {step}: {cut}; --max-tokens raises it", "truncated")]
    return notes


def _pretraining(step: int, values: dict[str, float], waiting: bool) -> list[Note]:
    """Says that the policy waits for its critic, and when the wait is over."""
    if "value_pretraining" in values:
        return [(f"step {step}: value pre-training, the policy waits for its critic", "value pre-training")]
    if not waiting:
        return []
    explained = f"the values explain {values.get('explained_variance', 0.0):.0%} of the returns' variance"
    return [(f"step {step}: value pre-training is over, {explained}", "value pre-training is over")]


def _why_nothing(done: StepResult, values: dict[str, float]) -> str:
    """Why no completion of a step could move the weights; how often it happens is the metric `updates/skipped`."""
    if values.get("trust_region/flat"):
        return (
            "the Fisher products show no positive curvature along the step, which is rounding: raise algorithm.update_rule.damping, or "
            "take --learner.dtype fp32"
        )
    if values.get("trust_region/accepted") == 0.0:
        return (
            "no candidate of the line search raised the surrogate within the KL allowed: lower algorithm.update_rule.delta, or raise "
            "algorithm.update_rule.backtrack_iters"
        )
    truncated = done.batch.truncated
    if values.get("completions/failed_ratio") == 1.0:
        return "no completion has a reward: see the notes about the reward functions"
    if values.get("teacher/kl") == 0.0:
        return "the teacher says of every token what the policy says: take another one"
    if "baseline" in done.algorithm.all_needs and values.get("reward") == values.get("reward/greedy"):
        return "every completion is worth what the greedy one of its prompt is: the task is too hard or too easy"
    if values.get("frac_reward_zero_std") == 1.0:
        return "in every group all rewards are equal: the task is too hard, too easy, or the samples too few"
    if truncated is not None and bool(truncated.all()) and not bool(done.batch.mask.any()):
        return "every completion was cut off by the token budget, and the overlong mask drops those: raise --max-tokens"
    if not done.algorithm.filters:
        return "every advantage is 0: nothing that was sampled is better or worse than what it is compared with"
    return "the filters left no completion that could move the weights"
