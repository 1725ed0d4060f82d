"""Agents as their authors write them: with the clients of OpenAI and Anthropic, and nothing of policygrad."""

from __future__ import annotations

import json
import os
import sys
import time
import urllib.request
from pathlib import Path

import openai

MODEL = os.environ.get("POLICYGRAD_MODEL", "policy")


def question(example: dict) -> str:
    prompt = example["prompt"]
    return prompt if isinstance(prompt, str) else prompt[-1]["content"]


def ask(messages: list, **options: object) -> str:
    reply = openai.OpenAI(max_retries=0).chat.completions.create(model=MODEL, messages=messages, **options)
    return reply.choices[0].message.content or ""


def one_answer(example: dict) -> dict:
    """One question; the reward is whether the answer is right."""
    text = ask([{"role": "user", "content": question(example)}])
    return {"reward": float(f"<answer>{example['answer']}</answer>" in text), "answer": text}


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


def ask_plainly() -> None:
    """One token, with nothing that takes long to import."""
    body = json.dumps({"prompt": "x", "max_tokens": 1}).encode()
    headers = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "Content-Type": "application/json"}
    url = f"{os.environ['OPENAI_BASE_URL']}/completions"
    urllib.request.urlopen(urllib.request.Request(url, body, headers)).read()


def crash(example: dict) -> None:
    ask([{"role": "user", "content": question(example)}], max_tokens=2)
    raise ValueError("the agent is broken")


def hang(example: dict) -> None:
    ask_plainly()
    time.sleep(3600)


def flood(example: dict) -> None:
    ask_plainly()
    while True:
        sys.stdout.write("x" * 65536)


def call_for_ever(example: dict) -> None:
    while True:
        ask([{"role": "user", "content": question(example)}], max_tokens=1)


def call_until_refused(example: dict) -> dict:
    count = 0
    try:
        while True:
            ask([{"role": "user", "content": question(example)}], max_tokens=4)
            count += 1
    except openai.PermissionDeniedError as error:
        return {"reward": float(count), "answer": str(error)}


def tell_columns(example: dict) -> dict:
    """The names of what it was given."""
    ask_plainly()
    return {"reward": 1, "answer": " ".join(sorted(example))}


def say_nothing(example: dict) -> float:
    return 1.0


def wrong_result(example: dict) -> dict:
    ask([{"role": "user", "content": question(example)}], max_tokens=2)
    return {"reward": "much"}


async def in_a_coroutine(example: dict) -> str:
    messages = [{"role": "user", "content": question(example)}]
    reply = await openai.AsyncOpenAI(max_retries=0).chat.completions.create(model=MODEL, messages=messages)
    return reply.choices[0].message.content or ""


if __name__ == "__main__":  # as a program: the question in a file, the result in another
    shown = json.loads(Path(os.environ["POLICYGRAD_EXAMPLE"]).read_text())
    Path("answer.txt").write_text(ask([{"role": "user", "content": question(shown)}]))
    if len(sys.argv) == 1:
        Path(os.environ["POLICYGRAD_RESULT"]).write_text(json.dumps({"reward": 0.5}))
