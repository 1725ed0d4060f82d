"""A run's configuration as TOML, both ways. An unknown key is an error that names the nearest known one.

A part of the algorithm is a table whose `part` names its class (`Clip`, or `module:Class`, `path/to/file.py:Class` of one's own);
without `part` the table changes fields of the part that is there. "none" stands for no part.
"""

from __future__ import annotations

import difflib
import tomllib
import typing
from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from types import NoneType, UnionType
from typing import Any

import tomli_w

import policygrad
from policygrad.algorithms import get_algorithm
from policygrad.algorithms import get_algorithm as named
from policygrad.core.algorithm import Algorithm
from policygrad.core.validation import ROLES, frozen_problem
from policygrad.errors import ConfigError
from policygrad.training.config.paths import resolve_directory, resolve_paths, with_full_paths
from policygrad.training.config.run import OBJECT_PREFIX, Run, UncheckedRun
from policygrad.training.config.supervised import SupervisedConfig
from policygrad.training.config.trust import NO_PERMISSIONS, CodePermissions, check_permissions
from policygrad.utils.filesystem import read_toml
from policygrad.utils.user_code import find_assignment, find_definition, import_path, is_user_reference, load_object

# Which parts there are, by name and by place, and what is said when a name is wrong.


def suggest_name(name: str, known: Iterable[str]) -> str:
    """' did you mean …?' or the known names."""
    known = list(known)
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"did you mean {near[0]!r}?" if near else f"known: {', '.join(sorted(known))}"


def list_parts(place: str | None = None) -> list[str]:
    """policygrad's own parts by class name, sorted; `place` = those that go into that field of an algorithm."""
    found = []
    for name in policygrad.__all__:
        kind = getattr(policygrad, name)
        if (
            isinstance(kind, type)
            and kind is not Algorithm
            and (_place(kind) == place if place else _place(kind) is not None)
        ):
            found.append(name)
    return found


def load_part_class(name: str, where: str, dotted: str) -> type:
    """The class of a part by its policygrad name, or `module:Class`, or `path/to/file.py:Class`.

    Raises:
        ConfigError: no such class, or not a dataclass.
    """
    if is_user_reference(name):
        script = (
            "; it was defined in a script: move the class to a module of its own"
            if name.startswith("__main__:")
            else ""
        )
        try:
            kind = load_object(name, f"{where}: {dotted}: cannot import the part {name!r}")
        except ConfigError as error:
            raise ConfigError(f"{error}{script}") from error
        if isinstance(kind, Algorithm):
            raise ConfigError(
                f"{where}: {dotted}: {name!r} ({find_assignment(name)}) is a whole algorithm, not a part: --algorithm {name}"
            )
        if not isinstance(kind, type):
            raise ConfigError(f"{where}: {dotted}: {name!r} is not a part: name its class, which is a frozen dataclass")
        if problem := frozen_problem(kind):
            raise ConfigError(f"{where}: {dotted}: {name!r}: {problem}")
        return kind
    if name not in list_parts():
        known = list_parts(dotted.rpartition(".")[2]) or list_parts()
        hint = (
            suggest_name(name, list_parts())
            if difflib.get_close_matches(name, list_parts(), 1, 0.5)
            else suggest_name(name, known)
        )
        raise ConfigError(
            f"{where}: {dotted}: no part is called {name!r}: {hint}; your own is module:Class or file.py:Class"
        )
    return getattr(policygrad, name)  # type: ignore[no-any-return]


def load_algorithm(name: str) -> Algorithm:
    """The named algorithm, or one of a user's own: `module:NAME`, `path/to/file.py:NAME`.

    Raises:
        ConfigError: an unknown name, with the nearest known one; no such module, file or attribute; no algorithm.
    """
    if not is_user_reference(name):
        return get_algorithm(name)
    found = load_object(name, f"algorithm {name!r}", Algorithm)
    if isinstance(found, type) and is_dataclass(found):
        field = next((field for field, role in ROLES.items() if issubclass(found, role.bases)), "FIELD")
        raise ConfigError(
            f"algorithm {name!r}: {find_definition(found) or name} is a part, not an algorithm: put it into one, "
            f"--algorithm.{field} {name}, or in the file NAME = dataclasses.replace(policygrad.GRPO, {field}=…)"
        )
    if not isinstance(found, Algorithm):
        raise ConfigError(
            f"algorithm {name!r} ({find_assignment(name)}) is {type(found).__name__}, not a policygrad.Algorithm"
        )
    return replace(found, name=name.rpartition(":")[2]) if found.name == Algorithm().name else found


