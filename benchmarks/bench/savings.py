"""The learner: each saving switched off alone, and how near it comes to the speed of bare matrix products."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

import policygrad as pg
from bench import operations
from bench.models import rollout, untrained
from bench.timing import Table, cpu_seconds
from bench.works import SEVEN, SMALL, TWENTY_FIVE, Shape
from policygrad.core.batch import Batch
from policygrad.models.loading import DTYPES, has_bf16_products, load_model
from policygrad.models.tokenizer import load_tokenizer
from policygrad.rewards.workers.pool import RewardPool
from policygrad.rollout.rollouter import Rollouter
from policygrad.rollout.trajectory import RolloutConfig


def embedded(prompts: int, samples: int) -> tuple[Any, Batch]:
    """The model inside the package, and a rollout of it on its own task."""
    model, task = load_model("tiny"), pg.load_task("embedded")
    tokenizer = load_tokenizer("tiny", model)
    with RewardPool(task.rewards) as pool:
        rollouter = Rollouter(
            task.train_example, tokenizer, pg.LocalSampler.from_tokenizer(model, tokenizer), pool.score
        )
        found = rollouter.collect(pg.DR_GRPO, RolloutConfig(pg.SamplingParams(max_tokens=32), prompts, samples))
    return model, found.batch


def gradient(model: Any, problem: Any) -> list[Tensor]:
    """What one rollout gives every parameter."""
    problem.accumulate()
    found = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    return found


def savings(small: bool, repeats: int) -> Table:
    """The learner's forward and backward passes, with its savings and without."""
    rows, shape = list[tuple[str | float, ...]](), SMALL if small else SEVEN
    prompts, length = (4, 16) if small else (4, 252)
    works = {
        "embedded task": embedded(*((8, 4) if small else (64, 8))),
        f"{prompts} × 8 completions of {length}": (untrained(shape), rollout(shape.vocabulary, prompts, 8, (length,))),
    }
    for work, (model, batch) in works.items():
        algorithm = pg.DR_GRPO.with_max_tokens(batch.mask.shape[1])
        learner = pg.LocalLearner(model, pg.LearnerSpec(algorithm, lr=0.0, steps=1))
        psi = algorithm.compute_advantages(batch)
        every = learner.build_problem(batch, psi, algorithm)
        policy = learner.evaluator
        texts = replace(every.networks, policy=replace(policy, network=replace(policy.network, use_tree=False)))
        known = replace(batch, logp_old=learner.evaluate(batch, frozenset({"logp_old"})).logp_old)
        variants = {
            "every saving": every,
            "without skipping what cannot learn": replace(every, skip_inactive=False),
            "without a common beginning computed once": replace(every, networks=texts),
            "without knowing the coefficients": replace(every, batch=known),
            "without any of them": replace(every, networks=texts, skip_inactive=False, batch=known),
        }
        took = cpu_seconds({name: partial(gradient, model, problem) for name, problem in variants.items()}, repeats)
        found = {name: gradient(model, problem) for name, problem in variants.items()}
        plain = found["without any of them"]
        largest = max(float(g.abs().max()) for g in plain)
        for name, seconds in took.items():
            off = max(float((a - b).abs().max()) for a, b in zip(found[name], plain, strict=True)) / largest
            rows.append((work, name, seconds, float(batch.mask.sum()) / seconds, seconds / took["every saving"], off))
    note = "Forward and backward of one update, without the optimiser's step. Every way has the same gradient, up to rounding."
    columns = ("rollout", "learner", "CPU s", "sampled tokens per CPU s", "× every saving", "gradient off by")
    return Table("The learner's savings", note, columns, tuple(rows))


def groups(batch: Batch) -> list[operations.Group]:
    """How long a rollout's prompts and completions are."""
    assert batch.prompts is not None
    return [(len(prompt), batch.lengths[batch.group == i].tolist()) for i, prompt in enumerate(batch.prompts)]


def rate(dtype: torch.dtype, small: bool) -> float:
    """Operations per CPU second of the fastest of some square matrix products."""
    best = 0.0
    for n in (128,) if small else (512, 1024, 2048):
        a, b = torch.randn(n, n).to(dtype), torch.randn(n, n).to(dtype)
        out = torch.empty(n, n, dtype=dtype)
        times: dict[str, Callable[[], object]] = {"mm": partial(torch.mm, a, b, out=out)}
        best = max(best, 2 * n**3 / max(cpu_seconds(times, 5)["mm"], 1e-9))
    return best


