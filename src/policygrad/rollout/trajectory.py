"""The data of a rollout: episodes as segments of tokens with one origin, and groups of episodes that share a prompt."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import torch
from torch import Tensor

from policygrad.core.batch import SamplingMask
from policygrad.core.media import Media, TextMedia, shift_media
from policygrad.models.chat.messages import EncodedText
from policygrad.rewards.base import COMPLETION_IDS, TRAINER_STATE, StepScores, TrainerState
from policygrad.rollout.environment import ENVIRONMENT, TOKENS
from policygrad.samplers.base import Generation, SamplingParams
from policygrad.tasks.base import Example


@dataclass(frozen=True)
class StepMarks:
    """The reasoning steps of one completion, by token."""

    ends: tuple[int, ...]  # index of each step's last token, ascending; always includes the last sampled token
    scores: tuple[float, ...]  # score of each step; 0 where none was given


def find_token_index(decode: Callable[[Tensor], str], tokens: Tensor, text: str, end: int) -> int:
    """Return the index of the first token at which the decoded text reaches `end` characters, by decoding prefixes of the ids.

    A step followed only by white space ends with the last token, since the end-of-text token is no step of its own.
    """
    if end >= len(text.rstrip()):
        return len(tokens) - 1
    return bisect_left(range(1, len(tokens)), True, key=lambda count: decode(tokens[:count])[:end] == text[:end])


def locate_steps(decode: Callable[[Tensor], str], tokens: Tensor, text: str, steps: StepScores) -> StepMarks:
    """Convert steps given by characters to token indices; scores of steps that end with the same token are summed."""
    scores = {len(tokens) - 1: 0.0}
    for end, score in steps:
        at = find_token_index(decode, tokens, text, end)
        scores[at] = scores.get(at, 0.0) + score
    ends = tuple(sorted(scores))
    return StepMarks(ends, tuple(scores[end] for end in ends))


TRAIN, EVALUATE, VALUES, GREEDY, VINE, OPTIMAL = 0, 1, 2, 3, 4, 5
"""Streams of random numbers: the second entry of `EpisodeSpec.key`."""


@dataclass(frozen=True, eq=False)
class EpisodeSpec:
    """The starting point of one group of episodes."""

    example: Example
    key: tuple[int, ...]
    """(seed, stream, step, example), for a prefix followed by (sample, position). Sample j uses the random numbers of
    key + (j,), its turn k > 0 those of key + (j, k)."""
    max_tokens: int  # maximum sampled tokens per episode
    prefix: Tensor | None = None  # [n] int64; the beginning of a completion to continue, for Monte-Carlo values

    @property
    def location(self) -> str:
        """The example's place in its data, for error messages."""
        kind = "held-out" if self.key[1] == EVALUATE else "training"
        return getattr(self.example, "source", "") or f"{kind} prompt {self.key[3]}"

    @property
    def seed(self) -> int:
        """Seed of the environment: the same for all episodes of the group and for its greedy one."""
        return Random(f"{self.key[0]}/{self.key[2:4]}").getrandbits(63)


@dataclass(frozen=True, eq=False)
class Segment:
    """Consecutive tokens with one origin: the policy, or the environment."""

    tokens: Tensor
    """[n] int64."""
    logp: Tensor | None = None
    """[n] nats, under the distribution that was sampled from; None = written by a tool or the environment."""
    version: int | Tensor = 0
    """Version of the weights that sampled it; [n] int64 if it changed within the segment."""
    routed_experts: Tensor | None = None
    """[m, layers, k] experts of all tokens up to the end of the segment, from the prompt on; -1 = not read."""
    prefix_length: int | None = None
    """Set where a branch begins, because the chat template rewrote the conversation: the number of earlier ids, prompt included,
    that these tokens follow. None = they follow all earlier ids."""
    sampling_mask: SamplingMask | None = None
    """The tokens that top-k and top-p left at each one; None = all."""
    new_tokens: Tensor | None = None
    """[m] int64; the new part of `tokens`, for texts and reward functions; None = all."""
    media: TextMedia = ()
    """Pictures that a tool or the environment showed, at positions in `tokens`."""
    observation: Tensor | None = None
    """[n] bool; the tokens of what a tool or the environment wrote, without the chat template's; None = none are marked."""

    @classmethod
    def from_generation(cls, generation: Generation) -> Segment:
        g = generation
        return cls(g.tokens, g.logp, g.version, g.routed_experts, sampling_mask=g.sampling_mask)

    @property
    def is_sampled(self) -> bool:
        return self.logp is not None

    @property
    def visible_tokens(self) -> Tensor:
        """[m] int64; the tokens that are part of the episode's text."""
        return self.tokens if self.new_tokens is None else self.new_tokens


