"""Run games of several players at once: all moves that are due, of all games, are one batch of requests."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from random import Random
from types import SimpleNamespace
from typing import Any

import torch

from policygrad.core.media import TextMedia, select_media
from policygrad.environments.games import (
    RANDOM,
    GameStep,
    HasLegalMoves,
    Opponent,
    SelfPlay,
    SupportsForfeit,
    Turn,
    choose_move,
    choose_random_move,
)
from policygrad.errors import EngineError
from policygrad.models.chat.messages import EncodedText
from policygrad.models.tokenizer import Tokenizer
from policygrad.rollout.environment import CONTEXT, FAILED, TOKENS, Action, Observation
from policygrad.rollout.environment_calls import CLOSE_TIMEOUT, EnvironmentCalls, EnvironmentFailedError
from policygrad.rollout.episodes import Conversation, before_picture, call_close
from policygrad.rollout.trajectory import EVALUATE, EpisodeGroup, EpisodeSpec, Segment, Trajectory, common_length
from policygrad.samplers.base import CachesTexts, Generation, Request, Sampler, SamplingParams
from policygrad.tasks.base import Prompt
from policygrad.utils.async_runner import await_with_timeout, gather_or_cancel
from policygrad.utils.spans import span


@dataclass(frozen=True, eq=False)
class ModelOpponent:
    """An opponent that samples its moves from a model of its own, at the policy's temperature."""

    sampler: Sampler
    tokenizer: Tokenizer

    def __call__(self, turn: Turn) -> str:
        raise TypeError("a ModelOpponent samples the moves of many games at a time: run_games asks it")


async def run_games(
    specs: Sequence[EpisodeSpec],
    samples_per_prompt: int,
    sampling: SamplingParams,
    *,
    sampler: Sampler,
    encoder: Tokenizer,
    environment: SelfPlay,
    calls: EnvironmentCalls | None = None,
) -> list[EpisodeGroup]:
    """Play `samples_per_prompt` games for each spec; one group per spec, in their order, with a row for each trained player.

    Raises:
        EngineError: a game that is not one (no roles, a player that it does not have), or a sampler whose answers do not fit.
    """
    policy = ModelOpponent(sampler, encoder)
    with calls or EnvironmentCalls() as environment_calls:
        groups = [
            [_Table(environment, spec, sample, policy, environment_calls) for sample in range(samples_per_prompt)]
            for spec in specs
        ]
        tables = [table for group in groups for table in group]
        samplers = [sampler]
        try:
            for group in groups:  # one after the other: texts that are equal in a group are encoded once
                shared = dict[str, EncodedText]()
                for table in group:
                    await table.start(shared)
            while active := [table for table in tables if not table.is_over]:
                due = [seat for table in active for seat in table.due]
                for player in dict.fromkeys(seat.player for seat in due):
                    if isinstance(player, ModelOpponent):
                        if player.sampler not in samplers:
                            samplers.append(player.sampler)
                        await _sample(player, [seat for seat in due if seat.player is player], sampling)
                with span("environment step", episodes=len(active)):
                    steps = [table.step() for table in active]
                    if any(table.waits for table in active):
                        await gather_or_cancel(steps)
                    else:
                        for step in steps:
                            await step
        finally:  # after an error or interruption, close all open games together
            for each in samplers:
                if isinstance(each, CachesTexts):
                    each.clear_texts()
            await asyncio.gather(*(table.abandon() for table in tables), return_exceptions=True)
    return [_make_group(spec, group, encoder) for spec, group in zip(specs, groups, strict=True)]


async def _sample(player: ModelOpponent, seats: Sequence[_Seat], sampling: SamplingParams) -> None:
    """Sample the moves of some seats of one player."""
    requests = [seat.request(sampling) for seat in seats]
    with span("sample", requests=len(requests)):
        generations = await player.sampler.generate(requests)
    if len(generations) != len(requests):
        raise EngineError(
            f"{type(player.sampler).__name__}.generate returned {len(generations)} generations for {len(requests)} requests: "
            "return one for each"
        )
    for seat, generation in zip(seats, generations, strict=True):
        seat.add(seat.cut(generation, sampling, player.tokenizer))


