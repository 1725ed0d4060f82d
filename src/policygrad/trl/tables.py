"""The completions of a generation as a table: a parquet file per log entry, and a sample on the screen."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any


def write_completions(columns: Mapping[str, list[Any]], output: Path, step: int, args: Any) -> None:
    """Write a table to completions/completions_STEP.parquet, and print some of its rows."""
    import pandas

    rows = len(columns["prompt"])
    readable = {name: [_describe(value) for value in values] for name, values in columns.items()}
    table = pandas.DataFrame({"step": [step] * rows, **readable})
    folder = output / "completions"
    folder.mkdir(parents=True, exist_ok=True)
    table.to_parquet(folder / f"completions_{step:05d}.parquet")
    if args.log_unique_prompts:
        table = table[~table["prompt"].astype(str).duplicated()]
    _show(table.head(args.num_completions_to_print or rows), step)


def _describe(value: Any) -> Any:
    """Return a value without its pictures."""
    if isinstance(value, Mapping):
        return {name: _describe(each) for name, each in value.items() if name != "image"}
    return [_describe(each) for each in value] if isinstance(value, list | tuple) else value


def _show(table: Any, step: int) -> None:
    from rich.console import Console
    from rich.table import Table

    shown = Table(title=f"Step {step}", show_lines=True)
    for name in table.columns[1:]:
        shown.add_column(str(name))
    for row in table.itertuples(index=False):
        shown.add_row(*(f"{x:.2f}" if isinstance(x, float) else _as_text(x) for x in row[1:]))
    Console().print(shown)


def _as_text(value: Any) -> str:
    if isinstance(value, list | tuple) and value and isinstance(value[0], Mapping):
        return "\n".join(f"{message.get('role', '')}: {message.get('content', '')}" for message in value)
    return str(value)
