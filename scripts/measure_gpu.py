"""Prove and measure policygrad on a GPU, with nothing to download.

python scripts/measure_gpu.py                      every part for which there is time, results in .bench/gpu.json
python scripts/measure_gpu.py --parts head sampler  some of them
python scripts/measure_gpu.py --device cpu          the same code with tiny shapes

Where a GPU is lent for a quarter of an hour, two commands bring all of it:

python scripts/measure_gpu.py --parts alone --seconds 400
python scripts/measure_gpu.py --parts checks --results .bench/checks.json & python scripts/measure_gpu.py --parts "real model"; wait

Each part is a process of its own with a time limit: one that fails or hangs costs none of the others. Models have random weights
and the shapes of Qwen3-0.6B and Qwen3-4B, so nothing is downloaded; only the default run needs reasoning-gym, and is left out
without it. docs/gpu.md is made from docs/results/gpu.json; `scripts/gpu_record.py .bench/gpu.json docs/results/gpu.json` adds
new parts to it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import multiprocessing
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parents[1]
sys.path += [str(ROOT / "src"), str(ROOT / "tests"), str(ROOT / "scripts")]  # also where nothing is installed

import gpu_colocation  # noqa: E402
import gpu_parts  # noqa: E402
import gpu_ranks  # noqa: E402
import gpu_real_model  # noqa: E402
import gpu_real_trl  # noqa: E402
from gpu_parts import CheckFailedError as CheckFailedError  # noqa: E402
from gpu_parts import check  # noqa: E402
from gpu_record import NOT_RUN, stamp, write_part  # noqa: E402
from gpu_versus import Step, build_on_cpu, measure_step  # noqa: E402

import policygrad as pg  # noqa: E402
from doubles.algorithms import runnable  # noqa: E402
from doubles.ranked import filled, learned, make_spec  # noqa: E402
from doubles.ranked import model as small_model  # noqa: E402
from policygrad.algorithms import ALGORITHMS  # noqa: E402
from policygrad.learners.local import tree_attention  # noqa: E402
from policygrad.learners.local.forward import build_evaluator, get_backbone  # noqa: E402
from policygrad.learners.local.learner import LocalLearner  # noqa: E402
from policygrad.learners.local.logprobs import fused_log_probability  # noqa: E402
from policygrad.learners.local.packing import pack_micro_batches  # noqa: E402
from policygrad.models.adapters import add_adapters  # noqa: E402
from policygrad.models.loading import DTYPES, load_model  # noqa: E402
from policygrad.models.lora_config import parse_lora  # noqa: E402
from policygrad.planning.cost_model import Workload  # noqa: E402
from policygrad.planning.hardware import DEVICES  # noqa: E402
from policygrad.planning.model_shapes import KNOWN_SHAPES  # noqa: E402
from policygrad.planning.shapes import DenseShape  # noqa: E402
from policygrad.samplers.base import Generation, Request, SamplingParams  # noqa: E402
from policygrad.samplers.local.sampler import LocalSampler  # noqa: E402
from policygrad.training import calibration  # noqa: E402

SECONDS = {"cuda": 520.0, "cpu": 3600.0}
"""For all parts together."""
CPU_PATIENCE = 3
"""How much longer a part may take on a CPU, which others may use too."""
RESULTS = ROOT / ".bench" / "gpu.json"
TINY = DenseShape("tiny", 64, 128, 2, 4, 2, 16, 512, tied=True, qk_norm=True)
GIB = 2**30


@dataclass(frozen=True)
class Texts:
    """What a learner is timed on: `prompts` groups of completions of one length."""

    prompts: int
    samples: int
    prompt_tokens: int
    completion_tokens: int
    micro_tokens: int

    @property
    def tokens(self) -> int:
        """Tokens of all texts, shared ones as often as they occur."""
        return self.prompts * self.samples * (self.prompt_tokens + self.completion_tokens)

    def batch(self, shape: DenseShape) -> pg.Batch:
        lengths = (self.prompt_tokens, self.completion_tokens, self.completion_tokens)
        return calibration.build_batch(shape, Workload(self.prompts, self.samples, *lengths))


@dataclass(frozen=True)
class Sizes:
    """How much work the parts do."""

    algorithms: int  # one of so many is compared
    small: DenseShape  # the first model
    large: DenseShape  # the one that trains with adapters
    texts_16k: Texts
    texts_64k: Texts
    groups: Texts  # completions that share a prompt
    rows: tuple[int, ...]  # completions drawn at once
    decode: tuple[int, int]  # tokens of a prompt and of a completion
    ahead: int  # tokens of the longest completion that is drawn ahead
    head: tuple[int, int, int]  # states, width and vocabulary
    step: Step  # of GRPO, beside TRL's
    long_step: Step  # whose prompt is longer than its completions


SIZES = {
    "cuda": Sizes(
        1,
        KNOWN_SHAPES["Qwen3-0.6B"],
        KNOWN_SHAPES["Qwen3-4B"],
        Texts(4, 1, 128, 16_256, 16_384),
        Texts(1, 1, 128, 65_408, 65_536),
        Texts(4, 8, 2_048, 1_024, 16_384),
        (64, 512),
        (256, 256),
        400,
        (4_096, 1_024, 151_936),
        Step(8, 8, 256, 1_024, (8, 16)),
        Step(8, 8, 4_096, 1_024, (2, 8)),
    ),
    "cpu": Sizes(
        16,
        TINY,
        TINY,
        Texts(2, 1, 8, 56, 64),
        Texts(1, 1, 8, 248, 256),
        Texts(2, 4, 24, 8, 64),
        (4, 8),
        (8, 8),
        40,
        (64, 32, 700),
        Step(2, 2, 8, 6, (2, 4)),
        Step(2, 2, 24, 6, (2,)),
    ),
}


def measure_device(device: str) -> dict[str, Any]:
    """Rates that everything else is compared with."""
    setup = calibration.CPU if device == "cpu" else calibration.GPU
    dtypes = ("fp32",) if device == "cpu" else ("fp32", "bf16")
    facts: dict[str, Any] = {
        f"{dtype} Tflop/s": calibration.measure_matmul(setup, dtype, device) / 1e12 for dtype in dtypes
    }
    facts["GB/s"] = calibration.measure_bandwidth(setup, device) / 1e9
    return facts


# Equality: the GPU computes what the CPU computes.


def check_algorithms(device: str) -> dict[str, Any]:
    """Every algorithm's update of a small model, on the device against the CPU: both in float64, and the device in float32. On a
    CPU some of them."""
    report: dict[str, Any] = {}
    for name in tuple(ALGORITHMS)[:: SIZES[device].algorithms]:
        algorithm = runnable(name).with_max_tokens(6)
        algorithm = algorithm.with_state(algorithm.init_state())
        states = dict[str, dict[str, Tensor]]()
        for where, dtype in ((f"{device} float64", torch.float64), (f"{device} float32", torch.float32)):
            learner = _small_learner(algorithm, device, dtype)
            learned(learner, algorithm, filled(algorithm, dtype))
            states[where] = {n: x.cpu().double() for n, x in learner.state()[0].items()}
        learner = _small_learner(algorithm, "cpu", torch.float64)
        learned(learner, algorithm, filled(algorithm))
        expected = {n: x for n, x in learner.state()[0].items() if x.is_floating_point() and x.ndim}
        report[name] = {where: _worst_error(state, expected) for where, state in states.items()}
        exact = 1e-6 if algorithm.critic is not None else 1e-9 if algorithm.update_rule.uses_lr else 1e-7
        error = report[name][f"{device} float64"]
        check(error <= exact, f"{name} differs from the CPU by {error:.2g} of the largest number in float64")
    worst = {where: max(report, key=lambda n: report[n][where]) for where in next(iter(report.values()))}
    return {where: {"algorithm": n, "error": report[n][where]} for where, n in worst.items()} | {
        "algorithms": len(report)
    }


def _small_learner(algorithm: pg.Algorithm, device: str, dtype: torch.dtype) -> LocalLearner:
    """Return a learner of a model with few weights, the same on every device."""
    named = algorithm.reference is not None and algorithm.reference.model is not None
    teacher = small_model(dtype, seed=7, n_embd=8, n_layer=2).to(device) if named else None
    model = small_model(dtype).to(device)
    torch.manual_seed(1)  # for a critic's head
    return LocalLearner(model, make_spec(algorithm), reference=teacher)


def _worst_error(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Return the largest difference, relative to each tensor's largest number."""
    errors = [
        float((actual[n] - x).abs().max()) / max(1e-30, float(x.abs().max())) for n, x in expected.items() if x.numel()
    ]
    return max(errors)


