"""Texts that end a completion: one rule in every sampler, in token ids, and what follows a turn that ended so."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import policygrad as pg
from doubles.drawing import Context, sample
from doubles.engine import Bigram
from doubles.http_engines import FormServer, SglangForm, VllmForm
from doubles.scripted_sampler import ScriptedSampler, conversation
from doubles.templates import tokenizer_with
from policygrad.core.batch import SamplingMask
from policygrad.errors import ConfigError, EngineError
from policygrad.models.loading import load_model
from policygrad.models.tokenizer import Tokenizer, load_tokenizer
from policygrad.rollout.episodes import run_episodes
from policygrad.rollout.trajectory import TRAIN, EpisodeSpec
from policygrad.samplers.base import Generation, Request, SamplingParams
from policygrad.samplers.config import SamplerConfig
from policygrad.samplers.engines.http import HttpClient
from policygrad.samplers.engines.sglang import SglangSampler
from policygrad.samplers.engines.vllm import VllmSampler
from policygrad.samplers.local.sampler import LocalSampler
from policygrad.samplers.stop_texts import cut_at_stop, find_stop
from policygrad.training.config.serialization import load_config
from policygrad.utils.async_runner import AsyncRunner
from policygrad.weight_sync.base import PublishedWeights

STOP = ("7", " 1", "é", "</answer>")
URL = "http://engine:8000"


@pytest.fixture(scope="module")
def own(random_model: Path) -> Tokenizer:
    return load_tokenizer(str(random_model), load_model(str(random_model)))


@pytest.fixture
def wait() -> Iterator[AsyncRunner]:
    with AsyncRunner() as waiter:
        yield waiter


def test_a_completion_is_cut_after_the_token_that_completes_a_stop_text(own: Tokenizer) -> None:
    """With all that is recorded of its tokens; the first of several stop texts counts, whatever their order."""
    text = "so <answer>42</answer> and <answer>7</answer>"
    tokens = torch.tensor(own.hf(text, add_special_tokens=False)["input_ids"])
    n = len(tokens)
    mask = SamplingMask(torch.arange(n, dtype=torch.int32), torch.ones(n, dtype=torch.int32))
    experts = torch.arange(n + 3, dtype=torch.int16).view(-1, 1, 1)  # of a prompt of 3 too
    whole = Generation(tokens, torch.arange(n).float(), "length", torch.arange(n), experts, mask)
    for stop in (("</answer>",), ("7", "</answer>"), ("</answer>", "never")):
        cut = cut_at_stop(whole, stop, own.decode)
        count = len(cut.tokens)
        assert own.decode(cut.tokens).count("</answer>") == 1
        assert "</answer>" not in own.decode(tokens[: count - 1])
        assert cut.finish_reason == "stop"
        assert cut.tokens.tolist() == tokens[:count].tolist()
        assert cut.logp.tolist() == list(range(count))
        assert torch.as_tensor(cut.version).tolist() == list(range(count))
        assert cut.routed_experts is not None
        assert cut.routed_experts.flatten().tolist() == list(range(count + 3))
        assert cut.sampling_mask is not None
        assert cut.sampling_mask.ids.tolist() == list(range(count))
    assert cut_at_stop(whole, ("never",), own.decode) is whole
    half = find_stop(tokens, ("</answer>",), own.decode) or 0
    rest = Generation(tokens[half - 2 :], torch.zeros(n - half + 2), "stop", 0)
    assert len(cut_at_stop(rest, ("</answer>",), own.decode, tokens[: half - 2]).tokens) == 2
    for wrong in ("</answer>", ("",), (3,)):
        with pytest.raises(ConfigError, match="stop must be"):
            SamplingParams(stop=wrong)  # type: ignore[arg-type]


def test_the_local_sampler_stops_where_the_completion_would_be_cut(random_model: Path, own: Tokenizer) -> None:
    """Token for token; it samples nothing after that, and a completion without a stop text stays the same."""
    model = load_model(str(random_model))
    contexts = [Context(own.encode(text, 48).ids, (3, 0, 1, i)) for i, text in enumerate(("7 + 8 =\n", "a", "12\n"))]
    plain = [
        c
        for g in sample(LocalSampler.from_tokenizer(model, own), contexts, 24, SamplingParams(max_tokens=48))
        for c in g
    ]
    stopping = SamplingParams(max_tokens=48, stop=STOP)
    early = [c for g in sample(LocalSampler.from_tokenizer(model, own), contexts, 24, stopping) for c in g]
    expected = [cut_at_stop(c, STOP, own.decode) for c in plain]
    assert 10 < sum(len(e.tokens) < len(p.tokens) for e, p in zip(expected, plain, strict=True)) < len(plain)
    for got, want in zip(early, expected, strict=True):
        assert got.tokens.tolist() == want.tokens.tolist()
        assert got.finish_reason == want.finish_reason
        torch.testing.assert_close(got.logp, want.logp, atol=1e-5, rtol=0)


@pytest.mark.parametrize("stops", [True, False])
@pytest.mark.parametrize(
    ("kind", "form"), [(VllmSampler, VllmForm), pytest.param(SglangSampler, SglangForm, marks=pytest.mark.full)]
)
@pytest.mark.parametrize("chunk_tokens", [0, 5])
def test_engines_end_completions_at_the_same_token(
    kind: Any, form: Any, stops: bool, chunk_tokens: int, own: Tokenizer, tmp_path: Path, wait: AsyncRunner
) -> None:
    """Whether the server stops or samples on, in one piece or in chunks."""
    model = Bigram(len(own.hf))
    config = SamplerConfig(engine="vllm" if kind is VllmSampler else "sglang", urls=(URL,), chunk_tokens=chunk_tokens)
    sampler, server = kind(model, own, config, tmp_path / "weights"), form(model.table, own.end_ids)
    sampler.http = HttpClient(5.0, server.transport)
    if stops:
        server.tell = _stop(server, server.tell, own)
    wait(sampler.update(PublishedWeights(1, dict(model.named_parameters()))))

    def ask(params: SamplingParams) -> list[Generation]:
        requests = [Request(torch.tensor([3, 9]), (1, i), params, params.max_tokens) for i in range(12)]
        return list(wait(sampler.generate(requests)))

    letters = tuple("aeiou7")
    plain = [cut_at_stop(g, letters, own.decode) for g in ask(SamplingParams(max_tokens=40))]
    early = ask(SamplingParams(max_tokens=40, stop=letters))
    assert [g.tokens.tolist() for g in early] == [g.tokens.tolist() for g in plain]
    assert [g.finish_reason for g in early] == [g.finish_reason for g in plain]
    assert sum(any(letter in own.decode(g.tokens) for letter in letters) for g in early) > 0
    body = server.asked[-1][1]
    options = body if kind is VllmSampler else body["sampling_params"]
    assert (options["stop"], options["skip_special_tokens"]) == (list(letters), False)
    assert options["include_stop_str_in_output" if kind is VllmSampler else "no_stop_trim"] is True
    if stops and not chunk_tokens:  # one that ends elsewhere is a fault
        sampler.tokenizer = tokenizer_with("chatml", ("<|im_end|>",))
        sampler.tokenizer.hf.decode = lambda *_, **__: ""
        with pytest.raises(EngineError, match="without an end token of the policy"):
            ask(SamplingParams(max_tokens=40, stop=letters))


def _stop(server: FormServer, tell: Any, own: Tokenizer) -> Any:
    """Reply as a server that ends completions at stop texts, and returns all tokens up to that."""

    def answer(path: str, body: Any) -> Any:
        reply = tell(path, body)
        options = (body or {}).get("sampling_params", body) or {}
        if not options.get("stop"):
            return reply
        if path == "/v1/completions":
            [choice] = reply["choices"]
            count = find_stop(torch.tensor(choice["token_ids"]), options["stop"], own.decode)
            choice["token_ids"] = choice["token_ids"][:count]
            choice["logprobs"]["token_logprobs"] = choice["logprobs"]["token_logprobs"][:count]
        else:
            count = find_stop(torch.tensor(reply["output_ids"]), options["stop"], own.decode)
            reply["output_ids"] = reply["output_ids"][:count]
            reply["meta_info"]["output_token_logprobs"] = reply["meta_info"]["output_token_logprobs"][:count]
        return reply

    return answer


class Asks:
    """Shows a second question after the first answer."""

    waits = False

    def __init__(self, example: pg.Example) -> None:
        self.read: list[pg.Action] = []
        self.example = example

    async def reset(self) -> pg.Observation:
        return pg.Observation(self.example.prompt)

    async def step(self, action: pg.Action) -> pg.Step:
        self.read.append(action)
        seen.append(action)
        return pg.Step(pg.Observation(({"role": "user", "content": "and?"},)) if len(self.read) < 2 else None, 1.0)


seen: list[pg.Action] = []


def test_a_turn_that_ended_at_a_stop_text_is_closed_by_the_template() -> None:
    """It is finished; the environment reads the stop text; the next turn follows the template's end token, which is not learned."""
    own = tokenizer_with("chatml", ("<|im_end|>",), "<|im_start|>")
    example = pg.Example(({"role": "user", "content": "1+1="},), {})
    sampler = ScriptedSampler(own, lambda key, context: "<answer>2</answer> or so" if len(key) < 6 else "yes")
    sampling = SamplingParams(max_tokens=200, stop=("</answer>",))
    seen.clear()
    work = run_episodes(
        [EpisodeSpec(example, (0, TRAIN, 1, 0), 200)], 1, sampling, sampler=sampler, encoder=own, environment=Asks
    )
    [trajectory] = asyncio.run(work)[0].trajectories
    assert [(action.text.split(" or")[0], action.truncated) for action in seen] == [
        ("<answer>2</answer>", False),
        ("yes", False),
    ]
    first, given, second = trajectory.segments
    assert own.decode(first.tokens).startswith("<answer>2</answer>")
    assert " or so" not in own.decode(first.tokens)
    assert own.hf.decode(given.tokens).startswith("<|im_end|>\n<|im_start|>user\nand?")
    assert not given.is_sampled
    assert own.hf.decode(second.tokens) == "yes<|im_end|>"
    assert not trajectory.truncated
    plain, _ = conversation(own, Asks, example, ["<answer>2</answer> or so", "yes"])
    assert " or so" in plain.trajectories[0].text


