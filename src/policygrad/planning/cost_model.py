"""Memory and time of one training step, computed from a model's shape, a parallel layout and a device's figures."""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import ceil

from policygrad.errors import ConfigError
from policygrad.planning.hardware import Device, Efficiency
from policygrad.planning.shapes import LayerShape, ModelShape

DTYPE_BYTES = {"bf16": 2, "fp32": 4}
MICRO_TOKENS = 16384  # tokens per micro-batch on a GPU: the default of `--learner.micro-tokens`
MICRO_TOKENS_CPU = 1024


@dataclass(frozen=True)
class ParallelLayout:
    """How a run is spread over devices, and in what precision.

    Learners shard weights, gradients and moments (FSDP2); each sampler holds the full policy, or a share of every layer.

    Raises:
        ConfigError: the values contradict each other.
    """

    gpus: int
    samplers: int = 0  # devices that only sample; 0 = every device alternates between sampling and learning
    tensor_parallel: int = 1  # devices that each sampler's layers are split over
    max_staleness: int = 0  # rollouts by which disaggregated samplers may run ahead
    dtype: str = "bf16"  # compute precision; master weights, gradients and moments are float32
    checkpointing: bool = False  # recompute activations in the backward pass (`--learner.gradient-checkpointing`)
    micro_tokens: int = MICRO_TOKENS  # tokens per forward and backward pass of a learner; a sequence is never split
    decode_rows: int = 512  # maximum completions that one sampler generates at once
    shares_prompts: bool = True  # A prompt is computed once for its group, as in this library
    adapter_rank: int = 0  # rank of the adapters that alone are trained (`--learner.lora rank=16`); 0 = all weights are
    base_bits: int | None = None  # 4 = the frozen weights under adapters are in four bits (`bits=4`)
    keeps_full_policy: bool = True
    """Each learner also keeps the full policy for sampling, as this library's own sampler needs; False = an engine samples and is
    the only one to hold it."""

    def __post_init__(self) -> None:
        for name in ("gpus", "tensor_parallel", "micro_tokens", "decode_rows"):
            if getattr(self, name) < 1:
                raise ConfigError(f"--{name.replace('_', '-')} must be at least 1, not {getattr(self, name)}")
        if self.dtype not in DTYPE_BYTES:
            raise ConfigError(f"--dtype must be one of {', '.join(DTYPE_BYTES)}, not {self.dtype!r}")
        if self.samplers < 0 or self.max_staleness < 0:
            raise ConfigError(
                f"--samplers and --max-staleness must be at least 0, not {self.samplers} and {self.max_staleness}"
            )
        if self.base_bits is not None and self.learning_devices > 1:
            raise ConfigError(
                f"--lora with bits=4 does not work with several learners, and there are {self.learning_devices}. Leave bits out, "
                "or plan with one learning device."
            )
        if self.samplers >= self.gpus:
            raise ConfigError(
                f"--samplers {self.samplers} of {self.gpus} devices leaves none to learn. Use at most {self.gpus - 1}."
            )
        if self.sampling_devices % self.tensor_parallel:
            raise ConfigError(
                f"--tensor-parallel {self.tensor_parallel} does not divide the {self.sampling_devices} sampling devices. Use a "
                "divisor."
            )

    @property
    def is_disaggregated(self) -> bool:
        """True if samplers have devices of their own."""
        return self.samplers > 0

    @property
    def learning_devices(self) -> int:
        return self.gpus - self.samplers

    @property
    def sampling_devices(self) -> int:
        return self.samplers or self.gpus

    @property
    def num_samplers(self) -> int:
        """Samplers, of `tensor_parallel` devices each."""
        return self.sampling_devices // self.tensor_parallel

    @property
    def only_adapters(self) -> bool:
        """True if adapters alone are trained."""
        return self.adapter_rank > 0

    @property
    def bytes_per_number(self) -> int:
        """Bytes per number in the compute precision."""
        return DTYPE_BYTES[self.dtype]


# The work of one step: how many completions of which lengths, and what the algorithm does with them.

GOLDEN_RATIO = 0.618


