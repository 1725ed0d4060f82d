"""The folder of a run: create a new one, open one to resume, replace one, or copy one. One process at a time works in it."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from contextlib import suppress
from fnmatch import fnmatch
from pathlib import Path
from typing import IO, Any, Self

from policygrad.errors import ConfigError, RunError
from policygrad.trackers.jsonl import convert_write_errors
from policygrad.training.config.paths import relative_to_folder
from policygrad.training.config.serialization import dump_config
from policygrad.utils.filesystem import HAS_FILE_LOCKS, acquire_lock, write_lock_owner

REPORT_FILE = "report.html"  # may be rewritten at any time
LOCK_FILE = "lock"  # Names the process at work in the folder. It has no meaning once that process is gone.
CONFIG_FILES = ("run.toml", "sft.toml", "reward-model.toml")  # every run's folder has one of these
# Files that runs, and the commands that read runs, write into the folder. Any other file is the user's.
RUN_FILES = (
    LOCK_FILE,
    *CONFIG_FILES,
    *(
        "metrics.jsonl",
        "notes.jsonl",
        "memory.json",
        "completions.jsonl",
        "optimal_values.json",
        "checkpoints",
        "verification",
        "pictures",
        "weights",
        "result.json",
        "verify.*",
    ),
    *(
        "model",
        "best",
        "best-earlier",
        "model-step-*",
        "merged",
        "model.gguf",
        "tracked.json*",
        "report.html",
        "stacks.txt",
        "tensorboard",
    ),
    *("trace.json", "trace-*.json"),
    *("wandb", ".tmp-*"),
)
NOT_COPIED = (
    LOCK_FILE,
    *(".tmp-*", "model", "merged", "model.gguf", "weights", "result.json", "verify.*", "tracked.json*", "wandb"),
    REPORT_FILE,
)
"""Results of a finished run, files for servers, and identities at tracking services, of which a copied run has its own."""
STASH = ".tmp-overwritten"  # holds a run that is being overwritten until the new one has started
_TRASH = ".tmp-forgotten"
_HEADER, _END = '# complete only with its last line, "# end"', "# end"


class RunFolder:
    """A locked run folder. Unless `commit` is called, leaving the context removes what was created and restores a stashed run.
    `created`: folders that did not exist before, outermost first; `leftovers`: files that an uncommitted run has written."""

    def __init__(
        self, path: Path, lock: IO[bytes], created: tuple[Path, ...] = (), leftovers: tuple[str, ...] = ()
    ) -> None:
        self.path, self._lock = path, lock
        self._created, self._leftovers = created, leftovers

    @property
    def has_stash(self) -> bool:
        """Whether another run is stashed here, to be deleted or restored."""
        return (self.path / STASH).is_dir()

    def commit(self) -> None:
        """Keep the folder whatever happens, and delete the run that it replaces."""
        self._created, self._leftovers = (), ()
        with suppress(OSError):  # its name disappears at once, and files that cannot be deleted do no harm
            os.replace(self.path / STASH, self.path / _TRASH)
        for name in (STASH, _TRASH):
            shutil.rmtree(self.path / name, ignore_errors=True)

    def __enter__(self) -> Self:
        try:
            with convert_write_errors(self.path / LOCK_FILE, self.path):
                write_lock_owner(self._lock)
        except RunError:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        with self._lock:
            if not HAS_FILE_LOCKS:  # Windows cannot delete an open file
                self._lock.close()
            _remove(self.path, self._leftovers, self._created)
            if self._leftovers and self.has_stash:  # never committed
                stash = self.path / STASH
                with convert_write_errors(self.path, self.path):
                    for path in _config_last(stash):
                        _move(path, self.path)
                    stash.rmdir()


def open_run_folder(folder: Path, kind: str, note: Callable[[str], None]) -> RunFolder:
    """Lock an existing run's folder, to resume the run.

    Raises:
        RunError: There is no run of this kind in it, or another process is at work on it.
    """
    return RunFolder(check_resumable(folder, kind), _lock_folder(folder, note))


def create_run_folder(
    output: str | None, name: str, file: str, note: Callable[[str], None], overwrite: bool = False
) -> RunFolder:
    """Create and lock the folder of a new run: `output`, or the next free runs/NAME-N.

    Args:
        file: Name of the configuration file.
        overwrite: Stash a run that is in the folder, which is deleted once the new one is committed.

    Raises:
        RunError: The folder is not empty, another process is at work on it, or it cannot be created.
        ConfigError: `overwrite` is given without `output`.
    """
    leftovers = (LOCK_FILE, file, f".tmp-{file}")
    if overwrite and output is None:
        raise ConfigError("--overwrite replaces the run in the folder of --output, and there is no --output")
    folder, created = create_next_free(name) if output is None else (Path(output), _make(Path(output)))
    if created:
        try:
            return RunFolder(folder, _lock_folder(folder, note), created, leftovers)
        except RunError:
            _remove(folder, (), created)
            raise
    error = RunError(
        f"{folder} is not empty: resume the run in it by --resume {folder}, or choose another --output; --overwrite deletes the "
        "run that is in it"
    )
    with convert_write_errors(folder, folder):
        if not folder.is_dir():
            raise RunError(f"{folder} is a file: choose another --output")
        if _has_other_files(folder, leftovers) and overwrite:
            check_overwritable(folder)
        elif _has_other_files(folder, leftovers) and not (folder / LOCK_FILE).exists():
            raise error
        lock = _lock_folder(folder, note)
        if _has_other_files(folder, leftovers):
            try:
                if not overwrite:
                    raise error
                check_overwritable(folder)
                stash_run(folder)
            except BaseException:
                lock.close()
                raise
    return RunFolder(folder, lock, (), leftovers)


def _has_other_files(folder: Path, leftovers: tuple[str, ...]) -> bool:
    """Return whether the folder holds more than a run leaves that was killed before it started."""
    lock, _, unfinished = leftovers
    return any(path.name not in (lock, unfinished) for path in folder.iterdir())


def create_next_free(name: str) -> tuple[Path, tuple[Path, ...]]:
    """Create runs/NAME-N. Return it, and all folders that were created for it, outermost first."""
    name = re.sub(r"[^\w.+-]", "_", name).lstrip(".") or "run"  # a custom algorithm may have any name
    number = 1
    while not (created := _make(folder := Path("runs") / f"{name}-{number}")):
        number += 1
    return folder, created


def _make(folder: Path) -> tuple[Path, ...]:
    """Create the folder, which only one process can. Return the folders created, outermost first; none if it exists."""
    with convert_write_errors(folder, folder):
        for is_last_try in (False, False, True):  # an uncommitted run may remove the same parents at the same time
            above = [path for path in reversed(folder.parents) if not path.exists()]
            try:
                folder.mkdir(parents=True)
                return (*above, folder)
            except (FileExistsError, FileNotFoundError):
                if folder.exists():
                    break
                if is_last_try:
                    raise
    return ()


def _remove(folder: Path, files: tuple[str, ...], created: tuple[Path, ...]) -> None:
    with suppress(OSError):  # the folder now holds a file of the user's, and stays
        for name in files:
            (folder / name).unlink(missing_ok=True)
        for path in reversed(created):
            path.rmdir()


def _lock_folder(folder: Path, note: Callable[[str], None]) -> IO[bytes]:
    hint = f"wait for its end, or stop it, then --resume {folder}; a new run needs another --output"
    with convert_write_errors(folder / LOCK_FILE, folder):
        return acquire_lock(folder / LOCK_FILE, hint=hint, note=note)


# Configuration files


def config_file(folder: Path, kind: str) -> Path:
    """Return the configuration file of a run of `policygrad KIND`."""
    return folder / ("run.toml" if kind == "train" else f"{kind}.toml")


def check_resumable(folder: Path, kind: str) -> Path:
    """Return the folder. Raise RunError if it holds no run of this kind, or its configuration is lost."""
    if (stash := folder / STASH).is_dir():
        raise RunError(
            f"{folder} was to be overwritten, and the new run was killed before it started: start it again with --overwrite; or, "
            f"to restore the old run, move the contents of {stash} one folder up"
        )
    file = config_file(folder, kind)
    if not file.is_file():
        others = [other for other in ("train", "sft", "reward-model") if config_file(folder, other).is_file()]
        resume = [f"resume its run by `policygrad {other} --resume {folder}`" for other in others]
        hint = resume[0] if resume else "a run's folder is what --output named"
        raise RunError(f"{folder} holds no run of `policygrad {kind}`, since there is no {file.name} in it: {hint}")
    try:
        lines = file.read_bytes().splitlines()
    except OSError as error:
        raise RunError(f"{file} cannot be read: {error.strerror}") from error
    content = [line for line in lines if line.strip() and not line.strip().startswith(b"#")]
    if not content or (lines[0] == _HEADER.encode() and _END.encode() not in lines):
        problem = "is truncated" if content else "is empty"
        raise RunError(
            f"{file} {problem}, so the run's options are lost: restore a copy of it, or write it again with the options that "
            f"the run started with, `policygrad {kind} … --dry-run > {file}`"
        )
    return folder


def with_end_marker(text: str) -> str:
    """Mark the end of a configuration, so that a truncated file is noticed: cut off at a line's end, TOML would be read with
    defaults for the rest."""
    return f"{_HEADER}\n{text}{_END}\n"


# Overwriting: the old run is stashed, deleted once the new one starts, and restored if that never happens


def check_overwritable(folder: Path) -> None:
    """Raise RunError if the folder holds no run, or more than a run."""
    if not any((place / name).is_file() for place in (folder, folder / STASH) for name in CONFIG_FILES):
        raise RunError(f"{folder} holds no run, so --overwrite deletes nothing in it: choose another --output")
    other = sorted(path.name for path in folder.iterdir() if not any(fnmatch(path.name, name) for name in RUN_FILES))
    if other:
        names = ", ".join([*other[:3], *["…"] * (len(other) > 3)])
        raise RunError(
            f"{folder} holds files that no run writes ({names}), so --overwrite deletes nothing in it: move them elsewhere, or "
            "choose another --output"
        )


def check_no_run_file(path: Path, option: str) -> None:
    """Check that `option` does not name a file that a run has written, which would be overwritten.

    Raises:
        ConfigError: The path is a file of a run, or lies in one of its folders.
        OSError, ValueError: No file can have this name.
    """
    path = Path(os.path.realpath(path))
    for folder in path.parents:
        first = path.relative_to(folder).parts[0]
        is_run_file = first != REPORT_FILE and any(fnmatch(first, name) for name in RUN_FILES)
        if is_run_file and _has_config(folder):
            raise ConfigError(
                f"{option} {path} is a file of the run in {folder}: use another name, or it would be lost"
            )


def stash_run(folder: Path) -> None:
    """Move everything but the lock into the stash, the configuration last, so that an interruption leaves a run's folder.

    If the stash already holds a run, the folder's files are from one that was killed before it started, and are deleted.
    """
    stash = folder / STASH
    stash.mkdir(exist_ok=True)
    delete = _has_config(stash) and _has_config(folder)
    for path in _config_last(folder):
        if path.name in (LOCK_FILE, STASH):
            continue
        if not delete:
            _move(path, stash)
        elif path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def _has_config(folder: Path) -> bool:
    return any((folder / name).is_file() for name in CONFIG_FILES)


def _config_last(folder: Path) -> list[Path]:
    return sorted(folder.iterdir(), key=lambda path: path.name in CONFIG_FILES)


def _move(path: Path, into: Path) -> None:
    target = into / path.name
    if target.is_dir() and not target.is_symlink():
        shutil.rmtree(target)
    os.replace(path, target)


# Copying


def resolve_resume_folder(
    resume: str | None, kind: str, config: Any, note: Callable[[str], None] = print
) -> str | None:
    """Return the folder to resume in: `resume`, or a copy of it if `config.output` is another. Raises as `copy_run`."""
    if resume is None or config.output is None or Path(config.output).resolve() == Path(resume).resolve():
        return resume
    return str(copy_run(Path(resume), Path(config.output), kind, config, note))


def copy_run(run: Path, to: Path, kind: str, config: Any, note: Callable[[str], None]) -> Path:
    """Copy a run's history and checkpoints, with this configuration, into the folder `to`, which appears complete or not at all.

    Raises:
        RunError: There is no such run, another process is at work on it, or `to` is not empty, within it, or not writable.
    """

    def ignore(folder: str, names: list[str]) -> set[str]:
        patterns = NOT_COPIED if Path(folder) == run else (".tmp-*",)
        return {name for name in names if any(fnmatch(name, pattern) for pattern in patterns)}

    with open_run_folder(run, kind, note), convert_write_errors(to, run):
        if to.exists() and (not to.is_dir() or any(to.iterdir())):
            raise RunError(f"{to} is not empty: --resume {run} would continue there in a copy; choose another --output")
        if run.resolve() in to.resolve().parents:
            raise RunError(f"{to} is within {run}, of which it would be a copy: choose another --output")
        temporary = to.with_name(f".tmp-{to.name}")
        shutil.rmtree(temporary, ignore_errors=True)
        shutil.copytree(run, temporary, ignore=ignore)
        text = with_end_marker(dump_config(relative_to_folder(config, to)))
        config_file(temporary, kind).write_text(text, encoding="utf-8")
        os.replace(temporary, to)
    return to
