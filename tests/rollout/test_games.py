"""Games of several players: each player's row holds what it read and sampled, and nothing else; forfeits, opponents, failures."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import policygrad as pg
from doubles.scripted_sampler import ScriptedSampler
from doubles.templates import random_model, tokenizer
from policygrad.environments.game_episodes import ModelOpponent, run_games
from policygrad.environments.games import choose_random_move
from policygrad.environments.nim import NIM, Nim
from policygrad.learners.local.learner import LocalLearner
from policygrad.rollout.batching import batch_groups, measure_rollout
from policygrad.rollout.serialization import pack_groups, unpack_groups
from policygrad.rollout.trajectory import EVALUATE, TRAIN, EpisodeGroup, EpisodeSpec

NAME = "qwen3"
EXAMPLE = pg.Example("1 + 1 =\n")
Say = Callable[[tuple[int, ...], str], str]


def play(
    environment: Any,
    say: Say | pg.Sampler,
    *,
    samples: int = 1,
    max_tokens: int = 200,
    stream: int = TRAIN,
    index: int = 0,
    chat: bool = False,
    context_length: int | None = 2048,
) -> EpisodeGroup:
    """The games of one prompt, in which the policy says what is written for it."""
    encoder = replace(tokenizer(NAME), context_length=context_length)
    sampler: Any = ScriptedSampler(encoder, say) if not isinstance(say, pg.Sampler) else say
    example = pg.Example(({"role": "user", "content": "1 + 1 ="},)) if chat else EXAMPLE
    work = run_games(
        [EpisodeSpec(example, (0, stream, 1, index), max_tokens)],
        samples,
        pg.SamplingParams(max_tokens=max_tokens),
        sampler=sampler,
        encoder=encoder,
        environment=environment,
    )
    return asyncio.run(work)[0]


@dataclass
class Secrets:
    """Two players take turns; each reads a word of its own, player p before its k-th turn `words[p][k]`."""

    example: pg.Example
    words: tuple[tuple[str, ...], tuple[str, ...]] = (("alpha", "beta"), ("gamma", "delta"))
    simultaneous: bool = False
    roles: tuple[str, ...] = ("first", "second")
    waits = False
    turns: list[int] = field(default_factory=lambda: [0, 0])

    def observe(self, player: int) -> pg.Observation:
        word = self.words[player][self.turns[player]]
        self.turns[player] += 1
        text = f" <{player}:{word}>"
        return pg.Observation(text if isinstance(self.example.prompt, str) else ({"role": "user", "content": text},))

    async def reset(self) -> Mapping[int, pg.Observation]:
        return {p: self.observe(p) for p in ((0, 1) if self.simultaneous else (0,))}

    async def step(self, moves: Mapping[int, pg.Action]) -> pg.GameStep:
        players = (0, 1) if self.simultaneous else (1 - next(iter(moves)),)
        if any(self.turns[p] == len(self.words[p]) for p in players):
            return pg.GameStep(rewards={0: 1.0, 1: -1.0}, stop_reason="won")
        return pg.GameStep({p: self.observe(p) for p in players})


def read_text(group: EpisodeGroup, row: int) -> tuple[str, str]:
    """A row's complete text, prompt included, and the part that is trained."""
    t, encoder = group.trajectories[row], tokenizer(NAME)
    assert t.num_branches == 1
    return (
        encoder.hf.decode(torch.cat([group.prompt_ids, t.tokens])),
        encoder.hf.decode(t.tokens[t.mask]),
    )


WORDS = st.text("abcdefgh", min_size=1, max_size=5)


