"""Seconds of a step's phases, from operations and bytes.

a pass      ( operations / peak rate + bytes / bandwidth ) / share reached
operations  forward: 2 per weight of a matrix product and token, 4 per width of the heads and pair of a token and one that it
            attends to; backward twice that; activations that are computed once more, forward again
bytes       of what is no matrix product: numbers that norms, positions, gates and residuals read and write
a token for each of n completions
            ( weights / bandwidth + n · ( keys and values / bandwidth + operations / peak rate ) ) / share + layers · overhead
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from policygrad.planning.devices import Device
from policygrad.planning.layout import Layout
from policygrad.planning.memory import GRADIENT, MASTER, MOMENTS, SAMPLING, slots
from policygrad.planning.pipeline import SamplerSpeed
from policygrad.planning.reached import Reached
from policygrad.planning.shapes import Shape
from policygrad.planning.work import Asks, Tokens, Work

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
