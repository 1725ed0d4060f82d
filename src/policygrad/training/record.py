"""What a step tells the world: a line of metrics, its completions, notes, and the sample that people look at."""

from __future__ import annotations

from typing import Any

from policygrad.trackers import Display, RunFiles, Sample
from policygrad.training.loop import Done

MISMATCH = 1.0
"""Nats; bfloat16 rounding stays below, a model that decodes otherwise than it is trained does not."""


class Recorder:
    """Writes a run's files and feeds its display; a note of one kind is shown once."""

    def __init__(self, files: RunFiles, display: Display) -> None:
        self.files, self.display = files, display
        self._told: set[str] = set()
        self._fitting = False

    def note(self, text: str, kind: str | None = None) -> None:
        """Shown the first time something of its kind is said."""
        kind = text.partition(" (completion ")[0] if kind is None else kind
        if kind not in self._told:
            self._told.add(kind)
            self.display.note(text)

    def step(self, done: Done) -> None:
        """One step: files first, so that what the display showed is also on disk."""
        step = done.step
        values = {name: metric.value for name, metric in done.metrics.items()}
        elapsed = values["time/rollout"] + values["time/update"]
        values["tokens_per_second"] = values["tokens/sampled"] / elapsed if elapsed else 0.0
        rows = _rows(done)
        self.files.metrics(step, values)
        self.files.completions(step, rows)
        for message in done.rollout.messages:
            self.note(message)
        self._pretraining(step, values)
        if values.get("trust_region/nonfinite"):
            kept = "took a shorter step" if values.get("updates/taken") else "left the weights as they were"
            self.note(f"step {step}: the trust region met numbers that are not finite and {kept}", "nonfinite")
        elif not values.get("updates/taken") and "value_pretraining" not in values:
            why = _why_nothing(done, values)
            self.note(f"step {step}: nothing was learned; {why}", why)
        if values.get("mismatch/logp_max", 0.0) > MISMATCH:
            gap = f"a token's log-probability differs by {values['mismatch/logp_max']:.1f} nats between sampler and learner"
            self.note(f"step {step}: {gap}; the gradient is not the policy's. Try --learner.dtype fp32", "mismatch")
        if values.get("completions/truncated_ratio", 0.0) > 0.5:
            cut = f"{values['completions/truncated_ratio']:.0%} of the completions were cut off by the token budget"
            self.note(f"step {step}: {cut}; --max-tokens raises it", "truncated")
        shown = rows[step % len(rows)] if rows else None
        sample = Sample(_in_words(shown["prompt"]), str(shown["completion"]), shown["reward"]) if shown else None
        self.display.step(step, values, sample)

    def _pretraining(self, step: int, values: dict[str, float]) -> None:
        """Says that the policy waits for its critic, and when the wait is over."""
        explained = values.get("explained_variance", 0.0)
        if "value_pretraining" in values:
            self.note(f"step {step}: value pre-training, the policy waits for its critic", "value pre-training")
            self._fitting = True
        elif self._fitting:
            self._fitting = False
            self.note(
                f"step {step}: value pre-training is over, the values explain {explained:.0%} of the returns' variance"
            )


def _in_words(prompt: Any) -> str:
    """A prompt for people: chat messages as `role: content`."""
    if isinstance(prompt, str):
        return prompt
    return "\n".join(f"{message['role']}: {message['content']}" for message in prompt)


def _why_nothing(done: Done, values: dict[str, float]) -> str:
    """Why no completion of a step could move the weights; how often it happens is the metric `updates/skipped`."""
    if values.get("trust_region/flat"):
        return (
            "the Fisher products show no positive curvature along the step, which is rounding: raise algorithm.step.damping, or "
            "take --learner.dtype fp32"
        )
    if values.get("trust_region/accepted") == 0.0:
        return (
            "no candidate of the line search raised the surrogate within the KL allowed: lower algorithm.step.delta, or raise "
            "algorithm.step.tries"
        )
    truncated = done.batch.truncated
    if values.get("completions/failed_ratio") == 1.0:
        return "no completion has a reward: see the notes about the reward functions"
    if values.get("frac_reward_zero_std") == 1.0:
        return "in every group all rewards are equal: the task is too hard, too easy, or the samples too few"
    if truncated is not None and bool(truncated.all()) and not bool(done.batch.mask.any()):
        return "every completion was cut off by the token budget, and the overlong mask drops those: raise --max-tokens"
    return "the filters left no completion that could move the weights"


def _rows(done: Done) -> list[dict[str, Any]]:
    """A step's completions, for the log: prompt, completion, reward, advantage (of the first token), truncated, tokens.

    Where answers are looked at in steps, also each step's [tokens up to its end, advantage].
    """
    batch, rollout = done.batch, done.rollout
    counted, rewards = rollout.batch.counted.tolist(), rollout.batch.reward.tolist()
    advantages = done.psi[:, 0].tolist() if done.psi.shape[1] else [0.0] * len(counted)
    truncated = batch.truncated.tolist() if batch.truncated is not None else [False] * len(counted)
    rows: list[dict[str, Any]] = [
        {
            "prompt": prompt,
            "completion": text,
            "reward": reward if ok else None,
            "advantage": advantage,
            "tokens": tokens,
            "truncated": cut,
        }
        for prompt, text, reward, ok, advantage, tokens, cut in zip(
            rollout.prompts, rollout.texts, rewards, counted, advantages, rollout.lengths, truncated, strict=True
        )
    ]
    for row, end, psi in zip(rows, batch.step_end, done.psi, strict=True) if batch.step_end is not None else ():
        row["steps"] = [[t + 1, float(psi[t])] for t in end.nonzero().flatten().tolist()]
    return rows
