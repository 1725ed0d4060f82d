"""What the papers say: each named algorithm's objective as published, and where its defaults come from."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Paper:
    """The objective J that an algorithm's source maximises, in this package's notation, and the source of its numbers."""

    objective: str
    """Maximised; lines of plain text. r is π_θ/π_old of a token, s its geometric mean over a completion."""
    defaults: dict[str, str] = field(default_factory=dict)
    """`Part.setting` (or `samples_per_prompt`) -> where the default comes from. What is not here is the parent's where the
    value is the parent's, and otherwise our choice."""
    departs: str = ""
    """Where our row departs from what was published, in one line; "" = nowhere that we know."""


USUAL: dict[str, str] = {
    "SequenceSum.group_power": "1: a plain mean",
    "FirstOrder.epochs": "1: every rollout is used once",
    "FirstOrder.minibatches": "1: a rollout is one update",
    "KLInReward.form": "k1, the only form that gives the gradient of the sequence's KL",
    "Reference.every": "open: frozen, as everywhere but in iterative GRPO and ProRL",
    "Reference.reset": "off",
    "Reference.stall": "open: off",
    "Reference.model": "open: the model that the run began with",
    "Critic.features": "own, as everywhere in the literature on language models",
    "Critic.hidden": "0: means something with features = policy only",
    "Critic.gamma": "1: an episode is one answer",
    "Critic.pretrain": "0: none",
    "Critic.explained": "our choice; without pre-training it means nothing",
    "GroupStd.eps": "our choice, and that of common code",
    "BatchStd.eps": "our choice, as for the group's std",
    "Whiten.eps": "our choice, and that of common code",
    "MaskTruncated.keep_in_statistics": "off: a masked answer is as if it had not been sampled",
}
"""`Part.setting` -> what there is to say of a part's own default where no paper speaks of it."""
_CLIPPED = "min( r Â, clip(r, 1 − ε_low, 1 + ε_high) Â )"
_ZSCORE = "Â_i = (R_i − mean_g R)/std_g R"

