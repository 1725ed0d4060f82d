"""Data sets of the hub, and folders and objects of the `datasets` library, as rows; the one file that imports it."""

from __future__ import annotations

from functools import lru_cache
from importlib.util import find_spec
from typing import Any

from policygrad.errors import ConfigError, DataError, install_command
from policygrad.tasks.arrow import plain

SPLIT = "train"


class DatasetRows:
    """A `datasets.Dataset`, whose rows are on the disk."""

    def __init__(self, data: Any) -> None:
        self._data = data

    def __len__(self) -> int:
        return len(self._data)

    def rows(self, start: int, end: int) -> list[dict[str, Any]]:
        columns = self._data[start:end]
        return [plain({name: values[i] for name, values in columns.items()}) for i in range(end - start)]


def is_dataset(data: object) -> bool:
    """Whether an object is a `datasets.Dataset`, without importing anything."""
    return all(hasattr(data, name) for name in ("column_names", "features", "_fingerprint", "__getitem__"))


def load(name: str) -> DatasetRows:
    """`hf:REPOSITORY[:CONFIG[:SPLIT]]` from the hub or its cache, `FOLDER[:SPLIT]` that `save_to_disk` wrote; the split is train
    where none is named.

    Raises:
        ConfigError: no `datasets`; DataError: what is not there, with what there is.
    """
    return DatasetRows(_loaded(name))


def fingerprint(name: str) -> str:
    """Of the data set, as the library computes it from files, configuration and split."""
    return str(_loaded(name)._fingerprint)


@lru_cache(maxsize=4)
def _loaded(name: str) -> Any:
    if find_spec("datasets") is None:
        raise ConfigError(f"{name} needs datasets, which is not installed: {install_command('data')}")
    import datasets

    try:
        if not name.startswith("hf:"):
            folder, _, split = name.partition(":")
            return _split(datasets.load_from_disk(folder), split, name)
        repository, config, split = _parts(name)
        return _split(datasets.load_dataset(repository, config or None), split, name)
    except (DataError, ConfigError):
        raise
    except Exception as error:  # of which class depends on what is wrong: the network, a name, a file
        said = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise DataError(f"{name}: cannot be loaded: {said}") from error


def _parts(name: str) -> tuple[str, str, str]:
    words = name.removeprefix("hf:").split(":")
    if len(words) > 3 or not words[0]:
        raise DataError(
            f"{name}: a data set of the hub is hf:REPOSITORY, hf:REPOSITORY:CONFIG or hf:REPOSITORY:CONFIG:SPLIT"
        )
    repository, config, split = [*words, "", ""][:3]
    return repository, config, split


def _split(found: Any, split: str, name: str) -> Any:
    if is_dataset(found):
        if split:
            raise DataError(f"{name}: it has no splits: leave {split!r} out")
        return found
    wanted = split or SPLIT
    if wanted not in found:
        raise DataError(f"{name}: no split {wanted!r}; it has {', '.join(map(str, found))}")
    return found[wanted]
