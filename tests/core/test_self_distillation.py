"""A policy that teaches itself: against the published functions, by hand, and what is refused."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import policygrad as pg
from doubles.random_batches import Shape, close, gradients, make, passed, policy
from policygrad.core.auxiliary import fill_template, template_names
from policygrad.core.objective import objective, with_selected_tokens
from policygrad.core.staleness import resolve_old_policy
from policygrad.core.validation import check_rollout

T = ("{answer} {prompt}",)


def sampled_token_loss(
    logp: Tensor, teacher: Tensor, old: Tensor, mask: Tensor, has_reference: Tensor, is_clip: float
) -> Tensor:
    """The published loss on sampled tokens, in its own steps: the detached log-ratio times log π, times a ratio that is bounded on
    both sides, averaged over the tokens of the completions that the teacher has read (SDPO's code: token-mean)."""
    per_token = (logp - teacher).detach() * logp
    change = (logp - old).detach().clamp(min=-20.0, max=20.0)
    per_token = per_token * change.exp().clamp(max=is_clip)
    counted = mask & has_reference[:, None]
    return per_token[counted].sum() / counted.sum().clamp(min=1)


def per_completion_loss(
    logp: Tensor, teacher: Tensor, old: Tensor, mask: Tensor, has_reference: Tensor, is_clip: float
) -> Tensor:
    """TRL's average: over a completion's tokens, then over all completions, those that the teacher has not read included."""
    per_token = (logp - teacher).detach() * logp * (logp - old).detach().exp().clamp(max=is_clip)
    counted = mask & has_reference[:, None]
    zero = torch.zeros((), dtype=logp.dtype)
    sums = torch.where(counted, per_token, zero).sum(1) / counted.sum(1).clamp(min=1)
    return sums.mean()


@pytest.mark.parametrize("spread", [0.0, 0.15, 1.5])
def test_sdpo_has_the_gradient_of_the_published_loss(spread: float) -> None:
    batch, logits = make(Shape((4, 3, 4), 6, seed=7, binary=True), spread or None, "references")
    logp = policy(logits, batch.tokens, batch.mask)  # type: ignore[arg-type]
    old = logp.detach() if batch.logp_old is None else batch.logp_old
    assert batch.logp_ref is not None
    assert batch.has_reference is not None
    loss = sampled_token_loss(logp, batch.logp_ref, old, batch.mask, batch.has_reference, 2.0)
    psi = pg.SDPO.compute_advantages(batch)
    assert not psi.any()
    ours = pg.surrogate(logp, replace(batch, logp_old=old), psi, pg.SDPO)
    close(*gradients(ours, logits), *gradients(loss, logits))
    if spread == 1.5:
        assert bool(((logp - old).detach()[batch.mask] > math.log(2)).any())


def test_sdpo_averaged_as_in_trl() -> None:
    """SequenceMean over the completions that the teacher has read is TRL's loss but for its denominator, which counts all."""
    batch, logits = make(Shape((4, 3, 4), 6, seed=7, binary=True), 0.15, "references")
    batch = batch.select(batch.mask.any(1))
    logp = policy(logits, batch.tokens, batch.mask)  # type: ignore[arg-type]
    assert batch.has_reference is not None
    loss = per_completion_loss(logp, batch.logp_ref, batch.logp_old, batch.mask, batch.has_reference, 2.0)  # type: ignore[arg-type]
    algorithm = replace(pg.SDPO, aggregation=pg.SequenceMean())
    (ours,) = gradients(pg.surrogate(logp, batch, algorithm.compute_advantages(batch), algorithm), logits)
    close(ours * float(batch.has_reference.double().mean()), *gradients(loss, logits))


@pytest.mark.parametrize("algorithm", [pg.SDFT, pg.OPSD], ids=lambda row: row.name)
def test_stale_samples_of_an_exact_teacher_are_corrected(algorithm: pg.Algorithm) -> None:
    """As in the published code: each token's divergence is multiplied by min(π_old/μ, 2). Fresh samples are as they were."""
    batch, logits = make(Shape((4, 3, 4), 6, seed=7, binary=True), 0.15, "references")
    batch = replace(batch, version=torch.where(batch.mask, 3, -9))
    assert resolve_old_policy(algorithm, replace(batch, logp_old=None), 3)[0] == algorithm
    corrected, stale = resolve_old_policy(algorithm, batch, 8)
    logp = policy(logits, batch.tokens, batch.mask)  # type: ignore[arg-type]
    out, psi = passed(logp, stale, algorithm), corrected.compute_advantages(stale)
    rho = torch.where(batch.mask, batch.logp_old - batch.logp_sampler, 0).exp().clamp(max=2.0)  # type: ignore[operator]
    assert out.kl_ref is not None
    assert batch.has_reference is not None
    counted = batch.mask & batch.has_reference[:, None]
    divergence = torch.where(counted, out.kl_ref, 0)
    per_row = (rho * divergence).sum(1) / counted.sum(1).clamp(min=1)
    mean = per_row.sum() / counted.any(1).sum() if algorithm is pg.SDFT else (rho * divergence).sum() / counted.sum()
    close(*gradients(pg.surrogate(out, stale, psi, corrected), logits), *gradients(mean, logits))
    torch.testing.assert_close(objective(out, stale, psi, corrected), -mean.detach())
    fresh = gradients(pg.surrogate(out, stale, psi, algorithm), logits)[0]
    assert not torch.allclose(fresh, gradients(mean, logits)[0], rtol=1e-2)


def test_corrections_multiply_what_the_policy_learns_from() -> None:
    """Terms that replace Ψ, follow a teacher or imitate samples; a penalty that only restrains stays as TRL and verl have it."""
    regression = replace(pg.ASTAR_PO, corrections=(pg.TruncatedIS(),))
    assert regression.corrects(regression.terms[0])
    imitation = replace(pg.VAPO, corrections=(pg.TruncatedIS(),))
    assert imitation.corrects(imitation.terms[0])
    penalty = replace(pg.GRPO, corrections=(pg.TruncatedIS(),))
    assert not penalty.corrects(penalty.terms[0])
    taught = replace(penalty, reference=pg.Reference(model="teacher"))
    assert taught.corrects(taught.terms[0])
    for shown in (pg.DemonstrationNLL(), pg.ObservationNLL()):
        assert not taught.corrects(shown)
    batch, logits = make(Shape((4, 3, 4), 6, seed=7, binary=True), 0.15)
    logp = policy(logits, batch.tokens, batch.mask)  # type: ignore[arg-type]
    for algorithm in (regression, imitation, penalty):
        psi = torch.zeros_like(batch.mask, dtype=torch.float64)
        plain = gradients(pg.surrogate(logp, batch, psi, replace(algorithm, corrections=())), logits)[0]
        actual = gradients(pg.surrogate(logp, batch, psi, algorithm), logits)[0]
        assert torch.equal(plain, actual) is (algorithm is penalty)


def test_masks_reach_a_distillation_without_an_advantage() -> None:
    """A mask on tokens keeps the divergence of the others; one that looks for Ψ < 0 would find none, and is refused."""
    batch, logits = make(Shape((4, 3, 4), 6, seed=7, binary=True), 0.15, "entropy")
    algorithm = replace(pg.OPSD, corrections=(pg.HighEntropy(0.3),))
    logp = policy(logits, batch.tokens, batch.mask)  # type: ignore[arg-type]
    out, psi = passed(logp, batch, algorithm), torch.zeros_like(batch.mask, dtype=torch.float64)
    chosen = with_selected_tokens(out, batch, psi, algorithm).selected
    assert chosen is not None
    assert out.kl_ref is not None
    expected = torch.where(chosen, out.kl_ref, 0).sum() / batch.mask.sum()
    close(*gradients(pg.surrogate(out, batch, psi, algorithm), logits), *gradients(expected, logits))


def test_capped_kl_by_hand() -> None:
    """One token: π_old = ¼, π_ref = ½, cap 2, at π_θ = ⅛, ½ (where r reaches the cap) and ¾."""
    term = pg.KLToReference(1.0, "r*k3", cap=2.0)
    p = torch.tensor([[0.125, 0.5, 0.75]], dtype=torch.float64)
    batch = pg.Batch(
        mask=torch.ones(1, 3, dtype=torch.bool),
        group=torch.zeros(1, dtype=torch.int64),
        reward=torch.zeros(1, dtype=torch.float64),
        logp_old=torch.full((1, 3), math.log(0.25), dtype=torch.float64),
        logp_ref=torch.full((1, 3), math.log(0.5), dtype=torch.float64),
    )
    out, psi = pg.Forward(p.log()), torch.zeros_like(p)
    u = [math.log(0.25), 0.0, math.log(1.5)]
    torch.testing.assert_close(term.score(out, batch, psi)[0].tolist(), [-0.5 * u[0], 0.0, -2 * u[2]])
    values = [-0.5 * (4 + u[0] - 1), 0.0, -(u[2] ** 2)]
    torch.testing.assert_close(term.value(out, batch, psi)[0].tolist(), values)


def test_completions_that_the_reference_has_not_read_do_not_count() -> None:
    """Neither in the gradient, nor in a denominator, nor in `kl` and `teacher/kl`."""
    batch, logits = make(Shape((4, 4), 5, seed=3, binary=True), 0.15, "references")
    assert batch.has_reference is not None
    assert batch.logp_ref is not None
    read = batch.select(batch.has_reference & batch.mask.any(1))
    far = replace(batch, logp_ref=torch.where(batch.has_reference[:, None], batch.logp_ref, -77.0))
    algorithm = replace(pg.SDPO, terms=(pg.KLToReference(0.3, "k2"),), old_policy="learner")
    both = []
    for rows in (far, replace(read, has_reference=None)):
        logp = policy(logits, rows.tokens, rows.mask)  # type: ignore[arg-type]
        psi = algorithm.compute_advantages(rows)
        both.append(gradients(pg.surrogate(logp, rows, psi, algorithm), logits)[0])
    close(*both)
    reports = [pg.DISTILL.report(rows)["teacher/kl"].value for rows in (far, replace(read, has_reference=None))]
    assert reports[0] == pytest.approx(reports[1], rel=1e-12)


def test_templates_are_filled_once() -> None:
    """Braces that are no placeholder stay, and a value is not searched for placeholders again."""
    template = "\\boxed{7} {answer}, {x+1} {prompt}"
    assert template_names(template) == ("answer", "prompt")
    assert fill_template(template, {"answer": "{prompt}", "prompt": "1+1="}) == "\\boxed{7} {prompt}, {x+1} 1+1="
    assert fill_template(template, {"prompt": "1+1="}) is None


def test_rewards_are_needed_only_to_tell_successes() -> None:
    assert pg.SDPO.reads_reward
    assert not pg.SDFT.reads_reward
    assert not pg.OPSD.reads_reward
    for algorithm in (pg.SDPO, pg.SDFT, pg.OPSD):
        check_rollout(algorithm)
        assert "logp_old" not in algorithm.needs


def test_formula() -> None:
    assert (
        pg.SDPO.equation()["π_ref"]
        == "a moving average of the policy at rate 0.05 per rollout, reading {success} {prompt} {feedback}"
    )
    assert pg.SDPO.equation()["k"] == "−1·min(r, 2)·u,  u = log π_θ − log π_ref"
    assert pg.SDFT.equation()["k"] == "−1·∇KL(π_θ‖π_ref) over the vocabulary"
    assert pg.OPSD.equation()["k"] == "−1·∇JSD_0.5(π_ref, π_θ) over the vocabulary"
    assert pg.ExactKLToReference(alpha=0).formula == "−1·∇KL(π_ref‖π_θ) over the vocabulary"
    assert pg.Reference(live=True, templates=T).formula == "the policy, reading {answer} {prompt}"


REFUSED = {
    "a model that moves": (lambda: pg.Reference(model="x", ema=0.1), ["model='x' and ema=0.1", "only one origin"]),
    "an average that is refreshed": (lambda: pg.Reference(refresh_every=3, ema=0.1), ["refresh_every", "ema=0.1"]),
    "a live average": (lambda: pg.Reference(live=True, ema=0.1, templates=T), ["ema=0.1 and live=True"]),
    "a live policy under its own prompt": (
        lambda: pg.Reference(live=True),
        ["compares the policy with itself", "templates="],
    ),
    "a rate above 1": (lambda: pg.Reference(ema=1.5), ["Reference.ema", "1.5"]),
    "a rate of 0": (lambda: pg.Reference(ema=0.0), ["Reference.ema", "0.0"]),
    "a text for the templates": (lambda: pg.Reference(templates="{prompt}"), ["tuple of texts", "comma"]),  # type: ignore[arg-type]
    "a template without the question": (
        lambda: pg.Reference(templates=("{answer}",)),
        ["'{answer}'", "without {prompt}"],
    ),
    "an infinite success": (lambda: pg.Reference(success_reward=math.inf), ["Reference.success_reward", "finite"]),
    "a cap without a ratio": (lambda: pg.KLToReference(cap=2.0), ["KLToReference.cap=2", "form='r*k3'"]),
    "a cap below 1": (lambda: pg.KLToReference(1.0, "r*k3", cap=0.5), ["KLToReference.cap", "0.5"]),
    "a weight outside [0, 1]": (lambda: pg.ExactKLToReference(alpha=1.2), ["ExactKLToReference.alpha", "1.2"]),
    "two divergences": (
        lambda: replace(pg.OPSD, terms=(pg.ExactKLToReference(), pg.ExactKLToReference(alpha=0.0))),
        ["different alphas", "make them equal"],
    ),
    "templates that nobody reads": (
        lambda: replace(pg.DAPO, reference=pg.Reference(templates=T)),
        ["templates, but no part of dapo", "add KLToReference()"],
    ),
    "an average that nobody reads": (
        lambda: replace(pg.DAPO, reference=pg.Reference(ema=0.1)),
        ["ema=0.1, but no part"],
    ),
    "a KL in the reward": (
        lambda: replace(pg.RLOO, reference=pg.Reference(templates=T)),
        ["KLInReward charges every completion", "templates=()"],
    ),
    "an implicit reward model": (
        lambda: replace(pg.PRIME, reference=pg.Reference(ema=0.1)),
        ["ImplicitReward is relative", "ema=0.1"],
    ),
    "a sampler in a ratio that the term lacks": (
        lambda: replace(pg.SDFT, old_policy="sampler"),
        ["ExactKLToReference does not have", "old_policy='learner'"],
    ),
    "the same with sampled tokens": (
        lambda: replace(pg.SDPO, terms=(pg.KLToReference(1.0, "k2"),)),
        ["KLToReference does not have", "old_policy='learner'"],
    ),
    "a mask that looks for failures": (
        lambda: replace(pg.OPSD, corrections=(pg.OffPolicySequenceMask(),)),
        ["OffPolicySequenceMask reads Ψ", "at 0 everywhere", "TruncatedIS()"],
    ),
    "no hint for a distillation": (
        lambda: check_rollout(replace(pg.SDFT, reference=pg.Reference(ema=0.1))),
        ["learns from a teacher", "Reference.templates"],
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals(case: str) -> None:
    make_it, says = REFUSED[case]
    with pytest.raises(pg.ConfigError) as error:
        make_it()
    assert all(text in str(error.value) for text in says), error.value


def test_batch_checks_its_reference_fields() -> None:
    batch, _ = make(Shape((2,), 3, seed=1, binary=True))
    with pytest.raises(pg.ConfigError, match=r"Batch\.reference_prompts has 1 entries, expected one for each of the 2"):
        replace(batch, reference_prompts=(torch.tensor([1]),))
    with pytest.raises(pg.ConfigError, match=r"Batch\.has_reference must be bool"):
        replace(batch, has_reference=torch.ones(2))
    prompts = tuple(torch.tensor([i]) for i in range(2))
    filled = replace(batch, reference_prompts=prompts, has_reference=torch.tensor([True, False]))
    chosen = filled.select(torch.tensor([1])).to("cpu")
    assert [x.tolist() for x in chosen.reference_prompts] == [[1]]
    assert chosen.has_reference is not None
    assert chosen.has_reference.tolist() == [False]
    assert filled.without_texts().reference_prompts == ()
