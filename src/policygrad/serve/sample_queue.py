"""Sampling requests that wait, their answers, and the weights in memory that they are answered with."""

from __future__ import annotations

import threading
import time
import traceback
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from safetensors.torch import load_file

from policygrad.errors import ConfigError, DataError, OutOfMemoryError, PolicygradError, RunError
from policygrad.models.traits import ADAPTER_WEIGHTS
from policygrad.samplers.config import LOCAL
from policygrad.serve import wire
from policygrad.serve.adapters import Adapter, AdapterSpec
from policygrad.serve.config import ServeConfig
from policygrad.serve.models import ServedNetwork
from policygrad.serve.sampling import EngineAnswers, FullWeights, LocalAnswers, SampleQuery
from policygrad.serve.store import SavedPath, Store
from policygrad.serve.training import FULL_WEIGHTS, WEIGHTS_INFO, load_trainable
from policygrad.serve.wire import Answer
from policygrad.utils.out_of_memory import describe_missing_memory, is_out_of_memory

GATHER_SECONDS = 0.01
"""A sampling request waits this long for others, so that they are decoded together."""
MAX_GATHER_SECONDS = 0.5
MAX_WAITING = 2**16
"""Requests that may wait; clients come again with what is above it."""
MAX_WAITING_BYTES = 2**29
"""Of the requests that wait."""
MAX_ANSWER_BYTES = 2**30
"""Answers of this size in all are kept, the latest, for clients that ask for them again."""
WeightsT = TypeVar("WeightsT", Adapter, FullWeights)


class BusyError(RunError):
    """Too much waits already."""


class LostRequestError(DataError):
    """A sampling request that a restart has lost, or whose answer is kept no more: the client sends it again."""


@dataclass(frozen=True, eq=False)
class QueuedSample:
    """A sampling request that waits."""

    request_id: str
    tenant: str
    """The user or session that takes turns with others (`Service.find_tenant`)."""
    query: SampleQuery
    base_model: str
    model_path: str | None
    """Saved weights; None: the base model's own."""
    num_bytes: int = 0
    """Of the request."""


