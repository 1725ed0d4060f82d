"""Requests to vLLM and SGLang, and replies in their documented form; no real server is used here.

A real vLLM is used in tests/samplers/test_vllm.py, where there is one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from transformers import PretrainedConfig

from doubles.engine import Bigram
from doubles.http_engines import FormServer, SglangForm, VllmForm
from policygrad.errors import ConfigError, EngineError
from policygrad.models.loading import load_model
from policygrad.models.tokenizer import Tokenizer, load_tokenizer
from policygrad.samplers.base import Request, SamplingParams
from policygrad.samplers.config import SamplerConfig
from policygrad.samplers.engines.base import EngineSampler, LaunchOptions
from policygrad.samplers.engines.http import HttpClient
from policygrad.samplers.engines.sglang import SglangSampler
from policygrad.samplers.engines.vllm import VllmSampler
from policygrad.samplers.local.sampling import log_probabilities
from policygrad.utils.async_runner import AsyncRunner
from policygrad.weight_sync.base import PublishedWeights

pytestmark = pytest.mark.usefixtures("short_probes")

URL = "http://engine:8000"
KINDS: dict[str, tuple[type[EngineSampler], type[FormServer]]] = {
    "vllm": (VllmSampler, VllmForm),
    "sglang": (SglangSampler, SglangForm),
}
Made = tuple[EngineSampler, Any]


@pytest.fixture(scope="module")
def tokenizer(random_model: Path) -> Tokenizer:
    return load_tokenizer(str(random_model), load_model(str(random_model), dtype="fp32", device="cpu"))


@pytest.fixture
def make(tokenizer: Tokenizer, tmp_path: Path) -> Callable[[str], Made]:
    def made(name: str) -> Made:
        sampler_class, form = KINDS[name]
        model = Bigram(len(tokenizer.hf))
        config = SamplerConfig(engine=name, urls=(URL,), recovery_timeout=0.2)
        sampler, server = (
            sampler_class(model, tokenizer, config, tmp_path / "weights"),
            form(model.table, tokenizer.end_ids),
        )
        sampler.http = HttpClient(5.0, server.transport)
        return sampler, server

    return made


@pytest.fixture
def wait() -> Iterator[AsyncRunner]:
    with AsyncRunner() as waiter:
        yield waiter


def publish(sampler: EngineSampler, version: int) -> PublishedWeights:
    """Return weights that the server does not have."""
    with torch.no_grad():
        sampler.model.table.mul_(0.9)  # type: ignore[union-attr, operator]
    return PublishedWeights(version, dict(sampler.model.named_parameters()))


@pytest.mark.parametrize("name", KINDS)
def test_servers_load_weights_and_sample_from_the_policy(name: str, make: Any, wait: AsyncRunner) -> None:
    sampler, server = make(name)
    for version in (4, 5):
        metrics = wait(sampler.update(publish(sampler, version)))
        assert metrics["publication/probe_max"].value < 1e-5
        assert server.version == sampler.published.name
        assert server.version.startswith(f"v0000000{version}-")
    [generation] = wait(
        sampler.generate([Request(torch.tensor([3, 9]), (1, 2), SamplingParams(temperature=0.7, max_tokens=6), 6)])
    )
    rows = torch.cat([torch.tensor([9]), generation.tokens[:-1]])
    expected = (sampler.model.table[rows] / 0.7).log_softmax(-1).gather(-1, generation.tokens[:, None])[:, 0]
    assert torch.allclose(generation.logp, expected, atol=1e-5)
    assert generation.version == 5
    assert [p.name for p in sampler.versions.root.iterdir() if p.is_dir()] == [server.version]


def test_vllm_is_paused_during_a_reload_and_its_prefix_cache_reset(make: Any, wait: AsyncRunner) -> None:
    sampler, server = make("vllm")
    wait(sampler.update(publish(sampler, 0)))
    reload = ["/pause?mode=keep", "/collective_rpc", "/reset_prefix_cache", "/resume", "/update_weight_version"]
    assert server.paths == ["/v1/models", "/weight_info", *reload]
    [rpc] = [body for path, body in server.asked if path == "/collective_rpc"]
    assert rpc["method"] == "reload_weights"
    assert rpc["kwargs"] == {"weights_path": str(sampler.published.path)}


def test_requests_set_every_sampling_option(make: Any, wait: AsyncRunner) -> None:
    sampler, server = make("vllm")
    wait(sampler.update(publish(sampler, 0)))
    body = next(body for path, body in server.asked if path == "/v1/completions")
    neutral = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0}
    assert {name: body[name] for name in neutral} == neutral
    assert (body["model"], body["stream"], body["n"], body["stop_token_ids"]) == ("served", False, 1, [1])
    sampler, server = make("sglang")
    wait(sampler.update(publish(sampler, 0)))
    body = next(body for path, body in server.asked if path == "/generate")["sampling_params"]
    neutral |= {"top_k": -1}
    assert {name: body[name] for name in neutral} == neutral


def test_vllm_with_raw_logprobs_is_refused_with_the_option(make: Any, wait: AsyncRunner) -> None:
    sampler, server = make("vllm")
    server.raw = True
    with pytest.raises(EngineError, match=r"before the temperature. Start it with --logprobs-mode processed_logprobs"):
        wait(sampler.update(publish(sampler, 0)))


def test_vllm_without_development_mode_is_refused_with_the_variable(make: Any, wait: AsyncRunner) -> None:
    sampler, server = make("vllm")
    server.developing = False
    with pytest.raises(EngineError, match="VLLM_SERVER_DEV_MODE=1"):
        wait(sampler.update(publish(sampler, 0)))


def test_sglang_load_failure_is_reported(make: Any, wait: AsyncRunner) -> None:
    sampler, server = make("sglang")
    server.broken = True
    with pytest.raises(EngineError, match="Failed to get weights iterator"):
        wait(sampler.update(publish(sampler, 0)))


def test_sglang_refuses_truncated_distributions(make: Any, wait: AsyncRunner) -> None:
    sampler, _ = make("sglang")
    wait(sampler.update(publish(sampler, 0)))
    request = Request(torch.tensor([3]), (1,), SamplingParams(top_k=5), 4)
    with pytest.raises(EngineError, match="before top-k and top-p"):
        wait(sampler.generate([request]))


@pytest.mark.parametrize("name", KINDS)
def test_another_kind_of_server_is_refused(name: str, make: Any, wait: AsyncRunner) -> None:
    sampler, server = make(name)
    server.tell = lambda path, body: {"success": True, "data": [{"id": "x"}], "weight_version": "none"}
    with pytest.raises(EngineError, match="is it one"):
        wait(sampler.update(publish(sampler, 0)))


@pytest.mark.parametrize("name", KINDS)
def test_greedy_tokens_have_logprob_zero(name: str, make: Any, wait: AsyncRunner) -> None:
    sampler, _ = make(name)
    wait(sampler.update(publish(sampler, 0)))
    requests = Request(torch.tensor([3]), (1,), SamplingParams(temperature=0.0, max_tokens=4), 4)
    [generation] = wait(sampler.generate([requests]))
    assert generation.logp.tolist() == [0.0] * len(generation.tokens)


def test_tied_head_is_written_twice_for_vllm(random_model: Path, tokenizer: Tokenizer, tmp_path: Path) -> None:
    """A reload by vLLM 0.32 keeps the old tied head, as tests/samplers/test_vllm.py shows."""
    from safetensors.torch import load_file

    model = load_model(str(random_model), dtype="fp32", device="cpu")
    tensors = dict(model.named_parameters())
    assert "lm_head.weight" not in tensors
    for engine, heads in ((VllmSampler, 1), (SglangSampler, 0)):
        config = SamplerConfig(engine=engine.__name__.lower().removesuffix("sampler"), urls=(URL,))
        sampler = engine(model, tokenizer, config, tmp_path / engine.__name__)
        result = sampler.versions.publish(PublishedWeights(0, tensors))
        written = load_file(result.path / "model.safetensors")
        assert len(written) == len(tensors) + heads
        assert all(torch.equal(written[name], tensors[name]) for name in tensors)
        if heads:
            assert torch.equal(written["lm_head.weight"], tensors["model.embed_tokens.weight"])
        assert (result.path / "config.json").is_file()
        assert (result.path / "tokenizer.json").is_file()


def test_chunks_need_an_engine() -> None:
    with pytest.raises(ConfigError, match=r"sampler.chunk_tokens is an option of servers, and sampler.engine is local"):
        SamplerConfig(chunk_tokens=3)
    with pytest.raises(
        ConfigError, match=r"cuda_graphs is for sampling in this process, and sampler.engine is llama_cpp"
    ):
        SamplerConfig(engine="llama_cpp", cuda_graphs=False)


def test_four_bit_weights_are_not_published_in_full(random_model: Path, tokenizer: Tokenizer, tmp_path: Path) -> None:
    model: Any = load_model(str(random_model), dtype="fp32", device="cpu")
    model.is_quantized = True  # as transformers marks one
    with pytest.raises(EngineError, match=r"four bits cannot be published in full.*--sampler.lora-sync adapter"):
        VllmSampler(model, tokenizer, SamplerConfig(engine="vllm", urls=(URL,)), tmp_path)


def test_recorded_vllm_reply_is_parsed(make: Any, wait: AsyncRunner) -> None:
    """A reply of version 0.32 to ids of the embedded model at temperature 2, seed 3, without fields that are not read."""
    answer = {
        "id": "cmpl-b6070f7e5641e197",
        "object": "text_completion",
        "model": "policy",
        "choices": [
            {
                "index": 0,
                "text": "Solve for </answer>",
                "logprobs": {
                    "text_offset": [0, 10, 19],
                    "token_logprobs": [-5.219334125518799, -3.8465323448181152, -0.00394043792039156],
                    "tokens": ["Solve for ", "</answer>", "<eos>"],
                    "top_logprobs": [
                        {"Solve for ": -5.219334125518799},
                        {"</answer>": -3.8465323448181152},
                        {"<eos>": -0.0039},
                    ],
                },
                "finish_reason": "stop",
                "stop_reason": None,
                "token_ids": [447, 275, 1],
                "prompt_logprobs": None,
                "prompt_token_ids": [5, 70, 300, 40],
            }
        ],
    }
    sampler, server = make("vllm")
    wait(sampler.update(publish(sampler, 0)))
    tell = server.tell
    server.tell = lambda path, body: answer if path == "/v1/completions" else tell(path, body)
    request = Request(torch.tensor([5, 70, 300, 40]), (1,), SamplingParams(temperature=2.0, max_tokens=8), 8)
    [generation] = wait(sampler.generate([request, replace(request)]))[:1]
    assert generation.tokens.tolist() == [447, 275, 1]
    assert generation.logp.tolist() == pytest.approx([-5.219334125518799, -3.8465323448181152, -0.00394043792039156])
    assert generation.finish_reason == "stop"


def test_vllm_with_a_model_of_another_shape_is_refused_and_both_are_named(
    make: Any, wait: AsyncRunner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampler, server = make("vllm")
    tell = server.tell
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "config.json").write_text('{"num_hidden_layers": 30, "hidden_size": 576}')
    sampler.model.config = PretrainedConfig(name_or_path="ours", num_hidden_layers=2, hidden_size=64)

    def other(path: str, body: Any) -> Any:
        if path == "/v1/models":
            return {"data": [{"id": "policy", "root": str(tmp_path / "theirs")}]}
        return httpx.Response(500, text="size mismatch") if path == "/collective_rpc" else tell(path, body)

    monkeypatch.setattr(server, "tell", other)
    message = r"serves the model \S+theirs \(num_hidden_layers 30, hidden_size 576\) .* model ours \(.*hidden_size 64.*mismatch"
    with pytest.raises(EngineError, match=message):
        wait(sampler.update(publish(sampler, 4)))
    assert server.paths.count("/collective_rpc") == 1
    monkeypatch.setattr(server, "tell", tell)
    wait(sampler.update(publish(sampler, 5)))
    monkeypatch.setattr(server, "tell", other)  # a server that has loaded weights before may have a passing fault
    with pytest.raises(EngineError, match="no server has answered"):
        wait(sampler.update(publish(sampler, 6)))


class MaskingVllm(VllmForm):
    """`/inference/v1/generate` of vLLM 0.32, started with --return-sampling-mask; without it if `silent`."""

    silent = False

    def tell(self, path: str, body: Any) -> Any:
        if path != "/inference/v1/generate":
            return super().tell(path, body)
        asked = body["sampling_params"]
        params = SamplingParams(temperature=asked["temperature"], top_p=asked["top_p"], top_k=asked["top_k"])
        generator, token = torch.Generator().manual_seed(asked["seed"]), body["token_ids"][-1]
        tokens, logp, left = list[int](), list[float](), list[list[int]]()
        while len(tokens) < asked["max_tokens"] and token not in self.end:
            rows = log_probabilities(self.table[token][None], params)[0]
            token = int(rows.exp().multinomial(1, generator=generator))
            tokens.append(token)
            logp.append(float(rows[token]))
            left.append((rows > -torch.inf).nonzero().squeeze(1).tolist())
        choice = {
            "index": 0,
            "logprobs": {"content": [{"token_id": t, "logprob": p} for t, p in zip(tokens, logp, strict=True)]},
            "finish_reason": "stop" if tokens[-1] in self.end else "length",
            "token_ids": tokens,
            "sampling_mask": None if self.silent else left,
        }
        return {"request_id": "1", "model": body["model"], "choices": [choice]}


@pytest.mark.parametrize("chunk_tokens", [0, 2])
def test_vllm_tells_what_top_p_left(chunk_tokens: int, tokenizer: Tokenizer, tmp_path: Path, wait: AsyncRunner) -> None:
    model = Bigram(len(tokenizer.hf))
    config = SamplerConfig(engine="vllm", urls=(URL,), recovery_timeout=0.2, chunk_tokens=chunk_tokens)
    sampler = VllmSampler(model, tokenizer, config, tmp_path / "weights")
    server = MaskingVllm(model.table, tokenizer.end_ids)
    sampler.http = HttpClient(5.0, server.transport)
    wait(sampler.update(publish(sampler, 0)))
    params = SamplingParams(temperature=0.8, top_p=0.6, max_tokens=7)
    request = Request(torch.tensor([3, 9]), (1, 2), params, 7, needs_mask=True)
    [generation] = wait(sampler.generate([request]))
    rows = torch.cat([torch.tensor([9]), generation.tokens[:-1]])
    logits = model.table[rows].detach()
    assert generation.sampling_mask is not None
    masked = generation.sampling_mask.apply_(logits / 0.8).log_softmax(-1)
    assert torch.equal(masked > -torch.inf, log_probabilities(logits, params) > -torch.inf)
    assert torch.allclose(masked.gather(-1, generation.tokens[:, None])[:, 0], generation.logp, atol=1e-5)
    server.silent = True
    with pytest.raises(EngineError, match=r"Start it with --return-sampling-mask"):
        wait(sampler.generate([request]))


def test_vllm_is_started_so_that_it_returns_masks_and_on_a_gpu_only() -> None:
    options = LaunchOptions("m", None, "h", 1, "bfloat16", 64, 4, 1, returns_masks=True)
    environment, argv = VllmSampler.launch_command(options)
    assert {"--return-sampling-mask", "--enable-scale-out"} <= {*argv}
    assert environment["VLLM_USE_V2_MODEL_RUNNER"] == "1"
    for needed in (options, replace(options, returns_masks=False, records_experts=True)):
        with pytest.raises(ConfigError, match=r"vLLM returns experts and sampling masks on a GPU only"):
            VllmSampler.launch_command(replace(needed, on_cpu=True))
