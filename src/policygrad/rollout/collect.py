"""One call from prompts to a scored batch: sample, decode, score, and refill where dynamic sampling asks for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from policygrad.core.advantages import no_spread
from policygrad.core.algorithm import Algorithm
from policygrad.core.filters import DropNoSpread, reweight
from policygrad.core.metrics import Max, Mean, Metrics, Sum, merge
from policygrad.core.ragged import Groups
from policygrad.core.types import Batch
from policygrad.rollout.prefixes import with_values
from policygrad.rollout.source import TRAIN, Example, Scores, Source, StepScores, make_prompt, score_groups, step_scores
from policygrad.rollout.steps import Marks, mark, with_steps
from policygrad.samplers.base import Completion, Group, Sampler, Sampling


@dataclass(frozen=True, eq=False)
class Rollout:
    """A step's completions, scored; what stands in text is for people and logs, the batch is what trains."""

    batch: Batch
    prompts: tuple[Any, ...]
    """Per completion, as the task gave it."""
    texts: tuple[str, ...]
    """Per completion."""
    lengths: tuple[int, ...]
    """Per completion, tokens sampled; `batch.lengths` is 0 where a reward failed or a filter masked."""
    position: int
    """The task's next example."""
    metrics: Metrics
    messages: tuple[str, ...] = field(default=())
    """What went wrong with rewards, once per kind, and what dynamic sampling could not fill."""


def to_batch(groups: Sequence[Group], rewards: Sequence[float | None]) -> Batch:
    """Right-padded tensors; a completion without a reward (None) has an all-false mask: it takes no part in anything."""
    rows: list[Completion] = [c for g in groups for c in g.completions]
    tokens = pad_sequence([c.tokens for c in rows], batch_first=True)
    scored = [0 if reward is None else len(c.tokens) for c, reward in zip(rows, rewards, strict=True)]
    return Batch(
        mask=torch.arange(tokens.shape[1]) < torch.tensor(scored)[:, None],
        group=torch.arange(len(groups)).repeat_interleave(
            torch.tensor([len(g.completions) for g in groups], dtype=torch.int64)
        ),
        reward=torch.tensor([0.0 if r is None else r for r in rewards]),
        tokens=tokens,
        prompts=tuple(g.prompt.tokens for g in groups),
        logp_sampler=pad_sequence([c.logp.float() for c in rows], batch_first=True),
        truncated=torch.tensor([c.truncated for c in rows], dtype=torch.bool),
    )


@dataclass(eq=False)
class _Kept:
    """Groups gathered so far, group by group."""

    groups: list[Group] = field(default_factory=list)
    examples: list[Example] = field(default_factory=list)
    rewards: list[list[float | None]] = field(default_factory=list)
    texts: list[list[str]] = field(default_factory=list)
    marks: list[list[Marks | None]] = field(default_factory=list)

    def add(self, other: _Kept, i: int) -> None:
        """Takes the other's i-th group."""
        self.groups.append(other.groups[i])
        self.examples.append(other.examples[i])
        self.rewards.append(other.rewards[i])
        self.texts.append(other.texts[i])
        self.marks.append(other.marks[i])

    def batch(self) -> Batch:
        """With the outcome's reward alone, which filters and metrics look at."""
        return to_batch(self.groups, [r for rewards in self.rewards for r in rewards])


