"""Answers judged by reasoning-gym's own scorers; the one file in rewards that imports it, and only when it is used."""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from policygrad.errors import DataError
from policygrad.rewards.builtin import final_answer
from policygrad.rewards.types import reward

_RIGHT = 1.0 - 1e-6


def prepare() -> None:
    """Import reasoning-gym (about a second) before the first sample's clock runs."""
    import reasoning_gym  # noqa: F401


@reward(prepare=prepare)
def reasoning_gym(
    prompts: Any, completions: Sequence[str], dataset: Sequence[str], entry: Sequence[Mapping[str, Any]], **_: Any
) -> list[float | None]:
    """1.0 if reasoning-gym calls the final answer right, else 0.0: its partial credit is mostly for the format."""
    scores = reasoning_gym_partial(prompts, completions, dataset, entry)
    return [None if score is None else float(score >= _RIGHT) for score in scores]


@reward(prepare=prepare)
def reasoning_gym_partial(
    prompts: Any, completions: Sequence[str], dataset: Sequence[str], entry: Sequence[Mapping[str, Any]], **_: Any
) -> list[float | None]:
    """The scorer's own number, usually 0 to 1; a wrong but readable answer gets 0.01 or 0.05 from many datasets."""
    return [
        _score(final_answer(text), name, item) for text, name, item in zip(completions, dataset, entry, strict=True)
    ]


def _score(answer: str, dataset: str, entry: Mapping[str, Any]) -> float:
    """An answer that the scorer cannot read is wrong; an entry whose own answer it cannot read is an error."""
    scorer = _scorer(dataset)
    try:
        return float(scorer(answer, entry))
    except Exception:
        if entry["answer"] is not None:
            scorer(entry["answer"], entry)
        return 0.0


@lru_cache(maxsize=128)
def _scorer(dataset: str) -> Any:
    from reasoning_gym.factory import DATASETS, get_score_answer_fn

    if dataset not in DATASETS:
        raise DataError(f"column 'dataset' names {dataset!r}, which is no reasoning-gym dataset; see known_tasks()")
    return get_score_answer_fn(dataset)
