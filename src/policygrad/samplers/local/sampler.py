"""The sampler of this process, for any `AutoModelForCausalLM`: each distinct prompt is read once, and finished rows leave the
batch."""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from policygrad.core.batch import SamplingMask
from policygrad.core.metrics import Metrics, Sum
from policygrad.core.precision import move, widest_dtype
from policygrad.models.tokenizer import Tokenizer, pad_token_id
from policygrad.samplers.base import CompletionCallback, Generation, Request, RowsCallback, SamplingParams
from policygrad.samplers.local.kv_cache import (
    COMPACT_FRACTION,
    DecodeCache,
    PlainDecodeCache,
    PrefillCounts,
    first_positions,
)
from policygrad.samplers.local.sampling import check_finite_logits, log_probabilities, philox_uniforms, sample_tokens
from policygrad.samplers.local.shared_prefix import (
    SharedPrefixCache,
    supports_appending,
    supports_continuing,
    supports_continuing_states,
    supports_padding,
    supports_shared_prefix,
)
from policygrad.samplers.stop_texts import Decode, StopDetector
from policygrad.utils.out_of_memory import MemoryBudget
from policygrad.weight_sync.base import PublishedWeights, copy_weights_

if TYPE_CHECKING:
    from policygrad.models.moe_routing import Routing
    from policygrad.samplers.local.arriving import Finish, Take
    from policygrad.samplers.local.state_cache import StateCache
    from policygrad.samplers.local.text_cache import TextCache

SHORT_PROMPT = 64
"""Tokens up to which a prompt is too short for its beginning to be looked for in others, unless they are a conversation's."""


