"""Episodes of many environments at once: turn k of all that go on is one batch of requests."""

from __future__ import annotations

import asyncio
import inspect
import json
from collections import Counter
from collections.abc import Callable, Coroutine, Hashable, Iterable, Sequence
from contextlib import suppress
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from policygrad.environments.base import (
    CONTEXT,
    FAILED,
    TOKENS,
    Action,
    Environment,
    EnvironmentFactory,
    MalformedError,
    Observation,
    SingleTurn,
    Step,
    SupportsTruncation,
)
from policygrad.errors import EngineError
from policygrad.models.chat_template import HistoryRewrittenError, Message, Tools
from policygrad.models.tool_calls import ToolCallParser
from policygrad.rollout.environment_calls import CLOSE_TIMEOUT, EnvironmentCalls, EnvironmentFailedError
from policygrad.rollout.trajectory import EpisodeGroup, EpisodeSpec, Segment, Trajectory
from policygrad.samplers.base import Generation, Request, Sampler, SamplingParams
from policygrad.tasks.base import Prompt
from policygrad.utils.async_runner import await_with_timeout

# What episodes need of a tokenizer.


class Encoder(Protocol):
    """Text to tokens and back."""

    @property
    def context_length(self) -> int | None:
        """Positions of the model, in tokens."""
        ...

    @property
    def tool_call_parser(self) -> ToolCallParser:
        """How the model writes calls of tools."""
        ...

    def encode(self, prompt: Prompt, max_tokens: int, source: str = ..., tools: Tools | None = ...) -> Tensor:
        """[P] int64; refuses a prompt that leaves no room for max_tokens."""
        ...

    def decode(self, tokens: Any) -> str: ...

    def encode_answer(self, prompt_ids: Tensor, prompt: Prompt, text: str, source: str = ...) -> list[int]:
        """The ids of an answer that somebody else wrote to the prompt, its end token the last."""
        ...

    def encode_continuation(
        self, so_far: Prompt, reply: str, new: Prompt, source: str = ..., tools: Tools | None = ...
    ) -> Tensor:
        """[n] int64; what stands between a sampled turn and the next. Raises HistoryRewrittenError where that cannot be."""
        ...

    def encode_rewritten(
        self, messages: Sequence[Message], opening: int, new: int, source: str = ..., tools: Tools | None = ...
    ) -> tuple[Tensor, Tensor]:
        """([P'] int64, [n] int64); a conversation as it is written from then on, and what of it is new."""
        ...


T = TypeVar("T")