@dataclass(frozen=True)
class AlgorithmCost:
    """Models, passes and updates that an algorithm needs besides sampling."""

    name: str = ""
    trained_models: int = 1  # models that train: the policy, a critic with a backbone of its own, a reward model
    frozen_models: int = 0  # models that are only evaluated: the reference
    scoring_passes: int = 0  # forward passes over a rollout before learning: log π_old, log π_ref, values
    epochs: int = 1  # passes of learning over each rollout
    updates: int = 1  # optimizer steps per rollout
    stale_scoring_passes: int = 0
    """Further forward passes when samples are older than the weights: log π_old, for the correction."""
    recomputes_head: bool = False
    """Logits are computed again in the backward pass: the gradient of log π is not known in the forward pass."""
    samples_per_prompt: int = 8  # G, the algorithm's default number of completions per prompt
    uncounted: tuple[str, ...] = ()  # costs that no plan counts, in words

    def scoring_passes_at(self, staleness: int) -> int:
        """Forward passes over a rollout before learning, at this staleness."""
        return self.scoring_passes + (self.stale_scoring_passes if staleness else 0)


@dataclass(frozen=True)
class Workload:
    """Prompts and completions of one step.

    Completion lengths follow a policy that ends with the same probability at every token, cut off at `max_completion_tokens`:
    geometric, or in the limit exponential, with the given mean. Equal quantiles of that distribution replace random samples.

    Raises:
        ConfigError: a number is below 1, or the mean exceeds the maximum.
    """

    prompts: int
    samples_per_prompt: int
    prompt_tokens: int  # mean tokens of a prompt
    completion_tokens: float  # mean tokens of a completion
    max_completion_tokens: int

    def __post_init__(self) -> None:
        for name in ("prompts", "samples_per_prompt", "prompt_tokens", "completion_tokens", "max_completion_tokens"):
            if not getattr(self, name) >= 1:
                raise ConfigError(f"{name} must be at least 1, not {getattr(self, name):g}")
        if self.completion_tokens > self.max_completion_tokens:
            raise ConfigError(
                f"a mean completion of {self.completion_tokens:g} tokens is more than the maximum of {self.max_completion_tokens}. "
                "Raise --context, or lower --completion."
            )

    @property
    def num_completions(self) -> int:
        return self.prompts * self.samples_per_prompt

    @property
    def max_tokens(self) -> int:
        """Tokens of the longest sequence."""
        return self.prompt_tokens + self.max_completion_tokens

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each completion, with long and short ones interleaved."""
        count, limit = self.num_completions, self.max_completion_tokens
        # θ as a fraction of the limit, for a cut-off exponential whose mean θ (1 − e^(−1/θ)) is the given one; by bisection.
        share, low, high = self.completion_tokens / limit, 1e-9, 1e9
        for _ in range(200):
            middle = math.sqrt(low * high)
            low, high = (middle, high) if -middle * math.expm1(-1 / middle) < share else (low, middle)
        ordered = [max(1, min(limit, round(-high * limit * math.log(1 - (i + 0.5) / count)))) for i in range(count)]
        stride = next(s for s in range(max(1, round(count * GOLDEN_RATIO)), 2 * count + 2) if math.gcd(s, count) == 1)
        return tuple(ordered[i * stride % count] for i in range(count))

    @cached_property
    def sampled_tokens(self) -> int:
        """Tokens of all completions."""
        return sum(self.lengths)

    def count_tokens(self, shares_prompts: bool = True, windows: Sequence[int] = ()) -> TokenCounts:
        """Count what a learner computes, with each prompt once per group or once per completion.

        Args:
            windows: Numbers of tokens that some layers attend to, for which pairs are counted too.
        """
        count, sampled, squares = self.num_completions, self.sampled_tokens, sum(n * n for n in self.lengths)
        copies = self.prompts if shares_prompts else count
        layer_tokens = copies * self.prompt_tokens + sampled - count  # the last token predicts nothing
        pairs = copies * self.prompt_tokens * (self.prompt_tokens + 1) / 2
        pairs += (sampled - count) * self.prompt_tokens + (squares - sampled) / 2
        prompt, ends = self.prompt_tokens, [self.prompt_tokens + n - 1 for n in self.lengths]
        within = {
            w: copies * windowed_pairs(prompt, w)
            + sum(windowed_pairs(end, w) for end in ends)
            - count * windowed_pairs(prompt, w)
            for w in windows
        }
        return TokenCounts(layer_tokens, pairs, copies + sampled - count, within)

    @cached_property
    def mean_attended_tokens(self) -> float:
        """Mean number of tokens that a sampled token attends to."""
        return self.prompt_tokens + sum(n * n for n in self.lengths) / (2 * self.sampled_tokens)


@dataclass(frozen=True)
class TokenCounts:
    """Amounts of computation over a set of sequences."""

    layer_tokens: float  # tokens that go through the layers
    attention_pairs: float  # pairs of a token and one that it attends to
    head_tokens: float  # tokens that go through the output head
    window_pairs: Mapping[int, float] = field(default_factory=dict)  # attention pairs in windows of so many tokens

    def pairs(self, window: int | None) -> float:
        """Return the pairs of a layer with this window."""
        if window is None:
            return self.attention_pairs
        known = self.window_pairs.get(window)
        return min(self.attention_pairs, self.layer_tokens * window) if known is None else known


def windowed_pairs(length: int, window: int) -> float:
    """Return the pairs of a text in which each token attends to itself and the `window` − 1 tokens before it."""
    inside = min(length, window)
    return inside * (inside + 1) / 2 + (length - inside) * window


# Memory of one device.
#
# A learner, one of R that share P parameters, holds master weights, gradients and two moments of AdamW in float32, 16 P/R; the
# gathered layers; the reference, 4 P/R; and the activations of a micro-batch. A sampler holds its share of the weights, and the
# keys and values of the completions that it generates at once.

MASTER_BYTES, GRADIENT_BYTES, MOMENT_BYTES = 4, 4, 8  # bytes per trained parameter, in float32
LOGITS_IN_MEMORY = {"gpu": 2**27, "cpu": 2**21}
"""Logits in memory at once: the learner's head processes this many at a time (`learners/local/logprobs.py`)."""
NF4_BYTES = (4 + 8 / 64 + 32 / (64 * 256)) / 8
"""Bytes of a weight in four bits with double quantization: a scale of 8 bits for 64, and one of 32 bits for 256 of these (Dettmers
et al. 2023, QLoRA, sec. 3)."""
LOGIT_BYTES = 12  # bytes per logit, with its temporaries
MAX_SNAPSHOT_BYTES = 2**30  # largest training state that is copied so that a failed step can be undone
DRIVER_BYTES = 2 * 2**30  # memory that a GPU's driver and its communication buffers occupy
USABLE_FRACTION = 0.95  # fraction of the remaining memory that is usable before fragmentation
SAMPLING_LOGIT_BYTES = 24  # bytes per logit during sampling, with its probability and its rank


