"""Gates, terms and masks that measure otherwise than by the token's ratio, or choose among an update's tokens: by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

import policygrad as pg
from doubles.random_batches import Shape, make, policy, shapes
from policygrad.core.objective import with_selected_tokens
from policygrad.core.ratios import covariance

NAN = math.nan
PLAIN = replace(pg.DR_GRPO, name="plain", advantage=(pg.GroupMean(),), gate=pg.Importance(), aggregation=pg.TokenMean())


def numbers(*rows: list[float]) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def batch_of(old: Tensor, rewards: list[float], entropy: Tensor | None = None) -> pg.Batch:
    """One prompt; a NaN in `old` is no token."""
    group = torch.zeros(len(old), dtype=torch.long)
    reward = torch.tensor(rewards, dtype=torch.float64)
    return pg.Batch(mask=~old.isnan(), group=group, reward=reward, logp_old=old, entropy=entropy)


def both_signs(change: list[float], old: float = -1.0) -> tuple[pg.Batch, Tensor, Tensor]:
    """(batch, r, Ψ): the same log-ratios in an answer with Ψ = +1 and in one with Ψ = −1."""
    logr = numbers(change, change)
    batch = batch_of(torch.full_like(logr, old), [2.0, 0.0])
    return batch, logr.exp(), numbers([1.0] * len(change), [-1.0] * len(change))


def test_geometric_mean_clips_before_averaging() -> None:
    batch, r, psi = both_signs([0.6, -0.5, 0.2])
    gate = pg.GeometricMean()
    up, down = math.exp((0.4 - 0.5 + 0.2) / 3), math.exp((0.6 - 0.4 + 0.2) / 3)
    torch.testing.assert_close(gate.weight(r, psi, batch), numbers([0, up, up], [down, 0, down]), rtol=1e-14, atol=0)
    torch.testing.assert_close(gate.value(r, psi, batch), numbers([up] * 3, [-down] * 3), rtol=1e-14, atol=0)
    below, above = gate.clipped(r, psi, batch)
    assert below.tolist() == [[False] * 3, [False, True, False]]
    assert above.tolist() == [[True, False, False], [False] * 3]


def test_the_geometric_mean_is_of_the_sampled_tokens_alone() -> None:
    old = numbers([-1.0, NAN, -1.0], [-1.0, -1.0, NAN])
    batch, r = batch_of(old, [1.0, 0.0]), numbers([0.1, 0.0, 0.3], [0.2, 0.2, 0.0]).exp()
    weight = pg.GeometricMean().weight(r, numbers([1.0] * 3, [1.0] * 3), batch)
    assert weight[0, 0].item() == pytest.approx(math.exp(0.2), rel=1e-15)
    assert weight[1, 0].item() == pytest.approx(math.exp(0.2), rel=1e-15)


def test_a_clip_that_keeps_gradients_weighs_what_lies_beyond() -> None:
    """Ratios inside, above and below 1 ± 0.2, and above the dual clip's 3."""
    r, batch = numbers([1.1, 2.0, 0.5, 4.0]), batch_of(numbers([-1.0] * 4), [1.0])
    gate = pg.parts.GradientPreservingClip(0.2, 0.2, beta_low=0.5, beta_high=2.0, c=3.0)
    for psi, expected in ((1.0, [1.1, 2.4, 0.5, 2.4]), (-1.0, [1.1, 2.0, 0.4, 0.0])):
        weight = gate.weight(r, numbers([psi] * 4), batch)
        torch.testing.assert_close(weight, numbers(expected), rtol=1e-12, atol=0)
    plain = pg.parts.GradientPreservingClip(0.2, 0.2, beta_low=0.0, beta_high=0.0, c=math.inf)
    for sign in (1.0, -1.0):
        psi_ = numbers([sign] * 4)
        assert torch.equal(plain.weight(r, psi_, batch), pg.Clip(0.2, 0.2).weight(r, psi_, batch))


def test_a_flipped_ratio_weighs_tokens_that_became_unlikely_most() -> None:
    r, batch = numbers([1.1, 2.0, 0.5, 4.0, 0.1]), batch_of(numbers([-1.0] * 5), [1.0])
    gate = pg.parts.FlippedImportance(0.2, 0.2, c=3.0)
    for psi, expected in ((1.0, [1 / 1.1, 0.0, 2.0, 0.0, 3.0]), (-1.0, [1.1, 2.0, 0.0, 3.0, 0.0])):
        weight = gate.weight(r, numbers([psi] * 5), batch)
        torch.testing.assert_close(weight, numbers(expected), rtol=1e-12, atol=0)


