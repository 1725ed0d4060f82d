"""Environments of others: their names, what a conversation with them says, and what is said where a package is missing."""

from __future__ import annotations

import random
from importlib.util import find_spec
from pathlib import Path

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

import policygrad as pg
from policygrad.environments.observations import initial_observation, join_texts, parse_choice, reply_observation
from policygrad.environments.registry import (
    code_references,
    resolve_environment,
    split_environment_name,
    to_http_url,
)
from policygrad.environments.textarena import SHARED_FROM, iter_large_collections
from policygrad.tasks.base import IsolatedRandom
from policygrad.tasks.verifiers import taskset_module
from policygrad.training.config.trust import code_in_argv, missing_permissions

WAYS = ("left", "down", "right", "up")
TEXT = pg.Example("98 - 35 =\n")
CHAT = pg.Example(({"role": "system", "content": "You play."}, {"role": "user", "content": "98 - 35 ="}))


@pytest.mark.parametrize(
    ("name", "result"),
    [
        ("textarena:Wordle-v0", ("textarena", "Wordle-v0")),
        ("openenv:http://localhost:8000", ("openenv", "http://localhost:8000")),
        ("gymnasium:mine:Game-v0", ("gymnasium", "mine:Game-v0")),
        ("mine.py:Guess", None),
        ("calculator", None),
        ("textarena", None),
        ("textarena:", None),
    ],
)
def test_the_prefix_of_a_name_selects_the_library(name: str, result: tuple[str, str] | None) -> None:
    assert split_environment_name(name) == result


@pytest.mark.parametrize(
    ("name", "result"),
    [
        ("textarena:Wordle-v0", []),
        ("gymnasium:FrozenLake-v1", []),
        ("gymnasium:mine:Game-v0", ["mine"]),
        ("openenv:ws://localhost:8000/", ["http://localhost:8000"]),
        ("verifiers:someone/word-count@0.1", ["word_count"]),
        ("mine.py:Guess", ["mine.py"]),
        ("mine.py", ["mine.py"]),
    ],
)
def test_code_that_needs_permission(name: str, result: list[str]) -> None:
    assert code_references(name) == result


@pytest.mark.parametrize("value", [float("nan"), float("-inf"), 1e300, 10**400, "0.5", [1.0]])
def test_a_step_s_reward_is_a_finite_number(value: object) -> None:
    with pytest.raises(pg.EngineError, match=r"Step has reward = .*: give a finite number"):
        pg.Step(reward=value)  # type: ignore[arg-type]
    with pytest.raises(pg.EngineError, match=r"Step has metrics\['seen'\] = "):
        pg.Step(metrics={"seen": value})  # type: ignore[dict-item]
    assert pg.Step(reward=numpy.float32(0.5), metrics={"seen": True}).reward == 0.5  # type: ignore[arg-type]


