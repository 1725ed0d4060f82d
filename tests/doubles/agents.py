"""Agents as their authors write them: with the clients of OpenAI and Anthropic, and nothing of policygrad.

Where the client is not what a test is about, plain_agents.py does without one.
"""

from __future__ import annotations

import os

import openai

MODEL = os.environ.get("POLICYGRAD_MODEL", "policy")


def question(example: dict) -> str:
    prompt = example["prompt"]
    return prompt if isinstance(prompt, str) else prompt[-1]["content"]


def ask(messages: list, **options: object) -> str:
    reply = openai.OpenAI(max_retries=0).chat.completions.create(model=MODEL, messages=messages, **options)
    return reply.choices[0].message.content or ""


def two_turns(example: dict) -> float:
    """A question, and another about its answer."""
    messages = [{"role": "user", "content": question(example)}]
    messages.append({"role": "assistant", "content": ask(messages, max_tokens=12)})
    messages.append({"role": "user", "content": "Are you sure?"})
    return float(len(ask(messages, max_tokens=12)) % 2)


def with_helper(example: dict) -> dict:
    """A main conversation, and another with other instructions in between, by Anthropic's client."""
    from anthropic import Anthropic

    client = Anthropic(max_retries=0)

    def answer(messages: list, **options: object) -> str:
        reply = client.messages.create(model=MODEL, max_tokens=8, messages=messages, **options)
        return "".join(block.text for block in reply.content if block.type == "text")

    messages = [{"role": "user", "content": question(example)}]
    plan = answer(messages)
    help_ = answer([{"role": "user", "content": "12 + 7 ="}], system="You help.")
    messages += [{"role": "assistant", "content": plan}, {"role": "user", "content": f"The helper says: {help_}"}]
    return {"reward": 1.0, "answer": answer(messages), "metrics": {"helped": 1}}


async def in_a_coroutine(example: dict) -> str:
    messages = [{"role": "user", "content": question(example)}]
    reply = await openai.AsyncOpenAI(max_retries=0).chat.completions.create(model=MODEL, messages=messages)
    return reply.choices[0].message.content or ""
