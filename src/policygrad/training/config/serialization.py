"""A run's configuration as TOML, both ways, and read from YAML too. An unknown key is an error that suggests the closest known one.

A part of the algorithm is a table whose `part` names its class (`Clip`, or `module:Class` or `path/to/file.py:Class` for a custom
one); without `part` the table changes fields of the part that is already there. A text stands for a table: "Clip(low=0.1)", or
"Clip" for one of `part` alone. "none" stands for no part.

The structuring is written by hand rather than with cattrs: options change a base instead of building a new object, parts are
chosen by name and may be user code, and every message names file, key and remedy, so that all but the scalars would be custom
hooks.
"""

from __future__ import annotations

import difflib
import tomllib
import typing
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from functools import partial
from pathlib import Path
from types import NoneType, UnionType
from typing import Any

import tomli_w

from policygrad import parts
from policygrad.algorithms import ALGORITHMS, get_algorithm
from policygrad.core.algorithm import Algorithm
from policygrad.core.base import Part
from policygrad.core.validation import ROLES, frozen_problem
from policygrad.errors import ConfigError
from policygrad.training.config.paths import resolve_config_paths, resolve_directory, with_full_paths
from policygrad.training.config.run import OBJECT_PREFIX, Run, UncheckedRun
from policygrad.training.config.trust import NO_PERMISSIONS, CodePermissions, check_permissions
from policygrad.utils.filesystem import read_toml
from policygrad.utils.plugins import find_plugin
from policygrad.utils.user_code import find_assignment, find_definition, import_path, is_user_reference, load_object

if typing.TYPE_CHECKING:
    from policygrad.training.config.supervised import SupervisedConfig

NONE = "none"
YAML_SUFFIXES = (".yaml", ".yml")
C = typing.TypeVar("C", bound=Any)  # a frozen dataclass
ConfigT = typing.TypeVar("ConfigT", bound="UncheckedRun | SupervisedConfig")


def dump_config(config: Run | SupervisedConfig) -> str:
    """Return the complete configuration as TOML."""
    return tomli_w.dumps(_to_plain(config.without_objects() if isinstance(config, Run) else config))


def load_config(path: Path | str, base: ConfigT, permissions: CodePermissions = NO_PERMISSIONS) -> ConfigT:
    """Return `base` changed by a file's options. `permissions`: Code that the file may name.

    Raises:
        ConfigError: The file cannot be read or is neither TOML nor YAML, names code without permission, has an unknown key or a
            value of the wrong type, or its parts contradict each other.
    """
    path = Path(path)
    try:
        data = resolve_directory(read_config_file(path), path)
        check_permissions(with_full_paths(data), path, permissions)
        return from_dict(data, base, str(path))
    except RecursionError as error:
        raise ConfigError(f"{path} cannot be read as a configuration: its tables are nested too deeply") from error


def read_config_file(path: Path) -> dict[str, Any]:
    """Return a file's tables, YAML if its name says so, else TOML. Raises ConfigError if it cannot be read as that."""
    try:
        if path.suffix.lower() not in YAML_SUFFIXES:
            return read_toml(path)
        from policygrad.utils.yaml_files import read_yaml

        return read_yaml(path)
    except ImportError:
        raise ConfigError(
            f"{path} is YAML, which needs PyYAML: pip install pyyaml, or write the file as TOML"
        ) from None
    except OSError as error:
        raise ConfigError(f"cannot read the configuration {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 (byte {error.start}): save it as UTF-8") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from error
    except ValueError as error:  # no YAML, deeply nested brackets, or an integer of thousands of digits
        raise ConfigError(f"{path} cannot be read as a configuration: {error}") from error


def algorithm_to_dict(algorithm: Algorithm) -> dict[str, Any]:
    """Return every part with its class and fields, in a form that JSON and TOML can hold."""
    out: dict[str, Any] = {}
    for f in fields(algorithm):
        value = getattr(algorithm, f.name)
        if isinstance(value, tuple):
            out[f.name] = [_part_to_dict(part) for part in value]
        else:
            out[f.name] = value if isinstance(value, (str, int)) else NONE if value is None else _part_to_dict(value)
    return out


def _part_to_dict(part: Any) -> dict[str, Any]:
    kind = type(part)
    is_custom = getattr(parts, kind.__name__, None) is not kind
    out: dict[str, Any] = {"part": import_path(kind) if is_custom else kind.__name__}
    for f in fields(part):
        value = getattr(part, f.name)
        # an open field is written as "none": left out, it would be read as the named algorithm's value
        value = list(value) if isinstance(value, tuple) else value
        out[f.name] = NONE if value is None else _part_to_dict(value) if is_dataclass(value) else value
    return out


