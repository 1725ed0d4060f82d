"""Programs that are trained as agents: what they receive, what they cost when they fail, and that nothing of them is left."""

from __future__ import annotations

import asyncio
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import policygrad as pg
from doubles import plain_agents
from policygrad.environments import agent_episodes
from policygrad.environments.agent_episodes import run_agent_episodes
from policygrad.environments.agent_program import AgentProgram, write_prompt
from policygrad.environments.registry import code_references, resolve_environment
from policygrad.models.chat.rendering import render_ids
from policygrad.models.tokenizer import Tokenizer, load_tokenizer
from policygrad.rewards.base import RewardScores
from policygrad.rollout.scoring import score_groups
from policygrad.rollout.trajectory import TRAIN, EpisodeGroup, EpisodeSpec
from policygrad.samplers.base import Generation, Request
from policygrad.training.config.trust import NO_PERMISSIONS, CodePermissions, check_permissions

FILE = Path(plain_agents.__file__)
CLIENTS = FILE.with_name("agents.py")  # not imported here: a client takes a second
EXAMPLE = pg.Example([{"role": "user", "content": "Solve for q: 7*q + 4 = 39"}], {"answer": "5"})


@cache
def loaded() -> tuple[Any, Tokenizer]:
    from policygrad.models.loading import load_model

    model = load_model("tiny")
    return model, load_tokenizer("tiny", model)


