"""Samples beyond the step's episodes: greedy baselines (ReMax), prefix values (VinePPO), and vines (TRPO)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from policygrad.core.batch import Batch
from policygrad.core.metrics import Mean, Metrics, Sum
from policygrad.core.vine import Vine
from policygrad.errors import ConfigError
from policygrad.rollout.batching import batch_groups
from policygrad.rollout.scoring import ScoringResult
from policygrad.rollout.trajectory import GREEDY, VALUES, VINE, EpisodeGroup, EpisodeSpec, Trajectory
from policygrad.samplers.local.sampling import philox_uniforms

PlayEpisodes = Callable[[list[EpisodeSpec], int], list[EpisodeGroup]]
"""(specs, samples per spec) -> unscored groups."""
ScoreGroups = Callable[[list[EpisodeGroup]], tuple[list[EpisodeGroup], ScoringResult]]


def add_greedy_baseline(
    batch: Batch,
    groups: Sequence[EpisodeGroup],
    play_greedy: Callable[[list[EpisodeSpec]], list[EpisodeGroup]],
    score: ScoreGroups,
) -> tuple[Batch, ScoringResult]:
    """Fill `baseline` with the reward of one greedy episode for each prompt that is trained on (ReMax).

    NaN where its reward failed: that prompt is not learned from.
    """
    baseline = torch.full_like(batch.reward, torch.nan)
    active = [g for g in range(len(groups)) if bool(batch.mask[batch.group == g].any())]
    if not active:  # reward functions do not accept an empty list
        return replace(batch, baseline=baseline), ScoringResult()
    specs = []
    for g in active:
        seed, _, step, index = groups[g].spec.key  # the environment may draw from the key
        specs.append(replace(groups[g].spec, key=(seed, GREEDY, step, index)))
    greedy, scoring = score(play_greedy(specs))
    episodes = [group.trajectories[0] for group in greedy]
    rewards = [t.reward for t in episodes if t.reward is not None]
    for g, episode in zip(active, episodes, strict=True):
        if episode.reward is not None:
            baseline[batch.group == g] = episode.reward
    tokens = sum(t.num_sampled_tokens for t in episodes)
    metrics: Metrics = {name: Sum(float(tokens)) for name in ("tokens/greedy", "tokens/sampled")}
    if rewards:
        metrics |= {"reward/greedy": Mean(sum(rewards), float(len(rewards)))}
    note = "a greedy completion has no reward; its prompt is not learned from" if len(rewards) < len(active) else ""
    return replace(batch, baseline=baseline), scoring.failures_only(metrics, note)


@dataclass(frozen=True)
class Prefix:
    """The first `length` tokens of a completion, at which a reasoning step begins. Equal prefixes of a group are one."""

    group: int
    sample: int
    """The first completion of the group with this prefix."""
    length: int


def add_prefix_values(
    batch: Batch,
    groups: Sequence[EpisodeGroup],
    samples_per_prefix: int,
    play: PlayEpisodes,
    score: ScoreGroups,
    step: int,
) -> tuple[Batch, ScoringResult]:
    """Fill `values` with Monte-Carlo values of reasoning steps (VinePPO).

    The value at each token is the mean reward of `samples_per_prefix` completions of the text before its step, sampled within
    the rest of the token budget. Completions whose reward fails are left out. A prefix without any reward takes the value of
    the step before it; the prompt itself takes the mean reward of its group.
    """
    prefixes, steps = _find_prefixes(batch, groups)
    if not prefixes:  # reward functions do not accept an empty list
        return replace(batch, values=_spread_values(batch, (), steps)), ScoringResult({"values/prefixes": Sum(0.0)})
    specs = []
    for prefix in prefixes:
        group = groups[prefix.group]
        seed, _, _, index = group.spec.key
        key = (seed, VALUES, step, index, prefix.sample, prefix.length)
        tokens = group.trajectories[prefix.sample].tokens[: prefix.length]
        specs.append(EpisodeSpec(group.spec.example, key, group.spec.max_tokens - prefix.length, tokens))
    continued, scoring = score(play(specs, samples_per_prefix))
    values = [_mean_reward(group) for group in continued]
    failed = values.count(None)
    num_tokens = sum(t.num_sampled_tokens for g in continued for t in g.trajectories)
    metrics: Metrics = {name: Sum(float(num_tokens)) for name in ("tokens/values", "tokens/sampled")}
    metrics |= {"values/prefixes": Sum(float(len(prefixes))), "values/failed": Sum(float(failed))}
    note = "no completion of a prefix has a reward; its step takes the value of the step before" if failed else ""
    return replace(batch, values=_spread_values(batch, values, steps)), scoring.failures_only(metrics, note)


def _find_prefixes(batch: Batch, groups: Sequence[EpisodeGroup]) -> tuple[list[Prefix], list[list[tuple[int, int]]]]:
    """Return the distinct prefixes and, per completion, (first token of a step, index of its prefix).

    Completions that are masked have no steps.
    """
    if batch.step_end is None:
        raise ConfigError("prefix values need completions with reasoning steps: give the Rollouter `score_steps`")
    indices: dict[tuple[int, bytes], int] = {}
    prefixes: list[Prefix] = []
    steps: list[list[tuple[int, int]]] = []
    rows = [(g, sample, c.tokens) for g, group in enumerate(groups) for sample, c in enumerate(group.trajectories)]
    for row, (g, sample, tokens) in enumerate(rows):
        last = len(tokens) - 1
        ends = batch.step_end[row].nonzero().flatten().tolist() if bool(batch.mask[row].any()) else None
        starts = [] if ends is None else [0, *(end + 1 for end in ends if end < last)]
        row_steps = []
        for start in starts:
            key = (g, tokens[:start].numpy().tobytes())
            if key not in indices:
                indices[key] = len(prefixes)
                prefixes.append(Prefix(g, sample, start))
            row_steps.append((start, indices[key]))
        steps.append(row_steps)
    return prefixes, steps


def _mean_reward(group: EpisodeGroup) -> float | None:
    rewards = [t.reward for t in group.trajectories if t.reward is not None]
    return sum(rewards) / len(rewards) if rewards else None


def _spread_values(batch: Batch, values: Sequence[float | None], steps: Sequence[Sequence[tuple[int, int]]]) -> Tensor:
    """Return [B, T]: the value of each step at its tokens."""
    filled = torch.zeros(batch.mask.shape, dtype=batch.reward.dtype)
    for row, row_steps in enumerate(steps):
        if not row_steps:
            continue
        peers = (batch.group == batch.group[row]) & batch.counted
        value = float(batch.reward[peers].mean())
        for start, index in row_steps:
            prefix_value = values[index]
            value = value if prefix_value is None else prefix_value
            filled[row, start:] = value
    return filled


MAX_TRY_ROUNDS = 4
"""Maximum number of times that K tokens are sampled in a state to find K different ones."""


@dataclass(frozen=True, eq=False)
class TriedToken:
    """A token sampled in a state of the vine."""

    token: Trajectory
    """The episode of this one token."""
    count: int = 1
    """Number of times it was sampled."""
    value: float | None = None
    """Q̂, the mean reward of its continuations; None = no reward."""
    first_continuation: Trajectory | None = None


@dataclass(frozen=True, eq=False)
class VineState:
    """A prefix of a completion, and the tokens tried after it."""

    group: int
    spec: EpisodeSpec
    """The prefix, the rest of its token budget, and the key of its random numbers."""
    count: int
    """Number of times it was chosen: equal prefixes are one state."""
    tried: tuple[TriedToken, ...] = ()

    @property
    def valued_tokens(self) -> tuple[TriedToken, ...]:
        """The tokens with a Q̂."""
        return tuple(t for t in self.tried if t.value is not None)


def sample_vine(
    batch: Batch, groups: Sequence[EpisodeGroup], vine: Vine, play: PlayEpisodes, score: ScoreGroups, step: int
) -> tuple[Batch, list[EpisodeGroup], ScoringResult]:
    """Replace the batch by a vine (TRPO): in states along the completions, several next tokens with their values Q̂.

    `vine.states` of all sampled tokens of each prompt are chosen, and the state before each. Every state becomes a group whose
    prompt includes the prefix, with one row per token and Q̂ as reward. `weight` sums over a state to its number of tokens times
    its share of the chosen states. A state with only one distinct token counts among these but teaches nothing; one with fewer
    than two tokens because rewards failed does not count. All tokens of a state are completed with the same random numbers.
    """
    states, num_tried = _try_tokens(_choose_states(batch, groups, vine.states, step), vine, play)
    states, num_completed, scoring = _complete_tokens(states, groups, vine.samples, play, score)
    used = [s for s in states if len(s.valued_tokens) > 1]
    failed = sum(len(s.tried) - len(s.valued_tokens) for s in states if len(s.tried) > 1)
    metrics: Metrics = {name: Sum(float(num_tried + num_completed)) for name in ("tokens/vine", "tokens/sampled")}
    metrics |= {"vine/states": Sum(float(len(used))), "vine/failed": Sum(float(failed))}
    if states:
        metrics["vine/actions"] = Mean(float(sum(len(s.tried) for s in states)), float(len(states)))
    note = "a vine's token has no reward; it is not compared with the other tokens of its state" if failed else ""
    scoring = scoring.failures_only(metrics, note)
    if not used:
        note = "no vine state has two tokens to compare, so nothing is learned: the policy is certain, or rewards fail"
        return (
            replace(batch, mask=torch.zeros_like(batch.mask)),
            list(groups),
            scoring | ScoringResult(messages=(note,)),
        )
    num_counted = sum(s.count for s in states if s in used or len(s.tried) < 2)
    state_groups, weights = [], []
    for s in used:
        # a group of one-token episodes, each with the text of its first continuation
        rows = []
        for tried in s.valued_tokens:
            assert tried.first_continuation is not None
            text, truncated = tried.first_continuation.text, tried.first_continuation.truncated
            rows.append(replace(tried.token, text=text, truncated=truncated, reward=tried.value))
        assert s.spec.prefix is not None
        prompt_ids = torch.cat([groups[s.group].prompt_ids, s.spec.prefix])
        state_groups.append(EpisodeGroup(s.spec, prompt_ids, tuple(rows)))
        # [K], ŵ·K: by probability if all tokens are distinct, otherwise by how often each was sampled
        if vine.distinct:
            token_weights = torch.cat([t.token.logp for t in s.valued_tokens]).double().softmax(0) * len(rows)
        else:
            counts = torch.tensor([t.count for t in s.valued_tokens], dtype=torch.float64)
            token_weights = counts * len(counts) / counts.sum()
        weights.append(token_weights * s.count * len(used) / num_counted)
    vine_batch = batch_groups(state_groups)
    weight = torch.cat(weights)[:, None].to(vine_batch.reward.dtype)
    return replace(vine_batch, weight=weight), state_groups, scoring


def _choose_states(batch: Batch, groups: Sequence[EpisodeGroup], count: int, step: int) -> list[VineState]:
    """Choose `count` sampled tokens of each prompt uniformly, and take the text before each."""
    states: list[VineState] = []
    row = 0
    for g, group in enumerate(groups):
        size = len(group.trajectories)
        active = batch.mask[row : row + size].any(1).tolist()
        row += size
        places = [(i, t) for i, c in enumerate(group.trajectories) if active[i] for t in range(len(c.tokens))]
        seed, _, _, index = group.spec.key
        order = philox_uniforms([(seed, VINE, step, index)], max(1, len(places)))[0].argsort(stable=True).tolist()
        by_prefix: dict[bytes, VineState] = {}
        for i, t in (places[place] for place in order[:count] if places):
            prefix = group.trajectories[i].tokens[:t]
            name = prefix.numpy().tobytes()
            if name in by_prefix:
                by_prefix[name] = replace(by_prefix[name], count=by_prefix[name].count + 1)
            else:
                key = (seed, VINE, step, index, i, t)
                spec = EpisodeSpec(group.spec.example, key, group.spec.max_tokens - t, prefix)
                by_prefix[name] = VineState(g, spec, 1)
        states += by_prefix.values()
    return states


def _try_tokens(states: list[VineState], vine: Vine, play: PlayEpisodes) -> tuple[list[VineState], int]:
    """Return (the states with up to `vine.actions` different tokens each, in the order sampled; tokens sampled)."""
    tried: list[dict[int, TriedToken]] = [{} for _ in states]
    active, num_sampled = list(range(len(states))), 0
    for turn in range(MAX_TRY_ROUNDS if vine.distinct else 1):
        specs = [replace(s.spec, key=(*s.spec.key, turn), max_tokens=1) for s in (states[i] for i in active)]
        for i, group in zip(active, play(specs, vine.actions) if specs else [], strict=True):
            for episode in group.trajectories:
                token = int(episode.tokens[0])
                if token in tried[i]:
                    tried[i][token] = replace(tried[i][token], count=tried[i][token].count + 1)
                elif len(tried[i]) < vine.actions:
                    tried[i][token] = TriedToken(episode)
            num_sampled += len(group.trajectories)
        active = [i for i in active if len(tried[i]) < vine.actions]
    return [replace(s, tried=tuple(x.values())) for s, x in zip(states, tried, strict=True)], num_sampled


def _complete_tokens(
    states: list[VineState], groups: Sequence[EpisodeGroup], samples: int, play: PlayEpisodes, score: ScoreGroups
) -> tuple[list[VineState], int, ScoringResult]:
    """Return (the states with Q̂ of every token, where there are two; tokens sampled; the scoring).

    An end token, or the last one of the budget, completes its text by itself.
    """
    pairs = [(i, k) for i, s in enumerate(states) if len(s.tried) > 1 for k in range(len(s.tried))]
    specs: dict[tuple[int, int], EpisodeSpec] = {}
    for i, k in pairs:
        spec = states[i].spec
        assert spec.prefix is not None
        prefix = torch.cat([spec.prefix, states[i].tried[k].token.tokens])
        key = (*spec.key, MAX_TRY_ROUNDS)  # the same for all tokens of a state
        specs[i, k] = replace(spec, key=key, max_tokens=spec.max_tokens - 1, prefix=prefix)
    active = [(i, k) for i, k in pairs if specs[i, k].max_tokens and states[i].tried[k].token.truncated]
    played = dict(zip(active, play([specs[p] for p in active], samples) if active else [], strict=True))
    num_sampled = sum(t.num_sampled_tokens for group in played.values() for t in group.trajectories)
    texts = [
        played.get((i, k)) or EpisodeGroup(specs[i, k], groups[states[i].group].prompt_ids, (states[i].tried[k].token,))
        for i, k in pairs
    ]
    scored, scoring = score(texts) if texts else ([], ScoringResult())  # reward functions do not accept an empty list
    tried = [list(s.tried) for s in states]
    for (i, k), group in zip(pairs, scored, strict=True):
        tried[i][k] = replace(tried[i][k], value=_mean_reward(group), first_continuation=group.trajectories[0])
    return [replace(s, tried=tuple(t)) for s, t in zip(states, tried, strict=True)], num_sampled, scoring