def _to_plain(value: Any) -> Any:
    if isinstance(value, Algorithm):
        return algorithm_to_dict(value)
    if is_dataclass(value):
        items = ((f.name, getattr(value, f.name)) for f in fields(value))
        return {name: _to_plain(item) for name, item in items if item is not None}
    return [_to_plain(item) for item in value] if isinstance(value, (tuple, list)) else value


def suggest_name(name: str, names: Iterable[str]) -> str:
    """Return "did you mean …?" for the closest name, or all known names."""
    names = list(names)
    closest = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return f"did you mean {closest[0]!r}?" if closest else f"known: {', '.join(sorted(names))}"


def list_parts(field: str | None = None) -> list[str]:
    """Return the class names of policygrad's parts, sorted; with `field`, those that fit this field of an algorithm."""
    kinds = [(name, getattr(parts, name)) for name in parts.__all__]
    places = [(name, _field_of(kind)) for name, kind in kinds if isinstance(kind, type)]
    return [name for name, place in places if (place == field if field else place is not None)]


def load_part_class(name: str, where: str, dotted: str) -> type:
    """Return the class of a part by its policygrad name, `module:Class`, or `path/to/file.py:Class`.

    Raises:
        ConfigError: There is no such class, or it is no frozen dataclass.
    """
    if is_user_reference(name):
        try:
            kind = load_object(name, f"{where}: {dotted}: cannot import the part {name!r}")
        except ConfigError as error:
            in_script = name.startswith("__main__:")
            hint = "; it was defined in a script: move the class to a module of its own" if in_script else ""
            raise ConfigError(f"{error}{hint}") from error
        if isinstance(kind, Algorithm):
            raise ConfigError(
                f"{where}: {dotted}: {name!r} ({find_assignment(name)}) is an algorithm, not a part: use --algorithm {name}"
            )
        if not isinstance(kind, type):
            raise ConfigError(f"{where}: {dotted}: {name!r} is not a part: name its class, which is a frozen dataclass")
        if problem := frozen_problem(kind):
            raise ConfigError(f"{where}: {dotted}: {name!r}: {problem}")
        return kind
    names = list_parts()
    if name not in names:
        if not difflib.get_close_matches(name, names, 1, 0.5):
            names = list_parts(dotted.rpartition(".")[2]) or names
        raise ConfigError(
            f"{where}: {dotted}: no part is called {name!r}: {suggest_name(name, names)}; a custom one is module:Class or "
            "file.py:Class"
        )
    return getattr(parts, name)  # type: ignore[no-any-return]


def load_algorithm(name: str) -> Algorithm:
    """Return a named algorithm, or a custom one: `module:NAME`, `path/to/file.py:NAME`.

    Raises:
        ConfigError: The name is unknown, the code cannot be imported, or the object is no algorithm.
    """
    if not is_user_reference(name):
        kind = getattr(parts, name) if name in parts.__all__ else None
        if isinstance(kind, type) and (field := _field_of(kind)):
            joined = f" Several are joined by commas: --algorithm.{field} FIRST,{name}" if ROLES[field].is_tuple else ""
            raise ConfigError(
                f"{name!r} is a part, not an algorithm: it goes into {field}, --algorithm.{field} {name}.{joined}"
            )
        if name not in ALGORITHMS and (plugin := find_plugin("algorithm", name)) is not None:
            return load_algorithm(plugin.target)
        return get_algorithm(name)
    value = load_object(name, f"algorithm {name!r}", Algorithm)
    if isinstance(value, type) and is_dataclass(value):
        field = next((field for field, role in ROLES.items() if issubclass(value, role.bases)), "FIELD")
        raise ConfigError(
            f"algorithm {name!r}: {find_definition(value) or name} is a part, not an algorithm: put it into one, "
            f"--algorithm.{field} {name}, or in the file NAME = dataclasses.replace(policygrad.GRPO, {field}=…)"
        )
    if not isinstance(value, Algorithm):
        raise ConfigError(
            f"algorithm {name!r} ({find_assignment(name)}) is {type(value).__name__}, not a policygrad.Algorithm"
        )
    return replace(value, name=name.rpartition(":")[2]) if value.name == Algorithm().name else value


def _field_of(kind: type) -> str | None:
    """Return the field of an algorithm that one of policygrad's parts goes into; None = the class is no such part."""
    if not kind.__module__.startswith("policygrad.core.") or kind.__module__ == "policygrad.core.base":
        return None
    return next((field for field, role in ROLES.items() if issubclass(kind, role.bases)), None)


def check_part_field(kind: type, where: str, dotted: str) -> None:
    """Raise ConfigError for one of policygrad's parts in a field where it has no meaning; custom parts may go anywhere."""
    field, expected = dotted.rpartition(".")[2], _field_of(kind)
    if expected is not None and expected != field and field in ROLES:
        raise ConfigError(
            f"{where}: {dotted}: {kind.__name__} goes into {expected!r}, not {field!r}, which takes {', '.join(list_parts(field))}"
        )


