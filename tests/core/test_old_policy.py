"""Which policy the samples are from, over the whole matrix: what is old is never taken for on-policy in silence."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

import policygrad as pg
from doubles.data_fields import blank
from doubles.random_batches import Shape, make, passed, policy
from policygrad.core.objective import gate_weight, measure_forward, with_selected_tokens
from policygrad.core.staleness import resolve_old_policy, staleness_metrics
from policygrad.core.terms import log_ratio

VERSION = 7
ROWS = sorted(pg.ALGORITHMS)
RECOMPUTED = [name for name in ROWS if pg.ALGORITHMS[name].old_policy == "learner"]
WEIGHS = [
    name
    for name in ROWS
    if pg.ALGORITHMS[name].ratio is not None
    and name not in ("sdft", "opsd")  # which have no Ψ, and a term without a ratio
    and not isinstance(pg.ALGORITHMS[name].gate, pg.TaperedImportance | pg.UnitWeight)
]


def drawn(lag: int = 2, seed: int = 3) -> tuple[pg.Batch, Tensor]:
    """(a batch drawn `lag` versions ago by a policy about half a nat a token away, log π_θ now)."""
    batch, logits = make(Shape((6, 6), 8, seed, binary=True), extra="steps")
    version = torch.where(batch.mask, VERSION - lag, 10**6)  # what stands off the mask is never read
    batch = replace(batch, **blank(torch.zeros(12, 8)), grad_logp_sq_norm=torch.ones(12).double())
    return replace(batch, version=version), policy(logits, batch.tokens, batch.mask)


def scored(batch: pg.Batch, logp: Tensor, needs: frozenset[str]) -> pg.Batch:
    """As a learner does: log π_old is its own policy's."""
    return replace(batch, logp_old=logp.detach()) if "logp_old" in needs else batch


def chosen_from(batch: pg.Batch, logp: Tensor, algorithm: pg.Algorithm) -> pg.Batch:
    """As a learner does, where a part chooses among the tokens."""
    looked = replace(batch, entropy=torch.where(batch.mask, logp.detach() ** 2, 0))
    return with_selected_tokens(passed(logp, looked), batch, pulled(batch), algorithm)


def pulled(batch: pg.Batch) -> Tensor:
    """Ψ of both signs at every token."""
    rows = torch.arange(len(batch.mask))[:, None] + torch.arange(batch.mask.shape[1])
    return torch.where(batch.mask, (-1.0) ** rows, 0).double()


@pytest.mark.parametrize("name", RECOMPUTED)
def test_stale_samples_are_corrected(name: str) -> None:
    batch, logp = drawn()
    algorithm, batch = resolve_old_policy(pg.ALGORITHMS[name], batch, VERSION)
    assert "logp_old" in algorithm.needs
    batch = chosen_from(scored(batch, logp, algorithm.needs), logp, algorithm)
    weight, ratio = gate_weight(pg.Forward(logp), batch, pulled(batch), algorithm)
    effective = algorithm.apply_corrections(weight, pg.Forward(logp), batch, pulled(batch))[batch.mask]
    rho = (batch.logp_old - batch.logp_sampler).exp()[batch.mask].clamp(max=2)  # type: ignore[operator]
    assert (ratio[batch.mask] == 1).all()  # π_old is the learner's policy, and nothing has moved yet
    if algorithm.token_selector is not None:  # a choice leaves some out
        effective, rho = effective[effective != 0], rho[effective != 0]
        assert len(rho) > 1
    torch.testing.assert_close(effective, rho)
    assert ((effective - 1).abs() > 1e-3).float().mean() > 0.9


@pytest.mark.parametrize("name", RECOMPUTED)
def test_fresh_samples_change_nothing(name: str) -> None:
    algorithm, (batch, _) = pg.ALGORITHMS[name], drawn(lag=0)
    assert resolve_old_policy(algorithm, batch, VERSION) == (algorithm, batch)
    unsaid = replace(batch, version=None)
    assert resolve_old_policy(algorithm, unsaid, VERSION) == (algorithm, unsaid)


