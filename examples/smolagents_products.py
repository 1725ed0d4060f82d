"""An agent of smolagents that is trained as it is: it knows nothing of policygrad, whose packages it does not need.

    python smolagents_products.py          writes products.jsonl, the task, and demonstrations.jsonl

smolagents' CodeAgent answers a task with Python code, which it runs. Here a task is a product, such as `23 * 45`. The agent may let
Python compute it, or write a number of its own. docs/agents.md trains it.
"""

import json
import os
from pathlib import Path
from random import Random

import openai.resources.chat  # noqa: F401 - otherwise imported late, and so in every episode: 0.2 s each
from smolagents import CodeAgent, OpenAIServerModel
from smolagents.agents import EMPTY_PROMPT_TEMPLATES

SYSTEM = "Answer in code."
GUESS, COMPUTE = "<code>\nfinal_answer({number})\n</code>", "<code>\nfinal_answer({task})\n</code>"


def main(example):
    """Run the agent on an example of the task; return its reward and its answer."""
    model = OpenAIServerModel(os.environ["POLICYGRAD_MODEL"])  # the client reads OPENAI_BASE_URL and OPENAI_API_KEY
    agent = CodeAgent(
        [], model, prompt_templates={**EMPTY_PROMPT_TEMPLATES, "system_prompt": SYSTEM}, max_steps=2, verbosity_level=0
    )
    answer = agent.run(example["prompt"])
    return {"reward": float(answer == example["answer"]), "answer": str(answer)}


def write(count=3000):
    """Write the task and its demonstrations, in the words that CodeAgent sends: every other one lets Python compute."""
    random, task, demonstrations = Random(0), [], []
    for number in range(count):
        a, b = random.randrange(10, 100), random.randrange(10, 100)
        prompt = f"{a} * {b}"
        reply = (COMPUTE if number % 2 else GUESS).format(task=prompt, number=random.randrange(100, 9802))
        task.append({"prompt": prompt, "answer": a * b})
        texts = {"system": SYSTEM, "user": f"New task:\n{prompt}", "assistant": reply}
        demonstrations.append({"messages": [{"role": role, "content": text} for role, text in texts.items()]})
    Path("products.jsonl").write_text("\n".join(map(json.dumps, task)))
    Path("demonstrations.jsonl").write_text("\n".join(map(json.dumps, demonstrations)))


if __name__ == "__main__":
    write()
