"""What a reader wants to know of an algorithm before choosing it; for `show` and the documentation."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class About:
    """What a reader wants to know before choosing: where it comes from, what it mends, how it fails."""

    title: str
    source: str
    parent: str | None
    fixes: str
    fails: str


ABOUT: dict[str, About] = {
    "reinforce": About(
        "REINFORCE with a running-mean baseline",
        "Williams 1992, Machine Learning 8",
        None,
        "The score-function gradient itself: unbiased, no critic, one sample per prompt is enough.",
        "High variance: one baseline for easy and hard prompts alike, so a prompt's difficulty looks like an action's merit.",
    ),
    "rloo": About(
        "REINFORCE leave-one-out",
        "Ahmadian et al. 2024, arXiv:2402.14740",
        "reinforce",
        "A baseline per prompt from the other samples: still unbiased, far less variance, no critic.",
        "Needs several samples per prompt; a prompt that is always solved or never solved teaches nothing.",
    ),
    "opo": About(
        "On-policy RL with the optimal reward baseline",
        "Hao et al. 2025, arXiv:2505.23585",
        "rloo",
        "The baseline of least gradient variance, if scores grow with the length: long completions weigh more in the mean.",
        "A completion's own reward is in its baseline, which biases the gradient (leave_one_out mends it); norms only by proxy.",
    ),
    "a2c": About(
        "Advantage actor-critic",
        "Mnih et al. 2016 (A3C), arXiv:1602.01783, sec. 4",
        "reinforce",
        "Credit per token: what a token adds to the value of what was written so far, instead of one number per completion.",
        "The advantage is only as good as the critic; bootstrapping from a poor one is biased, and early in a run all are poor.",
    ),
    "trpo": About(
        "Trust region policy optimisation",
        "Schulman et al. 2015, arXiv:1502.05477, eq. 12 to 14 and app. C",
        "a2c",
        "No learning rate: the step is as long as a KL of δ nats a token allows, measured over the whole vocabulary.",
        "One step per rollout at the price of dozens of passes; the mean KL is bounded, single states may move further.",
    ),
    "natural": About(
        "Natural policy gradient",
        "Kakade 2001 (NeurIPS 14), eq. 3; the step's length as in Schulman et al. 2015, app. C",
        "trpo",
        "The direction in which the policy, not its parameters, changes least; half the code of a trust region.",
        "Nothing checks the step: where the KL's quadratic model is poor, δ is only a wish (trust_region/kl is what came of it).",
    ),
    "ppo": About(
        "Proximal policy optimisation",
        "Schulman et al. 2017, arXiv:1707.06347, eq. 7 and 9",
        "a2c",
        "Several updates per rollout: beyond the clip's range moving on earns nothing; GAE trades bias for variance.",
        "A second model in memory; whitening hides the reward's scale; the clip bounds the incentive, not the step.",
    ),
    "ppo_penalty": About(
        "PPO with an adaptive KL penalty",
        "Schulman et al. 2017, arXiv:1707.06347, eq. 8",
        "ppo",
        "Bounds the step by the KL itself, at the β that keeps it near a target.",
        "β follows the last rollout's KL, so that one step may still go far; the paper found clipping better.",
    ),
    "grpo": About(
        "Group relative policy optimisation",
        "Shao et al. 2024 (DeepSeekMath), arXiv:2402.03300, eq. 3 and 4",
        "rloo",
        "No critic in memory; clipped ratio allows several updates per rollout; KL to the reference in the loss.",
        "The std over-weights very easy and very hard prompts; the sequence mean favours short right and long wrong answers.",
    ),
    "grpo_process": About(
        "GRPO with process supervision",
        "Shao et al. 2024 (DeepSeekMath), arXiv:2402.03300, sec. 4.1.3",
        "grpo",
        "Credit per step: a token answers for the steps from it on, so a right start before a wrong end is not blamed.",
        "As good as what scores the steps: what it overrates gets written often. More steps, larger sums, unless they are bad.",
    ),
    "iterative_grpo": About(
        "Iterative GRPO",
        "Shao et al. 2024 (DeepSeekMath), arXiv:2402.03300, algorithm 1",
        "grpo",
        "The KL no longer holds the policy at where it started: the reference follows it, every M rollouts.",
        "Each refresh forgives all drift so far; nothing holds the run near its initial model any more.",
    ),
    "prorl": About(
        "Prolonged reinforcement learning",
        "Liu et al. 2025 (ProRL), arXiv:2505.24864, sec. 2",
        "dapo",
        "Long runs that stall: a light KL keeps entropy up, and reference and optimiser start anew every M rollouts.",
        "The reset's period is one more choice; just after it the KL says nothing.",
    ),
    "magistral": About(
        "Magistral's GRPO",
        "Mistral AI 2025 (Magistral), arXiv:2506.10910, sec. 2.1",
        "grpo",
        "The std of the whole batch instead of the group's: prompts with almost equal rewards are not blown up.",
        "One scale for easy and hard prompts alike; sources differ on the upper clip (0.28, or about 0.25).",
    ),
    "gspo_token": About(
        "GSPO with token-level advantages",
        "Zheng et al. 2025, arXiv:2507.18071, eq. 13 and 14",
        "gspo",
        "The sequence's ratio with an advantage per token, for rewards that say where; GSPO itself when they do not.",
        "As GSPO: whole completions are clipped at once.",
    ),
    "dr_grpo": About(
        "GRPO done right",
        "Liu et al. 2025, arXiv:2503.20783, sec. 3.2",
        "grpo",
        "Removes both of GRPO's biases: no std, no length in the denominator; no KL, so no reference model.",
        "Step size now follows the reward's scale and the token budget L; unequal prompt difficulty is not evened out.",
    ),
    "dapo": About(
        "Decoupled clip and dynamic sampling policy optimisation",
        "Yu et al. 2025, arXiv:2503.14476, eq. 8 to 13; AIME 2024 avg@32: GRPO 30, + overlong mask 36, + clip-higher 38, "
        "+ soft penalty 41, + token mean 42, + dynamic sampling 50",
        "grpo",
        "Entropy collapse (clip-higher), dead groups (dynamic sampling), length bias (token mean), noisy cut-offs (overlong).",
        "Sampling cost grows as prompts are solved; long completions dominate the token mean.",
    ),
    "gspo": About(
        "Group sequence policy optimisation",
        "Zheng et al. 2025, arXiv:2507.18071, eq. 5 to 7",
        "grpo",
        "One ratio per completion, as there is one reward: far less ratio noise, stable with mixture-of-experts routing.",
        "The clip range is of another order (3e-4): clips whole completions, and long drifts cancel in the mean.",
    ),
    "cispo": About(
        "Clipped importance-sampling-weight policy optimisation",
        "MiniMax-M1 2025, arXiv:2506.13585, eq. 4 and 5",
        "grpo",
        "Rare, decisive tokens keep their gradient: the weight is capped, never the token dropped.",
        "No trust region: nothing stops the ratio from drifting when a rollout feeds many updates.",
    ),
    "vapo": About(
        "Value-based augmented PPO",
        "Yue et al. 2025, arXiv:2504.05118; AIME 2024: 60.4 against DAPO's 50 and DeepSeek-R1-Zero-Qwen-32B's 47, "
        "each by RL from Qwen2.5-32B",
        "ppo",
        "A critic that holds for long answers: fitted before training, Monte-Carlo targets, λ that grows with the length.",
        "At α = 0.05 answers below 20 tokens get λ = 0, one-step advantages from the critic alone: short tasks need a larger α.",
    ),
    "vineppo": About(
        "PPO with Monte-Carlo values",
        "Kazemnejad et al. 2024 (VinePPO), arXiv:2410.01679, sec. 4",
        "ppo",
        "Unbiased values without a critic: a step is worth what fresh completions make of it, early in a run as late.",
        "Samples K more completions per step of every answer; the KL and length penalties of later steps are not in the values.",
    ),
    "sapo": About(
        "Soft adaptive policy optimisation",
        "Gao et al. 2025, arXiv:2511.20347, eq. 5 and 6",
        "grpo",
        "A smooth gate for the clip's cliff: far tokens fade, near ones keep their gradient; negative tokens fade faster.",
        "Two temperatures to choose; a far token never quite loses its weight.",
    ),
    "remax": About(
        "REINFORCE with the greedy answer as its baseline",
        "Li et al. 2023 (ReMax), arXiv:2310.10505, algorithm 1",
        "reinforce",
        "A baseline per prompt from one more, greedy, completion: unbiased, no group, no critic.",
        "Pays a generation that is not trained on; where the greedy answer's luck is not the policy's mean the variance stays.",
    ),
    "reinforce_pp": About(
        "REINFORCE++",
        "Hu et al. 2025, arXiv:2501.03262",
        "reinforce",
        "PPO without its critic: reward to go with a KL per token, whitened over the whole batch, clipped; one sample is enough.",
        "One baseline for easy and hard prompts, so a prompt's difficulty looks like merit; the scale follows the batch.",
    ),
    "reinforce_pp_baseline": About(
        "REINFORCE++ with the group's mean as baseline",
        "Hu et al. 2025, arXiv:2501.03262",
        "reinforce_pp",
        "Difficulty leaves through the prompt's mean, scale through the batch: no prompt is blown up by a small std of its own.",
        "Whitening moves the centred advantages once more: long completions weigh in its mean, and flat prompts get pushed.",
    ),
    "gpg": About(
        "Group policy gradient",
        "Chu et al. 2025, arXiv:2504.02546",
        "dr_grpo",
        "The policy gradient itself, no ratio, no KL; prompts without signal no longer shrink the step: it is scaled by B/(B − M).",
        "The fewer prompts have signal, the larger the step from each: noisiest just where little is known.",
    ),
    "raft": About(
        "Reward-ranked fine-tuning: rejection sampling",
        "Dong et al. 2023, arXiv:2304.06767; Xiong et al. 2025, arXiv:2504.11343, on right and wrong answers",
        "reinforce",
        "The simplest of all: imitate the right answers. Nothing can run away, any number of updates, anybody's samples.",
        "Wrong answers teach nothing, entropy falls fast, and easy prompts, right most often, get most of the gradient.",
    ),
    "maxrl": About(
        "Maximum likelihood reinforcement learning",
        "Tajwar et al. 2026 (MaxRL), arXiv:2602.02710",
        "dr_grpo",
        "Maximises log p instead of p, as far as G samples can: hard prompts weigh by 1/p, as likelihood would have it.",
        "A rare success moves the policy far, a lucky guess too; rewards must be successes, 0 or more.",
    ),
    "passk": About(
        "Pass@k training",
        "Chen et al. 2025, arXiv:2508.10751, analytical derivation; Walder & Karkhanis 2025 (PKPO), arXiv:2505.15201",
        "grpo",
        "Rewards a set of k answers for its best one: what is solved sometimes stops pulling, so there is room to explore.",
        "Prompts solved more often than k of G allow teach nothing, though pass@1 could still rise; k is one more choice.",
    ),
    "topr": About(
        "Tapered off-policy REINFORCE",
        "Le Roux et al. 2025, arXiv:2503.14286, eq. 8",
        "reinforce",
        "Right answers are imitated whoever gave them, wrong ones fade as the policy leaves them: stable far off-policy.",
        "Biased off-policy: successes are not weighed by how likely they still are; the baseline decides what is a failure.",
    ),
    "asymre": About(
        "Asymmetric REINFORCE",
        "Arnal et al. 2025, arXiv:2506.20520",
        "topr",
        "No ratio at all: a baseline a little below the mean keeps off-policy updates safe, and is the one thing to choose.",
        "At δV ≥ 0 failures win and the policy collapses; below, prompts without spread imitate whatever was sampled.",
    ),
    "scale_rl": About(
        "ScaleRL's recipe",
        "Khatri et al. 2025, arXiv:2510.13786",
        "cispo",
        "Capped weights against old samples, each prompt's tokens averaged apart, one std for the batch, flat prompts left out.",
        "Chosen for what scales on large runs with samples up to eight updates old; on small ones each choice matters little.",
    ),
    "lite_ppo": About(
        "Lite PPO",
        "Liu et al. 2025 (Tricks or traps?), arXiv:2508.08221",
        "grpo",
        "Two choices and nothing else: the prompt's mean with the batch's std, and the mean over tokens.",
        "The rewards' std is large where prompts are of unequal difficulty, so easy and hard data change the step's size.",
    ),
    "gmpo": About(
        "Geometric-mean policy optimisation",
        "Zhao et al. 2025, arXiv:2507.20673, sec. 3 and 4",
        "grpo",
        "One token with an extreme ratio no longer rules its answer: the ratios' geometric mean weighs it, each clipped before.",
        "A wide clip (e^±0.4) and a mean in which drifts of both signs cancel: the trust region is loose for long answers.",
    ),
    "dppo": About(
        "Divergence proximal policy optimisation",
        "Qi et al. 2026, arXiv:2602.04879, eq. 13 and 14 (binary total variation)",
        "dr_grpo",
        "A clip on the ratio stops rare tokens that hardly matter and lets common ones go far; one on the divergence does neither.",
        "The divergence is a lower bound from the token that was drawn: what moves among the others is not seen.",
    ),
    "m2po": About(
        "Second-moment trust policy optimisation",
        "Zheng et al. 2025, arXiv:2510.01161, algorithm 1",
        "grpo",
        "Old samples: a clip drops the tokens that teach most; this drops the few outliers that the second moment cannot bear.",
        "The moment is of one update's tokens, so that a small update decides by few; nothing bounds a single ratio below it.",
    ),
    "luspo": About(
        "Length-unbiased sequence policy optimisation",
        "Liu et al. 2026, arXiv:2602.05261",
        "gspo",
        "GSPO's gradient divides an answer by its length, and answers shrink: times the length, every token counts alike.",
        "Long answers rule the step, as in every sum over tokens, and their ratio is a mean in which drifts cancel.",
    ),
    "vespo": About(
        "Variational sequence-level soft policy optimisation",
        "Shen et al. 2026, arXiv:2602.10693, sec. 3.4",
        "gspo",
        "The true ratio of an answer, without the length in it, and a kernel that fades where a clip cuts: made for stale samples.",
        "The product of a long answer's ratios leaves the kernel's range soon, and what has left it teaches nothing at all.",
    ),
    "cpgd": About(
        "Clipped policy gradient with policy drift",
        "Liu et al. 2025, arXiv:2505.12504",
        "grpo",
        "No ratio multiplies the gradient, so that none can blow it up: a clip on log r, and a bounded pull back to π_old.",
        "Without the ratio the gradient is that of other samples after the first update; the pull at 0.001 is faint.",
    ),
    "clip_cov": About(
        "Clip-Cov: tokens of high covariance are left out",
        "Cui et al. 2025, arXiv:2505.22617, sec. 4",
        "grpo",
        "Entropy collapse at its cause: likely tokens with high advantage make it fall, and a few of them are left out.",
        "The band of covariances (1 to 5) is in units of the task: and where none reaches it nothing happens.",
    ),
    "kl_cov": About(
        "KL-Cov: tokens of high covariance are held",
        "Cui et al. 2025, arXiv:2505.22617, sec. 4",
        "clip_cov",
        "As Clip-Cov, with a penalty where it cuts: the tokens keep their gradient and are held near π_old.",
        "No clip anywhere else; the first update of a rollout has π_θ = π_old, where the penalty is 0.",
    ),
    "high_entropy": About(
        "Policy gradient at forking tokens alone (80/20)",
        "Wang et al. 2025, arXiv:2506.01939, sec. 5",
        "dapo",
        "Most tokens are certain and teach little: only the 20 % at which the policy hesitates learn.",
        "A forward pass more per update, to know where it hesitates; small models lose more by the 80 % than large ones.",
    ),
    "gdpo": About(
        "Group reward-decoupled normalisation policy optimisation",
        "Liu et al. 2026, arXiv:2601.05242",
        "grpo",
        "Several rewards keep apart: each is compared within its group before they are added, so that one reward's scale, or a sum "
        "that happens to be equal, hides no other.",
        "Also a reward that hardly differs gets unit spread, noise included; with one reward function it is hardly more than GRPO.",
    ),
    "gigpo": About(
        "Group-in-group policy optimisation",
        "Feng et al. 2025, arXiv:2505.10978, eq. 3 to 9",
        "grpo",
        "Credit per turn without a critic: turns that begin in the same state of the world are compared by what came after them.",
        "Needs states that come again (else it is GRPO); episodes of one turn all begin alike: GRPO with Ψ twice as large.",
    ),
    "luffy": About(
        "Learning to reason under off-policy guidance",
        "Yan et al. 2025 (LUFFY), arXiv:2504.14945, mixed-policy GRPO with policy shaping",
        "grpo",
        "A right answer that others wrote stands in every group: something to learn from where no sample of the policy's is right.",
        "A demonstration's gradient has no trust region, and its writer is held to be sure of every token (π_φ = 1). The lab, "
        "which only samples, measures it without demonstrations.",
    ),
    "chord": About(
        "Controllable harmonisation of on- and off-policy reinforcement learning",
        "Zhang et al. 2025 (CHORD), arXiv:2508.11408, the variant CHORD-φ",
        "luffy",
        "Supervised fine-tuning as a term beside GRPO: most at the tokens where the policy is in two minds, p(1 − p).",
        "Imitates whatever is shown, right or wrong, at one μ for the whole run; tokens the policy has given up on are not learnt. "
        "The lab, which only samples, measures it without demonstrations.",
    ),
    "distill": About(
        "On-policy distillation",
        "Lu & Thinking Machines Lab 2025, On-Policy Distillation; Agarwal et al. 2024 (GKD), arXiv:2306.13649, eq. 2 to 4",
        None,
        "A teacher grades every token of the policy's own answers: far more is said than by one reward, and none is needed.",
        "Never better than its teacher; where the policy writes what the teacher never would, its log-probabilities say little.",
    ),
    "prime": About(
        "Process reinforcement through implicit rewards",
        "Cui et al. 2025 (PRIME), arXiv:2502.01456, eq. 3 to 6 and algorithm 1",
        "rloo",
        "Credit per token without step labels: a second language model learns from outcomes what each token was worth.",
        "Two more models in memory; the baseline is charged per token, so lengths are pushed where siblings' tokens earn or lose.",
    ),
    "trpo_vine": About(
        "Trust region policy optimisation, vine",
        "Schulman et al. 2015, arXiv:1502.05477, sec. 5.2, eq. 15, 16 and 66",
        "trpo",
        "No critic and no baseline: several next tokens are tried in one state, and what comes of each says which was better. "
        "Common random numbers take most of the noise off the differences.",
        "Every state costs K completions for K tokens of training, and what was sampled to reach it is not trained on; where "
        "the policy is sure of its token, nothing is learnt. The lab, whose steps are whole completions, has no place for it.",
    ),
}
