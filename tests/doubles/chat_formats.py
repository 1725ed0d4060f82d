"""A short chat template for each format of tool calls, written for the tests: what a model of the format would be prompted with."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from policygrad.models.loading import resolve_model
from policygrad.models.tokenizer import Tokenizer

VALUE = "{{ v if v is string else v | tojson }}"


@dataclass(frozen=True)
class Spelling:
    """How a format writes what a conversation consists of; `c` is a call's function, `m` a message."""

    call: str
    before: str = ""
    """What precedes a turn's first call."""
    between: str = ""
    after: str = ""
    thought: tuple[str, str] = ("<think>\n", "\n</think>\n\n")
    reasoning_key: str = "reasoning_content"
    content: str = "{{ m.content }}"
    user: str = "<|im_start|>user\n{{ m.content }}<|im_end|>\n"
    assistant: str = "<|im_start|>assistant\n"
    end: str = "<|im_end|>"
    call_end: str = ""
    """The token that ends a turn with calls; "" = the same."""
    space: str = "\n"
    """What stands behind a turn."""
    result: str = "<|im_start|>tool\n{{ m.content }}<|im_end|>\n"
    marks: tuple[str, ...] = ()
    """Other control tokens."""

    @property
    def template(self) -> str:
        key, (opened, closed) = self.reasoning_key, map(show, self.thought)
        before, between, after = show(self.before), show(self.between), show(self.after)
        return "".join(
            (
                "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}",
                f"{{% if m.role == 'assistant' %}}{self.assistant}",
                f"{{% if m.{key} %}}{opened}{{{{ m.{key} }}}}{closed}{{% endif %}}",
                f"{{% if m.content %}}{self.content}{{% endif %}}",
                f"{{% if m.tool_calls %}}{before}{{% for t in m.tool_calls %}}{{% set c = t.function %}}",
                f"{{% if not loop.first %}}{between}{{% endif %}}{self.call}{{% endfor %}}{after}",
                f"{self.call_end or self.end}{{% else %}}{self.end}{{% endif %}}{self.space}",
                f"{{% elif m.role == 'tool' %}}{self.result}{{% else %}}{self.user}{{% endif %}}",
                f"{{% endfor %}}{{% if add_generation_prompt %}}{self.assistant}{{% endif %}}",
            )
        )


def show(text: str) -> str:
    """Write a text as a template's expression, which keeps the line breaks behind a block."""
    return f"{{{{ {text!r} }}}}"


def pairs(open_: str, close: str, value: str = VALUE) -> str:
    """Every argument between two texts, which may name its key."""
    return f"{{% for k, v in c.arguments.items() %}}{open_}{value}{close}{{% endfor %}}"


