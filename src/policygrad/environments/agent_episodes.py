"""Run episodes of programs that request completions by HTTP, and sample for all of them from the run's policy."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from policygrad.environments.agent_program import AgentProgram, RunningProgram, shared_proxy
from policygrad.errors import EngineError
from policygrad.models.tokenizer import Tokenizer
from policygrad.proxy.formats import ApiError, ChatChoice, ChatReply, ChatRequest
from policygrad.rollout.conversation_tree import ConversationTree, OpenTurn
from policygrad.rollout.environment import CONTEXT, DEFAULT_TIMEOUT, FAILED, TOKENS
from policygrad.rollout.trajectory import TRAIN, EpisodeGroup, EpisodeSpec, Segment, Trajectory, common_length
from policygrad.samplers.base import (
    CachesTexts,
    Generation,
    Request,
    Sampler,
    SamplingParams,
    SupportsConcurrentCalls,
)
from policygrad.samplers.stop_texts import cut_at_stop
from policygrad.utils.progress import ProgressCallback, ignore_progress
from policygrad.utils.spans import span

_REWARD_REMEDY = (
    "return a number or {'reward': …} from the agent's function, write it to POLICYGRAD_RESULT, or set reward_command, reward_file "
    "or reward functions (--reward)"
)
POLL_SECONDS = 0.02  # between looks at the programs
REPORT_SECONDS = 4.0  # age at which the wait for programs is reported
_EXCEEDED = {
    "output": "printed more than {config.max_output} bytes (max_output)",
    "processes": "had more than {config.max_processes} processes (max_processes)",
    "disk": "wrote more than {config.max_disk} bytes (max_disk)",
}
"""What a message says of a program that exceeds a limit."""
FINISHED, CALLS = "finished", "calls"
"""Further reasons for an episode's end: its program ended, or may request no more completions."""


async def run_agent_episodes(
    specs: Sequence[EpisodeSpec],
    samples_per_prompt: int,
    sampling: SamplingParams,
    *,
    sampler: Sampler,
    encoder: Tokenizer,
    program: AgentProgram,
    timeout: float = DEFAULT_TIMEOUT,
    progress: ProgressCallback = ignore_progress,
    clock: Callable[[], float] = time.monotonic,
) -> list[EpisodeGroup]:
    """Run a program `samples_per_prompt` times for each spec; one group per spec, in their order.

    timeout: Seconds that an episode's program may take for itself, if it sets none.

    Raises:
        EngineError: No program of this rollout has requested a completion.
    """
    rollout = _Rollout(sampling, sampler, encoder, program, timeout, clock)
    groups = [[_Episode(spec, sample, rollout) for sample in range(samples_per_prompt)] for spec in specs]
    episodes = [episode for group in groups for episode in group]
    try:
        await rollout.run(episodes, progress)
    finally:
        for task in rollout.tasks:
            task.cancel()
        for episode in episodes:
            episode.close()
        if isinstance(sampler, CachesTexts):
            sampler.clear_texts()
    if episodes and not any(episode.tree.num_turns for episode in episodes):
        if refusals := [episode.last_refusal for episode in episodes if episode.last_refusal]:
            raise EngineError(
                f"no request of {program.name} was answered with a completion in any episode: {refusals[-1]}. Try it by hand with "
                "`policygrad proxy`, which shows each refusal"
            )
        raise EngineError(
            f"no episode of {program.name} requested a completion: {episodes[0].failure or 'it ended by itself'}. Try it by hand "
            "with `policygrad proxy`, and let it send its requests to OPENAI_BASE_URL or ANTHROPIC_BASE_URL"
        )
    return [_make_group(spec, group, encoder) for spec, group in zip(specs, groups, strict=True)]