def test_divergence_clip_on_rare_and_common_tokens() -> None:
    """0.01 to 0.1, a ratio of 10, is 0.09 of total variation; 0.5 to 0.7, a ratio of 1.4, is 0.2."""
    old, new = numbers([0.01, 0.5, 0.5]), numbers([0.1, 0.7, 0.3])
    batch = batch_of(old.log(), [1.0])
    for psi, expected in ((1.0, [10.0, 0.0, 0.6]), (-1.0, [10.0, 1.4, 0.0])):
        gate = pg.DivergenceClip("tv", 0.15)
        weight = gate.weight(new / old, numbers([psi] * 3), batch)
        torch.testing.assert_close(weight, numbers(expected), rtol=1e-12, atol=0)
        torch.testing.assert_close(gate.value(new / old, numbers([psi] * 3), batch), psi * weight)
        capped = replace(gate, c=4.0)
        torch.testing.assert_close(
            capped.weight(new / old, numbers([psi] * 3), batch), weight.clamp(max=4), rtol=1e-12, atol=0
        )
        value = capped.value(new / old, numbers([psi] * 3), batch)[0, 0]
        assert value.item() == pytest.approx(psi * 4 * (1 + math.log(10 / 4)), rel=1e-12)


def test_the_binary_divergences_by_hand_and_below_the_vocabularys() -> None:
    old, new = numbers([0.2, 0.5, 0.3]), numbers([0.4, 0.4, 0.2])
    batch = batch_of(old.log(), [1.0])
    tv = pg.DivergenceClip("tv").divergence(new / old, batch)
    kl = pg.DivergenceClip("kl", 0.05).divergence(new / old, batch)
    torch.testing.assert_close(tv, numbers([0.2, 0.1, 0.1]))
    assert kl[0, 0].item() == pytest.approx(0.2 * math.log(0.2 / 0.4) + 0.8 * math.log(0.8 / 0.6), abs=1e-7)
    assert bool((tv <= (new - old).abs().sum() / 2 + 1e-15).all())
    assert bool((kl <= (old * (old / new).log()).sum() + 1e-7).all())


def test_a_certain_token_has_a_finite_divergence() -> None:
    batch = batch_of(numbers([0.0, -1e-9, -50.0]), [1.0])
    ratio = numbers([1.0, 1.0 + 1e-9, math.exp(43.0)])
    for measure in ("tv", "kl"):
        assert pg.DivergenceClip(measure, 0.05).divergence(ratio, batch).isfinite().all()  # type: ignore[arg-type]


def test_divergence_clip_never_clips_on_policy() -> None:
    batch = replace(batch_of(numbers([-1.0, -2.0]), [1.0]), logp_old=None)
    assert torch.equal(
        pg.DivergenceClip().weight(numbers([1.0, 1.0]), numbers([1.0, -1.0]), batch), numbers([1.0, 1.0])
    )


def test_the_gamma_kernel_by_hand() -> None:
    batch, r, psi = both_signs([math.log(0.5), 0.0, math.log(2.0)])
    expected = numbers(
        [0.25 * math.exp(1.5), 1.0, 4 * math.exp(-3.0)], [0.125 * math.exp(1.0), 1.0, 8 * math.exp(-2.0)]
    )
    torch.testing.assert_close(pg.GammaKernel().weight(r, psi, batch), expected, rtol=1e-14, atol=0)


@pytest.mark.parametrize("change", [-95.0, 95.0])
def test_gamma_kernel_vanishes_in_float32(change: float) -> None:
    batch, _, psi = both_signs([change])
    ratio = pg.SequenceProduct()(numbers([change], [change]).float(), batch.mask)
    weight = pg.GammaKernel().weight(ratio, psi.float(), batch)
    assert weight.isfinite().all()
    assert weight.abs().max() < 1e-30


def test_the_log_clip_by_hand() -> None:
    batch, r, psi = both_signs([math.log(0.5), 0.0, math.log(1.5)])
    gate = pg.LogClip(0.2, 0.2)
    assert gate.weight(r, psi, batch).tolist() == [[1, 1, 0], [0, 1, 1]]
    expected = numbers([math.log(0.5) + 1, 1, math.log(1.2) + 1], [-math.log(0.8) - 1, -1, -math.log(1.5) - 1])
    torch.testing.assert_close(gate.value(r, psi, batch), expected, rtol=1e-14, atol=1e-15)


