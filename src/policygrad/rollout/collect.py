"""One call from prompts to a scored batch: sample, decode, score, and refill where dynamic sampling asks for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from policygrad.core.algorithm import Algorithm
from policygrad.core.filters import DropNoSpread, reweight
from policygrad.core.metrics import Max, Mean, Metrics, Sum
from policygrad.core.ragged import Groups
from policygrad.core.types import Batch
from policygrad.rollout.types import Completion, Group, Prompt, Sampler, Sampling

TRAIN, EVALUATE = 0, 1
"""Streams of random numbers, the second entry of a prompt's key."""


class Example(Protocol):
    """What a task yields: a prompt and the columns its reward reads."""

    @property
    def prompt(self) -> Any: ...
    @property
    def columns(self) -> Mapping[str, Any]: ...


class Scores(Protocol):
    """What a reward pool says of a list of completions."""

    @property
    def total(self) -> Sequence[float | None]: ...
    @property
    def failures(self) -> Mapping[str, int]: ...
    @property
    def messages(self) -> Sequence[str]: ...


class Encoder(Protocol):
    """Text to tokens and back."""

    def encode(self, prompt: Any, max_tokens: int, source: str = ...) -> Tensor: ...
    def decode(self, tokens: Any) -> str: ...


Score = Callable[[Sequence[Any], Sequence[str], Mapping[str, Sequence[Any]]], Scores]


@dataclass(frozen=True, eq=False)
class Source:
    """Everything a rollout reads from, but for the weights: `examples(i)` is the task's i-th training example."""

    examples: Callable[[int], Example]
    codec: Encoder
    score: Score
    seed: int


@dataclass(frozen=True, eq=False)
class Rollout:
    """A step's completions, scored; what stands in text is for people and logs, the batch is what trains."""

    batch: Batch
    prompts: tuple[Any, ...]
    """Per completion, as the task gave it."""
    texts: tuple[str, ...]
    """Per completion."""
    position: int
    """The task's next example."""
    metrics: Metrics
    messages: tuple[str, ...] = field(default=())
    """What went wrong with rewards, once per kind, and what dynamic sampling could not fill."""


def score_groups(source: Source, examples: Sequence[Example], groups: Sequence[Group]) -> tuple[list[str], Scores]:
    """Texts and scores, completion by completion in the groups' order. Every column of an example reaches the reward."""
    texts = [source.codec.decode(c.tokens) for g in groups for c in g.completions]
    repeated = [e for e, g in zip(examples, groups, strict=True) for _ in g.completions]
    names = dict.fromkeys(name for e in repeated for name in e.columns)
    columns = {name: [e.columns.get(name) for e in repeated] for name in names}
    return texts, source.score([e.prompt for e in repeated], texts, columns)


def to_batch(groups: Sequence[Group], rewards: Sequence[float | None]) -> Batch:
    """Right-padded tensors; a completion without a reward (None) has an all-false mask: it takes no part in anything."""
    rows: list[Completion] = [c for g in groups for c in g.completions]
    width = max((len(c.tokens) for c in rows), default=0)
    tokens = torch.zeros(len(rows), width, dtype=torch.int64)
    mask = torch.zeros(len(rows), width, dtype=torch.bool)
    logp = torch.zeros(len(rows), width)
    for i, (completion, reward) in enumerate(zip(rows, rewards, strict=True)):
        n = len(completion.tokens)
        tokens[i, :n], logp[i, :n], mask[i, :n] = completion.tokens, completion.logp, reward is not None
    return Batch(
        mask=mask,
        group=torch.arange(len(groups)).repeat_interleave(
            torch.tensor([len(g.completions) for g in groups], dtype=torch.int64)
        ),
        reward=torch.tensor([0.0 if r is None else r for r in rewards]),
        tokens=tokens,
        prompts=tuple(g.prompt.tokens for g in groups),
        logp_sampler=logp,
        truncated=torch.tensor([c.truncated for c in rows], dtype=torch.bool),
    )


@dataclass(eq=False)
class _Kept:
    """Groups gathered so far, and those that dynamic sampling set aside."""

    groups: list[Group] = field(default_factory=list)
    examples: list[Example] = field(default_factory=list)
    rewards: list[list[float | None]] = field(default_factory=list)
    texts: list[list[str]] = field(default_factory=list)

    def add(self, other: _Kept, i: int) -> None:
        for mine, theirs in ((self.groups, other.groups), (self.examples, other.examples)):
            mine.append(theirs[i])  # type: ignore[attr-defined]
        self.rewards.append(other.rewards[i])
        self.texts.append(other.texts[i])

    def batch(self) -> Batch:
        return to_batch(self.groups, [r for rewards in self.rewards for r in rewards])


