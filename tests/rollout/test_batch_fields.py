"""What a rollout knows of rewards, turns and demonstrations, in the batch of the algorithms that read it, and in no other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

import policygrad as pg
from doubles.rollouts import collect_rollout
from doubles.tabular_sampler import TabularSampler, TabularTokenizer
from policygrad.environments import Action, Observation, Step
from policygrad.rewards.base import RewardScores
from policygrad.rollout.batching import hash_prompt
from policygrad.rollout.rollouter import Rollout, Rollouter
from policygrad.samplers.base import SamplingParams
from policygrad.tasks.base import Example


def length(prompts: Sequence[Any], texts: Sequence[str], columns: Mapping[str, Sequence[Any]]) -> RewardScores:
    """Two rewards: `ones`, how often 1 is said, and `brief`, worth −0.5 each, the words; the second says nothing of prompt 2."""
    ones = [float(text.split().count("1")) for text in texts]
    brief = [None if p == "2" else float(len(text.split())) for p, text in zip(prompts, texts, strict=True)]
    total: list[float | None] = [a - 0.5 * (b or 0.0) for a, b in zip(ones, brief, strict=True)]
    return RewardScores(total, {"ones": list(ones), "brief": brief}, weights={"ones": 1.0, "brief": -0.5})


def run(
    algorithm: pg.Algorithm, example: Any = None, score: Any = length, environment: Any = None, **changed: Any
) -> Rollout:
    options = {"prompts": 3, "samples": 4, "step": 1, "position": 0} | changed
    made = example or (lambda i: Example(str(i % 4)))
    given = {} if environment is None else {"environment": environment}
    rollouter = Rollouter(made, TabularTokenizer(), TabularSampler(4, 12, 4), score, **given)  # type: ignore[arg-type]
    return collect_rollout(rollouter, algorithm, SamplingParams(max_tokens=9 if given else 3), **options)


def test_rewards_one_by_one_add_up_to_the_reward() -> None:
    batch = run(pg.GDPO).batch
    assert (batch.reward_names, batch.reward_weights) == (("ones", "brief"), (1.0, -0.5))
    assert batch.rewards is not None
    assert batch.rewards[8:, 1].isnan().all()  # prompt 2
    assert not batch.rewards[:8].isnan().any()
    total = (batch.rewards.nan_to_num() * torch.tensor(batch.reward_weights)).sum(1)
    torch.testing.assert_close(total, batch.reward)


def test_they_are_filled_only_where_a_part_reads_them() -> None:
    batch = run(pg.GRPO, example=lambda i: Example(str(i % 4), {"demonstration": "1 1"})).batch
    for name in ("rewards", "turn_state", "demonstration", "token_reward"):
        assert getattr(batch, name) is None
    assert batch.example_id is not None
    known = [hash_prompt(Example(str(i))) for i in range(4)]  # the prompt's own, whatever its place
    assert batch.example_id.tolist() == [known[i] for i in range(3) for _ in range(4)]
    assert run(pg.GRPO, position=5).batch.example_id.tolist() == [known[i] for i in (1, 2, 3) for _ in range(4)]  # type: ignore[union-attr]


def test_the_spread_of_each_reward_is_that_within_its_groups() -> None:
    rollout = run(pg.GDPO)
    rewards = rollout.batch.rewards
    assert rewards is not None
    result = rollout.metrics["rewards/ones/std"].value
    assert result == pytest.approx(float(rewards[:, 0].view(3, 4).double().std(1).mean()), rel=1e-6)
    brief = float(rewards[:8, 1].view(2, 4).double().std(1).mean())
    assert rollout.metrics["rewards/brief/std"].value == pytest.approx(brief, rel=1e-6)


def test_a_rollout_of_one_reward_has_one_column() -> None:
    def one(prompts: Any, texts: Sequence[str], columns: Any) -> RewardScores:
        return RewardScores([float(len(text)) for text in texts], {})

    batch = run(pg.GDPO, score=one).batch
    assert batch.reward_names == ("reward",)
    assert torch.equal(batch.rewards[:, 0], batch.reward)  # type: ignore[index]


@dataclass
class Rooms:
    """A walk: saying 1 leads one room on, anything else one back; the room is said, its number worth 0.1; room 2 ends it."""

    example: Example
    waits = False

    async def reset(self) -> Observation:
        self.room, self.turns = 0, 0
        return Observation(self.example.prompt, state="room 0")

    async def step(self, action: Action) -> Step:
        self.turns += 1
        self.room = self.room + 1 if action.text.split()[:1] == ["1"] else max(0, self.room - 1)
        over = self.room == 2 or self.turns == 3
        named = Observation(str(self.room + self.turns), state=f"room {self.room}")
        return Step(None if over else named, reward=0.1 * self.room if self.turns > 1 else None)


class Unnamed(Rooms):
    """The same, saying only the room."""

    async def step(self, action: Action) -> Step:
        step = await super().step(action)
        return replace(step, observation=None if step.observation is None else Observation(str(self.room)))

    async def reset(self) -> Observation:
        await super().reset()
        return Observation("0")


def turns(rollout: Rollout) -> list[tuple[int, int, int, Any, float]]:
    """(row, first token, last token, state, reward) of every turn, from the trajectories."""
    result, row = [], 0
    for group in rollout.groups:
        for t in group.trajectories:
            at, turn = 0, 0
            for segment in t.segments:
                end = at + len(segment.tokens)
                if segment.is_sampled:
                    result.append((row, at, end - 1, t.turn_states[turn], t.turn_rewards[turn] or 0.0))
                    turn += 1
                at = end
            row += 1
    return result


@pytest.mark.parametrize("environment", [Rooms, Unnamed])
def test_turns_from_equal_states_of_a_group_have_equal_anchors(environment: Any) -> None:
    rollout = run(pg.GIGPO, environment=environment, samples=12)
    batch, known = rollout.batch, turns(rollout)
    assert batch.turn_state is not None
    assert batch.token_reward is not None
    assert max(sum(s.is_sampled for s in t.segments) for g in rollout.groups for t in g.trajectories) == 3
    number: dict[tuple[int, Any], int] = {}
    for row, first, last, state, reward in known:
        assert batch.mask[row, first : last + 1].all()
        assert len(set(batch.turn_state[row, first : last + 1].tolist())) == 1
        here = (int(batch.group[row]), state)
        assert number.setdefault(here, int(batch.turn_state[row, first])) == int(batch.turn_state[row, first])
        assert float(batch.token_reward[row, last]) == pytest.approx(reward)
    for group in range(3):
        mine = {state: n for (g, state), n in number.items() if g == group}
        assert len(set(mine.values())) == len(mine)
    assert len(number) > 3  # some episode saw more than its first room
    ends = torch.zeros_like(batch.mask)
    for row, _, last, _, _ in known:
        ends[row, last] = True
    assert not batch.token_reward[~ends].any()


def test_turn_rewards_change_no_total_and_no_other_rows_numbers() -> None:
    rollout, plain = run(pg.GIGPO, environment=Rooms), run(replace(pg.GRPO, terms=()), environment=Rooms)
    batch = rollout.batch
    assert batch.token_reward is not None
    torch.testing.assert_close(batch.reward + batch.token_reward.sum(1), plain.batch.reward)
    assert plain.batch.token_reward is None
    assert rollout.metrics["reward"].value == plain.metrics["reward"].value
    assert rollout.metrics["environment/turns"].value > 1


def test_an_environments_own_reward_is_one_of_the_rewards() -> None:
    batch = run(pg.GDPO, environment=Rooms).batch
    assert batch.reward_names == ("ones", "brief", "environment")
    assert batch.rewards is not None
    total = (batch.rewards.nan_to_num() * torch.tensor(batch.reward_weights)).sum(1)
    torch.testing.assert_close(total, batch.reward)
    alone = run(pg.GDPO, environment=Rooms, score=None).batch
    assert alone.reward_names == ("environment",)


def test_a_turns_advantage_is_what_the_paper_says() -> None:
    """GiGPO by hand from the trajectories: the episode's z-score, and that of the turn's return among equal states."""
    rollout = run(pg.GIGPO, environment=Rooms, samples=6)
    psi, batch = pg.GIGPO.compute_advantages(rollout.batch).double(), rollout.batch
    episodes = [t for g in rollout.groups for t in g.trajectories]
    returns: dict[tuple[int, int], float] = {}
    states: dict[tuple[int, Any], list[float]] = {}
    for row, t in enumerate(episodes):
        own = [r or 0.0 for r in t.turn_rewards]
        own[-1] += float(t.reward or 0.0) - sum(own)  # what the reward functions said
        for n in range(len(own)):
            returns[row, n] = sum(0.95 ** (m - n) * own[m] for m in range(n, len(own)))
            states.setdefault((int(batch.group[row]), t.turn_states[n]), []).append(returns[row, n])

    def z(x: float, xs: list[float]) -> float:
        y = torch.tensor(xs, dtype=torch.float64)
        return 0.0 if max(xs) - min(xs) < 1e-9 else (x - float(y.mean())) / (float(y.std()) + 1e-4)

    seen: dict[int, int] = {}
    for row, first, last, state, _ in turns(rollout):
        n = seen[row] = seen.get(row, -1) + 1
        g = int(batch.group[row])
        totals = [float(t.reward or 0.0) for t in rollout.groups[g].trajectories]
        expected = z(totals[row % 6], totals) + z(returns[row, n], states[g, state])
        assert psi[row, first : last + 1].tolist() == pytest.approx([expected] * (last + 1 - first), abs=2e-3)


def test_the_rewards_to_go_are_those_of_the_turns_as_they_were_played() -> None:
    """From the trajectories: a turn's own reward and half of what comes after it; the reward functions score the last turn."""
    algorithm = replace(pg.GIGPO, advantage=(pg.TurnReturn(0.5),), terms=())
    rollout = run(algorithm, environment=Rooms)
    psi, episodes = algorithm.compute_advantages(rollout.batch), [t for g in rollout.groups for t in g.trajectories]
    seen: dict[int, int] = {}
    for row, first, last, _, _ in turns(rollout):
        n = seen[row] = seen.get(row, -1) + 1
        own = [r or 0.0 for r in episodes[row].turn_rewards]
        own[-1] += float(episodes[row].reward or 0.0) - sum(own)
        expected = sum(0.5 ** (m - n) * own[m] for m in range(n, len(own)))
        assert psi[row, first : last + 1].tolist() == pytest.approx([expected] * (last + 1 - first), abs=1e-6)
    assert max(seen.values()) == 2


