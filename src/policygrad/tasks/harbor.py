"""Tasks in Harbor's format, such as Terminal-Bench 2's: folders with task.toml, instruction.md, environment/ and tests/test.sh.

A folder is read as data, without running anything of it; `environments/harbor.py` runs its episodes. What a task needs and cannot
have here is said before a run, with every task that it concerns.
"""

from __future__ import annotations

import json
import math
import os
import posixpath
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from policygrad.errors import ConfigError, DataError
from policygrad.sandbox.backends import find_backend
from policygrad.sandbox.containers import ENGINES, explain_engine, find_engine
from policygrad.tasks.sources import HARBOR_PREFIX, Row
from policygrad.utils.filesystem import read_text_bounded, read_toml

NAME_COLUMN, FOLDER_COLUMN = "name", "folder"
DEFAULT_FOLDER = "/app"
"""Where a task works whose Dockerfile and task.toml name no folder."""
_MAX_TEXT = 1 << 20  # bytes of an instruction or a Dockerfile
_MAX_SECONDS = 24 * 3600.0
_RESERVED = (
    *("bin", "boot", "dev", "etc", "lib", "lib32", "lib64", "libx32", "proc", "run", "sbin", "sys", "usr"),
    *("logs", "tests"),
)
"""Folders of the root that are this machine's, or the verifier's: a Dockerfile that copies there needs a container."""


@dataclass(frozen=True)
class HarborTask:
    """A task: what the policy is told, what its Dockerfile makes, and its limits."""

    name: str
    folder: Path
    instruction: str
    recipe: Recipe
    image: str = ""
    """One that is there already (`docker_image`); "" = the Dockerfile's."""
    work_folder: str = DEFAULT_FOLDER
    """Where commands and the verifier begin."""
    agent_seconds: float = 600.0
    """Of all commands together, and of an agent's program."""
    verifier_seconds: float = 600.0
    build_seconds: float = 600.0
    memory: int = 2048 << 20
    """Bytes."""
    disk: int = 10240 << 20
    """Bytes."""
    cpus: float = 1.0
    network: bool = False
    """Whether task.toml says that it may use the internet (`allow_internet = true`)."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Of the environment."""
    verifier_variables: Mapping[str, str] = field(default_factory=dict)
    difficulty: str = ""
    category: str = ""

    @property
    def has_image(self) -> bool:
        """Whether a container engine finds or builds an image of it."""
        return bool(self.image) or not self.recipe.is_missing

    @property
    def needs_container(self) -> str:
        """Why this machine's programs and the task's files do not suffice; "" = they do."""
        if self.image:
            return "it names an image (docker_image)"
        return "it asks for the internet (allow_internet)" if self.network else self.recipe.needs


@dataclass(frozen=True)
class Recipe:
    """A Dockerfile, as far as it is about files."""

    folder: str = ""
    """Its last WORKDIR; "" = none."""
    copies: tuple[tuple[str, str], ...] = ()
    """Of its environment: (a name there, a path inside, which ends with / where it is a folder)."""
    variables: Mapping[str, str] = field(default_factory=dict)
    needs: str = ""
    """Its first instruction that needs a container; "" = none."""
    is_missing: bool = False
    """True if there is no Dockerfile."""


class HarborTasks:
    """The tasks of a folder as rows: prompt, name, folder, difficulty, category."""

    fits_in_memory = True

    def __init__(self, name: str) -> None:
        self.folder, self._name = split_harbor_name(name).folder, name
        self._tasks = read_tasks(self.folder)

    def __len__(self) -> int:
        return len(self._tasks)

    def __getitem__(self, index: int) -> Row:
        task = self._tasks[index]
        if isinstance(task, BadTask) or explain_unusable(task):
            raise DataError(self._explain())
        prompt = ({"role": "user", "content": task.instruction},)
        columns = {NAME_COLUMN: task.name, FOLDER_COLUMN: str(task.folder)}
        return str(task.folder), {
            "prompt": prompt,
            **columns,
            "difficulty": task.difficulty,
            "category": task.category,
        }

    def _explain(self) -> str:
        """Return why tasks cannot be used, all of them by name."""
        reasons = dict[str, list[str]]()
        for task in self._tasks:
            if reason := task.reason if isinstance(task, BadTask) else explain_unusable(task):
                reasons.setdefault(reason, []).append(task.name)
        texts = [f"{', '.join(names)}: {reason}" for reason, names in reasons.items()]
        count = sum(map(len, reasons.values()))
        return (
            f"{self._name}: {count} of its {len(self._tasks)} tasks cannot be used here. {'; '.join(texts)}. "
            "--task.skip-bad-rows leaves such tasks out"
        )


