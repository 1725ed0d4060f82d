"""Which environment a run uses, and what the adapters to other libraries' environments share."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from policygrad.environments import EnvironmentFactory
from policygrad.environments.agent_program import AgentProgram
from policygrad.environments.base import Observation
from policygrad.environments.games import SelfPlay
from policygrad.errors import ConfigError
from policygrad.tasks.base import Example, Prompt
from policygrad.tasks.verifiers import taskset_module
from policygrad.utils.user_code import load_object

# The prefix of a name, as in `textarena:Wordle-v0`, and the class or function that takes the remainder.
FAMILIES = {
    "gymnasium": "policygrad.environments.gymnasium:GymnasiumText",
    "mcp": "policygrad.environments.mcp:use_mcp_tools",
    "openenv": "policygrad.environments.openenv:OpenEnv",
    "textarena": "policygrad.environments.textarena:use_textarena",
    "verifiers": "policygrad.environments.verifiers:Verifiers",
}
PROGRAM, FUNCTION = "program", "agent"
"""Prefixes of agents: `program:COMMAND` and `agent:FILE.py:NAME`."""
BUILT_IN = {
    "calculator": "policygrad.environments.calculator:CALCULATOR",
    "nim": "policygrad.environments.nim:NIM",
}
TERMINATED, TURNS = "terminated", "turns"
"""Further reasons for an episode's end: the environment's terminal state, the limit on turns."""


def resolve_environment(
    option: Any, argument: EnvironmentFactory | AgentProgram | None = None, variables: Sequence[str] = ()
) -> EnvironmentFactory | AgentProgram | None:
    """Return the environment of a run; None = single-turn.

    Args:
        option: The run's setting, a name or an object.
        argument: The argument of `train`.
        variables: Names of environment variables that an agent's program gets.

    Raises:
        ConfigError: Both are given, no such file or name, an object that creates no environment, a package that is not installed,
            or variables for an environment that is no program.
    """
    environment = _resolve(option, argument)
    if not variables:
        return environment
    if not isinstance(environment, AgentProgram):
        raise ConfigError(
            "--environment.env passes variables to agents' programs (program:…, agent:…), and the environment is none: other "
            "environments run in this process, which has all; a server of tools gets pg.McpTools(variables=…). Leave it out"
        )
    return replace(environment, environment=(*environment.environment, *variables))


def _resolve(
    option: Any, argument: EnvironmentFactory | AgentProgram | None
) -> EnvironmentFactory | AgentProgram | None:
    if option is not None and argument is not None:
        raise ConfigError("environment is set both in the run and as an argument; pass only one")
    if isinstance(option, str) and (parts := split_environment_name(option)) is not None:
        family, name = parts
        if family in (PROGRAM, FUNCTION):
            return AgentProgram(name) if family == PROGRAM else AgentProgram(function=name)
        environment: EnvironmentFactory = load_object(FAMILIES[family], "--environment")(name)
        return environment
    path = BUILT_IN.get(option, option) if isinstance(option, str) else None
    factory = load_object(path, "--environment") if path is not None else argument if option is None else option
    if isinstance(factory, AgentProgram | SelfPlay):
        return factory
    if factory is not None and not callable(factory):
        raise ConfigError(
            f"--environment {path or factory!r} creates no environment: name a class with reset and step, a policygrad.ToolUse, "
            "or a function of an example"
        )
    if isinstance(factory, type):
        for method in ("reset", "step"):
            if not callable(getattr(factory, method, None)):
                raise ConfigError(
                    f"--environment {path or factory.__name__} has no method {method!r}, which an environment needs: write "
                    f"`async def {method}`"
                )
    return factory


def split_environment_name(name: str) -> tuple[str, str] | None:
    """Split `family:name` for the families of other libraries; None for any other name."""
    family, _, target = name.partition(":")
    return (family, target) if family in (*FAMILIES, PROGRAM, FUNCTION) and target else None


def code_references(name: str) -> list[str]:
    """Return the modules, files and addresses that an environment's or a task's name refers to, which need permission.

    Games of TextArena and Gymnasium's own environments need none. `gymnasium:MODULE:ID` imports a module, `verifiers:ID` a
    package, a server of OpenEnv or of the Model Context Protocol sees the model's output. `mcp:COMMAND` and `program:COMMAND` run a
    program: the complete name stands for that.
    """
    parts = split_environment_name(name)
    if parts is None:
        return [name.rpartition(":")[0] or name]
    family, target = parts
    if family == PROGRAM:
        return [name]
    if family == FUNCTION:
        return [target.rpartition(":")[0]]
    if family == "openenv":
        return [to_http_url(target)]
    if family == "mcp":
        return [target if is_http_url(target) else name]
    if family == "verifiers":
        return [taskset_module(target)]
    return [target.partition(":")[0]] if family == "gymnasium" and ":" in target else []


def to_http_url(address: str) -> str:
    """Convert a server's address to http(s): ws://host:port/ becomes http://host:port."""
    url = address.rstrip("/")
    if url.startswith(("ws://", "wss://")):
        return "http" + url.removeprefix("ws")
    return url if "://" in url else f"http://{url}"


def is_http_url(text: str) -> bool:
    """Return True for an address that begins with http:// or https://."""
    return text.startswith(("http://", "https://"))


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
