"""What a reader wants to know of an algorithm before choosing it; for `show` and the documentation."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class AlgorithmInfo:
    """What a reader wants to know before choosing: where it comes from, what it mends, how it fails."""

    title: str
    source: str
    parent: str | None
    addresses: str
    failure_modes: str


ABOUT: dict[str, AlgorithmInfo] = {
    "reinforce": AlgorithmInfo(
        "REINFORCE with a running-mean baseline",
        "Williams 1992, Machine Learning 8",
        None,
        "The score-function gradient itself: unbiased, no critic, one sample per prompt is enough.",
        "High variance: one baseline for easy and hard prompts alike, so a prompt's difficulty looks like an action's merit.",
    ),
    "rloo": AlgorithmInfo(
        "REINFORCE leave-one-out",
        "Ahmadian et al. 2024, arXiv:2402.14740",
        "reinforce",
        "A baseline per prompt from the other samples: still unbiased, far less variance, no critic.",
        "Needs several samples per prompt; a prompt that is always solved or never solved teaches nothing.",
    ),
    "opo": AlgorithmInfo(
        "On-policy RL with the optimal reward baseline",
        "Hao et al. 2025, arXiv:2505.23585",
        "rloo",
        "The baseline of least gradient variance, if scores grow with the length: long completions weigh more in the mean.",
        "A completion's own reward is in its baseline, which biases the gradient (leave_one_out mends it); norms only by proxy.",
    ),
    "a2c": AlgorithmInfo(
        "Advantage actor-critic",
        "Mnih et al. 2016 (A3C), arXiv:1602.01783, sec. 4",
        "reinforce",
        "Credit per token: what a token adds to the value of what was written so far, instead of one number per completion.",
        "The advantage is only as good as the critic; bootstrapping from a poor one is biased, and early in a run all are poor.",
    ),
    "trpo": AlgorithmInfo(
        "Trust region policy optimisation",
        "Schulman et al. 2015, arXiv:1502.05477, eq. 12 to 14 and app. C",
        "a2c",
        "No learning rate: the step is as long as a KL of δ nats a token allows, measured over the whole vocabulary.",
        "One step per rollout at the price of dozens of passes; the mean KL is bounded, single states may move further.",
    ),
    "natural": AlgorithmInfo(
        "Natural policy gradient",
        "Kakade 2001 (NeurIPS 14), eq. 3; the step's length as in Schulman et al. 2015, app. C",
        "trpo",
        "The direction in which the policy, not its parameters, changes least; half the code of a trust region.",
        "Nothing checks the step: where the KL's quadratic model is poor, δ is only a wish (trust_region/kl is what came of it).",
    ),
    "ppo": AlgorithmInfo(
        "Proximal policy optimisation",
        "Schulman et al. 2017, arXiv:1707.06347, eq. 7 and 9",
        "a2c",
        "Several updates per rollout: beyond the clip's range moving on earns nothing; GAE trades bias for variance.",
        "A second model in memory; whitening hides the reward's scale; the clip bounds the incentive, not the step.",
    ),
    "ppo_penalty": AlgorithmInfo(
        "PPO with an adaptive KL penalty",
        "Schulman et al. 2017, arXiv:1707.06347, eq. 8",
        "ppo",
        "Bounds the step by the KL itself, at the β that keeps it near a target.",
        "β follows the last rollout's KL, so that one step may still go far; the paper found clipping better.",
    ),
    "grpo": AlgorithmInfo(
        "Group relative policy optimisation",
        "Shao et al. 2024 (DeepSeekMath), arXiv:2402.03300, eq. 3 and 4",
        "rloo",
        "No critic in memory; clipped ratio allows several updates per rollout; KL to the reference in the loss.",
        "The std over-weights very easy and very hard prompts; the sequence mean favours short right and long wrong answers.",
    ),
    "grpo_process": AlgorithmInfo(
        "GRPO with process supervision",
        "Shao et al. 2024 (DeepSeekMath), arXiv:2402.03300, sec. 4.1.3",
        "grpo",
        "Credit per step: a token answers for the steps from it on, so a right start before a wrong end is not blamed.",
        "As good as what scores the steps: what it overrates gets written often. More steps, larger sums, unless they are bad.",
    ),
    "iterative_grpo": AlgorithmInfo(
        "Iterative GRPO",
        "Shao et al. 2024 (DeepSeekMath), arXiv:2402.03300, algorithm 1",
        "grpo",
        "The KL no longer holds the policy at where it started: the reference follows it, every M rollouts.",
        "Each refresh forgives all drift so far; nothing holds the run near its initial model any more.",
    ),
    "prorl": AlgorithmInfo(
        "Prolonged reinforcement learning",
        "Liu et al. 2025 (ProRL), arXiv:2505.24864, sec. 2",
        "dapo",
        "Long runs that stall: a light KL keeps entropy up, and reference and optimiser start anew every M rollouts.",
        "The reset's period is one more choice; just after it the KL says nothing.",
    ),
    "magistral": AlgorithmInfo(
        "Magistral's GRPO",
        "Mistral AI 2025 (Magistral), arXiv:2506.10910, sec. 2.1",
        "grpo",
        "The std of the whole batch instead of the group's: prompts with almost equal rewards are not blown up.",
        "One scale for easy and hard prompts alike; sources differ on the upper clip (0.28, or about 0.25).",
    ),
    "gspo_token": AlgorithmInfo(
        "GSPO with token-level advantages",
        "Zheng et al. 2025, arXiv:2507.18071, eq. 13 and 14",
        "gspo",
        "The sequence's ratio with an advantage per token, for rewards that say where; GSPO itself when they do not.",
        "As GSPO: whole completions are clipped at once.",
    ),
    "dr_grpo": AlgorithmInfo(
        "GRPO done right",
        "Liu et al. 2025, arXiv:2503.20783, sec. 3.2",
        "grpo",
        "Removes both of GRPO's biases: no std, no length in the denominator; no KL, so no reference model.",
        "Step size now follows the reward's scale and the token budget L; unequal prompt difficulty is not evened out.",
    ),
    "dapo": AlgorithmInfo(
        "Decoupled clip and dynamic sampling policy optimisation",
        "Yu et al. 2025, arXiv:2503.14476, eq. 8 to 13; AIME 2024 avg@32: GRPO 30, + overlong mask 36, + clip-higher 38, "
        "+ soft penalty 41, + token mean 42, + dynamic sampling 50",
        "grpo",
        "Entropy collapse (clip-higher), dead groups (dynamic sampling), length bias (token mean), noisy cut-offs (overlong).",
        "Sampling cost grows as prompts are solved; long completions dominate the token mean.",
    ),
    "gspo": AlgorithmInfo(
        "Group sequence policy optimisation",
        "Zheng et al. 2025, arXiv:2507.18071, eq. 5 to 7",
        "grpo",
        "One ratio per completion, as there is one reward: far less ratio noise, stable with mixture-of-experts routing.",
        "The clip range is of another order (3e-4): clips whole completions, and long drifts cancel in the mean.",
    ),
    "cispo": AlgorithmInfo(
        "Clipped importance-sampling-weight policy optimisation",
        "MiniMax-M1 2025, arXiv:2506.13585, eq. 4 and 5",
        "grpo",
        "Rare, decisive tokens keep their gradient: the weight is capped, never the token dropped.",
        "No trust region: nothing stops the ratio from drifting when a rollout feeds many updates.",
    ),
    "vapo": AlgorithmInfo(
        "Value-based augmented PPO",
        "Yue et al. 2025, arXiv:2504.05118; AIME 2024: 60.4 against DAPO's 50 and DeepSeek-R1-Zero-Qwen-32B's 47, "
        "each by RL from Qwen2.5-32B",
        "ppo",
        "A critic that holds for long answers: fitted before training, Monte-Carlo targets, λ that grows with the length.",
        "At α = 0.05 answers below 20 tokens get λ = 0, one-step advantages from the critic alone: short tasks need a larger α.",
    ),
    "vineppo": AlgorithmInfo(
        "PPO with Monte-Carlo values",
        "Kazemnejad et al. 2024 (VinePPO), arXiv:2410.01679, sec. 4",
        "ppo",
        "Unbiased values without a critic: a step is worth what fresh completions make of it, early in a run as late.",
        "Samples K more completions per step of every answer; the KL and length penalties of later steps are not in the values.",
    ),
    "sapo": AlgorithmInfo(
        "Soft adaptive policy optimisation",
        "Gao et al. 2025, arXiv:2511.20347, eq. 5 and 6",
        "grpo",
        "A smooth gate for the clip's cliff: far tokens fade, near ones keep their gradient; negative tokens fade faster.",
        "Two temperatures to choose; a far token never quite loses its weight.",
    ),
    "remax": AlgorithmInfo(
        "REINFORCE with the greedy answer as its baseline",
        "Li et al. 2023 (ReMax), arXiv:2310.10505, algorithm 1",
        "reinforce",
        "A baseline per prompt from one more, greedy, completion: unbiased, no group, no critic.",
        "Pays a generation that is not trained on; where the greedy answer's luck is not the policy's mean the variance stays.",
    ),
    "reinforce_pp": AlgorithmInfo(
        "REINFORCE++",
        "Hu et al. 2025, arXiv:2501.03262",
        "reinforce",
        "PPO without its critic: reward to go with a KL per token, whitened over the whole batch, clipped; one sample is enough.",
        "One baseline for easy and hard prompts, so a prompt's difficulty looks like merit; the scale follows the batch.",
    ),
    "reinforce_pp_baseline": AlgorithmInfo(
        "REINFORCE++ with the group's mean as baseline",
        "Hu et al. 2025, arXiv:2501.03262",
        "reinforce_pp",
        "Difficulty leaves through the prompt's mean, scale through the batch: no prompt is blown up by a small std of its own.",
        "Whitening moves the centred advantages once more: long completions weigh in its mean, and flat prompts get pushed.",
    ),
    "gpg": AlgorithmInfo(
        "Group policy gradient",
        "Chu et al. 2025, arXiv:2504.02546",
        "dr_grpo",
        "The policy gradient itself, no ratio, no KL; prompts without signal no longer shrink the step: it is scaled by B/(B − M).",
        "The fewer prompts have signal, the larger the step from each: noisiest just where little is known.",
    ),
    "raft": AlgorithmInfo(
        "Reward-ranked fine-tuning: rejection sampling",
        "Dong et al. 2023, arXiv:2304.06767; Xiong et al. 2025, arXiv:2504.11343, on right and wrong answers",
        "reinforce",
        "The simplest of all: imitate the right answers. Nothing can run away, any number of updates, anybody's samples.",
        "Wrong answers teach nothing, entropy falls fast, and easy prompts, right most often, get most of the gradient.",
    ),
    "maxrl": AlgorithmInfo(
        "Maximum likelihood reinforcement learning",
        "Tajwar et al. 2026 (MaxRL), arXiv:2602.02710",
        "dr_grpo",
        "Maximises log p instead of p, as far as G samples can: hard prompts weigh by 1/p, as likelihood would have it.",
        "A rare success moves the policy far, a lucky guess too; rewards must be successes, 0 or more.",
    ),
    "passk": AlgorithmInfo(
        "Pass@k training",
        "Chen et al. 2025, arXiv:2508.10751, analytical derivation; Walder & Karkhanis 2025 (PKPO), arXiv:2505.15201",
        "grpo",
        "Rewards a set of k answers for its best one: what is solved sometimes stops pulling, so there is room to explore.",
        "Prompts solved more often than k of G allow teach nothing, though pass@1 could still rise; k is one more choice.",
    ),
    "topr": AlgorithmInfo(
        "Tapered off-policy REINFORCE",
        "Le Roux et al. 2025, arXiv:2503.14286, eq. 8",
        "reinforce",
        "Right answers are imitated whoever gave them, wrong ones fade as the policy leaves them: stable far off-policy.",
        "Biased off-policy: successes are not weighed by how likely they still are; the baseline decides what is a failure.",
    ),
    "asymre": AlgorithmInfo(
        "Asymmetric REINFORCE",
        "Arnal et al. 2025, arXiv:2506.20520",
        "topr",
        "No ratio at all: a baseline a little below the mean keeps off-policy updates safe, and is the one thing to choose.",
        "At δV ≥ 0 failures win and the policy collapses; below, prompts without spread imitate whatever was sampled.",
    ),
    "scale_rl": AlgorithmInfo(
        "ScaleRL's recipe",
        "Khatri et al. 2025, arXiv:2510.13786",
        "cispo",
        "Capped weights against old samples, each prompt's tokens averaged apart, one std for the batch, flat prompts left out.",
        "Chosen for what scales on large runs with samples up to eight updates old; on small ones each choice matters little.",
    ),
    "lite_ppo": AlgorithmInfo(
        "Lite PPO",
        "Liu et al. 2025 (Tricks or traps?), arXiv:2508.08221",
        "grpo",
        "Two choices and nothing else: the prompt's mean with the batch's std, and the mean over tokens.",
        "The rewards' std is large where prompts are of unequal difficulty, so easy and hard data change the step's size.",
    ),
    "gmpo": AlgorithmInfo(
        "Geometric-mean policy optimisation",
        "Zhao et al. 2025, arXiv:2507.20673, sec. 3 and 4",
        "grpo",
        "One token with an extreme ratio no longer rules its answer: the ratios' geometric mean weighs it, each clipped before.",
        "A wide clip (e^±0.4) and a mean in which drifts of both signs cancel: the trust region is loose for long answers.",
    ),
    "dppo": AlgorithmInfo(
        "Divergence proximal policy optimisation",
        "Qi et al. 2026, arXiv:2602.04879, eq. 13 and 14 (binary total variation)",
        "dr_grpo",
        "A clip on the ratio stops rare tokens that hardly matter and lets common ones go far; one on the divergence does neither.",
        "The divergence is a lower bound from the token that was drawn: what moves among the others is not seen.",
    ),
    "m2po": AlgorithmInfo(
        "Second-moment trust policy optimisation",
        "Zheng et al. 2025, arXiv:2510.01161, algorithm 1",
        "grpo",
        "Old samples: a clip drops the tokens that teach most; this drops the few outliers that the second moment cannot bear.",
        "The moment is of one update's tokens, so that a small update decides by few; nothing bounds a single ratio below it.",
    ),
    "luspo": AlgorithmInfo(
        "Length-unbiased sequence policy optimisation",
        "Liu et al. 2026, arXiv:2602.05261",
        "gspo",
        "GSPO's gradient divides an answer by its length, and answers shrink: times the length, every token counts alike.",
        "Long answers rule the step, as in every sum over tokens, and their ratio is a mean in which drifts cancel.",
    ),
    "vespo": AlgorithmInfo(
        "Variational sequence-level soft policy optimisation",
        "Shen et al. 2026, arXiv:2602.10693, sec. 3.4",
        "gspo",
        "The true ratio of an answer, without the length in it, and a kernel that fades where a clip cuts: made for stale samples.",
        "The product of a long answer's ratios leaves the kernel's range soon, and what has left it teaches nothing at all.",
    ),
    "cpgd": AlgorithmInfo(
        "Clipped policy gradient with policy drift",
        "Liu et al. 2025, arXiv:2505.12504",
        "grpo",
        "No ratio multiplies the gradient, so that none can blow it up: a clip on log r, and a bounded pull back to π_old.",
        "Without the ratio the gradient is that of other samples after the first update; the pull at 0.001 is faint.",
    ),
    "clip_cov": AlgorithmInfo(
        "Clip-Cov: tokens of high covariance are left out",
        "Cui et al. 2025, arXiv:2505.22617, sec. 4",
        "grpo",
        "Entropy collapse at its cause: likely tokens with high advantage make it fall, and a few of them are left out.",
        "The band of covariances (1 to 5) is in units of the task: and where none reaches it nothing happens.",
    ),
    "kl_cov": AlgorithmInfo(
        "KL-Cov: tokens of high covariance are held",
        "Cui et al. 2025, arXiv:2505.22617, sec. 4",
        "clip_cov",
        "As Clip-Cov, with a penalty where it cuts: the tokens keep their gradient and are held near π_old.",
        "No clip anywhere else; the first update of a rollout has π_θ = π_old, where the penalty is 0.",
    ),
    "high_entropy": AlgorithmInfo(
        "Policy gradient at forking tokens alone (80/20)",
        "Wang et al. 2025, arXiv:2506.01939, sec. 5",
        "dapo",
        "Most tokens are certain and teach little: only the 20 % at which the policy hesitates learn.",
        "A forward pass more per update, to know where it hesitates; small models lose more by the 80 % than large ones.",
    ),
    "gdpo": AlgorithmInfo(
        "Group reward-decoupled normalisation policy optimisation",
        "Liu et al. 2026, arXiv:2601.05242",
        "grpo",
        "Several rewards keep apart: each is compared within its group before they are added, so that one reward's scale, or a sum "
        "that happens to be equal, hides no other.",
        "Also a reward that hardly differs gets unit spread, noise included; with one reward function it is hardly more than GRPO.",
    ),
    "gigpo": AlgorithmInfo(
        "Group-in-group policy optimisation",
        "Feng et al. 2025, arXiv:2505.10978, eq. 3 to 9",
        "grpo",
        "Credit per turn without a critic: turns that begin in the same state of the world are compared by what came after them.",
        "Needs states that come again (else it is GRPO); episodes of one turn all begin alike: GRPO with Ψ twice as large.",
    ),
    "luffy": AlgorithmInfo(
        "Learning to reason under off-policy guidance",
        "Yan et al. 2025 (LUFFY), arXiv:2504.14945, mixed-policy GRPO with policy shaping",
        "grpo",
        "A right answer that others wrote stands in every group: something to learn from where no sample of the policy's is right.",
        "A demonstration's gradient has no trust region, and its writer is held to be sure of every token (π_φ = 1). The lab, "
        "which only samples, measures it without demonstrations.",
    ),
    "chord": AlgorithmInfo(
        "Controllable harmonisation of on- and off-policy reinforcement learning",
        "Zhang et al. 2025 (CHORD), arXiv:2508.11408, the variant CHORD-φ",
        "luffy",
        "Supervised fine-tuning as a term beside GRPO: most at the tokens where the policy is in two minds, p(1 − p).",
        "Imitates whatever is shown, right or wrong, at one μ for the whole run; tokens the policy has given up on are not learnt. "
        "The lab, which only samples, measures it without demonstrations.",
    ),
    "distill": AlgorithmInfo(
        "On-policy distillation",
        "Lu & Thinking Machines Lab 2025, On-Policy Distillation; Agarwal et al. 2024 (GKD), arXiv:2306.13649, eq. 2 to 4",
        None,
        "A teacher grades every token of the policy's own answers: far more is said than by one reward, and none is needed.",
        "Never better than its teacher; where the policy writes what the teacher never would, its log-probabilities say little.",
    ),
    "prime": AlgorithmInfo(
        "Process reinforcement through implicit rewards",
        "Cui et al. 2025 (PRIME), arXiv:2502.01456, eq. 3 to 6 and algorithm 1",
        "rloo",
        "Credit per token without step labels: a second language model learns from outcomes what each token was worth.",
        "Two more models in memory; the baseline is charged per token, so lengths are pushed where siblings' tokens earn or lose.",
    ),
    "trpo_vine": AlgorithmInfo(
        "Trust region policy optimisation, vine",
        "Schulman et al. 2015, arXiv:1502.05477, sec. 5.2, eq. 15, 16 and 66",
        "trpo",
        "No critic and no baseline: several next tokens are tried in one state, and what comes of each says which was better. "
        "Common random numbers take most of the noise off the differences.",
        "Every state costs K completions for K tokens of training, and what was sampled to reach it is not trained on; where "
        "the policy is sure of its token, nothing is learnt. The lab, whose steps are whole completions, has no place for it.",
    ),
}


# What is said of one paper, and the two formulas that most of them share.

CLIPPED = "min( r Â, clip(r, 1 − ε_low, 1 + ε_high) Â )"
ZSCORE = "Â_i = (R_i − mean_g R)/std_g R"


@dataclass(frozen=True)
class Paper:
    """The objective J that an algorithm's source maximises, in this package's notation, and the source of its numbers."""

    objective: str
    """Maximised; lines of plain text. r is π_θ/π_old of a token, s its geometric mean over a completion."""
    defaults: dict[str, str] = field(default_factory=dict)
    """`Part.setting` (or `samples_per_prompt`) -> where the default comes from. What is not here is the parent's where the
    value is the parent's, and otherwise our choice."""
    deviations: str = ""
    """Where our row departs from what was published, in one line; "" = nowhere that we know."""


