"""Memory of one training step, computed from a model's shape, a parallel layout and a device's figures."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import ceil

from policygrad.errors import ConfigError
from policygrad.planning.hardware import Device
from policygrad.planning.model_sizes import ADAMW_MOMENT_BYTES, EIGHT_BIT_MOMENT_BYTES, GRADIENT_BYTES, MASTER_BYTES
from policygrad.planning.shapes import LayerShape, ModelShape

DTYPE_BYTES = {"bf16": 2, "fp32": 4}
MICRO_TOKENS = 16384  # tokens per micro-batch on a GPU: the default of `--learner.micro-tokens`
MICRO_TOKENS_CPU = 1024
SEGMENT_TOKENS = {"gpu": 4096, "cpu": 512}  # proposed for texts that are read in segments


OFFLOADS = ("none", "sampling", "always")


@dataclass(frozen=True)
class OptimizerState:
    """What an optimizer keeps of each trained parameter, in bytes, and where: of `learners/optimizers.py`'s registry."""

    name: str = "adamw"
    moment_bytes: float = ADAMW_MOMENT_BYTES  # of a parameter of a hidden matrix
    outer_moment_bytes: float = ADAMW_MOMENT_BYTES  # of one of embeddings and output head
    masters: str = "fp32"  # none = bf16 weights alone (`--optimizer.masters none`)
    offload: str = "none"
    """When moments and masters are in the host's memory: sampling (`--learner.offload`), or always but for the parameter that is
    being updated (`--optimizer.offload`)."""

    def __post_init__(self) -> None:
        if self.offload not in OFFLOADS:
            raise ConfigError(f"--offload must be one of {', '.join(OFFLOADS)}, not {self.offload!r}")

    def count_moments(self, outer: float) -> float:
        """Return the bytes per parameter of a model with this fraction of its parameters in embeddings and output head."""
        return (1 - outer) * self.moment_bytes + outer * self.outer_moment_bytes

    def master_bytes(self, number: int, ranks: int) -> int:
        """Return the bytes of a parameter's master beside the weight that is computed with. Several processes have masters alone,
        and gather the others layer by layer."""
        return MASTER_BYTES if number < MASTER_BYTES and ranks == 1 and self.masters == "fp32" else 0

    def weight_bytes(self, number: int, ranks: int) -> int:
        """Return the bytes of a trained weight, without a master beside it."""
        return number if ranks == 1 or self.masters == "none" else MASTER_BYTES


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
    micro_tokens: int = (
        MICRO_TOKENS  # tokens per forward and backward pass of a learner; longer texts are read in segments
    )
    decode_rows: int = 512  # maximum completions that one sampler generates at once
    shares_prompts: bool = True  # A prompt is computed once for its group, as in this library
    adapter_rank: int = 0  # rank of the adapters that alone are trained (`--learner.lora rank=16`); 0 = all weights are
    base_bits: int | None = None  # 4 = the frozen weights under adapters are in four bits (`bits=4`)
    context_parallel: int = 1  # learners that share each text (`--learner.context-parallel`)
    optimizer: OptimizerState = OptimizerState()
    engine_sleeps: bool = (
        True  # an engine on the learners' devices frees its memory while they learn (`--sampler.colocate`)
    )
    weight_transport: str = "folder"
    """How samplers on other devices get the weights: through a folder, or nccl, once for each sampler."""
    keeps_full_policy: bool = True
    """Each learner also keeps the full policy for sampling, as this library's own sampler needs; False = an engine samples and is
    the only one to hold it."""

    def __post_init__(self) -> None:
        for name in ("gpus", "tensor_parallel", "micro_tokens", "decode_rows", "context_parallel"):
            if getattr(self, name) < 1:
                section = "learner." if name in ("micro_tokens", "context_parallel") else ""
                raise ConfigError(f"--{section}{name.replace('_', '-')} must be at least 1, not {getattr(self, name)}")
        if self.dtype not in DTYPE_BYTES:
            raise ConfigError(f"--learner.dtype must be one of {', '.join(DTYPE_BYTES)}, not {self.dtype!r}")
        if self.samplers < 0 or self.max_staleness < 0:
            raise ConfigError(
                f"--samplers and --max-staleness must be at least 0, not {self.samplers} and {self.max_staleness}"
            )
        state = self.optimizer
        if state.masters == "none" and (self.dtype == "fp32" or self.only_adapters):
            reason = "--learner.lora trains adapters in fp32" if self.only_adapters else "--learner.dtype is fp32"
            raise ConfigError(f"--optimizer.masters none is for weights in bf16, and {reason}: leave it out")
        if self.learning_devices > 1 and state.offload == "sampling":
            raise ConfigError(
                f"--learner.offload is for a learner in one process, and there are {self.learning_devices}: use --offload "
                "always, or plan with one learning device"
            )
        if self.samplers >= self.gpus:
            raise ConfigError(
                f"--samplers {self.samplers} of {self.gpus} devices leaves none to learn. Use at most {self.gpus - 1}."
            )
        if self.learning_devices % self.context_parallel:
            raise ConfigError(
                f"--learner.context-parallel {self.context_parallel} does not divide the {self.learning_devices} learning devices. "
                "Use a divisor."
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
# A learner, one of R that share P parameters, holds master weights, gradients and moments, with AdamW 16 P/R; the gathered layers;
# the reference, 4 P/R; and the activations of a micro-batch. Of a text that is longer, one process keeps what its segments leave:
# keys, values and their gradients, and states. A sampler holds its share of the weights, and the keys and values of the
# completions that it generates at once.

LOGITS_IN_MEMORY = {"gpu": 2**27, "cpu": 2**21}
"""Logits in memory at once: the learner's head processes this many at a time (`learners/local/logprobs.py`)."""
CACHED_PROBABILITIES = 2**24  # that are kept for the backward pass, where the head would run twice
NF4_BYTES = (4 + 8 / 64 + 32 / (64 * 256)) / 8
"""Bytes of a weight in four bits with double quantization: a scale of 8 bits for 64, and one of 32 bits for 256 of these (Dettmers
et al. 2023, QLoRA, sec. 3)."""
LOGIT_BYTES = 12  # bytes per logit, with its temporaries
MAX_SNAPSHOT_BYTES = 2**30  # largest training state that is copied so that a failed step can be undone
DRIVER_BYTES = 2 * 2**30  # memory that a GPU's driver and its communication buffers occupy
USABLE_FRACTION = 0.95  # fraction of the remaining memory that is usable before fragmentation
SAMPLING_LOGIT_BYTES = 24  # bytes per logit during sampling, with its probability and its rank
PROCESS_BYTES = 384 * 2**20
"""Memory of a process on a CPU without any tensor: 254 MiB of Python and torch, 96 to 115 of transformers, PEFT and an
architecture, 16 of the first step's kernels were measured."""
HOLES = {"weights": 0.7, "adapters": 1.85}
"""Bytes that the C library's allocator holds beside each byte of a pass, on a CPU, after some passes: between saved tensors freed
ones leave holes, most where adapters' small ones lie between large temporary ones. With `MALLOC_MMAP_THRESHOLD_=1048576` there are
next to none, and an update takes half as long again."""
STEP_BYTES, ROUNDING_BYTES = 8, 12
"""Bytes per parameter of the largest matrix during its own step: temporaries in float32; noise and bits of stochastic rounding."""


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
    optimizer: OptimizerState | None = OptimizerState(),
    outer: float = 0.0,
) -> dict[str, float]:
    """Return the bytes of models and optimizer state on one of `ranks` devices.

    Args:
        bytes_per_number: In the compute precision.
        frozen_models: Evaluated models besides those that train.
        optimizer: None = a trust-region step, whose conjugate gradient needs six vectors.
        outer: Fraction of the parameters in embeddings and output head.
    """
    share = parameters / ranks
    kept = OptimizerState() if optimizer is None else optimizer
    master, weight = kept.master_bytes(bytes_per_number, ranks), kept.weight_bytes(bytes_per_number, ranks)
    moments = 0 if optimizer is None else share * trained_models * optimizer.count_moments(outer)
    state = share * trained_models * (master or weight) + moments
    on_device = kept.offload != "always"
    return {
        "weights": share * trained_models * (weight + master * on_device),
        "gradients": share * trained_models * GRADIENT_BYTES,
        "optimizer": share * 6 * 4 if optimizer is None else moments * on_device,
        "copy of the state": state if ranks == 1 and state <= MAX_SNAPSHOT_BYTES else 0,
        "other models": share * frozen_models * (bytes_per_number if ranks == 1 else MASTER_BYTES),
    }