@dataclass(frozen=True)
class BadTask:
    """A folder that is no task, or one that nothing here can run."""

    name: str
    reason: str


@dataclass(frozen=True)
class HarborName:
    """The parts of `harbor:FOLDER[,engine=ENGINE][,agent=COMMAND]`."""

    folder: str
    engine: str = "auto"
    agent: str = ""


def split_harbor_name(name: str) -> HarborName:
    """Split the name of a task or an environment. Raises ConfigError for a folder that is none, or an unknown engine."""
    rest, _, agent = name.removeprefix(HARBOR_PREFIX).partition(",agent=")
    folder, _, engine = rest.partition(",engine=")
    engines = ("auto", "none", *ENGINES)
    if engine and engine not in engines:
        raise ConfigError(f"harbor:{rest} names the engine {engine!r}: choose one of {', '.join(engines)}")
    if not Path(folder).is_dir():
        raise ConfigError(
            f"harbor:{folder} names no folder: give that of a task (with task.toml and instruction.md), or one of several such "
            "folders"
        )
    return HarborName(folder, engine or "auto", agent)


@lru_cache(maxsize=8)
def read_tasks(folder: str) -> tuple[HarborTask | BadTask, ...]:
    """Read a task's folder, or all folders of tasks in one, in the order of their names. Once per process.

    Raises:
        DataError: There is no task in it.
    """
    top = Path(folder).resolve()
    if (top / "task.toml").exists() or (top / "instruction.md").exists():
        folders = [top]
    else:
        marks = ("task.toml", "instruction.md")
        folders = [
            path for path in sorted(top.iterdir()) if path.is_dir() and any((path / mark).exists() for mark in marks)
        ]
    if not folders:
        raise DataError(f"harbor:{folder}: no folder in it has a task.toml, which a task in Harbor's format has")
    return tuple(map(_read_task, folders))


def find_task(folder: str, name: object) -> HarborTask | None:
    """Return the task of an example, by its column `folder`; None = it is not one of this folder's."""
    return next((t for t in read_tasks(folder) if isinstance(t, HarborTask) and str(t.folder) == name), None)


def explain_unusable(task: HarborTask, engine: str = "auto", *, agent: bool = False) -> str:
    """Return why a task cannot be run with this engine, or by an agent's program; "" = it can."""
    needs = task.needs_container
    if agent and needs:
        return f"{needs}, which agent= cannot have: an agent's program runs in bubblewrap"
    if not agent and task.has_image and choose_engine(engine) is not None:
        return ""
    if needs:
        tried = ENGINES if engine == "auto" else () if engine == "none" else (engine,)
        reasons = "; ".join(f"{name}: {explain_engine(name)}" for name in tried) or "engine=none"
        return f"{needs}, for which a container engine is needed ({reasons})"
    try:
        find_backend("bubblewrap")
    except ConfigError as error:
        return (
            f"its verifier needs a {task.work_folder}, /tests and /logs of its own, and neither a container engine nor bubblewrap "
            f"works here: {error}"
        )
    return ""


def choose_engine(engine: str) -> str | None:
    """Return the container engine that tasks run in; None = in bubblewrap."""
    if engine in ENGINES:
        return engine if explain_engine(engine) == "" else None
    return find_engine() if engine == "auto" else None


def _read_task(folder: Path) -> HarborTask | BadTask:
    try:
        return _parse_task(folder)
    except FileNotFoundError as error:
        return BadTask(folder.name, f"it has no {Path(str(error.filename)).relative_to(folder)}")
    except (OSError, ValueError) as error:  # also text that is not UTF-8
        return BadTask(folder.name, str(error).replace(f"{folder}{os.sep}", ""))


