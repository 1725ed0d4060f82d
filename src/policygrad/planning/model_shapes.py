"""Shapes of transformer models, from a config.json or from a table of well-known names."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from policygrad.errors import ConfigError
from policygrad.planning.model_sizes import EMBEDDED_MODELS, MAX_SIZES, shorten_value
from policygrad.utils.filesystem import read_json

MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3", "smollm3")
"""Architectures whose weights can be counted, by `model_type`."""
LANGUAGE_MODELS = {"qwen2_5_vl_text": "qwen2", "qwen2_vl_text": "qwen2", "qwen3_vl_text": "qwen3"}
"""The language models inside models that see, and the text models of the same shape."""
VARIANT_SUFFIXES = ("-instruct-2507", "-thinking-2507", "-instruct", "-base")
"""Suffixes of hub names that mean further training of the same shape."""


@dataclass(frozen=True)
class ModelShape:
    """A decoder-only transformer of the Llama family: grouped-query attention, a gated MLP, RMS norms."""

    name: str
    hidden: int
    intermediate: int  # MLP width
    layers: int
    heads: int
    kv_heads: int  # key and value heads
    head_dim: int
    vocabulary: int
    tied: bool = False  # the output head shares the embeddings' weights
    qk_norm: bool = False  # queries and keys are normalised (Qwen3)
    layer_biases: int = 0  # bias parameters per layer
    source: str = ""  # origin of the figures

    @property
    def qkv_width(self) -> int:
        """Width of a token's queries, keys and values together."""
        return (self.heads + 2 * self.kv_heads) * self.head_dim

    @property
    def layer_matmul_weights(self) -> int:
        """Weights of one layer's matrix products."""
        attention = self.hidden * (self.qkv_width + self.heads * self.head_dim)
        return attention + 3 * self.hidden * self.intermediate

    @property
    def layer_parameters(self) -> int:
        """Parameters of one layer."""
        return (
            self.layer_matmul_weights + 2 * self.hidden + (2 * self.head_dim if self.qk_norm else 0) + self.layer_biases
        )

    @property
    def embedding_parameters(self) -> int:
        """Parameters of the embeddings, and likewise of the output head."""
        return self.vocabulary * self.hidden

    @property
    def parameters(self) -> int:
        """All parameters; tied ones count once."""
        return self.layers * self.layer_parameters + self.embedding_parameters * (1 if self.tied else 2) + self.hidden

    @property
    def cache_numbers_per_token(self) -> int:
        """Numbers per token in the key-value cache."""
        return 2 * self.layers * self.kv_heads * self.head_dim


Sizes = tuple[int, int, int, int, int, int, int]  # hidden, intermediate, layers, heads, kv_heads, head_dim, vocabulary


def _published(owner: str, name: str, sizes: Sizes, *, tied: bool = False, qk_norm: bool = False) -> ModelShape:
    return ModelShape(name, *sizes, tied=tied, qk_norm=qk_norm, source=f"config.json of {owner}/{name}")


KNOWN_SHAPES = {
    shape.name: shape
    for shape in (
        _published("HuggingFaceTB", "SmolLM2-135M", (576, 1536, 30, 9, 3, 64, 49152), tied=True),
        _published("Qwen", "Qwen3-0.6B", (1024, 3072, 28, 16, 8, 128, 151936), tied=True, qk_norm=True),
        _published("Qwen", "Qwen3-1.7B", (2048, 6144, 28, 16, 8, 128, 151936), tied=True, qk_norm=True),
        _published("Qwen", "Qwen3-4B", (2560, 9728, 36, 32, 8, 128, 151936), tied=True, qk_norm=True),
        _published("Qwen", "Qwen3-8B", (4096, 12288, 36, 32, 8, 128, 151936), qk_norm=True),
        _published("Qwen", "Qwen3-14B", (5120, 17408, 40, 40, 8, 128, 151936), qk_norm=True),
        _published("Qwen", "Qwen3-32B", (5120, 25600, 64, 64, 8, 128, 151936), qk_norm=True),
        _published("meta-llama", "Llama-3.1-8B", (4096, 14336, 32, 32, 8, 128, 128256)),
        _published("meta-llama", "Llama-3.1-70B", (8192, 28672, 80, 64, 8, 128, 128256)),
    )
}