def test_drift_penalty_is_capped() -> None:
    """k is the derivative of the value, also where it bends, at r = 3."""
    change = torch.linspace(-3, 3, 61, dtype=torch.float64)[None]
    batch = batch_of(torch.full_like(change, -1.0), [1.0])
    term, h = pg.KLToOld(0.5, cap=2.0), 1e-6
    k = term.score(pg.Forward(change - 1), batch, change)
    ahead, behind = (term.value(pg.Forward(change - 1 + d), batch, change) for d in (h, -h))
    torch.testing.assert_close(k, (ahead - behind) / (2 * h), rtol=0, atol=1e-6)
    assert k.min().item() == -1.0
    assert k[0, 30].item() == pytest.approx(0.0, abs=1e-15)


def selected(algorithm: pg.Algorithm, batch: pg.Batch, out: pg.Forward, psi: Tensor) -> list[list[int]]:
    return with_selected_tokens(out, batch, psi, algorithm).selected.int().tolist()  # type: ignore[union-attr]


def test_second_moment_drops_the_fewest_furthest_tokens() -> None:
    """Squares of those that moved with Ψ: 0.01, 0.04, 0.09 and 1; with three of them the mean is 0.0467, with two 0.025."""
    change = numbers([0.1, 0.3, -5.0], [-0.2, -1.0, 5.0])
    batch, psi = batch_of(torch.full_like(change, -6.0), [2.0, 0.0]), numbers([1.0] * 3, [-1.0] * 3)
    algorithm = replace(PLAIN, gate=pg.SecondMomentFilter(0.04))
    assert selected(algorithm, batch, pg.Forward(change - 6), psi) == [[0, 1, 0], [0, 1, 0]]
    wider = replace(PLAIN, gate=pg.SecondMomentFilter(0.05))
    assert selected(wider, batch, pg.Forward(change - 6), psi) == [[0, 0, 0], [0, 1, 0]]
    chosen = with_selected_tokens(pg.Forward(change - 6), batch, psi, algorithm)
    r = change.exp()
    kept = numbers([1, 0, 1], [1, 0, 1])
    torch.testing.assert_close(pg.SecondMomentFilter().weight(r, psi, chosen), r * kept)
    torch.testing.assert_close(pg.SecondMomentFilter().value(r, psi, chosen), r * kept * psi)


def test_no_token_is_dropped_on_policy() -> None:
    change = numbers([0.0, 0.0], [0.0, 0.0])
    batch, psi = batch_of(change - 1, [2.0, 0.0]), numbers([1.0] * 2, [-1.0] * 2)
    assert selected(replace(PLAIN, gate=pg.SecondMomentFilter(0.0)), batch, pg.Forward(change - 1), psi) == [
        [0, 0],
        [0, 0],
    ]


def test_clip_cov_selects_evenly_from_the_band() -> None:
    """log π = 0, −1, −2, −3 and 0, −1, −2, −3 with Ψ = ±1: covariances ±1.5, ±0.5; four in (0.4, 2), two of each size."""
    logp = numbers([0.0, -1.0, -2.0, -3.0], [0.0, -1.0, -2.0, -3.0])
    batch, psi = batch_of(logp, [2.0, 0.0]), numbers([1.0] * 4, [-1.0] * 4)
    gate = pg.ClipCov(fraction=1e-9, cov_low=0.4, cov_high=2.0)
    assert selected(replace(PLAIN, gate=gate), batch, pg.Forward(logp), psi) == [
        [1, 0, 0, 0],
        [0, 0, 0, 1],
    ]  # 1.5 twice
    gate = replace(gate, fraction=0.25)  # two of eight
    assert selected(replace(PLAIN, gate=gate), batch, pg.Forward(logp), psi) == [[1, 1, 0, 0], [0, 0, 1, 1]]
    gate = replace(gate, cov_high=1.0)
    assert selected(replace(PLAIN, gate=gate), batch, pg.Forward(logp), psi) == [[0, 1, 0, 0], [0, 0, 1, 0]]
    gate = replace(gate, cov_low=5.0, cov_high=6.0)
    assert selected(replace(PLAIN, gate=gate), batch, pg.Forward(logp), psi) == [[0] * 4, [0] * 4]