@dataclass(frozen=True)
class MemoryBreakdown:
    """Memory of one device in bytes, by purpose."""

    static: Mapping[str, float] = field(default_factory=dict)  # held for the whole run
    training: Mapping[str, float] = field(default_factory=dict)  # needed in addition while learning
    sampling: Mapping[str, float] = field(default_factory=dict)  # needed in addition while sampling

    @property
    def peak_bytes(self) -> float:
        return sum(self.static.values()) + max(sum(self.training.values()), sum(self.sampling.values()))


def usable_bytes(device: Device) -> float:
    """Return how much of a device's memory a plan may fill."""
    return (device.memory - (0 if device.name == "cpu" else DRIVER_BYTES)) * USABLE_FRACTION


def static_bytes(
    parameters: float,
    bytes_per_number: int,
    trained_models: int,
    frozen_models: float,
    ranks: int = 1,
    *,
    adamw: bool = True,
) -> dict[str, float]:
    """Return the bytes of models and optimizer state on one of `ranks` devices.

    Args:
        bytes_per_number: in the compute precision.
        frozen_models: evaluated models besides those that train.
        adamw: False = a trust-region step, whose conjugate gradient needs six vectors.
    """
    share = parameters / ranks
    state = share * trained_models * (MASTER_BYTES + (MOMENT_BYTES if adamw else 0))
    # A single process holds master and compute weights; several gather the compute weights layer by layer.
    weight = bytes_per_number + (MASTER_BYTES if bytes_per_number < MASTER_BYTES else 0) if ranks == 1 else MASTER_BYTES
    return {
        "weights": share * trained_models * weight,
        "gradients": share * trained_models * GRADIENT_BYTES,
        "optimizer": share * (trained_models * MOMENT_BYTES if adamw else 6 * 4),
        "copy of the state": state if ranks == 1 and state <= MAX_SNAPSHOT_BYTES else 0,
        "other models": share * frozen_models * (bytes_per_number if ranks == 1 else MASTER_BYTES),
    }


