"""Prompts with pictures and engines: what is sent, what is checked, and what the probe notices. The servers are stand-ins.

A real vLLM is used in tests/samplers/test_vllm_pictures.py, where there is one.
"""

from __future__ import annotations

import base64
import copy
import io
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import nn

from doubles.engine import Bigram, Standins
from doubles.seeing_engines import Seeing, SeeingSglang, SeeingVllm, save_served
from doubles.vision_models import FAMILIES, make_family, make_picture
from policygrad.commands.engine import EngineOptions, build_launch_command
from policygrad.core.batch import Batch
from policygrad.errors import EngineError
from policygrad.learners.local.forward import build_evaluator
from policygrad.learners.local.packing import pack_micro_batches
from policygrad.models.chat.messages import EncodedText
from policygrad.models.loading import load_model
from policygrad.models.tokenizer import Tokenizer, load_tokenizer
from policygrad.models.vision import encode_picture_file
from policygrad.samplers.base import Generation, Request, SamplingParams
from policygrad.samplers.config import SamplerConfig
from policygrad.samplers.engines import probe
from policygrad.samplers.engines.base import EngineSampler
from policygrad.samplers.engines.http import HttpClient
from policygrad.samplers.engines.sglang import SglangSampler
from policygrad.samplers.engines.vllm import VllmSampler
from policygrad.utils.async_runner import AsyncRunner
from policygrad.utils.pictures import Picture
from policygrad.weight_sync.base import PublishedWeights

pytestmark = pytest.mark.usefixtures("short_probes")

URL = "http://engine:8000"
KINDS: dict[str, tuple[type[EngineSampler], type[Seeing]]] = {
    "vllm": (VllmSampler, SeeingVllm),
    "sglang": (SglangSampler, SeeingSglang),
}
Make = Callable[..., tuple[EngineSampler, Any]]


@pytest.fixture
def wait() -> Iterator[AsyncRunner]:
    with AsyncRunner() as waiter:
        yield waiter


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    """A sampler with its own model, and the server that it is connected to."""
    monkeypatch.setattr(probe, "NUM_PROMPTS", 4)

    def made(name: str, **options: Any) -> tuple[EngineSampler, Any]:
        model, processor = make_family("idefics3")
        sampler_class, server_class = KINDS[name]
        config = SamplerConfig(engine=name, urls=(URL,), recovery_timeout=0.2, **options)
        sampler = sampler_class(model, load_tokenizer(processor, model), config, tmp_path / "weights")
        server = server_class(model, load_tokenizer(copy.deepcopy(processor), model))
        sampler.http = HttpClient(30.0, server.transport)
        return sampler, server

    return made


def publish(model: nn.Module, version: int) -> PublishedWeights:
    """Return weights that the server does not have."""
    with torch.no_grad():
        for i, p in enumerate(model.parameters()):
            p.mul_(1 + 0.05 * torch.sin(torch.arange(p.numel()).float() + i + version).view_as(p))
    return PublishedWeights(version, dict(model.named_parameters()))


def encode(tokenizer: Tokenizer, *pictures: Picture, text: str = "how many?") -> EncodedText:
    parts = [{"type": "image", "image": picture} for picture in pictures]
    return tokenizer.encode([{"role": "user", "content": (*parts, {"type": "text", "text": text})}], 8)


def request(text: EncodedText, i: int = 0, max_tokens: int = 6) -> Request:
    sampling = SamplingParams(max_tokens=max_tokens)
    return Request(text.ids, (1, i), sampling, max_tokens, media=text.media, compact_ids=text.compact_ids)


def check_logp(sampler: EngineSampler, requests: list[Request], generations: list[Generation]) -> None:
    logp, _, _ = probe.score_tokens(sampler.model, requests, generations)
    assert float((torch.cat([g.logp for g in generations]) - logp).abs().max()) < 1e-5


