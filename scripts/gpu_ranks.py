"""Two processes that learn on one device, over gloo: parts of scripts/measure_gpu.py.

A run refuses that on a GPU, where NCCL cannot do it. It shows on a single GPU what several would do: sharded weights, moments and
gradients on a GPU, gathered and summed between processes, give the update of one process. On a CPU gloo is what a run uses.

    python scripts/gpu_ranks.py PORT RANK SIZE    a rank above 0, started by the first one
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

ROOT = Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    sys.path += [str(ROOT / "src"), str(ROOT / "tests"), str(ROOT / "scripts")]

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

from policygrad.learners.fsdp.message_key import read_sent_key, send_key  # noqa: E402
from policygrad.learners.fsdp.processes import LocalWorker, WorkerGroup, WorkerLauncher  # noqa: E402

ALGORITHMS = ("grpo", "ppo")
LIMITS = {"cpu": 1e-12, "cuda": 1e-9}
"""Largest difference in float64, relative to each tensor's largest number; a critic's values are float32."""


class SharingWorker(LocalWorker):
    """A rank on the device of rank 0."""

    def __init__(self, host: str, port: int, rank: int, size: int, key: bytes) -> None:
        words = [sys.executable, __file__, *map(str, (port, rank, size))]
        subprocess.Popen.__init__(self, words, stdin=subprocess.PIPE, start_new_session=True)
        assert self.stdin is not None
        send_key(self.stdin.fileno(), key)


@contextmanager
def sharing_device() -> Iterator[None]:
    """While the block runs, ranks meet over gloo whatever their tensors are on, and take the first GPU."""
    backend = "cpu:gloo,cuda:gloo" if torch.cuda.is_available() else "gloo"
    with ExitStack() as stack:
        stack.enter_context(patch("policygrad.learners.fsdp.processes._backend", lambda: backend))
        stack.enter_context(patch.dict(os.environ, {"LOCAL_RANK": "0"}))
        yield


def check_learners(device: str) -> dict[str, Any]:
    """One update of a learner in two processes, each with a shard, and of one process: weights and moments in float64."""
    from gpu_parts import check

    from doubles.algorithms import runnable
    from doubles.ranked import filled, learned, make_spec, model
    from policygrad.learners.fsdp.controller import FsdpController
    from policygrad.learners.local.learner import LocalLearner

    report: dict[str, Any] = {}
    with sharing_device():
        workers = WorkerGroup.start(2, WorkerLauncher(SharingWorker))
        try:
            for name in ALGORITHMS:
                algorithm = runnable(name).with_max_tokens(6)
                algorithm = algorithm.with_state(algorithm.init_state())
                states = list[dict[str, Tensor]]()
                for ranks in (1, 2):
                    network, spec = model().to(device), make_spec(algorithm)
                    torch.manual_seed(1)  # for a critic's head
                    learner = LocalLearner(network, spec) if ranks == 1 else FsdpController(workers, network, spec)
                    learned(learner, algorithm, filled(algorithm))
                    states.append({n: x.cpu().double() for n, x in learner.state()[0].items()})
                report[name] = error = _worst_error(*states)
                limit = max(LIMITS[device], 1e-6 if algorithm.critic is not None else 0.0)
                check(error <= limit, f"{name}: two processes differ from one by {error:.2g} of the largest number")
            report["GiB held by rank 0"] = 0.0 if device == "cpu" else torch.cuda.memory_allocated() / 2**30
            workers.close()
        except BaseException:
            workers.close(in_sync=False)
            raise
    return report


def _worst_error(expected: dict[str, Tensor], actual: dict[str, Tensor]) -> float:
    errors = [
        float((actual[n] - x).abs().max()) / max(1e-30, float(x.abs().max())) for n, x in expected.items() if x.numel()
    ]
    return max(errors)


def check_sum(device: str) -> dict[str, Any]:
    """The sum of two processes' halves of a gradient is the whole one: what gloo moves, without a learner."""
    import torch.multiprocessing as multiprocessing

    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(_sum_in_rank, args=(device, folder), nprocs=2)  # type: ignore[no-untyped-call]
        return {"off by": float(torch.load(f"{folder}/error"))}


def _sum_in_rank(rank: int, device: str, folder: str) -> None:
    import torch.distributed as dist
    from gpu_parts import SMALL, check

    from policygrad.training import calibration

    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    model = calibration.build_model(SMALL, "fp32", device)
    batch = torch.randint(2, 512, (4, 32), generator=torch.Generator().manual_seed(0)).to(device)

    def differentiate(rows: Tensor) -> Tensor:
        model.zero_grad()
        model(input_ids=rows).logits.float().log_softmax(-1)[..., 5].sum().backward()
        return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])

    whole, half = differentiate(batch), differentiate(batch[2 * rank : 2 * rank + 2])
    dist.all_reduce(half)
    error = float((half - whole).norm() / whole.norm())
    check(error <= 1e-4, f"the summed gradient is off by {error:.2g} of its norm")
    if rank == 0:
        torch.save(error, f"{folder}/error")
    dist.barrier()
    dist.destroy_process_group()


def _join(port: int, rank: int, size: int) -> int:
    """Be a rank above 0 until the first one ends it."""
    from policygrad.learners.fsdp.processes import exit_with_parent
    from policygrad.learners.fsdp.worker import serve_controller

    key = read_sent_key(0)
    exit_with_parent()
    with sharing_device():
        return serve_controller(WorkerGroup.join(port, rank, size, key, device=0))


PARTS: dict[str, tuple[int, Callable[[str], dict[str, Any]]]] = {
    "two processes, one device": (90, check_learners),
    "two processes, one device: a sum": (60, check_sum),
}

if __name__ == "__main__":
    os._exit(_join(*map(int, sys.argv[1:])))
