"""More than one reward a completion: several rewards, turns, demonstrations, a second model, branches."""

from __future__ import annotations

from policygrad.papers.paper import CLIPPED, ZSCORE, Paper

DATA: dict[str, Paper] = {
    "gdpo": Paper(
        f"J = E[ 1/G Σ_i 1/|o_i| Σ_t {CLIPPED} ],   Â = (A − mean_batch A)/std_batch A\n"
        "A_i = Σ_k w_k (r_{k,i} − mean_g r_k)/std_g r_k,   k the reward functions",
        {
            "RewardZScores.eps": "1e-4, the authors' code for TRL (1e-6 in that for verl)",
            "RewardZScores.ddof": "1, the authors' code",
            "BatchStd.eps": "1e-4, the authors' code for TRL",
            "Clip.low": "0.2 as in PPO: the paper gives none for its smallest experiment",
            "Clip.high": "0.2 as in PPO: the paper gives none for its smallest experiment",
            "FirstOrder.minibatches": "4, the authors' script: 512 prompts in minibatches of 128",
            "samples_per_prompt": "4, the authors' script",
        },
        "a reward function that says nothing of a completion leaves it out of that reward's statistics, as in TRL, "
        "where the authors' code counts 0; averages are over completions, as in the paper, where the authors' verl "
        "code takes tokens",
    ),
    "gigpo": Paper(
        "J = E[ 1/(NT) Σ_i Σ_n min( ρ Â, clip(ρ, 1 − ε, 1 + ε) Â ) ] − β KL(π_θ‖π_ref)\n"
        "Â_{i,n} = (R(τ_i) − mean_g R)/F + ω (R_{i,n} − mean_s R_n)/F_s,   R_{i,n} = Σ_{m≥n} γ^{m−n} r_{i,m},   "
        "s the state of turn n",
        {
            "GroupInGroup.omega": "ω = 1, sec. 5.1",
            "GroupInGroup.gamma": "0.95, the authors' scripts",
            "GroupInGroup.std": "on, the authors' script for ALFWorld; the paper reports both (F = std, F = 1)",
            "GroupInGroup.eps": "our choice, as for the group's std; the authors' code has 1e-6",
            "GroupInGroup.ddof": "1, the authors' code",
            "KLToReference.beta": "0.01, the authors' scripts",
            "KLToReference.form": "k3, the authors' scripts (low_var_kl)",
            "Clip.low": "0.2 as in PPO, which is what the authors' code has when nothing is said",
            "Clip.high": "0.2 as in PPO, which is what the authors' code has when nothing is said",
            "samples_per_prompt": "N = 8, sec. 5.1",
            "FirstOrder.minibatches": "our choice: the authors take 256 turns for an update (ALFWorld), however many that makes",
        },
        "an episode is one row whose turns see all that was said, where the authors make every turn a row with a "
        "prompt of its own; ratio and mean are over tokens, as in their code, where eq. 9 has turns",
    ),
    "luffy": Paper(
        "J = 1/Z ( Σ_{shown j} Σ_t f(π_θ/π_φ) Â_j + Σ_{sampled i} Σ_t min( r Â_i, clip(r, 1 − ε, 1 + ε) Â_i ) ),   Z all tokens\n"
        "f(x) = x/(x + γ),   π_φ = 1,   Â = (R − mean R)/std R over sampled and shown alike",
        {
            "PolicyShaping.gamma": "γ = 0.1, the paper and the authors' script",
            "PolicyShaping.low": "0.2 as in PPO; the authors' script turns the clip off",
            "PolicyShaping.high": "0.2 as in PPO; the authors' script turns the clip off",
            "FirstOrder.minibatches": "2, the authors' script: 128 prompts in minibatches of 64",
            "samples_per_prompt": "7 beside one demonstration, the authors' script",
        },
        "nowhere from the paper's objective that we know; the authors' script has no clip, no std, a constant "
        "length in place of Z, means over the sampled alone, and an entropy bonus of 0.001",
    ),
    "chord": Paper(
        f"J = (1 − μ) · 1/Σ_i|o_i| Σ_i Σ_t {CLIPPED}\n"
        "    + μ · 1/Σ_j|o*_j| Σ_j Σ_t sg[ p (1 − p) ] log p,   p = π_θ(o*_{j,t}),   o* demonstrations\n" + ZSCORE,
        {
            "DemonstrationNLL.mu": "μ = 0.1, the authors' settings for CHORD-φ",
            "DemonstrationNLL.phi": "on: CHORD-φ; off, and with mu=0.9, final=0.05, it is CHORD-μ",
            "DemonstrationNLL.rollouts": "200 steps of a cosine, the authors' settings for CHORD-μ",
            "DemonstrationNLL.aggregate": "the mean over the demonstrations' tokens, the authors' code",
            "Clip.low": "0.2, the authors' settings",
            "Clip.high": "0.2, the authors' settings",
            "samples_per_prompt": "8, the authors' settings",
            "FirstOrder.minibatches": "one update per rollout, the authors' settings (256 samples and 64 demonstrations)",
        },
        "demonstrations are those of the step's prompts, where the authors draw theirs, one to four samples, from "
        "a data set of its own",
    ),
    "distill": Paper(
        "J = E[ Σ_i Σ_t r Â_t ],   Â_t = log π_T(o_t) − log π_old(o_t),   π_T the teacher",
        {
            "TeacherLogRatio.coefficient": "1.0: kl_penalty_coef of the authors' code (tinker-cookbook)",
            "TeacherLogRatio.discount": '0, the post\'s "Loss function"; the authors saw no gain from more',
            "FirstOrder.epochs": "1: num_substeps of the authors' code",
            "FirstOrder.minibatches": "1: num_substeps of the authors' code",
            "samples_per_prompt": "4: group_size of the authors' code",
        },
        "averaged over the update's tokens, where the authors' loss is a sum of them and their π_old is what the "
        "sampler said",
    ),
    "prime": Paper(
        f"J = E[ 1/Σ_i|o_i| Σ_i Σ_t {CLIPPED.replace('Â', 'Â_t')} ],   r_φ(o_t) = β log( π_φ(o_t)/π_ref(o_t) )\n"
        "Â_t = R_i − mean_{j≠i} R_j + Σ_{s≥t} γ^{s−t} ( r_φ(o_s) − mean_{j≠i} r_φ(o_j)/|o_j| )\n"
        "φ: min E[ −R log σ(r_φ(o)) − (1 − R) log(1 − σ(r_φ(o))) ]   s.t.  some R_i differ",
        {
            "ImplicitReward.beta": "0.05, sec. 4.1",
            "ImplicitProcess.gamma": "1, sec. 5.4",
            "Clip.low": "0.2: the default of the authors' library (verl)",
            "Clip.high": "0.2: the default of the authors' library (verl)",
            "FirstOrder.minibatches": "4: batches of 256 answers of 1,024 (sec. 4.1); 800 rollouts are 3,200 updates (sec. 5.2)",
            "DropNoSpread.mode": "refill: the authors' code samples four times as many prompts and takes those that pass first",
            "DropNoSpread.max_rounds": "4: their oversample_factor",
            "samples_per_prompt": "4, sec. 4.1",
        },
        "filters by spread, which with 4 samples of 0/1 outcomes is the published accuracy range of 0.2 to 0.8; "
        "the authors' code also scales the process rewards by their largest return and whitens Â; its script fits φ "
        "after it has rewarded, as here, and verl's recipe of it before",
    ),
    "trpo_vine": Paper(
        "maximise 1/N Σ_n L_n(θ)  subject to  E_s[ KL( π_old(·|s) ‖ π_θ(·|s) ) ] ≤ δ\n"
        "L_n(θ) = Σ_k ( π_θ(a_k|s_n)/q(a_k|s_n) ) Q̂(s_n, a_k) / Σ_k π_θ(a_k|s_n)/q(a_k|s_n),   a_k ~ q(·|s_n)",
        {
            "Vine.states": "4, our choice: as many as a prompt has completions",
            "Vine.actions": "K = 4 rollouts per state, tables 2 and 3",
            "Vine.samples": "1: one rollout per action, sec. 5.2",
            "Vine.distinct": "on: q uniform over the tokens drawn; sec. 5.2 takes it where actions are discrete, which over a "
            "whole vocabulary would try what nobody says. Off: q = π_old, eq. 16 as it stands",
            "samples_per_prompt": "4, our choice: they are where the states come from, and are not trained on",
        },
        departs="the tokens of a state are drawn from π_old without replacement, and q is uniform among them (Vine(distinct=False) "
        "is eq. 16, q = π_old); rollouts go on to the end of the answer, γ is 1, and the step is trpo's",
    ),
}
