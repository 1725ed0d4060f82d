"""`policygrad convert FILE|COMMAND`: another library's configuration as a run.toml, with where each line comes from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, TypedDict

import tyro

from policygrad.commands.converters.base import Conversion, convert_options
from policygrad.commands.converters.reading import KINDS, Source, read_file, read_words
from policygrad.commands.converters.render import build_run, format_conversion
from policygrad.commands.json_output import print_json, prints
from policygrad.commands.parsing import parse_arguments
from policygrad.errors import ConfigError
from policygrad.training.config.optional_arg import optional_arg
from policygrad.utils.filesystem import write_atomically

HELP = (
    "Write another library's configuration as a run.toml: policygrad convert run_grpo.sh > run.toml, then policygrad train "
    "--config run.toml. Each line says what it is made of; at the end stands what was left out, and why.",
    "It reads a command of verl (python3 -m verl.trainer.main_ppo NAME=VALUE …), OpenRLHF (python3 -m openrlhf.cli.train_ppo_ray "
    "--NAME VALUE …) or TRL (accelerate launch grpo.py --NAME VALUE …, trl grpo --config FILE), a shell script that contains one, "
    "verl's or TRL's YAML, a script of TRL, or prime-rl's TOML.",
)
_WITH_VALUE = ("--output", "--rows", "--command")
_SWITCHES = ("--overwrite", "--json", "--json-schema", "--help", "-h")


@dataclass(frozen=True)
class ConvertOptions:
    """Options of `policygrad convert`."""

    source: Annotated[
        tyro.conf.Positional[tuple[str, ...]], tyro.conf.arg(metavar="FILE|COMMAND", help_behavior_hint="(required)")
    ]
    """A file, or a command with its arguments."""
    output: Annotated[Path | None, optional_arg("FILE", "standard output")] = None
    """Write the configuration to a file."""
    overwrite: bool = False
    """Replace the file of --output."""
    rows: Annotated[int | None, optional_arg("INT", "unknown")] = None
    """Rows of the training data, with which passes over it become steps."""
    command: int = 1
    """Which command of a file with several."""
    json: bool = False
    """Print one JSON object."""

    def __post_init__(self) -> None:
        if self.overwrite and self.output is None:
            raise ConfigError("--overwrite applies to --output: add --output FILE")
        if self.rows is not None and self.rows < 1:
            raise ConfigError(f"--rows must be at least 1, not {self.rows}")


class LeftOut(TypedDict):
    """An option that is left out."""

    option: str
    """As it is written."""
    reason: str


class ConvertOutput(TypedDict):
    """What became of the configuration."""

    library: str
    toml: str
    """For train --config."""
    needs: list[str]
    """What only you know."""
    options: int
    """Options that are given."""
    translated: int
    """Of these, those that a line is made of."""
    left_out: list[LeftOut]
    unknown: list[str]
    """Options without an answer."""


@prints(ConvertOutput)
def convert(args: list[str]) -> int:
    """Run `policygrad convert FILE|COMMAND`."""
    own, words = _split_arguments(args)
    options = parse_arguments(ConvertOptions, [*own, *(["FILE"] if words else [])], "convert", *HELP)
    if not words:
        raise ConfigError(f"nothing is named to convert: give {KINDS}")
    sources = read_sources(words)
    if not 1 <= options.command <= len(sources):
        raise ConfigError(f"--command {options.command}: {words[0]} has {len(sources)}; choose 1 to {len(sources)}")
    source = sources[options.command - 1]
    done, text = convert_source(source, options.rows, len(sources) - 1)
    if options.output is not None:
        if options.output.exists() and not options.overwrite:
            raise ConfigError(f"{options.output} exists: choose another --output, or add --overwrite")
        write_atomically(options.output, text.encode())
    if options.json:
        print_json(_to_json(done, text))
    elif options.output is None:
        print(text, end="")
    else:
        counts = f"{done.translated} of {len(done.names)} options of {done.library}, {len(done.unknown)} unknown"
        print(f"{options.output}: {counts}, {len(done.needs)} to complete (its first lines)")
    return 0


def read_sources(words: Sequence[str]) -> list[Source]:
    """Return the configurations in a file, or the one that a command is. Raises ConfigError."""
    if len(words) == 1 and not words[0].startswith("-") and "=" not in words[0]:
        return read_file(Path(words[0]))
    return [read_words(words)]


def convert_source(source: Source, rows: int | None = None, others: int = 0) -> tuple[Conversion, str]:
    """Return what became of a configuration, and the text of its run.toml, from which a run was built.

    Args:
        others: Number of further commands in the file.

    Raises:
        ConfigError: A value is wrong or has no equivalent, with the option that it comes from.
    """
    try:
        done = convert_options(source.library, source.settings, rows)
    except ConfigError as error:
        raise ConfigError(f"{source.origin}: {error}") from error
    more = f" (of {others + 1}; --command N chooses)" if others else ""
    text = format_conversion(done, f"{source.origin}{more}")
    build_run(text, done)
    return done, text


def _split_arguments(args: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the command's own options, wherever they stand, and what is to be converted."""
    own, words = [], []
    rest = iter(args)
    for word in rest:
        name, equals, _ = word.partition("=")
        if name in _WITH_VALUE:
            own += [word] if equals else [word, *[value for value in [next(rest, None)] if value is not None]]
        elif word in _SWITCHES:
            own.append(word)
        else:
            words.append(word)
    return own, words


def _to_json(done: Conversion, text: str) -> ConvertOutput:
    given = done.options.given
    return {
        "library": done.library,
        "toml": text,
        "needs": [need.text for need in done.needs],
        "options": len(done.names),
        "translated": done.translated,
        "left_out": [
            {"option": given[left.name].text, "reason": left.reason} for left in done.left if left.name in given
        ],
        "unknown": [given[name].text for name in done.unknown],
    }
