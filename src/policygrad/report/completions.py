"""Select completions for the page: all of a small file, some steps of a large one, found without reading the rest."""

from __future__ import annotations

import base64
import sys
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any

from policygrad.core.base import Advantage, Explanation, format_term
from policygrad.errors import RunError
from policygrad.report.advantages import explain_group
from policygrad.report.data import read_json_rows
from policygrad.trackers.jsonl import THUMBNAILS
from policygrad.trackers.jsonl import parse_row as parsed
from policygrad.utils.filesystem import UnusableDataError, iter_lines, open_regular
from policygrad.utils.message_parts import content_text

MAX_PAGE_CHARS = 3_000_000  # maximum characters of a page, over all its runs; the page says how much is left out
BYTES_PER_CHAR = 8
"""File size per page character above which a file is not read completely: JSON may take six bytes per letter."""
SAMPLED_STEPS = 24  # steps read from a file that is too large
MAX_STEP_BYTES = 4_000_000  # maximum bytes read of one step
MAX_TEXT_CHARS = 6_000  # maximum characters of one text
MAX_ROWS = 20_000  # maximum completions of a page
MAX_PICTURES = 400  # maximum small pictures of a page, of some 5 kB each


@dataclass(frozen=True)
class CompletionExcerpt:
    """The completions of one run that are on the page."""

    rows: tuple[dict[str, Any], ...]
    is_complete: bool  # True if these are all of the run's completions
    folder: Path | None = None
    """The run's folder, which has small copies of pictures."""
    chain: tuple[Advantage, ...] = ()
    """The links of the run's advantage, which say how it came about."""

    def explain(self) -> Iterator[tuple[Explanation | None, int]]:
        """Yield for each row how the advantages of its group came about, and the row's place in the group."""
        groups: dict[tuple[int, Any], list[dict[str, Any]]] = {}
        for row in self.rows:
            groups.setdefault((row["step"], row.get("group")), []).append(row)
        explained = {
            key: explain_group(self.chain, rows) if key[1] is not None else None for key, rows in groups.items()
        }
        seen: dict[tuple[int, Any], int] = {}
        for row in self.rows:
            key = (row["step"], row.get("group"))
            seen[key] = seen.get(key, -1) + 1
            yield explained[key], seen[key]


def excerpt_completions(file: Path, text: int = MAX_PAGE_CHARS, most: int = MAX_ROWS) -> CompletionExcerpt:
    """Return at most `text` characters and `most` rows; of a longer file, rows of evenly spaced steps.

    Prompts that occurred in earlier steps come first, since these can be compared.

    Raises:
        RunError: The file cannot be read.
    """
    if not file.is_file():
        return CompletionExcerpt((), True)
    size = file.stat().st_size
    if size <= BYTES_PER_CHAR * text:
        rows, left = list[dict[str, Any]](), text
        for row in read_json_rows(file):
            left -= count_chars(row)
            if left < 0 or len(rows) == most:
                break
            rows.append(row)
        else:
            return CompletionExcerpt(_check_fields(rows, file), True, file.parent)
    try:
        with open_regular(file) as lines:
            return CompletionExcerpt(_check_fields(_sample_steps(lines, size, text, most), file), False, file.parent)
    except OSError as error:
        raise RunError(
            f"{file} cannot be read: {error.strerror}; check its permissions, or restore it from a copy"
        ) from error
    except UnusableDataError as error:
        raise RunError(f"{file}: {error}: delete the line, or restore the file from a copy") from error


# Optional field of a row -> (type, description of a valid value).
FIELDS = {
    **dict.fromkeys(("reward", "advantage", "tokens", "group", "branches"), (int | float, "a number")),
    **dict.fromkeys(("truncated", "demonstration"), (int | float, "true or false")),
    "rewards": (dict, "an object of numbers"),
    "turns": (list, "pairs of role and text"),
}


def _check_fields(rows: Iterable[dict[str, Any]], file: Path) -> tuple[dict[str, Any], ...]:
    """Return the rows. Raises RunError for a value that the page cannot show."""
    checked = tuple(rows)
    for row in checked:
        for key, (kind, what) in FIELDS.items():
            value = row.get(key)
            valid = value is None or isinstance(value, kind)
            if valid and key == "turns":
                valid = all(isinstance(turn, list) and len(turn) == 2 for turn in value or ())
            if not valid:
                raise RunError(
                    f"{file}, a completion of step {row['step']}: {key} is {value!r:.60}, but should be {what}: "
                    "delete the line, or restore the file from a copy"
                )
    return checked


