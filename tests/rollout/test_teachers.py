"""Teachers behind servers, and several of them: which texts are scored, once each and all at once, and by whom."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

import policygrad as pg
from policygrad.core.media import Media
from policygrad.rollout.teachers import ServedTeachers, add_teacher_positions, find_teacher, split_texts
from policygrad.rollout.trajectory import EpisodeGroup, EpisodeSpec, Segment, Trajectory
from policygrad.samplers.base import TokenScores
from policygrad.tasks.base import Example
from policygrad.utils.async_runner import AsyncRunner


class Scorer:
    """Gives the token at index i of a text i + id/1000 nats below 0; waits until `together` requests are open."""

    def __init__(self, together: int = 1) -> None:
        self.requests: list[tuple[list[int], int]] = []
        self.together, self.open = together, 0
        self.changed = asyncio.Condition()

    async def score(self, ids: Sequence[int], start: int) -> TokenScores:
        self.requests.append((list(ids), start))
        async with self.changed:
            self.open += 1
            self.changed.notify_all()
            await self.changed.wait_for(lambda: self.open >= self.together)
        return TokenScores(torch.tensor([-(i + ids[i] / 1000) for i in range(start, len(ids))]))

    def pop_retries(self) -> int:
        return 2


def batch_of(tokens: list[list[int]], mask: list[list[int]], **fields: object) -> pg.Batch:
    """One group for each row; the prompts are [1, 2], [1, 2, 3], …"""
    return pg.Batch(
        mask=torch.tensor(mask, dtype=torch.bool),
        group=torch.arange(len(tokens)),
        reward=torch.zeros(len(tokens)),
        tokens=torch.tensor(tokens),
        prompts=tuple(torch.arange(1, 3 + row) for row in range(len(tokens))),
        **fields,  # type: ignore[arg-type]
    )


def test_sampled_tokens_are_scored_after_all_before_them() -> None:
    """A tool's token is read and not scored; a row that is masked is not sent; padding is cut off."""
    batch = batch_of([[10, 11, 12, 13], [20, 21, 0, 0], [30, 31, 32, 33]], [[1, 0, 1, 0], [0, 0, 0, 0], [0, 1, 1, 1]])
    scorer = Scorer(2)
    with AsyncRunner() as wait:
        scored, metrics = ServedTeachers({0: scorer}, wait).score(batch)
    assert scorer.requests == [([1, 2, 10, 11, 12], 2), ([1, 2, 3, 4, 30, 31, 32, 33], 5)]
    assert scored.logp_ref is not None
    expected = torch.tensor([[-2.010, 0, -4.012, 0], [0, 0, 0, 0], [0, -5.031, -6.032, -7.033]])
    assert torch.allclose(scored.logp_ref, expected)
    assert metrics["teacher/retries"].value == 2
    assert metrics["time/teacher"].value > 0


def test_equal_completions_are_scored_once_and_all_at_once() -> None:
    batch = replace(batch_of([[7, 8]] * 6, [[1, 1]] * 6), group=torch.tensor([0, 0, 0, 1, 1, 2]))
    scorer = Scorer(together=3)  # answers only once three requests are open
    with AsyncRunner() as wait:
        scored, _ = ServedTeachers({0: scorer}, wait).score(batch)
    assert [len(ids) for ids, _ in scorer.requests] == [4, 5, 6]
    assert scored.logp_ref is not None
    assert scored.logp_ref[:3].unique(dim=0).shape[0] == 1


def test_rewritten_conversations_are_scored_branch_by_branch() -> None:
    """Prompt [1, 2]; the turn 10, 11; then the template drops 11 and writes 12, and the turn 13, 14 follows."""
    batch = batch_of([[10, 11, 12, 13, 14]], [[1, 1, 0, 1, 1]], positions=torch.tensor([[2, 3, 3, 4, 5]]))
    texts = [(text.ids, text.start, text.places) for text in split_texts(batch, 0)]
    assert texts == [([1, 2, 10, 11], 2, [0, 1]), ([1, 2, 10, 12, 13, 14], 4, [3, 4])]


def test_each_teacher_scores_its_completions() -> None:
    """Teacher 1 is in memory: its rows are left to the learner."""
    batch = batch_of([[10], [20], [30]], [[1], [1], [1]], teacher=torch.tensor([2, 1, 0]))
    first, third = Scorer(), Scorer()
    with AsyncRunner() as wait:
        scored, metrics = ServedTeachers({0: first, 2: third}, wait).score(batch)
    assert first.requests == [([1, 2, 3, 4, 30], 4)]
    assert third.requests == [([1, 2, 10], 2)]
    assert scored.logp_ref is not None
    assert torch.allclose(scored.logp_ref, torch.tensor([[-2.010], [0.0], [-4.030]]))
    assert metrics["teacher/retries"].value == 4


def test_nothing_is_sent_where_nothing_was_sampled() -> None:
    with AsyncRunner() as wait:
        scored, _ = ServedTeachers({0: Scorer()}, wait).score(batch_of([[10]], [[0]]))
    assert scored.logp_ref is not None
    assert scored.logp_ref.tolist() == [[0.0]]


def test_pictures_are_refused() -> None:
    media = Media(torch.tensor([0]), {"pixels": torch.zeros(1)}, "one")
    batch = batch_of([[10]], [[1]], prompt_media=((media,),))
    with (
        AsyncRunner() as wait,
        pytest.raises(pg.ConfigError, match="a teacher behind a server is sent token ids alone"),
    ):
        ServedTeachers({0: Scorer()}, wait).score(batch)


def group(column: object, samples: int = 2) -> EpisodeGroup:
    columns = {} if column is None else {"teacher": column}
    rows = tuple(Trajectory((Segment(torch.tensor([5]), torch.zeros(1)),), "", False) for _ in range(samples))
    spec = EpisodeSpec(Example("1+1=", columns), (0, 0, 1, 0), 4)
    return EpisodeGroup(spec, torch.tensor([1, 2]), rows)


REFERENCE = pg.Reference(teachers=("math=a", "code=http://b"))


def test_an_example_names_its_teacher_or_gives_its_number() -> None:
    groups = [group("code"), group("math", 1), group(1), group(0)]
    batch = add_teacher_positions(batch_of([[5]] * 7, [[1]] * 7), groups, REFERENCE)
    assert batch.teacher is not None
    assert batch.teacher.tolist() == [1, 1, 0, 1, 1, 0, 0]


@pytest.mark.parametrize(
    ("column", "says"),
    [
        (None, "line 3 has no column 'teacher', and Reference.teachers has math, code"),
        ("physics", "line 3 has the teacher 'physics'"),
        (2, "line 3 has the teacher 2"),
        (True, "line 3 has the teacher True"),
        (-1, "line 3 has the teacher -1"),
    ],
)
def test_examples_without_a_teacher_are_refused(column: object, says: str) -> None:
    with pytest.raises(pg.PolicygradError, match=says):
        find_teacher(group(column).spec.example, ["math", "code"], "line 3")
