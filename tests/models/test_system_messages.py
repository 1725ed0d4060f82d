"""System messages wherever an agent sends them: none is refused or lost, whatever the chat template does with them."""

from __future__ import annotations

from typing import Any

import pytest

from doubles.templates import tokenizer_with
from policygrad.models.chat.rendering import render
from policygrad.models.tokenizer import Tokenizer

TURN = "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
OPENING = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
LOOP = (
    "{% for m in messages %}{% if CONDITION %}{{ raise_exception('no') }}{% endif %}" + TURN + "{% endfor %}" + OPENING
)
ANYWHERE = LOOP.replace("CONDITION", "false")
FIRST = LOOP.replace("CONDITION", "m.role == 'system' and not loop.first")
"""As Qwen 3.5."""
SILENT = "{% for m in messages %}{% if loop.first or m.role != 'system' %}" + TURN + "{% endif %}{% endfor %}" + OPENING
"""As gpt-oss, which shows the first one alone."""
ALTERNATING = LOOP.replace(
    "CONDITION", "(m.role == 'system' and not loop.first) or (not loop.first and m.role == loop.previtem.role)"
)
CHAT = [
    ("system", "Be brief."),
    ("system", "Be kind."),
    ("user", "Hi"),
    ("system", "You are in /tmp."),
    ("assistant", "Yes?"),
    ("system", "It is late."),
    ("user", "Bye"),
]
JOINED = [("system", "Be brief.\n\nBe kind."), ("user", "Hi"), ("user", "You are in /tmp."), ("assistant", "Yes?")]
FORMS = {
    ANYWHERE: CHAT,
    FIRST: [*JOINED, ("user", "It is late."), ("user", "Bye")],
    SILENT: [*JOINED, ("user", "It is late."), ("user", "Bye")],
    ALTERNATING: [
        JOINED[0],
        ("user", "Hi\n\nYou are in /tmp."),
        ("assistant", "Yes?"),
        ("user", "It is late.\n\nBye"),
    ],
}


def own(template: str) -> Tokenizer:
    result = tokenizer_with("chatml", ("<|im_end|>",))
    result.hf.chat_template = template
    return result


def say(chat: list[tuple[str, str]]) -> list[dict[str, Any]]:
    return [{"role": role, "content": content} for role, content in chat]


@pytest.mark.parametrize(("template", "shown"), FORMS.items(), ids=["anywhere", "first", "silent", "alternating"])
def test_the_first_form_that_the_template_shows_is_taken(template: str, shown: list[tuple[str, str]]) -> None:
    text = render(own(template), say(CHAT), generation_prompt=False)
    assert text == "".join(f"<|im_start|>{role}\n{content}<|im_end|>\n" for role, content in shown)


@pytest.mark.parametrize("template", FORMS, ids=["anywhere", "first", "silent", "alternating"])
def test_a_conversation_goes_on_as_it_is_rendered_whole(template: str) -> None:
    """Codex and Claude Code begin with several, and send more between the turns."""
    tokens = own(template)
    before, reply, after = say(CHAT[:4]), "Yes?", say(CHAT[5:])
    ids = [
        *tokens.encode(before, 1).ids.tolist(),
        *tokens.hf(f"{reply}<|im_end|>", add_special_tokens=False)["input_ids"],
    ]
    ids += tokens.encode_continuation(before, reply, after).ids.tolist()
    assert tokens.hf.decode(ids) == render(tokens, say(CHAT), generation_prompt=True)
