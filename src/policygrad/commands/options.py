"""An algorithm's parts as options: another part by `--algorithm.FIELD Part`, a part's field by `--algorithm.FIELD.NAME`."""

from __future__ import annotations

import contextlib
import io
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import MISSING, dataclass, field, fields, is_dataclass, make_dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import tyro

from policygrad.algorithms import ALGORITHMS
from policygrad.commands.render import summarise_docstring
from policygrad.core.algorithm import Algorithm
from policygrad.core.base import ObjectiveTerm, Part
from policygrad.errors import ConfigError, RunError
from policygrad.models.loading import TRUST_FLAG
from policygrad.training.config.run import UncheckedRun, optional_arg
from policygrad.training.config.serialization import from_dict
from policygrad.training.config.supervised import SupervisedConfig
from policygrad.training.interrupts import parse_duration
from policygrad.training.run_folder import check_no_run_file

SWITCHES = (
    "--dry-run",
    "--overwrite",
    "--plain",
    TRUST_FLAG,
    "--learner.gradient-checkpointing",
    "--learner.routing-replay",
)
"""Flags that take no value."""
_NUMBERS = ("name", "samples_per_prompt")
_NO_PARTS = (*_NUMBERS, "old_policy")  # which is chosen as parts are, by a word
_OWN = re.compile(r"[\w./~-]*\w:[A-Za-z_]\w*")

TYRO_REGISTRY = tyro.constructors.ConstructorRegistry()


@dataclass(frozen=True)
class CommandOptions:
    """Options of the command that are not part of the run itself."""

    config: Annotated[str | None, optional_arg("FILE", "none")] = None
    """A TOML file of options, such as the one in a run's folder; flags given here win over it."""
    resume: Annotated[str | None, optional_arg("RUN", "none")] = None
    """Go on with the run in this folder, from its newest intact checkpoint; with another --output in a copy there."""
    stop_after: Annotated[int | None, optional_arg("INT", "none")] = None
    """Stop, resumably, after so many steps."""
    time_limit: Annotated[str | None, optional_arg("TIME", "none")] = None
    """Be stopped, resumably, before so much time has passed, such as 23h50m of a cluster's 24 hours."""
    overwrite: bool = False
    """Begin anew where --output names the folder of a run that has ended, which is deleted once the new one begins."""
    dry_run: bool = False
    """Print what would be done, as TOML that --config reads; load no model."""
    plain: bool = False
    """Plain lines, also on a terminal."""

    def __post_init__(self) -> None:
        if self.overwrite and self.resume is not None:
            raise ConfigError("--resume goes on with a run and --overwrite begins anew: leave one of them out")
        if self.stop_after is not None and self.stop_after < 1:
            raise ConfigError(f"--stop-after must be at least 1, not {self.stop_after}; --dry-run takes no step at all")
        if self.time_limit is not None:
            parse_duration(self.time_limit, "--time-limit")


def list_help_flags(parse_help: Callable[[], object]) -> list[str]:
    """Every flag that a command's help lists, for tab completion."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
        parse_help()
    lines = re.findall(r"^\W+(--[a-z][a-z0-9.-]*[a-z0-9](?=\s|$).*)", out.getvalue(), re.MULTILINE)
    return [flag for line in lines for flag in re.findall(r"(?:^|, )(--[a-z][a-z0-9.-]*[a-z0-9])(?=\s|$)", line)]


def check_writable(path: Path, option: str) -> None:
    """Raises ConfigError where no file can be written, or a run would lose one: before the work and not after it."""
    try:
        check_no_run_file(path, option)
        if path.is_dir():
            raise ConfigError(f"{option} {path} is a folder: name a file in it")
        if not path.parent.is_dir():
            raise ConfigError(f"{option} {path}: there is no folder {path.parent}: make it first")
        if not os.access(path if path.exists() else path.parent, os.W_OK):
            raise ConfigError(f"{option} {path}: it may not be written there: take another place")
    except OSError as error:  # a name of more bytes than a file system takes
        raise ConfigError(f"{option} {path}: {error.strerror}: take another name") from error
    except ConfigError:
        raise
    except ValueError as error:  # a NUL, half a surrogate pair
        raise ConfigError(f"{option} {str(path)!r} is a name that no file system takes: take another name") from error


def write_text_file(path: Path, text: str, option: str) -> None:
    """Raises RunError when the file cannot be written after all, on a full disk, say."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise RunError(f"{option} {path} was not written: {error.strerror}; take another place") from error


