"""Classic control: batches from vector environments, advantages, Fisher products and steps; and that they learn."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import gymnasium
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

import measure_control
import policygrad as pg
from policygrad import cli
from policygrad.lab.control.environments import GymEnvironments, Spaces, Transition
from policygrad.lab.control.learner import ControlLearner
from policygrad.lab.control.policies import Categorical, ControlPolicy, Distribution, Gaussian, Normaliser
from policygrad.lab.control.presets import PRESETS, Settings, preset, with_gamma
from policygrad.lab.control.problem import ControlProblem
from policygrad.lab.control.rollout import Collector, Experience, seeds
from policygrad.lab.control.train import Trained, evaluate, train

DISCRETE, CONTINUOUS = Spaces(1, 2, True), Spaces(3, 2, False)
RUNNING, TERMINATED, TRUNCATED = range(3)


class Scripted:
    """Environments whose episodes end by script [S][N]. A state is 100·environment + steps ever taken there, a half more
    for one that nobody acts in; a reward is the state's tenth."""

    spaces = DISCRETE

    def __init__(self, script: Sequence[Sequence[int]]) -> None:
        self.script, self.number, self.t, self.resets = torch.tensor(script), len(script[0]), 0, 0

    def state(self) -> Tensor:
        return (100.0 * torch.arange(self.number) + self.t)[:, None]

    def reset(self, seeds: Sequence[int] | None = None) -> Tensor:
        self.resets += 1
        return self.state()

    def step(self, action: Tensor) -> Transition:
        reward = self.state().squeeze(1) / 10
        ends = self.script[self.t % len(self.script)]
        self.t += 1
        over = ends != RUNNING
        final = self.state() + 0.5 * over[:, None]
        return Transition(self.state(), reward, ends == TERMINATED, ends == TRUNCATED, final)


SCRIPT = [[0, 0], [1, 0], [0, 0], [0, 1], [2, 0], [0, 0]]
"""Environment 0 terminates after 2 steps and is cut off after 3 more; environment 1 terminates after 4."""


def zeros(observation: Tensor) -> Tensor:
    return torch.zeros(len(observation), dtype=torch.int64)


def test_a_rollout_as_rows() -> None:
    collect = Collector(Scripted(SCRIPT), seed=0)
    found = collect(zeros, 6)
    batch = found.batch
    assert batch.lengths.tolist() == [2, 3, 1, 4, 2]
    assert batch.truncated is not None
    assert batch.truncated.tolist() == [False, True, True, False, True]
    assert batch.group.tolist() == [0, 1, 2, 3, 4]
    states = [row[mask].squeeze(1).tolist() for row, mask in zip(found.observation, batch.mask, strict=True)]
    assert states == [[0, 1], [2, 3, 4], [5], [100, 101, 102, 103], [104, 105]]
    assert found.after.squeeze(1).tolist() == [2.5, 5.5, 6, 104.5, 106]
    assert batch.token_reward is not None
    assert torch.allclose(batch.token_reward, found.observation.squeeze(2) / 10)
    assert batch.reward.tolist() == [0] * 5
    assert found.steps == 12
    assert found.finished == pytest.approx((0.1, 40.6, 0.9))  # in the order in which they ended
    again = collect(zeros, 2)  # the episodes go on, and their returns count from their first step
    assert again.observation[0, 0] == 6
    assert again.finished == pytest.approx((0.5 + 0.6 + 0.7,))


def test_whole_episodes_start_afresh_and_end() -> None:
    environments = Scripted(SCRIPT)
    found = Collector(environments, seed=0)(zeros, 3, whole=True)
    assert found.batch.lengths.tolist() == [2, 3, 4]
    assert found.batch.truncated is not None
    assert found.batch.truncated.tolist() == [False, True, False]
    assert found.steps == 10  # environment 1 waited a step for the other, which counts
    assert found.finished == pytest.approx((0.1, 40.6, 0.9))
    collect = Collector(environments, seed=0)
    before = environments.resets
    collect(zeros, 3, whole=True)
    collect(zeros, 3, whole=True)
    assert environments.resets == before + 1