def _place(kind: type) -> str | None:
    """The field of an algorithm that one of policygrad's parts goes into, by its base class; None = not one of them."""
    if not kind.__module__.startswith("policygrad.core.") or kind.__module__ == "policygrad.core.base":
        return None
    return next((field for field, role in ROLES.items() if issubclass(kind, role.bases)), None)


def check_part_field(kind: type, where: str, dotted: str) -> None:
    """Refuses a part of ours in a place where it means nothing; what others write is theirs to know."""
    place, own = dotted.rpartition(".")[2], _place(kind)
    if own is not None and own != place and place in ROLES:
        raise ConfigError(
            f"{where}: {dotted}: {kind.__name__} goes into {own!r}, not {place!r}, which takes {', '.join(list_parts(place))}"
        )


NONE = "none"
ConfigT = typing.TypeVar("ConfigT", bound=UncheckedRun | SupervisedConfig)


def dump_config(run: Run | SupervisedConfig) -> str:
    """The whole configuration, enough to run it again."""
    return tomli_w.dumps(_plain(run.without_objects() if isinstance(run, Run) else run))


def load_config(path: Path | str, base: ConfigT, permissions: CodePermissions = NO_PERMISSIONS) -> ConfigT:
    """`base` changed by what the file says. allowed: the code that it may name.

    Raises:
        ConfigError: no such file, code that is not allowed, no TOML, an unknown key, a value of the wrong type, parts that
            contradict each other.
    """
    path = Path(path)
    try:
        data = resolve_directory(read_config(path), path)
        check_permissions(with_full_paths(data), path, permissions)
        return from_dict(data, base, str(path))
    except RecursionError as error:
        raise ConfigError(f"{path} cannot be read as a configuration: tables in tables, too deep") from error


def read_config(path: Path) -> dict[str, Any]:
    """A file's tables. Raises ConfigError where there are none to read."""
    try:
        return read_toml(path)
    except OSError as error:
        raise ConfigError(f"cannot read the configuration {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 (byte {error.start}): save it as UTF-8") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from error
    except ValueError as error:  # brackets in brackets, an integer of thousands of digits
        raise ConfigError(f"{path} cannot be read as a configuration: {error}") from error


def from_dict(data: Mapping[str, Any], base: ConfigT, where: str) -> ConfigT:
    """`base` changed by a nested mapping as TOML gives it."""
    return _change(base, data, where, "")  # type: ignore[no-any-return]


def algorithm_to_dict(algorithm: Algorithm) -> dict[str, Any]:
    """Every part with its class and fields: JSON and TOML can hold it, and a checkpoint does."""
    return _algorithm(algorithm)


def _plain(value: Any) -> Any:
    if isinstance(value, Algorithm):
        return _algorithm(value)
    if is_dataclass(value):
        items = ((f.name, getattr(value, f.name)) for f in fields(value))
        return {name: _plain(item) for name, item in items if item is not None}
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    return value


def _algorithm(algorithm: Algorithm) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for f in fields(algorithm):
        value = getattr(algorithm, f.name)
        if isinstance(value, tuple):
            out[f.name] = [_part(item) for item in value]
        else:
            out[f.name] = value if isinstance(value, (str, int)) else NONE if value is None else _part(value)
    return out


def _part(part: Any) -> dict[str, Any]:
    kind = type(part)
    own = getattr(policygrad, kind.__name__, None) is not kind
    name = import_path(kind) if own else kind.__name__
    values = {f.name: getattr(part, f.name) for f in fields(part)}
    return {"part": name, **{k: _field(v) for k, v in values.items()}}


def _field(value: Any) -> Any:
    """An open field is written out: left away, it would be the named algorithm's when the file is read."""
    return NONE if value is None else _part(value) if is_dataclass(value) else value


def _change(base: Any, data: Mapping[str, Any], where: str, prefix: str) -> Any:
    known = {f.name for f in fields(base)}
    hints = typing.get_type_hints(type(base))
    changes: dict[str, Any] = {}
    for key, value in data.items():
        dotted = f"{prefix}{key}"
        if key not in known:
            raise ConfigError(f"{where}: unknown key {dotted!r}: {suggest_name(key, known)}")
        current = getattr(base, key)
        if isinstance(current, Algorithm):
            changes[key] = _read_algorithm(current, value, where, dotted)
        elif is_dataclass(current):
            changes[key] = _change(current, _table(value, where, dotted), where, f"{dotted}.")
        else:
            changes[key] = _typed(value, hints[key], where, dotted)
    return _build(lambda: replace(base, **changes), where, prefix.rstrip(".") or "the run")


