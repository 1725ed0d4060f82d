"""The help of every command, without its parser.

`help.json` holds what the parsers say of every option; `scripts/make_docs.py` writes it, and its check fails where they differ. So
help imports nothing but this. `--help` shows what people set, `--help SECTION` one section of the configuration, `--help all` all.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from policygrad.commands.styled import HEAD, NAME, QUIET, TextRow, get_page_width, print_lines, wrap_rows
from policygrad.errors import ConfigError

HELP_FILE = Path(__file__).with_name("help.json")
HELP_FLAGS = ("-h", "--help")
CHANGEABLE = ("train", "sft", "reward-model", "eval")  # commands whose defaults a file or a run may change
ALL, GENERAL, ALGORITHM = "all", "general", "algorithm"
LONG_PAGE = 40  # options: a page of more shows the main ones, and names the sections
MAIN_OPTIONS = {  # command -> heading -> flags; of a long page without an entry, those of `GENERAL`
    "train": {
        "Model and data": "[ALGORITHM] --model --task --eval-data --reward --environment",
        "Size": "--steps --prompts-per-step --samples-per-prompt --max-tokens --temperature --lr --seed --max-staleness",
        "Machine": "--learner.device --learner.dtype --learner.lora --learner.world-size --sampler.engine",
        "Run": "--output --overwrite --resume --config --dry-run --stop-after --time-limit --checkpoint.every "
        "--checkpoint.keep-best",
        "Measurements": "--evaluation.problems --evaluation.every --evaluation.benchmarks --track --json",
    }
}
NO_DEFAULT = (
    "(default: none)",
    "(default: None)",
    "(default: '')",
    "(default: )",
)  # left out where main options are listed


@dataclass(frozen=True)
class Option:
    """A flag with its other names, or a positional argument."""

    flags: tuple[str, ...]  # empty for a positional argument
    value: str  # what stands for its value; empty for a switch
    text: str  # each line is the end of a sentence
    default: str  # such as "(default: 16)" or "(required)"


@dataclass(frozen=True)
class Section:
    """Options whose flags begin with the section's name, as in the file of options; `GENERAL` = those at its top."""

    name: str
    text: str
    options: tuple[Option, ...]


@dataclass(frozen=True)
class Page:
    """A command's help."""

    command: str
    texts: tuple[str, ...]  # paragraphs
    sections: tuple[Section, ...]


class HelpRequest(SystemExit):
    """Ends parsing because the arguments ask for help; `policygrad.cli` prints it."""

    def __init__(self, page: Page, topic: str | None) -> None:
        super().__init__(0)
        self.page, self.topic = page, topic


def find_help_flag(args: Sequence[str]) -> int | None:
    """Return the index of the first --help or -h before a `--`."""
    for i, word in enumerate(args):
        if word == "--":
            return None
        if word in HELP_FLAGS:
            return i
    return None


def read_topic(args: Sequence[str]) -> str | None:
    """Return SECTION of `--help SECTION`; None without one."""
    i = find_help_flag(args)
    following = args[i + 1 : i + 2] if i is not None else ()
    return None if not following or following[0].startswith("-") else following[0]


def print_stored_help(command: str, args: Sequence[str]) -> bool:
    """Print the help that a command's arguments ask for, if it is stored: where no other argument changes it."""
    if (i := find_help_flag(args)) is None:
        return False
    topic = read_topic(args)
    before, after = list(args[:i]), args[i + 1 + (topic is not None) :]
    if command == "lab" and before[:1] == ["control"]:
        command = "lab control"
    row = before.pop() if command == "train" and len(before) == 1 else None
    if command in CHANGEABLE and (before or after):
        return False
    page = load_page(command, row)
    if page is not None:
        print_help(page, topic)
    return page is not None


def print_help(page: Page, topic: str | None) -> None:
    """Print a page, or one of its sections. Raises ConfigError for a section that it does not have."""
    print_lines(wrap_rows(format_help(page, topic), get_page_width()))


def load_page(command: str, row: str | None = None) -> Page | None:
    """Return the stored help of a command, of `train` with this algorithm; None if it is none of the package's own."""
    stored = _load_stored()
    entry = stored["commands"][command]
    sections = [
        Section(name, section["text"], tuple(Option(tuple(flags), *texts) for flags, *texts in section["options"]))
        for name, section in entry["sections"].items()
    ]
    if command == "train":
        parts = stored["rows"].get((row or entry["row"]).lower().replace("-", "_"))
        if parts is None:
            return None
        sections += _read_parts(parts)
    return Page(command, tuple(entry["texts"]), tuple(sections))


def list_flags(page: Page) -> list[str]:
    """Return every flag of a command, and its other names."""
    return [flag for section in page.sections for option in section.options for flag in option.flags]


def list_command_flags(command: str) -> list[str]:
    """Return every flag of a command; of `train`, those of the default algorithm."""
    page = load_page(command)
    return [] if page is None else list_flags(page)


