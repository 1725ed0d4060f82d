"""Which code a configuration file may bring in, and where it may send texts and weights.

A file may come from anyone, so code that it names is imported only if one of these holds:

- the command line names it, in an option or by `--allow-code`;
- it lies below the current folder, but neither in the folder that the file came in nor among the installed packages;
- this process has already imported it, and it is not an installed package.

The Python of an engine that the run starts is code in this sense. Servers on other machines, and folders outside the file's own,
always need `--allow-code`. Nothing is imported to find this out.
"""

from __future__ import annotations

import importlib.util
import os
import shlex
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from policygrad.environments.registry import code_references, is_http_url, split_environment_name
from policygrad.errors import ConfigError
from policygrad.rewards.resolve import find_code, is_local_url
from policygrad.utils.plugins import find_plugin
from policygrad.utils.user_code import add_cwd_to_path, is_user_reference

RUN_FILE = "run.toml"
GENERATED_FILES = (RUN_FILE, "sft.toml", "reward-model.toml", "plan.json")
"""Configuration files that policygrad writes into the folder of a run or comparison; code beside them came with them."""
SAMPLER_TARGETS = ("sampler.urls", "sampler.folder", "sampler.python")
"""Options that say where prompts and weights go, or what program is run."""
TEACHER_FLAGS = ("teacher", "algorithm.reference.model", "algorithm.reference.teachers")
"""Flags that replace a file's teachers."""
_TEXT_FIELDS = ("name", "old_policy", "head")  # fields of an algorithm that hold text rather than parts


@dataclass(frozen=True)
class CodePermissions:
    """What the command line, or the caller, allows."""

    names: tuple[str, ...] = ()
    """Modules with everything in them, files, folders, servers."""
    remote_code: bool = False
    """Whether a model's own code may run."""
    overridden: frozenset[str] = frozenset()
    """Options that the command line sets, so that the file's values are not used: some of `SAMPLER_TARGETS` and `TEACHER_FLAGS`."""


NO_PERMISSIONS = CodePermissions()


def check_permissions(data: Mapping[str, Any], file: Path, permissions: CodePermissions) -> None:
    """Check that a file's options run no code, and send texts and weights nowhere, without permission.

    Raises:
        ConfigError: A permission is missing; the message says how to give it.
    """
    missing = filter_unpermitted(find_code_references(data), file, permissions)
    require_permissions(missing, bool(data.get("trust_remote_code")), file, permissions)
    if targets := find_remote_teachers(data, permissions):
        raise ConfigError(
            f"{file}: algorithm.reference names {', '.join(targets)}: prompts, completions and the API key would go to a teacher "
            f"on another machine, which a file cannot allow. To allow it, add --allow-code {shlex.join(targets)} (in Python "
            f"allow_code={tuple(targets)}), or set --teacher yourself"
        )
    if targets := find_remote_targets(data, file, permissions):
        raise ConfigError(
            f"{file}: sampler.urls, sampler.folder and sampler.python name {', '.join(targets)}: prompts and weights would go to "
            f"servers on another machine or to a folder outside {file.parent}, or a program would be run, which a file cannot "
            f"allow. To allow it, add --allow-code {shlex.join(targets)} (in Python allow_code={tuple(targets)}), or set "
            "--sampler.urls, --sampler.folder, --sampler.python yourself"
        )


def require_permissions(missing: Sequence[str], remote_code: bool, file: Path, permissions: CodePermissions) -> None:
    """Raise ConfigError if code in `missing` has no permission, or if the file wants a model's own code to run and may not."""
    if remote_code and not permissions.remote_code:
        raise ConfigError(
            f"{file}: trust_remote_code lets Python code in the model's folder run, which a file cannot allow: add "
            "--trust-remote-code (in Python pass the run, policygrad.train(run, resume=…)), or remove the line"
        )
    if missing:
        raise ConfigError(
            f"{file} names code of its own, {missing[0]}, which the command line does not: a run folder with custom parts or "
            f"rewards is a program. If it is yours, or you have read it, add --allow-code {shlex.join(missing)} (in Python "
            f"allow_code={tuple(missing)}); a row map that is given again, --row-map FILE:NAME, needs nothing else"
        )