def _sample_steps(file: IO[bytes], size: int, text: int, most: int) -> Iterator[dict[str, Any]]:
    """Yield rows of evenly spaced steps, found by bisection."""
    first, last = _step_at(file, 0), _last_step(file, size)
    if last is None:
        return
    steps = sorted({first + (last - first) * i // (SAMPLED_STEPS - 1) for i in range(SAMPLED_STEPS)})
    share, many = text // len(steps), max(1, most // len(steps))
    seen: set[str] = set()
    for step in steps:
        _seek_line(file, bisect_left(range(size), step, key=partial(_step_at, file)))
        # the first step from here, up to `MAX_STEP_BYTES` bytes of it
        start, step_rows = file.tell(), list[dict[str, Any]]()
        for line in iter_lines(file):
            if (row := parsed(line)) is not None:
                if (step_rows and row["step"] != step_rows[0]["step"]) or file.tell() - start > MAX_STEP_BYTES:
                    break
                step_rows.append(row)
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


def _seek_line(file: IO[bytes], offset: int) -> None:
    """Seek to the first line that begins at or after this offset."""
    file.seek(max(0, offset - 1))
    if offset:
        next(iter_lines(file), b"")


def _step_at(file: IO[bytes], offset: int) -> int:
    """Return the step of the first complete line from here; `sys.maxsize` at the end."""
    _seek_line(file, offset)
    return next((row["step"] for line in iter_lines(file) if (row := parsed(line)) is not None), sys.maxsize)


def _last_step(file: IO[bytes], size: int) -> int | None:
    """Return the step of the last complete line."""
    back = 65_536
    while True:
        last = None
        _seek_line(file, max(0, size - back))
        for line in iter_lines(file):
            row = parsed(line)
            last = row["step"] if row is not None else last
        if last is not None or back >= size:
            return last
        back *= 4


def embed_completions(runs: Sequence[CompletionExcerpt]) -> dict[str, Any]:
    """Return the data for the script: every prompt once, and rows that refer to prompts by index; long texts are truncated.

    A prompt is a list of [role, text, places of its pictures in `pictures`, if any]; pictures are data: URIs. Keys of a row: r run,
    s step, p prompt, c completion, w reward, and if present a advantage, n tokens, t truncated, g group, x value of each reward,
    u turns, b branches, d demonstration; f and e are places in `said`: what the algorithm computed for the group, and the
    arithmetic of this advantage.
    """
    said: dict[str, int] = {}
    prompts: dict[Any, int] = {}
    pictures = _Pictures()
    embedded_rows = []
    for number, run in enumerate(runs):
        for row, (explanation, at) in zip(run.rows, run.explain(), strict=True):
            messages = row.get("prompt", "")
            if not (isinstance(messages, list) and all(isinstance(m, dict) for m in messages)):
                messages = [{"content": messages}]  # plain text is one message without a role
            prompt = tuple(
                (
                    str(m.get("role", "")),
                    truncate_text(content_text(m.get("content", ""))),
                    pictures.place(m, run.folder),
                )
                for m in messages
            )
            place = prompts.setdefault(prompt, len(prompts))
            item = {"r": number, "s": row["step"], "p": place, "c": truncate_text(row.get("completion", ""))}
            more: dict[str, Any] = {"w": _number(row.get("reward")), "a": _number(row.get("advantage"))}
            more |= {"n": row.get("tokens"), "g": row.get("group"), "t": row.get("truncated") or None}
            more |= {"x": {k: _number(v) for k, v in row["rewards"].items()} if row.get("rewards") else None}
            more |= {"u": [[who, truncate_text(text)] for who, text in row["turns"]] if row.get("turns") else None}
            more |= {"b": row.get("branches"), "d": row.get("demonstration") or None}
            if explanation is not None:
                facts = ", ".join(f"{name} {format_term(value)}" for name, value in explanation.facts)
                more["f"] = said.setdefault(facts, len(said)) if facts else None
                if any(explanation.values):  # of equal rewards all advantages are 0, which needs no arithmetic
                    more["e"] = said.setdefault(explanation.expressions[at], len(said))
            embedded_rows.append(item | {key: value for key, value in more.items() if value is not None})
    shown = [[[role, text, *([list(places)] if places else [])] for role, text, places in prompt] for prompt in prompts]
    return {
        "prompts": shown,
        "rows": embedded_rows,
        **({"said": list(said)} if said else {}),
        **({"pictures": pictures.uris} if pictures.uris else {}),
    }


class _Pictures:
    """The pictures of a page, each once, up to a limit."""

    def __init__(self) -> None:
        self.uris: list[str] = []
        self._places: dict[Path, int] = {}

    def place(self, message: Mapping[str, Any], folder: Path | None) -> tuple[int, ...]:
        """Return the places of a message's pictures; of those that the run's folder has not, none."""
        content = message.get("content")
        digests = (
            [str(part.get("sha256")) for part in content if part.get("sha256")] if isinstance(content, list) else []
        )
        places = list[int]()
        for file in () if folder is None else [folder / THUMBNAILS / f"{digest}.png" for digest in digests]:
            if file not in self._places and len(self.uris) < MAX_PICTURES and file.is_file():
                self._places[file] = len(self.uris)
                self.uris.append("data:image/png;base64," + base64.b64encode(file.read_bytes()).decode())
            if file in self._places:
                places.append(self._places[file])
        return tuple(places)


def _number(x: Any) -> float | None:
    return float(f"{x:.4g}") if isinstance(x, int | float) else None


def truncate_text(text: Any) -> str:
    """Truncate to `MAX_TEXT_CHARS` characters, and say how many are left out."""
    text = str(text)
    more = len(text) - MAX_TEXT_CHARS
    return text if more <= 0 else f"{text[:MAX_TEXT_CHARS]} … ({more:,} characters more)"