# More than one reward a completion: several rewards, turns, demonstrations, a second model, branches.

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
            "GradientSteps.minibatches": "4, the authors' script: 512 prompts in minibatches of 128",
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
            "GradientSteps.minibatches": "our choice: the authors take 256 turns for an update (ALFWorld), however many that makes",
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
            "GradientSteps.minibatches": "2, the authors' script: 128 prompts in minibatches of 64",
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
            "DemonstrationNLL.token_weighting": "on: CHORD-φ; off, and with mu=0.9, final=0.05, it is CHORD-μ",
            "DemonstrationNLL.decay_rollouts": "200 steps of a cosine, the authors' settings for CHORD-μ",
            "DemonstrationNLL.aggregation": "the mean over the demonstrations' tokens, the authors' code",
            "Clip.low": "0.2, the authors' settings",
            "Clip.high": "0.2, the authors' settings",
            "samples_per_prompt": "8, the authors' settings",
            "GradientSteps.minibatches": "one update per rollout, the authors' settings (256 samples and 64 demonstrations)",
        },
        "demonstrations are those of the step's prompts, where the authors draw theirs, one to four samples, from "
        "a data set of its own",
    ),
    "distill": Paper(
        "J = E[ Σ_i Σ_t r Â_t ],   Â_t = log π_T(o_t) − log π_old(o_t),   π_T the teacher",
        {
            "TeacherLogRatio.coefficient": "1.0: kl_penalty_coef of the authors' code (tinker-cookbook)",
            "TeacherLogRatio.discount": '0, the post\'s "Loss function"; the authors saw no gain from more',
            "GradientSteps.epochs": "1: num_substeps of the authors' code",
            "GradientSteps.minibatches": "1: num_substeps of the authors' code",
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
            "GradientSteps.minibatches": "4: batches of 256 answers of 1,024 (sec. 4.1); 800 rollouts are 3,200 updates (sec. 5.2)",
            "DropZeroVariance.mode": "refill: the authors' code samples four times as many prompts and takes those that pass first",
            "DropZeroVariance.max_rounds": "4: their oversample_factor",
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
        deviations="the tokens of a state are drawn from π_old without replacement, and q is uniform among them (Vine(distinct=False) "
        "is eq. 16, q = π_old); rollouts go on to the end of the answer, γ is 1, and the step is trpo's",
    ),
}


