"""Parsing a command line with tyro, and reading a parser's help as a page."""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeVar

import tyro

from policygrad.commands.help import (
    GENERAL,
    HelpRequest,
    Option,
    Page,
    Section,
    find_help_flag,
    find_parts_with,
    list_command_flags,
    list_flags,
    read_topic,
)
from policygrad.commands.json_output import capture_usage_error
from policygrad.commands.styled import wrap_paragraphs

MAIN_COMMANDS = ("train", "sft", "eval", "serve", "compare", "export")  # whose options people look for elsewhere
AUTO_SWITCHES = ("--learner.compile",)
"""Switches that have a third value, auto."""
_SWITCH_WORDS = {"auto": "auto", "on": "on", "off": "off", "true": "on", "false": "off"}
_MARKERS = (tyro.conf.FlagCreatePairsOff, tyro.conf.AvoidSubcommands, tyro.conf.SuppressFixed)

OptionsT = TypeVar("OptionsT")


def parse_arguments(
    kind: Callable[..., OptionsT], args: Sequence[str], command: str, *texts: str, **settings: Any
) -> OptionsT:
    """Parse the arguments of `policygrad COMMAND`.

    Args:
        texts: Paragraphs of the command's description; by default the docstring of `kind`.
        settings: Further arguments of `tyro.cli`.

    Raises:
        HelpRequest: The arguments have --help.
    """
    texts, args = texts or (" ".join((kind.__doc__ or "").split()),), _write_out_switches(args)
    if find_help_flag(args) is not None:
        raise HelpRequest(read_page(kind, command, *texts, **settings), read_topic(args))
    try:
        with capture_usage_error():
            options: OptionsT = tyro.cli(
                kind,
                args=args,
                prog=f"policygrad {command}",
                description=wrap_paragraphs(*texts),
                config=_MARKERS,
                **settings,
            )
    except SystemExit as end:
        own = list_flags(read_page(kind, command, *texts, **settings)) if end.code else []
        if end.code and (hint := describe_options_elsewhere(args, command, own)):
            print(hint, file=sys.stderr)
            end.add_note(hint)
        raise
    return options


def _write_out_switches(args: Sequence[str]) -> list[str]:
    """Return the arguments with a value after each of AUTO_SWITCHES: alone it means on."""
    written = list[str]()
    for i, word in enumerate(args):
        flag, equals, value = word.partition("=")
        flag = flag.replace("_", "-") if flag.startswith("--") else flag
        negative = next((switch for switch in AUTO_SWITCHES if flag == switch.replace(".", ".no-")), None)
        if negative is not None:
            written += [negative, "off"]
        elif flag in AUTO_SWITCHES:
            is_given = equals or (i + 1 < len(args) and args[i + 1].lower() in _SWITCH_WORDS)
            written += [
                flag,
                *([] if is_given else ["on"]),
                *([_SWITCH_WORDS.get(value.lower(), value)] if equals else []),
            ]
        elif written and written[-1] in AUTO_SWITCHES:
            written.append(_SWITCH_WORDS.get(word.lower(), word))
        else:
            written.append(word)
    return written


def describe_options_elsewhere(args: Sequence[str], command: str, own: Collection[str]) -> str:
    """Return which other commands, or parts of an algorithm, have the options that this one lacks; empty if none has.

    Args:
        own: The command's options; of train, those of the algorithm.
    """
    given = {word.partition("=")[0] for word in args if re.match(r"--[a-z]", word)}
    unknown = sorted(given - {*own})
    lines = []
    for flag in unknown:
        field, parts = find_parts_with(flag) if command == "train" else ("", [])
        if parts:
            lines.append(
                f"{flag} is an option of {' and of '.join(parts)}, which this algorithm does not have: --algorithm.{field} "
                f"{parts[0]} puts it in"
            )
        names = [name for name in MAIN_COMMANDS if name != command and flag in list_command_flags(name)]
        if names:
            lines.append(f"{flag} is an option of {', '.join(f'`policygrad {name}`' for name in names)}")
    return "\n".join(lines)


def list_help_flags(parse_help: Callable[[], object]) -> list[str]:
    """Return every flag of the parser whose help `parse_help` asks for."""
    try:
        parse_help()
    except HelpRequest as request:
        return list_flags(request.page)
    raise AssertionError("no help was asked for")


def read_page(kind: Callable[..., object], command: str, *texts: str, **settings: Any) -> Page:
    """Return the help of the parser that `parse_arguments` would use."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # tyro has no other way to its options than their text
        parser = tyro.extras.get_parser(kind, config=_MARKERS, **settings)
    return Page(command, texts, _read_sections(parser))


def _read_sections(parser: Any) -> tuple[Section, ...]:
    """Sort a parser's options into the sections of the configuration."""
    sections: dict[str, tuple[str, list[Option]]] = {GENERAL: ("", [])}
    for group in parser._action_groups:
        actions = [action for action in group._group_actions if action.dest != "help"]
        for action in actions:
            help_text = action.help or ""
            start = max(help_text.rfind("(default"), help_text.rfind("(required"), 0)
            is_switch = action.nargs == 0
            text, default = help_text[:start].strip(), "" if is_switch else help_text[start:]
            metavar = "" if is_switch else str(action.metavar)
            if any(flag in AUTO_SWITCHES for flag in action.option_strings):
                metavar, default = "{auto,on,off}", default.replace("False", "off").replace("True", "on")
            option = Option(tuple(action.option_strings), metavar, text, default)
            name = _name_section(group.title or "", action.dest, option)
            sections.setdefault(name, (group.description or "", []))[1].append(option)
    for option in [*sections[GENERAL][1]]:  # --task beside --task.fetch
        name = option.flags[0].removeprefix("--") if option.flags else ""
        if name in sections:
            sections[GENERAL][1].remove(option)
            sections[name][1].insert(0, option)
    return tuple(Section(name, text, tuple(options)) for name, (text, options) in sections.items() if options)


def _name_section(title: str, path: str, option: Option) -> str:
    """Return the section of an option: the tyro group's own, its flag's, or that of its field's path."""
    if title.endswith(" options"):
        return title.removesuffix(" options")
    if option.flags and "." in option.flags[0]:
        return option.flags[0].removeprefix("--").rpartition(".")[0]
    folders = [name for name in path.split(".")[:-1] if name not in ("command", "run")]
    return folders[-1] if folders else GENERAL
