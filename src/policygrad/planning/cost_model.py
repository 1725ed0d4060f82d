"""How a run is spread over devices, and in what precision."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import ceil

from policygrad.errors import ConfigError
from policygrad.planning.hardware import Device, Efficiency
from policygrad.planning.model_shapes import ModelShape
from policygrad.planning.pipeline import SamplerSpeed

DTYPE_BYTES = {"bf16": 2, "fp32": 4}
"""Bytes of a number."""
MICRO_TOKENS = 16384
"""Tokens of a micro-batch on a GPU, as `--learner.micro-tokens` leaves it."""
MICRO_TOKENS_CPU = 1024


@dataclass(frozen=True)
class ParallelLayout:
    """Learners spread weights, gradients and moments among them (FSDP2); samplers have the policy whole, or a share of each layer.

    Raises:
        ConfigError: what does not go together.
    """

    gpus: int
    samplers: int = 0
    """Devices of these that only draw; 0 = all draw and learn, in turns."""
    tensor_parallel: int = 1
    """Devices that a sampler's layers are spread over (tensor parallel)."""
    max_staleness: int = 0
    """Rollouts that the samplers may be ahead, where they are apart."""
    dtype: str = "bf16"
    """That is computed in; masters, gradients and moments are float32."""
    checkpointing: bool = False
    """Activations are computed once more on the way back (`--learner.gradient-checkpointing`)."""
    micro_tokens: int = MICRO_TOKENS
    """Of a forward and backward pass of a learner; a text is never split."""
    decode_rows: int = 512
    """Completions that one sampler draws at once, at most."""
    shares_prompts: bool = True
    """A prompt is computed once for its group, as this library does."""
    keeps_full_policy: bool = True
    """A learner has the policy whole beside its share, to draw with, as this library's own sampler does; False = an engine draws,
    which alone has it."""

    def __post_init__(self) -> None:
        for name in ("gpus", "tensor", "micro_tokens", "decode_rows"):
            if getattr(self, name) < 1:
                raise ConfigError(f"--{name.replace('_', '-')} must be at least 1, not {getattr(self, name)}")
        if self.dtype not in DTYPE_BYTES:
            raise ConfigError(f"--dtype must be one of {', '.join(DTYPE_BYTES)}, not {self.dtype!r}")
        if self.samplers < 0 or self.max_staleness < 0:
            raise ConfigError(
                f"--samplers and --max-staleness are at least 0, not {self.samplers} and {self.max_staleness}"
            )
        if self.samplers >= self.gpus:
            raise ConfigError(
                f"--samplers {self.samplers} of {self.gpus} devices leave none to learn: give at most {self.gpus - 1}"
            )
        if self.sampling_devices % self.tensor_parallel:
            raise ConfigError(
                f"--tensor-parallel {self.tensor_parallel} does not divide the {self.sampling_devices} devices that draw: give a divisor of it"
            )

    @property
    def is_disaggregated(self) -> bool:
        """Whether samplers have devices of their own."""
        return self.samplers > 0

    @property
    def learning_devices(self) -> int:
        """Devices that learn."""
        return self.gpus - self.samplers

    @property
    def sampling_devices(self) -> int:
        """Devices that draw."""
        return self.samplers or self.gpus

    @property
    def num_samplers(self) -> int:
        """Samplers, of `tensor` devices each."""
        return self.sampling_devices // self.tensor_parallel

    @property
    def bytes_per_number(self) -> int:
        """Bytes of a number that is computed with."""
        return DTYPE_BYTES[self.dtype]


# What is done in a step: how many completions of which lengths, and what an algorithm asks of them.

GOLDEN_RATIO = 0.618


