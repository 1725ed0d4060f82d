"""A real llama.cpp server samples from the policy, and the run survives its death."""

from __future__ import annotations

import asyncio
import copy
import os
import shlex
import signal
import socket
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import policygrad as pg
from policygrad.errors import EngineError
from policygrad.models.loading import load_model
from policygrad.models.lora_config import Lora
from policygrad.models.tokenizer import Tokenizer, load_tokenizer
from policygrad.rewards.workers.pool import IncrementalScoring, RewardPool
from policygrad.samplers.base import Request, SamplingParams
from policygrad.samplers.config import SamplerConfig
from policygrad.samplers.engines import probe, server_pool
from policygrad.samplers.engines.factory import build_engine_sampler
from policygrad.samplers.engines.llama_cpp import LlamaCppSampler
from policygrad.training.base_trainer import Callback
from policygrad.utils.async_runner import AsyncRunner
from policygrad.weight_sync.base import PublishedWeights

pytest.importorskip("xllamacpp")
CONFIG = SamplerConfig(engine="llama_cpp", context_length=256, max_concurrency=4, recovery_timeout=60.0)
SIZES = {
    "vocab_size": 487,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
}
STRETCHED = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


@pytest.fixture
def wait() -> Iterator[AsyncRunner]:
    with AsyncRunner() as waiter:
        yield waiter


@pytest.fixture
def model(random_model: Path) -> Any:
    return load_model(str(random_model), dtype="fp32", device="cpu")


@pytest.fixture(scope="module")
def tokenizer(random_model: Path) -> Tokenizer:
    return load_tokenizer(str(random_model), load_model(str(random_model), dtype="fp32", device="cpu"))


def publish(model: Any, version: int, change: float = 0.0) -> PublishedWeights:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(change * torch.sin(torch.arange(parameter.numel()).float()).view_as(parameter))
    return PublishedWeights(version, dict(model.named_parameters()))


def make_requests(count: int, max_tokens: int = 16) -> list[Request]:
    return [
        Request(torch.tensor([5, 70, 300, 40]), (1, i), SamplingParams(max_tokens=max_tokens), max_tokens)
        for i in range(count)
    ]


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("llama", {"attention_bias": True}),
        ("llama", {"rope_parameters": STRETCHED}),
        ("qwen2", {}),
        ("qwen3", {"head_dim": 16, "tie_word_embeddings": True}),
    ],
)
def test_exported_architectures_agree_to_1e_4_nats(
    kind: str, more: dict[str, Any], tokenizer: Tokenizer, tmp_path: Path, wait: AsyncRunner
) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SIZES | more)).eval()
    sampler = LlamaCppSampler(model, tokenizer, CONFIG, tmp_path)
    try:
        wait(sampler.update(publish(model, 0, 0.01)))
        (verdict,) = sampler.probe_results.values()
        assert verdict.tokens > 300
        assert verdict.difference < 1e-4
    finally:
        wait(sampler.close())


@pytest.mark.usefixtures("short_probes")
def test_adapter_is_merged_for_llama_cpp(
    random_model: Path, tokenizer: Tokenizer, tmp_path: Path, wait: AsyncRunner
) -> None:
    pytest.importorskip("peft")
    model = load_model(str(random_model), dtype="fp32", device="cpu", lora=Lora(rank=4))
    sampler = LlamaCppSampler(model, tokenizer, CONFIG, tmp_path)
    try:
        for version in range(2):
            expected = dict(model.named_parameters())
            with torch.no_grad():
                for name in (name for name in expected if "lora_B" in name):
                    expected[name].add_(
                        0.1 * torch.sin(torch.arange(expected[name].numel()).float()).view_as(expected[name])
                    )
            assert wait(sampler.update(PublishedWeights(version, expected)))["publication/probe_max"].value < 1e-4
    finally:
        wait(sampler.close())


