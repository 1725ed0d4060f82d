"""TRPO's vine: in states along the answers that were sampled, several next tokens are tried and what comes of each is sampled."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from policygrad.core.batch import Batch
from policygrad.core.metrics import Mean, Metrics, Sum, merge
from policygrad.core.vine import Vine
from policygrad.rollout.batching import to_batch
from policygrad.rollout.judging import Judged
from policygrad.rollout.trajectory import VINE, Group, Start, Trajectory
from policygrad.samplers.draw import uniforms

ROUNDS = 4
"""Times that K tokens are drawn in a state where fewer than K different ones have been found."""
Play = Callable[[list[Start], int], list[Group]]


@dataclass(frozen=True, eq=False)
class Tried:
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
class State:
    """A prefix of a completion, and the tokens that were tried after it."""

    group: int
    start: Start
    """The prefix, what it leaves of the budget, and the key of its random numbers."""
    times: int
    """How often it was chosen: equal prefixes are one state."""
    tried: tuple[Tried, ...] = ()

    @property
    def known(self) -> tuple[Tried, ...]:
        """With a Q̂."""
        return tuple(t for t in self.tried if t.value is not None)


def branched(
    batch: Batch,
    groups: Sequence[Group],
    vine: Vine,
    play: Play,
    judge: Callable[[list[Group]], tuple[list[Group], Judged]],
    step: int,
) -> tuple[Batch, list[Group], Judged]:
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
    kept = [s for s in states if len(s.known) > 1]
    metrics: Metrics = {name: Sum(float(drawn + sampled)) for name in ("tokens/vine", "tokens/sampled")}
    metrics |= {"vine/states": Sum(float(len(kept))), "vine/failed": Sum(float(_failed(states)))}
    if states:
        metrics["vine/actions"] = Mean(float(sum(len(s.tried) for s in states)), float(len(states)))
    failures = {name: metric for name, metric in judged.metrics.items() if name.startswith("rewards/failed_")}
    note = "what came of a token has no reward; it is not compared with the others of its state"
    judged = Judged(merge(metrics, failures), (*judged.messages, *((note,) if _failed(states) else ())))
    if not kept:  # nothing to compare: nothing is learnt from what was sampled
        said = "no state has two tokens to compare, and nothing is learnt: the policy is sure of every token, or rewards fail"
        return replace(batch, mask=torch.zeros_like(batch.mask)), list(groups), judged | Judged(messages=(said,))
    counted = sum(s.times for s in states if s in kept or len(s.tried) < 2)
    found = [_group(s, groups[s.group]) for s in kept]
    weight = [_weights(s, vine.distinct) * s.times * len(kept) / counted for s in kept]
    trained = to_batch(found)
    return replace(trained, weight=torch.cat(weight)[:, None].to(trained.reward.dtype)), found, judged


def _chosen(batch: Batch, groups: Sequence[Group], count: int, step: int) -> list[State]:
    """The rollout set: `count` sampled tokens of each prompt, each as likely as the others, and the text before each."""
    states: list[State] = []
    row = 0
    for g, group in enumerate(groups):
        size = len(group.trajectories)
        takes = batch.mask[row : row + size].any(1).tolist()
        row += size
        places = [(i, t) for i, c in enumerate(group.trajectories) if takes[i] for t in range(len(c.tokens))]
        seed, _, _, index = group.start.key
        order = uniforms([(seed, VINE, step, index)], max(1, len(places)))[0].argsort(stable=True).tolist()
        found: dict[bytes, State] = {}
        for i, t in (places[place] for place in order[:count] if places):
            prefix = group.trajectories[i].tokens[:t]
            name = prefix.numpy().tobytes()
            if name in found:
                found[name] = replace(found[name], times=found[name].times + 1)
            else:
                key = (seed, VINE, step, index, i, t)
                found[name] = State(g, Start(group.start.example, key, group.start.max_tokens - t, prefix), 1)
        states += found.values()
    return states


def _try(states: list[State], vine: Vine, play: Play) -> tuple[list[State], int]:
    """(the states with up to `vine.actions` different tokens each, in the order they were drawn; tokens drawn)."""
    found: list[dict[int, Tried]] = [{} for _ in states]
    going, drawn = list(range(len(states))), 0
    for turn in range(ROUNDS if vine.distinct else 1):
        starts = [replace(s.start, key=(*s.start.key, turn), max_tokens=1) for s in (states[i] for i in going)]
        for i, group in zip(going, play(starts, vine.actions) if starts else [], strict=True):
            for one in group.trajectories:
                token = int(one.tokens[0])
                if token in found[i]:
                    found[i][token] = replace(found[i][token], times=found[i][token].times + 1)
                elif len(found[i]) < vine.actions:
                    found[i][token] = Tried(one)
            drawn += len(group.trajectories)
        going = [i for i in going if len(found[i]) < vine.actions]
    return [replace(s, tried=tuple(f.values())) for s, f in zip(states, found, strict=True)], drawn


def _complete(
    states: list[State],
    groups: Sequence[Group],
    samples: int,
    play: Play,
    judge: Callable[[list[Group]], tuple[list[Group], Judged]],
) -> tuple[list[State], int, Judged]:
    """(the states with Q̂ of every token, where there are two; tokens sampled; what went wrong). An end token, or the budget's
    last, completes its text by itself."""
    places = [(i, k) for i, s in enumerate(states) if len(s.tried) > 1 for k in range(len(s.tried))]
    starts = {(i, k): _after(states[i], k) for i, k in places}
    going = [(i, k) for i, k in places if starts[i, k].max_tokens and states[i].tried[k].token.truncated]
    played = dict(zip(going, play([starts[p] for p in going], samples) if going else [], strict=True))
    sampled = sum(t.sampled for group in played.values() for t in group.trajectories)
    texts = [
        played.get((i, k)) or Group(starts[i, k], groups[states[i].group].prompt, (states[i].tried[k].token,))
        for i, k in places
    ]
    scored, judged = judge(texts) if texts else ([], Judged())  # a reward is not asked about nothing
    tried = [list(s.tried) for s in states]
    for (i, k), group in zip(places, scored, strict=True):
        known = [t.reward for t in group.trajectories if t.reward is not None]
        value = sum(known) / len(known) if known else None
        tried[i][k] = replace(tried[i][k], value=value, after=group.trajectories[0])
    return [replace(s, tried=tuple(t)) for s, t in zip(states, tried, strict=True)], sampled, judged


def _after(state: State, k: int) -> Start:
    """After a token: with the same key for all tokens of a state, so that they are completed with the same random numbers."""
    start, token = state.start, state.tried[k].token.tokens
    assert start.prefix is not None
    return replace(
        start, key=(*start.key, ROUNDS), max_tokens=start.max_tokens - 1, prefix=torch.cat([start.prefix, token])
    )


def _failed(states: Sequence[State]) -> int:
    """Tokens whose Q̂ is not known, of those that were completed."""
    return sum(len(s.tried) - len(s.known) for s in states if len(s.tried) > 1)


def _group(state: State, of: Group) -> Group:
    """The state as a group of one-token episodes; the text is what came of each."""
    assert state.start.prefix is not None
    rows = []
    for tried in state.known:
        assert tried.after is not None
        after, token = tried.after, tried.token
        rows.append(replace(token, text=after.text, truncated=after.truncated, reward=tried.value))
    return Group(state.start, torch.cat([of.prompt, state.start.prefix]), tuple(rows))


def _weights(state: State, distinct: bool) -> Tensor:
    """[K] float64, ŵ·K: by probability where every token stands for itself, otherwise by how often it was drawn."""
    if distinct:
        logp = torch.cat([t.token.logp for t in state.known]).double()
        return logp.softmax(0) * len(logp)
    times = torch.tensor([t.times for t in state.known], dtype=torch.float64)
    return times * len(times) / times.sum()