@settings(max_examples=25)
@given(
    words=st.tuples(st.lists(WORDS, min_size=1, max_size=3), st.lists(WORDS, min_size=1, max_size=3)),
    simultaneous=st.booleans(),
    chat=st.booleans(),
)
def test_a_player_s_row_has_its_own_words_only(
    words: tuple[list[str], list[str]], simultaneous: bool, chat: bool
) -> None:
    """What the other was shown or said is nowhere in the row; what it was shown itself is in it and not trained."""
    private = tuple(tuple(f"{p}{word}" for word in words[p]) for p in range(2))

    def game(example: pg.Example) -> Secrets:
        return Secrets(example, private, simultaneous)  # type: ignore[arg-type]

    said: dict[int, list[str]] = {0: [], 1: []}

    def say(key: tuple[int, ...], context: str) -> str:
        player = key[6]
        said[player].append(f"[move {len(said[player])} of {player}]")
        return said[player][-1]

    group = play(pg.SelfPlay(game), say, chat=chat)
    rows = {t.role: i for i, t in enumerate(group.trajectories)}
    assert list(rows) == ["first", "second"]
    for player, (role, row) in enumerate(rows.items()):
        text, trained = read_text(group, row) if group.trajectories[row].mask.any() else ("", "")
        if not said[player]:
            assert not group.trajectories[row].mask.any()
            continue
        assert all(move in trained for move in said[player])
        assert not any(move in text for move in said[1 - player])
        assert f"<{1 - player}:" not in text
        assert f"<{player}:" in text
        assert f"<{player}:" not in trained
        assert role == ("first", "second")[player]


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("simultaneous", [False, True])
def test_the_learner_s_log_probabilities_are_the_sampler_s(chat: bool, simultaneous: bool) -> None:
    """Rows of both players in one batch, whose texts share only a beginning, or nothing."""
    encoder = replace(tokenizer(NAME), end_ids=frozenset(range(40, 160)), context_length=1024)
    sampler = pg.LocalSampler.from_tokenizer(random_model(), encoder)
    example = pg.Example(({"role": "user", "content": "1 + 1 ="},)) if chat else EXAMPLE
    work = run_games(
        [EpisodeSpec(example, (3, TRAIN, 1, i), 40) for i in range(3)],
        2,
        pg.SamplingParams(max_tokens=40),
        sampler=sampler,
        encoder=encoder,
        environment=pg.SelfPlay(lambda example: Secrets(example, simultaneous=simultaneous)),
    )
    groups = asyncio.run(work)
    batch = batch_groups(groups)
    assert batch.role_names == ("first", "second")
    assert batch.mask.any(1).sum() > 8
    learner = LocalLearner(random_model(), pg.LearnerSpec(pg.SPIRAL, 1e-3, 1))
    logp = learner.evaluate(batch, frozenset({"logp_old"})).logp_old
    assert logp is not None
    assert batch.logp_sampler is not None
    torch.testing.assert_close(logp[batch.mask], batch.logp_sampler[batch.mask], rtol=0, atol=2e-4)


def test_rows_have_roles_peers_and_rewards() -> None:
    group = play(NIM, lambda key, context: "1", samples=2)
    batch = batch_groups([group])
    assert [t.role for t in group.trajectories] == ["first", "second"] * 2
    assert batch.role is not None
    assert batch.peers is not None
    assert batch.role.tolist() == batch.peers.tolist() == [0, 1, 0, 1]
    assert batch.group.tolist() == [0, 0, 0, 0]
    assert sorted(batch.reward.tolist()) == [-1.0, -1.0, 1.0, 1.0]
    metrics = measure_rollout([([group], batch)])
    won = [metrics[f"environment/won/{role}"].value for role in ("first", "second")]
    assert sorted(won) == [0.0, 1.0]
    assert metrics["reward/role/first"].value == 2 * won[0] - 1
    assert metrics["environment/moves"].value == Nim(EXAMPLE, EpisodeSpec(EXAMPLE, (0, TRAIN, 1, 0), 1).seed).stones
    assert metrics["environment/ended_won"].value == 1.0
    assert metrics["reward"].value == 0.0


