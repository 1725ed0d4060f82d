"""verl's options: ppo_trainer.yaml with its actor, rollout and critic (volcengine/verl, verl/trainer/config)."""

from __future__ import annotations

from policygrad.commands.foreign.meanings import (
    BOTH_CLIPS,
    DEVICES,
    DUAL_CLIP,
    ENGINE,
    ENTROPY,
    EPOCHS_OF_DATA,
    HIGH,
    KL_FORM,
    KL_IN_LOSS,
    KL_IN_REWARD,
    METHOD,
    MICRO,
    PROMPT_LENGTH,
    RATIO_WARMUP,
    RESUME,
    REWARD_MODEL,
    SCHEDULE,
    TARGET_KL,
    TRACKER,
    WARMUP,
    Ours,
)

VERL = {
    "data.train_files": Ours("--task", "the same .parquet file, whose columns are read as verl does"),
    "data.val_files": Ours("--held-out", "data, as --task"),
    "data.train_batch_size": Ours("--prompts-per-step"),
    "data.max_prompt_length": PROMPT_LENGTH,
    "data.max_response_length": Ours("--max-tokens"),
    "actor_rollout_ref.model.path": Ours("--model"),
    "actor_rollout_ref.model.enable_gradient_checkpointing": Ours("--learner.gradient-checkpointing"),
    "actor_rollout_ref.actor.ppo_mini_batch_size": Ours(
        "--algorithm.step.minibatches", "how many there are, not how large: data.train_batch_size over verl's number"
    ),
    "actor_rollout_ref.actor.ppo_micro_batch_size": MICRO,
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": MICRO,
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": MICRO,
    "actor_rollout_ref.actor.ppo_epochs": Ours("--algorithm.step.epochs"),
    "actor_rollout_ref.actor.clip_ratio": BOTH_CLIPS,
    "actor_rollout_ref.actor.clip_ratio_low": Ours("--algorithm.gate.low"),
    "actor_rollout_ref.actor.clip_ratio_high": HIGH,
    "actor_rollout_ref.actor.clip_ratio_c": Ours(DUAL_CLIP.flag, "verl always has it, at 3; Clip here has none"),
    "actor_rollout_ref.actor.loss_agg_mode": Ours(
        "--algorithm.aggregate",
        "token-mean is TokenMean, seq-mean-token-sum SequenceSum, seq-mean-token-mean SequenceMean; over the whole update here",
    ),
    "actor_rollout_ref.actor.policy_loss.loss_mode": METHOD,
    "actor_rollout_ref.actor.entropy_coeff": ENTROPY,
    "actor_rollout_ref.actor.use_kl_loss": Ours("--algorithm.terms KLToReference", "none is verl's False"),
    "actor_rollout_ref.actor.kl_loss_coef": KL_IN_LOSS,
    "actor_rollout_ref.actor.kl_loss_type": Ours(
        KL_FORM.flag, "low_var_kl is k3, mse k2; kl (k1) has no expected gradient in the loss and is refused"
    ),
    "actor_rollout_ref.actor.grad_clip": Ours("--optimizer.clip"),
    "actor_rollout_ref.actor.optim.lr": Ours("--lr"),
    "actor_rollout_ref.actor.optim.weight_decay": Ours("--optimizer.weight-decay"),
    "actor_rollout_ref.actor.optim.lr_warmup_steps": WARMUP,
    "actor_rollout_ref.actor.optim.lr_warmup_steps_ratio": RATIO_WARMUP,
    "actor_rollout_ref.actor.optim.warmup_style": SCHEDULE,
    "actor_rollout_ref.rollout.n": Ours("--samples-per-prompt"),
    "actor_rollout_ref.rollout.temperature": Ours("--temperature"),
    "actor_rollout_ref.rollout.top_p": Ours("--top-p", "training takes 1 only: the ratio is of the whole distribution"),
    "actor_rollout_ref.rollout.top_k": Ours(
        "--top-k", "training takes 0 only (verl's -1): the ratio is of the whole distribution"
    ),
    "actor_rollout_ref.rollout.response_length": Ours("--max-tokens"),
    "actor_rollout_ref.rollout.name": ENGINE,
    "actor_rollout_ref.rollout.val_kwargs.n": Ours("--evaluation.samples"),
    "critic.optim.lr": Ours("--algorithm.critic.lr"),
    "critic.cliprange_value": Ours("--algorithm.critic.clip"),
    "trainer.critic_warmup": Ours(
        "--algorithm.critic.pretrain", "rollouts, at most: it ends when the critic explains enough"
    ),
    "algorithm.adv_estimator": METHOD,
    "algorithm.gamma": Ours("--algorithm.psi.gae.gamma"),
    "algorithm.lam": Ours("--algorithm.psi.gae.lam"),
    "algorithm.norm_adv_by_std_in_grpo": Ours(
        "--algorithm.psi",
        "False is GroupMean, True GroupMean,GroupStd, whose eps is 1e-6 in verl: --algorithm.psi.group-std.eps 1e-6",
    ),
    "algorithm.use_kl_in_reward": Ours(
        "--algorithm.shaping KLInReward",
        "none is verl's False; where completions are compared, as in grpo, verl's is "
        "--algorithm.shaping.kl-in-reward.level sequence",
    ),
    "algorithm.kl_penalty": Ours("--algorithm.shaping.kl-in-reward.form", "k1 only, which is verl's kl"),
    "algorithm.kl_ctrl.kl_coef": KL_IN_REWARD,
    "algorithm.kl_ctrl.target_kl": TARGET_KL,
    "algorithm.filter_groups.enable": Ours("--algorithm.filters DropNoSpread"),
    "algorithm.filter_groups.max_num_gen_batches": Ours("--algorithm.filters.drop-no-spread.max-rounds"),
    "custom_reward_function.path": Ours("--reward verl:path/to/file.py", "calls its compute_score as verl does"),
    "custom_reward_function.name": Ours("--reward verl:path/to/file.py:function"),
    "reward_model.model.path": REWARD_MODEL,
    "trainer.total_epochs": EPOCHS_OF_DATA,
    "trainer.total_training_steps": Ours("--steps", "rollouts, as there"),
    "trainer.save_freq": Ours("--checkpoint.every"),
    "trainer.test_freq": Ours("--evaluation.every"),
    "trainer.default_local_dir": Ours("--output"),
    "trainer.resume_from_path": RESUME,
    "trainer.logger": TRACKER,
    "trainer.nnodes": DEVICES,
    "trainer.n_gpus_per_node": DEVICES,
}
