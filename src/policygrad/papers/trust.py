"""Other trust regions, and choices among the tokens of an update."""

from __future__ import annotations

from policygrad.papers.paper import CLIPPED, ZSCORE, Paper

TRUST: dict[str, Paper] = {
    "gmpo": Paper(
        "J = E[ 1/G Σ_i { Π_t min( r^sgn(Â_i), clip(r^sgn(Â_i), e^−0.4, e^0.4) )^sgn(Â_i) }^(1/|o_i|) Â_i ]\n" + ZSCORE,
        {
            "GeometricMean.low": "0.4 nats, sec. 4 and the authors' script",
            "GeometricMean.high": "0.4 nats, sec. 4 and the authors' script",
            "FirstOrder.epochs": "1: each rollout is gone over once",
            "FirstOrder.minibatches": "8: 1,024 answers a rollout, 128 an update (the authors' script)",
        },
        departs="nowhere that we know; a Ψ per token, which the paper does not have, weighs each token by its own",
    ),
    "dppo": Paper(
        "J = E[ 1/(B·L) Σ_i Σ_t M r Â ],   Â_i = R_i − mean_g R,   r = π_θ/μ\n"
        "M = 0 where Â > 0, r > 1, D > δ or Â < 0, r < 1, D > δ, else 1;   D = |π_θ(o_{i,t}) − μ(o_{i,t})|",
        {
            "DivergenceClip.measure": "binary total variation, the first of the paper's two; the binary KL is 'kl'",
            "DivergenceClip.delta": "0.15 for total variation (0.05 for the KL), the authors' script in verl",
            "FirstOrder.epochs": "1: each rollout is gone over once",
            "FirstOrder.minibatches": "8: 256 prompts a rollout, 32 an update (the authors' script)",
        },
        departs="G is 8 where the authors' script has 16, the ratio has no cap (the script: 10,000), and the top-K divergences, "
        "which need the sampler's likeliest tokens, are not built",
    ),
    "m2po": Paper(
        f"J = E[ 1/Σ_i|o_i| Σ_i Σ_t M r Â ],   r = π_θ/π_behaviour,   {ZSCORE}\n"
        "M: of the tokens with Â > 0, r > 1 or Â < 0, r < 1 the furthest are masked until the others' mean (log r)² ≤ τ",
        {
            "SecondMoment.threshold": "τ = 0.04, all of the paper's experiments",
            "FirstOrder.epochs": "1: each rollout is gone over once",
            "FirstOrder.minibatches": "4, the paper's experiments",
        },
        departs="algorithm 1 as published; the authors' code clips at a threshold that counts the masked tokens too, which masks "
        "more, but never inside 0.7 ≤ r ≤ 1.5, which masks fewer where the ratios spread far",
    ),
    "luspo": Paper(
        "J = E[ 1/G Σ_i |o_i| min( s_i Â_i, clip(s_i, 1 − ε_low, 1 + ε_high) Â_i ) ]\n" + ZSCORE,
        {
            "Clip.low": "2e-3, sec. 5.1",
            "Clip.high": "2.5e-3, sec. 5.1",
            "FirstOrder.epochs": "1, as for GSPO",
            "FirstOrder.minibatches": "4, as for GSPO: we found no number of the paper's",
        },
        departs="updates per rollout and G are GSPO's and ours: we found none in the paper",
    ),
    "vespo": Paper(
        "J = E[ sg[φ(W)] Â log π_θ(o) ],   W = π_θ(o)/μ(o),   φ(W) = W^k e^{λ(1 − W)}\n"
        f"(k, λ) by the sign of Â;   {ZSCORE}",
        {
            "GammaKernel.k_pos": "2, sec. 3.4 and the authors' scripts",
            "GammaKernel.lambda_pos": "3, sec. 3.4 and the authors' scripts",
            "GammaKernel.k_neg": "3, sec. 3.4 and the authors' scripts",
            "GammaKernel.lambda_neg": "2, sec. 3.4 and the authors' scripts",
            "FirstOrder.epochs": "1: each rollout is gone over once",
            "FirstOrder.minibatches": "8, the authors' script; the paper goes from 4 to 64",
        },
        departs="W is bounded by the number format and not at e^±20; nothing else that we know",
    ),
    "cpgd": Paper(
        "J = E[ 1/Σ_i|o_i| Σ_i Σ_t min( Â log r, Â clip(log r, log(1 − ε), log(1 + ε)) ) ] − β KL(π_old‖π_θ)\n"
        f"the KL's gradient as min(r − 1, 2) ∇log π_θ;   {ZSCORE}",
        {
            "LogClip.low": "0.2 as in siiRL, from the authors' institute",
            "LogClip.high": "0.2 as in siiRL, from the authors' institute",
            "PolicyDrift.beta": "0.001 as in siiRL, from the authors' institute",
            "PolicyDrift.cap": "2 as in siiRL, from the authors' institute",
            "FirstOrder.epochs": "1: each rollout is gone over once",
            "FirstOrder.minibatches": "2: 512 prompts a rollout, 256 an update (siiRL's scripts)",
        },
        departs="numbers are siiRL's: the authors' own code was not to be had; Â is over the std, and the clip-filter-like weight, "
        "the paper's other way to give more to what prompts with different rewards teach, is not built",
    ),
    "clip_cov": Paper(
        "J = E[ 1/Σ_i|o_i| Σ_i Σ_t min( r Â, clip(r, 0, 2) Â ) at all tokens but I ]\n"
        "I = ⌊2e-4 N⌋ of those with 1 < cov < 5, at random;   cov = (log π_θ − mean log π_θ)(Â − mean Â)\n" + ZSCORE,
        {
            "ClipCov.low": "1: no lower bound (the authors' scripts)",
            "ClipCov.high": "1: r up to 2 (the authors' scripts); the paper's formula has no bound",
            "ClipCov.share": "2e-4, the paper's experiments and the authors' scripts",
            "ClipCov.least": "1, the paper's experiments and the authors' scripts",
            "ClipCov.most": "5, the paper's experiments and the authors' scripts",
            "DropNoSpread.mode": "refill: dynamic sampling, the authors' scripts",
            "DropNoSpread.max_rounds": "our choice: they have 10",
            "FirstOrder.epochs": "1: each rollout is gone over once",
            "FirstOrder.minibatches": "8: 256 prompts a rollout, 32 an update (the authors' scripts)",
        },
        departs="the share of the band is drawn evenly in order of covariance, not at random; covariances "
        "are over an update, where the authors' code takes a micro-batch",
    ),
    "kl_cov": Paper(
        "J = E[ 1/Σ_i|o_i| Σ_i Σ_t ( r Â − β 1[(i, t) ∈ I] KL(π_old‖π_θ) ) ]\n"
        "I = the ⌊k N⌋ tokens of highest cov = (log π_θ − mean log π_θ)(Â − mean Â);   " + ZSCORE,
        {
            "KLCov.beta": "1, the authors' scripts",
            "KLCov.share": "2e-3, the authors' script for 7B; 2e-4 for 32B",
            "KLCov.form": "|log r|, what the authors' code has for the KL",
            "FirstOrder.epochs": "1: each rollout is gone over once",
            "FirstOrder.minibatches": "8: 256 prompts a rollout, 32 an update (the authors' scripts)",
        },
        departs="covariances are over an update, where the authors' code takes a micro-batch; the KL is |log r| as in that code, "
        "and form='k3' is nearer to the formula",
    ),
    "high_entropy": Paper(
        f"J = E[ 1/Σ_i|o_i| Σ_i Σ_t 1[H_t ≥ τ] {CLIPPED} ]   s.t.  0 < #right < G\n"
        f"τ: the entropy that the batch's highest 20 % begin with, of π_θ;   {ZSCORE}",
        {
            "HighEntropy.share": "0.2, sec. 5",
            "HighEntropy.of": "π_θ, also where the samples are of an older policy (sec. 2)",
            "FirstOrder.epochs": "1: each rollout is gone over once",
            "FirstOrder.minibatches": "16, as in DAPO, whose recipe it takes",
        },
        departs="as dapo departs; G is 8 where the paper has DAPO's 16",
    ),
}
