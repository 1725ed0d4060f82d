"""TextArena itself, in a virtual environment of its own: make test-environments."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

textarena = pytest.importorskip("textarena", reason="TextArena has an environment of its own: make test-environments")

import policygrad as pg  # noqa: E402
from doubles.files import rows, untimed  # noqa: E402
from policygrad.environments.registry import resolve_environment  # noqa: E402

pytestmark = pytest.mark.environments
TEXT = pg.Example("1 + 1 =\n")
WORDS = ("apple", "bread", "chair", "cloud", "field", "grass", "house", "plant", "river", "table")


class Game:
    """An episode, step by step."""

    def __init__(self, factory: Any, seed: int = 0, example: pg.Example = TEXT) -> None:
        self.environment = factory(example, seed=seed)
        self.first = asyncio.run(self.environment.reset()).content

    def say(self, text: str, truncated: bool = False) -> pg.Step:
        result: pg.Step = asyncio.run(self.environment.step(pg.Action(text, truncated)))
        return result


@pytest.fixture(scope="module")
def number() -> pg.TextArena:
    result = resolve_environment("textarena:GuessTheNumber-v0")
    assert isinstance(result, pg.TextArena)
    return result


def solved(game: Game) -> tuple[list[int], pg.Step]:
    """Halving finds one of twenty."""
    low, high, said = 1, 20, list[int]()
    while True:
        said.append((low + high) // 2)
        step = game.say(f"I guess [{said[-1]}].")
        if step.observation is None:
            return said, step
        low, high = (said[-1] + 1, high) if "higher" in str(step.observation.content) else (low, said[-1] - 1)


def test_a_game_is_won(number: pg.TextArena) -> None:
    game = Game(number)
    assert "between 1 and 20" in str(game.first)
    assert "1 + 1" not in str(game.first)
    said, step = solved(game)
    assert len(said) <= 5
    assert (step.reward, step.stop_reason) == (1.0, "terminated")


def test_each_message_is_shown_once_without_the_policy_s_own(number: pg.TextArena) -> None:
    game = Game(number, seed=1)
    answers = [str(game.say(f"[{n}]").observation.content) for n in (1, 20)]  # neither is the number with this seed
    assert answers == ["\nThe target number is higher.\n", "\nThe target number is lower.\n"]


def test_a_seed_determines_the_game(number: pg.TextArena) -> None:
    random.seed(5)
    before = random.getstate()
    alone = [solved(Game(number, seed))[0] for seed in range(12)]
    beside = [Game(number, seed) for seed in range(12)]  # all of them begun before the first goes on
    assert [solved(game)[0] for game in beside] == alone
    assert len({guesses[-1] for guesses in alone}) > 3
    assert random.getstate() == before


def test_a_game_s_randomness_belongs_to_its_episode() -> None:
    """Each press of a bandit draws."""
    bandit = pg.TextArena("Bandit-v0")

    def presses(game: Game) -> list[str]:
        return [str(game.say("red").observation.content) for _ in range(8)]  # its wrapper adds the brackets

    alone = presses(Game(bandit, 3))
    one, other = Game(bandit, 3), Game(bandit, 4)
    mixed = []
    for _ in range(8):
        mixed.append(str(one.say("[red]").observation.content))
        other.say("[blue]")
    assert mixed == alone
    assert any("1" in text for text in alone)


def test_invalid_answers_are_counted_and_allowed_once(number: pg.TextArena) -> None:
    game = Game(number)
    step = game.say("I do not know")
    assert "invalid move" in str(step.observation.content)
    assert (step.reward, step.metrics) == (0.0, {"invalid": 1.0, "failed": 0.0})
    step = game.say("still not")
    assert (step.observation, step.stop_reason, step.metrics["invalid"]) == (None, "terminated", 1.0)


class Unfinished(textarena.Env):  # type: ignore[misc]
    """A game of somebody's own that has not foreseen every answer, and prints."""

    def reset(self, num_players: int, seed: int | None = None) -> None:
        self.state = textarena.SinglePlayerState(num_players=num_players, seed=seed)
        self.state.reset(game_state={}, player_prompt_function=lambda player_id, game_state: "Say something.")

    def step(self, action: str) -> Any:
        print("a step")
        return {"fine": self.state.step()}[action]


def test_a_game_that_raises_on_an_answer_fails_its_episode(capsys: pytest.CaptureFixture[str]) -> None:
    textarena.register(id="Unfinished-v0", entry_point=Unfinished)
    game = Game(pg.TextArena("Unfinished-v0"))
    assert game.say("fine").observation is not None
    step = game.say("unforeseen")
    assert (step.observation, step.reward, step.stop_reason, step.metrics["failed"]) == (None, 0.0, "failed", 1.0)
    assert capsys.readouterr().out == ""