# GRPO and what is made of it by another average, ratio, gate or recipe; VinePPO, which samples its values.

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
            "GradientSteps.epochs": "one update per rollout, sec. 4.2",
            "GradientSteps.minibatches": "one update per rollout, sec. 4.2",
        },
        deviations="G is 8 where the paper has 64, ε is PPO's since the paper gives none, and a verifier's scores stand "
        "for those of a reward model",
    ),
    "grpo_process": Paper(
        f"J = E[ 1/G Σ_i 1/|o_i| Σ_t {CLIPPED} − β KL(π_θ‖π_ref) ]\n"
        "Â_{i,t} = Σ_{step ends j ≥ t} (r_{i,j} − mean_g r)/std_g r,   over the rewards of all steps of the group",
        {
            "ProcessReward.eps": "our choice, as for the group's std",
            "ProcessReward.ddof": "1, as for the group's std",
            "GradientSteps.epochs": "one update per rollout, sec. 4.2",
            "GradientSteps.minibatches": "one update per rollout, sec. 4.2",
        },
        deviations="as grpo: G is 8 where the paper has 64",
    ),
    "iterative_grpo": Paper(
        "as grpo, with π_ref ← π_θ at the start of every iteration (algorithm 1)",
        {
            "Reference.refresh_every": "our choice: the paper renews it once per iteration and gives no length",
            "GradientSteps.epochs": "our choice: μ of algorithm 1",
            "GradientSteps.minibatches": "1: algorithm 1 goes over the whole batch μ times",
        },
        deviations="the reference is renewed every 100 rollouts, the paper's iteration having no stated length, and the "
        "reward model is not trained on",
    ),
    "dr_grpo": Paper(
        "J = E[ 1/G Σ_i Σ_t min( r Â, clip(r, 1 − ε, 1 + ε) Â ) ],   Â_i = R_i − mean_g R",
        {
            "samples_per_prompt": "8, the authors' code",
            "GradientSteps.epochs": "1 inner epoch, app. G, table 6",
            "GradientSteps.minibatches": "our choice: the paper states none, and the authors' code takes 8, 128 of "
            "1,024 completions at a time",
        },
        deviations="divided by the token budget, as in the authors' code and not in the formula, which is the same "
        "direction; one update per rollout, where that code takes 8",
    ),
    "dapo": Paper(
        f"J = E[ 1/Σ_i|o_i| Σ_i Σ_t {CLIPPED} ]   s.t.  0 < #right < G\n{ZSCORE}",
        {
            "Clip.low": "0.2, sec. 4.1",
            "Clip.high": "0.28, sec. 4.1",
            "SoftOverlong.cache": "4,096 of 20,480 tokens, sec. 4.1",
            "DropZeroVariance.mode": "refill, eq. 11",
            "DropZeroVariance.max_rounds": "our choice: the paper sets no bound",
            "samples_per_prompt": "our choice, for small machines; the paper samples 16 (sec. 4.1)",
            "GradientSteps.epochs": "1: each rollout is gone over once",
            "GradientSteps.minibatches": "16 updates per rollout: 8,192 answers in mini-batches of 512, sec. 4.1",
            "SoftOverlong.scale": "1, eq. 13",
        },
        deviations="the token mean is over the step and not per group (eq. 8), as in the authors' code; rewards are 0 "
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
            "Reference.refresh_every": "our choice: the paper resets when validation stalls",
            "Reference.reset_optimizer": "the paper, sec. 2",
            "GradientSteps.epochs": "1: each rollout is gone over once",
            "GradientSteps.minibatches": "4 updates per rollout: batch 256, mini-batch 64, sec. 3.2",
        },
        deviations="the reset comes every 200 rollouts, not when validation stalls (Reference(stall=…) does that); token "
        "mean, overlong mask and length penalty are DAPO's, of which the paper takes the clip and the dynamic "
        "sampling; temperature is 1 (1.2) and G is 8 (16)",
    ),
    "magistral": Paper(
        f"J = E[ 1/Σ_i|o_i| Σ_i Σ_t {CLIPPED} ]   s.t.  some R_i differ\n"
        "Ã_i = R_i − mean_g R,   Â_i = (Ã_i − mean_batch Ã)/std_batch Ã",
        {
            "Clip.low": "0.2 as in PPO",
            "Clip.high": "0.28: the paper tunes it between 0.26 and 0.28 (sec. 2.1); another source says about 0.25",
            "DropZeroVariance.mode": "our choice: the paper only says that such groups are filtered",
            "GradientSteps.epochs": "1: a batch is one update, sec. 6.3",
            "GradientSteps.minibatches": "1: the paper trains with n_batch = n_minibatch, since more than 2 hurt (sec. "
            "6.3, fig. 6)",
            "SoftOverlong.scale": "0.1, eq. 1",
            "SoftOverlong.cache": "a fifth as in DAPO: the paper gives l_max − l_cache alone",
        },
        deviations="of the rewards only correctness (the task's) and length: the 0.1 each for format and language are "
        "for a task to give; ε_high is fixed, and generation is synchronous",
    ),
    "gspo": Paper(
        f"J = E[ 1/G Σ_i min( s_i Â_i, clip(s_i, 1 − ε_low, 1 + ε_high) Â_i ) ]\n"
        f"s_i = ( π_θ(o_i)/π_old(o_i) )^(1/|o_i|),   {ZSCORE}",
        {
            "Clip.low": "3e-4, sec. 5.1",
            "Clip.high": "4e-4, sec. 5.1",
            "GradientSteps.epochs": "1: each rollout is gone over once",
            "GradientSteps.minibatches": "4: each batch of rollouts in four mini-batches, sec. 5.1",
        },
        deviations="G is our choice: we found none in the paper; nothing else that we know",
    ),
    "gspo_token": Paper(
        "J = E[ 1/G Σ_i 1/|o_i| Σ_t min( s_{i,t} Â_{i,t}, clip(s_{i,t}, 1 − ε_low, 1 + ε_high) Â_{i,t} ) ]\n"
        "s_{i,t} = sg[s_i] · π_θ(o_{i,t})/sg[π_θ(o_{i,t})]",
        {
            "GradientSteps.epochs": "1: each rollout is gone over once",
            "GradientSteps.minibatches": "4, as for GSPO: sec. 5.1 of the same paper",
        },
        deviations="the advantage is GSPO's unless rewards come per token: the paper leaves open where token-level "
        "advantages come from",
    ),
    "cispo": Paper(
        "J = E[ 1/Σ_i|o_i| Σ_i Σ_t sg[ clip(r, 1 − ε_low, 1 + ε_high) ] Â log π_θ(o_{i,t}) ]\n" + ZSCORE,
        {
            "ClippedImportance.low": "0: the paper sets no lower bound",
            "ClippedImportance.high": "5 as an absolute bound, from Khatri et al. 2025 (ScaleRL), arXiv:2510.13786; "
            "the paper tunes it and gives no number",
            "GradientSteps.epochs": "1: each rollout is gone over once",
            "GradientSteps.minibatches": "16 rounds of off-policy updates per generation batch, sec. 3.1",
            "SoftOverlong.scale": "1: the paper takes DAPO's length penalty, sec. 3.1",
            "SoftOverlong.cache": "a fifth as in DAPO, whose penalty it is",
            "DropZeroVariance.mode": "refill: the paper takes DAPO's dynamic sampling, sec. 3.1",
        },
        deviations="the token mean is over the step and not per group (eq. 4); ε_high is ScaleRL's, the paper gives "
        "none; the stop of repetitive answers and the optimiser's settings (sec. 3.2) are left out",
    ),
    "vineppo": Paper(
        f"J = E[ 1/Σ_i|o_i| Σ_i Σ_t {CLIPPED} ],   r_t −= β ( log π_old − log π_ref )\n"
        "Â_t = r(step of t) + V(next step) − V(step),   V(s) = 1/K Σ_k R(o_k),  o_k ~ π_old(·|s)",
        {
            "PrefixValue.samples": "K = 9, the paper's main experiments",
            "samples_per_prompt": "8, the paper's experiments",
            "GradientSteps.epochs": "2 epochs per iteration, the authors' code",
            "GradientSteps.minibatches": "8: 512 answers in batches of 64, the authors' code",
            "KLInReward.beta": "0.05 as in ppo; the authors' runs have 1e-4",
        },
        deviations="the KL is in the reward (β 0.05), as in the paper's statement of the problem; the authors' runs have "
        "k3 in the loss with 1e-4, and whiten the advantages",
    ),
    "sapo": Paper(
        f"J = E[ 1/G Σ_i 1/|o_i| Σ_t σ( τ (r − 1) ) · 4/τ · Â ],   τ = τ_pos if Â > 0 else τ_neg\n{ZSCORE}",
        {
            "SigmoidGate.tau_pos": "1.0, the paper's experiments",
            "SigmoidGate.tau_neg": "1.05, the paper's experiments",
            "GradientSteps.epochs": "1: each rollout is gone over once",
            "GradientSteps.minibatches": "4: each batch of rollouts in four mini-batches, sec. 5.1",
        },
        deviations="G is our choice: we found none in the paper; nothing else that we know",
    ),
}


