"""Command-line parsing that several commands share, and an algorithm's parts as options.

`--algorithm.FIELD Part` puts another part in a field; `--algorithm.FIELD.NAME` sets a field of a part.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, make_dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypedDict, TypeVar, get_args, get_origin, get_type_hints

import tyro

from policygrad.algorithms import ALGORITHMS
from policygrad.commands import STOPPED
from policygrad.commands.docstrings import summarise_docstring
from policygrad.commands.json_output import print_json
from policygrad.core.algorithm import Algorithm
from policygrad.core.base import ObjectiveTerm, Part
from policygrad.errors import ConfigError, RunError
from policygrad.learners.fsdp.torchrun import resolve_world_size, torchrun_rank
from policygrad.models.loading import TRUST_FLAG
from policygrad.trackers.events import Evaluation, EventTracker, Note, Phase, Started, Step
from policygrad.training.config.optional_arg import optional_arg
from policygrad.training.config.paths import find_changed_options, is_own_config
from policygrad.training.config.run import UncheckedRun
from policygrad.training.config.serialization import from_dict, load_config, parse_part
from policygrad.training.config.trust import CodePermissions
from policygrad.training.interrupts import parse_duration
from policygrad.training.run_folder import check_no_run_file, check_resumable, config_file
from policygrad.utils.argv import split_outside_brackets
from policygrad.utils.filesystem import read_json, write_atomically

if TYPE_CHECKING:
    from policygrad.pages.export import Export

SELECTABLE_FIELDS = tuple(f.name for f in fields(Algorithm) if f.name not in ("name", "samples_per_prompt"))
"""Fields of an algorithm that are selected like parts: all that hold some, and old_policy and head, plain words."""
_PART_SWITCH = "--algorithm.*."  # a part's flag names the field that holds the part, which differs between algorithms
_OWN_AVERAGE = re.compile(r"terms\.(\w+)\.aggregation")
_CUSTOM_NAME = re.compile(r"[\w./~-]*\w:[A-Za-z_]\w*")

TYRO_REGISTRY = tyro.constructors.ConstructorRegistry()
ConfigT = TypeVar("ConfigT", bound=Any)  # A configuration of train, sft or reward-model


@dataclass(frozen=True)
class CommandOptions:
    """Options of the command that are not part of the run itself."""

    config: Annotated[str | None, optional_arg("FILE", "none")] = None
    """A TOML or YAML file of options, such as a run's own or what `policygrad init` prints; flags take precedence over it."""
    resume: Annotated[str | None, optional_arg("RUN", "none")] = None
    """Resume the run in this folder from its newest intact checkpoint; with another --output, in a copy there."""
    stop_after: Annotated[int | None, optional_arg("INT", "none")] = None
    """Stop after this many steps; the run can be resumed."""
    time_limit: Annotated[str | None, optional_arg("TIME", "none")] = None
    """Stop before this much time has passed, such as 23h50m of a cluster's 24 hours; the run can be resumed."""
    overwrite: bool = False
    """Replace the finished run in --output, which is deleted once the new one starts."""
    dry_run: bool = False
    """Print the configuration as TOML for --config, without loading a model."""
    plain: bool = False
    """Print plain lines, even on a terminal."""
    json: bool = False
    """Print one JSON object per event: started, step, evaluation, note, finished, …."""

    def __post_init__(self) -> None:
        if self.overwrite and self.resume is not None:
            raise ConfigError("--resume continues a run and --overwrite replaces it; give only one of them")
        if self.stop_after is not None and self.stop_after < 1:
            raise ConfigError(f"--stop-after must be at least 1, not {self.stop_after}. --dry-run takes no step.")
        if self.time_limit is not None:
            parse_duration(self.time_limit, "--time-limit")


def load_base(
    default: ConfigT, command: str, resume: str | None, config: str | None, permissions: CodePermissions
) -> ConfigT:
    """Return the configuration before flags: defaults < resumed run < TOML file."""
    base = default
    if resume is not None:
        base = load_config(config_file(check_resumable(Path(resume), command), command), base, permissions)
    if config is not None:
        base = load_config(config, base, permissions)
        if is_own_config(base, Path(config)):
            base = replace(base, output=None)  # a finished run's own file starts a new run in a new folder
    return base


