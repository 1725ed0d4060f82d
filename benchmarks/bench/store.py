"""What has been measured, kept in one JSON file after every measurement, so that a benchmark can be stopped and gone on with."""

from __future__ import annotations

import hashlib
import json
import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Record = dict[str, Any]


@dataclass(frozen=True)
class Task:
    """One process to run."""

    key: str
    """Its name in the store: what it measures, and which repeat."""
    fingerprint: str
    """Of the work, of the code that does it and of the machine: what was measured of others is measured again."""
    command: tuple[str, ...]
    environment: tuple[tuple[str, str], ...] = ()

    @property
    def kind(self) -> str:
        """Repeats of one measurement take about as long."""
        return self.key.rpartition("/")[0]

    @property
    def shell(self) -> str:
        """What can be typed to repeat it."""
        return " ".join([*(f"{name}={value}" for name, value in self.environment), *self.command])


class Store:
    """A dictionary of records on the disk."""

    def __init__(self, file: Path, published: Path | None = None) -> None:
        """published: what has been committed, from which a fresh clone goes on."""
        self.file = file
        begun = next((known for known in (file, published) if known is not None and known.is_file()), None)
        self.values: Record = json.loads(begun.read_text(encoding="utf-8")) if begun else {}

    def section(self, name: str) -> Record:
        """`measurements`, `grid`, `components`, …"""
        found: Record = self.values.setdefault(name, {})
        return found

    def known(self, section: str, task: Task) -> Record | None:
        """What was measured of this code on such a machine, if anything."""
        found: Record | None = self.section(section).get(task.key)
        return found if found is not None and found["fingerprint"] == task.fingerprint else None

    def forget(self, section: str, now: Mapping[str, str]) -> None:
        """Leaves out what was measured of other code than that of `now`: kind → fingerprint."""
        held = self.section(section)
        for key in [k for k, r in held.items() if now.get(k.rpartition("/")[0], r["fingerprint"]) != r["fingerprint"]]:
            del held[key]

    def put(self, section: str, key: str, record: Record) -> None:
        """Keeps it, on the disk too."""
        self.section(section)[key] = record
        write(self.file, json.dumps(self.values, indent=1, ensure_ascii=False) + "\n")


def write(file: Path, text: str) -> None:
    """The whole file or, when the power goes, the one before it."""
    file.parent.mkdir(parents=True, exist_ok=True)
    new = file.with_name(file.name + ".new")
    new.write_text(text, encoding="utf-8")
    os.replace(new, file)


def fingerprint(values: Mapping[str, Any], files: Sequence[Path] = ()) -> str:
    """Of plain values and of what stands in files."""
    found = hashlib.sha256(json.dumps(values, sort_keys=True).encode())
    for file in sorted(files):
        found.update(file.name.encode() + file.read_bytes())
    return found.hexdigest()[:16]


def remaining(waiting: Sequence[Task], seconds: Mapping[str, Sequence[float]]) -> tuple[float, bool]:
    """(seconds that the tasks will take, whether that is a guess for some): by the median of their kind, or of all where none
    of its kind has been measured."""
    every = [s for kind in seconds.values() for s in kind]
    total, guessed = 0.0, False
    for task in waiting:
        known = seconds.get(task.kind)
        guessed = guessed or not known
        total += statistics.median(known or every) if known or every else 0.0
    return total, guessed


def in_words(seconds: float) -> str:
    """90 → 1:30."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
