"""What had not run on a GPU yet: parts of scripts/measure_gpu.py, the most important first.

Each has a small CPU form, of the same code. Equality is with the CPU, speed with random weights.
"""

from __future__ import annotations

import asyncio
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from threading import Event, Thread
from typing import Any

import torch
from torch import Tensor, nn

import policygrad as pg
from policygrad.errors import OutOfMemoryError
from policygrad.learners.local.host_memory import HostMemory
from policygrad.learners.local.learner import LocalLearner
from policygrad.models.loading import load_model
from policygrad.planning.cost_model import Workload
from policygrad.planning.model_shapes import KNOWN_SHAPES
from policygrad.planning.shapes import DenseShape
from policygrad.samplers.base import Generation, Request, SamplingParams
from policygrad.samplers.local.sampler import LocalSampler
from policygrad.training import calibration

GIB = 2**30
SMALL = DenseShape("small", 64, 128, 2, 4, 2, 16, 512, tied=True, qk_norm=True)
LONGEST = {"cuda": (131_072, 262_144), "cpu": (128, 256)}  # tokens of one text
SEGMENT = {"cuda": 16_384, "cpu": 32}
BALLAST = 3 * GIB
"""What is left of a GPU's memory when it is filled to make it run out."""
FAMILIES = ("qwen3_5", "gemma3_text", "gemma4_text", "gpt_oss")
WIDE = {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 32_000,
    "max_position_embeddings": 8192,
    "sliding_window": 512,
    "vocab_size_per_layer_input": 32_000,
    "initializer_range": 0.02,
}


class CheckFailedError(AssertionError):
    """A number is not what it must be."""


def check(holds: bool, message: str) -> None:
    """Raise CheckFailedError unless something holds."""
    if not holds:
        raise CheckFailedError(message)


def check_segments(device: str) -> dict[str, Any]:
    """Texts of several models read in segments: gradients as of whole texts, in float32, and as the CPU's."""
    from doubles.long_texts import built, make_batch

    report: dict[str, Any] = {}
    for kind in ("gpt2", "qwen3_5", "gemma3_text", "gpt_oss"):
        gradients = dict[str, Tensor]()
        for where, tokens in (("cpu", 10**6), (device, 10**6), (device, 40)):
            model = built(kind).float().to(where)
            config = pg.LearnerConfig(micro_tokens=tokens, device=where)
            learner = LocalLearner(model, pg.LearnerSpec(pg.DR_GRPO, 0.0, 1, config=config))
            batch = make_batch()
            metrics = learner.build_problem(batch, pg.DR_GRPO.compute_advantages(batch) + 0.1, pg.DR_GRPO).accumulate()
            assert metrics is not None
            parts = [p.grad.flatten().cpu().double() for p in model.parameters() if p.grad is not None]
            gradients[f"{where} {tokens}"] = torch.cat(parts)
        truth = gradients["cpu 1000000"]
        errors = {n: float((x - truth).norm() / truth.norm()) for n, x in gradients.items() if n != "cpu 1000000"}
        for where, error in errors.items():
            check(error <= 1e-3, f"{kind}, {where} tokens at a time: the gradient is off by {error:.2g} of its norm")
        report[kind] = errors.get(f"{device} 40")
    return report


def measure_longest(device: str) -> dict[str, Any]:
    """One update on the longest texts that time allows, 0.6B, in segments: seconds, tokens a second, memory."""
    shape = SMALL if device == "cpu" else KNOWN_SHAPES["Qwen3-0.6B"]
    report, start, last = dict[str, Any](), time.perf_counter(), 0.0
    for length in LONGEST[device]:
        if time.perf_counter() - start + 4 * last > LIMITS["longest texts in segments"]:
            report[f"{length:,} tokens"] = "no time was left"
            break
        model = calibration.build_model(shape, "fp32" if device == "cpu" else "bf16", device)
        learner, algorithm = _make_learner(model, device, micro_tokens=SEGMENT[device])
        batch = calibration.build_batch(shape, Workload(1, 1, 8, length - 8, length - 8))
        psi = torch.where(batch.mask, 0.1, 0.0)
        _reset_peak(device)
        began = time.perf_counter()
        metrics = learner.update(batch, psi, algorithm)
        _synchronize(device)
        last = time.perf_counter() - began
        check(metrics["grad_norm"].value > 0, "no gradient")
        report[f"{length:,} tokens"] = {"seconds": last, "tokens/s": length / last} | _peak(device)
        del learner, model
    return report