PAPERS: dict[str, Paper] = {
    "reinforce": Paper("J = E[ R(o) ],   ∇J = E[ (R(o) − b) ∇log π_θ(o) ],  b independent of o"),
    "rloo": Paper(
        "∇J = E[ 1/k Σ_i ( R_i − 1/(k−1) Σ_{j≠i} R_j ) ∇log π_θ(o_i) ]\nR(o) = score(o) − β log( π_θ(o)/π_ref(o) )",
        {
            "samples_per_prompt": "k = 4, the larger of the paper's 2 and 4",
            "KLInReward.beta": "0.05 as in Stiennon et al. 2020; the paper has 0.03 (app. C)",
            "SequenceSum.group_power": "1: the mean over samples, as the paper has it",
        },
    ),
    "opo": Paper(
        "∇J = E[ (R(o) − b*) ∇log π_θ(o) ],   b* = E[‖∇log π_θ(o)‖² R]/E[‖∇log π_θ(o)‖²] ≈ Σ_j |o_j| R_j / Σ_j |o_j|",
        {
            "OptimalBaseline.norm": "length: the paper takes ‖∇log π_θ(o)‖² to grow with |o|",
            "OptimalBaseline.leave_one_out": "off, as published",
        },
    ),
    "a2c": Paper(
        "∇J = E[ ∇log π_θ(a_t|s_t) ( Σ_{i<k} γ^i r_{t+i} + γ^k V(s_{t+k}) − V(s_t) ) + η ∇H(π_θ(·|s_t)) ]",
        {
            "NStep.n": "t_max = 5, the paper's experiments",
            "NStep.gamma": "1: an episode is one answer, and γ < 1 would penalise its length; the paper has 0.99",
            "Entropy.eta": "0.01, the paper's experiments",
            "Critic.clip": "none, as in the paper",
        },
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
    ),
    "natural": Paper(
        "Δθ = √( 2δ / gᵀF⁻¹g ) F⁻¹g,   g = ∇J,  F = E[ ∇log π ∇log πᵀ ]",
        {"TrustRegion.line_search": "off: the paper has none"},
    ),
    "ppo": Paper(
        "J = E_t[ min( r Â, clip(r, 1 − ε, 1 + ε) Â ) ] − c_1 E_t[ (V_φ(s_t) − V_target)² ]",
        {
            "Clip.low": "ε = 0.2, table 1 (the best of three)",
            "Clip.high": "ε = 0.2, table 1 (the best of three)",
            "GAE.lam": "0.95, tables 3 to 5",
            "GAE.gamma": "1 as in Ziegler et al. 2019, for language; the paper's 0.99 would penalise length",
            "KLInReward.beta": "0.05 as in Stiennon et al. 2020; not part of PPO itself",
            "FirstOrder.epochs": "4 as in Ziegler et al. 2019 and Stiennon et al. 2020, for language; the paper has 3 to 15",
            "Critic.clip": "0.2, the value clipping of the authors' code (Huang et al. 2022)",
            "Critic.coefficient": "½, as in the authors' code; the paper has c_1 = 1 (table 5)",
            "Critic.lam": "the advantages' λ, as in the paper",
        },
    ),
    "ppo_penalty": Paper(
        "J = E_t[ r Â − β KL( π_old(·|s_t) ‖ π_θ(·|s_t) ) ]\nthen β ← 2β if KL > 1.5 target,  β/2 if KL < target/1.5",
        {
            "KLToOld.target": "0.01, table 1 (the middle of three)",
            "KLToOld.beta": "β starts at 1, the paper's experiments",
        },
    ),
    "vapo": Paper(
        f"J = 1/Σ_i|o_i| Σ_i Σ_t {_CLIPPED}  +  μ · 1/Σ_{{o_i right}} |o_i| Σ_{{o_i right}} Σ_t log π_θ(o_{{i,t}})\n"
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
        },
    ),
    "grpo": Paper(
        f"J = E[ 1/G Σ_i 1/|o_i| Σ_t ( min( r Â, clip(r, 1 − ε, 1 + ε) Â ) − β (e^{{−u}} + u − 1) ) ]\n{_ZSCORE}"
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
    ),
    "grpo_process": Paper(
        f"J = E[ 1/G Σ_i 1/|o_i| Σ_t {_CLIPPED} − β KL(π_θ‖π_ref) ]\n"
        "Â_{i,t} = Σ_{step ends j ≥ t} (r_{i,j} − mean_g r)/std_g r,   over the rewards of all steps of the group",
        {"ProcessReward.eps": "our choice, as for the group's std", "ProcessReward.ddof": "1, as for the group's std"},
    ),
    "iterative_grpo": Paper(
        "as grpo, with π_ref ← π_θ at the start of every iteration (algorithm 1)",
        {
            "Reference.every": "our choice: the paper renews it once per iteration and gives no length",
            "FirstOrder.epochs": "our choice: μ of algorithm 1",
        },
    ),
    "dr_grpo": Paper(
        "J = E[ 1/G Σ_i Σ_t min( r Â, clip(r, 1 − ε, 1 + ε) Â ) ],   Â_i = R_i − mean_g R",
        {"samples_per_prompt": "8, the authors' code"},
    ),
    "dapo": Paper(
        f"J = E[ 1/Σ_i|o_i| Σ_i Σ_t {_CLIPPED} ]   s.t.  0 < #right < G\n{_ZSCORE}",
        {
            "Clip.low": "0.2, sec. 4.1",
            "Clip.high": "0.28, sec. 4.1",
            "SoftOverlong.cache": "4,096 of 20,480 tokens, sec. 4.1",
            "DropNoSpread.mode": "refill, eq. 11",
            "DropNoSpread.max_rounds": "our choice: the paper sets no bound",
            "samples_per_prompt": "our choice, for small machines; the paper samples 16 (sec. 4.1)",
        },
    ),
    "prorl": Paper(
        f"J = E[ 1/Σ_i|o_i| Σ_i Σ_t {_CLIPPED} ] − β KL( π_θ ‖ π_ref ),   π_ref and the optimiser renewed now and then",
        {
            "Clip.low": "0.2, the paper's experiments",
            "Clip.high": "0.4, the paper's experiments",
            "KLToReference.form": "k2 as in the authors' later code (OpenRLHF, ProRL v2)",
            "KLToReference.beta": "our choice",
            "Reference.every": "our choice: the paper resets when validation stalls",
            "Reference.reset": "the paper, sec. 2",
        },
    ),
    "magistral": Paper(
        f"J = E[ 1/Σ_i|o_i| Σ_i Σ_t {_CLIPPED} ]   s.t.  some R_i differ\n"
        "Ã_i = R_i − mean_g R,   Â_i = (Ã_i − mean_batch Ã)/std_batch Ã",
        {
            "Clip.low": "0.2 as in PPO",
            "Clip.high": "0.28: the paper tunes it between 0.26 and 0.28 (sec. 2.1); another source says about 0.25",
            "DropNoSpread.mode": "our choice: the paper only says that such groups are filtered",
        },
    ),
    "gspo": Paper(
        f"J = E[ 1/G Σ_i min( s_i Â_i, clip(s_i, 1 − ε_low, 1 + ε_high) Â_i ) ]\n"
        f"s_i = ( π_θ(o_i)/π_old(o_i) )^(1/|o_i|),   {_ZSCORE}",
        {"Clip.low": "3e-4, sec. 5.1", "Clip.high": "4e-4, sec. 5.1"},
    ),
    "gspo_token": Paper(
        "J = E[ 1/G Σ_i 1/|o_i| Σ_t min( s_{i,t} Â_{i,t}, clip(s_{i,t}, 1 − ε_low, 1 + ε_high) Â_{i,t} ) ]\n"
        "s_{i,t} = sg[s_i] · π_θ(o_{i,t})/sg[π_θ(o_{i,t})]"
    ),
    "cispo": Paper(
        "J = E[ 1/Σ_i|o_i| Σ_i Σ_t sg[ clip(r, 1 − ε_low, 1 + ε_high) ] Â log π_θ(o_{i,t}) ]\n" + _ZSCORE,
        {
            "WeightCap.low": "0: the paper sets no lower bound",
            "WeightCap.high": "5 as an absolute bound, from Khatri et al. 2025 (ScaleRL), arXiv:2510.13786; "
            "the paper tunes it and gives no number",
        },
    ),
    "vineppo": Paper(
        f"J = E[ 1/Σ_i|o_i| Σ_i Σ_t {_CLIPPED} ],   r_t −= β ( log π_old − log π_ref )\n"
        "Â_t = r(step of t) + V(next step) − V(step),   V(s) = 1/K Σ_k R(o_k),  o_k ~ π_old(·|s)",
        {
            "PrefixValue.samples": "K = 9, the paper's main experiments",
            "samples_per_prompt": "8, the paper's experiments",
        },
    ),
    "sapo": Paper(
        f"J = E[ 1/G Σ_i 1/|o_i| Σ_t σ( τ (r − 1) ) · 4/τ · Â ],   τ = τ_pos if Â > 0 else τ_neg\n{_ZSCORE}",
        {"SoftGate.tau_pos": "1.0, the paper's experiments", "SoftGate.tau_neg": "1.05, the paper's experiments"},
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
        "Averaged over the update's tokens; the authors' loss is a sum of them. Their π_old is what the sampler said.",
    ),
    "prime": Paper(
        f"J = E[ 1/Σ_i|o_i| Σ_i Σ_t {_CLIPPED.replace('Â', 'Â_t')} ],   r_φ(o_t) = β log( π_φ(o_t)/π_ref(o_t) )\n"
        "Â_t = R_i − mean_{j≠i} R_j + Σ_{s≥t} γ^{s−t} ( r_φ(o_s) − mean_{j≠i} r_φ(o_j)/|o_j| )\n"
        "φ: min E[ −R log σ(r_φ(o)) − (1 − R) log(1 − σ(r_φ(o))) ]   s.t.  some R_i differ",
        {
            "ImplicitReward.beta": "0.05, sec. 4.1",
            "ImplicitReward.lr": "open: 1e-6 beside the policy's 5e-7, sec. 4.1",
            "ImplicitProcess.gamma": "1, sec. 5.4",
            "Clip.low": "0.2: the default of the authors' library (verl)",
            "Clip.high": "0.2: the default of the authors' library (verl)",
            "FirstOrder.minibatches": "4: batches of 256 answers of 1,024 (sec. 4.1); 800 rollouts are 3,200 updates (sec. 5.2)",
            "DropNoSpread.mode": "refill: the authors' code samples four times as many prompts and takes those that pass first",
            "DropNoSpread.max_rounds": "4: their oversample_factor",
            "samples_per_prompt": "4, sec. 4.1",
        },
        "Filters by spread, which with 4 samples of 0/1 outcomes is the published accuracy range of 0.2 to 0.8. The authors' "
        "code also scales the process rewards by their largest return, whitens Â, and fits φ before it rewards.",
    ),
}
