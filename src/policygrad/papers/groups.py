"""GRPO and what is made of it by another average, ratio, gate or recipe; VinePPO, which samples its values."""

from __future__ import annotations

from policygrad.papers.paper import CLIPPED, ZSCORE, Paper

GROUPS: dict[str, Paper] = {
    "grpo": Paper(
        f"J = E[ 1/G Σ_i 1/|o_i| Σ_t ( min( r Â, clip(r, 1 − ε, 1 + ε) Â ) − β (e^{{−u}} + u − 1) ) ]\n{ZSCORE}"
        ",   u = log π_θ − log π_ref",
        {
            "KLToReference.beta": "0.04, sec. 4.2",
            "KLToReference.form": "k3, eq. 4",
            "Clip.low": "0.2 as in PPO: this paper gives no ε",
            "Clip.high": "0.2 as in PPO: this paper gives no ε",
            "GroupStd.ddof": "1 as in common code: the paper says std and no more",
            "samples_per_prompt": "our choice, for small machines; the paper samples 64 (sec. 4.2)",
            "FirstOrder.epochs": "one update per rollout, sec. 4.2",
            "FirstOrder.minibatches": "one update per rollout, sec. 4.2",
        },
        departs="G is 8 where the paper has 64, ε is PPO's since the paper gives none, and a verifier's scores stand "
        "for those of a reward model",
    ),
    "grpo_process": Paper(
        f"J = E[ 1/G Σ_i 1/|o_i| Σ_t {CLIPPED} − β KL(π_θ‖π_ref) ]\n"
        "Â_{i,t} = Σ_{step ends j ≥ t} (r_{i,j} − mean_g r)/std_g r,   over the rewards of all steps of the group",
        {
            "ProcessReward.eps": "our choice, as for the group's std",
            "ProcessReward.ddof": "1, as for the group's std",
            "FirstOrder.epochs": "one update per rollout, sec. 4.2",
            "FirstOrder.minibatches": "one update per rollout, sec. 4.2",
        },
        departs="as grpo: G is 8 where the paper has 64",
    ),
    "iterative_grpo": Paper(
        "as grpo, with π_ref ← π_θ at the start of every iteration (algorithm 1)",
        {
            "Reference.every": "our choice: the paper renews it once per iteration and gives no length",
            "FirstOrder.epochs": "our choice: μ of algorithm 1",
            "FirstOrder.minibatches": "1: algorithm 1 goes over the whole batch μ times",
        },
        departs="the reference is renewed every 100 rollouts, the paper's iteration having no stated length, and the "
        "reward model is not trained on",
    ),
    "dr_grpo": Paper(
        "J = E[ 1/G Σ_i Σ_t min( r Â, clip(r, 1 − ε, 1 + ε) Â ) ],   Â_i = R_i − mean_g R",
        {
            "samples_per_prompt": "8, the authors' code",
            "FirstOrder.epochs": "1 inner epoch, app. G, table 6",
            "FirstOrder.minibatches": "our choice: the paper states none, and the authors' code takes 8, 128 of "
            "1,024 completions at a time",
        },
        departs="divided by the token budget, as in the authors' code and not in the formula, which is the same "
        "direction; one update per rollout, where that code takes 8",
    ),
    "dapo": Paper(
        f"J = E[ 1/Σ_i|o_i| Σ_i Σ_t {CLIPPED} ]   s.t.  0 < #right < G\n{ZSCORE}",
        {
            "Clip.low": "0.2, sec. 4.1",
            "Clip.high": "0.28, sec. 4.1",
            "SoftOverlong.cache": "4,096 of 20,480 tokens, sec. 4.1",
            "DropNoSpread.mode": "refill, eq. 11",
            "DropNoSpread.max_rounds": "our choice: the paper sets no bound",
            "samples_per_prompt": "our choice, for small machines; the paper samples 16 (sec. 4.1)",
            "FirstOrder.epochs": "1: each rollout is gone over once",
            "FirstOrder.minibatches": "16 updates per rollout: 8,192 answers in mini-batches of 512, sec. 4.1",
            "SoftOverlong.scale": "1, eq. 13",
        },
        departs="the token mean is over the step and not per group (eq. 8), as in the authors' code; rewards are 0 "
        "and 1 where the paper has −1 and 1, which doubles the length penalty beside them; truncated answers "
        "are masked and punished, as in the published ladder, where the authors' script only punishes; G is 8 "
        "where the paper has 16",
    ),
    "prorl": Paper(
        f"J = E[ 1/Σ_i|o_i| Σ_i Σ_t {CLIPPED} ] − β KL( π_θ ‖ π_ref ),   π_ref and the optimiser renewed now and then",
        {
            "Clip.low": "0.2, the paper's experiments",
            "Clip.high": "0.4, the paper's experiments",
            "KLToReference.form": "k2 as in the authors' later code (OpenRLHF, ProRL v2)",
            "KLToReference.beta": "our choice",
            "Reference.every": "our choice: the paper resets when validation stalls",
            "Reference.reset": "the paper, sec. 2",
            "FirstOrder.epochs": "1: each rollout is gone over once",
            "FirstOrder.minibatches": "4 updates per rollout: batch 256, mini-batch 64, sec. 3.2",
        },
        departs="the reset comes every 200 rollouts, not when validation stalls (Reference(stall=…) does that); token "
        "mean, overlong mask and length penalty are DAPO's, of which the paper takes the clip and the dynamic "
        "sampling; temperature is 1 (1.2) and G is 8 (16)",
    ),
    "magistral": Paper(
        f"J = E[ 1/Σ_i|o_i| Σ_i Σ_t {CLIPPED} ]   s.t.  some R_i differ\n"
        "Ã_i = R_i − mean_g R,   Â_i = (Ã_i − mean_batch Ã)/std_batch Ã",
        {
            "Clip.low": "0.2 as in PPO",
            "Clip.high": "0.28: the paper tunes it between 0.26 and 0.28 (sec. 2.1); another source says about 0.25",
            "DropNoSpread.mode": "our choice: the paper only says that such groups are filtered",
            "FirstOrder.epochs": "1: a batch is one update, sec. 6.3",
            "FirstOrder.minibatches": "1: the paper trains with n_batch = n_minibatch, since more than 2 hurt (sec. "
            "6.3, fig. 6)",
            "SoftOverlong.scale": "0.1, eq. 1",
            "SoftOverlong.cache": "a fifth as in DAPO: the paper gives l_max − l_cache alone",
        },
        departs="of the rewards only correctness (the task's) and length: the 0.1 each for format and language are "
        "for a task to give; ε_high is fixed, and generation is synchronous",
    ),
    "gspo": Paper(
        f"J = E[ 1/G Σ_i min( s_i Â_i, clip(s_i, 1 − ε_low, 1 + ε_high) Â_i ) ]\n"
        f"s_i = ( π_θ(o_i)/π_old(o_i) )^(1/|o_i|),   {ZSCORE}",
        {
            "Clip.low": "3e-4, sec. 5.1",
            "Clip.high": "4e-4, sec. 5.1",
            "FirstOrder.epochs": "1: each rollout is gone over once",
            "FirstOrder.minibatches": "4: each batch of rollouts in four mini-batches, sec. 5.1",
        },
        departs="G is our choice: we found none in the paper; nothing else that we know",
    ),
    "gspo_token": Paper(
        "J = E[ 1/G Σ_i 1/|o_i| Σ_t min( s_{i,t} Â_{i,t}, clip(s_{i,t}, 1 − ε_low, 1 + ε_high) Â_{i,t} ) ]\n"
        "s_{i,t} = sg[s_i] · π_θ(o_{i,t})/sg[π_θ(o_{i,t})]",
        {
            "FirstOrder.epochs": "1: each rollout is gone over once",
            "FirstOrder.minibatches": "4, as for GSPO: sec. 5.1 of the same paper",
        },
        departs="the advantage is GSPO's unless rewards come per token: the paper leaves open where token-level "
        "advantages come from",
    ),
    "cispo": Paper(
        "J = E[ 1/Σ_i|o_i| Σ_i Σ_t sg[ clip(r, 1 − ε_low, 1 + ε_high) ] Â log π_θ(o_{i,t}) ]\n" + ZSCORE,
        {
            "WeightCap.low": "0: the paper sets no lower bound",
            "WeightCap.high": "5 as an absolute bound, from Khatri et al. 2025 (ScaleRL), arXiv:2510.13786; "
            "the paper tunes it and gives no number",
            "FirstOrder.epochs": "1: each rollout is gone over once",
            "FirstOrder.minibatches": "16 rounds of off-policy updates per generation batch, sec. 3.1",
            "SoftOverlong.scale": "1: the paper takes DAPO's length penalty, sec. 3.1",
            "SoftOverlong.cache": "a fifth as in DAPO, whose penalty it is",
            "DropNoSpread.mode": "refill: the paper takes DAPO's dynamic sampling, sec. 3.1",
        },
        departs="the token mean is over the step and not per group (eq. 4); ε_high is ScaleRL's, the paper gives "
        "none; the stop of repetitive answers and the optimiser's settings (sec. 3.2) are left out",
    ),
    "vineppo": Paper(
        f"J = E[ 1/Σ_i|o_i| Σ_i Σ_t {CLIPPED} ],   r_t −= β ( log π_old − log π_ref )\n"
        "Â_t = r(step of t) + V(next step) − V(step),   V(s) = 1/K Σ_k R(o_k),  o_k ~ π_old(·|s)",
        {
            "PrefixValue.samples": "K = 9, the paper's main experiments",
            "samples_per_prompt": "8, the paper's experiments",
            "FirstOrder.epochs": "2 epochs per iteration, the authors' code",
            "FirstOrder.minibatches": "8: 512 answers in batches of 64, the authors' code",
            "KLInReward.beta": "0.05 as in ppo; the authors' runs have 1e-4",
        },
        departs="the KL is in the reward (β 0.05), as in the paper's statement of the problem; the authors' runs have "
        "k3 in the loss with 1e-4, and whiten the advantages",
    ),
    "sapo": Paper(
        f"J = E[ 1/G Σ_i 1/|o_i| Σ_t σ( τ (r − 1) ) · 4/τ · Â ],   τ = τ_pos if Â > 0 else τ_neg\n{ZSCORE}",
        {
            "SoftGate.tau_pos": "1.0, the paper's experiments",
            "SoftGate.tau_neg": "1.05, the paper's experiments",
            "FirstOrder.epochs": "1: each rollout is gone over once",
            "FirstOrder.minibatches": "4: each batch of rollouts in four mini-batches, sec. 5.1",
        },
        departs="G is our choice: we found none in the paper; nothing else that we know",
    ),
}
