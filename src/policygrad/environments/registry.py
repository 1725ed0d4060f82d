"""Environments of others, each behind one file here: what they are called, and what is said in a conversation with any of them."""

from __future__ import annotations

import re
from typing import Any

from policygrad.environments import EnvironmentFactory
from policygrad.environments.base import Observation
from policygrad.errors import ConfigError
from policygrad.tasks.base import Example, Prompt
from policygrad.tasks.verifiers import taskset_module
from policygrad.utils.user_code import load_object

FAMILIES = {
    "gymnasium": "policygrad.environments.gymnasium:GymnasiumText",
    "openenv": "policygrad.environments.openenv:OpenEnv",
    "textarena": "policygrad.environments.textarena:TextArena",
    "verifiers": "policygrad.environments.verifiers:Verifiers",
}
"""The first word of a name, `textarena:Wordle-v0`, and the class that is given what follows."""
TERMINATED, TURNS = "terminated", "turns"
"""What ends an episode, besides its tokens: the world itself, the number of turns."""


def split_environment_name(name: str) -> tuple[str, str] | None:
    """(family, what follows) of the name of an environment of others; None of any other name."""
    word, _, rest = name.partition(":")
    return (word, rest) if word in FAMILIES and rest else None


def code_references(name: str) -> list[str]:
    """The modules, files and addresses that an environment's or a task's name leads to, for whoever must give leave.

    A game of TextArena, or of Gymnasium's own, is no code of anybody's; `gymnasium:MODULE:ID` imports a module, `verifiers:ID` a
    package, and a server is shown what the model writes.
    """
    found = split_environment_name(name)
    if found is None:
        return [name.rpartition(":")[0] or name]
    word, rest = found
    if word == "openenv":
        return [to_http_url(rest)]
    if word == "verifiers":
        return [taskset_module(rest)]
    return [rest.partition(":")[0]] if word == "gymnasium" and ":" in rest else []


def to_http_url(address: str) -> str:
    """A server's address as one of the web: ws://host:port/ is http://host:port."""
    plain = address.rstrip("/")
    if plain.startswith(("ws://", "wss://")):
        return "http" + plain.removeprefix("ws")
    return plain if "://" in plain else f"http://{plain}"


def initial_observation(example: Example, text: str, instructions: str = "") -> Observation:
    """What an episode begins with: instructions, then the world's own words.

    The example says how: where its prompt is text, as text, and nothing of the prompt is shown; where it is chat messages, as the
    user's, behind the example's system messages.
    """
    whole = "\n".join(part.strip("\n") for part in (instructions, text) if part.strip())
    if isinstance(example.prompt, str):
        return Observation(f"{whole}\n")
    system = tuple(dict(message) for message in example.prompt if message["role"] == "system")
    return Observation((*system, _user(whole)))


def reply_observation(example: Example, text: str) -> Observation:
    """What the world says to a turn, in the way that the episode began."""
    said = text.strip("\n")
    content: Prompt = f"\n{said}\n" if isinstance(example.prompt, str) else (_user(said),)
    return Observation(content)


def _user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def parse_choice(text: str, words: tuple[str, ...], first: int = 0) -> int | None:
    """The number of the action that a turn names, by its word or by its number; None where it names none.

    In square brackets where there are any, and the last one that is named. words: of the actions from number `first` on, "" for
    one without a word.
    """
    bracketed = re.findall(r"\[([^\[\]]*)\]", text)
    said = (bracketed[-1] if bracketed else text).lower()
    known = {word.lower(): first + i for i, word in enumerate(words) if word}
    known |= {str(first + i): first + i for i in range(len(words))}
    longest = sorted(known, key=len, reverse=True)
    pattern = rf"(?<![\w.-])(?:{'|'.join(map(re.escape, longest))})(?![\w-]|\.\d)"
    found = re.findall(pattern, said)
    return known[found[-1]] if found else None


# The environment that a run names, or that is given in Python.

BUILT_IN = {"calculator": "policygrad.environments.calculator:CALCULATOR"}


def resolve_environment(option: Any, argument: EnvironmentFactory | None = None) -> EnvironmentFactory | None:
    """option: the run's, a name or an object; given: the argument of `train`. None = the prompt and one answer.

    Raises:
        ConfigError: both; no such file or name; what makes no environment; a package that is not installed.
    """
    if option is not None and argument is not None:
        raise ConfigError("the run has an environment and another one is given: leave one of the two away")
    if isinstance(option, str) and (of_others := split_environment_name(option)) is not None:
        word, rest = of_others
        made: EnvironmentFactory = load_object(FAMILIES[word], "--environment")(rest)
        return made
    name = BUILT_IN.get(option, option) if isinstance(option, str) else None
    found = load_object(name, "--environment") if name is not None else argument if option is None else option
    if found is not None and not callable(found):
        raise ConfigError(
            f"--environment {name or found!r} makes no environment: name a class with reset and step, a policygrad.ToolUse, or "
            "a function of an example"
        )
    if isinstance(found, type):
        for method in ("reset", "step"):
            if not callable(getattr(found, method, None)):
                raise ConfigError(
                    f"--environment {name or found.__name__} has no method {method!r}, which an environment has: write "
                    f"`async def {method}`"
                )
    return found
