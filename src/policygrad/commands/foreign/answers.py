"""An option of another library is answered with ours: whoever comes from TRL, verl or OpenRLHF need not look for it."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence

from policygrad.commands.foreign.meanings import Ours
from policygrad.commands.foreign.openrlhf import OPENRLHF
from policygrad.commands.foreign.supervised import SUPERVISED
from policygrad.commands.foreign.trl import TRL
from policygrad.commands.foreign.verl import VERL
from policygrad.errors import ConfigError

_VERL = re.compile(
    r"\+{0,2}((?:actor_rollout_ref|algorithm|critic|custom_reward_function|data|reward_model|trainer)\.[\w.]+)=(.*)"
)
LIBRARIES = {"TRL": TRL, "verl": VERL, "OpenRLHF": OPENRLHF}
_NO_OPTION = Ours("", "`--help` lists what there is")


def refuse_foreign(args: Sequence[str], known: Callable[[], Collection[str]], *, supervised: bool = False) -> None:
    """Refuses the options of other libraries, all of them at once.

    known: the command's own options, asked for only where there is something to refuse.

    Raises:
        ConfigError: whose each is, what ours is called, and where its meaning differs.
    """
    found = [(word, value, answers(name, supervised)) for word, name, value in _named(args)]
    found = [(word, value, said) for word, value, said in found if said]
    if not found:
        return
    own = known()
    told = [_told(word, value, said, own, supervised) for word, value, said in found]
    raise ConfigError(told[0] if len(told) == 1 else "options of other libraries:\n  " + "\n  ".join(told))


def answers(name: str, supervised: bool = False) -> dict[Ours, list[str]]:
    """What is said to a name -> the libraries that have it. Empty for a name that none of them has."""
    found: dict[Ours, list[str]] = {}
    for library, names in LIBRARIES.items():
        if name in names:
            found.setdefault(names[name], []).append(library)
    if not found and "." in name and "=" not in name and _VERL.fullmatch(f"{name}="):
        found[_NO_OPTION] = ["verl"]
    if supervised and name in SUPERVISED:
        return {SUPERVISED[name]: [library for libraries in found.values() for library in libraries] or ["TRL"]}
    return found


def _named(args: Sequence[str]) -> list[tuple[str, str, str]]:
    """(as written, name in the libraries' spelling, value) of everything that may be an option."""
    found = []
    for i, word in enumerate(args):
        if overridden := _VERL.fullmatch(word):
            found.append((overridden[1], overridden[1], overridden[2]))
        elif word.startswith("--") and not word.startswith("--algorithm."):
            flag, equals, value = word.partition("=")
            after = args[i + 1] if i + 1 < len(args) and not args[i + 1].startswith("--") else ""
            found.append((flag, flag[2:].replace("-", "_"), value if equals else after))
    return found


def _told(word: str, value: str, said: dict[Ours, list[str]], own: Collection[str], supervised: bool) -> str:
    return "; ".join(_answer(word, value, ours, libraries, own, supervised) for ours, libraries in said.items())


def _answer(word: str, value: str, ours: Ours, libraries: list[str], own: Collection[str], supervised: bool) -> str:
    whose = f"{word} is {' and '.join(libraries)}'s"
    note = f" ({ours.note})" if ours.note else ""
    flags = re.findall(r"--[a-z][\w.-]*[a-z]", ours.flag)
    lacks = [flag for flag in flags if flag not in own]
    if not ours.flag:
        return f"{whose}, and there is no such option here{note}"
    if supervised and (lacks or not flags):
        return f"{whose}, and means nothing here: it is of reinforcement learning, `policygrad train`"
    one = ours.flag == "".join(flags)  # an option alone, which takes the value as it is
    same = one and not ours.note and value and value.lower() not in ("true", "false")
    parts = [flag for flag in lacks if flag.count(".") > 1]
    without = f"; the algorithm as it is has no part with {' or '.join(parts)}" if parts and one else ""
    return f"{whose}; here it is {ours.flag}{f' {value}' if same else ''}{note}{without}"