def collect(
    source: Source,
    sampler: Sampler,
    algorithm: Algorithm,
    sampling: Sampling,
    *,
    prompts: int,
    samples: int,
    step: int,
    position: int,
) -> Rollout:
    """A step's worth of groups: `prompts` × `samples` completions, from the task's example `position` on.

    Dynamic sampling sets groups without spread aside and takes further prompts, for at most its `max_rounds` rounds; what is
    missing then is filled with the groups set aside at weight 0, the others are reweighted, and that is reported.
    """
    dynamic = next((f for f in algorithm.filters if isinstance(f, DropNoSpread)), None)
    kept, aside, messages, failures = _Kept(), _Kept(), dict[str, None](), dict[str, int]()
    seen: list[Batch] = []
    for round_ in range(dynamic.rounds if dynamic else 1):
        fresh = _round(
            source, sampler, sampling, range(position, position + prompts), samples, step, messages, failures
        )
        position += prompts
        batch = fresh.batch()
        seen.append(batch)
        drop = (
            dynamic.dropped(batch)
            if dynamic and dynamic.mode == "refill"
            else torch.zeros(len(batch.group), dtype=torch.bool)
        )
        for i in range(len(fresh.groups)):
            if len(kept.groups) < prompts or round_ == 0:
                (aside if bool(drop[batch.group == i].all()) else kept).add(fresh, i)
        if len(kept.groups) >= prompts:
            break
    missing = max(0, prompts - len(kept.groups))
    for i in range(missing):
        kept.add(aside, i)
    batch = _filter(kept.batch(), algorithm, dynamic, missing)
    if missing:
        messages[
            f"dynamic sampling: {missing} of {prompts} groups still without spread after {dynamic.rounds} rounds"
        ] = None  # type: ignore[union-attr]
    return Rollout(
        batch,
        tuple(e.prompt for e, g in zip(kept.examples, kept.groups, strict=True) for _ in g.completions),
        tuple(text for texts in kept.texts for text in texts),
        position,
        {**_measure(seen), **{f"rewards/failed_{reason}": Sum(float(n)) for reason, n in failures.items()}},
        tuple(messages),
    )


def _round(
    source: Source,
    sampler: Sampler,
    sampling: Sampling,
    indices: range,
    samples: int,
    step: int,
    messages: dict[str, None],
    failures: dict[str, int],
) -> _Kept:
    examples = [source.examples(i) for i in indices]
    prompts = [
        Prompt(
            source.codec.encode(e.prompt, sampling.max_tokens, getattr(e, "source", None) or f"training prompt {i}"),
            key,
        )
        for i, e in zip(indices, examples, strict=True)
        for key in [(source.seed, TRAIN, step, i)]
    ]
    groups = sampler.sample(prompts, samples, sampling)
    texts, scores = score_groups(source, examples, groups)
    messages.update(dict.fromkeys(scores.messages))
    for reason, n in scores.failures.items():
        failures[reason] = failures.get(reason, 0) + n
    per = [slice(i * samples, (i + 1) * samples) for i in range(len(groups))]
    return _Kept(list(groups), examples, [list(scores.total[s]) for s in per], [texts[s] for s in per])


def _filter(batch: Batch, algorithm: Algorithm, dynamic: DropNoSpread | None, missing: int) -> Batch:
    """The algorithm's filters; refilled groups were chosen already, and what could not be refilled is reweighted."""
    for part in algorithm.filters:
        if part is dynamic and dynamic.mode == "refill":
            batch = reweight(batch, dynamic.dropped(batch)) if missing else batch
        else:
            batch = part(batch)
    return batch


def _measure(seen: Sequence[Batch]) -> Metrics:
    """Of everything sampled, what dynamic sampling set aside included: the policy's reward, not the training batch's."""
    metrics: dict[str, list[Tensor]] = {}
    for batch in seen:
        counted = batch.counted
        groups = Groups(batch.group, counted)
        lengths = batch.lengths[counted].double()
        values = {
            "reward": batch.reward[counted].double(),
            "reward_std": groups.std(batch.reward, 1)[counted].double(),
            "frac_reward_zero_std": groups.no_spread(batch.reward)[counted].double(),
            "completions/mean_length": lengths,
            "completions/truncated_ratio": batch.truncated[counted].double()
            if batch.truncated is not None
            else lengths * 0,
            "completions/failed_ratio": (~counted).double(),
        }
        if batch.logp_sampler is not None:  # −log μ at the samples: an unbiased estimate of the policy's entropy
            values["entropy"] = -batch.logp_sampler[batch.mask].double()
        for name, value in values.items():
            metrics.setdefault(name, []).append(value)
    merged: Metrics = {name: Mean(float(torch.cat(v).sum()), float(sum(map(len, v)))) for name, v in metrics.items()}
    merged["tokens/sampled"] = Sum(float(sum(len(x) for x in metrics.get("entropy", []))))
    merged["completions/max_length"] = Max(
        max((float(x.max()) for x in metrics["completions/mean_length"] if len(x)), default=0.0)
    )
    return merged


def without_rewards(rollout: Rollout) -> bool:
    """Whether no completion of the step has a reward."""
    return not bool(rollout.batch.counted.any()) and not bool(replace(rollout.batch, in_statistics=None).counted.any())