def measure_family(device: str, kind: str) -> dict[str, Any]:
    """An architecture of today: the CPU's completions and log-probabilities, and the speed of sampling and of an update."""
    from doubles.long_texts import FAMILIES as KNOWN
    from doubles.long_texts import built

    report: dict[str, Any] = {"flash-linear-attention": find_spec("fla") is not None} if kind == "qwen3_5" else {}
    prompts = [torch.randint(3, 40, (n,), generator=torch.Generator().manual_seed(n)) for n in (5, 12)]
    requests = _ask(prompts, 8, 24)
    drawn = dict[str, list[Generation]]()
    for where in dict.fromkeys(("cpu", device)):
        model = built(kind).float().to(where)
        drawn[where] = list(asyncio.run(LocalSampler(model, frozenset({1}), 0).generate(requests)))
        report[f"nats from the learner, {where}"] = error = _find_mismatch(model, where, prompts, drawn[where])
        check(error <= 1e-3, f"{kind} on {where}: sampler and learner differ by {error:.2g} nats")
    same = sum(torch.equal(a.tokens, b.tokens) for a, b in zip(drawn["cpu"], drawn[device], strict=True))
    report["completions as on the CPU"] = f"{same} of {len(requests)}"
    check(same >= len(requests) - 2, f"{kind}: only {same} of {len(requests)} completions are the CPU's")
    if device == "cpu":
        return report
    model = _build_wide(KNOWN[kind]).to(device, torch.bfloat16)
    report["parameters"] = sum(p.numel() for p in model.parameters())
    sampler, prompts = LocalSampler(model, frozenset({-1}), 0), [torch.randint(2, 32_000, (256,)) for _ in range(8)]
    for tokens in (4, 128):
        asked, start = _ask(prompts, 8, tokens), time.perf_counter()
        asyncio.run(sampler.generate(asked))
        seconds = time.perf_counter() - start
    report["sampled tokens/s"] = 64 * 128 / seconds
    learner, algorithm = _make_learner(model, device, micro_tokens=8192)
    mask, tokens_ = torch.ones(8, 1024, dtype=torch.bool), torch.randint(2, 32_000, (8, 1024))
    batch = pg.Batch(mask=mask, group=torch.arange(8), reward=torch.zeros(8), tokens=tokens_, prompts=tuple(prompts))
    psi = torch.full(mask.shape, 0.1)
    _reset_peak(device)
    for _ in range(2):
        start = time.perf_counter()
        learner.update(batch, psi, algorithm)
        _synchronize(device)
        seconds = time.perf_counter() - start
    return report | {"learned tokens/s": mask.numel() / seconds} | _peak(device)