def test_an_illegal_move_loses_and_a_player_that_never_moved_is_not_trained() -> None:
    group = play(NIM, lambda key, context: "I do not know")
    first, second = group.trajectories
    assert (first.reward, first.stop_reason, first.metrics["illegal"]) == (-1.0, "illegal", 1.0)
    assert (second.reward, second.failure, bool(second.mask.any())) == (1.0, "", False)
    batch = batch_groups([group])
    assert batch.counted.tolist() == [True, False]
    assert measure_rollout([([group], batch)])["completions/failed_ratio"].value == 0.0
    psi = pg.SPIRAL.with_max_tokens(8).compute_advantages(batch)
    assert psi[0][batch.mask[0]].unique().tolist() == [-1.0]
    assert not psi[1].any()


@pytest.mark.parametrize(("room", "reason"), [({"max_tokens": 6}, "tokens"), ({"context_length": 12}, "context")])
def test_who_has_no_room_left_forfeits(room: dict[str, int], reason: str) -> None:
    """The first player talks until its tokens, or the model's context, are used up."""
    group = play(NIM, lambda key, context: "1 " * 30, **room)  # type: ignore[arg-type]
    first, second = group.trajectories
    assert (first.reward, second.reward, first.stop_reason) == (-1.0, 1.0, reason)
    assert (first.truncated, second.truncated) == (True, False)


def test_a_game_may_say_what_a_forfeit_is_worth() -> None:
    class Lenient(Nim):
        def forfeit(self, player: int) -> Mapping[int, float]:
            return {player: -0.25, 1 - player: 0.5}

    group = play(pg.SelfPlay(Lenient), lambda key, context: "1 " * 30, max_tokens=6)
    assert [t.reward for t in group.trajectories] == [-0.25, 0.5]
    group = play(pg.SelfPlay(Nim, forfeit_reward=-3.0), lambda key, context: "1 " * 30, max_tokens=6)
    assert [t.reward for t in group.trajectories] == [-3.0, 3.0]


def test_an_opponent_s_moves_are_in_no_row() -> None:
    """The policy's role changes from prompt to prompt; the opponent, a function, reads what a player reads."""
    turns: list[pg.Turn] = []

    async def take_one(turn: pg.Turn) -> str:
        turns.append(turn)
        return f"{turn.legal_moves[0]}, says the opponent"

    groups = [play(pg.SelfPlay(Nim, opponent=take_one), lambda key, context: "1", samples=2, index=i) for i in (0, 1)]
    assert [t.role for group in groups for t in group.trajectories] == ["first", "first", "second", "second"]
    assert not any("opponent" in t.text for group in groups for t in group.trajectories)
    assert {turn.role for turn in turns} == {"first", "second"}
    assert all("Take 1, 2 or 3 of" in str(turn.observation) for turn in turns)
    later = next(turn for turn in turns if turn.earlier)
    assert later.earlier[1] == "1, says the opponent"


def test_an_evaluation_is_against_another_opponent_than_training() -> None:
    group = play(NIM, lambda key, context: "1", stream=EVALUATE, samples=6, index=1)
    assert [t.role for t in group.trajectories] == ["second"] * 6
    again = play(NIM, lambda key, context: "1", stream=EVALUATE, samples=6, index=1)
    assert [t.reward for t in group.trajectories] == [t.reward for t in again.trajectories]
    assert len({t.metrics["moves"] for t in group.trajectories}) > 1  # the opponent moves at random


def test_a_model_s_moves_are_sampled_with_its_own_weights_and_tokenizer() -> None:
    encoder = tokenizer("llama31")
    other = ScriptedSampler(encoder, lambda key, context: "2")
    environment = pg.SelfPlay(Nim, opponent=ModelOpponent(other, encoder))
    group = play(environment, lambda key, context: "1", samples=2)
    assert [t.role for t in group.trajectories] == ["first", "first"]
    assert other.asked
    for t in group.trajectories:
        assert tokenizer(NAME).decode(t.tokens[t.mask]).replace(" ", "").strip("1") == ""