def check_resume(device: str) -> dict[str, Any]:
    """A learner that continues from another's checkpoint takes the same step as that one, bit for bit."""
    report: dict[str, Any] = {}
    for name in ("grpo", "ppo"):
        algorithm = runnable(name).with_max_tokens(6)
        batch = filled(algorithm, torch.float32)
        first, second = (_small_learner(algorithm, device, torch.float32) for _ in range(2))
        learned(first, algorithm, batch)
        tensors, values = first.state()
        second.check_state(tensors, values)
        second.restore({n: x.cpu().clone() for n, x in tensors.items()}, values)
        for learner in (first, second):
            learned(learner, algorithm, batch)
        states = [{n: x.cpu() for n, x in learner.state()[0].items()} for learner in (first, second)]
        differing = [n for n, x in states[0].items() if not torch.equal(x, states[1][n])]
        check(not differing, f"{name}: after a resume {', '.join(differing)} differ")
        report[name] = "bit for bit"
    return report


def check_packing(device: str) -> dict[str, Any]:
    """Log-probabilities and gradients of texts that share prefixes: by FlexAttention, by scaled-dot-product attention, and text by
    text, each against float64 on the CPU."""
    shape = replace(TINY, hidden=128, intermediate=256, heads=4, kv_heads=2, head_dim=32)
    batch = Texts(3, 4, 150, 90, 700).batch(shape)
    assert batch.tokens is not None
    batch.tokens[1::4, :40] = batch.tokens[::4, :40]  # completions that part late
    weight = torch.randn(batch.mask.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)

    def compute(model: nn.Module, kernel: str) -> tuple[Tensor, Tensor]:
        with patch.object(tree_attention, "FLEX_SCORES", 0 if kernel == "flex" else math.inf):
            evaluator = build_evaluator(model, 1.0)
            if kernel == "texts":
                evaluator = replace(evaluator, network=replace(evaluator.network, use_tree=False))
            check(evaluator.network.use_tree == (kernel != "texts"), "the model is not read as a tree")
            logp = torch.zeros(batch.mask.shape, dtype=torch.float64)
            for pack in pack_micro_batches(batch, torch.arange(len(batch.mask)), 700):
                out = evaluator(pack.to(next(model.parameters()).device))
                (out.double() * weight[pack.rows].to(out.device)).sum().backward()
                logp[pack.rows] = out.detach().cpu().double()
        gradient = torch.cat([p.grad.flatten().cpu().double() for p in model.parameters() if p.grad is not None])
        return logp, gradient

    truth_model = calibration.build_model(shape, "fp32", "cpu").double()
    truth = compute(truth_model, "texts")
    report: dict[str, Any] = {}
    kernels = ("texts", "sdpa") if device == "cpu" else ("texts", "sdpa", "flex")
    for dtype in ("fp32", "bf16"):
        for kernel in kernels:
            model = calibration.build_model(shape, "fp32", "cpu").to(device, DTYPES[dtype])
            logp, gradient = compute(model, kernel)
            report[f"{dtype} {kernel}"] = {
                "logp": float((logp - truth[0]).abs().max()),
                "gradient": float((gradient - truth[1]).norm() / truth[1].norm()),
            }
            errors, plain = report[f"{dtype} {kernel}"], report[f"{dtype} texts"]
            for name, error in errors.items():
                limit = 1e-4 if dtype == "fp32" else 2 * plain[name] + 1e-3
                check(error <= limit, f"{dtype} {kernel}: {name} is off by {error:.2g}, more than {limit:.2g}")
    return report


