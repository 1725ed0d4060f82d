"""A server and a learner on one GPU, which lend each other its memory: a part of scripts/measure_gpu.py.

Two steps of a run with `--sampler.colocate` and, on a GPU, `--learner.offload`. The server is a process with the routes of vLLM
(`stand_in_servers`) that holds memory as vLLM does: for its weights and for its cache, freed when it is put to sleep, and taken
back part by part when it wakes. While it sleeps, the learner takes more than what is free beside a server that is awake. On a CPU,
where there is nothing to lend, the server's resident memory is shown in place of the GPU's.

    python scripts/gpu_colocation.py DEVICE WEIGHTS_MIB CACHE_MIB LOG serve MODEL … --dtype TYPE … --port N    the server
"""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

MIB, GIB = 2**20, 2**30
STEPS = 2
PART_NAMES = ("weights", "kv_cache")
BESIDE = 2 * GIB
"""What a GPU keeps for two contexts when the learner takes all that is free."""


@dataclass(frozen=True)
class Sizes:
    """Memory that the server holds awake, in MiB. It has the model itself besides."""

    weights: int
    cache: int


def choose_sizes(device: str) -> Sizes:
    """Return what is worth lending: most of half a GPU."""
    if device == "cpu":
        return Sizes(64, 192)
    return Sizes(2 * 1024, int(0.43 * torch.cuda.get_device_properties(0).total_memory) // MIB)


def measure_colocation(device: str, build: Callable[[], Any], step: Any) -> dict[str, Any]:
    """Run two steps beside a server that sleeps while the learner learns; return the memory of each phase, in GiB.

    Args:
        build: Builds the model, on the CPU.
        step: Prompts, completions and their lengths (`gpu_versus.Step`).
    """
    from gpu_versus import make_folder

    from doubles.engine_environment import make_environment

    sizes, on_cpu = choose_sizes(device), device == "cpu"
    with make_folder(build, step) as folder, ExitStack() as stack:
        log = folder / "server.jsonl"
        words = [sys.executable, __file__, device, str(sizes.weights), str(sizes.cache), str(log)]
        environment = make_environment(folder / "venv", program=f'exec {" ".join(words)} "$@"')
        if on_cpu:
            stack.enter_context(patch("policygrad.samplers.engines.factory.assign_gpus", _share_gpu))
        stack.enter_context(patch("policygrad.samplers.engines.probe.NUM_PROMPTS", 2))
        learner = _follow(stack, device, sizes)
        _train(device, folder, environment, step)
        server = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    return check_phases(device, sizes, learner, server)


def _train(device: str, folder: Path, environment: Path, step: Any) -> None:
    """Run the steps as `policygrad train` does."""
    import policygrad as pg
    from policygrad.training.trainer import train

    on_cpu = device == "cpu"
    run = pg.Run(
        algorithm=pg.GRPO,
        model=str(folder / "model"),
        task=str(folder / "prompts.jsonl"),
        reward=(f"{folder / 'reward.py'}:even",),
        steps=STEPS,
        prompts_per_step=step.prompts,
        samples_per_prompt=step.samples,
        lr=1e-6,
        sampling=pg.SamplingParams(max_tokens=step.completion_tokens),
        evaluation=pg.EvaluationConfig(problems=0),
        checkpoint=pg.CheckpointConfig(every=10**6),
        learner=pg.LearnerConfig(device=device, dtype="fp32" if on_cpu else "bf16", offload=not on_cpu),
        sampler=pg.SamplerConfig(engine="vllm", colocate=True, python=str(environment), max_concurrency=4),
        output=str(folder / "run"),
    )
    train(run, display=False)


def _follow(stack: ExitStack, device: str, sizes: Sizes) -> list[dict[str, float]]:
    """Note the device's memory before, in and after each update; there the learner also takes all that a sleeping server left."""
    from policygrad.learners.local.learner import LocalLearner

    noted, update = list[dict[str, float]](), LocalLearner.update

    def watch(learner: LocalLearner, *args: Any) -> Any:
        row = {"before an update": read_used(device)}
        if device != "cpu":
            taken = torch.empty(torch.cuda.mem_get_info()[0] - BESIDE, dtype=torch.uint8, device=device).fill_(1)
            row["the learner could take"] = taken.numel() / GIB
            row["then used"] = read_used(device)
            del taken
            torch.cuda.empty_cache()
        result = update(learner, *args)
        noted.append(row | {"after an update": read_used(device)})
        return result

    stack.enter_context(patch.object(LocalLearner, "update", watch))
    return noted


def read_used(device: str) -> float:
    """Return the GiB in use on the device by all processes; on a CPU, the resident ones of this process."""
    if device == "cpu":
        return _read_resident() / GIB
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return float(total - free) / GIB


def _read_resident() -> int:
    pages = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def check_phases(
    device: str, sizes: Sizes, learner: list[dict[str, float]], server: list[dict[str, Any]]
) -> dict[str, Any]:
    """Return both sides' phases. Raises CheckFailedError where memory was not lent."""
    from gpu_parts import check

    events = [row["event"] for row in server]
    cycle = ["sleep", "wake weights", "load", "wake kv_cache"]
    check(events == ["start", "load", *cycle * STEPS], f"the server was asked for {', '.join(events)}")
    lent = (sizes.weights + sizes.cache) * MIB / GIB
    used = {name: [row["GiB"] for row in server if row["event"] == name] for name in ("load", "sleep", *cycle[1::2])}
    for before, after in zip([used["load"][0], *used["wake kv_cache"]], used["sleep"], strict=False):
        check(before - after >= 0.9 * lent, f"sleep freed {before - after:.3g} of {lent:.3g} GiB")
    if device != "cpu":
        total = torch.cuda.get_device_properties(0).total_memory / GIB
        for row in learner:
            check(
                row["the learner could take"] > total - lent,
                f"the learner could take no more than beside a server: {row}",
            )
    phases = {f"server: {name}": [round(x, 2) for x in values] for name, values in used.items()}
    if device != "cpu":
        phases["device"] = [round(row["device, GiB"], 2) for row in server]
    return {"held by the server, GiB": lent} | phases | {f"step {i + 1}": row for i, row in enumerate(learner)}


def _share_gpu(config: Any, learner: object, count: int) -> Any:
    """In the place of `assign_gpus` on a machine without a GPU."""
    return replace(config, gpus=(0,), gpu_memory=0.5)


# The server.


def serve(device: str, sizes: Sizes, log: Path, dtype: str, port: int) -> None:
    """Serve vLLM's routes, and hold memory on the device while awake."""
    from stand_in_servers import make_vllm, serve_json

    respond = make_vllm(device, dtype)
    wanted = dict(zip(PART_NAMES, (sizes.weights, sizes.cache), strict=True))
    held = {name: _take(size, device) for name, size in wanted.items()}

    def note(event: str) -> None:
        gc.collect()
        if device != "cpu":
            torch.cuda.empty_cache()
        with log.open("a", encoding="utf-8") as file:
            own = read_used(device) if device == "cpu" else torch.cuda.memory_reserved() / GIB
            file.write(json.dumps({"event": event, "GiB": own, "device, GiB": read_used(device)}) + "\n")

    def respond_and_hold(path: str, body: Any) -> Any:
        answer = respond(path, body)
        if path.startswith("/sleep"):
            held.clear()
            note("sleep")
        elif path.startswith("/wake_up"):
            part = path.partition("tags=")[2]
            held[part] = _take(wanted[part], device)
            note(f"wake {part}")
        elif path == "/collective_rpc":
            note("load")
        return answer

    note("start")
    serve_json(respond_and_hold, port)


def _take(mib: int, device: str) -> torch.Tensor:
    return torch.ones(mib * MIB, dtype=torch.uint8, device=device)


if __name__ == "__main__":
    sys.path.append(str(Path(__file__).parent))  # a server's Python does not add it by itself
    if len(sys.argv) < 6 or "--port" not in sys.argv:
        sys.exit("usage: gpu_colocation.py DEVICE WEIGHTS_MIB CACHE_MIB LOG serve MODEL … --dtype TYPE … --port N")
    options = {name: sys.argv[sys.argv.index(f"--{name}") + 1] for name in ("dtype", "port")}
    given = Sizes(int(sys.argv[2]), int(sys.argv[3]))
    serve(sys.argv[1], given, Path(sys.argv[4]), options["dtype"], int(options["port"]))
