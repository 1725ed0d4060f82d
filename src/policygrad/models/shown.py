"""What somebody else wrote, as the token ids that a policy would have sampled: the prompt's own, then the answer's, closed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from policygrad.errors import ModelError
from policygrad.models.chat import ChatTokenizer, Message, grown_ids


def shown_ids(
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
    if len(whole) == len(ids) or whole[-1] not in tokenizer.end:
        whole.append(end_token(tokenizer))
    if whole[: len(ids)] != ids:
        raise ModelError(
            f"{source}: the tokenizer of {tokenizer.name!r} joins the end of 'prompt' with the beginning of 'completion', so "
            "the model would learn other tokens than it is prompted with: move the space or newline between them from one to "
            f"the other (the prompt ends {prompt[-12:]!r}, the completion begins {rest[:12]!r})"
        )
    return whole, [i >= len(ids) for i in range(len(whole))]


def end_token(tokenizer: ChatTokenizer) -> int:
    """The tokenizer's own end token, or the first of those that the model names."""
    own = tokenizer.hf.eos_token_id
    return int(own) if own in tokenizer.end else min(tokenizer.end)


def _chat(
    tokenizer: ChatTokenizer, prompt_ids: list[int], prompt: Sequence[Message], rest: Sequence[Message], source: str
) -> tuple[list[int], list[bool]]:
    """Renders ever longer beginnings of the conversation: before and after each of the assistant's turns."""
    messages: list[Mapping[str, str]] = list(prompt)
    ids, learnt = prompt_ids, [False] * len(prompt_ids)
    for message in rest:
        if message["role"] == "assistant":
            ids = grown_ids(tokenizer, ids, messages, generation_prompt=True, source=source)
            learnt += [False] * (len(ids) - len(learnt))
            ids = grown_ids(tokenizer, ids, [*messages, message], generation_prompt=False, source=source)
            learnt += _said(tokenizer, ids[len(learnt) :], source)
        messages.append(message)
    return ids, learnt


def _said(tokenizer: ChatTokenizer, turn: list[int], source: str) -> list[bool]:
    """The assistant's turn is learnt up to its last end token: what a template writes behind it (a newline) is never sampled."""
    ends = [i for i, token in enumerate(turn) if token in tokenizer.end]
    if not ends:
        closes = tokenizer.hf.decode(turn[-3:])
        known = ", ".join(tokenizer.hf.convert_ids_to_tokens(sorted(tokenizer.end)))
        raise ModelError(
            f"{source}: the chat template of {tokenizer.name!r} does not close the assistant's turn with an end token "
            f"({known}), so the model would not learn to stop: the turn ends {closes!r}. Set `eos_token` in its "
            "tokenizer_config.json to the token that closes a turn, or add it in the template"
        )
    return [i <= ends[-1] for i in range(len(turn))]


def shown_answer(
    tokenizer: ChatTokenizer, prompt_ids: list[int], prompt: str | Sequence[Message], text: str, source: str
) -> list[int]:
    """The answer `text` alone, in the ids that follow the prompt's, its end token the last. Raises as `shown_ids`."""
    rest = text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]
    whole, learnt = shown_ids(tokenizer, prompt_ids, prompt, rest, source)
    return [token for token, said in zip(whole, learnt, strict=True) if said]
