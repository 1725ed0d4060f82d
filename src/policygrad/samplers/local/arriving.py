"""Decode requests that come while others are decoded: they join the batch at its next token, whatever they are sampled with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from policygrad.samplers.base import CompletionCallback, Generation, Request, SamplingParams
from policygrad.samplers.local.kv_cache import DecodeCache
from policygrad.samplers.local.sampler import DecodeLoop
from policygrad.samplers.stop_texts import Decode, StopDetector

Take = Callable[[], Sequence[Request]]
"""Returns the requests that have come since the last call."""
Finish = Callable[[Request, Generation], None]
"""Receives a request's completion as soon as it ends."""
_LEAST_FINISHED = 64  # finished requests whose places are not worth the copy of the others


@dataclass(frozen=True, eq=False)
class _Kind:
    """How requests are sampled that differ in nothing but their prompts."""

    sampling: SamplingParams
    end: Tensor
    detector: StopDetector | None


class ArrivingLoop(DecodeLoop):
    """A `DecodeLoop` that takes requests while it runs, and forgets those that are finished."""

    def __init__(
        self,
        requests: Sequence[Request],
        end: Tensor,
        pad: int,
        take: Take,
        finish: Finish,
        version: int,
        *,
        decode: Decode | None = None,
        **options: Any,
    ) -> None:
        """
        Args:
            requests: The first ones, at least one. None may need a mask.
            end: Ids of the end tokens of requests that have none of their own.
            decode: As in `LocalSampler`.
            options: As in `DecodeLoop`.
        """
        super().__init__(requests, end, pad, None, **options)
        self.requests: list[Request] = list(requests)
        self.pad, self.take, self.finish, self.version, self.decode = pad, take, finish, version, decode
        self.default_end, self.may_run_ahead = end, self.decodes_ahead
        self.arrived = list[Request]()
        self.kinds = dict[tuple[object, ...], _Kind]()
        self.kind_of = [self._find_kind(r) for r in requests]
        """The kind of each request."""
        self.grouped: tuple[Tensor, list[tuple[_Kind, Tensor]]] = self.active, []
        """The active rows, and which of them are of each kind."""
        self._choose_pace()

    def _find_kind(self, request: Request) -> _Kind:
        key = (request.sampling, request.stop)
        if key not in self.kinds:
            stop, texts, detector = request.stop, request.sampling.stop, None
            end = self.default_end
            if stop is not None:
                end = torch.tensor(sorted(stop), dtype=torch.int64, device=self.device)
            if texts and self.decode is not None:
                detector = StopDetector(texts, self.decode)
            self.kinds[key] = _Kind(request.sampling, end, detector)
        return self.kinds[key]

    def has_arrivals(self) -> bool:
        self.arrived += self.take()
        return bool(self.arrived)

    def admit(self) -> None:
        if not self.has_arrivals():
            return
        self._forget_finished()
        new, self.arrived = self.arrived, []
        before = len(self.requests)
        self.requests += new
        limit = torch.tensor([r.max_tokens for r in new], device=self.device)
        self._resize(max(self.tokens.shape[1], int(limit.max())), len(self.requests))
        self.limit = torch.cat([self.limit, limit])
        self.length = torch.cat([self.length, limit])
        lengths = torch.tensor([len(r.prompt_ids) for r in new], device=self.device)
        self.first_position = torch.cat([self.first_position, lengths])
        self.kind_of += map(self._find_kind, new)
        self.queue.extend(self._queue_up(range(before, len(self.requests))))
        if self.texts is not None:
            waiting = {id(p): p for group in self.queue for p in [self.requests[group[0]].prompt_ids]}
            self.texts.plan(list(waiting.values()))
        self._choose_pace()

    def _choose_pace(self) -> None:
        """Look at the results every few tokens only, where that is possible, and no two kinds are sampled at once."""
        used = {self.kind_of[i] for i in (~self.is_reported).nonzero().squeeze(1).tolist()}
        if len(used) == 1:
            self._use(next(iter(used)))
        self.decodes_ahead = self.may_run_ahead and len(used) == 1 and self.detector is None

    def _use(self, kind: _Kind) -> None:
        self.sampling, self.end, self.detector = kind.sampling, kind.end, kind.detector

    def _resize(self, width: int, rows: int) -> None:
        """Give `rows` requests room for `width` tokens; those that are there keep theirs."""
        more, columns = rows - len(self.tokens), width - self.tokens.shape[1]
        self.tokens = F.pad(self.tokens, (0, columns, 0, more), value=self.pad)
        self.logps, self.u = (F.pad(x, (0, columns, 0, more)) for x in (self.logps, self.u))
        self.ended, self.is_reported = (F.pad(x, (0, more), value=False) for x in (self.ended, self.is_reported))

    def _forget_finished(self) -> None:
        """Drop what is kept of finished requests, once they are many."""
        count = int(self.is_reported.sum())
        if count < max(_LEAST_FINISHED, len(self.requests) // 2):
            return
        kept = (~self.is_reported).nonzero().squeeze(1)
        place = torch.zeros_like(self.length)
        place[kept] = torch.arange(len(kept), device=self.device)
        self.requests = [self.requests[i] for i in kept.tolist()]
        width = max((r.max_tokens for r in self.requests), default=1)
        self.tokens, self.logps, self.u = (x[kept, :width] for x in (self.tokens, self.logps, self.u))
        self.limit, self.length, self.first_position = (x[kept] for x in (self.limit, self.length, self.first_position))
        self.ended, self.is_reported = self.ended[kept], self.is_reported[kept]
        self.active, places = place[self.active], place.tolist()
        self.queue = type(self.queue)([places[i] for i in group] for group in self.queue)
        self.kind_of = [self.kind_of[i] for i in kept.tolist()]
        self.kinds = {key: kind for key, kind in self.kinds.items() if kind in set(self.kind_of)}

    def _draw(self, cache: DecodeCache, logits: Tensor, active: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
        if self.grouped[0] is not active:
            rows = dict[_Kind, list[int]]()
            for row, index in enumerate(active.tolist()):
                rows.setdefault(self.kind_of[index], []).append(row)
            self.grouped = active, [(kind, torch.tensor(of, device=self.device)) for kind, of in rows.items()]
        if len(self.grouped[1]) == 1:
            self._use(self.grouped[1][0][0])
            return super()._draw(cache, logits, active, count)
        token, stops = torch.empty_like(active), torch.zeros_like(active, dtype=torch.bool)
        for kind, of_kind in self.grouped[1]:
            self._use(kind)
            token[of_kind], stops[of_kind] = super()._draw(cache, logits[of_kind], active[of_kind], count[of_kind])
        return token, stops

    def _report(self, finished: Tensor, callback: CompletionCallback | None) -> None:
        super()._report(finished, callback)
        if not len(finished):
            return
        lengths, ended = self.length[finished].tolist(), self.ended[finished].tolist()
        tokens, logps = self.tokens[finished].cpu(), self.logps[finished].cpu()
        for i, n, end, row, logp in zip(finished.tolist(), lengths, ended, tokens, logps, strict=True):
            generation = Generation(row[:n].clone(), logp[:n].clone(), "stop" if end else "length", self.version)
            self.finish(self.requests[i], generation)
        self._choose_pace()
