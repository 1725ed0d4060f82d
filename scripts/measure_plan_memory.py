"""Measure the memory of one update of small models of several kinds, and what `policygrad plan` says of it.

    python scripts/measure_plan_memory.py                 on a CPU, in float32: docs/results/plan-memory.json
    python scripts/measure_plan_memory.py --device cuda   on a GPU, in bfloat16; with --output FILE

Each run is a process of its own, and its update has four micro-batches, or as many as segments make. On a CPU two things are
measured: the bytes of all tensors that are alive, added up operation by operation, and what the operating system counts of the
whole process, with Python, libraries and what the allocator keeps. On a GPU it is what PyTorch's allocator gave out. The copy of
the state that undoes a failed step is the trainer's, not the learner's, and is in neither number.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import subprocess
import sys
import weakref
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from policygrad.planning.cost_model import AlgorithmCost, ParallelLayout, Workload, learner_memory
from policygrad.planning.hardware import DEVICES

SIZES = {
    "vocab_size": 4096,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": None,
}
EXPERTS = {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 384}
DELTA = {
    "linear_num_value_heads": 8,
    "linear_num_key_heads": 8,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
}


@dataclass(frozen=True)
class MeasuredUpdate:
    """A model, what of it trains, and the texts of one update."""

    config: dict[str, Any]  # config.json
    rank: int = 0  # of adapters; 0 = all weights train
    prompts: int = 4
    samples: int = 8
    completion: int = 224
    micro_tokens: int = 32 + 8 * 223  # one group

    @property
    def workload(self) -> Workload:
        return Workload(self.prompts, self.samples, PROMPT, self.completion, self.completion)

    @property
    def layout(self) -> ParallelLayout:
        return ParallelLayout(1, dtype="fp32", micro_tokens=self.micro_tokens, adapter_rank=self.rank)


PROMPT = 32
QWEN = {"model_type": "qwen3", **SIZES}
RUNS = {
    "dense (qwen3)": MeasuredUpdate(QWEN),
    "dense (qwen3), long texts in segments": MeasuredUpdate(
        QWEN | {"max_position_embeddings": 8192}, prompts=1, samples=2, completion=3040, micro_tokens=512
    ),
    "dense (qwen3), adapters of rank 16": MeasuredUpdate(QWEN, rank=16),
    "experts (qwen3_moe)": MeasuredUpdate({"model_type": "qwen3_moe", **SIZES, **EXPERTS}),
    "delta rule and attention (qwen3_5_text)": MeasuredUpdate({"model_type": "qwen3_5_text", **SIZES, **DELTA}),
}


class LiveTensors(TorchDispatchMode):
    """Adds up the bytes of storages that are alive, those of the existing tensors first."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: dict[int, int] = {}
        self.finalizers: list[Any] = []
        self.now = self.peak = 0
        for x in gc.get_objects():
            if isinstance(x, torch.Tensor):
                self.add(x)

    def add(self, x: torch.Tensor) -> None:
        storage = x.untyped_storage()
        key = storage._cdata
        if key in self.sizes or storage.nbytes() == 0:
            return
        self.sizes[key] = storage.nbytes()
        self.now += storage.nbytes()
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self.remove, key)

    def remove(self, key: int) -> None:
        self.now -= self.sizes.pop(key, 0)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, torch.Tensor):
                self.add(x)
        return out


def measure(name: str, device: str) -> dict[str, Any]:
    """Train one step on random completions in this process."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from policygrad.algorithms import DR_GRPO
    from policygrad.learners.base import LearnerSpec
    from policygrad.learners.config import LearnerConfig
    from policygrad.learners.local.learner import LocalLearner
    from policygrad.models.adapters import add_adapters
    from policygrad.models.lora_config import Lora
    from policygrad.planning.model_shapes import read_dense_shape
    from policygrad.training.calibration import build_batch
    from policygrad.training.shape_counting import count_shape

    run = RUNS[name]
    config, work, rank = dict(run.config), run.workload, run.rank
    kind, dtype = config.pop("model_type"), "fp32" if device == "cpu" else "bf16"
    dense = kind == "qwen3"
    shape = read_dense_shape(run.config, name, "here") if dense else count_shape(run.config, name, "here")
    layout = replace(run.layout, dtype=dtype)
    algorithm = DR_GRPO.with_max_tokens(run.completion)
    place = DEVICES["cpu" if device == "cpu" else "H200"]
    breakdown = learner_memory(shape, work, AlgorithmCost(), layout, place)
    planned = breakdown.static | breakdown.training
    planned.pop("copy of the state", None)
    others = sum(planned.pop(key, 0.0) for key in ("Python and libraries", "allocator's holes"))
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(kind, **config), dtype=torch.float32 if dtype == "fp32" else torch.bfloat16
    )
    model = model.to(device).eval()
    if rank:
        model = add_adapters(model, Lora(rank=rank))
    options = LearnerConfig(dtype=dtype, device=device, micro_tokens=run.micro_tokens)
    learner = LocalLearner(model, LearnerSpec(algorithm, lr=1e-6, steps=2, config=options))
    batch = build_batch(shape, work)
    psi = algorithm.compute_advantages(batch)
    if device == "cpu":
        for _ in range(2):  # the first makes the optimizer's state
            learner.update(batch, psi, algorithm)
        process = read_peak()
        with LiveTensors() as live:
            learner.update(batch, psi, algorithm)
        peak = live.peak
    else:
        for _ in range(2):
            learner.update(batch, psi, algorithm)
        process = peak = torch.cuda.max_memory_allocated()
    return {
        "run": name,
        "parameters": shape.parameters,
        "tokens": work.max_tokens if run.micro_tokens < work.max_tokens else run.micro_tokens,
        "tensors": peak,
        "planned_tensors": sum(planned.values()),
        "process": process,
        "planned_process": sum(planned.values()) + others,
        "parts": {key: round(size) for key, size in planned.items()},
    }


def read_peak() -> int:
    """Return the largest number of bytes of this process that were in memory at once."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) * 1024
    raise OSError("/proc/self/status has no VmHWM")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--run", choices=RUNS, help="one of them, in this process")
    options = parser.parse_args()
    if options.run:
        print(json.dumps(measure(options.run, options.device)))
        return
    rows = []
    for name in RUNS:
        argv = [sys.executable, __file__, "--device", options.device, "--run", name]
        done = subprocess.run(argv, stdout=subprocess.PIPE, text=True, check=True)
        rows.append(json.loads(done.stdout.splitlines()[-1]))
        row = rows[-1]
        print(
            f"{name}: tensors {row['tensors'] / 2**20:.0f} MiB, planned {row['planned_tensors'] / row['tensors'] - 1:+.1%}; "
            f"process {row['process'] / 2**20:.0f} MiB, planned {row['planned_process'] / row['process'] - 1:+.1%}",
            file=sys.stderr,
        )
    import transformers

    where = platform.machine() if options.device == "cpu" else torch.cuda.get_device_name(0)
    content = {"device": where, "torch": torch.__version__, "transformers": transformers.__version__, "rows": rows}
    default = Path(__file__).parents[1] / "docs" / "results" / "plan-memory.json"
    (options.output or default).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