class _Episode:
    """One episode under way."""

    def __init__(self, factory: EnvironmentFactory, start: EpisodeSpec, sample: int, calls: EnvironmentCalls) -> None:
        self.start, self.sample, self.calls = start, sample, calls
        self.environment: Environment | None = None
        self.failed = ""
        """Why its environment has lost it."""
        self.name = _name(factory)
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
        self._closing: Callable[[], Any] | None = None
        try:
            self.environment = calls.create_environment(factory, start.example, start.seed, self.name, start.location)
        except EnvironmentFailedError as error:
            self._fail(error)
        else:
            self.name = _name(factory, self.environment)
            self._closing = getattr(self.environment, "close", None)

    def request(self, sampling: SamplingParams) -> Request:
        turn = len(self.rewards)
        key = (*self.start.key, self.sample, turn) if turn else (*self.start.key, self.sample)
        return Request(self.context, key, sampling, self.room)

    async def take(self, generation: Generation, encoder: Encoder, sampler: Sampler) -> None:
        """The turn that was sampled, and what the environment says to it."""
        _check(generation, self.room, sampler)
        cut = generation.finish_reason == "length"
        self.text = text = encoder.decode(generation.tokens)
        self.segments.append(Segment.from_generation(generation))
        self.left -= len(generation.tokens)
        self.truncated = cut
        try:
            step = await self._ask("step", Action(text, cut, encoder.tool_call_parser))
            if not isinstance(step, Step):
                raise EngineError(f"{self.name}.step returned {type(step).__name__}: return a Step (pg.Step)")
            self.rewards.append(step.reward)
            self.metrics.update(step.metrics)
            self.over = cut
            self.ended = self.limit if cut else step.stop_reason
            if step.observation is None:
                self.over = True
            elif not cut and not self._hear(step.observation, text, encoder, generation.tokens):
                await self._break_off()
            if self.over:
                await self._close()
        except EnvironmentFailedError as error:
            self._fail(error)
            with suppress(EnvironmentFailedError):
                await self._close()

    async def begin(self) -> Observation | None:
        """What the environment says first; None where that has failed."""
        try:
            seen = None if self.failed else await self._ask("reset")
        except EnvironmentFailedError as error:
            self._fail(error)
            return None
        if not (self.failed or isinstance(seen, Observation)):
            raise EngineError(
                f"{self.name}.reset returned {type(seen).__name__}: return an Observation (pg.Observation)"
            )
        return seen

    async def _ask(self, method: str, *args: Any) -> Any:
        """What a method of the environment returns; raises as `Calls.call`."""
        turn = f", turn {len(self.rewards) + 1}" if method != "reset" else ""
        return await self.calls.call(self.environment, self.name, method, f"{self.start.location}{turn}", *args)

    def _fail(self, error: EnvironmentFailedError) -> None:
        """It ends here and has no reward. One that has not sampled anything has a token that the policy did not write."""
        self.failed, self.ended, self.over = str(error), FAILED, True
        sampled = sum(segment.is_sampled for segment in self.segments)
        self.rewards += [None] * (sampled - len(self.rewards))
        self.segments = self.segments or [Segment(torch.zeros(1, dtype=torch.int64))]

    async def _close(self) -> None:
        """Close the environment of an episode that is over, once. Raises EnvironmentFailedError where that fails."""
        closing, self._closing = self._closing, None
        if closing is not None:
            await self.calls.call(_Closing(closing), self.name, "close", self.start.location)

    @property
    def open(self) -> bool:
        """Whether its environment is to be closed."""
        return self._closing is not None

    async def give_up(self) -> None:
        """Close the environment of an episode that nobody goes on with."""
        closing, self._closing = self._closing, None
        if closing is not None:
            await await_with_timeout(CLOSE_TIMEOUT, _Closing(closing).close())

    async def _break_off(self) -> None:
        """Nothing more can be said, so what the environment said last is left away."""
        self.over = self.truncated = True
        self.ended = TOKENS if self.left < 1 else CONTEXT
        if isinstance(self.environment, SupportsTruncation):
            try:
                last = Step(reward=await self._ask("on_truncated"))
            except MalformedError as error:
                raise EngineError(f"{self.name}.on_truncated: {error} ({self.start.location})") from error
            if last.reward is not None:
                self.rewards[-1] = (self.rewards[-1] or 0.0) + last.reward

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
            segment = Segment(encoder.encode_continuation(before, text, content, self.start.location, self.tools))
        except HistoryRewrittenError:
            segment = self._anew(so_far, len(content), encoder)
        self.context = torch.cat([so_far[: segment.prefix_length], segment.tokens])
        self.room = (
            self.left if encoder.context_length is None else min(self.left, encoder.context_length - len(self.context))
        )
        if self.room < 1:
            return False
        self.limit = CONTEXT if self.room < self.left else TOKENS
        self.segments.append(segment)
        self.states.append(_state(observation, self.name))
        return True

    def _anew(self, so_far: Tensor, new: int, encoder: Encoder) -> Segment:
        """A branch: what has been sampled stays in the context in which it was, and the conversation goes on behind as much of that
        as the template still writes."""
        assert not isinstance(self.conversation, str)
        whole, news = encoder.encode_rewritten(self.conversation, self.opening, new, self.start.location, self.tools)
        shared = min(len(so_far), len(whole) - 1)
        differs = (so_far[:shared] != whole[:shared]).nonzero()
        keeps = int(differs[0]) if len(differs) else shared
        if keeps == len(so_far):  # other letters, the same tokens
            return Segment(whole[keeps:])
        return Segment(whole[keeps:], prefix_length=keeps, new_tokens=news)

    def trajectory(self, encoder: Encoder) -> Trajectory:
        before = () if self.start.prefix is None else (self.start.prefix,)
        parts = (*before, *(s.visible_tokens for s in self.segments))
        own = [reward for reward in self.rewards if reward is not None and not self.failed]
        return Trajectory(
            tuple(self.segments),
            self.text if len(parts) == 1 else encoder.decode(torch.cat(parts)),
            self.truncated,
            tuple(self.rewards),
            sum(own) if own else None,
            metrics=dict(self.metrics),
            turn_states=tuple(self.states),
            stop_reason=self.ended,
            failure=self.failed,
        )


class _Closing:
    """A `close` that need not be async, as one that is."""

    def __init__(self, close: Callable[[], Any]) -> None:
        self._close = close

    async def close(self) -> None:
        closed = self._close()
        if inspect.isawaitable(closed):
            await closed