class Solving:
    """A proposer, then two solvers at the same time; the proposer gets a reward before its rows end."""

    roles = ("proposer", "solver", "solver")
    waits = False

    def __init__(self, example: pg.Example, seed: int = 0) -> None:
        self.problem = ""

    async def reset(self) -> Mapping[int, pg.Observation]:
        return {0: pg.Observation("Propose:")}

    async def step(self, moves: Mapping[int, pg.Action]) -> pg.GameStep:
        if 0 in moves:
            self.problem = moves[0].text
            return pg.GameStep({n: pg.Observation(f"Solve {self.problem}:") for n in (1, 2)})
        solved = {n: float(move.text == "right") for n, move in moves.items()}
        return pg.GameStep(rewards=solved | {0: 1 - sum(solved.values()) / 2}, metrics={"problems": 1.0})


def test_solvers_are_peers_within_a_game_and_proposers_across_games() -> None:
    def say(key: tuple[int, ...], context: str) -> str:
        return f"problem {key[4]}" if "Propose" in context else ("right" if key[6] == 1 and key[4] == 0 else "wrong")

    environment = pg.SelfPlay(Solving, compared_within_game=("solver",), eval_opponent=None)
    group = play(environment, say, samples=2)
    batch = batch_groups([group])
    assert [t.role for t in group.trajectories] == ["proposer", "solver", "solver"] * 2
    assert batch.peers is not None
    assert batch.peers.tolist() == [0, 1, 1, 0, 2, 2]
    psi = pg.Algorithm(advantage=(pg.GroupMean(within="peers"),)).compute_advantages(batch)
    assert [float(row[mask].unique()) for row, mask in zip(psi, batch.mask, strict=True)] == [
        -0.25,
        0.5,
        -0.5,
        0.25,
        0.0,
        0.0,
    ]


# What goes wrong.


def broken(**changed: Any) -> type[Nim]:
    return type("Broken", (Nim,), changed)


async def raises(self: Any, *args: Any) -> Any:
    raise ValueError("the table fell over")


@pytest.mark.parametrize("method", ["reset", "step", "close"])
def test_an_error_of_the_game_leaves_its_rows_out(method: str) -> None:
    closed: list[int] = []

    async def close(self: Any) -> None:
        closed.append(1)
        if method == "close":
            raise ValueError("the table fell over")

    changed: dict[str, Any] = {"close": close} | ({method: raises} if method != "close" else {})
    group = play(pg.SelfPlay(broken(**changed)), lambda key, context: "1", samples=2)
    assert all(t.reward is None and "the table fell over" in t.failure for t in group.trajectories)
    assert {t.stop_reason for t in group.trajectories} == {"failed"}
    assert not batch_groups([group]).mask.any()
    assert len(closed) == 2


def test_an_error_of_an_opponent_leaves_the_game_out() -> None:
    def silent(turn: pg.Turn) -> str:
        return None  # type: ignore[return-value]

    group = play(pg.SelfPlay(Nim, opponent=silent), lambda key, context: "1")
    assert "the opponent returned NoneType" in group.trajectories[0].failure


def test_a_game_that_cannot_be_created_leaves_the_others() -> None:
    made: list[int] = []

    def sometimes(example: pg.Example, seed: int) -> Nim:
        made.append(1)
        if len(made) == 2:
            raise ValueError("no table is free")
        return Nim(example, seed)

    group = play(pg.SelfPlay(sometimes), lambda key, context: "1", samples=3)
    assert [bool(t.failure) for t in group.trajectories] == [False, False, True, False, False]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"roles": "both"}, "list the name of each player's role"),
        ({"roles": ()}, "list the name of each player's role"),
        ({"reset": None}, "has no method 'reset'"),
        ({"reset": "nothing"}, "of the players that move first"),
        ({"step": "nothing"}, "return a GameStep"),
        ({"step": "stranger"}, "has the players 0 to 1, and names player 7"),
        ({"step": "infinite"}, "give a finite number"),
    ],
)
def test_a_game_that_is_none_ends_the_run(changed: dict[str, Any], message: str) -> None:
    async def nothing(self: Any, *args: Any) -> Any:
        return None

    async def stranger(self: Any, *args: Any) -> Any:
        return pg.GameStep(rewards={7: 1.0})

    async def infinite(self: Any, *args: Any) -> Any:
        return pg.GameStep(rewards={0: float("inf")})

    methods = {"nothing": nothing, "stranger": stranger, "infinite": infinite}
    changed = {name: methods.get(value, value) if isinstance(value, str) else value for name, value in changed.items()}
    with pytest.raises(pg.EngineError, match=message):
        play(pg.SelfPlay(broken(**changed)), lambda key, context: "1")


