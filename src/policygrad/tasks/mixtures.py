"""A mix of data: which part the next prompt is of, by weight; each part goes through its own rows epoch by epoch."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, reduce
from pathlib import PurePath
from threading import Lock
from typing import overload

from policygrad.errors import DataError
from policygrad.tasks.base import Example, hash_choice
from policygrad.tasks.rows import (
    Concatenated,
    NgramOverlap,
    ShuffledEpochs,
    Subset,
    prompt_key,
    sort_by_hash,
    split_train_eval,
)

BLOCK = 1024
"""Draws that are worked out together."""


@dataclass(frozen=True)
class MixturePart:
    """Rows with their share."""

    weight: float
    name: str
    rows: Sequence[Example]


class ExamplesWithColumns(Sequence[Example]):
    """A part's rows with the columns of all parts, None where it has none, and with its name."""

    def __init__(self, rows: Sequence[Example], names: Sequence[str], part: str) -> None:
        self._rows, self._missing, self._part = rows, dict.fromkeys(names), part

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, index: int) -> Example: ...
    @overload
    def __getitem__(self, index: slice) -> list[Example]: ...
    def __getitem__(self, index: int | slice) -> Example | list[Example]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        row = self._rows[index]
        return replace(row, columns={**self._missing, **row.columns}, part=self._part)


class MixedTask:
    """The part of every draw comes from a hash of (seed, its number), as often as the weights say; the part's own next row follows.

    Held out is of every part what it would hold out alone, drawn by the weights too until there is no more; or the rows that are
    given. No part trains on a prompt that any part holds out.
    """

    rewards: tuple[str, ...] = ()
    steps: tuple[str, ...] = ()

    def __init__(
        self, name: str, train: Sequence[MixturePart], held_out: Sequence[MixturePart], *, seed: int = 0
    ) -> None:
        self.name, self.seed = name, seed
        self.eval_on_train = not held_out
        self._epochs = [ShuffledEpochs(part.rows, seed) for part in train]
        self._weights = tuple(part.weight for part in train)
        self._measured = [replace(part, rows=sort_by_hash(part.rows)) for part in held_out or train]
        self.rows: Sequence[Example] = reduce(Concatenated, [part.rows for part in (*train, *held_out)])
        self._block = lru_cache(maxsize=4)(self._drawn)
        self._before, self._counting = [(0,) * len(train)], Lock()

    @classmethod
    def from_parts(
        cls,
        name: str,
        parts: Sequence[MixturePart],
        seed: int,
        eval_parts: Sequence[MixturePart] | None = None,
        decontaminate: int = 0,
    ) -> MixedTask:
        """Splits the parts, or takes the held-out ones.

        apart: leave out training rows with so many words in a row of a held-out prompt (`overlap.py`); 0 = only equal prompts.

        Raises:
            DataError: a part of which no row is left to train on.
        """
        parts, measured = _alike(parts, eval_parts or ())
        if not measured:
            split = [(part, *split_train_eval(part.rows)) for part in parts]
            measured = [replace(part, rows=others) for part, _, others in split if others]
            unmeasured = [part.name for part, _, others in split if not others]
            if measured and unmeasured:
                warnings.warn(
                    f"{', '.join(unmeasured)}: no row is held out of so few, so they are trained on and not measured",
                    stacklevel=3,
                )
            parts = [replace(part, rows=kept) for part, kept, _ in split]
        prompts = [row.prompt for part in measured for row in part.rows]
        keys, overlap = (
            frozenset(map(prompt_key, prompts)),
            NgramOverlap.from_prompts(prompts, decontaminate) if decontaminate else None,
        )
        return cls(name, [_kept(part, keys, overlap) for part in parts], measured, seed=seed)

    def train_example(self, index: int) -> Example:
        if index < 0:
            raise IndexError(f"training examples are numbered from 0, got {index}")
        number, place = divmod(index, BLOCK)
        part, nth = self._block(number)[place]
        return self._epochs[part][nth]

    def eval_examples(self, count: int) -> list[Example]:
        """At most `count` rows; all of them when there are fewer. Fewer are the first of more."""
        found, weights = list[Example](), [part.weight for part in self._measured]
        taken = [0] * len(weights)
        while len(found) < count and any(weights):
            part = hash_choice("held-out", len(found), weights)
            found.append(self._measured[part].rows[taken[part]])
            taken[part] += 1
            if taken[part] == len(self._measured[part].rows):
                weights[part] = 0.0
        return found

    def _parts(self, block: int) -> list[int]:
        return [
            hash_choice(f"{self.seed}", index, self._weights) for index in range(block * BLOCK, (block + 1) * BLOCK)
        ]

    def _drawn(self, block: int) -> list[tuple[int, int]]:
        """(part, which of its rows) of every draw in a block."""
        counts, found = list(self._counts(block)), list[tuple[int, int]]()
        for part in self._parts(block):
            found.append((part, counts[part]))
            counts[part] += 1
        return found

    def _counts(self, block: int) -> tuple[int, ...]:
        """Draws of each part before a block. A resumed run counts them anew: some two seconds for a million."""
        with self._counting:  # a later rollout may be drawn beside an evaluation
            while len(self._before) <= block:
                parts = self._parts(len(self._before) - 1)
                self._before.append(tuple(n + parts.count(part) for part, n in enumerate(self._before[-1])))
            return self._before[block]


def shorten_names(names: Sequence[str]) -> list[str]:
    """What tells parts apart in metrics: the last part of a path, or all of it where two end alike."""
    last = [PurePath(name).name or name for name in names]
    return last if len(set(last)) == len(set(names)) else list(names)


def _alike(parts: Sequence[MixturePart], others: Sequence[MixturePart]) -> tuple[list[MixturePart], list[MixturePart]]:
    """All with the same columns, since each column reaches the reward as one list."""
    columns = list(dict.fromkeys(name for part in (*parts, *others) for name in part.rows[0].columns))

    def widened(some: Sequence[MixturePart]) -> list[MixturePart]:
        short = shorten_names([part.name for part in some])
        return [
            replace(p, rows=ExamplesWithColumns(p.rows, columns, name)) for p, name in zip(some, short, strict=True)
        ]

    return widened(parts), widened(others)


def _kept(part: MixturePart, keys: frozenset[str], overlap: NgramOverlap | None) -> MixturePart:
    """A part without what is measured, in whichever part that stands."""
    kept = [i for i, row in enumerate(part.rows) if _trained(row, keys, overlap)]
    if not kept:
        raise DataError(
            f"{part.name}: every prompt of it is held out, or overlaps with one that is, so none is left to train on; give other "
            "held-out rows, or leave this part out of the mix"
        )
    if len(kept) < len(part.rows):
        also = f", or have {overlap.n} words in a row of one that is" if overlap else ""
        count = len(part.rows) - len(kept)
        warnings.warn(
            f"{part.name}: {count} of {len(part.rows)} rows left out of training: their prompts are held out{also}",
            stacklevel=4,
        )
    return replace(part, rows=Subset(part.rows, kept)) if len(kept) < len(part.rows) else part


def _trained(row: Example, keys: frozenset[str], overlap: NgramOverlap | None) -> bool:
    return prompt_key(row.prompt) not in keys and (overlap is None or row.prompt not in overlap)
