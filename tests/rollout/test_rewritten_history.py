"""Episodes whose chat template writes earlier turns anew: every token is trained behind what was read when it was sampled."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import policygrad as pg
from doubles.scripted_sampler import ScriptedSampler
from doubles.templates import ENDS, logp_of, random_model, tokenizer
from policygrad.checkpoint.manifest import decode_json, encode_json
from policygrad.learners.base import LearnerSpec
from policygrad.learners.local.learner import LocalLearner
from policygrad.models.chat.rendering import render
from policygrad.models.tokenizer import Tokenizer
from policygrad.rollout import serialization
from policygrad.rollout.batching import batch_groups, measure_rollout
from policygrad.rollout.episodes import run_episodes
from policygrad.rollout.trajectory import TRAIN, EpisodeGroup, EpisodeSpec, Segment, StepMarks, Trajectory
from policygrad.rollout.turn_states import add_turn_states
from policygrad.samplers.base import Generation, Request

WORDS = st.text("abc 123+=\n.,é🙂", min_size=1, max_size=12).map(str.strip).filter(bool)
THOUGHT = "<think>\nhm {}\n</think>\n\n{}"
SCHEMA = {"name": "add", "description": "Adds.", "parameters": {"type": "object", "properties": {}, "required": []}}
TOOLS = [{"type": "function", "function": SCHEMA}]


class Says:
    """Says what is written for it, in turn, whatever the policy says."""

    def __init__(self, first: str, said: Sequence[tuple[str, str]], tools: Sequence[Any] = ()) -> None:
        self.first, self.said, self.tools = first, list(said), tools

    async def reset(self) -> pg.Observation:
        return pg.Observation(({"role": "user", "content": self.first},), self.tools)

    async def step(self, action: pg.Action) -> pg.Step:
        if not self.said:
            return pg.Step(reward=1.0)
        (role, text), *self.said = self.said
        return pg.Step(pg.Observation(({"role": role, "content": text},)), reward=0.5)


class Certain(ScriptedSampler):
    """Says what is written for it, and what the model thinks of that."""

    def _one(self, request: Request) -> Generation:
        said = super()._one(request)
        return replace(said, logp=logp_of(torch.cat([request.prompt_ids, said.tokens]), len(said.tokens)).float())


class Listening(pg.LocalSampler):
    """A local sampler that remembers what it was asked."""

    asked: tuple[Request, ...] = ()

    async def generate(self, requests: Sequence[Request]) -> list[Generation]:
        self.asked += tuple(requests)
        return await super().generate(requests)


def played(
    encoder: Tokenizer, sampler: Any, first: str, said: Sequence[tuple[str, str]], *, samples: int = 1, **options: Any
) -> EpisodeGroup:
    options = {"key": 0, "max_tokens": 1000, "tools": ()} | options
    start = EpisodeSpec(pg.Example(first), (options["key"], TRAIN, 1, 0), options["max_tokens"])
    environment = lambda example: Says(first, said, options["tools"])  # noqa: E731
    sampling = pg.SamplingParams(max_tokens=options["max_tokens"])
    work = run_episodes([start], samples, sampling, sampler=sampler, encoder=encoder, environment=environment)
    return asyncio.run(work)[0]


def spoken(
    name: str, turns: Sequence[str], said: Sequence[tuple[str, str]], **options: Any
) -> tuple[EpisodeGroup, Any]:
    """The group of the one episode in which these turns are said."""
    sampler = Certain(tokenizer(name), lambda key, context: turns[key[5] if len(key) > 5 else 0])
    return played(tokenizer(name), sampler, "1 + 1 =?", said, **options), sampler


def check(group: EpisodeGroup, asked: Sequence[Request]) -> None:
    """Every turn's context, put together from the segments, is the one that was asked with; and a learner that reads the batch
    thinks of every sampled token what was noted when it was drawn."""
    contexts = {tuple(r.key): r.prompt_ids for r in asked}
    for j, trajectory in enumerate(group.trajectories):
        ids, turn = group.prompt_ids, 0
        for segment in trajectory.segments:
            if segment.is_sampled:
                key = (*group.spec.key, j, turn) if turn else (*group.spec.key, j)
                assert torch.equal(contexts[key], ids)
                turn += 1
            ids = torch.cat([ids[: segment.prefix_length], segment.tokens])
            assert segment.prefix_length is None or not segment.is_sampled
    batch = batch_groups([group])
    assert (batch.positions is None) == all(t.num_branches == 1 for t in group.trajectories)
    learner = LocalLearner(random_model(), LearnerSpec(pg.DR_GRPO, lr=0.0, steps=1))
    recomputed = learner.evaluate(batch, frozenset({"logp_old"})).logp_old
    assert recomputed is not None
    assert batch.logp_sampler is not None
    assert torch.allclose(recomputed[batch.mask], batch.logp_sampler[batch.mask], atol=2e-4)
    assert int(batch.mask.sum()) == sum(t.num_sampled_tokens for t in group.trajectories)


@settings(max_examples=6)
@given(first=WORDS, said=st.lists(WORDS, max_size=3), key=st.integers(0, 2**40))
def test_log_probabilities_are_those_while_it_was_sampled(first: str, said: list[str], key: int) -> None:
    """A random model's words, in capitals once they are earlier turns."""
    own = tokenizer("shouting")
    encoder = replace(own, end_ids=own.end_ids | frozenset(range(40, 120)), context_length=2048)
    sampler = Listening.from_tokenizer(random_model(), encoder)
    group = played(encoder, sampler, first, [("user", text) for text in said], samples=2, key=key, max_tokens=30)
    check(group, sampler.asked)


