"""From another library's options to lines of a `run.toml`: what a library's file is made of, and how it is applied.

A plain option needs its row in foreign_options.toml alone. One whose value is computed, or that acts together with others, is
answered by a rule: a generator that reads the options and yields lines, what is left out, and what only the user knows.
"""

from __future__ import annotations

import fnmatch
import math
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import Any, NamedTuple

from policygrad.commands.foreign_options import Equivalent, load_foreign_options
from policygrad.errors import ConfigError
from policygrad.utils.child_environment import is_secret

CASCADES = ("advantage", "terms", "shaping", "filters", "corrections")
"""Fields of an algorithm that hold a list of parts."""
IMPLIED = "trainer"
"""An option that no file has: which of a library's programs is configured."""
_SAMPLING = ("max_tokens", "temperature", "top_p", "top_k", "decode_rows", "stop")
_PLAIN = re.compile(r"--[a-z][\w.-]*( and --[a-z][\w.-]*)*")


class Setting(NamedTuple):
    """An option of another library that is given."""

    name: str  # as in the tables
    value: Any
    text: str  # as it is written
    line: int = 0  # of the file; 0 = the command line

    @property
    def place(self) -> str:
        """Where it is written, for messages."""
        return f"line {self.line}: {self.text}" if self.line else self.text


class Line(NamedTuple):
    """A line of run.toml."""

    key: str  # dotted; of an algorithm's list of parts, with the part's name: algorithm.terms.KLToReference.beta
    value: Any  # of a key that ends in a part's name, None
    sources: tuple[str, ...] = ()  # options that it is made of
    note: str = ""  # what differs


class Left(NamedTuple):
    """An option that is left out."""

    name: str
    reason: str


class Need(NamedTuple):
    """Something that only the user knows."""

    text: str
    sources: tuple[str, ...] = ()


Outcome = Line | Left | Need


class UnsetVariable(Exception):
    """A value depends on a shell variable that nothing sets."""

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting.text)
        self.setting = setting


@dataclass(frozen=True)
class Options:
    """The options that are given, and the library's own defaults for others that its rules read."""

    library: str
    given: Mapping[str, Setting]
    defaults: Mapping[str, Any]
    rows: int | None = None  # of the training data, if the user tells

    def __contains__(self, name: str) -> bool:
        return name in self.given

    def get(self, name: str) -> Any:
        """Return a value: the given one, or the library's default."""
        return self.given[name].value if name in self.given else self.defaults.get(name)

    def first(self, *names: str) -> str:
        """Return the first of the names that is given; the last one if none is."""
        return next((name for name in names if name in self.given), names[-1])

    def number(self, name: str) -> float:
        """Return a value that has to be a number. Raises ConfigError, or UnsetVariable."""
        value = self.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._explain(name, "a number")
        return value

    def count(self, name: str) -> int:
        """Return a value that has to be a whole number. Raises ConfigError, or UnsetVariable."""
        value = self.number(name)
        if not math.isfinite(value) or value != int(value):
            raise self._explain(name, "a whole number")
        return int(value)

    def positive(self, name: str) -> int:
        """Return a whole number of at least 1. Raises ConfigError, or UnsetVariable."""
        value = self.count(name)
        if value < 1:
            raise self._explain(name, "at least 1")
        return value

    def pair(self, name: str) -> tuple[float, float]:
        """Return two numbers. Raises ConfigError, or UnsetVariable."""
        values = as_list(self.get(name))
        if len(values) != 2 or not all(isinstance(x, int | float) and not isinstance(x, bool) for x in values):
            raise self._explain(name, "two numbers")
        return float(values[0]), float(values[1])

    def flag(self, name: str) -> bool:
        """Return a value that is true or false. Raises ConfigError, or UnsetVariable."""
        value = self.get(name)
        if value in (None, ""):
            return False
        if not isinstance(value, bool | int):
            raise self._explain(name, "true or false")
        return bool(value)

    def text(self, name: str) -> str:
        """Return a value as text; empty if there is none."""
        value = self.get(name)
        return "" if value is None else str(value)

    def number_line(self, key: str, name: str, note: str = "") -> Line:
        """Return the line of an option that is a number and means the same here."""
        return Line(key, float(self.number(name)), (name,), note)

    def count_line(self, key: str, name: str, note: str = "") -> Line:
        """Return the line of an option that is a whole number and means the same here."""
        return Line(key, self.count(name), (name,), note)

    def _explain(self, name: str, kind: str) -> Exception:
        if name not in self.given:
            return ConfigError(f"{self.library}'s {name} is missing, and has no default: add it")
        setting = self.given[name]
        if isinstance(setting.value, str) and "$" in setting.value:
            return UnsetVariable(setting)
        return ConfigError(f"{setting.place}: {name} must be {kind}, not {setting.value!r}: correct it there")


class Rule(NamedTuple):
    """Options that are answered together."""

    text: str  # patterns of their names, with spaces between them
    answer: Callable[[Options], Iterator[Outcome]]

    @property
    def names(self) -> list[str]:
        """The patterns."""
        return self.text.split()