def from_dict(data: Mapping[str, Any], base: C, where: str, dotted: str = "") -> C:
    """Return `base` changed by nested mappings as TOML has them.

    Args:
        where: What holds them, which starts every error message.
        dotted: The key there; "" = the complete configuration.
    """
    hints = typing.get_type_hints(type(base))
    names, changes = {f.name for f in fields(base)}, dict[str, Any]()
    for key, value in data.items():
        place = f"{dotted}.{key}" if dotted else key
        if key not in names:
            raise ConfigError(f"{where}: unknown key {place!r}: {suggest_name(key, names)}")
        current = getattr(base, key)
        if value is None and current is None:  # YAML's null
            continue
        if isinstance(base, Algorithm) and isinstance(current, tuple):
            if not isinstance(value, list):
                raise ConfigError(f"{where}: {place!r} is a list of parts: write [[{place}]] and a `part` for each")
            changes[key] = tuple(parse_part(None, part, where, place) for part in value)
        elif isinstance(base, Algorithm) and not isinstance(current, str | int):
            changes[key] = parse_part(current, value, where, place)
            if changes[key] is None and NoneType not in typing.get_args(hints[key]):
                raise ConfigError(f"{where}: {place!r} cannot be none: it takes {', '.join(list_parts(key))}")
        elif isinstance(current, Algorithm) and isinstance(value, str):
            changes[key] = _build(partial(load_algorithm, value), where, place)
        elif is_dataclass(current):
            table = _check_table(value, where, place)
            name = table.get("name")
            if isinstance(current, Algorithm) and isinstance(name, str) and name != current.name:
                try:
                    current = get_algorithm(name)
                except ValueError:
                    current = replace(current, name=name)  # a custom algorithm, given part by part
            changes[key] = from_dict(table, current, where, place)
        else:
            changes[key] = _parse_value(value, hints[key], where, place)
    return _build(lambda: replace(base, **changes), where, dotted or "the run")  # type: ignore[no-any-return]


def _build(make: typing.Callable[[], Any], where: str, dotted: str) -> Any:
    try:
        return make()
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{where}: {dotted}: {error}") from error