def check_head(device: str) -> dict[str, Any]:
    """Log-probabilities and entropies without a table of tokens × vocabulary, against the table in float64."""
    states, width, vocabulary = SIZES[device].head
    generator = torch.Generator().manual_seed(0)
    h = torch.randn(states, width, generator=generator)
    w = torch.randn(vocabulary, width, generator=generator) / width**0.5
    tokens = torch.randint(vocabulary, (states,), generator=generator)
    g, g_entropy = (torch.randn(states, generator=generator) for _ in range(2))
    report: dict[str, Any] = {}
    for dtype in (torch.float32, torch.bfloat16):
        results = []
        for exact in (True, False):
            head = nn.Linear(width, vocabulary, bias=False, device=device, dtype=torch.float64 if exact else dtype)
            with torch.no_grad():
                head.weight.copy_(w.to(dtype))
            x = h.to(dtype).to(device, head.weight.dtype).requires_grad_()
            entropy: Tensor | None
            if exact:
                logp, entropy = _table_statistics(head(x), tokens.to(device), 0.7)
            else:
                index = torch.arange(states, device=device)
                logp, entropy, _ = fused_log_probability(x, head, index, tokens.to(device), 0.7, entropy=True)
            assert entropy is not None
            loss = (logp * g.to(device)).sum() + (entropy * g_entropy.to(device)).sum()
            gradients = torch.autograd.grad(loss, [x, head.weight])
            results.append([logp.detach().double(), entropy.detach().double(), *(y.double() for y in gradients)])
        names = ("logp", "entropy", "gradient of states", "gradient of weights")
        errors = {n: float((a - b).norm() / b.norm()) for n, b, a in zip(names, *results, strict=True)}
        limit = 1e-4 if dtype == torch.float32 else 1e-2
        for name, error in errors.items():
            check(error <= limit, f"{dtype}: {name} is off by {error:.2g} of its norm")
        report[str(dtype).removeprefix("torch.")] = errors
    return report


