"""Time of a step's phases, computed from operations and bytes on a device's figures.

a pass      ( operations / peak rate + bytes / bandwidth ) / efficiency
operations  forward: 2 per weight of a matrix product and token, 4 per width of the heads and attention pair; backward: twice
            that; recomputed activations, and tokens that segments of a long text read twice: one more forward pass
bytes       outside matrix products: numbers that norms, positions, gates and residuals read and write
one token for each of n completions
            ( weights / bandwidth + n · ( keys and values / bandwidth + operations / peak rate ) )
            / efficiency + layers · overhead
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

from policygrad.planning.cost_model import (
    NF4_BYTES,
    SAMPLING_LOGIT_BYTES,
    AlgorithmCost,
    ParallelLayout,
    TokenCounts,
    Workload,
    max_concurrent_rows,
    reads_segments,
    windowed_pairs,
)
from policygrad.planning.hardware import PCIE_5, Device, Efficiency
from policygrad.planning.model_sizes import GRADIENT_BYTES, MASTER_BYTES
from policygrad.planning.shapes import ModelShape

BACKWARD_PASSES = 2  # cost of a backward pass, in forward passes
FROZEN_PASSES = 1  # what a backward pass saves at weights without gradients


@dataclass(frozen=True)
class StepTimes:
    """Seconds of each phase of a step, by itself."""

    generation: float  # from reading the first prompt to the end of the last completion
    scoring: float  # log π_old, log π_ref and values of all tokens
    learning: float  # forward and backward passes
    optimizer: float
    publishing: float  # until samplers have the new weights

    @property
    def update(self) -> float:
        """A learner's work in a step, without publishing."""
        return self.scoring + self.learning + self.optimizer

    @property
    def total(self) -> float:
        """All phases in sequence."""
        return self.generation + self.update + self.publishing


@dataclass(frozen=True)
class SamplerSpeed:
    """Seconds of a sampler: one token for each of n completions takes `fixed` + n · `per_completion`.

    The weights are read once per token, and every completion's cache once. At most `max_concurrency` completions are generated at
    a time; when one ends, the next starts.
    """

    fixed: float
    per_completion: float
    max_concurrency: int
    startup: float = 0.0  # seconds of a rollout before its first token

    def __call__(self, lengths: Sequence[int]) -> float:
        """Return the seconds of a rollout whose completions have these tokens, in the order of the requests."""
        waiting = [n for n in reversed(lengths) if n > 0]
        running = list[int]()  # the token count at which each will end
        position, seconds = 0, self.startup
        while waiting or running:
            while waiting and len(running) < self.max_concurrency:
                heapq.heappush(running, position + waiting.pop())
            tokens = running[0] - position
            seconds += tokens * (self.fixed + len(running) * self.per_completion)
            position = running[0]
            while running and running[0] == position:
                heapq.heappop(running)
        return seconds