def drop_trust_flag(base: UncheckedRun | SupervisedConfig, args: list[str]) -> list[str]:
    """The arguments without the flag that has given a file its leave: what is on already has no flag to turn it on."""
    return [word for word in args if word != TRUST_FLAG] if base.trust_remote_code else args


@TYRO_REGISTRY.primitive_rule
def _choice(info: Any) -> Any:
    """Choices are named in the help, and the part itself refuses what is none of them: it knows the reason."""
    if get_origin(info.type) is not Literal:
        return None
    return tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar=f"{{{','.join(get_args(info.type))}}}",
        instance_from_str=lambda words: words[0],
        is_instance=lambda value: isinstance(value, str),
        str_from_instance=lambda value: [value],
    )


def pop_algorithm(args: list[str]) -> tuple[str | None, list[str]]:
    """(ALGORITHM, the other arguments): the first word, a known name or mine:NAME among later ones, or `--algorithm NAME`."""
    if args and not args[0].startswith("-"):
        return args[0], args[1:]
    for i, word in enumerate(args):
        if word.startswith("--algorithm="):
            return word.partition("=")[2], args[:i] + args[i + 1 :]
        if word == "--algorithm" and i + 1 < len(args):
            return args[i + 1], args[:i] + args[i + 2 :]
        before = args[i - 1].replace("_", "-")
        is_value = before.startswith("--") and "=" not in before and before not in SWITCHES
        if word.lower().replace("-", "_") in ALGORITHMS and not is_value:
            return word, args[:i] + args[i + 1 :]
        if _OWN.fullmatch(word) and not is_value and not _of_rewards(args[:i]):
            return word, args[:i] + args[i + 1 :]
    return None, args


def _of_rewards(before: list[str]) -> bool:
    """Whether a word after these is one more reward, or one more to allow: they too are files, any number of them."""
    flag = next((word for word in reversed(before) if word.startswith("--")), "")
    return flag.partition("=")[0] in ("--reward", "--allow-code")


def merge_repeated_flags(args: list[str], *flags: str) -> list[str]:
    """The arguments with each of these flags once and all its values behind it: given again, it adds to what it had."""
    found: dict[str, list[str]] = {}
    rest: list[str] = []
    into = rest
    for word in args:
        flag, equals, value = word.partition("=")
        if flag in flags:
            into = found.setdefault(flag, [])
            into += [value] if equals else []
        elif word.startswith("-") and word != "-":
            into = rest
            rest.append(word)
        else:
            into.append(word)
    return [*rest, *(word for flag, values in found.items() for word in (flag, *values))]


def choose_parts(base: Algorithm, args: list[str]) -> tuple[Algorithm, list[str]]:
    """Takes `--algorithm.FIELD Part[,Part…]` out of the arguments: another part in its place, `none` for no part."""
    rest: list[str] = []
    changes: dict[str, Any] = {}
    names = {f.name: getattr(base, f.name) for f in fields(Algorithm) if f.name not in _NUMBERS}
    words = iter(args)
    for word in words:
        flag, _, value = word.partition("=")
        key = flag.removeprefix("--algorithm.").replace("-", "_")
        if not flag.startswith("--algorithm.") or key not in names:
            rest.append(word)
            continue
        value = value or next(words, "")
        if not value or value.startswith("-"):
            raise ConfigError(f"{flag} needs the name of a part, or 'none'")
        several = isinstance(names[key], tuple)
        parts = [] if several and value == "none" else value.split(",")
        changes[key] = [{"part": p} for p in parts] if several else value
    if changes:
        base = from_dict({"algorithm": changes}, UncheckedRun(algorithm=base), "command line").algorithm
    return base, rest


