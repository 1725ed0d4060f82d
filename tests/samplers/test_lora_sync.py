"""Adapters alone, under the name of their version: requests to vLLM and SGLang, and replies in their documented form.

A real vLLM is used in tests/samplers/test_vllm_lora.py, where there is one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from doubles.adapter_forms import Adapters, OneLayer, SglangAdapters, VllmAdapters
from policygrad.errors import ConfigError, EngineError
from policygrad.models.loading import load_model
from policygrad.models.tokenizer import Tokenizer, load_tokenizer
from policygrad.samplers.base import Request, SamplingParams
from policygrad.samplers.config import SamplerConfig
from policygrad.samplers.engines.base import EngineSampler
from policygrad.samplers.engines.http import HttpClient
from policygrad.samplers.engines.sglang import SglangSampler
from policygrad.samplers.engines.vllm import VllmSampler
from policygrad.utils.async_runner import AsyncRunner
from policygrad.weight_sync.base import PublishedWeights

pytestmark = pytest.mark.usefixtures("short_probes")

peft = pytest.importorskip("peft")
URL = "http://engine:8000"
KINDS: dict[str, tuple[type[EngineSampler], type[Adapters]]] = {
    "vllm": (VllmSampler, VllmAdapters),
    "sglang": (SglangSampler, SglangAdapters),
}
ASKED = Request(torch.tensor([3, 9]), (1, 2), SamplingParams(temperature=0.7, max_tokens=6), 6)


@pytest.fixture(scope="module")
def tokenizer(random_model: Path) -> Tokenizer:
    return load_tokenizer(str(random_model), load_model(str(random_model), dtype="fp32", device="cpu"))


def one_layer(vocabulary: int, **options: Any) -> Any:
    """Return the model with an adapter of rank 3 that adds nothing yet. The options are those of PEFT's LoraConfig."""
    torch.manual_seed(0)
    config = peft.LoraConfig(**({"r": 3, "lora_alpha": 6, "target_modules": ["layer"]} | options))
    return peft.get_peft_model(OneLayer(vocabulary), config).eval()


@pytest.fixture
def make(tokenizer: Tokenizer, tmp_path: Path) -> Callable[[str], tuple[EngineSampler, Any]]:
    def made(name: str) -> tuple[EngineSampler, Any]:
        sampler_class, form = KINDS[name]
        model = one_layer(len(tokenizer.hf))
        config = SamplerConfig(engine=name, urls=(URL,), recovery_timeout=5.0)
        sampler = sampler_class(model, tokenizer, config, tmp_path / "weights")
        server = form(model.get_base_model().layer.base_layer.weight.T, tokenizer.end_ids)
        sampler.http = HttpClient(5.0, server.transport)
        return sampler, server

    return made


@pytest.fixture
def wait() -> Iterator[AsyncRunner]:
    with AsyncRunner() as waiter:
        yield waiter


def learnt(sampler: EngineSampler, version: int) -> PublishedWeights:
    """Return an adapter that the server does not have."""
    generator = torch.Generator().manual_seed(version)
    expected = dict(sampler.model.named_parameters())
    with torch.no_grad():
        for name, parameter in expected.items():
            if "lora_B" in name:
                parameter.copy_(10 * torch.randn(parameter.shape, generator=generator))
    return PublishedWeights(version, expected)


def own_logp(sampler: EngineSampler, result: Any) -> torch.Tensor:
    ids = torch.cat([ASKED.prompt_ids, result.tokens])[None]
    with torch.no_grad():
        logits = sampler.model(input_ids=ids).logits[0, len(ASKED.prompt_ids) - 1 : -1] / ASKED.sampling.temperature
    return logits.log_softmax(-1).gather(-1, result.tokens[:, None])[:, 0]


