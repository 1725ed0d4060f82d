"""Completions for the page: all of a small file; of a large one a part, found without reading the rest."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from policygrad.errors import RunError
from policygrad.report.data import rows
from policygrad.trackers.jsonl import parse_row as parsed
from policygrad.utils.filesystem import Unusable, lines_in, open_regular

TEXT = 3_000_000
"""Characters that a page holds, of all its runs; what is left out is said on it."""
BYTES = 8
"""Of a file, for each of these characters: a larger one is not read through. JSON takes six for a letter, and has more columns."""
STEPS = 24
"""Of a file that is too large, steps that are looked at."""
READ = 4_000_000
"""Bytes that are read of one of them."""
CUT = 6_000
"""Characters of one text, at most."""
ROWS = 20_000
"""Completions of a page, however short."""


@dataclass(frozen=True)
class Shown:
    """What the page has of one run's completions."""

    rows: tuple[dict[str, Any], ...]
    whole: bool
    """Whether that is all there is."""


def shown(file: Path, text: int = TEXT, most: int = ROWS) -> Shown:
    """At most so many characters, and so many rows; of a file that has more, rows of steps evenly apart.

    Of each step come first the prompts that earlier ones had too, since these can be compared.

    Raises:
        RunError: the file cannot be read.
    """
    if not file.is_file():
        return Shown((), True)
    if file.stat().st_size <= BYTES * text and (found := _all(file, text, most)) is not None:
        return Shown(_checked(found, file), True)
    try:
        with open_regular(file) as lines:
            return Shown(_checked(_some(lines, file.stat().st_size, text, most), file), False)
    except OSError as error:
        raise RunError(
            f"{file} cannot be read: {error.strerror}; see to its permissions, or put a copy of it back"
        ) from error
    except Unusable as error:
        raise RunError(f"{file}: {error}: delete the line, or put a copy of the file back") from error


def _checked(rows: Iterable[dict[str, Any]], file: Path) -> tuple[dict[str, Any], ...]:
    """The rows. Raises RunError for a value that no run writes and the page could not show."""
    found = tuple(rows)
    for row in found:
        for key, (is_right, what) in KINDS.items():
            if (value := row.get(key)) is not None and not is_right(value):
                raise RunError(
                    f"{file}, a completion of step {row['step']}: {key} is {value!r:.60}, where a run writes {what}: delete the "
                    "line, or put a copy of the file back"
                )
    return found


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float)


def _is_turns(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(turn, list) and len(turn) == 2 for turn in value)


KINDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    **dict.fromkeys(("reward", "advantage", "tokens", "group", "branches"), (_is_number, "a number")),
    **dict.fromkeys(
        ("truncated", "demonstration"), (lambda value: isinstance(value, bool | int | float), "true or false")
    ),
    "rewards": (lambda value: isinstance(value, dict), "an object of numbers"),
    "turns": (_is_turns, "pairs of who and text"),
}
"""Values of a row: whether one is right, and what it is then."""


def _all(file: Path, text: int, most: int) -> tuple[dict[str, Any], ...] | None:
    """Return every row, or None where they are more than the page holds."""
    found: list[dict[str, Any]] = []
    for row in rows(file):
        text -= weight(row)
        if text < 0 or len(found) == most:
            return None
        found.append(row)
    return tuple(found)