def test_clipped_tokens_are_not_selected_again() -> None:
    logp = numbers([0.0, -1.0, -2.0, -3.0], [0.0, -1.0, -2.0, -3.0])
    old = logp.clone()
    old[0, 0] = -2.0  # r = e² and Ψ > 0
    batch, psi = batch_of(old, [2.0, 0.0]), numbers([1.0] * 4, [-1.0] * 4)
    gate = pg.ClipCov(fraction=1e-9, cov_low=1.0, cov_high=2.0)
    algorithm, out = replace(PLAIN, gate=gate), pg.Forward(logp)
    assert selected(algorithm, batch, out, psi) == [[0, 0, 0, 0], [0, 0, 0, 1]]
    chosen = with_selected_tokens(out, batch, psi, algorithm)
    weight = gate.weight((logp - old).exp(), psi, chosen)
    assert weight.tolist() == [[0, 1, 1, 1], [1, 1, 1, 0]]


def test_kl_cov_penalises_only_the_highest_covariances() -> None:
    logp = numbers([0.0, -1.0, -2.0, -4.0], [0.0, -1.0, -2.0, -3.0])
    batch, psi = batch_of(logp - 0.5, [2.0, 0.0]), numbers([1.0] * 4, [-1.0] * 4)
    term = pg.KLCov(2.0, fraction=0.25)
    algorithm = replace(pg.KL_COV, filters=(), terms=(term,))
    assert selected(algorithm, batch, pg.Forward(logp), psi) == [[1, 0, 0, 0], [0, 0, 0, 1]]
    chosen = with_selected_tokens(pg.Forward(logp), batch, psi, algorithm)
    assert term.score(pg.Forward(logp), chosen, psi).tolist() == [[-2, 0, 0, 0], [0, 0, 0, -2]]
    assert term.value(pg.Forward(logp), chosen, psi).tolist() == [[-1, 0, 0, 0], [0, 0, 0, -1]]
    smooth = replace(term, form="k3").score(pg.Forward(logp), chosen, psi)
    assert smooth[0, 0].item() == pytest.approx(2 * (1 - math.exp(0.5)), rel=1e-14)


def test_kl_cov_selects_exactly_its_fraction_among_ties() -> None:
    """26 of 52 tokens are at log π = 0 and have one Ψ: of the 2e-3 of them one token is held, and not 26."""
    k = torch.arange(26)
    logp = torch.stack([torch.zeros(26), torch.where(k < 20, -1.0 - k, -4.0)]).double()
    batch, psi = (
        batch_of(logp - 0.5, [2.0, 0.0]),
        torch.stack([torch.ones(26), torch.where(k < 20, 1.0, -1.0)]).double(),
    )
    for share, count in ((2e-3, 1), (0.1, 5)):
        algorithm = replace(pg.KL_COV, filters=(), terms=(pg.KLCov(fraction=share),))
        chosen = with_selected_tokens(pg.Forward(logp), batch, psi, algorithm).selected
        assert chosen is not None
        assert int(chosen.sum()) == count
        assert chosen[0, :count].all()


def test_only_the_highest_entropy_tokens_learn() -> None:
    entropy = numbers([0.1, 0.9, NAN, 0.5], [0.2, 0.8, 0.3, 0.4])
    old = torch.where(entropy.isnan(), NAN, -1.0)
    batch, psi = batch_of(old, [2.0, 0.0], entropy), numbers([1.0] * 4, [-1.0] * 4)
    out = pg.Forward(old, entropy=entropy)
    for share, expected in ((0.2, [[0, 1, 0, 0], [0, 1, 0, 0]]), (0.1, [[0, 1, 0, 0], [0, 0, 0, 0]]), (1.0, None)):
        for of in ("current", "old"):
            algorithm = replace(PLAIN, corrections=(pg.HighEntropy(share, of),))  # type: ignore[arg-type]
            assert selected(algorithm, batch, out, psi) == (expected or batch.mask.int().tolist())


def test_old_policy_entropy_needs_no_extra_pass() -> None:
    now, old = pg.HighEntropy(), pg.HighEntropy(of="old")
    assert (now.forward_needs, old.forward_needs) == ({"entropy"}, set())
    assert "entropy" in replace(PLAIN, corrections=(old,)).needs
    assert "entropy" not in replace(PLAIN, corrections=(now,)).needs


SELECTING = {
    "second moment": replace(PLAIN, gate=pg.SecondMomentFilter(0.1)),
    "clip-cov": replace(PLAIN, gate=pg.ClipCov(fraction=0.3, cov_low=-0.5, cov_high=2.0)),
    "high entropy": replace(PLAIN, corrections=(pg.HighEntropy(0.3),)),
}