def matmul(small: bool, repeats: int) -> Table:
    """The learner's share of the measured matrix-multiply rate."""
    rows = list[tuple[str | float, ...]]()
    prompts, length = (2, 16) if small else (4, 256)
    for name, shape in (("small", SMALL),) if small else (("7M", SEVEN), ("25M", TWENTY_FIVE)):
        batch = rollout(shape.vocabulary, prompts, 8, (length,))
        for dtype in ("fp32", "bf16") if has_bf16_products() else ("fp32",):
            model = untrained(shape).to(DTYPES[dtype])
            algorithm = pg.DR_GRPO.with_max_tokens(length)
            learner = pg.LocalLearner(
                model, pg.LearnerSpec(algorithm, lr=0.0, steps=1, config=pg.LearnerConfig(dtype=dtype))
            )
            problem = learner.build_problem(batch, algorithm.compute_advantages(batch), algorithm)
            seconds = cpu_seconds({"": partial(learned, learner, problem)}, repeats)[""]
            needed, bare = operations.gradient(shape, groups(batch)), rate(DTYPES[dtype], small)
            rows.append(
                (f"{name}, {dtype}", needed / 1e9, seconds, needed / seconds / 1e9, bare / 1e9, needed / seconds / bare)
            )
    note = (
        f"{prompts * 8} completions of {length} tokens to {prompts} prompts of 100: what a gradient needs (of attention only "
        "what is seen, no recomputation) per CPU second, against the fastest square matrix product in the same format."
    )
    columns = ("model", "Gflop", "CPU s", "Gflop/s", "matrix product, Gflop/s", "share")
    return Table("Share of the matrix-multiply rate", note, columns, tuple(rows))


def compiled(small: bool, repeats: int) -> Table:
    """The learner with `--learner.compile` and without."""
    rows = list[tuple[str | float, ...]]()
    prompts, length = (2, 16) if small else (4, 252)
    models = (("small", SMALL),) if small else (("7M", SEVEN), ("25M", TWENTY_FIVE))
    dtypes = ("fp32", "bf16") if has_bf16_products() else ("fp32",)
    for (name, shape), dtype in product(models, dtypes):
        with tempfile.TemporaryDirectory() as cache:
            compiling, again = (time_compiling(shape, dtype, prompts, length, cache) for _ in range(2))
        works, gradients = dict[str, Callable[[], object]](), dict[bool, Tensor]()
        for use in (False, True):
            learner, problem = build_learner(shape, dtype, prompts, length, use)
            problem.accumulate()
            gradients[use] = learner.optimizer.pop_flat_gradient()
            works["compiled" if use else "as it is"] = partial(learned, learner, problem)
        took = cpu_seconds(works, repeats)
        off = float((gradients[True] - gradients[False]).norm() / gradients[False].norm())
        ratio = took["as it is"] / took["compiled"]
        rows.append((f"{name}, {dtype}", took["as it is"], took["compiled"], ratio, compiling, again, off))
    note = (
        f"{prompts * 8} completions of up to {length} tokens. Compiling is by how many seconds the first pass of a new process "
        "takes longer than its second: with nothing compiled before, and with what that process has left on the disk."
    )
    columns = ("model", "CPU s", "compiled, CPU s", "ratio", "compiling, s", "from the disk, s", "gradient off by")
    return Table("`--learner.compile`", note, columns, tuple(rows))


def build_learner(shape: Shape, dtype: str, prompts: int, length: int, use: bool) -> tuple[Any, Any]:
    """A learner, with compiled blocks or without, and a problem for it."""
    batch = rollout(shape.vocabulary, prompts, 8, (length, length // 2, length // 3))
    model, algorithm = untrained(shape).to(DTYPES[dtype]), pg.DR_GRPO.with_max_tokens(length)
    config = pg.LearnerConfig(dtype=dtype, compile=use)
    learner = pg.LocalLearner(model, pg.LearnerSpec(algorithm, lr=0.0, steps=1, config=config))
    return learner, learner.build_problem(batch, algorithm.compute_advantages(batch), algorithm)


def time_compiling(shape: Shape, dtype: str, prompts: int, length: int, cache: str) -> float:
    """By how many seconds the first pass of a process takes longer than its second. What it compiles stays in `cache`."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, context) as process:
        return process.submit(_time_first_pass, shape, dtype, prompts, length, cache).result()


def _time_first_pass(shape: Shape, dtype: str, prompts: int, length: int, cache: str) -> float:
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
    learner, problem = build_learner(shape, dtype, prompts, length, True)
    seconds = list[float]()
    for _ in range(2):
        begin = time.perf_counter()
        learned(learner, problem)
        seconds.append(time.perf_counter() - begin)
    return seconds[0] - seconds[1]


def learned(learner: Any, problem: Any) -> None:
    problem.accumulate()
    learner.optimizer.pop_flat_gradient()