def adapted_static_bytes(
    shape: ModelShape, layout: ParallelLayout, trained_models: int, frozen_models: float
) -> dict[str, float]:
    """Return the bytes of frozen weights and of the adapters that are trained on them, in float32.

    All models share the weights; several learners shard them in float32, and those in four bits each has whole.
    """
    quantised = shape.linear_parameters if layout.base_bits == 4 else 0
    ranks, adapters = layout.learning_devices, shape.count_adapters(layout.adapter_rank)
    share = adapters / ranks * trained_models
    moments = share * layout.optimizer.count_moments(outer=0.0)
    state = share * MASTER_BYTES + moments
    return {
        "frozen weights": weight_bytes(shape, layout)
        if ranks == 1
        else quantised * NF4_BYTES + (shape.parameters - quantised) * MASTER_BYTES / ranks,
        "adapters": share * MASTER_BYTES,
        "gradients": share * GRADIENT_BYTES,
        "optimizer": moments * (layout.optimizer.offload != "always"),
        "copy of the state": state if ranks == 1 and state <= MAX_SNAPSHOT_BYTES else 0,
        "other models": adapters / ranks * frozen_models * MASTER_BYTES if ranks == 1 else 0,
    }


def weight_bytes(shape: ModelShape, layout: ParallelLayout) -> float:
    """Return the bytes of one copy of the weights in the compute precision, or in four bits where they are linear layers'."""
    quantised = shape.linear_parameters if layout.base_bits == 4 else 0
    return quantised * NF4_BYTES + (shape.parameters - quantised) * layout.bytes_per_number


