"""Sampling requests that wait, their answers, and the weights in memory that they are answered with."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from safetensors.torch import load_file

from policygrad.errors import PolicygradError
from policygrad.models.adapters import ADAPTER_WEIGHTS
from policygrad.samplers.config import LOCAL
from policygrad.serve import wire
from policygrad.serve.adapters import Adapter, AdapterSpec
from policygrad.serve.config import ServeConfig
from policygrad.serve.models import ServedNetwork
from policygrad.serve.sampling import EngineAnswers, FullWeights, LocalAnswers, SampleQuery
from policygrad.serve.store import SavedPath, Store
from policygrad.serve.training import ADAPTER_SPEC, FULL_WEIGHTS, load_trainable
from policygrad.serve.wire import Answer

GATHER_SECONDS = 0.01
"""A sampling request waits this long for others, so that they are decoded together."""
MAX_GATHER_SECONDS = 0.5
MAX_RESULTS = 8192
"""Answers that are kept for clients that have not fetched them."""
WeightsT = TypeVar("WeightsT", Adapter, FullWeights)


@dataclass(frozen=True, eq=False)
class QueuedSample:
    """A sampling request that waits."""

    request_id: str
    session: str
    """The sampling session, among which turns are taken."""
    query: SampleQuery
    base_model: str
    model_path: str | None
    """Saved weights; None: the base model's own."""


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
        on_result: Callable[[str], None],
        note: Callable[[str], None],
    ) -> None:
        """
        Args:
            condition: Held while the queue and the results change.
            on_ready: Called, holding the condition, when there is something to answer.
            on_result: Called with a request's id when it has an answer.
            note: Tells the server's log about bugs.
        """
        self.config, self.store, self.networks, self.condition = config, store, networks, condition
        self.on_ready, self.on_result, self.note = on_ready, on_result, note
        self.waiting: deque[QueuedSample] = deque()
        self.results: OrderedDict[str, Answer | None] = OrderedDict()  # None: not computed yet
        self.cancelled: set[str] = set()
        self.first_arrival = self.last_arrival = 0.0
        self.samplers = {name: self._make_sampler(network) for name, network in networks.items()}
        self.full_samplers: OrderedDict[str, LocalAnswers] = OrderedDict()  # by the path of all weights
        self.weights: OrderedDict[str, Adapter | FullWeights] = OrderedDict()  # by path
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
        """Accept a request, unless it was accepted before."""
        with self.condition:
            if item.request_id in self.results:
                return
            self.results[item.request_id] = None
            self.last_arrival = time.monotonic()
            if not self.waiting:
                self.first_arrival = self.last_arrival
            self.waiting.append(item)
            self.counts["requests"] += 1
            self.on_ready()

    def cancel(self, request_id: str) -> None:
        """Leave out a request that has not begun."""
        with self.condition:
            if request_id in self.results and self.results[request_id] is None:
                self.cancelled.add(request_id)

    def seconds_to_gather(self) -> float:
        """Return how long to wait for other requests if there is nothing else to do."""
        if self.config.reproducible:
            return 0.0
        now = time.monotonic()
        return min(self.last_arrival + GATHER_SECONDS, self.first_arrival + MAX_GATHER_SECONDS) - now

    def answer_some(self) -> None:
        """Answer as many requests as are decoded at a time."""
        groups: dict[int, tuple[LocalAnswers, list[tuple[QueuedSample, Any]]]] = {}
        for item in self._take():
            try:
                sampler, weights = self._load_weights(item.base_model, item.model_path)
                sampler.check(item.query)
                groups.setdefault(id(sampler), (sampler, []))[1].append((item, weights))
            except PolicygradError as error:
                self._finish(item, wire.format_error(str(error), is_users=True))
        for sampler, chosen in groups.values():
            try:
                answers = sampler.answer([(item.query, weights) for item, weights in chosen])
            except Exception as error:  # the clients and the log get it, and the server goes on
                text = f"{type(error).__name__}: {error}"
                if not isinstance(error, PolicygradError):
                    text += " (a bug of the server)"
                    self.note(f"sampling: {text}")
                for item, _ in chosen:
                    self._finish(item, wire.format_error(text, is_users=False))
                continue
            for (item, _), answer in zip(chosen, answers, strict=True):
                self.counts["tokens_sampled"] += sum(len(s.tokens) for s in answer.samples)
                self._finish(item, wire.format_sample(answer))

    def _take(self) -> Sequence[QueuedSample]:
        """Take requests of all sampling sessions in turn, as many as are decoded at a time."""
        with self.condition:
            by_session: OrderedDict[str, deque[QueuedSample]] = OrderedDict()
            for item in self.waiting:
                by_session.setdefault(item.session, deque()).append(item)
            chosen, rows = dict[str, QueuedSample](), 0
            limit = 1 if self.config.reproducible else self.config.decode_rows
            while by_session and rows < limit:
                session, items = by_session.popitem(last=False)
                item = items.popleft()
                chosen[item.request_id] = item
                rows += item.query.num_samples
                if items:
                    by_session[session] = items  # last in the next round
            self.waiting = deque(item for item in self.waiting if item.request_id not in chosen)
            if self.waiting:
                self.first_arrival = 0.0
                self.on_ready()
            for request_id in self.cancelled & chosen.keys():
                self.cancelled.remove(request_id)
                del self.results[request_id], chosen[request_id]
        return list(chosen.values())

    def _finish(self, item: QueuedSample, answer: Answer) -> None:
        with self.condition:
            self.results[item.request_id] = answer
            self.results.move_to_end(item.request_id)
            finished = [key for key, value in self.results.items() if value is not None]
            for key in finished[: max(0, len(finished) - MAX_RESULTS)]:
                del self.results[key]
        self.on_result(item.request_id)

    def publish(self, base_model: str, model_path: str) -> None:
        """Let an engine load weights that were saved for it."""
        if isinstance(sampler := self.samplers[base_model], EngineAnswers):
            sampler.publish(self._load_weights(base_model, model_path)[1])

    def _load_weights(self, base_model: str, path: str | None) -> tuple[LocalAnswers, Adapter | FullWeights | None]:
        """Return what samples from weights, with these in memory."""
        sampler = self.samplers[base_model]
        if path is None:
            return sampler, None
        if path in self.weights:
            self.weights.move_to_end(path)
            return sampler, self.weights[path]
        if path in self.full_samplers:
            self.full_samplers.move_to_end(path)
            return self.full_samplers[path], None
        folder, network = self.store.saved(SavedPath.parse(path)), self.networks[base_model]
        spec = self.store.read(folder / ADAPTER_SPEC, path)["adapter"]
        if spec is not None:
            assert network.switch is not None
            adapter_spec = AdapterSpec(**spec)
            adapter = Adapter(network.switch.choose_layers(adapter_spec), adapter_spec)
            adapter.load(load_file(folder / ADAPTER_WEIGHTS))
            return sampler, self._remember(path, adapter)
        tensors = load_file(folder / FULL_WEIGHTS)
        if isinstance(sampler, EngineAnswers):
            return sampler, self._remember(path, FullWeights(tensors))
        copy = load_trainable(self.config, base_model, network.path)
        with torch.no_grad():
            for name, parameter in copy.model.named_parameters():
                parameter.copy_(tensors[name])
        self.full_samplers[path] = LocalAnswers(copy, self.config.decode_rows)
        while len(self.full_samplers) > max(1, self.config.max_models // 4):
            self.full_samplers.popitem(last=False)
        return self.full_samplers[path], None

    def _remember(self, path: str, weights: WeightsT) -> WeightsT:
        """Keep weights in memory, and drop those that were used longest ago."""
        self.weights[path] = weights
        while len(self.weights) > self.config.max_models:
            self.weights.popitem(last=False)
        return weights