def build_option_type(chosen: Algorithm) -> type:
    """A dataclass of this algorithm's parts, so that every field of every part is an option with its own type and help."""
    columns: list[tuple[str, Any, Any]] = []
    for f in fields(Algorithm):
        value = getattr(chosen, f.name)
        if f.name in _NO_PARTS:
            continue
        if isinstance(value, tuple):
            members = [_column(name, part) for name, part in _named(value) if _has_fields(part)]
            if members:
                kind = make_dataclass(f.name, members, frozen=True)
                columns.append((f.name, kind, field(default_factory=kind)))
        elif _has_fields(value):
            columns.append(_column(f.name, value))
    return make_dataclass("Parts", columns, frozen=True)


def list_part_flags(kind: type, prefix: str = "--algorithm") -> Iterator[str]:
    """The flags of `build_option_type`'s fields as the help lists them, without asking for it: completion has every algorithm's."""
    hints = get_type_hints(kind)
    for f in fields(kind):
        flag = f"{prefix}.{f.name.replace('_', '-')}"
        default = (
            f.default if f.default is not MISSING else f.default_factory() if callable(f.default_factory) else None
        )
        if is_dataclass(default):
            yield from list_part_flags(type(default), flag)
        elif not any(
            isinstance(k, type) and issubclass(k, Part) for k in get_args(hints[f.name])
        ):  # an open part is no flag
            yield flag if default is not True else f"{prefix}.no-{f.name.replace('_', '-')}"


def apply_options(chosen: Algorithm, options: Any) -> Algorithm:
    """The algorithm with the fields that `build_option_type`'s instance holds."""
    changes: dict[str, Any] = {}
    for f in fields(options):
        there, new = getattr(chosen, f.name), getattr(options, f.name)
        if isinstance(there, tuple):
            changes[f.name] = tuple(getattr(new, name, part) for name, part in _named(there))
        else:
            changes[f.name] = new
    return replace(chosen, **changes)


def reopen_lengths(a: Algorithm, budget: int) -> Algorithm:
    """Lengths that a resolved configuration took from its budget are open again, so that they follow --max-tokens."""

    def reopened(part: Any) -> Any:
        own = part.aggregation if isinstance(part, ObjectiveTerm) else None
        part = part if own is None else replace(part, aggregation=reopened(own))
        return replace(part, length=None) if part.length == budget else part

    changes: dict[str, Any] = {}
    for name in {key.partition(".")[0] for key, _ in a.named_parts()}:
        value = getattr(a, name)
        changes[name] = tuple(map(reopened, value)) if isinstance(value, tuple) else reopened(value)
    return replace(a, **changes)


def _column(name: str, part: Any) -> tuple[str, Any, Any]:
    text, source = summarise_docstring(part)
    help_ = f"{text} Source: {source}." if source else text
    return name, Annotated[type(part), tyro.conf.arg(help=help_)], field(default=part)


def _named(parts: tuple[Any, ...]) -> Iterator[tuple[str, Any]]:
    """(option, part): the class in snake case, numbered where a class occurs again."""
    seen: dict[str, int] = {}
    for part in parts:
        name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", type(part).__name__).lower()
        seen[name] = seen.get(name, 0) + 1
        yield name if seen[name] == 1 else f"{name}_{seen[name]}", part


def _has_fields(value: Any) -> bool:
    return value is not None and bool(fields(value))


# What is wrong with a command line before its options are read.


def reject_empty_values(args: Sequence[str], *flags: str) -> None:
    """Raises ConfigError for a flag of several values that has none: it would be taken for one that was not given."""
    for word, after in zip(args, [*args[1:], "-"], strict=False):
        flag, equals, value = word.partition("=")
        if flag in flags and not (value.strip() if equals else after.strip() and not after.startswith("-")):
            raise ConfigError(f"{flag} needs a value, or several: leave it away for the default")


def reject_cluster_flags(args: Sequence[str], command: str, hint: str) -> None:
    """Raises ConfigError for `--cluster` and what belongs to it, which `policygrad train` alone has."""
    if odd := [word for word in args if word.partition("=")[0].partition(".")[0] == "--cluster"]:
        raise ConfigError(
            f"{odd[0].partition('=')[0]} is of `policygrad train`, whose work a Ray cluster can do; `policygrad {command}` "
            f"{hint}"
        )