def activation_bytes(shape: ModelShape, layout: ParallelLayout, tokens: float, longest: float = 0) -> float:
    """Return the bytes of activations of a micro-batch with a text of `longest` tokens, in transformers' own implementation.

    Recomputed layers keep their input; the largest is recomputed at a time. Behind the layers are the last norm, the states that
    predict tokens, and their gradient.
    """

    def saved(layer: LayerShape) -> float:
        return layer.saved_bytes(layout.dtype, tokens, longest, only_adapters=layout.only_adapters)

    number = layout.bytes_per_number
    outside = shape.hidden * (4 + 4 * number) * tokens
    if layout.checkpointing:
        inputs = shape.num_layers * shape.hidden * number * tokens
        return inputs + max(map(saved, shape.layer_shapes)) + outside
    return sum(layer.count * saved(layer) for layer in shape.layer_shapes) + outside


def reads_segments(shape: ModelShape, layout: ParallelLayout) -> bool:
    """Return whether texts longer than a micro-batch are read in segments: by each process its own; recurrent layers do so through
    a cache, which layers that recompute activations do not have."""
    return layout.context_parallel == 1 and not (shape.has_states and layout.checkpointing)


def segment_bytes(shape: ModelShape, layout: ParallelLayout, tokens: float, predicting: float) -> dict[str, float]:
    """Return the bytes that segments of so many tokens leave to what follows them (`learners/local/path_reader.py`).

    Keys and values are kept in the compute precision, their gradients in float32, and those of the layer that is being
    differentiated once more. Recurrent layers keep their state at the end of each segment, in float32. The last layer's states are
    there as they were read and beside those of the last pass, which have a gradient.

    Args:
        predicting: How many of the tokens predict one that is learned from.
    """
    number, widest = layout.bytes_per_number, max(layer.attended_numbers for layer in shape.layer_shapes)
    numbers = sum(layer.count * layer.attended_numbers for layer in shape.layer_shapes)
    recurrent = sum(layer.count * layer.state_numbers for layer in shape.layer_shapes)
    return {
        "keys and values of segments": tokens * (numbers * (number + GRADIENT_BYTES) + widest * GRADIENT_BYTES),
        "states of segments": predicting * shape.hidden * (2 * number + GRADIENT_BYTES)
        + math.ceil(tokens / layout.micro_tokens) * recurrent * 2 * GRADIENT_BYTES,
    }


def shrink_state(layout: ParallelLayout) -> tuple[str, OptimizerState]:
    """Return options and state of AdamW with moments in 8 bits and, for bf16 weights, without masters."""
    is_bare = layout.bytes_per_number < MASTER_BYTES
    moments = EIGHT_BIT_MOMENT_BYTES
    state = replace(layout.optimizer, name="adamw8bit", moment_bytes=moments, outer_moment_bytes=moments)
    if not is_bare:
        return "--optimizer.name adamw8bit", state
    return "--optimizer.name adamw8bit --optimizer.masters none", replace(state, masters="none")