@dataclass(frozen=True)
class TimeModel:
    """A roofline model of a transformer on devices with a given efficiency."""

    shape: ModelShape
    device: Device
    efficiency: Efficiency
    layout: ParallelLayout

    def operations(self, tokens: TokenCounts, passes: float, head: float, weight_passes: float | None = None) -> float:
        """Return the operations of `passes` forward passes through the layers and `head` through the output head.

        Args:
            weight_passes: Passes that multiply with weights, where attention has others; None = the same.
        """
        products = passes if weight_passes is None else weight_passes
        total = 0.0
        for layer in self.shape.layer_shapes:
            weights = 2 * layer.matmul_weights * tokens.layer_tokens
            attention = 4 * layer.pair_width * tokens.pairs(layer.window)
            total += layer.count * (products * weights + passes * attention)
        return total + head * 2 * self.shape.head_weights * tokens.head_tokens

    def bytes_moved(self, tokens: TokenCounts, passes: float, head: float) -> float:
        """Return the bytes that are read and written outside matrix products."""
        shape = self.shape
        numbers = sum(layer.count * layer.moved_numbers for layer in shape.layer_shapes)
        in_layers = passes * numbers * self.layout.bytes_per_number * tokens.layer_tokens
        return in_layers + head * 5 * 4 * shape.vocabulary * tokens.head_tokens

    def roofline_seconds(
        self, tokens: TokenCounts, passes: float, head: float, weight_passes: float | None = None
    ) -> float:
        """Return the seconds on one device at its published figures."""
        rate = self.device.rate(self.layout.bytes_per_number)
        operations = self.operations(tokens, passes, head, weight_passes)
        moved = self.bytes_moved(tokens, passes, head)
        if self.layout.base_bits is not None:  # four-bit weights are made larger for every micro-batch
            micro_batches = ceil(tokens.layer_tokens / self.layout.micro_tokens)
            moved += passes * micro_batches * self.shape.linear_parameters * self.unpacked_bytes
        return operations / rate + moved / self.device.bandwidth

    @property
    def unpacked_bytes(self) -> float:
        """Bytes that are read and written to use a weight of four bits in a matrix product, beside those of the product."""
        return NF4_BYTES + self.layout.bytes_per_number

    def _moving_seconds(self, moments: float, trained: float) -> float:
        """Return the seconds in which masters and moments that are in the host's memory come back and go again."""
        optimizer = self.layout.optimizer
        if optimizer.offload == "none":
            return 0.0
        masters = 0 if self.layout.only_adapters else trained * optimizer.master_bytes(self.layout.bytes_per_number, 1)
        return 2 * (moments + masters) / min(self.device.link, PCIE_5) / self.efficiency.link

    def count_read_twice(self, workload: Workload, algorithm: AlgorithmCost) -> float:
        """Return the fraction of the tokens that segments of long texts read twice."""
        if not reads_segments(self.shape, self.layout):
            return 0.0
        texts = [workload.prompt_tokens + length for length in workload.lengths]
        return sum(max(0, text - self.layout.micro_tokens) for text in texts) / sum(texts)

    def scoring_seconds(self, tokens: TokenCounts) -> float:
        """Return the seconds of a forward pass on one device."""
        return self.roofline_seconds(tokens, 1, 1) / self.efficiency.scoring / self.device.utilisation

    def training_seconds(self, tokens: TokenCounts, algorithm: AlgorithmCost, read_twice: float = 0.0) -> float:
        """Return the seconds of a forward and backward pass on one device.

        Args:
            read_twice: Fraction of the tokens (`count_read_twice`).
        """
        passes = 1 + BACKWARD_PASSES + (1 if self.layout.checkpointing else 0) + read_twice
        is_corrected = self.layout.max_staleness > 0 and algorithm.stale_scoring_passes > 0
        head = 1 + BACKWARD_PASSES + (1 if algorithm.recomputes_head or is_corrected else 0)
        reached = self.efficiency.training * self.device.utilisation
        if not self.layout.only_adapters:
            return self.roofline_seconds(tokens, passes, head) / reached
        # Frozen weights have no gradients, which are half of a backward pass's products. Adapters' own products are trained.
        seconds = self.roofline_seconds(tokens, passes, head - FROZEN_PASSES, passes - FROZEN_PASSES)
        adapters = 2 * passes * self.shape.count_adapters(self.layout.adapter_rank) * tokens.layer_tokens
        adapters *= self.shape.active_parameters / self.shape.parameters
        return (seconds + adapters / self.device.rate(self.layout.bytes_per_number)) / reached

    def sampler_speed(self, workload: Workload) -> SamplerSpeed:
        """Return the speed of one sampler: a token for n completions reads the weights once, and every completion's cache."""
        shape, tensor = self.shape, self.layout.tensor_parallel
        number, bandwidth = self.layout.bytes_per_number, self.device.bandwidth * tensor
        rate = self.device.rate(number) * tensor
        attended = workload.mean_attended_tokens
        cached = shape.cached_numbers(attended, engine=not self.layout.keeps_full_policy)
        read = cached * number + SAMPLING_LOGIT_BYTES * shape.vocabulary
        rows = ceil(workload.num_completions / self.layout.num_samplers)
        concurrent = max_concurrent_rows(shape, workload, self.layout, self.device)
        weights = (sum(x.count * x.read_weights(concurrent) for x in shape.layer_shapes) + shape.head_weights) * number
        if self.layout.base_bits is not None and not self.layout.is_disaggregated:
            weights += shape.linear_parameters * self.unpacked_bytes
        prompts, length = min(workload.prompts, ceil(rows / workload.samples_per_prompt)), workload.prompt_tokens
        within = {w: prompts * windowed_pairs(length, w) for w in shape.windows}
        context = TokenCounts(length * prompts, prompts * length * (length + 1) / 2, prompts, within)
        efficiency = self.efficiency
        reached, overhead = efficiency.sampling, efficiency.layer_overhead
        if not self.layout.keeps_full_policy:
            reached, overhead = efficiency.engine_sampling, efficiency.engine_overhead
        if tensor > 1:
            overhead += 2 * (efficiency.allreduce if tensor <= self.device.per_node else efficiency.allreduce_network)
        seen = {w: min(attended, w) for w in shape.windows}
        per_token = self.operations(TokenCounts(1, attended, 1, seen), 1, 1) / rate
        return SamplerSpeed(
            fixed=weights / bandwidth / reached + shape.num_layers * overhead,
            per_completion=(read / bandwidth + per_token) / reached,
            max_concurrency=concurrent,
            startup=self.scoring_seconds(context) / tensor,
        )

    def sampling_seconds(self, workload: Workload) -> float:
        """Return the seconds until the sampler with the most work is done."""
        speed, samplers = self.sampler_speed(workload), self.layout.num_samplers
        loads = {workload.lengths[i::samplers] for i in range(min(samplers, workload.num_completions))}
        heaviest = sorted(loads, key=lambda load: (max(load, default=0), sum(load)))[-4:]
        return max(map(speed, heaviest))

    def gather_seconds(self, size: float, devices: int) -> float:
        """Return the seconds until `size` bytes that are sharded over these devices are on each of them."""
        if devices < 2:
            return 0.0
        within = size / self.device.link
        machines = ceil(devices / self.device.per_node)
        between = size / (self.device.network * self.device.per_node) if machines > 1 else 0.0
        return max(within, between) / self.efficiency.link

    def sending_seconds(self, size: float) -> float:
        """Return the seconds until weights of `size` bytes that one learner has are in samplers on other devices.

        They are written to a folder and read from it, or sent to each sampler by itself, as fast as the learner's network allows.
        """
        if self.layout.weight_transport == "folder":
            return 2 * size / self.efficiency.storage
        samplers, network = self.layout.num_samplers, self.device.network * self.efficiency.link
        if self.layout.gpus <= self.device.per_node:
            return samplers * size / self.device.link / self.efficiency.link
        return samplers * size / min(samplers * self.efficiency.broadcast, network)

    def step_times(self, workload: Workload, algorithm: AlgorithmCost) -> StepTimes:
        """Return the times of a step. Learners share tokens evenly; communication counts only where it outlasts their passes."""
        shape, ranks = self.shape, self.layout.learning_devices
        tokens = workload.count_tokens(self.layout.shares_prompts, shape.windows)
        number, trains = self.layout.bytes_per_number, shape.parameters
        if self.layout.only_adapters:
            trains = shape.count_adapters(self.layout.adapter_rank)
        gather = self.gather_seconds(shape.parameters * number, ranks)
        reduce = self.gather_seconds(trains * GRADIENT_BYTES, ranks)
        per_update = algorithm.epochs * tokens.layer_tokens / algorithm.updates / ranks
        batches = algorithm.updates * ceil(per_update / self.layout.micro_tokens)  # every update has at least one
        scoring_batches = ceil(tokens.layer_tokens / ranks / self.layout.micro_tokens)
        # Experts are not gathered ahead: which of them are used is known when they are.
        experts = shape.routed_parameters / shape.parameters
        scoring = self.scoring_seconds(tokens) / ranks + experts * gather * scoring_batches
        scoring = max(scoring, gather * scoring_batches)
        read_twice = self.count_read_twice(workload, algorithm)
        training = algorithm.epochs * self.training_seconds(tokens, algorithm, read_twice) / ranks
        links = batches * (BACKWARD_PASSES * gather + reduce)
        training = max(training + experts * links, links)
        optimizer = self.layout.optimizer
        outer = 0.0 if self.layout.only_adapters else shape.around_parameters / shape.parameters
        moments = optimizer.count_moments(outer)
        state = 2 * (MASTER_BYTES + moments) + GRADIENT_BYTES + number
        trained = algorithm.updates * algorithm.trained_models * trains
        size = shape.parameters * number
        if self.layout.is_disaggregated:
            publishing = gather + self.sending_seconds(size)
        elif not self.layout.keeps_full_policy:  # to an engine that shares the devices
            publishing = gather + size / self.layout.tensor_parallel / self.efficiency.engine_load
        elif ranks == 1:
            publishing = (
                0.0 if number == MASTER_BYTES or self.layout.only_adapters else size * 3 / self.device.bandwidth
            )
        else:
            publishing = gather
        return StepTimes(
            generation=self.sampling_seconds(workload),
            scoring=algorithm.scoring_passes_at(self.layout.max_staleness) * scoring,
            learning=algorithm.trained_models * training,
            optimizer=trained * state / ranks / self.device.bandwidth + self._moving_seconds(trains * moments, trains),
            publishing=publishing,
        )