JSON = "{{ c.arguments | tojson }}"
PYTHON = (
    "{{ c.name }}({% for k, v in c.arguments.items() %}"
    "{% if not loop.first %}, {% endif %}{{ k }}={{ v | tojson }}{% endfor %})"
)
SPELLINGS = {
    "hermes": Spelling(
        '<tool_call>\n{"name": {{ c.name | tojson }}, "arguments": {{ c.arguments | tojson }}}\n</tool_call>',
        between="\n",
    ),
    "qwen_xml": Spelling(
        "<tool_call>\n<function={{ c.name }}>\n"
        + pairs("<parameter={{ k }}>\n", "\n</parameter>\n")
        + "</function>\n</tool_call>",
        between="\n",
    ),
    "glm": Spelling(
        "<tool_call>{{ c.name }}\n"
        + pairs("<arg_key>{{ k }}</arg_key>\n<arg_value>", "</arg_value>\n")
        + "</tool_call>",
        before="\n",
        between="\n",
        thought=("\n<think>", "</think>\n"),
        user="<|user|>\n{{ m.content }}",
        assistant="<|assistant|>",
        end="<|user|>",
        call_end="<|observation|>",
        space="",
        result="\n<tool_response>\n{{ m.content }}\n</tool_response>",
        marks=("<|assistant|>",),
    ),
    "harmony": Spelling(
        f" to=functions.{{{{ c.name }}}}<|channel|>commentary json<|message|>{JSON}",
        between="<|start|>assistant",
        thought=("<|channel|>analysis<|message|>", "<|end|><|start|>assistant"),
        reasoning_key="thinking",
        content="<|channel|>final<|message|>{{ m.content }}{% if m.tool_calls %}<|end|><|start|>assistant{% endif %}",
        user="<|start|>user<|message|>{{ m.content }}<|end|>",
        assistant="<|start|>assistant",
        end="<|return|>",
        call_end="<|call|>",
        space="",
        result="<|start|>functions.{{ m.name }} to=assistant<|channel|>commentary<|message|>{{ m.content | tojson }}<|end|>",
        marks=("<|start|>", "<|channel|>", "<|message|>", "<|end|>"),
    ),
    "gemma4": Spelling(
        "<|tool_call>call:{{ c.name }}{{ '{' }}"
        "{% for k, v in c.arguments.items() %}{% if not loop.first %},{% endif %}{{ k }}:"
        '{% if v is string %}<|"|>{{ v }}<|"|>{% else %}{{ v | tojson }}{% endif %}{% endfor %}}<tool_call|>',
        thought=("<|channel>thought\n", "\n<channel|>"),
        reasoning_key="reasoning",
        user="<|turn>user\n{{ m.content }}<turn|>\n",
        assistant="<|turn>model\n",
        end="<turn|>",
        result="<|turn>tool\n{{ m.content }}<turn|>\n",
        marks=("<|turn>", "<|tool_call>", "<tool_call|>", '<|"|>', "<|channel>", "<channel|>"),
    ),
    "deepseek_v3": Spelling(
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{{ c.name }}\n```json\n" + JSON + "\n```<｜tool▁call▁end｜>",
        before="<｜tool▁calls▁begin｜>",
        between="\n",
        after="<｜tool▁calls▁end｜>",
        user="<｜User｜>{{ m.content }}",
        assistant="<｜Assistant｜>",
        end="<｜end▁of▁sentence｜>",
        space="",
        result="<｜tool▁output▁begin｜>{{ m.content }}<｜tool▁output▁end｜>",
        marks=("<｜User｜>", "<｜Assistant｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>"),
    ),
    "deepseek_dsml": Spelling(
        '<｜DSML｜invoke name="{{ c.name }}">\n'
        + pairs('<｜DSML｜parameter name="{{ k }}" string="true">', "</｜DSML｜parameter>\n")
        + "</｜DSML｜invoke>",
        before="<｜DSML｜function_calls>\n",
        between="\n",
        after="\n</｜DSML｜function_calls>",
        user="<｜User｜>{{ m.content }}",
        assistant="<｜Assistant｜>",
        end="<｜end▁of▁sentence｜>",
        space="",
        result="<function_results>{{ m.content }}</function_results>",
        marks=("<｜User｜>", "<｜Assistant｜>"),
    ),
    "kimi_k2": Spelling(
        "<|tool_call_begin|>functions.{{ c.name }}:{{ loop.index0 }}<|tool_call_argument_begin|>"
        + JSON
        + "<|tool_call_end|>",
        before="<|tool_calls_section_begin|>",
        after="<|tool_calls_section_end|>",
        user="<|im_user|>user<|im_middle|>{{ m.content }}<|im_end|>",
        assistant="<|im_assistant|>assistant<|im_middle|>",
        space="",
        result="<|im_system|>tool<|im_middle|>{{ m.content }}<|im_end|>",
        marks=("<|im_user|>", "<|im_middle|>", "<|im_assistant|>", "<|tool_call_begin|>", "<|tool_call_end|>"),
    ),
    "minimax_m2": Spelling(
        '<invoke name="{{ c.name }}">\n' + pairs('<parameter name="{{ k }}">', "</parameter>\n") + "</invoke>",
        before="<minimax:tool_call>\n",
        between="\n",
        after="\n</minimax:tool_call>",
        user="]~b]user\n{{ m.content }}[e~[\n",
        assistant="]~b]ai\n",
        end="[e~[",
        result="]~b]tool\n<response>{{ m.content }}</response>[e~[\n",
        marks=("]~b]", "<minimax:tool_call>", "</minimax:tool_call>"),
    ),
    "atem": Spelling(
        ' to={{ c.name }}<|message|><atem:function_calls>\n<atem:invoke name="{{ c.name }}">\n'
        + pairs('<atem:parameter name="{{ k }}">', "</atem:parameter>\n")
        + "</atem:invoke>\n</atem:function_calls>",
        between="<|eom|><|start|>assistant",
        thought=(" to=self<|message|>", "<|eom|><|start|>assistant"),
        reasoning_key="reasoning",
        content=" to=user<|message|>{{ m.content }}{% if m.tool_calls %}<|eom|><|start|>assistant{% endif %}",
        user="<|start|>user<|message|>{{ m.content }}<|eot|>",
        assistant="<|start|>assistant",
        end="<|eot|>",
        space="",
        result="<|start|>tool {{ m.name }}<|message|>{{ m.content }}<|eot|>",
        marks=("<|start|>", "<|message|>", "<|eom|>"),
    ),
    "mistral": Spelling(
        "[TOOL_CALLS]{{ c.name }}[ARGS]" + JSON,
        thought=("[THINK]", "[/THINK]"),
        user="[INST]{{ m.content }}[/INST]",
        assistant="",
        end="</s>",
        space="",
        result="[TOOL_RESULTS]{{ m.content }}[/TOOL_RESULTS]",
        marks=(
            "[INST]",
            "[/INST]",
            "[TOOL_CALLS]",
            "[ARGS]",
            "[TOOL_RESULTS]",
            "[/TOOL_RESULTS]",
            "[THINK]",
            "[/THINK]",
        ),
    ),
    "command": Spelling(
        '{"tool_call_id": "{{ loop.index0 }}", "tool_name": {{ c.name | tojson }}, "parameters": {{ c.arguments | tojson }}}',
        before="<|START_ACTION|>[",
        between=", ",
        after="]<|END_ACTION|>",
        thought=("<|START_THINKING|>", "<|END_THINKING|>"),
        content="<|START_RESPONSE|>{{ m.content }}<|END_RESPONSE|>",
        user="<|USER_TOKEN|>{{ m.content }}<|END_OF_TURN_TOKEN|>",
        assistant="<|CHATBOT_TOKEN|>",
        end="<|END_OF_TURN_TOKEN|>",
        space="",
        result="<|SYSTEM_TOKEN|>{{ m.content }}<|END_OF_TURN_TOKEN|>",
        marks=("<|USER_TOKEN|>", "<|CHATBOT_TOKEN|>", "<|START_ACTION|>", "<|END_ACTION|>"),
    ),
    "phi4": Spelling(
        '{"name": {{ c.name | tojson }}, "arguments": {{ c.arguments | tojson }}}',
        before="<|tool_call|>[",
        between=", ",
        after="]<|/tool_call|>",
        user="<|user|>{{ m.content }}<|end|>",
        assistant="<|assistant|>",
        end="<|end|>",
        space="",
        result="<|tool_response|>{{ m.content }}<|end|>",
        marks=("<|user|>", "<|assistant|>", "<|tool_call|>", "<|/tool_call|>"),
    ),
    "lfm2": Spelling(
        PYTHON,
        before="<|tool_call_start|>[",
        between=", ",
        after="]<|tool_call_end|>",
        marks=("<|tool_call_start|>", "<|tool_call_end|>"),
    ),
    "olmo3": Spelling(
        PYTHON,
        before="<function_calls>\n",
        between="\n",
        after="\n</function_calls>",
    ),
}


@cache
def tokenizer_of(name: str) -> Tokenizer:
    """The embedded model's tokenizer with a format's template, and its control tokens."""
    from transformers import AutoTokenizer

    spelling = SPELLINGS[name]
    hf = AutoTokenizer.from_pretrained(resolve_model("tiny"))
    ends = [end for end in (spelling.end, spelling.call_end) if end]
    hf.add_special_tokens({"additional_special_tokens": [*ends, *spelling.marks]})
    hf.chat_template = spelling.template
    return Tokenizer(hf, frozenset(hf.convert_tokens_to_ids(ends)), name, None)
