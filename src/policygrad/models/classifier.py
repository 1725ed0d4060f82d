"""Scoring texts with an AutoModelForSequenceClassification that has one label. This module alone imports that class.

Using a reward model (`--reward model:PATH`) and training one (`policygrad reward-model`) share these functions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from policygrad.errors import ModelError
from policygrad.models.adapters import reload_saved_precision, require_peft, saved_head_dtype, train_only_adapters
from policygrad.models.chat.rendering import render_ids
from policygrad.models.loading import (
    at_least_float32,
    check_missing_weights,
    load_error,
    read_config,
    reject_pickle_files,
)
from policygrad.models.lora_config import adapter_base, read_adapter_config
from policygrad.models.tokenizer import Tokenizer, load_pretrained_tokenizer
from policygrad.models.traits import adapter_configs
from policygrad.utils.out_of_memory import MemoryBudget

MICRO_BATCH_TOKENS = 8192  # tokens per forward pass, including padding
_MEMORY = MemoryBudget("", "tokens")  # of this process, which scores with one model
Messages = Sequence[Mapping[str, str]]


def encode_for_scoring(
    tokenizer: Tokenizer, prompt: str | Messages, completion: str, source: str = "the prompt"
) -> list[int]:
    """Encode a prompt and a completion as the reward model reads them.

    Chat messages are rendered by its chat template, with the completion as the assistant's turn. Plain text is prompt +
    completion, followed by the end token if the tokenizer has one.

    Raises:
        ModelError: No chat template, or one that refuses the messages.
    """
    if not isinstance(prompt, str):
        messages = [*prompt, {"role": "assistant", "content": completion}]
        return render_ids(tokenizer, messages, generation_prompt=False, source=source)
    ids = list(tokenizer.hf(prompt + completion)["input_ids"])
    end = tokenizer.hf.eos_token_id
    separator = getattr(tokenizer.hf, "sep_token_id", None)  # BERT's [SEP], which its tokenizer adds
    closed = ids[-1:] == [end] or (separator is not None and ids[-1:] == [separator])
    return ids if end is None or closed else [*ids, end]


def micro_batches(lengths: Sequence[int], tokens: int) -> Iterator[list[int]]:
    """Yield batches of indices into `lengths`, longest first, with at most `tokens` padded tokens (or one text)."""
    batch: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if batch and (len(batch) + 1) * lengths[batch[0]] > tokens:
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch


def forward(model: nn.Module, texts: Sequence[Sequence[int]]) -> Tensor:
    """Score n texts in one padded forward pass: [n], at least float32, with graph.

    The model scores the last token that is not padding, so a model without a padding token is padded with an id that occurs in
    none of the texts.
    """
    config: Any = model.config.get_text_config()  # type: ignore[operator, union-attr]
    device = next(model.parameters()).device
    original = filler = config.pad_token_id
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
    config.pad_token_id = filler
    try:
        out = model(input_ids=ids.to(device), attention_mask=attention.to(device))
    finally:
        config.pad_token_id = original
    return at_least_float32(out.logits.squeeze(-1))


@torch.inference_mode()
def score(model: nn.Module, texts: Sequence[Sequence[int]], tokens: int = MICRO_BATCH_TOKENS) -> Tensor:
    """Score n texts: [n] float32 on the CPU."""
    out = torch.zeros(len(texts))

    def work() -> None:
        batches = micro_batches([len(text) for text in texts], _MEMORY.cap(tokens))
        for indices in _MEMORY.watch(batches, lambda batch: len(batch) * max(len(texts[i]) for i in batch), len):
            out[indices] = forward(model, [texts[i] for i in indices]).cpu()

    _MEMORY.run(work)
    return out


def load_classifier_tokenizer(path: str, trust_remote_code: bool = False) -> Tokenizer:
    """Load a classifier's tokenizer, which has no end ids because nothing is sampled.

    Raises:
        ModelError: No tokenizer.
    """
    try:
        return Tokenizer(load_pretrained_tokenizer(path, trust_remote_code), frozenset(), path, None)
    except Exception as error:  # the class depends on what is wrong with which file
        raise load_error(f"the tokenizer of {path!r}", error, "tokenizer.json and tokenizer_config.json") from error


def load_classifier(
    path: str,
    dtype: torch.dtype | str = "auto",
    device: str = "cpu",
    *,
    new_head: bool = False,
    trust_remote_code: bool = False,
) -> Any:
    """Load a network with one label, in evaluation mode. new_head: allow a randomly initialised head, to be trained.

    Raises:
        ModelError: A model that cannot be loaded, or with missing weights other than those of a new head.
    """
    from transformers import AutoModelForSequenceClassification
    from transformers.utils import logging

    base = adapter_base(path)
    what = f"the reward model {path!r}"
    if base is not None:
        require_peft(f"{what}, which is an adapter,")
        reject_pickle_files(base, f"the model {base!r}, which {path!r} adapts,")
        read_config(base, f"the model {base!r}, which {path!r} adapts,")
        # the base's file may have another precision than it was trained in
        dtype = saved_head_dtype(path) if dtype == "auto" else dtype
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    reject_pickle_files(path, what)
    read_config(path, what)
    before = logging.get_verbosity()
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]  # the caller reports a new head, the rest is refused below
    try:
        model, info = AutoModelForSequenceClassification.from_pretrained(
            path,
            dtype=dtype,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            use_safetensors=True,
            trust_remote_code=trust_remote_code,
            **({"num_labels": 1} if new_head or base is not None else {}),
        )
    except Exception as error:  # the class depends on what is wrong with which file
        raise load_error(what, error, "config.json and safetensors") from error
    finally:
        logging.set_verbosity(before)
    if getattr(model.config, "is_encoder_decoder", False):
        raise ModelError(
            f"{what} ({model.config.model_type}) is an encoder-decoder, which reads a text twice: use an "
            "encoder-only or a decoder-only model"
        )

    def is_new(name: str) -> bool:
        return new_head and (not name.startswith(f"{model.base_model_prefix}.") or ".pooler." in name)

    check_missing_weights(model, info, what, new=is_new)
    if adapter_configs(model):
        train_only_adapters(model)
        reload_saved_precision(model, path)
        # as in training: an adapter's folder has no config.json to record it
        set_padding_token(model, load_classifier_tokenizer(path, trust_remote_code).hf)
    text = model.config.get_text_config()
    if getattr(text, "use_cache", False):
        text.use_cache = False  # a text is read once: cached keys and values would waste memory
    return model.to(device).eval()


def set_padding_token(model: nn.Module, tokenizer: object) -> None:
    """Set a padding token, because the model scores the last token that is not padding.

    Without another candidate it is the end token; then the last token before it is scored, in training as in use.
    """
    config = model.config.get_text_config()  # type: ignore[operator, union-attr]
    if config.pad_token_id is None:
        names = ("pad_token_id", "unk_token_id", "bos_token_id", "eos_token_id")
        end = getattr(tokenizer, "eos_token_id", None)
        ids = [getattr(tokenizer, name, None) for name in names]
        config.pad_token_id = next((i for i in ids if i is not None and i != end), end)
    if getattr(tokenizer, "pad_token_id", None) is None and config.pad_token_id is not None:
        tokenizer.pad_token_id = config.pad_token_id  # type: ignore[attr-defined]


def score_head_modules(model: Any) -> tuple[str, ...]:
    """Return the names of the modules outside the body, which compute the score; a new head must be trained completely."""
    heads = (name for name, module in model.named_children() if next(module.parameters(), None) is not None)
    return tuple(name for name in heads if name != model.base_model_prefix)


def read_num_labels(path: str, trust_remote_code: bool = False) -> tuple[int, list[str]]:
    """Read the number of scores of the model's head, 0 without such a head, and its architectures.

    Raises:
        ModelError: No configuration.
    """
    from transformers import AutoConfig

    adapter = read_adapter_config(path)
    if adapter is not None:
        is_classifier, base = adapter.get("task_type") == "SEQ_CLS", f"adapter of {adapter['base_model_name_or_path']}"
        return (1, [f"{base} with a score head"]) if is_classifier else (0, [base])
    read_config(path, f"the model {path!r}")
    try:
        config: Any = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    except Exception as error:  # the class depends on what is wrong with which file
        raise load_error(f"the model {path!r}", error, "config.json") from error
    kinds = list(config.architectures or [config.model_type])
    return (config.num_labels if any(kind.endswith("ForSequenceClassification") for kind in kinds) else 0), kinds