def _parse_task(folder: Path) -> HarborTask:
    """Raises OSError for a file that cannot be read, ValueError for anything that cannot be used."""
    try:
        _read_text(folder / "task.toml")
        config = read_toml(folder / "task.toml")
    except ValueError as error:
        raise ValueError(f"its task.toml is no TOML: {error}") from error
    tables = {name: _table(config, name) for name in ("task", "metadata", "agent", "verifier", "environment")}
    agent, verifier, environment = tables["agent"], tables["verifier"], tables["environment"]
    if config.get("steps"):
        raise ValueError("it has several steps ([[steps]]), and an episode here has one instruction and one verifier")
    if verifier.get("environment_mode", "shared") != "shared" or verifier.get("environment"):
        raise ValueError(
            "its verifier runs in a container of its own ([verifier] environment_mode), which is unsupported"
        )
    if environment.get("gpus"):
        raise ValueError("it asks for GPUs ([environment] gpus), which an episode cannot have")
    if environment.get("mcp_servers"):
        raise ValueError("it has MCP servers ([environment] mcp_servers), which are unsupported")
    where = folder / "environment"
    for name in ("docker-compose.yaml", "docker-compose.yml"):
        if (where / name).exists():
            raise ValueError(f"its environment is one of docker compose (environment/{name}), which is unsupported")
    instruction = _read_text(folder / "instruction.md").strip()
    if not instruction:
        raise ValueError("its instruction.md is empty")
    if not (folder / "tests" / "test.sh").is_file():
        raise ValueError("it has no tests/test.sh, which writes the reward")
    recipe, image = _read_recipe(where), environment.get("docker_image") or ""
    if not isinstance(image, str):
        raise ValueError("[environment] docker_image in its task.toml is no text")
    if image.startswith("-"):
        raise ValueError(f"[environment] docker_image in its task.toml is {image[:40]!r}, which names no image")
    work_folder = posixpath.normpath(str(environment.get("workdir") or recipe.folder or DEFAULT_FOLDER))
    if not recipe.needs and (reason := _explain_path(work_folder)):
        recipe = Recipe(needs=f"it works in {work_folder}, {reason}")
    metadata = tables["metadata"]
    return HarborTask(
        folder.name,
        folder,
        instruction,
        recipe,
        image,
        work_folder,
        _number(agent, "agent", "timeout_sec", 600.0, _MAX_SECONDS),
        _number(verifier, "verifier", "timeout_sec", 600.0, _MAX_SECONDS),
        _number(environment, "environment", "build_timeout_sec", 600.0, _MAX_SECONDS),
        int(_number(environment, "environment", "memory_mb", 2048, 1 << 20)) << 20,
        int(_number(environment, "environment", "storage_mb", 10240, 1 << 24)) << 20,
        _number(environment, "environment", "cpus", 1, 1024),
        _allows_network(environment),
        {**recipe.variables, **_variables(environment, "environment")},
        _variables(verifier, "verifier"),
        str(metadata.get("difficulty") or ""),
        str(metadata.get("category") or ""),
    )


def _read_text(path: Path) -> str:
    if path.exists() and not path.is_file():
        raise ValueError(f"its {path.name} is no file")
    return read_text_bounded(path, _MAX_TEXT)


