"""The critic on the policy's states, the learner's exact terms, and what pre-training does."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import policygrad as pg
from doubles.batches import float_batch, make_batch, naive_logp
from policygrad.learners.base import LearnerSpec
from policygrad.learners.config import LearnerConfig
from policygrad.learners.local.auxiliary_networks import ValueModel
from policygrad.learners.local.learner import LocalLearner
from policygrad.learners.local.packing import pack_micro_batches
from policygrad.models.loading import load_model

POLICY = pg.Critic(backbone="policy", lr=1e-2)


def with_critic(critic: pg.Critic, **changes: object) -> pg.Algorithm:
    return replace(pg.PPO, shaping=(), critic=critic, **changes)  # type: ignore[arg-type]


def learner_of(
    folder: Path, algorithm: pg.Algorithm, *, lr: float = 1e-2, dtype: str = "fp32", **config: object
) -> LocalLearner:
    model = load_model(str(folder), dtype=dtype)
    return LocalLearner(model, LearnerSpec(algorithm, lr=lr, steps=8, config=LearnerConfig(dtype=dtype, **config)))  # type: ignore[arg-type]


def critic_of(learner: LocalLearner) -> ValueModel:
    assert learner.critic is not None
    return learner.critic


def rollout(learner: LocalLearner, algorithm: pg.Algorithm, batch: pg.Batch) -> dict:  # type: ignore[type-arg]
    scored = algorithm.add_critic_targets(learner.evaluate(batch, algorithm.needs))
    return learner.update(scored, algorithm.compute_advantages(scored), algorithm)


def copies(module: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in module.parameters()]


def same(a: list[Tensor], module: nn.Module) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, module.parameters(), strict=True))


@pytest.mark.parametrize(
    ("options", "hidden"),
    [({}, 0), ({}, 16), ({"gradient_checkpointing": True}, 16), ({"dtype": "bf16"}, 0), ({"micro_tokens": 20}, 0)],
    ids=str,
)
def test_a_value_head_on_policy_states_trains_alone(
    random_model: Path, hidden: int, options: dict[str, object]
) -> None:
    """With the policy's rate at 0 the value loss moves the head and nothing else; with the head's at 0, the other way round."""
    batch = float_batch()
    for policy_lr, critic_lr in ((0.0, 1e-2), (1e-2, 0.0)):
        algorithm = with_critic(replace(POLICY, lr=critic_lr, hidden=hidden))
        learner = learner_of(random_model, algorithm, lr=policy_lr, **options)  # type: ignore[arg-type]
        network = critic_of(learner).network
        before = copies(learner.model), copies(network)
        metrics = rollout(learner, algorithm, batch)
        assert same(before[0], learner.model) == (policy_lr == 0)
        assert same(before[1], network) == (critic_lr == 0)
        assert {"value_loss", "explained_variance", "value", "value_grad_norm"} <= metrics.keys()


def test_a_value_head_adds_no_backbone_and_no_policy_gradient(random_model: Path) -> None:
    algorithm = with_critic(POLICY)
    learner = learner_of(random_model, algorithm)
    network, width = critic_of(learner).network, learner.model.get_output_embeddings().weight.shape[1]  # type: ignore[operator]
    assert sum(p.numel() for p in network.parameters()) == width + 1
    assert not {id(p) for p in network.parameters()} & {id(p) for p in learner.model.parameters()}
    nn.init.normal_(network.head.weight)  # type: ignore[arg-type, union-attr]
    scored = algorithm.add_critic_targets(learner.evaluate(float_batch(), algorithm.needs))
    assert algorithm.critic is not None
    critic_of(learner).accumulate(scored, algorithm.critic)
    assert all(p.grad is None for p in learner.model.parameters())
    assert all(p.grad is not None for p in network.parameters())


@pytest.mark.parametrize("backbone", ["separate", "policy"])
def test_the_value_gradient_equals_the_definition(random_model: Path, backbone: str) -> None:
    """Packed, prompts shared and equal completions once, against one completion at a time: Σ ½(V − R)²/N, no saving at all."""
    critic = pg.Critic(backbone=backbone, clip=0.0, lam=1.0)  # type: ignore[arg-type]
    algorithm = with_critic(critic)
    model = load_model(str(random_model)).double()
    learner = LocalLearner(model, LearnerSpec(algorithm, lr=0.0, steps=1, config=LearnerConfig(micro_tokens=30)))
    network = critic_of(learner).network
    nn.init.normal_(network.head.weight, generator=torch.Generator().manual_seed(0))  # type: ignore[arg-type, union-attr]
    batch = make_batch(4)
    scored = algorithm.add_critic_targets(critic_of(learner).evaluate(batch))
    critic_of(learner).accumulate(scored, critic)
    got = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in network.parameters()]
    network.zero_grad()
    loss = torch.zeros((), dtype=torch.float64)
    assert batch.tokens is not None
    assert batch.prompts is not None
    assert scored.returns is not None
    trunk = network.backbone if backbone == "separate" else model.get_decoder()  # type: ignore[operator]
    for i in range(len(batch.mask)):
        prompt = batch.prompts[int(batch.group[i])]
        states = trunk(input_ids=torch.cat([prompt, batch.tokens[i]])[None]).last_hidden_state[0, len(prompt) - 1 : -1]
        values = network.head(states if backbone == "separate" else states.detach()).squeeze(-1)  # type: ignore[operator]
        loss = loss + (0.5 * (values - scored.returns[i]) ** 2)[batch.mask[i]].sum() / batch.mask.sum()
    expected = torch.autograd.grad(loss, list(network.parameters()), allow_unused=True)
    largest = max(float(e.abs().max()) for e in expected if e is not None)
    for g, e in zip(got, expected, strict=True):
        assert (
            e is None or float((g - e).abs().max()) <= 1e-5 * largest
        )  # the model normalises and V is kept in float32


@pytest.mark.parametrize("backbone", ["separate", "policy"])
@pytest.mark.parametrize("micro_tokens", [16, 4096])
def test_the_bootstrap_value_is_that_of_the_state_after_the_last_token(
    random_model: Path, backbone: str, micro_tokens: int
) -> None:
    """V of the state after the last sampled token, one completion at a time; 0 for what has ended or has no token."""
    algorithm = with_critic(pg.Critic(backbone=backbone), advantage=(pg.GAE(bootstrap=True),))  # type: ignore[arg-type]
    learner = learner_of(random_model, algorithm, micro_tokens=micro_tokens)
    network = critic_of(learner).network
    nn.init.normal_(network.head.weight, generator=torch.Generator().manual_seed(0))  # type: ignore[arg-type, union-attr]
    batch = make_batch(4)
    cut = torch.arange(len(batch.mask)) % 3 != 1
    batch = replace(batch, truncated=cut, reward=batch.reward.float())
    assert int((cut & batch.mask.any(1)).sum()) > 4
    result = learner.evaluate(batch, algorithm.needs)
    assert result.bootstrap is not None
    assert batch.tokens is not None
    assert batch.prompts is not None
    trunk = network.backbone if backbone == "separate" else learner.model.get_decoder()  # type: ignore[operator]
    for i in range(len(batch.mask)):
        expected = torch.zeros(())
        if bool(cut[i] & batch.mask[i].any()):
            read = batch.tokens[i, : int(batch.mask[i].nonzero().max()) + 1]
            ids = torch.cat([batch.prompts[int(batch.group[i])], read])[None]
            with torch.no_grad():
                expected = network.head(trunk(input_ids=ids).last_hidden_state[0, -1]).squeeze()  # type: ignore[operator]
        torch.testing.assert_close(result.bootstrap[i], expected, rtol=1e-4, atol=1e-5)
    plain = learner.evaluate(batch, pg.PPO.needs)
    assert plain.bootstrap is None
    assert torch.equal(plain.values, result.values)  # type: ignore[arg-type]
    with pytest.raises(pg.ConfigError, match=r"Batch\.truncated"):
        learner.evaluate(replace(batch, truncated=None), algorithm.needs)


@pytest.mark.parametrize("hidden", [0, 8])
def test_pretraining_explains_variance_between_prompts(random_model: Path, hidden: int) -> None:
    batch = float_batch()
    batch = replace(batch, reward=(batch.group % 2).float())
    algorithm = with_critic(replace(POLICY, lr=3e-2, lam=1.0, pretrain=60, pretrain_until=0.9, hidden=hidden))
    learner = learner_of(random_model, algorithm)
    before, rollouts, state = copies(learner.model), 0, algorithm.init_state()
    while state["critic"]["pretrain"]:
        now = algorithm.with_state(state)
        scored = now.add_critic_targets(learner.evaluate(batch, now.needs))
        metrics = learner.update(scored, now.compute_advantages(scored), now)
        state, rollouts = algorithm.update_state(state, scored, metrics), rollouts + 1
    assert same(before, learner.model)
    assert metrics["explained_variance"].value >= 0.9
    assert 1 < rollouts < 60


def test_pretraining_goes_over_each_rollout_several_times_without_the_clip(random_model: Path) -> None:
    """Four steps at one pass's cost of sampling; the clip, which compares with V_old, waits for the policy to move."""
    batch = float_batch()
    taken = []
    for pretrain in (0, 1):
        algorithm = with_critic(pg.Critic(lr=1e-2, pretrain=pretrain), update_rule=pg.GradientSteps())
        learner = learner_of(random_model, algorithm)
        rollout(learner, algorithm, batch)
        taken.append(critic_of(learner).optimizer.num_updates)
    assert taken == [1, 4]
    values, old = torch.tensor([[0.9]]), torch.tensor([[0.2]])
    one = pg.Batch(
        mask=torch.ones(1, 1).bool(), group=torch.zeros(1, dtype=torch.int64), reward=torch.ones(1), values=old
    )
    clipped, free = (
        pg.Critic().loss(values, one, torch.ones(1, 1)),
        pg.Critic(pretrain=1).loss(values, one, torch.ones(1, 1)),
    )
    assert clipped.item() == pytest.approx(0.5 * 0.36)
    assert free.item() == pytest.approx(0.5 * 0.01)