def _table_statistics(logits: Tensor, tokens: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Return log π [n] of the tokens and the entropies [n] by their definition."""
    logp = (logits / temperature).log_softmax(-1)
    return logp.gather(-1, tokens[:, None]).squeeze(1), -(logp.exp() * logp).sum(-1)


def check_sampler(device: str) -> dict[str, Any]:
    """Completions of the embedded model: the same as on the CPU, with the log-probabilities that the learner computes."""
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(3, 60, (n,), generator=generator) for n in (5, 9, 14, 20)]
    sampling = SamplingParams(max_tokens=64, decode_rows=24)
    requests = [Request(prompts[i // 8], (0, i), sampling, 64) for i in range(32)]
    drawn: dict[str, list[Generation]] = {}
    report: dict[str, Any] = {}
    for where, dtype in (("cpu", "fp32"), (device, "fp32"), (device, "bf16")):
        model = load_model("tiny", dtype=dtype, device=where)
        generations = asyncio.run(LocalSampler(model, frozenset({1}), 0).generate(requests))
        drawn[f"{where} {dtype}"] = generations
        width = max(len(x.tokens) for x in generations)
        mask = torch.zeros(len(requests), width, dtype=torch.bool)
        tokens = torch.zeros(len(requests), width, dtype=torch.int64)
        sampled = torch.zeros(len(requests), width)
        for i, x in enumerate(generations):
            n = len(x.tokens)
            mask[i, :n], tokens[i, :n], sampled[i, :n] = True, x.tokens, x.logp
        batch = pg.Batch(
            mask=mask, group=torch.arange(32) // 8, reward=torch.zeros(32), tokens=tokens, prompts=tuple(prompts)
        )
        spec = pg.LearnerSpec(pg.DR_GRPO, 1e-3, 1, 1.0, pg.LearnerConfig(dtype=dtype, device=where))
        logp = LocalLearner(model, spec).evaluate(batch, frozenset({"logp_old"})).logp_old
        assert logp is not None
        error = float((logp - sampled)[mask].abs().max())
        report[f"{where} {dtype}"] = {"nats from the learner": error}
        limit = 1e-4 if dtype == "fp32" else 0.5
        check(error <= limit, f"{where} {dtype}: sampler and learner differ by {error:.2g} nats")
    reference = drawn["cpu fp32"]
    for where, generations in drawn.items():
        same = sum(torch.equal(a.tokens, b.tokens) for a, b in zip(generations, reference, strict=True))
        report[where]["completions as on the CPU"] = same
    check(report[f"{device} fp32"]["completions as on the CPU"] >= 30, f"other completions than on the CPU: {report}")
    return report | {"completions": len(requests)}


def check_decode_ahead(device: str) -> dict[str, Any]:
    """Completions of many lengths, drawn several tokens at a time and, on a GPU, by CUDA graphs: as those drawn one by one."""
    model, longest = calibration.build_model(TINY, "fp32", device), SIZES[device].ahead
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(2, 512, (n,), generator=generator) for n in (7, 30, 3, 19, 11)]
    sampling = SamplingParams(max_tokens=longest, decode_rows=16)
    limits = torch.randint(1, longest, (40,), generator=generator).tolist()
    requests = [Request(prompts[i // 8], (0, i), sampling, limit) for i, limit in enumerate(limits)]
    drawn = []
    for ahead in (False, True):
        sampler = LocalSampler(model, frozenset({5, 9}), 0)
        sampler.decodes_ahead = ahead
        drawn.append(asyncio.run(sampler.generate(requests)))
    same = [torch.equal(a.tokens, b.tokens) and a.finish_reason == b.finish_reason for a, b in zip(*drawn, strict=True)]
    pairs = [pair for pair, is_same in zip(zip(*drawn, strict=True), same, strict=True) if is_same]
    error = max(float((a.logp - b.logp).abs().max()) for a, b in pairs)
    check(sum(same) >= 38, f"only {sum(same)} of 40 completions are the same")  # rounding may change a token
    check(error <= 1e-4, f"log-probabilities differ by {error:.2g} nats")
    return {"same completions": f"{sum(same)} of 40", "nats": error, "tokens": sum(len(a.tokens) for a in drawn[0])}


def check_conversations(device: str) -> dict[str, Any]:
    """Turns of conversations that read only what is new: as those that read everything."""
    model, drawn = calibration.build_model(TINY, "fp32", device), dict[bool, list[Tensor]]()
    for continues in (False, True):
        generator, sampler = torch.Generator().manual_seed(0), LocalSampler(model, frozenset({5}), 0)
        contexts = [torch.randint(2, 512, (60 + i // 4,), generator=generator) for i in range(16)]
        for turn in range(4):
            sampling = SamplingParams(max_tokens=40, decode_rows=16)
            requests = [Request(ids, (turn, i), sampling, 20 + i, continues) for i, ids in enumerate(contexts)]
            generations = asyncio.run(sampler.generate(requests))
            drawn[continues] = drawn.get(continues, []) + [x.tokens for x in generations]
            answers = torch.randint(2, 512, (16, 30), generator=generator)
            contexts = [torch.cat([c, x.tokens, a]) for c, x, a in zip(contexts, generations, answers, strict=True)]
    same = sum(torch.equal(a, b) for a, b in zip(drawn[False], drawn[True], strict=True))
    check(same >= 60, f"only {same} of 64 turns are the same")  # rounding may change a token, and what follows it
    return {"same turns": f"{same} of 64"}


# Speed.


def measure_learner(
    device: str,
    texts: str,
    shape: str = "small",
    lora: str = "",
    recompute: bool = False,
    compiled: bool = False,
    attention: str = "auto",
) -> dict[str, Any]:
    """Return what one update of random texts takes: forward, backward, optimizer step."""
    work: Texts = getattr(SIZES[device], texts)
    dimensions: DenseShape = getattr(SIZES[device], shape)
    dtype = "fp32" if device == "cpu" else "bf16"
    model = calibration.build_model(dimensions, dtype, device)
    if lora:
        adapters = parse_lora(lora)
        assert adapters is not None
        model = add_adapters(model, adapters, seed=0)
    algorithm = pg.DR_GRPO.with_max_tokens(work.completion_tokens)
    config = pg.LearnerConfig(
        dtype=dtype,
        device=device,
        micro_tokens=work.micro_tokens,
        gradient_checkpointing=recompute,
        lora=lora,
        compile=compiled,
        attention=attention,
    )
    learner = LocalLearner(model, pg.LearnerSpec(algorithm, 1e-6, 10, config=config))
    batch = work.batch(dimensions)
    psi = algorithm.compute_advantages(replace(batch, group=torch.arange(len(batch.mask)) // work.samples))
    psi = torch.where(batch.mask, psi + 0.1, 0.0)  # groups of one have no advantage
    first = batch.select((batch.group == 0).nonzero().squeeze(1))
    learner.update(first, psi[: len(first.mask)], algorithm)
    if device != "cpu":
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.synchronize()
    start = time.perf_counter()
    metrics = learner.update(batch, psi, algorithm)
    if device != "cpu":
        torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    check(metrics["grad_norm"].value > 0, "no gradient")
    length = work.prompt_tokens + work.completion_tokens
    attended = dimensions.layers * dimensions.heads * dimensions.head_dim * length
    flops = 6 * (dimensions.parameters + attended)  # per token, in the mean of a causal text
    rate = work.tokens / seconds
    report: dict[str, Any] = {"text tokens": work.tokens, "seconds": seconds, "text tokens/s": rate}
    if device != "cpu":
        name = torch.cuda.get_device_name()
        peak = next((entry.bf16 for key, entry in DEVICES.items() if key in name), None)
        if peak is not None and work.samples == 1:  # shared tokens are computed once: no MFU of theirs
            report["MFU"] = rate * flops / peak
        report["peak GiB"] = torch.cuda.max_memory_allocated() / GIB
    return report


def measure_sampler(
    device: str, shape: str = "small", cuda_graphs: bool = True, compiled: bool = False
) -> dict[str, Any]:
    """Return the tokens per second of the local sampler, for some numbers of completions.

    Args:
        compiled: What is not attention in the blocks, norms and MLPs, by torch.compile. A CPU gains nothing from it; a GPU's graphs
            may, from fewer kernels.
    """
    sizes = SIZES[device]
    model = calibration.build_model(getattr(sizes, shape), "fp32" if device == "cpu" else "bf16", device)
    if compiled:
        blocks: Any = get_backbone(model).layers
        for part in (part for block in blocks for part in block.children() if "Attention" not in type(part).__name__):
            part.compile(dynamic=True, mode="max-autotune-no-cudagraphs")
    sampler = LocalSampler(model, frozenset({-1}), 0, cuda_graphs=cuda_graphs)
    generator = torch.Generator().manual_seed(0)
    report: dict[str, Any] = {}
    prompt_tokens, tokens = sizes.decode
    for rows in sizes.rows:
        generations, seconds = time_decoding(sampler, rows, draw_prompts(rows, prompt_tokens, generator), tokens)
        drawn = sum(len(x.tokens) for x in generations)
        report[f"{rows} rows"] = {"tokens/s": drawn / seconds, "ms per token": 1e3 * seconds / tokens}
    return report


def draw_prompts(rows: int, length: int, generator: torch.Generator) -> list[Tensor]:
    """Return prompts of random tokens, one for every eight rows."""
    return [torch.randint(2, 512, (length,), generator=generator) for _ in range(-(-rows // 8))]


def make_requests(rows: int, prompts: list[Tensor], tokens: int) -> list[Request]:
    """Return requests for completions of so many tokens, eight for each prompt, all decoded at once."""
    sampling = SamplingParams(max_tokens=tokens, decode_rows=rows)
    return [Request(prompts[i // 8], (0, i), sampling, tokens) for i in range(rows)]


def time_decoding(
    sampler: LocalSampler, rows: int, prompts: list[Tensor], tokens: int
) -> tuple[list[Generation], float]:
    """Return completions and the seconds that they took, after a call of two tokens."""
    asyncio.run(sampler.generate(make_requests(rows, prompts, 2)))
    start = time.perf_counter()
    generations = asyncio.run(sampler.generate(make_requests(rows, prompts, tokens)))
    return generations, time.perf_counter() - start


def check_decode_kernels(device: str) -> dict[str, Any]:
    """ms per token of the local sampler with Triton's kernels and without, and how far log-probabilities differ."""
    sizes = SIZES[device]
    model = calibration.build_model(sizes.small, "fp32" if device == "cpu" else "bf16", device)
    prompt_tokens, tokens = sizes.decode
    report: dict[str, Any] = {}
    for rows in (1, 2) if device == "cpu" else (1, 64, 512):
        prompts = draw_prompts(rows, prompt_tokens, torch.Generator().manual_seed(0))
        of_rows: dict[str, Any] = {}
        drawn = []
        for kernels in ("off", "auto"):
            sampler = LocalSampler(model, frozenset({-1}), 0, kernels=kernels)
            if device == "cpu" and kernels == "auto" and find_spec("triton") is not None:
                sampler.uses_kernels = os.environ.get("TRITON_INTERPRET") == "1"
            generations, seconds = time_decoding(sampler, rows, prompts, tokens)
            check(device == "cpu" or sampler.uses_kernels == (kernels == "auto"), "the kernels were refused")
            of_rows[f"ms per token, kernels {kernels}"] = 1e3 * seconds / tokens
            drawn.append(generations)
        # up to the first token that differs, both have read the same
        alike = [int((a.tokens == b.tokens).long().cumprod(0).sum()) for a, b in zip(*drawn, strict=True)]
        gaps = [(a.logp - b.logp)[:n].abs() for a, b, n in zip(*drawn, alike, strict=True) if n]
        check(bool(gaps), "no row begins with the same token")
        of_rows["nats"] = float(torch.cat(gaps).max())
        of_rows["tokens before the first that differs"] = f"{sum(alike)} of {rows * tokens}"
        limit = 1e-4 if device == "cpu" else 0.5
        check(of_rows["nats"] <= limit, f"log-probabilities differ by {of_rows['nats']:.2g} nats at {rows} rows")
        report[f"{rows} rows"] = of_rows
    return report


def profile_decoding(device: str) -> dict[str, Any]:
    """The 25 kernels that take most of a token's time, in ms per token, with Triton's kernels and without."""
    from torch.profiler import ProfilerActivity, profile

    sizes = SIZES[device]
    model = calibration.build_model(sizes.small, "fp32" if device == "cpu" else "bf16", device)
    prompt_tokens, rows, tokens = sizes.decode[0], sizes.rows[0], min(64, sizes.decode[1])
    prompts = draw_prompts(rows, prompt_tokens, torch.Generator().manual_seed(0))
    activity = ProfilerActivity.CPU if device == "cpu" else ProfilerActivity.CUDA
    report: dict[str, Any] = {"rows": rows}
    for kernels in ("off", "auto"):
        sampler = LocalSampler(model, frozenset({-1}), 0, kernels=kernels)
        requests = make_requests(rows, prompts, tokens)
        asyncio.run(sampler.generate(requests))
        with profile(activities=[activity]) as profiled:
            asyncio.run(sampler.generate(requests))
            if device != "cpu":
                torch.cuda.synchronize()
        name = "self_cpu_time_total" if device == "cpu" else "self_device_time_total"
        spent = {event.key: getattr(event, name) / 1e3 / tokens for event in profiled.key_averages()}
        most = sorted(spent, key=lambda key: spent[key], reverse=True)[:25]
        report[f"kernels {kernels}"] = {key[:80]: spent[key] for key in most} | {"all": sum(spent.values())}
    return report


def measure_versus(device: str, side: str, step: str = "step") -> dict[str, Any]:
    """Return what a GRPO step takes here, or with TRL (`gpu_versus`)."""
    if side != "policygrad" and not os.environ.get("POLICYGRAD_PEERS") and find_spec("trl") is None:
        return {"left out": "TRL is not installed: POLICYGRAD_PEERS names folders with it and what it needs"}
    sizes = SIZES[device]
    return measure_step(device, side, getattr(sizes, step), lambda: build_on_cpu(sizes.small, device))


def measure_colocation(device: str) -> dict[str, Any]:
    """Return what a server on the learner's device and the learner hold in each phase (`gpu_colocation`)."""
    sizes, step = SIZES[device], Step(2, 2, 8, 8, (0,))
    return gpu_colocation.measure_colocation(device, lambda: build_on_cpu(sizes.small, device), step)


def run_default(device: str, task: str = "") -> dict[str, Any]:
    """`policygrad train` as a newcomer runs it, or its embedded task of another name: `shapes` has pictures."""
    if missing := [name for name in ("reasoning_gym", "tyro", "tomli_w") if find_spec(name) is None]:
        return {"left out": f"{', '.join(missing)} not installed"}
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "policygrad", "train", "--plain", "--output", f"{folder}/run"]
        command += ["--learner.device", device, *(["--task", task] if task else [])]
        if device == "cpu":
            command += [
                "--steps",
                "2",
                "--prompts-per-step",
                "4",
                "--samples-per-prompt",
                "2",
                "--evaluation.problems",
                "8",
            ]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
        start = time.perf_counter()
        subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL)
        seconds = time.perf_counter() - start
        result = json.loads(Path(f"{folder}/run/result.json").read_text())
    return {
        "seconds of the command": seconds,
        "seconds of training": result["seconds"],
        "held out before": result["eval_reward_before"],
        "held out after": result["eval_reward_after"],
    }


