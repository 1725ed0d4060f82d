"""Bytes on one device, by what they are for.

A learner's, of R that share P parameters: masters, gradients and two moments of AdamW in float32, 16 P/R; the layers that are
gathered; the reference, 4 P/R; and what a micro-batch keeps for its way back. A sampler's: its share of the weights, and the keys
and values of the completions that it draws at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from policygrad.planning.devices import Device
from policygrad.planning.layout import Layout
from policygrad.planning.shapes import Shape
from policygrad.planning.work import Asks, Work

MASTER, GRADIENT, MOMENTS = 4, 4, 8
"""Bytes per parameter that trains, in float32."""
LOGITS = {"gpu": 2**27, "cpu": 2**21}
"""Logits that are in memory at once: the learner's head takes as many states at a time (`learners/local/head.py`)."""
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
