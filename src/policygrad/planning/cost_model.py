"""How a run is spread over devices, and in what precision."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import ceil

from policygrad.errors import ConfigError
from policygrad.planning.hardware import Device, Reached
from policygrad.planning.model_shapes import Shape
from policygrad.planning.pipeline import SamplerSpeed

WEIGHT = {"bf16": 2, "fp32": 4}
"""Bytes of a number."""
MICRO = 16384
"""Tokens of a micro-batch on a GPU, as `--learner.micro-tokens` leaves it."""
MICRO_CPU = 1024


@dataclass(frozen=True)
class Layout:
    """Learners spread weights, gradients and moments among them (FSDP2); samplers have the policy whole, or a share of each layer.

    Raises:
        ConfigError: what does not go together.
    """

    gpus: int
    samplers: int = 0
    """Devices of these that only draw; 0 = all draw and learn, in turns."""
    tensor: int = 1
    """Devices that a sampler's layers are spread over (tensor parallel)."""
    staleness: int = 0
    """Rollouts that the samplers may be ahead, where they are apart."""
    dtype: str = "bf16"
    """That is computed in; masters, gradients and moments are float32."""
    checkpointing: bool = False
    """Activations are computed once more on the way back (`--learner.gradient-checkpointing`)."""
    micro_tokens: int = MICRO
    """Of a forward and backward pass of a learner; a text is never split."""
    decode_rows: int = 512
    """Completions that one sampler draws at once, at most."""
    shared: bool = True
    """A prompt is computed once for its group, as this library does."""
    whole: bool = True
    """A learner has the policy whole beside its share, to draw with, as this library's own sampler does; False = an engine draws,
    which alone has it."""

    def __post_init__(self) -> None:
        for name in ("gpus", "tensor", "micro_tokens", "decode_rows"):
            if getattr(self, name) < 1:
                raise ConfigError(f"--{name.replace('_', '-')} must be at least 1, not {getattr(self, name)}")
        if self.dtype not in WEIGHT:
            raise ConfigError(f"--dtype must be one of {', '.join(WEIGHT)}, not {self.dtype!r}")
        if self.samplers < 0 or self.staleness < 0:
            raise ConfigError(f"--samplers and --staleness are at least 0, not {self.samplers} and {self.staleness}")
        if self.samplers >= self.gpus:
            raise ConfigError(
                f"--samplers {self.samplers} of {self.gpus} devices leave none to learn: give at most {self.gpus - 1}"
            )
        if self.drawing % self.tensor:
            raise ConfigError(
                f"--tensor-parallel {self.tensor} does not divide the {self.drawing} devices that draw: give a divisor of it"
            )

    @property
    def apart(self) -> bool:
        """Whether samplers have devices of their own."""
        return self.samplers > 0

    @property
    def learners(self) -> int:
        """Devices that learn."""
        return self.gpus - self.samplers

    @property
    def drawing(self) -> int:
        """Devices that draw."""
        return self.samplers or self.gpus

    @property
    def engines(self) -> int:
        """Samplers, of `tensor` devices each."""
        return self.drawing // self.tensor

    @property
    def weight(self) -> int:
        """Bytes of a number that is computed with."""
        return WEIGHT[self.dtype]


# What is done in a step: how many completions of which lengths, and what an algorithm asks of them.

GOLDEN = 0.618


@dataclass(frozen=True)
class Asks:
    """What an algorithm asks for besides sampling and the policy's gradient."""

    name: str = ""
    trained: int = 1
    """Models that train: the policy, a critic with a backbone of its own, a reward model."""
    frozen: int = 0
    """Models beside them that only evaluate: the reference."""
    scores: int = 0
    """Times that a rollout is read by some model before it is learned: log π_old, log π_ref, values."""
    epochs: int = 1
    """Times that a rollout is learned from."""
    updates: int = 1
    """Optimiser steps of a rollout."""
    behind: int = 0
    """Times that it is read besides where samples are older than the weights: log π_old, to correct for that."""
    head_twice: bool = False
    """The logits are computed once more on the way back, as the gradient to log π is not known on the way there."""
    samples: int = 8
    """G, completions of a prompt, where nobody says otherwise."""
    uncounted: tuple[str, ...] = ()
    """What it does besides that no plan counts, in words."""

    def readings(self, staleness: int) -> int:
        """Passes over a rollout before it is learned."""
        return self.scores + (self.behind if staleness else 0)

    def twice(self, staleness: int) -> bool:
        """Whether logits are computed again on the way back."""
        return self.head_twice or (staleness > 0 and self.behind > 0)


