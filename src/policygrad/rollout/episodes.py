"""Run episodes of many environments at once: turn k of all active episodes is one batch of requests."""

from __future__ import annotations

import asyncio
import inspect
import json
from collections import Counter
from collections.abc import Callable, Coroutine, Hashable, Iterable, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any, TypeVar

import torch
from torch import Tensor

from policygrad.checkpoint.manifest import encode_json
from policygrad.core.media import TextMedia, distinguish_media, select_media, shift_media
from policygrad.errors import EngineError
from policygrad.models.chat.control_tokens import replace_surrogates
from policygrad.models.chat.messages import EncodedText, HistoryRewrittenError, Tools
from policygrad.models.tokenizer import PromptTooLongError, Tokenizer
from policygrad.rewards.base import EPISODE_COLUMNS
from policygrad.rollout.environment import (
    CONTEXT,
    FAILED,
    TOKENS,
    Action,
    Environment,
    EnvironmentFactory,
    MalformedError,
    Observation,
    Step,
    SupportsTruncation,
    find_capabilities,
)
from policygrad.rollout.environment_calls import CLOSE_TIMEOUT, EnvironmentCalls, EnvironmentFailedError
from policygrad.rollout.trajectory import (
    TRAIN,
    EpisodeGroup,
    EpisodeSpec,
    Segment,
    Trajectory,
    align_contents,
    common_length,
)
from policygrad.samplers.base import CachesTexts, Generation, Request, Sampler, SamplingParams
from policygrad.samplers.stop_texts import cut_at_stop
from policygrad.tasks.base import Prompt
from policygrad.utils.async_runner import await_with_timeout, gather_or_cancel
from policygrad.utils.message_parts import describe_pictures, list_pictures, to_plain
from policygrad.utils.spans import is_recording, span

T = TypeVar("T")


async def run_episodes(
    specs: Sequence[EpisodeSpec],
    samples_per_prompt: int,
    sampling: SamplingParams,
    *,
    sampler: Sampler,
    encoder: Tokenizer,
    environment: EnvironmentFactory,
    calls: EnvironmentCalls | None = None,
) -> list[EpisodeGroup]:
    """Run `samples_per_prompt` episodes for each spec; one group per spec, in their order."""
    with calls or EnvironmentCalls() as environment_calls:
        groups = [
            [_Episode(environment, spec, sample, environment_calls) for sample in range(samples_per_prompt)]
            for spec in specs
        ]
        episodes = active = [episode for group in groups for episode in group]
        try:
            with span("environment reset", episodes=len(episodes)):
                first = iter(await _gather(episodes, (episode.reset() for episode in episodes)))
            prompts = [_encode_prompt(group, [next(first) for _ in group], encoder) for group in groups]
            while active := [episode for episode in active if not episode.done]:
                requests = [episode.request(sampling) for episode in active]
                with span("sample", requests=len(requests)) as sampled:
                    generations = await sampler.generate(requests)
                    if len(generations) != len(active):
                        raise EngineError(
                            f"{type(sampler).__name__}.generate returned {len(generations)} generations for {len(active)} "
                            "requests: return one for each"
                        )
                    if is_recording():
                        sampled.set(**_describe_requests(requests, generations))
                if sampling.stop:
                    generations = [e.cut(g, sampling, encoder) for e, g in zip(active, generations, strict=True)]
                steps = (e.step(g, encoder, sampler) for e, g in zip(active, generations, strict=True))
                with span("environment step", episodes=len(active)):
                    await _gather(active, steps)
        finally:  # after an error or interruption, close all open environments together
            if isinstance(sampler, CachesTexts):
                sampler.clear_texts()
            await asyncio.gather(*(episode.abandon() for episode in episodes), return_exceptions=True)
    return [
        EpisodeGroup(spec, prompt.ids, tuple(episode.trajectory(encoder) for episode in group), media=prompt.media)
        for spec, prompt, group in zip(specs, prompts, groups, strict=True)
    ]


