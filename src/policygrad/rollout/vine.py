"""Vines (TRPO): several next tokens, tried in states along the completions, with the values of their continuations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch

from policygrad.core.batch import Batch
from policygrad.core.metrics import Metrics, Sum, list_means
from policygrad.core.vine import Vine
from policygrad.rollout.batching import batch_groups
from policygrad.rollout.prefix_values import mean_reward
from policygrad.rollout.providers import Collected, FieldProvider, PlayEpisodes, ProviderContext, Stage
from policygrad.rollout.scoring import ScoreGroups, ScoringResult
from policygrad.rollout.trajectory import VINE, EpisodeGroup, EpisodeSpec, Trajectory
from policygrad.samplers.local.sampling import philox_uniforms


@dataclass(frozen=True)
class VineRows(FieldProvider):
    """Puts a vine in the place of the rows."""

    part: Vine
    stage: ClassVar[Stage] = Stage.ROWS
    single_answers: ClassVar[tuple[str, str]] = ("Vine continues completions", "algorithm trpo")

    def provide(self, collected: Collected, context: ProviderContext) -> Collected:
        batch, groups, result = sample_vine(
            collected.batch, collected.groups, self.part, context.play, context.score, context.step
        )
        return collected.with_result(batch, result, groups)


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
        tried.value, tried.first_continuation = mean_reward(group), group.trajectories[0]
    return num_sampled, scoring