@dataclass(frozen=True)
class Work:
    """A step's completions.

    Their lengths are those of a policy that ends with the same probability at every token, cut off at `budget`: geometric, or in
    the limit exponential, with the mean that is given. Equal quantiles of that stand for the draws.

    Raises:
        ConfigError: numbers below 1, or a mean above the budget.
    """

    prompts: int
    samples: int
    prompt: int
    """Mean tokens of a prompt."""
    completion: float
    """Mean tokens of a completion."""
    budget: int
    """Tokens of a completion, at most."""

    def __post_init__(self) -> None:
        for name in ("prompts", "samples", "prompt", "completion", "budget"):
            if not getattr(self, name) >= 1:
                raise ConfigError(f"a step's {name} must be at least 1, not {getattr(self, name):g}")
        if self.completion > self.budget:
            raise ConfigError(
                f"completions of {self.completion:g} tokens in the mean are more than the {self.budget} that one may have: give a "
                "larger --context, or a smaller --completion"
            )

    @property
    def completions(self) -> int:
        """Of a step."""
        return self.prompts * self.samples

    @property
    def context(self) -> int:
        """Tokens of the longest text."""
        return self.prompt + self.budget

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each completion, long and short ones mixed."""
        count, scale = self.completions, _scale(self.completion / self.budget) * self.budget
        ordered = [_quantile((i + 0.5) / count, scale, self.budget) for i in range(count)]
        stride = next(s for s in range(max(1, round(count * GOLDEN)), 2 * count + 2) if math.gcd(s, count) == 1)
        return tuple(ordered[i * stride % count] for i in range(count))

    @cached_property
    def sampled(self) -> int:
        """Tokens of all completions."""
        return sum(self.lengths)

    def tokens(self, shared: bool = True) -> Tokens:
        """That a learner computes, each prompt once for its group, or with every completion anew."""
        count, whole, squares = self.completions, self.sampled, sum(n * n for n in self.lengths)
        copies = self.prompts if shared else count
        nodes = copies * self.prompt + whole - count  # nobody asks what comes after the last token
        pairs = copies * self.prompt * (self.prompt + 1) / 2 + (whole - count) * self.prompt + (squares - whole) / 2
        return Tokens(nodes, pairs, copies + whole - count)

    @cached_property
    def seen(self) -> float:
        """Tokens that a drawn one attends to, in the mean over all that are drawn."""
        return self.prompt + sum(n * n for n in self.lengths) / (2 * self.sampled)


@dataclass(frozen=True)
class Tokens:
    """What is computed of some texts."""

    nodes: float
    """Tokens that go through the layers."""
    pairs: float
    """Of a token and one that it attends to."""
    states: float
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

MASTER, GRADIENT, MOMENTS = 4, 4, 8
"""Bytes per parameter that trains, in float32."""
LOGITS = {"gpu": 2**27, "cpu": 2**21}
"""Logits that are in memory at once: the learner's head takes as many states at a time (`learners/local/logprobs.py`)."""
LOGIT = 12
"""Bytes of one, with what is made of it."""
KEPT_COPY = 2**30
"""Bytes of a state that is copied so that a failed step can be undone; of a larger one no copy is kept."""
CONTEXT = 2 * 2**30
"""Bytes that a GPU's driver and its communication take."""
USABLE = 0.95
"""Share of what is left that can be used before it is in too many pieces."""
SAMPLING = 24
"""Bytes of a logit that is drawn from, with its probability and its place in order."""


@dataclass(frozen=True)
class Memory:
    """Of one device."""

    always: Mapping[str, float] = field(default_factory=dict)
    """Bytes for the whole run, by what they are for."""
    learning: Mapping[str, float] = field(default_factory=dict)
    """Besides, while it learns."""
    drawing: Mapping[str, float] = field(default_factory=dict)
    """Besides, while it draws."""

    @property
    def peak(self) -> float:
        return sum(self.always.values()) + max(sum(self.learning.values()), sum(self.drawing.values()))


def usable(device: Device) -> float:
    """Bytes of a device that a plan may fill."""
    return (device.memory - (0 if device.name == "cpu" else CONTEXT)) * USABLE


def static(
    parameters: float, weight: int, trained: int, frozen: float, ranks: int = 1, *, adamw: bool = True
) -> dict[str, float]:
    """Bytes of models and what moves them, on one of so many ranks. weight: bytes of a number that is computed with. frozen: models
    beside those that train."""
    share, narrow = parameters / ranks, weight < MASTER
    state = share * trained * (MASTER + (MOMENTS if adamw else 0))
    alone = weight + (MASTER if narrow else 0)  # one process has both, several gather the narrow ones
    return {
        "weights": share * trained * (alone if ranks == 1 else MASTER),
        "gradients": share * trained * GRADIENT,
        "optimiser": share * (trained * MOMENTS if adamw else 6 * 4),  # conjugate gradients have six vectors
        "copy of the state": state if ranks == 1 and state <= KEPT_COPY else 0,
        "other models": share * frozen * (weight if ranks == 1 else MASTER),
    }