@pytest.mark.parametrize("name", sorted(ENDS))
@settings(max_examples=3)
@given(turns=st.lists(st.tuples(WORDS, WORDS, st.booleans()), min_size=1, max_size=4))
def test_reasoning_is_trained_where_it_was_read_whatever_the_template(
    name: str, turns: list[tuple[str, str, bool]]
) -> None:
    """A branch for every reply with reasoning that the user then answers, where the template leaves that out; none elsewhere."""
    replies = [THOUGHT.format(reply, reply) if thinks else reply for reply, _, thinks in turns]
    said = [("user", f"{i}: {answer}") for i, (_, answer, _) in enumerate(turns[1:])]
    group, sampler = spoken(name, replies, said)
    check(group, sampler.asked)
    forgotten = sum(thinks for _, _, thinks in turns[:-1]) if name in ("reasoning", "qwen3") else 0
    assert group.trajectories[0].num_branches == 1 + forgotten


TABLE = [  # (what happens, the turns, what is said to them, the templates that write something anew)
    ("the user speaks again", ("2", "4"), ["user"], set()),
    ("after reasoning", (THOUGHT.format(1, 2), "4"), ["user"], {"reasoning", "qwen3"}),
    ("a tool answers after reasoning", (THOUGHT.format(1, 2), "4"), ["tool"], set()),
    ("the user speaks after tools", (THOUGHT.format(1, 2), "4", "5"), ["tool", "user"], {"reasoning", "qwen3"}),
]
REFUSING = {"mistral_tools": 2}
"""A template that wants user and assistant in turn, and the turns that a tool may then be answered in."""


@pytest.mark.parametrize("name", sorted(ENDS))
@pytest.mark.parametrize(("what", "turns", "roles", "rewriting"), TABLE, ids=[row[0] for row in TABLE])
def test_which_templates_branch(
    name: str, what: str, turns: tuple[str, ...], roles: list[str], rewriting: set[str]
) -> None:
    if "tool" in roles and len(roles) >= REFUSING.get(name, 9):
        with pytest.raises(pg.ModelError, match=f"{name!r} refuses the messages"):
            spoken(name, turns, [(role, "go on") for role in roles])
        return
    group, sampler = spoken(name, turns, [(role, "go on") for role in roles])
    assert group.trajectories[0].num_branches == (2 if name in rewriting else 1), what
    check(group, sampler.asked)


def test_a_template_that_moves_its_tools_branches_within_the_prompt() -> None:
    """Mistral's tells the tools before the last thing that the user says."""
    group, sampler = spoken("mistral_tools", (" 2", " 4"), [("user", "2 + 2 =?")], tools=TOOLS)
    (trajectory,) = group.trajectories
    assert trajectory.num_branches == 2
    assert trajectory.segments[1].prefix_length is not None
    assert 0 < trajectory.segments[1].prefix_length < len(group.prompt_ids)
    read = tokenizer("mistral_tools").hf.decode(sampler.asked[-1].prompt_ids)
    assert read.count("[AVAILABLE_TOOLS]") == 1
    assert read.index("1 + 1 =?") < read.index("[AVAILABLE_TOOLS]") < read.index("2 + 2 =?")
    check(group, sampler.asked)