def test_vllm_is_sent_one_mark_for_each_of_two_pictures_and_their_files(make: Make, wait: AsyncRunner) -> None:
    sampler, server = make("vllm")
    metrics = wait(sampler.update(publish(sampler.model, 0)))
    assert metrics["publication/probe_max"].value < 1e-5
    assert "/reset_encoder_cache" in server.paths
    pictures = make_picture(40, 24, 1), make_picture(32, 32, 2)
    text = encode(sampler.tokenizer, *pictures)
    server.asked.clear()
    [generation] = wait(sampler.generate([request(text)]))
    check_logp(sampler, [request(text)], [generation])
    [(path, body)] = server.asked
    assert path == "/inference/v1/generate"
    assert text.compact_ids is not None
    mark = sampler.tokenizer.pictures.placeholder  # type: ignore[union-attr]
    assert body["token_ids"] == text.compact_ids.tolist()
    assert body["token_ids"].count(mark) == 2 < text.ids.tolist().count(mark)
    assert body["return_token_ids"] is True
    files = [part["url"].removeprefix("data:image/png;base64,") for part in body["content_parts"]]
    assert [base64.b64decode(file) for file in files] == [picture.data for picture in pictures]
    assert body["sampling_params"]["logprobs"] == 0


def test_sglang_is_sent_one_mark_for_each_of_two_pictures_and_their_files(make: Make, wait: AsyncRunner) -> None:
    sampler, server = make("sglang")
    metrics = wait(sampler.update(publish(sampler.model, 0)))
    assert metrics["publication/probe_max"].value < 1e-5
    text = encode(sampler.tokenizer, make_picture(40, 24, 1), make_picture(32, 32, 2))
    server.asked.clear()
    [generation] = wait(sampler.generate([request(text)]))
    check_logp(sampler, [request(text)], [generation])
    [(path, body)] = server.asked
    assert path == "/generate"
    assert text.compact_ids is not None
    assert body["input_ids"] == text.compact_ids.tolist()
    assert len(body["image_data"]) == 2
    assert all(uri.startswith("data:image/png;base64,") for uri in body["image_data"])


@pytest.mark.parametrize("name", KINDS)
def test_prompts_without_pictures_are_sent_as_before(make: Make, wait: AsyncRunner, name: str) -> None:
    sampler, server = make(name)
    wait(sampler.update(publish(sampler.model, 0)))
    server.asked.clear()
    wait(sampler.generate([request(encode(sampler.tokenizer))]))
    [(path, body)] = server.asked
    assert path == {"vllm": "/v1/completions", "sglang": "/generate"}[name]
    assert not {"content_parts", "image_data"} & {*body}


def test_chunks_continue_both_forms_of_the_prompt(make: Make, wait: AsyncRunner) -> None:
    sampler, server = make("vllm", chunk_tokens=2)
    wait(sampler.update(publish(sampler.model, 0)))
    requests = [request(encode(sampler.tokenizer, make_picture(40, 24, i)), i) for i in range(3)]
    server.asked.clear()
    generations = wait(sampler.generate(requests))
    check_logp(sampler, requests, generations)
    assert len(server.asked) > len(requests)
    sent = [body["token_ids"] for _, body in server.asked]
    for r, generation in zip(requests, generations, strict=True):
        assert r.compact_ids is not None
        texts = [
            [*r.compact_ids.tolist(), *generation.tokens.tolist()[:n]] for n in range(0, len(generation.tokens), 2)
        ]
        assert all(text in sent for text in texts)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "vllm",
            r"http://engine:8000 reads a prompt with pictures as other tokens than '.*' does in the run: \d+ with \d+ parts of "
            r"pictures, not \d+ with \d+; token \d+ is the first that differs. Its processor's settings are not the run's",
        ),
        ("sglang", r"reads a prompt with pictures as \d+ tokens, and the run's model as \d+. Its processor's settings"),
    ],
)
def test_another_processor_is_refused(make: Make, wait: AsyncRunner, name: str, message: str) -> None:
    sampler, server = make(name)
    server.tokenizer.pictures.hf.image_processor.size = {"longest_edge": 128}
    with pytest.raises(EngineError, match=message):
        wait(sampler.update(publish(sampler.model, 0)))


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("stale", ["vision_model", pytest.param("connector", marks=pytest.mark.full)])
def test_probe_notices_an_old_vision_tower(make: Make, wait: AsyncRunner, name: str, stale: str) -> None:
    sampler, server = make(name)
    wait(sampler.update(publish(sampler.model, 0)))
    server.stale = (stale,)
    with pytest.raises(EngineError, match=r"nats .* after pictures, and \S+ without: it has an older vision tower, or"):
        wait(sampler.update(publish(sampler.model, 1)))