def test_unsupported_models_are_refused_before_a_server_starts(tokenizer: Tokenizer, tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    other = AutoModelForCausalLM.from_config(
        AutoConfig.for_model("gpt2", n_embd=32, n_layer=1, n_head=2, vocab_size=487)
    )
    with pytest.raises(
        EngineError, match=r"llama, mistral, qwen2, qwen3, and this one is a gpt2. Choose --sampler.engine"
    ):
        LlamaCppSampler(other, tokenizer, CONFIG, tmp_path)
    stretched = AutoConfig.for_model("llama", **SIZES, rope_parameters=STRETCHED | {"rope_type": "yarn"})
    with pytest.raises(EngineError, match="scales its positions by 'yarn'"):
        LlamaCppSampler(AutoModelForCausalLM.from_config(stretched), tokenizer, CONFIG, tmp_path)


def test_server_that_does_not_start_ends_the_run_with_its_log(
    model: Any, tokenizer: Tokenizer, tmp_path: Path, wait: AsyncRunner
) -> None:
    sampler = LlamaCppSampler(model, tokenizer, CONFIG, tmp_path)
    sampler.versions.write = lambda tensors, folder: (folder / "model.gguf").write_text("no such thing") and None
    try:
        with pytest.raises(
            EngineError, match=r"(?s)exit code 1 before it answered.*server-0.log.*llama.cpp does not start"
        ):
            wait(sampler.update(publish(model, 0)))
    finally:
        wait(sampler.close())


def find_server_pid(sampler: LlamaCppSampler) -> int:
    """Return the process that serves, the child of the one that watches the folder, which is the guard's."""
    [process] = sampler.processes.values()
    assert process.guard is not None
    return find_child(find_child(process.guard.pid))


def find_child(pid: int) -> int:
    [child] = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return int(child)


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="looks for child processes in /proc")
@pytest.mark.usefixtures("short_probes")
def test_killed_server_restarts_with_its_weights(
    model: Any, tokenizer: Tokenizer, tmp_path: Path, wait: AsyncRunner
) -> None:
    sampler = LlamaCppSampler(model, tokenizer, CONFIG, tmp_path / "weights")
    wait(sampler.update(publish(model, 0)))
    wait(sampler.update(publish(model, 7, 1e-3)))
    server = find_server_pid(sampler)
    [process] = sampler.processes.values()
    complete = sampler.complete
    started: list[int] = []

    async def killing(url: str, request: Request, seed: int) -> Any:
        started.append(seed)
        if len(started) == 10:
            os.kill(server, signal.SIGKILL)
        return await complete(url, request, seed)

    sampler.complete = killing  # type: ignore[method-assign]
    generations = wait(sampler.generate(make_requests(40)))
    assert len(generations) == 40
    assert {g.version for g in generations} == {7}
    assert sampler.servers.num_retries >= 1
    assert find_server_pid(sampler) != server

    guard, server = process.guard, find_server_pid(sampler)
    assert guard is not None
    os.kill(find_child(guard.pid), signal.SIGKILL)  # the watching process too, and its server with it
    guard.wait()
    wait_for_exit(server)
    assert len(wait(sampler.generate(make_requests(8)))) == 8
    served = find_server_pid(sampler)
    wait(sampler.close())
    assert not (tmp_path / "weights").exists()
    wait_for_exit(served)


@pytest.mark.usefixtures("short_probes")
def test_llama_cpp_tokens_match_their_version_during_updates(
    model: Any, tokenizer: Tokenizer, tmp_path: Path, wait: AsyncRunner
) -> None:
    sampler = LlamaCppSampler(model, tokenizer, replace(CONFIG, chunk_tokens=2), tmp_path)
    wait(sampler.update(publish(model, 0)))
    models = {0: copy.deepcopy(model)}
    requests = [replace(r, sampling=SamplingParams(temperature=3.0)) for r in make_requests(24)]
    complete, started = sampler.complete, asyncio.Event()

    async def signalling(url: str, request: Request, seed: int) -> Any:
        completion = await complete(url, request, seed)
        if len(request.prompt_ids) == 8:  # two chunks are finished
            started.set()
        return completion

    async def both() -> list[Any]:
        generating = asyncio.ensure_future(sampler.generate(requests))
        await started.wait()
        sampler.complete = complete  # type: ignore[method-assign]
        await sampler.update(publish(model, 2, 1e-2))
        assert not generating.done()
        return list(await generating)

    sampler.complete = signalling  # type: ignore[method-assign]
    try:
        generations = wait(both())
    finally:
        wait(sampler.close())
    models[2] = model
    mixed = 0
    for request, generation in zip(requests, generations, strict=True):
        versions = torch.as_tensor(generation.version).expand(len(generation.tokens))
        assert versions.tolist() == sorted(versions.tolist())
        assert set(versions.tolist()) <= {0, 2}
        mixed += len(set(versions.tolist())) == 2
        expected = {v: probe.score_tokens(m, [request], [generation])[0] for v, m in models.items()}
        logp = torch.stack([expected[int(v)][i] for i, v in enumerate(versions)])
        assert (generation.logp.double() - logp).abs().max() < 1e-4
    assert mixed


