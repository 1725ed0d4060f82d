"""Rendering of chat templates is bounded in time and size, and is transformers' own otherwise."""

from __future__ import annotations

from typing import Any

import pytest

from doubles.templates import ENDS, template, tokenizer, tokenizer_with
from policygrad.errors import ModelError
from policygrad.models.chat import bounded_templates
from policygrad.models.chat.bounded_templates import bounded_rendering
from policygrad.models.chat.rendering import render

USER: dict[str, Any] = {"role": "user", "content": "<b>a</b> & 'b'"}
TOOLS = [
    {
        "type": "function",
        "function": {"name": "f", "parameters": {"type": "object", "properties": {"x": {"enum": [1, 2]}}}},
    }
]
TALKS = [
    [USER],
    [USER, {"role": "assistant", "content": "<think>\nhm\n</think>\n\n2"}, USER],
    [USER, {"role": "assistant", "content": "2"}, {"role": "tool", "content": "x"}],
]
SMALL = "{% set a = 'a' * 100000 %}"
BOMBS = {
    "loops": "{% for a in range(9999) %}{% for b in range(9999) %}{% for c in range(9999) %}{% endfor %}{% endfor %}{% endfor %}",
    "letters": "{% set a = 'a' * 999 %}{% for i in a %}{% for j in a %}{% for k in a %}{% endfor %}{% endfor %}{% endfor %}",
    "product": "{{ 'x' * 10000000000 }}",
    "computed": "{% set n = 100000 %}{{ 'x' * (n * n) }}",
    "list": "{{ ([1] * 10000000000) | length }}",
    "power": "{{ 9 ** (9 ** 9) }}",
    "joined": "{% set ns = namespace(s='xx') %}{% for i in range(60) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
    "added": "{% set ns = namespace(s=[1]) %}{% for i in range(60) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
    "nested": "{% set ns = namespace(s='x') %}{% for i in range(60) %}{% set ns.s = [ns.s, ns.s] %}{% endfor %}{{ ns.s }}",
    "dumped": "{% set ns = namespace(s='x') %}{% for i in range(60) %}{% set ns.s = [ns.s, ns.s] %}{% endfor %}{{ ns.s | tojson }}",
    "filter": "{{ 'x' | center(10000000000) }}",
    "method": "{{ 'x'.ljust(10000000000) }}",
    "indent": "{{ 'a\nb' | indent(10000000000) }}",
    "json": "{{ [1] | tojson(indent=10000000000) }}",
    "format": "{{ '%10000000000d' % 1 }}",
    "format method": "{{ '{:>10000000000}'.format(1) }}",
    "format filter": "{{ '%10000000000d' | format(1) }}",
    "format star": "{{ '%*d' % (10000000000, 1) }}",
    "replace": SMALL + "{{ a | replace('a', a) }}",
    "replace method": SMALL + "{{ a.replace('a', a) }}",
    "join": SMALL + "{{ a | join(a) }}",
    "output": SMALL + "{% for i in range(99999) %}{{ a }}{% endfor %}",
    "block": "{% set z %}{% for i in range(99999) %}{{ 'a' * 100000 }}{% endfor %}{% endset %}",
    "words": "{{ lipsum(n=10000000) }}",
    "for data": "{% if messages | length > 1 %}{{ 'x' * 10000000000 }}{% endif %}",
}


@pytest.mark.parametrize("name", ENDS)
def test_templates_render_as_transformers_renders_them(name: str) -> None:
    hf = tokenizer(name).hf
    for talk in TALKS:
        for tools in (None, TOOLS):
            for prompt in (True, False):

                def text(talk: Any = talk, tools: Any = tools, prompt: Any = prompt) -> str:
                    try:
                        return str(
                            hf.apply_chat_template(talk, tools=tools, tokenize=False, add_generation_prompt=prompt)
                        )
                    except Exception as error:
                        return repr(error)

                plain = text()
                with bounded_rendering():
                    assert text() == plain


def test_loops_and_text_bombs_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those that wait for a second message; and the next template is rendered as ever."""
    monkeypatch.setattr(bounded_templates, "MAX_STEPS", 200_000)
    monkeypatch.setattr(bounded_templates, "MAX_CHARACTERS", 10**7)
    own = tokenizer_with("chatml", ("<|im_end|>",), "<|im_start|>")
    for name, bomb in BOMBS.items():
        own.hf.chat_template = "{{ messages[0].content }}" + bomb
        with pytest.raises(ModelError, match=r"rows\.jsonl:3: the chat template of 'chatml' cannot be rendered: it "):
            render(own, [USER, USER], generation_prompt=True, source="rows.jsonl:3")
        if name == "for data":
            assert render(own, [USER], generation_prompt=True) == USER["content"]
    own.hf.chat_template = "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}"
    with pytest.raises(ModelError, match="recursion"):
        render(own, [USER], generation_prompt=True)
    own.hf.chat_template = template("chatml")
    assert USER["content"] in render(own, [USER] * 50, generation_prompt=True)
