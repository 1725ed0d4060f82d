"""Tasks made of data: rows in memory, files, folders, data sets of a hub, and mixtures of these."""

from __future__ import annotations

from typing import Any

from policygrad.errors import DataError
from policygrad.tasks.mixtures import MixturePart, RowsTask
from policygrad.tasks.rows import RowOptions, explain_data, load_examples, open_rows
from policygrad.tasks.sources import parse_data_mixture


def load_data_task(name: Any, seed: int, eval_data: Any, row_options: RowOptions | None) -> RowsTask | None:
    """Return the task made of data; None if the name is none of data. For the arguments see `load_task`.

    Raises:
        DataError: Invalid data, or options for data where there is none.
    """
    options = row_options or RowOptions()
    title = name if isinstance(name, str) else "rows"
    parts = _load_parts(name, "row", options)
    if not parts:
        if options != RowOptions():
            raise DataError("row_map, skip_bad_rows and decontaminate need data; this task generates its examples")
        return None
    eval_parts = None if eval_data is None else _load_parts(eval_data, "held-out row", options)
    if eval_parts == []:
        got = repr(eval_data) if isinstance(eval_data, str) else f"of type {type(eval_data).__name__}"
        raise DataError(
            f"eval_data={got} is not data: {explain_data(eval_data) or 'give rows or a file such as eval.jsonl'}"
        )
    return RowsTask.from_parts(title, parts, seed, eval_parts, options.decontaminate)


def _load_parts(data: Any, kind: str, options: RowOptions) -> list[MixturePart]:
    """Load the parts of a mixture, or the single part that other data is; none if it is not data.

    kind: the name of in-memory rows in messages.
    """
    parts = list[MixturePart]()
    for weight, part in parse_data_mixture(data) or ((1.0, data),):
        if (source := open_rows(part, kind)) is not None:
            name = part if isinstance(part, str) else "rows" if kind == "row" else "eval_data"
            parts.append(MixturePart(weight, name, load_examples(source, options, name)))
    return parts