# Other baselines and other objectives of a prompt's outcomes, from ReMax to Lite PPO.

OUTCOMES: dict[str, Paper] = {
    "remax": Paper(
        "∇J = E[ Σ_t ∇log π_θ(a_t) ( R(a_1:T) − R(ā_1:T) ) ],   ā_t = argmax π_θ(·|x, ā_1:t−1)",
        {"samples_per_prompt": "1, and the greedy one, algorithm 1"},
        deviations="no KL penalty in the reward; the authors' code has one, 0.05 per token, and takes the token mean where the "
        "paper sums",
    ),
    "reinforce_pp": Paper(
        f"J = E[ 1/Σ_i|o_i| Σ_i Σ_t {CLIPPED} ]\n"
        "Â = (A − mean_batch A)/std_batch A over all tokens,   A_t = R − β Σ_{s≥t} ( log π_old − log π_ref )(o_s)",
        {
            "KLInReward.beta": "0.01, the authors' script (OpenRLHF, train_reinforce_llama_ray.sh)",
            "Clip.low": "0.2 as in PPO, the default of the authors' code",
            "Clip.high": "0.2 as in PPO, the default of the authors' code",
            "GradientSteps.minibatches": "8: 1,024 samples in batches of 128, the authors' script",
            "GradientSteps.epochs": "1, the authors' script",
        },
        deviations="the authors' script draws 1 completion per prompt; std with ddof 1, theirs with 0",
    ),
    "reinforce_pp_baseline": Paper(
        f"J = E[ 1/Σ_i|o_i| Σ_i Σ_t ( {CLIPPED} − β ( log π_θ − log π_ref )²/2 ) ]\n"
        "Â = (A − mean_batch A)/std_batch A over all tokens,   A_i = R_i − mean_g R",
        {
            "KLToReference.beta": "1e-5, the authors' script (OpenRLHF, train_reinforce_baseline_hybrid_engine.sh)",
            "KLToReference.form": "k2, the paper",
            "GradientSteps.minibatches": "1: 1,024 samples in batches of 1,024, the authors' script; ProRL v2's has 8",
            "GradientSteps.epochs": "1, the authors' script",
            "samples_per_prompt": "8, the authors' script",
        },
        deviations="std with ddof 1, the authors' code with 0; the script's dynamic filtering and its correction for the engine "
        "are options",
    ),
    "gpg": Paper(
        "J = E[ 1/Σ_i|o_i| Σ_i Σ_t log π_θ(o_{i,t}) Â_i ],   Â_i = B/(B − M) ( R_i − mean_g R )\n"
        "M of the B completions belong to prompts whose rewards are all equal",
        {
            "DropZeroVariance.mode": "reweight: denominators of the whole step, times B/(B − M)",
            "DropZeroVariance.max_rounds": "means something with mode = refill",
            "samples_per_prompt": "8, the authors' code",
        },
        deviations="the threshold β_th = 0.6, below which another batch is drawn, is left out (verl's M counts other things than "
        "the paper's)",
    ),
    "raft": Paper(
        "J = E_{o ∼ μ}[ 1/Σ_i|o_i| Σ_{i right} Σ_t log π_θ(o_{i,t}) ]",
        {
            "RejectionSampling.keep": "right, Xiong et al. 2025; best is Dong et al. 2023",
            "RejectionSampling.threshold": "our choice: an answer is right where its reward is 1",
            "GradientSteps.minibatches": "4: 1,024 prompts in batches of 256, the authors' script (RLHFlow, Minimal-RL)",
            "GradientSteps.epochs": "1, the authors' script",
        },
        deviations="the authors' script adds a KL of 0.001 to the loss and draws 4 completions per prompt",
    ),
    "maxrl": Paper(
        f"J = E[ 1/Σ_i|o_i| Σ_i Σ_t {CLIPPED} ],   Â_i = ( R_i − mean_g R )/mean_g R,   0 where no R_i > 0\n"
        "from ∇log p = Σ_k 1/k ∇pass@k, the first terms",
        {
            "Clip.low": "0.2, the authors' script",
            "Clip.high": "0.2, the authors' script",
            "GradientSteps.minibatches": "1: 256 prompts in batches of 256, the authors' script",
            "GradientSteps.epochs": "1, the authors' script",
        },
        deviations="the paper's estimator sums over tokens; its code, and this row, take the token mean and PPO's clip; their code "
        "adds 1e-6 to the mean, their script draws 16 completions per prompt",
    ),
    "passk": Paper(
        "Â_right = (1 − R̄)/σ,   Â_wrong = ( 1 − R̄ − C(N_neg − 1, k − 1)/C(N − 1, k − 1) )/σ\n"
        "R̄ = 1 − C(N_neg, k)/C(N, k),   σ = √( R̄(1 − R̄) )",
        {
            "PassAtK.k": "our choice, for groups of 8; the paper has k = 4 of 32",
            "PassAtK.eps": "1e-6, the authors' code",
            "PassAtK.normalise": "as published",
        },
        deviations="the paper gives the advantage alone: ratio, clip and average are GRPO's; rewards other than 0 and 1 go by "
        "their order",
    ),
    "topr": Paper(
        "∇J = Σ_{R(o) ≥ 0} μ(o) R(o) ∇log π_θ(o)  +  Σ_{R(o) < 0} μ(o) [ π_θ(o)/μ(o) ]_0^1 R(o) ∇log π_θ(o)",
        {
            "ConstantBaseline.value": "½ of rewards 0 and 1: the paper's ±1 about no baseline, halved",
            "GradientSteps.minibatches": "our choice: the paper trains on a data set of an earlier model's answers",
            "GradientSteps.epochs": "our choice: one pass, as in the matrix's other rows",
        },
        deviations="rewards of 0 and 1 about ½ in place of ±1, half the gradient; rollouts in place of a data set (other libraries "
        "clip the ratio per token)",
    ),
    "asymre": Paper(
        "J = E_{o ∼ μ}[ log π_θ(o) ( R(o) − V ) ],   V = mean_g R + δV",
        {
            "ConstantBaseline.value": "δV = −0.1, the value of the paper's experiments as Trinity-RFT's default has it",
            "GradientSteps.minibatches": "our choice: the paper renews the sampler every so many updates",
            "GradientSteps.epochs": "our choice: one pass, as in the matrix's other rows",
        },
        deviations="a rollout's minibatches in place of a sampler that is renewed every so many updates",
    ),
    "scale_rl": Paper(
        "J = E[ 1/#prompts Σ_g 1/Σ_{i∈g}|o_i| Σ_{i∈g} Σ_t sg[ min(r, ε) ] Â_i log π_θ(o_{i,t}) ],   r = π_θ/π_sampler\n"
        "Â_i = ( R_i − mean_g R )/std_batch,   s.t.  0 < mean_g R < 1,  pass rate of the prompt so far < 0.9",
        {
            "ClippedImportance.low": "0: the paper bounds from above alone",
            "ClippedImportance.high": "5, as TRL's documentation of the paper has it",
            "BatchStd.ddof": "our choice, as for the group's std",
            "NoPositiveResampling.threshold": "0.9, the paper",
            "DropZeroVariance.mode": "drop, the paper: such prompts leave the effective batch",
            "DropZeroVariance.max_rounds": "means something with mode = refill",
            "GradientSteps.minibatches": "1: one update per batch of the paper's pipeline",
            "GradientSteps.epochs": "1",
            "samples_per_prompt": "our choice, for small machines; the paper draws 16",
        },
        deviations="the sampler is not eight updates behind (PipelineRL-8), answers are not interrupted for length, and the head is "
        "in the model's precision, where the paper's is in float32 in learner and sampler: with `--learner.dtype bf16` it is bf16, "
        "and only the softmax over its logits is float32",
    ),
    "lite_ppo": Paper(
        f"J = E[ 1/Σ_i|o_i| Σ_i Σ_t {CLIPPED} ],   Â_i = ( R_i − mean_g R )/std_batch R",
        {
            "BatchStd.of": "rewards: the std of the batch's rewards, as TRL's and ROLL's documentation of the paper have it",
            "BatchStd.ddof": "our choice, as for the group's std",
            "GradientSteps.minibatches": "8, the paper's experiments as TRL's documentation has them",
            "GradientSteps.epochs": "1, the paper's experiments as TRL's documentation has them",
            "samples_per_prompt": "8, the paper's experiments as TRL's documentation has them",
        },
    ),
}


