"""Episodes of many environments at once: turn k of all that go on is one batch of requests."""

from __future__ import annotations

import asyncio
import inspect
import json
from collections import Counter
from collections.abc import Coroutine, Hashable, Iterable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from policygrad.environments.base import (
    CONTEXT,
    TOKENS,
    Action,
    Cut,
    Environment,
    EnvironmentFactory,
    Observation,
    Step,
    made,
)
from policygrad.errors import EngineError
from policygrad.models.chat import RewrittenError, Tools
from policygrad.rollout.encoder import Encoder
from policygrad.rollout.trajectory import Group, Segment, Start, Trajectory
from policygrad.samplers.base import Generation, Request, Sampler, Sampling
from policygrad.tasks.types import Prompt

T = TypeVar("T")


class _Episode:
    """One episode under way."""

    def __init__(self, environment: Environment, start: Start, sample: int) -> None:
        self.environment, self.start, self.sample = environment, start, sample
        self.context = torch.empty(0, dtype=torch.int64)
        self.conversation: Prompt = ""
        """All that was said before this turn."""
        self.opening = 0
        """Messages of it that the episode began with."""
        self.tools: Tools | None = None
        self.segments: list[Segment] = []
        self.rewards: list[float | None] = []
        self.states: list[Hashable] = []
        """In which each turn began, and the one to come."""
        self.metrics: Counter[str] = Counter()
        self.text = ""
        """Of the last turn."""
        self.left = self.room = start.max_tokens
        """Tokens that it may still sample, and those of this turn."""
        self.over = self.truncated = False
        self.limit, self.ended = TOKENS, ""
        self._closing = getattr(environment, "close", None)

    def request(self, sampling: Sampling) -> Request:
        turn = len(self.rewards)
        key = (*self.start.key, self.sample, turn) if turn else (*self.start.key, self.sample)
        return Request(self.context, key, sampling, self.room)

    async def take(self, generation: Generation, encoder: Encoder, sampler: Sampler) -> None:
        """The turn that was sampled, and what the environment says to it."""
        _check(generation, self.room, sampler)
        cut = generation.finish_reason == "length"
        self.text = text = encoder.decode(generation.tokens)
        step = await _awaited(self.environment, "step", Action(text, cut, encoder.form))
        if not isinstance(step, Step):
            name = type(self.environment).__name__
            raise EngineError(f"{name}.step returned {type(step).__name__}: return a Step (pg.Step)")
        self.segments.append(Segment.drawn(generation))
        self.rewards.append(step.reward)
        self.metrics.update(step.metrics)
        self.left -= len(generation.tokens)
        self.over = self.truncated = cut
        self.ended = self.limit if cut else step.ended
        if step.observation is None:
            self.over = True
        elif not cut and not self._hear(step.observation, text, encoder, generation.tokens):
            await self._break_off()
        if self.over:
            await self.close()

    async def close(self) -> None:
        """Once, whatever has ended it: the environment lets go of what it holds, where it has a `close`."""
        closing, self._closing = self._closing, None
        if closing is not None and inspect.isawaitable(closed := closing()):
            await closed

    async def _break_off(self) -> None:
        """Nothing more can be said, so what the environment said last is left away."""
        self.over = self.truncated = True
        self.ended = TOKENS if self.left < 1 else CONTEXT
        if isinstance(self.environment, Cut):
            last = Step(reward=await _awaited(self.environment, "cut"))  # which refuses what is no number
            self.rewards[-1] = (
                self.rewards[-1] if last.reward is None else (self.rewards[-1] or 0.0) + float(last.reward)
            )

    def _hear(self, observation: Observation, text: str, encoder: Encoder, drawn: Tensor) -> bool:
        """The next turn's context is the ids so far, the sampled ids and those of what is new, or the conversation as the template
        writes it now; whether there is room for a turn."""
        content = observation.content
        so_far, before = torch.cat([self.context, drawn]), self.conversation
        if isinstance(before, str):
            self.conversation = f"{before}{text}{content}"
        else:
            said = () if isinstance(content, str) else content  # text is refused by `continuation`
            self.conversation = (*before, {"role": "assistant", "content": text}, *map(dict, said))
        try:
            segment = Segment(encoder.continuation(before, text, content, self.start.where, self.tools))
        except RewrittenError:
            segment = self._anew(so_far, len(content), encoder)
        self.context = torch.cat([so_far[: segment.keeps], segment.tokens])
        self.room = self.left if encoder.context is None else min(self.left, encoder.context - len(self.context))
        if self.room < 1:
            return False
        self.limit = CONTEXT if self.room < self.left else TOKENS
        self.segments.append(segment)
        self.states.append(_state(observation, self.environment))
        return True

    def _anew(self, so_far: Tensor, new: int, encoder: Encoder) -> Segment:
        """A branch: what has been sampled stays in the context in which it was, and the conversation goes on behind as much of that
        as the template still writes."""
        assert not isinstance(self.conversation, str)
        whole, news = encoder.rewritten(self.conversation, self.opening, new, self.start.where, self.tools)
        shared = min(len(so_far), len(whole) - 1)
        differs = (so_far[:shared] != whole[:shared]).nonzero()
        keeps = int(differs[0]) if len(differs) else shared
        if keeps == len(so_far):  # other letters, the same tokens
            return Segment(whole[keeps:])
        return Segment(whole[keeps:], keeps=keeps, news=news)

    def trajectory(self, encoder: Encoder) -> Trajectory:
        before = () if self.start.prefix is None else (self.start.prefix,)
        parts = (*before, *(s.told for s in self.segments))
        own = [reward for reward in self.rewards if reward is not None]
        return Trajectory(
            tuple(self.segments),
            self.text if len(parts) == 1 else encoder.decode(torch.cat(parts)),
            self.truncated,
            tuple(self.rewards),
            sum(own) if own else None,
            metrics=dict(self.metrics),
            states=tuple(self.states),
            ended=self.ended,
        )


