"""What a judge has answered, and how often it was asked, in one file that all workers share: sqlite waits for its turn."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from policygrad.errors import RewardError

FILE = "judged.sqlite"
_WAITS = 60.0  # seconds for another worker's turn
_TABLES = """
create table if not exists scores (key text primary key, score real not null);
create table if not exists spent (session text primary key, calls integer not null);
"""


@dataclass(frozen=True)
class Judged:
    """A folder's file; the texts are not in it, only what names them. Each step is on the disk when it returns."""

    folder: Path
    session: str
    calls: int
    """How many requests the session may send."""

    def known(self, key: str) -> float | None:
        """The score that was given to this question; None = it has not been asked."""
        with self._open() as file:
            row = file.execute("select score from scores where key = ?", (key,)).fetchone()
        return None if row is None else float(row[0])

    def keep(self, key: str, score: float) -> None:
        """Remember an answer."""
        with self._open() as file:
            file.execute("insert or replace into scores values (?, ?)", (key, score))

    def spend(self) -> None:
        """Count one request. Raises RewardError where the session has sent as many as it may."""
        with self._open() as file:
            file.execute("insert or ignore into spent values (?, 0)", (self.session,))
            done = file.execute(
                "update spent set calls = calls + 1 where session = ? and calls < ?", (self.session, self.calls)
            )
        if not done.rowcount:
            raise RewardError(
                f"the judge was asked {self.calls} times, which is all it may be: judge:…,calls=N allows more"
            )

    @contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with closing(sqlite3.connect(self.folder / FILE, timeout=_WAITS, isolation_level=None)) as file:
                file.executescript(_TABLES)
                yield file
        except (OSError, sqlite3.Error) as error:
            raise RewardError(
                f"what the judge said cannot be kept in {self.folder / FILE}: {error}; judge:…,cache=FOLDER names another place"
            ) from error