def _build_wide(family: Any) -> nn.Module:
    """Return a random model of an architecture, wide enough for a GPU."""
    import transformers as tf

    from doubles.architectures import Family

    settings = {**family.settings, **WIDE}
    if "layer_types" in family.settings:
        settings["layer_types"] = list(family.settings["layer_types"]) * (WIDE["num_hidden_layers"] // 2)
    config = Family(family.type, family.layers, settings, family.nested).config()
    return load_model(tf.AutoModelForCausalLM.from_config(config).eval())


def check_out_of_memory(device: str) -> dict[str, Any]:
    """Memory that really runs out: an update goes on with fewer tokens at a time, or ends with what to change."""
    on_cpu = device == "cpu"
    shape = SMALL if on_cpu else KNOWN_SHAPES["Qwen3-0.6B"]
    length, rows = (56, 4) if on_cpu else (4096, 8)
    model = calibration.build_model(shape, "fp32" if on_cpu else "bf16", device)
    learner, algorithm = _make_learner(model, device, micro_tokens=rows * (length + 8))
    batch = calibration.build_batch(shape, Workload(rows, 1, 8, length, length))
    psi = torch.where(batch.mask, 0.1, 0.0)
    learner.update(batch.select(torch.arange(1)), psi[:1], algorithm)  # gradients and moments are there
    report, messages = dict[str, Any](), list[str]()
    learner.memory.on_halved = lambda halving: messages.append(halving.message)
    for name, left in (("little memory", 2 * BALLAST), ("hardly any", BALLAST // 12)):
        learner.memory.limit = None
        messages.clear()
        if on_cpu:
            from doubles.short_memory import short_of_memory

            with short_of_memory():
                learner.update(batch, psi, algorithm)
            report["rehearsed"] = "an update whose memory is watched"
            break
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info()
        ballast = torch.empty(max(0, free - left), dtype=torch.uint8, device=device)
        try:
            learner.update(batch, psi, algorithm)
            report[name] = f"went on, {len(messages)} times with fewer tokens, at last {learner.memory.limit}"
        except (OutOfMemoryError, torch.OutOfMemoryError) as error:  # torch's own in the optimizer's step
            report[name] = f"ended: {type(error).__module__}: {error}"[:200]
        del ballast
        torch.cuda.empty_cache()
    learner.memory.limit = None
    metrics = learner.update(batch, psi, algorithm)
    check(metrics["grad_norm"].value > 0, "no gradient after memory had run out")
    return report | {"afterwards": "an update as before"}


def check_captures(device: str) -> dict[str, Any]:
    """CUDA graphs that are captured while a learner updates in another thread: the completions of a sampler alone."""
    shape = replace(SMALL, hidden=128, heads=8)
    prompts = [torch.randint(2, 512, (n,), generator=torch.Generator().manual_seed(n)) for n in (7, 30, 19)]

    def draw() -> list[Generation]:
        sampler = LocalSampler(calibration.build_model(shape, "fp32", device), frozenset({5}), 0)
        return [x for i in range(3) for x in asyncio.run(sampler.generate(_ask(prompts, 8, 40 + 20 * i)))]

    alone = draw()
    learner, algorithm = _make_learner(calibration.build_model(shape, "fp32", device), device, micro_tokens=256)
    batch = calibration.build_batch(shape, Workload(8, 1, 8, 56, 56))
    psi = torch.where(batch.mask, 0.1, 0.0)
    done, begun, failed, updates = Event(), Event(), list[BaseException](), [0]

    def learn() -> None:
        try:
            while not done.is_set():
                learner.update(batch, psi, algorithm)
                updates[0] += 1
                begun.set()
        except BaseException as error:
            failed.append(error)
        finally:
            begun.set()

    thread = Thread(target=learn)
    thread.start()
    begun.wait()
    try:
        beside = draw()
    finally:
        done.set()
        thread.join()
    if failed:
        raise failed[0]
    same = sum(torch.equal(a.tokens, b.tokens) for a, b in zip(alone, beside, strict=True))
    check(same >= len(alone) - 2, f"only {same} of {len(alone)} completions are those of a sampler alone")
    return {"same completions": f"{same} of {len(alone)}", "updates beside it": updates[0]}


def check_pictures(device: str) -> dict[str, Any]:
    """Models that see: logits and gradient of a text with a picture, in float32, as the CPU's."""
    import io

    from PIL import Image

    from doubles.vision_models import make_family, make_picture

    picture = Image.open(io.BytesIO(make_picture(32, 24, 0).data)).convert("RGB")
    message = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "how many?"}]}
    report: dict[str, Any] = {}
    for name in ("idefics3", "qwen3_vl", "qwen3_5", "gemma3", "gemma4"):
        found = list[Tensor]()
        for where in ("cpu", device):
            model, processor = make_family(name)
            text = processor.apply_chat_template([message], tokenize=False)
            inputs = processor(text=[text], images=[[picture]], return_tensors="pt").to(where)
            logits = model.to(where)(**inputs).logits.float()
            logits.log_softmax(-1)[0, :, 5].sum().backward()
            gradient = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
            found.append(torch.cat([logits.detach().flatten(), gradient]).cpu().double())
        error = float((found[1] - found[0]).norm() / found[0].norm())
        check(error <= 1e-3, f"{name}: logits and gradient are off by {error:.2g} of their norm")
        report[name] = error
    return report