@pytest.mark.parametrize("name", SELECTING)
@settings(max_examples=20, derandomize=True)
@given(shape=shapes(), seed=st.integers(0, 1000))
def test_selection_does_not_depend_on_token_order(name: str, shape: Shape, seed: int) -> None:
    algorithm = SELECTING[name]
    batch, logits = make(shape, 0.5, "entropy")
    logp, psi = policy(logits, batch.tokens, batch.mask).detach(), algorithm.compute_advantages(batch)
    # where Ψ is its mean, covariances are 0 but for rounding, and which of them is largest depends on the order of a sum
    cov = covariance(logp, psi, batch.mask)[batch.mask].sort().values
    assume(name != "clip-cov" or bool((cov.diff() > 1e-9).all()))
    order = torch.randperm(len(logp), generator=torch.Generator().manual_seed(seed))
    chosen = with_selected_tokens(pg.Forward(logp, entropy=batch.entropy), batch, psi, algorithm).selected
    shuffled = batch.select(order)
    rerun = with_selected_tokens(
        pg.Forward(logp[order], entropy=shuffled.entropy), shuffled, psi[order], algorithm
    ).selected
    assert chosen is not None
    assert rerun is not None
    assert torch.equal(rerun, chosen[order])
    assert not (chosen & ~batch.mask).any()


REFUSED = [
    (lambda: pg.GeometricMean(low=0.0), "GeometricMean.low must be above 0"),
    (lambda: pg.DivergenceClip("tv", 1.0), "DivergenceClip.delta must be below 1 for 'tv'"),
    (lambda: pg.DivergenceClip("js"), "DivergenceClip.measure must be 'tv'"),  # type: ignore[arg-type]
    (lambda: pg.GammaKernel(k_pos=-1.0), "GammaKernel.k_pos must be above 0"),
    (lambda: pg.LogClip(low=1.0), "LogClip.low must be between 0 and 1"),
    (lambda: pg.KLToOld(cap=0.0), "KLToOld.cap must be above 0"),
    (lambda: pg.KLToOld(form="k2", cap=2.0), "KLToOld.cap must be None with form 'k2'"),
    (lambda: pg.SecondMomentFilter(-1.0), "SecondMomentFilter.threshold must be at least 0"),
    (lambda: pg.ClipCov(fraction=0.0), "ClipCov.fraction must be above 0"),
    (lambda: pg.ClipCov(cov_low=5.0, cov_high=5.0), "ClipCov.cov_low must be below ClipCov.cov_high"),
    (lambda: pg.KLCov(form="k1"), "KLCov.form must be 'abs'"),  # type: ignore[arg-type]
    (lambda: pg.HighEntropy(1.5), "HighEntropy.fraction must be above 0 and at most 1"),
    (lambda: pg.HighEntropy(of="new"), "HighEntropy.of must be 'current'"),  # type: ignore[arg-type]
    (
        lambda: replace(pg.GMPO, ratio=pg.Sequence()),
        "GeometricMean needs per-token ratios, and ratio is Sequence.*set ratio=Token",
    ),
    (lambda: replace(pg.DPPO, ratio=pg.SequenceProduct()), "DivergenceClip needs per-token ratios"),
    (lambda: replace(pg.CLIP_COV, terms=(pg.KLCov(),)), "each select tokens of an update"),
    (
        lambda: replace(pg.M2PO, update_rule=pg.TrustRegion()),
        "SecondMomentFilter selects tokens of one gradient step",
    ),
    (lambda: replace(pg.DPPO, gate=pg.OnPolicy(), ratio=None, update_rule=pg.GradientSteps()), "old_policy='sampler'"),
]


@pytest.mark.parametrize(("build", "message"), REFUSED)
def test_invalid_settings_are_refused_with_a_remedy(build, message: str) -> None:
    with pytest.raises(pg.ConfigError, match=message):
        build()


def test_entropy_selection_names_the_missing_output() -> None:
    batch = batch_of(numbers([-1.0], [-1.0]), [1.0, 0.0])
    psi = numbers([1.0], [-1.0])
    with pytest.raises(
        pg.ConfigError, match=r"HighEntropy selects tokens by the current policy's entropy.*Forward with"
    ):
        pg.surrogate(numbers([-1.0], [-1.0]), batch, psi, replace(PLAIN, corrections=(pg.HighEntropy(),)))