def test_a_state_that_cannot_be_looked_up_is_refused() -> None:
    class Listed(Rooms):
        async def reset(self) -> Observation:
            await super().reset()
            return Observation("0", state=[1])  # type: ignore[arg-type]

    with pytest.raises(pg.EngineError, match=r"Listed has a state without a hash .*use text, a number or a tuple"):
        run(pg.GIGPO, environment=Listed)


SHOWN = {"demonstration": "1 1"}


def test_a_demonstration_stands_behind_its_groups_samples() -> None:
    rollout = run(pg.LUFFY, example=lambda i: Example(str(i % 4), SHOWN))
    batch = rollout.batch
    assert batch.demonstration is not None
    assert batch.demonstration.tolist() == ([False] * 4 + [True]) * 3
    shown = batch.demonstration
    assert [row[: int(n)].tolist() for row, n in zip(batch.tokens[shown], batch.lengths[shown], strict=True)] == [
        [1, 1, 0]
    ] * 3  # type: ignore[index]
    assert batch.logp_sampler is not None
    assert not batch.logp_sampler[shown].any()
    assert batch.rewards is None
    assert batch.reward[shown].tolist() == [1.0, 1.0, 2.0]  # judged like the others: ones less half the words
    assert list(rollout.completions[4::5]) == ["1 1"] * 3
    psi = pg.LUFFY.compute_advantages(replace(batch, logp_old=batch.logp_sampler))
    rewards = batch.reward[:5].double()
    expected = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
    torch.testing.assert_close(psi[:5, 0].double(), expected, atol=1e-5, rtol=1e-5)


