"""Finds out whose configuration a file or a command is, and reads its options."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from policygrad.commands.converters import openrlhf, prime_rl, trl, verl
from policygrad.commands.converters.base import IMPLIED, Library, Setting, flatten, parse_value, read_flags
from policygrad.commands.converters.shell import Word, read_commands
from policygrad.commands.foreign_options import load_foreign_options
from policygrad.errors import ConfigError

KINDS = "a command of verl, OpenRLHF or TRL, a script with one, verl's or TRL's YAML, or prime-rl's TOML"
_VERL = re.compile(r"(^|[./_])main_\w+(\.py)?$")
_OPENRLHF = re.compile(r"(?:^|[./])openrlhf[./]cli[./](\w+?)(\.py)?$")
_OPENRLHF_ELSEWHERE = {
    "train_sft": "policygrad sft --data FILE trains on demonstrations",
    "train_rm": "policygrad reward-model --data FILE trains a reward model",
    "train_kd": "policygrad train distill --teacher MODEL distils",
}


class Source(NamedTuple):
    """A configuration of another library."""

    library: Library
    settings: list[Setting]
    origin: str  # for the first line of what becomes of it


def read_file(path: Path) -> list[Source]:
    """Return the configurations that a file holds, one for each command in it.

    Raises:
        ConfigError: It cannot be read, is of no kind that is known, or holds something that cannot be parsed, with its line.
    """
    text = _read_text(path, f"name {KINDS}")
    try:
        sources = [*_parse_file(path, text)]
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    if not sources:
        raise ConfigError(f"{path} is not recognised: it holds none of {KINDS}")
    return sources


def _read_text(path: Path, remedy: str) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 (byte {error.start}): save it as UTF-8") from error
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}; {remedy}") from error


def _parse_file(path: Path, text: str) -> Iterator[Source]:
    suffix = path.suffix.lower()
    if suffix == ".toml":
        yield _read_toml(path, text)
    elif suffix in (".yaml", ".yml") and (source := _read_yaml(path, text)) is not None:
        yield source
    elif suffix == ".py":
        yield from _read_python(path, text)
    else:
        for command in read_commands(text):
            yield from _find_sources(command, str(path))


def read_words(words: Sequence[str]) -> Source:
    """Return the configuration that a command line is, or its arguments alone. Raises ConfigError if it is of no known kind."""
    command = [Word(word, 0) for word in words]
    for source in _find_sources(command, "a command"):
        return source
    if any(re.match(r"[+~]{0,2}(actor_rollout_ref|algorithm|data|trainer)\.[\w.]+=", word) for word in words):
        return Source(verl.VERL, verl.read_overrides(command), "overrides")
    settings = read_flags(command)
    names = {setting.name for setting in settings}
    known = {library: names & {*options} for library, options in load_foreign_options()[0].items()}
    known["OpenRLHF"] |= names & {*openrlhf.RENAMED, *openrlhf.DEFAULTS}
    library = max(known, key=lambda name: len(known[name]))
    if not known[library]:
        raise ConfigError(f"{' '.join(words)[:80]!r} is not recognised: give {KINDS}")
    if library == "OpenRLHF":
        return Source(openrlhf.OPENRLHF, settings, "arguments")
    if library == "prime-rl":
        return Source(prime_rl.PRIME_RL, settings, "arguments")
    return Source(trl.make_library(_guess_trainer(names, "the arguments")), settings, "arguments")


def _find_sources(command: Sequence[Word], origin: str) -> Iterator[Source]:
    """Yield the configurations in a command; one may stand in quotes, as after `bash -c`."""
    for i, (word, line) in enumerate(command):
        where, rest = (f"{origin}, line {line}" if line else origin), command[i + 1 :]
        if re.search(r"\s", word) and re.search(r"main_\w+|openrlhf|\.py\b", word):
            inner = [[Word(text, line + number - 1) for text, number in words] for words in read_commands(word)]
            found_inside = [source for words in inner for source in _find_sources(words, origin)]
            if not found_inside:
                continue
            yield from found_inside
        elif _VERL.search(word) and any(
            re.match(r"[+~]{0,2}(actor_rollout_ref|algorithm|data)\.", text) for text, _ in rest
        ):
            program = Setting(IMPLIED, word, word, line)
            yield Source(verl.VERL, [program, *verl.read_overrides(rest)], where)
        elif found := _OPENRLHF.search(word):
            if not found[1].startswith("train_ppo"):
                other = _OPENRLHF_ELSEWHERE.get(found[1], "it is not included: use OpenRLHF")
                raise ConfigError(
                    f"{f'line {line}: ' if line else ''}openrlhf.cli.{found[1]} is not a policy gradient: {other}"
                )
            yield Source(openrlhf.OPENRLHF, read_flags(rest), where)
        elif word in ("rl", "trainer", "orchestrator", "inference") and rest and rest[0].text == "@":
            path = Path(rest[1].text) if len(rest) > 1 else Path()
            if path.suffix.lower() != ".toml":
                raise ConfigError(f"{word} @ {path}: prime-rl's configuration is a .toml; name it after @")
            source = read_file(path)[0]
            yield source._replace(settings=[*source.settings, *read_flags(rest[2:])])
        elif (trainer := _find_trl(command, i)) is not None:
            yield _read_trl_command(trainer, command[:i], rest, where)
        else:
            continue
        return


def _find_trl(command: Sequence[Word], i: int) -> str | None:
    """Return the trainer that a word of a command starts: `trl grpo`, a script, a module of TRL."""
    word = command[i].text
    if i > 0 and command[i - 1].text == "trl" and not word.startswith("-"):
        return trl.find_trainer(word)
    if found := re.fullmatch(r"trl\.scripts\.(\w+)", word):
        return trl.find_trainer(found[1])
    return trl.find_trainer(word) if word.endswith(".py") else None


def _read_trl_command(trainer: str, before: Sequence[Word], rest: Sequence[Word], origin: str) -> Source:
    settings = read_flags([word for word in rest if word.text])
    # "--x" stands before the first value of a launcher without options
    launch = read_flags(
        [Word("--x", 0), *(word for word in before if word.text.startswith("-") or word.text.isdigit())]
    )
    settings = [*(setting for setting in launch if setting.name == trl.PROCESSES), *settings]
    config = next((setting for setting in settings if setting.name == "config"), None)
    if config is not None:
        path = Path(str(config.value))
        data = _load_yaml(path, _read_text(path, "name the file after --config"))
        read = [Setting(name, value, f"{name}: {value}") for name, value in flatten(data) if name != "env"]
        settings = [*read, *(setting for setting in settings if setting.name != "config")]
    return Source(trl.make_library(trainer), settings, origin)


def _read_python(path: Path, text: str) -> Iterator[Source]:
    """Yield a script of TRL with what its code gives; commands in its first text add their options."""
    tree = trl.parse_script(text)
    texts = [node.value for node in tree.body if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)]
    commands: list[Source] = []
    for node in texts:
        for command in read_commands(_drop_prose(str(node.value), node.lineno)):
            commands += [source for source in _find_sources(command, str(path)) if source.library.name == "TRL"]
    if not (in_code := trl.read_script(tree)):
        yield from commands
    elif not commands:
        yield Source(trl.make_library(str(in_code[0].value)), in_code, str(path))
    for source in commands if in_code else ():
        given = trl.read_script(tree, source.settings)
        own = trl.read_own_arguments(tree)  # which the code passes on
        yield source._replace(settings=[*given, *(setting for setting in source.settings if setting.name not in own)])


def _drop_prose(text: str, first: int) -> str:
    """Return the lines of a text that are commands, with those that continue them; others may have quotes that are not closed.

    first: the text's line in its file."""
    lines, goes_on = [""] * (first - 1), False
    for line in text.splitlines():
        is_command = (
            goes_on or re.match(r"\s*([A-Z_]+=\S+\s+)*(accelerate|python3?|trl|torchrun|uv)\s", line) is not None
        )
        lines.append(line if is_command else "")
        goes_on = is_command and line.rstrip().endswith("\\")
    return "\n".join(lines)


