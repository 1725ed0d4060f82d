"""The log of a step of reinforcement learning: metrics, a row per completion, and notes about anything unusual."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from policygrad.core.batch import Batch
from policygrad.models.tokenizer import Tokenizer
from policygrad.rollout.trajectory import EpisodeGroup, is_multi_turn
from policygrad.trackers.jsonl import THUMBNAILS
from policygrad.training.loop import StepResult
from policygrad.utils.filesystem import write_atomically
from policygrad.utils.message_parts import list_pictures, to_plain

MAX_LOGP_MISMATCH = 1.0
"""Nats. bfloat16 rounding stays below; a model that decodes differently from how it is trained does not."""
REWARD_METRICS = ("reward", "reward_std", "frac_reward_zero_std")  # logged only if there is a reward
THUMBNAIL_GROUPS = 4
"""Groups of a step whose pictures the run's folder keeps, small: of a run of weeks some hundred megabytes."""
Note = tuple[str, str]  # (message, kind): of each kind only the first message is shown


def compute_step_metrics(result: StepResult, has_rewards: bool = True) -> dict[str, float]:
    """Return every metric as a number, without `REWARD_METRICS` if there are no rewards (as in distillation)."""
    values = {
        name: metric.value for name, metric in result.metrics.items() if has_rewards or name not in REWARD_METRICS
    }
    elapsed = values["time/rollout"] + values["time/update"]
    return values | {"tokens_per_second": values["tokens/sampled"] / elapsed if elapsed else 0.0}


def build_completion_rows(
    result: StepResult, decode: Callable[[Tensor], str], has_rewards: bool = True
) -> list[dict[str, Any]]:
    """Return a row for each of the step's completions: prompt, completion, reward, advantage (of the first token), truncated,
    tokens, and the `group` (from 0) it was compared in.

    `reward` is the completion's own, also where a filter dropped it; None = its reward failed, or there are no rewards. Further
    keys, where they apply: `rewards` (each of several rewards, before its weight), `feedback` (what the reward functions wrote),
    `demonstration`, `steps` (for each reasoning step [tokens up to its end, advantage]), `turns` (who wrote what) and `stop_reason`
    of an episode, `branches` (the number of texts that an episode is read as, where the chat template rewrote its conversation).
    """
    batch, rollout = result.batch, result.rollout
    num = len(rollout.completions)
    advantages = result.psi[:, 0].tolist() if result.psi.shape[1] else [0.0] * num
    truncated = batch.truncated.tolist() if batch.truncated is not None else [False] * num
    episodes = [(number, group, t) for number, group in enumerate(rollout.groups) for t in group.trajectories]
    multi_turn = is_multi_turn([t for _, _, t in episodes])
    rows: list[dict[str, Any]] = []
    for (number, group, t), advantage, cut in zip(episodes, advantages, truncated, strict=True):
        row = {
            "prompt": to_plain(group.spec.example.prompt),
            "completion": t.text,
            "reward": t.reward if has_rewards else None,
            "advantage": advantage,
            "tokens": t.num_sampled_tokens,
            "truncated": cut,
            "group": number,
        }
        if has_rewards and len(t.reward_parts) > 1:
            row["rewards"] = {name: x for (name, _), x in zip(group.reward_weights, t.reward_parts, strict=True)}
        if t.feedback:
            row["feedback"] = t.feedback
        if len(t.segments) > 1:
            row["turns"] = [["policy" if s.is_sampled else "environment", decode(s.visible_tokens)] for s in t.segments]
            if t.num_branches > 1:
                row["branches"] = t.num_branches
        if multi_turn:
            row["stop_reason"] = t.stop_reason
        rows.append(row)
    if batch.demonstration is not None:
        for row, is_demonstration in zip(rows, batch.demonstration.tolist(), strict=True):
            row["demonstration"] = is_demonstration
    if batch.step_end is not None:
        for row, end, psi in zip(rows, batch.step_end, result.psi, strict=True):
            row["steps"] = [[t + 1, float(psi[t])] for t in end.nonzero().flatten().tolist()]
    return rows