@dataclass(frozen=True)
class AlgorithmCost:
    """What an algorithm asks for besides sampling and the policy's gradient."""

    name: str = ""
    trained_models: int = 1
    """Models that train: the policy, a critic with a backbone of its own, a reward model."""
    frozen_models: int = 0
    """Models beside them that only evaluate: the reference."""
    scoring_passes: int = 0
    """Times that a rollout is read by some model before it is learned: log π_old, log π_ref, values."""
    epochs: int = 1
    """Times that a rollout is learned from."""
    updates: int = 1
    """Optimiser steps of a rollout."""
    stale_scoring_passes: int = 0
    """Times that it is read besides where samples are older than the weights: log π_old, to correct for that."""
    recomputes_head: bool = False
    """The logits are computed once more on the way back, as the gradient to log π is not known on the way there."""
    samples_per_prompt: int = 8
    """G, completions of a prompt, where nobody says otherwise."""
    uncounted: tuple[str, ...] = ()
    """What it does besides that no plan counts, in words."""

    def scoring_passes_at(self, staleness: int) -> int:
        """Passes over a rollout before it is learned."""
        return self.scoring_passes + (self.stale_scoring_passes if staleness else 0)

    def recomputes_head_at(self, staleness: int) -> bool:
        """Whether logits are computed again on the way back."""
        return self.recomputes_head or (staleness > 0 and self.stale_scoring_passes > 0)


@dataclass(frozen=True)
class Workload:
    """A step's completions.

    Their lengths are those of a policy that ends with the same probability at every token, cut off at `budget`: geometric, or in
    the limit exponential, with the mean that is given. Equal quantiles of that stand for the draws.

    Raises:
        ConfigError: numbers below 1, or a mean above the budget.
    """

    prompts: int
    samples_per_prompt: int
    prompt_tokens: int
    """Mean tokens of a prompt."""
    completion_tokens: float
    """Mean tokens of a completion."""
    max_completion_tokens: int
    """Tokens of a completion, at most."""

    def __post_init__(self) -> None:
        for name in ("prompts", "samples_per_prompt", "prompt_tokens", "completion_tokens", "max_completion_tokens"):
            if not getattr(self, name) >= 1:
                raise ConfigError(f"a step's {name} must be at least 1, not {getattr(self, name):g}")
        if self.completion_tokens > self.max_completion_tokens:
            raise ConfigError(
                f"completions of {self.completion_tokens:g} tokens in the mean are more than the {self.max_completion_tokens} that one may have: give a "
                "larger --context, or a smaller --completion"
            )

    @property
    def num_completions(self) -> int:
        """Of a step."""
        return self.prompts * self.samples_per_prompt

    @property
    def max_tokens(self) -> int:
        """Tokens of the longest text."""
        return self.prompt_tokens + self.max_completion_tokens

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each completion, long and short ones mixed."""
        count, scale = (
            self.num_completions,
            _scale(self.completion_tokens / self.max_completion_tokens) * self.max_completion_tokens,
        )
        ordered = [_quantile((i + 0.5) / count, scale, self.max_completion_tokens) for i in range(count)]
        stride = next(s for s in range(max(1, round(count * GOLDEN_RATIO)), 2 * count + 2) if math.gcd(s, count) == 1)
        return tuple(ordered[i * stride % count] for i in range(count))

    @cached_property
    def sampled_tokens(self) -> int:
        """Tokens of all completions."""
        return sum(self.lengths)

    def count_tokens(self, shared: bool = True) -> TokenCounts:
        """That a learner computes, each prompt once for its group, or with every completion anew."""
        count, whole, squares = self.num_completions, self.sampled_tokens, sum(n * n for n in self.lengths)
        copies = self.prompts if shared else count
        nodes = copies * self.prompt_tokens + whole - count  # nobody asks what comes after the last token
        pairs = (
            copies * self.prompt_tokens * (self.prompt_tokens + 1) / 2
            + (whole - count) * self.prompt_tokens
            + (squares - whole) / 2
        )
        return TokenCounts(nodes, pairs, copies + whole - count)

    @cached_property
    def mean_attended_tokens(self) -> float:
        """Tokens that a drawn one attends to, in the mean over all that are drawn."""
        return self.prompt_tokens + sum(n * n for n in self.lengths) / (2 * self.sampled_tokens)


@dataclass(frozen=True)
class TokenCounts:
    """What is computed of some texts."""

    layer_tokens: float
    """Tokens that go through the layers."""
    attention_pairs: float
    """Of a token and one that it attends to."""
    head_tokens: float
    """Tokens that go through the head."""


def _quantile(q: float, scale: float, budget: int) -> int:
    """Of an exponential cut off at the budget; at least one token."""
    return budget if math.isinf(scale) else max(1, min(budget, round(-scale * math.log(1 - q))))


def _scale(share: float) -> float:
    """θ over the budget, of an exponential with mean θ (1 − e^(−1/θ)) when it is cut off there; by bisection."""
    if share >= 1 - 1e-9:
        return math.inf
    low, high = 1e-9, 1e9
    for _ in range(200):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if -middle * math.expm1(-1 / middle) < share else (low, middle)
    return high


# Bytes on one device, by what they are for.
#
# A learner's, of R that share P parameters: masters, gradients and two moments of AdamW in float32, 16 P/R; the layers that are
# gathered; the reference, 4 P/R; and what a micro-batch keeps for its way back. A sampler's: its share of the weights, and the keys
# and values of the completions that it draws at once.

MASTER_BYTES, GRADIENT_BYTES, MOMENT_BYTES = 4, 4, 8
"""Bytes per parameter that trains, in float32."""
LOGITS_IN_MEMORY = {"gpu": 2**27, "cpu": 2**21}
"""Logits that are in memory at once: the learner's head takes as many states at a time (`learners/local/logprobs.py`)."""
LOGIT_BYTES = 12
"""Bytes of one, with what is made of it."""
MAX_SNAPSHOT_BYTES = 2**30
"""Bytes of a state that is copied so that a failed step can be undone; of a larger one no copy is kept."""
DRIVER_BYTES = 2 * 2**30
"""Bytes that a GPU's driver and its communication take."""
USABLE_FRACTION = 0.95
"""Share of what is left that can be used before it is in too many pieces."""
SAMPLING_LOGIT_BYTES = 24
"""Bytes of a logit that is drawn from, with its probability and its place in order."""


