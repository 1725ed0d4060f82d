"""Text to token ids and back."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from policygrad.errors import ModelError
from policygrad.models.chat_template import (
    ChatTokenizer,
    Message,
    Tools,
    encode_continuation,
    encode_prompt,
    encode_rewritten,
    extend_ids,
)
from policygrad.models.loading import context_length, load_error, pretrained_kwargs, resolve_model
from policygrad.models.lora_config import adapter_base
from policygrad.models.tool_calls import ToolCallParser, get_chat_template, parser_for_template

# What somebody else wrote, as the token ids that a policy would have sampled: the prompt's own, then the answer's, closed.


def encode_demonstration(
    tokenizer: ChatTokenizer,
    prompt_ids: list[int],
    prompt: str | Sequence[Message],
    rest: str | Sequence[Message],
    source: str,
) -> tuple[list[int], list[bool]]:
    """(ids of prompt and rest, which of them the assistant says). rest: the completion of a text, or the messages after a chat's.

    Raises:
        ModelError: text whose prompt is no prefix of the whole in token ids; a template that changes earlier turns or does not
            close the assistant's.
    """
    if isinstance(prompt, str) and isinstance(rest, str):
        return _text(tokenizer, prompt_ids, prompt, rest, source)
    assert not isinstance(prompt, str)
    assert not isinstance(rest, str)
    return _chat(tokenizer, prompt_ids, prompt, rest, source)


def _text(
    tokenizer: ChatTokenizer, ids: list[int], prompt: str, rest: str, source: str
) -> tuple[list[int], list[bool]]:
    """Prompt + completion as plain text, with the end token behind it."""
    whole = list(tokenizer.hf(prompt + rest)["input_ids"])
    if len(whole) == len(ids) or whole[-1] not in tokenizer.end_ids:
        whole.append(end_token_id(tokenizer))
    if whole[: len(ids)] != ids:
        raise ModelError(
            f"{source}: the tokenizer of {tokenizer.name!r} joins the end of 'prompt' with the beginning of 'completion', so "
            "the model would learn other tokens than it is prompted with: move the space or newline between them from one to "
            f"the other (the prompt ends {prompt[-12:]!r}, the completion begins {rest[:12]!r})"
        )
    return whole, [i >= len(ids) for i in range(len(whole))]


def end_token_id(tokenizer: ChatTokenizer) -> int:
    """The tokenizer's own end token, or the first of those that the model names."""
    own = tokenizer.hf.eos_token_id
    return int(own) if own in tokenizer.end_ids else min(tokenizer.end_ids)


def _chat(
    tokenizer: ChatTokenizer, prompt_ids: list[int], prompt: Sequence[Message], rest: Sequence[Message], source: str
) -> tuple[list[int], list[bool]]:
    """Renders ever longer beginnings of the conversation: before and after each of the assistant's turns."""
    messages: list[Mapping[str, str]] = list(prompt)
    ids, learnt = prompt_ids, [False] * len(prompt_ids)
    for message in rest:
        if message["role"] == "assistant":
            ids = extend_ids(tokenizer, ids, messages, generation_prompt=True, source=source)
            learnt += [False] * (len(ids) - len(learnt))
            ids = extend_ids(tokenizer, ids, [*messages, message], generation_prompt=False, source=source)
            learnt += _said(tokenizer, ids[len(learnt) :], source)
        messages.append(message)
    return ids, learnt


def _said(tokenizer: ChatTokenizer, turn: list[int], source: str) -> list[bool]:
    """The assistant's turn is learnt up to its last end token: what a template writes behind it (a newline) is never sampled."""
    ends = [i for i, token in enumerate(turn) if token in tokenizer.end_ids]
    if not ends:
        closes = tokenizer.hf.decode(turn[-3:])
        known = ", ".join(tokenizer.hf.convert_ids_to_tokens(sorted(tokenizer.end_ids)))
        raise ModelError(
            f"{source}: the chat template of {tokenizer.name!r} does not close the assistant's turn with an end token "
            f"({known}), so the model would not learn to stop: the turn ends {closes!r}. Set `eos_token` in its "
            "tokenizer_config.json to the token that closes a turn, or add it in the template"
        )
    return [i <= ends[-1] for i in range(len(turn))]


