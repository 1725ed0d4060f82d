"""The head, attention and packing, each against what it stands for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from bench.models import rollout, untrained
from bench.timing import Table, cpu_seconds
from bench.works import SEVEN, SMALL, TWENTY_FIVE, Shape, geometric
from policygrad.core.batch import Batch
from policygrad.learners.local.forward import Evaluator, build_evaluator
from policygrad.learners.local.logprobs import fused_log_probability
from policygrad.learners.local.packing import Pack, pack_micro_batches

BUDGET = 8192
"""Tokens of a micro-batch."""


def cases(small: bool) -> dict[str, tuple[int, int, tuple[int, ...], int]]:
    """Name → prompts, samples, lengths, tokens of a prompt."""
    if small:
        return {"equal lengths": (2, 4, (16,), 8), "geometric lengths": (2, 4, geometric(2, 32, 8), 8)}
    return {
        "equal lengths": (4, 8, (252,), 100),
        "geometric lengths": (4, 8, geometric(16, 1024, 32), 100),
        "long prompts, short answers": (4, 8, (32,), 400),
        "one answer per prompt": (32, 1, (252,), 100),
    }


def head(small: bool, repeats: int) -> Table:
    """log π and its gradient from states and the head's weight."""
    rows: list[tuple[str | float, ...]] = []
    for shape in (SMALL,) if small else (SEVEN, TWENTY_FIVE):
        count = 64 if small else 2048
        works, off = _heads(shape, count)
        took = cpu_seconds(works, repeats)
        for name, seconds in took.items():
            size, times = f"{count} × {shape.hidden} → {shape.vocabulary:,}", seconds / took["bare matrix products"]
            rows.append((size, name, seconds, times, off.get(name, "")))
    note = "Forward and backward of log π at every state, float32, against the three matrix products that it cannot do without."
    columns = ("states × hidden → vocabulary", "way", "CPU s", "× bare products", "gradient off by")
    return Table("Head", note, columns, tuple(rows))


def _heads(shape: Shape, count: int) -> tuple[dict[str, Callable[[], object]], dict[str, float]]:
    """(ways from states to gradients, how far each one's is from what autograd records)."""
    draw = torch.Generator().manual_seed(0)
    states = torch.randn(count, shape.hidden, generator=draw).requires_grad_()
    linear = nn.Linear(shape.hidden, shape.vocabulary, bias=False)
    tokens, index = torch.randint(shape.vocabulary, (count,), generator=draw), torch.arange(count)
    g = torch.randn(count, generator=draw) / count

    def gradient(logp: Tensor) -> Tensor:
        states.grad = linear.weight.grad = None
        torch.autograd.backward(logp, g)
        assert linear.weight.grad is not None
        return linear.weight.grad

    def products() -> None:
        with torch.no_grad():
            z = states @ linear.weight.T
            _ = z @ linear.weight, z.T @ states

    def fused(expected: Tensor | None) -> Tensor:
        return gradient(fused_log_probability(states, linear, index, tokens, 1.0, expected=expected)[0])

    def recorded() -> Tensor:
        return gradient(linear(states).log_softmax(-1).gather(-1, tokens[:, None]).squeeze(-1))

    ways = {"written down, coefficients known": partial(fused, g), "written down": partial(fused, None)}
    truth = recorded()
    off = {name: float((way() - truth).abs().max() / truth.abs().max()) for name, way in ways.items()}
    return {"bare matrix products": products, **ways, "recorded by autograd": recorded}, off


def packs(batch: Batch) -> list[Pack]:
    return list(pack_micro_batches(batch, torch.arange(len(batch.mask)), BUDGET))


def states(evaluator: Evaluator, parts: list[Pack]) -> None:
    """Forward and backward of the transformer below the head."""
    for part in parts:
        found = evaluator.network.states(part)
        torch.autograd.backward(found, torch.ones_like(found))
    evaluator.model.zero_grad()


def attention(small: bool, repeats: int) -> Table:
    """The tree of tokens against padded texts."""
    shape, rows = SMALL if small else SEVEN, list[tuple[str | float, ...]]()
    tree = build_evaluator(untrained(shape), 1.0)
    padded = replace(tree, network=replace(tree.network, use_tree=False))
    for name, (prompts, samples, lengths, prompt) in cases(small).items():
        parts = packs(rollout(shape.vocabulary, prompts, samples, lengths, prompt))
        took = cpu_seconds({"tree": partial(states, tree, parts), "padded": partial(states, padded, parts)}, repeats)
        nodes, places = sum(len(p.ids) for p in parts), sum(p.paths.numel() for p in parts)
        rows.append((name, nodes, places, took["tree"], took["padded"], took["padded"] / took["tree"]))
    note = "Forward and backward below the head: a tree's tokens once each, or texts in rows, padded to the longest of them."
    return Table(
        "Attention", note, ("completions", "tokens", "padded", "tree, CPU s", "padded, CPU s", "ratio"), tuple(rows)
    )


def packing(small: bool, repeats: int) -> Table:
    """What making micro-batches costs."""
    shape, rows = SMALL if small else SEVEN, list[tuple[str | float, ...]]()
    evaluator = build_evaluator(untrained(shape), 1.0)
    for name, (prompts, samples, lengths, prompt) in cases(small).items():
        batch = rollout(shape.vocabulary, prompts, samples, lengths, prompt)
        parts, alone = packs(batch), sum(len(batch.prompts[g]) for g in batch.group.tolist()) if batch.prompts else 0
        took = cpu_seconds({"packing": partial(packs, batch), "model": partial(states, evaluator, parts)}, repeats)
        whole, nodes = alone + int(batch.mask.sum()) - len(batch.mask), sum(len(p.ids) for p in parts)
        rows.append((name, whole, nodes, whole / nodes, took["packing"], took["packing"] / took["model"]))
    note = (
        "From completions to trees; the share is of the time that the transformer takes for them, forward and backward."
    )
    return Table(
        "Packing", note, ("completions", "tokens of the texts", "of the tree", "ratio", "CPU s", "share"), tuple(rows)
    )
