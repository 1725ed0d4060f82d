"""Notes about a step."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

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