def adapted_static_bytes(
    shape: ModelShape, layout: ParallelLayout, trained_models: int, frozen_models: float
) -> dict[str, float]:
    """Return the bytes of frozen weights and of the adapters that are trained on them, in float32.

    All models share the weights; several learners shard them in float32.
    """
    ranks, adapters = layout.learning_devices, shape.count_adapters(layout.adapter_rank)
    share = adapters / ranks * trained_models
    state = share * (MASTER_BYTES + MOMENT_BYTES)
    return {
        "frozen weights": weight_bytes(shape, layout) if ranks == 1 else shape.parameters * MASTER_BYTES / ranks,
        "adapters": share * MASTER_BYTES,
        "gradients": share * GRADIENT_BYTES,
        "optimizer": share * MOMENT_BYTES,
        "copy of the state": state if ranks == 1 and state <= MAX_SNAPSHOT_BYTES else 0,
        "other models": adapters / ranks * frozen_models * MASTER_BYTES if ranks == 1 else 0,
    }


def weight_bytes(shape: ModelShape, layout: ParallelLayout) -> float:
    """Return the bytes of one copy of the weights in the compute precision, or in four bits where they are linear layers'."""
    quantised = shape.linear_parameters if layout.base_bits == 4 else 0
    return quantised * NF4_BYTES + (shape.parameters - quantised) * layout.bytes_per_number


def activation_bytes(shape: ModelShape, layout: ParallelLayout, tokens: float, longest: float = 0) -> float:
    """Return the bytes of activations of a micro-batch with a text of `longest` tokens, in transformers' own implementation.

    Recomputed layers keep their input; the largest is recomputed at a time.
    """

    def saved(layer: LayerShape) -> float:
        return layer.saved_bytes(layout.dtype, tokens, longest, only_adapters=layout.only_adapters)

    if layout.checkpointing:
        inputs = shape.num_layers * shape.hidden * layout.bytes_per_number * tokens
        return inputs + max(map(saved, shape.layer_shapes))
    return sum(layer.count * saved(layer) for layer in shape.layer_shapes)


def learner_memory(
    shape: ModelShape, workload: Workload, algorithm: AlgorithmCost, layout: ParallelLayout, device: Device
) -> MemoryBreakdown:
    """Return the memory of a device that learns, and samples too unless samplers have devices of their own."""
    ranks, number = layout.learning_devices, layout.bytes_per_number
    if layout.only_adapters:
        static = adapted_static_bytes(shape, layout, algorithm.trained_models, algorithm.frozen_models)
    else:
        static = static_bytes(shape.parameters, number, algorithm.trained_models, algorithm.frozen_models, ranks)
    if ranks > 1:
        static["gathered layers"] = (2 * shape.largest_layer + shape.around_parameters) * number
        if layout.keeps_full_policy and (layout.is_disaggregated or layout.tensor_parallel == 1):
            static["full policy"] = shape.parameters * number
    tokens = max(layout.micro_tokens, workload.max_tokens)
    logits = LOGITS_IN_MEMORY["cpu" if device.name == "cpu" else "gpu"]
    training = {
        "activations": activation_bytes(shape, layout, tokens, workload.max_tokens),
        "logits": min(logits, tokens * shape.vocabulary) * LOGIT_BYTES,
    }
    sampling = {} if layout.is_disaggregated else sampling_bytes(shape, workload, layout, _row_limit(workload, layout))
    if not layout.is_disaggregated and (not layout.keeps_full_policy or (ranks > 1 and layout.tensor_parallel > 1)):
        sampling["policy shard"] = shape.parameters * number / layout.tensor_parallel
    return MemoryBreakdown({name: size for name, size in static.items() if size}, training, sampling)


def sampler_memory(shape: ModelShape, workload: Workload, layout: ParallelLayout, device: Device) -> MemoryBreakdown:
    """Return the memory of a device that only samples, with as many completions at once as fit."""
    weights = shape.parameters * layout.bytes_per_number / layout.tensor_parallel
    rows = max_concurrent_rows(shape, workload, layout, device)
    return MemoryBreakdown({"policy": weights}, sampling=sampling_bytes(shape, workload, layout, rows))