def wait_for_exit(pid: int) -> None:
    """Wait until the process has ended."""
    subprocess.run(["tail", f"--pid={pid}", "-f", "/dev/null"], timeout=60, check=True)


class Killing(Callback):
    """Kills the server after step 2."""

    folder: Path  # of the published weights

    def step(self, trainer: Any, step: int, metrics: Any) -> None:
        self.folder = trainer.resources.rollouter.sampler.versions.root
        if step == 2:
            os.kill(find_server_pid(trainer.resources.rollouter.sampler), signal.SIGKILL)


@pytest.mark.full
@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="looks for child processes in /proc")
@pytest.mark.usefixtures("short_probes")
def test_run_survives_a_killed_server_and_resumes(small: pg.Run, tmp_path: Path) -> None:
    run = replace(small, sampler=CONFIG, steps=4, samples_per_prompt=2, output=str(tmp_path / "run"))
    killing = Killing()
    assert pg.train(run, stop_after=3, display=False, callbacks=[killing]).steps == 3
    assert not killing.folder.exists()
    assert pg.train(resume=tmp_path / "run", display=False).steps == 4
    check_rows(tmp_path / "run", 4)


@pytest.mark.full
def test_run_with_llama_cpp_learns(tmp_path: Path) -> None:
    run = pg.Run(
        sampler=replace(CONFIG, max_concurrency=16),
        steps=4,
        prompts_per_step=32,
        evaluation=pg.EvaluationConfig(problems=32, samples_per_prompt=2),
        rewards=pg.RewardConfig(num_workers=1),
        output=str(tmp_path / "run"),
    )
    result = pg.train(run, display=False)
    assert result.before is not None
    assert result.after is not None
    assert result.after - result.before > 0.3
    check_rows(tmp_path / "run", 4)


def check_rows(folder: Path, steps: int) -> None:
    rows = [row for row in map(_json, (folder / "metrics.jsonl").read_text().splitlines()) if "reward" in row]
    assert [row["step"] for row in rows] == [*range(1, steps + 1)]
    assert all(row["publication/bytes"] > 1e5 and row["publication/seconds"] > 0 for row in rows)
    assert all(row["publication/probe_max"] < 1e-4 for row in rows)
    assert all(row["staleness/max"] == 0 for row in rows if not row.get("dynamic/leftover"))


