"""Answers to options of TRL, verl and OpenRLHF: the option here that does the same, from foreign_options.toml."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Collection, Sequence
from functools import cache
from importlib.resources import files
from typing import NamedTuple

from policygrad.errors import ConfigError

LIBRARIES = ("TRL", "verl", "OpenRLHF")
_VERL = re.compile(
    r"\+{0,2}((?:actor_rollout_ref|algorithm|critic|custom_reward_function|data|reward_model|trainer)\.[\w.]+)=(.*)"
)


class Equivalent(NamedTuple):
    """The option that replaces one of another library."""

    flag: str  # empty if there is none
    note: str = ""


@cache
def load_foreign_options() -> tuple[dict[str, dict[str, Equivalent]], dict[str, Equivalent]]:
    """Return each library's options, and those that `sft` and `reward-model` answer differently, by name."""
    table = tomllib.loads((files("policygrad.commands") / "foreign_options.toml").read_text(encoding="utf-8"))

    def read(entry: dict[str, str]) -> Equivalent:
        return Equivalent(entry.get("flag", ""), entry.get("note", ""))

    by_library = {lib: {n: read(e) for e in table["option"] for n in e.get(lib, ())} for lib in LIBRARIES}
    return by_library, {name: read(entry) for entry in table["supervised"] for name in entry["names"]}


def reject_foreign_options(
    args: Sequence[str], list_options: Callable[[], Collection[str]], *, supervised: bool = False
) -> None:
    """Reject the options of other libraries, all at once.

    Args:
        list_options: returns the command's own options; called only if there is something to reject.
        supervised: the command is `sft` or `reward-model`.
    """
    matches = []  # (argument, value, equivalents)
    for arg, following in zip(args, [*args[1:], "--"], strict=False):
        if override := _VERL.fullmatch(arg):
            flag, name, value = override[1], override[1], override[2]
        elif arg.startswith("--") and not arg.startswith("--algorithm."):
            flag, equals, value = arg.partition("=")
            name = flag[2:].replace("-", "_")  # as the libraries spell it
            value = value if equals else "" if following.startswith("--") else following
        else:
            continue
        if answers := look_up_option(name, supervised):
            matches.append((flag, value, answers))
    if not matches:
        return
    options = list_options()
    messages = [
        "; ".join(_describe(flag, value, ours, libraries, options, supervised) for ours, libraries in answers.items())
        for flag, value, answers in matches
    ]
    raise ConfigError(messages[0] if len(messages) == 1 else "options of other libraries:\n  " + "\n  ".join(messages))


def look_up_option(name: str, supervised: bool = False) -> dict[Equivalent, list[str]]:
    """Return the equivalents of an option with the libraries that have it; empty if none has."""
    by_library, for_supervised = load_foreign_options()
    answers: dict[Equivalent, list[str]] = {}
    for library, options in by_library.items():
        if name in options:
            answers.setdefault(options[name], []).append(library)
    if not answers and "." in name and "=" not in name and _VERL.fullmatch(f"{name}="):
        answers[Equivalent("", "see `--help`")] = ["verl"]
    if supervised and name in for_supervised:
        return {for_supervised[name]: [library for libraries in answers.values() for library in libraries] or ["TRL"]}
    return answers


def _describe(
    arg: str, value: str, ours: Equivalent, libraries: list[str], options: Collection[str], supervised: bool
) -> str:
    subject = f"{arg} is {' and '.join(libraries)}'s"
    note = f" ({ours.note})" if ours.note else ""
    flags = re.findall(r"--[a-z][\w.-]*[a-z]", ours.flag)
    missing = [flag for flag in flags if flag not in options]
    if not ours.flag:
        return f"{subject}; there is no such option here{note}"
    if supervised and (missing or not flags):
        return f"{subject} and has no meaning here: it belongs to reinforcement learning, `policygrad train`"
    is_single = ours.flag == "".join(flags)
    keeps_value = is_single and not ours.note and value and value.lower() not in ("true", "false")
    parts = [flag for flag in missing if flag.count(".") > 1]
    hint = f"; the algorithm has no part with {' or '.join(parts)}" if parts and is_single else ""
    return f"{subject}; here it is {ours.flag}{f' {value}' if keeps_value else ''}{note}{hint}"