class Quadratic(nn.Module):
    def forward(self, states: Tensor) -> Tensor:
        return (states.squeeze(1) / 50) ** 2 + 1


def literal_gae(script: Sequence[Sequence[int]], steps: int, gamma: float, lam: float) -> list[list[float]]:
    """[N][S] straight from the environments' steps: value of the final state at a time limit and at the rollout's end, 0 where
    an episode terminates; no advantage flows over an end."""

    def v(state: float) -> float:
        return (state / 50) ** 2 + 1

    rows = []
    for i in range(len(script[0])):
        advantages, last = [0.0] * steps, 0.0
        for t in reversed(range(steps)):
            state, end = 100 * i + t, script[t][i]
            following = {RUNNING: v(state + 1), TERMINATED: 0.0, TRUNCATED: v(state + 1.5)}[end]
            delta = state / 10 + gamma * following - v(state)
            last = delta + (gamma * lam * last if end == RUNNING else 0)
            advantages[t] = last
        rows.append(advantages)
    return rows


def test_gae_over_boundary_time_limit_and_cut_is_a_literal_loop() -> None:
    algorithm = replace(preset("trpo").algorithm, critic=pg.Critic(lr=1e-3, lam=0.8, gamma=0.9, clip=0.0))
    algorithm = replace(algorithm, psi=(pg.GAE(0.9, 0.8),))
    learner = ControlLearner(DISCRETE, algorithm, Settings(lr=None), seed=0)
    learner.critic = replace(learner.critic, network=Quadratic())  # type: ignore[type-var]
    found = Collector(Scripted(SCRIPT), seed=0)(zeros, 6)
    batch = learner.evaluate(found, algorithm.needs)
    psi, batch = algorithm.advantages(batch), algorithm.with_targets(batch)
    literal = literal_gae(SCRIPT, 6, 0.9, 0.8)
    expected = torch.tensor(literal[0] + literal[1])
    assert torch.allclose(psi[batch.mask], expected, rtol=1e-5)
    assert batch.returns is not None
    assert batch.values is not None
    assert torch.allclose((batch.returns - batch.values)[batch.mask], expected, rtol=1e-5)
    assert expected.abs().min() > 0.01


def distributions(
    seed: int = 0,
) -> list[tuple[Distribution, Distribution, torch.distributions.Distribution, list[Tensor]]]:
    """(one, another, the first as torch has it, the leaves it depends on) of each kind."""
    g = torch.Generator().manual_seed(seed)
    logits, mean, log_std = (torch.randn(5, 3, generator=g, dtype=torch.float64).requires_grad_() for _ in range(3))
    other = torch.randn(5, 3, generator=g, dtype=torch.float64)
    normal = torch.distributions.Independent(torch.distributions.Normal(mean, log_std.exp()), 1)
    return [
        (Categorical(logits), Categorical(other), torch.distributions.Categorical(logits=logits), [logits]),
        (Gaussian(mean, log_std), Gaussian(other, other / 2), normal, [mean, log_std]),
    ]


@pytest.mark.parametrize("kind", [0, 1])
def test_distributions_are_torchs(kind: int) -> None:
    ours, other, theirs, leaves = distributions()[kind]
    action = theirs.sample()
    pairs = [(ours.logp(action), theirs.log_prob(action)), (ours.entropy(), theirs.entropy())]
    theirs_other = {
        0: lambda d: torch.distributions.Categorical(logits=d.logits),
        1: lambda d: torch.distributions.Independent(torch.distributions.Normal(d.mean, d.log_std.exp()), 1),
    }[kind](other)
    pairs.append((ours.kl(other), torch.distributions.kl_divergence(theirs, theirs_other)))
    for mine, reference in pairs:
        assert mine.shape == (5,)
        assert torch.allclose(mine, reference, atol=1e-12)
        for a, b in zip(
            torch.autograd.grad(mine.sum(), leaves, retain_graph=True, allow_unused=True),
            torch.autograd.grad(reference.sum(), leaves, retain_graph=True, allow_unused=True),
            strict=True,
        ):
            assert torch.allclose(torch.zeros(()) if a is None else a, torch.zeros(()) if b is None else b, atol=1e-12)
    draws = torch.stack([ours.sample(torch.Generator().manual_seed(i)).double() for i in range(4000)]).detach()
    many = torch.stack([theirs.sample() for _ in range(4000)]).double()
    assert (draws.mean(0) - many.mean(0)).abs().max() < 6 * float(many.std(0).max()) * math.sqrt(2 / 4000)


