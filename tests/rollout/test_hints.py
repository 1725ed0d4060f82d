"""The prompts that a reference reads: which template, with whose answer, and what happens where there is none."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import policygrad as pg
from doubles.rollouts import collect_rollout
from policygrad.environments import Action, Observation, Step
from policygrad.models.loading import load_model
from policygrad.models.tokenizer import Tokenizer, load_tokenizer
from policygrad.rewards.base import RewardScores
from policygrad.rollout.batching import batch_groups
from policygrad.rollout.reference_prompts import add_reference_prompts, check_template_columns
from policygrad.rollout.rollouter import Rollout, Rollouter
from policygrad.rollout.serialization import pack_rollouts, unpack_rollouts
from policygrad.rollout.trajectory import TRAIN, EpisodeGroup, EpisodeSpec, Segment, Trajectory
from policygrad.samplers.base import SamplingParams
from policygrad.samplers.local.sampler import LocalSampler
from policygrad.tasks.base import Example

HINTS = ("{success}|{prompt}", "{answer}|{prompt}")


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer("tiny", load_model("tiny"))


def group_of(tokenizer: Tokenizer, example: Example, answers: dict[str, float | None], **changes: Any) -> EpisodeGroup:
    """A group whose completions are these texts with these rewards."""
    spec = EpisodeSpec(example, (0, TRAIN, 1, 0), 20)
    prompt = tokenizer.encode(example.prompt, 20).ids
    trajectories = []
    for text, reward in answers.items():
        tokens = torch.tensor(tokenizer.hf(text)["input_ids"][:-1] or [5])
        segment = Segment(tokens, torch.full(tokens.shape, -1.0))
        trajectories.append(Trajectory((segment,), text, False, reward=reward, **changes))
    return EpisodeGroup(spec, prompt, tuple(trajectories))


def written(
    tokenizer: Tokenizer, reference: pg.Reference, *groups: EpisodeGroup
) -> tuple[list[str | None], dict[str, float]]:
    """The text of each completion's prompt, None where it has none, and the metrics."""
    batch, metrics = add_reference_prompts(batch_groups(groups), groups, reference, tokenizer)
    assert batch.has_reference is not None
    texts = [
        tokenizer.decode(ids) if has else None
        for ids, has in zip(batch.reference_prompts, batch.has_reference.tolist(), strict=True)
    ]
    return texts, {name: metric.value for name, metric in metrics.items()}


def test_the_first_template_with_all_its_values_is_used(tokenizer: Tokenizer) -> None:
    """A success of another completion first; the first that succeeded reads the second; without an answer column, nothing."""
    reference = pg.Reference(templates=HINTS)
    known = group_of(tokenizer, Example("1+1=\n", {"answer": 2}), {"2": 1.0, "3": 0.0, "two": 1.0})
    failed = group_of(tokenizer, Example("1+2=\n", {"answer": "3"}), {"7": 0.0, "8": None})
    unknown = group_of(tokenizer, Example("1+4=\n"), {"7": 0.0, "5": 1.0})
    texts, metrics = written(tokenizer, reference, known, failed, unknown)
    assert texts == [
        *("two|1+1=\n", "2|1+1=\n", "2|1+1=\n"),
        *("3|1+2=\n", "3|1+2=\n"),
        *("5|1+4=\n", None),
    ]
    assert metrics["reference/prompted"] == 6 / 7
    assert "reference/too_long" not in metrics


def test_a_lower_reward_can_be_a_success(tokenizer: Tokenizer) -> None:
    group = group_of(tokenizer, Example("1+1=\n"), {"2": 0.5, "3": 0.0})
    assert written(tokenizer, pg.Reference(templates=HINTS[:1]), group)[0] == [None, None]
    half = pg.Reference(templates=HINTS[:1], success_reward=0.5)
    assert written(tokenizer, half, group)[0] == [None, "2|1+1=\n"]


def test_what_a_reward_wrote_about_a_failure_is_read_and_about_a_success_is_not(tokenizer: Tokenizer) -> None:
    reference = pg.Reference(templates=("{success}|{prompt}", "{feedback}|{prompt}"))
    told = group_of(tokenizer, Example("1+1=\n", {"feedback": "a column"}), {"3": 0.0, "9": 0.0}, feedback="too large")
    solved = group_of(tokenizer, Example("1+2=\n"), {"3": 1.0}, feedback="well done")
    silent = group_of(tokenizer, Example("1+3=\n"), {"9": 0.0})
    texts, _ = written(tokenizer, reference, told, solved, silent)
    assert texts == ["too large|1+1=\n", "too large|1+1=\n", None, None]


def test_completions_keep_their_token_ids_and_the_others_their_prompt(tokenizer: Tokenizer) -> None:
    group = group_of(tokenizer, Example("1+1=\n"), {"2": 1.0, "3": 0.0})
    before = batch_groups([group])
    batch, _ = add_reference_prompts(before, [group], pg.Reference(templates=HINTS[:1]), tokenizer)
    assert torch.equal(batch.tokens, before.tokens)  # type: ignore[arg-type]
    assert torch.equal(batch.reference_prompts[0], group.prompt_ids)
    assert torch.equal(batch.reference_prompts[1], tokenizer.encode("2|1+1=\n", 0).ids)


