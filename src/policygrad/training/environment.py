"""The environment that a run names, or that is given in Python."""

from __future__ import annotations

from typing import Any

from policygrad.environments import EnvironmentFactory
from policygrad.environments.others import FAMILIES, family
from policygrad.errors import ConfigError
from policygrad.training.config.own import load_own

BUILT_IN = {"calculator": "policygrad.environments.calculator:CALCULATOR"}


def chosen_environment(option: Any, given: EnvironmentFactory | None = None) -> EnvironmentFactory | None:
    """option: the run's, a name or an object; given: the argument of `train`. None = the prompt and one answer.

    Raises:
        ConfigError: both; no such file or name; what makes no environment; a package that is not installed.
    """
    if option is not None and given is not None:
        raise ConfigError("the run has an environment and another one is given: leave one of the two away")
    if isinstance(option, str) and (of_others := family(option)) is not None:
        word, rest = of_others
        made: EnvironmentFactory = load_own(FAMILIES[word], "--environment")(rest)
        return made
    name = BUILT_IN.get(option, option) if isinstance(option, str) else None
    found = load_own(name, "--environment") if name is not None else given if option is None else option
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
