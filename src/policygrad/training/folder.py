"""The folder of a run: a new one, or one to go on with; held by one process at a time."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from policygrad.checkpoint.lock import LOCKS, sign, take
from policygrad.errors import ConfigError, RunError
from policygrad.trackers.jsonl import writing
from policygrad.training.overwriting import ASIDE, check_begun, check_overwritable, forget, put_aside, put_back

_FIRST, _LAST = '# whole with its last line, "# end"', "# end"
LOCK = "lock"
"""In a run's folder: who is at work on it. It means nothing once that process is gone."""


class RunFolder:
    """A run's folder, held until the context ends; what was made for a run that never began is then taken away again."""

    def __init__(self, path: Path, lock: IO[bytes], made: tuple[Path, ...] = (), leaves: tuple[str, ...] = ()) -> None:
        """made: folders that were not there before, outermost first. leaves: files that a run that never began has written."""
        self.path, self._lock = path, lock
        self._made, self._leaves = made, leaves

    @property
    def replaces(self) -> bool:
        """Whether another run waits to be deleted, or put back where this one never begins."""
        return (self.path / ASIDE).is_dir()

    def keep(self) -> None:
        """The run begins: the folder stays, whatever comes, and what it takes the place of goes."""
        self._made, self._leaves = (), ()
        forget(self.path)

    def __enter__(self) -> Self:
        try:
            with writing(self.path / LOCK, self.path):
                sign(self._lock)
        except RunError:
            self._let_go()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._let_go()

    def _let_go(self) -> None:
        with self._lock:
            if not LOCKS:  # Windows deletes no file that is open
                self._lock.close()
            _remove(self.path, self._leaves, self._made)
            if self._leaves:  # it never began
                with writing(self.path, self.path):
                    put_back(self.path)


def check_resumable(folder: Path, kind: str) -> Path:
    """The folder. Raises RunError when it holds no run of this kind, or what it was is lost."""
    own = _own(folder, kind)
    check_begun(folder)
    if own.is_file():
        _check_whole(own)
        return folder
    other = next((name for name in ("train", "sft", "reward-model") if _own(folder, name).is_file()), None)
    hint = (
        f"go on with it by `policygrad {other} --resume {folder}`" if other else "a run's folder is what --output named"
    )
    raise RunError(f"{folder} holds no run of `policygrad {kind}`, there is no {own.name} in it: {hint}")


def sealed(text: str) -> str:
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


def resumed_folder(folder: Path, kind: str, note: Callable[[str], None]) -> RunFolder:
    """The folder to go on in. note: hears what is worth saying of it.

    Raises:
        RunError: no run of this kind in it; another process is at work on it.
    """
    return RunFolder(check_resumable(folder, kind), _hold(folder, note))


def new_folder(
    output: str | None, name: str, file: str, note: Callable[[str], None], overwrite: bool = False
) -> RunFolder:
    """The folder for a new run, made now: `output`, or the next free runs/NAME-N. file: the configuration's name in it.
    overwrite: a run that is in it is put aside, and deleted once the new one begins.

    Raises:
        RunError: there is something in it; another process is at work on it; it cannot be made. ConfigError: nothing to overwrite.
    """
    leaves = (LOCK, file, f".tmp-{file}")
    if overwrite and output is None:
        raise ConfigError("--overwrite is for the folder that --output names; without that every run has a new one")
    if output is None:
        folder, made = next_free(name)
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
    with writing(folder, folder):
        if not folder.is_dir():
            raise RunError(f"{folder} is a file: choose another --output")
        if _foreign(folder, leaves) and overwrite:
            check_overwritable(folder)
        elif _foreign(folder, leaves) and not (folder / LOCK).exists():
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
        put_aside(folder, LOCK)
    except BaseException:
        lock.close()
        raise


def _foreign(folder: Path, leaves: tuple[str, ...]) -> bool:
    """Whether there is more in it than what a run leaves that was killed before it began."""
    lock, _, unfinished = leaves
    return any(path.name not in (lock, unfinished) for path in folder.iterdir())


def next_free(name: str) -> tuple[Path, tuple[Path, ...]]:
    """runs/NAME-N, made now; and all the folders that were made for it, outermost first."""
    name = re.sub(r"[^\w.+-]", "_", name).lstrip(".") or "run"  # an algorithm of a user's own may be called anything
    number = 1
    while not (made := _make(folder := Path("runs") / f"{name}-{number}")):
        number += 1
    return folder, made


def _make(folder: Path) -> tuple[Path, ...]:
    """Makes the folder, which only one process can; those that were made, outermost first, or none where it was there."""
    with writing(folder, folder):
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
    with writing(folder / LOCK, folder):
        return take(folder / LOCK, way_out=way_out, note=note)