def _build(make: typing.Callable[[], Any], where: str, dotted: str) -> Any:
    try:
        return make()
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{where}: {dotted}: {error}") from error


def _table(value: Any, where: str, dotted: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ConfigError(f"{where}: {dotted!r} is a table, not {value!r}: write [{dotted}] and its keys below")
    return value


def _typed(value: Any, hint: Any, where: str, dotted: str) -> Any:
    options = (
        typing.get_args(hint) if isinstance(hint, UnionType) or typing.get_origin(hint) is typing.Union else (hint,)
    )
    if isinstance(value, str) and value.startswith(OBJECT_PREFIX):
        kind = value.removeprefix(OBJECT_PREFIX)
        raise ConfigError(
            f"{where}: {dotted!r} was a {kind} object given in Python, which no file can hold: go on from Python, "
            "pg.train(run, resume=folder) with the same object, or write a name here"
        )
    for option in options:
        option = str if option is Any else option  # by name here, where Python may give an object
        if option is NoneType:
            continue
        if typing.get_origin(option) is tuple and isinstance(value, list):
            return _typed_tuple(value, typing.get_args(option), where, dotted)
        if typing.get_origin(option) is typing.Literal and isinstance(value, str):
            return value  # the part itself refuses what it does not know, and says why
        if option is float and isinstance(value, int) and not isinstance(value, bool):
            return float(value)
        if isinstance(option, type) and isinstance(value, option) and not (option is int and isinstance(value, bool)):
            return value
    names = " or ".join(_type_name(o) for o in options if o is not NoneType)
    raise ConfigError(f"{where}: {dotted!r} must be {names}, not {value!r}")


def _typed_tuple(value: list[Any], kinds: tuple[Any, ...], where: str, dotted: str) -> tuple[Any, ...]:
    if kinds[-1] is not Ellipsis and len(kinds) != len(value):
        raise ConfigError(f"{where}: {dotted!r} must be a list of {len(kinds)}, not {value!r}")
    each = kinds[:1] * len(value) if kinds[-1] is Ellipsis else kinds
    return tuple(
        _typed(item, kind, where, f"{dotted}[{i}]") for i, (item, kind) in enumerate(zip(value, each, strict=True))
    )


def _type_name(kind: Any) -> str:
    if typing.get_origin(kind) is tuple:
        return f"a list of {_type_name(typing.get_args(kind)[0])}"
    words = {
        "Any": "text in quotes",
        "str": "text in quotes",
        "int": "a whole number",
        "float": "a number",
        "bool": "true or false",
    }
    name = getattr(kind, "__name__", str(kind))
    return words.get(name, name)


def _read_algorithm(current: Algorithm, value: Any, where: str, dotted: str) -> Algorithm:
    if isinstance(value, str):
        return _build(lambda: load_algorithm(value), where, dotted)  # type: ignore[no-any-return]
    value = dict(_table(value, where, dotted))
    name = value.get("name")
    if isinstance(name, str) and name != current.name:
        try:
            current = named(name)
        except ValueError:
            current = replace(current, name=name)  # a method of one's own, spelled out part by part
    known = {f.name for f in fields(Algorithm)}
    changes: dict[str, Any] = {}
    for key, item in value.items():
        if key not in known:
            raise ConfigError(f"{where}: unknown key '{dotted}.{key}': {suggest_name(key, known)}")
        place, there = f"{dotted}.{key}", getattr(current, key)
        if isinstance(there, tuple):
            if not isinstance(item, list):
                raise ConfigError(
                    f"{where}: {place!r} is a list of parts: write [[{place}]] and a `part` for each"
                )
            changes[key] = tuple(parse_part(None, one, where, place) for one in item)
        elif isinstance(there, (str, int)):
            changes[key] = _typed(item, type(there), where, place)
        else:
            changes[key] = parse_part(there, item, where, place)
            if changes[key] is None and NoneType not in typing.get_args(typing.get_type_hints(Algorithm)[key]):
                raise ConfigError(f"{where}: {place!r} cannot be none: it takes {', '.join(list_parts(key))}")
    return _build(lambda: replace(current, **changes), where, dotted)  # type: ignore[no-any-return]


def parse_part(current: Any, value: Any, where: str, dotted: str) -> Any:
    """Build the part that a name, or a table of a `part` and its settings, describes; None for the word `none`.

    Args:
        current: the part that stands there: settings that are left out keep its values where it is of the same class.
        where: what holds the value, which begins the message of a refusal; dotted: the key there.

    Raises:
        ConfigError: no such part, a setting that it does not have, or a value of another type.
    """
    if value == NONE:
        return None
    value = {"part": value} if isinstance(value, str) else dict(_table(value, where, dotted))
    name = value.pop("part", None)
    if name is None and current is None:
        raise ConfigError(f"{where}: {dotted!r} needs a `part`, the class it is made of, e.g. part = 'Clip'")
    kind = type(current) if name is None else load_part_class(name, where, dotted)
    check_part_field(kind, where, dotted)
    known = {f.name for f in fields(kind)}
    hints = typing.get_type_hints(kind)
    for key in value:
        if key not in known:
            raise ConfigError(f"{where}: unknown key '{dotted}.{key}' of {kind.__name__}: {suggest_name(key, known)}")
    values = {k: _read_field(v, hints[k], where, f"{dotted}.{k}") for k, v in value.items()}
    same: Any = current if type(current) is kind else None
    return _build(lambda: kind(**values) if same is None else replace(same, **values), where, dotted)


def _read_field(value: Any, hint: Any, where: str, dotted: str) -> Any:
    if value == NONE and NoneType in typing.get_args(hint):
        return None
    return parse_part(None, value, where, dotted) if isinstance(value, Mapping) else _typed(value, hint, where, dotted)


# A configuration in words, from its TOML alone: whoever reads of a run need not have the parts that a user wrote.

PART_LABELS = {
    "advantage": "advantage Ψ",
    "ratio": "ratio",
    "gate": "gate w",
    "aggregation": "average c",
    "terms": "terms k",
    "corrections": "corrections",
    "shaping": "reward shaping",
    "filters": "filters",
    "critic": "critic",
    "reward_model": "reward model",
    "update_rule": "update_rule",
}
"""Of an algorithm, in the equation's order."""


def format_option(value: Any) -> str:
    """An option's value: a part as `Clip(low=0.2, high=0.28)`, a list with commas."""
    if isinstance(value, Mapping):
        inside = ", ".join(f"{k}={format_option(v)}" for k, v in value.items() if k != "part")
        return f"{value['part']}({inside})" if "part" in value and inside else str(value.get("part", inside))
    if isinstance(value, list):
        return ", ".join(map(format_option, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def format_parts(algorithm: Mapping[str, Any]) -> dict[str, str]:
    """Where a part goes -> the part; what is absent is left out."""
    said = {label: format_option(algorithm[key]) for key, label in PART_LABELS.items() if key in algorithm}
    return {label: text for label, text in said.items() if text not in ("", "none")}


# What a run was measured on and how, from the `run.toml` in its folder: its task, rewards and lengths, and no more of it.

EVAL_OPTIONS = (
    "task", "map", "skip_bad_rows", "reward", "environment", "environment_timeout", "eval/reward", "sampling", "seed",
    "trust_remote_code",
)  # fmt: skip
"""Options that mean the same where a model is measured."""
_READ = (*EVAL_OPTIONS, "evaluation", "rewards", "learner", "directory")


def load_eval_options(file: Path, allowed: CodePermissions) -> tuple[UncheckedRun, tuple[str, ...]]:
    """(the run as far as it is measured, with its files wherever they are, and the options that were objects of Python's, which the
    file does not hold).

    Its algorithm is not read, so that parts of one's own need no leave.

    Raises:
        ConfigError: what cannot be read, or code that is not allowed.
    """
    data = {name: value for name, value in resolve_directory(read_config(file), file).items() if name in _READ}
    objects = tuple(name for name, value in data.items() if _is_object(value))
    data = {name: value for name, value in data.items() if name not in objects}
    if isinstance(data.get("learner"), Mapping):
        data["learner"] = {name: data["learner"][name] for name in ("device", "dtype") if name in data["learner"]}
    check_permissions(with_full_paths(data), file, allowed)
    return resolve_paths(from_dict(data, UncheckedRun(), str(file))), objects


def _is_object(value: Any) -> bool:
    several = value if isinstance(value, list) else [value]
    return any(isinstance(word, str) and word.startswith(OBJECT_PREFIX) for word in several)