def _read_toml(path: Path, text: str) -> Source:
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"not valid TOML: {error}") from error
    if "algorithm" in data or "sampling" in data:
        raise ConfigError("it is a run.toml already: policygrad train --config FILE reads it")
    if not prime_rl.is_prime_rl([*data]):
        raise ConfigError(
            f"its tables, {', '.join(map(str, data))[:80] or 'none'}, are not prime-rl's (trainer, orchestrator, inference)"
        )
    if "orchestrator" not in data and "data" in data:
        raise ConfigError("it trains on demonstrations: policygrad sft --data FILE does")
    return Source(prime_rl.PRIME_RL, _number_lines(prime_rl.read_tables(data), text), str(path))


def _read_yaml(path: Path, text: str) -> Source | None:
    """Return the configuration of verl or TRL in a YAML file; None if it may be a script in YAML."""
    data = _load_yaml(path, text)
    if "actor_rollout_ref" in data:
        return Source(verl.VERL, _number_lines(verl.read_tables(data), text), str(path))
    settings = [
        Setting(name, parse_value(value) if isinstance(value, str) else value, f"{name}: {value}")
        for name, value in flatten(data)
    ]
    names = {setting.name for setting in settings}
    if not names & {*load_foreign_options()[0]["TRL"]}:
        if any(isinstance(value, str) and "\n" in value for value in data.values()):
            return None
        raise ConfigError(
            f"its keys, {', '.join(map(str, data))[:80] or 'none'}, are neither verl's (actor_rollout_ref, data, …) nor TRL's"
        )
    return Source(trl.make_library(_guess_trainer(names, str(path))), _number_lines(settings, text), str(path))


def _load_yaml(path: Path, text: str) -> Mapping[str, Any]:
    from policygrad.training.config.serialization import read_config_file

    try:
        return read_config_file(path)
    except ConfigError:
        if "actor_rollout_ref" in text or "main_ppo" not in text:
            raise
        return {"run": text}  # a script in YAML of another dialect


def _guess_trainer(names: set[str], what: str) -> str:
    """Return the trainer of TRL that options without a script belong to."""
    for own, trainer in (
        ({"num_ppo_epochs", "num_mini_batches", "kl_coef", "vf_coef", "cliprange"}, "ppo"),
        ({"normalize_advantages", "rloo_k"}, "rloo"),
        (
            {"num_generations", "max_completion_length", "reward_funcs", "loss_type", "epsilon_high", "num_iterations"},
            "grpo",
        ),
    ):
        if names & own:
            return trainer
    raise ConfigError(
        f"{what} does not say which trainer of TRL it is for: policygrad convert trl grpo --config FILE (or rloo, or a script.py)"
    )


def _number_lines(settings: list[Setting], text: str) -> list[Setting]:
    """Add the line of each option whose last name stands once in the file."""
    places: dict[str, list[int]] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if found := re.match(r"\s*\"?([\w-]+)\"?\s*[:=]", line):
            places.setdefault(found[1], []).append(number)
    lines = [places.get(setting.name.rpartition(".")[2], []) for setting in settings]
    return [
        setting._replace(line=own[0]) if len(own) == 1 else setting
        for setting, own in zip(settings, lines, strict=True)
    ]