class Library(NamedTuple):
    """Another library."""

    name: str  # as in foreign_options.toml
    defaults: Mapping[str, Any]  # that its rules read
    rules: Sequence[Rule]
    renamed: Mapping[str, str] = {}  # options of other versions -> as in the tables and the rules


@dataclass
class Conversion:
    """What became of another library's options."""

    library: str
    options: Options
    lines: list[Line] = field(default_factory=list)
    left: list[Left] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    needs: list[Need] = field(default_factory=list)

    @property
    def names(self) -> list[str]:
        """The options that are given."""
        return [name for name in self.options.given if name != IMPLIED]

    @property
    def translated(self) -> int:
        """Number of given options that a line is made of, or that only the user can complete."""
        return len({*self._mentioned()} & {*self.names})

    def cite(self, sources: Sequence[str]) -> str:
        """Return the options as they are written, and what is a default of the library."""
        given = [self.options.given[name].text for name in sources if name in self.options.given]
        others = [name for name in sources if name not in self.options.given and name != IMPLIED]
        defaults = [f"{name}={_show(self.options.get(name))}" for name in others]
        if defaults and not given:
            return f"{self.library}'s default: {', '.join(defaults)}"
        return ", ".join(given)

    def _mentioned(self) -> Iterator[str]:
        for line in self.lines:
            yield from line.sources
        for need in self.needs:
            yield from need.sources


def convert_options(library: Library, settings: Sequence[Setting], rows: int | None = None) -> Conversion:
    """Answer every option of another library.

    Args:
        settings: Later ones replace earlier ones of the same name.
        rows: Number of rows of the training data, with which passes over it become steps.

    Raises:
        ConfigError: A value is of the wrong type, or an option that everything depends on has no equivalent.
    """
    given = {}
    for setting in settings:
        name = library.renamed.get(setting.name, setting.name)
        given[name] = setting._replace(name=name)
    done = Conversion(library.name, Options(library.name, given, library.defaults, rows))
    known = load_foreign_options()[0].get(library.name, {})
    answered = {IMPLIED}
    for rule in library.rules:
        own = {name for name in given if any(fnmatch.fnmatchcase(name, pattern) for pattern in rule.names)}
        answered |= own
        done.options = _apply_rule(rule, done)
        mentioned = {*done._mentioned(), *(left.name for left in done.left)}
        for name in given:
            if name in own - mentioned - {IMPLIED}:
                is_known = name in library.defaults or name in known or name in rule.names
                _answer_idle(done, name, is_known)
    done.options = Options(library.name, given, library.defaults, rows)
    for name, setting in given.items():
        if name not in answered:
            _answer_plain(done, setting, known.get(name))
    asked = {name for need in done.needs for name in need.sources}
    for name in dict.fromkeys(name for line in done.lines for name in line.sources if name in given):
        if "$" in str(given[name].value) and name not in asked:
            done.needs.append(_ask_for_variable(given[name]))
    return done


def _apply_rule(rule: Rule, done: Conversion) -> Options:
    """Add what the rule answers. Where a variable is not set, say so, and go on as if the option were not given."""
    options = done.options
    while True:
        try:
            outcomes = list(rule.answer(options))
            break
        except UnsetVariable as unset:
            done.needs.append(_ask_for_variable(unset.setting))
            rest = {key: setting for key, setting in options.given.items() if key != unset.setting.name}
            options = Options(options.library, rest, options.defaults, options.rows)
    for outcome in outcomes:
        if isinstance(outcome, Line):
            done.lines.append(outcome)
        elif isinstance(outcome, Need):
            done.needs.append(outcome)
        else:
            done.left.append(outcome)
    return options


def _answer_idle(done: Conversion, name: str, is_known: bool) -> None:
    """Answer an option that its rule has passed over."""
    reason = "has no effect beside the other options" if is_known else find_reason(done.library, name)
    if reason is None:
        done.unknown.append(name)
    else:
        done.left.append(Left(name, reason))


def _ask_for_variable(setting: Setting) -> Need:
    reference = re.search(r"\$\{?(\w+)", str(setting.value))
    name = reference[1] if reference else "NAME"
    if name == "COMMAND":
        return Need(f"{setting.text}: computed by a command or by code, which is not run", (setting.name,))
    if is_secret(name):
        return Need(
            f"{setting.text}: {name} is not read from the environment, since it is named like a secret", (setting.name,)
        )
    return Need(f"{setting.text}: nothing sets {name}; {name}=… before `policygrad convert` does", (setting.name,))


