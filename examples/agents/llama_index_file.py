"""LlamaIndex's FunctionAgent: pip install llama-index-core llama-index-llms-openai-like."""

import os
from pathlib import Path

from llama_index.core.agent.workflow import FunctionAgent
from llama_index.llms.openai_like import OpenAILike


def read_file(path: str) -> str:
    """Read a file."""
    return Path(path).read_text()


def write_file(path: str, text: str) -> str:
    """Write a file."""
    Path(path).write_text(text)
    return "written"


async def main(example, streaming=False):
    llm = OpenAILike(
        "policy", api_base=os.environ["OPENAI_BASE_URL"], is_chat_model=True, is_function_calling_model=True
    )
    agent = FunctionAgent(llm=llm, tools=[read_file, write_file], streaming=streaming)
    return {"answer": str(await agent.run(example["prompt"]))}


async def stream(example):
    return await main(example, streaming=True)