@dataclass(frozen=True, eq=False)
class Trajectory:
    """One episode after the prompt, with its reward: one row of a batch, also where it has branches (`Segment.prefix_length`)."""

    segments: tuple[Segment, ...]
    """In order. Each sampled segment is one turn of the policy."""
    text: str
    """Decoded prefix and visible tokens, for reward functions and logs."""
    truncated: bool
    """True if the token budget ended the episode, not the policy or the environment."""
    turn_rewards: tuple[float | None, ...] = ()
    """Reward of each turn by the environment; None = it gave none."""
    reward: float | None = None
    """Sum of turn rewards and reward functions; None = scoring failed, and the episode is left out of training."""
    step_marks: StepMarks | None = None
    """Ends and scores of reasoning steps; None without `Rollouter.score_steps`."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Metrics by the environment, summed over turns."""
    turn_states: tuple[Hashable, ...] = ()
    """State of the environment at the start of each turn."""
    reward_parts: tuple[float | None, ...] = ()
    """Value of each of the group's `reward_weights`, unweighted; None = it failed or does not apply."""
    feedback: str = ""
    """What the reward functions wrote about the completion; "" = nothing."""
    demonstration: bool = False
    """True if given by the data, not sampled: its one segment has its author's `logp`, or 0."""
    stop_reason: str = ""
    """How an environment's episode ended: `environment`, `tokens`, `context`, `failed`, or a reason of the environment's own."""
    failure: str = ""
    """Error of its environment, after which nothing can be scored; "" = none."""
    notes: tuple[str, ...] = ()
    """What the step's notes say of it, one of each kind."""
    reward_remedy: str = ""
    """How its environment would give a reward, for the message that it gave none; "" = as a step does."""
    role: str = ""
    """The role that the policy played, in a game of several players; "" = no game."""
    peers: str = ""
    """Equal for the episodes of a group that can be compared with each other."""
    columns: Mapping[str, Any] = field(default_factory=dict)
    """What its environment tells the reward functions (`reward_columns`): plain data by name, as it was at the episode's end."""

    @property
    def tokens(self) -> Tensor:
        """[n] int64."""
        return _concat([s.tokens for s in self.segments])

    @property
    def mask(self) -> Tensor:
        """[n] bool; True where the policy sampled the token."""
        return _concat([torch.full(s.tokens.shape, s.is_sampled) for s in self.segments])

    @property
    def logp(self) -> Tensor:
        """[n] nats, log μ; 0 where nothing was sampled."""
        return _concat([torch.zeros(len(s.tokens)) if s.logp is None else s.logp.float() for s in self.segments])

    @property
    def version(self) -> Tensor:
        """[n] int64; 0 where nothing was sampled."""
        return _concat([torch.zeros_like(s.tokens) + s.version for s in self.segments])

    @property
    def observation(self) -> Tensor:
        """[n] bool; the tokens of what tools and the environment wrote, as far as they are marked."""
        none = (torch.zeros_like(s.tokens, dtype=torch.bool) for s in self.segments)
        return _concat(
            [x if s.observation is None else s.observation for s, x in zip(self.segments, none, strict=True)]
        )

    @property
    def num_branches(self) -> int:
        """Number of texts the episode is read as: 1 plus the number of times the template rewrote the conversation."""
        return 1 + sum(s.prefix_length is not None for s in self.segments)

    def positions(self, prompt_length: int) -> Tensor:
        """[n] int64; number of tokens before each in the text it was read in, prompt included."""
        positions, at = list[Tensor](), prompt_length
        for segment in self.segments:
            at = at if segment.prefix_length is None else segment.prefix_length
            positions.append(torch.arange(at, at + len(segment.tokens)))
            at += len(segment.tokens)
        return _concat(positions)

    @property
    def visible_tokens(self) -> Tensor:
        """[m] int64; the tokens of `text`."""
        return _concat([s.visible_tokens for s in self.segments])

    def map_step_marks(self, marks: StepMarks) -> StepMarks:
        """Convert indices into `visible_tokens` to indices into `tokens`; a rewritten part counts as its last token."""
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
        """The last sampled segment of each branch, which read everything before it there."""
        last, branch = dict[int, Segment](), 0
        for segment in self.segments:
            branch += segment.prefix_length is not None
            if segment.is_sampled:
                last[branch] = segment
        return tuple(last.values())

    @property
    def routed_experts(self) -> Tensor | None:
        """[P + n, layers, k] experts of the prompt and of these tokens; None if any are missing."""
        begins = [0, *(s.prefix_length for s in self.segments if s.prefix_length is not None)]
        read = [
            s.routed_experts[begin:]
            for s, begin in zip(self.branch_ends, begins, strict=False)
            if s.routed_experts is not None
        ]
        return _concat(read) if len(read) == len(begins) else None

    @property
    def sampling_mask(self) -> SamplingMask | None:
        """The masks of all tokens; None if none was sampled under one."""
        if all(s.sampling_mask is None for s in self.segments):
            return None
        no_ids = torch.empty(0, dtype=torch.int32)
        unmasked = (SamplingMask(no_ids, torch.zeros(len(s.tokens), dtype=torch.int32)) for s in self.segments)
        return SamplingMask.concat([s.sampling_mask or none for s, none in zip(self.segments, unmasked, strict=True)])

    @property
    def media(self) -> TextMedia:
        """The pictures, at positions in `tokens`."""
        media, at = list[Media](), 0
        for segment in self.segments:
            media += shift_media(segment.media, at)
            at += len(segment.tokens)
        return tuple(media)

    @property
    def num_sampled_tokens(self) -> int:
        """Tokens sampled by the policy."""
        return 0 if self.demonstration else sum(len(s.tokens) for s in self.segments if s.is_sampled)