@pytest.mark.full
@pytest.mark.usefixtures("short_probes")
def test_eval_with_servers_equals_local_eval_and_scores_early(
    run_command: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Greedy completions are the same, and each is scored as soon as it is finished."""
    counts: list[int] = []
    add_completions = IncrementalScoring.add_completions

    def counted(scoring: IncrementalScoring, completions: Any) -> None:
        counts.append(len(completions))
        add_completions(scoring, completions)

    monkeypatch.setattr(IncrementalScoring, "add_completions", counted)
    monkeypatch.setattr(RewardPool, "is_overlap_worthwhile", lambda *_: True)
    argv = ["eval", "tiny", "--problems", "6", "--samples", "1", "--temperature", "0", "--max-tokens", "8", "--json"]
    code, local, _ = run_command(*argv)
    assert code == 0
    counts.clear()
    code, remote, _ = run_command(*argv, "--sampler.engine", "llama_cpp", "--sampler.context-length", "256")
    assert code == 0
    assert remote == local
    assert counts.count(1) == 6  # one by one, as they finish


@pytest.mark.usefixtures("short_probes")
def test_collect_samples_from_servers(small: pg.Run) -> None:
    sampler = SamplerConfig(engine="llama_cpp", context_length=256)
    batch = pg.collect(replace(small, prompts_per_step=2, samples_per_prompt=2, sampler=sampler)).batch
    assert len(batch.mask) == 4
    assert batch.version is not None
    assert bool((batch.version[batch.mask] == 0).all())


class Versions(pg.Trainer):
    """Records the versions of each completion's tokens."""

    seen: list[set[int]]

    def on_step(self, done: Any) -> Any:
        batch = done.batch
        self.seen += [set(v[mask].tolist()) for v, mask in zip(batch.version, batch.policy_tokens, strict=True)]
        return super().on_step(done)


@pytest.mark.usefixtures("short_probes")
def test_run_updates_weights_during_its_next_rollout(small: pg.Run, tmp_path: Path) -> None:
    run = replace(
        small,
        sampler=replace(CONFIG, chunk_tokens=2),
        max_staleness=1,
        steps=6,
        samples_per_prompt=4,
        sampling=SamplingParams(temperature=3.0, max_tokens=24),  # seldom ends early
        output=str(tmp_path / "run"),
    )
    trainer = Versions(run, display=False)
    trainer.seen = []
    assert trainer.train().steps == 6
    assert any(len(versions) == 2 for versions in trainer.seen)
    assert all(len(versions) <= 2 for versions in trainer.seen)
    rows = [_json(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    # which rollout an update falls into is a matter of pace; that some completion has two versions was seen above
    assert rows[0]["staleness/max"] == 0
    assert max(row["staleness/max"] for row in rows) == 1
    assert any(0 < row["staleness/mean"] < 1 for row in rows)
    assert all(row["publication/probe_max"] < 1e-4 for row in rows)


class Ending(Callback):
    """Stops the server after step 2, for good, and has it waited for for 0.2 seconds from then on."""

    def step(self, trainer: Any, step: int, metrics: Any) -> None:
        if step == 2:
            sampler = trainer.resources.rollouter.sampler
            [process] = sampler.processes.values()
            process.stop()
            process.ensure_running = lambda: ""
            sampler.servers.recovery_timeout = 0.2


class Phases(pg.Tracker):
    """Records progress reports."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def phase(self, text: str, done: int = 0, total: int = 0) -> None:
        self.texts.append(text)


@pytest.mark.full
@pytest.mark.usefixtures("short_probes")
def test_run_without_server_waits_ends_and_resumes(
    small: pg.Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_pool, "WAIT_REPORT_SECONDS", 0.0)
    run = replace(small, sampler=CONFIG, steps=3, samples_per_prompt=2, output=str(tmp_path / "run"))
    phases = Phases()
    with pytest.raises(EngineError, match=r"no server has answered for 0\.2 seconds") as error:
        pg.train(run, display=phases, callbacks=[Ending()])
    assert any("--resume" in note and "resumes from step 2" in note for note in error.value.__notes__), (
        error.value.__notes__
    )
    assert any(
        text.startswith("waiting for a server, each for up to 0.2 s (http://127.0.0.1:") for text in phases.texts
    )
    assert phases.texts[-1] == ""
    assert pg.train(run, resume=tmp_path / "run", display=False).steps == 3
    rows = [_json(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "reward" in row] == [1, 2, 3]


def _json(line: str) -> dict[str, Any]:
    import json

    result: dict[str, Any] = json.loads(line)
    return result


@pytest.mark.usefixtures("short_probes")
def test_server_started_by_command_follows_the_runs_folder(
    tokenizer: Tokenizer, tmp_path: Path, wait: AsyncRunner, run_command: Any
) -> None:
    """It is started with the printed command, and named by its address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    where = f"--folder {tmp_path}/shared --port {port} --max-concurrency 4 --context-length 256 --threads 1".split()
    code, command, _ = run_command("engine", "llama_cpp", *where, "--print")
    assert code == 0
    url = f"http://127.0.0.1:{port}"
    with subprocess.Popen(shlex.split(command), stdout=subprocess.DEVNULL) as server:
        try:
            model = load_model("tiny", dtype="fp32", device="cpu")  # what the command compares with
            config = replace(CONFIG, urls=(url,), folder=str(tmp_path / "shared"))
            sampler = build_engine_sampler(config, model, tokenizer, tmp_path / "run", 1.0)
            wait(sampler.update(publish(model, 0)))
            code, output, _ = run_command("engine", "check", url, "--max-concurrency", "4")
            assert (code, "samples from tiny" in output) == (0, True)
            wait(sampler.update(publish(model, 1, 1e-3)))
            assert {g.version for g in wait(sampler.generate(make_requests(4)))} == {1}
            code, _, output = run_command(
                "engine", "check", url, "--max-concurrency", "4"
            )  # it serves other weights now
            assert (code, "its log-probabilities differ from the learner's" in output) == (2, True)
            other = replace(config, folder=str(tmp_path / "other"), recovery_timeout=0.5)
            elsewhere = build_engine_sampler(other, model, tokenizer, tmp_path, 1.0)
            with pytest.raises(EngineError, match=r"it still serves v00000001.*--sampler.folder"):
                wait(elsewhere.update(publish(model, 2)))
            wait(elsewhere.close())
            wait(sampler.close())
        finally:
            server.terminate()
