"""A model whose attention depends on the implementation's name is found by what its code does, and read without the tree."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as tf

from doubles.architectures import families
from policygrad.learners.local.forward import build_evaluator
from policygrad.learners.local.tree_attention import ATTENTION_NAME, enable_tree_attention
from policygrad.models.attention import depends_on_attention_name

SPARSE = ("deepseek_v32", "glm_moe_dsa")


def built(kind: str) -> Any:
    torch.manual_seed(0)
    family = next(f for f in families() if f.type == kind)
    return tf.AutoModelForCausalLM.from_config(family.config()).eval()


@torch.no_grad()
@pytest.mark.parametrize("kind", SPARSE)
def test_sparse_attention_is_kept_beyond_its_top_k(kind: str) -> None:
    model, ids = built(kind), torch.arange(40)[None] * 7 % 37 + 3
    before = model(input_ids=ids, use_cache=False).logits
    assert depends_on_attention_name(model, ATTENTION_NAME)
    assert not enable_tree_attention(model)
    evaluator = build_evaluator(model, 1.0)
    assert not evaluator.network.use_tree
    assert torch.equal(model(input_ids=ids, use_cache=False).logits, before)
    model.set_attn_implementation("eager")  # the model's own indexer under another name that it knows
    assert torch.allclose(model(input_ids=ids, use_cache=False).logits, before, atol=1e-4)


@pytest.mark.parametrize("kind", ["llama", "gemma4_text", "qwen3_moe", "deepseek_v3", "gpt_oss", "gpt2", "qwen3_next"])
def test_other_models_keep_the_tree_they_had(kind: str) -> None:
    model = built(kind)
    name = model.config._attn_implementation
    assert not depends_on_attention_name(model, ATTENTION_NAME)
    assert model.config._attn_implementation == name
    assert type(model.config._attn_implementation) is str


def test_the_comparison_is_found_however_it_is_written() -> None:
    def compares(model: Any, how: Any) -> bool:
        attention, own = model.model.layers[0].self_attn, model.model.layers[0].self_attn.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            how(attention.config)
            return own(*args, **kwargs)

        attention.forward = forward
        type(attention).__module__, before = __name__, type(attention).__module__
        try:
            return depends_on_attention_name(model, ATTENTION_NAME)
        finally:
            type(attention).__module__ = before

    assert compares(built("llama"), lambda config: config._attn_implementation == "sdpa")
    assert compares(built("llama"), lambda config: config._attn_implementation != "sdpa")
    assert compares(built("llama"), lambda config: config._attn_implementation in ("eager", "sdpa"))
    assert compares(built("llama"), lambda config: config._attn_implementation in {"eager", "sdpa"})
    assert not compares(built("llama"), lambda config: config._attn_implementation == "flash_attention_2")