def test_resuming_with_a_server_needs_permission(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    server = {"environment": "openenv:http://elsewhere:1"}
    assert missing_permissions(server, file) == ["http://elsewhere:1"]
    assert code_in_argv(["train", "--environment", "openenv:http://elsewhere:1"]) == ["http://elsewhere:1"]
    assert missing_permissions({"environment": "textarena:Wordle-v0", "task": "embedded"}, file) == []
    assert missing_permissions({"task": "chain_sum:max_terms=2"}, file) == []
    assert missing_permissions({"task": "verifiers:json-tool"}, file) == []  # of a module that there is not
    assert missing_permissions({"task": "verifiers:numpy"}, file) == [
        "numpy"
    ]  # which is installed, and nobody here wrote it


@pytest.mark.parametrize("address", ["http://a:1", "http://a:1/", "ws://a:1", "a:1"])
def test_addresses_are_converted_to_http(address: str) -> None:
    assert to_http_url(address) == "http://a:1"


def test_an_encrypted_one_stays_so() -> None:
    assert to_http_url("wss://a") == to_http_url("https://a/") == "https://a"


def test_a_taskset_s_module() -> None:
    assert taskset_module("primeintellect/Reverse-Text@0.1.2") == "reverse_text"


# --- what a turn names


@pytest.mark.parametrize(
    ("text", "result"),
    [
        ("right", 2),
        ("I go RIGHT.", 2),
        ("[2]", 2),
        ("first left, then [up]", 3),
        ("[left] or rather [down]", 1),
        ("left, no: up", 3),
        ("3", 3),
        ("0.", 0),
        ("4", None),
        ("-1", None),
        ("1.5", None),
        ("10", None),
        ("upwards", None),
        ("left-hand", None),
        ("[]", None),
        ("[left right", 2),
        ("[nowhere] left", None),
        ("", None),
    ],
)
def test_an_action_is_named_by_word_or_number(text: str, result: int | None) -> None:
    assert parse_choice(text, WAYS) == result


def test_numbers_may_begin_elsewhere_and_actions_may_have_no_words() -> None:
    assert parse_choice("[-1]", ("", "", ""), first=-1) == -1
    assert parse_choice("1", ("", "", ""), first=-1) == 1
    assert parse_choice("2", ("", "", ""), first=-1) is None
    assert parse_choice("12", ("",) * 13) == 12
    assert parse_choice("pick up", ("pick", "pick up")) == 1


@given(st.text(max_size=60))
def test_any_text_gives_an_action_or_none(text: str) -> None:
    assert parse_choice(text, WAYS) in (None, 0, 1, 2, 3)


# --- what is said


def test_replies_have_the_format_of_the_prompt() -> None:
    assert initial_observation(TEXT, "A game.\n", "Play!").content == "Play!\nA game.\n"
    assert initial_observation(TEXT, "A game.").content == "A game.\n"
    assert reply_observation(TEXT, "higher\n").content == "\nhigher\n"
    system, user = initial_observation(CHAT, "A game.").content
    assert (system["content"], user) == ("You play.", {"role": "user", "content": "A game."})
    assert reply_observation(CHAT, "higher\n").content == ({"role": "user", "content": "higher"},)


def test_messages_of_a_game_are_lines() -> None:
    assert join_texts(["a\n", "  ", "\nb"]) == "a\nb"


# --- randomness of an episode's own


def drawn(own: IsolatedRandom, count: int) -> list[float]:
    result = []
    for _ in range(count):
        with own():
            result += [random.random(), float(numpy.random.random())]
    return result


def test_an_episode_s_randomness_is_isolated() -> None:
    alone = drawn(IsolatedRandom(7), 4)
    random.seed(1)
    numpy.random.seed(1)
    outside = [random.random(), float(numpy.random.random())]
    random.seed(1)
    numpy.random.seed(1)
    one, other = IsolatedRandom(7), IsolatedRandom(8)
    beside: list[float] = []
    for _ in range(4):
        beside += drawn(one, 1)
        drawn(other, 2)
    assert beside == alone
    assert [random.random(), float(numpy.random.random())] == outside
    assert drawn(IsolatedRandom(8), 4) != alone


def test_the_generators_are_restored_after_an_exception() -> None:
    def failing() -> None:
        with IsolatedRandom(3)():
            random.random()
            raise KeyError

    random.seed(1)
    before = random.getstate()
    with pytest.raises(KeyError):
        failing()
    assert random.getstate() == before


def test_only_long_lists_are_shared() -> None:
    class Words:
        def __init__(self) -> None:
            self.long = {str(i) for i in range(SHARED_FROM + 1)}
            self.short = ["a", "b"]

    class Game:
        def __init__(self) -> None:
            self.words, self.guesses = Words(), ["c"]

    game = Game()
    assert list(iter_large_collections(game)) == [game.words.long]


# --- what is missing


@pytest.mark.parametrize(
    ("name", "package", "extra"),
    [
        ("textarena:Wordle-v0", "textarena", "textarena"),
        ("openenv:http://localhost:8000", "websockets", "openenv"),
        ("verifiers:gsm8k", "verifiers", "verifiers"),
    ],
)
def test_a_package_that_is_not_installed_is_named_with_its_extra(name: str, package: str, extra: str) -> None:
    if find_spec(package) is not None:
        pytest.skip(f"{package} is installed")
    with pytest.raises(
        pg.ConfigError, match=rf"needs {package}, which is not installed: pip install '\.\[{extra}\]' in a clone"
    ):
        resolve_environment(name)


def test_a_task_of_verifiers_without_it() -> None:
    if find_spec("verifiers") is not None:
        pytest.skip("verifiers is installed")
    with pytest.raises(pg.ConfigError, match=r"\.\[verifiers\]"):
        pg.load_task("verifiers:gsm8k")