def activation(shape: Shape, weight: int) -> float:
    """Bytes that a layer keeps of a token for its way back, as transformers' own code runs it: a norm's input in float32 and its
    output twice, queries, keys and values (these repeated for every head), the attention's output, the MLP's four."""
    norms = 2 * (4 + 2 * weight) * shape.hidden
    each = (shape.heads + shape.kv_heads) * shape.head_dim
    normed = (4 + 2 * weight) * each if shape.qk_norm else 0
    attended = 4 * shape.heads * shape.head_dim * weight
    return norms + normed + attended + 4 * shape.intermediate * weight


def kept(shape: Shape, layout: Layout, tokens: float) -> float:
    """Bytes of activations of a micro-batch."""
    layer = activation(shape, layout.weight) * tokens
    entry = shape.hidden * layout.weight * tokens
    return shape.layers * entry + layer if layout.checkpointing else shape.layers * layer


def learner(shape: Shape, work: Work, asks: Asks, layout: Layout, device: Device) -> Memory:
    """Of the learner that has most; where all do both, of one of those."""
    ranks, weight = layout.learners, layout.weight
    always = static(shape.parameters, weight, asks.trained, asks.frozen, ranks)
    if ranks > 1:
        around = shape.embedding * (1 if shape.tied else 2)
        always["gathered layers"] = (2 * shape.layer + around) * weight
        if layout.whole and (layout.apart or layout.tensor == 1):
            always["the policy, whole"] = shape.parameters * weight
    tokens = max(layout.micro_tokens, work.context)
    logits = LOGITS["cpu" if device.name == "cpu" else "gpu"]
    learning = {
        "activations": kept(shape, layout, tokens),
        "logits": min(logits, tokens * shape.vocabulary) * LOGIT,
    }
    drawing = {} if layout.apart else sampling(shape, work, layout, _rows(work, layout))
    if not layout.apart and (not layout.whole or (ranks > 1 and layout.tensor > 1)):
        drawing["the policy's share"] = shape.parameters * weight / layout.tensor
    return Memory(_without_zeros(always), learning, drawing)


def sampler(shape: Shape, work: Work, layout: Layout, device: Device) -> Memory:
    """Of a device that only draws: as many completions as its memory holds."""
    weights = shape.parameters * layout.weight / layout.tensor
    return Memory({"the policy": weights}, drawing=sampling(shape, work, layout, slots(shape, work, layout, device)))


def sampling(shape: Shape, work: Work, layout: Layout, rows: int) -> dict[str, float]:
    """Bytes of drawing so many completions at once. This library's sampler keeps room for the longest text in each of its rows; an
    engine takes a page of the cache when a completion gets there (Kwon et al. 2023, PagedAttention, sec. 4.3)."""
    cache = rows * (work.context if layout.whole else work.seen) * shape.cache * layout.weight
    return {
        "keys and values": cache / layout.tensor,
        "logits": rows * shape.vocabulary * SAMPLING / layout.tensor,
    }


def slots(shape: Shape, work: Work, layout: Layout, device: Device) -> int:
    """Completions that a sampler draws at once: of what there are, as many as its memory holds; at least one."""
    if not layout.apart:
        return _rows(work, layout)
    left = usable(device) - shape.parameters * layout.weight / layout.tensor
    one = sum(sampling(shape, work, layout, 1).values())
    return max(1, min(_rows(work, layout), int(left / one)))


