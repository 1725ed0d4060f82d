"""Another model beside the policy: a teacher of another architecture, and a reward model that learns."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel

import policygrad as pg
from doubles.batches import make_batch, naive_logp
from policygrad.learners.base import LearnerSpec
from policygrad.learners.config import LearnerConfig
from policygrad.learners.local.learner import LocalLearner
from policygrad.models.loading import load_model
from policygrad.models.replica import load_reference
from policygrad.models.tokenizer import load_tokenizer

TAUGHT = replace(pg.DISTILL, reference=pg.Reference(model="a teacher"))
EXACT = replace(TAUGHT, advantage=(pg.TeacherLogRatio(0.0),), terms=(pg.ExactKLToReference(0.7),))
NO_FILTER = replace(pg.PRIME, filters=(), update_rule=pg.GradientSteps())


@pytest.fixture
def model(random_model: Path) -> nn.Module:
    return load_model(str(random_model)).double()


@pytest.fixture
def teacher(model: nn.Module) -> nn.Module:
    """Another architecture than the policy's, over its vocabulary."""
    torch.manual_seed(1)
    size = int(model.config.vocab_size)  # type: ignore[union-attr, arg-type]
    config = GPT2Config(vocab_size=size, n_positions=64, n_embd=24, n_layer=2, n_head=2, initializer_range=0.3)
    return load_model(GPT2LMHeadModel(config).double())


def parameters(module: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in module.parameters()]


def same(a: list[Tensor], module: nn.Module) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, module.parameters(), strict=True))


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_teacher_log_probabilities_equal_the_definition(
    model: nn.Module, teacher: nn.Module, temperature: float
) -> None:
    """At the sampling temperature, of completions with holes, equal ones and an empty one."""
    batch = make_batch(5)
    learner = LocalLearner(model, LearnerSpec(TAUGHT, lr=0.0, steps=1, temperature=temperature), reference=teacher)
    result = learner.evaluate(batch, TAUGHT.needs)
    assert result.logp_ref is not None
    assert result.logp_old is not None
    with torch.no_grad():
        for got, by in ((result.logp_ref, teacher), (result.logp_old, model)):
            assert float((got - naive_logp(by, batch, temperature))[batch.mask].abs().max()) < 1e-6
    assert not any(p.requires_grad for p in teacher.parameters())
    assert learner.reference_parameters == sum(p.numel() for p in teacher.parameters())


