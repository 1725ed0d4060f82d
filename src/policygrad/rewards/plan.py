"""A rollout's samples as chunks of work for reward workers."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from policygrad.errors import RewardError
from policygrad.rewards.slots import Work
from policygrad.rewards.wire import Chunk, by_value

_LARGEST_CHUNK = 64  # samples per message
_LARGEST_EARLY = 8  # enough to be busy with, and what comes later can still be shared out evenly
_CHUNKS_PER_WORKER = 4  # enough that one slow chunk does not leave the other workers idle


def plan(
    prompts: Sequence[Any],
    completions: Sequence[str],
    columns: Mapping[str, Sequence[Any]],
    *,
    batched: Sequence[int] = (),
    single: Sequence[int],
    workers: int,
    asked: Sequence[int] | None = None,
    early: bool = False,
) -> list[Work]:
    """Chunks for the workers: functions that take the whole batch first, they are the longest calls.

    batched, single: numbers of the functions that get all samples, and one at a time. asked: places of the samples that they get
    one at a time, None = all. early: more are to come, and workers are looked after from time to time only.

    Raises:
        RewardError: a column that cannot be sent, by its name.
    """
    count = len(completions)
    chunks: list[tuple[tuple[int, ...], list[tuple[int, tuple[int, ...]]]]] = []
    everything = tuple(range(count))
    if count:
        chunks += [(everything, [(f, everything)]) for f in batched]
    asked = everything if asked is None else asked
    each, largest = (1, _LARGEST_EARLY) if early else (_CHUNKS_PER_WORKER, _LARGEST_CHUNK)
    size = min(math.ceil(len(asked) / max(workers * each, 1)) or 1, largest)
    for first in range(0, len(asked) if single else 0, size):
        places = tuple(asked[first : first + size])
        chunks.append((places, [(f, (i,)) for i in range(len(places)) for f in single]))
    return [
        Work(
            Chunk(_pack(take(prompts, completions, columns, places)), tuple(calls)),
            places,
            tuple(len(completions[i]) for i in places),
        )
        for places, calls in chunks
    ]


def take(
    prompts: Sequence[Any], completions: Sequence[str], columns: Mapping[str, Sequence[Any]], places: Sequence[int]
) -> tuple[list[Any], list[str], dict[str, list[Any]]]:
    chosen = {name: [values[i] for i in places] for name, values in columns.items()}
    return [prompts[i] for i in places], [completions[i] for i in places], chosen


def _pack(samples: tuple[list[Any], list[str], dict[str, list[Any]]]) -> bytes:
    try:
        return by_value(samples)
    except Exception as error:
        for name, values in (("prompts", samples[0]), *samples[2].items()):
            try:
                by_value(values)
            except Exception:
                raise RewardError(
                    f"column {name!r} cannot be sent to a reward worker: {error}; use plain data"
                ) from error
        raise
