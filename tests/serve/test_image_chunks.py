"""Images in sampling requests and training data, by the SDK: the numbers are those of transformers, errors say why."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from serve.conftest import trained_adapter
from serve.running import Running, running
from torch import Tensor, nn
from transformers import Idefics3ForConditionalGeneration

from doubles.vision_models import FAMILIES, make_family, make_picture, save_family
from policygrad.errors import ConfigError
from policygrad.learners.config import LearnerConfig
from policygrad.samplers.base import Generation, SamplingParams
from policygrad.serve import wire
from policygrad.serve.losses import Datum, prepare_loss
from policygrad.serve.model_input import ModelInputParts, PictureChunk
from policygrad.serve.models import ClientModel, ServedNetwork, load_network
from policygrad.serve.sampling import LocalAnswers, SampleQuery
from policygrad.utils.pictures import Picture

tinker = pytest.importorskip("tinker", reason="the extra `serve`")
types = tinker.types
QUESTION, ANSWER = [40, 41, 42], [50, 51, 52, 53]
LARGE, SMALL = make_picture(48, 24, 1), make_picture(32, 32, 2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_family("idefics3", tmp_path_factory.mktemp("models") / "sees")


@pytest.fixture(scope="module")
def server(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running(tmp_path_factory.mktemp("serve") / "served", model=(f"sees={folder}", "tiny")) as started:
        yield started


@pytest.fixture(scope="module")
def client(server: Running) -> Iterator[Any]:
    with tinker.ServiceClient(base_url=server.url, api_key="tml-local") as service:
        yield service


@pytest.fixture(scope="module")
def network(folder: Path) -> ServedNetwork:
    return load_network("sees", str(folder), LearnerConfig(), adaptable=True)


def image(picture: Picture, **options: Any) -> Any:
    return types.ImageChunk(data=picture.data, format="png", **options)


def text(ids: list[int]) -> Any:
    return types.EncodedTextChunk(tokens=ids)


def model_input(*chunks: Any) -> Any:
    return types.ModelInput(chunks=list(chunks))


def read_plainly(*pictures: Picture, begin: list[int], end: list[int]) -> dict[str, Tensor]:
    """What transformers' processor makes of pictures between two pieces of text."""
    _, processor = make_family("idefics3")
    decode = processor.tokenizer.decode
    written = decode(begin) + "<image>" * len(pictures) + decode(end)
    return dict(processor(text=[written], images=[[p.decode() for p in pictures]], return_tensors="pt"))