@pytest.mark.parametrize("chunk", [2**26, 200])
def test_the_exact_kl_to_the_teacher(
    model: nn.Module, teacher: nn.Module, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The learner's gradient against autograd through Σ_a π(a) log(π(a)/π_T(a)) of one completion at a time."""
    monkeypatch.setattr("policygrad.learners.local.forward.MAX_LOGITS", chunk)
    batch = make_batch(3)
    learner = LocalLearner(
        model, LearnerSpec(EXACT, lr=0.0, steps=1, config=LearnerConfig(micro_tokens=40)), reference=teacher
    )
    batch = learner.evaluate(batch, EXACT.needs)
    learner.build_problem(batch, EXACT.compute_advantages(batch), EXACT).accumulate()
    got = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    total = torch.zeros((), dtype=torch.float64)
    for i in range(len(batch.mask)):
        prompt = batch.prompts[int(batch.group[i])]  # type: ignore[index]
        ids = torch.cat([prompt, batch.tokens[i]])[None]  # type: ignore[index]
        p, q = (m(input_ids=ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1) for m in (model, teacher))
        total = total + 0.7 * ((p.exp() * (p - q)).sum(-1) * batch.mask[i]).sum() / batch.mask.sum()
    torch.autograd.backward(total)
    largest = max(float(g.abs().max()) for g in got)
    assert largest > 1e-3
    for g, p in zip(got, model.parameters(), strict=True):
        assert float((g - p.grad).abs().max()) < 1e-7 * largest


def test_distillation_halves_the_exact_kl_to_the_teacher(model: nn.Module, teacher: nn.Module) -> None:
    """Rollouts of the same texts, as an off-policy gradient would: only that the exact KL falls by half is asked."""
    batch = make_batch(7, holes=False)
    learner = LocalLearner(model, LearnerSpec(EXACT, lr=1e-2, steps=30), reference=teacher)
    result = []
    for _ in range(30):
        filled = learner.evaluate(batch, EXACT.needs)
        result.append(-learner.update(filled, EXACT.compute_advantages(filled), EXACT)["objective"].value)
    assert result[-1] < 0.5 * result[0]


@pytest.mark.parametrize("named", [True, False])
def test_a_teacher_needs_both_name_and_model(model: nn.Module, teacher: nn.Module, named: bool) -> None:
    with pytest.raises(pg.ConfigError, match=r"Reference\.model is .*give both"):
        LocalLearner(
            model, LearnerSpec(TAUGHT if named else pg.GRPO, lr=0.0, steps=1), reference=None if named else teacher
        )


def test_exact_kl_needs_equal_vocabularies(model: nn.Module) -> None:
    torch.manual_seed(1)
    size = int(model.config.vocab_size) + 8  # type: ignore[union-attr, arg-type]
    wide = load_model(GPT2LMHeadModel(GPT2Config(vocab_size=size, n_positions=64, n_embd=24, n_layer=1, n_head=2)))
    LocalLearner(model, LearnerSpec(TAUGHT, lr=0.0, steps=1), reference=wide)
    with pytest.raises(pg.ConfigError, match=r"ExactKLToReference needs one vocabulary.* logits.*TeacherLogRatio"):
        LocalLearner(model, LearnerSpec(EXACT, lr=0.0, steps=1), reference=wide)


def test_a_teacher_must_share_the_tokenizer(random_model: Path, tmp_path: Path) -> None:
    """The embedded model has the random model's tokenizer; one with a token more, or two tokens swapped, is refused."""
    policy = load_tokenizer(str(random_model), load_model(str(random_model)))
    assert not any(p.requires_grad for p in load_reference("tiny", policy).parameters())
    more = AutoTokenizer.from_pretrained(random_model)
    more.add_tokens(["<think>"])
    other = AutoModelForCausalLM.from_pretrained(random_model)
    other.resize_token_embeddings(len(more))
    for tokenizer in (more,):
        other.save_pretrained(tmp_path / "other")
        tokenizer.save_pretrained(tmp_path / "other")
        with pytest.raises(pg.ModelError, match=r"vocabulary differs in 1 tokens: '<think>', for example, is no token"):
            load_reference(str(tmp_path / "other"), policy)
    small = copy.deepcopy(other)
    small.resize_token_embeddings(100)
    small.save_pretrained(tmp_path / "small")
    AutoTokenizer.from_pretrained(random_model).save_pretrained(tmp_path / "small")
    with pytest.raises(pg.ModelError, match=r"has \d+ tokens and the model has embeddings for 100"):
        load_reference(str(tmp_path / "small"), policy)
    with pytest.raises(pg.ModelError, match="nowhere"):
        load_reference(str(tmp_path / "nowhere"), policy)


def evaluated(learner: LocalLearner, batch: pg.Batch) -> pg.Batch:
    return learner.evaluate(batch, NO_FILTER.needs)


def rollout(learner: LocalLearner, batch: pg.Batch) -> dict:  # type: ignore[type-arg]
    batch = evaluated(learner, batch)
    return learner.update(batch, NO_FILTER.compute_advantages(batch), NO_FILTER)


@pytest.mark.parametrize("options", [{}, {"gradient_checkpointing": True}, {"micro_tokens": 20}], ids=str)
def test_implicit_reward_gradient_is_the_cross_entropys(model: nn.Module, options: dict[str, object]) -> None:
    """Merged duplicates, shared prompts and micro-batches, against one completion at a time. π_φ has moved before."""
    learner = LocalLearner(model, LearnerSpec(NO_FILTER, lr=0.0, steps=1, config=LearnerConfig(**options)))  # type: ignore[arg-type]
    assert learner.reward_model is not None
    phi = learner.reward_model.evaluator.model
    with torch.no_grad():
        for p in phi.parameters():
            p.add_(0.05 * torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel()), dtype=p.dtype))
    batch = evaluated(learner, make_batch(3))
    assert batch.implicit_reward is not None
    metrics = learner.reward_model.accumulate(batch)
    got = [p.grad.clone() for p in phi.parameters()]
    phi.zero_grad()
    kept = batch.mask.any(1)
    total = (
        0.05 * torch.where(batch.mask, naive_logp(phi, batch, 1.0) - naive_logp(model, batch, 1.0).detach(), 0)
    ).sum(1)
    p = torch.sigmoid(total)
    loss = -(batch.reward * p.log() + (1 - batch.reward) * (1 - p).log())[kept].mean()
    torch.autograd.backward(loss)
    torch.testing.assert_close(torch.where(batch.mask, batch.implicit_reward, 0).sum(1), total.detach())
    assert metrics["reward_model/loss"].value == pytest.approx(float(loss.detach()), rel=1e-6)
    largest = max(float(g.abs().max()) for g in got)
    assert largest > 1e-5
    for g, q in zip(got, phi.parameters(), strict=True):
        assert float((g - q.grad).abs().max()) < 1e-6 * largest


