"""Try chat templates: a prompt, demonstrations, the next turn, a tool's result and a call, with each `*.jinja` of a folder.

    python scripts/measure_templates.py FOLDER [--results FILE]

The templates of today's models are, for example, in TRL's wheel (`pip download --no-deps trl==1.16.0`), in trl/chat_templates.
Files named `*_training` are variants of others with marks around what is to be learned (`{% generation %}`), with which our ids are
compared. The tokenizer is the embedded model's, with the control tokens of the template.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from jinja2 import UndefinedError
from transformers import AutoTokenizer

from policygrad.errors import ModelError
from policygrad.models.chat.continuation import write_turn
from policygrad.models.chat.demonstrations import encode_demonstration_texts
from policygrad.models.chat.formats import supports_tools
from policygrad.models.chat.messages import HistoryRewrittenError
from policygrad.models.chat.turns import AssistantMessage, ToolCall
from policygrad.models.loading import resolve_model
from policygrad.models.tokenizer import Tokenizer

CHECKS = (
    "prompt",
    "one demonstrated turn",
    "two demonstrated turns",
    "learned as TRL's marks say",
    "the user's next turn",
    "a tool's result",
    "a call",
)
REWRITES = "writes earlier turns anew"
"""The result of a template for which a branch begins, or a second text."""
WORKS = "works"
_CONTROL = re.compile(
    r"<[|｜][^<>\s]{1,40}[|｜]>|<\|[a-z_\"]+>|<[a-z_]+\|>|</?(?:start_of_turn|end_of_turn|end_of_utterance|s)>"
)
_ENDS = (
    *(
        "<|im_end|>",
        "<|eot_id|>",
        "<|eot|>",
        "<turn|>",
        "<end_of_turn>",
        "<|return|>",
        "<|call|>",
        "<|observation|>",
        "</s>",
    ),
    *("<｜end▁of▁sentence｜>", "<|END_OF_TURN_TOKEN|>", "<|end|>", "<end_of_utterance>"),
)
_SCHEMA = {
    "name": "read_file",
    "description": "Reads a file.",
    "parameters": {
        "type": "object",
        "properties": {
            "path": {"type": "string", "description": "which"},
            "lines": {"type": "integer", "description": "how many"},
        },
        "required": ["path"],
    },
}
TOOLS = [{"type": "function", "function": _SCHEMA}]
CALL = ToolCall("read_file", {"path": "a.py", "lines": 3})
ASKED = ({"role": "user", "content": "Read a.py, please."},)
SAID = ("Hello to you.", "Now we stop.")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--results", type=Path, help="a JSON file to write, such as docs/results/chat-templates.json")
    options = parser.parse_args()
    files = sorted(f for f in options.folder.glob("*.jinja") if not f.stem.endswith("_training"))
    if not files:
        parser.error(f"{options.folder} has no *.jinja files")
    results = {}
    for file in files:
        marked = file.with_stem(f"{file.stem}_training")
        marks = marked.read_text(encoding="utf-8") if marked.exists() else ""
        results[file.stem] = try_template(file.read_text(encoding="utf-8"), file.stem, marks)
    for name, result in results.items():
        odd = [f"{check}: {outcome}" for check, outcome in result.items() if outcome != WORKS]
        print(f"{name:24s} {'; '.join(odd) or 'all'}")
    for check in CHECKS:
        tried = [result[check] for result in results.values() if check in result]
        print(f"{check}: {tried.count(WORKS)} of {len(tried)}")
    if options.results:
        options.results.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return 0


def try_template(template: str, name: str, marked: str = "") -> dict[str, str]:
    """Return the outcome of each check; those of tools only where the template reads tools, and of marks where there are some."""
    own = wrap(template, name)
    checks: dict[str, Callable[[], str]] = {
        "prompt": lambda: say(len(own.encode(ASKED, 1).ids) > 1, "is empty"),
        "one demonstrated turn": lambda: demonstrate(own, 1),
        "two demonstrated turns": lambda: demonstrate(own, 2),
        **({"learned as TRL's marks say": lambda: compare_marks(own, marked)} if marked else {}),
        "the user's next turn": lambda: go_on(own, "It says x = 1.", {"role": "user", "content": "And b.py?"}, "b.py"),
    }
    if supports_tools(template):
        result = {"role": "tool", "tool_call_id": "c00000000", "name": "read_file", "content": "x = 1"}
        checks |= {
            "a tool's result": lambda: go_on(own, write_call(own), result, "x = 1", TOOLS),
            "a call": lambda: read_call(own),
        }
    return {check: attempt(work) for check, work in checks.items()}


def attempt(work: Callable[[], str]) -> str:
    try:
        return work()
    except HistoryRewrittenError:
        return REWRITES
    except ModelError as error:
        return str(error)


def say(works: bool, otherwise: str) -> str:
    return WORKS if works else otherwise


def demonstrate(own: Tokenizer, turns: int) -> str:
    """Encode answers as supervised fine-tuning does, and see that every one of them is learned."""
    messages = [
        m
        for i in range(turns)
        for m in ({"role": "user", "content": f"Hi {i}."}, {"role": "assistant", "content": SAID[i]})
    ]
    ids = own.encode(messages[:1], 1).ids.tolist()
    texts = encode_demonstration_texts(own, ids, messages[:1], messages[1:], "a row")
    learned = [own.hf.decode([i for i, m in zip(ids, mask, strict=True) if m]) for ids, mask in texts]
    if not all(any(text in part for part in learned) for text in SAID[:turns]):
        return f"learns {learned}"
    return WORKS if len(texts) == 1 else REWRITES


def compare_marks(own: Tokenizer, marked: str) -> str:
    """Compare what is learned of an answer with what a template with marks has transformers learn."""
    messages = [{"role": "user", "content": "Hi."}, {"role": "assistant", "content": SAID[0]}]
    ids = own.encode(messages[:1], 1).ids.tolist()
    ((text, mask),) = encode_demonstration_texts(own, ids, messages[:1], messages[1:], "a row")
    ours = own.hf.decode([i for i, m in zip(text, mask, strict=True) if m])
    try:
        out = own.hf.apply_chat_template(
            messages, chat_template=marked, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
    except UndefinedError:  # a template that takes lists of parts alone
        return "the marked template takes no text"
    theirs = own.hf.decode([i for i, m in zip(out["input_ids"], out["assistant_masks"], strict=True) if m])
    if SAID[0] not in theirs:
        return "the marks leave out the answer"
    before, after = (parts.partition(SAID[0])[::2] for parts in (ours, theirs))
    more = []
    if after[0] != before[0]:
        more.append("other words before the answer than are sampled there")
    if after[1] != before[1]:
        more.append("what follows the end of the turn")
    return " and ".join(more) or WORKS


def go_on(own: Tokenizer, reply: str, new: Mapping[str, Any], said: str, tools: Any = None) -> str:
    """Continue a sampled reply, and see that the model reads what the new message says."""
    added = own.hf.decode(own.encode_continuation(ASKED, reply, [new], "a conversation", tools).ids)
    return say(said in added, f"is lost in {added!r}")


def write_call(own: Tokenizer) -> str:
    """Return what a model of the template would write to call the tool."""
    return write_turn(own, ASKED, AssistantMessage(calls=(CALL,)), TOOLS, "a conversation")


def read_call(own: Tokenizer) -> str:
    text = write_call(own)
    if CALL.name not in text:
        return "shows no calls"
    message = own.chat_format.parse(text, tools=TOOLS)
    return say(message.calls == (CALL,), f"{text!r} is read as {message}")


def wrap(template: str, name: str, hf: Any = None) -> Tokenizer:
    """Return a tokenizer, by default the embedded model's, with a template and the control tokens that it writes."""
    hf = hf or AutoTokenizer.from_pretrained(resolve_model("tiny"))
    ends = [end for end in _ENDS if end in template] or ["<eos>"]
    if "<|return|>" in ends:  # of gpt-oss, whose messages within a turn end with <|end|>
        ends.remove("<|end|>")
    if "<|observation|>" in ends:  # of GLM, whose turns end with the next turn's role
        ends.append("<|user|>")
    hf.add_special_tokens({"additional_special_tokens": [*ends, *sorted(set(_CONTROL.findall(template)) - {*ends})]})
    hf.bos_token = "<bos>"
    hf.chat_template = template
    return Tokenizer(hf, frozenset(hf.convert_tokens_to_ids(ends)), name, None)


if __name__ == "__main__":
    raise SystemExit(main())