class _Seat(Conversation):
    """One player of one game: who moves for it, and what it has read and sampled."""

    def __init__(
        self, spec: EpisodeSpec, name: str, number: int, role: str, player: Opponent, key: tuple[int, ...]
    ) -> None:
        super().__init__(spec, name)
        self.number, self.role, self.player = number, role, player
        self.key = key
        self.first = torch.empty(0, dtype=torch.int64)
        """[P] int64; the text before its first move."""
        self.first_media: TextMedia = ()
        self.rewards: list[float | None] = []
        self.early_reward: float | None = None
        """Rewards before its first move."""
        self.action: Action | None = None
        self.last_ids = self.first
        self.cut_off = ""
        """Why it cannot move: `tokens` or `context`."""
        self.earlier: list[Prompt] = []
        self.observation: Observation | None = None

    @property
    def encoder(self) -> Tokenizer | None:
        """The tokenizer of the model that plays; None for a function."""
        return self.player.tokenizer if isinstance(self.player, ModelOpponent) else None

    def read(self, observation: Observation, shared: dict[str, EncodedText]) -> None:
        """Add what the player reads before its next move.

        Args:
            shared: Texts that other games of the group have begun with, by content, so that a sampler reads each of them once.
        """
        self.observation = observation
        if (encoder := self.encoder) is None:
            return
        if len(self.first):
            if not self.append_observation(observation, self.text, encoder, self.last_ids):
                self.cut_off = TOKENS if self.token_budget < 1 else CONTEXT
            return
        content = repr((id(encoder), observation.content, observation.tools))
        if content not in shared:
            unlimited = replace(encoder, context_length=None)  # what is too long for the model is a forfeit
            source = f"the first observation of {self.name} ({self.spec.location})"
            shared[content] = unlimited.encode(observation.content, 1, source, observation.tools or None)
        self.open(observation, shared[content])
        self.first, self.first_media = self.context_ids, self.context_media
        if encoder.context_length is not None:
            room = encoder.context_length - len(self.first)
            self.turn_budget, self.budget_reason = min((self.turn_budget, TOKENS), (room, CONTEXT))
        if self.turn_budget < 1:
            self.cut_off = self.budget_reason

    def request(self, sampling: SamplingParams) -> Request:
        return self.make_request((*self.key, len(self.rewards), self.number), sampling, continues=True)

    def add(self, generation: Generation) -> None:
        """Add a sampled move."""
        assert isinstance(self.player, ModelOpponent)
        encoder = self.player.tokenizer
        text = self.add_turn(generation, encoder, self.player.sampler)
        self.rewards.append(None)
        self.last_ids = generation.tokens
        if generation.finish_reason == "length":
            self.cut_off = self.budget_reason
        read = partial(encoder.read_turn, context_ids=self.context_ids, tools=self.tools or ())
        self.action = Action(text, bool(self.cut_off), read, bool(self.tools))

    def pay(self, reward: float) -> None:
        """Add a reward to the last move, or to the first one if there is none yet."""
        if self.rewards:
            self.rewards[-1] = (self.rewards[-1] or 0.0) + reward
        else:
            self.early_reward = (self.early_reward or 0.0) + reward

    @property
    def reward(self) -> float | None:
        given = [reward for reward in (self.early_reward, *self.rewards) if reward is not None]
        return sum(given) if given else None


