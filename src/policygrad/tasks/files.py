"""Data files by name: a folder or a pattern as a list of files, and files that are parsed whole, JSON arrays and CSV."""

from __future__ import annotations

import csv
import glob
import json
import os
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from policygrad.errors import DataError
from policygrad.tasks.reasoning_gym import EMBEDDED, dataset_names
from policygrad.utils.filesystem import reject_constant, reject_duplicate_keys

TABLE_SUFFIXES = (".parquet", ".arrow", ".feather")
CSV_SEPARATORS = {".csv": ",", ".tsv": "\t"}
DATA_SUFFIXES = (".jsonl", ".jsonl.gz", ".json", *TABLE_SUFFIXES, *CSV_SEPARATORS)
MAX_PARSED_BYTES = (
    2**30
)  # larger files that cannot be read row by row are refused: parsing takes several times their size
ParsedRow = tuple[str, Mapping[str, Any] | DataError]  # (location, columns), or what is wrong with the row
_SPLITS = re.compile(r"(?<![a-z])(train|test|valid|validation|val|dev|eval)(?![a-z])", re.IGNORECASE)


def list_files(name: str) -> list[str]:
    """Return the data files that a folder holds or a pattern matches, sorted by name; [] for any other name.

    Raises:
        DataError: A folder without data, or with files of several kinds or splits, of which one is probably meant.
    """
    if is_data_folder(name):
        files = [entry for entry in sorted(os.listdir(name)) if entry.endswith(DATA_SUFFIXES) and entry[0] not in "._"]
        if not files:
            some = ", ".join(sorted(os.listdir(name))[:3]) or "nothing"
            raise DataError(
                f"{name}: a folder without data files, which end in {', '.join(DATA_SUFFIXES)}; it holds {some}"
            )
        kinds = sorted({find_suffix(file) for file in files})
        splits = sorted({match[1] for file in files if (match := _SPLITS.search(file))})
        if len(kinds) > 1 or len(splits) > 1:
            what, example = ("kinds", f"*{kinds[0]}") if len(kinds) > 1 else ("splits", f"*{splits[0]}*")
            found = ", ".join(kinds if len(kinds) > 1 else splits)
            raise DataError(
                f"{name}: a folder with files of several {what} ({found}): choose by a pattern, '{name}/{example}'"
            )
        return [os.path.join(name, file) for file in files]
    if is_pattern(name):
        return sorted(file for file in glob.glob(name, recursive=True) if os.path.isfile(file))
    return []


def is_data_folder(name: str, directory: str = "") -> bool:
    """Return True for a folder. One with the name of a built-in task needs a slash: `./maze`."""
    if not os.path.isdir(os.path.join(directory, name)):
        return False
    return "/" in name or os.sep in name or name not in (*EMBEDDED, "shapes", *dataset_names())


def is_pattern(name: str) -> bool:
    """Return True for a name with wildcards that is no file's own."""
    return glob.has_magic(name) and not os.path.lexists(name)


def find_suffix(file: str) -> str:
    return max((suffix for suffix in DATA_SUFFIXES if file.endswith(suffix)), key=len, default="")


def read_csv(path: str, separator: str) -> list[ParsedRow]:
    """Return the rows of a CSV file, whose first line names the columns. All values are text.

    Raises:
        DataError: A file that cannot be read, or without a header.
    """
    _check_size(path)
    csv.field_size_limit(MAX_PARSED_BYTES)
    rows, line = list[ParsedRow](), 1
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            reader = csv.reader(file, delimiter=separator, strict=True)
            header = next(reader, [])
            if not all(header) or (twice := [name for name, count in Counter(header).items() if count > 1]):
                wrong = f"the column {twice[0]!r} twice" if header and all(header) else "a column without a name"
                raise DataError(f"{path}:1: the first line names the columns, as in prompt,answer; it has {wrong}")
            line = reader.line_num + 1
            for values in reader:
                where = f"{path}:{line}"
                if len(values) == len(header):
                    rows.append((where, dict(zip(header, values, strict=True))))
                elif values:
                    message = (
                        f"{where}: {len(values)} values for {len(header)} columns; is a text with a comma not quoted?"
                    )
                    rows.append((where, DataError(message)))
                line = reader.line_num + 1
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: byte {error.start + 1} is not UTF-8; save the file as UTF-8") from None
    except csv.Error as error:
        raise DataError(f"{path}:{line}: cannot be read as CSV: {error}") from error
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from error
    return rows


def read_json_array(path: str) -> list[ParsedRow] | None:
    """Return the objects of a JSON array; None if the file begins otherwise, as JSON lines do.

    Raises:
        DataError: A file that cannot be read.
    """
    _check_size(path)
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
        if not text.lstrip().startswith("["):
            return None
        values = json.loads(text, parse_constant=reject_constant, object_pairs_hook=reject_duplicate_keys)
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: byte {error.start + 1} is not UTF-8; save the file as UTF-8") from None
    except json.JSONDecodeError as error:
        place = f"line {error.lineno}, column {error.colno}"
        raise DataError(f"{path}: not JSON at {place}: {error.msg}; is the file cut off?") from None
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: cannot be read as JSON: {error}") from None
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from error
    rows = list[ParsedRow]()
    for number, value in enumerate(values, 1):
        where = f"{path}, row {number}"
        wrong = DataError(f"{where}: every row must be a JSON object, got a {type(value).__name__}")
        rows.append((where, value if isinstance(value, dict) else wrong))
    return rows


def _check_size(path: str) -> None:
    """Raise DataError for a file that does not exist, is no regular file, or is too large to be parsed whole."""
    if not os.path.isfile(path):
        exists = os.path.exists(path)
        problem = "not a regular file" if exists else "no such file; a relative path starts at the current folder"
        raise DataError(f"{path}: {problem}")
    if (size := os.path.getsize(path)) > MAX_PARSED_BYTES:
        limit = f"{size / 2**30:.1f} GiB, more than {MAX_PARSED_BYTES >> 30} GiB"
        raise DataError(f"{path}: {limit} of a format that is parsed whole: convert it to JSONL or Parquet")