def test_turns_and_tokens_end_a_game_at_0() -> None:
    short = pg.TextArena("GuessTheNumber-v0", max_turns=1, instructions="Think first.")
    game = Game(short, seed=1)
    assert str(game.first).startswith("Think first.\nYou are Player 0")
    step = game.say("[1]")
    assert (step.observation, step.reward, step.stop_reason) == (None, 0.0, "turns")
    assert Game(short, seed=1).say("[", truncated=True).observation is None


def test_messages_are_continued_by_messages(number: pg.TextArena) -> None:
    example = pg.Example(({"role": "system", "content": "You play."}, {"role": "user", "content": "1 + 1 ="}))
    game = Game(number, seed=1, example=example)
    assert [message["role"] for message in game.first] == ["system", "user"]
    step = game.say("[1]")
    assert step.observation.content == ({"role": "user", "content": "The target number is higher."},)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("TicTacToe-v0", "not for one player"),
        ("Wordel-v0", "no game 'Wordel-v0': did you mean Wordle-v0"),
        ("TwentyQuestions-v0", "cannot be played here"),  # it asks a model of somebody's
    ],
)
def test_refusals(name: str, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENROUTER_API_KEY", raising=False)
    with pytest.raises(pg.ConfigError, match=says):
        pg.TextArena(name)


def test_many_games_of_one_player_can_be_played() -> None:
    """Those that need no word lists, each reset twice alike and answered with nonsense."""
    for name in (
        "2048-v0",
        "Blackjack-v0",
        "FrozenLake-v0",
        "LightsOut-v0",
        "Mastermind-v0",
        "Minesweeper-v0",
        "TowerOfHanoi-v0",
    ):
        factory = pg.TextArena(name)
        one, other = Game(factory, 9), Game(factory, 9)
        assert one.first == other.first
        said = [(game.say("[nonsense]"), game.say("[up]")) for game in (one, other)]
        assert said[0] == said[1], name


def word_lists(folder: Path, words: Sequence[str]) -> None:
    """NLTK's word lists and its tagger, of ten words: the real ones are a download."""
    lists = folder / "corpora" / "words"
    lists.mkdir(parents=True)
    (lists / "README").write_text("")
    for name in ("en", "en-basic"):
        (lists / name).write_text("\n".join(words) + "\n")
    tagger = folder / "taggers" / "averaged_perceptron_tagger_eng"
    tagger.mkdir(parents=True)
    parts = {"weights": {}, "tagdict": {**dict.fromkeys(words, "NN"), "test": "NN"}, "classes": ["NN"]}
    for part, value in parts.items():
        (tagger / f"averaged_perceptron_tagger_eng.{part}.json").write_text(json.dumps(value))


@pytest.fixture(scope="module")
def wordle(tmp_path_factory: pytest.TempPathFactory) -> Iterator[pg.TextArena]:
    import nltk

    folder = tmp_path_factory.mktemp("nltk")
    word_lists(folder, WORDS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nltk.data, "path", [str(folder)])  # which nltk remembers: once for all tests
        patch.setattr(nltk, "download", lambda *args, **options: True)  # no network
        yield pg.TextArena("Wordle-v0")


def test_wordle(wordle: pg.TextArena) -> None:
    game = Game(wordle, seed=2)
    assert "5-letter word" in str(game.first)
    step = game.say("[zzzzz]")
    assert "not an English word" in str(step.observation.content)
    turns = 0
    for word in WORDS:
        step, turns = game.say(f"My guess is [{word}]."), turns + 1
        if step.observation is None:
            break
        assert f"You submitted [{word}]." in str(step.observation.content)
    assert step.stop_reason == "terminated"
    assert 0.0 <= step.reward <= 1.0
    assert turns <= 6
    assert {str(Game(wordle, seed).say("[apple]").observation) for seed in range(8)} != {""}


def test_word_lists_are_shared_by_the_episodes(wordle: pg.TextArena) -> None:
    one, other = wordle(TEXT, seed=0), wordle(TEXT, seed=1)
    assert one.env.dictionary.us_words is other.env.dictionary.us_words  # some 100,000 words
    assert one.env.word_list is not other.env.word_list


def test_a_run_resumes_bitwise(tmp_path: Path) -> None:
    run = pg.Run(
        algorithm=pg.GRPO,
        environment="textarena:GuessTheNumber-v0",
        steps=2,
        prompts_per_step=2,
        samples_per_prompt=2,
        sampling=pg.SamplingParams(max_tokens=60),
        evaluation=pg.EvaluationConfig(problems=2, samples_per_prompt=1),
        checkpoint=pg.CheckpointConfig(every=1, keep=3),
        output=str(tmp_path / "whole"),
    )
    full = pg.train(run, display=False)
    said = [row for row in rows(full.output / "metrics.jsonl") if "environment/turns" in row]
    assert len(said) == 2
    assert all("environment/invalid" in row and row["environment/failed"] == 0 for row in said)
    pieces = tmp_path / "pieces"
    pg.train(replace(run, output=str(pieces)), stop_after=1, display=False)
    pg.train(resume=pieces, display=False)
    assert untimed(full.output / "metrics.jsonl") == untimed(pieces / "metrics.jsonl")
    assert rows(full.output / "completions.jsonl") == rows(pieces / "completions.jsonl")


# Games of two players.


def moves_of(game: Any, *moves: str) -> tuple[list[tuple[int, str]], pg.GameStep]:
    """What each player reads before its moves, and the last step."""
    read, step = list[tuple[int, str]](), pg.GameStep(asyncio.run(game.reset()))
    for move in moves:
        ((player, observation),) = step.observations.items()
        read.append((player, str(observation.content)))
        step = asyncio.run(game.step({player: pg.Action(move)}))
    return read, step


def test_a_game_of_two_is_self_play() -> None:
    environment = resolve_environment("textarena:TicTacToe-v0")
    assert isinstance(environment, pg.SelfPlay)
    assert environment.eval_opponent == "initial"
    game = environment(TEXT, seed=1)
    read, step = moves_of(game, "[0]", "[3]", "[1]", "I think aloud [8] </think> [4]", "[2]")
    assert [player for player, _ in read] == [0, 1, 0, 1, 0]
    assert "You are Player 0" in read[0][1]
    assert "You are Player 1" in read[1][1]
    assert "You are Player" not in read[2][1]
    assert "think aloud" not in read[4][1]
    assert (dict(step.rewards), step.stop_reason) == ({0: 1, 1: -1}, "terminated")


def test_two_players_draw() -> None:
    game = pg.TextArena("TicTacToe-v0", players=2)(TEXT, seed=1)
    _, step = moves_of(game, "[0]", "[1]", "[2]", "[4]", "[3]", "[5]", "[7]", "[6]", "[8]")
    assert set(step.rewards.values()) == {0.0}


def test_who_answers_wrongly_twice_loses() -> None:
    game = pg.TextArena("TicTacToe-v0", players=2)(TEXT, seed=1)
    _, step = moves_of(game, "I do not know")
    ((player, observation),) = step.observations.items()
    assert (player, step.metrics["invalid"]) == (0, 1.0)
    assert "invalid move" in str(observation.content)
    step = asyncio.run(game.step({0: pg.Action("still not")}))
    assert dict(step.rewards) == {0: -1, 1: 1}


def test_a_hidden_card_is_read_by_its_player_alone() -> None:
    game = pg.TextArena("KuhnPoker-v0", players=2)(TEXT, seed=4)
    read, _ = moves_of(game, "[check]", "[bet]", "[call]")
    cards = {player: {line[-3:] for line in text.splitlines() if "Your card is" in line} for player, text in read[:2]}
    assert len(cards[0]) == len(cards[1]) == 1
    assert cards[0] != cards[1]


def test_turns_end_a_game_of_two_at_0_and_a_failing_game_is_lost() -> None:
    short = pg.TextArena("TicTacToe-v0", players=2, max_turns=1)(TEXT, seed=1)
    _, step = moves_of(short, "[0]", "[1]")
    assert (dict(step.rewards), step.stop_reason) == ({0: 0.0, 1: 0.0}, "turns")

    game = pg.TextArena("TicTacToe-v0", players=2)(TEXT, seed=1)
    moves_of(game)

    def step_that_raises(action: str) -> Any:
        raise KeyError(action)

    game.env.step = step_that_raises
    result = asyncio.run(game.step({0: pg.Action("[0]")}))
    assert (dict(result.rewards), result.stop_reason, result.metrics["failed"]) == ({0: -1.0, 1: 1.0}, "failed", 1.0)


@pytest.mark.parametrize(
    ("name", "players", "says"),
    [("GuessTheNumber-v0", 2, "not for 2 players"), ("TicTacToe-v0", 0, "must be at least 1")],
)
def test_another_number_of_players_is_refused(name: str, players: int, says: str) -> None:
    with pytest.raises(pg.ConfigError, match=says):
        pg.TextArena(name, players=players)


def test_a_run_of_self_play(tmp_path: Path) -> None:
    run = pg.Run(
        algorithm=pg.SPIRAL,
        environment="textarena:TicTacToe-v0",
        steps=2,
        prompts_per_step=4,
        sampling=pg.SamplingParams(max_tokens=24),
        evaluation=pg.EvaluationConfig(problems=4, samples_per_prompt=2),
        output=str(tmp_path / "run"),
    )
    pg.train(run)
    steps = rows(tmp_path / "run" / "metrics.jsonl")
    assert any("reward/role/player0" in row for row in steps)
    assert any("eval/reward" in row for row in steps)
