"""Chat templates, as the model cards of public models have them, and the embedded tokenizer with each."""

from __future__ import annotations

import ast
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from policygrad.models.loading import resolve_model
from policygrad.models.tokenizer import Tokenizer

ENDS = {  # the template's name, and the token that ends its turns
    "embedded": "<eos>",
    "chatml": "<|im_end|>",
    "llama3": "<|eot_id|>",
    "gemma": "<end_of_turn>",
    "mistral": "</s>",
    "reasoning": "<|im_end|>",
    "qwen3": "<|im_end|>",
    "llama31": "<|eot_id|>",
    "mistral_tools": "</s>",
    "phi3": "<|end|>",
    "phi4": "<|im_end|>",
    "transformers:llama4/processing_llama4.py": "<|eot|>",
    "transformers:qwen2_audio/processing_qwen2_audio.py": "<|im_end|>",
}
REWRITING = {"shouting": "<|im_end|>", "forgetful": "<|im_end|>"}
"""Made by hand: one that writes earlier replies in capitals, whatever they are, and one that leaves them out."""
MARKS = (
    "<bos>",
    "<s>",
    "<|begin_of_text|>",
    "<|im_start|>",
    "<start_of_turn>",
    "<|start_header_id|>",
    "<|end_header_id|>",
)


def template(name: str) -> str:
    """The model's own, one of those beside this test, or the one that a module of transformers writes out."""
    if name == "embedded":
        return (Path(resolve_model("tiny")) / "chat_template.jinja").read_text()
    place, _, file = name.partition(":")
    if not file:
        return (Path(__file__).parents[1] / "models" / "templates" / f"{name}.jinja").read_text()
    result = find_spec(place)
    assert result is not None
    assert result.origin is not None
    code = ast.parse((Path(result.origin).parent / "models" / file).read_text())
    texts = [node.value for node in ast.walk(code) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    return next(text for text in texts if "{%" in text and "add_generation_prompt" in text)


@cache
def tokenizer(name: str) -> Tokenizer:
    """The embedded model's, with another template and its special tokens."""
    from transformers import AutoTokenizer

    hf = AutoTokenizer.from_pretrained(resolve_model("tiny"))
    hf.add_special_tokens({"additional_special_tokens": [*MARKS, *(set(ENDS.values()) - {"<eos>"})]})
    hf.chat_template = template(name)
    return Tokenizer(hf, frozenset([hf.convert_tokens_to_ids((ENDS | REWRITING)[name])]), name, None)


def tokenizer_with(name: str, ends: tuple[str, ...], *others: str) -> Tokenizer:
    """The embedded model's, with a template and special tokens of its own; `ends` end turns."""
    from transformers import AutoTokenizer

    hf = AutoTokenizer.from_pretrained(resolve_model("tiny"))
    hf.add_special_tokens({"additional_special_tokens": [*ends, *others]})
    hf.chat_template = template(name)
    return Tokenizer(hf, frozenset(hf.convert_tokens_to_ids(list(ends))), name, None)


@cache
def random_model() -> LlamaForCausalLM:
    """A random model of all tokens of every template, which often ends its turns."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=max(len(tokenizer(name).hf) for name in (*ENDS, *REWRITING)),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=2048,
        initializer_range=0.2,
    )
    return LlamaForCausalLM(config).eval()


def logp_of(ids: torch.Tensor, count: int) -> torch.Tensor:
    """Return the random model's log-probabilities of the last tokens, in float64."""
    with torch.no_grad():
        result = random_model()(ids[None]).logits[0, :-1].double().log_softmax(-1)
    return result.gather(1, ids[1:, None])[-count:, 0]