# Other trust regions, and choices among the tokens of an update.

TRUST: dict[str, Paper] = {
    "gmpo": Paper(
        "J = E[ 1/G Σ_i { Π_t min( r^sgn(Â_i), clip(r^sgn(Â_i), e^−0.4, e^0.4) )^sgn(Â_i) }^(1/|o_i|) Â_i ]\n" + ZSCORE,
        {
            "GeometricMean.low": "0.4 nats, sec. 4 and the authors' script",
            "GeometricMean.high": "0.4 nats, sec. 4 and the authors' script",
            "GradientSteps.epochs": "1: each rollout is gone over once",
            "GradientSteps.minibatches": "8: 1,024 answers a rollout, 128 an update (the authors' script)",
        },
        deviations="nowhere that we know; a Ψ per token, which the paper does not have, weighs each token by its own",
    ),
    "dppo": Paper(
        "J = E[ 1/(B·L) Σ_i Σ_t M r Â ],   Â_i = R_i − mean_g R,   r = π_θ/μ\n"
        "M = 0 where Â > 0, r > 1, D > δ or Â < 0, r < 1, D > δ, else 1;   D = |π_θ(o_{i,t}) − μ(o_{i,t})|",
        {
            "DivergenceClip.measure": "binary total variation, the first of the paper's two; the binary KL is 'kl'",
            "DivergenceClip.delta": "0.15 for total variation (0.05 for the KL), the authors' script in verl",
            "GradientSteps.epochs": "1: each rollout is gone over once",
            "GradientSteps.minibatches": "8: 256 prompts a rollout, 32 an update (the authors' script)",
        },
        deviations="G is 8 where the authors' script has 16, the ratio has no cap (the script: 10,000), and the top-K divergences, "
        "which need the sampler's likeliest tokens, are not built",
    ),
    "m2po": Paper(
        f"J = E[ 1/Σ_i|o_i| Σ_i Σ_t M r Â ],   r = π_θ/π_behaviour,   {ZSCORE}\n"
        "M: of the tokens with Â > 0, r > 1 or Â < 0, r < 1 the furthest are masked until the others' mean (log r)² ≤ τ",
        {
            "SecondMomentFilter.threshold": "τ = 0.04, all of the paper's experiments",
            "GradientSteps.epochs": "1: each rollout is gone over once",
            "GradientSteps.minibatches": "4, the paper's experiments",
        },
        deviations="algorithm 1 as published; the authors' code clips at a threshold that counts the masked tokens too, which masks "
        "more, but never inside 0.7 ≤ r ≤ 1.5, which masks fewer where the ratios spread far",
    ),
    "luspo": Paper(
        "J = E[ 1/G Σ_i |o_i| min( s_i Â_i, clip(s_i, 1 − ε_low, 1 + ε_high) Â_i ) ]\n" + ZSCORE,
        {
            "Clip.low": "2e-3, sec. 5.1",
            "Clip.high": "2.5e-3, sec. 5.1",
            "GradientSteps.epochs": "1, as for GSPO",
            "GradientSteps.minibatches": "4, as for GSPO: we found no number of the paper's",
        },
        deviations="updates per rollout and G are GSPO's and ours: we found none in the paper",
    ),
    "vespo": Paper(
        "J = E[ sg[φ(W)] Â log π_θ(o) ],   W = π_θ(o)/μ(o),   φ(W) = W^k e^{λ(1 − W)}\n"
        f"(k, λ) by the sign of Â;   {ZSCORE}",
        {
            "GammaKernel.k_pos": "2, sec. 3.4 and the authors' scripts",
            "GammaKernel.lambda_pos": "3, sec. 3.4 and the authors' scripts",
            "GammaKernel.k_neg": "3, sec. 3.4 and the authors' scripts",
            "GammaKernel.lambda_neg": "2, sec. 3.4 and the authors' scripts",
            "GradientSteps.epochs": "1: each rollout is gone over once",
            "GradientSteps.minibatches": "8, the authors' script; the paper goes from 4 to 64",
        },
        deviations="W is bounded by the number format and not at e^±20; nothing else that we know",
    ),
    "cpgd": Paper(
        "J = E[ 1/Σ_i|o_i| Σ_i Σ_t min( Â log r, Â clip(log r, log(1 − ε), log(1 + ε)) ) ] − β KL(π_old‖π_θ)\n"
        f"the KL's gradient as min(r − 1, 2) ∇log π_θ;   {ZSCORE}",
        {
            "LogClip.low": "0.2 as in siiRL, from the authors' institute",
            "LogClip.high": "0.2 as in siiRL, from the authors' institute",
            "DriftPenalty.beta": "0.001 as in siiRL, from the authors' institute",
            "DriftPenalty.cap": "2 as in siiRL, from the authors' institute",
            "GradientSteps.epochs": "1: each rollout is gone over once",
            "GradientSteps.minibatches": "2: 512 prompts a rollout, 256 an update (siiRL's scripts)",
        },
        deviations="numbers are siiRL's: the authors' own code was not to be had; Â is over the std, and the clip-filter-like weight, "
        "the paper's other way to give more to what prompts with different rewards teach, is not built",
    ),
    "clip_cov": Paper(
        "J = E[ 1/Σ_i|o_i| Σ_i Σ_t min( r Â, clip(r, 0, 2) Â ) at all tokens but I ]\n"
        "I = ⌊2e-4 N⌋ of those with 1 < cov < 5, at random;   cov = (log π_θ − mean log π_θ)(Â − mean Â)\n" + ZSCORE,
        {
            "ClipCov.low": "1: no lower bound (the authors' scripts)",
            "ClipCov.high": "1: r up to 2 (the authors' scripts); the paper's formula has no bound",
            "ClipCov.fraction": "2e-4, the paper's experiments and the authors' scripts",
            "ClipCov.cov_low": "1, the paper's experiments and the authors' scripts",
            "ClipCov.cov_high": "5, the paper's experiments and the authors' scripts",
            "DropZeroVariance.mode": "refill: dynamic sampling, the authors' scripts",
            "DropZeroVariance.max_rounds": "our choice: they have 10",
            "GradientSteps.epochs": "1: each rollout is gone over once",
            "GradientSteps.minibatches": "8: 256 prompts a rollout, 32 an update (the authors' scripts)",
        },
        deviations="the share of the band is drawn evenly in order of covariance, not at random; covariances "
        "are over an update, where the authors' code takes a micro-batch",
    ),
    "kl_cov": Paper(
        "J = E[ 1/Σ_i|o_i| Σ_i Σ_t ( r Â − β 1[(i, t) ∈ I] KL(π_old‖π_θ) ) ]\n"
        "I = the ⌊k N⌋ tokens of highest cov = (log π_θ − mean log π_θ)(Â − mean Â);   " + ZSCORE,
        {
            "KLCov.beta": "1, the authors' scripts",
            "KLCov.fraction": "2e-3, the authors' script for 7B; 2e-4 for 32B",
            "KLCov.form": "|log r|, what the authors' code has for the KL",
            "GradientSteps.epochs": "1: each rollout is gone over once",
            "GradientSteps.minibatches": "8: 256 prompts a rollout, 32 an update (the authors' scripts)",
        },
        deviations="covariances are over an update, where the authors' code takes a micro-batch; the KL is |log r| as in that code, "
        "and form='k3' is nearer to the formula",
    ),
    "high_entropy": Paper(
        f"J = E[ 1/Σ_i|o_i| Σ_i Σ_t 1[H_t ≥ τ] {CLIPPED} ]   s.t.  0 < #right < G\n"
        f"τ: the entropy that the batch's highest 20 % begin with, of π_θ;   {ZSCORE}",
        {
            "HighEntropy.fraction": "0.2, sec. 5",
            "HighEntropy.of": "π_θ, also where the samples are of an older policy (sec. 2)",
            "GradientSteps.epochs": "1: each rollout is gone over once",
            "GradientSteps.minibatches": "16, as in DAPO, whose recipe it takes",
        },
        deviations="as dapo departs; G is 8 where the paper has DAPO's 16",
    ),
}


