"""The folder of a run: a new one, or one to go on with; held by one process at a time."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from contextlib import suppress
from fnmatch import fnmatch
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from policygrad.errors import ConfigError, RunError
from policygrad.trackers.jsonl import convert_write_errors
from policygrad.training.config.paths import relative_to_folder
from policygrad.training.config.serialization import dump_config
from policygrad.utils.filesystem import HAS_FILE_LOCKS, acquire_lock, write_lock_owner

# A run's folder that is begun anew: what the old run left is put aside, deleted once the new one begins, back if it never does.

CONFIG_FILES = ("run.toml", "sft.toml", "reward-model.toml")
"""One of them is in every run's folder."""
RUN_FILES = (
    "lock",
    *CONFIG_FILES,
    "metrics.jsonl",
    "completions.jsonl",
    "checkpoints",
    "model",
    "model-step-*",
    "merged",
    "model.gguf",
    "weights",
    "result.json",
    "tracked.json*",
    "report.html",
    "stacks.txt",
    "tensorboard",
    "wandb",
    ".tmp-*",
)
"""What runs leave, and what is made of them beside it. Anything else in the folder is somebody's own."""
REPORT_FILE = "report.html"
"""Of these, what is written anew at any time."""
STASH = ".tmp-overwritten"
"""Where the old run waits for the new one to begin."""
_GONE = ".tmp-forgotten"


def check_overwritable(folder: Path) -> None:
    """Raises RunError where there is no run in the folder, or more than a run."""
    if not any((place / name).is_file() for place in (folder, folder / STASH) for name in CONFIG_FILES):
        raise RunError(f"{folder} holds no run, so --overwrite deletes nothing in it: choose another --output")
    own = sorted(path.name for path in folder.iterdir() if not any(fnmatch(path.name, name) for name in RUN_FILES))
    if own:
        some = ", ".join([*own[:3], *["…"] * (len(own) > 3)])
        raise RunError(
            f"{folder} holds more than a run leaves ({some}), so --overwrite deletes nothing in it: move that elsewhere, or choose "
            "another --output"
        )


def check_no_run_file(path: Path, option: str) -> None:
    """Refuse to overwrite what a run has written. option: which names the path.

    Raises:
        ConfigError: the path is a file of a run, or lies in one of its folders.
        OSError, ValueError: no file can have this name.
    """
    path = Path(os.path.realpath(path))
    for folder in path.parents:
        first = path.relative_to(folder).parts[0]
        if (
            first != REPORT_FILE
            and any(fnmatch(first, name) for name in RUN_FILES)
            and any((folder / c).is_file() for c in CONFIG_FILES)
        ):
            raise ConfigError(
                f"{option} {path} is a file of the run in {folder}, which would be lost: take another name"
            )


def check_no_pending_overwrite(folder: Path) -> None:
    """Raises RunError where a run waits that was to be overwritten, by one that was killed before it began."""
    if (aside := folder / STASH).is_dir():
        raise RunError(
            f"{folder} was to be overwritten, and the new run was killed before it began: begin it again with --overwrite; or, to "
            f"have the old run back, move what is in {aside} one folder up"
        )


def stash_run(folder: Path, lock: str) -> None:
    """All but the lock goes into a folder of its own; the configuration last, so that what is killed midway is still a run's.
    Where an old run waits there already, what is here is of one that was killed before it began, and goes."""
    aside = folder / STASH
    aside.mkdir(exist_ok=True)
    waits = _configured(aside) and _configured(folder)
    for path in _config_last(folder):
        if path.name not in (lock, STASH):
            _delete(path) if waits else _move(path, aside)


def restore_stashed(folder: Path) -> None:
    """What was put aside, where anything was."""
    aside = folder / STASH
    if aside.is_dir():
        for path in _config_last(aside):
            _move(path, folder)
        aside.rmdir()


def delete_stashed(folder: Path) -> None:
    """Deletes what was put aside, at once as far as its name goes; what cannot be deleted is in nobody's way."""
    with suppress(OSError):
        os.replace(folder / STASH, folder / _GONE)
    for name in (STASH, _GONE):
        shutil.rmtree(folder / name, ignore_errors=True)


def _configured(folder: Path) -> bool:
    return any((folder / name).is_file() for name in CONFIG_FILES)


def _config_last(folder: Path) -> list[Path]:
    return sorted(folder.iterdir(), key=lambda path: path.name in CONFIG_FILES)


def _move(path: Path, into: Path) -> None:
    there = into / path.name
    if there.is_dir() and not there.is_symlink():
        shutil.rmtree(there)
    os.replace(path, there)