def test_what_is_measured_is_the_policys_own() -> None:
    with_, without = (
        run(a, example=lambda i: Example(str(i % 4), SHOWN)) for a in (pg.LUFFY, replace(pg.GRPO, terms=()))
    )
    for name in (
        "reward",
        "reward_std",
        "completions/mean_length",
        "entropy",
        "tokens/sampled",
        "frac_reward_zero_std",
    ):
        assert with_.metrics[name].value == without.metrics[name].value
    assert with_.metrics["rewards/ones"].value == without.metrics["rewards/ones"].value
    assert with_.metrics["completions/sampled_per_trained"].value == 1
    assert with_.metrics["demonstrations/reward"].value == pytest.approx(4 / 3)
    assert with_.metrics["demonstrations/mean_length"].value == 3
    assert with_.metrics["demonstrations/count"].value == 3
    assert with_.lengths[4::5] == (0, 0, 0)  # nothing of them was sampled
    same = [x for i, x in enumerate(with_.completions) if i % 5 < 4]
    assert tuple(same) == without.completions  # and the samples are the same as ever


def test_a_demonstration_may_say_what_its_writer_thought() -> None:
    value = {"tokens": [1, 2, 0], "logp": [-0.5, -0.25, -0.125]}
    batch = run(pg.LUFFY, example=lambda i: Example(str(i % 4), {"demonstration": value if i else None})).batch
    assert batch.demonstration is not None
    assert batch.demonstration.sum() == 2  # prompt 0 has none, and its group is as ever
    assert batch.logp_sampler[batch.demonstration].tolist() == [value["logp"]] * 2  # type: ignore[index]


