"""LangChain's agent, a graph of LangGraph: pip install langchain langchain-openai."""

from pathlib import Path

from langchain.agents import create_agent
from langchain_openai import ChatOpenAI


def read_file(path: str) -> str:
    """Read a file."""
    return Path(path).read_text()


def write_file(path: str, text: str) -> str:
    """Write a file."""
    Path(path).write_text(text)
    return "written"


def main(example, streaming=False):
    agent = create_agent(ChatOpenAI(model="policy", streaming=streaming), [read_file, write_file])
    ended = agent.invoke({"messages": [{"role": "user", "content": example["prompt"]}]})
    return {"answer": ended["messages"][-1].text}


def stream(example):
    return main(example, streaming=True)
