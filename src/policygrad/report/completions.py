"""Select completions for the page: all of a small file, some steps of a large one, found without reading the rest."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from policygrad.errors import RunError
from policygrad.report.data import read_json_rows
from policygrad.trackers.jsonl import parse_row as parsed
from policygrad.utils.filesystem import UnusableDataError, iter_lines, open_regular

MAX_PAGE_CHARS = 3_000_000
"""Maximum characters of a page, over all its runs; the page says how much is left out."""
BYTES_PER_CHAR = 8
"""File size per page character above which a file is not read completely: JSON may take six bytes per letter."""
SAMPLED_STEPS = 24
"""Steps read from a file that is too large."""
MAX_STEP_BYTES = 4_000_000
"""Maximum bytes read of one step."""
MAX_TEXT_CHARS = 6_000
"""Maximum characters of one text."""
MAX_ROWS = 20_000
"""Maximum completions of a page."""


@dataclass(frozen=True)
class CompletionExcerpt:
    """The completions of one run that are on the page."""

    rows: tuple[dict[str, Any], ...]
    is_complete: bool
    """True if these are all of the run's completions."""


def excerpt_completions(file: Path, text: int = MAX_PAGE_CHARS, most: int = MAX_ROWS) -> CompletionExcerpt:
    """Return at most `text` characters and `most` rows; of a longer file, rows of evenly spaced steps.

    Prompts that occurred in earlier steps come first, since these can be compared.

    Raises:
        RunError: The file cannot be read.
    """
    if not file.is_file():
        return CompletionExcerpt((), True)
    if file.stat().st_size <= BYTES_PER_CHAR * text and (rows := _all(file, text, most)) is not None:
        return CompletionExcerpt(_checked(rows, file), True)
    try:
        with open_regular(file) as lines:
            return CompletionExcerpt(_checked(_some(lines, file.stat().st_size, text, most), file), False)
    except OSError as error:
        raise RunError(
            f"{file} cannot be read: {error.strerror}; check its permissions, or restore it from a copy"
        ) from error
    except UnusableDataError as error:
        raise RunError(f"{file}: {error}: delete the line, or restore the file from a copy") from error


def _checked(rows: Iterable[dict[str, Any]], file: Path) -> tuple[dict[str, Any], ...]:
    """Return the rows. Raises RunError for a value that the page cannot show."""
    checked = tuple(rows)
    for row in checked:
        for key, (is_right, what) in FIELD_CHECKS.items():
            if (value := row.get(key)) is not None and not is_right(value):
                raise RunError(
                    f"{file}, a completion of step {row['step']}: {key} is {value!r:.60}, but should be {what}: "
                    "delete the line, or restore the file from a copy"
                )
    return checked


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float)


def _is_turns(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(turn, list) and len(turn) == 2 for turn in value)


FIELD_CHECKS: dict[str, tuple[Callable[[Any], bool], str]] = {
    **dict.fromkeys(("reward", "advantage", "tokens", "group", "branches"), (_is_number, "a number")),
    **dict.fromkeys(
        ("truncated", "demonstration"), (lambda value: isinstance(value, bool | int | float), "true or false")
    ),
    "rewards": (lambda value: isinstance(value, dict), "an object of numbers"),
    "turns": (_is_turns, "pairs of role and text"),
}
"""Field of a row -> (check, description of a valid value)."""


def _all(file: Path, text: int, most: int) -> tuple[dict[str, Any], ...] | None:
    """Return all rows, or None if they exceed the limits."""
    all_rows: list[dict[str, Any]] = []
    for row in read_json_rows(file):
        text -= count_chars(row)
        if text < 0 or len(all_rows) == most:
            return None
        all_rows.append(row)
    return tuple(all_rows)


