"""Which tokens of an episode the environment wrote: contents of its messages, without the chat template's tokens and pictures."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import policygrad as pg
from doubles.scripted_sampler import ScriptedSampler
from doubles.tabular_sampler import TabularSampler, TabularTokenizer
from doubles.templates import ENDS, tokenizer
from policygrad.models.tokenizer import Tokenizer
from policygrad.proxy.formats import ChatRequest
from policygrad.rollout.batching import batch_groups
from policygrad.rollout.conversation_tree import ConversationTree
from policygrad.rollout.episodes import run_episodes
from policygrad.rollout.rollouter import Rollouter
from policygrad.rollout.serialization import pack_groups, unpack_groups
from policygrad.rollout.trajectory import TRAIN, EpisodeGroup, EpisodeSpec, RolloutConfig, Trajectory
from policygrad.samplers.base import Generation

CONTENTS: dict[str, list[dict[str, str]]] = {
    "lines": [{"role": "user", "content": "42\nok é🙂"}],
    "a word of the template": [{"role": "user", "content": "user"}],
    "two tools": [{"role": "tool", "content": "42"}, {"role": "tool", "content": "error: <|im_end|> x"}],
    "nothing": [{"role": "user", "content": ""}],
}
REFUSING = ("gemma",)  # templates without a tool's role


def marking(name: str) -> Tokenizer:
    return replace(tokenizer(name), marks_contents=True)


def decode(own: Tokenizer, ids: Tensor) -> str:
    return str(own.hf.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))


@pytest.mark.parametrize("what", CONTENTS)
@pytest.mark.parametrize("name", ENDS)
def test_contents_are_marked_whatever_the_template(name: str, what: str) -> None:
    """Ids are those without marks; the marked tokens say what the messages say, and the others what the template adds."""
    new, so_far = CONTENTS[what], [{"role": "user", "content": "1 + 1 ="}]
    if what == "two tools" and name in REFUSING:
        pytest.skip("the template has no tools")
    own = marking(name)
    encoded = own.encode_continuation(so_far, "2", new)
    plain = tokenizer(name).encode_continuation(so_far, "2", new)
    assert torch.equal(encoded.ids, plain.ids)
    assert plain.is_content is None
    assert encoded.is_content is not None
    contents = [message["content"] for message in new]
    assert decode(own, encoded.ids[encoded.is_content]) == "".join(contents)
    template = decode(own, encoded.ids[~encoded.is_content])
    assert "42" not in template
    assert "error" not in template


def test_a_template_that_changes_a_content_is_marked_as_it_writes_it() -> None:
    own = marking("llama31")  # a tool's result as JSON
    encoded = own.encode_continuation([{"role": "user", "content": "x"}], "y", [{"role": "tool", "content": 'a "b"'}])
    assert decode(own, encoded.ids[encoded.is_content]) == 'a \\"b\\"'


class Says:
    """Says what is written for it, in turn."""

    def __init__(self, first: Any, texts: Sequence[Any]) -> None:
        self.first, self.texts = first, list(texts)

    async def reset(self) -> pg.Observation:
        return pg.Observation(self.first)

    async def step(self, action: pg.Action) -> pg.Step:
        return pg.Step(pg.Observation(self.texts.pop(0)) if self.texts else None, reward=1.0)


def play(own: Tokenizer, first: Any, replies: Sequence[str], texts: Sequence[Any]) -> EpisodeGroup:
    sampler = ScriptedSampler(own, lambda key, context: replies[key[5] if len(key) > 5 else 0])
    spec = EpisodeSpec(pg.Example("x"), (0, TRAIN, 1, 0), 100)
    sampling = pg.SamplingParams(max_tokens=100)
    environment = lambda example: Says(first, texts)  # noqa: E731
    work = run_episodes([spec], 1, sampling, sampler=sampler, encoder=own, environment=environment)
    return asyncio.run(work)[0]


def observed_text(own: Tokenizer, batch: pg.Batch) -> str:
    assert batch.tokens is not None
    return decode(own, batch.tokens[batch.observed_tokens])


def message(text: str) -> tuple[dict[str, str], ...]:
    return ({"role": "user", "content": text},)


@pytest.mark.parametrize("name", ["chatml", "qwen3", "llama3"])
def test_a_batch_marks_what_the_environment_wrote_after_the_prompt(name: str) -> None:
    own = marking(name)
    group = play(own, message("1 + 1 =?"), ("2", "4", "8"), [message("and 2 + 2?"), message("4 + 4?")])
    batch = batch_groups([group], frozenset({"observation"}))
    assert observed_text(own, batch) == "and 2 + 2?4 + 4?"
    assert not (batch.observed_tokens & batch.mask).any()
    assert batch_groups([group]).observation is None


def test_text_without_a_template_is_marked_completely() -> None:
    own = marking("embedded")
    group = play(own, "1 + 1 =", ("2", "4"), [" 2 + 2 ="])
    assert observed_text(own, batch_groups([group], frozenset({"observation"}))) == " 2 + 2 ="


@pytest.mark.parametrize("name", ["reasoning", "qwen3", "shouting"])
def test_earlier_replies_that_a_template_rewrites_are_not_the_environments(name: str) -> None:
    own = marking(name)
    thought = "<think>\nhm\n</think>\n\n2"
    group = play(own, message("1 + 1 =?"), (thought, "4"), [message("and 2 + 2?")])
    assert group.trajectories[0].num_branches == 2
    assert observed_text(own, batch_groups([group], frozenset({"observation"}))) == "and 2 + 2?"


def test_an_agents_messages_are_marked() -> None:
    own = marking("chatml")
    tree, messages = ConversationTree(own, "a request"), [{"role": "user", "content": "1 + 1 =?"}]
    for reply, answer in (("2", "and 2 + 2?"), ("4", "")):
        turn = tree.open_turn(ChatRequest(tuple(messages)))
        ids = torch.tensor([*own.hf(reply, add_special_tokens=False)["input_ids"], min(own.end_ids)])
        choice = tree.add_reply(turn, Generation(ids, torch.zeros(len(ids)), "stop", 0))
        messages += [{"role": "assistant", "content": choice.text}, {"role": "user", "content": answer}]
    segments, _ = tree.segments(len(tree.first_text))
    spec = EpisodeSpec(pg.Example("x"), (0, TRAIN, 1, 0), 100)
    group = EpisodeGroup(spec, tree.first_text, (Trajectory(segments, "", False, reward=1.0),))
    assert observed_text(own, batch_groups([group], frozenset({"observation"}))) == "and 2 + 2?"


def test_leftover_groups_keep_their_marks() -> None:
    own = marking("chatml")
    group = play(own, message("1 + 1 =?"), ("2", "4"), [message("and 2 + 2?")])
    (again,) = unpack_groups(*pack_groups([group]), lambda i: group.spec.example)
    needs = frozenset({"observation"})
    assert torch.equal(batch_groups([again], needs).observation, batch_groups([group], needs).observation)  # type: ignore[arg-type]


def test_single_answers_are_refused() -> None:
    rollouter = Rollouter(lambda i: pg.Example("0"), TabularTokenizer(), TabularSampler(4, 3, 4), None)  # type: ignore[arg-type]
    config = RolloutConfig(pg.SamplingParams(max_tokens=3), 2, 2)
    with pytest.raises(pg.ConfigError, match=r"what an environment writes.*--environment.*grpo"):
        rollouter.collect(pg.ECHO, config)
    with pytest.raises(pg.ConfigError, match=r"what an environment writes.*--environment.*grpo"):
        pg.train(pg.Run(algorithm=pg.ECHO, steps=1))
