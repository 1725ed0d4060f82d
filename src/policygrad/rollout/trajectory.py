"""What a rollout is made of: episodes as runs of tokens of one origin, each token with who wrote it and which weights drew it."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

import torch
from torch import Tensor

from policygrad.core.batch import Batch
from policygrad.environments.base import ENVIRONMENT, TOKENS
from policygrad.rewards.base import StepScores
from policygrad.samplers.base import Generation
from policygrad.tasks.base import Example

# Reasoning steps: from where a text's steps end to the tokens at which they end, and from there to the batch.


@dataclass(frozen=True)
class StepMarks:
    """The steps of one completion, by token."""

    ends: tuple[int, ...]
    """Index of each step's last token, rising; the last sampled token is always one."""
    scores: tuple[float, ...]
    """Of each step; 0 where nothing scored it."""


def find_token_index(decode: Callable[[Tensor], str], tokens: Tensor, text: str, end: int) -> int:
    """The first token with which the decoded text reaches `end` characters; ids are decoded, never made from text.

    A character of several tokens is there with its last one. What is followed by white space only ends with the last token,
    since the end token that closes an answer is no step of its own.
    """
    if end >= len(text.rstrip()):
        return len(tokens) - 1
    low, high = 1, len(tokens)  # tokens needed
    while low < high:
        middle = (low + high) // 2
        if decode(tokens[:middle])[:end] == text[:end]:
            high = middle
        else:
            low = middle + 1
    return low - 1


def locate_steps(decode: Callable[[Tensor], str], tokens: Tensor, text: str, steps: StepScores) -> StepMarks:
    """Steps by characters as steps by tokens; the scores of steps that end with the same token are added up."""
    scores = {len(tokens) - 1: 0.0}
    for end, score in steps:
        at = find_token_index(decode, tokens, text, end)
        scores[at] = scores.get(at, 0.0) + score
    ends = tuple(sorted(scores))
    return StepMarks(ends, tuple(scores[end] for end in ends))


def add_step_marks(batch: Batch, marks: Sequence[StepMarks | None], *, scored: bool) -> Batch:
    """`step_end`, and with `scored` the steps' scores as `token_reward`; None = a completion without steps (it failed)."""
    step_end = torch.zeros_like(batch.mask)
    reward = torch.zeros(batch.mask.shape, dtype=batch.reward.dtype)
    for row, step_marks in enumerate(marks):
        if step_marks is not None:
            ends = torch.tensor(step_marks.ends, dtype=torch.int64)
            step_end[row, ends] = True
            reward[row, ends] = torch.tensor(step_marks.scores, dtype=batch.reward.dtype)
    batch = replace(batch, step_end=step_end & batch.mask)
    return replace(batch, token_reward=reward) if scored else batch


TRAIN, EVALUATE, VALUES, GREEDY, VINE = 0, 1, 2, 3, 4
"""Streams of random numbers, the second entry of a start's key."""


@dataclass(frozen=True, eq=False)
class EpisodeSpec:
    """Where the episodes of one group begin."""

    example: Example
    key: tuple[int, ...]
    """(seed, stream, step, example), and of a prefix (…, sample, position); sample j draws from key + (j,), its turn k > 0 from
    key + (j, k)."""
    max_tokens: int
    """Tokens that an episode may sample."""
    prefix: Tensor | None = None
    """[n] int64; an answer's beginning to go on from, as Monte-Carlo values do."""

    @property
    def location(self) -> str:
        """For error messages."""
        kind = "held-out" if self.key[1] == EVALUATE else "training"
        return getattr(self.example, "source", "") or f"{kind} prompt {self.key[3]}"

    @property
    def seed(self) -> int:
        """Of the world, the same for every episode of the group and for its greedy one."""
        return Random(f"{self.key[0]}/{self.key[2:4]}").getrandbits(63)


@dataclass(frozen=True, eq=False)
class Segment:
    """A run of tokens of one origin."""

    tokens: Tensor
    """[n] int64."""
    logp: Tensor | None = None
    """[n] nats under what was really sampled from; None = not sampled: a tool or the environment said them."""
    version: int | Tensor = 0
    """Of the weights that drew it; [n] int64 where they changed on the way."""
    routed_experts: Tensor | None = None
    """[m, layers, k] the experts of every token up to its end, the prompt's first; -1 = not read."""
    prefix_length: int | None = None
    """A new branch begins: the template has written the conversation anew. Of the ids that were read before, the prompt's first,
    so many stay, and these tokens follow them. None = they follow all of them."""
    new_tokens: Tensor | None = None
    """[m] int64; what of them was said now, for people and reward functions; None = all."""

    @classmethod
    def from_generation(cls, generation: Generation) -> Segment:
        return cls(generation.tokens, generation.logp, generation.version, generation.routed_experts)

    @property
    def is_sampled(self) -> bool:
        return self.logp is not None

    @property
    def visible_tokens(self) -> Tensor:
        """[m] int64."""
        return self.tokens if self.new_tokens is None else self.new_tokens