class Noting(pg.LocalSampler):
    """A local sampler that notes its requests, and what it sampled for them."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.calls: list[tuple[tuple[Request, Generation], ...]] = []

    async def generate(self, requests: Sequence[Request]) -> list[Generation]:
        generations = await super().generate(requests)
        self.calls.append(tuple(zip(requests, generations, strict=True)))
        return generations


def play(
    name: str = "", *, file: Path = FILE, samples: int = 2, max_tokens: int = 64, **options: Any
) -> tuple[EpisodeGroup, Noting]:
    """The episodes of a function in a file, or of a command, and the sampler that answered it."""
    model, encoder = loaded()
    sampler = Noting.from_tokenizer(model, encoder)
    assert isinstance(sampler, Noting)
    program = AgentProgram(function=f"{file}:{name}" if name else "", **options)
    spec = EpisodeSpec(EXAMPLE, (0, TRAIN, 1, 0), max_tokens)
    sampling = pg.SamplingParams(max_tokens=max_tokens)
    try:
        work = run_agent_episodes([spec], samples, sampling, sampler=sampler, encoder=encoder, program=program)
        (group,) = asyncio.run(work)
    finally:
        program.close()
    return group, sampler


def test_what_was_sampled_is_what_the_template_made_of_the_messages_and_is_recorded_token_by_token() -> None:
    group, sampler = play("two_turns", file=CLIENTS, samples=2)
    encoder = loaded()[1]
    noted = {tuple(r.key): (r.prompt_ids, g) for call in sampler.calls for r, g in call}
    for sample, trajectory in enumerate(group.trajectories):
        first, second = (noted[(*group.spec.key, sample)], noted[(*group.spec.key, sample, 1)])
        reply = encoder.decode(first[1].tokens)
        messages = [
            {"role": "user", "content": "Solve for q: 7*q + 4 = 39"},
            {"role": "assistant", "content": reply},
            {"role": "user", "content": "Are you sure?"},
        ]
        assert first[0].tolist() == render_ids(encoder, messages[:1], generation_prompt=True)
        written = encoder.hf.decode(render_ids(encoder, messages, generation_prompt=True))
        assert encoder.hf.decode(second[0]) == written
        sampled = [s for s in trajectory.segments if s.is_sampled]
        for segment, (_, generation) in zip(sampled, (first, second), strict=True):
            assert torch.equal(segment.tokens, generation.tokens)
            assert torch.equal(segment.logp, generation.logp)
        assert trajectory.num_branches == 1
        assert trajectory.stop_reason == "finished"
        assert trajectory.metrics == {"calls": 2.0}


def test_programs_that_wait_are_sampled_for_together() -> None:
    """So that equal prompts are read once, and a run is the same again whoever asks first."""
    group, sampler = play("two_turns", samples=3, batch_seconds=600)
    assert [len(call) for call in sampler.calls] == [3, 3]
    assert len({id(r.prompt_ids) for r, _ in sampler.calls[0]}) == 1
    again, _ = play("two_turns", samples=3, batch_seconds=600)
    for one, two in zip(group.trajectories, again.trajectories, strict=True):
        assert torch.equal(one.tokens, two.tokens)
        assert torch.equal(one.logp, two.logp)


@pytest.mark.full
def test_a_sub_agent_of_another_client_is_a_branch() -> None:
    (trajectory,) = play("with_helper", file=CLIENTS, samples=1)[0].trajectories
    assert trajectory.reward == 1.0
    assert trajectory.metrics == {"calls": 3.0, "helped": 1.0}
    assert trajectory.num_branches == 2
    texts = [loaded()[1].decode(s.tokens) for s in trajectory.segments if s.is_sampled]
    assert trajectory.text == texts[1]  # the main conversation's end is its second text


@pytest.mark.full
def test_a_coroutine_and_an_answer_for_reward_functions() -> None:
    group, sampler = play("in_a_coroutine", file=CLIENTS, samples=1)
    (trajectory,) = group.trajectories
    assert trajectory.reward is None
    assert trajectory.text == loaded()[1].decode(sampler.calls[0][0][1].tokens)


@pytest.mark.parametrize(
    ("name", "metric", "reason", "options"),
    [
        ("crash", "program_crashed", "ended with exit code 1: .*the agent is broken", {}),
        ("flood", "program_output", "printed more than 100000 bytes", {"max_output": 100_000}),
        ("wrong_result", "program_result", "its reward is 'much'", {}),
        ("call_for_ever", "program_crashed", "exit code 1", {"max_calls": 3}),
    ],
)
def test_a_program_that_fails_costs_its_episode_and_is_counted(
    name: str, metric: str, reason: str, options: Mapping[str, Any]
) -> None:
    if name == "call_for_ever":  # its error is that of its own limit, and ends the episode without a reward
        group, _ = play(name, samples=1, **options)
        assert group.trajectories[0].metrics["calls"] == 3.0
        assert group.trajectories[0].stop_reason == "calls"
        return
    group, _ = play(name, samples=2, **options)
    for trajectory in group.trajectories:
        assert trajectory.reward is None
        assert trajectory.stop_reason == "failed"
        assert trajectory.metrics[metric] == 1.0
        assert re.search(reason, trajectory.failure)
    punished, _ = play(name, samples=1, failure_reward=-1.0, **options)
    assert punished.trajectories[0].reward == -1.0
    assert punished.trajectories[0].failure == ""


def test_a_program_that_hangs_is_killed_and_its_wait_for_completions_does_not_count() -> None:
    model, encoder = loaded()
    now = [0.0]

    class Slow(pg.LocalSampler):
        async def generate(self, requests: Sequence[Request]) -> list[Generation]:
            now[0] += 1000  # sampling takes longer than a program may
            return await super().generate(requests)

    def clock() -> float:
        now[0] += 0.1 if now[0] >= 1000 else 0.0  # nothing that comes before the first completion counts
        return now[0]

    program = AgentProgram(function=f"{FILE}:hang")
    spec = EpisodeSpec(EXAMPLE, (0, TRAIN, 1, 0), 8)
    sampler = Slow.from_tokenizer(model, encoder)
    sampling = pg.SamplingParams(max_tokens=8)
    work = run_agent_episodes(
        [spec], 1, sampling, sampler=sampler, encoder=encoder, program=program, timeout=60, clock=clock
    )
    (group,) = asyncio.run(work)
    program.close()
    (trajectory,) = group.trajectories
    assert "exceeded 60 s of its own (--environment.timeout)" in trajectory.failure
    assert trajectory.metrics == {"calls": 1.0, "program_slow": 1.0}


def test_a_program_is_given_the_columns_that_it_may_see() -> None:
    assert play("tell_columns", samples=1)[0].trajectories[0].text == "answer prompt"
    assert play("tell_columns", samples=1, columns=())[0].trajectories[0].text == "prompt"


def test_a_program_finds_its_prompt_as_text() -> None:
    assert play("repeat_prompt", samples=1)[0].trajectories[0].text == EXAMPLE.prompt[0]["content"]  # type: ignore[index]
    assert (
        write_prompt(({"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}))
        == "Be brief.\n\nHi"
    )


def test_tokens_of_all_turns_are_limited_together() -> None:
    group, sampler = play("call_until_refused", samples=1, max_tokens=10, max_calls=100)
    (trajectory,) = group.trajectories
    assert trajectory.num_sampled_tokens == sum(len(g.tokens) for call in sampler.calls for _, g in call) <= 10
    assert trajectory.text.startswith("403 ")
    assert "sampled all of its 10 tokens" in trajectory.text
    assert (trajectory.stop_reason, trajectory.truncated) == ("tokens", True)


def test_a_rollout_in_which_no_program_asks_is_an_error() -> None:
    with pytest.raises(pg.EngineError, match=r"no episode of .*say_nothing requested a completion.*policygrad proxy"):
        play("say_nothing")


def test_a_command_works_in_a_copy_of_a_folder_and_a_command_scores_it(tmp_path: Path) -> None:
    template = tmp_path / "repository"
    template.mkdir()
    (template / "README").write_text("here")
    command = [sys.executable, str(FILE), "silent"]
    right = play(command=command, folder=str(template), reward_command="test -s answer.txt -a -f README", samples=1)[0]
    wrong = play(command=command, folder=str(template), reward_command="test -f missing", samples=1)[0]
    assert [g.trajectories[0].reward for g in (right, wrong)] == [1.0, 0.0]
    assert sorted(path.name for path in template.iterdir()) == ["README"]


def write_reward(written: str, *, by: str = "reward_command", **options: Any) -> Any:
    """The trajectory of an episode whose file out/reward is written by a shell command, of the reward command or the program."""
    if by == "reward_command":
        options |= {"command": [sys.executable, str(FILE), "silent"], "reward_command": ["sh", "-c", written]}
    else:
        options |= {"command": ["sh", "-c", f"{sys.executable} {FILE} silent && {written}"]}
    return play(samples=1, reward_file="out/reward", **options)[0].trajectories[0]


@pytest.mark.parametrize("by", ["reward_command", "program"])
def test_a_reward_file_gives_a_number_or_more(by: str) -> None:
    number = write_reward("mkdir -p out && echo ' 0.25 ' > out/reward", by=by)
    assert (number.reward, number.failure, number.feedback) == (0.25, "", "")
    text = '{"reward": 2, "feedback": "3 tests fail", "passed": 4, "note": "left out"}'
    more = write_reward(f"mkdir -p out && echo '{text}' > out/reward", by=by)
    assert (more.reward, more.feedback) == (2.0, "3 tests fail")
    assert more.metrics == {"calls": 1.0, "reward_passed": 4.0}


def test_the_exit_code_of_a_command_that_writes_a_reward_counts_for_nothing() -> None:
    assert write_reward("mkdir -p out && echo 1 > out/reward; exit 7").reward == 1.0


@pytest.mark.parametrize(
    ("written", "reason"),
    [
        ("true", "has no reward file"),
        ("mkdir out; echo much > out/reward", "has 'much', which is no finite number"),
        ("mkdir out; echo inf > out/reward", "has 'inf', which is no finite number"),
        ("mkdir out; head -c 70000 /dev/zero > out/reward", "larger than 65,536 bytes"),
        ("mkdir out; ln -s /etc/hostname out/reward", "cannot be read"),
        ("mkdir out; mkfifo out/reward", "is not a regular file"),
        ("rmdir out; mkdir real; echo 1 > real/reward; ln -s real out", "cannot be read"),
        ("mkdir out; echo '[1]' > out/reward", "no finite number"),
        ("mkdir out; echo '{\"reward\": null}' > out/reward", "no finite number"),
        ('mkdir out; echo \'{"reward": 1, "feedback": 5}\' > out/reward', "a feedback that is no text"),
    ],
)
def test_a_reward_file_that_is_none_costs_its_episode(written: str, reason: str) -> None:
    trajectory = write_reward(written)
    assert trajectory.reward is None
    assert reason in trajectory.failure
    assert trajectory.metrics["program_result"] == 1.0


def test_what_a_program_writes_is_not_the_reward_of_a_reward_command() -> None:
    planted = f"{sys.executable} {FILE} silent && mkdir out && echo 1 > out/reward"
    group, _ = play(command=["sh", "-c", planted], reward_command="true", reward_file="out/reward", samples=1)
    assert group.trajectories[0].reward is None
    assert "has no reward file" in group.trajectories[0].failure


def test_feedback_of_a_reward_file_stays_beside_that_of_reward_functions() -> None:
    text = '{"reward": 1, "feedback": "one test fails"}'
    trajectory = write_reward(f"echo '{text}' > out/reward")
    group = EpisodeGroup(EpisodeSpec(EXAMPLE, (0, TRAIN, 1, 0), 64), torch.tensor([1]), (trajectory,))

    def score(prompts: Any, completions: Sequence[str], columns: Any) -> RewardScores:
        return RewardScores([0.5], {}, feedback=["too long"])

    for function, expected in ((score, "one test fails\ntoo long"), (None, "one test fails")):
        ((scored,), _) = score_groups([group], function)
        assert scored.trajectories[0].feedback == expected


@pytest.mark.skipif(shutil.which("bwrap") is None, reason="needs bubblewrap")
def test_a_sandboxed_command_sees_its_folder_alone(tmp_path: Path) -> None:
    probe = tmp_path / "outside"
    script = tmp_path / "agent.sh"
    script.write_text(
        f"#!/bin/sh\n{sys.executable} {FILE} || exit 1\n"
        f"echo x > {probe} 2>/dev/null && exit 3\n[ -e {Path.home()}/.bashrc ] && exit 4\nexit 0\n"
    )
    script.chmod(0o755)
    group, _ = play(command=[str(script), str(FILE)], sandbox=True, samples=1)
    (trajectory,) = group.trajectories
    assert trajectory.failure == ""
    assert trajectory.reward == 0.5
    assert not probe.exists()


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({}, "needs either command or function"),
        ({"command": "true", "function": "a.py:b"}, "needs either command or function"),
        ({"command": "no-such-program-1"}, "'no-such-program-1', which is no program"),
        ({"command": "true", "max_calls": 0}, "max_calls must be at least 1"),
        ({"command": "true", "max_seconds": 0}, "max_seconds must be above 0"),
        ({"command": "true", "folder": "/nowhere/at/all"}, "no folder"),
        ({"function": "a.py:b", "sandbox": True}, "shares a process"),
        ({"command": "true", "reward_file": "../reward"}, "reward_file is '../reward', which is no name below"),
        ({"command": "true", "reward_file": "/tmp/reward"}, "which is no name below"),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(pg.ConfigError, match=reason):
        AgentProgram(**options)


def test_a_function_that_cannot_be_imported_is_named(tmp_path: Path) -> None:
    file = tmp_path / "broken.py"
    file.write_text("import no_such_package_1\n")
    with pytest.raises(pg.EngineError, match="no_such_package_1"):
        _ = AgentProgram(function=f"{file}:main").host


def test_names_of_the_command_line_and_the_code_that_they_bring_in(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.sh").write_text("#!/bin/sh\n")
    (tmp_path / "run.sh").chmod(0o755)
    program = resolve_environment("program:./run.sh --fast")
    assert isinstance(program, AgentProgram)
    assert program.command == "./run.sh --fast"
    assert code_references("program:./run.sh --fast") == ["program:./run.sh --fast"]
    function = resolve_environment("agent:mine.py:main")
    assert isinstance(function, AgentProgram)
    assert function.function == "mine.py:main"
    assert code_references("agent:mine.py:main") == ["mine.py"]


class Broken(pg.LocalSampler):
    """A server that answers calls at once, and then with an error."""

    serves_concurrently = True

    async def generate(self, requests: Sequence[Request]) -> list[Generation]:
        raise pg.EngineError("the server is gone")


def test_an_error_of_the_sampler_ends_the_rollout_even_where_calls_are_concurrent() -> None:
    model, encoder = loaded()
    program = AgentProgram(function=f"{FILE}:one_answer")
    spec, sampling = EpisodeSpec(EXAMPLE, (0, TRAIN, 1, 0), 8), pg.SamplingParams(max_tokens=8)
    sampler = Broken.from_tokenizer(model, encoder)
    with pytest.raises(pg.EngineError, match="the server is gone"):
        asyncio.run(run_agent_episodes([spec], 2, sampling, sampler=sampler, encoder=encoder, program=program))
    program.close()


def test_no_request_to_a_server_waits_for_another_s_completion(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two that came in one look: the first is answered after the second."""
    model, encoder = loaded()
    answered = asyncio.Event()
    answer = agent_episodes._Call.answer

    def notice(call: Any, generations: Sequence[Generation]) -> None:
        answer(call, generations)
        answered.set()

    class Slow(pg.LocalSampler):
        serves_concurrently = True

        async def generate(self, requests: Sequence[Request]) -> list[Generation]:
            generations = await super().generate(requests)
            if any(request.key[4] == 0 for request in requests):  # of the first episode
                await answered.wait()
            return generations

    monkeypatch.setattr(agent_episodes._Call, "answer", notice)
    seen = list[int]()

    def is_time(rollout: Any, running: Sequence[Any], now: float) -> bool:
        seen.append(len(rollout.waiting))
        return len(rollout.waiting) == 2

    monkeypatch.setattr(agent_episodes._Rollout, "_is_time", is_time)
    program = AgentProgram(function=f"{FILE}:one_answer")
    spec, sampling = EpisodeSpec(EXAMPLE, (0, TRAIN, 1, 0), 8), pg.SamplingParams(max_tokens=8)
    sampler = Slow.from_tokenizer(model, encoder)
    work = run_agent_episodes([spec], 2, sampling, sampler=sampler, encoder=encoder, program=program)
    (group,) = asyncio.run(asyncio.wait_for(work, 60))
    program.close()
    assert seen[-1] == 2
    assert not any(trajectory.failure for trajectory in group.trajectories)


def test_a_file_cannot_bring_in_a_program_by_itself(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("program:sh -c id", "program:./run.sh"):
        data, file = {"environment": name}, tmp_path / "runs" / "run.toml"
        with pytest.raises(pg.ConfigError, match=r"--allow-code '?program:"):
            check_permissions(data, file, NO_PERMISSIONS)
        check_permissions(data, file, CodePermissions((name,)))
    (tmp_path / "mine.py").write_text("def main(example): ...\n")
    check_permissions({"environment": "agent:mine.py:main"}, tmp_path / "runs" / "run.toml", NO_PERMISSIONS)
    elsewhere = tmp_path.parent / f"{tmp_path.name}-elsewhere.py"
    elsewhere.write_text("def main(example): ...\n")
    with pytest.raises(pg.ConfigError, match="--allow-code"):
        check_permissions({"environment": f"agent:{elsewhere}:main"}, tmp_path / "runs" / "run.toml", NO_PERMISSIONS)
