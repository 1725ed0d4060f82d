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
from policygrad.learners.base import LearnerSpec
from policygrad.learners.config import LearnerConfig
from policygrad.learners.local.learner import LocalLearner
from policygrad.models.loading import DTYPES
from policygrad.planning.cost_model import MICRO_TOKENS, MICRO_TOKENS_CPU, ParallelLayout, TimeModel, Workload
from policygrad.planning.hardware import DEVICES, Calibration, Device, Efficiency
from policygrad.planning.model_shapes import ModelShape
from policygrad.samplers.base import Request, SamplingParams
from policygrad.samplers.local.sampler import LocalSampler

# What a calibration measures: a made-up model, completions that were never drawn, and how much of everything.


@dataclass(frozen=True)
class CalibrationWorkload:
    """What is measured."""

    shape: ModelShape
    workload: Workload
    """That is learned, and read."""
    matmul_widths: tuple[int, ...]
    """Widths of square matrices, of which the fastest counts."""
    copy_bytes: int
    """Bytes that are copied, to measure the memory's bandwidth."""
    decode_rows: tuple[int, int]
    """Completions drawn at once: few and many."""
    decode_tokens: int
    """Tokens of each."""
    repeats: int = 3


CPU = CalibrationWorkload(
    ModelShape("made up", 256, 1024, 4, 4, 2, 64, 6144, tied=True, qk_norm=True),
    Workload(4, 8, 64, 192, 192),
    (512, 1024, 2048),
    2**28,
    (16, 128),
    96,
)
GPU = CalibrationWorkload(
    ModelShape("made up", 2048, 8192, 4, 16, 8, 128, 32768, tied=True, qk_norm=True),
    Workload(16, 8, 256, 1024, 1024),
    (4096, 8192),
    2**32,
    (16, 256),
    128,
)


def build_model(shape: ModelShape, dtype: str, device: str) -> nn.Module:
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


def build_batch(shape: ModelShape, work: Workload) -> Batch:
    """Completions that were never drawn, with a reward for each."""
    draw, count = torch.Generator().manual_seed(0), work.num_completions
    longest = torch.tensor(work.lengths)

    def tokens(*size: int) -> Tensor:
        return torch.randint(2, shape.vocabulary, size, generator=draw)

    return Batch(
        mask=torch.arange(work.max_completion_tokens) < longest[:, None],
        group=torch.arange(work.prompts).repeat_interleave(work.samples_per_prompt),
        reward=torch.rand(count, generator=draw),
        tokens=tokens(count, work.max_completion_tokens),
        prompts=tuple(tokens(work.prompt_tokens) for _ in range(work.prompts)),
    )


def calibrate(
    dtype: str, device: str, say: Callable[[str], None], setup: CalibrationWorkload | None = None
) -> Calibration:
    """Measures the device in some precision; about a minute. device: torch's. trial: another than the usual one."""
    setup = setup or (CPU if device == "cpu" else GPU)
    say(f"matrix products in {dtype}")
    rate = measure_matmul(setup, dtype, device)
    say(f"{rate / 1e9:,.0f} Gflop/s; memory")
    known = _known(device)
    bandwidth = measure_bandwidth(setup, device)
    figures = {"bf16" if dtype == "bf16" else "fp32": rate, "bandwidth": bandwidth, "memory": _memory(device)}
    measured = replace(known, source="measured by policygrad plan --calibrate", **figures)  # type: ignore[arg-type]
    say(f"{bandwidth / 1e9:,.1f} GB/s; learning")
    micro = MICRO_TOKENS_CPU if device == "cpu" else MICRO_TOKENS
    clock = TimeModel(setup.shape, measured, Efficiency(), ParallelLayout(gpus=1, dtype=dtype, micro_tokens=micro))
    model, tokens = build_model(setup.shape, dtype, device), setup.workload.count_tokens()
    learning, scoring = measure_training(setup, model, dtype, device)
    say(f"{learning:.2f} s forward and backward, {scoring:.2f} s forward, {tokens.layer_tokens:,.0f} tokens; drawing")
    few, many = (measure_decoding(setup, model, rows, device) for rows in setup.decode_rows)
    reached = replace(
        Efficiency(),
        training=clock.roofline_seconds(tokens, 3, 3) / learning,
        scoring=clock.roofline_seconds(tokens, 1, 1) / scoring,
        **fit_decoding(setup, clock, few, many),
    )
    say(
        f"{1e3 * many:.1f} ms a token of {setup.decode_rows[1]} completions, {1e3 * few:.1f} ms of {setup.decode_rows[0]}"
    )
    taken = {"learning": learning, "scoring": scoring, "token of few": few, "token of many": many}
    return Calibration(measured, reached, dtype, {**_machine(), "rows": list(setup.decode_rows), "seconds": taken})