def problem(spaces: Spaces, algorithm: pg.Algorithm, seed: int = 0) -> ControlProblem:
    """A made-up rollout of two rows of 4 and 2 steps, in float64; the policy has moved away from π_old where ratios matter."""
    learner = ControlLearner(spaces, algorithm, Settings(lr=1e-3, hidden=(4,)), seed)
    policy = learner.policy.network.double()
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in policy.parameters():
            p.add_(0.5 * torch.randn(p.shape, generator=g, dtype=p.dtype))
    mask = torch.tensor([[True, True, True, True], [True, True, False, False]])
    states = torch.randn(6, spaces.features, generator=g, dtype=torch.float64)
    action = policy(states).sample(g)
    shift = 0.4 * torch.randn(6, generator=g, dtype=torch.float64)
    logp = policy(states).logp(action).detach() + shift
    full = torch.zeros(2, 4, dtype=torch.float64)
    batch = pg.Batch(mask=mask, group=torch.arange(2), reward=torch.zeros(2), logp_old=full.masked_scatter(mask, logp))
    psi = full.masked_scatter(mask, torch.randn(6, generator=g, dtype=torch.float64))
    old = policy(states).at(torch.arange(6))
    return ControlProblem(learner.policy, learner.critic, 1_000_003 * seed, batch, psi, states, action, old, algorithm)


def parameters(p: ControlProblem) -> Tensor:
    return torch.cat([x.detach().flatten() for x in p.policy.network.parameters()])


def outputs(p: ControlProblem, theta: Tensor) -> Tensor:
    """[n, K] logits, or means and log standard deviations, as a function of θ."""
    shares = theta.split([x.numel() for x in p.policy.network.parameters()])
    named = {n: s.view_as(x) for (n, x), s in zip(p.policy.network.named_parameters(), shares, strict=True)}
    found = functional_call(p.policy.network, named, (p.states,))
    return found.logits if isinstance(found, Categorical) else torch.cat([found.mean, found.log_std], 1)


@pytest.mark.parametrize("spaces", [DISCRETE, CONTINUOUS], ids=["discrete", "continuous"])
def test_fisher_products_are_those_of_the_explicit_matrix(spaces: Spaces) -> None:
    p = problem(spaces, preset("trpo").algorithm)
    theta = parameters(p)
    jacobian = torch.autograd.functional.jacobian(lambda x: outputs(p, x), theta)  # [n, K, P]
    found = p.policy.network(p.states)
    if isinstance(found, Categorical):
        probability = found.logits.softmax(-1)
        middle = torch.diag_embed(probability) - probability[:, :, None] * probability[:, None, :]
    else:  # of a Gaussian: 1/σ² for a mean, 2 for a log σ
        middle = torch.diag_embed(torch.cat([(-2 * found.log_std).exp(), torch.full_like(found.mean, 2)], 1))
    explicit = torch.einsum("nkp,nkl,nlq->pq", jacobian, middle, jacobian) / 6
    logp = torch.autograd.functional.jacobian(lambda x: scored(p, x), theta)  # [n, P]
    sampled = logp.T @ logp / 6
    for v in torch.eye(len(theta), dtype=torch.float64)[::3]:
        assert torch.allclose(p.fisher(v, False), explicit @ v, atol=1e-10)
        assert torch.allclose(p.fisher(v, True), sampled @ v, atol=1e-10)
    assert explicit.abs().max() > 1e-2


