"""Tasks made of data: rows in memory, files, folders, data sets of a hub, and mixtures of these.

In a mixture each prompt's part is chosen by weight, and each part is read epoch by epoch.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, reduce
from pathlib import PurePath
from threading import Lock
from typing import Any

from policygrad.errors import DataError, PolicygradError
from policygrad.tasks.base import Example, hash_choice
from policygrad.tasks.rows import (
    EvalPrompts,
    LazyRows,
    RowOptions,
    ShuffledEpochs,
    concatenate,
    explain_data,
    load_examples,
    open_rows,
    select_rows,
    sort_by_hash,
    split_train_eval,
    warn_of_skipped,
)
from policygrad.tasks.sources import parse_data_mixture

BLOCK = 1024  # part choices computed together


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


@dataclass(frozen=True)
class MixturePart:
    """Rows and their weight in a mixture."""

    weight: float
    name: str
    rows: Sequence[Example]


class RowsTask:
    """Rows, or a weighted mixture of several parts.

    The rows of a part are shuffled anew each epoch by (seed, epoch). The part of each training example is chosen by a hash of
    (seed, index), with frequencies given by the weights; the example is then the next row of that part.

    The evaluation rows are given, or selected by a hash of the prompt (1 in 16) in each part, and interleaved by weight. With
    fewer than 32 rows, or when the hash selects none or all of them, a part has none; when no part has any, evaluation uses the
    training rows and `eval_on_train` is True. No part trains on a prompt that any part evaluates.
    """

    rewards: tuple[str, ...] = ()
    steps: tuple[str, ...] = ()

    def __init__(self, name: str, train: Sequence[MixturePart], eval_parts: Sequence[MixturePart], *, seed: int = 0):
        self.name, self.seed = name, seed
        self._train_parts, self._given_eval_parts = train, eval_parts
        self.eval_on_train = not eval_parts
        self._epochs = [ShuffledEpochs(part.rows, seed) for part in train]
        self._weights = tuple(part.weight for part in train)
        self._eval_parts = [replace(part, rows=sort_by_hash(part.rows)) for part in eval_parts or train]
        self.rows: Sequence[Example] = reduce(concatenate, [part.rows for part in (*train, *eval_parts)])
        self._counts_before, self._lock = [(0,) * len(train)], Lock()  # of each part's examples before a block

    @classmethod
    def from_parts(
        cls,
        name: str,
        parts: Sequence[MixturePart],
        seed: int,
        eval_parts: Sequence[MixturePart] | None = None,
        decontaminate: int = 0,
    ) -> RowsTask:
        """Build a task from parts, splitting each into training and evaluation rows unless evaluation parts are given.

        Args:
            decontaminate: Leave out training rows that share this many consecutive words with an evaluation prompt
                (`EvalPrompts`); 0 leaves out equal prompts only.

        Raises:
            DataError: A part has no row left to train on, or the columns of evaluation rows differ from those of a single part.
        """
        are_given, eval_parts = bool(eval_parts), eval_parts or ()
        if len(parts) > 1 or len(eval_parts) > 1:
            columns = list(dict.fromkeys(column for part in (*parts, *eval_parts) for column in part.rows[0].columns))
            parts, eval_parts = _add_columns(parts, columns), _add_columns(eval_parts, columns)
        elif eval_parts and (odd := sorted(set(parts[0].rows[0].columns) ^ set(eval_parts[0].rows[0].columns))):
            raise DataError(
                f"{eval_parts[0].name}: its columns differ from those of {name} in {', '.join(odd)}; rewards need all of them"
            )
        if not eval_parts:
            splits = [(part, *split_train_eval(part.rows)) for part in parts]
            eval_parts = [replace(part, rows=rows) for part, _, rows in splits if rows]
            unmeasured = [part.name for part, _, rows in splits if not rows]
            if eval_parts and unmeasured:
                warnings.warn(
                    f"{', '.join(unmeasured)}: too few rows to hold any out, so all are trained on and none evaluated",
                    stacklevel=4,
                )
            parts = [replace(part, rows=rows) for part, rows, _ in splits]
        if are_given or decontaminate or len(parts) > 1:  # equal prompts of a part are on the same side of its split
            excluded = EvalPrompts((row.prompt for part in eval_parts for row in part.rows), decontaminate)
            parts = [replace(part, rows=excluded.exclude_from(part.rows, part.name, stacklevel=6)) for part in parts]
        return cls(name, parts, eval_parts, seed=seed)

    @property
    def shares(self) -> str:
        """How often training prompts come from each part of a mixture, with its number of rows; "" for a single part."""
        if len(self._train_parts) < 2:
            return ""
        names, total = shorten_names([part.name for part in self._train_parts]), sum(self._weights)
        return ", ".join(
            f"{name} {part.weight / total:.1%} ({len(part.rows):,} rows)"
            for name, part in zip(names, self._train_parts, strict=True)
        )

    def without_bad_rows(self, check: Callable[[Example], object]) -> RowsTask:
        """Return the task without the rows for which `check` raises a PolicygradError, and warn about their number.

        The other rows stay where they are, in training or in evaluation.

        Raises:
            DataError: A part has no row left to train on.
        """

        skipped, first_error = 0, ""

        def keep(part: MixturePart) -> MixturePart:
            nonlocal skipped, first_error
            kept = list[int]()
            for index, example in enumerate(part.rows):
                try:
                    check(example)
                    kept.append(index)
                except PolicygradError as error:
                    skipped, first_error = skipped + 1, first_error or str(error)
            return part if len(kept) == len(part.rows) else replace(part, rows=select_rows(part.rows, kept))

        train = [keep(part) for part in self._train_parts]
        evaluated = [part for part in map(keep, self._given_eval_parts) if part.rows]
        if emptied := [part.name for part in train if not part.rows]:
            raise DataError(f"{emptied[0]}: no row is left to train on; the first that was skipped: {first_error}")
        if not skipped:
            return self
        warn_of_skipped(self.name, skipped, len(self.rows), first_error)
        return RowsTask(self.name, train, evaluated, seed=self.seed)

    def train_example(self, index: int) -> Example:
        if index < 0:
            raise IndexError(f"training examples are numbered from 0, got {index}")
        if len(self._epochs) == 1:
            return self._epochs[0][index]
        block, offset = divmod(index, BLOCK)
        with self._lock:  # a later rollout may be sampled during an evaluation
            while len(self._counts_before) <= block:  # a resumed run counts from the start: two seconds per million
                parts = choose_parts(self.seed, self._weights, len(self._counts_before) - 1)
                self._counts_before.append(tuple(n + parts.count(i) for i, n in enumerate(self._counts_before[-1])))
        parts = choose_parts(self.seed, self._weights, block)
        part = parts[offset]
        return self._epochs[part][self._counts_before[block][part] + parts[:offset].count(part)]

    def eval_examples(self, count: int) -> list[Example]:
        """Return at most `count` rows, or all when there are fewer. A smaller count gives a prefix of a larger one."""
        chosen, weights = list[Example](), [part.weight for part in self._eval_parts]
        used = [0] * len(weights)
        while len(chosen) < count and any(weights):
            part = hash_choice("held-out", len(chosen), weights)
            chosen.append(self._eval_parts[part].rows[used[part]])
            used[part] += 1
            if used[part] == len(self._eval_parts[part].rows):
                weights[part] = 0.0
        return chosen


@lru_cache(maxsize=4)
def choose_parts(seed: int, weights: tuple[float, ...], block: int) -> list[int]:
    """Choose the part of every example of a block."""
    return [hash_choice(f"{seed}", i, weights) for i in range(block * BLOCK, (block + 1) * BLOCK)]


def shorten_names(names: Sequence[str]) -> list[str]:
    """Return names that distinguish the parts in metrics: the last path component, or the full path where two are equal."""
    last = [PurePath(name).name or name for name in names]
    return last if len(set(last)) == len(set(names)) else list(names)


def _add_columns(parts: Sequence[MixturePart], columns: Sequence[str]) -> list[MixturePart]:
    """Give all rows the columns of all parts, None where a part has none, and the part's name."""
    missing, names = dict.fromkeys(columns), shorten_names([part.name for part in parts])

    def complete(rows: Sequence[Example], name: str) -> LazyRows:
        def fetch(index: int) -> Example:
            row = rows[index]
            return replace(row, columns={**missing, **row.columns}, part=name)

        return LazyRows(len(rows), fetch)

    return [replace(part, rows=complete(part.rows, name)) for part, name in zip(parts, names, strict=True)]