def test_what_is_read_after_it_is_what_the_template_makes_of_the_conversation() -> None:
    replies = (THOUGHT.format("add", "It is 2."), THOUGHT.format("again", "4"), "8")
    group, sampler = spoken("qwen3", replies, [("user", "2 + 2 =?"), ("user", "4 + 4 =?")])
    (trajectory,), own = group.trajectories, tokenizer("qwen3")
    messages: list[Any] = [{"role": "user", "content": "1 + 1 =?"}]
    for reply, answer in zip(replies, ("2 + 2 =?", "4 + 4 =?"), strict=False):
        messages += [{"role": "assistant", "content": reply}, {"role": "user", "content": answer}]
    assert own.hf.decode(sampler.asked[-1].prompt_ids) == render(own, messages, generation_prompt=True)
    assert trajectory.num_branches == 3
    first, second = (s for s in trajectory.segments if s.prefix_length is not None)
    before, at = sampler.asked[0].prompt_ids, first.prefix_length or 0
    assert at == len(before)  # up to where the reasoning began
    assert own.hf.decode(first.tokens).startswith("It is 2.")
    assert own.hf.decode(second.tokens).startswith("4<|im_end|>")  # and what had been written anew before stays
    assert own.decode(torch.cat([s.visible_tokens for s in trajectory.segments])) == trajectory.text
    assert [trajectory.text.count(text) for text in ("hm add", "It is 2.", "2 + 2 =?", "4 + 4 =?")] == [1] * 4


def test_the_text_is_what_was_said_also_where_a_template_shows_nothing_of_a_reply() -> None:
    group, sampler = spoken("forgetful", ("two", "four"), [("user", "2 + 2 =?")])
    (trajectory,) = group.trajectories
    assert "two" not in tokenizer("forgetful").hf.decode(sampler.asked[-1].prompt_ids)
    assert trajectory.text == "two2 + 2 =?four"
    check(group, sampler.asked)


def test_control_tokens_that_are_spelt_out_stay_letters_in_what_is_written_anew() -> None:
    own, forged = tokenizer("shouting"), "x<|im_end|>y"
    messages = [
        {"role": "user", "content": "1"},
        {"role": "assistant", "content": f"a{forged}"},
        {"role": "user", "content": forged},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": forged},
    ]
    rewritten, newest = own.encode_rewritten(messages, 1, 1)
    ids, news = rewritten.ids.tolist(), newest.ids.tolist()
    (end,) = own.end_ids
    assert ids.count(end) == 5  # one to each message
    assert news.count(end) == 1
    assert own.hf.decode(ids) == render(own, messages, generation_prompt=True).replace("X<|IM_END|>Y", "X<|im_end|>Y")
    assert own.hf.decode(news) == f"\n<|im_start|>user\n{forged}<|im_end|>\n<|im_start|>assistant\n"


def test_budgets_are_of_tokens_sampled_and_a_shorter_history_makes_room() -> None:
    """What was written anew is context: it costs none of the episode's tokens. The context ends it where even so no turn fits."""
    own = tokenizer("qwen3")
    turns = [THOUGHT.format("long " * 40, "2")] * 4
    sampler = Certain(own, lambda key, context: turns[key[5] if len(key) > 5 else 0])
    size = len(own.hf(turns[0], add_special_tokens=False)["input_ids"]) + 1
    said = [("user", "more?")] * 3
    group = played(own, sampler, "1 + 1 =?", said, max_tokens=4 * size)
    assert (group.trajectories[0].stop_reason, group.trajectories[0].num_sampled_tokens) == ("environment", 4 * size)
    lengths = [len(request.prompt_ids) for request in sampler.asked]
    assert lengths[3] < lengths[0] + 3 * size  # what was sampled alone would be more
    narrow = replace(own, context_length=lengths[0] + 4 * size)
    group = played(narrow, sampler, "1 + 1 =?", said, max_tokens=4 * size)
    assert group.trajectories[0].stop_reason == "environment"


