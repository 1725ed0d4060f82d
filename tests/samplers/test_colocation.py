"""A server on the learner's GPU: it sleeps while the learner learns, and wakes in the one order that keeps the memory."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import policygrad as pg
from doubles.engine_environment import make_environment
from policygrad.errors import ConfigError, EngineError
from policygrad.learners.local.learner import LocalLearner
from policygrad.models.loading import load_model
from policygrad.models.tokenizer import load_tokenizer
from policygrad.samplers.base import LendsMemory, Request, SamplingParams
from policygrad.samplers.config import SamplerConfig
from policygrad.samplers.engines import factory
from policygrad.samplers.engines.colocation import CACHE, WEIGHTS, ColocatedServer, Memory, memory_share
from policygrad.samplers.engines.factory import assign_gpus
from policygrad.samplers.engines.http import ServerUnavailableError
from policygrad.samplers.engines.sglang import SglangSampler
from policygrad.samplers.engines.vllm import VllmSampler
from policygrad.training.base_trainer import Callback
from policygrad.training.engine_setup import compute_resident_bytes
from policygrad.utils.async_runner import AsyncRunner
from policygrad.weight_sync.base import PublishedWeights

GIB = 2**30
URL = "http://server"


class StrictEngine:
    """Servers that refuse a wrong order, and fail as they are told to."""

    def __init__(self) -> None:
        self.holds = {WEIGHTS, CACHE}
        self.calls: list[str] = []
        self.failing = 0  # further requests that are not answered

    def answer(self, call: str) -> None:
        self.calls.append(call)
        if self.failing:
            self.failing -= 1
            raise ServerUnavailableError("500")

    async def sleep(self, url: str) -> None:
        self.answer("sleep")
        assert self.holds == {WEIGHTS, CACHE}
        self.holds.clear()

    async def wake(self, url: str, part: str) -> None:
        self.answer(part)
        assert part not in self.holds
        assert part == WEIGHTS or self.holds == {WEIGHTS}
        self.holds.add(part)


def test_memory_of_the_weights_comes_back_before_that_of_the_cache() -> None:
    async def steps() -> None:
        engine = StrictEngine()
        server = ColocatedServer(engine, URL)
        assert not await server.begin_waking()  # it never slept
        await server.finish_waking()
        assert engine.calls == []
        for _ in range(2):
            await server.lend()
            await server.lend()  # a second time changes nothing
            assert server.memory is Memory.ASLEEP
            assert await server.begin_waking()
            assert server.memory is Memory.LOADING
            await server.finish_waking()
            assert server.memory is Memory.AWAKE
        assert engine.calls == ["sleep", WEIGHTS, CACHE] * 2

    asyncio.run(steps())


def test_interrupted_wakings_go_on_where_they_were() -> None:
    async def steps() -> None:
        engine = StrictEngine()
        server = ColocatedServer(engine, URL)
        await server.lend()
        engine.failing = 1  # the wake-up is lost
        with pytest.raises(ServerUnavailableError):
            await server.begin_waking()
        assert server.memory is Memory.ASLEEP
        with pytest.raises(EngineError, match="while it slept"):
            await server.finish_waking()
        assert await server.begin_waking()
        engine.failing = 1
        with pytest.raises(ServerUnavailableError):
            await server.finish_waking()
        assert await server.begin_waking()  # its weights are loaded again: they may not have been
        await server.finish_waking()
        assert engine.holds == {WEIGHTS, CACHE}
        assert engine.calls == ["sleep", WEIGHTS, WEIGHTS, CACHE, CACHE]

    asyncio.run(steps())


def test_server_that_is_half_awake_wakes_before_it_sleeps_again() -> None:
    async def steps() -> None:
        engine = StrictEngine()
        server = ColocatedServer(engine, URL)
        await server.lend()
        await server.begin_waking()
        await server.lend()
        assert engine.calls == ["sleep", WEIGHTS, CACHE, "sleep"]
        assert not engine.holds
        server.mark_restarted()  # it died asleep, and was started again
        assert not await server.begin_waking()

    asyncio.run(steps())


@pytest.mark.parametrize(
    ("total", "learner", "share"),
    [(80 * GIB, 10 * GIB, 0.85), (80 * GIB, 40 * GIB, 0.475), (80 * GIB, 1 * GIB, 0.9), (24 * GIB, 12 * GIB, 0.417)],
)
def test_server_gets_what_the_learners_state_leaves(total: float, learner: float, share: float) -> None:
    assert memory_share(total, learner) == share


def test_gpu_that_the_learner_fills_is_refused() -> None:
    with pytest.raises(EngineError, match=r"keeps 75.0 of the GPU's 80.0 GiB .*--learner.lora rank=16"):
        memory_share(80 * GIB, 75 * GIB)


def test_learners_state_is_counted_by_its_parts() -> None:
    run = pg.Run(learner=pg.LearnerConfig(dtype="bf16"), algorithm=pg.get_algorithm("grpo"))
    # bf16 weights, fp32 masters, gradients and two moments, and the reference in bf16; the state is too large for a copy
    assert compute_resident_bytes(run, run.algorithm, 10**9) == pytest.approx((2 + 4 + 4 + 8 + 2) * 1e9)
    adapter = replace(run, learner=pg.LearnerConfig(dtype="bf16", lora="rank=16"))
    assert compute_resident_bytes(adapter, run.algorithm, 10**9) == 2e9


VLLM = SamplerConfig(engine="vllm", colocate=True)


def test_colocated_servers_are_on_the_learners_gpus() -> None:
    assert assign_gpus(replace(VLLM, servers=2), (0, 1), 8).gpus == (0, 1)
    with pytest.raises(ConfigError, match="the learner has none"):
        assign_gpus(VLLM, (), 0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"engine": "llama_cpp"}, "sampler.colocate is supported by vllm and sglang"),
        ({"urls": ("http://a:1",)}, "sampler.colocate is for servers that the run starts"),
        ({"engine": "local"}, "sampler.colocate is an option of servers"),
    ],
)
def test_engines_and_servers_that_cannot_sleep_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SamplerConfig(**{"engine": "vllm", "colocate": True, **options})


def test_sampling_ahead_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"with max_staleness=1 they sample then"):
        pg.Run(sampler=VLLM, max_staleness=1)


@pytest.fixture
def wait() -> Iterator[AsyncRunner]:
    with AsyncRunner() as waiter:
        yield waiter


def with_a_gpu(config: SamplerConfig, learner: object, count: int) -> SamplerConfig:
    """In the place of `assign_gpus`, on a machine that has none."""
    return replace(config, gpus=(0,), gpu_memory=0.5)


@pytest.fixture
def sampler(random_model: Path, short_probes: None, tmp_path: Path, wait: AsyncRunner) -> Iterator[VllmSampler]:
    model = load_model(str(random_model), dtype="fp32", device="cpu")
    environment = make_environment(tmp_path / "venv")
    config = replace(VLLM, gpus=(0,), python=str(environment), max_concurrency=4, recovery_timeout=60.0)
    made = VllmSampler(model, load_tokenizer(str(random_model), model), config, tmp_path / "weights")
    wait(made.update(PublishedWeights(0, dict(model.named_parameters()))))
    yield made
    wait(made.close())


def sample(sampler: VllmSampler, wait: AsyncRunner) -> list[Any]:
    import torch

    requests = [Request(torch.tensor([5, 70, 300]), (1, i), SamplingParams(max_tokens=4), 4) for i in range(3)]
    return wait(sampler.generate(requests))


@pytest.mark.full
def test_real_process_sleeps_wakes_and_survives(sampler: VllmSampler, wait: AsyncRunner) -> None:
    [(url, process)] = sampler.processes.items()
    routes: list[str] = []
    control = sampler._control

    async def following(url: str, method: str, route: str, *rest: Any) -> Any:
        if route.startswith(("/sleep", "/wake_up", "/collective_rpc")):
            routes.append(route)
        return await control(url, method, route, *rest)

    sampler._control = following  # type: ignore[method-assign]
    assert isinstance(sampler, LendsMemory)
    assert "time/lend_memory" in wait(sampler.lend_memory())
    metrics = wait(sampler.update(PublishedWeights(1, dict(sampler.model.named_parameters()))))
    assert metrics["publication/servers"].value == 1
    expected = ["/sleep?level=2&mode=wait", "/wake_up?tags=weights", "/collective_rpc", "/wake_up?tags=kv_cache"]
    assert routes == expected
    wait(sampler.lend_memory())
    assert len(sample(sampler, wait)) == 3  # without new weights: it loads the same ones again
    assert routes == expected * 2

    wait(sampler.lend_memory())
    guard = process.guard
    assert guard is not None
    os.kill(find_child(guard.pid), signal.SIGKILL)  # it dies asleep
    guard.wait()
    del routes[:]
    assert {g.version for g in sample(sampler, wait)} == {1}
    assert "/wake_up?tags=weights" not in routes  # it started awake

    wait(sampler.lend_memory())
    fail_next(sampler, "wake", 3)  # three wake-ups are lost: it is stopped, and started again
    first = process.guard
    assert len(sample(sampler, wait)) == 3
    assert process.guard is not first

    fail_next(sampler, "sleep", 1)  # it does not go to sleep: it is stopped, so that its memory is free
    wait(sampler.lend_memory())
    assert process.guard is None
    assert len(sample(sampler, wait)) == 3
    assert sampler.colocated[url].memory is Memory.AWAKE


def fail_next(sampler: VllmSampler, name: str, count: int) -> None:
    """Let the next calls of a method fail as if the server did not answer."""
    method, left = getattr(sampler, name), [count]

    async def failing(*args: Any) -> None:
        if left[0]:
            left[0] -= 1
            raise ServerUnavailableError("500")
        await method(*args)

    setattr(sampler, name, failing)


def find_child(pid: int) -> int:
    [child] = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return int(child)


def test_server_that_cannot_sleep_ends_the_run_with_the_reason(sampler: VllmSampler, wait: AsyncRunner) -> None:
    fail_next(sampler, "sleep", 1)
    with pytest.raises(EngineError, match=r"vLLM does not go to sleep: 500\."):
        wait(sampler.lend_memory())


class Order(Callback):
    """Notes what a server holds while the learner has the step's result."""

    def __init__(self) -> None:
        self.held: list[Memory] = []

    def step(self, trainer: Any, step: int, metrics: Any) -> None:
        [colocated] = trainer.resources.rollouter.sampler.colocated.values()
        self.held.append(colocated.memory)