def test_probe_notices_other_pixels(make: Make, wait: AsyncRunner) -> None:
    """Other normalisation gives the same ids."""
    sampler, server = make("vllm")
    server.tokenizer.pictures.hf.image_processor.image_mean = [0.4, 0.5, 0.5]
    with pytest.raises(EngineError, match=r"older vision tower, or processes pictures differently"):
        wait(sampler.update(publish(sampler.model, 0)))


def test_vllm_without_the_route_is_refused_with_the_option(make: Make, wait: AsyncRunner) -> None:
    sampler, server = make("vllm")
    server.scales_out = False
    with pytest.raises(EngineError, match=r"Restart vllm serve with --enable-scale-out"):
        wait(sampler.update(publish(sampler.model, 0)))


def test_a_written_placeholder_before_a_later_picture_is_named(make: Make, wait: AsyncRunner) -> None:
    sampler, server = make("vllm")
    wait(sampler.update(publish(sampler.model, 0)))
    text = encode(sampler.tokenizer, make_picture(40, 24, 1))
    assert text.compact_ids is not None
    written = torch.tensor([40, sampler.tokenizer.pictures.placeholder])  # type: ignore[union-attr]
    media = tuple(m.shift(2) for m in text.media)
    later = EncodedText(torch.cat([written, text.ids]), media, torch.cat([written, text.compact_ids]))
    assert server.tokenizer.pictures is not None
    server.expand = lambda ids, uris: (ids[1:], ())
    with pytest.raises(EngineError, match=r"takes a token that the policy wrote for a picture: .* has sampled 99"):
        wait(sampler.complete(URL, request(later), 7))


@pytest.mark.full
@pytest.mark.usefixtures("few_attempts")
def test_sglang_refuses_a_prompt_that_it_would_encode_differently(make: Make, wait: AsyncRunner) -> None:
    sampler, _ = make("sglang")
    wait(sampler.update(publish(sampler.model, 0)))
    text = encode(sampler.tokenizer, make_picture(40, 24, 1))
    assert text.compact_ids is not None
    invalid = torch.tensor([127])  # an id that the tokenizer has not: it is decoded as nothing
    longer = EncodedText(torch.cat([text.ids, invalid]), text.media, torch.cat([text.compact_ids, invalid]))
    with pytest.raises(
        EngineError, match=r"decodes a prompt with pictures and encodes it again, and this one then has other"
    ):
        wait(sampler.generate([request(longer)]))


@pytest.mark.full
@pytest.mark.usefixtures("few_attempts")
def test_requests_without_compact_ids_or_files_are_refused(make: Make, wait: AsyncRunner) -> None:
    sampler, _ = make("vllm")
    wait(sampler.update(publish(sampler.model, 0)))
    full = request(encode(sampler.tokenizer, make_picture(40, 24, 1)))
    restored = replace(full, media=tuple(replace(m, file=b"") for m in full.media))
    for wrong, missing in ((replace(full, compact_ids=None), "compact_ids"), (restored, "the files of its pictures")):
        with pytest.raises(EngineError, match=f"a request has not {missing}: pass those of Tokenizer.encode"):
            wait(sampler.generate([wrong]))


def test_engines_that_are_sent_ids_alone_refuse_pictures(tmp_path: Path, wait: AsyncRunner) -> None:
    model, processor = make_family("idefics3")
    tokenizer = load_tokenizer(processor, model)
    table = Bigram(len(tokenizer.hf))
    config = SamplerConfig(engine="llama_cpp", urls=("http://one",), recovery_timeout=0.2)
    sampler = Standins(table, tokenizer, config, tmp_path / "weights")
    sampler.name = "llama.cpp"  # type: ignore[misc]
    wait(sampler.update(PublishedWeights(0, dict(table.named_parameters()))))  # probed without pictures
    with pytest.raises(
        EngineError, match=r"a prompt has a picture, .* llama.cpp token ids alone. Use --sampler.engine vllm"
    ):
        wait(sampler.generate([request(encode(tokenizer, make_picture(40, 24, 1)))]))