@pytest.mark.parametrize("name", KINDS)
def test_adapter_is_loaded_under_its_version_name(name: str, make: Any, wait: AsyncRunner) -> None:
    sampler, server = make(name)
    base = server.table.clone()
    for version in (4, 5):
        metrics = wait(sampler.update(learnt(sampler, version)))
        assert metrics["publication/probe_max"].value < 1e-4
        assert list(server.adapters) == [sampler.published.name]
        assert sampler.published.name.startswith(f"v0000000{version}-")
        assert metrics["publication/bytes"].value < 0.1 * base.numel() * base.element_size()
    assert torch.equal(server.table, base)
    [generation] = wait(sampler.generate([ASKED]))
    assert generation.version == 5
    assert torch.allclose(generation.logp, own_logp(sampler, generation), atol=1e-5)
    plain = (base[torch.cat([ASKED.prompt_ids[-1:], generation.tokens[:-1]])] / 0.7).log_softmax(-1)
    assert not torch.allclose(generation.logp, plain.gather(-1, generation.tokens[:, None])[:, 0], atol=1e-2)
    assert [p.name for p in sampler.versions.root.iterdir() if p.is_dir()] == [sampler.published.name]
    files = {p.name for p in sampler.published.path.iterdir()}
    assert files == {"adapter_config.json", "adapter_model.safetensors"}


@pytest.mark.parametrize(
    ("name", "path", "field"), [("vllm", "completions", "model"), ("sglang", "generate", "lora_path")]
)
def test_every_request_names_the_adapter_and_no_weight_route_is_called(
    name: str, path: str, field: str, make: Any, wait: AsyncRunner
) -> None:
    sampler, server = make(name)
    for version in (0, 1):
        server.asked.clear()
        wait(sampler.update(learnt(sampler, version)))
        assert {body[field] for at, body in server.asked if at.endswith(path)} == {sampler.published.name}
        assert not {"/collective_rpc", "/update_weights_from_disk", "/weight_info"} & {*server.paths}


@pytest.mark.parametrize("name", KINDS)
def test_zero_adapter_equals_the_base_and_another_base_is_refused(name: str, make: Any, wait: AsyncRunner) -> None:
    sampler, server = make(name)
    untouched = PublishedWeights(0, dict(sampler.model.named_parameters()))
    assert wait(sampler.update(untouched))["publication/probe_max"].value < 1e-4
    sampler, server = make(name)
    server.table *= 0.9
    with pytest.raises(EngineError, match="it has other weights"):
        wait(sampler.update(untouched))


@pytest.mark.parametrize("name", KINDS)
def test_adapters_left_by_a_killed_run_are_unloaded_and_others_stay(name: str, make: Any, wait: AsyncRunner) -> None:
    sampler, server = make(name)
    root = sampler.versions.root
    server.adapters["v00000007-00000000"] = (str(root / "v00000007-00000000"), server.table)
    server.adapters["somebodys"] = (str(root.parent / "elsewhere" / "somebodys"), server.table)
    wait(sampler.update(learnt(sampler, 0)))
    assert {*server.adapters} == {"somebodys", sampler.published.name}
    wait(sampler.close())
    assert {*server.adapters} == {"somebodys"}


@pytest.mark.parametrize("name", KINDS)
def test_server_without_its_adapter_loads_it_again(name: str, make: Any, wait: AsyncRunner) -> None:
    """For example after a restart: no completion is sampled from its own weights instead."""
    sampler, server = make(name)
    wait(sampler.update(learnt(sampler, 3)))
    server.adapters.clear()
    [generation] = wait(sampler.generate([ASKED]))
    assert list(server.adapters) == [sampler.published.name]
    assert generation.version == 3
    assert torch.allclose(generation.logp, own_logp(sampler, generation), atol=1e-5)


@pytest.mark.parametrize("name", KINDS)
def test_server_with_another_adapter_of_the_same_name_loads_it_again(name: str, make: Any, wait: AsyncRunner) -> None:
    sampler, server = make(name)
    wait(sampler.update(learnt(sampler, 3)))
    [(message, (folder, right))] = server.adapters.items()
    sampler.servers.all[0].ready = False
    server.adapters[message] = (folder, 0.5 * right)
    [generation] = wait(sampler.generate([ASKED]))
    assert torch.equal(server.adapters[message][1], right)
    assert torch.allclose(generation.logp, own_logp(sampler, generation), atol=1e-5)


def test_vllm_reply_under_another_name_is_discarded(make: Any, wait: AsyncRunner) -> None:
    sampler, server = make("vllm")
    wait(sampler.update(learnt(sampler, 3)))
    tell, odd = server.tell, ["v00000002-00000000"]

    def told(path: str, body: Any) -> Any:
        answer = tell(path, body)
        if path == "/v1/completions" and odd:
            answer["model"] = odd.pop()
        return answer

    server.tell = told
    [generation] = wait(sampler.generate([ASKED]))
    assert not odd
    assert generation.version == 3
    assert wait(sampler.update(learnt(sampler, 4)))["publication/retries"].value == 1