def _some(file: IO[bytes], size: int, text: int, most: int) -> Iterator[dict[str, Any]]:
    first, last = _step_at(file, 0), _last_step(file, size)
    if first is None or last is None:
        return
    wanted = sorted({first + (last - first) * i // (STEPS - 1) for i in range(STEPS)})
    share, many = text // len(wanted), max(1, most // len(wanted))
    seen: set[str] = set()
    for step in wanted:
        there = list(_of_step(file, size, step))
        there.sort(key=lambda row: str(row.get("prompt")) not in seen)
        seen |= {str(row.get("prompt")) for row in there}
        left = share
        for number, row in enumerate(there[:many]):
            left -= weight(row)
            if left < 0 and number:
                break
            yield row


def weight(row: dict[str, Any]) -> int:
    """Characters of a row as the page holds it; 60 for its numbers."""
    texts = min(CUT, len(str(row.get("prompt")))) + min(CUT, len(str(row.get("completion"))))
    return texts + (len(str(row["turns"])) if row.get("turns") else 0) + 60


def _of_step(file: IO[bytes], size: int, step: int) -> Iterator[dict[str, Any]]:
    """The rows of the first step that is not before this one, up to `READ` bytes."""
    low, high = 0, size
    while low < high:  # the first offset whose next line is of this step or a later one
        middle = (low + high) // 2
        found = _step_at(file, middle)
        if found is not None and found < step:
            low = middle + 1
        else:
            high = middle
    _to_line(file, low)
    begun, at = file.tell(), None
    for line in lines_in(file):
        row = parsed(line)
        if row is None:
            continue
        at = row["step"] if at is None else at
        if row["step"] != at or file.tell() - begun > READ:
            return
        yield row


def _to_line(file: IO[bytes], offset: int) -> None:
    """To the first line that begins at this offset or behind it."""
    file.seek(max(0, offset - 1))
    if offset:
        next(lines_in(file), b"")


def _step_at(file: IO[bytes], offset: int) -> int | None:
    """Of the first whole line from here; None at the end."""
    _to_line(file, offset)
    for line in lines_in(file):
        if (row := parsed(line)) is not None:
            return int(row["step"])
    return None


def _last_step(file: IO[bytes], size: int) -> int | None:
    """Of the last whole line."""
    back = 65_536
    while True:
        found = None
        _to_line(file, max(0, size - back))
        for line in lines_in(file):
            row = parsed(line)
            found = row["step"] if row is not None else found
        if found is not None or back >= size:
            return found
        back *= 4


def embedded(runs: Sequence[Shown]) -> dict[str, Any]:
    """For the script: every prompt once, and rows that name it by its number; texts cut to `CUT` characters.

    A row: r run, s step, p prompt, c completion, w reward, and where it is there a advantage, n tokens, t cut off, g group,
    x each reward's own value, u turns, b texts that it is read as, d demonstration.
    """
    prompts: dict[Any, int] = {}
    found = []
    for number, run in enumerate(runs):
        for row in run.rows:
            prompt = _messages(row.get("prompt", ""))
            place = prompts.setdefault(prompt, len(prompts))
            found.append({"r": number, "s": row["step"], "p": place, "c": cut(row.get("completion", "")), **_more(row)})
    return {"prompts": [list(map(list, prompt)) for prompt in prompts], "rows": found}


def _more(row: dict[str, Any]) -> dict[str, Any]:
    """What not every row has; numbers to what can be read."""
    more: dict[str, Any] = {"w": _number(row.get("reward")), "a": _number(row.get("advantage"))}
    more |= {"n": row.get("tokens"), "g": row.get("group"), "t": row.get("truncated") or None}
    more |= {"x": {k: _number(v) for k, v in row["rewards"].items()} if row.get("rewards") else None}
    more |= {"u": [[who, cut(text)] for who, text in row["turns"]] if row.get("turns") else None}
    more |= {"b": row.get("branches"), "d": row.get("demonstration") or None}
    return {key: value for key, value in more.items() if value is not None}


def _number(x: Any) -> float | None:
    return float(f"{x:.4g}") if isinstance(x, int | float) else None


def _messages(prompt: Any) -> tuple[tuple[str, str], ...]:
    """(role, content) of chat messages; of plain text one without a role."""
    if isinstance(prompt, list) and all(isinstance(m, dict) for m in prompt):
        return tuple((str(m.get("role", "")), cut(m.get("content", ""))) for m in prompt)
    return (("", cut(prompt)),)


def cut(text: Any) -> str:
    """At most `CUT` characters, and how many more there are."""
    text = str(text)
    return text if len(text) <= CUT else f"{text[:CUT]} … ({len(text) - CUT:,} characters more)"