def load_shape(model: str) -> ModelShape:
    """Return the shape of a model.

    Args:
        model: A folder with a config.json, a run's folder, a config.json, `tiny`, or a well-known name, with or without its owner.

    Raises:
        ConfigError: The file or name does not exist, or the architecture is not supported.
    """
    if model in EMBEDDED_MODELS:
        return read_shape(Path(__file__).parents[1] / "models" / model / "config.json", model)
    path = Path(model).expanduser()
    for file in (path / "config.json", path / "model" / "config.json", path):
        with suppress(OSError):  # a name longer than the file system allows
            if file.is_file():
                return read_shape(file, model)
    key = model.rpartition("/")[2].lower()
    for suffix in VARIANT_SUFFIXES:
        key = key.removesuffix(suffix)
    names = {name.lower(): name for name in KNOWN_SHAPES}
    if key in names:
        return KNOWN_SHAPES[names[key]]
    near = difflib.get_close_matches(key, names, n=1, cutoff=0.6)
    hint = (
        f"did you mean {names[near[0]]!r}?"
        if near
        else f"known names: {', '.join(KNOWN_SHAPES)}, {', '.join(EMBEDDED_MODELS)}."
    )
    raise ConfigError(
        f"--model {model} is neither a folder with a config.json nor a known name; {hint} For any other model, download its "
        "config.json and name that file."
    )


def read_shape(file: Path, name: str) -> ModelShape:
    """Read the shape from a config.json. Raises ConfigError for another file or an unsupported architecture."""
    try:
        config = read_json(file)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--model {name}: {file} cannot be read as a configuration: {error}") from error
    if not isinstance(config, dict) or "model_type" not in config:
        raise ConfigError(f"--model {name}: {file} has no model_type. Name a model's config.json, or its folder.")
    text = config.get("text_config")
    if config.get("vision_config") is not None and isinstance(text, dict):
        name, tied = f"{name} (without its vision tower)", config.get("tie_word_embeddings", False)
        config = {"tie_word_embeddings": tied, **text}
    kind = LANGUAGE_MODELS.get(str(config.get("model_type")), config.get("model_type"))
    if kind not in MODEL_TYPES:
        raise ConfigError(
            f"--model {name}: plans support dense models of the Llama family ({', '.join(MODEL_TYPES)}), not {kind}. Plan with one "
            "of these of the same size."
        )
    try:
        hidden, heads = _count(config, "hidden_size"), _count(config, "num_attention_heads")
        kv_heads = _count(config, "num_key_value_heads", heads)
        if heads % kv_heads:
            raise ValueError(f"num_key_value_heads {kv_heads} does not divide num_attention_heads {heads}")
        if config.get("head_dim") is None and hidden % heads:
            raise ValueError(f"num_attention_heads {heads} does not divide hidden_size {hidden}; give head_dim")
        head_dim = _count(config, "head_dim", hidden // heads)
        intermediate, widths = _count(config, "intermediate_size"), (heads + 2 * kv_heads) * head_dim
        biases = widths if kind == "qwen2" else 0
        if config.get("attention_bias"):
            biases = widths + hidden
        if config.get("mlp_bias"):
            biases += 2 * intermediate + hidden
        return ModelShape(
            name=name,
            hidden=hidden,
            intermediate=intermediate,
            layers=_count(config, "num_hidden_layers"),
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            vocabulary=_count(config, "vocab_size"),
            tied=bool(config.get("tie_word_embeddings", False)),
            qk_norm=kind == "qwen3",
            layer_biases=biases,
            source=str(file),
        )
    except KeyError as error:
        raise ConfigError(f"--model {name}: {file} lacks {error}") from error
    except ValueError as error:
        raise ConfigError(f"--model {name}: {file}: {error}. Correct it, or download the file again.") from error


def _count(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """Return an integer from 1 to its limit in `MAX_SIZES`. Raises KeyError if it is missing, ValueError if it is invalid."""
    value = config[key] if default is None else config.get(key)
    value = default if value is None and default is not None else value
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MAX_SIZES[key]:
        raise ValueError(f"{key} must be an integer from 1 to {MAX_SIZES[key]:,}, not {shorten_value(value)}")
    return value