REFUSED: dict[str, tuple[Any, str]] = {
    "a number": (3, "must be text, null, or an object"),
    "both": ({"text": "1", "tokens": [1]}, 'either "text" or "tokens"'),
    "another key": ({"text": "1", "logps": [0.0]}, "has 'logps'"),
    "words for ids": ({"tokens": ["1"]}, "'tokens' must hold token ids, whole numbers, got 1"),
    "no text": ({"text": 5}, "'text' must be text, got int"),
    "a probability above 1": (
        {"text": "1", "logp": [0.5, 0.0]},
        "log-probabilities in nats, finite and at most 0, got 0.5",
    ),
    "too few": ({"text": "1 1", "logp": [-1.0]}, "1 log-probabilities for 3 tokens, the end token included"),
}


@pytest.mark.parametrize(("value", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_what_is_no_demonstration_is_refused_with_its_place(value: Any, message: str) -> None:
    with pytest.raises(pg.DataError, match="training prompt 0") as error:
        run(pg.LUFFY, example=lambda i: Example(str(i % 4), {"demonstration": value}))
    assert message in str(error.value)


def test_a_step_whose_prompts_have_no_demonstration_trains_on_its_samples() -> None:
    """Where few rows of a file have one, some steps have none. A task without the column is another matter."""
    rollout = run(pg.LUFFY, example=lambda i: Example(str(i % 4), {"demonstration": None}))
    assert rollout.batch.demonstration is not None
    assert not rollout.batch.demonstration.any()
    assert rollout.metrics["demonstrations/count"].value == 0
    with pytest.raises(
        pg.DataError,
        match="training prompt 0 and the other examples of its step have no column 'demonstration': give the task a",
    ):
        run(pg.LUFFY)


def test_an_environment_has_no_demonstrations() -> None:
    with pytest.raises(
        pg.ConfigError, match="Demonstrations are complete answers, which an environment's episodes do not allow"
    ):
        run(pg.LUFFY, environment=Rooms, example=lambda i: Example(str(i % 4), SHOWN))


@pytest.mark.parametrize("long", [0, 1, 3])
def test_a_demonstration_longer_than_an_answer_is_left_out_and_counted(long: int) -> None:
    """With the end token "1 1" has 3 of the 3 tokens that an answer may have, "1 1 1" one more. The step goes on without it."""
    output = [pg.Example(str(i), {"demonstration": "1 1 1" if i < long else "1 1"}) for i in range(3)]
    rollout = run(pg.LUFFY, example=lambda i: output[i % 3])
    batch = rollout.batch
    assert batch.demonstration is not None
    assert batch.demonstration.tolist() == [False] * 4 * long + ([False] * 4 + [True]) * (3 - long)
    assert batch.mask.any(1).all()
    counted = rollout.metrics.get("demonstrations/too_long")
    assert (counted.value if counted else 0) == long
    assert rollout.metrics["demonstrations/count"].value == 3 - long
    assert ("demonstrations/mean_length" in rollout.metrics) is (long < 3)
    report = [m for m in rollout.messages if "of more than 3 tokens are left out" in m and "--max-tokens" in m]
    assert len(report) == (long > 0)