@dataclass(frozen=True)
class MemoryBreakdown:
    """Of one device."""

    static: Mapping[str, float] = field(default_factory=dict)
    """Bytes for the whole run, by what they are for."""
    training: Mapping[str, float] = field(default_factory=dict)
    """Besides, while it learns."""
    sampling: Mapping[str, float] = field(default_factory=dict)
    """Besides, while it draws."""

    @property
    def peak_bytes(self) -> float:
        return sum(self.static.values()) + max(sum(self.training.values()), sum(self.sampling.values()))


def usable_bytes(device: Device) -> float:
    """Bytes of a device that a plan may fill."""
    return (device.memory - (0 if device.name == "cpu" else DRIVER_BYTES)) * USABLE_FRACTION


def static_bytes(
    parameters: float, weight: int, trained: int, frozen: float, ranks: int = 1, *, adamw: bool = True
) -> dict[str, float]:
    """Bytes of models and what moves them, on one of so many ranks. weight: bytes of a number that is computed with. frozen: models
    beside those that train."""
    share, narrow = parameters / ranks, weight < MASTER_BYTES
    state = share * trained * (MASTER_BYTES + (MOMENT_BYTES if adamw else 0))
    alone = weight + (MASTER_BYTES if narrow else 0)  # one process has both, several gather the narrow ones
    return {
        "weights": share * trained * (alone if ranks == 1 else MASTER_BYTES),
        "gradients": share * trained * GRADIENT_BYTES,
        "optimiser": share * (trained * MOMENT_BYTES if adamw else 6 * 4),  # conjugate gradients have six vectors
        "copy of the state": state if ranks == 1 and state <= MAX_SNAPSHOT_BYTES else 0,
        "other models": share * frozen * (weight if ranks == 1 else MASTER_BYTES),
    }