def fit_decoding(trial: CalibrationWorkload, clock: TimeModel, few: float, many: float) -> dict[str, float]:
    """Of `Efficiency`, from the seconds of a token for few and for many completions: what grows with their number is bytes and
    operations, what does not is weights and overhead."""
    a, b = trial.decode_rows
    each = max((many - few) / (b - a), 1e-9)
    speed = replace(clock, efficiency=replace(clock.efficiency, sampling=1.0, layer_overhead=0.0)).sampler_speed(
        _drawn(trial)
    )
    share = speed.per_completion / each
    return {"drawing": share, "layer": max(0.0, few - a * each - speed.fixed / share) / clock.shape.layers}


def measure_matmul(trial: CalibrationWorkload, dtype: str, device: str) -> float:
    """Operations a second of the fastest of some square matrix products."""
    best = 0.0
    for n in trial.matmul_widths:
        a, b = (torch.randn(n, n, device=device).to(DTYPES[dtype]) for _ in range(2))
        out = torch.empty(n, n, dtype=DTYPES[dtype], device=device)
        best = max(best, 2 * n**3 / time_call(partial(torch.mm, a, b, out=out), 2 * trial.repeats, device))
    return best


def measure_bandwidth(trial: CalibrationWorkload, device: str) -> float:
    """Bytes a second, read and written."""
    a = torch.ones(trial.copy_bytes // 4, device=device)
    b = torch.empty_like(a)
    return 2 * a.nbytes / time_call(partial(b.copy_, a), 2 * trial.repeats, device)


def measure_training(trial: CalibrationWorkload, model: nn.Module, dtype: str, device: str) -> tuple[float, float]:
    """Seconds of (forward and backward, forward alone) of the learner."""
    batch, algorithm = (
        build_batch(trial.shape, trial.workload),
        DR_GRPO.with_max_tokens(trial.workload.max_completion_tokens),
    )
    config = LearnerConfig(dtype=dtype, device=device)
    learner = LocalLearner(model, LearnerSpec(algorithm, lr=0.0, steps=1, config=config))
    problem = learner.build_problem(batch, algorithm.compute_advantages(batch), algorithm)

    def learn() -> None:
        problem.accumulate()
        learner.optimizer.pop_flat_gradient()

    needs = frozenset({"logp_old"})
    return (
        time_call(learn, trial.repeats, device),
        time_call(partial(learner.evaluate, batch, needs), trial.repeats, device),
    )


def measure_decoding(trial: CalibrationWorkload, model: nn.Module, rows: int, device: str) -> float:
    """Seconds of a token for so many completions at once, prompts left out."""
    sampler, draw = LocalSampler(model, frozenset({-1}), 0), torch.Generator().manual_seed(0)
    groups = max(1, rows // trial.workload.samples_per_prompt)
    prompts = [
        torch.randint(2, trial.shape.vocabulary, (trial.workload.prompt_tokens,), generator=draw) for _ in range(groups)
    ]

    def work(tokens: int) -> Callable[[], object]:
        sampling = SamplingParams(max_tokens=tokens, decode_rows=rows)
        asked = [Request(prompts[i % groups], (0, i), sampling, tokens) for i in range(rows)]
        return lambda: asyncio.run(_generated(sampler, asked))

    long, short = (time_call(work(tokens), trial.repeats, device) for tokens in (trial.decode_tokens, 1))
    return max(long - short, 1e-9) / (trial.decode_tokens - 1)


def time_call(work: Callable[[], object], repeats: int, device: str) -> float:
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


def _drawn(trial: CalibrationWorkload) -> Workload:
    """The work of `measure_decoding`: completions of one length."""
    samples = trial.workload.samples_per_prompt
    return Workload(
        max(1, trial.decode_rows[1] // samples),
        samples,
        trial.workload.prompt_tokens,
        trial.decode_tokens,
        trial.decode_tokens,
    )


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