def _check_table(value: Any, where: str, dotted: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ConfigError(f"{where}: {dotted!r} is a table, not {value!r}: write [{dotted}] and its keys below")
    return value


def _parse_value(value: Any, hint: Any, where: str, dotted: str) -> Any:
    is_union = isinstance(hint, UnionType) or typing.get_origin(hint) is typing.Union
    kinds = [kind for kind in (typing.get_args(hint) if is_union else (hint,)) if kind is not NoneType]
    if value is None and is_union and NoneType in typing.get_args(hint):
        return None
    if isinstance(value, str) and value.startswith(OBJECT_PREFIX):
        raise ConfigError(
            f"{where}: {dotted!r} was a {value.removeprefix(OBJECT_PREFIX)} object given in Python, which no file can hold: "
            "resume from Python, pg.train(run, resume=folder) with the same object, or write a name here"
        )
    for kind in kinds:
        kind = str if kind is Any else kind  # a name here, where Python may give an object
        if typing.get_origin(kind) is tuple and isinstance(value, list):
            items = typing.get_args(kind)
            if items[-1] is Ellipsis:
                items = items[:1] * len(value)
            elif len(items) != len(value):
                raise ConfigError(f"{where}: {dotted!r} must be a list of {len(items)}, not {value!r}")
            pairs = enumerate(zip(value, items, strict=True))
            return tuple(_parse_value(item, hint, where, f"{dotted}[{i}]") for i, (item, hint) in pairs)
        if typing.get_origin(kind) is typing.Literal and isinstance(value, str):
            return value  # the part checks it, and explains what it accepts
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            return float(value)
        if isinstance(kind, type) and isinstance(value, kind) and not (kind is int and isinstance(value, bool)):
            return value
    raise ConfigError(f"{where}: {dotted!r} must be {' or '.join(map(_describe_type, kinds))}, not {value!r}")


def _describe_type(kind: Any) -> str:
    if typing.get_origin(kind) is tuple:
        return f"a list of {_describe_type(typing.get_args(kind)[0])}"
    name = getattr(kind, "__name__", str(kind))
    texts = {"int": "a whole number", "float": "a number", "bool": "true or false"}
    return texts.get(name, "text in quotes" if name in ("Any", "str", "Literal") else name)


def parse_part(current: Any, value: Any, where: str, dotted: str) -> Any:
    """Build the part that a name, or a table of a `part` and its settings, describes; None for "none".

    Args:
        current: The present part; if it is of the same class, settings that are left out keep its values.
        where: What holds the value, which starts every error message.
        dotted: The value's key there.

    Raises:
        ConfigError: There is no such part or setting, or a value has the wrong type.
    """
    if value is None or value == NONE:  # YAML's null, TOML's "none"
        return None
    value = {"part": value} if isinstance(value, str) else dict(_check_table(value, where, dotted))
    name = value.pop("part", None)
    if isinstance(name, str) and name.endswith(")"):
        from policygrad.training.config.part_text import read_part_call

        name, value = (
            (call := dict(_build(partial(read_part_call, name), where, dotted))).pop("part"),
            {**call, **value},
        )
    if name is None and current is None:
        raise ConfigError(f"{where}: {dotted!r} needs a `part`, the name of its class, e.g. part = 'Clip'")
    kind = type(current) if name is None else load_part_class(name, where, dotted)
    check_part_field(kind, where, dotted)
    names = {f.name for f in fields(kind)}
    hints = typing.get_type_hints(kind)
    values: dict[str, Any] = {}
    for key, item in value.items():
        if key not in names:
            raise ConfigError(f"{where}: unknown key '{dotted}.{key}' of {kind.__name__}: {suggest_name(key, names)}")
        place = f"{dotted}.{key}"
        if (item is None or item == NONE) and NoneType in typing.get_args(hints[key]):
            values[key] = None
        elif isinstance(item, Mapping) or _names_part(item, hints[key]):
            values[key] = parse_part(None, item, where, place)
        else:
            values[key] = _parse_value(item, hints[key], where, place)
    same: Any = current if type(current) is kind else None
    return _build(lambda: kind(**values) if same is None else replace(same, **values), where, dotted)


def _names_part(value: Any, hint: Any) -> bool:
    """Return whether a setting that holds a part is given as the name of one of policygrad's, or as its call."""
    is_held = any(isinstance(kind, type) and issubclass(kind, Part) for kind in (hint, *typing.get_args(hint)))
    return is_held and isinstance(value, str) and not is_user_reference(value)


# A configuration for people, from its TOML alone, so that a run can be read about without its custom parts.

# An algorithm's fields, in the equation's order.
PART_LABELS = {
    "advantage": "advantage Ψ",
    "ratio": "ratio",
    "gate": "gate w",
    "aggregation": "aggregation c",
    "terms": "terms k",
    "corrections": "corrections",
    "shaping": "reward shaping",
    "filters": "filters",
    "critic": "critic",
    "reward_model": "reward model",
    "update_rule": "update rule",
}


def format_option(value: Any) -> str:
    """Return an option's value as text: a part as `Clip(low=0.2, high=0.28)`, a list with commas."""
    if isinstance(value, Mapping):
        settings = ", ".join(f"{k}={format_option(v)}" for k, v in value.items() if k != "part")
        return f"{value['part']}({settings})" if "part" in value and settings else str(value.get("part", settings))
    if isinstance(value, list):
        return ", ".join(map(format_option, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def format_parts(algorithm: Mapping[str, Any]) -> dict[str, str]:
    """Return label → part for the parts that an algorithm has."""
    texts = {label: format_option(algorithm[key]) for key, label in PART_LABELS.items() if key in algorithm}
    return {label: text for label, text in texts.items() if text not in ("", NONE)}


EVAL_OPTIONS = (
    *(
        "task",
        "row_map",
        "skip_bad_rows",
        "fetch_images",
        "reward",
        "environment",
        "environment_timeout",
        "environment_env",
        "eval_data",
        "sampling",
    ),
    *("seed", "trust_remote_code", "template_options"),
)
"""Options that mean the same in training and evaluation."""


def load_eval_options(
    file: Path, permissions: CodePermissions, names: Sequence[str] = EVAL_OPTIONS
) -> tuple[UncheckedRun, tuple[str, ...]]:
    """Return what an evaluation uses of a run's `run.toml`: its task, rewards and lengths, with full paths, and the names of
    options that were Python objects, which the file does not hold. Raises ConfigError if the file cannot be read, or names code
    without permission.

    The algorithm is not read, so that its custom parts need no permission. names: the options to read, of EVAL_OPTIONS."""
    names = (*names, "evaluation", "rewards", "learner", "directory")
    data = {name: value for name, value in resolve_directory(read_config_file(file), file).items() if name in names}
    objects = tuple(
        name
        for name, value in data.items()
        if any(
            isinstance(x, str) and x.startswith(OBJECT_PREFIX) for x in (value if isinstance(value, list) else [value])
        )
    )
    data = {name: value for name, value in data.items() if name not in objects}
    if isinstance(data.get("learner"), Mapping):
        data["learner"] = {name: data["learner"][name] for name in ("device", "dtype") if name in data["learner"]}
    check_permissions(with_full_paths(data), file, permissions)
    return resolve_config_paths(from_dict(data, UncheckedRun(), str(file))), objects