def _describe_requests(requests: Sequence[Request], generations: Sequence[Generation]) -> dict[str, Any]:
    """Return attributes of a sampling span, with the names of OpenTelemetry's conventions for generative models
    (https://opentelemetry.io/docs/specs/semconv/gen-ai/gen-ai-spans)."""
    return {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.request.temperature": requests[0].sampling.temperature,
        "gen_ai.request.top_p": requests[0].sampling.top_p,
        "gen_ai.request.max_tokens": max(request.max_tokens for request in requests),
        "gen_ai.usage.input_tokens": sum(len(request.prompt_ids) for request in requests),
        "gen_ai.usage.output_tokens": sum(len(generation.tokens) for generation in generations),
    }


class Conversation:
    """What the policy has read and sampled in an episode, token by token."""

    def __init__(self, spec: EpisodeSpec, name: str) -> None:
        self.spec = spec
        self.name = name
        """Name of the environment in messages: its class, or the factory if the class is private or unknown."""
        self.context_ids, self.context_media = torch.empty(0, dtype=torch.int64), TextMedia()
        self.compact_ids = self.context_ids  # `context_ids` with one mark for each picture
        self.conversation: Prompt = ""  # everything before the current turn
        self.num_opening_messages = 0  # messages of the conversation that the episode began with
        self.tools: Tools | None = None
        self.segments: list[Segment] = []
        self.turn_states: list[Hashable] = []  # at the start of each turn, the next one included
        self.text = ""  # text of the last turn
        self.token_budget = self.turn_budget = spec.max_tokens
        """Tokens the episode, and the next turn, may still sample."""
        self.needs_mask = False
        self.budget_reason = TOKENS
        self.num_unseen_pictures = 0

    def open(self, first: Observation, prompt: EncodedText) -> None:
        """Begin with the first observation, encoded."""
        self.context_ids = prompt.ids
        self.compact_ids = prompt.ids if prompt.compact_ids is None else prompt.compact_ids
        self.context_media, self.conversation, self.tools = prompt.media, first.content, first.tools or None
        self.num_opening_messages = len(first.content)
        self.turn_states.append(_state(first, self.name))

    def make_request(self, key: tuple[int, ...], sampling: SamplingParams, *, continues: bool) -> Request:
        """Return the request for the next turn."""
        self.needs_mask = sampling.is_truncated and self.spec.key[1] == TRAIN
        return Request(
            self.context_ids,
            key,
            sampling,
            self.turn_budget,
            continues,
            self.needs_mask,
            media=self.context_media,
            compact_ids=self.compact_ids if self.context_media else None,
        )

    def cut(self, generation: Generation, sampling: SamplingParams, encoder: Tokenizer) -> Generation:
        """Return a sampled turn up to its first stop text."""
        return cut_at_stop(generation, sampling.stop, encoder.decode, None if self.segments else self.spec.prefix)

    def add_turn(self, generation: Generation, encoder: Tokenizer, sampler: Sampler) -> str:
        """Add a sampled turn; return its text. Raises EngineError for a generation that does not fit its request."""
        n, num_logps = len(generation.tokens), len(generation.logp)
        versions = n if isinstance(generation.version, int) else len(generation.version)
        if not n == num_logps == versions or not 1 <= n <= self.turn_budget:
            raise EngineError(
                f"{type(sampler).__name__}.generate returned {n} tokens, {num_logps} log-probabilities and {versions} versions for "
                f"a request of at most {self.turn_budget} tokens: return one of each per token, and at least one token"
            )
        left = generation.sampling_mask
        if self.needs_mask and (left is None or len(left.counts) != n):
            raise EngineError(
                f"{type(sampler).__name__}.generate does not return the tokens that top-k and top-p left "
                "(Generation.sampling_mask), which training needs: leave --top-p 1 and --top-k 0"
            )
        self.text = encoder.decode(generation.tokens)
        self.segments.append(Segment.from_generation(generation))
        self.token_budget -= n
        return self.text

    def append_observation(self, observation: Observation, text: str, encoder: Tokenizer, sampled_ids: Tensor) -> bool:
        """Extend the context by the sampled ids and the observation; return False if no room is left for a turn."""
        content = observation.content
        if encoder.pictures is None and not isinstance(content, str) and (unseen := len([*list_pictures(content)])):
            self.num_unseen_pictures += unseen  # of a tool: a prompt with pictures is refused at the beginning
            content = describe_pictures(content)
        so_far, before = torch.cat([self.context_ids, sampled_ids]), self.conversation
        if isinstance(before, str):
            self.conversation = f"{before}{text}{content}"
        try:
            last = int(sampled_ids[-1])
            sampled_end = last if last in encoder.end_ids else None
            new = encoder.encode_continuation(before, text, content, self.spec.location, self.tools, end=sampled_end)
            if not isinstance(before, str):
                self.conversation = (*before, *new.messages)
            segment = Segment(new.ids, media=new.media, observation=new.is_content)
            compact_ids = new.ids if new.compact_ids is None else new.compact_ids
            self.compact_ids = torch.cat([self.compact_ids, sampled_ids, compact_ids])
        except HistoryRewrittenError as error:
            # start a branch with the conversation as the template renders it now, after the longest common prefix of ids:
            # sampled tokens stay in the context in which they were sampled
            assert not isinstance(before, str)
            self.conversation = conversation = (*before, *error.messages)
            num_new = len(error.messages) - 1
            rendered, end = encoder.encode_rewritten(
                conversation, self.num_opening_messages, num_new, self.spec.location, self.tools
            )
            earlier = distinguish_media(so_far, self.context_media)
            shared = common_length([earlier, distinguish_media(rendered.ids, rendered.media)[:-1]])
            prefix_length = before_picture(shared, rendered.media)
            media = select_media(rendered.media, prefix_length, len(rendered.ids))
            tokens = rendered.ids[prefix_length:]
            segment = Segment(tokens, media=media, observation=align_contents(tokens, end))
            self.compact_ids = rendered.ids if rendered.compact_ids is None else rendered.compact_ids
            if prefix_length < len(so_far):  # otherwise it is another text with the same tokens
                segment = replace(segment, prefix_length=prefix_length, new_tokens=end.ids)
        prefix_length = len(so_far) if segment.prefix_length is None else segment.prefix_length
        self.context_ids = torch.cat([so_far[:prefix_length], segment.tokens])
        earlier_media = select_media(self.context_media, 0, prefix_length)
        self.context_media = (*earlier_media, *shift_media(segment.media, prefix_length))
        limit = encoder.context_length
        self.turn_budget = self.token_budget if limit is None else min(self.token_budget, limit - len(self.context_ids))
        if self.turn_budget < 1:
            return False
        self.budget_reason = CONTEXT if self.turn_budget < self.token_budget else TOKENS
        self.segments.append(segment)
        self.turn_states.append(_state(observation, self.name))
        return True