def check_offload(device: str) -> dict[str, Any]:
    """The optimizer's state on the host while a server has the GPU: its memory is free, and the next update is as without."""
    shape = SMALL if device == "cpu" else KNOWN_SHAPES["Qwen3-0.6B"]
    model = calibration.build_model(shape, "fp32" if device == "cpu" else "bf16", device)
    if device == "cpu":  # learner.offload is refused there: the same moves, of bare tensors
        host, tensors = HostMemory(), [p.detach().clone() for p in model.parameters()]
        before = [x.clone() for x in tensors]
        host.move_out(tensors)
        check(all(x.untyped_storage().nbytes() == 0 for x in tensors), "a tensor that is away holds memory")
        host.move_back()
        check(all(torch.equal(a, b) for a, b in zip(tensors, before, strict=True)), "a tensor came back changed")
        return {"moved tensors": len(tensors)}
    report, weights, moments = dict[str, Any](), list[Tensor](), list[Tensor]()
    for offload in (False, True):
        model = calibration.build_model(shape, "bf16", device)
        learner, algorithm = _make_learner(model, device, micro_tokens=2048, offload=offload)
        batch = calibration.build_batch(shape, Workload(2, 1, 8, 504, 504))
        psi = torch.where(batch.mask, 0.1, 0.0)
        for _ in range(2):
            learner.update(batch, psi, algorithm)
            torch.cuda.synchronize()
            held = torch.cuda.memory_allocated()
            if offload:
                torch.cuda.empty_cache()
                size = int(0.8 * torch.cuda.mem_get_info()[0])
                server = torch.empty(size, dtype=torch.uint8, device=device).fill_(1)  # what a server holds awake
                torch.cuda.synchronize()
                report["a server held GiB"] = server.numel() / GIB
                del server
                torch.cuda.empty_cache()  # asleep
        report[f"GiB held between updates{', offload' if offload else ''}"] = held / GIB
        weights.append(torch.cat([p.detach().flatten().cpu() for p in model.parameters()]))
        moments.append(torch.cat([x.flatten().cpu() for n, x in learner.state()[0].items() if n.endswith("/exp_avg")]))
        del learner, model
        torch.cuda.empty_cache()
    error = float((moments[1] - moments[0]).norm() / moments[0].norm())
    check(
        error <= 1e-2, f"the first moments after two updates are off by {error:.2g} of their norm"
    )  # bf16, sums in any order
    return report | {"first moments off by": error, "weights bit for bit": torch.equal(*weights)}


# What the parts share.


def _make_learner(model: nn.Module, device: str, **options: Any) -> tuple[LocalLearner, pg.Algorithm]:
    algorithm = pg.DR_GRPO.with_max_tokens(16)
    config = pg.LearnerConfig(
        device=device, dtype="fp32" if next(model.parameters()).dtype == torch.float32 else "bf16", **options
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return LocalLearner(model, pg.LearnerSpec(algorithm, 1e-6, 10, config=config)), algorithm


def _ask(prompts: list[Tensor], each: int, tokens: int) -> list[Request]:
    sampling = SamplingParams(max_tokens=tokens, decode_rows=64)
    return [Request(p, (i, k), sampling, tokens) for i, p in enumerate(prompts) for k in range(each)]


def _find_mismatch(model: nn.Module, device: str, prompts: list[Tensor], drawn: list[Generation]) -> float:
    """Return the largest difference of log π as the sampler and as the learner compute it, in nats."""
    each, width = len(drawn) // len(prompts), max(len(x.tokens) for x in drawn)
    mask, tokens = torch.zeros(len(drawn), width, dtype=torch.bool), torch.zeros(len(drawn), width, dtype=torch.int64)
    sampled = torch.zeros(len(drawn), width)
    for i, x in enumerate(drawn):
        n = len(x.tokens)
        mask[i, :n], tokens[i, :n], sampled[i, :n] = True, x.tokens, x.logp
    group = torch.arange(len(drawn)) // each
    batch = pg.Batch(mask=mask, group=group, reward=torch.zeros(len(drawn)), tokens=tokens, prompts=tuple(prompts))
    spec = pg.LearnerSpec(pg.DR_GRPO, 1e-3, 1, 1.0, pg.LearnerConfig(dtype="fp32", device=device))
    logp = LocalLearner(model, spec).evaluate(batch, frozenset({"logp_old"})).logp_old
    assert logp is not None
    return float((logp - sampled)[mask].abs().max())


def _synchronize(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


def _reset_peak(device: str) -> None:
    if device != "cpu":
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.synchronize()


def _peak(device: str) -> dict[str, float]:
    return {} if device == "cpu" else {"peak GiB": torch.cuda.max_memory_allocated() / GIB}


LIMITS = {"longest texts in segments": 120}
PARTS: dict[str, tuple[int, Callable[[str], dict[str, Any]]]] = {
    "segments": (90, check_segments),
    "longest texts in segments": (LIMITS["longest texts in segments"], measure_longest),
    **{f"family {kind}": (60, lambda device, kind=kind: measure_family(device, kind)) for kind in FAMILIES},  # type: ignore[misc]
    "out of memory": (60, check_out_of_memory),
    "captures beside a learner": (60, check_captures),
    "pictures": (60, check_pictures),
    "offload beside a server": (60, check_offload),
}
"""Name -> time limit in seconds, and what is run."""