@pytest.mark.parametrize(
    ("name", "missing", "way_out"),
    [
        ("vllm", {"updating": False}, "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"),
        ("vllm", {"enabled": False}, "--enable-lora"),
        ("vllm", {"most": 2}, "LoRA rank 3 is greater than max_lora_rank 2.*--max-lora-rank"),
        ("sglang", {"enabled": False}, "--enable-lora"),
        ("sglang", {"most": 2}, "with rank 3 is incompatible.*--max-lora-rank and --lora-target-modules"),
    ],
)
def test_server_that_cannot_load_adapters_is_refused_with_the_missing_option(
    name: str, missing: dict[str, Any], way_out: str, make: Any, wait: AsyncRunner
) -> None:
    sampler, server = make(name)
    for key, value in missing.items():
        setattr(server, key, value)
    with pytest.raises(EngineError, match=rf"does not load the adapter: .*{way_out}.*--sampler.lora-sync merged"):
        wait(sampler.update(learnt(sampler, 0)))
    assert len([path for path in server.paths if path.endswith("/load_lora_adapter")]) == 1


def test_vllm_error_without_reason_is_retried(make: Any, wait: AsyncRunner) -> None:
    import httpx

    sampler, server = make("vllm")
    tell, times = server.tell, [1, 2]

    def told(path: str, body: Any) -> Any:
        if path == "/v1/load_lora_adapter" and times:
            times.pop()
            return httpx.Response(503, text="Service Unavailable")
        return tell(path, body)

    server.tell = told
    wait(sampler.update(learnt(sampler, 0)))
    assert not times
    assert list(server.adapters) == [sampler.published.name]


# what is chosen


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"use_dora": True}, "use_dora"),
        ({"bias": "lora_only"}, "bias"),
        ({"use_rslora": True}, "use_rslora"),
        ({"alpha_pattern": {"layer": 3}}, "alpha_pattern"),
    ],
)
def test_adapter_that_is_more_than_ba_is_sent_merged(
    options: dict[str, Any], reason: str, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    model = one_layer(len(tokenizer.hf), **options)
    model.config = {"model_type": "custom"}  # a full model has one
    config = SamplerConfig(engine="vllm", urls=(URL,))
    assert not VllmSampler(model, tokenizer, config, tmp_path).adapter_only
    with pytest.raises(EngineError, match=rf"adapter has {reason}, which .*--sampler.lora-sync merged"):
        VllmSampler(model, tokenizer, replace(config, lora_sync="adapter"), tmp_path)


def test_adapter_sync_needs_exactly_one_adapter(tokenizer: Tokenizer, tmp_path: Path) -> None:
    config = SamplerConfig(engine="vllm", urls=(URL,), lora_sync="adapter")
    with pytest.raises(EngineError, match=r"has no adapter .--learner.lora adds one"):
        VllmSampler(OneLayer(len(tokenizer.hf)), tokenizer, config, tmp_path)
    model = one_layer(len(tokenizer.hf))
    model.add_adapter("second", peft.LoraConfig(target_modules=["layer"]))
    with pytest.raises(EngineError, match="has 2 adapters"):
        VllmSampler(model, tokenizer, config, tmp_path)


def test_merged_sync_sends_full_weights_with_an_adapter(make: Any, tokenizer: Tokenizer, tmp_path: Path) -> None:
    assert make("vllm")[0].adapter_only
    model = one_layer(len(tokenizer.hf))
    model.config = {"model_type": "custom"}
    for name, (kind, _) in KINDS.items():
        config = SamplerConfig(engine=name, urls=(URL,), lora_sync="merged")
        assert not kind(model, tokenizer, config, tmp_path).adapter_only


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lora_sync": "merged"}, "sampler.engine is local"),
        (
            {"engine": "llama_cpp", "lora_sync": "adapter"},
            "llama_cpp takes full models. Set --sampler.lora-sync merged",
        ),
        ({"engine": "vllm", "urls": (URL,), "lora_sync": "lora"}, "must be auto, merged or adapter, not 'lora'"),
    ],
)
def test_invalid_lora_sync_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SamplerConfig(**options)
