"""Samples beyond the step's episodes: greedy baselines (ReMax), prefix values (VinePPO), and vines (TRPO)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch

from policygrad.core.batch import Batch
from policygrad.core.metrics import Metrics, Sum, list_means
from policygrad.core.vine import Vine
from policygrad.errors import ConfigError
from policygrad.rollout.batching import batch_groups
from policygrad.rollout.scoring import ScoringResult
from policygrad.rollout.trajectory import GREEDY, VALUES, VINE, EpisodeGroup, EpisodeSpec, Trajectory
from policygrad.samplers.local.sampling import philox_uniforms

PlayEpisodes = Callable[[list[EpisodeSpec], int], list[EpisodeGroup]]  # (specs, samples per spec) -> unscored groups
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
    for g, episode in zip(active, episodes, strict=True):
        if episode.reward is not None:
            baseline[batch.group == g] = episode.reward
    tokens = sum(t.num_sampled_tokens for t in episodes)
    rewards = [t.reward for t in episodes if t.reward is not None]
    metrics: Metrics = {name: Sum(float(tokens)) for name in ("tokens/greedy", "tokens/sampled")}
    metrics |= list_means({"reward/greedy": rewards})
    note = "a greedy completion has no reward; its prompt is not learned from" if len(rewards) < len(active) else ""
    return replace(batch, baseline=baseline), scoring.failures_only(metrics, note)


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
    if batch.step_end is None:
        raise ConfigError("prefix values need completions with reasoning steps: give the Rollouter `score_steps`")
    specs: list[EpisodeSpec] = []  # one for each distinct prefix of a group
    indices: dict[tuple[int, bytes], int] = {}
    # of each completion (first token, index of its prefix) of every step; none if it is masked
    steps: list[list[tuple[int, int]]] = []
    rows = [(g, sample, c.tokens) for g, group in enumerate(groups) for sample, c in enumerate(group.trajectories)]
    for row, (g, sample, tokens) in enumerate(rows):
        spec = groups[g].spec
        seed, _, _, index = spec.key
        ends = batch.step_end[row].nonzero().flatten().tolist()
        steps.append([])
        for start in [0, *(end + 1 for end in ends if end < len(tokens) - 1)] if bool(batch.mask[row].any()) else ():
            prefix = tokens[:start]
            name = (g, prefix.numpy().tobytes())
            if name not in indices:
                indices[name] = len(specs)
                key = (seed, VALUES, step, index, sample, start)
                specs.append(EpisodeSpec(spec.example, key, spec.max_tokens - start, prefix))
            steps[row].append((start, indices[name]))
    filled = torch.zeros(batch.mask.shape, dtype=batch.reward.dtype)
    if not specs:  # reward functions do not accept an empty list
        return replace(batch, values=filled), ScoringResult({"values/prefixes": Sum(0.0)})
    continued, scoring = score(play(specs, samples_per_prefix))
    values = [_mean_reward(group) for group in continued]
    for row, row_steps in enumerate(steps):
        peers = (batch.group == batch.group[row]) & batch.counted
        value = float(batch.reward[peers].mean())
        for start, place in row_steps:
            prefix_value = values[place]
            value = value if prefix_value is None else prefix_value
            filled[row, start:] = value
    failed = values.count(None)
    num_tokens = sum(t.num_sampled_tokens for g in continued for t in g.trajectories)
    metrics: Metrics = {name: Sum(float(num_tokens)) for name in ("tokens/values", "tokens/sampled")}
    metrics |= {"values/prefixes": Sum(float(len(specs))), "values/failed": Sum(float(failed))}
    note = "no completion of a prefix has a reward; its step takes the value of the step before" if failed else ""
    return replace(batch, values=filled), scoring.failures_only(metrics, note)


def _mean_reward(group: EpisodeGroup) -> float | None:
    rewards = [t.reward for t in group.trajectories if t.reward is not None]
    return sum(rewards) / len(rewards) if rewards else None


MAX_TRY_ROUNDS = 4  # maximum number of times that K tokens are sampled in a state to find K different ones


@dataclass(eq=False)
class TriedToken:
    """A token sampled in a state of the vine."""

    token: Trajectory  # the episode of this one token
    count: int = 1  # number of times it was sampled
    value: float | None = None  # Q̂, the mean reward of its continuations; None = no reward
    first_continuation: Trajectory | None = None


@dataclass(eq=False)
class VineState:
    """A prefix of a completion, and the tokens tried after it."""

    group: int
    spec: EpisodeSpec  # the prefix, the rest of its token budget, and the key of its random numbers
    count: int = 1  # number of times it was chosen: equal prefixes are one state
    tried: dict[int, TriedToken] = field(default_factory=dict)  # by token id, in the order sampled

    @property
    def valued_tokens(self) -> list[TriedToken]:
        """The tokens with a Q̂."""
        return [t for t in self.tried.values() if t.value is not None]


def sample_vine(
    batch: Batch, groups: Sequence[EpisodeGroup], vine: Vine, play: PlayEpisodes, score: ScoreGroups, step: int
) -> tuple[Batch, list[EpisodeGroup], ScoringResult]:
    """Replace the batch by a vine (TRPO): in states along the completions, several next tokens with their values Q̂.

    `vine.states` of all sampled tokens of each prompt are chosen, and the state before each. Every state becomes a group whose
    prompt includes the prefix, with one row per token and Q̂ as reward. `weight` sums over a state to its number of tokens times
    its share of the chosen states. A state with only one distinct token counts among these but teaches nothing; one with fewer
    than two tokens because rewards failed does not count. All tokens of a state are completed with the same random numbers.
    """
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
        for i, t in (places[place] for place in order[: vine.states] if places):
            prefix = group.trajectories[i].tokens[:t]
            name = prefix.numpy().tobytes()
            if name in by_prefix:
                by_prefix[name].count += 1
            else:
                key = (seed, VINE, step, index, i, t)
                spec = EpisodeSpec(group.spec.example, key, group.spec.max_tokens - t, prefix)
                by_prefix[name] = VineState(g, spec)
        states += by_prefix.values()
    num_tokens, scoring = _value_tokens(states, groups, vine, play, score)
    used = [s for s in states if len(s.valued_tokens) > 1]
    failed = sum(len(s.tried) - len(s.valued_tokens) for s in states if len(s.tried) > 1)
    metrics: Metrics = {name: Sum(float(num_tokens)) for name in ("tokens/vine", "tokens/sampled")}
    metrics |= {"vine/states": Sum(float(len(used))), "vine/failed": Sum(float(failed))}
    metrics |= list_means({"vine/actions": [len(s.tried) for s in states]})
    note = "a vine's token has no reward; it is not compared with the other tokens of its state" if failed else ""
    scoring = scoring.failures_only(metrics, note)
    if not used:
        note = "no vine state has two tokens to compare, so nothing is learned: the policy is certain, or rewards fail"
        scoring |= ScoringResult(messages=(note,))
        return replace(batch, mask=torch.zeros_like(batch.mask)), list(groups), scoring
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
        state_groups.append(EpisodeGroup(s.spec, prompt_ids, tuple(rows), media=groups[s.group].media))
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


def _value_tokens(
    states: Sequence[VineState], groups: Sequence[EpisodeGroup], vine: Vine, play: PlayEpisodes, score: ScoreGroups
) -> tuple[int, ScoringResult]:
    """Try up to `vine.actions` different tokens in every state, and estimate their Q̂ where there are two.

    Returns:
        The number of sampled tokens, and the scoring.
    """
    active, num_sampled = states, 0
    for turn in range(MAX_TRY_ROUNDS if vine.distinct else 1):
        specs = [replace(s.spec, key=(*s.spec.key, turn), max_tokens=1) for s in active]
        for state, group in zip(active, play(specs, vine.actions) if specs else [], strict=True):
            num_sampled += len(group.trajectories)
            for episode in group.trajectories:
                token = int(episode.tokens[0])
                if token in state.tried:
                    state.tried[token].count += 1
                elif len(state.tried) < vine.actions:
                    state.tried[token] = TriedToken(episode)
        active = [s for s in active if len(s.tried) < vine.actions]

    compared = [(s, tried) for s in states if len(s.tried) > 1 for tried in s.tried.values()]
    texts = []
    for s, tried in compared:
        assert s.spec.prefix is not None
        prefix = torch.cat([s.spec.prefix, tried.token.tokens])
        key = (*s.spec.key, MAX_TRY_ROUNDS)  # the same for all tokens of a state
        spec = replace(s.spec, key=key, max_tokens=s.spec.max_tokens - 1, prefix=prefix)
        group = groups[s.group]
        texts.append(EpisodeGroup(spec, group.prompt_ids, (tried.token,), media=group.media))
    # an end token, or the last one of the budget, completes its text by itself; the others are continued
    unfinished = [i for i, text in enumerate(texts) if text.spec.max_tokens and text.trajectories[0].truncated]
    continued = play([texts[i].spec for i in unfinished], vine.samples) if unfinished else []
    for i, group in zip(unfinished, continued, strict=True):
        texts[i] = group
        num_sampled += sum(t.num_sampled_tokens for t in group.trajectories)
    scored, scoring = score(texts) if texts else ([], ScoringResult())  # reward functions do not accept an empty list
    for (_, tried), group in zip(compared, scored, strict=True):
        tried.value, tried.first_continuation = _mean_reward(group), group.trajectories[0]
    return num_sampled, scoring