async def play(
    starts: Sequence[Start],
    n: int,
    sampling: Sampling,
    *,
    sampler: Sampler,
    encoder: Encoder,
    environment: EnvironmentFactory,
) -> list[Group]:
    """n episodes from each start, in their order."""
    groups = [[_Episode(made(environment, start.example, start.seed), start, j) for j in range(n)] for start in starts]
    everyone = going = [episode for episodes in groups for episode in episodes]
    try:
        prompts = [await _begin(episodes, encoder) for episodes in groups]
        while going:
            generations = await sampler.generate([episode.request(sampling) for episode in going])
            if len(generations) != len(going):
                asked, name = len(going), type(sampler).__name__
                raise EngineError(
                    f"{name}.generate returned {len(generations)} generations for {asked} requests: one for each"
                )
            pairs = zip(going, generations, strict=True)
            await _together(going, (e.take(g, encoder, sampler) for e, g in pairs))
            going = [episode for episode in going if not episode.over]
    finally:  # an error, an interruption: what is open ends with it
        for episode in everyone:
            await episode.close()
    return [
        Group(start, prompt, tuple(episode.trajectory(encoder) for episode in episodes))
        for start, prompt, episodes in zip(starts, prompts, groups, strict=True)
    ]


async def _together(episodes: Sequence[_Episode], work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """What each comes to; side by side where one of the environments may wait, else each begun when the one before is done."""
    if any(getattr(episode.environment, "waits", True) for episode in episodes):
        return await asyncio.gather(*work)
    return [await one for one in work]


def _check(generation: Generation, most: int, sampler: Sampler) -> None:
    """Raises EngineError for lengths that do not agree, or that were not asked for."""
    n, said = len(generation.tokens), len(generation.logp)
    versions = n if isinstance(generation.version, int) else len(generation.version)
    if not n == said == versions or not 1 <= n <= most:
        raise EngineError(
            f"{type(sampler).__name__}.generate returned {n} tokens, {said} log-probabilities and {versions} versions for a "
            f"request of at most {most} tokens: there is one of each per token, and at least one token"
        )


async def _awaited(environment: Environment, method: str, *args: Any) -> Any:
    """What a method of an environment returns."""
    result = getattr(environment, method)(*args)
    if not inspect.isawaitable(result):
        raise EngineError(f"{type(environment).__name__}.{method} is not async: write `async def {method}`")
    return await result


def _observed(environment: Environment, seen: object) -> Observation:
    if not isinstance(seen, Observation):
        name = type(environment).__name__
        raise EngineError(f"{name}.reset returned {type(seen).__name__}: return an Observation (pg.Observation)")
    return seen


async def _begin(episodes: Sequence[_Episode], encoder: Encoder) -> Tensor:
    """Resets the episodes of one start and gives them their context, one tensor for all; the prompt."""
    start = episodes[0].start
    said = await _together(episodes, (_awaited(episode.environment, "reset") for episode in episodes))
    seen = [_observed(episode.environment, found) for episode, found in zip(episodes, said, strict=True)]
    if any((o.content, list(o.tools)) != (seen[0].content, list(seen[0].tools)) for o in seen):
        name = type(episodes[0].environment).__name__
        raise EngineError(
            f"{name}.reset says different things to the samples of one example ({start.where}), and what they begin with is "
            "read once: draw what differs in step(), or from the example"
        )
    room = start.max_tokens + (0 if start.prefix is None else len(start.prefix))
    tools = seen[0].tools or None
    prompt = encoder.encode(seen[0].content, room, start.where, tools)
    context = prompt if start.prefix is None else torch.cat([prompt, start.prefix])
    for episode in episodes:
        episode.context, episode.conversation, episode.tools = context, seen[0].content, tools
        episode.opening = len(seen[0].content)
    for episode, observation in zip(episodes, seen, strict=True):
        episode.states.append(_state(observation, episode.environment))
    return prompt


def _state(observation: Observation, environment: Environment) -> Hashable:
    """What the environment calls its state, or else what it says."""
    if observation.state is None:
        content = observation.content
        return content if isinstance(content, str) else json.dumps(content, sort_keys=True, ensure_ascii=False)
    try:
        hash(observation.state)
    except TypeError as error:
        name = type(environment).__name__
        raise EngineError(
            f"{name} names a state that cannot be looked up ({error}): give text, a number or a tuple of those"
        ) from None
    return observation.state