def activation_bytes_per_token(shape: ModelShape, weight: int) -> float:
    """Bytes that a layer keeps of a token for its way back, as transformers' own code runs it: a norm's input in float32 and its
    output twice, queries, keys and values (these repeated for every head), the attention's output, the MLP's four."""
    norms = 2 * (4 + 2 * weight) * shape.hidden
    each = (shape.heads + shape.kv_heads) * shape.head_dim
    normed = (4 + 2 * weight) * each if shape.qk_norm else 0
    attended = 4 * shape.heads * shape.head_dim * weight
    return norms + normed + attended + 4 * shape.intermediate * weight


def activation_bytes(shape: ModelShape, layout: ParallelLayout, tokens: float) -> float:
    """Bytes of activations of a micro-batch."""
    layer = activation_bytes_per_token(shape, layout.bytes_per_number) * tokens
    entry = shape.hidden * layout.bytes_per_number * tokens
    return shape.layers * entry + layer if layout.checkpointing else shape.layers * layer


def learner_memory(
    shape: ModelShape, work: Workload, asks: AlgorithmCost, layout: ParallelLayout, device: Device
) -> MemoryBreakdown:
    """Of the learner that has most; where all do both, of one of those."""
    ranks, weight = layout.learning_devices, layout.bytes_per_number
    always = static_bytes(shape.parameters, weight, asks.trained_models, asks.frozen_models, ranks)
    if ranks > 1:
        around = shape.embedding_parameters * (1 if shape.tied else 2)
        always["gathered layers"] = (2 * shape.layer_parameters + around) * weight
        if layout.keeps_full_policy and (layout.is_disaggregated or layout.tensor_parallel == 1):
            always["the policy, whole"] = shape.parameters * weight
    tokens = max(layout.micro_tokens, work.max_tokens)
    logits = LOGITS_IN_MEMORY["cpu" if device.name == "cpu" else "gpu"]
    learning = {
        "activations": activation_bytes(shape, layout, tokens),
        "logits": min(logits, tokens * shape.vocabulary) * LOGIT_BYTES,
    }
    drawing = {} if layout.is_disaggregated else sampling_bytes(shape, work, layout, _rows(work, layout))
    if not layout.is_disaggregated and (not layout.keeps_full_policy or (ranks > 1 and layout.tensor_parallel > 1)):
        drawing["the policy's share"] = shape.parameters * weight / layout.tensor_parallel
    return MemoryBreakdown(_without_zeros(always), learning, drawing)


def sampler_memory(shape: ModelShape, work: Workload, layout: ParallelLayout, device: Device) -> MemoryBreakdown:
    """Of a device that only draws: as many completions as its memory holds."""
    weights = shape.parameters * layout.bytes_per_number / layout.tensor_parallel
    return MemoryBreakdown(
        {"the policy": weights},
        sampling=sampling_bytes(shape, work, layout, max_concurrent_rows(shape, work, layout, device)),
    )


def sampling_bytes(shape: ModelShape, work: Workload, layout: ParallelLayout, rows: int) -> dict[str, float]:
    """Bytes of drawing so many completions at once. This library's sampler keeps room for the longest text in each of its rows; an
    engine takes a page of the cache when a completion gets there (Kwon et al. 2023, PagedAttention, sec. 4.3)."""
    cache = (
        rows
        * (work.max_tokens if layout.keeps_full_policy else work.mean_attended_tokens)
        * shape.cache_numbers_per_token
        * layout.bytes_per_number
    )
    return {
        "keys and values": cache / layout.tensor_parallel,
        "logits": rows * shape.vocabulary * SAMPLING_LOGIT_BYTES / layout.tensor_parallel,
    }


def max_concurrent_rows(shape: ModelShape, work: Workload, layout: ParallelLayout, device: Device) -> int:
    """Completions that a sampler draws at once: of what there are, as many as its memory holds; at least one."""
    if not layout.is_disaggregated:
        return _rows(work, layout)
    left = usable_bytes(device) - shape.parameters * layout.bytes_per_number / layout.tensor_parallel
    one = sum(sampling_bytes(shape, work, layout, 1).values())
    return max(1, min(_rows(work, layout), int(left / one)))