@pytest.mark.full
@pytest.mark.parametrize(
    "critic", [replace(POLICY, hidden=8), pg.Critic(pretrain=1)], ids=["on the policy's states", "separate"]
)
def test_a_critic_resumes_bit_for_bit(random_model: Path, critic: pg.Critic) -> None:
    algorithm, batch = with_critic(critic), float_batch()
    one, two = learner_of(random_model, algorithm), learner_of(random_model, algorithm)
    rollout(one, algorithm, batch)
    tensors, values = one.state()
    two.restore({name: tensor.clone() for name, tensor in tensors.items()}, values)
    for learner in (one, two):
        rollout(learner, algorithm, batch)
    assert same(copies(critic_of(one).network), critic_of(two).network)
    assert same(copies(one.model), two.model)


def test_the_critics_learning_rate_follows_the_policys(random_model: Path) -> None:
    assert critic_of(learner_of(random_model, with_critic(pg.Critic()), lr=1e-3)).optimizer.lr == pytest.approx(1e-2)
    assert critic_of(learner_of(random_model, with_critic(pg.Critic(lr=3e-5)), lr=1e-3)).optimizer.lr == 3e-5
    assert pg.Run(algorithm=pg.TRPO).resolve().algorithm.critic.lr == pytest.approx(1e-2 / 5**0.5)  # type: ignore[union-attr]
    with pytest.raises(ValueError, match=r"Critic\.lr is None and the policy has no learning rate"):
        pg.Critic().learning_rate(None)