async def run_episodes(
    specs: Sequence[EpisodeSpec],
    samples_per_prompt: int,
    sampling: SamplingParams,
    *,
    sampler: Sampler,
    encoder: Encoder,
    environment: EnvironmentFactory,
    calls: EnvironmentCalls | None = None,
) -> list[EpisodeGroup]:
    """n episodes from each start, in their order. calls: how environments are called, None = by default."""
    with calls or EnvironmentCalls() as calling:
        groups = [[_Episode(environment, start, j, calling) for j in range(samples_per_prompt)] for start in specs]
        everyone = active = [episode for episodes in groups for episode in episodes]
        try:
            seen = iter(await _together(everyone, (episode.begin() for episode in everyone)))
            prompts = [_begin(episodes, [next(seen) for _ in episodes], encoder) for episodes in groups]
            while active := [episode for episode in active if not episode.over]:
                generations = await sampler.generate([episode.request(sampling) for episode in active])
                if len(generations) != len(active):
                    num_requests, name = len(active), type(sampler).__name__
                    raise EngineError(
                        f"{name}.generate returned {len(generations)} generations for {num_requests} requests: one for each"
                    )
                pairs = zip(active, generations, strict=True)
                await _together(active, (e.take(g, encoder, sampler) for e, g in pairs))
        finally:  # an error, an interruption: what is open ends with it, all at once
            still_open = [episode for episode in everyone if episode.open]
            await asyncio.gather(*(episode.give_up() for episode in still_open), return_exceptions=True)
    return [
        EpisodeGroup(start, prompt, tuple(episode.trajectory(encoder) for episode in episodes))
        for start, prompt, episodes in zip(specs, prompts, groups, strict=True)
    ]


async def _together(episodes: Sequence[_Episode], work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """What each comes to; side by side where one of the environments may wait, else each begun when the one before is done."""
    if not any(getattr(episode.environment, "waits", True) for episode in episodes):
        return [await one for one in work]
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        return await asyncio.gather(*tasks)
    finally:  # one has raised: the others end too
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _check(generation: Generation, most: int, sampler: Sampler) -> None:
    """Raises EngineError for lengths that do not agree, or that were not asked for."""
    n, num_logps = len(generation.tokens), len(generation.logp)
    versions = n if isinstance(generation.version, int) else len(generation.version)
    if not n == num_logps == versions or not 1 <= n <= most:
        raise EngineError(
            f"{type(sampler).__name__}.generate returned {n} tokens, {num_logps} log-probabilities and {versions} versions for a "
            f"request of at most {most} tokens: there is one of each per token, and at least one token"
        )


def _name(factory: EnvironmentFactory, environment: object = None) -> str:
    """What an environment is called in messages: its class, or where that is private or not known what makes it."""
    kind = type(environment).__name__
    if environment is not None and not kind.startswith("_"):
        return kind
    return str(getattr(factory, "__name__", type(factory).__name__))


def _begin(episodes: Sequence[_Episode], seen: Sequence[Observation | None], encoder: Encoder) -> Tensor:
    """Gives the episodes of one start their context, one tensor for all; the prompt. seen: each one's first, None = it failed."""
    start = episodes[0].start
    room = start.max_tokens + (0 if start.prefix is None else len(start.prefix))
    pairs = [
        (episode, observation) for episode, observation in zip(episodes, seen, strict=True) if observation is not None
    ]
    if not pairs:  # none of it is trained on
        return encoder.encode(start.example.prompt, room, start.location)
    name, first = pairs[0][0].name, pairs[0][1]
    if any((o.content, list(o.tools)) != (first.content, list(first.tools)) for _, o in pairs):
        raise EngineError(
            f"{name}.reset says different things to the samples of one example ({start.location}), and what they begin with is "
            "read once: draw what differs in step(), or from the example"
        )
    tools = first.tools or None
    is_single_turn = isinstance(pairs[0][0].environment, SingleTurn)
    source = start.location if is_single_turn else f"the first observation of {name} ({start.location})"
    prompt = encoder.encode(first.content, room, source, tools)
    context = prompt if start.prefix is None else torch.cat([prompt, start.prefix])
    for episode, observation in pairs:
        episode.context, episode.conversation, episode.tools = context, first.content, tools
        episode.opening = len(first.content)
        episode.states.append(_state(observation, episode.name))
    return prompt


def _state(observation: Observation, name: str) -> Hashable:
    """What the environment calls its state, or else what it says."""
    if observation.state is None:
        content = observation.content
        return content if isinstance(content, str) else json.dumps(content, sort_keys=True, ensure_ascii=False)
    try:
        hash(observation.state)
    except TypeError as error:
        raise EngineError(
            f"{name} names a state that cannot be looked up ({error}): give text, a number or a tuple of those"
        ) from None
    return observation.state