class _Table:
    """One game with its players."""

    def __init__(
        self, environment: SelfPlay, spec: EpisodeSpec, sample: int, policy: ModelOpponent, calls: EnvironmentCalls
    ) -> None:
        self.spec, self.sample, self.calls, self.environment = spec, sample, calls, environment
        self.policy, self.key = policy, (*spec.key, sample)
        self.name = environment.__name__
        self.seats: list[_Seat] = []
        self.due: list[_Seat] = []
        self.metrics: Counter[str] = Counter()
        self.num_moves = 0
        self.is_over = False
        self.failure = self.stop_reason = ""
        self.game: Any = None
        self._shared: dict[str, EncodedText] = {}
        try:
            self.game = calls.create_environment(environment, spec.example, spec.seed, self.name, spec.location)
        except EnvironmentFailedError as error:
            self._fail(error)
            return
        self._seat_players()

    @property
    def waits(self) -> bool:
        return bool(getattr(self.game, "waits", True)) or any(
            seat.encoder is None and seat.player is not choose_random_move for seat in self.seats
        )

    def _seat_players(self) -> None:
        roles = getattr(self.game, "roles", ())
        if isinstance(roles, str) or not roles or not all(isinstance(role, str) and role for role in roles):
            raise EngineError(
                f"{self.name} has roles = {roles!r}: list the name of each player's role, such as ('first', 'second')"
            )
        if unknown := set(self.environment.compared_within_game) - set(roles):
            raise EngineError(
                f"SelfPlay.compared_within_game names {sorted(unknown)[0]!r}, and the roles of {self.name} are "
                f"{', '.join(dict.fromkeys(roles))}"
            )
        evaluates = self.spec.key[1] == EVALUATE
        opponent: Any = self.environment.eval_opponent if evaluates else self.environment.opponent
        opponent = choose_random_move if opponent == RANDOM else opponent
        if isinstance(opponent, str):
            raise EngineError(f"the opponent {opponent!r} has not been loaded: pass it to pg.train or pg.evaluate")
        mine = self.spec.key[3] % len(roles)  # one role in a group, so that its games can be compared
        for number, role in enumerate(roles):
            player = self.policy if opponent is None or number == mine else opponent
            self.seats.append(_Seat(self.spec, self.name, number, role, player, self.key))

    async def start(self, shared: dict[str, EncodedText]) -> None:
        """Show the first players what they read."""
        self._shared = shared
        if self.is_over:
            return
        try:
            first = await self.calls.call(self.game, self.name, "reset", self.spec.location)
            if not isinstance(first, Mapping) or not first:
                raise EngineError(
                    f"{self.name}.reset returned {type(first).__name__}: return {{player: Observation}} of the players that move "
                    "first"
                )
            await self._proceed(GameStep(first))
        except EnvironmentFailedError as error:
            await self._give_up(error)

    async def step(self) -> None:
        """Apply the moves of the players that were to move."""
        moves = dict[int, Action]()
        try:
            for seat in self.due:
                if seat.encoder is None:
                    seat.action = Action(await self._ask(seat))
                if seat.cut_off:
                    await self._forfeit(seat)
                    return
                assert seat.action is not None
                moves[seat.number] = seat.action
            self.num_moves += len(moves)
            result = await self._call("step", moves)
            if not isinstance(result, GameStep):
                raise EngineError(f"{self.name}.step returned {type(result).__name__}: return a GameStep (pg.GameStep)")
            await self._proceed(result)
        except EnvironmentFailedError as error:
            await self._give_up(error)

    async def _proceed(self, step: GameStep) -> None:
        """Record a step; show the next players what they read, or end the game."""
        players = range(len(self.seats))
        if unknown := [number for number in (*step.observations, *step.rewards) if number not in players]:
            raise EngineError(f"{self.name} has the players 0 to {len(players) - 1}, and names player {unknown[0]!r}")
        self.metrics.update(step.metrics)
        for number, reward in step.rewards.items():
            self.seats[number].pay(float(reward))
        self.due = [self.seats[number] for number in step.observations]
        for seat in self.due:
            seat.read(step.observations[seat.number], self._shared)
        if not self.due:
            self.stop_reason = step.stop_reason
            await self._end()
        elif blocked := [seat for seat in self.due if seat.cut_off]:
            await self._forfeit(blocked[0])

    async def _ask(self, seat: _Seat) -> str:
        """Return the move of an opponent that is a function."""
        assert seat.observation is not None
        legal = self.game.legal_moves(seat.number) if isinstance(self.game, HasLegalMoves) else ()
        seed = Random(f"{self.key}/{self.num_moves}/{seat.number}").getrandbits(63)
        turn = Turn(seat.number, seat.role, seat.observation.content, tuple(seat.earlier), tuple(map(str, legal)), seed)
        player = SimpleNamespace(move=partial(choose_move, seat.player))
        move: str = await self.calls.call(player, "opponent", "move", self.spec.location, turn)
        seat.earlier += [seat.observation.content, move]
        return move

    async def _forfeit(self, seat: _Seat) -> None:
        """End the game of a player that cannot complete a move."""
        share = -self.environment.forfeit_reward / max(1, len(self.seats) - 1)
        rewards: Mapping[int, float] = {
            each.number: self.environment.forfeit_reward if each is seat else share for each in self.seats
        }
        if isinstance(self.game, SupportsForfeit):
            rewards = self.game.forfeit(seat.number)
        self.stop_reason = seat.cut_off
        for each in self.seats:
            each.pay(float(rewards.get(each.number, 0.0)))
        await self._end()

    async def _end(self) -> None:
        self.is_over = True
        await self._close()

    async def _give_up(self, error: EnvironmentFailedError) -> None:
        self._fail(error)
        with suppress(EnvironmentFailedError):
            await self._close()

    def _fail(self, error: EnvironmentFailedError) -> None:
        self.failure, self.stop_reason, self.is_over = str(error), FAILED, True

    async def _call(self, method: str, *args: Any) -> Any:
        where = f"{self.spec.location}, move {self.num_moves}"
        return await self.calls.call(self.game, self.name, method, where, *args)

    async def _close(self) -> None:
        close = self._take_close()
        if close is not None:
            await self.calls.call(
                SimpleNamespace(close=partial(call_close, close)), self.name, "close", self.spec.location
            )

    async def abandon(self) -> None:
        """Close the game, if that was not done."""
        close = self._take_close()
        if close is not None:
            await await_with_timeout(CLOSE_TIMEOUT, call_close(close))

    def _take_close(self) -> Any:
        close, self.game = getattr(self.game, "close", None), SimpleNamespace(waits=self.waits)
        return close

    @property
    def trained(self) -> list[_Seat]:
        """The seats of the policy; of a game that was never created, none."""
        return [seat for seat in self.seats if seat.player is self.policy]

    def trajectory(self, seat: _Seat | None, prompt_length: int, encoder: Tokenizer) -> Trajectory:
        """Return a player's row, after the first tokens of its group's prompt. None = a game that could not be created."""
        unsampled = (Segment(torch.zeros(1, dtype=torch.int64)),)
        if seat is None:
            return Trajectory(unsampled, "", False, stop_reason=FAILED, failure=self.failure)
        segments: tuple[Segment, ...] = tuple(seat.segments)
        while segments and not segments[-1].is_sampled:  # read, but not answered
            segments = segments[:-1]
        text = ""
        if segments:
            if len(seat.first) > prompt_length:
                media = select_media(seat.first_media, prompt_length, len(seat.first))
                start = Segment(seat.first[prompt_length:], prefix_length=None if prompt_length else 0, media=media)
                segments = (start, *segments)
            text = encoder.decode(torch.cat([segment.visible_tokens for segment in segments]))
        turns = list(seat.rewards)
        if turns and seat.early_reward is not None:
            turns[0] = (turns[0] or 0.0) + seat.early_reward
        within = seat.role in self.environment.compared_within_game
        return Trajectory(
            segments or unsampled,
            text,
            bool(seat.cut_off),
            tuple(turns),
            None if self.failure else seat.reward,
            metrics=self._measure(seat),
            turn_states=tuple(seat.turn_states),
            stop_reason=self.stop_reason,
            failure=self.failure,
            role=seat.role,
            peers=f"{seat.role}/{self.sample}" if within else seat.role,
        )

    def _measure(self, seat: _Seat) -> dict[str, float]:
        """Return the game's metrics, and how it ended for a player."""
        metrics = dict(self.metrics) | {"moves": float(self.num_moves)}
        rewards = [each.reward for each in self.seats]
        if self.failure or len(rewards) < 2 or any(reward is None for reward in rewards):
            return metrics
        opponents = [reward for each, reward in zip(self.seats, rewards, strict=True) if each is not seat]
        best = max(reward for reward in opponents if reward is not None)
        assert seat.reward is not None
        return metrics | {
            f"won/{seat.role}": float(seat.reward > best),
            "drawn": float(len(set(rewards)) == 1),
        }


def _make_group(spec: EpisodeSpec, tables: Sequence[_Table], encoder: Tokenizer) -> EpisodeGroup:
    """Return the games as a group: its prompt is what all of its players' texts begin with."""
    seats = [(table, seat) for table in tables for seat in table.trained or (None,)]
    texts = [(seat.first, seat.first_media) for _, seat in seats if seat is not None and len(seat.first)]
    if not texts:  # no player has read anything
        prompt, length, media = encoder.encode_unanswered(spec.example.prompt, spec.location).ids, 0, TextMedia()
    else:
        length = common_length([ids for ids, _ in texts])
        for _, shown in texts:
            length = min(length, before_picture(length, shown))
        prompt, media = texts[0][0][: max(length, 1)], select_media(texts[0][1], 0, length)
    rows = tuple(table.trajectory(seat, length, encoder) for table, seat in seats)
    return EpisodeGroup(spec, prompt, rows, media=media)