def scored(p: ControlProblem, theta: Tensor) -> Tensor:
    out = outputs(p, theta)
    k = p.policy.network.body[-1].out_features  # type: ignore[union-attr]
    found = Categorical(out) if p.policy.network.log_std is None else Gaussian(out[:, :k], out[:, k:])
    return found.logp(p.action)


@pytest.mark.parametrize("spaces", [DISCRETE, CONTINUOUS], ids=["discrete", "continuous"])
def test_the_gradient_is_that_of_the_literal_clipped_loss(spaces: Spaces) -> None:
    p = problem(spaces, replace(preset("ppo").algorithm, psi=(pg.GAE(),)))
    parts = p.split(0, 3)
    assert [len(part.states) for part in parts] == [2, 2, 2]
    assert sum(part.batch.mask.int() for part in parts).equal(p.batch.mask.int())  # type: ignore[union-attr]
    assert not all(part.states.equal(p.states[2 * i : 2 * i + 2]) for i, part in enumerate(parts))
    for part in [p, *parts]:
        part.accumulate()
        found = torch.cat([x.grad.flatten() for x in part.policy.network.parameters() if x.grad is not None])
        part.policy.adam.zero_grad(set_to_none=True)
        theta = parameters(part).requires_grad_()
        ratio = (scored(part, theta) - part.batch.logp_old[part.batch.mask]).exp()  # type: ignore[index]
        psi = part.psi[part.batch.mask]
        loss = -torch.minimum(ratio * psi, ratio.clamp(0.8, 1.2) * psi).mean()
        (expected,) = torch.autograd.grad(loss, theta)
        assert torch.allclose(found, expected, atol=1e-7)  # coefficients are in the reward's float32
        assert expected.abs().max() > 1e-3


