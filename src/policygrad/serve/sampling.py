"""Sampling for clients: completions of several adapters in one batch, and log-probabilities of prompts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar, Literal

import torch
from torch import Tensor

from policygrad.core.media import TextMedia, mark_slots
from policygrad.errors import ConfigError
from policygrad.models.loading import at_least_float32
from policygrad.models.vision import picture_inputs, picture_positions
from policygrad.samplers.base import Generation, Request, SamplingParams
from policygrad.samplers.config import SamplerConfig
from policygrad.samplers.engines.factory import make_engine_factory
from policygrad.samplers.engines.registry import WEIGHTS_FOLDER
from policygrad.samplers.local.sampler import LocalSampler
from policygrad.samplers.local.sampling import philox_uniforms, sample_tokens
from policygrad.samplers.stop_texts import cut_at_stop
from policygrad.serve.adapters import Adapter, merge_adapter
from policygrad.serve.model_input import ModelInputParts
from policygrad.serve.models import ServedNetwork
from policygrad.utils.async_runner import AsyncRunner
from policygrad.weight_sync.base import PublishedWeights

MAX_LOGITS = 2**24
"""Elements of logits that are computed at a time."""


@dataclass(frozen=True, eq=False)
class SampleQuery:
    """A sampling request: one prompt, and what to sample and score."""

    prompt: Tensor
    """[P] int64; of a picture, its placeholder tokens."""
    num_samples: int
    sampling: SamplingParams
    max_tokens: int | None
    """None: up to the model's limit."""
    key: tuple[int, ...]
    """Seeds the samples, with their index."""
    stop_tokens: frozenset[int] | None = None
    """Ids that end a completion; None = the tokenizer's end tokens."""
    stop_texts: tuple[str, ...] = ()
    """Texts that end a completion, whatever tokens they are made of."""
    prompt_logprobs: bool = False
    prompt_logprobs_last: int | None = None
    """Score only so many tokens at the end of the prompt; None = all."""
    top_prompt_logprobs: int = 0
    top_sample_logprobs: int = 0
    target_ids: Tensor | None = None
    """[P − 1, K] int64; ids to score at each position after the first, -1 = none."""
    prompt_draws: int = 0
    """Tokens to draw at each position after the first."""
    media: TextMedia = ()
    """The prompt's pictures."""
    compact_ids: Tensor | None = None
    """[P'] int64; the prompt with one mark for each picture, for an engine that expands it. None = no pictures."""
    parts: ModelInputParts | None = None
    """Chunks with pictures that are not read yet: `prompt` is empty until `LocalAnswers.prepare` has read them."""


@dataclass(frozen=True, eq=False)
class TopTokens:
    """The most probable tokens at n positions; positions that were not scored have id 0 and log-probability −99999."""

    ids: Tensor
    """[n, k] int32."""
    logprobs: Tensor
    """[n, k] float32, nats."""


@dataclass(frozen=True, eq=False)
class Sampled:
    """One completion."""

    tokens: Tensor
    """[n] int64."""
    logprobs: Tensor
    """[n] nats, under the distribution that was sampled from."""
    finish_reason: Literal["stop", "length"]
    top: TopTokens | None = None


@dataclass(frozen=True, eq=False)
class SampleAnswer:
    """The answer to a query."""

    samples: Sequence[Sampled]
    prompt_logprobs: Tensor | None = None
    """[P] nats; NaN where nothing was scored."""
    top_prompt: TopTokens | None = None
    target_logprobs: Tensor | None = None
    """[P − 1, K] nats; 0 where nothing was asked for."""
    drawn_ids: Tensor | None = None
    """[P − 1, k] int64."""
    drawn_logprobs: Tensor | None = None


@dataclass(frozen=True, eq=False)
class _AdaptedRequest(Request):
    adapter: Adapter | None = None


