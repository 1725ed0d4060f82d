"""Scores of texts under an AutoModelForSequenceClassification with one label; the one file that imports it.

Using a reward model (`--reward model:PATH`) and training one (`policygrad reward-model`) render and score with these functions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from policygrad.errors import ModelError
from policygrad.models.adapters import (
    adapter_configs,
    reload_saved_precision,
    require_peft,
    saved_head_dtype,
    train_only_adapters,
)
from policygrad.models.chat_template import render_ids
from policygrad.models.loading import (
    at_least_float32,
    check_missing_weights,
    load_error,
    pretrained_kwargs,
    read_config,
    reject_pickle_files,
    weight_kwargs,
)
from policygrad.models.lora_config import adapter_base, read_adapter_config
from policygrad.models.tokenizer import Tokenizer, load_pretrained_tokenizer

MICRO_BATCH_TOKENS = 8192
"""Tokens per forward pass, padding included."""
_HEAD = "ForSequenceClassification"

Messages = Sequence[Mapping[str, str]]


def encode_for_scoring(
    tokenizer: Tokenizer, prompt: str | Messages, completion: str, source: str = "the prompt"
) -> list[int]:
    """Token ids of prompt and completion as the reward model reads them.

    Chat messages go through its chat template, the completion as the assistant's turn, which the template closes. Plain text
    is prompt + completion, closed by the end token where the tokenizer has one.

    Raises:
        ModelError: no chat template, or one that refuses the messages.
    """
    if not isinstance(prompt, str):
        messages = [*prompt, {"role": "assistant", "content": completion}]
        return render_ids(tokenizer, messages, generation_prompt=False, source=source)
    ids = list(tokenizer.hf(prompt + completion)["input_ids"])
    end = tokenizer.hf.eos_token_id
    return ids if end is None or ids[-1:] == [end] or _is_closed(tokenizer.hf, ids) else [*ids, end]


def _is_closed(tokenizer: Any, ids: list[int]) -> bool:
    """Whether the tokenizer closes a text itself (BERT's [SEP])."""
    separator = getattr(tokenizer, "sep_token_id", None)
    return separator is not None and ids[-1:] == [separator]


def micro_batches(lengths: Sequence[int], tokens: int) -> Iterator[list[int]]:
    """Places in `lengths`, longest first, at most `tokens` padded tokens (or one text) at a time."""
    batch: list[int] = []
    for place in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        if batch and (len(batch) + 1) * lengths[batch[0]] > tokens:
            yield batch
            batch = []
        batch.append(place)
    if batch:
        yield batch


def forward(model: nn.Module, texts: Sequence[Sequence[int]]) -> Tensor:
    """r [n] float32 or better, with graph: one padded forward pass over n texts.

    A model without a padding token is padded with an id that none of the texts contains: what is scored is the last token
    that is not padding.
    """
    config: Any = model.config
    config = config.get_text_config()
    device = next(model.parameters()).device
    filler = config.pad_token_id
    if filler is None and len(texts) > 1:
        used = {token for text in texts for token in text}
        filler = next((token for token in range(config.vocab_size) if token not in used), None)
        if filler is None:
            return torch.cat([forward(model, [text]) for text in texts])
    width = max(map(len, texts))
    ids = torch.full((len(texts), width), 0 if filler is None else filler, dtype=torch.int64)
    attention = torch.zeros_like(ids)
    for row, text in enumerate(texts):
        ids[row, : len(text)] = torch.tensor(text)
        attention[row, : len(text)] = 1
    with _padded_with(config, filler):
        out = model(input_ids=ids.to(device), attention_mask=attention.to(device))
    return at_least_float32(out.logits.squeeze(-1))


@contextmanager
def _padded_with(config: Any, filler: int | None) -> Iterator[None]:
    before = config.pad_token_id
    config.pad_token_id = filler
    try:
        yield
    finally:
        config.pad_token_id = before


@torch.inference_mode()
def score(model: nn.Module, texts: Sequence[Sequence[int]], tokens: int = MICRO_BATCH_TOKENS) -> Tensor:
    """r [n] float32 on the CPU."""
    out = torch.zeros(len(texts))
    for places in micro_batches([len(text) for text in texts], tokens):
        out[places] = forward(model, [texts[i] for i in places]).cpu()
    return out


def classifier_context_length(model: nn.Module) -> int | None:
    """Positions the model was made for, in tokens; None when its configuration does not say."""
    config: Any = model.config
    return getattr(config.get_text_config(), "max_position_embeddings", None)


def load_classifier_tokenizer(path: str, trust_remote_code: bool = False) -> Tokenizer:
    """The tokenizer beside a model; nothing ends a text that is read, so it names no ends.

    Raises:
        ModelError: none.
    """
    try:
        return Tokenizer(load_pretrained_tokenizer(path, trust_remote_code), frozenset(), path, None)
    except Exception as error:  # of which class depends on what is wrong with which file
        raise load_error(f"the tokenizer of {path!r}", error, "tokenizer.json and tokenizer_config.json") from error


def load_classifier(
    path: str,
    dtype: torch.dtype | str = "auto",
    device: str = "cpu",
    *,
    new_head: bool = False,
    trust_remote_code: bool = False,
) -> Any:
    """The network with one label, in evaluation mode. new_head: its head may be drawn afresh, to be trained.

    Raises:
        ModelError: what cannot be loaded; weights that are not all there, but for a head that may be new.
    """
    from transformers import AutoModelForSequenceClassification
    from transformers.utils import logging

    base = adapter_base(path)
    if base is not None:
        require_peft(f"the reward model {path!r}, which is an adapter,")
        reject_pickle_files(base, f"the model {base!r}, which {path!r} adapts,")
        read_config(base, f"the model {base!r}, which {path!r} adapts,")
        dtype = (
            saved_head_dtype(path) if dtype == "auto" else dtype
        )  # the base's file may be in another than it was trained in

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    reject_pickle_files(path, f"the reward model {path!r}")
    read_config(path, f"the reward model {path!r}")
    options = weight_kwargs(trust_remote_code) | ({"num_labels": 1} if new_head or base is not None else {})
    before = logging.get_verbosity()
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]  # of a new head the caller speaks, the rest is refused below
    try:
        model, info = AutoModelForSequenceClassification.from_pretrained(
            path, dtype=dtype, output_loading_info=True, ignore_mismatched_sizes=True, **options
        )
    except Exception as error:  # of which class depends on what is wrong with which file
        raise load_error(f"the reward model {path!r}", error, "config.json and safetensors") from error
    finally:
        logging.set_verbosity(before)
    if getattr(model.config, "is_encoder_decoder", False):
        kind = f"the reward model {path!r} ({model.config.model_type}) is an encoder with a decoder"
        raise ModelError(f"{kind}, which reads a text twice: take an encoder or a decoder alone")
    body = f"{model.base_model_prefix}."
    head = lambda name: not name.startswith(body) or ".pooler." in name  # noqa: E731
    check_missing_weights(model, info, f"the reward model {path!r}", new=head if new_head else lambda name: False)
    if adapter_configs(model):
        train_only_adapters(model)
        reload_saved_precision(model, path)
        set_padding_token(
            model, load_classifier_tokenizer(path, trust_remote_code).hf
        )  # as in training: an adapter's folder has no config.json
    text = model.config.get_text_config()
    if getattr(text, "use_cache", False):
        text.use_cache = (
            False  # it reads a text once: keys and values kept for a next token would be memory for nothing
        )
    return model.to(device).eval()


