"""Notes about a step."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch.autograd import forward_ad

import policygrad as pg
from policygrad.learners.local.curvature import make_dual, unpack_dual
from policygrad.learners.local.optimizer import Optimizer
from policygrad.models.loading import find_zero_embeddings, load_model
from policygrad.models.tokenizer import Tokenizer, load_tokenizer
from policygrad.training.step_log import describe_zero_embeddings


@pytest.fixture
def tokenizer(random_model: Path) -> Tokenizer:
    return load_tokenizer(str(random_model), load_model(str(random_model)))


def make_step(*segments: tuple[list[int], bool]) -> Any:
    parts = [SimpleNamespace(tokens=torch.tensor(tokens), is_sampled=sampled) for tokens, sampled in segments]
    group = SimpleNamespace(trajectories=[SimpleNamespace(segments=parts)])
    return SimpleNamespace(step=3, rollout=SimpleNamespace(groups=[group]))


def delta_rule_model(zero: int | None = None) -> Any:
    """A model of three delta-rule layers, which keep a token of zeros at zero; `zero`: a token that is made one."""
    config = transformers.Qwen3NextConfig(
        vocab_size=40,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=3,
        layer_types=["linear_attention"] * 3,
        mlp_only_layers=[0, 1, 2],
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        linear_num_value_heads=2,
        linear_num_key_heads=1,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        initializer_range=0.1,
        eos_token_id=1,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    model = transformers.Qwen3NextForCausalLM(config).eval()
    if zero is not None:
        with torch.no_grad():
            model.get_input_embeddings().weight[zero] = 0.0
    return model


def gradients(model: Any, token: int) -> dict[str, torch.Tensor]:
    """The gradients of −log π of a text with this token three times in a row."""
    ids = torch.tensor([[7, 3, 9, token, token, token, 5, 8]])
    model.zero_grad()
    logp = model(input_ids=ids, use_cache=False).logits.float().log_softmax(-1)
    logp[0, :-1].gather(-1, ids[0, 1:, None]).mean().neg().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def norm(found: dict[str, torch.Tensor]) -> float:
    return float(torch.stack([x.float().norm() for x in found.values()]).norm())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_delta_rule_layers_do_not_blow_up_the_gradient_of_a_sampled_padding_token(dtype: torch.dtype) -> None:
    model = delta_rule_model().to(dtype)
    embeddings, plain = model.get_input_embeddings(), gradients(model, 0)  # as transformers has it
    embeddings.padding_idx = None
    assert norm(gradients(model, 0)) > 1e5  # what it would be otherwise
    embeddings.padding_idx = 0
    load_model(model)
    Optimizer(model, pg.OptimizerConfig(), 1e-6, 1)
    assert embeddings.padding_idx is None
    found = gradients(model, 0)
    assert norm(found) < 100
    assert all(torch.equal(x, found[name]) for name, x in plain.items())
    assert find_zero_embeddings(model) == frozenset()


def test_padding_of_zeros_has_no_gradient_in_forward_mode_either() -> None:
    embeddings = load_model(delta_rule_model()).get_input_embeddings()  # type: ignore[operator]
    ids = torch.tensor([0, 4])
    with torch.no_grad(), forward_ad.dual_level():
        weight = make_dual(embeddings.weight, torch.ones_like(embeddings.weight))
        out = torch.func.functional_call(embeddings, {"weight": weight}, ids)
        _, tangent = unpack_dual(out)
    assert tangent.tolist() == [[0.0] * 16, [1.0] * 16]


def test_delta_rule_layers_blow_up_the_gradient_of_another_token_of_zeros_which_is_named(tokenizer: Tokenizer) -> None:
    model = load_model(delta_rule_model(zero=4))
    assert find_zero_embeddings(model) == {4}
    values = {"grad_norm": norm(gradients(model, 4))}
    assert values["grad_norm"] > 1e5
    text = describe_zero_embeddings(make_step(([1, 4], True)), values, find_zero_embeddings(model), 1.0, tokenizer)
    assert repr(tokenizer.hf.convert_ids_to_tokens(4)) in text


def test_a_token_without_an_embedding_is_named_where_it_dominates_the_gradient(tokenizer: Tokenizer) -> None:
    model = torch.nn.Module()
    embeddings = torch.nn.Embedding(8, 4)
    with torch.no_grad():
        embeddings.weight[5] = 0.0
    model.get_input_embeddings = lambda: embeddings  # type: ignore[assignment]
    zero = find_zero_embeddings(model)
    assert zero == {5}
    sampled, observed, other = (
        make_step(([1, 5], True)),
        make_step(([1, 5], False), ([2], True)),
        make_step(([1], True)),
    )
    text = describe_zero_embeddings(sampled, {"grad_norm": 2e5}, zero, 1.0, tokenizer)
    assert text.startswith("step 3: the gradient's norm is 2.0e+05")
    assert repr(tokenizer.hf.convert_ids_to_tokens(5)) in text
    for step, norm, clip in ((observed, 2e5, 1.0), (other, 2e5, 1.0), (sampled, 50.0, 1.0), (sampled, 2e5, 0.0)):
        assert describe_zero_embeddings(step, {"grad_norm": norm}, zero, clip, tokenizer) == ""