def plain_table(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    """log π [P, V] by transformers' own forward pass."""
    table: Tensor = model(**inputs).logits[0].log_softmax(-1)
    return table


def datum(inputs: dict[str, Tensor], chunks: list[Any], answer: list[int] = ANSWER) -> Any:
    """A text whose every position predicts the next token; the answer has a weight. `chunks`: all but the last."""
    ids = inputs["input_ids"][0].tolist()
    targets, weights = ids[1:], [float(i >= len(ids) - len(answer)) for i in range(1, len(ids))]
    return types.Datum(model_input=model_input(*chunks), loss_fn_inputs={"target_tokens": targets, "weights": weights})


@pytest.mark.parametrize("pictures", [(LARGE,), (LARGE, SMALL)])
def test_log_probabilities_are_those_of_transformers(client: Any, pictures: tuple[Picture, ...]) -> None:
    """Of every position, placeholder tokens included; and of prompts, completions and their alternatives."""
    plain, _ = make_family("idefics3")
    inputs = read_plainly(*pictures, begin=QUESTION, end=QUESTION + ANSWER)
    ids = inputs["input_ids"][0]
    with torch.no_grad():
        table = plain_table(plain, inputs)
    expected = table[:-1].gather(1, ids[1:, None])[:, 0]
    images = [image(p) for p in pictures]
    training = client.create_lora_training_client("sees", rank=4, seed=1).result()
    given = datum(inputs, [text(QUESTION), *images, text(QUESTION + ANSWER[:-1])])
    output = training.forward([given], "cross_entropy").result()
    computed = output.loss_fn_outputs[0]["logprobs"].to_torch()
    assert torch.allclose(computed, expected, atol=2e-4)
    assert output.metrics["loss:sum"] == pytest.approx(-float(expected[-len(ANSWER) :].sum()), rel=1e-4)

    sampling = client.create_sampling_client(base_model="sees").result()
    prompt = model_input(text(QUESTION), *images, text(QUESTION + ANSWER))
    params = types.SamplingParams(max_tokens=5, seed=3, stop=[])
    result = sampling.sample(
        prompt, 3, params, include_prompt_logprobs=True, topk_prompt_logprobs=2, topk_sample_logprobs=2
    ).result()
    assert torch.allclose(torch.tensor(result.prompt_logprobs[1:]), expected, atol=2e-4)
    top = table[:-1].topk(2)
    alternatives = torch.tensor([[p for _, p in row] for row in result.topk_prompt_logprobs[1:]])
    assert torch.allclose(alternatives, top.values, atol=2e-4)
    for sequence in result.sequences:
        longer = read_plainly(*pictures, begin=QUESTION, end=QUESTION + ANSWER)
        longer["input_ids"] = torch.cat([longer["input_ids"], torch.tensor([sequence.tokens])], 1)
        longer["attention_mask"] = torch.ones_like(longer["input_ids"])
        with torch.no_grad():
            after = plain_table(plain, longer)[len(ids) - 1 : -1]
        logp = after.gather(1, torch.tensor(sequence.tokens)[:, None])[:, 0]
        assert torch.allclose(torch.tensor(sequence.logprobs), logp, atol=2e-4)
        best = torch.tensor([[p for _, p in row] for row in sequence.topk_logprobs])
        assert torch.allclose(best, after.topk(2).values, atol=2e-4)


@pytest.mark.parametrize("rank", [4, 0])
def test_gradients_move_the_weights(client: Any, server: Running, rank: int) -> None:
    """An adapter learns the answer to a picture; all weights take transformers' gradient, also in the vision tower."""
    inputs = read_plainly(LARGE, begin=QUESTION, end=QUESTION + ANSWER)
    given = datum(inputs, [text(QUESTION), image(LARGE), text(QUESTION + ANSWER[:-1])])
    training = client.create_lora_training_client("sees", rank=rank, seed=1).result()
    losses = [training.forward_backward([given], "cross_entropy").result().metrics["loss:sum"]]
    if not rank:
        plain, _ = make_family("idefics3")
        expected = plain_table(plain, inputs)[:-1].gather(1, inputs["input_ids"][0, 1:, None])[-len(ANSWER) :].sum()
        (-expected).backward()
        lane = server.service.training.lanes[training.model_id]
        assert lane.model is not None
        gradients = {name: p.grad for name, p in lane.model.network.model.named_parameters()}
        for name, parameter in plain.named_parameters():
            theirs, computed = parameter.grad, gradients[name]
            if theirs is None:
                assert computed is None or not computed.any(), name
                continue
            assert computed is not None, name
            assert torch.allclose(computed, theirs, atol=1e-3 * float(theirs.abs().max()) + 1e-6), name
        assert any("vision" in name and x is not None and x.any() for name, x in gradients.items())
    for _ in range(3):
        training.optim_step(types.AdamParams(learning_rate=1e-2 if rank else 1e-3)).result()
        losses.append(training.forward_backward([given], "cross_entropy").result().metrics["loss:sum"])
    assert losses == sorted(losses, reverse=True)
    sampling = training.save_weights_and_get_sampling_client().result()
    prompt = model_input(text(QUESTION), image(LARGE), text(QUESTION + ANSWER))
    scored = sampling.sample(prompt, 1, types.SamplingParams(max_tokens=1), include_prompt_logprobs=True).result()
    assert -sum(scored.prompt_logprobs[-len(ANSWER) :]) == pytest.approx(losses[-1], rel=1e-3)


def test_a_placeholder_that_a_policy_wrote_is_text(client: Any, server: Running) -> None:
    """Only a chunk is a picture: its token in a text chunk is read as any other token."""
    processor = server.service.networks["sees"].tokenizer.pictures
    assert processor is not None
    written = [processor.placeholder, 45]
    alone = [text(QUESTION), image(SMALL), text([60, 61])]
    training = client.create_lora_training_client("sees", rank=2).result()
    inputs = read_plainly(SMALL, begin=QUESTION, end=[60, 61, 62])
    first = datum(inputs, alone)
    second = types.Datum(
        model_input=model_input(*alone, text(written)),
        loss_fn_inputs={
            "target_tokens": [*first.loss_fn_inputs["target_tokens"].data, 1, 1],
            "weights": [*first.loss_fn_inputs["weights"].data, 1.0, 1.0],
        },
    )
    outputs = training.forward([first, second], "cross_entropy").result().loss_fn_outputs
    short, long = (output["logprobs"].to_torch() for output in outputs)
    assert torch.allclose(long[: len(short)], short, atol=1e-5)
    assert bool(torch.isfinite(long).all())


def refusals(server: Running) -> list[tuple[str, Any, str]]:
    """(model, chunk, reason)"""
    processor = server.service.networks["sees"].tokenizer.pictures
    assert processor is not None
    count = len(processor.picture_ids(LARGE))
    pointer = types.ImageAssetPointerChunk(format="png", location="file:///etc/passwd")
    cut = Picture(data=LARGE.data[: len(LARGE.data) // 2])
    return [
        (
            "sees",
            image(LARGE, expected_tokens=count + 1),
            f"is {count} tokens for 'sees', and expected_tokens is {count + 1}",
        ),
        ("tiny", image(LARGE), "'tiny' reads text alone"),
        ("sees", image(Picture(data=b"no picture")), "cannot be decoded"),
        ("sees", image(cut), "cannot be decoded"),
        ("sees", image(Picture(data=b"")), "without data"),
        ("sees", pointer, "this server fetches nothing"),
    ]


def test_what_cannot_be_read_is_refused(
    client: Any, server: Running, monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    trainings = {name: client.create_lora_training_client(name, rank=2).result() for name in ("sees", "tiny")}
    samplings = {name: client.create_sampling_client(base_model=name).result() for name in ("sees", "tiny")}
    params, errors = types.SamplingParams(max_tokens=1), (tinker.RequestFailedError, tinker.BadRequestError)
    cases = refusals(server)
    for name, chunk, reason in cases:
        with pytest.raises(errors, match=reason):
            samplings[name].sample(model_input(text(QUESTION), chunk), 1, params).result()
        if chunk.type == "image":  # the SDK itself refuses the other kind in training data
            given = types.Datum(
                model_input=model_input(text(QUESTION), chunk),
                loss_fn_inputs={"target_tokens": [1], "weights": [1.0]},
            )
            with pytest.raises(errors, match=f"datum 0, chunk 1.*{reason}"):
                trainings[name].forward([given], "cross_entropy").result()
    wrong = types.Datum(
        model_input=model_input(image(LARGE)), loss_fn_inputs={"target_tokens": [1, 2], "weights": [1.0, 1.0]}
    )
    with pytest.raises(errors, match="give one target, or K, for each position"):
        trainings["sees"].forward([wrong], "cross_entropy").result()
    monkeypatch.setattr("policygrad.utils.pictures.MAX_PIXELS", 100)
    larger = make_picture(30, 20, 7)  # not one that was processed before
    with pytest.raises(errors, match="the most is 100: make it smaller"):
        samplings["sees"].sample(model_input(image(larger)), 1, params).result()
    with httpx.Client(base_url=f"{server.url}/api/v1") as http:
        for chunk in ({"type": "image", "data": 3, "format": "png"}, {"type": "image", "data": "", "format": "gif"}):
            body = {"base_model": "sees", "prompt": {"chunks": [chunk]}, "sampling_params": {}}
            assert http.post("/asample", json=body).status_code == 400


def test_a_request_that_is_refused_leaves_the_others_of_its_batch(network: ServedNetwork, tmp_path: Path) -> None:
    """Even where a library raises what nobody expected."""
    with running(tmp_path / "served", model=(f"sees={network.path}",)) as server:
        client = tinker.ServiceClient(base_url=server.url, api_key="tml-local")
        sampling = client.create_sampling_client(base_model="sees").result()
        sampler = server.service.queue.samplers["sees"]
        prepare = sampler.prepare

        def fails(query: SampleQuery) -> SampleQuery:
            if query.parts is not None:
                raise KeyError("a library's own")
            return prepare(query)

        sampler.prepare = fails  # type: ignore[method-assign]
        params = types.SamplingParams(max_tokens=2, stop=[])
        prompts = [model_input(image(LARGE)), model_input(text(QUESTION))]
        first, second = [sampling.sample(prompt, 1, params) for prompt in prompts]
        assert len(second.result().sequences[0].tokens) == 2
        with pytest.raises(tinker.RequestFailedError, match="a library's own"):
            first.result()


def parts(*chunks: Tensor | Picture) -> ModelInputParts:
    return ModelInputParts(tuple(PictureChunk(c) if isinstance(c, Picture) else c for c in chunks))


NO_IDS = torch.zeros(0, dtype=torch.int64)


def query(*chunks: Tensor | Picture, samples: int = 2, number: int = 0) -> SampleQuery:
    return SampleQuery(NO_IDS, samples, SamplingParams(), 6, (7, number), parts=parts(*chunks), prompt_logprobs=True)


def test_adapters_are_sampled_together_with_pictures(network: ServedNetwork) -> None:
    """Rows of several adapters and numbers of pictures: each as alone, and with `forward`'s log-probabilities."""
    models = [trained_adapter(network, seed) for seed in (1, 2)]
    assert network.switch is not None
    assert not [name for name in network.switch.layers if "vision" in name or "connector" in name]
    words = torch.tensor(QUESTION)
    answers = LocalAnswers(network)
    queries = [
        query(words, LARGE, words, SMALL, number=0),
        query(LARGE, words, number=1),
        query(SMALL, words, words, number=2),
    ]
    ready = [answers.prepare(q) for q in queries]
    pairs = [(q, None if i == 0 else models[i - 1].adapter) for i, q in enumerate(ready)]
    together, alone = answers.answer(pairs), [answers.answer([pair])[0] for pair in pairs]
    for i, (one, other) in enumerate(zip(together, alone, strict=True)):
        for first, second in zip(one.samples, other.samples, strict=True):
            assert first.tokens.equal(second.tokens)
            chunks = queries[i].parts
            assert chunks is not None
            read = parts(*(c.picture if isinstance(c, PictureChunk) else c for c in chunks.chunks), first.tokens[:-1])
            targets = torch.cat([ready[i].prompt[1:], first.tokens])
            given = Datum(NO_IDS, {"target_tokens": targets, "weights": torch.ones(len(targets))}, parts=read)
            model = models[i - 1] if i else trained_base(network)
            logp = model.run([given], "cross_entropy", {}, backward=False).logprobs[0]
            assert torch.allclose(first.logprobs, logp[-len(first.tokens) :].float(), atol=2e-4)
            assert one.prompt_logprobs is not None
            length = len(ready[i].prompt)
            assert torch.allclose(one.prompt_logprobs[1:], logp[: length - 1].float(), atol=2e-4)


def trained_base(network: ServedNetwork) -> ClientModel:
    """The network itself: an adapter that is still the identity."""
    model = trained_adapter(network, 3)
    assert model.adapter is not None
    with torch.no_grad():
        for _, b in model.adapter.pairs.values():
            b.zero_()
    return model


def test_an_engine_gets_one_mark_for_each_picture(network: ServedNetwork, monkeypatch: pytest.MonkeyPatch) -> None:
    answers, words = LocalAnswers(network), torch.tensor(QUESTION)
    seen = []

    def generate(requests: Any) -> list[Generation]:
        seen.extend(requests)
        return [Generation(torch.tensor([40]), torch.zeros(1), "length", 0) for _ in requests]

    monkeypatch.setattr(answers, "_generate", generate)
    answers.answer([(answers.prepare(query(words, LARGE, SMALL, words)), None)])
    mark = network.tokenizer.hf.convert_tokens_to_ids("<image>")
    for request in seen:
        assert request.compact_ids.tolist() == [*QUESTION, mark, mark, *QUESTION]
        assert [m.file for m in request.media] == [LARGE.data, SMALL.data]
        expected = read_plainly(LARGE, SMALL, begin=QUESTION, end=QUESTION)["input_ids"][0]
        assert request.prompt_ids.tolist() == expected.tolist()
        assert all(set(request.prompt_ids[m.slots].tolist()) == {mark} for m in request.media)


@pytest.mark.full
@pytest.mark.parametrize("name", FAMILIES)
def test_every_family(name: str, tmp_path: Path) -> None:
    """Prompts are scored, and data are learned from, alike: several targets for a position, texts that share a picture,
    or have another one of the same size."""
    network = load_network(name, str(save_family(name, tmp_path / name)), LearnerConfig(), adaptable=True)
    answers, words = LocalAnswers(network), torch.tensor(QUESTION)
    given = []
    like_it = make_picture(48, 24, 9)  # as many tokens
    for last, picture in ((words, LARGE), (torch.tensor([40, 44]), LARGE), (words, like_it), (words, SMALL)):
        chunks = (words, picture, last)
        ready = answers.prepare(query(*chunks, samples=1))
        scored = answers.answer([(ready, None)])[0]
        assert scored.prompt_logprobs is not None
        targets = torch.stack([ready.prompt[1:], torch.full((len(ready.prompt) - 1,), 33)], 1)
        read = parts(words, picture, last[:-1])
        given.append((scored.prompt_logprobs[1:], Datum(NO_IDS, {"target_tokens": targets}, parts=read)))
    data = [replace(d, inputs={**d.inputs, "weights": torch.ones(d.inputs["target_tokens"].shape)}) for _, d in given]
    result = trained_base(network).run(data, "cross_entropy", {}, backward=True)
    for (scored_logp, _), logp in zip(given, result.logprobs, strict=True):
        assert torch.allclose(scored_logp, logp[:, 0].float(), atol=5e-4)


def test_groups_are_prompts_with_equal_pictures(network: ServedNetwork) -> None:
    """Two pictures with the same words and as many tokens are two prompts."""
    other = make_picture(48, 24, 9)
    data = []
    for picture, reward in ((LARGE, 0.0), (LARGE, 1.0), (other, 0.0), (other, 0.0)):
        read = parts(picture, torch.tensor([*QUESTION, 50]))
        length = len(read.read(network.tokenizer, "sees").ids)
        inputs = {
            "target_tokens": torch.full((length,), 45),
            "mask": (torch.arange(length) >= length - 2).float(),
            "reward": torch.tensor([reward]),
            "logprobs": torch.zeros(length),
        }
        data.append(network.read_datum(Datum(NO_IDS, inputs, parts=read)))
    assert len({len(d.tokens) for d in data}) == 1
    loss: Any = prepare_loss("dapo", {}, data)
    assert loss.batch.group.tolist() == [0, 0, 1, 1]
    assert bool((loss.psi[:2, -1] != 0).all())
    assert not loss.psi[2:].any()


def test_json_requests_have_images_too() -> None:
    """The form that older clients send."""
    chunks = [{"tokens": QUESTION}, json.loads(image(LARGE, expected_tokens=5).model_dump_json())]
    given = {"data": [{"model_input": {"chunks": chunks}, "loss_fn_inputs": {}}], "loss_fn": "cross_entropy"}
    parsed = wire.parse_pass(json.dumps({"forward_backward_input": given}).encode(), wire.JSON).data[0].parts
    assert parsed is not None
    [words, read] = parsed.chunks
    assert isinstance(words, Tensor)
    assert isinstance(read, PictureChunk)
    assert words.tolist() == QUESTION
    assert (read.picture.data, read.expected_tokens) == (LARGE.data, 5)
    chunks[1] = {"type": "image_asset_pointer", "location": "http://example.org/a.png", "format": "png"}
    with pytest.raises(
        ConfigError, match="datum 0, chunk 1 is an address of an image, and this server fetches nothing"
    ):
        wire.parse_pass(json.dumps({"forward_input": given}).encode(), wire.JSON)
    message = wire.pb.ForwardBackwardRequest()
    message.data.add().model_input.add().image.override_dimensions.width = 3
    with pytest.raises(ConfigError, match="override_dimensions is not available here"):
        wire.parse_pass(message.SerializeToString(), wire.PROTOBUF)


def test_saved_weights_load_with_their_processor(client: Any, folder: Path, server: Running, tmp_path: Path) -> None:
    """All weights of a model that sees, exported: transformers reads them."""
    training = client.create_lora_training_client("sees", rank=0).result()
    path = training.save_weights_external("out").result().path
    files = tinker.RestClient(base_url=server.url, api_key="tml-local").get_external_weights_urls(path).result().urls
    for name, url in files.items():
        (tmp_path / name).write_bytes(httpx.get(url).content)
    assert "preprocessor_config.json" in files
    loaded = load_network("again", str(tmp_path), LearnerConfig(), adaptable=False)
    assert loaded.tokenizer.pictures is not None
    assert isinstance(loaded.model, Idefics3ForConditionalGeneration)