def resume_in_folder(base: Any, config: ConfigT, folder: str, fixed: Mapping[str, str], restart: str) -> ConfigT:
    """Return the configuration of a resumed run, whose output is its own folder unless another one is given.

    Args:
        base: The configuration before flags.
        fixed: Option -> reason why a resumed run cannot change it.
        restart: Options that start a new run from this one.

    Raises:
        ConfigError: A flag changes a fixed option.
    """
    changed = find_changed_options(base, config)
    for name, reason in fixed.items():
        if name in changed:
            raise ConfigError(f"--resume {folder} {reason}. Omit it, or start a new run with {restart} --output DIR")
    return config if "output" in changed else replace(config, output=folder)


def run_training(
    trainer: str, config: Any, command: str, options: CommandOptions, describe: Callable[[Any], str]
) -> int:
    """Train in this process, or serve as one of several that torchrun started; return the exit code.

    Args:
        trainer: module:function, which is imported only when needed.
        describe: Returns what --dry-run prints instead.
    """
    if (rank_and_size := torchrun_rank()) is not None:
        world_size = resolve_world_size(config.learner.world_size)
        config = replace(config, learner=replace(config.learner, world_size=world_size))
        if rank_and_size[0] > 0:  # rank 0 sends the commands
            from policygrad.learners.fsdp.worker import join_torchrun

            return 0 if options.dry_run else join_torchrun()
    if options.dry_run:
        text = describe(config).rstrip()
        if options.json:
            print_json({"event": "configuration", "toml": text})
        else:
            print(text)
        return 0
    from policygrad.trackers import default_tracker
    from policygrad.training.run_folder import resolve_resume_folder

    module, _, function = trainer.partition(":")
    train = getattr(import_module(module), function)
    display = EventTracker(print_json) if options.json else default_tracker(plain=options.plain or None)
    result = train(
        config,
        resume=resolve_resume_folder(options.resume, command, config),
        stop_after=options.stop_after,
        time_limit=options.time_limit,
        overwrite=options.overwrite,
        display=display,
    )
    return report_end(result, command, is_json=options.json)


class Finished(TypedDict):
    """The last line: the run is complete, or stopped and can be resumed."""

    event: Literal["finished", "stopped"]
    run: str
    """The run's folder."""
    steps: int
    """Steps done."""
    model: str | None
    """Folder of the trained model; null if the run stopped."""
    result: Mapping[str, Any] | None
    """The content of result.json; null if the run stopped."""
    resume: list[str] | None
    """The command that continues a stopped run."""
    next: Mapping[str, str]
    """What to do with a finished run, in words -> the command; empty if it stopped."""
    exit_code: int


class Configuration(TypedDict):
    """--dry-run: the configuration, the only line."""

    event: Literal["configuration"]
    toml: str
    """For --config."""


RUN_EVENTS = (Started, Phase, Evaluation, Step, Note, Finished, Configuration)
"""What a run prints under --json, an event each."""


def report_end(result: Any, command: str, *, is_json: bool) -> int:
    """Return the exit code of a run's `TrainingResult`; under --json, print the last event."""
    exit_code = STOPPED if result.interrupted else 0
    if is_json:
        is_finished = result.model is not None
        print_json(
            {
                "event": "finished" if is_finished else "stopped",
                "run": result.output,
                "steps": result.steps,
                "model": result.model,
                "result": read_json(result.output / "result.json") if is_finished else None,
                "resume": None if is_finished else ["policygrad", command, "--resume", str(result.output)],
                "next": result.next_commands,
                "exit_code": exit_code,
            }
        )
    return exit_code


def check_at_least_1(options: object, *names: str) -> None:
    """Raise ConfigError for a number below 1; None is an open choice."""
    for name in names:
        value = getattr(options, name)
        if value is not None and value < 1:
            raise ConfigError(f"--{name.replace('_', '-')} must be at least 1, not {value}")


