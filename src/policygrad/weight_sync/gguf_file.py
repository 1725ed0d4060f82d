"""Weights for a server of llama.cpp, in float32, with as much of a vocabulary as token ids need."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from policygrad.errors import EngineError
from policygrad.weight_sync.folder import Write
from policygrad.weight_sync.gathered import Gathered
from policygrad.weight_sync.gguf_weights import add_weights, package, rows, unfit, writing
from policygrad.weight_sync.safetensors_folder import check_whole, without_adapters

FILE = "model.gguf"
_ENDS = ("eos", "eot", "eom")
"""End tokens that a vocabulary can name; a client cuts at any others."""


def gguf_writer(model: Any, end: frozenset[int]) -> Write:
    """model: transformers' own. end: ids that end a completion.

    Raises:
        EngineError: an architecture that is not written here, or the package `gguf` is missing.
    """
    check_whole(model)
    if reason := unfit(model):
        raise EngineError(f"{reason}: take --sampler.engine vllm, or local")
    package()

    def write(tensors: Mapping[str, Tensor], folder: Path) -> None:
        with writing(folder / FILE, model, spooled=isinstance(tensors, Gathered)) as writer:
            _vocabulary(writer, rows(model), end)
            add_weights(writer, model, without_adapters(model, tensors))

    return write


def _vocabulary(writer: Any, size: int, end: frozenset[int]) -> None:
    """Every token is called by its number: a server that is asked for ids says nothing of a token whose text is no whole UTF-8."""
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([f"<{i}>" for i in range(size)])
    writer.add_token_types([package().TokenType.NORMAL] * size)
    writer.add_token_merges(["< 0"])  # a list that is empty is refused
    writer.add_add_bos_token(False)
    writer.add_add_eos_token(False)
    for name, token in zip(_ENDS, sorted(end), strict=False):
        getattr(writer, f"add_{name}_token_id")(token)
