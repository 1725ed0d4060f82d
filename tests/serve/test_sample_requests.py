"""Completions of several adapters in one batch, and what the adapters add."""

from __future__ import annotations

import pytest
import torch
from serve.conftest import trained_adapter
from transformers import GPT2Config, GPT2LMHeadModel

from policygrad.errors import ConfigError, ModelError
from policygrad.samplers.base import SamplingParams
from policygrad.serve.adapters import AdapterSpec, make_adaptable, merge_adapter
from policygrad.serve.losses import Datum
from policygrad.serve.models import ClientModel, ServedNetwork
from policygrad.serve.sampling import LocalAnswers, SampleQuery


def queries(count: int = 6) -> list[SampleQuery]:
    generator = torch.Generator().manual_seed(0)
    return [
        SampleQuery(torch.randint(3, 400, (3 + i,), generator=generator), 3, SamplingParams(), 9, (7, i))
        for i in range(count)
    ]


def test_a_batch_of_several_adapters_is_the_same_as_each_alone(network: ServedNetwork) -> None:
    """Tokens are equal, and log-probabilities are those of a forward pass under the same adapter; rows leave at different times."""
    models = [trained_adapter(network, seed) for seed in (1, 2)]
    adapters = [None, models[0].adapter, models[1].adapter]
    answers = LocalAnswers(network)
    asked = [(query, adapters[i % 3]) for i, query in enumerate(queries())]
    mixed, alone = answers.answer(asked), [answers.answer([pair])[0] for pair in asked]
    base = ClientModel.with_adapter(network, AdapterSpec(1))
    for i, (pair, together, single) in enumerate(zip(asked, mixed, alone, strict=True)):
        for first, second in zip(together.samples, single.samples, strict=True):
            assert first.tokens.equal(second.tokens)
            ids = torch.cat([pair[0].prompt, first.tokens])
            data = [Datum(ids[:-1], {"target_tokens": ids[1:], "weights": torch.ones(len(ids) - 1)})]
            model = base if i % 3 == 0 else models[i % 3 - 1]
            logp = model.run(data, "cross_entropy", {}, backward=False).logprobs[0]
            assert torch.allclose(first.logprobs, logp[len(pair[0].prompt) - 1 :], atol=1e-4)
    lengths = {len(s.tokens) for a in mixed for s in a.samples}
    assert len(lengths) > 2


def test_a_batch_is_decoded_in_parts_that_fit(network: ServedNetwork) -> None:
    model = trained_adapter(network)
    asked = [(query, model.adapter if i % 2 else None) for i, query in enumerate(queries())]
    whole, parts = LocalAnswers(network).answer(asked), LocalAnswers(network, decode_rows=4).answer(asked)
    for a, b in zip(whole, parts, strict=True):
        assert [s.tokens.tolist() for s in a.samples] == [s.tokens.tolist() for s in b.samples]


def test_merged_weights_are_the_adapters_function(exact_network: ServedNetwork) -> None:
    model = trained_adapter(exact_network)
    assert model.adapter is not None
    assert exact_network.switch is not None
    merged = merge_adapter(exact_network.model, exact_network.switch, model.adapter)
    ids = torch.tensor([[5, 17, 40, 33]])
    with torch.no_grad():
        with exact_network.using(model.adapter):
            adapted = exact_network.model(input_ids=ids).logits
        plain = type(exact_network.model)(exact_network.model.config).double().eval()  # type: ignore[arg-type]
        plain.lm_head.weight = torch.nn.Parameter(plain.lm_head.weight.clone())  # type: ignore[union-attr, operator]
        plain.load_state_dict(merged)
        assert torch.allclose(plain(input_ids=ids).logits, adapted, rtol=0, atol=1e-10)
        assert not torch.allclose(exact_network.model(input_ids=ids).logits, adapted, atol=1e-3)


def test_adapters_are_on_the_layers_that_were_asked_for(network: ServedNetwork) -> None:
    assert network.switch is not None
    for spec, part in (
        (AdapterSpec(2, mlp=False, head=False), "self_attn"),
        (AdapterSpec(2, attention=False, head=False), "mlp"),
    ):
        assert all(part in name for name in network.switch.choose_layers(spec))
    assert list(network.switch.choose_layers(AdapterSpec(2, attention=False, mlp=False))) == ["lm_head"]
    with pytest.raises(ConfigError, match="one of train_attn"):
        AdapterSpec(2, attention=False, mlp=False, head=False)


def test_a_model_without_linear_layers_is_refused() -> None:
    """GPT-2's are of a class of its own; only its head is linear."""
    model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=20, n_positions=8))
    assert list(make_adaptable(model).layers) == ["lm_head"]
    model.lm_head = torch.nn.Identity()
    with pytest.raises(ModelError, match="rank=0"):
        make_adaptable(model)


@pytest.mark.parametrize(
    ("query", "message"),
    [
        (SampleQuery(torch.tensor([5, 600]), 1, SamplingParams(), 4, (0,)), "token id 600"),
        (SampleQuery(torch.tensor([], dtype=torch.int64), 1, SamplingParams(), 4, (0,)), "no tokens"),
        (SampleQuery(torch.tensor([5, 6]), 1, SamplingParams(), 10**6, (0,)), "together more than"),
        (
            SampleQuery(torch.tensor([5, 6]), 1, SamplingParams(), 4, (0,), target_ids=torch.zeros(3, 1)),
            "expected \\[1, K\\]",
        ),
        (SampleQuery(torch.tensor([5, 6]), 1, SamplingParams(), 4, (0,), prompt_logprobs_last=2), "from 1 to 1"),
    ],
)
def test_queries_that_cannot_be_answered_are_refused(network: ServedNetwork, query: SampleQuery, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LocalAnswers(network).prepare(query)