def sampling_bytes(shape: ModelShape, workload: Workload, layout: ParallelLayout, rows: int) -> dict[str, float]:
    """Return the bytes needed to generate `rows` completions at once.

    This library's sampler reserves the longest sequence for every row; an engine allocates its cache in pages as completions grow
    (Kwon et al. 2023, PagedAttention, sec. 4.3).
    """
    length = workload.max_tokens if layout.keeps_full_policy else workload.mean_attended_tokens
    cache = rows * shape.cached_numbers(length, engine=not layout.keeps_full_policy) * layout.bytes_per_number
    return {
        "keys and values": cache / layout.tensor_parallel,
        "logits": rows * shape.vocabulary * SAMPLING_LOGIT_BYTES / layout.tensor_parallel,
    }


def max_concurrent_rows(shape: ModelShape, workload: Workload, layout: ParallelLayout, device: Device) -> int:
    """Return how many completions a sampler generates at once: as many as it has to, or as its memory holds; at least one."""
    if not layout.is_disaggregated:
        return _row_limit(workload, layout)
    free = usable_bytes(device) - shape.parameters * layout.bytes_per_number / layout.tensor_parallel
    one = sum(sampling_bytes(shape, workload, layout, 1).values())
    return max(1, min(_row_limit(workload, layout), int(free / one)))


def _row_limit(workload: Workload, layout: ParallelLayout) -> int:
    """Completions per sampler at once, regardless of memory."""
    return min(layout.decode_rows, ceil(workload.num_completions / layout.num_samplers))


# Time of a step's phases, from operations and bytes.
#
# a pass      ( operations / peak rate + bytes / bandwidth ) / efficiency
# operations  forward: 2 per weight of a matrix product and token, 4 per width of the heads and attention pair; backward: twice
#             that; recomputed activations: one more forward pass
# bytes       outside matrix products: numbers that norms, positions, gates and residuals read and write
# one token for each of n completions
#             ( weights / bandwidth + n · ( keys and values / bandwidth + operations / peak rate ) )
#             / efficiency + layers · overhead

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

    def scoring_seconds(self, tokens: TokenCounts) -> float:
        """Return the seconds of a forward pass on one device."""
        return self.roofline_seconds(tokens, 1, 1) / self.efficiency.scoring

    def training_seconds(self, tokens: TokenCounts, algorithm: AlgorithmCost) -> float:
        """Return the seconds of a forward and backward pass on one device."""
        passes = 1 + BACKWARD_PASSES + (1 if self.layout.checkpointing else 0)
        is_corrected = self.layout.max_staleness > 0 and algorithm.stale_scoring_passes > 0
        head = 1 + BACKWARD_PASSES + (1 if algorithm.recomputes_head or is_corrected else 0)
        if not self.layout.only_adapters:
            return self.roofline_seconds(tokens, passes, head) / self.efficiency.training
        # Frozen weights have no gradients, which are half of a backward pass's products. Adapters' own products are trained.
        seconds = self.roofline_seconds(tokens, passes, head - FROZEN_PASSES, passes - FROZEN_PASSES)
        adapters = 2 * passes * self.shape.count_adapters(self.layout.adapter_rank) * tokens.layer_tokens
        adapters *= self.shape.active_parameters / self.shape.parameters
        return (seconds + adapters / self.device.rate(self.layout.bytes_per_number)) / self.efficiency.training

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
        overhead = self.efficiency.layer_overhead + (2 * self.efficiency.allreduce if tensor > 1 else 0)
        seen = {w: min(attended, w) for w in shape.windows}
        per_token = self.operations(TokenCounts(1, attended, 1, seen), 1, 1) / rate
        return SamplerSpeed(
            fixed=weights / bandwidth / self.efficiency.sampling + shape.num_layers * overhead,
            per_completion=(read / bandwidth + per_token) / self.efficiency.sampling,
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
        scoring = max(self.scoring_seconds(tokens) / ranks, gather * scoring_batches)
        training = algorithm.epochs * self.training_seconds(tokens, algorithm) / ranks
        training = max(training, batches * (BACKWARD_PASSES * gather + reduce))
        state = 2 * (MASTER_BYTES + MOMENT_BYTES) + GRADIENT_BYTES + number
        trained = algorithm.updates * algorithm.trained_models * trains
        size = shape.parameters * number
        if self.layout.is_disaggregated:  # through a folder to the samplers
            publishing = gather + 2 * size / self.efficiency.storage
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
            optimizer=trained * state / ranks / self.device.bandwidth,
            publishing=publishing,
        )