def find_parts_with(flag: str) -> tuple[str, list[str]]:
    """Return (field, parts of policygrad's own) that have a flag: of --algorithm.terms.entropy.eta, terms and Entropy."""
    place, _, name = flag.removeprefix(f"--{ALGORITHM}.").rpartition(".")
    stored = _load_stored()
    kinds = dict.fromkeys(row[place][0] for row in stored["rows"].values() if place in row)
    having = [
        kind.partition(" ")[0]
        for kind in kinds
        if any(option == name for option, *_ in stored["parts"][kind]["options"])
    ]
    return place.partition(".")[0], list(dict.fromkeys(having))


def format_help(page: Page, topic: str | None) -> list[TextRow]:
    """Format the main options, or one section, or all. Raises ConfigError for a section that the page does not have."""
    if topic is not None and topic != ALL:
        chosen = [s for s in page.sections if s.name == topic or s.name.startswith(f"{topic}.")]
        if not chosen:
            raise ConfigError(_describe_unknown(page, topic))
        return [row for section in chosen for row in _format_section(section)][1:]
    arguments = "".join(f" {o.value}" for s in page.sections for o in s.options if not o.flags)
    rows = [TextRow((("usage: ", QUIET),), f"policygrad {page.command} [OPTIONS]{arguments}"), TextRow(())]
    rows += [TextRow((), text) for text in page.texts]
    if topic is None and sum(len(s.options) for s in page.sections) > LONG_PAGE:
        return [*rows, *_format_main(page), TextRow(()), *_list_sections(page)]
    return [*rows, *(row for section in page.sections for row in _format_section(section))]


def _format_main(page: Page) -> Iterator[TextRow]:
    by_name = {name: o for s in page.sections for o in s.options for name in o.flags or (o.value,)}
    if (main := MAIN_OPTIONS.get(page.command)) is None:
        main = {"Options": " ".join(name for o in page.sections[0].options for name in (o.flags or (o.value,))[:1])}
    for heading, names in main.items():
        yield TextRow(())
        yield TextRow(((heading, HEAD),))
        for name in names.split():
            option = by_name[name]
            text = re.split(r"(?<=[\w)\]])\.(?=\s)", option.text, maxsplit=1)[0].rstrip(".") + "."
            default = "" if option.default in NO_DEFAULT else option.default
            yield from _format_option(replace(option, flags=option.flags[:1], text=text, default=default))


def _list_sections(page: Page) -> Iterator[TextRow]:
    yield TextRow((("All options of a section", HEAD), (f"  policygrad {page.command} --help SECTION", "")))
    names = _name_sections(page)
    longest = max(map(len, [*names, ALL])) + 4
    for name, text in names.items():
        yield TextRow(((f"  {name}".ljust(longest), NAME),), text)
    yield TextRow(((f"  {ALL}".ljust(longest), NAME),), "every section")


def _name_sections(page: Page) -> dict[str, str]:
    """Return each section that can be asked for, with what stands in it."""
    names = {}
    for s in page.sections:
        first = ", ".join(o.flags[0] for o in s.options if o.flags)
        names[s.name] = s.text or (first if len(first) < 60 else f"{first[:60].rpartition(',')[0]}, …")
    if any(name.startswith(f"{ALGORITHM}.") for name in names):
        names = {name: text for name, text in names.items() if not name.startswith(f"{ALGORITHM}.")}
        names[ALGORITHM] = "The fields of the algorithm's parts; of another one: policygrad train ROW --help algorithm"
    return names


def _describe_unknown(page: Page, topic: str) -> str:
    names = [*_name_sections(page), ALL]
    if len(names) == 2:
        return f"the help of `policygrad {page.command}` has no section {topic!r}: leave it out"
    hint = (
        f"; for the options of {topic} write policygrad train {topic} --help" if topic in _load_stored()["rows"] else ""
    )
    return f"the help of `policygrad {page.command}` has no section {topic!r}: give one of {', '.join(names)}{hint}"


def _format_section(section: Section) -> Iterator[TextRow]:
    yield TextRow(())
    yield TextRow(((section.name, HEAD), (f"  {section.text}" if len(section.text) < 60 else "", QUIET)))
    if len(section.text) >= 60:
        yield TextRow((("  ", ""),), section.text, QUIET)
    for option in section.options:
        yield from _format_option(option)


def _format_option(option: Option) -> Iterator[TextRow]:
    column = 30 if get_page_width() >= 72 else 6
    lead = f"  {', '.join(f'{flag} {option.value}'.rstrip() for flag in option.flags) or option.value}"
    first, *more = f"{option.text} {option.default}".strip().split("\n")
    if len(lead) + 2 > column:
        yield TextRow(((lead, NAME),))
        lead = ""
    yield TextRow(((lead.ljust(column), NAME),), first)
    for line in more:
        yield TextRow(((" " * column, ""),), line)


@cache
def _load_stored() -> dict[str, Any]:
    stored: dict[str, Any] = json.loads(HELP_FILE.read_text(encoding="utf-8"))
    return stored


def _read_parts(parts: Mapping[str, Sequence[str]]) -> Iterator[Section]:
    """Read the sections of an algorithm's parts: place -> (kind of part, default, …)."""
    for place, (kind, *defaults) in parts.items():
        part, name = _load_stored()["parts"][kind], f"{ALGORITHM}.{place}"
        options = (
            Option((f"--{name}.{flag}",), value, text, default)
            for (flag, value, text), default in zip(part["options"], defaults, strict=True)
        )
        yield Section(name, part["text"], tuple(options))