@dataclass(eq=False)
class _Said:
    """What the reward functions said over the rounds of a step."""

    scored: bool
    """Whether the algorithm reads what steps are worth, not only where they end."""
    messages: dict[str, None] = field(default_factory=dict)
    metrics: Metrics = field(default_factory=dict)

    def hear(self, scores: Scores, steps: StepScores | None) -> None:
        self._failures(scores)
        known = {name: [x for x in part if x is not None] for name, part in scores.parts.items()}
        parts = {f"rewards/{name}": Mean(sum(x), float(len(x))) for name, x in known.items() if len(known) > 1}
        self.metrics = merge(self.metrics, parts)
        if steps is not None:
            self._failures(steps)
            means = {f"rewards/{name}": Mean(sum(x), float(len(x))) for name, x in steps.parts.items() if x}
            self.metrics = merge(self.metrics, means if self.scored else {})

    def count(self, marks: Sequence[Marks | None]) -> None:
        """How many steps completions take."""
        sizes = [len(found.ends) for found in marks if found is not None]
        self.metrics = merge(self.metrics, {"steps/mean": Mean(float(sum(sizes)), float(len(sizes)))} if sizes else {})

    def _failures(self, scores: Scores | StepScores) -> None:
        self.messages.update(dict.fromkeys(scores.messages))
        failed = {f"rewards/failed_{why}": Sum(float(n)) for why, n in scores.failures.items()}
        self.metrics = merge(self.metrics, failed)


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

    Dynamic sampling sets groups without spread aside and takes further prompts, for at most its `max_rounds` rounds; what
    is missing then is filled with groups set aside at weight 0, the others are reweighted, and that is reported.
    """
    dynamic = next((f for f in algorithm.filters if isinstance(f, DropNoSpread)), None)
    rounds, refill = (dynamic.rounds, dynamic.mode == "refill") if dynamic else (1, False)
    scored = "token_reward" in algorithm.declared or "step_end" not in algorithm.declared
    kept, aside, said, seen = _Kept(), _Kept(), _Said(scored), list[_Kept]()
    for _ in range(rounds):
        fresh = _round(source, sampler, sampling, range(position, position + prompts), samples, step, said)
        position += prompts
        seen.append(fresh)
        flat = no_spread(fresh.batch())
        for i in range(prompts):
            set_aside = refill and bool(flat[i * samples])
            if set_aside or len(kept.groups) < prompts:
                (aside if set_aside else kept).add(fresh, i)
        if len(kept.groups) == prompts:
            break
    missing = prompts - len(kept.groups)
    for i in range(missing):
        kept.add(aside, i)
    if missing:
        note = f"dynamic sampling: groups were still without spread after {rounds} rounds; the others are reweighted"
        said.messages[note] = None
    batch = _filter(kept.batch(), algorithm, dynamic, missing)
    if source.steps is not None:
        batch = with_steps(batch, [found for marks in kept.marks for found in marks], scored=scored)
    for link in algorithm.psi:
        if getattr(link, "samples_values", False):
            batch, cost, notes = with_values(
                source, sampler, sampling, batch, kept.groups, kept.examples, samples=link.samples, step=step
            )
            said.metrics = merge(said.metrics, cost)
            said.messages.update(dict.fromkeys(notes))
    return Rollout(
        batch,
        tuple(e.prompt for e, g in zip(kept.examples, kept.groups, strict=True) for _ in g.completions),
        tuple(text for texts in kept.texts for text in texts),
        tuple(len(c.tokens) for g in kept.groups for c in g.completions),
        position,
        merge(_measure(seen), said.metrics, {"dynamic/unfilled": Sum(float(missing))} if refill else {}),
        tuple(said.messages),
    )


def _round(
    source: Source, sampler: Sampler, sampling: Sampling, indices: range, samples: int, step: int, said: _Said
) -> _Kept:
    examples = [source.examples(i) for i in indices]
    pairs = zip(indices, examples, strict=True)
    prompts = [make_prompt(source, e, sampling.max_tokens, TRAIN, step, i) for i, e in pairs]
    groups = sampler.sample(prompts, samples, sampling)
    texts, scores = score_groups(source, examples, groups)
    steps = step_scores(source, examples, groups, texts)
    said.hear(scores, steps)
    rewards, marks = _marked(source, groups, texts, scores.total, steps)
    said.count(marks)
    per = [slice(i * samples, (i + 1) * samples) for i in range(len(groups))]
    return _Kept(list(groups), examples, *([list(column[s]) for s in per] for column in (rewards, texts, marks)))


def _marked(
    source: Source,
    groups: Sequence[Group],
    texts: Sequence[str],
    rewards: Sequence[float | None],
    steps: StepScores | None,
) -> tuple[Sequence[float | None], Sequence[Marks | None]]:
    """Rewards and steps by token; a completion whose steps failed has no reward either."""
    if steps is None:
        return rewards, [None] * len(texts)
    completions = [c for g in groups for c in g.completions]
    marks = [
        None if found is None else mark(source.tokenizer.decode, c.tokens, text, found)
        for c, text, found in zip(completions, texts, steps.steps, strict=True)
    ]
    return [None if m is None else reward for reward, m in zip(rewards, marks, strict=True)], marks


def _filter(batch: Batch, algorithm: Algorithm, dynamic: DropNoSpread | None, missing: int) -> Batch:
    """The algorithm's filters; refilled groups were chosen already, and what could not be refilled is reweighted."""
    for part in algorithm.filters:
        if part is dynamic and dynamic.mode == "refill":
            batch = reweight(batch, dynamic.dropped(batch)) if missing else batch
        else:
            batch = part(batch)
    return batch


def _measure(seen: Sequence[_Kept]) -> Metrics:
    """Of everything sampled, what dynamic sampling set aside included: the policy's reward, not the training batch's.

    What no completion could be measured for (every reward failed) is left out, rather than reported as 0.
    """
    completions = [c for kept in seen for g in kept.groups for c in g.completions]
    lengths = torch.tensor([len(c.tokens) for c in completions], dtype=torch.float64)
    found: dict[str, list[Tensor]] = {
        "completions/mean_length": [lengths],
        "completions/truncated_ratio": [torch.tensor([float(c.truncated) for c in completions])],
        "entropy": [
            -c.logp for c in completions
        ],  # −log μ at the samples: an unbiased estimate of the policy's entropy
    }
    for kept in seen:
        batch = kept.batch()
        counted, groups = batch.counted, Groups(batch.group, batch.counted)
        values = {
            "reward": batch.reward[counted],
            "reward_std": groups.std(batch.reward, 1)[counted],
            "frac_reward_zero_std": groups.no_spread(batch.reward)[counted],
            "completions/failed_ratio": ~counted,
        }
        for name, value in values.items():
            found.setdefault(name, []).append(value)
    whole = {name: torch.cat(parts).double() for name, parts in found.items()}
    metrics: Metrics = {name: Mean(float(x.sum()), float(len(x))) for name, x in whole.items() if len(x)}
    return metrics | {"tokens/sampled": Sum(float(lengths.sum())), "completions/max_length": Max(float(lengths.max()))}
