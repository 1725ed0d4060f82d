"""TRL's options: GRPOConfig, RLOOConfig, PPOConfig (huggingface/trl, trl/trainer) and transformers' TrainingArguments."""

from __future__ import annotations

from policygrad.commands.foreign.meanings import (
    BOTH_CLIPS,
    CORRECTION,
    DUAL_CLIP,
    ENGINE,
    EPOCHS_OF_DATA,
    HIGH,
    KL_IN_LOSS,
    KL_IN_REWARD,
    LORA,
    PROMPT_LENGTH,
    RATIO_WARMUP,
    REWARD_MODEL,
    SCHEDULE,
    SERVERS,
    STEPS,
    TRACKER,
    WARMUP,
    Ours,
)

TRL = {
    "num_generations": Ours("--samples-per-prompt"),
    "rloo_k": Ours("--samples-per-prompt"),
    "num_generations_eval": Ours("--evaluation.samples"),
    "max_completion_length": Ours("--max-tokens"),
    "response_length": Ours("--max-tokens"),
    "max_prompt_length": PROMPT_LENGTH,
    "epsilon": Ours(BOTH_CLIPS.flag, "two options here, and both are meant where TRL has no epsilon_high"),
    "epsilon_high": HIGH,
    "delta": DUAL_CLIP,
    "cliprange": BOTH_CLIPS,
    "cliprange_value": Ours("--algorithm.critic.clip"),
    "vf_coef": Ours(
        "--algorithm.critic.coefficient", "of the squared error, which TRL halves first: half of TRL's number"
    ),
    "gamma": Ours("--algorithm.psi.gae.gamma"),
    "lam": Ours("--algorithm.psi.gae.lam"),
    "whiten_rewards": Ours("", "rewards are not whitened; advantages are, by Whiten in --algorithm.psi"),
    "beta": Ours(
        KL_IN_LOSS.flag,
        "off by default in TRL, the paper's 0.04 in grpo here; RLOO's is --algorithm.shaping.kl-in-reward.beta. "
        "--algorithm.terms KLToReference puts the term in where there is none, none takes it out",
    ),
    "kl_coef": KL_IN_REWARD,
    "init_kl_coef": KL_IN_REWARD,
    "kl_estimator": Ours(
        "--algorithm.shaping.kl-in-reward.form", "k1 only: k2 and k3 in the reward are not the KL's gradient"
    ),
    "num_iterations": Ours("--algorithm.step.epochs"),
    "num_ppo_epochs": Ours("--algorithm.step.epochs"),
    "ppo_epochs": Ours("--algorithm.step.epochs"),
    "num_mini_batches": Ours("--algorithm.step.minibatches", "shares of whole groups of one prompt"),
    "steps_per_generation": Ours(
        "--algorithm.step.minibatches", "updates per rollout and epoch: TRL's number over gradient_accumulation_steps"
    ),
    "generation_batch_size": Ours(
        "--prompts-per-step", "in prompts, where TRL counts completions: divide by --samples-per-prompt"
    ),
    "per_device_train_batch_size": Ours(
        "--prompts-per-step",
        "in prompts per rollout, --samples-per-prompt completions each, where TRL counts completions per device and pass; "
        "memory is set by --learner.micro-tokens",
    ),
    "gradient_accumulation_steps": Ours(
        "--learner.micro-tokens",
        "tokens per pass: what does not fit is accumulated, and the batch stays --prompts-per-step",
    ),
    "learning_rate": Ours("--lr"),
    "lr_scheduler_type": SCHEDULE,
    "warmup_ratio": RATIO_WARMUP,
    "warmup_steps": WARMUP,
    "max_grad_norm": Ours("--optimizer.clip"),
    "weight_decay": Ours("--optimizer.weight-decay"),
    "adam_beta1": Ours("--optimizer.betas", "both at once: --optimizer.betas 0.9 0.99"),
    "adam_beta2": Ours("--optimizer.betas", "both at once: --optimizer.betas 0.9 0.99"),
    "adam_epsilon": Ours("--optimizer.eps"),
    "max_steps": STEPS,
    "num_train_epochs": EPOCHS_OF_DATA,
    "total_episodes": Ours("--steps", "in rollouts of --prompts-per-step prompts, where TRL counts completions"),
    "loss_type": Ours(
        "--algorithm.aggregate",
        "grpo is SequenceMean, dr_grpo FixedLength, dapo and bnpo TokenMean; cispo and sapo are algorithms here, and so is all "
        "of dapo: policygrad train dapo",
    ),
    "scale_rewards": Ours(
        "--algorithm.psi",
        "group is GroupMean,GroupStd; none GroupMean; batch GroupMean,BatchStd with --algorithm.psi.batch-std.of rewards, for "
        "TRL divides by the std of the rewards, not of the centred ones",
    ),
    "importance_sampling_level": Ours("--algorithm.ratio", "token is Token, sequence Sequence"),
    "mask_truncated_completions": Ours(
        "--algorithm.filters MaskTruncated",
        "TRL counts their rewards in the group's mean and std: --algorithm.filters.mask-truncated.keep-in-statistics",
    ),
    "sapo_temperature_pos": Ours("--algorithm.gate.tau-pos"),
    "sapo_temperature_neg": Ours("--algorithm.gate.tau-neg"),
    "sync_ref_model": Ours("--algorithm.reference.every", "in rollouts"),
    "ref_model_sync_steps": Ours(
        "--algorithm.reference.every", "in rollouts; the policy is taken over whole, not mixed in"
    ),
    "ref_model_mixup_alpha": Ours("--algorithm.reference.every", "the policy is taken over whole, not mixed in"),
    "vllm_importance_sampling_correction": CORRECTION,
    "vllm_importance_sampling_cap": Ours(
        "--algorithm.corrections TruncatedIS --algorithm.corrections.truncated-is.cap",
        "an upper bound alone, token by token: TRL's mode token_truncate without a minimum",
    ),
    "reward_funcs": Ours("--reward"),
    "reward_weights": Ours("--reward", "a weight stands with its reward: --reward math format*0.5"),
    "reward_model_path": REWARD_MODEL,
    "model_name_or_path": Ours("--model"),
    "sft_model_path": Ours("--model"),
    "dataset_name": Ours("--task", "a file, a built-in task, or hf:REPOSITORY:CONFIG:SPLIT"),
    "output_dir": Ours("--output"),
    "resume_from_checkpoint": Ours("--resume RUN", "the run's folder"),
    "save_steps": Ours("--checkpoint.every", "in rollouts"),
    "save_total_limit": Ours("--checkpoint.keep"),
    "eval_steps": Ours("--evaluation.every", "in rollouts"),
    "bf16": Ours("--learner.dtype bf16", "with fp32 master weights"),
    "gradient_checkpointing": Ours("--learner.gradient-checkpointing", "a switch without a value, off by default"),
    "logging_steps": Ours("", "every step is written to metrics.jsonl"),
    "report_to": TRACKER,
    "use_vllm": ENGINE,
    "vllm_mode": ENGINE,
    "vllm_server_base_url": SERVERS,
    "use_peft": LORA,
    "lora_r": LORA,
    "lora_alpha": LORA,
    "load_in_4bit": Ours(
        "--learner.lora bits=4", "the frozen weights under adapters in four bits, NF4 as in QLoRA; part of one option"
    ),
    "log_completions": Ours(
        "", "every completion is written to completions.jsonl, and `policygrad report RUN` shows them"
    ),
    "push_to_hub": Ours(
        "", "nothing is uploaded: the run's folder model/ is what `hf upload REPOSITORY RUN/model` takes"
    ),
}