# What there is to say of the parts' own defaults, whatever the algorithm.

DEFAULT_SOURCES: dict[str, str] = {
    "SequenceSum.group_power": "1: a plain mean",
    "GradientSteps.epochs": "1: every rollout is used once",
    "GradientSteps.minibatches": "1: a rollout is not split",
    "KLInReward.level": "token: each token answers for the KL to go, as in PPO for language",
    "SoftOverlong.scale": "1, as in DAPO",
    "KLInReward.form": "k1, the only form that gives the gradient of the sequence's KL",
    "Reference.refresh_every": "open: frozen, as everywhere but in iterative GRPO and ProRL",
    "Reference.reset_optimizer": "off",
    "Reference.refresh_after_stall": "open: off",
    "Reference.model": "open: the model that the run began with",
    "Critic.backbone": "own, as everywhere in the literature on language models",
    "Critic.hidden": "0: means something with features = policy only",
    "Critic.gamma": "1: an episode is one answer",
    "Critic.turn_gamma": "1: nothing is discounted per turn",
    "Critic.pretrain": "0: none",
    "Critic.pretrain_until": "our choice; without pre-training it means nothing",
    "GroupStd.eps": "our choice, and that of common code",
    "BatchStd.eps": "our choice, as for the group's std",
    "BatchStd.of": "the centred advantages, as in Magistral",
    "Whiten.eps": "verl's masked_whiten: added to the variance, under the root",
    "MaskTruncated.keep_in_statistics": "off: a masked answer is as if it had not been sampled",
    "GAE.bootstrap": "off: an answer that the budget cut off has ended",
    "NStep.bootstrap": "off: an answer that the budget cut off has ended",
    "LengthAdaptiveGAE.bootstrap": "off: an answer that the budget cut off has ended",
    "ProcessReward.outcome": "on, our choice: the task's reward scores the last step; sec. 4.1.3 has process rewards alone",
    "Downsample.keep": "our choice: half of the usual eight; no algorithm has it",
    "DropZeroVariance.keep_leftovers": "our choice: so that nothing good is thrown away; no paper says what becomes of it",
}
"""`Part.setting` -> what there is to say of a part's own default where no paper speaks of it."""
RECIPE_FIELDS = frozenset({"GradientSteps.epochs", "GradientSteps.minibatches"})
"""Settings that no row has from its parent: how often a rollout is used is each paper's own, also where the number is the same."""