@pytest.mark.parametrize("name", sorted(set(ROWS) - set(RECOMPUTED)))
@pytest.mark.parametrize("lag", [0, 2])
def test_sampler_as_old_policy_for_fresh_and_stale_samples(name: str, lag: int) -> None:
    algorithm, (batch, logp) = pg.ALGORITHMS[name], drawn(lag)
    result, report = resolve_old_policy(algorithm, batch, VERSION)
    assert result == algorithm
    assert report.logp_old is batch.logp_sampler
    report = chosen_from(report, logp, algorithm)
    weight, ratio = gate_weight(pg.Forward(logp), report, pulled(batch), algorithm)
    assert ((ratio[batch.mask] - 1).abs() > 1e-3).float().mean() > 0.9
    assert torch.equal(ratio, algorithm.ratio(log_ratio(logp, batch.logp_sampler, batch.mask), batch.mask))  # type: ignore[misc]
    if isinstance(
        algorithm.gate, pg.Clip | pg.DivergenceClip | pg.SecondMomentFilter | pg.GammaKernel | pg.SelfNormalised
    ):
        assert torch.equal(weight, algorithm.gate.weight(ratio, pulled(batch), report))
        return
    imitated = isinstance(algorithm.gate, pg.UnitWeight) | (
        isinstance(algorithm.gate, pg.TaperedImportance) & (pulled(batch) > 0)
    )
    expected = torch.where(
        torch.as_tensor(imitated), 1, ratio.clamp(max=1 if isinstance(algorithm.gate, pg.TaperedImportance) else 5)
    )
    torch.testing.assert_close(weight[batch.mask], expected[batch.mask])


@pytest.mark.parametrize("name", WEIGHS)
def test_sampler_as_old_policy_reaches_every_gate(name: str) -> None:
    chosen = replace(pg.ALGORITHMS[name], old_policy="sampler")
    assert "logp_old" not in chosen.needs  # a learner must not put its own there
    batch, logp = drawn()
    algorithm, batch = resolve_old_policy(chosen, batch, VERSION)
    assert algorithm == chosen
    batch = scored(batch, logp, algorithm.needs)
    assert batch.logp_old is batch.logp_sampler
    psi, batch = pulled(batch), chosen_from(batch, logp, algorithm)
    weight, ratio = gate_weight(pg.Forward(logp), batch, psi, algorithm)
    if not isinstance(algorithm.gate, pg.LogClip):  # which weighs 1 or 0
        assert ((weight[batch.mask] - 1).abs() > 1e-3).all()
    if not algorithm.corrections:  # a mask is one
        torch.testing.assert_close(
            algorithm.apply_corrections(weight, pg.Forward(logp), batch, psi), weight, rtol=0, atol=0
        )
    batch = replace(batch, entropy=torch.zeros_like(logp.detach()))
    result = measure_forward(passed(logp, batch), batch, psi, algorithm, algorithm.all_coefficients(batch))
    gate = algorithm.gate
    if isinstance(gate, pg.Clip):
        cut = (psi < 0) & (ratio < 1 - gate.low) | (psi > 0) & (ratio > 1 + gate.high)
        assert (cut & batch.mask).any()
        assert (weight[cut & batch.mask] == 0).all()
        assert result["clip_ratio/low"].value + result["clip_ratio/high"].value > 0
    elif isinstance(gate, pg.ClippedImportance):
        assert (weight[batch.mask] == ratio.clamp(gate.low, gate.high)[batch.mask]).all()


def test_partly_stale_rollout_is_corrected() -> None:
    batch, _ = drawn(lag=0)
    assert batch.version is not None
    row = int(batch.mask.any(1).nonzero()[0])
    version = batch.version.clone()
    version[row] -= 1
    algorithm, _ = resolve_old_policy(pg.DAPO, replace(batch, version=version), VERSION)
    assert algorithm.corrections == (pg.TruncatedIS(),)