def _delete(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


_FIRST, _LAST = '# whole with its last line, "# end"', "# end"
LOCK_FILE = "lock"
"""In a run's folder: who is at work on it. It means nothing once that process is gone."""


class RunFolder:
    """A run's folder, held until the context ends; what was made for a run that never began is then taken away again."""

    def __init__(self, path: Path, lock: IO[bytes], made: tuple[Path, ...] = (), leaves: tuple[str, ...] = ()) -> None:
        """made: folders that were not there before, outermost first. leaves: files that a run that never began has written."""
        self.path, self._lock = path, lock
        self._made, self._leaves = made, leaves

    @property
    def has_stash(self) -> bool:
        """Whether another run waits to be deleted, or put back where this one never begins."""
        return (self.path / STASH).is_dir()

    def commit(self) -> None:
        """The run begins: the folder stays, whatever comes, and what it takes the place of goes."""
        self._made, self._leaves = (), ()
        delete_stashed(self.path)

    def __enter__(self) -> Self:
        try:
            with convert_write_errors(self.path / LOCK_FILE, self.path):
                write_lock_owner(self._lock)
        except RunError:
            self._let_go()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._let_go()

    def _let_go(self) -> None:
        with self._lock:
            if not HAS_FILE_LOCKS:  # Windows deletes no file that is open
                self._lock.close()
            _remove(self.path, self._leaves, self._made)
            if self._leaves:  # it never began
                with convert_write_errors(self.path, self.path):
                    restore_stashed(self.path)


def check_resumable(folder: Path, kind: str) -> Path:
    """The folder. Raises RunError when it holds no run of this kind, or what it was is lost."""
    own = _own(folder, kind)
    check_no_pending_overwrite(folder)
    if own.is_file():
        _check_whole(own)
        return folder
    other = next((name for name in ("train", "sft", "reward-model") if _own(folder, name).is_file()), None)
    hint = (
        f"go on with it by `policygrad {other} --resume {folder}`" if other else "a run's folder is what --output named"
    )
    raise RunError(f"{folder} holds no run of `policygrad {kind}`, there is no {own.name} in it: {hint}")


def with_end_marker(text: str) -> str:
    """A configuration that shows whether it is whole: cut off at a line's end, TOML is read with defaults for the rest."""
    return f"{_FIRST}\n{text}{_LAST}\n"


def _check_whole(file: Path) -> None:
    """Raises RunError for a configuration that is empty or cut off."""
    try:
        lines = file.read_bytes().splitlines()
    except OSError as error:
        raise RunError(f"{file} cannot be read: {error.strerror}") from error
    said = [line for line in lines if line.strip() and not line.strip().startswith(b"#")]
    if not said or (lines[0] == _FIRST.encode() and _LAST.encode() not in lines):
        what = "is cut off" if said else "is empty"
        raise RunError(
            f"{file} {what}, so nobody knows what the run was: put a copy of it back, or write it anew with the options that the "
            f"run began with, `policygrad {'train' if file.name == 'run.toml' else file.stem} … --dry-run > {file}`"
        )


def _own(folder: Path, kind: str) -> Path:
    return folder / ("run.toml" if kind == "train" else f"{kind}.toml")


def open_run_folder(folder: Path, kind: str, note: Callable[[str], None]) -> RunFolder:
    """The folder to go on in. note: hears what is worth saying of it.

    Raises:
        RunError: no run of this kind in it; another process is at work on it.
    """
    return RunFolder(check_resumable(folder, kind), _hold(folder, note))


def create_run_folder(
    output: str | None, name: str, file: str, note: Callable[[str], None], overwrite: bool = False
) -> RunFolder:
    """The folder for a new run, made now: `output`, or the next free runs/NAME-N. file: the configuration's name in it.
    overwrite: a run that is in it is put aside, and deleted once the new one begins.

    Raises:
        RunError: there is something in it; another process is at work on it; it cannot be made. ConfigError: nothing to overwrite.
    """
    leaves = (LOCK_FILE, file, f".tmp-{file}")
    if overwrite and output is None:
        raise ConfigError("--overwrite is for the folder that --output names; without that every run has a new one")
    if output is None:
        folder, made = create_next_free(name)
    else:
        folder = Path(output)
        made = _make(folder)
    if made:
        try:
            return RunFolder(folder, _hold(folder, note), made, leaves)
        except RunError:
            _remove(folder, (), made)
            raise
    refusal = (
        f"{folder} is not empty: go on with it by --resume {folder}, or choose another --output; --overwrite deletes the run "
        "that is in it"
    )
    with convert_write_errors(folder, folder):
        if not folder.is_dir():
            raise RunError(f"{folder} is a file: choose another --output")
        if _foreign(folder, leaves) and overwrite:
            check_overwritable(folder)
        elif _foreign(folder, leaves) and not (folder / LOCK_FILE).exists():
            raise RunError(refusal)
        lock = _hold(folder, note)
        if _foreign(folder, leaves):
            _settle(folder, lock, refusal, overwrite)
    return RunFolder(folder, lock, (), leaves)


def _settle(folder: Path, lock: IO[bytes], refusal: str, overwrite: bool) -> None:
    """Puts aside what is in the folder, which is held now, or lets go of it and raises."""
    try:
        if not overwrite:
            raise RunError(refusal)
        check_overwritable(folder)
        stash_run(folder, LOCK_FILE)
    except BaseException:
        lock.close()
        raise


def _foreign(folder: Path, leaves: tuple[str, ...]) -> bool:
    """Whether there is more in it than what a run leaves that was killed before it began."""
    lock, _, unfinished = leaves
    return any(path.name not in (lock, unfinished) for path in folder.iterdir())


def create_next_free(name: str) -> tuple[Path, tuple[Path, ...]]:
    """runs/NAME-N, made now; and all the folders that were made for it, outermost first."""
    name = re.sub(r"[^\w.+-]", "_", name).lstrip(".") or "run"  # an algorithm of a user's own may be called anything
    number = 1
    while not (made := _make(folder := Path("runs") / f"{name}-{number}")):
        number += 1
    return folder, made


def _make(folder: Path) -> tuple[Path, ...]:
    """Makes the folder, which only one process can; those that were made, outermost first, or none where it was there."""
    with convert_write_errors(folder, folder):
        for last in (False, False, True):  # a run that never began may take away the same ones meanwhile
            above = [path for path in reversed(folder.parents) if not path.exists()]
            try:
                folder.mkdir(parents=True)
                return (*above, folder)
            except (FileExistsError, FileNotFoundError):
                if folder.exists():
                    break
                if last:
                    raise
    return ()


def _remove(folder: Path, files: tuple[str, ...], made: tuple[Path, ...]) -> None:
    with suppress(OSError):  # somebody has put something of theirs beside it: that is not ours to delete
        for name in files:
            (folder / name).unlink(missing_ok=True)
        for path in reversed(made):
            path.rmdir()


def _hold(folder: Path, note: Callable[[str], None]) -> IO[bytes]:
    way_out = f"wait for its end, or stop it, then --resume {folder}; a new run takes another --output"
    with convert_write_errors(folder / LOCK_FILE, folder):
        return acquire_lock(folder / LOCK_FILE, hint=way_out, note=note)


# A run that goes on in another folder: a copy of what it needs for that, and the run stays as it is.

NOT_COPIED = (
    LOCK_FILE,
    ".tmp-*",
    "model",
    "merged",
    "model.gguf",
    "weights",
    "result.json",
    "tracked.json*",
    "wandb",
    "report.html",
)
"""What an end has left, what servers are given, and what trackers know the run by: the copy has its own."""


def copy_run(run: Path, to: Path, kind: str, config: Any, note: Callable[[str], None]) -> Path:
    """The folder `to`, whole or not there: history and checkpoints of the run's, with this configuration. note: hears what is worth
    saying of the run's folder.

    Raises:
        RunError: there is no such run; another process is at work on it; `to` is not empty, lies within it, or cannot be written.
    """
    with open_run_folder(run, kind, note), convert_write_errors(to, run):
        if to.exists() and (not to.is_dir() or any(to.iterdir())):
            raise RunError(f"{to} is not empty: --resume {run} would go on there in a copy, so choose another --output")
        if run.resolve() in to.resolve().parents:
            raise RunError(f"{to} is within {run}, of which it would be a copy: choose another --output")
        temporary = to.with_name(f".tmp-{to.name}")
        shutil.rmtree(temporary, ignore_errors=True)
        shutil.copytree(run, temporary, ignore=_left_behind(run))
        file = "run.toml" if kind == "train" else f"{kind}.toml"
        (temporary / file).write_text(with_end_marker(dump_config(relative_to_folder(config, to))), encoding="utf-8")
        os.replace(temporary, to)
    return to


def _left_behind(run: Path) -> Callable[[str, list[str]], set[str]]:
    def ignored(folder: str, names: list[str]) -> set[str]:
        patterns = NOT_COPIED if Path(folder) == run else (".tmp-*",)
        return {name for name in names if any(fnmatch(name, pattern) for pattern in patterns)}

    return ignored


def resolve_resume_folder(
    resume: str | None, kind: str, config: Any, note: Callable[[str], None] = print
) -> str | None:
    """The folder to go on in: the run's own, `resume`, or a copy of it where `config.output` is another. Raises as `copied`."""
    if resume is None or config.output is None or Path(config.output).resolve() == Path(resume).resolve():
        return resume
    return str(copy_run(Path(resume), Path(config.output), kind, config, note))
