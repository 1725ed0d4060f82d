"""Weights as llama.cpp reads them: one GGUF file in float32, with as much of a vocabulary as token ids need.

Names and metadata: ggml-org/ggml, docs/gguf.md, and the package `gguf`. llama.cpp turns neighbouring pairs (x₀, x₁) in a `llama`,
transformers the halves (x_i, x_{i + d/2}): the rows of its q and k are put in that order; `qwen2` and `qwen3` turn halves in both.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from policygrad.errors import EngineError
from policygrad.weight_sync.folder import Write
from policygrad.weight_sync.safetensors_folder import check_whole

FILE = "model.gguf"
_KINDS = {"llama": "LLAMA", "mistral": "LLAMA", "qwen2": "QWEN2", "qwen3": "QWEN3"}
"""transformers' model_type to the architecture's name in `gguf`."""
_PAIRS = ("LLAMA",)
"""Architectures that turn neighbouring pairs."""
_ENDS = ("eos", "eot", "eom")
"""End tokens that a vocabulary can name; a client cuts at any others."""


def gguf_writer(model: Any, end: frozenset[int]) -> Write:
    """model: transformers' own. end: ids that end a completion.

    Raises:
        EngineError: an architecture that is not written here, or the package `gguf` is missing.
    """
    check_whole(model)
    config = model.config
    kind = _KINDS.get(config.model_type)
    if kind is None:
        raise EngineError(
            f"llama.cpp is given models of the kinds {', '.join(_KINDS)}, and this one is a {config.model_type}: take "
            "--sampler.engine vllm, or local"
        )
    if getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True):
        raise EngineError(
            "the model's attention has a sliding window, which is not exported: take --sampler.engine vllm, or local"
        )
    _package()
    scaling = _rope_factors(config)
    size = model.get_input_embeddings().weight.shape[0]

    def write(tensors: Mapping[str, Tensor], folder: Path) -> None:
        gguf = _package()
        writer = gguf.GGUFWriter(folder / FILE, gguf.MODEL_ARCH_NAMES[gguf.MODEL_ARCH[kind]])
        _metadata(writer, config, size)
        _vocabulary(writer, gguf, size, end)
        if scaling is not None:
            writer.add_tensor("rope_freqs.weight", scaling)
        names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[kind], config.num_hidden_layers)
        for name, tensor in tensors.items():
            found = names.get_name(name, try_suffixes=(".weight", ".bias"))
            if found is None:
                raise EngineError(f"llama.cpp's {kind.lower()} has no place for the parameter {name!r}")
            writer.add_tensor(found, _array(name, tensor, config, kind))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()

    return write


def _package() -> Any:
    try:
        import gguf
    except ImportError as error:
        raise EngineError("llama.cpp takes its weights as GGUF: pip install 'policygrad[llama_cpp]'") from error
    return gguf


def _array(name: str, tensor: Tensor, config: Any, kind: str) -> NDArray[np.float32]:
    found: NDArray[np.float32] = tensor.detach().float().cpu().numpy()
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    count = next((n for part, n in heads.items() if f".{part}." in name), 0)
    if count and kind in _PAIRS:
        halves = found.reshape(count, 2, -1, *found.shape[1:])
        found = halves.swapaxes(1, 2).reshape(found.shape)
    return np.ascontiguousarray(found)


def _metadata(writer: Any, config: Any, size: int) -> None:
    width = _head_width(config)
    writer.add_vocab_size(size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(width)
    writer.add_value_length(width)
    writer.add_rope_dimension_count(width)
    writer.add_rope_freq_base(float(_rope(config).get("rope_theta", 10000.0)))
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_file_type(0)  # all float32


def _vocabulary(writer: Any, gguf: Any, size: int, end: frozenset[int]) -> None:
    """Every token is called by its number: a server that is asked for ids says nothing of a token whose text is no whole UTF-8."""
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([f"<{i}>" for i in range(size)])
    writer.add_token_types([gguf.TokenType.NORMAL] * size)
    writer.add_token_merges(["< 0"])  # a list that is empty is refused
    writer.add_add_bos_token(False)
    writer.add_add_eos_token(False)
    for name, token in zip(_ENDS, sorted(end), strict=False):
        getattr(writer, f"add_{name}_token_id")(token)


def _head_width(config: Any) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def _rope(config: Any) -> dict[str, Any]:
    found = getattr(config, "rope_parameters", None) or {}
    return dict(found)


def _rope_factors(config: Any) -> NDArray[np.float32] | None:
    """What divides each frequency [head width / 2]; None = 1. Llama 3's, as transformers' modeling_rope_utils computes them.

    Raises:
        EngineError: positions that are stretched in another way.
    """
    rope, width = _rope(config), _head_width(config)
    kind = rope.get("rope_type", "default")
    if kind == "default":
        return None
    if kind != "llama3":
        raise EngineError(
            f"the model stretches its positions by {kind!r}, which is not exported for llama.cpp: take --sampler.engine vllm"
        )
    factor, low, high = rope["factor"], rope["low_freq_factor"], rope["high_freq_factor"]
    old = rope["original_max_position_embeddings"]
    found = []
    for i in range(0, width, 2):
        length = 2 * math.pi * rope["rope_theta"] ** (i / width)
        smooth = (old / length - low) / (high - low)
        if length < old / high:
            found.append(1.0)
        elif length > old / low:
            found.append(float(factor))
        else:
            found.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(found, dtype=np.float32)