def encode_answer(
    tokenizer: ChatTokenizer, prompt_ids: list[int], prompt: str | Sequence[Message], text: str, source: str
) -> list[int]:
    """The answer `text` alone, in the ids that follow the prompt's, its end token the last. Raises as `encode_demonstration`."""
    rest = text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]
    whole, learnt = encode_demonstration(tokenizer, prompt_ids, prompt, rest, source)
    return [token for token, said in zip(whole, learnt, strict=True) if said]


@dataclass(frozen=True)
class Tokenizer:
    """Text to token ids and back, by the model's own tokenizer."""

    hf: Any
    """The object of transformers."""
    end_ids: frozenset[int]
    """Ids that end a completion."""
    name: str
    context_length: int | None
    """Tokens a prompt and its completion may take together."""

    def encode(
        self,
        prompt: str | Sequence[Message],
        max_tokens: int,
        source: str = "a prompt",
        tools: Tools | None = None,
    ) -> Tensor:
        """[P] int64. A string is encoded as it stands; chat messages are rendered by the tokenizer's template.

        Raises:
            ModelError: no chat template, or one that refuses the messages; a prompt without tokens; a prompt that leaves no
                room for max_tokens.
        """
        ids = encode_prompt(self, prompt, tools=tools, source=source)
        if not ids:
            raise ModelError(f"{source} has no tokens: {prompt!r}. A prompt needs at least one")
        if self.context_length is not None and len(ids) + max_tokens > self.context_length:
            raise ModelError(
                f"{source} has {len(ids)} tokens and max_tokens is {max_tokens}: together more than the {self.context_length} positions "
                f"of {self.name!r}. Shorten it, or lower --max-tokens. It begins: {str(prompt)[:80]!r}"
            )
        return torch.tensor(ids, dtype=torch.int64)

    def encode_continuation(
        self,
        so_far: str | Sequence[Message],
        reply: str,
        new: str | Sequence[Message],
        source: str = "a conversation",
        tools: Tools | None = None,
    ) -> Tensor:
        """[n] int64; the ids between a sampled turn and the next: see `chat.continuation`, also for what it raises."""
        return torch.tensor(
            encode_continuation(self, so_far, reply, new, tools=tools, source=source), dtype=torch.int64
        )

    def encode_rewritten(
        self,
        messages: Sequence[Message],
        opening: int,
        new: int,
        source: str = "a conversation",
        tools: Tools | None = None,
    ) -> tuple[Tensor, Tensor]:
        """([P'] int64, [n] int64) of a conversation that the template writes anew: see `chat.rewritten`, also for what it
        raises."""
        whole, news = encode_rewritten(self, messages, opening, new, tools=tools, source=source)
        return torch.tensor(whole, dtype=torch.int64), torch.tensor(news, dtype=torch.int64)

    def encode_answer(
        self, prompt: Tensor, said: str | Sequence[Message], text: str, source: str = "an answer"
    ) -> list[int]:
        """The ids of an answer that somebody else wrote, as they would have been sampled behind the ids `prompt` of what was
        `said`, closed by an end token. Raises as `shown.shown_ids`."""
        return encode_answer(self, prompt.tolist(), said, text, source)

    @property
    def tool_call_parser(self) -> ToolCallParser:
        """How the model writes calls of tools, by its chat template."""
        return parser_for_template(get_chat_template(self.hf), self.name)

    def decode(self, tokens: Iterable[int] | Tensor) -> str:
        """The text, without end and padding tokens."""
        return str(self.hf.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False))


def load_tokenizer(model: str | object, network: nn.Module, *, trust_remote_code: bool = False) -> Tokenizer:
    """The tokenizer beside a loaded model; or an object of transformers' own in a name's place.

    Raises:
        ModelError: no tokenizer, one with more tokens than the model reads, or none of tokenizer and model names an end token.
    """
    if isinstance(model, str):
        path = resolve_model(model)
        base = adapter_base(path)
        own = base is None or (Path(path) / "tokenizer_config.json").is_file()
        tokenizer = _pretrained(path if own or base is None else base, model, trust_remote_code)
        ends = [*_written_ends(path), *(_written_ends(base) if base else ())]
        name, written = model, [*ends, *_set_ends(network)]
    else:
        tokenizer = _checked(model)
        name, written = str(getattr(model, "name_or_path", "") or type(model).__name__), _set_ends(network)
    check_vocabulary(tokenizer, network, name)
    end = frozenset(_end_ids(tokenizer.eos_token_id)).union(*(_end_ids(ids) for ids in written))
    if odd := [token for token in end if not isinstance(token, int) or isinstance(token, bool)]:
        raise ModelError(
            f"an end token of {name!r} is {odd[0]!r}, not a token's number: see eos_token_id in its configuration files"
        )
    if not end:
        raise ModelError(
            f"neither the tokenizer nor a configuration file of {name!r} names an end token, so no completion could ever end: "
            "set `eos_token` in its tokenizer_config.json"
        )
    return Tokenizer(tokenizer, end, name, context_length(network))