def check_writable(path: Path, option: str) -> None:
    """Raise ConfigError if the file cannot be written or belongs to a run, before any work is done."""
    try:
        check_no_run_file(path, option)
        if path.is_dir():
            raise ConfigError(f"{option} {path} is a folder; name a file in it")
        if not path.parent.is_dir():
            raise ConfigError(f"{option} {path}: there is no folder {path.parent}; create it first")
        if not os.access(path if path.exists() else path.parent, os.W_OK):
            raise ConfigError(f"{option} {path}: no permission to write there; choose another path")
        if path.is_fifo():
            try:
                os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK))
            except OSError as error:  # where writing would wait for ever
                raise ConfigError(f"{option} {path} is a pipe that nothing reads; choose another name") from error
    except OSError as error:  # a name that is too long
        raise ConfigError(f"{option} {path}: {error.strerror}; choose another name") from error
    except ConfigError:
        raise
    except ValueError as error:  # a NUL, half a surrogate pair
        raise ConfigError(f"{option} {str(path)!r} is not a valid file name; choose another one") from error


def write_text_file(path: Path, text: str, option: str) -> None:
    """Write the file. Raises RunError if that fails, for example on a full disk."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise RunError(f"{option} {path} was not written: {error.strerror}; choose another path") from error


def check_export_folder(folder: Path) -> None:
    """Raise ConfigError if figures cannot be written there, before any work is done."""
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"--export {folder} is a file: name a folder, which is created if it is not there")
    above = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not os.access(above, os.W_OK):
        raise ConfigError(f"--export {folder}: no permission to write there; choose another folder")


def write_figures(folder: Path, export: Export) -> None:
    """Write figures, tables and sentences into the folder, and say so on standard error. Raises RunError if that fails."""
    from policygrad.pages.export import render_export

    texts = render_export(export)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            write_atomically(folder / name, text)
    except OSError as error:
        file = error.filename or "a file"
        raise RunError(f"--export {folder}: {file} was not written: {error.strerror}; choose another folder") from error
    print(f"{folder}: {len(texts)} files, of which README.md names each; figures are SVG, not PDF", file=sys.stderr)


def drop_trust_flag(base: Any, args: list[str]) -> list[str]:
    """Remove --trust-remote-code if a file has set it already: tyro has no flag for a switch that is on."""
    return [word for word in args if word != TRUST_FLAG] if base.trust_remote_code else args


@TYRO_REGISTRY.primitive_rule
def _choice(info: Any) -> Any:
    """List choices in the help, but leave checking to the part, whose message gives the reason."""
    if get_origin(info.type) is not Literal:
        return None
    return tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar=f"{{{','.join(get_args(info.type))}}}",
        instance_from_str=lambda values: values[0],
        is_instance=lambda value: isinstance(value, str),
        str_from_instance=lambda value: [value],
    )


def list_switches(*kinds: type) -> frozenset[str]:
    """Return the flags without a value of these dataclasses of options, and `--algorithm.….NAME` of every part's switches."""
    parts, switches = [Part], {flag for kind in kinds for flag in _iter_switches(kind)}
    while parts:
        part = parts.pop()
        parts += part.__subclasses__()
        switches |= {f"{_PART_SWITCH}{flag.removeprefix('--')}" for flag in _iter_switches(part)}
    return frozenset(switches)


def _is_switch(flag: str, switches: Collection[str]) -> bool:
    is_of_part = flag.startswith("--algorithm.")
    return (_PART_SWITCH + flag.rpartition(".")[2] if is_of_part else flag) in switches


def _iter_switches(kind: type, prefix: str = "--") -> Iterator[str]:
    for f in fields(kind) if is_dataclass(kind) else ():
        hint = get_type_hints(kind, include_extras=True)[f.name]
        given = [extra.name for extra in getattr(hint, "__metadata__", ()) if getattr(extra, "name", None) is not None]
        name = given[0] if given else f.name.replace("_", "-")
        plain = get_args(hint)[0] if get_origin(hint) is Annotated else hint
        if plain in (bool, bool | str):
            head, dot, last = name.rpartition(".")
            yield from (f"{prefix}{name}", f"{prefix}{head}{dot}no-{last}")
        elif is_dataclass(plain) and isinstance(plain, type):
            yield from _iter_switches(plain, f"{prefix}{name}." if name else prefix)