class _Episode(Conversation):
    """The state of one running episode."""

    def __init__(self, factory: EnvironmentFactory, spec: EpisodeSpec, sample: int, calls: EnvironmentCalls) -> None:
        super().__init__(spec, str(getattr(factory, "__name__", type(factory).__name__)))
        self.sample, self.calls, self.capabilities = sample, calls, find_capabilities(factory)
        self.environment: Environment | None = None
        self.failure = ""  # error of the environment
        self.rewards: list[float | None] = []
        self.metrics: Counter[str] = Counter()
        self.done = self.truncated = False
        self.stop_reason = ""
        self.feedback: list[str] = []
        self.columns: dict[str, Any] = {}  # for reward functions
        self._close: Callable[[], Any] | None = None
        try:
            self.environment = calls.create_environment(factory, spec.example, spec.seed, self.name, spec.location)
        except EnvironmentFailedError as error:
            self.fail(str(error))
        else:
            if not (kind := type(self.environment).__name__).startswith("_"):
                self.name = kind
            self._close = getattr(self.environment, "close", None)

    async def reset(self) -> Observation | None:
        """Return the first observation; None if the environment failed."""
        if self.failure:
            return None
        try:
            observation = await self._call("reset")
        except EnvironmentFailedError as error:
            self.fail(str(error))
            return None
        if not isinstance(observation, Observation):
            raise EngineError(
                f"{self.name}.reset returned {type(observation).__name__}: return an Observation (pg.Observation)"
            )
        return observation

    def request(self, sampling: SamplingParams) -> Request:
        turn = len(self.rewards)
        key = (*self.spec.key, self.sample, turn) if turn else (*self.spec.key, self.sample)
        return self.make_request(key, sampling, continues=not self.capabilities.is_single_answer)

    async def step(self, generation: Generation, encoder: Tokenizer, sampler: Sampler) -> None:
        """Add a sampled turn and pass it to the environment."""
        text = self.add_turn(generation, encoder, sampler)
        self.truncated = cut = generation.finish_reason == "length"
        try:
            read = partial(encoder.read_turn, context_ids=self.context_ids, tools=self.tools or ())
            action = Action(text, cut, read, bool(self.tools))
            step = await self._call("step", action)
            if not isinstance(step, Step):
                raise EngineError(f"{self.name}.step returned {type(step).__name__}: return a Step (pg.Step)")
            self.rewards.append(step.reward)
            self.metrics.update(step.metrics)
            self.feedback += [step.feedback] if step.feedback else []
            self.done = cut or step.observation is None
            self.stop_reason = self.budget_reason if cut else step.stop_reason
            observation = None if cut else step.observation
            if observation and not self.append_observation(observation, text, encoder, generation.tokens):
                await self._truncate()
            if self.done:
                await self._read_columns()
                await self._close_environment()
        except EnvironmentFailedError as error:
            self.fail(str(error))
            with suppress(EnvironmentFailedError):
                await self._close_environment()

    async def abandon(self) -> None:
        """Close the environment, if that was not done."""
        close, self._close = self._close, None
        if close is not None:
            await await_with_timeout(CLOSE_TIMEOUT, call_close(close))

    def trajectory(self, encoder: Tokenizer) -> Trajectory:
        prefix = () if self.spec.prefix is None else (self.spec.prefix,)
        parts = (*prefix, *(s.visible_tokens for s in self.segments))
        rewards = [reward for reward in self.rewards if reward is not None and not self.failure]
        return Trajectory(
            tuple(self.segments),
            self.text if len(parts) == 1 else encoder.decode(torch.cat(parts)),
            self.truncated,
            tuple(self.rewards),
            sum(rewards) if rewards else None,
            metrics=dict(self.metrics) | self._count_unseen(),
            turn_states=tuple(self.turn_states),
            stop_reason=self.stop_reason,
            feedback="\n".join(self.feedback),
            failure=self.failure,
            columns=self.columns,
        )

    async def _read_columns(self) -> None:
        """Read what the environment shows to reward functions, before it is closed."""
        if getattr(self.environment, "reward_columns", ()):
            reader = SimpleNamespace(reward_columns=partial(read_columns, self.environment, self.spec.example.columns))
            self.columns = await self.calls.call(reader, self.name, "reward_columns", self.spec.location)

    def _count_unseen(self) -> dict[str, float]:
        return {"unseen_pictures": float(self.num_unseen_pictures)} if self.num_unseen_pictures else {}

    async def _call(self, method: str, *args: Any) -> Any:
        turn = f", turn {len(self.rewards) + 1}" if method != "reset" else ""
        return await self.calls.call(self.environment, self.name, method, f"{self.spec.location}{turn}", *args)

    def fail(self, reason: str) -> None:
        """End the episode without a reward. If nothing was sampled, it gets one token not written by the policy."""
        self.failure, self.stop_reason, self.done = reason, FAILED, True
        self.rewards += [None] * (sum(segment.is_sampled for segment in self.segments) - len(self.rewards))
        self.segments = self.segments or [Segment(torch.zeros(1, dtype=torch.int64))]

    async def _close_environment(self) -> None:
        close, self._close = self._close, None
        if close is not None:
            await self.calls.call(
                SimpleNamespace(close=partial(call_close, close)), self.name, "close", self.spec.location
            )

    async def _truncate(self) -> None:
        """End the episode between turns; the last observation is left out, since no turn follows it."""
        self.done = self.truncated = True
        self.stop_reason = TOKENS if self.token_budget < 1 else CONTEXT
        if isinstance(self.environment, SupportsTruncation):
            try:
                last = Step(reward=await self._call("on_truncated"))
            except MalformedError as error:
                raise EngineError(f"{self.name}.on_truncated: {error} ({self.spec.location})") from error
            if last.reward is not None:
                self.rewards[-1] = (self.rewards[-1] or 0.0) + last.reward


