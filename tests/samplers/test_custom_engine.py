"""An engine is one file: the example of docs/engines.md samples, is checked by its own flags, and is found by its name."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import httpx
import pytest
import torch

from doubles.engine import Bigram, walk
from policygrad.commands.engine import EngineOptions, build_launch_command
from policygrad.errors import ConfigError
from policygrad.models.loading import load_model
from policygrad.models.tokenizer import load_tokenizer
from policygrad.samplers.base import Request, SamplingParams
from policygrad.samplers.config import SamplerConfig
from policygrad.samplers.engines import registry
from policygrad.samplers.engines.factory import build_engine_sampler
from policygrad.samplers.engines.http import HttpClient
from policygrad.utils.async_runner import AsyncRunner
from policygrad.weight_sync.base import PublishedWeights

ROOT = Path(__file__).parents[2]
URL = "http://mine"


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    monkeypatch.setitem(registry.ENGINES, "mine", "custom_engine:MyEngine")
    monkeypatch.delitem(sys.modules, "custom_engine", raising=False)


@pytest.mark.usefixtures("registered")
def test_custom_engine_samples_from_the_policy(random_model: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(str(random_model), load_model(str(random_model), dtype="fp32", device="cpu"))
    model = Bigram(len(tokenizer.hf))
    loaded: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content)
        if request.url.path == "/load":
            loaded.append(body["folder"])
            return httpx.Response(200, json={})
        sampling = SamplingParams(temperature=body["temperature"])
        prompt = Request(torch.tensor(body["prompt_ids"]), (0,), sampling, body["max_tokens"])
        completion = walk(model.table, prompt, body["seed"], tokenizer.end_ids)
        return httpx.Response(200, json={"token_ids": completion.tokens, "logprobs": completion.logp})

    config = SamplerConfig(engine="mine", urls=(URL,))
    sampler = build_engine_sampler(config, model, tokenizer, tmp_path / "weights", 1.0)
    sampler.http = HttpClient(5.0, httpx.MockTransport(answer))
    with AsyncRunner() as run:
        metrics = run(sampler.update(PublishedWeights(3, dict(model.named_parameters()))))
        request = Request(torch.tensor([5, 70]), (1,), SamplingParams(max_tokens=8), 8)
        [generation] = run(sampler.generate([request]))
        assert sampler.published is not None
        assert loaded == [str(sampler.published.path)]
        run(sampler.close())
    assert metrics["publication/probe_max"].value < 1e-5
    assert generation.version == 3
    previous = torch.cat([torch.tensor([70]), generation.tokens[:-1]])
    expected = model.table[previous].log_softmax(-1).gather(-1, generation.tokens[:, None])[:, 0]
    assert torch.allclose(generation.logp, expected, atol=1e-5)


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"urls": ()},
            "sampler.engine=mine has no servers, and policygrad does not start any of this engine. Start it with",
        ),
        ({"lora_sync": "adapter"}, "supported by vllm and sglang; mine takes full models"),
        ({"weight_transport": "nccl"}, "supported by vllm and sglang, not by mine"),
        ({"max_concurrency": 0}, "mine reports none"),
    ],
)
def test_custom_engine_options_are_checked_by_its_facts(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SamplerConfig(**{"engine": "mine", "urls": (URL,), **options})  # type: ignore[arg-type]


@pytest.mark.usefixtures("registered")
def test_custom_engine_without_launch_command_is_refused_with_its_hint() -> None:
    with pytest.raises(ConfigError, match=r"does not start servers of my engine\. Start it with: my-server"):
        build_launch_command(EngineOptions("mine"))


def test_the_page_shows_the_example() -> None:
    source = (ROOT / "examples" / "custom_engine.py").read_text()
    assert source[source.index("from policygrad.errors") :] in (ROOT / "docs" / "engines.md").read_text()


def test_no_engine_is_named_outside_its_file_and_the_registry() -> None:
    for path in (ROOT / "src" / "policygrad").rglob("*.py"):
        # engines have files of their own; converters and trl speak of other libraries' options
        if path.parent.name in ("engines", "converters", "trl") or path.name == "foreign_options.py":
            continue
        names = [name for name in registry.ENGINES if f'"{name}"' in path.read_text(encoding="utf-8")]
        assert not names, f"{path} lists {names}"


def test_reading_the_options_imports_no_engine() -> None:
    import subprocess

    code = (
        "import sys; from policygrad.samplers.config import SamplerConfig; SamplerConfig(); "
        "print({'torch', 'httpx', 'numpy', 'policygrad.samplers.engines.base'} & set(sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"