PARTS: dict[str, tuple[int, Callable[[str], dict[str, Any]]]] = {
    "device": (30, measure_device),
    "algorithms": (150, check_algorithms),
    "resume": (60, check_resume),
    "packing": (120, check_packing),
    "head": (60, check_head),
    "sampler": (60, check_sampler),
    "decoding ahead": (60, check_decode_ahead),
    "conversations": (60, check_conversations),
    "decoding profile": (90, profile_decoding),
    "decoding kernels": (120, check_decode_kernels),
    "learner 16k": (40, partial(measure_learner, texts="texts_16k")),
    "learner 16k recomputed": (40, partial(measure_learner, texts="texts_16k", recompute=True)),
    "learner 64k recomputed": (60, partial(measure_learner, texts="texts_64k", recompute=True)),
    "learner groups": (90, partial(measure_learner, texts="groups")),
    "learner groups, sdpa": (60, partial(measure_learner, texts="groups", attention="sdpa")),
    "learner 4B LoRA 16k recomputed": (
        60,
        partial(measure_learner, texts="texts_16k", shape="large", lora="rank=16", recompute=True),
    ),
    "learner 4B LoRA 16k recomputed, compiled": (
        120,
        partial(measure_learner, texts="texts_16k", shape="large", lora="rank=16", recompute=True, compiled=True),
    ),
    "learner 16k compiled": (90, partial(measure_learner, texts="texts_16k", compiled=True)),
    "learner 16k recomputed, compiled": (
        90,
        partial(measure_learner, texts="texts_16k", recompute=True, compiled=True),
    ),
    "learner groups, compiled": (90, partial(measure_learner, texts="groups", compiled=True)),
    "decoding": (90, measure_sampler),
    "decoding compiled": (150, partial(measure_sampler, compiled=True)),
    "decoding without graphs": (90, partial(measure_sampler, cuda_graphs=False)),
    "default run": (120, run_default),
    "default run with pictures": (150, partial(run_default, task="shapes")),
    **{
        f"versus{name}: {side}": (150, partial(measure_versus, side=side, step=step))
        for name, step in (("", "step"), (", long prompt", "long_step"))
        for side in ("policygrad", "trl", "trl, continuous batching")
    },
    **gpu_real_model.PARTS,
    **gpu_parts.PARTS,
    **gpu_ranks.PARTS,
    "colocation beside a server": (120, measure_colocation),
    **gpu_real_trl.PARTS,
}
"""Name -> time limit in seconds, and what is run."""
CHECKS = (
    "algorithms",
    "resume",
    "packing",
    "head",
    "sampler",
    "decoding ahead",
    "conversations",
    "segments",
    "pictures",
)
GROUPS: dict[str, tuple[str, ...]] = {
    "checks": (*CHECKS, "captures beside a learner", "default run with pictures", *gpu_ranks.PARTS),
}
GROUPS["alone"] = tuple(
    name for name in PARTS if name not in (*GROUPS["checks"], *gpu_real_model.PARTS, *gpu_real_trl.PARTS)
)
"""Names for several parts. `checks` compare numbers and need little of a GPU, so `real model` can learn beside them; the figures of
the others, or their need of memory, want it alone."""


