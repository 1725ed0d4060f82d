"""Shapes of transformer models, from a config.json or from a table of well-known names."""

from __future__ import annotations

import difflib
import json
import tomllib
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from policygrad.errors import ConfigError
from policygrad.planning.model_sizes import EMBEDDED_MODELS, MAX_SIZES, shorten_value
from policygrad.planning.shapes import CountedShape, DenseShape, LayerShape, ModelShape
from policygrad.utils.filesystem import read_json

MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3", "smollm3")
"""Architectures whose weights can be counted, by `model_type`."""
LANGUAGE_MODELS = {"qwen2_5_vl_text": "qwen2", "qwen2_vl_text": "qwen2", "qwen3_vl_text": "qwen3"}
"""The language models inside models that see, and the text models of the same shape."""
VARIANT_SUFFIXES = ("-instruct-2507", "-thinking-2507", "-instruct", "-thinking", "-base", "-it")
"""Suffixes of hub names that mean further training of the same shape."""


MODELS_FILE = Path(__file__).with_name("models.toml")
COUNTED_FILE = Path(__file__).with_name("counted_models.json")
CountLayers = Callable[[Mapping[str, Any], str, str], CountedShape]
"""Counts the layers of a config.json (name, source): `policygrad.training.shape_counting.count_shape`, which needs torch."""


def load_known_shapes() -> dict[str, ModelShape]:
    """Return the shapes of the models in models.toml by name, in the file's order."""
    counted = json.loads(COUNTED_FILE.read_text(encoding="utf-8"))["models"]
    shapes = dict[str, ModelShape]()
    for model in _read_models():
        name, source, hub, config = (model[key] for key in ("name", "source", "hub", "config"))
        if config["model_type"] in MODEL_TYPES:
            shapes[name] = read_dense_shape(config, name, source, hub)
        elif name in counted:
            values = counted[name]
            kinds = tuple(
                LayerShape(**kind | {key: tuple(map(tuple, kind[key])) for key in ("saved", "adapted_saved")})
                for kind in values["kinds"]
            )
            shapes[name] = CountedShape(**values | {"name": name, "source": source, "hub": hub, "kinds": kinds})
    return shapes


def load_shape(model: str, count: CountLayers | None = None, *, recount: bool = False) -> ModelShape:
    """Return the shape of a model.

    Args:
        model: A folder with a config.json, a run's folder, a config.json, `tiny`, or a well-known name, with or without its owner.
        count: Counts the layers of families other than Llama's; None = they are refused.
        recount: Count every model with it.

    Raises:
        ConfigError: The file or name does not exist, or the architecture is not supported.
    """
    if model in EMBEDDED_MODELS:
        return read_shape(Path(__file__).parents[1] / "models" / model / "config.json", model, count, recount)
    path = Path(model).expanduser()
    for file in (path / "config.json", path / "model" / "config.json", path):
        with suppress(OSError):  # a name longer than the file system allows
            if file.is_file():
                return read_shape(file, model, count, recount)
    key = _normalise(model)
    names = {_normalise(entry[label]): entry["name"] for entry in _read_models() for label in ("hub", "name")}
    if key in names:
        shape = KNOWN_SHAPES.get(names[key])
        if shape is not None and (not recount or count is None):
            return shape
        entry = next(entry for entry in _read_models() if entry["name"] == names[key])
        if count is not None:  # as a row of models.toml that was not counted yet
            return replace(count(entry["config"], entry["name"], entry["source"]), hub=entry["hub"])
    near = difflib.get_close_matches(key, names, n=1, cutoff=0.6)
    hint = (
        f"did you mean {names[near[0]]!r}?"
        if near
        else f"known names: {', '.join(entry['name'] for entry in _read_models())}, {', '.join(EMBEDDED_MODELS)}."
    )
    raise ConfigError(
        f"--model {model} is neither a folder with a config.json nor a known name; {hint} For any other model, download its "
        "config.json and name that file."
    )


@cache
def _read_models() -> list[dict[str, Any]]:
    models: list[dict[str, Any]] = tomllib.loads(MODELS_FILE.read_text(encoding="utf-8"))["model"]
    return models


def _normalise(name: str) -> str:
    """Return a name without its owner and what only says how the model was trained further."""
    key = name.rpartition("/")[2].lower()
    for suffix in VARIANT_SUFFIXES:
        key = key.removesuffix(suffix)
    return key


def read_shape(file: Path, name: str, count: CountLayers | None = None, recount: bool = False) -> ModelShape:
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
    has_windows = bool(config.get("sliding_window") and config.get("use_sliding_window", kind == "mistral"))
    if kind not in MODEL_TYPES or (count is not None and (has_windows or recount)):
        if count is None:
            raise ConfigError(
                f"--model {name}: only dense models of the Llama family ({', '.join(MODEL_TYPES)}) are counted here, not {kind}. "
                "`policygrad plan` counts the others."
            )
        return count(config, name, str(file))
    return read_dense_shape(config, name, str(file))


def read_dense_shape(config: Mapping[str, Any], name: str, source: str, hub: str = "") -> DenseShape:
    """Read the sizes of a model of the Llama family. Raises ConfigError if one is missing or impossible."""
    kind = LANGUAGE_MODELS.get(str(config.get("model_type")), config.get("model_type"))
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
        positions = config.get("max_position_embeddings")
        return DenseShape(
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
            source=source,
            context_length=positions if isinstance(positions, int) and positions > 0 else None,
            hub=hub,
        )
    except KeyError as error:
        raise ConfigError(f"--model {name}: {source} lacks {error}") from error
    except ValueError as error:
        raise ConfigError(f"--model {name}: {source}: {error}. Correct it, or download the file again.") from error


def _count(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """Return an integer from 1 to its limit in `MAX_SIZES`. Raises KeyError if it is missing, ValueError if it is invalid."""
    value = config[key] if default is None else config.get(key)
    value = default if value is None and default is not None else value
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MAX_SIZES[key]:
        raise ValueError(f"{key} must be an integer from 1 to {MAX_SIZES[key]:,}, not {shorten_value(value)}")
    return value


KNOWN_SHAPES = load_known_shapes()
