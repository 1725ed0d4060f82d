"""OpenAI's Agents SDK, by the responses API: pip install openai-agents."""

import os
from pathlib import Path

from agents import Agent, Runner, function_tool, set_tracing_disabled

set_tracing_disabled(True)  # traces would be sent to OpenAI


@function_tool
def read_file(path: str) -> str:
    """Read a file."""
    return Path(path).read_text()


@function_tool
def write_file(path: str, text: str) -> str:
    """Write a file."""
    Path(path).write_text(text)
    return "written"


AGENT = Agent("editor", model=os.environ.get("POLICYGRAD_MODEL", "policy"), tools=[read_file, write_file])


async def main(example):
    return {"answer": (await Runner.run(AGENT, example["prompt"])).final_output}


async def stream(example):
    running = Runner.run_streamed(AGENT, example["prompt"])
    async for _ in running.stream_events():
        pass
    return {"answer": running.final_output}
