"""Models, tokenizers and reward models of a trainer, by id, by folder, or as objects."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import transformers
from torch import nn
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer, PreTrainedTokenizerBase

from policygrad.models.adapters import wrap_with_adapters
from policygrad.models.loading import resolve_model
from policygrad.models.vision import load_processor as load_picture_processor
from policygrad.trl.config import OnlineConfig
from policygrad.trl.scoring import Rewards, name_function

logger = transformers.utils.logging.get_logger("policygrad.trl")


def load_model(model: Any, args: OnlineConfig, quantization_config: Any, peft_config: Any) -> nn.Module:
    """Return the model, with new adapters if `peft_config` describes them.

    Raises:
        ValueError: A setting that is given twice, or adapters for a model that has some.
    """
    options = dict(args.model_init_kwargs or {})  # type: ignore[arg-type]
    if isinstance(model, str):
        model = resolve_model(model)
        if quantization_config is not None:
            if "quantization_config" in options:
                raise ValueError(
                    "quantization_config is an argument of the trainer and in model_init_kwargs: give it once"
                )
            options["quantization_config"] = quantization_config
        model = _load_by_name(model, args, options)
    else:
        for name, given in {"model_init_kwargs": options, "quantization_config": quantization_config}.items():
            if given:
                logger.warning(f"{name} is not used: the model is an object that was loaded already")
    if peft_config is None:
        return model  # type: ignore[no-any-return]
    return wrap_with_adapters(model, peft_config)


def _load_by_name(name: str, args: OnlineConfig, options: dict[str, Any]) -> Any:
    """Load a model in the class that its configuration names, in float32 unless `dtype` says otherwise."""
    hub = {key: options[key] for key in ("revision", "subfolder", "cache_dir", "token") if key in options}
    trust = options.pop("trust_remote_code", args.trust_remote_code)
    config = AutoConfig.from_pretrained(name, trust_remote_code=trust, **hub)
    options.setdefault("dtype", "bfloat16" if args.bf16 and args.device.type == "cuda" else "float32")
    options.setdefault("device_map", None)
    kind = getattr(transformers, (config.architectures or [""])[0], None) or transformers.AutoModelForCausalLM
    return kind.from_pretrained(name, trust_remote_code=trust, **options)


def load_processor(model: Any, args: OnlineConfig) -> Any:
    """Return the tokenizer of a model, or the processor of one that sees."""
    name, trust = model.config._name_or_path, args.trust_remote_code
    options = args.model_init_kwargs if isinstance(args.model_init_kwargs, dict) else {}
    sides = {"truncation_side": "left", "padding_side": "left"}
    tokenizer = AutoTokenizer.from_pretrained(name, revision=options.get("revision"), trust_remote_code=trust, **sides)
    pictures = load_picture_processor(name, model, tokenizer, name, trust)
    return tokenizer if pictures is None else pictures.hf


def prepare_tokenizer(processing_class: Any, model: Any) -> None:
    """Give a tokenizer without padding its end token for it, and tell the model's configuration."""
    tokenizer = getattr(processing_class, "tokenizer", processing_class)
    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        raise TypeError(
            f"The `processing_class` must be a tokenizer or a processor of transformers, not {type(processing_class).__name__}"
        )
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    model.config.get_text_config().pad_token_id = tokenizer.pad_token_id
    if getattr(model, "generation_config", None) is not None:
        model.generation_config.pad_token_id = tokenizer.pad_token_id


def load_reward_functions(functions: Any, tokenizers: Any, args: OnlineConfig) -> Rewards:
    """Return functions as they are, and reward models by name loaded with their tokenizers.

    Raises:
        ValueError: Another number of tokenizers than of functions.
    """
    functions = [] if functions is None else [*functions] if isinstance(functions, list | tuple) else [functions]
    tokenizers = [None] * len(functions) if tokenizers is None else tokenizers
    tokenizers = [*tokenizers] if isinstance(tokenizers, list | tuple) else [tokenizers]
    if len(tokenizers) != len(functions):
        raise ValueError(
            f"The number of reward processing classes ({len(tokenizers)}) must match the number of reward functions "
            f"({len(functions)})."
        )
    names = list[str]()
    for k, function in enumerate(functions):
        if isinstance(function, str):
            options = {**(args.model_init_kwargs or {})}  # type: ignore[dict-item]
            options.setdefault("trust_remote_code", args.trust_remote_code)
            functions[k] = function = AutoModelForSequenceClassification.from_pretrained(
                function, num_labels=1, **options
            )
        if isinstance(function, nn.Module):
            names.append(str(function.config._name_or_path).rstrip("/").split("/")[-1])  # type: ignore[union-attr]
            tokenizers[k] = _prepare_reward_tokenizer(function, tokenizers[k], args)
        else:
            names.append(name_function(function))
    return Rewards(functions, names, tokenizers, dict(args.chat_template_kwargs or {}))  # type: ignore[arg-type]


def _prepare_reward_tokenizer(model: Any, tokenizer: Any, args: OnlineConfig) -> Callable[..., Any]:
    """Return the tokenizer of a reward model, which reads each text at its last token that is no padding."""
    if tokenizer is None:
        tokenizer = AutoTokenizer.from_pretrained(model.config._name_or_path, trust_remote_code=args.trust_remote_code)
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    model.config.get_text_config().pad_token_id = tokenizer.pad_token_id
    return tokenizer  # type: ignore[no-any-return]
