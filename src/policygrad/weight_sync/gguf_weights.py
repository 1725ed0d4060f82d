"""A model's shape and weights as GGUF, which llama.cpp reads.

Names and metadata: ggml-org/ggml, docs/gguf.md, and the package `gguf`. llama.cpp turns neighbouring pairs (x₀, x₁) in a `llama`,
transformers the halves (x_i, x_{i + d/2}): the rows of its q and k are put in that order; `qwen2` and `qwen3` turn halves in both.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from policygrad.errors import EngineError, install_command

_KINDS = {"llama": "LLAMA", "mistral": "LLAMA", "qwen2": "QWEN2", "qwen3": "QWEN3"}
"""transformers' model_type to the architecture's name in `gguf`."""
_PAIRS = ("LLAMA",)
"""Architectures that turn neighbouring pairs."""


def unfit(model: Any) -> str:
    """Why a model of transformers' cannot be written; "" = it can."""
    config = model.config
    if config.model_type not in _KINDS:
        return f"llama.cpp is given models of the kinds {', '.join(_KINDS)}, and this one is a {config.model_type}"
    if getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True):
        return "the model's attention has a sliding window, which is not exported"
    kind = _rope(config).get("rope_type", "default")
    if kind not in ("default", "llama3"):
        return f"the model stretches its positions by {kind!r}, which is not exported for llama.cpp"
    return ""


def package() -> Any:
    """The package `gguf`. Raises EngineError where it is missing."""
    try:
        import gguf
    except ImportError as error:
        raise EngineError(f"llama.cpp takes its weights as GGUF: {install_command('llama-cpp')}") from error
    return gguf


def rows(model: Any) -> int:
    """Ids that the model reads."""
    return int(model.get_input_embeddings().weight.shape[0])


@contextmanager
def writing(path: Path, model: Any, file_type: int = 0, *, spooled: bool = False) -> Iterator[Any]:
    """A writer that knows the model's shape; the file is written when the context ends, with what was put in meanwhile.

    file_type: of the weights, by `gguf.LlamaFileType`; 0 = float32. spooled: what was put in waits in a temporary file, not in
    memory.
    """
    gguf, config = package(), model.config
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[gguf.MODEL_ARCH[_KINDS[config.model_type]]], spooled)
    _metadata(writer, config, rows(model), file_type)
    yield writer
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_weights(writer: Any, model: Any, tensors: Mapping[str, Tensor], *, bf16: bool = False) -> None:
    """The parameters by transformers' names. bf16: matrices are rounded to it; vectors stay in float32, as llama.cpp has them.

    Raises:
        EngineError: a parameter that the architecture has no place for.
    """
    gguf, config = package(), model.config
    kind = _KINDS[config.model_type]
    if (scaling := _rope_factors(config)) is not None:
        writer.add_tensor("rope_freqs.weight", scaling)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[kind], config.num_hidden_layers)
    for name, tensor in tensors.items():
        found = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if found is None:
            raise EngineError(f"llama.cpp's {kind.lower()} has no place for the parameter {name!r}")
        array = _array(name, tensor, config, kind)
        if bf16 and array.ndim > 1:
            rounded = gguf.GGMLQuantizationType.BF16
            writer.add_tensor(found, gguf.quants.quantize(array, rounded), raw_dtype=rounded)
        else:
            writer.add_tensor(found, array)


def _array(name: str, tensor: Tensor, config: Any, kind: str) -> NDArray[np.float32]:
    found: NDArray[np.float32] = tensor.detach().float().cpu().numpy()
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    count = next((n for part, n in heads.items() if f".{part}." in name), 0)
    if count and kind in _PAIRS:
        halves = found.reshape(count, 2, -1, *found.shape[1:])
        found = halves.swapaxes(1, 2).reshape(found.shape)
    return np.ascontiguousarray(found)


def _metadata(writer: Any, config: Any, size: int, file_type: int) -> None:
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
    writer.add_file_type(file_type)


def _head_width(config: Any) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def _rope(config: Any) -> dict[str, Any]:
    found = getattr(config, "rope_parameters", None) or {}
    return dict(found)


def _rope_factors(config: Any) -> NDArray[np.float32] | None:
    """What divides each frequency [head width / 2]; None = 1. Llama 3's, as transformers' modeling_rope_utils computes them."""
    rope, width = _rope(config), _head_width(config)
    if rope.get("rope_type", "default") == "default":
        return None
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