def missing_permissions(
    data: Mapping[str, Any], file: Path, permissions: CodePermissions = NO_PERMISSIONS, *, new_process: bool = False
) -> list[str]:
    """Return the modules, files, servers and folders in a file's options that need permission and have none, sorted.
    `new_process`: Answer for another process, which has imported nothing yet."""
    code = filter_unpermitted(find_code_references(data), file, permissions, new_process=new_process)
    return sorted({*code, *find_remote_targets(data, file, permissions), *find_remote_teachers(data, permissions)})


def find_remote_targets(
    data: Mapping[str, Any], file: Path, permissions: CodePermissions = NO_PERMISSIONS
) -> list[str]:
    """Return the sampler's servers on other machines, the Python that starts its servers, and its folder if that is outside the
    file's own, without permission."""
    sampler = data.get("sampler")
    if not isinstance(sampler, Mapping):
        return []
    urls = [] if "sampler.urls" in permissions.overridden else sampler.get("urls", ())
    targets = [str(url) for url in urls if not is_local_url(str(url))] if isinstance(urls, (list, tuple)) else []
    python = None if "sampler.python" in permissions.overridden else sampler.get("python")
    # not resolved: the Python of a virtual environment is a link to another one
    if isinstance(python, str) and not _is_below_current_folder(
        Path(os.path.abspath(os.path.expanduser(python))), file
    ):
        targets.append(python)
    folder = None if "sampler.folder" in permissions.overridden else sampler.get("folder")
    if isinstance(folder, str):
        is_allowed = False
        with suppress(OSError, ValueError, RuntimeError):  # a NUL in it, or the home of an unknown user
            path = Path(folder).expanduser().resolve()
            allowed = [Path(name).expanduser().resolve() for name in (str(file.parent), *permissions.names)]
            is_allowed = any(path.is_relative_to(place) for place in allowed)
        targets += [] if is_allowed else [folder]
    return [target for target in targets if target not in permissions.names]


def find_remote_teachers(data: Mapping[str, Any], permissions: CodePermissions = NO_PERMISSIONS) -> list[str]:
    """Return the addresses of teachers on other machines that have no permission."""
    algorithm = data.get("algorithm")
    reference = algorithm.get("reference") if isinstance(algorithm, Mapping) else None
    if not isinstance(reference, Mapping) or permissions.overridden & set(TEACHER_FLAGS):
        return []
    teachers = reference.get("teachers")
    named = [reference.get("model"), *(teachers if isinstance(teachers, list) else ())]
    addresses = [_strip_name(item) for item in named if isinstance(item, str)]
    remote = [url for url in addresses if is_http_url(url) and not is_local_url(url)]
    return [url for url in remote if url not in permissions.names]


def _strip_name(teacher: str) -> str:
    """Return the model of NAME=MODEL, or of a model without a name."""
    name, _, model = teacher.partition("=")
    return model if name.replace("-", "_").isidentifier() else teacher


def filter_unpermitted(
    codes: Iterable[str], file: Path, permissions: CodePermissions, *, new_process: bool = False
) -> list[str]:
    """Return the modules, files and addresses named in `file` that need permission and have none, sorted."""
    return sorted(code for code in set(codes) if not _is_permitted(code, file, permissions, new_process))


def code_in_argv(argv: Sequence[str]) -> list[str]:
    """Return the modules, files and addresses that a command line names, by `--flag value` or `--flag=value`, also in a list."""
    names, flag, directory = set[str](), "", None
    for word in argv:
        value = word
        if word.startswith("--"):
            flag, _, value = word.partition("=")
        if flag == "--directory":
            directory = value or directory
        if value and flag == "--reward":
            names |= set(find_code(value))
        elif value and flag == "--environment":
            names |= set(code_references(value)) if is_user_reference(value) else set()
        else:
            for item in map(_strip_name, value.split(",") if value else ()):
                if is_http_url(item):
                    names |= set() if is_local_url(item) else {item}
                elif is_user_reference(item):
                    names |= set(code_references(item))
    return sorted(names | {str(Path(directory, name)) for name in names if directory and name.endswith(".py")})


def overridden_in_argv(argv: Sequence[str]) -> frozenset[str]:
    """Return the options of `CodePermissions.overridden` that a command line sets."""
    flags = {word.partition("=")[0] for word in argv}
    return frozenset(name for name in (*SAMPLER_TARGETS, *TEACHER_FLAGS) if f"--{name}" in flags)


