"""Converting text to token ids and back."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import compress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from policygrad.errors import ModelError
from policygrad.models.chat.control_tokens import (
    encode_escaped,
    escape_special_tokens,
    make_placeholder,
)
from policygrad.models.chat.messages import ANY_END, Continuation, EncodedText, Message, Tools
from policygrad.models.chat.template_options import check_template_options, get_chat_template, parse_template_options
from policygrad.models.chat.turns import AssistantMessage, ToolCall, ToolCallParser
from policygrad.models.loading import context_length, load_error, resolve_model
from policygrad.models.lora_config import adapter_base
from policygrad.models.traits import placeholder_id
from policygrad.utils.message_parts import list_pictures

if TYPE_CHECKING:
    from policygrad.models.chat.formats import ChatFormat
    from policygrad.models.vision import PictureProcessor

_OPENING_TOKENS = 64  # more than a chat template writes of a turn, with what begins it


class PromptTooLongError(ModelError):
    """A prompt that leaves no room for a completion in the model's context."""


@dataclass(frozen=True)
class Tokenizer:
    """The model's tokenizer, with the ids that end a completion.

    Sampled tokens are never tokenized again: the next turn's prompt is the ids so far, the sampled ids, and `encode_continuation`.
    If a template rewrites earlier turns, that is impossible, and the next turn's prompt is `encode_rewritten`.
    """

    hf: Any  # the transformers tokenizer
    end_ids: frozenset[int]  # ids that end a completion
    name: str
    context_length: int | None  # maximum tokens of a prompt and its completion together
    pictures: PictureProcessor | None = None  # None: the model does not see
    marks_contents: bool = False  # what continues a conversation is encoded with `EncodedText.is_content`
    template_options: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """Values of the chat template's own variables, such as `enable_thinking`."""

    def encode(
        self, prompt: str | Sequence[Message], max_tokens: int, source: str = "a prompt", tools: Tools | None = None
    ) -> EncodedText:
        """Encode a prompt: text as it is, chat messages rendered by the tokenizer's template.

        Control tokens that the descriptions of tools spell out are encoded letter by letter: a server may have written them.

        Raises:
            PromptTooLongError: The prompt leaves no room for max_tokens.
            ModelError: No chat template, or one that refuses the messages; a prompt without tokens.
        """
        compact: list[int] | None = None
        tools, placeholders = escape_special_tokens(self.hf, tools or (), make_placeholder(repr((prompt, tools))))
        encode = partial(encode_escaped, self.hf, placeholders=placeholders, source=source)
        if isinstance(prompt, str):
            text = prompt
            if tools:
                from policygrad.models.chat.rendering import format_tools

                text = f"{format_tools(tools)}\n\n{prompt}"
            # with placeholders only what begins a text
            ids = list(self.hf("" if placeholders else text, add_special_tokens=True)["input_ids"])
            ids = [*(i for i in ids if i not in self.end_ids), *encode(text)] if placeholders else ids
            if len(ids) > 1 and ids[-1] in self.end_ids:  # some tokenizers close every text; a prompt stays open
                ids.pop()
        else:
            from policygrad.models.chat.rendering import expand_pictures, render

            rendered = render(self, prompt, generation_prompt=True, tools=tools or None, source=source)
            ids = encode(expand_pictures(self, rendered, prompt, source))
            if any(list_pictures(prompt)):
                compact = encode(rendered)
        if not ids:
            raise ModelError(f"{source} has no tokens: {prompt!r}. A prompt needs at least one")
        if self.context_length is not None and len(ids) + max_tokens > self.context_length:
            described = ", with the descriptions of its tools," if tools else ""
            limits = f"the {self.context_length} positions of {self.name!r}"
            excess = f"{described} and max_tokens is {max_tokens}: together more than {limits}. Shorten it, or lower --max-tokens"
            if not max_tokens:
                excess = f"{described.rstrip(',')}: more than {limits}. Shorten it"
            raise PromptTooLongError(f"{source} has {len(ids)} tokens{excess}. It begins: {str(prompt)[:80]!r}")
        return self.with_media(ids, compact, () if isinstance(prompt, str) else prompt, source)

    def encode_unanswered(
        self, prompt: str | Sequence[Message], source: str = "a prompt", tools: Tools | None = None
    ) -> EncodedText:
        """Encode the prompt of a group of which nothing was sampled, so that it is not trained on: one that leaves no room for a
        completion is its first token."""
        try:
            return self.encode(prompt, 1, source, tools)
        except PromptTooLongError:
            return EncodedText(replace(self, context_length=None).encode(prompt, 0, source, tools).ids[:1])

    def with_media(
        self, ids: Sequence[int], compact: Sequence[int] | None, messages: Sequence[Message], source: str
    ) -> EncodedText:
        """Add the pictures of some messages to the ids in which their placeholder tokens are."""
        tensor, pictures = torch.tensor(ids, dtype=torch.int64), list(list_pictures(messages))
        if not pictures or self.pictures is None or compact is None:
            return EncodedText(tensor)
        media = self.pictures.media(tensor, pictures, source)
        return EncodedText(tensor, media, torch.tensor(compact, dtype=torch.int64))

    def encode_continuation(
        self,
        so_far: str | Sequence[Message],
        reply: str,
        new: str | Sequence[Message],
        source: str = "a conversation",
        tools: Tools | None = None,
        *,
        end: int | None = ANY_END,
        call_ids: Sequence[str] = (),
    ) -> Continuation:
        """Encode what stands between a sampled turn and the next: prompt + sampled ids + these are the next prompt.

        They are the rendered difference. Decoded, the concatenation is the template's rendering of the conversation, except for
        whitespace around the reply and the end token, which a template may trim or leave out. New messages come from tools and
        environments: control tokens that they spell out are encoded letter by letter.

        Args:
            so_far: The conversation that the reply answers, each earlier reply as its sampled text.
            reply: The sampled turn, decoded without its end token.
            new: Text if the conversation is text, else messages.
            end: The end token that was sampled, which is not repeated; None = the turn was cut off; ANY_END = whichever the
                template writes. Where it writes another than was sampled, such as the next turn's role, that is part of the result.

        Raises:
            DataError: Text continued by messages, or the reverse.
            ModelError: See `render`; or letters that cannot be encoded without a control token.
            HistoryRewrittenError: The template renders earlier turns differently once there are more.
        """
        from policygrad.models.chat.continuation import encode_continuation

        return encode_continuation(self, so_far, reply, new, source, tools, end=end, call_ids=call_ids)

    def encode_rewritten(
        self,
        messages: Sequence[Message],
        opening: int,
        new: int,
        source: str = "a conversation",
        tools: Tools | None = None,
    ) -> tuple[EncodedText, EncodedText]:
        """Encode a conversation whose template rewrites earlier turns.

        Earlier replies are text here, as the template renders them. Control tokens that tools or environments spell out are encoded
        letter by letter, and so are those in replies that the template writes around turns; others, such as `<think>`, stay.

        Args:
            opening: Number of messages in the task's prompt, which are encoded as they are.
            new: Number of messages after the last reply.

        Returns:
            The conversation up to where the assistant's turn begins, and its end, the new messages.

        Raises:
            ModelError: See `encode_continuation`.
        """
        from policygrad.models.chat.continuation import encode_rewritten

        return encode_rewritten(self, messages, opening, new, source, tools)

    def encode_answer(
        self,
        prompt_ids: Tensor,
        prompt: str | Sequence[Message],
        text: str,
        source: str = "an answer",
        tools: Tools | None = None,
    ) -> list[int]:
        """Encode a given answer as if it had been sampled after `prompt_ids`, with an end token.

        Raises:
            ModelError: See `encode_demonstration`.
        """
        from policygrad.models.chat.demonstrations import encode_demonstration

        completion = text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]
        return list(compress(*encode_demonstration(self, prompt_ids.tolist(), prompt, completion, source, tools)))

    def check_tool_use(
        self, prompt: Sequence[Message], tools: Tools, source: str = "a prompt", *, reads_calls: bool = True
    ) -> None:
        """Raise ModelError where the chat template cannot show a call and its result, or calls are not read (`reads_calls`)."""
        from policygrad.models.chat.continuation import check_tool_use

        check_tool_use(self, prompt, tools, source, reads_calls=reads_calls)

    def with_template_options(self, options: Sequence[str]) -> Tokenizer:
        """Return the tokenizer with values of its chat template's variables, NAME=VALUE.

        Raises:
            ConfigError: Options of another form.
            ModelError: A variable that the template does not read.
        """
        parsed = parse_template_options(options)
        check_template_options(self.hf, self.name, parsed)
        return replace(self, template_options=parsed)

    @cached_property
    def chat_format(self) -> ChatFormat:
        """How the model writes its turns: by its tokenizer's `response_template`, or by its chat template."""
        from policygrad.models.chat.formats import find_declared_format

        return find_declared_format(getattr(self.hf, "response_template", None), get_chat_template(self.hf), self.name)

    @property
    def tool_call_parser(self) -> ToolCallParser:
        """Returns the tool calls of a turn's text. Raises ModelError if the format is unknown."""

        def parse_calls(text: str) -> tuple[ToolCall, ...]:
            message = self.chat_format.parse(text)
            if message.unread:
                raise ModelError(message.unread)
            return message.calls

        return parse_calls

    def read_turn(self, text: str, context_ids: Tensor, tools: Tools = ()) -> AssistantMessage:
        """Read the text of a turn, in the model's format, that was sampled after a context [P]."""
        return self.chat_format.parse(text, self.find_opening(context_ids), tools)

    def find_opening(self, context_ids: Tensor) -> str:
        """Return what a context [P] contains already of the turn that goes on there, such as `<think>`."""
        return self.find_opening_text(str(self.hf.decode(context_ids[-_OPENING_TOKENS:], skip_special_tokens=False)))

    def find_opening_text(self, context: str) -> str:
        """Return the same of a rendered context."""
        opening = self.chat_format.find_opening(context)
        ends = map(str, self.hf.convert_ids_to_tokens(sorted(self.end_ids)))
        return "" if any(end in opening for end in ends) else opening  # what follows an earlier turn that has ended

    def save_pretrained(self, folder: str | Path) -> None:
        """Write the tokenizer's files, and those of the processor of a model that sees."""
        self.hf.save_pretrained(folder)
        if self.pictures is not None:
            self.pictures.save(Path(folder))

    def decode(self, tokens: Iterable[int] | Tensor) -> str:
        """Return the text, without end, padding and beginning tokens, and without what stands for pictures.

        Other special tokens stay: `<think>` or `<tool_call>` may be one.
        """
        ids = tokens.tolist() if isinstance(tokens, Tensor) else list(tokens)
        kept = [token for token in ids if token not in self.unread_ids]
        return str(self.hf.decode(kept, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    @cached_property
    def shown_roles(self) -> set[tuple[tuple[str, ...], bool, bool]]:
        """Kinds of continuations that the chat template was seen to show whole: roles, whether after calls, whether with tools."""
        return set()

    @cached_property
    def unread_ids(self) -> frozenset[int]:
        """Tokens that `decode` leaves out."""
        of_pictures = () if self.pictures is None else self.pictures.special_ids
        named = (getattr(self.hf, name, None) for name in ("pad_token_id", "bos_token_id", "eos_token_id"))
        return self.end_ids.union(of_pictures, (token for token in named if token is not None))


def pad_token_id(tokenizer: Tokenizer) -> int:
    """Return the padding token, or an end token if there is none (padded positions are never read)."""
    pad = tokenizer.hf.pad_token_id
    return int(pad) if pad is not None else min(tokenizer.end_ids)


def load_tokenizer(model: str | object, network: nn.Module, *, trust_remote_code: bool = False) -> Tokenizer:
    """Load the tokenizer of a model by name, or wrap a transformers tokenizer.

    Raises:
        ModelError: No tokenizer, more tokens than the model has embeddings for, or no end token.
    """
    generation: Any = getattr(network, "generation_config", None)
    # ends written down for generation with this model, not the defaults of its configuration's class
    declared = [] if getattr(generation, "_from_model_config", True) else [generation.eos_token_id]
    pictures: PictureProcessor | None = None
    if isinstance(model, str):
        path, name = resolve_model(model), model
        base = adapter_base(path)
        tokenizer_path = path if base is None or (Path(path) / "tokenizer_config.json").is_file() else base
        try:
            tokenizer = load_pretrained_tokenizer(tokenizer_path, trust_remote_code)
        except Exception as error:  # the class depends on what is wrong with which file
            files = "tokenizer.json and tokenizer_config.json"
            raise load_error(f"the tokenizer of {model!r}", error, files, tokenizer_path) from error
        declared = [*_read_end_ids(path), *(_read_end_ids(base) if base else ()), *declared]
        if placeholder_id(network) is not None:
            from policygrad.models.vision import load_processor

            pictures = load_processor(tokenizer_path, network, tokenizer, name, trust_remote_code)
    elif hasattr(model, "image_processor") and hasattr(model, "tokenizer"):
        tokenizer = model.tokenizer
        name = str(getattr(tokenizer, "name_or_path", "") or type(model).__name__)
        from policygrad.models.vision import wrap_processor

        pictures = wrap_processor(model, network, name)
    elif callable(model) and hasattr(model, "decode") and hasattr(model, "eos_token_id"):
        tokenizer, name = model, str(getattr(model, "name_or_path", "") or type(model).__name__)
    else:
        raise ModelError(
            f"a tokenizer is a folder, a hub id, a transformers tokenizer or a processor with one, not {type(model).__name__}"
        )
    if pictures is not None and isinstance(getattr(pictures.hf, "chat_template", None), str):
        tokenizer.chat_template = pictures.hf.chat_template  # which places pictures
    check_vocabulary(tokenizer, network, name)
    ends: set[Any] = set()
    for ids in (tokenizer.eos_token_id, *declared):
        ends.update(ids if isinstance(ids, (list, tuple)) else [] if ids is None else [ids])
    if odd := [token for token in ends if not isinstance(token, int) or isinstance(token, bool)]:
        raise ModelError(
            f"an end token of {name!r} is {odd[0]!r}, not a token id: see eos_token_id in its configuration files"
        )
    if not ends:
        raise ModelError(
            f"neither the tokenizer nor a configuration file of {name!r} names an end token, so no completion could ever end: "
            "set `eos_token` in its tokenizer_config.json"
        )
    return Tokenizer(tokenizer, frozenset(ends), name, context_length(network), pictures)


def check_vocabulary(tokenizer: Any, network: nn.Module, name: str) -> None:
    """Raise ModelError when a transformers tokenizer has tokens without an embedding in the model."""
    table: Any = network.get_input_embeddings() if hasattr(network, "get_input_embeddings") else None  # type: ignore[operator]
    if table is not None and hasattr(tokenizer, "__len__") and len(tokenizer) > (size := int(table.weight.shape[0])):
        raise ModelError(
            f"the tokenizer {name!r} has {len(tokenizer)} tokens and the model has embeddings for {size}: give the tokenizer that "
            "the model was trained with"
        )


def load_pretrained_tokenizer(path: str, trust: bool) -> Any:
    """Load the tokenizer of the class that the folder names.

    For some model types (qwen2, qwen3_5, qwen3_5_moe) transformers replaces the generic class by one of that type, which
    splits text differently and adds a token, so that ids differ from tokenizer.json. Raises whatever transformers raises.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast
    from transformers.models.auto.tokenization_auto import get_tokenizer_config

    tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=trust)
    if type(tokenizer).__module__.startswith("transformers.models."):
        named = get_tokenizer_config(path).get("tokenizer_class")
        if named in ("PreTrainedTokenizerFast", "TokenizersBackend"):
            return PreTrainedTokenizerFast.from_pretrained(path)
    return tokenizer


def _read_end_ids(path: str) -> Iterator[Any]:
    """Yield `eos_token_id` from the configuration files.

    A loaded configuration may have its class's default instead (2 for a Llama), which is an ordinary token in this vocabulary.
    """
    from transformers.utils.hub import cached_file

    for name in ("config.json", "generation_config.json"):
        file = None
        with suppress(OSError):  # the second is optional
            file = cached_file(path, name)
        if file is None:  # a tokenizer's own folder has no config.json
            continue
        try:
            config = json.loads(Path(str(file)).read_bytes())
        except (ValueError, RecursionError) as error:
            raise ModelError(f"{file} is not JSON ({error}): restore the model's own file") from error
        for section in (config, config.get("text_config") if isinstance(config, dict) else None):
            if isinstance(section, dict):
                yield section.get("eos_token_id")
