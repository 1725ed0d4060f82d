"""What adapters to other libraries' environments share: observations in the format of the example, choices that are named."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from policygrad.rollout.environment import Observation
from policygrad.tasks.base import Example, Prompt

TERMINATED, TURNS = "terminated", "turns"
"""Further reasons for an episode's end: the environment's terminal state, the limit on turns."""
Shown = str | tuple[Mapping[str, Any], ...]
"""What an environment shows: text, or parts of a message with pictures."""


def initial_observation(example: Example, shown: Shown, instructions: str = "") -> Observation:
    """Return an episode's first observation: instructions, then what the environment shows.

    The example determines the format. If its prompt is text, so is the observation, and the prompt is not shown; if it is chat
    messages, the observation is a user message after the example's system messages.
    """
    if not isinstance(shown, str):
        before = [{"type": "text", "text": join_texts((instructions,)) + "\n"}] if instructions.strip() else []
        content: Any = (*before, *shown)
    else:
        content = join_texts((instructions, shown))
        if isinstance(example.prompt, str):
            return Observation(f"{content}\n")
    if isinstance(example.prompt, str):  # pictures need messages
        return Observation(({"role": "user", "content": content},))
    system = tuple(dict(message) for message in example.prompt if message["role"] == "system")
    return Observation((*system, {"role": "user", "content": content}))


def join_texts(texts: Iterable[str]) -> str:
    """Join the texts that are not empty, each on its own lines."""
    return "\n".join(text.strip("\n") for text in texts if text.strip())


def reply_observation(example: Example, shown: Shown, *, as_messages: bool = False) -> Observation:
    """Return the environment's reply to a turn, in the format of the first observation.

    `as_messages`: the first observation has pictures, so that it is messages whatever the example's prompt is.
    """
    if not isinstance(shown, str) or as_messages:
        return Observation(({"role": "user", "content": shown},))
    reply = shown.strip("\n")
    content: Prompt = f"\n{reply}\n" if isinstance(example.prompt, str) else ({"role": "user", "content": reply},)
    return Observation(content)


def parse_choice(text: str, names: tuple[str, ...], first: int = 0) -> int | None:
    """Return the number of the last action that a turn names, by name or number, or None.

    If there are square brackets, only the text in the last pair is read. names: those of the actions numbered from `first`, ""
    for an action without a name.
    """
    bracketed = re.findall(r"\[([^\[\]]*)\]", text)
    answer = (bracketed[-1] if bracketed else text).lower()
    actions = {name.lower(): first + i for i, name in enumerate(names) if name}
    actions |= {str(first + i): first + i for i in range(len(names))}
    longest_first = sorted(actions, key=len, reverse=True)
    pattern = rf"(?<![\w.-])(?:{'|'.join(map(re.escape, longest_first))})(?![\w-]|\.\d)"
    matches = re.findall(pattern, answer)
    return actions[matches[-1]] if matches else None
