"""Gymnasium in words: against the package itself, which the development environment has."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import policygrad as pg
from doubles.files import rows
from doubles.resuming import check_resume
from policygrad.environments.gymnasium import ACTION_NAMES, strip_ansi
from policygrad.environments.registry import resolve_environment

gymnasium = pytest.importorskip("gymnasium", reason="pip install '.[control]'")
TEXT = pg.Example("1 + 1 =\n")
DIGITS = gymnasium.spaces.Text(3, charset="0123456789")
OPEN = {"is_slippery": False}


class Echo(gymnasium.Env):
    """Says back the number, and ends at 7; the reward is the number."""

    observation_space, action_space = gymnasium.spaces.Text(20, min_length=0), DIGITS
    closed = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        return f"begin{int(self.np_random.integers(100))}", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        return f"you said {action}", float(action), action == "7", action == "8", {}

    def close(self) -> None:
        Echo.closed += 1


class Broken(Echo):
    def step(self, action: str) -> Any:
        raise KeyError("a bug")


class Turned(Echo):
    action_space = gymnasium.spaces.Discrete(3, start=-1)


@pytest.fixture(scope="module", autouse=True)
def registered() -> Iterator[None]:
    kinds = {"Echo-v0": Echo, "Broken-v0": Broken, "Turned-v0": Turned}
    for name, kind in kinds.items():
        gymnasium.register(id=name, entry_point=kind)
    yield
    for name in kinds:
        del gymnasium.registry[name]


def played(factory: Any, *turns: str, seed: int = 0, example: pg.Example = TEXT) -> tuple[Any, list[Any]]:
    """(what is said first, the steps) of the episode with these turns."""

    async def play() -> tuple[Any, list[Any]]:
        environment = factory(example, seed=seed)
        seen = await environment.reset()
        steps = []
        for turn in turns:
            steps.append(await environment.step(pg.Action(turn)))
            if steps[-1].observation is None:
                break
        await environment.close()
        return seen, steps

    return asyncio.run(play())


def test_a_frame_is_shown_and_words_are_actions() -> None:
    lake = pg.GymnasiumText("FrozenLake-v1", options=OPEN)
    seen, steps = played(lake, "right", "I go [right]!", "1", "Down.", "down", "2")
    assert seen.content == (
        "Answer with one action in square brackets: 0 left, 1 down, 2 right, 3 up.\n[S]FFF\nFHFH\nFFFH\nHFFG\n"
    )
    assert steps[0].observation.content == "\n  (Right)\nS[F]FF\nFHFH\nFFFH\nHFFG\n"
    assert [step.stop_reason for step in steps if step.observation is None] == ["terminated"]
    assert steps[-1].reward == 1.0
    assert sum(step.reward for step in steps) == 1.0
    assert all(step.metrics == {"malformed": 0.0} for step in steps)


def test_turns_that_name_no_action_are_reported_and_change_nothing() -> None:
    lake = pg.GymnasiumText("FrozenLake-v1", options=OPEN)
    _, steps = played(lake, "north", "right")
    assert (
        steps[0].observation.content == "\nerror: name one action in square brackets: 0 left, 1 down, 2 right, 3 up\n"
    )
    assert (steps[0].reward, steps[0].metrics) == (0.0, {"malformed": 1.0})
    assert "S[F]FF" in steps[1].observation.content


def test_action_names_match_the_number_of_actions() -> None:
    for name, words in ACTION_NAMES.items():
        newest = max(gym for gym in gymnasium.registry if gym.startswith(f"{name}-v"))
        assert gymnasium.make(newest).action_space.n == len(words), name


def test_a_seed_determines_the_initial_state() -> None:
    taxi = pg.GymnasiumText("Taxi-v3" if "Taxi-v3" in gymnasium.registry else "Taxi-v4")
    first = [played(taxi, seed=seed)[0].content for seed in (5, 5, 6, 7, 8, 5 + (1 << 40))]
    assert first[0] == first[1] == first[5]
    assert len(set(first)) > 1


def test_a_text_space_accepts_its_elements() -> None:
    seen, steps = played(pg.GymnasiumText("Echo-v0"), " 12\n", "twelve", "1234", "7")
    assert seen.content.startswith("begin")
    assert steps[0].observation.content == "\nyou said 12\n"
    assert steps[0].reward == 12.0
    assert steps[1].observation.content == "\nerror: an answer has 1 to 3 of the characters 0123456789\n"
    assert [step.metrics["malformed"] for step in steps] == [0, 1, 1, 0]
    assert (steps[-1].observation, steps[-1].stop_reason, steps[-1].reward) == (None, "terminated", 7.0)
    assert played(pg.GymnasiumText("Echo-v0"), "8")[1][0].stop_reason == "turns"  # cut off by the environment


def test_numbers_may_begin_below_zero() -> None:
    turned = pg.GymnasiumText("Turned-v0", instructions="Turn!")
    seen, steps = played(turned, "[-1]", "2")
    assert seen.content.startswith("Turn!\nbegin")
    assert steps[0].observation.content == "\nyou said -1\n"
    assert steps[1].observation.content == "\nerror: name one action in square brackets: a number from -1 to 1\n"


def test_turns_are_budgeted_and_messages_are_messages() -> None:
    chat = pg.Example(({"role": "user", "content": "1 + 1 ="},))
    seen, steps = played(pg.GymnasiumText("Echo-v0", max_turns=2), "1", "2", "3", example=chat)
    assert [message["role"] for message in seen.content] == ["user"]
    assert steps[0].observation.content == ({"role": "user", "content": "you said 1"},)
    assert [(step.stop_reason, step.reward) for step in steps[1:]] == [("turns", 2.0)]


def test_an_observation_of_any_space_is_described() -> None:
    cards = pg.GymnasiumText("Blackjack-v1", describe=lambda seen: f"You have {seen[0]}, the dealer {seen[1]}.")
    seen, steps = played(cards, "stick")
    assert "0 stick, 1 hit" in seen.content
    assert "the dealer" in seen.content
    assert steps[0].stop_reason == "terminated"


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        ("CartPole-v1", {}, "has observations in Box.*neither text nor a number: .*give describe="),
        ("Blackjack-v1", {}, "has observations in Tuple"),
        ("Pendulum-v1", {"describe": str}, "has actions in Box.*Text or a Discrete space only"),
        ("FrozenLake-v9", {}, "gymnasium does not make 'FrozenLake-v9'"),
        ("FrozenLake", {"options": {"depth": 3}}, "gymnasium does not make 'FrozenLake' with {'depth': 3}"),
        ("no_such_module_here:Game-v0", {}, "does not make 'no_such_module_here:Game-v0': No module named"),
        ("FrozenLake-v1", {"max_turns": 0}, "max_turns must be at least 1"),
        ("FrozenLake-v1", {"actions": ("left", "right")}, "has 4 actions, and 2 are named"),
    ],
)
def test_refusals(name: str, options: dict[str, Any], says: str) -> None:
    with pytest.raises(pg.ConfigError, match=says):
        pg.GymnasiumText(name, **options)


def test_an_environment_s_exception_is_not_a_turn() -> None:
    with pytest.raises(KeyError, match="a bug"):
        played(pg.GymnasiumText("Broken-v0"), "1")


def test_coloured_characters_are_put_in_brackets() -> None:
    assert strip_ansi("\x1b[41mS\x1b[0mF\n\x1b[1mbold\x1b[0m\n") == "[S]F\nbold"


def test_a_name_on_the_command_line_is_a_factory() -> None:
    made = resolve_environment("gymnasium:FrozenLake-v1")
    assert isinstance(made, pg.GymnasiumText)
    assert made.name == "FrozenLake-v1"
    with pytest.raises(pg.ConfigError, match="CartPole-v1 has observations"):
        resolve_environment("gymnasium:CartPole-v1")


def test_episodes_are_always_closed(small: pg.Run, tmp_path: Path) -> None:
    """A random model says no number: all of its episodes end by their turns or tokens."""
    before, run = Echo.closed, tiny_run(small, tmp_path / "run", "gymnasium:Echo-v0", steps=1)
    pg.train(run, display=False)
    episodes = run.prompts_per_step * run.samples_per_prompt
    assert Echo.closed - before == episodes + 1  # and the one that was looked at


def tiny_run(small: pg.Run, folder: Path, environment: str, **changes: Any) -> pg.Run:
    options = {
        "reward": (),
        "steps": 2,
        "prompts_per_step": 2,
        "samples_per_prompt": 2,
        "sampling": pg.SamplingParams(max_tokens=12),
    }
    return replace(small, environment=environment, output=str(folder), **{**options, **changes})


@pytest.mark.full
def test_a_run_resumes_bitwise(small: pg.Run, tmp_path: Path) -> None:
    run = tiny_run(
        small, tmp_path / "whole", "gymnasium:FrozenLake-v1", model="tiny", sampling=pg.SamplingParams(max_tokens=40)
    )
    full = check_resume(run, tmp_path)
    said = rows(full / "metrics.jsonl")
    assert len(said) == 2
    assert all("environment/malformed" in row and row["environment/turns"] >= 1 for row in said)
