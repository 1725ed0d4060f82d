"""Answers to options of TRL, verl, OpenRLHF and prime-rl, and to names that people try from habit: the option here that does the
same, from foreign_options.toml."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Collection, Sequence
from functools import cache
from importlib.resources import files
from typing import Any, NamedTuple

from policygrad.errors import ConfigError

LIBRARIES = ("TRL", "verl", "OpenRLHF", "prime-rl")
_VERL = re.compile(
    r"\+{0,2}((?:actor_rollout_ref|algorithm|critic|custom_reward_function|data|reward_model|trainer)\.[\w.]+)=(.*)"
)


class Equivalent(NamedTuple):
    """The option that replaces one of another library, or a guessed name."""

    flag: str  # empty if there is none; {} stands for the value
    note: str = ""
    keeps_value: bool = True  # whether the value means the same here


@cache
def load_guesses() -> dict[str, Equivalent]:
    """Return the names that people try from habit, with their equivalents."""
    return {
        name: Equivalent(entry.get("flag", ""), entry.get("note", ""), not entry.get("converted", False))
        for entry in _load_table()["guess"]
        for name in entry["names"]
    }


@cache
def load_foreign_options() -> tuple[dict[str, dict[str, Equivalent]], dict[str, Equivalent]]:
    """Return each library's options, and those that `sft` and `reward-model` answer differently, by name."""
    table = _load_table()

    def read(entry: dict[str, Any]) -> Equivalent:
        return Equivalent(entry.get("flag", ""), entry.get("note", ""), entry.get("same_value", "note" not in entry))

    by_library = {lib: {n: read(e) for e in table["option"] for n in e.get(lib, ())} for lib in LIBRARIES}
    return by_library, {name: read(entry) for entry in table["supervised"] for name in entry["names"]}


@cache
def _load_table() -> dict[str, Any]:
    return tomllib.loads((files("policygrad.commands") / "foreign_options.toml").read_text(encoding="utf-8"))


def reject_foreign_options(
    args: Sequence[str], list_options: Callable[[], Collection[str]], *, supervised: bool = False
) -> None:
    """Reject the options of other libraries, and guessed names, all at once.

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
    if len(messages) == 1:
        raise ConfigError(messages[0])
    are_foreign = all(libraries for *_, answers in matches for libraries in answers.values())
    title = "options of other libraries" if are_foreign else "options that have another name here"
    hint = "\n`policygrad convert COMMAND` writes a run.toml from all of them" if are_foreign and not supervised else ""
    raise ConfigError(f"{title}:\n  " + "\n  ".join(messages) + hint)


def look_up_option(name: str, supervised: bool = False) -> dict[Equivalent, list[str]]:
    """Return the equivalents of an option with the libraries that have it, none for a guessed name; empty if it is not known."""
    by_library, for_supervised = load_foreign_options()
    answers: dict[Equivalent, list[str]] = {}
    for library, options in by_library.items():
        if name in options:
            answers.setdefault(options[name], []).append(library)
    if not answers and "." in name and "=" not in name and _VERL.fullmatch(f"{name}="):
        answers[Equivalent("", "see `--help`")] = ["verl"]
    if not answers and not supervised and name in (guesses := load_guesses()):
        answers[guesses[name]] = []
    if supervised and name in for_supervised:
        return {for_supervised[name]: [library for libraries in answers.values() for library in libraries] or ["TRL"]}
    return answers


def _describe(
    arg: str, value: str, ours: Equivalent, libraries: list[str], options: Collection[str], supervised: bool
) -> str:
    note = f" ({ours.note})" if ours.note else ""
    if not ours.flag and not libraries:
        return f"there is no option {arg}: {ours.note}"
    subject = f"{arg} is {' and '.join(libraries)}'s" if libraries else f"there is no option {arg}"
    flags = re.findall(r"--[a-z][\w.-]*[a-z]", ours.flag)
    missing = [flag for flag in flags if flag not in options]
    if not ours.flag:
        return f"{subject}; there is no such option here{note}"
    if supervised and (missing or not flags):
        return f"{subject} and has no meaning here: it belongs to reinforcement learning, `policygrad train`"
    parts = [flag for flag in missing if flag.count(".") > 1]
    is_single = ours.flag == "".join(flags)
    hint = f"; the algorithm has no part with {' or '.join(parts)}" if parts and is_single else ""
    return f"{subject}; here it is {_fill_in(ours, flags, value)}{note}{hint}"


def _fill_in(ours: Equivalent, flags: Sequence[str], value: str) -> str:
    """Return the option with the value that was given, where it takes one that means the same."""
    if "{}" in ours.flag:
        return ours.flag.replace("{}", value or "VALUE")
    takes_value = re.fullmatch(r"--\S+( and --\S+)*", ours.flag) is not None
    if not (takes_value and ours.keeps_value and value and value.lower() not in ("true", "false")):
        return ours.flag
    return re.sub(
        "|".join(re.escape(flag) + r"(?![\w.-])" for flag in flags), lambda found: f"{found[0]} {value}", ours.flag
    )
