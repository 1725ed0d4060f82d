"""A model as one GGUF file for people: its weights, its own words and its chat template, for llama.cpp and what is built on it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from policygrad.models.byte_pairs import BytePairs
from policygrad.weight_sync.gguf_weights import add_weights, package, writing

_TYPES = {"fp32": "ALL_F32", "bf16": "MOSTLY_BF16"}
"""A precision to its name among `gguf.LlamaFileType`."""


def write_gguf(final: Path, model: Any, words: BytePairs, *, name: str, dtype: str) -> None:
    """The file, whole or not there. model: transformers' own, in float32. name: what the model is called. dtype: fp32 or bf16.

    Raises:
        EngineError: a parameter that the architecture has no place for, or the package `gguf` is missing; OSError: a full disk.
    """
    temporary = final.with_name(f".tmp-{final.name}")
    try:
        with writing(temporary, model, int(package().LlamaFileType[_TYPES[dtype]])) as writer:
            writer.add_name(name)
            _vocabulary(writer, words)
            add_weights(writer, model, dict(model.named_parameters()), bf16=dtype == "bf16")
        os.replace(temporary, final)
    finally:
        temporary.unlink(missing_ok=True)


def _vocabulary(writer: Any, words: BytePairs) -> None:
    writer.add_tokenizer_model("gpt2")  # byte-level BPE
    writer.add_tokenizer_pre(words.cut)
    writer.add_token_list(list(words.tokens))
    writer.add_token_types(list(words.kinds))
    writer.add_token_merges(list(words.merges) or ["< 0"])  # a list that is empty is refused
    begins, ends = words.adds
    writer.add_add_bos_token(begins)
    writer.add_add_eos_token(ends)
    for name, token in words.special.items():
        getattr(writer, f"add_{name}_token_id")(token)
    if words.template:
        writer.add_chat_template(words.template)
