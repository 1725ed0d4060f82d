"""Decode several tokens per row between two looks at the results, on a GPU by replaying a CUDA graph.

Decoding token by token, a small model's time on a GPU is spent launching kernels one by one and waiting for "has a row finished?".
A graph holds one token's kernels, from sampling to the next logits, and is launched as a whole. Rows that finish are only marked;
they are removed when enough of them have, and a new graph is captured for the others.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from policygrad.errors import NumericsError
from policygrad.models.loading import at_least_float32
from policygrad.samplers.local.sampling import check_finite_logits, draws_by_kernel, sample_tokens
from policygrad.samplers.local.shared_prefix import SharedPrefixCache
from policygrad.utils.out_of_memory import is_out_of_memory

if TYPE_CHECKING:
    from policygrad.samplers.local.sampler import DecodeLoop

_REFUSED = "_policygrad_cuda_graphs_refused"  # set on a model, so that it is tried once
STEPS = 16  # tokens per row between two looks


class DecodeAhead:
    """Decodes a fixed set of rows. All that changes from token to token changes in place, so that a graph can be replayed."""

    def __init__(self, loop: DecodeLoop, cache: SharedPrefixCache, logits: Tensor) -> None:
        """
        Args:
            logits: [N, V] of the rows' next tokens.
        """
        self.loop, self.cache = loop, cache
        self.captures = logits.device.type == "cuda" and not getattr(cache.model, _REFUSED, False)
        self.logits, self.active, self.count = logits.clone(), loop.active, loop.count.clone()
        self.finished = torch.zeros_like(self.active, dtype=torch.bool)
        self.broken = torch.zeros_like(self.finished)  # rows whose logits were no distribution
        self.graph: torch.cuda.CUDAGraph | None = None

    def run(self) -> None:
        """Decode `STEPS` tokens of each row, fewer if it is finished before.

        Raises:
            NumericsError: Logits that are not finite.
        """
        left = torch.where(self.finished, 0, self.loop.limit[self.active] - self.count)
        steps = min(STEPS, int(left.max()))
        if self.cache.reserve(STEPS):
            self.graph = None  # what it reads has moved
        if self.captures and self.graph is None:
            self.graph = self._capture()
        for _ in range(steps):
            if self.graph is None:
                self._step()
            else:
                with torch.cuda.device(self.logits.device):
                    self.graph.replay()
        self.cache.advance(steps)
        if bool(self.broken.any()):
            self._explain(int(self.broken.nonzero()[0]))

    def _capture(self) -> torch.cuda.CUDAGraph | None:
        """Return a graph of one step; None, with a warning, if the model does something that a graph cannot hold."""
        try:
            return capture_graph(self._step, self.logits.device)
        except CaptureError as error:
            warnings.warn(
                f"{type(self.cache.model).__name__} cannot be decoded by CUDA graphs ({error}); its kernels are launched one by "
                "one, which is slower. --sampler.no-cuda-graphs silences this.",
                stacklevel=2,
            )
            self.captures = False
            setattr(self.cache.model, _REFUSED, True)
            return None

    def _step(self) -> None:
        """Sample a token of each row that is not finished, store it, and compute the next logits. Nothing waits for the device."""
        loop, active, count, was_finished = self.loop, self.active, self.count, self.finished.clone()
        place = count.clamp(max=loop.tokens.shape[1] - 1)  # a finished row writes what is there already
        token, logp = sample_tokens(self.logits, loop.u[active, place], loop.sampling, kernels=loop.kernels)
        if loop.kernels and draws_by_kernel(self.logits, loop.sampling):
            scaled = logp  # tells as much, without another pass
        else:
            best, temperature = at_least_float32(self.logits.amax(-1)), loop.sampling.temperature
            scaled = best / temperature if temperature else best
        broken = ~scaled.isfinite() & ~was_finished
        self.broken |= broken
        loop.tokens[active, place] = torch.where(was_finished, loop.tokens[active, place], token)
        loop.logps[active, place] = torch.where(was_finished, loop.logps[active, place], logp.to(loop.logps.dtype))
        count += ~was_finished
        stops = torch.isin(token, loop.end)
        finishes = (stops | broken | (count >= loop.limit[active])) & ~was_finished
        loop.length[active] = torch.where(finishes, count, loop.length[active])
        loop.ended[active] |= finishes & stops
        self.finished |= finishes
        self.logits.copy_(self.cache.step(token, loop.first_position[active] + count - 1))

    def _explain(self, row: int) -> None:
        """Raise the error for a row whose logits were no distribution, by reading its tokens again."""
        model, ids = self.cache.model, self.loop.read_ids(int(self.active[row]), int(self.count[row]) - 1)
        logits = model(input_ids=ids[None].to(self.logits.device), use_cache=False).logits[0, -1:]
        check_finite_logits(logits, self.loop.sampling, model, lambda _: ids)
        raise NumericsError(
            "logits were not finite while decoding, and are when the text is read again. learner.dtype=fp32 has a larger range."
        )


class CaptureError(Exception):
    """Some operation cannot be part of a CUDA graph."""


def capture_graph(work: Callable[[], object], device: torch.device) -> torch.cuda.CUDAGraph:
    """Return a graph of what `work` does on a device. Raises CaptureError, with the reason."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.device(device):
        before, pool = torch.cuda.current_stream(device), torch.cuda.graph_pool_handle()
        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        try:
            # thread_local: a learner in another thread may allocate memory meanwhile
            with torch.cuda.graph(graph, pool, stream, capture_error_mode="thread_local"):
                work()
        except RuntimeError as error:
            # the end of a capture fails for what failed within, and leaves its stream current and the allocator filling its pool
            torch.cuda.set_stream(before)
            with suppress(RuntimeError):  # it ended orderly
                torch._C._cuda_endAllocateToPool(before.device_index, pool)
            if is_out_of_memory(error):
                raise
            cause = error.__context__ or error
            raise CaptureError(str(cause).strip().partition("\n")[0] or type(cause).__name__) from error
    return graph