def check_vocabulary(tokenizer: Any, network: nn.Module, name: str) -> None:
    """Raises ModelError where a tokenizer of transformers' has tokens that the model has no embedding for."""
    table: Any = network.get_input_embeddings() if hasattr(network, "get_input_embeddings") else None  # type: ignore[operator]
    if table is not None and hasattr(tokenizer, "__len__") and len(tokenizer) > (known := int(table.weight.shape[0])):
        raise ModelError(
            f"the tokenizer {name!r} has {len(tokenizer)} tokens and the model reads {known}: give the tokenizer that it was "
            "trained with"
        )


def load_pretrained_tokenizer(path: str, trust: bool) -> Any:
    """Load the tokenizer of the class that the folder names.

    Beside a model of some types (qwen2, qwen3_5, qwen3_5_moe) transformers replaces the generic class by one of that type, which
    splits text in its own way and adds a token, so that ids are others than tokenizer.json says. Raises whatever transformers does.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast
    from transformers.models.auto.tokenization_auto import get_tokenizer_config

    tokenizer = AutoTokenizer.from_pretrained(path, **pretrained_kwargs(trust))
    if type(tokenizer).__module__.startswith("transformers.models."):
        named = get_tokenizer_config(path).get("tokenizer_class")
        if named in ("PreTrainedTokenizerFast", "TokenizersBackend"):
            return PreTrainedTokenizerFast.from_pretrained(path)
    return tokenizer


def _pretrained(path: str, model: str, trust: bool) -> Any:
    try:
        return load_pretrained_tokenizer(path, trust)
    except Exception as error:  # of which class depends on what is wrong with which file
        files = "tokenizer.json and tokenizer_config.json"
        raise load_error(f"the tokenizer of {model!r}", error, files, path) from error


def _checked(tokenizer: object) -> Any:
    if callable(tokenizer) and hasattr(tokenizer, "decode") and hasattr(tokenizer, "eos_token_id"):
        return tokenizer
    raise ModelError(f"a tokenizer is a folder, a hub id or an object of transformers', not {type(tokenizer).__name__}")


def _set_ends(network: nn.Module) -> list[Any]:
    """Ends that somebody wrote down for generating with this model; not those that its configuration's class has by default."""
    own: Any = getattr(network, "generation_config", None)
    return [] if getattr(own, "_from_model_config", True) else [own.eos_token_id]


def _end_ids(ids: Any) -> list[int]:
    return list(ids) if isinstance(ids, (list, tuple)) else [] if ids is None else [ids]


def _written_ends(path: str) -> Iterator[Any]:
    """`eos_token_id` as the configuration files have it. What a loaded configuration says may be its class's default (2 for
    a Llama), a token like any other in this vocabulary."""
    from transformers.utils.hub import cached_file

    for name in ("config.json", "generation_config.json"):
        try:
            file = cached_file(path, name)
        except OSError:  # a model need not have the second
            continue
        if file is None:  # nor a tokenizer's own folder the first
            continue
        try:
            written = json.loads(Path(str(file)).read_bytes())
        except (ValueError, RecursionError) as error:
            raise ModelError(f"{file} is no JSON ({error}): put the model's own back") from error
        for place in (written, written.get("text_config") if isinstance(written, dict) else None):
            if isinstance(place, dict):
                yield place.get("eos_token_id")


def pad_token_id(tokenizer: Tokenizer) -> int:
    """What fills a row: the pad token, or an end token where there is none (padded positions are never read)."""
    pad = tokenizer.hf.pad_token_id
    return int(pad) if pad is not None else min(tokenizer.end_ids)