def learner_memory(
    shape: ModelShape, workload: Workload, algorithm: AlgorithmCost, layout: ParallelLayout, device: Device
) -> MemoryBreakdown:
    """Return the memory of a device that learns, and samples too unless samplers have devices of their own."""
    ranks, number, state = layout.learning_devices, layout.bytes_per_number, layout.optimizer
    outer = shape.around_parameters / shape.parameters
    if layout.only_adapters:
        static = adapted_static_bytes(shape, layout, algorithm.trained_models, algorithm.frozen_models)
    else:
        models = algorithm.trained_models, algorithm.frozen_models
        static = static_bytes(shape.parameters, number, *models, ranks, optimizer=state, outer=outer)
    if ranks > 1:
        layers = 0 if layout.base_bits else 2 * shape.largest_layer  # those in four bits are not gathered
        static["gathered layers"] = (layers + shape.around_parameters) * number
        if layout.keeps_full_policy and (layout.is_disaggregated or layout.tensor_parallel == 1):
            shared = shape.linear_parameters if layout.base_bits == 4 else 0  # the learner's own
            static["full policy"] = (shape.parameters - shared) * number
    if device.name == "cpu":
        static["Python and libraries"] = PROCESS_BYTES
    training = training_bytes(shape, workload, algorithm, layout, device)
    if state.offload == "sampling":
        training |= _pop_offloaded(static, shape, layout, algorithm.trained_models)
    sampling = {} if layout.is_disaggregated else sampling_bytes(shape, workload, layout, _row_limit(workload, layout))
    if not layout.is_disaggregated and (not layout.keeps_full_policy or (ranks > 1 and layout.tensor_parallel > 1)):
        sampling["policy shard"] = shape.parameters * number / layout.tensor_parallel
    if not layout.is_disaggregated and not layout.keeps_full_policy and not layout.engine_sleeps:
        static |= {f"engine's {name}": size for name, size in sampling.items()}
        sampling = {}
    return MemoryBreakdown({name: size for name, size in static.items() if size}, training, sampling)


def training_bytes(
    shape: ModelShape, workload: Workload, algorithm: AlgorithmCost, layout: ParallelLayout, device: Device
) -> dict[str, float]:
    """Return what a learner needs beside what it holds: of a pass or, where that is more, of a step of the optimizer."""
    number, on_cpu, longest = layout.bytes_per_number, device.name == "cpu", workload.max_tokens
    tokens: float = max(layout.micro_tokens, longest)
    further = 0
    if reads_segments(shape, layout):
        further = max(0, longest - layout.micro_tokens)
        tokens, longest = layout.micro_tokens, min(longest, layout.micro_tokens)
    own = tokens / layout.context_parallel
    logits: float = LOGITS_IN_MEMORY["cpu" if on_cpu else "gpu"]
    passes = {
        "activations": activation_bytes(shape, layout, own, longest),
        "logits": min(logits, own * shape.vocabulary) * LOGIT_BYTES,
    }
    if algorithm.recomputes_head:
        passes["logits"] += min(CACHED_PROBABILITIES, own * shape.vocabulary) * 4
    if layout.only_adapters:
        passes["unpacked weights"] = shape.largest_linear * number if layout.base_bits else 0
    else:
        passes["gradient of the head"] = shape.head_weights * GRADIENT_BYTES
    if layout.context_parallel > 1:
        widest = max(layer.attended_numbers for layer in shape.layer_shapes)
        passes["gathered keys and values"] = 2 * widest * number * tokens
    if further:
        passes |= segment_bytes(shape, layout, further, max(0, further - workload.prompt_tokens))
    trained = 0 if layout.only_adapters else shape.parameters * algorithm.trained_models / layout.learning_devices
    copies = {"gradients in bf16": trained * number if number < GRADIENT_BYTES else 0}
    if further:  # those of the segments before are there while the next one is read again
        passes |= copies
    if on_cpu:
        passes["allocator's holes"] = sum(passes.values()) * HOLES["adapters" if layout.only_adapters else "weights"]
    phases = passes, copies, {"optimizer step": _step_bytes(shape, layout)}
    heaviest = max(phases, key=lambda phase: sum(phase.values()))
    return {name: size for name, size in heaviest.items() if size}


def _step_bytes(shape: ModelShape, layout: ParallelLayout) -> float:
    """Return what the step of the largest matrix needs: temporaries, and what is there during its step alone."""
    state, largest = layout.optimizer, shape.head_weights / layout.learning_devices
    if layout.only_adapters:
        return 0.0
    each: float = STEP_BYTES
    if state.masters == "none":
        each += MASTER_BYTES + ROUNDING_BYTES
    if state.offload == "always":
        each += state.outer_moment_bytes + state.master_bytes(layout.bytes_per_number, layout.learning_devices)
    return largest * each


def _pop_offloaded(
    static: dict[str, float], shape: ModelShape, layout: ParallelLayout, trained_models: int
) -> dict[str, float]:
    """Remove masters and moments, which are elsewhere while completions are sampled; return them as what learning needs."""
    moved = static["optimizer"]
    static["optimizer"] = 0.0
    if not layout.only_adapters:
        masters = layout.optimizer.master_bytes(layout.bytes_per_number, layout.learning_devices)
        static["weights"] -= shape.parameters * trained_models * masters
        moved += shape.parameters * trained_models * masters
    return {"masters and moments": moved}


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