def test_existing_corrections_are_kept() -> None:
    own = replace(pg.DAPO, corrections=(pg.MaskedIS(level="sequence"),))
    batch, _ = drawn()
    assert resolve_old_policy(own, batch, VERSION) == (own, batch)


@pytest.mark.parametrize("algorithm", [pg.RLOO, replace(pg.GRPO, old_policy="sampler")], ids=["learner", "sampler"])
def test_missing_sampler_logprobs_are_refused(algorithm: pg.Algorithm) -> None:
    batch = replace(drawn()[0], logp_sampler=None)
    with pytest.raises(pg.ConfigError, match=r"Batch\.logp_sampler is None, and .*: the sampler must return"):
        resolve_old_policy(algorithm, batch, VERSION)
    resolve_old_policy(pg.RLOO, replace(batch, version=None), VERSION)


def test_contradictions_with_the_sampler_as_old_policy() -> None:
    with pytest.raises(pg.ConfigError, match=r"which OnPolicy ignores: use 'learner'.*ratio=Token\(\)"):
        replace(pg.RLOO, old_policy="sampler")
    with pytest.raises(pg.ConfigError, match=r"TruncatedIS corrects for π_old/μ.*corrections=\(\)"):
        replace(pg.GRPO, old_policy="sampler", corrections=(pg.TruncatedIS(),))
    with pytest.raises(pg.ConfigError, match="old_policy must be 'learner' or 'sampler', not 'engine'"):
        replace(pg.GRPO, old_policy="engine")  # type: ignore[arg-type]


def test_staleness_is_counted_in_versions_over_the_sampled_tokens() -> None:
    mask = torch.tensor([[True, True, False], [True, False, False]])
    version = torch.tensor([[7, 6, 99], [3, -99, 99]])
    batch = pg.Batch(mask=mask, group=torch.zeros(2).long(), reward=torch.ones(2), version=version)
    result = staleness_metrics(batch, VERSION)
    assert {name: metric.value for name, metric in result.items()} == {
        "staleness/mean": pytest.approx(5 / 3),
        "staleness/max": 4.0,
        **dict.fromkeys((f"staleness/age_{age}" for age in (2, 8, 16, 32, 64)), 0.0),
        **dict.fromkeys((f"staleness/age_{age}" for age in (0, 1, 4)), pytest.approx(1 / 3)),
    }
    old = staleness_metrics(replace(batch, version=version - 500), VERSION)
    assert (old["staleness/age_64"].value, old["staleness/age_32"].value) == (1.0, 0.0)
    assert set(staleness_metrics(replace(batch, version=torch.full_like(version, VERSION)), VERSION)) == {
        "staleness/mean",
        "staleness/max",
    }
    assert staleness_metrics(replace(batch, version=None), VERSION) == {}
    assert staleness_metrics(replace(batch, mask=torch.zeros_like(mask)), VERSION) == {}
    with pytest.raises(pg.ConfigError, match=r"Batch\.version must be int64, not torch\.float32"):
        replace(batch, version=version.float())


def test_filters_require_their_batch_fields() -> None:
    class Unlikely(pg.Filter):
        """A user's filter: drops what the policy would hardly have said."""

        needs = frozenset({"logp_old"})

        def __call__(self, batch: pg.Batch) -> pg.Batch:
            assert batch.logp_old is not None
            likely = torch.where(batch.mask, batch.logp_old, 0).sum(1) > -6
            return replace(batch, mask=batch.mask & likely[:, None])

    algorithm = replace(pg.DR_GRPO, filters=(Unlikely(),))
    assert algorithm.filter_needs == algorithm.needs == {"logp_old"}
    batch, logp = drawn()
    with pytest.raises(pg.ConfigError, match=r"Unlikely needs Batch\.logp_old, which is None"):
        algorithm.apply_filters(batch)
    filled = replace(batch, logp_old=logp.detach())
    kept = algorithm.apply_filters(filled).mask.any(1)
    assert torch.equal(algorithm.filters[0].find_dropped(filled), batch.mask.any(1) & ~kept)
    assert 0 < int(kept.sum()) < int(batch.mask.any(1).sum())