class SampleQueue:
    """Accepts sampling requests in the event loop, and answers them in the server's thread."""

    def __init__(
        self,
        config: ServeConfig,
        store: Store,
        networks: Mapping[str, ServedNetwork],
        *,
        condition: threading.Condition,
        on_ready: Callable[[], None],
        on_results: Callable[[Iterable[str]], None],
        note: Callable[[str], None],
    ) -> None:
        """
        Args:
            condition: Held while the queue and the results change.
            on_ready: Called, holding the condition, when there is something to answer.
            on_results: Called with the ids of requests that have an answer.
            note: Tells the server's log about bugs.
        """
        self.config, self.store, self.networks, self.condition = config, store, networks, condition
        self.on_ready, self.on_results, self.note = on_ready, on_results, note
        self.waiting: deque[QueuedSample] = deque()
        self.pending: set[str] = set()  # ids of accepted requests that have no answer yet
        self.answers: OrderedDict[str, Answer] = OrderedDict()
        self.answer_bytes = self.waiting_bytes = 0
        self.cancelled: set[str] = set()
        self.first_arrival = self.last_arrival = 0.0
        self.samplers = {name: self._make_sampler(network) for name, network in networks.items()}
        self.full_samplers: OrderedDict[tuple[str, float], LocalAnswers] = OrderedDict()  # by path and time of saving
        self.weights: OrderedDict[tuple[str, float], Adapter | FullWeights] = OrderedDict()  # likewise
        self.counts = {"requests": 0, "tokens_sampled": 0}

    def _make_sampler(self, network: ServedNetwork) -> LocalAnswers:
        """Return what samples for a base model: this process, or servers of an engine."""
        if self.config.sampler.engine == LOCAL:
            return LocalAnswers(network, self.config.decode_rows)
        return EngineAnswers(
            load_trainable(self.config, network.name, network.path),
            self.config.decode_rows,
            base=network,
            config=self.config.sampler,
            folder=self.store.folder,
            note=self.note,
        )

    def close(self) -> None:
        """Stop engines that were started here."""
        for sampler in self.samplers.values():
            if isinstance(sampler, EngineAnswers):
                sampler.close()

    def add(self, item: QueuedSample) -> None:
        """Accept a request, unless it was accepted before. Raises BusyError if too many wait."""
        with self.condition:
            if item.request_id in self.pending or item.request_id in self.answers:
                return
            waiting_bytes = self.waiting_bytes + item.num_bytes
            if len(self.waiting) >= MAX_WAITING or (self.waiting and waiting_bytes > MAX_WAITING_BYTES):
                raise BusyError(
                    f"{len(self.waiting):,} sampling requests ({self.waiting_bytes:,} bytes) wait: send more when some are answered"
                )
            self.waiting_bytes = waiting_bytes
            self.pending.add(item.request_id)
            self.last_arrival = time.monotonic()
            if not self.waiting:
                self.first_arrival = self.last_arrival
            self.waiting.append(item)
            self.counts["requests"] += 1
            self.on_ready()

    def cancel(self, request_id: str) -> None:
        """Leave out a request that has not begun."""
        with self.condition:
            if request_id in self.pending:
                self.cancelled.add(request_id)

    def find_answer(self, request_id: str) -> Answer | None:
        """Return an answer, None while there is none. Raises LostRequestError if the request is unknown."""
        with self.condition:
            if request_id in self.pending or request_id in self.answers:
                return self.answers.get(request_id)
        raise LostRequestError(
            f"the sampling request {request_id!r} was lost when the server started again: send it again"
        )

    def seconds_to_gather(self) -> float:
        """Return how long to wait for other requests if there is nothing else to do."""
        if self.config.reproducible:
            return 0.0
        now = time.monotonic()
        return min(self.last_arrival + GATHER_SECONDS, self.first_arrival + MAX_GATHER_SECONDS) - now

    def answer_some(self) -> None:
        """Answer as many requests as are decoded at a time."""
        by_weights: dict[tuple[str, str | None], list[QueuedSample]] = {}
        for item in self._take():
            by_weights.setdefault((item.base_model, item.model_path), []).append(item)
        together: dict[LocalAnswers, list[tuple[QueuedSample, Any]]] = {}  # by what answers them, with their weights
        for (base_model, path), items in by_weights.items():
            try:
                sampler, weights = self._load_weights(base_model, path)
            except Exception as error:
                self._finish((item, self._format_refusal(error)) for item in items)
                continue
            requests = [(item, weights) for item in items]
            if path is None or weights is not None:  # adapters of a base model are sampled together
                together.setdefault(sampler, []).extend(requests)
            else:  # all weights: not kept in memory until others are loaded
                self._finish(self._answer(sampler, requests))
        for sampler, requests in together.items():
            self._finish(self._answer(sampler, requests))

    def _answer(
        self, sampler: LocalAnswers, requests: Sequence[tuple[QueuedSample, Any]]
    ) -> list[tuple[QueuedSample, Answer]]:
        """Answer requests in one batch, or each alone if that fails: those that can be answered are."""
        answers, allowed = list[tuple[QueuedSample, Answer]](), list[tuple[QueuedSample, Any]]()
        for item, weights in requests:
            try:
                allowed.append((replace(item, query=sampler.prepare(item.query)), weights))
            except Exception as error:  # whatever a client's picture lets a library raise: the others are answered
                answers.append((item, self._format_refusal(error)))
        try:
            results = sampler.answer([(item.query, weights) for item, weights in allowed]) if allowed else []
            formatted = [wire.format_sample(result) for result in results]
        except Exception as error:
            if len(allowed) == 1:
                return [*answers, (allowed[0][0], self._format_refusal(error))]
            return [*answers, *(answer for one in allowed for answer in self._answer(sampler, [one]))]
        self.counts["tokens_sampled"] += sum(len(s.tokens) for result in results for s in result.samples)
        return [*answers, *zip((item for item, _ in allowed), formatted, strict=True)]

    def _format_refusal(self, error: Exception) -> Answer:
        """Return the answer of a request that failed. The log gets it too if it is a bug."""
        is_users, text = isinstance(error, ConfigError | DataError), str(error)
        if is_out_of_memory(error):
            shortage = (
                text if isinstance(error, OutOfMemoryError) else f"out of memory ({describe_missing_memory(error)})"
            )
            text = f"{shortage}: ask for fewer tokens, or start the server with a smaller --decode-rows or --max-models"
        elif not isinstance(error, PolicygradError):
            text = f"{type(error).__name__}: {error} (a bug of the server)"
            self.note(f"sampling: {text}\n{''.join(traceback.format_exception(error))}")
        return wire.format_error(text, is_users=is_users)

    def _take(self) -> Sequence[QueuedSample]:
        """Take requests of all tenants in turn, as many as are decoded at a time."""
        with self.condition:
            by_tenant: OrderedDict[str, deque[QueuedSample]] = OrderedDict()
            for item in self.waiting:
                by_tenant.setdefault(item.tenant, deque()).append(item)
            chosen, rows = dict[str, QueuedSample](), 0
            limit = 1 if self.config.reproducible else self.config.decode_rows
            while by_tenant and rows < limit:
                tenant, items = by_tenant.popitem(last=False)
                item = items.popleft()
                chosen[item.request_id] = item
                rows += item.query.num_samples
                if items:
                    by_tenant[tenant] = items  # last in the next round
            self.waiting = deque(item for item in self.waiting if item.request_id not in chosen)
            self.waiting_bytes = sum(item.num_bytes for item in self.waiting)
            if self.waiting:
                self.first_arrival = 0.0
                self.on_ready()
            for request_id in self.cancelled & chosen.keys():
                self.pending.remove(request_id)
                del chosen[request_id]
            self.cancelled.clear()  # what is left of it has begun
        return list(chosen.values())

    def _finish(self, answers: Iterable[tuple[QueuedSample, Answer]]) -> None:
        """Give answers to those who wait for them: all at once, as the event loop and this thread would hinder each other."""
        finished = {item.request_id: answer for item, answer in answers}
        with self.condition:
            self.pending -= finished.keys()
            self.answers |= finished
            self.answer_bytes += sum(len(answer.body) for answer in finished.values())
            while self.answer_bytes > MAX_ANSWER_BYTES and len(self.answers) > 1:
                self.answer_bytes -= len(self.answers.popitem(last=False)[1].body)
        self.on_results(finished)

    def publish(self, base_model: str, model_path: str) -> None:
        """Let an engine load weights that were saved for it."""
        if isinstance(sampler := self.samplers[base_model], EngineAnswers):
            sampler.publish(self._load_weights(base_model, model_path)[1])

    def _load_weights(self, base_model: str, path: str | None) -> tuple[LocalAnswers, Adapter | FullWeights | None]:
        """Return what samples from weights, with these in memory."""
        sampler = self.samplers[base_model]
        if path is None:
            return sampler, None
        saved = SavedPath.parse(path)
        folder, key = self.store.find_saved(saved), (path, self.store.saved_info(saved).created)
        if key in self.weights:
            self.weights.move_to_end(key)
            return sampler, self.weights[key]
        if key in self.full_samplers:
            self.full_samplers.move_to_end(key)
            return self.full_samplers[key], None
        network, spec = self.networks[base_model], self.store.read(folder / WEIGHTS_INFO, path)["adapter"]
        if spec is not None:
            assert network.switch is not None
            adapter_spec = AdapterSpec(**spec)
            adapter = Adapter(network.switch.choose_layers(adapter_spec), adapter_spec)
            adapter.load(load_file(folder / ADAPTER_WEIGHTS))
            return sampler, self._remember(key, adapter)
        tensors = load_file(folder / FULL_WEIGHTS)
        if isinstance(sampler, EngineAnswers):
            return sampler, self._remember(key, FullWeights(tensors))
        while len(self.full_samplers) >= max(1, self.config.max_models // 4):
            self.full_samplers.popitem(last=False)
        copy = load_trainable(self.config, base_model, network.path)
        with torch.no_grad():
            for name, parameter in copy.model.named_parameters():
                parameter.copy_(tensors[name])
        self.full_samplers[key] = LocalAnswers(copy, self.config.decode_rows)
        return self.full_samplers[key], None

    def _remember(self, key: tuple[str, float], weights: WeightsT) -> WeightsT:
        """Keep weights in memory, and drop those that were used longest ago."""
        self.weights[key] = weights
        while len(self.weights) > self.config.max_models:
            self.weights.popitem(last=False)
        return weights