def test_a_text_that_leaves_no_room_is_skipped(tokenizer: Tokenizer) -> None:
    """The next template is tried; the completion counts as too long also then."""
    short = replace(tokenizer, context_length=len(tokenizer.encode("9|1+1=\n", 0).ids) + 1)
    long = Example("1+1=\n", {"answer": "2", "solution": "one and one are two"})
    reference = pg.Reference(templates=("{solution}|{prompt}", "{answer}|{prompt}"))
    texts, metrics = written(short, reference, group_of(tokenizer, long, {"2": 1.0}))
    assert texts == ["2|1+1=\n"]
    assert metrics["reference/too_long"] == 1
    texts, metrics = written(
        short, pg.Reference(templates=reference.templates[:1]), group_of(tokenizer, long, {"2": 1.0})
    )
    assert texts == [None]
    assert metrics["reference/too_long"] == 1


def test_the_last_message_of_the_user_is_replaced(tokenizer: Tokenizer) -> None:
    template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
    )
    hf = load_tokenizer("tiny", load_model("tiny")).hf
    hf.chat_template = template
    chat = replace(tokenizer, hf=hf)
    messages = ({"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1=?"})
    group = group_of(chat, Example(messages, {"answer": 2}), {"2": 1.0})
    texts, _ = written(chat, pg.Reference(templates=("It is {answer}. {prompt}",)), group)
    assert texts == ["<system>Be brief.<user>It is 2. 1+1=?<a>"]


@pytest.mark.parametrize(
    ("columns", "text"),
    [
        ({"demonstration": "two"}, "two"),
        ({"demonstration": {"text": "two"}}, "two"),
        ({"demonstration": None}, None),
        ({"demonstration": "two", "x": 1}, "two"),
    ],
)
def test_a_demonstration_may_be_an_object(tokenizer: Tokenizer, columns: dict[str, Any], text: str | None) -> None:
    reference = pg.Reference(templates=("{demonstration}|{prompt}", "{success}|{prompt}"))
    texts, _ = written(tokenizer, reference, group_of(tokenizer, Example("1+1=\n", columns), {"2": 1.0}))
    assert texts == [None if text is None else f"{text}|1+1=\n"]


def test_demonstrations_are_neither_read_for_nor_successes(tokenizer: Tokenizer) -> None:
    shown = group_of(tokenizer, Example("1+1=\n"), {"2": 1.0}, demonstration=True)
    sampled = group_of(tokenizer, Example("1+1=\n"), {"3": 0.0})
    both = replace(sampled, trajectories=(*sampled.trajectories, *shown.trajectories))
    assert written(tokenizer, pg.Reference(templates=HINTS[:1]), both)[0] == [None, None]


def test_data_without_the_columns_is_refused(tokenizer: Tokenizer) -> None:
    reference = pg.Reference(templates=("{solution}|{prompt}", "{answer}|{prompt}"))
    example = Example("1+1=\n", {"label": "2"}, source="sums.jsonl:1")
    says = r"sums\.jsonl:1 and the other examples have no column 'solution' or 'answer'.*there are label"
    with pytest.raises(pg.DataError, match=says):
        written(tokenizer, reference, group_of(tokenizer, example, {"2": 1.0}))
    with pytest.raises(pg.DataError, match=says):
        check_template_columns([example], reference)
    check_template_columns([example, Example("1+2=\n", {"answer": "3"})], reference)
    with pytest.raises(pg.DataError, match=r"column 'answer' is read by Reference\.templates.*got dict"):
        written(tokenizer, reference, group_of(tokenizer, Example("1+1=\n", {"answer": {"a": 1}}), {"2": 1.0}))
    with pytest.raises(pg.DataError, match="no message of the user"):
        written(
            tokenizer,
            reference,
            EpisodeGroup(
                EpisodeSpec(Example(({"role": "system", "content": "x"},), {"answer": 2}), (0, TRAIN, 1, 0), 20),
                torch.tensor([1]),
                group_of(tokenizer, Example("1"), {"2": 1.0}).trajectories,
            ),
        )


class Echo:
    """An environment of one turn."""

    def reset(self, example: Example, seed: int) -> Observation:
        return Observation("1")

    def step(self, action: Action) -> Step:
        return Step(reward=1.0, done=True)


def collected(random_model: Path, algorithm: pg.Algorithm, **options: Any) -> tuple[Rollout, Rollouter]:
    model = load_model(str(random_model))
    tokenizer = load_tokenizer(str(random_model), model)

    def score(prompts: Any, texts: Any, columns: Any) -> RewardScores:
        return RewardScores([float(i % 3 == 0) for i in range(len(texts))], {})

    examples = [Example(f"{i}+1=\n", {"answer": str(i + 1)}) for i in range(4)]
    rollouter = Rollouter(
        lambda i: examples[i % 4], tokenizer, LocalSampler.from_tokenizer(model, tokenizer), score, **options
    )
    return collect_rollout(rollouter, algorithm, SamplingParams(max_tokens=4), prompts=3, samples=4), rollouter


def test_a_rollout_has_them_and_a_checkpoint_keeps_them(random_model: Path) -> None:
    rollout, rollouter = collected(random_model, pg.SDPO)
    batch = rollout.batch
    assert batch.has_reference is not None
    assert 0 < int(batch.has_reference.sum()) < len(batch.mask)
    assert rollout.metrics["reference/prompted"].value == float(batch.has_reference.double().mean())
    _, (restored,) = unpack_rollouts(*pack_rollouts((), [rollout]), rollouter.examples)
    assert torch.equal(restored.batch.has_reference, batch.has_reference)  # type: ignore[arg-type]
    pairs = zip(restored.batch.reference_prompts, batch.reference_prompts, strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    assert collected(random_model, pg.GRPO)[0].batch.reference_prompts == ()


def test_environments_are_refused(random_model: Path) -> None:
    with pytest.raises(
        pg.ConfigError, match=r"Reference\.templates replaces the prompt.*use a task of prompts and answers"
    ):
        collected(random_model, pg.SDPO, environment=Echo)
