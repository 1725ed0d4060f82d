"""What a file of options may have imported. Naming code on the command line is leave to run it; a file may come from anybody.

The same holds for where its texts and weights go: servers on other machines and folders outside of the file's own.

Without being asked for, a file's own code is imported where a script would find it who is written here: in the current folder, but
not in what the file came with, nor among the installed packages; and what this process has loaded already from elsewhere than
those. All else needs `--allow-code`. Nothing is imported to find that out.
"""

from __future__ import annotations

import importlib.util
import shlex
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from policygrad.environments.registry import code_references, split_environment_name
from policygrad.errors import ConfigError
from policygrad.rewards.resolve import find_code, is_local_url
from policygrad.utils.user_code import add_cwd_to_path, is_user_reference

RUN_FILE = "run.toml"
GENERATED_FILES = (RUN_FILE, "sft.toml", "reward-model.toml", "plan.json")
"""Files of options that policygrad writes into the folder of a run or of a comparison; code beside them came with them."""
_WORDS = ("name", "old_policy")  # of an algorithm, which are text and no parts


@dataclass(frozen=True)
class CodePermissions:
    """What the command line, or the caller, has said may run."""

    names: tuple[str, ...] = ()
    """Modules, with all that is in them; files; folders."""
    remote_code: bool = False
    """Whether a model's own code may."""
    overridden: frozenset[str] = frozenset()
    """Options that the command line sets anew, so that what the file says of them is not used: `sampler.urls`."""


NO_PERMISSIONS = CodePermissions()


def check_permissions(data: Mapping[str, Any], file: Path, allowed: CodePermissions) -> None:
    """Refuses a file of options that would run code nobody here has named, or send a run's texts and weights out of its folder and
    this machine. data: what it says.

    Raises:
        ConfigError: with the words that allow it.
    """
    require_permissions(
        filter_unpermitted(config_code_references(data), file, allowed),
        bool(data.get("trust_remote_code")),
        file,
        allowed,
    )
    if leads_out := find_remote_targets(data, file, allowed):
        raise ConfigError(
            f"{file}: sampler.urls and sampler.folder name {', '.join(leads_out)}: prompts and weights would go to servers on "
            f"another machine, or to a folder outside of {file.parent}, which a file cannot permit. If you want that, add --allow-code "
            f"{shlex.join(leads_out)} (from Python allow={tuple(leads_out)}), or give your own --sampler.urls, --sampler.folder"
        )


def require_permissions(missing: Sequence[str], remote_code: bool, file: Path, allowed: CodePermissions) -> None:
    """Refuse code that needs permission and has none. missing: its names; remote_code: whether the file asks for a model's own.

    Raises:
        ConfigError: with the words that allow it.
    """
    if remote_code and not allowed.remote_code:
        raise ConfigError(
            f"{file}: trust_remote_code lets Python in the model's folder run, which a file cannot say for you: give "
            "--trust-remote-code too (from Python pass the run, policygrad.train(run, resume=…)), or take the line out"
        )
    if missing:
        raise ConfigError(
            f"{file} names code of its own, {missing[0]}, which this command has not: a run folder with parts or rewards of one's "
            f"own is a program. If it is yours, or you have read it, add --allow-code {' '.join(missing)} (from Python "
            f"allow={tuple(missing)}); a map that is named again, --row-map FILE:NAME, needs no more"
        )


def missing_permissions(
    data: Mapping[str, Any], file: Path, allowed: CodePermissions = NO_PERMISSIONS, *, elsewhere: bool = False
) -> list[str]:
    """The modules and files that options in `file` would have imported, and the servers and folders elsewhere that a sampler would
    be given, as far as they need leave, sorted. elsewhere: in a process to come, which has loaded nothing."""
    return sorted(
        {
            *filter_unpermitted(config_code_references(data), file, allowed, elsewhere=elsewhere),
            *find_remote_targets(data, file, allowed),
        }
    )


def find_remote_targets(data: Mapping[str, Any], file: Path, allowed: CodePermissions = NO_PERMISSIONS) -> list[str]:
    """The servers on other machines that options in `file` would have a policy drawn by, and the folder outside of the file's own
    that they would have weights written to, as far as they need permission and have none."""
    sampler = data.get("sampler")
    if not isinstance(sampler, Mapping):
        return []
    urls = [] if "sampler.urls" in allowed.overridden else sampler.get("urls", ())
    found = [str(url) for url in urls if not is_local_url(str(url))] if isinstance(urls, (list, tuple)) else []
    folder = None if "sampler.folder" in allowed.overridden else sampler.get("folder")
    if isinstance(folder, str) and not any(_is_below(folder, place) for place in (str(file.parent), *allowed.names)):
        found.append(folder)
    return [place for place in found if place not in allowed.names]


def _is_below(folder: str, place: str) -> bool:
    try:
        return Path(folder).expanduser().resolve().is_relative_to(Path(place).expanduser().resolve())
    except (OSError, ValueError, RuntimeError):  # a NUL in it, or the home of a user that there is not
        return False


