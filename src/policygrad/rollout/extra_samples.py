"""The greedy completion of each prompt: what the policy does best, as a baseline for what it draws."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from policygrad.core.batch import Batch
from policygrad.core.metrics import Mean, Metrics, Sum, merge
from policygrad.core.vine import Vine
from policygrad.errors import ConfigError
from policygrad.rollout.batching import batch_groups
from policygrad.rollout.scoring import ScoringResult
from policygrad.rollout.trajectory import GREEDY, VALUES, VINE, EpisodeGroup, EpisodeSpec, Trajectory
from policygrad.samplers.local.sampling import philox_uniforms


def add_greedy_baseline(
    batch: Batch,
    groups: Sequence[EpisodeGroup],
    greedy: Callable[[list[EpisodeSpec]], tuple[list[EpisodeGroup], ScoringResult]],
) -> tuple[Batch, ScoringResult]:
    """(the batch with `baseline`, what it cost and what went wrong): one greedy episode for each prompt that takes part (ReMax).

    It is judged as the others are, stands in no batch, and its tokens are counted. NaN where its reward failed: nothing is
    learnt from that prompt. `greedy` makes one episode of each start.
    """
    baseline = torch.full_like(batch.reward, torch.nan)
    taking = [g for g in range(len(groups)) if bool(batch.mask[batch.group == g].any())]
    if not taking:  # a reward is not asked about nothing
        return replace(batch, baseline=baseline), ScoringResult()
    found, judged = greedy([_greedy_start(groups[g].spec) for g in taking])
    known = []
    for g, group in zip(taking, found, strict=True):
        reward = group.trajectories[0].reward
        if reward is not None:
            known.append(reward)
            baseline[batch.group == g] = reward
    tokens, failed = sum(group.trajectories[0].num_sampled_tokens for group in found), len(taking) - len(known)
    metrics: Metrics = {name: Sum(float(tokens)) for name in ("tokens/greedy", "tokens/sampled")}
    if known:
        metrics |= {"reward/greedy": Mean(sum(known), float(len(known)))}
    failures = {name: metric for name, metric in judged.metrics.items() if name.startswith("rewards/failed_")}
    note = "a greedy completion has no reward; nothing is learnt from its prompt"
    return replace(batch, baseline=baseline), ScoringResult(
        merge(metrics, failures), (*judged.messages, *((note,) if failed else ()))
    )


def _greedy_start(start: EpisodeSpec) -> EpisodeSpec:
    """The same, from random numbers of its own: in an environment it may be the world that draws."""
    seed, _, step, index = start.key
    return replace(start, key=(seed, GREEDY, step, index))


# Values by sampling: how well the policy does from the start of each step, from fresh completions of the text so far.


@dataclass(frozen=True)
class Prefix:
    """The start of a step: the first `length` tokens of a group's completion. Equal texts are one prefix."""

    group: int
    sample: int
    """The first completion that begins with it."""
    length: int


def add_prefix_values(
    batch: Batch,
    groups: Sequence[EpisodeGroup],
    go_on: Callable[[list[EpisodeSpec]], tuple[list[EpisodeGroup], ScoringResult]],
    step: int,
) -> tuple[Batch, ScoringResult]:
    """(the batch with `values`, what they cost and what went wrong): Monte-Carlo values of steps (VinePPO).

    At every token stands the mean reward of the completions that `go_on` makes of the text before its step. One call samples
    them all; each prefix has what it leaves of the token budget, and its numbers come from a key of its own. A completion
    whose reward fails is left out; a prefix of which all fail takes the value of the step before it, the prompt itself the
    mean reward of its group.
    """
    prefixes, where = _prefixes(batch, groups)
    if not prefixes:  # nothing takes part: a reward is not asked about nothing
        return replace(batch, values=_fill(batch, (), where)), ScoringResult({"values/prefixes": Sum(0.0)})
    continued, judged = go_on([_continuation_start(prefix, groups[prefix.group], step) for prefix in prefixes])
    values = [_mean([t.reward for t in group.trajectories]) for group in continued]
    failed, tokens = values.count(None), sum(t.num_sampled_tokens for g in continued for t in g.trajectories)
    metrics: Metrics = {name: Sum(float(tokens)) for name in ("tokens/values", "tokens/sampled")}
    metrics |= {"values/prefixes": Sum(float(len(prefixes))), "values/failed": Sum(float(failed))}
    note = "no completion of a prefix has a reward; its step's value is taken from the step before"
    failures = {name: metric for name, metric in judged.metrics.items() if name.startswith("rewards/failed_")}
    messages = (*judged.messages, *((note,) if failed else ()))
    return replace(batch, values=_fill(batch, values, where)), ScoringResult(merge(metrics, failures), messages)


