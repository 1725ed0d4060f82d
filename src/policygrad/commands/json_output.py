"""Standard output under --json: JSON lines and nothing else. docs/reference/json.md documents it.

Whatever else is printed, also by user code and by child processes, goes to standard error.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TextIO, TypedDict

Command = Callable[[list[str]], int]
OUTPUTS: dict[Command, tuple[Any, ...]] = {}
"""Types of what each command prints under --json, once its module is imported; see `prints`."""
_reserved: TextIO | None = None


def prints(*types: Any) -> Callable[[Command], Command]:
    """Declare what a command prints under --json, as TypedDicts and dataclasses; `json_schemas` derives its schema from them."""

    def declare(command: Command) -> Command:
        OUTPUTS[command] = types
        return command

    return declare


def requests_json(args: Sequence[str]) -> bool:
    """Return True if the arguments have --json before a `--`, and no --help."""
    mine = args[: args.index("--")] if "--" in args else args
    return "--json" in mine and not {"-h", "--help"} & {*mine}


@contextlib.contextmanager
def reserve_stdout() -> Iterator[None]:
    """Reserve standard output for `print_json`, and send what else is printed to standard error.

    The file descriptor is redirected too, for C libraries and child processes.
    """
    global _reserved
    sys.stdout.flush()
    try:
        has_descriptor = sys.stdout.fileno() == 1
    except (OSError, ValueError, io.UnsupportedOperation):
        has_descriptor = False  # another object stands for standard output, as in a notebook or a test
    with contextlib.ExitStack() as stack:
        stack.callback(setattr, sys.modules[__name__], "_reserved", _reserved)
        if has_descriptor:
            saved = os.dup(1)  # which child processes do not inherit
            _reserved = stack.enter_context(open(saved, "w", encoding="utf-8", errors="backslashreplace"))
            stack.callback(os.dup2, saved, 1)
            os.dup2(2, 1)
        else:
            _reserved = sys.stdout
        stack.enter_context(contextlib.redirect_stdout(sys.stderr))
        yield


def is_reserved() -> bool:
    """Return True under --json."""
    return _reserved is not None


def print_json(value: object) -> None:
    """Print the value as one line of JSON. Numbers that are not finite become null, since JSON has none."""
    stream = sys.stdout if _reserved is None else _reserved
    # backslashreplace writes a lone surrogate as \udc80, which is JSON's escape for it, too
    stream.write(json.dumps(to_plain(value), ensure_ascii=False, allow_nan=False) + "\n")
    stream.flush()


class ErrorDetails(TypedDict):
    """What failed."""

    kind: str
    """Class of the error, such as ConfigError; UsageError for options that cannot be parsed."""
    message: str
    """The sentence on standard error: option, value, reason and remedy."""
    exit_code: int
    """The command's exit code."""


class Error(TypedDict):
    """The last line of a command that fails."""

    error: ErrorDetails


def print_error(kind: str, message: str, exit_code: int) -> None:
    """Print an error as a JSON object; see docs/reference/json.md."""
    print_json({"error": {"kind": kind, "message": message, "exit_code": exit_code}})


@contextlib.contextmanager
def capture_usage_error() -> Iterator[None]:
    """Under --json, add the message of a failed parser to the SystemExit as a note, without the box around it."""
    if not is_reserved():
        yield
        return
    message = io.StringIO()
    try:
        with contextlib.redirect_stderr(message):
            yield
    except SystemExit as end:
        lines = (re.sub(r"[─│╭╮╰╯]|-{4,}", "", line).strip() for line in message.getvalue().splitlines()[1:])
        end.add_note(" ".join(line for line in lines if line))
        raise
    finally:
        sys.stderr.write(message.getvalue())


def to_plain(value: Any) -> Any:
    """Return the value as JSON has it: numbers that are not finite are null, paths are texts."""
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): to_plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain(item) for item in value]
    if isinstance(value, os.PathLike):
        return str(value)
    if getattr(value, "ndim", None) == 0:  # a number of torch's or numpy's
        return to_plain(value.item())
    return value
