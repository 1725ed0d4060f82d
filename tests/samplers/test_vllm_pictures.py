"""A real vLLM reads pictures as the policy does, before and after its vision tower is replaced. Needs a vLLM: `make test-vllm`.

POLICYGRAD_VLLM names a virtual environment of its own with vLLM 0.32, on a GPU or a CPU.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import policygrad as pg
from doubles.seeing_engines import save_served
from doubles.vision_models import make_picture
from policygrad.errors import EngineError
from policygrad.models.loading import load_model
from policygrad.models.tokenizer import load_tokenizer
from policygrad.samplers.base import Request, SamplingParams
from policygrad.samplers.config import SamplerConfig
from policygrad.samplers.engines import probe
from policygrad.samplers.engines.vllm import VllmSampler
from policygrad.utils.async_runner import AsyncRunner
from policygrad.weight_sync.base import PublishedWeights

VENV = os.environ.get("POLICYGRAD_VLLM", "")
pytestmark = pytest.mark.skipif(not VENV, reason="POLICYGRAD_VLLM names no environment with vLLM")
LENGTH = 20


@pytest.fixture
def wait() -> Iterator[AsyncRunner]:
    with AsyncRunner() as waiter:
        yield waiter


@pytest.fixture(params=[False, True], ids=["head of its own", "tied head"])
def sampler(request: pytest.FixtureRequest, tmp_path: Path, wait: AsyncRunner) -> Iterator[VllmSampler]:
    """It starts its server, and continues chunks of completions."""
    folder = str(save_served(tmp_path / "model", tied=request.param))
    model = load_model(folder, dtype="fp32", device="cpu")
    config = SamplerConfig(engine="vllm", python=VENV, chunk_tokens=6, context_length=512)
    made = VllmSampler(model, load_tokenizer(folder, model), config, tmp_path / "weights")
    try:
        yield made
    finally:
        wait(made.close())


def changed(model: Any, version: int) -> PublishedWeights:
    with torch.no_grad():
        for i, p in enumerate(model.parameters()):
            p.mul_(1 + 0.05 * torch.sin(torch.arange(p.numel()).float() + i + version).view_as(p))
    return PublishedWeights(version, dict(model.named_parameters()))


def test_vllm_agrees_after_every_publication_and_in_chunks(sampler: VllmSampler, wait: AsyncRunner) -> None:
    for version in range(3):
        metrics = wait(sampler.update(changed(sampler.model, version)))
        assert metrics["publication/probe_max"].value < 1e-4
    requests = list[Request]()
    for i in range(12):
        pictures = [make_picture(40 + 8 * i, 24 + j, 3 * i + j) for j in range(1 + i % 2)]
        parts = [{"type": "image", "image": picture} for picture in pictures]
        text = sampler.tokenizer.encode([{"role": "user", "content": (*parts, {"type": "text", "text": "?"})}], LENGTH)
        sampling = SamplingParams(max_tokens=LENGTH)
        requests.append(Request(text.ids, (1, i), sampling, LENGTH, media=text.media, compact_ids=text.compact_ids))
    assert sampler.tokenizer.pictures is not None
    written = torch.tensor([sampler.tokenizer.pictures.placeholder, 40])  # as a policy may have sampled it
    first = requests[0]
    assert first.compact_ids is not None
    ids, compact = torch.cat([first.prompt_ids, written]), torch.cat([first.compact_ids, written])
    requests[0] = replace(first, prompt_ids=ids, compact_ids=compact)
    generations = wait(sampler.generate(requests))
    logp, _, _ = probe.score_tokens(sampler.model, requests, generations)
    assert float((torch.cat([g.logp for g in generations]) - logp).abs().max()) < 1e-4
    # pictures matter: other pixels would show
    moved = [
        replace(r, media=tuple(replace(m, tensors={n: 0.9 * x for n, x in m.tensors.items()}) for m in r.media))
        for r in requests
    ]
    assert float((probe.score_tokens(sampler.model, moved, generations)[0] - logp).abs().max()) > 1e-2
    compact = torch.cat([written, first.compact_ids])
    earlier = replace(
        first,
        prompt_ids=torch.cat([written, first.prompt_ids]),
        compact_ids=compact,
        media=tuple(m.shift(len(written)) for m in first.media),
    )
    [url] = sampler.processes
    with pytest.raises(EngineError, match="takes a token that the policy wrote for a picture"):
        wait(sampler.complete(url, earlier, 7))


def test_run_with_pictures(tmp_path: Path) -> None:
    rows = list[str]()
    for i in range(6):
        (tmp_path / f"{i}.png").write_bytes(make_picture(32 + 8 * (i % 2), 24, i).data)
        rows.append(json.dumps({"prompt": [{"role": "user", "content": "<image>?"}], "images": [f"{i}.png"]}))
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    reward = "def digits(prompts, texts):\n    return [sum(c.isdigit() for c in t) / 8 for t in texts]\n"
    (tmp_path / "digits.py").write_text(reward)
    run = pg.Run(
        model=str(save_served(tmp_path / "model")),
        task=str(tmp_path / "rows.jsonl"),
        reward=(f"{tmp_path}/digits.py:digits",),
        sampler=SamplerConfig(engine="vllm", python=VENV),
        steps=3,
        prompts_per_step=3,
        samples_per_prompt=4,
        sampling=SamplingParams(max_tokens=8),
        evaluation=pg.EvaluationConfig(problems=0),
        output=str(tmp_path / "run"),
    )
    pg.train(run, display=False)
    metrics = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    probes = [row["publication/probe_max"] for row in metrics if "publication/probe_max" in row]
    assert len(probes) == 3
    assert max(probes) < 1e-4