def _prefixes(batch: Batch, groups: Sequence[EpisodeGroup]) -> tuple[list[Prefix], list[list[tuple[int, int]]]]:
    """The distinct prefixes, and per completion (first token of a step, its prefix); completions that take no part have none."""
    if batch.step_end is None:
        raise ConfigError(
            "a rollout whose completions have no steps has none to take values of: give its Rollouter `score_steps`"
        )
    places: dict[tuple[int, bytes], int] = {}
    prefixes: list[Prefix] = []
    where: list[list[tuple[int, int]]] = []
    rows = [(g, sample, c.tokens) for g, group in enumerate(groups) for sample, c in enumerate(group.trajectories)]
    for row, (g, sample, tokens) in enumerate(rows):
        last = len(tokens) - 1
        ends = batch.step_end[row].nonzero().flatten().tolist() if bool(batch.mask[row].any()) else None
        starts = [] if ends is None else [0, *(end + 1 for end in ends if end < last)]
        found = []
        for start in starts:
            key = (g, tokens[:start].numpy().tobytes())
            if key not in places:
                places[key] = len(prefixes)
                prefixes.append(Prefix(g, sample, start))
            found.append((start, places[key]))
        where.append(found)
    return prefixes, where


def _continuation_start(prefix: Prefix, group: EpisodeGroup, step: int) -> EpisodeSpec:
    seed, _, _, index = group.spec.key
    tokens = group.trajectories[prefix.sample].tokens[: prefix.length]
    key = (seed, VALUES, step, index, prefix.sample, prefix.length)
    return EpisodeSpec(group.spec.example, key, group.spec.max_tokens - prefix.length, tokens)


def _mean(rewards: Sequence[float | None]) -> float | None:
    known = [r for r in rewards if r is not None]
    return sum(known) / len(known) if known else None


def _fill(batch: Batch, values: Sequence[float | None], where: Sequence[Sequence[tuple[int, int]]]) -> Tensor:
    """[B, T]; each step's value at its tokens."""
    filled = torch.zeros(batch.mask.shape, dtype=batch.reward.dtype)
    for row, starts in enumerate(where):
        if not starts:
            continue
        peers = (batch.group == batch.group[row]) & batch.counted
        value = float(batch.reward[peers].mean())
        for start, place in starts:
            known = values[place]
            value = value if known is None else known
            filled[row, start:] = value
    return filled


# TRPO's vine: in states along the answers that were sampled, several next tokens are tried and what comes of each is sampled.

MAX_TRY_ROUNDS = 4
"""Times that K tokens are drawn in a state where fewer than K different ones have been found."""
Play = Callable[[list[EpisodeSpec], int], list[EpisodeGroup]]


@dataclass(frozen=True, eq=False)
class TriedToken:
    """A token that was drawn in a state."""

    token: Trajectory
    """The episode of that one token."""
    times: int = 1
    """How often it was drawn."""
    value: float | None = None
    """Q̂, the mean reward of what came of it; None = not known."""
    after: Trajectory | None = None
    """The first of what came of it."""


@dataclass(frozen=True, eq=False)
class VineState:
    """A prefix of a completion, and the tokens that were tried after it."""

    group: int
    start: EpisodeSpec
    """The prefix, what it leaves of the budget, and the key of its random numbers."""
    times: int
    """How often it was chosen: equal prefixes are one state."""
    tried: tuple[TriedToken, ...] = ()

    @property
    def valued_tokens(self) -> tuple[TriedToken, ...]:
        """With a Q̂."""
        return tuple(t for t in self.tried if t.value is not None)