def write_thumbnails(folder: Path, groups: Sequence[EpisodeGroup]) -> None:
    """Write small copies of the pictures of a step's first prompts below the run's folder, for its report. Each is one file."""
    for group in groups[:THUMBNAIL_GROUPS]:
        for picture in list_pictures(group.spec.example.prompt):
            file = folder / THUMBNAILS / f"{picture.digest}.png"
            if not file.exists():
                file.parent.mkdir(exist_ok=True)
                write_atomically(file, picture.make_thumbnail())


def explain_mismatch(batch: Batch, bound: float) -> str:
    """Return the likely cause of log-probabilities that differ by more than `bound` [nats] between sampler and learner, and the
    remedy."""
    rounding = "Where the learner computes in bf16, try --learner.dtype fp32"
    other = "in fp32 it is no rounding: sampler and learner read the model differently, or have other weights (policygrad verify)"
    if batch.logp_sampler is None or batch.logp_old is None or batch.prompts is None:
        return f"{rounding}; {other}"
    differs = (((batch.logp_old - batch.logp_sampler).abs() > bound) & batch.policy_tokens).any(1)
    lengths = torch.tensor([len(batch.prompts[group]) for group in batch.group.tolist()])
    longest = lengths == lengths.max()
    if bool(differs.any()) and not bool(differs[longest].any()) and bool(longest.any()):
        return (
            "It is so after shorter prompts alone, which are padded: the sampler's cache does not support this model's padding. "
            "Sample with an engine (--sampler.engine vllm), and report it"
        )
    return f"{rounding}; {other}"


ZERO_EMBEDDING_NORM = 100.0
"""Multiple of the clipping norm from which a gradient is explained by tokens without an embedding."""


def build_step_notes(
    result: StepResult, values: dict[str, float], was_pretraining: bool, nonfinite: str = ""
) -> list[Note]:
    """Return what users should know about the step. `was_pretraining`: whether only the critic was trained in the step before;
    `nonfinite`: where a value was not finite, as text."""
    notes = list[Note]()
    if "value_pretraining" in values:
        notes.append(("value pre-training: only the critic is trained for now", "value pre-training"))
    elif was_pretraining:
        explained = f"the values explain {values.get('explained_variance', 0.0):.0%} of the returns' variance"
        notes.append((f"value pre-training is finished, {explained}", "value pre-training is finished"))
    if values.get("trust_region/nonfinite"):
        action = "took a shorter step" if values.get("updates/taken") else "left the weights unchanged"
        notes.append((f"the trust region met values that are not finite{nonfinite} and {action}", "nonfinite"))
    elif not values.get("updates/taken") and "value_pretraining" not in values:
        reason = _explain_no_update(result, values)
        notes.append((f"nothing was learned; {reason}", reason))
    minibatches = result.algorithm.update_rule.minibatches
    groups = len(torch.unique(result.batch.group[result.batch.mask.any(1)]))
    if 0 < groups < minibatches:
        text = f"the rollout has {groups} group{'s' * (groups > 1)} left for {minibatches} minibatches of whole groups"
        notes.append((f"{text}: one update per group and epoch", "fewer groups than minibatches"))
    if values.get("dynamic/leftover") or values.get("replay/used"):
        pass  # such groups are stale by design (DropZeroVariance.keep_leftovers, ReplayBuffer), and the metrics show it
    elif values.get("staleness/max"):
        count = values["staleness/max"]
        text = f"the rollout is up to {count:.0f} version{'s' * (count > 1)} older than the weights it trains"
        notes.append((f"{text}; it counts as off-policy (algorithm.old_policy)", "stale"))
    elif (gap := values.get("mismatch/logp_max", 0.0)) > MAX_LOGP_MISMATCH:
        text = f"a token's log-probability differs by {gap:.1f} nats between sampler and learner"
        cause = explain_mismatch(result.batch, MAX_LOGP_MISMATCH)
        notes.append((f"{text}; the gradient is not the policy's. {cause}", "mismatch"))
    if ratio := values.get("environment/branched_ratio", 0.0):
        text = f"the chat template rewrites earlier turns in {ratio:.0%} of the episodes, which are read as several texts each"
        notes.append((f"{text} (environment/branches)", "branches"))
    if (ratio := values.get("completions/truncated_ratio", 0.0)) > 0.5:
        notes.append(
            (f"{ratio:.0%} of the completions were cut off by the token budget; --max-tokens raises it", "truncated")
        )
    return [
        *((message, message.partition(" (completion ")[0]) for message in result.rollout.messages),
        *((f"step {result.step}: {text}", kind) for text, kind in notes),
    ]