@pytest.mark.usefixtures("short_probes")
def test_run_lends_the_memory_in_every_step(small: pg.Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(factory, "assign_gpus", with_a_gpu)
    environment, order = make_environment(tmp_path / "venv"), Order()
    run = replace(
        small,
        sampler=replace(VLLM, python=str(environment), max_concurrency=4),
        steps=2,
        samples_per_prompt=2,
        evaluation=pg.EvaluationConfig(problems=2, samples_per_prompt=1),
        output=str(tmp_path / "run"),
    )
    updates: list[Memory] = []
    trainer = pg.Trainer(run, display=False, callbacks=[order])
    update = LocalLearner.update

    def watching(learner: Any, *args: Any) -> Any:
        updates.extend(c.memory for c in trainer.resources.rollouter.sampler.colocated.values())  # type: ignore[attr-defined]
        return update(learner, *args)

    monkeypatch.setattr(LocalLearner, "update", watching)
    assert trainer.train().steps == 2
    assert updates == [Memory.ASLEEP] * 2
    assert order.held == [Memory.AWAKE] * 2  # the published weights are loaded
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert all("time/lend_memory" in row for row in rows if "reward" in row)


@pytest.mark.parametrize("adapter_only", [True, False])
def test_sglang_releases_and_resumes_by_tags(adapter_only: bool, tmp_path: Path) -> None:
    from policygrad.models.lora_config import Lora
    from policygrad.samplers.engines.base import LaunchOptions

    posted: list[tuple[str, Any]] = []

    async def post(url: str, body: Any, timeout: float) -> Any:
        posted.append((url, body))

    model = load_model("tiny", dtype="fp32", device="cpu")
    sampler = SglangSampler(model, load_tokenizer("tiny", model), replace(VLLM, engine="sglang"), tmp_path)
    sampler.http.post = post  # type: ignore[method-assign, assignment]
    asyncio.run(sampler.sleep(URL))
    asyncio.run(sampler.wake(URL, WEIGHTS))
    assert posted == [
        (f"{URL}/release_memory_occupation", {"tags": ["kv_cache", "weights"]}),
        (f"{URL}/resume_memory_occupation", {"tags": ["weights"]}),
    ]
    lora = Lora(rank=8) if adapter_only else None
    options = LaunchOptions("m", None, "h", 1, "bfloat16", 64, 4, 1, lora=lora, colocate=True)
    argv = SglangSampler.launch_command(options)[1]
    assert "--enable-memory-saver" in argv
    assert ("--enable-weights-cpu-backup" in argv) is adapter_only
    environment, argv = VllmSampler.launch_command(options)
    assert "--enable-sleep-mode" in argv
    assert environment["VLLM_SERVER_DEV_MODE"] == "1"
