"""Where the time of a step goes, operation by operation."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from functools import partial

from torch.profiler import ProfilerActivity, profile

import policygrad as pg
from bench.decoding import requests
from bench.models import rollout, untrained
from bench.savings import learned
from bench.timing import Table
from bench.works import SEVEN, SMALL, Shape
from policygrad.models.loading import DTYPES, has_bf16_products

KINDS = {
    "attention": ("attention", "flash"),
    "matrix products": ("mm", "matmul", "linear", "bmm", "mkldnn", "addmv", "dot"),
    "softmax, exponentials, draws": (
        "softmax",
        "logsumexp",
        "exp",
        "log",
        "rand",
        "argmax",
        "multinomial",
        "sort",
        "topk",
    ),
    "copies, gathers, conversions": (
        "copy",
        "index",
        "gather",
        "scatter",
        "cat",
        "clone",
        "contiguous",
        "embedding",
        "fill",
        "zero",
        "_to",
        "repeat",
        "stack",
        "select_backward",
        "slice_backward",
    ),
}
"""Parts of the names of operations, looked for in this order; what has none of them is arithmetic element by element."""
REST, BETWEEN = "element by element", "between operations"


def kind(name: str) -> str:
    """To which part of the time an operation of torch belongs."""
    plain = name.removeprefix("aten::")
    if plain.startswith(("expand", "logical")):  # exp and log are others
        return REST
    return next((k for k, parts in KINDS.items() if any(part in plain for part in parts)), REST)


def parts(work: Callable[[], object]) -> tuple[float, dict[str, float]]:
    """(CPU seconds of a call, without the profiler; share of each kind of operation, under it)."""
    work()
    start = time.process_time()
    work()
    alone = time.process_time() - start
    start = time.process_time()
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        work()
    whole = time.process_time() - start
    found = dict.fromkeys([*KINDS, REST], 0.0)
    for event in seen.key_averages():
        if event.key.startswith("aten::"):
            found[kind(event.key)] += event.self_cpu_time_total / 1e6 / whole
    return alone, {**found, BETWEEN: 1 - sum(found.values())}


def works(shape: Shape, dtype: str, prompts: int, length: int) -> dict[str, Callable[[], object]]:
    """Drawing completions, and learning from as many."""
    batch = rollout(shape.vocabulary, prompts, 8, (length,), 60)
    model = untrained(shape).to(DTYPES[dtype])
    sampler = pg.LocalSampler(model, frozenset({-1}), 0)
    asked = requests(list(batch.prompts or ()), 8, [length] * len(batch.mask))
    algorithm = pg.DR_GRPO.with_max_tokens(length)
    learner = pg.LocalLearner(
        untrained(shape).to(DTYPES[dtype]),
        pg.LearnerSpec(algorithm, lr=0.0, steps=1, config=pg.LearnerConfig(dtype=dtype)),
    )
    problem = learner.build_problem(batch, algorithm.compute_advantages(batch), algorithm)
    return {
        "drawing": lambda: asyncio.run(sampler.generate(asked)),
        "learning": partial(learned, learner, problem),
    }


def profiled(small: bool, repeats: int) -> Table:
    """Shares of the time by kind of operation; `repeats` is not used, as a profile is one call."""
    shape, prompts, length = (SMALL, 2, 8) if small else (SEVEN, 16, 252)
    rows = list[tuple[str | float, ...]]()
    for dtype in ("fp32", "bf16") if has_bf16_products() else ("fp32",):
        for name, work in works(shape, dtype, prompts, length).items():
            seconds, shares = parts(work)
            rows.append((f"{name}, {dtype}", seconds, *shares.values()))
    note = (
        f"{prompts} × 8 completions of {length} tokens, prompts of 60: CPU seconds of drawing them and of one gradient from as "
        "many random ones, and which share of these goes to which operations (of torch, by its profiler, in a call of its own; "
        "the rest is Python, what the profiler itself takes, and what torch does not report)."
    )
    columns = ("what", "CPU s", *KINDS, REST, BETWEEN)
    return Table("Profile", note, columns, tuple(rows))