class LocalSampler:
    """Decodes with the model that it is given. If that is the learner's own model, `update` copies nothing."""

    _callback: CompletionCallback | None = None
    is_abandoned: Callable[[Request], bool] | None = None
    """Asked every `ABANDONED_STEPS` tokens, of each request: nobody waits for it any more, so that it may end where it is."""

    def __init__(
        self,
        model: nn.Module,
        end: frozenset[int],
        pad: int,
        routing: Routing | None = None,
        *,
        cuda_graphs: bool = True,
        before_pass: RowsCallback | None = None,
        decode: Decode | None = None,
        kernels: str = "off",
    ) -> None:
        """
        Args:
            end: Ids of the end tokens.
            decode: Returns the text of tokens, in which `SamplingParams.stop` is looked for. None = completions run on after a stop
                text, and whoever asked cuts them.
            routing: The model's, to record the experts in `Generation.routed_experts`.
            cuda_graphs: On a GPU, capture each token's kernels and launch them together.
            kernels: auto = decode by Triton's kernels on a CUDA GPU where Triton is installed; off = by plain torch.
            before_pass: Called before each forward pass whose rows belong to other requests than those of the pass before, for
                a model that computes something else for some of them.
        """
        self.model, self.pad, self.version, self.routing = model, pad, 0, routing
        self.device = next(model.parameters()).device
        self.cuda_graphs, self.kernels = cuda_graphs, kernels
        self.uses_kernels = kernels == "auto" and self.device.type == "cuda" and find_spec("triton") is not None
        """Until the model's test, which may refuse them."""
        self.caches_texts = True  # until a later call, those that may be continued
        self.before_pass, self.decode = before_pass, decode
        self.memory = MemoryBudget("--decode-rows", "completions", self.device)
        """What limits the completions that are decoded at a time, once memory has run out."""
        self.decodes_ahead = cuda_graphs and self.device.type == "cuda" and routing is None and before_pass is None
        self.end = torch.tensor(sorted(end), device=self.device)
        self._shares_prefixes: bool | None = None  # tested at the first request, when the model is complete
        self._needs_equal_lengths = self._shares_at_attention = self._appends_rows = False  # likewise
        self._continues: bool | None = None  # likewise, at the first that may be continued
        self._texts: TextCache | StateCache | None = None
        """What is cached of texts that prompts may begin with, with the current weights."""
        self.prefill = PrefillCounts()  # since the last update

    @classmethod
    def from_tokenizer(
        cls,
        model: nn.Module,
        tokenizer: Tokenizer,
        routing: Routing | None = None,
        *,
        cuda_graphs: bool = True,
        kernels: str = "off",
    ) -> LocalSampler:
        """Return a sampler with the tokenizer's end tokens."""
        end, pad = tokenizer.end_ids, pad_token_id(tokenizer)
        return cls(model, end, pad, routing, cuda_graphs=cuda_graphs, decode=tokenizer.decode, kernels=kernels)

    async def update(self, weights: PublishedWeights) -> Metrics:
        """Copy the weights, unless they are this model's own tensors."""
        copy_weights_(weights.tensors, self.model)
        self.version, self._texts = weights.version, None
        counts, self.prefill = self.prefill, PrefillCounts()
        if not counts.shared:
            return {}
        read = {"sampler/prefill_tokens": counts.read, "sampler/prefill_shared": counts.shared}
        return {name: Sum(float(n)) for name, n in read.items()}

    def clear_texts(self) -> None:
        """Free the cached texts: no prompt will begin with them."""
        self._texts = None

    @contextmanager
    def on_completion(self, callback: CompletionCallback) -> Iterator[None]:
        self._callback = callback
        try:
            yield
        finally:
            self._callback = None

    async def generate(self, requests: Sequence[Request]) -> list[Generation]:
        """Return one generation per request, in order. Each depends on its request and the weights, not on the rest of the batch
        (up to the rounding of matrix products of another shape)."""
        generations: dict[int, Generation] = {}
        recording = nullcontext if self.routing is None else self.routing.recording
        if requests and self._shares_prefixes is None:
            with recording():
                self._test_model()
        self._texts = self._open_texts(requests)
        for kind in dict.fromkeys(map(_decoded_together, requests)):
            indices = [i for i, r in enumerate(requests) if _decoded_together(r) == kind]
            with recording():
                completed = self._generate_alike([requests[i] for i in indices])
            generations |= zip(indices, completed, strict=True)
        if not (self.caches_texts and any(request.continues for request in requests)):
            self._texts = None
        return [generations[i] for i in range(len(requests))]

    def generate_arriving(self, requests: Sequence[Request], take: Take, finish: Finish) -> None:
        """Sample requests, and those that come meanwhile, which join the batch as soon as their prompts are read; return when all
        are finished. The completions are those of `generate`.

        Args:
            take: Called before each token (on a GPU before every `cuda_graphs.STEPS`); returns what has come.
            finish: Called with each completion when it ends.
        """
        from policygrad.samplers.local.arriving import ArrivingLoop

        if self.routing is not None or self.before_pass is not None:
            raise ValueError("requests join a batch only where no experts are recorded and all use the same weights")
        if self._shares_prefixes is None:
            self._test_model()
        self._texts = self._open_texts(requests)
        loop = ArrivingLoop(
            requests,
            self.end,
            self.pad,
            take,
            finish,
            self.version,
            decode=self.decode,
            decodes_ahead=self.decodes_ahead and bool(self._shares_prefixes),
            texts=None if self._shares_at_attention else self._texts,
            memory=self.memory,
            is_abandoned=self.is_abandoned,
            kernels=self.uses_kernels,
        )
        self._run(loop)

    def _test_model(self) -> None:
        """Find out how this model's prompts are read and kept, and whether the kernels compute what it does."""
        for kernels in (True, False) if self.uses_kernels else (False,):
            self._shares_prefixes = supports_shared_prefix(self.model, self.pad, kernels=kernels)
            if not self._shares_prefixes:
                self._shares_at_attention = supports_shared_prefix(
                    self.model, self.pad, at_attention=True, kernels=kernels
                )
                self._shares_prefixes = self._shares_at_attention
            if self._shares_prefixes:
                break
        if self.uses_kernels and self._shares_prefixes and not kernels:
            warnings.warn(
                f"{type(self.model).__name__} is decoded without Triton's kernels, which is slower: they cannot be compiled here, "
                "or compute something else. --sampler.kernels off silences this.",
                stacklevel=2,
            )
        self.uses_kernels = kernels and bool(self._shares_prefixes)
        if not self._shares_prefixes:
            self._needs_equal_lengths = not supports_padding(self.model, self.pad)
            self._appends_rows = not self._needs_equal_lengths and supports_appending(self.model, self.pad)

    def _open_texts(self, requests: Sequence[Request]) -> TextCache | StateCache | None:
        """Return what is cached of texts, prepared for the prompts of these requests; None = nothing is, nor is to be."""
        texts, keeps = self._texts, self.caches_texts and any(request.continues for request in requests)
        if texts is not None and not texts.is_valid_for(self.model):
            texts = None
        prompts = list({id(r.prompt_ids): r.prompt_ids for r in requests if not r.media}.values())
        can_share = self.routing is None and self.before_pass is None and not self._needs_equal_lengths
        if not can_share or not (keeps or sum(len(prompt) > SHORT_PROMPT for prompt in prompts) > 1):
            return texts if can_share else None
        from policygrad.samplers.local.beginnings import may_share

        if texts is None and not keeps and not may_share(prompts):
            return None
        if self._continues is None:
            if self._shares_prefixes:
                self._continues = supports_continuing(self.model, self.pad, at_attention=self._shares_at_attention)
            else:
                self._continues = supports_continuing_states(self.model, self.pad)
        if not self._continues:
            return None
        if texts is None:
            if self._shares_prefixes:
                from policygrad.samplers.local.text_cache import TextCache

                texts = TextCache(self.model, self.prefill)
            else:
                from policygrad.samplers.local.state_cache import StateCache

                texts = StateCache(self.model, self.prefill)
        texts.counts, texts.keeps_prompts = self.prefill, keeps
        texts.plan(prompts)
        return texts

    def _generate_alike(self, requests: Sequence[Request]) -> list[Generation]:
        """Return the generations of requests that are decoded together; of fewer at a time if memory runs out."""
        first = requests[0]
        stop, texts_to_stop_at = first.stop, first.sampling.stop if self.decode is not None else ()
        decodes_ahead = (
            self.decodes_ahead and bool(self._shares_prefixes) and not (first.needs_mask or texts_to_stop_at)
        )
        detector = None
        if texts_to_stop_at and self.decode is not None:
            detector = StopDetector(texts_to_stop_at, self.decode)
        end = self.end if stop is None else torch.tensor(sorted(stop), dtype=torch.int64, device=self.device)
        loop = DecodeLoop(
            requests,
            end,
            self.pad,
            self.routing,
            decodes_ahead,
            None if self._shares_at_attention else self._texts,
            self.before_pass,
            detector,
            self.memory,
            self.is_abandoned,
            kernels=self.uses_kernels,
        )
        return self._run(loop)

    def _run(self, loop: DecodeLoop) -> list[Generation]:
        """Run a loop; with fewer completions at a time if memory runs out."""

        def work() -> list[Generation]:
            cache = self._make_cache()
            return loop.run(cache, self.version, self._callback)

        def undo() -> None:
            self._texts = loop.texts = None  # they save time, not memory
            loop.restart()

        return self.memory.run(work, undo)

    def _make_cache(self) -> DecodeCache:
        """Return an empty cache of the kind that this model decodes with."""
        texts: Any = self._texts
        in_passes = self.routing is None and self.before_pass is None  # both count on one for all rows
        if self._shares_prefixes:
            at_attention = self._shares_at_attention
            return SharedPrefixCache(
                self.model,
                self.pad,
                texts,
                at_attention=at_attention,
                counts=self.prefill,
                kernels=self.uses_kernels,
                in_passes=in_passes,
            )
        return PlainDecodeCache(
            self.model, self.pad, self._needs_equal_lengths, texts, self.prefill, in_passes and self._appends_rows
        )