def test_policy_and_reward_model_train_independently(model: nn.Module) -> None:
    """With the policy's rate at 0 only φ moves, with φ's at 0 only the policy; the reference never does."""
    batch = make_batch(3)
    for policy, own in ((0.0, 1e-3), (1e-3, 0.0)):
        algorithm = replace(NO_FILTER, reward_model=pg.ImplicitReward(lr=own))
        learner = LocalLearner(model, LearnerSpec(algorithm, lr=policy, steps=1))
        assert learner.reward_model is not None
        assert learner.reference is not None
        phi, reference = learner.reward_model.evaluator.model, learner.reference.model
        before = parameters(model), parameters(phi), parameters(reference)
        assert float(evaluated(learner, batch).implicit_reward[batch.mask].abs().max()) == 0  # type: ignore[index]
        metrics = rollout(learner, batch)
        assert same(before[0], model) == (policy == 0)
        assert same(before[1], phi) == (own == 0)
        assert same(before[2], reference)
        assert {"reward_model/loss", "reward_model/grad_norm"} <= metrics.keys()


def test_the_implicit_reward_starts_as_the_reference(model: nn.Module, teacher: nn.Module) -> None:
    """A reference of another architecture: π_φ is one more of it, so that r_φ is 0, and it alone learns."""
    algorithm = replace(NO_FILTER, reference=pg.Reference(model="another"))
    learner = LocalLearner(model, LearnerSpec(algorithm, lr=1e-3, steps=1), reference=teacher)
    assert learner.reward_model is not None
    before = parameters(teacher)
    batch = evaluated(learner, make_batch(3))
    assert float(batch.implicit_reward[batch.mask].abs().max()) == 0  # type: ignore[index]
    rollout(learner, make_batch(3))
    assert same(before, teacher)
    assert not same(before, learner.reward_model.evaluator.model)


def test_the_implicit_reward_learns_which_answers_are_right(model: nn.Module) -> None:
    learner = LocalLearner(
        model, LearnerSpec(replace(NO_FILTER, reward_model=pg.ImplicitReward(1.0, 1e-2)), lr=0.0, steps=30)
    )
    batch, losses = make_batch(4, holes=False), []
    for _ in range(30):
        losses.append(rollout(learner, batch)["reward_model/loss"].value)
    reported = NO_FILTER.report(evaluated(learner, batch))
    assert losses[0] == pytest.approx(0.6931, abs=1e-3)
    assert losses[-1] < 0.2
    assert reported["reward_model/accuracy"].value == 1.0


def test_filtered_completions_do_not_train_the_implicit_reward(model: nn.Module) -> None:
    learner = LocalLearner(model, LearnerSpec(NO_FILTER, lr=0.0, steps=1))
    batch = evaluated(learner, make_batch(3))
    assert learner.reward_model is not None
    weight = torch.where(batch.group[:, None] == 0, 0.0, 1.5).double().expand(batch.mask.shape)
    learner.reward_model.accumulate(replace(batch, weight=weight))
    some = [p.grad.clone() for p in learner.reward_model.evaluator.model.parameters()]
    learner.reward_model.evaluator.model.zero_grad()
    learner.reward_model.accumulate(batch.select(batch.group != 0))
    for a, p in zip(some, learner.reward_model.evaluator.model.parameters(), strict=True):
        torch.testing.assert_close(a, p.grad, rtol=1e-9, atol=1e-12)
    learner.reward_model.evaluator.model.zero_grad()
    assert learner.reward_model.accumulate(replace(batch, weight=torch.zeros_like(weight))) == {}
    assert learner.reward_model.descend() == {}


def test_the_implicit_rewards_state_is_saved(random_model: Path) -> None:
    """A learner restored after two rollouts goes on as the one that was never stopped, to the bit."""
    batches = [replace(b, reward=b.reward.float()) for b in (make_batch(s) for s in (1, 2, 3))]
    algorithm = replace(NO_FILTER, reward_model=pg.ImplicitReward(lr=1e-2))
    full = LocalLearner(load_model(str(random_model)), LearnerSpec(algorithm, lr=1e-2, steps=3))
    for batch in batches[:2]:
        rollout(full, batch)
    tensors, values = full.state()
    tensors = {name: tensor.clone() for name, tensor in tensors.items()}
    rerun = LocalLearner(load_model(str(random_model)), LearnerSpec(algorithm, lr=1e-2, steps=3))
    rerun.restore(tensors, values)
    first, second = (rollout(learner, batches[2]) for learner in (full, rerun))
    assert first["reward_model/loss"].value == second["reward_model/loss"].value
    for a, b in zip(full.state()[0].items(), rerun.state()[0].items(), strict=True):
        assert a[0] == b[0]
        assert torch.equal(a[1], b[1])
    with pytest.raises(KeyError, match="reward_model"):
        rerun.restore(tensors, {name: value for name, value in values.items() if name != "reward_model"})
