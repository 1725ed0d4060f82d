"""Run a script for TRL as it is: `python -m policygrad.trl SCRIPT [ARGUMENT …]` resolves `import trl` to `policygrad.trl`."""

from __future__ import annotations

import runpy
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from policygrad.errors import PolicygradError

_ALIASES = {
    "trl": "policygrad.trl",
    "trl.rewards": "policygrad.trl.rewards",
    "trl.trainer": "policygrad.trl",
    "trl.trainer.grpo_config": "policygrad.trl",
    "trl.trainer.grpo_trainer": "policygrad.trl",
    "trl.trainer.rloo_config": "policygrad.trl",
    "trl.trainer.rloo_trainer": "policygrad.trl",
    "trl.scripts": "policygrad.trl",
    "trl.scripts.utils": "policygrad.trl",
}
"""Modules of TRL -> where their names are found here."""


class _Alias(ModuleType):
    """A module of TRL's whose names are looked up here when they are used."""

    def __init__(self, name: str, home: str) -> None:
        super().__init__(name)
        self.__path__ = []  # a package, so that its modules can be imported
        self._home = home

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        home = import_module(self._home)
        if not hasattr(home, name):
            raise ImportError(
                f"{self.__name__}.{name} is not in {self._home}, which has {', '.join(home.__all__)}: use TRL for the rest"
            )
        return getattr(home, name)


def install_aliases() -> None:
    """Let `import trl` and its modules that scripts use find the names of `policygrad.trl`."""
    modules = {name: _Alias(name, home) for name, home in _ALIASES.items()}
    for name, module in modules.items():
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(modules[parent], child, module)
    sys.modules.update(modules)


def main() -> None:
    """Run the script that the command line names, with the arguments after it."""
    arguments = sys.argv[1:]
    if not arguments or arguments[0] in ("-h", "--help"):
        print(
            "usage: python -m policygrad.trl SCRIPT [ARGUMENT …]\n\nRuns a script for TRL with policygrad's trainers."
        )
        raise SystemExit(0 if arguments else 2)
    script = Path(arguments[0])
    if not script.is_file():
        raise SystemExit(f"python -m policygrad.trl: there is no file {script}: name a script")
    install_aliases()
    sys.argv = arguments
    sys.path.insert(0, str(script.resolve().parent))
    try:
        runpy.run_path(str(script), run_name="__main__")
    except PolicygradError as error:  # it names what is wrong and the remedy
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(error.code) from None


if __name__ == "__main__":
    main()
