"""Agents of the standard library alone, which start at once: what a client of OpenAI's would send, sent by urllib."""

from __future__ import annotations

import json
import os
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path


def question(example: dict) -> str:
    prompt = example["prompt"]
    return prompt if isinstance(prompt, str) else prompt[-1]["content"]


def send(path: str, body: dict) -> dict:
    headers = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "Content-Type": "application/json"}
    request = urllib.request.Request(f"{os.environ['OPENAI_BASE_URL']}{path}", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)


def ask(messages: list, **options: object) -> str:
    reply = send("/chat/completions", {"model": "policy", "messages": messages, **options})
    return reply["choices"][0]["message"]["content"] or ""


def one_answer(example: dict) -> str:
    return ask([{"role": "user", "content": question(example)}])


def two_turns(example: dict) -> float:
    """A question, and another about its answer."""
    messages = [{"role": "user", "content": question(example)}]
    messages.append({"role": "assistant", "content": ask(messages, max_tokens=12)})
    messages.append({"role": "user", "content": "Are you sure?"})
    return float(len(ask(messages, max_tokens=12)) % 2)


def ask_once() -> None:
    """One token."""
    send("/completions", {"prompt": "x", "max_tokens": 1})


def crash(example: dict) -> None:
    ask_once()
    raise ValueError("the agent is broken")


def hang(example: dict) -> None:
    ask_once()
    time.sleep(3600)


def flood(example: dict) -> None:
    ask_once()
    while True:
        sys.stdout.write("x" * 65536)


def call_for_ever(example: dict) -> None:
    while True:
        ask_once()


def call_until_refused(example: dict) -> dict:
    count = 0
    try:
        while True:
            ask([{"role": "user", "content": question(example)}], max_tokens=4)
            count += 1
    except urllib.error.HTTPError as error:
        return {"reward": float(count), "answer": f"{error.code} {error.read().decode()}"}


def tell_columns(example: dict) -> dict:
    """The names of what it was given."""
    ask_once()
    return {"reward": 1, "answer": " ".join(sorted(example))}


def repeat_prompt(example: dict) -> str:
    """The text that a command finds as its prompt."""
    ask_once()
    return Path(os.environ["POLICYGRAD_PROMPT"]).read_text(encoding="utf-8")


def say_nothing(example: dict) -> float:
    return 1.0


def wrong_result(example: dict) -> dict:
    ask_once()
    return {"reward": "much"}


if __name__ == "__main__":  # as a program: the question in a file, the result in another
    shown = json.loads(Path(os.environ["POLICYGRAD_EXAMPLE"]).read_text())
    Path("answer.txt").write_text(one_answer(shown))
    if "silent" not in sys.argv:
        Path(os.environ["POLICYGRAD_RESULT"]).write_text(json.dumps({"reward": 0.5}))