def sample_vine(
    batch: Batch,
    groups: Sequence[EpisodeGroup],
    vine: Vine,
    play: Play,
    judge: Callable[[list[EpisodeGroup]], tuple[list[EpisodeGroup], ScoringResult]],
    step: int,
) -> tuple[Batch, list[EpisodeGroup], ScoringResult]:
    """(the batch to train on, its groups, what it cost and what went wrong), from completions that have been judged.

    Chosen are `vine.states` of all sampled tokens of each prompt's completions, and the state before each: states as the policy
    visits them. A group of the new batch is a state, its prompt the prefix too, a row a token, its reward Q̂; `weight` sums over
    a state to its number of tokens times its share of the states that were chosen. A state where only one token is found says
    nothing and counts; one that has fewer than two tokens because rewards failed does not count.

    play: n episodes from each start; judge: their rewards. All tokens of a state are completed with the random numbers of one key.
    """
    states = _chosen(batch, groups, vine.states, step)
    states, drawn = _try(states, vine, play)
    states, sampled, judged = _complete(states, groups, vine.samples, play, judge)
    kept = [s for s in states if len(s.valued_tokens) > 1]
    metrics: Metrics = {name: Sum(float(drawn + sampled)) for name in ("tokens/vine", "tokens/sampled")}
    metrics |= {"vine/states": Sum(float(len(kept))), "vine/failed": Sum(float(_failed(states)))}
    if states:
        metrics["vine/actions"] = Mean(float(sum(len(s.tried) for s in states)), float(len(states)))
    failures = {name: metric for name, metric in judged.metrics.items() if name.startswith("rewards/failed_")}
    note = "what came of a token has no reward; it is not compared with the others of its state"
    judged = ScoringResult(merge(metrics, failures), (*judged.messages, *((note,) if _failed(states) else ())))
    if not kept:  # nothing to compare: nothing is learnt from what was sampled
        said = "no state has two tokens to compare, and nothing is learnt: the policy is sure of every token, or rewards fail"
        return replace(batch, mask=torch.zeros_like(batch.mask)), list(groups), judged | ScoringResult(messages=(said,))
    counted = sum(s.times for s in states if s in kept or len(s.tried) < 2)
    found = [_group(s, groups[s.group]) for s in kept]
    weight = [_weights(s, vine.distinct) * s.times * len(kept) / counted for s in kept]
    trained = batch_groups(found)
    return replace(trained, weight=torch.cat(weight)[:, None].to(trained.reward.dtype)), found, judged


def _chosen(batch: Batch, groups: Sequence[EpisodeGroup], count: int, step: int) -> list[VineState]:
    """The rollout set: `count` sampled tokens of each prompt, each as likely as the others, and the text before each."""
    states: list[VineState] = []
    row = 0
    for g, group in enumerate(groups):
        size = len(group.trajectories)
        takes = batch.mask[row : row + size].any(1).tolist()
        row += size
        places = [(i, t) for i, c in enumerate(group.trajectories) if takes[i] for t in range(len(c.tokens))]
        seed, _, _, index = group.spec.key
        order = philox_uniforms([(seed, VINE, step, index)], max(1, len(places)))[0].argsort(stable=True).tolist()
        found: dict[bytes, VineState] = {}
        for i, t in (places[place] for place in order[:count] if places):
            prefix = group.trajectories[i].tokens[:t]
            name = prefix.numpy().tobytes()
            if name in found:
                found[name] = replace(found[name], times=found[name].times + 1)
            else:
                key = (seed, VINE, step, index, i, t)
                found[name] = VineState(g, EpisodeSpec(group.spec.example, key, group.spec.max_tokens - t, prefix), 1)
        states += found.values()
    return states