class _Rollout:
    """Collects the requests of all running programs and samples for them."""

    def __init__(
        self,
        sampling: SamplingParams,
        sampler: Sampler,
        encoder: Tokenizer,
        program: AgentProgram,
        timeout: float,
        clock: Callable[[], float],
    ) -> None:
        self.clock = clock
        self.max_seconds = timeout if program.max_seconds is None else program.max_seconds
        self.sampling, self.sampler, self.encoder, self.program = sampling, sampler, encoder, program
        self.proxy, self.loop = shared_proxy(), asyncio.get_running_loop()
        self.waiting: list[_Call] = []
        """Those that nobody samples for yet."""
        self.last_arrival = clock()
        self.contexts = dict[bytes, Tensor]()  # equal contexts as one tensor, which a sampler reads once
        self.samples_at_once = isinstance(sampler, SupportsConcurrentCalls) and sampler.serves_concurrently
        self.tasks = set[asyncio.Task[None]]()
        self.error: Exception | None = None
        """One that no program has caused, which ends the rollout."""

    async def run(self, episodes: Sequence[_Episode], progress: ProgressCallback) -> None:
        """Run all episodes, at most `concurrency` at a time."""
        unstarted, running = list(reversed(episodes)), list[_Episode]()
        since = self.clock()
        has_reported = False
        while unstarted or running:
            while unstarted and len(running) < self.program.concurrency:
                running.append(unstarted.pop())
                running[-1].start()
            if self.error is not None:
                raise self.error
            now = self.clock()
            for episode in running:
                episode.check(now)
            if ended := [episode for episode in running if episode.is_over]:
                for episode in ended:
                    episode.close()
                running = [episode for episode in running if not episode.is_over]
            if self.waiting and self._is_time(running, now):
                calls, self.waiting = self.waiting, []
                if self.samples_at_once:  # one by one, so that none waits for another's completion
                    for call in calls:
                        self.tasks.add(task := asyncio.create_task(self._sample([call])))
                        task.add_done_callback(self.tasks.discard)
                else:
                    await self._sample(calls)
                continue
            if now - since > REPORT_SECONDS:
                text = f"waiting for {len(running)} programs ({self.program.name})"
                progress(text, len(episodes) - len(running) - len(unstarted), len(episodes))
                has_reported = True
            await asyncio.sleep(POLL_SECONDS)
        if has_reported:
            progress("", 0, 0)

    def _is_time(self, running: Sequence[_Episode], now: float) -> bool:
        """Return whether to sample now, or to wait for the requests of further programs."""
        if self.samples_at_once or now - self.last_arrival > self.program.batch_seconds:
            return True
        return all(episode.num_pending for episode in running)

    async def _sample(self, calls: Sequence[_Call]) -> None:
        """Sample for some calls and answer them. An error ends the rollout."""
        calls = sorted(calls, key=lambda call: call.order)  # as in any other run, whoever came first
        pairs = [(call, request) for call in calls for request in call.requests]
        try:
            with span("sample", requests=len(pairs)):
                requests = [request for _, request in pairs]
                sampled = zip(await self.sampler.generate(requests), requests, strict=True)
            generations = iter([cut_at_stop(g, r.sampling.stop, self.encoder.decode) for g, r in sampled])
        except Exception as error:
            for call in calls:
                call.fail(ApiError(str(error), 403, "server_error"))
            self.error = error
            return
        for call in calls:
            call.answer([next(generations) for _ in call.requests])

    def share(self, ids: Tensor) -> Tensor:
        """Return one tensor for all equal contexts."""
        return self.contexts.setdefault(ids.numpy().tobytes(), ids)


class _Call:
    """A program's request that waits for its completions."""

    def __init__(
        self, episode: _Episode, turn: OpenTurn, requests: Sequence[Request], future: Future[ChatReply]
    ) -> None:
        self.episode, self.turn, self.requests, self.future = episode, turn, requests, future
        self.order = requests[0].key
        self.is_closed = False

    def answer(self, generations: Sequence[Generation]) -> None:
        """Add the completions to the episode and send them, unless its program has ended or gone away in the meantime."""
        if self.episode.is_over:
            self.fail(ApiError("the episode is over", 403, "episode_over"))
        elif self._close():
            try:
                choices = tuple(self.episode.add(self.turn, generation) for generation in generations)
                self.future.set_result(ChatReply(choices, tuple(self.turn.context_ids.tolist())))
            except Exception as error:  # of what its request asked for
                self.future.set_exception(error)

    def fail(self, error: ApiError) -> None:
        """Send an error instead."""
        if self._close():
            self.future.set_exception(error)

    def abandon(self) -> None:
        """Leave it out, since its program does not wait for it any more."""
        if not self.is_closed:
            self.is_closed = True
            self.episode.num_pending -= 1
            self.episode.count("abandoned")
            if self in self.episode.rollout.waiting:
                self.episode.rollout.waiting.remove(self)

    def _close(self) -> bool:
        """Return whether its program is still to be answered, which is to be done now."""
        if self.is_closed:
            return False
        if not self.future.set_running_or_notify_cancel():
            self.abandon()
            return False
        self.is_closed = True
        self.episode.num_pending -= 1
        return True


