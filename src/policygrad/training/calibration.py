"""Measure how fast a device is: matrix products, memory, this library's learner and its sampler on a made-up model. For
`policygrad plan`.

Every efficiency is the time that `planning.cost_model` expects divided by the measured one, so that a plan of the same work comes
out as measured.
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
from policygrad.planning.cost_model import MICRO_TOKENS, MICRO_TOKENS_CPU, ParallelLayout, Workload
from policygrad.planning.hardware import DEVICES, Calibration, Efficiency
from policygrad.planning.shapes import DenseShape, ModelShape
from policygrad.planning.time_model import TimeModel
from policygrad.samplers.base import Request, SamplingParams
from policygrad.samplers.local.sampler import LocalSampler
from policygrad.utils.devices import synchronize


@dataclass(frozen=True)
class CalibrationWorkload:
    """What is measured: a made-up model on completions that were never sampled."""

    shape: DenseShape
    workload: Workload  # for training and scoring
    matmul_widths: tuple[int, ...]  # widths of square matrices; the fastest counts
    copy_bytes: int  # copied to measure the memory's bandwidth
    decode_rows: tuple[int, int]  # completions sampled at once: few and many
    decode_tokens: int  # tokens of each completion
    repeats: int = 3


CPU = CalibrationWorkload(
    DenseShape("made up", 256, 1024, 4, 4, 2, 64, 6144, tied=True, qk_norm=True),
    Workload(4, 8, 64, 192, 192),
    (512, 1024, 2048),
    2**28,
    (16, 128),
    96,
)
GPU = CalibrationWorkload(
    DenseShape("made up", 2048, 8192, 4, 16, 8, 128, 32768, tied=True, qk_norm=True),
    Workload(16, 8, 256, 1024, 1024),
    (4096, 8192),
    2**32,
    (16, 256),
    128,
)


def calibrate(
    dtype: str, device: str, say: Callable[[str], None], setup: CalibrationWorkload | None = None
) -> Calibration:
    """Measure the device in this precision, in about a minute. `say` is called with progress messages."""
    setup = setup or (CPU if device == "cpu" else GPU)
    say(f"matrix products in {dtype}")
    rate = measure_matmul(setup, dtype, device)
    say(f"{rate / 1e9:,.0f} Gflop/s; memory")
    bandwidth = measure_bandwidth(setup, device)
    if device == "cpu":
        memory = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
        device_entry = DEVICES["cpu"]
    else:
        memory = float(torch.cuda.mem_get_info(device)[1])
        name = torch.cuda.get_device_name(device)
        unknown = replace(DEVICES["A100"], name=name.split()[-1])
        device_entry = next((entry for key, entry in DEVICES.items() if key in name), unknown)
    figures = {"bf16" if dtype == "bf16" else "fp32": rate, "bandwidth": bandwidth, "memory": memory}
    source = "measured by policygrad plan --calibrate"
    measured = replace(device_entry, source=source, utilisation=1.0, **figures)  # type: ignore[arg-type]
    say(f"{bandwidth / 1e9:,.1f} GB/s; training")
    micro_tokens = MICRO_TOKENS_CPU if device == "cpu" else MICRO_TOKENS
    layout = ParallelLayout(gpus=1, dtype=dtype, micro_tokens=micro_tokens)
    time_model = TimeModel(setup.shape, measured, Efficiency(), layout)
    model, tokens = build_model(setup.shape, dtype, device), setup.workload.count_tokens()
    training, scoring = measure_training(setup, model, dtype, device)
    say(f"{training:.2f} s forward and backward, {scoring:.2f} s forward, {tokens.layer_tokens:,.0f} tokens; sampling")
    few, many = (measure_decoding(setup, model, rows, device) for rows in setup.decode_rows)
    efficiency = replace(
        Efficiency(),
        training=time_model.roofline_seconds(tokens, 3, 3) / training,
        scoring=time_model.roofline_seconds(tokens, 1, 1) / scoring,
        **fit_decoding(setup, time_model, few, many),
    )
    say(
        f"{1e3 * many:.1f} ms per token of {setup.decode_rows[1]} completions, {1e3 * few:.1f} ms of {setup.decode_rows[0]}"
    )
    details = {
        "processor": platform.processor() or platform.machine(),
        "threads": str(torch.get_num_threads()),
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "policygrad": __version__,
        "rows": list(setup.decode_rows),
        "seconds": {"training": training, "scoring": scoring, "token of few": few, "token of many": many},
    }
    return Calibration(measured, efficiency, dtype, details)


def build_model(shape: DenseShape, dtype: str, device: str) -> nn.Module:
    """Build a Qwen3 with random weights."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        tie_word_embeddings=shape.tied,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
        attn_implementation="sdpa",  # type: ignore[call-arg]
    )
    with torch.random.fork_rng(devices=[] if device == "cpu" else [device]), torch.no_grad():
        torch.manual_seed(0)
        with torch.device(device):  # a GPU draws billions of weights in a second
            model: Any = Qwen3ForCausalLM(config)
        model.get_input_embeddings().weight.normal_(0.0, 0.02)  # the padding row too, since it is sampled here
    return model.to(dtype=DTYPES[dtype]).eval()  # type: ignore[no-any-return]