def filter_unpermitted(
    codes: Iterable[str], file: Path, allowed: CodePermissions, *, elsewhere: bool = False
) -> list[str]:
    """Those of the modules, files and addresses in `file` that need permission and have none, sorted."""
    asked = {code for code in codes if not _is_allowed(code, allowed)}
    return sorted(code for code in asked if not _is_ours(code, file, elsewhere))


def code_in_argv(words: Sequence[str]) -> list[str]:
    """The modules, files and addresses that a command line names, as `--flag value` or `--flag=value`, alone or in a list."""
    found, flag, directory = set[str](), "", None
    for word in words:
        value = word
        if word.startswith("--"):
            flag, _, value = word.partition("=")
        if flag == "--directory":
            directory = value or directory
        if value:
            pieces = [find_code(value)] if flag == "--reward" else map(_of_word, value.split(","))
            found |= {code for piece in pieces for code in piece}
    return sorted(found | {str(Path(directory, code)) for code in found if directory and code.endswith(".py")})


def overridden_in_argv(words: Sequence[str]) -> frozenset[str]:
    """Of the options that `Allowed.overridden` may hold, those that a command line sets."""
    flags = {word.partition("=")[0] for word in words}
    return frozenset(name for name in ("sampler.urls", "sampler.folder") if f"--{name}" in flags)


def _of_word(word: str) -> list[str]:
    if _is_address(word):
        return [] if is_local_url(word) else [word]
    return code_references(word) if is_user_reference(word) else []


def config_code_references(data: Mapping[str, Any]) -> Iterator[str]:
    """What reading these options would import: as `toml.from_dict` does, and the rewards when they are made."""
    rewards = data.get("reward")
    for name in rewards if isinstance(rewards, list) else [rewards]:
        if isinstance(name, str):
            yield from find_code(name)
    for option in ("map", "environment", "task"):
        name = data.get(option)
        if isinstance(name, str) and is_user_reference(name) and (option != "task" or split_environment_name(name)):
            yield from code_references(name)
    algorithm = data.get("algorithm")
    if isinstance(algorithm, Mapping):
        for key, value in algorithm.items():
            if key not in _WORDS:
                yield from _of_parts(value)
    else:
        yield from _of_parts(algorithm)


def _of_parts(value: Any) -> Iterator[str]:
    if isinstance(value, str) and is_user_reference(value):
        yield value.rpartition(":")[0] or value
    elif isinstance(value, list):
        for item in value:
            yield from _of_parts(item)
    elif isinstance(value, Mapping):
        yield from _of_parts(value.get("part"))
        yield from (code for item in value.values() if isinstance(item, Mapping) for code in _of_parts(item))


def _is_allowed(code: str, allowed: CodePermissions) -> bool:
    if code in allowed.names or _is_address(code):
        return code in allowed.names
    file = _file(code)
    for given in allowed.names:
        name = given.rpartition(":")[0] or given
        if f"{code}.".startswith(f"{name}."):
            return True
        if file is not None and file.is_relative_to(Path(name).expanduser().resolve()):
            return True
    return False


def _is_address(code: str) -> bool:
    return code.startswith(("http://", "https://"))


def _is_ours(code: str, options: Path, elsewhere: bool) -> bool:
    """Whether it is code of whoever runs this, as far as its place can tell."""
    if code == "__main__":  # which is running
        return True
    if _is_address(code):  # it would be shown what the model writes, and a key
        return False
    file = _file(code)
    if file is None or not file.exists():  # built in; or there is none, which whoever imports it says
        return file is not None or _spec(code) is None
    if any(file.is_relative_to(installed) for installed in _installed()):
        return False
    return _is_here(file, options) or (not elsewhere and _loaded(file))


def _is_here(file: Path, options: Path) -> bool:
    """Whether it is below the current folder, and not in that folder of it which the options came in (`runs` of runs/grpo-1)."""
    here, folder = Path.cwd().resolve(), options.resolve().parent
    if not file.is_relative_to(here):
        return False
    if folder == here:
        return options.name not in GENERATED_FILES
    if folder.is_relative_to(here):
        return not file.is_relative_to(here / folder.relative_to(here).parts[0])
    return not here.is_relative_to(folder)


def _loaded(file: Path) -> bool:
    return any(getattr(module, "__file__", None) == str(file) for module in list(sys.modules.values()))


def _installed() -> list[Path]:
    """Where packages are, Python's own among them: nobody wrote those for this run."""
    places = {place for kind, place in sysconfig.get_paths().items() if kind.endswith("lib")}
    return [Path(place).resolve() for place in {*places, *(p for p in sys.path if p.endswith("-packages"))}]


def _file(code: str) -> Path | None:
    """The file, or the package's folder, that the name would import; None = it has none, or there is no such module."""
    if code.endswith(".py"):
        return Path(code).expanduser().resolve()
    spec = _spec(code)
    if spec is None:
        return None
    if spec.origin and spec.has_location:
        return Path(spec.origin).resolve()
    return Path(next(iter(spec.submodule_search_locations))).resolve() if spec.submodule_search_locations else None


def _spec(code: str) -> Any:
    """Of the first word: to find a submodule, Python would import what it is in."""
    top = code.partition(".")[0]
    add_cwd_to_path(top)
    try:
        return importlib.util.find_spec(top)
    except (ValueError, ImportError):
        return None