def _try(states: list[VineState], vine: Vine, play: Play) -> tuple[list[VineState], int]:
    """(the states with up to `vine.actions` different tokens each, in the order they were drawn; tokens drawn)."""
    found: list[dict[int, TriedToken]] = [{} for _ in states]
    going, drawn = list(range(len(states))), 0
    for turn in range(MAX_TRY_ROUNDS if vine.distinct else 1):
        starts = [replace(s.start, key=(*s.start.key, turn), max_tokens=1) for s in (states[i] for i in going)]
        for i, group in zip(going, play(starts, vine.actions) if starts else [], strict=True):
            for one in group.trajectories:
                token = int(one.tokens[0])
                if token in found[i]:
                    found[i][token] = replace(found[i][token], times=found[i][token].times + 1)
                elif len(found[i]) < vine.actions:
                    found[i][token] = TriedToken(one)
            drawn += len(group.trajectories)
        going = [i for i in going if len(found[i]) < vine.actions]
    return [replace(s, tried=tuple(f.values())) for s, f in zip(states, found, strict=True)], drawn


def _complete(
    states: list[VineState],
    groups: Sequence[EpisodeGroup],
    samples: int,
    play: Play,
    judge: Callable[[list[EpisodeGroup]], tuple[list[EpisodeGroup], ScoringResult]],
) -> tuple[list[VineState], int, ScoringResult]:
    """(the states with Q̂ of every token, where there are two; tokens sampled; what went wrong). An end token, or the budget's
    last, completes its text by itself."""
    places = [(i, k) for i, s in enumerate(states) if len(s.tried) > 1 for k in range(len(s.tried))]
    starts = {(i, k): _after(states[i], k) for i, k in places}
    going = [(i, k) for i, k in places if starts[i, k].max_tokens and states[i].tried[k].token.truncated]
    played = dict(zip(going, play([starts[p] for p in going], samples) if going else [], strict=True))
    sampled = sum(t.num_sampled_tokens for group in played.values() for t in group.trajectories)
    texts = [
        played.get((i, k))
        or EpisodeGroup(starts[i, k], groups[states[i].group].prompt_ids, (states[i].tried[k].token,))
        for i, k in places
    ]
    scored, judged = judge(texts) if texts else ([], ScoringResult())  # a reward is not asked about nothing
    tried = [list(s.tried) for s in states]
    for (i, k), group in zip(places, scored, strict=True):
        known = [t.reward for t in group.trajectories if t.reward is not None]
        value = sum(known) / len(known) if known else None
        tried[i][k] = replace(tried[i][k], value=value, after=group.trajectories[0])
    return [replace(s, tried=tuple(t)) for s, t in zip(states, tried, strict=True)], sampled, judged


def _after(state: VineState, k: int) -> EpisodeSpec:
    """After a token: with the same key for all tokens of a state, so that they are completed with the same random numbers."""
    start, token = state.start, state.tried[k].token.tokens
    assert start.prefix is not None
    return replace(
        start,
        key=(*start.key, MAX_TRY_ROUNDS),
        max_tokens=start.max_tokens - 1,
        prefix=torch.cat([start.prefix, token]),
    )


def _failed(states: Sequence[VineState]) -> int:
    """Tokens whose Q̂ is not known, of those that were completed."""
    return sum(len(s.tried) - len(s.valued_tokens) for s in states if len(s.tried) > 1)


def _group(state: VineState, of: EpisodeGroup) -> EpisodeGroup:
    """The state as a group of one-token episodes; the text is what came of each."""
    assert state.start.prefix is not None
    rows = []
    for tried in state.valued_tokens:
        assert tried.after is not None
        after, token = tried.after, tried.token
        rows.append(replace(token, text=after.text, truncated=after.truncated, reward=tried.value))
    return EpisodeGroup(state.start, torch.cat([of.prompt_ids, state.start.prefix]), tuple(rows))


def _weights(state: VineState, distinct: bool) -> Tensor:
    """[K] float64, ŵ·K: by probability where every token stands for itself, otherwise by how often it was drawn."""
    if distinct:
        logp = torch.cat([t.token.logp for t in state.valued_tokens]).double()
        return logp.softmax(0) * len(logp)
    times = torch.tensor([t.times for t in state.valued_tokens], dtype=torch.float64)
    return times * len(times) / times.sum()
