"""How fast a device is: matrix products, memory, this library's learner and its sampler on a made-up model. For `policygrad plan`.

Every share is what `planning.seconds` expects over what was measured, so that a plan of the same work comes out as measured.
"""

from __future__ import annotations

import asyncio
import os
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor, nn

from policygrad import __version__
from policygrad.algorithms import DR_GRPO
from policygrad.core.batch import Batch
from policygrad.learners.config import LearnerConfig
from policygrad.learners.local.learner import LocalLearner
from policygrad.models.loading import DTYPES
from policygrad.planning.cost_model import MICRO, MICRO_CPU, Clock, Layout, Work
from policygrad.planning.hardware import DEVICES, Calibration, Device, Reached
from policygrad.planning.model_shapes import Shape
from policygrad.samplers.base import Request, Sampling
from policygrad.samplers.local.sampler import LocalSampler

# What a calibration measures: a made-up model, completions that were never drawn, and how much of everything.


@dataclass(frozen=True)
class Trial:
    """What is measured."""

    shape: Shape
    work: Work
    """That is learned, and read."""
    products: tuple[int, ...]
    """Widths of square matrices, of which the fastest counts."""
    copied: int
    """Bytes that are copied, to measure the memory's bandwidth."""
    rows: tuple[int, int]
    """Completions drawn at once: few and many."""
    drawn: int
    """Tokens of each."""
    repeats: int = 3


CPU = Trial(
    Shape("made up", 256, 1024, 4, 4, 2, 64, 6144, tied=True, qk_norm=True),
    Work(4, 8, 64, 192, 192),
    (512, 1024, 2048),
    2**28,
    (16, 128),
    96,
)
GPU = Trial(
    Shape("made up", 2048, 8192, 4, 16, 8, 128, 32768, tied=True, qk_norm=True),
    Work(16, 8, 256, 1024, 1024),
    (4096, 8192),
    2**32,
    (16, 256),
    128,
)


def model_of(shape: Shape, dtype: str, device: str) -> nn.Module:
    """A Qwen3 of random weights."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    settings: dict[str, Any] = {
        "vocab_size": shape.vocabulary,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "tie_word_embeddings": shape.tied,
        "bos_token_id": None,
        "eos_token_id": 1,
        "pad_token_id": 0,
        "attn_implementation": "sdpa",
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: Any = Qwen3ForCausalLM(Qwen3Config(**settings))
    with torch.no_grad():
        model.get_input_embeddings().weight.normal_(0.0, 0.02)  # padding too, which is drawn here
    made: nn.Module = model.to(device=device, dtype=DTYPES[dtype]).eval()
    return made


def batch_of(shape: Shape, work: Work) -> Batch:
    """Completions that were never drawn, with a reward for each."""
    draw, count = torch.Generator().manual_seed(0), work.completions
    longest = torch.tensor(work.lengths)

    def tokens(*size: int) -> Tensor:
        return torch.randint(2, shape.vocabulary, size, generator=draw)

    return Batch(
        mask=torch.arange(work.budget) < longest[:, None],
        group=torch.arange(work.prompts).repeat_interleave(work.samples),
        reward=torch.rand(count, generator=draw),
        tokens=tokens(count, work.budget),
        prompts=tuple(tokens(work.prompt) for _ in range(work.prompts)),
    )


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