class _Episode:
    """One episode: a program, its limits, and its conversations."""

    def __init__(self, spec: EpisodeSpec, sample: int, rollout: _Rollout) -> None:
        self.spec, self.sample, self.rollout = spec, sample, rollout
        self.key = f"pg-{secrets.token_hex(16)}"
        self.tree = ConversationTree(rollout.encoder, spec.location)
        self.program: RunningProgram | None = None
        self.is_over = self.is_judging = self.truncated = False
        self.failure = self.stop_reason = self.answer = self.last_refusal = self.feedback = ""
        self.num_calls = self.num_pending = 0
        self.tokens_left = spec.max_tokens
        self.reward: float | None = None
        self.metrics = dict[str, float]()
        self.notes = dict[str, str]()
        """By kind, what the step's notes say of its requests."""
        self._seconds, self._checked = 0.0, 0.0

    def start(self) -> None:
        """Start the program."""
        self._checked = self.rollout.clock()
        self.rollout.proxy.add(self.key, self._receive, self._receive_error)
        variables = self.rollout.proxy.environment(self.key)
        try:
            self.program = self.rollout.program.start(self.spec.example, self.key, variables)
        except OSError as error:
            self._fail("start", f"cannot be started: {error}")

    def check(self, now: float) -> None:
        """Look whether the program has ended, or exceeds a limit."""
        if self.is_over or self.program is None:
            return
        self._seconds += 0.0 if self.num_pending else now - self._checked
        self._checked = now
        code = self.program.poll()
        if code is not None:
            self._end(code)
            return
        seconds, reason = self.program.max_seconds or (self.rollout.max_seconds, "--environment.timeout")
        if self._seconds > seconds:
            self._fail("slow", f"exceeded {seconds:g} s of its own ({reason})")

    def close(self) -> None:
        """End the program, and whatever it has started."""
        self.is_over = True
        self.rollout.proxy.remove(self.key)
        for call in [call for call in self.rollout.waiting if call.episode is self]:
            self.rollout.waiting.remove(call)
            call.fail(ApiError("the episode is over", 403, "episode_over"))
        program, self.program = self.program, None
        if program is not None:
            program.close()

    def add(self, turn: OpenTurn, generation: Generation) -> ChatChoice:
        """Add a completion to the episode; return it as the program receives it."""
        choice = self.tree.add_reply(turn, generation)
        self.tokens_left -= len(choice.token_ids)
        self.truncated = choice.finish_reason == "length" and self.tokens_left < 1
        return choice

    def trajectory(self, prompt_length: int) -> Trajectory:
        """Return the episode after the first tokens of its group's prompt."""
        encoder = self.rollout.encoder
        segments, states = self.tree.segments(prompt_length) if self.tree.num_turns else ((), ())
        text = self.answer or encoder.decode(
            torch.cat([torch.empty(0, dtype=torch.int64), *(s.visible_tokens for s in segments)])
        )
        turns: list[float | None] = [None] * self.tree.num_turns
        if turns:  # the episode's reward stands at the end of its last text
            turns[-1] = self.reward
        failed = bool(self.failure) and self.reward is None
        return Trajectory(
            segments or (Segment(torch.zeros(1, dtype=torch.int64)),),
            text,
            self.truncated,
            tuple(turns),
            self.reward,
            metrics=self.metrics | {"calls": float(self.num_calls)},
            turn_states=states,
            stop_reason=self.stop_reason,
            feedback="" if self.failure else self.feedback,
            failure=self.failure if failed else "",
            notes=tuple(self.notes.values()),
            reward_remedy=_REWARD_REMEDY,
        )

    # Called by the proxy's thread.

    def _receive(self, request: ChatRequest) -> Future[ChatReply]:
        future: Future[ChatReply] = Future()
        try:
            self.rollout.loop.call_soon_threadsafe(self._open_call, request, future)
        except RuntimeError as error:  # the loop is closed: the rollout has ended
            raise ApiError("the episode is over", 403, "episode_over") from error
        return future

    def _receive_error(self, error: ApiError) -> None:
        with suppress(RuntimeError):
            self.rollout.loop.call_soon_threadsafe(self._note_error, error)

    # Called by the rollout's loop.

    def _note_error(self, error: ApiError) -> None:
        """Count an error that a request was answered with, and show it in the step's notes; a limit is shown by the stop reason."""
        if error.status == 403:
            return
        self.count("request_failed" if error.status >= 500 else "refused")
        self.last_refusal = f"the last one with status {error.status}: {error}"
        self._note(f"status {error.status}", f"was answered with status {error.status}: {error}")

    def _note(self, kind: str, text: str) -> None:
        name = self.rollout.program.name
        self.notes.setdefault(kind, f"a request of {name} ({kind}): it {text} (completion of {self.spec.location})")

    def _open_call(self, request: ChatRequest, future: Future[ChatReply]) -> None:
        """Queue a request, or refuse it: with status 403 where another one would be refused too, so that no client repeats it."""
        try:
            turn, requests = self._prepare(request)
        except Exception as error:  # whatever it is, it costs the request
            if future.set_running_or_notify_cancel():
                future.set_exception(error)
            return
        if request.only_counts:
            if future.set_running_or_notify_cancel():
                future.set_result(ChatReply((), tuple(turn.context_ids.tolist())))
            return
        call = _Call(self, turn, requests, future)
        self.num_pending += 1
        self.rollout.last_arrival = self.rollout.clock()
        self.rollout.waiting.append(call)
        future.add_done_callback(partial(self._notice_cancellation, call))

    def _notice_cancellation(self, call: _Call, future: Future[ChatReply]) -> None:
        if future.cancelled():  # by the proxy's thread
            with suppress(RuntimeError):
                self.rollout.loop.call_soon_threadsafe(call.abandon)

    def _prepare(self, request: ChatRequest) -> tuple[OpenTurn, list[Request]]:
        config, encoder = self.rollout.program, self.rollout.encoder
        count = request.num_choices
        if self.is_over:
            raise ApiError("the episode is over", 403, "episode_over")
        if request.only_counts:
            return self.tree.open_turn(request), []
        _check_followed(request)
        if self.num_calls + count > config.max_calls:
            self.stop_reason = CALLS
            raise ApiError(
                f"the episode may request {config.max_calls} completions (max_calls)", 403, "calls_exhausted"
            )
        if self.tokens_left < count:
            self.stop_reason, self.truncated = TOKENS, True
            raise ApiError(
                f"the episode has sampled all of its {self.spec.max_tokens} tokens (--max-tokens)",
                403,
                "tokens_exhausted",
            )
        turn = self.tree.open_turn(request)
        room, reason = self.tokens_left // count, TOKENS
        if encoder.context_length is not None and encoder.context_length - len(turn.context_ids) < room:
            room, reason = encoder.context_length - len(turn.context_ids), CONTEXT
        if room < 1:
            self.stop_reason, self.truncated = reason, True
            raise ApiError(
                f"the prompt has {len(turn.context_ids)} tokens, and the model reads {encoder.context_length}",
                400,
                "context_length_exceeded",
            )
        self._count_other_sampling(request)
        sampling, context = self.rollout.sampling, self.rollout.share(turn.context_ids)
        sampling = replace(sampling, stop=(*sampling.stop, *request.stop))
        limit = min(room, request.max_tokens or room)
        requests = []
        for _ in range(count):
            key = (*self.spec.key, self.sample, self.num_calls) if self.num_calls else (*self.spec.key, self.sample)
            self.num_calls += 1
            needs_mask = sampling.is_truncated and self.spec.key[1] == TRAIN
            requests.append(Request(context, key, sampling, limit, continues=True, needs_mask=needs_mask))
        return replace(turn, context_ids=context), requests

    def _count_other_sampling(self, request: ChatRequest) -> None:
        """Count what a request asks for and cannot have: the run's sampling is used, since the learner assumes it."""
        sampling = self.rollout.sampling
        if request.temperature not in (None, sampling.temperature):
            self.count("other_temperature")
        if request.top_p not in (None, sampling.top_p):
            self.count("other_top_p")
        if request.top_k is not None and max(request.top_k, 0) != sampling.top_k:
            self.count("other_top_k")
        if request.other_fields:
            self.count("other_fields")
            names = ", ".join(request.other_fields)
            self._note("other_fields", f"was answered without {names}, which cannot be followed")

    def count(self, name: str) -> None:
        """Count something in the episode's metrics."""
        self.metrics[name] = self.metrics.get(name, 0.0) + 1.0

    def _end(self, code: int) -> None:
        """Finish the episode of a program that has ended by itself."""
        assert self.program is not None
        if limit := self.program.exceeded:
            self._fail(limit, _EXCEEDED[limit].format(config=self.rollout.program))
            return
        if self.is_judging:
            if self.program.writes_reward:
                self._take_written(f"reward_command ended with exit code {code}: {self.program.last_output()}")
            else:
                self.reward = float(code == 0)
                self._finish()
            return
        try:
            values = self.program.read_result()
        except ValueError as error:
            self._fail("result", str(error))
            return
        if code != 0 and not values and not self.stop_reason:
            text = self.program.last_output() or "no output"
            hint = self.rollout.program.explain_missing(text)
            self._fail("crashed", f"ended with exit code {code}: {text}{hint}")
            return
        self.answer = values.get("answer") or ""
        self.metrics.update({str(name): float(value) for name, value in (values.get("metrics") or {}).items()})
        if values.get("reward") is not None:
            self.reward = float(values["reward"])
        if self.rollout.program.has_judge:
            self.is_judging, self._seconds = True, 0.0
            try:
                self.program.start_reward_command()
            except OSError as error:
                self._fail("start", f"leaves a folder in which reward_command cannot be started: {error}")
            return
        if self.program.writes_reward:
            self._take_written("it ended by itself")
            return
        self._finish()

    def _take_written(self, ending: str) -> None:
        """Finish the episode with what stands in its reward file. ending: how what writes it has ended, for a message."""
        assert self.program is not None
        try:
            written = self.program.read_reward()
        except ValueError as error:
            self._fail("result", str(error))
            return
        if written is None:
            self._fail("result", f"has no reward file; {ending}")
            return
        self.reward, self.feedback = written.reward, written.feedback
        self.metrics.update({f"reward_{name}": value for name, value in written.metrics.items()})
        self._finish()

    def _finish(self) -> None:
        if not self.tree.num_turns:
            self._fail("silent", "ended without a completion")
            return
        self.stop_reason = self.stop_reason or FINISHED
        self.is_over = True

    def _fail(self, kind: str, reason: str) -> None:
        """End the episode of a program that does not work. Its requests are refused from now on."""
        self.failure = f"the program {self.rollout.program.name} {reason} (completion of {self.spec.location})"
        self.count(f"program_{kind}")
        self.reward = self.rollout.program.failure_reward if self.tree.num_turns else None
        self.stop_reason, self.is_over = FAILED, True