# REINFORCE with its baselines, and the methods that have a critic, up to VAPO.

VALUES: dict[str, Paper] = {
    "reinforce": Paper(
        "J = E[ R(o) ],   ∇J = E[ (R(o) − b) ∇log π_θ(o) ],  b independent of o",
        deviations="the batch, the running mean's decay and the optimiser (AdamW) are ours: the paper's rule is for one "
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
        deviations="β is 0.05 where the paper has 0.03; the rest is as published",
    ),
    "opo": Paper(
        "∇J = E[ (R(o) − b*) ∇log π_θ(o) ],   b* = E[‖∇log π_θ(o)‖² R]/E[‖∇log π_θ(o)‖²] ≈ Σ_j |o_j| R_j / Σ_j |o_j|",
        {
            "OptimalBaseline.norm": "length: the paper takes ‖∇log π_θ(o)‖² to grow with |o|",
            "OptimalBaseline.leave_one_out": "off, as published",
            "GradientSteps.epochs": "1: the paper trains exactly on-policy",
            "GradientSteps.minibatches": "1: the paper trains exactly on-policy",
        },
        deviations="G is our choice; the rest is as published",
    ),
    "a2c": Paper(
        "∇J = E[ ∇log π_θ(a_t|s_t) ( Σ_{i<k} γ^i r_{t+i} + γ^k V(s_{t+k}) − V(s_t) ) + η ∇H(π_θ(·|s_t)) ]",
        {
            "NStep.n": "t_max = 5, the paper's experiments",
            "NStep.gamma": "1: an episode is one answer, and γ < 1 would penalise its length; the paper has 0.99",
            "Entropy.eta": "0.01, the paper's experiments",
            "Critic.clip": "none, as in the paper",
        },
        deviations="γ is 1, an episode is one answer, the critic has parameters of its own, and AdamW takes RMSProp's "
        "place",
    ),
    "trpo": Paper(
        "maximise E[ r Â ]  subject to  E_s[ KL( π_old(·|s) ‖ π_θ(·|s) ) ] ≤ δ",
        {
            "TrustRegion.delta": "δ = 0.01, the paper's experiments",
            "TrustRegion.cg_iters": "10 conjugate-gradient steps, app. C",
            "TrustRegion.damping": "0.1, as in OpenAI's Spinning Up",
            "TrustRegion.backtrack_coeff": "0.8, as in OpenAI's Spinning Up",
            "TrustRegion.backtrack_iters": "10, as in OpenAI's Spinning Up",
            "TrustRegion.line_search": "the paper, app. C",
            "TrustRegion.fisher": "exact in every state, as the paper prefers (app. C)",
            "GAE.gamma": "1: an episode is one answer",
            "GAE.lam": "Schulman et al. 2016 (GAE)",
        },
        deviations="the advantages are GAE with a learned critic (the paper takes sums of rewards), γ is 1, and damping "
        "and the line search's numbers are Spinning Up's",
    ),
    "natural": Paper(
        "Δθ = √( 2δ / gᵀF⁻¹g ) F⁻¹g,   g = ∇J,  F = E[ ∇log π ∇log πᵀ ]",
        {"TrustRegion.line_search": "off: the paper has none"},
        deviations="δ sets the step's length and the advantages are GAE: the paper has a fixed step size and Q-values",
    ),
    "ppo": Paper(
        "J = E_t[ min( r Â, clip(r, 1 − ε, 1 + ε) Â ) ] − c_1 E_t[ (V_φ(s_t) − V_target)² ]",
        {
            "Clip.low": "ε = 0.2, table 1 (the best of three)",
            "Clip.high": "ε = 0.2, table 1 (the best of three)",
            "GAE.lam": "0.95, tables 3 to 5",
            "GAE.gamma": "1 as in Ziegler et al. 2019, for language; the paper's 0.99 would penalise length",
            "KLInReward.beta": "0.05 as in Stiennon et al. 2020; not part of PPO itself",
            "GradientSteps.epochs": "4 as in Ziegler et al. 2019 and Stiennon et al. 2020, for language; the paper has "
            "3 to 15",
            "Critic.clip": "0.2, the value clipping of the authors' code (Huang et al. 2022)",
            "Critic.coefficient": "½, as in the authors' code; the paper has c_1 = 1 (table 5)",
            "Critic.lam": "the advantages' λ, as in the paper",
            "GradientSteps.minibatches": "1 as in the code of Ziegler et al. 2019 (nminibatches), for language; the "
            "paper has minibatches of 64 steps",
        },
        deviations="as used for language since Ziegler et al. 2019: γ = 1, a KL to the reference in the reward, a "
        "clipped value loss, no entropy bonus",
    ),
    "ppo_penalty": Paper(
        "J = E_t[ r Â − β KL( π_old(·|s_t) ‖ π_θ(·|s_t) ) ]\nthen β ← 2β if KL > 1.5 target,  β/2 if KL < target/1.5",
        {
            "KLToOld.target": "0.01, table 1 (the middle of three)",
            "KLToOld.beta": "β starts at 1, the paper's experiments",
            "GradientSteps.epochs": "4 as in ppo: the paper has 10",
            "GradientSteps.minibatches": "1 as in ppo",
        },
        deviations="whitened advantages, γ = 1 and 4 passes as in ppo for language; β is adapted after each rollout, as "
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
            "PositiveNLL.aggregation": "the mean over the tokens of right answers, as in the paper",
            "Critic.lam": "λ_critic = 1 (decoupled GAE)",
            "Critic.pretrain": "our choice: 20 rollouts at most; the paper fits about 50 steps",
            "samples_per_prompt": "16, the paper's experiments",
            "GradientSteps.epochs": "1: the paper mentions no second pass",
            "GradientSteps.minibatches": "16: 8,192 samples in mini-batches of 512, sec. 5.1",
        },
        deviations="the critic starts from the policy and not from a reward model, is fitted for 20 rollouts at most "
        "where the paper has about 50 steps, and learns ten times as fast as the policy (twice)",
    ),
}


# What the papers say: each named algorithm's objective as published, and where its defaults come from.

__all__ = ["DEFAULT_SOURCES", "PAPERS", "RECIPE_FIELDS", "Paper"]

PAPERS: dict[str, Paper] = {**VALUES, **GROUPS, **OUTCOMES, **TRUST, **DATA}