def _decoded_together(request: Request) -> tuple[object, ...]:
    """Return what requests that are decoded together have in common."""
    return request.sampling, request.needs_mask, request.stop


ABANDONED_STEPS = 16
_REFILL_FRACTION = 0.25
"""Fraction of the slots that must be free before prompts are read while other rows are active: reading few at a time is slow."""


class DecodeLoop:
    """Decodes requests with the same sampling parameters. A row takes a slot, leaves it when its completion is finished, and the
    next prompts of the queue take the free slots."""

    def __init__(
        self,
        requests: Sequence[Request],
        end: Tensor,
        pad: int,
        routing: Routing | None,
        decodes_ahead: bool = False,
        texts: TextCache | StateCache | None = None,
        before_pass: RowsCallback | None = None,
        detector: StopDetector | None = None,
        memory: MemoryBudget | None = None,
        is_abandoned: Callable[[Request], bool] | None = None,
        *,
        kernels: bool = False,
    ) -> None:
        """
        Args:
            kernels: Draw by Triton's kernel.
            is_abandoned: As in `LocalSampler`.
            memory: Limits the rows further, once memory has run out.
            decodes_ahead: Look at the results every `cuda_graphs.STEPS` tokens only.
            texts: Takes the texts of requests that may be continued.
            before_pass: As in `LocalSampler`.
            detector: Says which completions have reached a stop text.
        """
        self.detector, self.is_abandoned, self.num_steps = detector, is_abandoned, 0
        self.decodes_ahead, self.texts, self.before_pass = decodes_ahead, texts, before_pass
        self.kernels = kernels
        self.requests, self.end, self.device = requests, end, end.device
        self.sampling, rows = requests[0].sampling, len(requests)
        self.limit = torch.tensor([r.max_tokens for r in requests], device=self.device)
        self.first_position = torch.tensor([len(r.prompt_ids) for r in requests], device=self.device)
        """[requests] position of the first sampled token."""
        width = max(r.max_tokens for r in requests)
        self.tokens = torch.full((rows, width), pad, device=self.device)
        self.logps = torch.zeros(rows, width, device=self.device)
        self.u = torch.empty(rows, width, dtype=widest_dtype(self.device), device=self.device)
        self.length = self.limit.clone()
        self.ended = torch.zeros(rows, dtype=torch.bool, device=self.device)
        self.is_reported = torch.zeros(rows, dtype=torch.bool, device=self.device)
        """Completions that a restart leaves as they are."""
        self.memory = memory or MemoryBudget("--decode-rows", "completions")
        self.slots = self.memory.cap(self.sampling.decode_rows)  # rows at a time
        self.experts = RoutedExpertsRecorder(routing, requests, width)
        self.masks: list[list[Tensor]] | None = [[] for _ in requests] if requests[0].needs_mask else None
        """By request, the tokens that top-k and top-p left at each token."""
        self.queue = self._queue_up(range(rows))
        self.active = self.first_position.new_empty(0)  # [N]: index of each active row's request
        self.announced: Tensor | None = None  # `active` as `before_pass` was told
        self.count = self.first_position.new_empty(0)  # [N]: tokens sampled by each active row

    def _queue_up(self, indices: Iterable[int]) -> deque[list[int]]:
        """Return requests in groups with one prompt. Once memory has run out a group has at most `slots` rows."""
        groups: dict[int, list[int]] = {}
        for i in indices:
            groups.setdefault(id(self.requests[i].prompt_ids), []).append(i)
        size = len(self.requests) if self.memory.limit is None else self.slots
        parts = [group[k : k + size] for group in groups.values() for k in range(0, len(group), size)]
        # shortest prompts first, so that those read together need little padding
        return deque(sorted(parts, key=self._length))

    def restart(self) -> None:
        """Begin anew with the completions that have not been reported: with the same keys they become the same again."""
        self.slots = self.memory.cap(self.sampling.decode_rows)
        left = (~self.is_reported).nonzero().squeeze(1)
        self.queue = self._queue_up(left.tolist())
        self.active, self.count, self.announced = self.active[:0], self.count[:0], None
        self.length[left], self.ended[left] = self.limit[left], False
        self.experts.forget(left.cpu())
        if self.masks is not None:
            for i in left.tolist():
                self.masks[i] = []

    @torch.no_grad()
    def run(self, cache: DecodeCache, version: int, callback: CompletionCallback | None = None) -> list[Generation]:
        """Return the generations in the order of the requests."""
        logits: Tensor | None = None
        while self.queue or len(self.active) or self.has_arrivals():
            self.admit()
            # take the next prompts for which there are slots: at most so many rows, or one prompt
            slots, occupied, groups = self.slots, len(self.active), list[list[int]]()
            if not occupied or (cache.supports_refill and slots - occupied >= _REFILL_FRACTION * slots):
                while self.queue and (occupied == 0 or occupied + len(self.queue[0]) <= slots):
                    if groups and cache.needs_equal_lengths and self._length(groups[0]) != self._length(self.queue[0]):
                        break
                    groups.append(self.queue.popleft())
                    occupied += len(groups[-1])
            self.memory.begin(occupied, occupied)
            if groups:  # read each prompt once, and add the rows of its requests
                new = [i for group in groups for i in group]
                rows, max_tokens = torch.tensor(new, device=self.device), max(self.requests[i].max_tokens for i in new)
                repeats = torch.tensor([len(group) for group in groups], device=self.device)
                prompts = [self.requests[group[0]].prompt_ids for group in groups]
                if self.before_pass is not None:
                    self.before_pass([self.requests[group[0]] for group in groups])
                    self.announced = None
                media = [self.requests[group[0]].media for group in groups]
                new_logits, width = cache.read(prompts, repeats, max_tokens, media)
                if any(media):
                    first = torch.tensor(first_positions(cache.model, prompts, media), device=self.device)
                    self.first_position[rows] = first.repeat_interleave(repeats)
                self.experts.add_prompts(new, repeats, width)
                u = philox_uniforms([self.requests[i].key for i in new], max_tokens)
                self.u[rows, :max_tokens] = move(u, self.device)
                self.active = torch.cat([self.active, rows])
                self.count = torch.cat([self.count, torch.zeros_like(rows)])
                logits = new_logits if logits is None else torch.cat([logits, new_logits])
            assert logits is not None  # requests are due as soon as no row is active
            if self.decodes_ahead and isinstance(cache, SharedPrefixCache):
                logits = self._run_ahead(cache, logits, callback)
                continue
            sampled = self.active
            self.num_steps += 1
            if self.num_steps % ABANDONED_STEPS == 0:
                self._end_abandoned(self.active, self.count)
            token = self._sample(cache, logits)
            logits = None
            self._report(sampled[torch.isin(sampled, self.active, invert=True)], callback)
            if len(self.active):
                self._announce_rows(cache)
                logits = cache.step(token, self.first_position[self.active] + self.count - 1)
                self.experts.add_step(self.active, self.count - 1, cache.rows)
        lengths = self.length.tolist()
        within = torch.arange(self.tokens.shape[1], device=self.device) < self.length[:, None]
        completions, logps = (torch.split(x[within].cpu(), lengths) for x in (self.tokens, self.logps))
        ends = zip(completions, logps, lengths, self.ended.tolist(), strict=True)
        masks: list[SamplingMask | None] = [None] * len(lengths)
        if self.masks is not None:
            counts = [torch.tensor([len(x) for x in ids], dtype=torch.int32) for ids in self.masks]
            masks = [SamplingMask(torch.cat(ids), n) for ids, n in zip(self.masks, counts, strict=True)]
        return [
            Generation(ids, p, "stop" if end else "length", version, self.experts.for_row(i, n), masks[i])
            for i, (ids, p, n, end) in enumerate(ends)
        ]

    def admit(self) -> None:
        """Queue requests that have come meanwhile: here none do."""

    def has_arrivals(self) -> bool:
        """Return whether `admit` would queue something."""
        return False

    def _end_abandoned(self, active: Tensor, count: Tensor) -> None:
        """Let completions that nobody waits for end with their next token; active, count: [N] as in the loop."""
        if self.is_abandoned is None:
            return
        for index, sampled in zip(active.tolist(), count.tolist(), strict=True):
            if self.is_abandoned(self.requests[index]):
                self.limit[index] = min(sampled + 1, int(self.limit[index]))

    def _length(self, group: Sequence[int]) -> int:
        """Return the length of the prompt that these requests share."""
        return len(self.requests[group[0]].prompt_ids)

    def _announce_rows(self, cache: DecodeCache) -> None:
        """Tell `before_pass` which request each row of the next step belongs to; rows that are finished belong to any."""
        if self.before_pass is None or self.announced is self.active:
            return
        active = self.active.tolist()
        rows = [self.requests[active[0]]] * cache.batch_size
        for row, index in zip(cache.rows.tolist(), active, strict=True):
            rows[row] = self.requests[index]
        self.before_pass(rows)
        self.announced = self.active

    def _run_ahead(self, cache: SharedPrefixCache, logits: Tensor, callback: CompletionCallback | None) -> Tensor:
        """Decode until rows have to be removed or can be added; return the logits [N, V] of the remaining ones."""
        from policygrad.samplers.local.cuda_graphs import DecodeAhead

        decoder, rows = DecodeAhead(self, cache, logits), len(self.active)
        reported = torch.zeros_like(decoder.finished)
        while True:
            decoder.run()
            self._report(decoder.active[decoder.finished & ~reported], callback)
            reported = decoder.finished.clone()
            self._end_abandoned(decoder.active, decoder.count)
            remaining = rows - int(reported.sum())
            slots = self.slots - remaining
            has_room = self.queue and slots >= max(_REFILL_FRACTION * self.slots, len(self.queue[0]))
            if remaining < COMPACT_FRACTION * rows or has_room or self.has_arrivals():
                self._cache_texts(cache, reported)
                order = cache.keep_rows((~reported).nonzero().squeeze(1))
                self.active, self.count = decoder.active[order], decoder.count[order]
                return decoder.logits[order]

    def _report(self, finished: Tensor, callback: CompletionCallback | None) -> None:
        """Pass the completions of these requests on."""
        self.is_reported[finished] = True
        if callback is not None:
            lengths = self.length[finished].tolist()
            callback(
                [
                    (self.requests[i], tokens[:n])
                    for i, tokens, n in zip(finished.tolist(), self.tokens[finished].cpu(), lengths, strict=True)
                ]
            )

    def _cache_texts(self, cache: DecodeCache, finished: Tensor) -> None:
        """Keep the texts of finished rows that may be continued. The last token of each has not been read by the model."""
        if self.texts is None or not isinstance(cache, SharedPrefixCache):
            return
        texts: Any = self.texts
        for row in finished.nonzero().squeeze(1).tolist():
            index = int(self.active[row])
            if self.requests[index].continues and not self.requests[index].media:
                read = int(self.length[index]) - 1
                texts.add(self.read_ids(index, read), partial(cache.copy_text, row, read))

    def read_ids(self, index: int, sampled: int) -> Tensor:
        """Return the ids [P + t] that a request's row has read."""
        return torch.cat([self.requests[index].prompt_ids, self.tokens[index, :sampled].cpu()])

    def _sample(self, cache: DecodeCache, logits: Tensor) -> Tensor:
        """Sample one token per active row and remove finished rows; return the tokens [N] of the remaining ones."""
        active, count = self.active, self.count
        token, stops = self._draw(cache, logits, active, count)
        count = count + 1
        finished = stops | (count >= self.limit[active])
        if finished.any():
            self.length[active[finished]], self.ended[active[finished]] = count[finished], stops[finished]
            self._cache_texts(cache, finished)
            order = cache.keep_rows((~finished).nonzero().squeeze(1))
            active, count, token = active[order], count[order], token[order]
        self.active, self.count = active, count
        return token

    def _draw(self, cache: DecodeCache, logits: Tensor, active: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
        """Sample and store a token for each of the rows `active` [N], of which `count` [N] are sampled.

        Returns:
            The tokens [N], and which of them end the completion.
        """
        check_finite_logits(
            logits, self.sampling, cache.model, lambda row: self.read_ids(int(active[row]), int(count[row]))
        )
        sampling = self.sampling
        if self.masks is not None:
            logits, sampling = log_probabilities(logits, sampling), SamplingParams()
            left = SamplingMask.of(logits > -torch.inf)
            for i, ids in zip(active.tolist(), torch.split(left.ids.cpu(), left.counts.tolist()), strict=True):
                self.masks[i].append(ids)
        token, logp = sample_tokens(logits, self.u[active, count], sampling, kernels=self.kernels)
        self.tokens[active, count], self.logps[active, count] = token, logp.to(self.logps.dtype)
        stops = torch.isin(token, self.end)
        if self.detector is not None:
            stops |= self._reach_stop_text(token, active, count + 1)
        return token, stops

    def _reach_stop_text(self, token: Tensor, active: Tensor, count: Tensor) -> Tensor:
        """Return [N] bool: the rows whose last token, `token`, has completed a stop text."""
        assert self.detector is not None
        reached = torch.zeros(len(token), dtype=torch.bool)
        for row in [row for row, last in enumerate(token.tolist()) if self.detector.may_complete(last)]:
            reached[row] = self.detector.has_stopped(self.tokens[active[row], : count[row]].cpu())
        return reached.to(self.device)


class RoutedExpertsRecorder:
    """Collects the experts that tokens were routed to, forward pass by forward pass. Does nothing without a routing."""

    def __init__(self, routing: Routing | None, requests: Sequence[Request], max_tokens: int) -> None:
        self.routing, self.requests, self.max_tokens = routing, requests, max_tokens
        self.prompts: dict[int, Tensor] = {}  # by request, [P, layers, k]
        self.completions = torch.empty(0)  # [requests, max_tokens, layers, k], -1 where no token was read

    def forget(self, rows: Tensor) -> None:
        """Drop what was recorded of these requests' completions, which are sampled anew."""
        if self.routing is not None:
            for router in self.routing.routers:
                router.recorded = []
            if len(self.completions):
                self.completions[rows] = -1

    def add_prompts(self, rows: Sequence[int], repeats: Tensor, width: int) -> None:
        """Record the prompts of these requests, each read once and left-padded to `width`."""
        if self.routing is None:
            return
        recorded = self.routing.pop_recorded()
        prompts = recorded.reshape(len(repeats), width, *recorded.shape[1:]).repeat_interleave(repeats.cpu(), 0)
        for i, prompt in zip(rows, prompts, strict=True):
            self.prompts[i] = prompt[width - len(self.requests[i].prompt_ids) :]
        if not len(self.completions):
            self.completions = prompts.new_full((len(self.requests), self.max_tokens, *prompts.shape[2:]), -1)

    def add_step(self, rows: Tensor, count: Tensor, cache_rows: Tensor) -> None:
        """Record token number `count` of these requests, read at `cache_rows` of the forward pass."""
        if self.routing is not None:
            self.completions[rows.cpu(), count.cpu()] = self.routing.pop_recorded()[cache_rows.cpu()]

    def for_row(self, i: int, length: int) -> Tensor | None:
        """Return the experts [P + length, layers, k] of one completion."""
        return None if self.routing is None else torch.cat([self.prompts[i], self.completions[i, :length]])