def _check_followed(request: ChatRequest) -> None:
    """Refuse what a sampled token's own log-probability does not answer."""
    if request.has_echo:
        raise ApiError(
            "echo asks for what the policy thinks of a given text, which is no sample: send such requests to `policygrad proxy`"
        )
    # in the older format 1 is how log-probabilities of the sampled tokens are asked for
    is_chat = isinstance(request.prompt[0], dict)
    if request.num_alternatives > (0 if is_chat else 1):
        raise ApiError(
            f"log-probabilities of {request.num_alternatives} tokens in each place are not recorded here, only those of the "
            "sampled tokens: send top_logprobs=0, or logprobs=1 to /v1/completions"
        )


def _make_group(spec: EpisodeSpec, episodes: Sequence[_Episode], encoder: Tokenizer) -> EpisodeGroup:
    """Return the episodes as a group: its prompt is what all first texts begin with."""
    texts = [episode.tree.first_text for episode in episodes if episode.tree.num_turns]
    if not texts:
        prompt = encoder.encode_unanswered(spec.example.prompt, spec.location).ids
        return EpisodeGroup(spec, prompt, tuple(episode.trajectory(len(prompt)) for episode in episodes))
    length = common_length(texts)
    prompt = texts[0][: max(length, 1)]
    return EpisodeGroup(spec, prompt, tuple(episode.trajectory(length) for episode in episodes))
