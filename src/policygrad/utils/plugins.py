"""What other installed packages add to policygrad by name, without a change here. Nothing of theirs is imported before it is used.

A package lists it among its entry points, `KIND.NAME = "module:OBJECT"`:

    [project.entry-points."policygrad.plugins"]
    "environment.maze" = "maze_games:make_maze"
    "engine.fast" = "maze_games.engine:FastSampler"
    "format.maze" = "maze_games.format:MAZE_FORMAT"
    "optimizer.sign" = "maze_games.sign:SIGN_ROW"
    "tracker.board" = "maze_games.board:BoardTracker"
    "algorithm.maze_grpo" = "maze_games.algorithms:MAZE_GRPO"
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib.metadata import entry_points
from typing import Any

from policygrad.errors import ConfigError
from policygrad.utils.user_code import load_object

GROUP = "policygrad.plugins"
KINDS = ("algorithm", "engine", "environment", "format", "optimizer", "tracker")


@dataclass(frozen=True)
class Plugin:
    """One entry of another package."""

    kind: str
    name: str
    target: str
    """module:OBJECT."""
    package: str
    """The package's name and version."""

    @property
    def module(self) -> str:
        """The module that is imported when it is used."""
        return self.target.partition(":")[0]


@cache
def list_plugins() -> tuple[Plugin, ...]:
    """Return what the installed packages add, in the order of kinds and names."""
    plugins = []
    for entry in entry_points(group=GROUP):
        kind, _, name = entry.name.partition(".")
        package = f"{entry.dist.name} {entry.dist.version}" if entry.dist is not None else "?"
        plugins.append(Plugin(kind, name, entry.value, package))
    return tuple(sorted(plugins, key=lambda plugin: (plugin.kind, plugin.name, plugin.package)))


def find_plugin(kind: str, name: str) -> Plugin | None:
    """Return what an installed package adds by this name, or None.

    Raises:
        ConfigError: Two packages use the name.
    """
    plugins = [plugin for plugin in list_plugins() if (plugin.kind, plugin.name) == (kind, name)]
    if len(plugins) > 1:
        packages = " and ".join(plugin.package for plugin in plugins)
        raise ConfigError(f"{kind} {name!r} is added by two installed packages, {packages}: uninstall one of them")
    return plugins[0] if plugins else None


def list_plugin_names(kind: str) -> list[str]:
    """Return the names of one kind."""
    return list(dict.fromkeys(plugin.name for plugin in list_plugins() if plugin.kind == kind))


def load_plugin(plugin: Plugin) -> Any:
    """Import and return it. Raises ConfigError with its package if that fails."""
    return load_object(plugin.target, f"{plugin.kind} {plugin.name!r} of the package {plugin.package}")