def test_a_trust_region_looks_where_it_goes() -> None:
    p = problem(CONTINUOUS, preset("trpo").algorithm)
    before = parameters(p)
    delta = 0.1 * torch.randn(len(before), generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    value, kl = p.evaluate(delta)
    assert parameters(p).equal(before)
    assert kl > 0
    p.commit(delta)
    now = p.policy.network(p.states)
    assert p.old.kl(now).mean().item() == pytest.approx(kl, rel=1e-12)
    ratio = (now.logp(p.action) - p.batch.logp_old[p.batch.mask]).exp()  # type: ignore[index]
    assert (ratio * p.psi[p.batch.mask]).mean().item() == pytest.approx(value, rel=1e-6)
    assert len(p.some(0.5).states) == 3
    assert p.some(0.5).states.equal(p.some(0.5).states)


def run(name: str, steps: int, env: str = "CartPole-v1", seed: int = 0, **settings: object) -> Trained:
    found = preset(name)
    chosen = replace(found.settings, **settings)  # type: ignore[arg-type]
    return train(GymEnvironments(env, chosen.environments), found.algorithm, chosen, steps=steps, seed=seed)


@pytest.mark.parametrize(("name", "steps"), [("ppo", 9000), ("trpo", 9000), ("a2c", 14000), ("reinforce", 25000)])
def test_it_learns(name: str, steps: int) -> None:
    trained = run(name, steps)
    found = evaluate(trained.learner, GymEnvironments("CartPole-v1", 10), 30, seed=1)
    assert len(found.returns) == 30
    assert found.mean > 60  # a random policy's episodes last 22 steps
    assert trained.curve[0].steps < trained.curve[-1].steps
    assert trained.curve[-1].steps == steps or trained.algorithm.critic is None


@pytest.mark.parametrize("env", ["CartPole-v1", "Pendulum-v1"])
def test_an_accepted_step_stays_in_the_region(env: str) -> None:
    curve = run("trpo", 4096, env, environments=4, rollout=64).curve
    assert len(curve) == 16
    taken = [u for u in curve if u.accepted]
    assert len(taken) > 8
    for u in curve:
        assert u.kl <= 0.01 * (1 + 1e-5)
        assert (u.kl > 0) == bool(u.accepted)


@pytest.mark.parametrize("name", ["ppo", "ppo_penalty", "natural", "a2c", "reinforce"])
def test_continuous_actions_run(name: str) -> None:
    trained = run(name, 1600, "Pendulum-v1", environments=4, rollout=200, normalise=True)
    assert all(math.isfinite(u.kl) and u.kl > 0 for u in trained.curve)  # π_old is a copy: it did not move along
    assert trained.curve[-1].mean_return is not None
    assert trained.curve[-1].mean_return < -100
    assert trained.learner.normaliser is not None
    assert trained.learner.normaliser.count > 1000


def test_the_same_seed_is_the_same_run() -> None:
    first = run("ppo", 600, environments=2, rollout=100).curve
    torch.rand(7)
    np.random.rand(7)
    second = run("ppo", 600, environments=2, rollout=100).curve
    other = run("ppo", 600, environments=2, rollout=100, seed=1).curve
    assert [replace(u, seconds=0) for u in first] == [replace(u, seconds=0) for u in second]
    assert [replace(u, seconds=0) for u in first] != [replace(u, seconds=0) for u in other]
    assert not set(seeds(0, 8)) & set(seeds(1, 8))


def test_evaluation_takes_as_many_episodes_of_each_environment() -> None:
    environments = Scripted([[1, 0], [1, 0], [1, 1]])  # one ends at every step, the other at every third
    learner = ControlLearner(DISCRETE, preset("reinforce").algorithm, Settings(), seed=0)
    found = evaluate(learner, environments, 5, greedy=True)
    assert sorted(found.returns) == pytest.approx([0.0, 0.1, 0.2, 30.3, 31.2])
    assert found.mean == pytest.approx(sum(found.returns) / 5)


def test_normalising_is_by_all_that_was_seen() -> None:
    x = 3 + 2 * torch.randn(50, 3, generator=torch.Generator().manual_seed(0))
    state = Normaliser.fresh(3)
    assert state(x).equal(x)
    for chunk in x.split([1, 20, 29]):
        state = state.observe(chunk)
    assert state.count == 50
    assert torch.allclose(state(x), (x - x.mean(0)) / x.std(0, correction=0), atol=1e-5)


class Odd(gymnasium.Env):
    """Discrete observations from 3 on, Discrete actions from 5 on or a Box; it keeps what it was given."""

    given: list[object] = []  # noqa: RUF012

    def __init__(self, box: bool = False, space: object = None) -> None:
        self.observation_space = gymnasium.spaces.Discrete(4, start=3) if space is None else space
        self.action_space = (
            gymnasium.spaces.Box(-1, 1, (2, 1)) if box else gymnasium.spaces.Discrete(2, start=5)  # type: ignore[assignment]
        )

    def reset(self, *, seed: int | None = None, options: object = None) -> tuple[int, dict[str, object]]:
        super().reset(seed=seed)
        return 3, {}

    def step(self, action: object) -> tuple[int, float, bool, bool, dict[str, object]]:
        self.given.append(action)
        return 4, 1.0, False, False, {}


@pytest.fixture
def odd() -> object:
    tuple_space = gymnasium.spaces.Tuple([gymnasium.spaces.Discrete(2)])
    gymnasium.register("Odd-v0", Odd, max_episode_steps=2)
    gymnasium.register("OddBox-v0", Odd, max_episode_steps=2, kwargs={"box": True})
    gymnasium.register("OddEndless-v0", Odd)
    gymnasium.register("OddTuple-v0", Odd, max_episode_steps=2, kwargs={"space": tuple_space})
    Odd.given.clear()
    yield
    for name in ("Odd-v0", "OddBox-v0", "OddEndless-v0", "OddTuple-v0"):
        del gymnasium.registry[name]


def test_actions_reach_the_environment_in_its_own_terms(odd: object) -> None:
    environments = GymEnvironments("Odd-v0", 2)
    assert environments.spaces == Spaces(4, 2, True)
    assert environments.reset([0, 1]).tolist() == [[1, 0, 0, 0]] * 2
    first = environments.step(torch.tensor([0, 1]))
    assert [int(a) for a in Odd.given] == [5, 6]  # type: ignore[call-overload]
    assert not first.truncated.any()
    second = environments.step(torch.tensor([0, 0]))  # the time limit: the final state is not the next episode's first
    assert second.truncated.all()
    assert not second.terminated.any()
    assert second.observation.tolist() == [[1, 0, 0, 0]] * 2
    assert second.final.tolist() == [[0, 1, 0, 0]] * 2
    box = GymEnvironments("OddBox-v0", 1)
    assert box.spaces == Spaces(4, 2, False)
    box.reset([0])
    box.step(torch.tensor([[-3.0, 0.5]]))
    assert np.asarray(Odd.given[-1]).tolist() == [[-1.0], [0.5]]
    assert GymEnvironments("OddEndless-v0", 1, max_episode_steps=7).number == 1


def test_the_final_state_is_that_before_the_reset() -> None:
    environments = GymEnvironments("CartPole-v1", 3, max_episode_steps=9)
    environments.reset([0, 1, 2])
    for _ in range(8):
        last = environments.step(torch.tensor([1, 1, 0]))
    assert last.final.equal(last.observation) or bool(last.terminated.any())
    last = environments.step(torch.tensor([1, 1, 0]))
    ended = last.truncated | last.terminated
    assert ended.any()
    assert (last.observation[ended].abs() <= 0.05).all()  # CartPole starts there
    assert (last.final[ended].abs() > 0.3).any(1).all()


def test_refusals(odd: object) -> None:
    for name, words in {
        "CartPol-v1": "did you mean CartPole-v1",
        "OddEndless-v0": "has no time limit.*--max-episode-steps",
        "OddTuple-v0": "observes Tuple.*FlattenObservation",
    }.items():
        with pytest.raises(ValueError, match=words):
            GymEnvironments(name, 1)
    with pytest.raises(ValueError, match="no algorithm 'grpo'"):
        preset("grpo")
    ppo = preset("ppo").algorithm
    assert ppo.critic is not None
    for algorithm, words in (
        (pg.algorithm("grpo"), "set samples_per_prompt"),
        (replace(ppo, shaping=(pg.KLInReward(),)), "logp_ref"),
        (replace(ppo, psi=(pg.PrefixValue(4),), critic=None), "Batch.step_end"),
        (replace(ppo, ratio=pg.Sequence()), "minibatches hold single steps"),
        (replace(ppo, critic=replace(ppo.critic, pretrain=3)), "leave pretrain"),
        (replace(ppo, filters=(pg.MaskTruncated(),)), "filters look at"),
    ):
        with pytest.raises(ValueError, match=words):
            ControlLearner(DISCRETE, algorithm, Settings(), seed=0)
    with pytest.raises(ValueError, match="needs a learning rate"):
        ControlLearner(DISCRETE, ppo, Settings(lr=None), seed=0)
    with pytest.raises(ValueError, match="less than one in each of 2"):
        train(Scripted(SCRIPT), ppo, Settings(), steps=1)
    with pytest.raises(ValueError, match="does not discount"):
        with_gamma(preset("reinforce").algorithm, 0.9)


def test_presets_are_the_named_algorithms() -> None:
    for name in ("reinforce", "a2c", "trpo", "ppo"):
        mine, named = PRESETS[name].algorithm, pg.ALGORITHMS[name]
        assert mine.name == name
        assert (mine.gate, mine.ratio, mine.aggregate) == (named.gate, named.ratio, named.aggregate)
        assert [type(link) for link in mine.psi] == [type(link) for link in named.psi]
        assert type(mine.step) is type(named.step)
    other = with_gamma(preset("ppo").algorithm, 0.9)
    assert other.critic is not None
    assert (other.psi[0].gamma, other.critic.gamma) == (0.9, 0.9)  # type: ignore[attr-defined]


def test_reinforce_weighs_with_the_return_to_go() -> None:
    algorithm = preset("reinforce").algorithm
    found: Experience = Collector(Scripted(SCRIPT), seed=0)(zeros, 6)
    psi = algorithm.advantages(found.batch)
    assert psi[1].tolist() == pytest.approx([0.9, 0.7, 0.4, 0.0])
    after = algorithm.at(algorithm.update(algorithm.init(), found.batch))
    assert after.advantages(found.batch)[2, 0] == pytest.approx(0.5 - sum((0.1, 0.9, 0.5, 40.6, 20.9)) / 5, rel=1e-5)


def test_the_command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "curve.json"
    words = ["lab", "control", "--steps", "512", "--num-envs", "2", "--rollout", "128", "--episodes", "3"]
    assert cli.main([*words, "--output", str(file)]) == 0
    said = capsys.readouterr().out
    assert "mean return of 3 fresh episodes" in said
    assert "actions drawn from the policy" in said
    assert said.count("steps/s") == 2
    assert cli.main([*words, "--json"]) == 0
    printed, written = json.loads(capsys.readouterr().out), json.loads(file.read_text())
    assert [u["steps"] for u in printed["curve"]] == [256, 512]
    assert printed["evaluation"] == written["evaluation"]  # the same seed
    assert printed["settings"]["environments"] == 2
    assert cli.main(["lab", "control", "--algorithm", "trpo", "--lr", "1e-3"]) == 2
    assert "--lr: trpo sets its step's length by a KL" in capsys.readouterr().err
    assert cli.main(["lab", "control", "--env", "CartPol", "--steps", "99"]) == 2
    assert "did you mean" in capsys.readouterr().err


def test_policies_start_near_uniform() -> None:
    policy = ControlPolicy(DISCRETE, (64, 64), torch.Generator().manual_seed(0))
    entropy = policy(torch.randn(10, 1, generator=torch.Generator().manual_seed(0))).entropy()
    assert (entropy > math.log(2) - 1e-3).all()


def test_the_measured_table(tmp_path: Path) -> None:
    run = {
        "algorithm": "ppo",
        "seed": 1,
        "env": "CartPole-v1",
        "evaluation": {"returns": [500.0, 450.0], "mean": 475.0, "standard_error": 25.0},
        "curve": [
            {"steps": 10, "episodes": 99, "mean_return": 480.0},
            {"steps": 20, "episodes": 120, "mean_return": 480.0},
            {"steps": 1500, "episodes": 130, "mean_return": 460.0},
        ],
    }
    row = measure_control.row(run) | {"cpu_seconds": 12.4}
    assert row["reached"] == 20  # not of fewer than 100 episodes
    page = tmp_path / "control.md"
    page.write_text(f"before\n{measure_control.BEGIN}\nold\n{measure_control.END}\nafter\n")
    measure_control.write([row | {"seed": 2, "mean": 100.0, "reached": None}, row], page)
    text = page.read_text()
    assert "| `ppo` | 475.0 ± 25.0, 100.0 ± 25.0 | 450 | 20, never | 1,500 | 12 |" in text
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "old" not in text


def test_a_distribution_does_not_move_with_the_weights() -> None:
    policy = ControlPolicy(CONTINUOUS, (4,), torch.Generator().manual_seed(0))
    with torch.no_grad():
        old = policy(torch.zeros(2, 3))
        assert policy.log_std is not None
        policy.log_std.add_(1.0)
        new = policy(torch.zeros(2, 3))
    assert old.log_std.tolist() == [[0, 0], [0, 0]]
    assert (old.kl(new) > 0.5).all()