def _rows(work: Workload, layout: ParallelLayout) -> int:
    return min(layout.decode_rows, -(-work.num_completions // layout.num_samplers))


def _without_zeros(parts: Mapping[str, float]) -> dict[str, float]:
    return {name: size for name, size in parts.items() if size}


# Seconds of a step's phases, from operations and bytes.
#
# a pass      ( operations / peak rate + bytes / bandwidth ) / share reached
# operations  forward: 2 per weight of a matrix product and token, 4 per width of the heads and pair of a token and one that it
#             attends to; backward twice that; activations that are computed once more, forward again
# bytes       of what is no matrix product: numbers that norms, positions, gates and residuals read and write
# a token for each of n completions
#             ( weights / bandwidth + n · ( keys and values / bandwidth + operations / peak rate ) ) / share + layers · overhead

BACKWARD_PASSES = 2
"""Of a backward pass, in forward passes."""


@dataclass(frozen=True)
class StepTimes:
    """Seconds of a step, each phase alone."""

    generation: float
    """From the first prompt read to the last completion's end."""
    scoring: float
    """log π_old, log π_ref and values of all tokens."""
    learning: float
    """Forward and backward passes."""
    optimiser: float
    publishing: float
    """Until samplers have the new weights."""

    @property
    def update(self) -> float:
        """What a learner does in a step, without publishing."""
        return self.scoring + self.learning + self.optimiser

    @property
    def total(self) -> float:
        """One after the other."""
        return self.generation + self.update + self.publishing


@dataclass(frozen=True)
class TimeModel:
    """A shape on devices that reach so much of their figures."""

    shape: ModelShape
    device: Device
    efficiency: Efficiency
    layout: ParallelLayout

    def operations(self, tokens: TokenCounts, passes: float, head: float) -> float:
        """Of so many forward passes through the layers, and through the head."""
        shape = self.shape
        layers = (
            2 * shape.layer_matmul_weights * tokens.layer_tokens
            + 4 * shape.heads * shape.head_dim * tokens.attention_pairs
        )
        return passes * shape.layers * layers + head * 2 * shape.embedding_parameters * tokens.head_tokens

    def bytes_moved(self, tokens: TokenCounts, passes: float, head: float) -> float:
        """Bytes that are read and written besides the products' own."""
        shape = self.shape
        layer = 20 * shape.hidden + 8 * shape.qkv_width + 5 * shape.intermediate
        at_layers = passes * shape.layers * layer * self.layout.bytes_per_number * tokens.layer_tokens
        return at_layers + head * 5 * 4 * shape.vocabulary * tokens.head_tokens

    def roofline_seconds(self, tokens: TokenCounts, passes: float, head: float) -> float:
        """Seconds on one device at its published figures."""
        rate = self.device.rate(self.layout.bytes_per_number)
        return (
            self.operations(tokens, passes, head) / rate
            + self.bytes_moved(tokens, passes, head) / self.device.bandwidth
        )

    def scoring_seconds(self, tokens: TokenCounts) -> float:
        """Seconds of a forward pass on one device."""
        return self.roofline_seconds(tokens, 1, 1) / self.efficiency.scoring

    def training_seconds(self, tokens: TokenCounts, asks: AlgorithmCost) -> float:
        """Seconds of forward and backward on one device."""
        passes = 1 + BACKWARD_PASSES + (1 if self.layout.checkpointing else 0)
        head = 1 + BACKWARD_PASSES + (1 if asks.recomputes_head_at(self.layout.max_staleness) else 0)
        return self.roofline_seconds(tokens, passes, head) / self.efficiency.training

    def sampler_speed(self, work: Workload) -> SamplerSpeed:
        """Of one sampler. A token of n completions at once reads weights once, and every completion's keys and values."""
        shape, tensor = self.shape, self.layout.tensor_parallel
        narrow, bandwidth = self.layout.bytes_per_number, self.device.bandwidth * tensor
        rate = self.device.rate(narrow) * tensor
        weights = (shape.layers * shape.layer_matmul_weights + shape.embedding_parameters) * narrow
        one = TokenCounts(1, work.mean_attended_tokens, 1)
        read = (
            work.mean_attended_tokens * shape.cache_numbers_per_token * narrow + SAMPLING_LOGIT_BYTES * shape.vocabulary
        )
        rows = -(-work.num_completions // self.layout.num_samplers)
        prompts = min(work.prompts, -(-rows // work.samples_per_prompt))
        context = TokenCounts(
            work.prompt_tokens * prompts, prompts * work.prompt_tokens * (work.prompt_tokens + 1) / 2, prompts
        )
        overhead = self.efficiency.layer_overhead + (2 * self.efficiency.allreduce if tensor > 1 else 0)
        return SamplerSpeed(
            fixed=weights / bandwidth / self.efficiency.sampling + shape.layers * overhead,
            per_completion=(read / bandwidth + self.operations(one, 1, 1) / rate) / self.efficiency.sampling,
            max_concurrency=max_concurrent_rows(shape, work, self.layout, self.device),
            startup=self.scoring_seconds(context) / tensor,
        )

    def sampling_seconds(self, work: Workload) -> float:
        """Seconds until the sampler that has most to do is done."""
        speed, engines = self.sampler_speed(work), self.layout.num_samplers
        loads = {work.lengths[i::engines] for i in range(min(engines, work.num_completions))}
        heaviest = sorted(loads, key=lambda load: (max(load, default=0), sum(load)))[-4:]
        return max(map(speed, heaviest))

    def gather_seconds(self, size: float, devices: int) -> float:
        """Seconds until so many bytes, spread over so many devices, are in each of them."""
        if devices < 2:
            return 0.0
        within = size / self.device.link
        machines = -(-devices // self.device.per_node)
        between = size / (self.device.network * self.device.per_node) if machines > 1 else 0.0
        return max(within, between) / self.efficiency.link

    def count_micro_batches(self, tokens: TokenCounts, asks: AlgorithmCost) -> int:
        """Of one learner in a step; every update has at least one."""
        of_update = asks.epochs * tokens.layer_tokens / asks.updates / self.layout.learning_devices
        return asks.updates * ceil(of_update / self.layout.micro_tokens)

    def step_times(self, work: Workload, asks: AlgorithmCost) -> StepTimes:
        """Of a step. Learners share the tokens evenly. What they gather and sum goes on beside their passes, and is waited for
        where it takes longer."""
        shape, ranks = self.shape, self.layout.learning_devices
        tokens, narrow = work.count_tokens(self.layout.shares_prompts), self.layout.bytes_per_number
        gathered = self.gather_seconds(shape.parameters * narrow, ranks)
        summed = self.gather_seconds(shape.parameters * GRADIENT_BYTES, ranks)
        batches = self.count_micro_batches(tokens, asks)
        scored = max(
            self.scoring_seconds(tokens) / ranks,
            gathered * ceil(tokens.layer_tokens / ranks / self.layout.micro_tokens),
        )
        learned = max(
            asks.epochs * self.training_seconds(tokens, asks) / ranks, batches * (BACKWARD_PASSES * gathered + summed)
        )
        state = 2 * (MASTER_BYTES + MOMENT_BYTES) + GRADIENT_BYTES + narrow
        return StepTimes(
            generation=self.sampling_seconds(work),
            scoring=asks.scoring_passes_at(self.layout.max_staleness) * scored,
            learning=asks.trained_models * learned,
            optimiser=asks.updates * asks.trained_models * shape.parameters * state / ranks / self.device.bandwidth,
            publishing=self._publishing(),
        )

    def _publishing(self) -> float:
        """Into the same device's sampler, or through a folder."""
        size = self.shape.parameters * self.layout.bytes_per_number
        if self.layout.is_disaggregated:
            return self.gather_seconds(size, self.layout.learning_devices) + 2 * size / self.efficiency.storage
        if self.layout.learning_devices == 1:
            return 0.0 if self.layout.bytes_per_number == MASTER_BYTES else size * 3 / self.device.bandwidth
        return self.gather_seconds(size, self.layout.learning_devices)