def pop_algorithm(args: list[str], switches: Collection[str]) -> tuple[str | None, list[str]]:
    """Return (algorithm, remaining arguments).

    The algorithm is the first argument, or `--algorithm NAME`, or a later argument that is a known name or looks like
    mine:NAME and follows no option but one of these `switches`, which take no value.
    """
    if args and not args[0].startswith("-"):
        return args[0], args[1:]
    for i, word in enumerate(args):
        if word.startswith("--algorithm="):
            return word.partition("=")[2], args[:i] + args[i + 1 :]
        if word == "--algorithm" and i + 1 < len(args):
            return args[i + 1], args[:i] + args[i + 2 :]
        before = args[i - 1].replace("_", "-")
        if before.startswith("--") and "=" not in before and not _is_switch(before, switches):
            continue  # the value of an option
        last_flag = next((w for w in reversed(args[:i]) if w.startswith("--")), "")
        follows_list = last_flag.partition("=")[0] in ("--reward", "--allow-code")  # whose values may be files, too
        is_known = word.lower().replace("-", "_") in ALGORITHMS
        if is_known or (_CUSTOM_NAME.fullmatch(word) and not follows_list):
            return word, args[:i] + args[i + 1 :]
    return None, args


def merge_repeated_flags(args: list[str], *flags: str) -> list[str]:
    """Return the arguments with each of these flags once, followed by all its values, at the end."""
    values: dict[str, list[str]] = {}
    remaining: list[str] = []
    target = remaining
    for word in args:
        flag, equals, value = word.partition("=")
        if flag in flags:
            target = values.setdefault(flag, [])
            target += [value] if equals else []
        elif word.startswith("-") and word != "-":
            target = remaining
            remaining.append(word)
        else:
            target.append(word)
    return [*remaining, *(word for flag in values for word in (flag, *values[flag]))]


def choose_parts(base: Algorithm, args: list[str]) -> tuple[Algorithm, list[str]]:
    """Apply and remove every `--algorithm.FIELD Part[,Part…]`, each with settings or without; `none` leaves a field empty.

    `--algorithm.terms.NAME.aggregation Part` is the average of one term.
    """
    remaining: list[str] = []
    changes: dict[str, Any] = {}
    averages: dict[str, str] = {}
    pending = iter(args)
    for word in pending:
        flag, _, value = word.partition("=")
        key = flag.removeprefix("--algorithm.").replace("-", "_")
        if flag.startswith("--algorithm.") and (term := _OWN_AVERAGE.fullmatch(key)):
            averages[term[1]] = value or next(pending, "")
            continue
        if not flag.startswith("--algorithm.") or key not in SELECTABLE_FIELDS:
            remaining.append(word)
            continue
        value = value or next(pending, "")
        if not value or value.startswith("-"):
            raise ConfigError(f"{flag} needs the name of a part, or none")
        several = isinstance(getattr(base, key), tuple)
        parts = [] if several and value == "none" else split_outside_brackets(value)
        changes[key] = [{"part": p} for p in parts] if several else value
    if changes:
        base = from_dict({"algorithm": changes}, UncheckedRun(algorithm=base), "command line").algorithm
    return _set_averages(base, averages), remaining


def _set_averages(base: Algorithm, averages: Mapping[str, str]) -> Algorithm:
    """Return the algorithm with these averages of its terms, by the terms' options; none: the policy's."""
    terms = dict(name_parts(base.terms))
    for name, value in averages.items():
        flag = f"--algorithm.terms.{name.replace('_', '-')}.aggregation"
        if name not in terms:
            known = ", ".join(option.replace("_", "-") for option in terms) or "none"
            raise ConfigError(f"{flag}: the algorithm has no such term; its terms are {known}")
        terms[name] = replace(terms[name], aggregation=parse_part(None, value, "command line", flag))
    return replace(base, terms=tuple(terms.values())) if averages else base


