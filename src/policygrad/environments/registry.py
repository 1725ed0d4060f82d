"""The kinds of environments by name. A row is data: what `FAMILY:NAME` needs is imported when it is used."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from policygrad.errors import ConfigError
from policygrad.rollout.runners import EnvironmentKind, RunsEpisodes, TakesVariables
from policygrad.utils.plugins import find_plugin, load_plugin
from policygrad.utils.user_code import load_object


@dataclass(frozen=True)
class Family:
    """Environments `FAMILY:NAME`."""

    factory: str
    """module:OBJECT of the class or function that takes NAME."""
    find_code: Callable[[str], list[str]]
    """Returns the modules, files and addresses that NAME refers to, which need permission where a file names them."""


def _reference_program(name: str) -> list[str]:
    return [f"program:{name}"]  # the complete name stands for the program


def _reference_file(name: str) -> list[str]:
    return [name.rpartition(":")[0]]


def _reference_module(name: str) -> list[str]:
    return [name.partition(":")[0]] if ":" in name else []  # Gymnasium's own need no permission


def _reference_tools(name: str) -> list[str]:
    return [name if is_http_url(name) else f"mcp:{name}"]


def _reference_rows(name: str) -> list[str]:
    from policygrad.environments.by_row import split_names

    return [reference for part in split_names(name) for reference in code_references(part)]


def _reference_taskset(name: str) -> list[str]:
    from policygrad.tasks.verifiers import taskset_module

    return [taskset_module(name)]


def _reference_harbor(name: str) -> list[str]:
    from policygrad.environments.harbor import list_harbor_code

    return list_harbor_code(name)


FAMILIES = {
    "agent": Family("policygrad.environments.agent_program:use_function", _reference_file),
    "gymnasium": Family("policygrad.environments.gymnasium:GymnasiumText", _reference_module),
    "harbor": Family("policygrad.environments.harbor:use_harbor", _reference_harbor),
    "mcp": Family("policygrad.environments.mcp:use_mcp_tools", _reference_tools),
    "openenv": Family("policygrad.environments.openenv:OpenEnv", lambda name: [to_http_url(name)]),
    "program": Family("policygrad.environments.agent_program:AgentProgram", _reference_program),
    "rows": Family("policygrad.environments.by_row:load_row_environments", _reference_rows),
    "textarena": Family("policygrad.environments.textarena:use_textarena", lambda name: []),
    "verifiers": Family("policygrad.environments.verifiers:Verifiers", _reference_taskset),
}
BUILT_IN = {
    "calculator": "policygrad.environments.calculator:CALCULATOR",
    "nim": "policygrad.environments.nim:NIM",
}


def resolve_environment(
    option: Any, argument: EnvironmentKind | None = None, variables: Sequence[str] = ()
) -> EnvironmentKind | None:
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
    if not isinstance(environment, TakesVariables):
        raise ConfigError(
            "--environment.env passes variables to agents' programs (program:…, agent:…), and the environment is none: other "
            "environments run in this process, which has all; a server of tools gets pg.McpTools(variables=…). Leave it out"
        )
    return environment.with_variables(variables)


def _resolve(option: Any, argument: EnvironmentKind | None) -> EnvironmentKind | None:
    if option is not None and argument is not None:
        raise ConfigError("environment is set both in the run and as an argument; pass only one")
    if isinstance(option, str) and (parts := split_environment_name(option)) is not None:
        family, name = parts
        environment: EnvironmentKind = load_object(FAMILIES[family].factory, "--environment")(name)
        return environment
    if isinstance(option, str) and (plugin := find_plugin("environment", option.partition(":")[0])) is not None:
        _, colon, target = option.partition(":")
        return _check(load_plugin(plugin)(target) if colon else load_plugin(plugin), option)
    path = BUILT_IN.get(option, option) if isinstance(option, str) else None
    factory = load_object(path, "--environment") if path is not None else argument if option is None else option
    return factory if factory is None else _check(factory, path)


def _check(factory: Any, name: str | None) -> EnvironmentKind:
    """Return what is a kind of environment. Raises ConfigError for anything else. name: as it was given, for messages."""
    if isinstance(factory, RunsEpisodes) and not isinstance(factory, type):
        return factory
    if not callable(factory):
        raise ConfigError(
            f"--environment {name or factory!r} creates no environment: name a class with reset and step, a policygrad.ToolUse, "
            "or a function of an example"
        )
    if isinstance(factory, type):
        for method in ("reset", "step"):
            if not callable(getattr(factory, method, None)):
                raise ConfigError(
                    f"--environment {name or factory.__name__} has no method {method!r}, which an environment needs: write "
                    f"`async def {method}`"
                )
    kind: EnvironmentKind = factory
    return kind


def split_environment_name(name: str) -> tuple[str, str] | None:
    """Split `family:name` for the families of other libraries; None for any other name."""
    family, _, target = name.partition(":")
    return (family, target) if family in FAMILIES and target else None


def code_references(name: str) -> list[str]:
    """Return the modules, files and addresses that an environment's or a task's name refers to, which need permission.

    Games of TextArena and Gymnasium's own environments need none. `gymnasium:MODULE:ID` imports a module, `verifiers:ID` a
    package, a server of OpenEnv or of the Model Context Protocol sees the model's output. `mcp:COMMAND` and `program:COMMAND` run a
    program: the complete name stands for that. An environment that an installed package adds is that package's module.
    """
    if (parts := split_environment_name(name)) is not None:
        return FAMILIES[parts[0]].find_code(parts[1])
    if (plugin := find_plugin("environment", name.partition(":")[0])) is not None:
        return [plugin.module]
    return [name.rpartition(":")[0] or name]


def to_http_url(address: str) -> str:
    """Convert a server's address to http(s): ws://host:port/ becomes http://host:port."""
    url = address.rstrip("/")
    if url.startswith(("ws://", "wss://")):
        return "http" + url.removeprefix("ws")
    return url if "://" in url else f"http://{url}"


def is_http_url(text: str) -> bool:
    """Return True for an address that begins with http:// or https://."""
    return text.startswith(("http://", "https://"))