def set_padding_token(model: nn.Module, tokenizer: object) -> None:
    """A padding token for whoever loads the model: what is scored is the last token that is no padding. The end token serves
    where there is no other; the last token before it is then scored, in training as in use."""
    config = model.config.get_text_config()  # type: ignore[operator, union-attr]
    if config.pad_token_id is None:
        names = ("pad_token_id", "unk_token_id", "bos_token_id", "eos_token_id")
        end = getattr(tokenizer, "eos_token_id", None)
        ids = [getattr(tokenizer, name, None) for name in names]
        config.pad_token_id = next((i for i in ids if i is not None and i != end), end)
    if getattr(tokenizer, "pad_token_id", None) is None and config.pad_token_id is not None:
        tokenizer.pad_token_id = config.pad_token_id  # type: ignore[attr-defined]


def score_head_modules(model: Any) -> tuple[str, ...]:
    """The modules beside the body, which make a score of its states: a new one has to be learned whole."""
    return tuple(
        name
        for name, module in model.named_children()
        if name != model.base_model_prefix and any(True for _ in module.parameters())
    )


def read_num_labels(path: str, trust_remote_code: bool = False) -> tuple[int, list[str]]:
    """(how many scores the model's head gives, its architectures) by its configuration; 0 = it has no such head.

    Raises:
        ModelError: no configuration.
    """
    from transformers import AutoConfig

    said = read_adapter_config(path)
    if said is not None and said.get("task_type") == "SEQ_CLS":
        return 1, [f"adapter of {said['base_model_name_or_path']} with a head that scores"]
    if said is not None:
        return 0, [f"adapter of {said['base_model_name_or_path']}"]
    read_config(path, f"the model {path!r}")
    try:
        config: Any = AutoConfig.from_pretrained(path, **pretrained_kwargs(trust_remote_code))
    except Exception as error:  # likewise
        raise load_error(f"the model {path!r}", error, "config.json") from error
    kinds = list(config.architectures or [config.model_type])
    return (config.num_labels if any(kind.endswith(_HEAD) for kind in kinds) else 0), kinds