@pytest.mark.parametrize("name", FAMILIES)
def test_probe_scores_tokens_as_the_learner_does(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """After pictures, without them, and with placeholder tokens that stand for no picture."""
    monkeypatch.setattr(probe, "NUM_PROMPTS", 16)
    model, processor = make_family(name)
    tokenizer = load_tokenizer(processor, model)
    requests = probe.make_probe_requests(128, 1.0, 0, probe.make_pictured_prompts(tokenizer, 512))[:10]
    requests[0].prompt_ids[3] = tokenizer.pictures.placeholder  # type: ignore[union-attr]
    assert sum(bool(r.media) for r in requests) == 2
    tokens = torch.randint(2, 90, (10, 5), generator=torch.Generator().manual_seed(0))
    generations = [Generation(row, torch.zeros(5), "length", 0) for row in tokens]
    scored, _, _ = probe.score_tokens(model, [replace(r, sampling=SamplingParams()) for r in requests], generations)
    batch = Batch(
        mask=torch.ones(tokens.shape, dtype=torch.bool),
        group=torch.arange(10),
        reward=torch.zeros(10),
        tokens=tokens,
        prompts=tuple(r.prompt_ids for r in requests),
        prompt_media=tuple(r.media for r in requests),
    )
    evaluator, evaluated = build_evaluator(model, 1.0), torch.zeros(tokens.shape)
    with torch.no_grad():
        for part in pack_micro_batches(batch, torch.arange(10), 10**6):
            evaluated = evaluated.index_add(0, part.rows, evaluator(part))
    assert float((scored - evaluated.flatten()).abs().max()) < 1e-4


def test_the_published_folder_and_the_command_are_for_a_model_that_sees(tmp_path: Path) -> None:
    folder = save_served(tmp_path / "model")
    _, argv = build_launch_command(EngineOptions("vllm", model=str(folder)))
    assert "--enable-scale-out" in argv
    assert argv[argv.index("--max-model-len") + 1] == "512"
    assert "--enable-scale-out" not in build_launch_command(EngineOptions("vllm"))[1]
    model = load_model(str(folder), dtype="fp32", device="cpu")
    tokenizer = load_tokenizer(str(folder), model)
    config = SamplerConfig(engine="vllm", urls=(URL,))
    sampler = VllmSampler(model, tokenizer, config, tmp_path / "weights")
    version = sampler.versions.publish(PublishedWeights(0, dict(model.named_parameters())))
    written = load_model(str(version.path), dtype="fp32", device="cpu")
    again = load_tokenizer(str(version.path), written)
    picture = make_picture(72, 40, 1)
    before, after = encode(tokenizer, picture), encode(again, picture)
    assert torch.equal(before.ids, after.ids)
    assert before.media[0].digest == after.media[0].digest


def test_files_that_readers_decode_differently_are_written_anew() -> None:
    noise = Picture(data=make_picture(8, 6, 1).data).decode()
    exif = Image.Exif()
    exif[0x0112] = 6
    saved: dict[str, tuple[Any, str, dict[str, Any]]] = {
        "plain": (noise, "PNG", {}),
        "photo": (noise, "JPEG", {}),
        "palette": (noise.convert("P"), "PNG", {}),
        "transparent": (noise.convert("RGBA"), "PNG", {}),
        "one colour is transparent": (noise, "PNG", {"transparency": (0, 0, 0)}),
        "turned": (noise, "JPEG", {"exif": exif}),
        "bitmap": (noise, "BMP", {}),
    }
    for name, (image, kind, options) in saved.items():
        file = io.BytesIO()
        image.save(file, kind, **options)
        form, data = encode_picture_file(file.getvalue())
        assert (data == file.getvalue()) is (name in ("plain", "photo")), name
        assert form == ("jpeg" if name == "photo" else "png")
        with Image.open(io.BytesIO(data)) as read:
            assert read.mode == "RGB"
            assert read.tobytes() == Picture(data=file.getvalue()).decode().tobytes()