def test_the_random_opponent_needs_legal_moves() -> None:
    class Blind(Nim):
        legal_moves = None  # type: ignore[assignment]

    with pytest.raises(
        pg.ConfigError, match=r"'random' chooses among legal moves.*add it, or set eval_opponent='initial'"
    ):
        play(pg.SelfPlay(Blind), lambda key, context: "1", stream=EVALUATE)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"game": 3}, "game is 3: pass a function"),
        ({"opponent": 3}, "opponent is 3: pass a function of a policygrad.Turn"),
        ({"eval_opponent": ""}, "eval_opponent is ''"),
        ({"compared_within_game": "solver"}, "write a tuple of roles"),
        ({"forfeit_reward": float("nan")}, "forfeit_reward must be a finite number"),
    ],
)
def test_options_without_a_meaning_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(pg.ConfigError, match=message):
        pg.SelfPlay(**({"game": Nim} | options))


def test_a_role_that_the_game_does_not_have_is_refused() -> None:
    with pytest.raises(pg.EngineError, match=r"names 'solver', and the roles of Nim are first, second"):
        play(pg.SelfPlay(Nim, compared_within_game=("solver",)), lambda key, context: "1")


def test_groups_of_games_are_written_and_read() -> None:
    group = play(NIM, lambda key, context: "1", samples=2)
    tensors, values = pack_groups([group])
    (again,) = unpack_groups(tensors, values, lambda index: EXAMPLE)
    before, after = batch_groups([group]), batch_groups([again])
    assert before.role_names == after.role_names
    for name, tensor in before.tensors().items():
        assert torch.equal(tensor, getattr(after, name)), name


# The built-in game.


def optimal(turn: pg.Turn) -> str:
    stones = int(str(turn.observation).rsplit("of ", 1)[1].strip().rstrip(":"))
    return str(stones % 4 or 1)


def test_nim_is_won_by_who_leaves_a_multiple_of_four() -> None:
    """Perfect play wins whenever the pile is not a multiple of 4 at its turn, also against perfect play."""

    def win(first: Any, second: Any, seed: int) -> tuple[int, float]:
        game, players = Nim(EXAMPLE, seed), (first, second)
        start, observations = game.stones, asyncio.run(game.reset())
        while True:
            ((number, observation),) = observations.items()
            turn = pg.Turn(number, game.roles[number], observation.content, (), tuple(game.legal_moves(number)), seed)
            step = asyncio.run(game.step({number: pg.Action(players[number](turn))}))
            if not step.observations:
                return start, step.rewards[0]
            observations = step.observations

    results = [win(optimal, optimal, seed) for seed in range(40)]
    assert {start for start, _ in results} == set(range(4, 10))
    assert all(reward == (-1.0 if start % 4 == 0 else 1.0) for start, reward in results)
    assert all(reward == 1.0 for start, reward in (win(optimal, choose_random_move, s) for s in range(40)) if start % 4)


@pytest.mark.parametrize(
    ("text", "move"),
    [("I guess <answer>2</answer>", 2), ("7 - 3 = 4, so 3.", 3), ("", None), ("none", None), ("9" * 5000, None)],
)
def test_a_move_is_the_last_number(text: str, move: int | None) -> None:
    from policygrad.environments.nim import parse_move

    assert parse_move(text) == move