async def read_columns(environment: Any, columns: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of an environment's attributes that its `reward_columns` names.

    Args:
        columns: The example's own.

    Raises:
        TypeError, ValueError: One is not plain data, or has the name of another argument.
    """
    names: Sequence[str] = environment.reward_columns
    if taken := [name for name in names if name in {"prompts", "completions", *EPISODE_COLUMNS, *columns}]:
        raise ValueError(
            f"the task or the rollout has the column {taken[0]!r} already: rename the environment's attribute"
        )
    if (read := getattr(environment, "read_reward_columns", None)) is not None:  # it runs elsewhere
        values = await read()
    else:
        values = {name: getattr(environment, name) for name in names}
    for name, value in values.items():
        encode_json(value, name)  # checkpoints and records hold it
    return {name: deepcopy(replace_surrogates(value)) for name, value in values.items()}


def before_picture(length: int, media: TextMedia) -> int:
    """Return a prefix's length without the picture that it ends in the middle of."""
    return next((int(m.slots[0]) for m in media if m.slots[0] < length <= m.slots[-1]), length)


async def call_close(close: Callable[[], Any]) -> None:
    """Call a `close` that may or may not be async."""
    result = close()
    if inspect.isawaitable(result):
        await result


async def _gather(episodes: Sequence[_Episode], work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Run concurrently if any of the environments waits for something, otherwise one after the other."""
    if not any(getattr(episode.environment, "waits", True) for episode in episodes):
        return [await coroutine for coroutine in work]
    return await gather_or_cancel(work)


def _encode_prompt(
    episodes: Sequence[_Episode], observations: Sequence[Observation | None], encoder: Tokenizer
) -> EncodedText:
    """Encode the first observation of a group once and give it to its episodes. None = the environment failed.

    An observation that leaves no room for a completion ends the group's episodes: they fail, and none is trained on.
    """
    spec = episodes[0].spec
    max_tokens = spec.max_tokens + (0 if spec.prefix is None else len(spec.prefix))
    pairs = [(e, observation) for e, observation in zip(episodes, observations, strict=True) if observation is not None]
    if not pairs:  # all episodes failed: none is trained on
        return encoder.encode_unanswered(spec.example.prompt, spec.location, spec.example.tools)
    name, first = pairs[0][0].name, pairs[0][1]
    if any((o.content, list(o.tools)) != (first.content, list(first.tools)) for _, o in pairs):
        raise EngineError(
            f"{name}.reset returned different observations for the samples of one example ({spec.location}), which share a "
            "prompt: sample what differs in step(), or derive it from the example"
        )
    tools = first.tools or None
    is_prompt = pairs[0][0].capabilities.is_single_answer
    source = spec.location if is_prompt else f"the first observation of {name} ({spec.location})"
    try:
        prompt = encoder.encode(first.content, max_tokens, source, tools)
    except PromptTooLongError as error:
        for episode, _ in pairs:
            episode.fail(f"a prompt is too long, so its group is left out: {error}")
        return encoder.encode_unanswered(first.content, source)
    start = prompt  # one tensor for all episodes, which a sampler reads once
    if spec.prefix is not None:
        compact_ids = prompt.ids if prompt.compact_ids is None else prompt.compact_ids
        start = replace(
            prompt, ids=torch.cat([prompt.ids, spec.prefix]), compact_ids=torch.cat([compact_ids, spec.prefix])
        )
    for episode, observation in pairs:
        episode.open(observation, start)
    return prompt


def _state(observation: Observation, name: str) -> Hashable:
    """Return the environment's name for its state, or else the content of the observation."""
    if observation.state is None:
        content = observation.content
        return (
            content if isinstance(content, str) else json.dumps(to_plain(content), sort_keys=True, ensure_ascii=False)
        )
    try:
        hash(observation.state)
    except TypeError as error:
        raise EngineError(
            f"{name} has a state without a hash ({error}): use text, a number or a tuple of those"
        ) from None
    return observation.state