def _some(file: IO[bytes], size: int, text: int, most: int) -> Iterator[dict[str, Any]]:
    first, last = _step_at(file, 0), _last_step(file, size)
    if first is None or last is None:
        return
    steps = sorted({first + (last - first) * i // (SAMPLED_STEPS - 1) for i in range(SAMPLED_STEPS)})
    share, many = text // len(steps), max(1, most // len(steps))
    seen: set[str] = set()
    for step in steps:
        step_rows = list(_of_step(file, size, step))
        step_rows.sort(key=lambda row: str(row.get("prompt")) not in seen)
        seen |= {str(row.get("prompt")) for row in step_rows}
        left = share
        for number, row in enumerate(step_rows[:many]):
            left -= count_chars(row)
            if left < 0 and number:
                break
            yield row


def count_chars(row: dict[str, Any]) -> int:
    """Count the characters of a row on the page, with 60 for its numbers."""
    texts = min(MAX_TEXT_CHARS, len(str(row.get("prompt")))) + min(MAX_TEXT_CHARS, len(str(row.get("completion"))))
    return texts + (len(str(row["turns"])) if row.get("turns") else 0) + 60


def _of_step(file: IO[bytes], size: int, step: int) -> Iterator[dict[str, Any]]:
    """Yield the rows of the first step >= `step`, up to `MAX_STEP_BYTES` bytes."""
    low, high = 0, size
    while low < high:  # the first offset whose next line has this step or a later one
        middle = (low + high) // 2
        step_here = _step_at(file, middle)
        if step_here is not None and step_here < step:
            low = middle + 1
        else:
            high = middle
    _to_line(file, low)
    start, at = file.tell(), None
    for line in iter_lines(file):
        row = parsed(line)
        if row is None:
            continue
        at = row["step"] if at is None else at
        if row["step"] != at or file.tell() - start > MAX_STEP_BYTES:
            return
        yield row


def _to_line(file: IO[bytes], offset: int) -> None:
    """Seek to the first line that begins at or after this offset."""
    file.seek(max(0, offset - 1))
    if offset:
        next(iter_lines(file), b"")


def _step_at(file: IO[bytes], offset: int) -> int | None:
    """Return the step of the first complete line from here; None at the end."""
    _to_line(file, offset)
    for line in iter_lines(file):
        if (row := parsed(line)) is not None:
            return int(row["step"])
    return None


def _last_step(file: IO[bytes], size: int) -> int | None:
    """Return the step of the last complete line."""
    back = 65_536
    while True:
        last = None
        _to_line(file, max(0, size - back))
        for line in iter_lines(file):
            row = parsed(line)
            last = row["step"] if row is not None else last
        if last is not None or back >= size:
            return last
        back *= 4


def embed_completions(runs: Sequence[CompletionExcerpt]) -> dict[str, Any]:
    """Return the data for the script: every prompt once, and rows that refer to prompts by index; long texts are truncated.

    Keys of a row: r run, s step, p prompt, c completion, w reward, and if present a advantage, n tokens, t truncated, g group,
    x value of each reward, u turns, b branches, d demonstration.
    """
    prompts: dict[Any, int] = {}
    embedded_rows = []
    for number, run in enumerate(runs):
        for row in run.rows:
            prompt = _messages(row.get("prompt", ""))
            place = prompts.setdefault(prompt, len(prompts))
            item = {"r": number, "s": row["step"], "p": place, "c": truncate_text(row.get("completion", ""))}
            more: dict[str, Any] = {"w": _number(row.get("reward")), "a": _number(row.get("advantage"))}
            more |= {"n": row.get("tokens"), "g": row.get("group"), "t": row.get("truncated") or None}
            more |= {"x": {k: _number(v) for k, v in row["rewards"].items()} if row.get("rewards") else None}
            more |= {"u": [[who, truncate_text(text)] for who, text in row["turns"]] if row.get("turns") else None}
            more |= {"b": row.get("branches"), "d": row.get("demonstration") or None}
            embedded_rows.append(item | {key: value for key, value in more.items() if value is not None})
    return {"prompts": [list(map(list, prompt)) for prompt in prompts], "rows": embedded_rows}


def _number(x: Any) -> float | None:
    return float(f"{x:.4g}") if isinstance(x, int | float) else None


def _messages(prompt: Any) -> tuple[tuple[str, str], ...]:
    """Return (role, content) of chat messages; plain text is one message without a role."""
    if isinstance(prompt, list) and all(isinstance(m, dict) for m in prompt):
        return tuple((str(m.get("role", "")), truncate_text(m.get("content", ""))) for m in prompt)
    return (("", truncate_text(prompt)),)


def truncate_text(text: Any) -> str:
    """Truncate to `MAX_TEXT_CHARS` characters, and say how many are left out."""
    text = str(text)
    more = len(text) - MAX_TEXT_CHARS
    return text if more <= 0 else f"{text[:MAX_TEXT_CHARS]} … ({more:,} characters more)"
