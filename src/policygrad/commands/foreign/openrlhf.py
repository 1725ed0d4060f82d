"""OpenRLHF's options: train_ppo_ray.py (OpenRLHF/OpenRLHF, openrlhf/cli)."""

from __future__ import annotations

from policygrad.commands.foreign.meanings import (
    BOTH_CLIPS,
    CORRECTION,
    DUAL_CLIP,
    ENTROPY,
    EPOCHS_OF_DATA,
    KL_FORM,
    KL_IN_REWARD,
    LORA,
    METHOD,
    MICRO,
    PROMPT_LENGTH,
    RATIO_WARMUP,
    RESUME,
    REWARD_MODEL,
    SCHEDULE,
    SERVERS,
    TARGET_KL,
    TRACKER,
    Ours,
)

OPENRLHF = {
    "n_samples_per_prompt": Ours("--samples-per-prompt"),
    "rollout_batch_size": Ours("--prompts-per-step"),
    "train_batch_size": Ours(
        "--algorithm.step.minibatches",
        "how many there are, not how large: --prompts-per-step × --samples-per-prompt over OpenRLHF's number",
    ),
    "micro_train_batch_size": MICRO,
    "train_max_tokens_per_gpu": MICRO,
    "micro_rollout_batch_size": Ours("--decode-rows"),
    "max_epochs": Ours("--algorithm.step.epochs"),
    "num_episodes": EPOCHS_OF_DATA,
    "prompt_max_len": PROMPT_LENGTH,
    "generate_max_len": Ours("--max-tokens"),
    "eps_clip": BOTH_CLIPS,
    "eps_clip_low_high": BOTH_CLIPS,
    "dual_clip": DUAL_CLIP,
    "value_clip": Ours("--algorithm.critic.clip"),
    "gamma": Ours("--algorithm.psi.gae.gamma"),
    "lambd": Ours("--algorithm.psi.gae.lam"),
    "init_kl_coef": Ours(
        KL_IN_REWARD.flag,
        f"{KL_IN_REWARD.note}; OpenRLHF puts it behind the baselines of rloo, reinforce_baseline, group_norm and dr_grpo, and here "
        "it is in them",
    ),
    "kl_target": TARGET_KL,
    "kl_estimator": Ours(KL_FORM.flag, KL_FORM.note),
    "use_kl_loss": Ours("--algorithm.terms KLToReference"),
    "entropy_loss_coef": ENTROPY,
    "policy_loss_type": METHOD,
    "advantage_estimator": METHOD,
    "no_advantage_std_norm": Ours(
        "--algorithm.psi",
        "without Whiten: GroupMean for reinforce_pp_baseline, GAE for ppo; the mean over all tokens, which OpenRLHF still takes "
        "off, stays on; rloo, group_norm and dr_grpo are as they are",
    ),
    "overlong_buffer_len": Ours(
        "--algorithm.shaping SoftOverlong --algorithm.shaping.soft-overlong.cache",
        "a share of --max-tokens, not tokens",
    ),
    "dynamic_filtering": Ours(
        "--algorithm.filters DropNoSpread",
        "groups without any spread go, at whatever reward; OpenRLHF's are those whose mean is outside its range, the same for "
        "rewards of 0 and 1",
    ),
    "actor_learning_rate": Ours("--lr"),
    "critic_learning_rate": Ours("--algorithm.critic.lr"),
    "lr_warmup_ratio": RATIO_WARMUP,
    "lr_scheduler": SCHEDULE,
    "max_norm": Ours("--optimizer.clip"),
    "l2": Ours("--optimizer.weight-decay"),
    "adam_betas": Ours("--optimizer.betas"),
    "freezing_actor_steps": Ours(
        "--algorithm.critic.pretrain", "rollouts, at most: it ends when the critic explains enough"
    ),
    "enable_vllm_is_correction": CORRECTION,
    "vllm_is_truncated_threshold": Ours(
        "--algorithm.corrections TruncatedIS --algorithm.corrections.truncated-is.cap",
        "the upper of its two bounds; weights below the lower one are not raised here",
    ),
    "pretrain": Ours("--model"),
    "reward_pretrain": REWARD_MODEL,
    "remote_rm_url": Ours(
        "--reward openrlhf:path/to/file.py", "calls its reward_func; servers are not asked for rewards"
    ),
    "critic_pretrain": Ours("", "the critic starts as a copy of the model"),
    "prompt_data": Ours("--task", "a file, a built-in task, or hf:REPOSITORY:CONFIG:SPLIT"),
    "eval_dataset": Ours("--held-out", "data, as --task"),
    "eval_n_samples_per_prompt": Ours("--evaluation.samples"),
    "eval_steps": Ours("--evaluation.every", "in rollouts"),
    "save_path": Ours("--output"),
    "save_steps": Ours("--checkpoint.every", "in rollouts"),
    "max_ckpt_num": Ours("--checkpoint.keep"),
    "load_checkpoint": RESUME,
    "bf16": Ours("--learner.dtype bf16", "with fp32 master weights"),
    "gradient_checkpointing": Ours("--learner.gradient-checkpointing", "a switch without a value, off by default"),
    "vllm_num_engines": SERVERS,
    "use_wandb": TRACKER,
    "lora_rank": LORA,
}