def _rows(work: Work, layout: Layout) -> int:
    return min(layout.decode_rows, -(-work.completions // layout.engines))


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

BACKWARD = 2
"""Of a backward pass, in forward passes."""


@dataclass(frozen=True)
class Phases:
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
    def whole(self) -> float:
        """One after the other."""
        return self.generation + self.update + self.publishing


@dataclass(frozen=True)
class Clock:
    """A shape on devices that reach so much of their figures."""

    shape: Shape
    device: Device
    reached: Reached
    layout: Layout

    def operations(self, tokens: Tokens, passes: float, head: float) -> float:
        """Of so many forward passes through the layers, and through the head."""
        shape = self.shape
        layers = 2 * shape.layer_products * tokens.nodes + 4 * shape.heads * shape.head_dim * tokens.pairs
        return passes * shape.layers * layers + head * 2 * shape.embedding * tokens.states

    def moved(self, tokens: Tokens, passes: float, head: float) -> float:
        """Bytes that are read and written besides the products' own."""
        shape = self.shape
        layer = 20 * shape.hidden + 8 * shape.widths + 5 * shape.intermediate
        at_layers = passes * shape.layers * layer * self.layout.weight * tokens.nodes
        return at_layers + head * 5 * 4 * shape.vocabulary * tokens.states

    def least(self, tokens: Tokens, passes: float, head: float) -> float:
        """Seconds on one device at its published figures."""
        rate = self.device.rate(self.layout.weight)
        return self.operations(tokens, passes, head) / rate + self.moved(tokens, passes, head) / self.device.bandwidth

    def scored(self, tokens: Tokens) -> float:
        """Seconds of a forward pass on one device."""
        return self.least(tokens, 1, 1) / self.reached.scoring

    def learned(self, tokens: Tokens, asks: Asks) -> float:
        """Seconds of forward and backward on one device."""
        passes = 1 + BACKWARD + (1 if self.layout.checkpointing else 0)
        head = 1 + BACKWARD + (1 if asks.twice(self.layout.staleness) else 0)
        return self.least(tokens, passes, head) / self.reached.learning

    def sampler(self, work: Work) -> SamplerSpeed:
        """Of one sampler. A token of n completions at once reads weights once, and every completion's keys and values."""
        shape, tensor = self.shape, self.layout.tensor
        narrow, bandwidth = self.layout.weight, self.device.bandwidth * tensor
        rate = self.device.rate(narrow) * tensor
        weights = (shape.layers * shape.layer_products + shape.embedding) * narrow
        one = Tokens(1, work.seen, 1)
        read = work.seen * shape.cache * narrow + SAMPLING * shape.vocabulary
        rows = -(-work.completions // self.layout.engines)
        prompts = min(work.prompts, -(-rows // work.samples))
        context = Tokens(work.prompt * prompts, prompts * work.prompt * (work.prompt + 1) / 2, prompts)
        overhead = self.reached.layer + (2 * self.reached.reduce if tensor > 1 else 0)
        return SamplerSpeed(
            fixed=weights / bandwidth / self.reached.drawing + shape.layers * overhead,
            each=(read / bandwidth + self.operations(one, 1, 1) / rate) / self.reached.drawing,
            slots=slots(shape, work, self.layout, self.device),
            start=self.scored(context) / tensor,
        )

    def generation(self, work: Work) -> float:
        """Seconds until the sampler that has most to do is done."""
        speed, engines = self.sampler(work), self.layout.engines
        loads = {work.lengths[i::engines] for i in range(min(engines, work.completions))}
        heaviest = sorted(loads, key=lambda load: (max(load, default=0), sum(load)))[-4:]
        return max(map(speed, heaviest))

    def gathering(self, size: float, devices: int) -> float:
        """Seconds until so many bytes, spread over so many devices, are in each of them."""
        if devices < 2:
            return 0.0
        within = size / self.device.link
        machines = -(-devices // self.device.per_node)
        between = size / (self.device.network * self.device.per_node) if machines > 1 else 0.0
        return max(within, between) / self.reached.link

    def micro_batches(self, tokens: Tokens, asks: Asks) -> int:
        """Of one learner in a step; every update has at least one."""
        of_update = asks.epochs * tokens.nodes / asks.updates / self.layout.learners
        return asks.updates * ceil(of_update / self.layout.micro_tokens)

    def phases(self, work: Work, asks: Asks) -> Phases:
        """Of a step. Learners share the tokens evenly. What they gather and sum goes on beside their passes, and is waited for
        where it takes longer."""
        shape, ranks = self.shape, self.layout.learners
        tokens, narrow = work.tokens(self.layout.shared), self.layout.weight
        gathered = self.gathering(shape.parameters * narrow, ranks)
        summed = self.gathering(shape.parameters * GRADIENT, ranks)
        batches = self.micro_batches(tokens, asks)
        scored = max(self.scored(tokens) / ranks, gathered * ceil(tokens.nodes / ranks / self.layout.micro_tokens))
        learned = max(asks.epochs * self.learned(tokens, asks) / ranks, batches * (BACKWARD * gathered + summed))
        state = 2 * (MASTER + MOMENTS) + GRADIENT + narrow
        return Phases(
            generation=self.generation(work),
            scoring=asks.readings(self.layout.staleness) * scored,
            learning=asks.trained * learned,
            optimiser=asks.updates * asks.trained * shape.parameters * state / ranks / self.device.bandwidth,
            publishing=self._publishing(),
        )

    def _publishing(self) -> float:
        """Into the same device's sampler, or through a folder."""
        size = self.shape.parameters * self.layout.weight
        if self.layout.apart:
            return self.gathering(size, self.layout.learners) + 2 * size / self.reached.storage
        if self.layout.learners == 1:
            return 0.0 if self.layout.weight == MASTER else size * 3 / self.device.bandwidth
        return self.gathering(size, self.layout.learners)