def build_batch(shape: ModelShape, workload: Workload) -> Batch:
    """Build a batch of random completions and rewards."""
    generator, count = torch.Generator().manual_seed(0), workload.num_completions
    lengths, budget = torch.tensor(workload.lengths), workload.max_completion_tokens

    def random_ids(*size: int) -> Tensor:
        return torch.randint(2, shape.vocabulary, size, generator=generator)

    return Batch(
        mask=torch.arange(budget) < lengths[:, None],
        group=torch.arange(workload.prompts).repeat_interleave(workload.samples_per_prompt),
        reward=torch.rand(count, generator=generator),
        tokens=random_ids(count, budget),
        prompts=tuple(random_ids(workload.prompt_tokens) for _ in range(workload.prompts)),
    )


def fit_decoding(setup: CalibrationWorkload, time_model: TimeModel, few: float, many: float) -> dict[str, float]:
    """Fit the sampling fields of `Efficiency` to the seconds per token of few and of many completions. Bytes and operations grow
    with their number, weights and overhead do not."""
    a, b = setup.decode_rows
    per_completion = max((many - few) / (b - a), 1e-9)
    samples = setup.workload.samples_per_prompt
    workload = Workload(
        max(1, b // samples), samples, setup.workload.prompt_tokens, setup.decode_tokens, setup.decode_tokens
    )
    ideal = replace(time_model, efficiency=replace(time_model.efficiency, sampling=1.0, layer_overhead=0.0))
    speed = ideal.sampler_speed(workload)
    sampling = speed.per_completion / per_completion
    overhead = max(0.0, few - a * per_completion - speed.fixed / sampling) / time_model.shape.num_layers
    return {"sampling": sampling, "layer_overhead": overhead}


def measure_matmul(setup: CalibrationWorkload, dtype: str, device: str) -> float:
    """Return the operations per second of the fastest of some square matrix products."""
    best = 0.0
    for n in setup.matmul_widths:
        a, b = (torch.randn(n, n, device=device).to(DTYPES[dtype]) for _ in range(2))
        out = torch.empty(n, n, dtype=DTYPES[dtype], device=device)
        best = max(best, 2 * n**3 / time_call(partial(torch.mm, a, b, out=out), 2 * setup.repeats, device))
    return best


def measure_bandwidth(setup: CalibrationWorkload, device: str) -> float:
    """Return the bytes per second that are read and written."""
    a = torch.ones(setup.copy_bytes // 4, device=device)
    b = torch.empty_like(a)
    return 2 * a.nbytes / time_call(partial(b.copy_, a), 2 * setup.repeats, device)


def measure_training(setup: CalibrationWorkload, model: nn.Module, dtype: str, device: str) -> tuple[float, float]:
    """Return the learner's seconds for (forward and backward, forward alone)."""
    batch = build_batch(setup.shape, setup.workload)
    algorithm = DR_GRPO.with_max_tokens(setup.workload.max_completion_tokens)
    config = LearnerConfig(dtype=dtype, device=device)
    learner = LocalLearner(model, LearnerSpec(algorithm, lr=0.0, steps=1, config=config))
    problem = learner.build_problem(batch, algorithm.compute_advantages(batch), algorithm)

    def train() -> None:
        problem.accumulate()
        learner.optimizer.pop_flat_gradient()

    score = partial(learner.evaluate, batch, frozenset({"logp_old"}))
    return time_call(train, setup.repeats, device), time_call(score, setup.repeats, device)


def measure_decoding(setup: CalibrationWorkload, model: nn.Module, rows: int, device: str) -> float:
    """Return the seconds per token for this many completions at once, without their prompts."""
    sampler, generator = LocalSampler(model, frozenset({-1}), 0), torch.Generator().manual_seed(0)
    groups = max(1, rows // setup.workload.samples_per_prompt)
    size = (setup.workload.prompt_tokens,)
    prompts = [torch.randint(2, setup.shape.vocabulary, size, generator=generator) for _ in range(groups)]

    def sample(tokens: int) -> Callable[[], object]:
        sampling = SamplingParams(max_tokens=tokens, decode_rows=rows)
        requests = [Request(prompts[i % groups], (0, i), sampling, tokens) for i in range(rows)]

        async def generate() -> object:
            return await sampler.generate(requests)

        return lambda: asyncio.run(generate())

    long, short = (time_call(sample(tokens), setup.repeats, device) for tokens in (setup.decode_tokens, 1))
    return max(long - short, 1e-9) / (setup.decode_tokens - 1)


def time_call(work: Callable[[], object], repeats: int, device: str) -> float:
    """Return the shortest of several calls, in seconds, after a warm-up: other work on the machine only makes calls longer. With
    one thread these are CPU seconds, without the time that it had to wait."""
    clock = time.process_time if device == "cpu" and torch.get_num_threads() == 1 else time.perf_counter
    seconds = list[float]()
    for _ in range(repeats + 1):
        synchronize(device)
        started = clock()
        work()
        synchronize(device)
        seconds.append(clock() - started)
    return max(min(seconds[1:]), 1e-9)