def _answer_plain(done: Conversion, setting: Setting, row: Equivalent | None) -> None:
    """Answer an option without a rule, from its row or from the list of those that have no equivalent."""
    reason = find_reason(done.library, setting.name)
    if row is not None and row.flag and _PLAIN.fullmatch(row.flag) and row.keeps_value:
        if setting.value is None:
            done.left.append(Left(setting.name, "is left open"))
        else:
            note = row.note
            for flag in row.flag.split(" and "):
                done.lines.append(Line(flag_to_key(flag), setting.value, (setting.name,), note))
                note = ""
    elif row is not None and row.flag:
        note = f" ({row.note})" if row.note else ""
        done.left.append(Left(setting.name, f"here it is {row.flag}{note}"))
    elif row is not None:
        done.left.append(Left(setting.name, row.note))
    elif reason is not None:
        done.left.append(Left(setting.name, reason))
    else:
        done.unknown.append(setting.name)


def flag_to_key(flag: str) -> str:
    """Return the key in run.toml of an option of `train`."""
    key = flag.removeprefix("--").replace("-", "_")
    return f"sampling.{key}" if key in _SAMPLING else key


@cache
def _load_reasons() -> dict[str, list[tuple[str, str]]]:
    data = tomllib.loads((files("policygrad.commands.converters") / "left_out.toml").read_text(encoding="utf-8"))
    return {
        library: [(pattern, row["why"]) for row in rows for pattern in row["options"]] for library, rows in data.items()
    }


def find_reason(library: str, name: str) -> str | None:
    """Return why an option has no equivalent; None if that is not known."""
    return next((why for pattern, why in _load_reasons().get(library, ()) if fnmatch.fnmatchcase(name, pattern)), None)


def ratio_up(whole: int, part: int) -> tuple[int, str]:
    """Return whole / part, rounded up, with what differs if it is rounded."""
    result = -(-whole // part)
    return result, "" if result * part == whole else f"{whole} / {part}, rounded up"


def _show(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


_NUMBER = re.compile(r"[+-]?(\d[\d_]*\.?\d*|\.\d+)([eE][+-]?\d+)?")


def parse_value(text: str) -> Any:
    """Return the value that a command line's text stands for: true, a number, a list, a table, or the text itself."""
    from policygrad.utils.argv import split_outside_brackets

    text = text.strip()
    if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"":
        return text[1:-1]
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    if text.lower() in ("null", "none", "~"):
        return None
    if _NUMBER.fullmatch(text):
        plain = text.replace("_", "")
        return float(plain) if re.search(r"[.eE]", plain) else int(plain)
    if text.startswith("[") and text.endswith("]"):
        return [parse_value(part) for part in split_outside_brackets(text[1:-1]) if part]
    if text.startswith("{") and text.endswith("}"):
        pairs = (part.partition(":") for part in split_outside_brackets(text[1:-1]) if part)
        return {key.strip().strip("'\""): parse_value(value) for key, _, value in pairs}
    return text


def read_flags(words: Sequence[tuple[str, int]]) -> list[Setting]:
    """Return the options of arguments, `--name value …` or `--name=value`; one without a value is true.

    Raises:
        ConfigError: A value stands before the first option.
    """
    settings: list[Setting] = []
    values: list[str] = []
    for word, line in words:
        if word == ";":
            break
        if re.match(r"--?[A-Za-z]", word):
            name, equals, value = word.lstrip("-").partition("=")
            values = [value] if equals else []
            settings.append(Setting(name.replace("-", "_"), True, word, line))
        elif not settings:
            place = f"line {line}: " if line else ""
            raise ConfigError(f"{place}{word!r} stands before the first option: write it as --name value")
        elif word.strip(" ,") and not word.startswith("$@"):
            values.append(word.rstrip(",") if word.endswith(",") else word)
        if values and settings:
            name = settings[-1].name
            value_ = parse_value(values[0]) if len(values) == 1 else [parse_value(item) for item in values]
            text = f"{settings[-1].text.partition(' ')[0].partition('=')[0]} {' '.join(values)}"
            settings[-1] = Setting(name, value_, text, settings[-1].line)
    return settings


def list_lora(rank: int, alpha: int | None = None, targets: Any = None, bits: int | None = None) -> str:
    """Return the text of `learner.lora`."""
    parts = [f"rank={rank}", f"alpha={alpha}" if alpha else "", f"bits={bits}" if bits else ""]
    names = "+".join(str(name).strip("'\", ") for name in as_list(targets))
    return ",".join(part for part in (*parts, f"targets={names}" if names else "") if part)


def name_data(name: str) -> str:
    """Return a data set as `task` names it: a name of the hub after `hf:`, a file or folder as it is."""
    is_file = name.startswith((".", "/", "~", "$", "hf:")) or re.search(r"\.(jsonl?|csv|parquet|arrow)$", name)
    return name if is_file or not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name) else f"hf:{name}"


def as_list(value: Any) -> list[Any]:
    """Return a value as a list; a text may be one with commas."""
    if value is None:
        return []
    return list(value) if isinstance(value, list | tuple) else [value]


def flatten(tables: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted name, value) of nested tables; a list of tables is a value."""
    for key, value in tables.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            yield from flatten(value, f"{name}.")
        else:
            yield name, value
