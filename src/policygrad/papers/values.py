"""REINFORCE with its baselines, and the methods that have a critic, up to VAPO."""

from __future__ import annotations

from policygrad.papers.paper import CLIPPED, Paper

VALUES: dict[str, Paper] = {
    "reinforce": Paper(
        "J = E[ R(o) ],   ∇J = E[ (R(o) − b) ∇log π_θ(o) ],  b independent of o",
        departs="the batch, the running mean's decay and the optimiser (AdamW) are ours: the paper's rule is for one "
        "step of plain gradient ascent",
    ),
    "rloo": Paper(
        "∇J = E[ 1/k Σ_i ( R_i − 1/(k−1) Σ_{j≠i} R_j ) ∇log π_θ(o_i) ]\nR(o) = score(o) − β log( π_θ(o)/π_ref(o) )",
        {
            "samples_per_prompt": "k = 4, the larger of the paper's 2 and 4",
            "KLInReward.beta": "0.05 as in Stiennon et al. 2020; the paper has 0.03 (app. C)",
            "SequenceSum.group_power": "1: the mean over samples, as the paper has it",
            "KLInReward.level": "sequence: the completion's whole KL in its one reward, as in the objective above",
        },
        departs="β is 0.05 where the paper has 0.03; the rest is as published",
    ),
    "opo": Paper(
        "∇J = E[ (R(o) − b*) ∇log π_θ(o) ],   b* = E[‖∇log π_θ(o)‖² R]/E[‖∇log π_θ(o)‖²] ≈ Σ_j |o_j| R_j / Σ_j |o_j|",
        {
            "OptimalBaseline.norm": "length: the paper takes ‖∇log π_θ(o)‖² to grow with |o|",
            "OptimalBaseline.leave_one_out": "off, as published",
            "FirstOrder.epochs": "1: the paper trains exactly on-policy",
            "FirstOrder.minibatches": "1: the paper trains exactly on-policy",
        },
        departs="G is our choice; the rest is as published",
    ),
    "a2c": Paper(
        "∇J = E[ ∇log π_θ(a_t|s_t) ( Σ_{i<k} γ^i r_{t+i} + γ^k V(s_{t+k}) − V(s_t) ) + η ∇H(π_θ(·|s_t)) ]",
        {
            "NStep.n": "t_max = 5, the paper's experiments",
            "NStep.gamma": "1: an episode is one answer, and γ < 1 would penalise its length; the paper has 0.99",
            "Entropy.eta": "0.01, the paper's experiments",
            "Critic.clip": "none, as in the paper",
        },
        departs="γ is 1, an episode is one answer, the critic has parameters of its own, and AdamW takes RMSProp's "
        "place",
    ),
    "trpo": Paper(
        "maximise E[ r Â ]  subject to  E_s[ KL( π_old(·|s) ‖ π_θ(·|s) ) ] ≤ δ",
        {
            "TrustRegion.delta": "δ = 0.01, the paper's experiments",
            "TrustRegion.iterations": "10 conjugate-gradient steps, app. C",
            "TrustRegion.damping": "0.1, as in OpenAI's Spinning Up",
            "TrustRegion.backtrack": "0.8, as in OpenAI's Spinning Up",
            "TrustRegion.tries": "10, as in OpenAI's Spinning Up",
            "TrustRegion.line_search": "the paper, app. C",
            "TrustRegion.fisher": "exact in every state, as the paper prefers (app. C)",
            "GAE.gamma": "1: an episode is one answer",
            "GAE.lam": "Schulman et al. 2016 (GAE)",
        },
        departs="the advantages are GAE with a learned critic (the paper takes sums of rewards), γ is 1, and damping "
        "and the line search's numbers are Spinning Up's",
    ),
    "natural": Paper(
        "Δθ = √( 2δ / gᵀF⁻¹g ) F⁻¹g,   g = ∇J,  F = E[ ∇log π ∇log πᵀ ]",
        {"TrustRegion.line_search": "off: the paper has none"},
        departs="δ sets the step's length and the advantages are GAE: the paper has a fixed step size and Q-values",
    ),
    "ppo": Paper(
        "J = E_t[ min( r Â, clip(r, 1 − ε, 1 + ε) Â ) ] − c_1 E_t[ (V_φ(s_t) − V_target)² ]",
        {
            "Clip.low": "ε = 0.2, table 1 (the best of three)",
            "Clip.high": "ε = 0.2, table 1 (the best of three)",
            "GAE.lam": "0.95, tables 3 to 5",
            "GAE.gamma": "1 as in Ziegler et al. 2019, for language; the paper's 0.99 would penalise length",
            "KLInReward.beta": "0.05 as in Stiennon et al. 2020; not part of PPO itself",
            "FirstOrder.epochs": "4 as in Ziegler et al. 2019 and Stiennon et al. 2020, for language; the paper has "
            "3 to 15",
            "Critic.clip": "0.2, the value clipping of the authors' code (Huang et al. 2022)",
            "Critic.coefficient": "½, as in the authors' code; the paper has c_1 = 1 (table 5)",
            "Critic.lam": "the advantages' λ, as in the paper",
            "FirstOrder.minibatches": "1 as in the code of Ziegler et al. 2019 (nminibatches), for language; the "
            "paper has minibatches of 64 steps",
        },
        departs="as used for language since Ziegler et al. 2019: γ = 1, a KL to the reference in the reward, a "
        "clipped value loss, no entropy bonus",
    ),
    "ppo_penalty": Paper(
        "J = E_t[ r Â − β KL( π_old(·|s_t) ‖ π_θ(·|s_t) ) ]\nthen β ← 2β if KL > 1.5 target,  β/2 if KL < target/1.5",
        {
            "KLToOld.target": "0.01, table 1 (the middle of three)",
            "KLToOld.beta": "β starts at 1, the paper's experiments",
            "FirstOrder.epochs": "4 as in ppo: the paper has 10",
            "FirstOrder.minibatches": "1 as in ppo",
        },
        departs="whitened advantages, γ = 1 and 4 passes as in ppo for language; β is adapted after each rollout, as "
        "in the paper",
    ),
    "vapo": Paper(
        f"J = 1/Σ_i|o_i| Σ_i Σ_t {CLIPPED}  +  μ · 1/Σ_{{o_i right}} |o_i| Σ_{{o_i right}} Σ_t log π_θ(o_{{i,t}})\n"
        "Â = GAE with λ = 1 − 1/(α|o|)",
        {
            "LengthAdaptiveGAE.alpha": "α = 0.05, the paper's experiments",
            "LengthAdaptiveGAE.gamma": "1: an episode is one answer",
            "Clip.low": "0.2, the paper's experiments",
            "Clip.high": "0.28, the paper's experiments",
            "PositiveNLL.mu": "μ = 0.1, the paper's experiments",
            "PositiveNLL.threshold": "our choice: an answer is right where its reward is 1",
            "PositiveNLL.aggregate": "the mean over the tokens of right answers, as in the paper",
            "Critic.lam": "λ_critic = 1 (decoupled GAE)",
            "Critic.pretrain": "our choice: 20 rollouts at most; the paper fits about 50 steps",
            "samples_per_prompt": "16, the paper's experiments",
            "FirstOrder.epochs": "1: the paper mentions no second pass",
            "FirstOrder.minibatches": "16: 8,192 samples in mini-batches of 512, sec. 5.1",
        },
        departs="the critic starts from the policy and not from a reward model, is fitted for 20 rollouts at most "
        "where the paper has about 50 steps, and learns ten times as fast as the policy (twice)",
    ),
}
