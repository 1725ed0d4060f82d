"""DSPy's ReAct, which asks for calls in fields of text: pip install dspy."""

from pathlib import Path

import dspy


def read_file(path: str) -> str:
    """Read a file."""
    return Path(path).read_text()


def write_file(path: str, text: str) -> str:
    """Write a file."""
    Path(path).write_text(text)
    return "written"


def main(example):
    dspy.configure(lm=dspy.LM("openai/policy", cache=False))  # a cache would answer in place of the policy
    return {"answer": dspy.ReAct("task -> answer", tools=[read_file, write_file])(task=example["prompt"]).answer}