def _table(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = config.get(name, {})
    if not isinstance(value, dict):
        raise ValueError(f"[{name}] in its task.toml is no table")
    return value


def _number(table: Mapping[str, Any], where: str, name: str, default: float, maximum: float) -> float:
    value = table.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ValueError(f"[{where}] {name} in its task.toml is {str(value)[:40]!r}, and must be a number above 0")
    return min(float(value), maximum)


def _variables(table: Mapping[str, Any], where: str) -> dict[str, str]:
    """Return a table of environment variables. One that would be taken from this machine is refused: it is likely a secret."""
    values = table.get("env") or {}
    if not isinstance(values, dict) or not all(isinstance(value, str) for value in values.values()):
        raise ValueError(f"[{where}] env in its task.toml is no table of texts")
    if names := [name for name, value in values.items() if "${" in value]:
        raise ValueError(f"[{where}] env in its task.toml takes {names[0]} from this machine, which no task is given")
    if names := [name for name in values if "=" in name or not name.isprintable() or not name]:
        raise ValueError(f"[{where}] env in its task.toml has {names[0]!r}, which is no name of a variable")
    return values


def _allows_network(environment: Mapping[str, Any]) -> bool:
    """Return whether the task says that it needs the internet; a task that says nothing has none."""
    mode = environment.get("network_mode")
    if mode not in (None, "public", "no-network"):
        raise ValueError(f"[environment] network_mode in its task.toml is {str(mode)[:40]!r}, which is unsupported")
    return mode == "public" or environment.get("allow_internet") is True


# Dockerfiles that are about files.


def _read_recipe(folder: Path) -> Recipe:
    """Read a Dockerfile; without one, all files of the environment are in the folder that a task works in."""
    if not folder.is_dir():
        return Recipe(is_missing=True)
    if not (folder / "Dockerfile").exists():
        return Recipe(copies=((".", f"{DEFAULT_FOLDER}/"),), is_missing=True)
    recipe = parse_dockerfile(_read_text(folder / "Dockerfile"))
    if not recipe.needs and (folder / ".dockerignore").exists() and recipe.copies:
        return Recipe(needs="its environment has a .dockerignore")
    return recipe


def parse_dockerfile(text: str) -> Recipe:
    """Return what a Dockerfile does with files, or its first instruction that needs a container."""
    folder, copies, variables, stages = "", list[tuple[str, str]](), dict[str, str](), 0
    for line in _join_lines(text):
        instruction, _, rest = line.partition(" ")
        instruction, rest = instruction.upper(), rest.strip()
        needs = Recipe(needs=f"its Dockerfile has {instruction} {rest}"[:100].rstrip())
        if instruction in ("LABEL", "EXPOSE", "CMD", "MAINTAINER", "STOPSIGNAL", "ARG") or line == "USER root":
            continue
        if "$" in rest:
            return needs
        try:
            if instruction == "FROM":
                stages += 1
                if stages > 1:
                    return needs
            elif instruction == "WORKDIR":
                folder = posixpath.normpath(posixpath.join(folder or "/", *shlex.split(rest)[:1]))
            elif instruction == "ENV":
                variables |= _parse_variables(rest)
            elif instruction in ("COPY", "ADD") and (found := _parse_copy(instruction, rest, folder)):
                copies += found
            else:
                return needs
        except ValueError:  # quotes that are not closed
            return needs
    return Recipe(folder, tuple(copies), variables)


def _join_lines(text: str) -> list[str]:
    """Return the instructions of a Dockerfile, continued lines joined, without comments."""
    lines, pending = list[str](), ""
    for line in text.splitlines():
        stripped = line.strip()
        if not stripped or stripped.startswith("#"):
            continue
        if stripped.endswith("\\"):
            pending += stripped[:-1].rstrip() + " "
            continue
        lines.append(" ".join((pending + stripped).split(None, 1)))
        pending = ""
    return [*lines, pending.strip()] if pending.strip() else lines


def _parse_variables(text: str) -> dict[str, str]:
    words = shlex.split(text)
    if words and "=" not in words[0]:
        return {words[0]: text.partition(" ")[2].strip()}
    return {name: value for name, _, value in (word.partition("=") for word in words)}


def _parse_copy(instruction: str, text: str, folder: str) -> list[tuple[str, str]]:
    """Return (source, target) of a COPY; [] = one that needs a container. Raises ValueError as `shlex.split`."""
    words = json.loads(text) if text.startswith("[") else shlex.split(text)
    if not isinstance(words, list) or len(words) < 2 or not all(isinstance(word, str) for word in words):
        return []
    *sources, target = words
    for source in sources:
        if source.startswith(("--", "<<")) or not {"*", "?", "[", ":"}.isdisjoint(source) or ".." in source.split("/"):
            return []
        if instruction == "ADD" and source.endswith((".tar", ".gz", ".tgz", ".bz2", ".xz", ".zst")):
            return []  # they would be unpacked
    is_folder = len(sources) > 1 or target.endswith(("/", "/.")) or target == "."
    path = posixpath.normpath(posixpath.join(folder or DEFAULT_FOLDER, target))
    if _explain_path(path if is_folder else posixpath.dirname(path)):
        return []
    return [(source.lstrip("/") or ".", f"{path}/" if is_folder else path) for source in sources]


def _explain_path(path: str) -> str:
    """Return why a folder cannot be made for an episode beside this machine's own; "" = it can."""
    parts: Sequence[str] = posixpath.normpath(path).split("/")
    if not path.startswith("/") or len(parts) < 2 or not parts[1]:
        return "which is no folder below the root"
    return "which this machine has its own of" if parts[1] in _RESERVED else ""