@dataclass(frozen=True, eq=False)
class EpisodeGroup:
    """The episodes of one prompt."""

    spec: EpisodeSpec
    prompt_ids: Tensor  # [P] int64; shared by all episodes
    trajectories: tuple[Trajectory, ...]
    reward_weights: tuple[tuple[str, float], ...] = ()
    """(name, weight) of each value in `Trajectory.reward_parts`; the environment's own reward is one of them."""
    media: TextMedia = ()
    """The prompt's pictures."""


def align_contents(tokens: Tensor, end: EncodedText) -> Tensor | None:
    """Return [n] bool, the contents of new messages in `tokens`, which end with them; None if they are not marked, or tokenized
    differently there."""
    if end.is_content is None:
        return None
    count = min(len(tokens), len(end.ids))
    if not torch.equal(tokens[len(tokens) - count :], end.ids[len(end.ids) - count :]):
        return None
    marked = torch.zeros_like(tokens, dtype=torch.bool)
    marked[len(tokens) - count :] = end.is_content[len(end.ids) - count :]
    return marked


def common_length(texts: Sequence[Tensor]) -> int:
    """Return the number of tokens that all texts begin with."""
    length = min(map(len, texts))
    for text in texts[1:]:
        differs = (text[:length] != texts[0][:length]).nonzero()
        length = int(differs[0]) if len(differs) else length
    return length


def _concat(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


@dataclass(frozen=True)
class RolloutConfig:
    """The size of a step's rollout, and how its completions are sampled."""

    sampling: SamplingParams
    prompts_per_step: int
    samples_per_prompt: int


@dataclass(frozen=True, eq=False)
class RolloutRequest:
    """Which rollout to collect next."""

    step: int = 1
    position: int = 0  # index of the task's next example
    leftover_groups: Sequence[EpisodeGroup] = ()  # groups that the rollout before has left for this one


def reward_inputs(groups: list[EpisodeGroup]) -> tuple[list[Any], list[str], dict[str, list[Any]]]:
    """Return the arguments of a reward function: (prompts, completions, columns), one entry per episode.

    The columns are those of the examples, of the environments (`Trajectory.columns`), and EPISODE_COLUMNS.
    """
    rows = [(g.spec, t) for g in groups for t in g.trajectories]
    prompts, columns = prompts_and_columns([spec.example for spec, _ in rows])
    for name in dict.fromkeys(name for _, t in rows for name in t.columns):
        columns[name] = [t.columns.get(name) for _, t in rows]
    columns[COMPLETION_IDS] = _LazyColumn([t.visible_tokens.tolist for _, t in rows])  # type: ignore[assignment]
    columns[TRAINER_STATE] = [
        TrainerState(max(0, spec.key[2] - 1) if spec.key[1] != EVALUATE else 0) for spec, _ in rows
    ]
    return prompts, [t.text for _, t in rows], columns


@dataclass(frozen=True, eq=False)
class _LazyColumn(Sequence[Any]):
    """A column whose values are made when they are read: few reward functions ask for token ids."""

    make: Sequence[Callable[[], Any]]

    def __len__(self) -> int:
        return len(self.make)

    def __getitem__(self, index: Any) -> Any:
        return self.make[index]()


def prompts_and_columns(examples: Sequence[Example]) -> tuple[list[Any], dict[str, list[Any]]]:
    """Return (prompts, columns): the arguments of a reward function that are known before sampling."""
    names = dict.fromkeys(name for example in examples for name in example.columns)
    columns = {name: [example.columns.get(name) for example in examples] for name in names}
    return [example.prompt for example in examples], columns


def is_multi_turn(rows: Sequence[Trajectory]) -> bool:
    """Return True if an episode has several turns, or a stop reason of its environment's own."""
    return any(len(row.segments) > 1 or row.stop_reason not in ("", ENVIRONMENT, TOKENS) for row in rows)