def main() -> int:
    """Run the parts; 0 if all that ran has passed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", default=list(PARTS), metavar="PART", help=", ".join((*GROUPS, *PARTS)))
    parser.add_argument("--device", default="cuda", choices=sorted(SIZES))
    bounds = ", ".join(f"{seconds:g} on {device}" for device, seconds in SECONDS.items())
    parser.add_argument("--seconds", type=float, help=f"for all parts together ({bounds})")
    parser.add_argument("--results", type=Path, default=RESULTS)
    args = parser.parse_args()
    if unknown := [name for name in args.parts if name not in PARTS and name not in GROUPS]:
        parser.error(f"no part is called {unknown[0]!r}: choose from {', '.join((*GROUPS, *PARTS))}")
    parts = list(dict.fromkeys(part for name in args.parts for part in GROUPS.get(name, (name,))))
    device = run_part(lambda _: {"name": name_device(args.device)}, "cpu", 60)["result"][
        "name"
    ]  # asked here, it would forbid forks
    if not device:
        parser.error("this machine has no GPU that PyTorch can use: --device cpu runs the same code with tiny shapes")
    outcomes = list[dict[str, Any]]()
    start, patience = time.perf_counter(), CPU_PATIENCE if args.device == "cpu" else 1
    end = start + (args.seconds or SECONDS[args.device])
    for name in parts:
        limit, work = PARTS[name]
        limit = min(patience * limit, int(end - time.perf_counter()))
        outcome = {"error": NOT_RUN, "seconds": 0.0}
        if limit > 0:
            outcome = run_part(work, args.device, limit)
        outcomes.append(outcome)
        write_part(args.results, name, outcome | stamp(name, device))
        print(
            f"{'ok    ' if 'result' in outcome else 'FAILED'} {outcome['seconds']:6.1f} s  {name}: {describe(outcome)}",
            flush=True,
        )
    passed = sum("result" in outcome for outcome in outcomes)
    print(f"{passed} of {len(outcomes)} parts in {time.perf_counter() - start:.0f} s", flush=True)
    return 0 if passed == len(outcomes) else 1


def name_device(device: str) -> str:
    """Return the GPU's name, or the processor; empty if there is no GPU."""
    if device == "cpu":
        return platform.processor() or platform.machine()
    return torch.cuda.get_device_name() if torch.cuda.device_count() else ""