@pytest.mark.full
def test_a_run_ends_completions_at_its_stop_text_and_records_it(
    random_model: Path, own: Tokenizer, tmp_path: Path
) -> None:
    run = pg.Run(
        model=str(random_model),
        task="embedded",
        steps=1,
        prompts_per_step=4,
        samples_per_prompt=4,
        sampling=SamplingParams(max_tokens=40, stop=("e", "1")),
        evaluation=pg.EvaluationConfig(problems=0),
        output=str(tmp_path / "run"),
    )

    def completions(config: pg.Run) -> list[str]:
        pg.train(config, display=False)
        lines = (Path(str(config.output)) / "completions.jsonl").read_text().splitlines()
        return [str(json.loads(line)["completion"]) for line in lines]

    cut = completions(run)
    plain = completions(replace(run, sampling=SamplingParams(max_tokens=40), output=str(tmp_path / "plain")))
    longest = max(map(len, own.hf.get_vocab()))
    assert sum(len(text) < len(whole) for text, whole in zip(cut, plain, strict=True)) > len(cut) / 2
    for text, whole in zip(cut, plain, strict=True):
        assert whole.startswith(text.rstrip("\ufffd"))
        assert not {"e", "1"} & set(text[:-longest])  # only the last token has one
        assert {"e", "1"} & set(text) or len(text) == len(whole)
    assert load_config(tmp_path / "run" / "run.toml", pg.Run()).sampling.stop == ("e", "1")