def describe_zero_embeddings(
    result: StepResult, values: Mapping[str, float], zero_embeddings: Collection[int], clip: float, tokenizer: Tokenizer
) -> str:
    """Return a note if a token with an embedding of zero was sampled and the gradient is far beyond the clipping norm; else "".

    A normalisation of zeros has a derivative of up to eps^−½, once for each layer that passes them on.
    """
    norm = values.get("grad_norm", 0.0)
    if not zero_embeddings or not clip or norm < ZERO_EMBEDDING_NORM * clip:
        return ""
    sampled = {
        int(token)
        for group in result.rollout.groups
        for trajectory in group.trajectories
        for segment in trajectory.segments
        if segment.is_sampled
        for token in segment.tokens.tolist()
    }
    if not (tokens := sorted(sampled & set(zero_embeddings))):
        return ""
    names = ", ".join(repr(tokenizer.hf.convert_ids_to_tokens(token)) for token in tokens)
    return (
        f"step {result.step}: the gradient's norm is {norm:.1e}, and the policy sampled {names}, whose embedding is zero: such "
        f"a token can make the gradient explode, and clipping at {clip:g} then shrinks that of all other tokens. Let the model's "
        "generation_config.json name it among eos_token_id, so that it ends a completion"
    )


def _explain_no_update(result: StepResult, values: dict[str, float]) -> str:
    """Return why no completion of the step could change the weights. The metric `updates/skipped` counts such steps."""
    if values.get("trust_region/flat"):
        return (
            "the Fisher products show no positive curvature along the step, which is rounding: raise "
            "algorithm.update_rule.damping, or use --learner.dtype fp32"
        )
    if values.get("trust_region/accepted") == 0.0:
        return (
            "no candidate of the line search raised the surrogate within the allowed KL: lower algorithm.update_rule.delta, or "
            "raise algorithm.update_rule.backtrack_iters"
        )
    if values.get("completions/failed_ratio") == 1.0:
        return "no completion has a reward: see the notes about the reward functions"
    if values.get("reference/prompted") == 0.0:
        return (
            "π_ref had nothing to read: no other completion of a prompt reached Reference.success_reward, or the columns of "
            "Reference.templates are empty"
        )
    if values.get("teacher/kl") == 0.0:
        return "the teacher gives every token the policy's probability: use another one"
    if "baseline" in result.algorithm.all_needs and values.get("reward") == values.get("reward/greedy"):
        return "every completion has the reward of its prompt's greedy one: the task is too hard or too easy"
    if values.get("frac_reward_zero_std") == 1.0:
        return "in every group all rewards are equal: the task is too hard, too easy, or the samples too few"
    truncated = result.batch.truncated
    if truncated is not None and bool(truncated.all()) and not bool(result.batch.mask.any()):
        return "every completion was cut off by the token budget, and the overlong mask drops those: raise --max-tokens"
    if not result.algorithm.filters:
        return "every advantage is 0: no completion is better or worse than those it is compared with"
    return "the filters left no completion that could change the weights"
