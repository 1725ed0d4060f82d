"""Several teachers, and teachers behind servers: each completion's teacher, and its log-probabilities of the sampled tokens."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol

import torch

from policygrad.core.auxiliary import Reference
from policygrad.core.batch import Batch
from policygrad.core.metrics import Metrics, Sum
from policygrad.errors import ConfigError, DataError
from policygrad.rollout.providers import Collected, FieldProvider, ProviderContext, Stage
from policygrad.rollout.scoring import ScoringResult
from policygrad.rollout.trajectory import EpisodeGroup
from policygrad.samplers.base import TokenScores
from policygrad.tasks.base import Example
from policygrad.utils.async_runner import AsyncRunner, gather_or_cancel
from policygrad.utils.spans import span

TEACHER_COLUMN = "teacher"


class TokenScorer(Protocol):
    """A model that scores given tokens, such as one behind a server."""

    async def score(self, ids: Sequence[int], start: int) -> TokenScores:
        """Return the log-probability of each of the tokens ids[start:], and the likeliest in its place if the run needs them."""

    def pop_retries(self) -> int:
        """Return how many requests were sent again since the last call."""


@dataclass(frozen=True)
class TeacherPositions(FieldProvider):
    """Fills `teacher`."""

    part: Reference
    stage: ClassVar[Stage] = Stage.READINGS

    def provide(self, collected: Collected, context: ProviderContext) -> Collected:
        batch = add_teacher_positions(collected.batch, collected.groups, self.part)
        return collected.with_result(batch, ScoringResult())


@dataclass(frozen=True, eq=False)
class ServedTeachers(FieldProvider):
    """Fills `Batch.logp_ref` from the teachers that are behind servers, and their likeliest tokens if a term compares with them; a
    learner fills `logp_ref` from those in memory."""

    servers: Mapping[int, TokenScorer]
    """By position in `Reference.teachers`; the only one of `Reference.model` has position 0."""
    run_async: AsyncRunner
    top_k: int = 0
    """Likeliest tokens that each server tells (`Batch.top_ids_ref`)."""
    stage: ClassVar[Stage] = Stage.TEACHING

    def provide(self, collected: Collected, context: ProviderContext) -> Collected:
        with span("score by teachers"):
            batch, metrics = self.score(collected.batch)
        return collected.with_result(batch, ScoringResult(metrics))

    def score(self, batch: Batch) -> tuple[Batch, Metrics]:
        """Score all completions at once; equal ones are scored once. Returns the batch and time/teacher, teacher/retries.

        Raises:
            EngineError: A server fails.
            ConfigError: A text has pictures.
        """
        if batch.has_media:
            raise ConfigError(
                "a text has pictures, and a teacher behind a server is sent token ids alone: name a teacher in a folder, which the "
                "learner evaluates"
            )
        started, read = time.perf_counter(), batch.as_reference_reads()
        logp = torch.zeros(read.mask.shape)
        top_logp = torch.zeros(*read.mask.shape, self.top_k)
        ids = torch.zeros_like(top_logp, dtype=torch.int32)
        requests = dict[tuple[int, tuple[int, ...], int], list[tuple[int, list[int]]]]()  # to the places of its results
        for row in read.mask.any(1).nonzero()[:, 0].tolist():
            teacher = 0 if batch.teacher is None else int(batch.teacher[row])
            if teacher in self.servers:
                for text in split_texts(read, row):
                    requests.setdefault((teacher, tuple(text.ids), text.start), []).append((row, text.places))

        async def score_all() -> list[TokenScores]:
            return await gather_or_cancel(self.servers[teacher].score(text, start) for teacher, text, start in requests)

        for scores, targets in zip(self.run_async(score_all()) if requests else (), requests.values(), strict=True):
            for row, places in targets:
                logp[row, places] = scores.logp
                if scores.top is not None:
                    ids[row, places], top_logp[row, places] = scores.top.ids, scores.top.logp
        retries = sum(server.pop_retries() for server in self.servers.values())
        metrics: Metrics = {
            "time/teacher": Sum(time.perf_counter() - started),
            "teacher/retries": Sum(float(retries)),
        }
        batch = replace(batch, logp_ref=batch.fold_reference(logp.masked_fill(~read.mask, 0.0)))
        return (replace(batch, top_ids_ref=ids, top_logp_ref=top_logp) if self.top_k else batch), metrics


@dataclass(frozen=True)
class ScoredText:
    """A text of a completion: the prompt and tokens after it, up to the last one that counts."""

    ids: list[int]
    start: int  # number of ids before the first one to score
    places: list[int]  # index in the completion of each id from `start` on


def split_texts(batch: Batch, row: int) -> Iterator[ScoredText]:
    """Yield the texts in which a completion's sampled tokens were read: one, or one per branch where a chat template rewrote the
    conversation (`Batch.positions`)."""
    assert batch.prompts is not None
    assert batch.tokens is not None
    prompt = batch.prompts[int(batch.group[row])].tolist()
    last = int(batch.mask[row].nonzero()[-1, 0])
    tokens, mask = batch.tokens[row, : last + 1].tolist(), batch.mask[row, : last + 1].tolist()
    order = range(len(prompt), len(prompt) + len(tokens))
    positions: Sequence[int] = order if batch.positions is None else batch.positions[row, : last + 1].tolist()
    ids, places = list(prompt), [-1] * len(prompt)  # of the current text
    first: int | None = None  # position of the branch's first sampled token
    for i, (token, position, is_sampled) in enumerate(zip(tokens, positions, mask, strict=True)):
        if position < len(ids):  # a branch begins
            if first is not None:
                yield ScoredText(list(ids), first, places[first:])
            del ids[position:], places[position:]
            first = None
        ids.append(token)
        places.append(i)
        if is_sampled and first is None:
            first = position
    if first is not None:
        yield ScoredText(ids, first, places[first:])


def add_teacher_positions(batch: Batch, groups: Sequence[EpisodeGroup], reference: Reference) -> Batch:
    """Fill `Batch.teacher` from the examples' column `teacher`.

    Raises:
        DataError: An example has no such column, or names another teacher.
    """
    names = list(reference.models)
    sizes = torch.tensor([len(group.trajectories) for group in groups])
    teacher = torch.tensor([find_teacher(g.spec.example, names, g.spec.location) for g in groups], dtype=torch.int64)
    return replace(batch, teacher=teacher.repeat_interleave(sizes))


def find_teacher(example: Example, names: Sequence[str], where: str) -> int:
    """Return the position of an example's teacher, which its column `teacher` gives by name, or as that number.

    Raises:
        DataError: There is no such column, or no such teacher.
    """
    value: Any = example.columns.get(TEACHER_COLUMN)
    if isinstance(value, str) and value in names:
        return names.index(value)
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < len(names):
        return value
    problem = "has no column 'teacher'" if value is None else f"has the teacher {value!r}"
    raise DataError(
        f"{where} {problem}, and Reference.teachers has {', '.join(names)}: give each row the name of its teacher in the column "
        "'teacher', in the data or by --row-map"
    )
