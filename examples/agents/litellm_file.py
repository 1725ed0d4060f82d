"""A loop of one's own around LiteLLM: pip install litellm."""

import json
import os
from pathlib import Path

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # it would download prices
import litellm

PATH, TEXT = {"path": {"type": "string"}}, {"text": {"type": "string"}}


def describe(name, **properties):
    parameters = {"type": "object", "properties": properties, "required": [*properties]}
    return {"type": "function", "function": {"name": name, "description": name, "parameters": parameters}}


TOOLS = {
    "read_file": lambda path: Path(path).read_text(),
    "write_file": lambda path, text: str(Path(path).write_text(text)),
}
SCHEMAS = [describe("read_file", **PATH), describe("write_file", **PATH, **TEXT)]


def main(example, stream=False):
    messages = [{"role": "user", "content": example["prompt"]}]
    while True:
        reply = litellm.completion("openai/policy", messages, tools=SCHEMAS, stream=stream)
        message = (litellm.stream_chunk_builder([*reply]) if stream else reply).choices[0].message
        messages.append(message)
        if not message.tool_calls:
            return {"answer": message.content}
        for call in message.tool_calls:
            result = TOOLS[call.function.name](**json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})


def stream(example):
    return main(example, stream=True)
