"""Pydantic AI: pip install 'pydantic-ai-slim[openai]'."""

from pathlib import Path

from pydantic_ai import Agent

AGENT = Agent(instructions="You edit files.")


@AGENT.tool_plain
def read_file(path: str) -> str:
    """Read a file."""
    return Path(path).read_text()


@AGENT.tool_plain
def write_file(path: str, text: str) -> str:
    """Write a file."""
    Path(path).write_text(text)
    return "written"


async def main(example):
    return {"answer": (await AGENT.run(example["prompt"], model="openai-chat:policy")).output}


async def read_events(context, events):
    async for _ in events:
        pass


async def stream(example):
    # run_stream would take text before a call for the answer
    ended = await AGENT.run(example["prompt"], model="openai-chat:policy", event_stream_handler=read_events)
    return {"answer": ended.output}