def run_part(work: Callable[[str], dict[str, Any]], device: str, limit: int) -> dict[str, Any]:
    """Run a part in a process of its own, which begins as a copy of this one: nothing has touched the GPU here."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_run_in_child, args=(work, device, sender))
    start = time.perf_counter()
    process.start()
    sender.close()
    outcome: dict[str, Any] = {"error": f"it ran past its {limit} s"}
    if receiver.poll(limit):
        try:
            outcome = receiver.recv()
        except EOFError:
            process.join(5)
            outcome = {"error": f"its process ended with {process.exitcode}"}
    assert process.pid is not None
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.join()
    return outcome | {"seconds": time.perf_counter() - start}


def _run_in_child(work: Callable[[str], dict[str, Any]], device: str, sender: Any) -> None:
    os.setsid()
    torch.set_num_threads(
        torch.get_num_threads()
    )  # after a fork the pool of threads is made anew, which two at once cannot do
    try:
        outcome: dict[str, Any] = {"result": work(device)}
    except BaseException as error:
        traceback.print_exc()
        outcome = {"error": f"{type(error).__name__}: {error}"}
    sender.send(outcome)


def describe(outcome: dict[str, Any]) -> str:
    """Return an outcome on one line."""

    def text(value: Any) -> str:
        if isinstance(value, dict):
            return "; ".join(f"{k} {text(v)}" for k, v in value.items())
        return (
            f"{value:.3g}"
            if isinstance(value, float) and abs(value) < 100
            else f"{value:,.0f}"
            if isinstance(value, float)
            else str(value)
        )

    return text(outcome.get("result", outcome.get("error")))


if __name__ == "__main__":
    sys.exit(main())