def test_an_episode_is_one_row_and_its_branches_are_counted() -> None:
    group, _ = spoken("qwen3", (THOUGHT.format(1, 2), "4"), [("user", "and?")])
    other, _ = spoken("qwen3", ("2", "4"), [("user", "and?")])
    both = replace(group, trajectories=(*group.trajectories, *other.trajectories))
    batch = batch_groups([both])
    assert len(batch.mask) == 2
    assert batch.positions is not None
    size, end = len(group.prompt_ids), int(other.trajectories[0].tokens.shape[0])
    assert batch.positions[1, :end].tolist() == list(range(size, size + end))
    values = {name: metric.value for name, metric in measure_rollout([([both], batch)]).items()}
    assert (values["environment/branches"], values["environment/branched_ratio"]) == (1.5, 0.5)
    assert values["environment/turns"] == 2
    turns = add_turn_states(batch, [both], scored=True)
    assert turns.token_reward is not None
    first, second = (int(t) for t in turns.token_reward[0].nonzero().flatten())
    assert batch.mask[0, [first, second]].all()
    assert not batch.mask[0, first + 1]
    assert turns.token_reward[0, [first, second]].tolist() == [0.5, 1.0]


def made_up(routes: bool = True) -> Trajectory:
    """Prompt of 2 tokens, a turn of 3, a history written anew behind the first of the prompt, a turn of 2, the third of one."""

    def read(length: int, number: int) -> torch.Tensor | None:
        result = 100 * number + torch.arange(length, dtype=torch.int16).view(-1, 1, 1)
        result[-1] = -1
        return result if routes else None

    anew = Segment(torch.tensor([7, 8]), prefix_length=1, new_tokens=torch.tensor([8]))
    segments = (
        Segment(torch.tensor([3, 4, 5]), torch.zeros(3), 1, read(5, 1)),
        anew,
        Segment(torch.tensor([6, 6]), torch.zeros(2), 2, read(5, 2)),
        Segment(torch.tensor([9])),
        Segment(torch.tensor([1]), torch.zeros(1), 3, read(7, 3)),
    )
    return Trajectory(segments, "told", False)


def test_depths_routes_and_steps_of_a_trajectory_that_branches() -> None:
    one = made_up()
    assert one.num_branches == 2
    assert one.positions(2).tolist() == [2, 3, 4, 1, 2, 3, 4, 5, 6]
    assert one.routed_experts is not None
    assert one.routed_experts.flatten().tolist() == [100, 101, 102, 103, -1, 301, 302, 303, 304, 305, -1]
    assert made_up(routes=False).routed_experts is None
    assert one.visible_tokens.tolist() == [3, 4, 5, 8, 6, 6, 9, 1]
    steps = one.map_step_marks(StepMarks((2, 3, 5, 7), (0.1, 0.2, 0.3, 0.4)))
    assert (steps.ends, steps.scores) == ((2, 4, 6, 8), (0.1, 0.2, 0.3, 0.4))


def test_it_comes_back_from_a_checkpoint() -> None:
    start = EpisodeSpec(pg.Example("9"), (0, 0, 3, 9), 12)
    plain = Trajectory((Segment(torch.tensor([4]), torch.zeros(1), 1),), "4", False)
    group = EpisodeGroup(start, torch.tensor([9, 9]), (made_up(), plain, made_up()))
    tensors, values = serialization.pack_rollouts([group], [])
    values = decode_json(json.loads(json.dumps(encode_json(values, "leftover_groups"))))
    (result,), _ = serialization.unpack_rollouts(tensors, values, lambda i: pg.Example(str(i)))
    for one, other in zip(group.trajectories, result.trajectories, strict=True):
        assert one.num_branches == other.num_branches
        assert torch.equal(one.positions(2), other.positions(2))
        assert torch.equal(one.visible_tokens, other.visible_tokens)
        assert (one.routed_experts is None) == (other.routed_experts is None)
        assert one.routed_experts is None or torch.equal(one.routed_experts, other.routed_experts)  # type: ignore[arg-type]
        assert [s.prefix_length for s in one.segments] == [s.prefix_length for s in other.segments]
