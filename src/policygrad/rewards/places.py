"""A reward's name, `0.5*mine.py:f if judge:good.md`, with its files looked up in another folder than the current one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from policygrad.rewards.foreign import USUAL, place
from policygrad.rewards.resolve import known, resolve
from policygrad.rewards.spec import parse
from policygrad.rewards.types import Reward

Find = Callable[[str], str]
"""From a file or folder as it is named to where it is."""


def found(name: str, find: Find) -> str:
    """The same reward with every file that `find` knows by its whole path; weight, bounds and gates stay as they are written."""
    done, rest = "", name
    for part in parse(name, known).names:
        before, _, after = rest.partition(part)
        done, rest = done + before + _part(part, find), after
    return done + rest


def called(name: str, find: Find) -> Reward:
    """The reward, from where its files are, under the name that was given: metrics are called after it."""
    return replace(resolve(found(name, find)), name=parse(name, known).title)


def _part(part: str, find: Find) -> str:
    kind, colon, rest = part.partition(":")
    if not colon:
        return part
    if kind == "model":
        return f"model:{find(rest)}"
    if kind == "judge":
        rubric, comma, options = rest.partition(",")
        return f"judge:{find(rubric)}{comma}{options}"
    if kind in USUAL:
        file = place(kind, rest)[0]
        return f"{kind}:{find(file)}{rest.removeprefix(file)}" if file.endswith(".py") else part
    file, _, function = part.rpartition(":")
    return f"{find(file)}:{function}" if file.endswith(".py") else part