def find_code_references(data: Mapping[str, Any]) -> Iterator[str]:
    """Yield everything that reading these options, and loading their rewards, would import."""
    rewards = data.get("reward")
    for name in rewards if isinstance(rewards, list) else [rewards]:
        if isinstance(name, str):
            yield from find_code(name)
    for option in ("row_map", "environment", "task"):
        name = data.get(option)
        if isinstance(name, str) and is_user_reference(name) and (option != "task" or split_environment_name(name)):
            yield from code_references(name)
    yield from _code_of_plugins(data)
    algorithm = data.get("algorithm")
    if isinstance(algorithm, Mapping):
        for key, value in algorithm.items():
            if key not in _TEXT_FIELDS:
                yield from _code_of_parts(value)
    elif isinstance(algorithm, str) and is_user_reference(algorithm):  # a name alone, which takes no settings
        yield algorithm.rpartition(":")[0] or algorithm


def _code_of_plugins(data: Mapping[str, Any]) -> Iterator[str]:
    """Yield the modules of other packages whose engine, environment, trackers, optimizer or algorithm the options name."""
    sampler, tracked, optimizer = data.get("sampler"), data.get("track"), data.get("optimizer")
    named = [("environment", data.get("environment")), ("algorithm", data.get("algorithm"))]
    named += [("engine", sampler.get("engine") if isinstance(sampler, Mapping) else None)]
    named += [("optimizer", optimizer.get("name") if isinstance(optimizer, Mapping) else None)]
    named += [("tracker", name) for name in (tracked if isinstance(tracked, list) else ())]
    for kind, name in named:
        plugin = find_plugin(kind, name.partition(":")[0]) if isinstance(name, str) else None
        if plugin is not None:
            yield plugin.module


def _code_of_parts(value: Any) -> Iterator[str]:
    if isinstance(value, str) and value.endswith(")"):  # with settings, as it is read
        from policygrad.training.config.part_text import read_part_call

        yield from _code_of_parts(read_part_call(value))
    elif isinstance(value, str) and is_user_reference(value):
        yield value.rpartition(":")[0] or value
    elif isinstance(value, list):
        for item in value:
            yield from _code_of_parts(item)
    elif isinstance(value, Mapping):
        yield from _code_of_parts(value.get("part"))
        yield from (code for item in value.values() if isinstance(item, Mapping) for code in _code_of_parts(item))


def _is_permitted(code: str, options_file: Path, permissions: CodePermissions, new_process: bool) -> bool:
    """Return whether code has permission, or needs none because of its location."""
    if code in permissions.names or code == "__main__":  # it is running
        return True
    if is_http_url(code) or split_environment_name(code):  # it sees what the model writes, or runs a command
        return False
    spec, location = None, code if code.endswith(".py") else None
    if location is None:
        top = code.partition(".")[0]  # to find a submodule, Python would import its package
        add_cwd_to_path(top)
        with suppress(ValueError, ImportError):
            spec = importlib.util.find_spec(top)
        folders = spec.submodule_search_locations if spec is not None else None
        location = spec.origin if spec and spec.has_location else next(iter(folders or ()), None)
    file = Path(location).expanduser().resolve() if location else None
    for allowed in permissions.names:
        name = allowed.rpartition(":")[0] or allowed
        if f"{code}.".startswith(f"{name}."):
            return True
        if file is not None and file.is_relative_to(Path(name).expanduser().resolve()):
            return True
    if file is None or not file.exists():  # built in; or missing, which importing it reports
        return file is not None or spec is None
    installed = {path for kind, path in sysconfig.get_paths().items() if kind.endswith("lib")}
    installed |= {path for path in sys.path if path.endswith("-packages")}
    if any(file.is_relative_to(Path(path).resolve()) for path in installed):
        return False
    if _is_below_current_folder(file, options_file):
        return True
    return not new_process and any(
        getattr(module, "__file__", None) == str(file) for module in list(sys.modules.values())
    )


def _is_below_current_folder(file: Path, options_file: Path) -> bool:
    """Return whether a file lies below the current folder, and not in the folder that the options came in."""
    current, folder = Path.cwd().resolve(), options_file.resolve().parent
    if folder == current:
        came_with_options = options_file.name in GENERATED_FILES
    elif folder.is_relative_to(current):  # in the subfolder that the options came in: `runs` for runs/grpo-1
        came_with_options = file.is_relative_to(current / folder.relative_to(current).parts[0])
    else:
        came_with_options = current.is_relative_to(folder)
    return file.is_relative_to(current) and not came_with_options
