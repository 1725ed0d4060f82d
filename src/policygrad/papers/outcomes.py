"""Other baselines and other objectives of a prompt's outcomes, from ReMax to Lite PPO."""

from __future__ import annotations

from policygrad.papers.paper import CLIPPED, Paper

OUTCOMES: dict[str, Paper] = {
    "remax": Paper(
        "∇J = E[ Σ_t ∇log π_θ(a_t) ( R(a_1:T) − R(ā_1:T) ) ],   ā_t = argmax π_θ(·|x, ā_1:t−1)",
        {"samples_per_prompt": "1, and the greedy one, algorithm 1"},
        departs="no KL penalty in the reward; the authors' code has one, 0.05 per token, and takes the token mean where the "
        "paper sums",
    ),
    "reinforce_pp": Paper(
        f"J = E[ 1/Σ_i|o_i| Σ_i Σ_t {CLIPPED} ]\n"
        "Â = (A − mean_batch A)/std_batch A over all tokens,   A_t = R − β Σ_{s≥t} ( log π_old − log π_ref )(o_s)",
        {
            "KLInReward.beta": "0.01, the authors' script (OpenRLHF, train_reinforce_llama_ray.sh)",
            "Clip.low": "0.2 as in PPO, the default of the authors' code",
            "Clip.high": "0.2 as in PPO, the default of the authors' code",
            "FirstOrder.minibatches": "8: 1,024 samples in batches of 128, the authors' script",
            "FirstOrder.epochs": "1, the authors' script",
        },
        departs="the authors' script draws 1 completion per prompt; std with ddof 1, theirs with 0",
    ),
    "reinforce_pp_baseline": Paper(
        f"J = E[ 1/Σ_i|o_i| Σ_i Σ_t ( {CLIPPED} − β ( log π_θ − log π_ref )²/2 ) ]\n"
        "Â = (A − mean_batch A)/std_batch A over all tokens,   A_i = R_i − mean_g R",
        {
            "KLToReference.beta": "1e-5, the authors' script (OpenRLHF, train_reinforce_baseline_hybrid_engine.sh)",
            "KLToReference.form": "k2, the paper",
            "FirstOrder.minibatches": "1: 1,024 samples in batches of 1,024, the authors' script; ProRL v2's has 8",
            "FirstOrder.epochs": "1, the authors' script",
            "samples_per_prompt": "8, the authors' script",
        },
        departs="std with ddof 1, the authors' code with 0; the script's dynamic filtering and its correction for the engine "
        "are options",
    ),
    "gpg": Paper(
        "J = E[ 1/Σ_i|o_i| Σ_i Σ_t log π_θ(o_{i,t}) Â_i ],   Â_i = B/(B − M) ( R_i − mean_g R )\n"
        "M of the B completions belong to prompts whose rewards are all equal",
        {
            "DropNoSpread.mode": "reweight: denominators of the whole step, times B/(B − M)",
            "DropNoSpread.max_rounds": "means something with mode = refill",
            "samples_per_prompt": "8, the authors' code",
        },
        departs="the threshold β_th = 0.6, below which another batch is drawn, is left out (verl's M counts other things than "
        "the paper's)",
    ),
    "raft": Paper(
        "J = E_{o ∼ μ}[ 1/Σ_i|o_i| Σ_{i right} Σ_t log π_θ(o_{i,t}) ]",
        {
            "Accepted.keep": "right, Xiong et al. 2025; best is Dong et al. 2023",
            "Accepted.threshold": "our choice: an answer is right where its reward is 1",
            "FirstOrder.minibatches": "4: 1,024 prompts in batches of 256, the authors' script (RLHFlow, Minimal-RL)",
            "FirstOrder.epochs": "1, the authors' script",
        },
        departs="the authors' script adds a KL of 0.001 to the loss and draws 4 completions per prompt",
    ),
    "maxrl": Paper(
        f"J = E[ 1/Σ_i|o_i| Σ_i Σ_t {CLIPPED} ],   Â_i = ( R_i − mean_g R )/mean_g R,   0 where no R_i > 0\n"
        "from ∇log p = Σ_k 1/k ∇pass@k, the first terms",
        {
            "Clip.low": "0.2, the authors' script",
            "Clip.high": "0.2, the authors' script",
            "FirstOrder.minibatches": "1: 256 prompts in batches of 256, the authors' script",
            "FirstOrder.epochs": "1, the authors' script",
        },
        departs="the paper's estimator sums over tokens; its code, and this row, take the token mean and PPO's clip; their code "
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
        departs="the paper gives the advantage alone: ratio, clip and average are GRPO's; rewards other than 0 and 1 go by "
        "their order",
    ),
    "topr": Paper(
        "∇J = Σ_{R(o) ≥ 0} μ(o) R(o) ∇log π_θ(o)  +  Σ_{R(o) < 0} μ(o) [ π_θ(o)/μ(o) ]_0^1 R(o) ∇log π_θ(o)",
        {
            "ConstantBaseline.value": "½ of rewards 0 and 1: the paper's ±1 about no baseline, halved",
            "FirstOrder.minibatches": "our choice: the paper trains on a data set of an earlier model's answers",
            "FirstOrder.epochs": "our choice: one pass, as in the matrix's other rows",
        },
        departs="rewards of 0 and 1 about ½ in place of ±1, half the gradient; rollouts in place of a data set (other libraries "
        "clip the ratio per token)",
    ),
    "asymre": Paper(
        "J = E_{o ∼ μ}[ log π_θ(o) ( R(o) − V ) ],   V = mean_g R + δV",
        {
            "ConstantBaseline.value": "δV = −0.1, the value of the paper's experiments as Trinity-RFT's default has it",
            "FirstOrder.minibatches": "our choice: the paper renews the sampler every so many updates",
            "FirstOrder.epochs": "our choice: one pass, as in the matrix's other rows",
        },
        departs="a rollout's minibatches in place of a sampler that is renewed every so many updates",
    ),
    "scale_rl": Paper(
        "J = E[ 1/#prompts Σ_g 1/Σ_{i∈g}|o_i| Σ_{i∈g} Σ_t sg[ min(r, ε) ] Â_i log π_θ(o_{i,t}) ],   r = π_θ/π_sampler\n"
        "Â_i = ( R_i − mean_g R )/std_batch,   s.t.  0 < mean_g R < 1,  pass rate of the prompt so far < 0.9",
        {
            "WeightCap.low": "0: the paper bounds from above alone",
            "WeightCap.high": "5, as TRL's documentation of the paper has it",
            "BatchStd.ddof": "our choice, as for the group's std",
            "NoPositiveResampling.threshold": "0.9, the paper",
            "DropNoSpread.mode": "drop, the paper: such prompts leave the effective batch",
            "DropNoSpread.max_rounds": "means something with mode = refill",
            "FirstOrder.minibatches": "1: one update per batch of the paper's pipeline",
            "FirstOrder.epochs": "1",
            "samples_per_prompt": "our choice, for small machines; the paper draws 16",
        },
        departs="the sampler is not eight updates behind (PipelineRL-8), answers are not interrupted for length, and the head is "
        "in the model's precision, where the paper's is in float32 in learner and sampler: with `--learner.dtype bf16` it is bf16, "
        "and only the softmax over its logits is float32",
    ),
    "lite_ppo": Paper(
        f"J = E[ 1/Σ_i|o_i| Σ_i Σ_t {CLIPPED} ],   Â_i = ( R_i − mean_g R )/std_batch R",
        {
            "BatchStd.of": "rewards: the std of the batch's rewards, as TRL's and ROLL's documentation of the paper have it",
            "BatchStd.ddof": "our choice, as for the group's std",
            "FirstOrder.minibatches": "8, the paper's experiments as TRL's documentation has them",
            "FirstOrder.epochs": "1, the paper's experiments as TRL's documentation has them",
            "samples_per_prompt": "8, the paper's experiments as TRL's documentation has them",
        },
    ),
}
