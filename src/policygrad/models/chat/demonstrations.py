"""Demonstrations as token ids: each turn of the assistant in the context in which it would be sampled, closed by an end token."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from policygrad.errors import ModelError
from policygrad.models.chat.control_tokens import encode_escaped, escape_special_tokens, make_placeholder
from policygrad.models.chat.declared import REASONING_FIELDS
from policygrad.models.chat.messages import MESSAGE_WEIGHT, HistoryRewrittenError, Message, Tools
from policygrad.models.chat.rendering import encode_text, expand_pictures, render

if TYPE_CHECKING:
    from policygrad.models.tokenizer import Tokenizer

Encoded = tuple[list[int], list[bool]]
"""The ids of a text, and a mask of those that the assistant writes and that are learned."""
_OPENED_THOUGHT = re.compile(r"<think>(\s*)$")
_SHOWN_THOUGHT = re.compile(r"\s*(<think>.*?</think>|</think>)?\s*", re.DOTALL)


def encode_demonstration(
    tokenizer: Tokenizer,
    prompt_ids: list[int],
    prompt: str | Sequence[Message],
    completion: str | Sequence[Message],
    source: str,
    tools: Tools | None = None,
) -> Encoded:
    """Encode a prompt and a given completion as one text of the ids that a policy would have sampled.

    Args:
        completion: Text if the prompt is text, else the messages that follow.

    Raises:
        ModelError: See `encode_demonstration_texts`.
        HistoryRewrittenError: The template renders earlier turns differently once there are more, so that it takes several texts.
    """
    texts = encode_demonstration_texts(tokenizer, prompt_ids, prompt, completion, source, tools)
    if len(texts) > 1:
        raise HistoryRewrittenError(
            f"{source}: the chat template of {tokenizer.name!r} renders earlier messages differently once there is another one, so "
            "the assistant's turns are not in one text: use one answer alone"
        )
    return texts[0]


def encode_demonstration_texts(
    tokenizer: Tokenizer,
    prompt_ids: list[int],
    prompt: str | Sequence[Message],
    completion: str | Sequence[Message],
    source: str,
    tools: Tools | None = None,
) -> list[Encoded]:
    """Encode a demonstration as the texts in which its turns would be sampled.

    It is one text as long as the template only appends. Where it renders earlier turns differently once there are more, as those
    that drop earlier reasoning, the next turn begins another text, like a branch of an episode. An assistant's message of weight 0
    is read and not learned.

    Raises:
        ModelError: The template refuses the messages, begins the assistant's turn differently from the turn that is to be learned,
            or does not close it; or prompt and completion, both text, share a token.
    """
    if isinstance(prompt, str) and isinstance(completion, str):
        return [_encode_text_pair(tokenizer, prompt_ids, prompt, completion, source)]
    assert not isinstance(prompt, str)
    assert not isinstance(completion, str)
    encoder = _TurnEncoder(tokenizer, source, tools)
    texts = list[Encoded]()
    messages: list[Message] = list(prompt)
    ids, is_learned = list(prompt_ids), [False] * len(prompt_ids)
    seen = ""  # the last turn's text with all before it
    for number, message in enumerate(completion):
        if message["role"] == "assistant" and message.get(MESSAGE_WEIGHT, 1):
            before = encoder.render(messages, generation_prompt=True)
            before_ids = encoder.encode(before, messages)
            if before_ids[: len(ids)] != ids and before.startswith(seen) and tokenizer.hf.decode(ids) == seen:
                # the same text, whose tokens would be others where a turn begins or ends: as when sampling, they go on
                before_ids = ids + encoder.encode(before[len(seen) :], ())
            if before_ids[: len(ids)] != ids:
                if not any(is_learned):
                    raise ModelError(
                        f"{source}: the prompt is rendered differently for a demonstration than for sampling"
                    )
                texts.append((ids, is_learned))
                ids, is_learned = before_ids, [False] * len(before_ids)
            is_learned += [False] * (len(before_ids) - len(is_learned))
            turn = encoder.encode_turn(before, before_ids, messages, message, completion[number + 1 : number + 2])
            # the turn up to its last end token: what a template writes after it (a newline) is never sampled
            last = max(i for i, token in enumerate(turn) if token in tokenizer.end_ids)
            ids, is_learned = before_ids + turn, is_learned + [i <= last for i in range(len(turn))]
            seen = encoder.render([*messages, message], generation_prompt=False)
        messages.append(message)
    return [*texts, (ids, is_learned)]


class _TurnEncoder:
    """Renders and encodes one conversation; control tokens that its tools spell out are encoded letter by letter."""

    def __init__(self, tokenizer: Tokenizer, source: str, tools: Tools | None) -> None:
        self.tokenizer, self.source = tokenizer, source
        escaped, self.placeholders = escape_special_tokens(tokenizer.hf, tools or (), make_placeholder(repr(tools)))
        self.tools = escaped or None

    def render(self, messages: Sequence[Message], *, generation_prompt: bool) -> str:
        return render(
            self.tokenizer, messages, generation_prompt=generation_prompt, tools=self.tools, source=self.source
        )

    def encode(self, text: str, messages: Sequence[Message]) -> list[int]:
        expanded = expand_pictures(self.tokenizer, text, messages, self.source)
        return encode_escaped(self.tokenizer.hf, expanded, self.placeholders, self.source)

    def encode_turn(
        self,
        before: str,
        before_ids: list[int],
        messages: Sequence[Message],
        message: Message,
        following: Sequence[Message],
    ) -> list[int]:
        """Return the ids of a turn after `before`, the conversation up to where the assistant's turn begins.

        Args:
            following: The next message, if there is one.

        Raises:
            ModelError: See `encode_demonstration_texts`.
        """
        with_turn = [*messages, message]
        after = self.render(with_turn, generation_prompt=False)
        after_ids = self.encode(after, with_turn)
        if after.startswith(before) and (whole := _restore_thought(after[len(before) :], message)) is not None:
            turn = encode_text(self.tokenizer, whole)
        elif after_ids[: len(before_ids)] == before_ids:
            turn = after_ids[len(before_ids) :]
        elif after.startswith(before):  # the prompt's last token and the turn's first would have been one
            turn = encode_text(self.tokenizer, after[len(before) :])
        elif (text := _continue_thought(before, after, message)) is not None:
            turn = encode_text(self.tokenizer, text)
        else:
            raise ModelError(
                f"{self.source}: the chat template of {self.tokenizer.name!r} begins the assistant's turn differently when it is "
                f"sampled ({before[-40:]!r}) than when it is given, so the model would learn other tokens than it is prompted "
                "with: use a template that begins both in the same way"
            )
        if not self.tokenizer.end_ids.intersection(turn):
            turn = [*turn, self._find_end(with_turn, after, message, following, turn)]
        return turn

    def _find_end(
        self,
        with_turn: Sequence[Message],
        after: str,
        message: Message,
        following: Sequence[Message],
        turn: Sequence[int],
    ) -> int:
        """Return the end token of a template that does not close turns: the token that opens the next one. Raises ModelError."""
        tokenizer = self.tokenizer
        likely = {"role": "tool" if message.get("tool_calls") else "user", "content": "x"}
        probes = [[*with_turn, *(following or [likely])]]
        if not following:
            probes.append([*with_turn, {"role": "user", "content": "x"}])
        for conversation in probes:
            try:
                longer = self.render(conversation, generation_prompt=False)
            except ModelError:  # a template that refuses the next message; the message below says what to do
                continue
            tail = longer[len(after) :].lstrip() if longer.startswith(after) else ""
            for end in sorted(tokenizer.end_ids):
                if tail.startswith(str(tokenizer.hf.convert_ids_to_tokens(end))):
                    return end
        names = ", ".join(tokenizer.hf.convert_ids_to_tokens(sorted(tokenizer.end_ids)))
        raise ModelError(
            f"{self.source}: the chat template of {tokenizer.name!r} does not close the assistant's turn with an end token "
            f"({names}), so the model would not learn to stop: the turn ends {tokenizer.hf.decode(list(turn[-3:]))!r}. Set "
            "`eos_token` in its tokenizer_config.json to the token that closes a turn, or add it in the template"
        )


def _continue_thought(before: str, after: str, message: Mapping[str, Any]) -> str | None:
    """Return what follows `before` where the template opens a thought in it, and shows a given turn without, or otherwise.

    The message's own thought, from its content or a key of its own, is continued as it is written; a turn without one closes the
    thought at once. None = the template does something else.
    """
    opened = _OPENED_THOUGHT.search(before)
    if opened is None or not after.startswith(before[: opened.start()]):
        return None
    shown = after[opened.start() :]
    rest = shown[_SHOWN_THOUGHT.match(shown).end() :]  # type: ignore[union-attr]
    _, inner, end, answer = _split_thought(message)
    given = next((message[key] for key in REASONING_FIELDS if isinstance(message.get(key), str)), "")
    if end:
        lead = f"{inner.lstrip() if opened[1] else inner}{end}"
    elif given.strip():
        lead = f"{given.strip()}\n</think>\n\n"
    else:
        lead = f"{opened[1]}</think>\n\n"
    return lead + rest if rest.startswith(answer.strip()) else None


def _restore_thought(shown: str, message: Mapping[str, Any]) -> str | None:
    """Return a turn with the thought of its content, which the template leaves out; None = it leaves out nothing."""
    thought, inner, end, answer = _split_thought(message)
    if not end or not inner.strip() or inner.strip() in shown or not shown.lstrip().startswith(answer.strip()):
        return None
    return f"{thought}{end}{shown.lstrip()}"


def _split_thought(message: Mapping[str, Any]) -> tuple[str, str, str, str]:
    """Return the thought in a message's content, the same without its `<think>`, what ends it, with the space behind ("" if it has
    none), and the answer."""
    content = message["content"] if isinstance(message["content"], str) else ""
    thought, closed, answer = content.rpartition("</think>")
    inner = thought.partition("<think>")[2] if "<think>" in thought else thought
    space = answer[: len(answer) - len(answer.lstrip())]
    return thought, inner, closed and closed + space, answer


def _encode_text_pair(
    tokenizer: Tokenizer, prompt_ids: list[int], prompt: str, completion: str, source: str
) -> Encoded:
    ids = list(tokenizer.hf(prompt + completion)["input_ids"])
    if len(ids) == len(prompt_ids) or ids[-1] not in tokenizer.end_ids:
        end = tokenizer.hf.eos_token_id
        ids.append(end if end in tokenizer.end_ids else min(tokenizer.end_ids))
    if ids[: len(prompt_ids)] != prompt_ids:
        raise ModelError(
            f"{source}: the tokenizer of {tokenizer.name!r} joins the end of 'prompt' with the beginning of 'completion', so "
            "the model would learn other tokens than it is prompted with: move the space or newline between them from one to "
            f"the other (the prompt ends {prompt[-12:]!r}, the completion begins {completion[:12]!r})"
        )
    return ids, [i >= len(prompt_ids) for i in range(len(ids))]
