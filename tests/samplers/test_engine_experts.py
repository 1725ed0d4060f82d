"""Engines return the experts that each token was routed to, in their own forms: what the learner replays is what reading takes."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as tf
from torch import Tensor, nn

from doubles.cases import keep_fast
from doubles.experts import LAYERS, MODELS
from doubles.http_engines import FormServer, SglangForm, VllmForm
from policygrad.errors import EngineError
from policygrad.models.loading import load_model
from policygrad.models.moe_routing import Routing
from policygrad.models.tokenizer import Tokenizer, load_tokenizer
from policygrad.samplers.base import Generation, Request, SamplingParams
from policygrad.samplers.config import SamplerConfig
from policygrad.samplers.engines.base import EngineCompletion, EngineSampler
from policygrad.samplers.engines.http import HttpClient
from policygrad.samplers.engines.sglang import SglangSampler
from policygrad.samplers.engines.vllm import VllmSampler
from policygrad.utils.async_runner import AsyncRunner
from policygrad.weight_sync.base import PublishedWeights

pytestmark = pytest.mark.usefixtures("short_probes", "few_attempts")
URL = "http://engine:8000"
PROMPT = torch.tensor([3, 9, 17, 4, 30])


def read_experts(model: nn.Module, tokens: Tensor) -> Tensor:
    """Return the experts of each token [n, layers with experts, k], read in one pass."""
    routing = Routing.for_model(model)
    with torch.no_grad(), routing.recording():
        model(input_ids=tokens[None])
        return routing.pop_recorded()


class ExpertServer(FormServer):
    """Samples from a mixture of experts, and tells of all its layers: of one without experts, zeros."""

    model: nn.Module
    dense_layers: int
    experts: np.ndarray
    has_flag = True
    """False: it was started without --enable-return-routed-experts."""

    def load(self, folder: str) -> None:
        """Its weights are the policy's own."""

    def draw(self, tokens: list[int], temperature: float, max_tokens: int, seed: int) -> EngineCompletion:
        generator, drawn, logp = torch.Generator().manual_seed(seed), list[int](), list[float]()
        while len(drawn) < max_tokens and not (drawn and drawn[-1] in self.end):
            with torch.no_grad():
                logits = self.model(input_ids=torch.tensor([[*tokens, *drawn]])).logits[0, -1]
            rows = (logits / temperature).log_softmax(-1)
            drawn.append(int(rows.exp().multinomial(1, generator=generator)))
            logp.append(float(rows[drawn[-1]]))
        read = read_experts(self.model, torch.tensor([*tokens, *drawn[:-1]])).numpy()
        self.experts = np.concatenate([np.zeros_like(read[:, : self.dense_layers]), read], axis=1)
        return EngineCompletion(drawn, logp)


class VllmExperts(ExpertServer, VllmForm):
    """vllm-project/vllm 0.32, vllm/entrypoints/openai/completion/serving.py: a NumPy file in base64."""

    def tell(self, path: str, body: Any) -> Any:
        reply = super().tell(path, body)
        if path == "/v1/completions" and self.has_flag:
            file = io.BytesIO()
            np.save(file, self.experts.astype(np.uint8))
            reply["choices"][0]["routed_experts"] = base64.b64encode(file.getvalue()).decode()
        return reply


class SglangExperts(ExpertServer, SglangForm):
    """sgl-project/sglang 0.5, docs/advanced_features: int32 numbers in base64, if the request asks for them."""

    def tell(self, path: str, body: Any) -> Any:
        reply = super().tell(path, body)
        if path == "/generate" and self.has_flag and body.get("return_routed_experts"):
            encoded = base64.b64encode(self.experts.astype(np.int32).tobytes()).decode()
            reply["meta_info"]["routed_experts"] = encoded
        return reply


@dataclass
class Made:
    sampler: EngineSampler
    server: ExpertServer
    wait: AsyncRunner

    def sample(self, count: int = 3, max_tokens: int = 7) -> list[Generation]:
        params = SamplingParams(max_tokens=max_tokens)
        return self.wait(self.sampler.generate([Request(PROMPT, (1, i), params, max_tokens) for i in range(count)]))


@pytest.fixture(scope="module")
def tokenizer(random_model: Path) -> Tokenizer:
    return load_tokenizer(str(random_model), load_model(str(random_model), dtype="fp32", device="cpu"))


def make(engine: str, name: str, tokenizer: Tokenizer, folder: Path, wait: AsyncRunner, **options: Any) -> Made:
    config = MODELS[name]()
    config.vocab_size = len(tokenizer.hf)
    config._experts_implementation = "eager"  # the grouped product has no float64
    torch.manual_seed(0)
    model = tf.AutoModelForCausalLM.from_config(config).double().eval()
    sampler_class: type[EngineSampler] = {"vllm": VllmSampler, "sglang": SglangSampler}[engine]
    form: type[ExpertServer] = {"vllm": VllmExperts, "sglang": SglangExperts}[engine]
    sampler = sampler_class(model, tokenizer, SamplerConfig(engine=engine, urls=(URL,), **options), folder)
    server = form(torch.zeros(1), tokenizer.end_ids)
    server.model, server.dense_layers = model, config.num_hidden_layers - LAYERS[name]
    sampler.http = HttpClient(5.0, server.transport)
    sampler.records_experts = True
    wait(sampler.update(PublishedWeights(0, dict(model.named_parameters()))))
    return Made(sampler, server, wait)


@pytest.fixture
def wait() -> Iterator[AsyncRunner]:
    with AsyncRunner() as waiter:
        yield waiter


@pytest.mark.parametrize("chunk_tokens", keep_fast((0, 3), 3))
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_experts_are_those_that_reading_the_text_takes(
    engine: str, name: str, chunk_tokens: int, tokenizer: Tokenizer, tmp_path: Path, wait: AsyncRunner
) -> None:
    """Also for completions in chunks, whose prompts the server reads again; and only of the layers that have experts."""
    made = make(engine, name, tokenizer, tmp_path, wait, chunk_tokens=chunk_tokens)
    for generation in made.sample():
        expected = read_experts(made.server.model, torch.cat([PROMPT, generation.tokens]))
        assert generation.routed_experts is not None
        assert torch.equal(generation.routed_experts[:-1], expected[:-1])
        assert (generation.routed_experts[-1] == -1).all()  # no engine reads the last token
        assert generation.routed_experts.shape == expected.shape


@pytest.mark.parametrize("engine", ["vllm", pytest.param("sglang", marks=pytest.mark.full)])
def test_server_without_the_flag_is_refused_with_it(
    engine: str, tokenizer: Tokenizer, tmp_path: Path, wait: AsyncRunner
) -> None:
    made = make(engine, "qwen3", tokenizer, tmp_path, wait)
    made.server.has_flag = False
    with pytest.raises(EngineError, match=r"Start it with --enable-return-routed-experts"):
        made.sample()


@pytest.mark.parametrize("engine", ["vllm", pytest.param("sglang", marks=pytest.mark.full)])
def test_experts_of_too_few_tokens_are_refused(
    engine: str, tokenizer: Tokenizer, tmp_path: Path, wait: AsyncRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a server tells that leaves out what its prefix cache had."""
    made = make(engine, "qwen3", tokenizer, tmp_path, wait)
    draw = made.server.draw

    def cached(*args: Any) -> EngineCompletion:
        completion = draw(*args)
        made.server.experts = made.server.experts[2:]
        return completion

    monkeypatch.setattr(made.server, "draw", cached)
    with pytest.raises(EngineError, match=r"returns experts of the shape \[\d+, 2, 2\] for \d+ tokens that were read"):
        made.sample()