@pytest.mark.parametrize(
    ("build", "says"),
    [
        (lambda: pg.Critic(hidden=8), "set backbone='policy'"),
        (lambda: pg.Critic(backbone="shared"), "'separate' or 'policy', not 'shared'"),  # type: ignore[arg-type]
        (lambda: pg.Critic(backbone="policy", hidden=-1), "Critic.hidden"),
        (lambda: pg.Critic(pretrain_epochs=0), "Critic.pretrain_epochs"),
    ],
)
def test_refuses(build: object, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        build()  # type: ignore[operator]


def full_logp(model: nn.Module, batch: pg.Batch, temperature: float) -> Tensor:
    """log π(·|s) [B, T, V], one completion at a time."""
    out = []
    for i in range(len(batch.mask)):
        prompt = batch.prompts[int(batch.group[i])]  # type: ignore[index]
        ids = torch.cat([prompt, batch.tokens[i]])[None]  # type: ignore[index]
        out.append((model(input_ids=ids).logits[0, len(prompt) - 1 : -1] / temperature).log_softmax(-1))
    return torch.stack(out)


def literal(model: nn.Module, old: Tensor, batch: pg.Batch, term: object, temperature: float) -> Tensor:
    """η/N Σ_t H, or −β/N Σ_t KL(π_old‖π_θ), over full logits."""
    now = full_logp(model, batch, temperature)
    exact = (
        -0.3 * (now.exp() * now).sum(-1)
        if isinstance(term, pg.ExactEntropy)
        else -0.7 * (old.exp() * (old - now)).sum(-1)
    )
    return torch.where(batch.mask, exact, 0).sum() / batch.mask.sum()


EXACT = {"entropy": pg.ExactEntropy(0.3), "kl": pg.ExactKLToOld(0.7)}


@pytest.mark.parametrize("chunk", [2**26, 120])
@pytest.mark.parametrize("budget", [30, 10_000])
@pytest.mark.parametrize("kind", EXACT)
def test_the_learners_exact_terms_are_those_of_full_logits(
    random_model: Path, kind: str, budget: int, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Packed, merged, in chunks of three tokens, Ψ = 0 everywhere: only the term moves, and every completion counts."""
    monkeypatch.setattr("policygrad.learners.local.forward.MAX_LOGITS", chunk)
    step = pg.GradientSteps(epochs=2)
    algorithm = replace(pg.DR_GRPO, aggregation=pg.TokenMean(), terms=(EXACT[kind],), update_rule=step)
    model, temperature = load_model(str(random_model)).double(), 0.8
    learner = LocalLearner(
        model,
        LearnerSpec(algorithm, lr=0.0, steps=1, temperature=temperature, config=LearnerConfig(micro_tokens=budget)),
    )
    batch = make_batch(11)
    old = full_logp(model, batch, temperature).detach()
    learner.snapshot_old_policy()
    with torch.no_grad():
        for i, p in enumerate(model.parameters()):
            p += 0.05 * torch.randn(p.shape, generator=torch.Generator().manual_seed(i), dtype=p.dtype)
    psi = torch.zeros(batch.mask.shape, dtype=torch.float64)
    metrics = learner.build_problem(batch, psi, algorithm).accumulate()
    got = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    paper = literal(model, old, batch, EXACT[kind], temperature)
    expected = torch.autograd.grad(-paper, list(model.parameters()), allow_unused=True)
    value = float(paper.detach())
    largest = max(float(e.abs().max()) for e in expected if e is not None)
    assert largest > 1e-4
    for g, e in zip(got, expected, strict=True):
        assert e is None or float((g - e).abs().max()) <= 1e-6 * largest  # the model normalises in float32
    assert metrics["objective"].value == pytest.approx(value, rel=1e-5)
    assert metrics["completions/computed"].value < metrics["completions/offered"].value == int(batch.mask.any(1).sum())
    if kind == "kl":
        assert metrics["kl_old"].value == pytest.approx(-value / 0.7, rel=1e-5)


def test_the_snapshot_is_the_policy_before_each_rollouts_updates(random_model: Path) -> None:
    """Held only where a term asks for it; at the first epoch the KL is 0, at the next it is not, and so again next rollout."""
    assert learner_of(random_model, pg.DR_GRPO).networks.old is None
    algorithm = replace(pg.DR_GRPO, terms=(pg.ExactKLToOld(1.0, target=0.01),), update_rule=pg.GradientSteps(epochs=2))
    learner, batch = learner_of(random_model, algorithm, lr=1e-3), float_batch()
    for _ in range(2):
        scored = learner.evaluate(batch, algorithm.needs)
        before = copies(learner.model)
        metrics = learner.update(scored, algorithm.compute_advantages(scored), algorithm)
        assert learner.networks.old is not None
        assert same(before, learner.networks.old.model)
        assert not same(before, learner.model)
        assert metrics["kl_old/last"].value > 1e-5
        assert metrics["kl_old"].value == pytest.approx(
            metrics["kl_old/last"].value / 2, rel=1e-2
        )  # the first epoch's is 0
        assert metrics["beta/exact_kl_to_old"].value == 1.0
        assert algorithm.update_state(algorithm.init_state(), scored, metrics)["terms.0"]["beta"] in (0.5, 1.0, 2.0)


def test_metrics_cover_every_sampled_token(random_model: Path) -> None:
    """`measured` leaves no gradient and counts the completions that an update would skip; a critic that is fitted first has
    no policy to measure."""
    algorithm = replace(pg.DR_GRPO, update_rule=pg.GradientSteps(epochs=2))
    learner, batch = learner_of(random_model, algorithm), float_batch()
    scored = learner.evaluate(batch, algorithm.needs)
    assert scored.logp_old is not None
    shifted = replace(scored, logp_old=scored.logp_old - 0.1)
    problem = learner.build_problem(shifted, torch.zeros(batch.mask.shape), algorithm)
    result = problem.measure()
    assert result["kl_old"].value == pytest.approx(torch.tensor(0.1).expm1().item() - 0.1, rel=1e-3)
    assert float(result["kl_old"].count) == int(batch.mask.sum())  # type: ignore[union-attr]
    assert all(p.grad is None for p in learner.model.parameters())
    waiting = replace(problem, algorithm=with_critic(pg.Critic(pretrain=3)))
    assert waiting.measure() == {}


def test_dual_descent_on_a_model_ends_inside_its_band(random_model: Path) -> None:
    """A first round stays below the band, so β halves and the next goes further; what is reported is where it ended."""
    term, step = pg.ExactKLToOld(0.4, target=0.2), pg.DualDescent(epochs=4, rounds=6)
    algorithm = replace(pg.DR_GRPO, gate=pg.Importance(), terms=(term,), update_rule=step)
    learner, batch = learner_of(random_model, algorithm, lr=1e-3), float_batch()
    scored = learner.evaluate(batch, algorithm.needs)
    metrics = learner.update(scored, algorithm.compute_advantages(scored), algorithm)
    rounds = int(metrics["dual_rounds"].value)
    assert 1 < rounds < 6
    assert 0.2 / 1.5 <= metrics["kl_old/last"].value <= 1.5 * 0.2
    assert learner.version == 4 * rounds
    assert metrics["beta/exact_kl_to_old/last"].value == pytest.approx(0.4 / 2 ** (rounds - 1))
    problem = learner.build_problem(scored, algorithm.compute_advantages(scored), algorithm)
    assert problem.measure()["kl_old"].value == pytest.approx(metrics["kl_old/last"].value, rel=1e-4)


def test_an_evaluator_refuses_what_it_cannot_compute(random_model: Path) -> None:
    learner, batch = learner_of(random_model, pg.DR_GRPO), float_batch()
    (part,) = pack_micro_batches(batch, torch.arange(3), 10_000)
    with pytest.raises(ValueError, match="not values"):
        learner.evaluator.forward(part, frozenset({"values"}))
    with pytest.raises(ValueError, match="pass its evaluator as `old`"):
        learner.evaluator.forward(part, frozenset({"kl_old"}))
    plain = learner.evaluator.forward(part)
    assert plain.entropy is None
    assert plain.kl_old is None
    truth = torch.where(batch.mask, naive_logp(learner.model, batch, 1.0), 0)
    assert torch.allclose(plain.logp, truth[part.rows], atol=1e-4)


def test_a_token_of_probability_zero_gives_no_nan() -> None:
    """A logit of −∞ has probability 0 and no share in entropy, KL or their gradients."""
    from policygrad.learners.local.forward import compute_exact

    logits = torch.tensor([[0.0, 1.0, -torch.inf]], dtype=torch.float64, requires_grad=True)
    old = torch.tensor([[0.5, 0.0, -torch.inf]], dtype=torch.float64)
    entropy, kl = compute_exact(logits, old, ["entropy", "kl_old"], 1.0)
    p, q = torch.softmax(logits[0, :2], 0), torch.softmax(old[0, :2], 0)
    assert entropy.item() == pytest.approx(-float((p * p.log()).detach().sum()))
    assert kl.item() == pytest.approx(float((q * (q / p).log()).detach().sum()))
    (entropy + kl).sum().backward()
    assert torch.isfinite(logits.grad).all()  # type: ignore[arg-type]
