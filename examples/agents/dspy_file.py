"""DSPy's ReAct, which asks for calls in fields of text: pip install dspy."""

import os
from pathlib import Path

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # LiteLLM would download prices
import dspy


def read_file(path: str) -> str:
    """Read a file."""
    return Path(path).read_text()


def write_file(path: str, text: str) -> str:
    """Write a file."""
    Path(path).write_text(text)
    return "written"


def main(example):
    # a cache would answer in place of the policy; the fallback asks for JSON by force, which is refused
    dspy.configure(lm=dspy.LM("openai/policy", cache=False), adapter=dspy.ChatAdapter(use_json_adapter_fallback=False))
    return {"answer": dspy.ReAct("task -> answer", tools=[read_file, write_file])(task=example["prompt"]).answer}
