"""How fast a device is: matrix products, memory, this library's learner and its sampler on a made-up model. For `policygrad plan`.

Every share is what `planning.seconds` expects over what was measured, so that a plan of the same work comes out as measured.
"""

from __future__ import annotations

import asyncio
import os
import platform
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib.metadata import version

import torch
from torch import nn

from policygrad import __version__
from policygrad.algorithms import DR_GRPO
from policygrad.learners.config import LearnerConfig
from policygrad.learners.local.learner import LocalLearner
from policygrad.models.precision import DTYPES
from policygrad.planning.devices import DEVICES, Device
from policygrad.planning.layout import MICRO, MICRO_CPU, Layout
from policygrad.planning.reached import Calibration, Reached
from policygrad.planning.seconds import Clock
from policygrad.planning.work import Work
from policygrad.samplers.base import Request, Sampling
from policygrad.samplers.local import LocalSampler
from policygrad.training.trial import CPU, GPU, Trial, batch_of, model_of


def calibrate(dtype: str, device: str, say: Callable[[str], None], trial: Trial | None = None) -> Calibration:
    """Measures the device in some precision; about a minute. device: torch's. trial: another than the usual one."""
    trial = trial or (CPU if device == "cpu" else GPU)
    say(f"matrix products in {dtype}")
    rate = products(trial, dtype, device)
    say(f"{rate / 1e9:,.0f} Gflop/s; memory")
    known = _known(device)
    bandwidth = copies(trial, device)
    figures = {"bf16" if dtype == "bf16" else "fp32": rate, "bandwidth": bandwidth, "memory": _memory(device)}
    measured = replace(known, source="measured by policygrad plan --calibrate", **figures)  # type: ignore[arg-type]
    say(f"{bandwidth / 1e9:,.1f} GB/s; learning")
    micro = MICRO_CPU if device == "cpu" else MICRO
    clock = Clock(trial.shape, measured, Reached(), Layout(gpus=1, dtype=dtype, micro_tokens=micro))
    model, tokens = model_of(trial.shape, dtype, device), trial.work.tokens()
    learning, scoring = learned(trial, model, dtype, device)
    say(f"{learning:.2f} s forward and backward, {scoring:.2f} s forward, {tokens.nodes:,.0f} tokens; drawing")
    few, many = (drawn(trial, model, rows, device) for rows in trial.rows)
    reached = replace(
        Reached(),
        learning=clock.least(tokens, 3, 3) / learning,
        scoring=clock.least(tokens, 1, 1) / scoring,
        **drawing(trial, clock, few, many),
    )
    say(f"{1e3 * many:.1f} ms a token of {trial.rows[1]} completions, {1e3 * few:.1f} ms of {trial.rows[0]}")
    taken = {"learning": learning, "scoring": scoring, "token of few": few, "token of many": many}
    return Calibration(measured, reached, dtype, {**_machine(), "rows": list(trial.rows), "seconds": taken})


def drawing(trial: Trial, clock: Clock, few: float, many: float) -> dict[str, float]:
    """Of `Reached`, from the seconds of a token for few and for many completions: what grows with their number is bytes and
    operations, what does not is weights and overhead."""
    a, b = trial.rows
    each = max((many - few) / (b - a), 1e-9)
    speed = replace(clock, reached=replace(clock.reached, drawing=1.0, layer=0.0)).sampler(_drawn(trial))
    share = speed.each / each
    return {"drawing": share, "layer": max(0.0, few - a * each - speed.fixed / share) / clock.shape.layers}


def products(trial: Trial, dtype: str, device: str) -> float:
    """Operations a second of the fastest of some square matrix products."""
    best = 0.0
    for n in trial.products:
        a, b = (torch.randn(n, n, device=device).to(DTYPES[dtype]) for _ in range(2))
        out = torch.empty(n, n, dtype=DTYPES[dtype], device=device)
        best = max(best, 2 * n**3 / seconds(partial(torch.mm, a, b, out=out), 2 * trial.repeats, device))
    return best


def copies(trial: Trial, device: str) -> float:
    """Bytes a second, read and written."""
    a = torch.ones(trial.copied // 4, device=device)
    b = torch.empty_like(a)
    return 2 * a.nbytes / seconds(partial(b.copy_, a), 2 * trial.repeats, device)


def learned(trial: Trial, model: nn.Module, dtype: str, device: str) -> tuple[float, float]:
    """Seconds of (forward and backward, forward alone) of the learner."""
    batch, algorithm = batch_of(trial.shape, trial.work), DR_GRPO.with_budget(trial.work.budget)
    config = LearnerConfig(dtype=dtype, device=device)
    learner = LocalLearner(model, algorithm, lr=0.0, steps=1, config=config)
    problem = learner.problem(batch, algorithm.advantages(batch), algorithm)

    def learn() -> None:
        problem.accumulate()
        learner.optimizer.take_gradient()

    needs = frozenset({"logp_old"})
    return (
        seconds(learn, trial.repeats, device),
        seconds(partial(learner.evaluate, batch, needs), trial.repeats, device),
    )


def drawn(trial: Trial, model: nn.Module, rows: int, device: str) -> float:
    """Seconds of a token for so many completions at once, prompts left out."""
    sampler, draw = LocalSampler(model, frozenset({-1}), 0), torch.Generator().manual_seed(0)
    groups = max(1, rows // trial.work.samples)
    prompts = [torch.randint(2, trial.shape.vocabulary, (trial.work.prompt,), generator=draw) for _ in range(groups)]

    def work(tokens: int) -> Callable[[], object]:
        sampling = Sampling(max_tokens=tokens, decode_rows=rows)
        asked = [Request(prompts[i % groups], (0, i), sampling, tokens) for i in range(rows)]
        return lambda: asyncio.run(_generated(sampler, asked))

    long, short = (seconds(work(tokens), trial.repeats, device) for tokens in (trial.drawn, 1))
    return max(long - short, 1e-9) / (trial.drawn - 1)


def seconds(work: Callable[[], object], repeats: int, device: str) -> float:
    """The least of so many calls, after one that is not counted: whatever else the machine does only makes them longer. CPU seconds
    where one thread computes, which leave out when it had to wait."""
    clock = time.process_time if device == "cpu" and torch.get_num_threads() == 1 else time.perf_counter
    taken = list[float]()
    for _ in range(repeats + 1):
        _wait(device)
        begun = clock()
        work()
        _wait(device)
        taken.append(clock() - begun)
    return max(min(taken[1:]), 1e-9)


async def _generated(sampler: LocalSampler, asked: list[Request]) -> object:
    return await sampler.generate(asked)


def _drawn(trial: Trial) -> Work:
    """The work of `drawn`: completions of one length."""
    samples = trial.work.samples
    return Work(max(1, trial.rows[1] // samples), samples, trial.work.prompt, trial.drawn, trial.drawn)


def _wait(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize(device)


def _known(device: str) -> Device:
    """The device of `--gpus` that this is."""
    if device == "cpu":
        return DEVICES["cpu"]
    name = torch.cuda.get_device_name(device)
    return next(
        (found for key, found in DEVICES.items() if key in name), replace(DEVICES["A100"], name=name.split()[-1])
    )


def _memory(device: str) -> float:
    if device == "cpu":
        return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    return float(torch.cuda.mem_get_info(device)[1])


def _machine() -> dict[str, str]:
    versions = {"torch": torch.__version__, "transformers": version("transformers"), "policygrad": __version__}
    return {
        "processor": platform.processor() or platform.machine(),
        "threads": str(torch.get_num_threads()),
        **versions,
    }