@dataclass(frozen=True, eq=False)
class Trajectory:
    """One episode: what follows the prompt, and what it was worth. It is one, and one row of a batch, also where it has branches:
    what a branch's segments follow is what the segments before them have left it (`Segment.prefix_length`)."""

    segments: tuple[Segment, ...]
    """In order; a turn of the policy is one sampled segment."""
    text: str
    """What all segments have told (and a prefix before them), for reward functions and people."""
    truncated: bool
    """The token budget ended it, not the policy or the environment."""
    turn_rewards: tuple[float | None, ...] = ()
    """What the environment said of each turn."""
    reward: float | None = None
    """The turns' rewards and what the reward functions say, added up; None = it could not be judged and takes no part."""
    step_marks: StepMarks | None = None
    """Where its reasoning steps end; None where nobody looks."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """What the environment measured, its turns added up."""
    turn_states: tuple[Hashable, ...] = ()
    """What the environment was in when each turn began."""
    reward_parts: tuple[float | None, ...] = ()
    """What each of the group's `rewards` says, before its weight; None = it failed or does not apply."""
    demonstration: bool = False
    """Shown, not sampled: its one segment's `logp` is that of whoever wrote it, or 0."""
    stop_reason: str = ""
    """What ended it, where an environment was played: `environment`, `tokens`, `context`, `failed`, or a word of its own."""
    failure: str = ""
    """Why its environment has lost it, so that nothing is to be judged; "" = it has not."""

    @property
    def tokens(self) -> Tensor:
        """[n] int64."""
        return self._joined([s.tokens for s in self.segments])

    @property
    def mask(self) -> Tensor:
        """[n] bool; True where the policy sampled the token."""
        return self._joined([torch.full(s.tokens.shape, s.is_sampled) for s in self.segments])

    @property
    def logp(self) -> Tensor:
        """[n] nats, log μ; 0 where nothing was sampled."""
        return self._joined([torch.zeros(len(s.tokens)) if s.logp is None else s.logp.float() for s in self.segments])

    @property
    def version(self) -> Tensor:
        """[n] int64; 0 where nothing was sampled."""
        whole = (
            torch.full_like(s.tokens, s.version) if isinstance(s.version, int) else s.version for s in self.segments
        )
        return self._joined(list(whole))

    @property
    def num_branches(self) -> int:
        """Texts that it is read as: one, and another each time that the template wrote the conversation anew."""
        return 1 + sum(s.prefix_length is not None for s in self.segments)

    def positions(self, prompt: int) -> Tensor:
        """[n] int64; how many tokens stand before each where it was read, those of the prompt included."""
        found, at = list[Tensor](), prompt
        for segment in self.segments:
            at = at if segment.prefix_length is None else segment.prefix_length
            found.append(torch.arange(at, at + len(segment.tokens)))
            at += len(segment.tokens)
        return self._joined(found)

    @property
    def visible_tokens(self) -> Tensor:
        """[m] int64; the tokens of `text`."""
        return self._joined([s.visible_tokens for s in self.segments])

    def map_step_marks(self, marks: StepMarks) -> StepMarks:
        """Steps by the tokens of `told`, as steps by those of `tokens`; what was written anew is one token, its last."""
        if self.num_branches == 1:
            return marks
        places, at = list[int](), 0
        for segment in self.segments:
            end = at + len(segment.tokens)
            places += range(at, end) if segment.new_tokens is None else [end - 1] * len(segment.new_tokens)
            at = end
        return StepMarks(tuple(places[end] for end in marks.ends), marks.scores)

    @property
    def branch_ends(self) -> tuple[Segment, ...]:
        """The last turn of each branch, which has read all before it there."""
        last, branch = dict[int, Segment](), 0
        for segment in self.segments:
            branch += segment.prefix_length is not None
            if segment.is_sampled:
                last[branch] = segment
        return tuple(last.values())

    @property
    def routed_experts(self) -> Tensor | None:
        """[P + n, layers, k] the experts of the prompt's tokens and of these."""
        begins = [0, *(s.prefix_length for s in self.segments if s.prefix_length is not None)]
        read = [
            s.routed_experts[begin:]
            for s, begin in zip(self.branch_ends, begins, strict=False)
            if s.routed_experts is not None
        ]
        return self._joined(read) if len(read) == len(begins) else None

    @staticmethod
    def _joined(parts: list[Tensor]) -> Tensor:
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    @property
    def num_sampled_tokens(self) -> int:
        """Tokens that the policy drew."""
        return 0 if self.demonstration else sum(len(s.tokens) for s in self.segments if s.is_sampled)


@dataclass(frozen=True, eq=False)
class EpisodeGroup:
    """The episodes of one example."""

    spec: EpisodeSpec
    prompt_ids: Tensor
    """[P] int64; what all of them begin with."""
    trajectories: tuple[Trajectory, ...]
    reward_weights: tuple[tuple[str, float], ...] = ()
    """(name, weight) of every number in a trajectory's `parts`; what the environment itself gave is one of them."""


def reward_inputs(groups: list[EpisodeGroup]) -> tuple[list[Any], list[str], dict[str, list[Any]]]:
    """What a reward function is given: prompts, texts and columns, one of each per episode."""
    repeated = [(g.spec.example, t.text) for g in groups for t in g.trajectories]
    prompts, columns = prompts_and_columns([example for example, _ in repeated])
    return prompts, [text for _, text in repeated], columns


def prompts_and_columns(examples: Sequence[Example]) -> tuple[list[Any], dict[str, list[Any]]]:
    """Of that, what there is before there are texts: prompts and columns."""
    names = dict.fromkeys(name for example in examples for name in example.columns)
    columns = {name: [example.columns.get(name) for example in examples] for name in names}
    return [example.prompt for example in examples], columns


def is_multi_turn(rows: Sequence[Trajectory]) -> bool:
    """Whether there is anything to say of turns: an episode has several, or ended by a word of its environment's own."""
    return any(len(row.segments) > 1 or row.stop_reason not in ("", ENVIRONMENT, TOKENS) for row in rows)