@dataclass(eq=False)
class LocalAnswers:
    """Answers with a network in this process. Queries of different adapters are decoded in one batch."""

    stops_early: ClassVar[bool] = True
    """Whether sampling ends at a stop text; otherwise completions are cut afterwards."""
    network: ServedNetwork
    decode_rows: int = 512
    sampler: LocalSampler = field(init=False)

    def __post_init__(self) -> None:
        self.sampler = LocalSampler.from_tokenizer(self.network.model, self.network.tokenizer)
        self.sampler.decode = self.network.tokenizer.hf.decode

    @torch.no_grad()
    def answer(self, queries: Sequence[tuple[SampleQuery, Adapter | None]]) -> list[SampleAnswer]:
        """Answer queries that `prepare` has returned."""
        requests = list[_AdaptedRequest]()
        for query, adapter in queries:
            assert query.parts is None
            stop = query.stop_texts if self.stops_early else ()
            sampling = replace(query.sampling, decode_rows=self.decode_rows, stop=stop)
            limit = self._max_tokens(query)
            requests += [
                _AdaptedRequest(
                    query.prompt,
                    (*query.key, i),
                    sampling,
                    limit,
                    media=query.media,
                    compact_ids=query.compact_ids,
                    stop=query.stop_tokens,
                    adapter=adapter,
                )
                for i in range(query.num_samples)
            ]
        generations = iter(self._generate(requests))
        return [self._build_answer(query, adapter, generations) for query, adapter in queries]

    def prepare(self, query: SampleQuery) -> SampleQuery:
        """Return a query with its pictures read, before it is answered together with others.

        Raises:
            ConfigError: It cannot be answered.
        """
        if query.parts is not None:
            text = query.parts.read(self.network.tokenizer, self.network.name)
            query = replace(query, prompt=text.ids, media=text.media, compact_ids=text.compact_ids, parts=None)
        self._max_tokens(query)
        length, targets, last = len(query.prompt), query.target_ids, query.prompt_logprobs_last
        if targets is not None and len(targets) != length - 1:
            raise ConfigError(
                f"target_prompt_logprobs has shape {list(targets.shape)}, expected [{length - 1}, K]: one row for each of the "
                "prompt's tokens after the first"
            )
        if targets is not None:
            self.network.check_ids(targets.clamp(min=0), "target_prompt_logprobs")
        if last is not None and not 1 <= last <= length - 1:
            raise ConfigError(f"prompt_logprobs_last_n must be from 1 to {length - 1}, not {last}")
        return query

    def _max_tokens(self, query: SampleQuery) -> int:
        """Return how many tokens may be sampled. Raises ConfigError if the prompt leaves no room for them."""
        network = self.network
        network.check_text(query.prompt, "the prompt")
        if not len(query.prompt):
            raise ConfigError("the prompt has no tokens: give at least one")
        limit = network.context_length
        if query.max_tokens is None:
            if limit is None:
                raise ConfigError(f"{network.name!r} does not say how long its texts may be: give max_tokens")
            return max(1, limit - len(query.prompt))
        if limit is not None and len(query.prompt) + query.max_tokens > limit:
            raise ConfigError(
                f"the prompt has {len(query.prompt)} tokens and max_tokens is {query.max_tokens}: together more than the {limit} "
                f"positions of {network.name!r}"
            )
        return query.max_tokens

    def _generate(self, requests: Sequence[_AdaptedRequest]) -> Sequence[Generation]:
        network, sampler = self.network, self.sampler
        adapters = {id(r.adapter): r.adapter for r in requests}
        if len(adapters) <= 1 or network.switch is None:
            with network.using(next(iter(adapters.values()), None)):
                return _run(sampler, requests)
        switch = network.switch

        def select(rows: Sequence[Request]) -> None:
            switch.select_rows([row.adapter for row in rows if isinstance(row, _AdaptedRequest)], network.device)

        before, sampler.before_pass = sampler.before_pass, select
        decodes_ahead, sampler.decodes_ahead = sampler.decodes_ahead, False
        try:
            with switch.using():
                return _run(sampler, requests)
        finally:
            sampler.before_pass, sampler.decodes_ahead = before, decodes_ahead

    def _build_answer(
        self, query: SampleQuery, adapter: Adapter | None, generations: Iterator[Generation]
    ) -> SampleAnswer:
        samples = list[Sampled]()
        with self.network.using(adapter):
            for _ in range(query.num_samples):
                sample = self._cut_at_stop(next(generations), query)
                if query.top_sample_logprobs:
                    ids = torch.cat([query.prompt, sample.tokens])
                    top = _TopCollector(query.top_sample_logprobs)
                    self._score(ids, query.media, len(query.prompt), top)
                    sample = replace(sample, top=top.result(len(sample.tokens)))
                samples.append(sample)
            return self._score_prompt(query, SampleAnswer(samples))

    def _cut_at_stop(self, generation: Generation, query: SampleQuery) -> Sampled:
        """Return the completion up to the first token at which its text, with all special tokens, contains a stop text."""
        cut = cut_at_stop(generation, query.stop_texts, self.network.tokenizer.hf.decode)
        return Sampled(cut.tokens, cut.logp, cut.finish_reason)

    def _score_prompt(self, query: SampleQuery, answer: SampleAnswer) -> SampleAnswer:
        """Add what the query asks for about the prompt."""
        length = len(query.prompt)
        wants_logprobs = query.prompt_logprobs or query.top_prompt_logprobs > 0
        if not (wants_logprobs or query.target_ids is not None or query.prompt_draws):
            return answer
        scored = _PromptScores(query)
        if length > 1:
            self._score(query.prompt, query.media, 1, scored)
        return scored.add_to(answer)

    def _score(self, ids: Tensor, media: TextMedia, start: int, collector: _TopCollector | _PromptScores) -> None:
        """Give the logits that predict ids[start:] to a collector, in order and in parts."""
        model, device = self.network.model, self.network.device
        text = ids[None].to(device)
        part = self.network.evaluator.network
        index = torch.arange(start - 1, len(ids) - 1, device=device)
        call = {
            "input_ids": text,
            "attention_mask": torch.ones_like(text),
            "position_ids": torch.arange(text.shape[1], device=device)[None],
        }
        if media:
            slots = mark_slots(media, len(ids))[None].to(device)
            is_token = torch.ones_like(text, dtype=torch.bool)
            call["position_ids"] = picture_positions(model, text, slots, is_token, media)
            call |= picture_inputs(model, text, slots, media)
        model.eval()
        states = replace(part, use_tree=False).states_at(index, call)
        size = max(1, MAX_LOGITS // part.width(states))
        for first in range(0, len(index), size):
            logits = at_least_float32(part.logits(states[first : first + size])).cpu()
            collector.add(logits, ids[start + first : start + first + len(logits)])


@dataclass(frozen=True, eq=False)
class FullWeights:
    """All weights of a model, by parameter."""

    tensors: Mapping[str, Tensor]


@dataclass(eq=False)
class EngineAnswers(LocalAnswers):
    """Answers with servers of an engine, which have one set of weights at a time: it is published and probed when another is asked
    for. The network is a copy that has the published weights; it scores prompts."""

    stops_early = False  # servers decode without some special tokens
    base: ServedNetwork = field(kw_only=True)
    """The network that adapters belong to."""
    config: SamplerConfig = field(kw_only=True)
    folder: Path = field(kw_only=True)
    """Folder for published weights and the servers' logs."""
    note: Callable[[str], None] = field(kw_only=True)
    published: Adapter | FullWeights | None = None
    probe_difference: float | None = None
    """Largest difference in nats that the last probe found."""

    def __post_init__(self) -> None:
        super().__post_init__()

        def progress(text: str, done: int | None = None, total: int | None = None) -> None:
            self.note(text)

        make = make_engine_factory(
            self.config, self.folder / WEIGHTS_FOLDER, SamplingParams(max_tokens=1024), on_progress=progress
        )
        assert make is not None
        self.runner, self.version = AsyncRunner(), 0
        self.engine = make(self.network.model, self.network.tokenizer)
        self.initial = {name: p.detach().clone() for name, p in self.network.model.named_parameters()}

    def answer(self, queries: Sequence[tuple[SampleQuery, Adapter | FullWeights | None]]) -> list[SampleAnswer]:
        answers: dict[int, SampleAnswer] = {}
        for key in dict.fromkeys(id(weights) for _, weights in queries):
            chosen = [i for i, (_, weights) in enumerate(queries) if id(weights) == key]
            self.publish(queries[chosen[0]][1])
            answers |= zip(chosen, super().answer([(queries[i][0], None) for i in chosen]), strict=True)
        return [answers[i] for i in range(len(queries))]

    def publish(self, weights: Adapter | FullWeights | None) -> None:
        """Let the servers load these weights, unless they have them.

        Raises:
            ConfigError: Weights that cannot be sent.
            EngineError: A server samples from something else.
        """
        if self.version and weights is self.published:
            return
        names = self.initial.keys()
        if weights is None:
            tensors: Mapping[str, Tensor] = self.initial
        elif isinstance(weights, FullWeights):
            tensors = weights.tensors
        else:
            assert self.base.switch is not None
            merged = merge_adapter(self.base.model, self.base.switch, weights)
            adapts_head = any(self.base.switch.layers[n].kind == "head" for n in weights.pairs)
            if adapts_head and merged.keys() - names:  # the head's matrix is no parameter of its own
                raise ConfigError(
                    f"{self.base.name!r} shares its head's matrix with the embedding, so an adapter on the head cannot be sent to "
                    f"{self.config.engine}: create the client with train_unembed=False"
                )
            tensors = {name: merged[name] for name in names}
        self.version += 1
        self.runner(self.engine.update(PublishedWeights(self.version, tensors)))
        self.published = weights
        self.probe_difference = max((r.difference for r in self.engine.probe_results.values()), default=None)

    def _generate(self, requests: Sequence[_AdaptedRequest]) -> Sequence[Generation]:
        return self.runner(self.engine.generate(requests))

    def close(self) -> None:
        """Stop the servers that were started here."""
        self.runner(self.engine.close())
        self.runner.close()


def _run(sampler: LocalSampler, requests: Sequence[Request]) -> Sequence[Generation]:
    """Call a sampler whose `generate` never waits."""
    return asyncio.run(sampler.generate(requests))


class _TopCollector:
    """Collects the k most probable tokens at each position."""

    def __init__(self, k: int) -> None:
        self.k, self.ids, self.logprobs = k, list[Tensor](), list[Tensor]()

    def add(self, logits: Tensor, tokens: Tensor) -> None:
        top = logits.log_softmax(-1).topk(min(self.k, logits.shape[-1]), -1)
        self.ids.append(top.indices.to(torch.int32))
        self.logprobs.append(top.values.float())

    def result(self, length: int) -> TopTokens:
        """Return [length, k]; positions before the first one that was scored have none."""
        scored = sum(len(x) for x in self.ids)
        width = self.ids[0].shape[1] if self.ids else self.k
        before = length - scored
        ids = torch.cat([torch.zeros(before, width, dtype=torch.int32), *self.ids])
        return TopTokens(ids, torch.cat([torch.full((before, width), -99999.0), *self.logprobs]))


class _PromptScores:
    """Collects what a query asks for about the prompt's tokens after the first."""

    def __init__(self, query: SampleQuery) -> None:
        self.query, self.position = query, 1
        length = len(query.prompt)
        first = 1 if query.prompt_logprobs_last is None else length - query.prompt_logprobs_last
        self.first, self.top = first, _TopCollector(query.top_prompt_logprobs)
        self.logprobs = torch.full((length,), float("nan"))
        self.targets = None if query.target_ids is None else torch.zeros(query.target_ids.shape)
        self.draws = torch.zeros(2, max(0, length - 1), query.prompt_draws, dtype=torch.float64)

    def add(self, logits: Tensor, tokens: Tensor) -> None:
        query, start = self.query, self.position
        logp = logits.log_softmax(-1)
        end = self.position = start + len(tokens)
        skip = min(max(0, self.first - start), len(tokens))
        self.logprobs[start + skip : end] = logp.gather(1, tokens[:, None]).squeeze(1).float()[skip:]
        if query.top_prompt_logprobs and skip < len(tokens):
            self.top.add(logits[skip:], tokens[skip:])
        if self.targets is not None and query.target_ids is not None:
            ids = query.target_ids[start - 1 : end - 1]
            target_logp = logp.gather(1, ids.clamp(min=0)).float()
            self.targets[start - 1 : end - 1] = torch.where(ids >= 0, target_logp, 0.0)
        if query.prompt_draws:
            keys = [(*query.key, 2**20, start + i) for i in range(len(tokens))]
            u = philox_uniforms(keys, query.prompt_draws)
            plain = SamplingParams(temperature=query.sampling.temperature)
            for column in range(query.prompt_draws):
                ids, _ = sample_tokens(logits, u[:, column], plain)
                self.draws[0, start - 1 : end - 1, column] = ids.double()
                self.draws[1, start - 1 : end - 1, column] = logp.gather(1, ids[:, None]).squeeze(1).double()

    def add_to(self, answer: SampleAnswer) -> SampleAnswer:
        query = self.query
        if query.prompt_logprobs:
            answer = replace(answer, prompt_logprobs=self.logprobs)
        if query.top_prompt_logprobs:
            answer = replace(answer, top_prompt=self.top.result(len(query.prompt)))
        if query.prompt_draws:
            answer = replace(answer, drawn_ids=self.draws[0].long(), drawn_logprobs=self.draws[1].float())
        return replace(answer, target_logprobs=self.targets)
