"""Floating-point operations that a step cannot do without."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from bench.works import Shape

Group = tuple[int, Sequence[int]]
"""(tokens of a prompt, tokens of each completion to it)."""


def forward(shape: Shape, groups: Iterable[Group]) -> float:
    """Of one pass over every token, each prompt once: two per weight and token; of attention, four per head, width and pair of a
    token and one that it sees. A completion's last token is never read."""
    nodes = pairs = reading = 0.0
    for prompt, completions in groups:
        nodes += prompt + sum(n - 1 for n in completions)
        reading += 1 + sum(n - 1 for n in completions)
        pairs += prompt * (prompt + 1) / 2 + sum((n - 1) * prompt + (n - 1) * n / 2 for n in completions)
    widths = shape.heads + shape.kv_heads
    layer = 2 * shape.hidden * widths * shape.head_dim + 3 * shape.hidden * shape.intermediate
    attended = 4 * shape.heads * shape.head_dim * pairs
    return shape.layers * (2 * layer * nodes + attended) + 2 * shape.hidden * shape.vocabulary * reading


def gradient(shape: Shape, groups: Iterable[Group]) -> float:
    """Of a forward pass and a backward one, which takes twice as many, with nothing computed again."""
    return 3 * forward(shape, groups)


def step(shape: Shape, groups: Iterable[Group]) -> float:
    """Of drawing completions, each token once, and of one gradient from them."""
    return 4 * forward(shape, list(groups))
