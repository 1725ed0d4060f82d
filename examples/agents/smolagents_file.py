"""smolagents' ToolCallingAgent, whose tools work in the episode's folder: pip install 'smolagents[openai]'."""

import os
from pathlib import Path

from smolagents import OpenAIServerModel, ToolCallingAgent, tool


@tool
def read_file(path: str) -> str:
    """Reads a file.

    Args:
        path: Which file.
    """
    return Path(path).read_text()


@tool
def write_file(path: str, text: str) -> str:
    """Writes a file.

    Args:
        path: Which file.
        text: What it contains.
    """
    Path(path).write_text(text)
    return "written"


def main(example, stream_outputs=False):
    model = OpenAIServerModel(os.environ["POLICYGRAD_MODEL"])
    agent = ToolCallingAgent([read_file, write_file], model, stream_outputs=stream_outputs, verbosity_level=0)
    return {"answer": str(agent.run(example["prompt"]))}


def stream(example):
    return main(example, stream_outputs=True)
