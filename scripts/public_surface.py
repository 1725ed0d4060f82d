"""What others may rely on, a line each: names of `policygrad`, options of commands, fields of their JSON, files of a run.

    python scripts/public_surface.py --write   # after a change that is meant; CHANGELOG.md says what it is for a user

A test compares docs/public-surface.txt with it, so that no such change goes in unseen.
"""

from __future__ import annotations

import argparse
import inspect
import json
import re
import tempfile
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import policygrad as pg
from policygrad.cli import main as run_policygrad
from policygrad.commands import COMMANDS
from policygrad.commands.json_schemas import load_outputs, to_schema

ROOT = Path(__file__).resolve().parents[1]
PATH = ROOT / "docs" / "public-surface.txt"
HELP = ROOT / "src" / "policygrad" / "commands" / "help.json"


def list_surface() -> list[str]:
    """Return the lines, sorted."""
    return sorted({*list_names(), *list_options(), *list_json_fields(), *list_run_files()})


def list_names() -> Iterator[str]:
    """Yield each public name with its parameters; an argument's type and default are not promised here."""
    for name in pg.__all__:
        value = getattr(pg, name)
        if not callable(value):
            yield f"name {name}"
            continue
        try:
            names = [
                f"*{p.name}" if p.kind is p.VAR_POSITIONAL else p.name
                for p in inspect.signature(value).parameters.values()
            ]
        except ValueError:  # a protocol, or a class in C
            names = ["…"]
        yield f"name {name}({', '.join(names)})"


def list_options() -> Iterator[str]:
    """Yield each command's options, without those of an algorithm's parts, which the parts' own fields are."""
    for command, page in json.loads(HELP.read_text())["commands"].items():
        for title, section in page["sections"].items():
            for flags, *_ in section["options"]:
                if title != "algorithm" and not title.startswith("algorithm "):
                    yield from (f"option {command} {flag}" for flag in flags)


def list_json_fields() -> Iterator[str]:
    """Yield the fields of what each command prints under --json, also of what is nested in them."""
    for command in COMMANDS:
        for kind in load_outputs(command):
            schema = to_schema(kind)
            yield from (f"json {command} {schema.get('title', '')}{path}" for path in _field_paths(schema))


def list_run_files() -> Iterator[str]:
    """Yield the files of a run's folder, from one of two steps."""
    sizes = "--steps 2 --prompts-per-step 2 --samples-per-prompt 2 --max-tokens 8 --evaluation.problems 0"
    options = f"{sizes} --checkpoint.every 1 --checkpoint.keep 1 --rewards.num-workers 1 --plain"
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent) / "run"
        with redirect_stdout(StringIO()) as output, redirect_stderr(output):
            code = run_policygrad(["train", "grpo", *options.split(), "--output", str(folder)])
        if code:
            raise SystemExit(f"the run did not end well:\n{output.getvalue()}")
        for path in folder.rglob("*"):
            name = re.sub(r"step-\d+", "step-N", path.relative_to(folder).as_posix())
            yield f"file {name}{'/' if path.is_dir() else ''}"


def _field_paths(schema: dict[str, Any]) -> Iterator[str]:
    for name, inner in schema.get("properties", {}).items():
        yield f".{name}"
        yield from (f".{name}{path}" for path in _field_paths(inner))
    for inner in (schema.get("items"), *schema.get("anyOf", ())):
        if isinstance(inner, dict):
            yield from _field_paths(inner)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--write", action="store_true", help="write docs/public-surface.txt instead of printing")
    text = "\n".join(list_surface()) + "\n"
    if parser.parse_args().write:
        PATH.write_text(text)
    else:
        print(text, end="")