def build_option_type(chosen: Algorithm) -> type:
    """Build a dataclass of an algorithm's parts, so that every field of every part becomes an option with its type and help."""
    columns: list[tuple[str, Any, Any]] = []
    for name in SELECTABLE_FIELDS:
        value = getattr(chosen, name)
        if isinstance(value, tuple):
            if members := [_column(option, part) for option, part in name_parts(value) if fields(part)]:
                kind = make_dataclass(name, members, frozen=True)
                columns.append((name, kind, field(default_factory=kind)))
        elif is_dataclass(value) and fields(value):
            columns.append(_column(name, value))
    return make_dataclass("Parts", columns, frozen=True)


def list_part_flags(kind: type, prefix: str = "--algorithm") -> Iterator[str]:
    """Yield the flags of a type from `build_option_type`, as the help lists them."""
    hints = get_type_hints(kind)
    for f in fields(kind):
        flag = f"{prefix}.{f.name.replace('_', '-')}"
        default = f.default_factory() if callable(f.default_factory) else f.default
        if is_dataclass(default):
            yield from list_part_flags(type(default), flag)
        elif any(isinstance(k, type) and issubclass(k, Part) for k in get_args(hints[f.name])):
            continue  # an optional part that is None has no flag
        else:
            yield flag if default is not True else f"{prefix}.no-{f.name.replace('_', '-')}"


def apply_options(chosen: Algorithm, options: Any) -> Algorithm:
    """Return the algorithm with the values in an instance of `build_option_type`."""
    changes: dict[str, Any] = {}
    for f in fields(options):
        current, new = getattr(chosen, f.name), getattr(options, f.name)
        several = isinstance(current, tuple)
        changes[f.name] = tuple(getattr(new, name, part) for name, part in name_parts(current)) if several else new
    return replace(chosen, **changes)


def reopen_lengths(a: Algorithm, budget: int) -> Algorithm:
    """Reset lengths that equal the budget, so that they follow --max-tokens again."""

    def reopen(part: Any) -> Any:
        aggregation = part.aggregation if isinstance(part, ObjectiveTerm) else None
        part = part if aggregation is None else replace(part, aggregation=reopen(aggregation))
        return replace(part, length=None) if part.length == budget else part

    changes: dict[str, Any] = {}
    for name in {key.partition(".")[0] for key, _ in a.named_parts()}:
        value = getattr(a, name)
        changes[name] = tuple(map(reopen, value)) if isinstance(value, tuple) else reopen(value)
    return replace(a, **changes)


def _column(name: str, part: Any) -> tuple[str, Any, Any]:
    text, source = summarise_docstring(part)
    help_ = f"{text} Source: {source}." if source else text
    return name, Annotated[type(part), tyro.conf.arg(help=help_)], field(default=part)


def name_parts(parts: tuple[Any, ...]) -> Iterator[tuple[str, Any]]:
    """Yield (option, part); the option is the class name in snake case, numbered if a class occurs again."""
    seen: dict[str, int] = {}
    for part in parts:
        name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", type(part).__name__).lower()
        seen[name] = seen.get(name, 0) + 1
        yield name if seen[name] == 1 else f"{name}_{seen[name]}", part


def reject_empty_values(args: Sequence[str], *flags: str) -> None:
    """Raise ConfigError for a flag of several values that has none, which would otherwise look like one that was not given."""
    for word, after in zip(args, [*args[1:], "-"], strict=False):
        flag, equals, value = word.partition("=")
        if flag in flags and not (value.strip() if equals else after.strip() and not after.startswith("-")):
            raise ConfigError(f"{flag} needs at least one value; omit it for the default")


def reject_cluster_flags(args: Sequence[str], command: str, hint: str) -> None:
    """Raise ConfigError for `--cluster` options, which only `policygrad train` has."""
    for word in args:
        flag = word.partition("=")[0]
        if flag.partition(".")[0] == "--cluster":
            raise ConfigError(f"{flag} is an option of `policygrad train` only; `policygrad {command}` {hint}")
