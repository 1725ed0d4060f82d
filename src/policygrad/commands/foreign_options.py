"""Options of other libraries, answered with ours: one table per library, and who answers."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

from policygrad.errors import ConfigError

# What is said to an option of another library, and what several of them are told alike.


class Equivalent(NamedTuple):
    """What is said instead; no flag where there is nothing of the kind."""

    flag: str
    note: str = ""


BOTH_CLIPS = Equivalent("--algorithm.gate.low and --algorithm.gate.high", "the two sides are two options here")
HIGH = Equivalent(
    "--algorithm.gate.high", "an offset from 1 with Clip; with ClippedImportance (cispo) the bound itself"
)
KL_IN_REWARD = Equivalent(
    "--algorithm.shaping.kl-in-reward.beta", "--algorithm.shaping KLInReward puts the penalty in where there is none"
)
TARGET_KL = Equivalent(
    "--algorithm.shaping.kl-in-reward.target",
    "nats a token, over all tokens; at most 2 % a rollout, as with a horizon of ten rollouts' samples",
)
KL_IN_LOSS = Equivalent(
    "--algorithm.terms.kl-to-reference.beta", "--algorithm.terms KLToReference puts the term in where there is none"
)
KL_FORM = Equivalent(
    "--algorithm.terms.kl-to-reference.form", "k2 or k3; k1 belongs into the reward, --algorithm.shaping KLInReward"
)
ENTROPY = Equivalent(
    "--algorithm.terms.entropy.eta",
    "--algorithm.terms Entropy puts the term in where there is none; it is an estimate from the sampled tokens, and "
    "--algorithm.terms ExactEntropy the sum over the vocabulary",
)
DUAL_CLIP = Equivalent(
    "--algorithm.gate DualClip --algorithm.gate.c", "it bounds r where Ψ < 0; where Ψ > 0 the clip does already"
)
MICRO = Equivalent(
    "--learner.micro-tokens",
    "tokens per forward and backward pass; it changes memory, never the gradient",
)
RATIO_WARMUP = Equivalent("--optimizer.warmup", "counted in optimiser steps, not as a share of the run")
WARMUP = Equivalent("--optimizer.warmup", "in optimiser steps, of which a rollout may have several")
SCHEDULE = Equivalent("--optimizer.schedule", "constant, linear or cosine, down to 0")
STEPS = Equivalent("--steps", "a step here is a rollout with all of its updates, not an optimiser step")
EPOCHS_OF_DATA = Equivalent("--steps", "a run is counted in rollouts, or by --tokens, not in passes over the prompts")
PROMPT_LENGTH = Equivalent("", "prompts are never cut: one that leaves no room for --max-tokens is refused by name")
DEVICES = Equivalent(
    "--learner.world-size", "processes that learn together, a GPU each; on more than one machine torchrun starts them"
)
ENGINE = Equivalent("--sampler.engine", "vllm or sglang, servers that you start and name, --sampler.urls; or llama_cpp")
SERVERS = Equivalent("--sampler.urls", "the address of each server; --sampler.engine says what they are")
TRACKER = Equivalent("--track", "wandb, tensorboard, mlflow, trackio; every run writes metrics.jsonl too")
LORA = Equivalent("--learner.lora rank=16,alpha=32,targets=all-linear", "one option, of which any part may be left out")
REWARD_MODEL = Equivalent("--reward model:DIR", "a reward model that `policygrad reward-model` trained")
METHOD = Equivalent(
    "ALGORITHM, the first word after `train`",
    "`policygrad algorithms` lists them; --algorithm.FIELD changes a part",
)
RESUME = Equivalent("--resume RUN")
CORRECTION = Equivalent("--algorithm.corrections", "TruncatedIS or MaskedIS")


# OpenRLHF's options: train_ppo_ray.py (OpenRLHF/OpenRLHF, openrlhf/cli).

OPENRLHF = {
    "n_samples_per_prompt": Equivalent("--samples-per-prompt"),
    "rollout_batch_size": Equivalent("--prompts-per-step"),
    "train_batch_size": Equivalent(
        "--algorithm.update-rule.minibatches",
        "how many there are, not how large: --prompts-per-step × --samples-per-prompt over OpenRLHF's number",
    ),
    "micro_train_batch_size": MICRO,
    "train_max_tokens_per_gpu": MICRO,
    "micro_rollout_batch_size": Equivalent("--decode-rows"),
    "max_epochs": Equivalent("--algorithm.update-rule.epochs"),
    "num_episodes": EPOCHS_OF_DATA,
    "prompt_max_len": PROMPT_LENGTH,
    "generate_max_len": Equivalent("--max-tokens"),
    "eps_clip": BOTH_CLIPS,
    "eps_clip_low_high": BOTH_CLIPS,
    "dual_clip": DUAL_CLIP,
    "value_clip": Equivalent("--algorithm.critic.clip"),
    "gamma": Equivalent("--algorithm.advantage.gae.gamma"),
    "lambd": Equivalent("--algorithm.advantage.gae.lam"),
    "init_kl_coef": Equivalent(
        KL_IN_REWARD.flag,
        f"{KL_IN_REWARD.note}; OpenRLHF puts it behind the baselines of rloo, reinforce_baseline, group_norm and dr_grpo, and here "
        "it is in them",
    ),
    "kl_target": TARGET_KL,
    "kl_estimator": Equivalent(KL_FORM.flag, KL_FORM.note),
    "use_kl_loss": Equivalent("--algorithm.terms KLToReference"),
    "entropy_loss_coef": ENTROPY,
    "policy_loss_type": METHOD,
    "advantage_estimator": METHOD,
    "no_advantage_std_norm": Equivalent(
        "--algorithm.advantage",
        "without Whiten: GroupMean for reinforce_pp_baseline, GAE for ppo; the mean over all tokens, which OpenRLHF still takes "
        "off, stays on; rloo, group_norm and dr_grpo are as they are",
    ),
    "overlong_buffer_len": Equivalent(
        "--algorithm.shaping SoftOverlong --algorithm.shaping.soft-overlong.cache",
        "a share of --max-tokens, not tokens",
    ),
    "dynamic_filtering": Equivalent(
        "--algorithm.filters DropZeroVariance",
        "groups without any spread go, at whatever reward; OpenRLHF's are those whose mean is outside its range, the same for "
        "rewards of 0 and 1",
    ),
    "actor_learning_rate": Equivalent("--lr"),
    "critic_learning_rate": Equivalent("--algorithm.critic.lr"),
    "lr_warmup_ratio": RATIO_WARMUP,
    "lr_scheduler": SCHEDULE,
    "max_norm": Equivalent("--optimizer.clip"),
    "l2": Equivalent("--optimizer.weight-decay"),
    "adam_betas": Equivalent("--optimizer.betas"),
    "freezing_actor_steps": Equivalent(
        "--algorithm.critic.pretrain", "rollouts, at most: it ends when the critic explains enough"
    ),
    "enable_vllm_is_correction": CORRECTION,
    "vllm_is_truncated_threshold": Equivalent(
        "--algorithm.corrections TruncatedIS --algorithm.corrections.truncated-is.cap",
        "the upper of its two bounds; weights below the lower one are not raised here",
    ),
    "pretrain": Equivalent("--model"),
    "reward_pretrain": REWARD_MODEL,
    "remote_rm_url": Equivalent(
        "--reward openrlhf:path/to/file.py", "calls its reward_func; servers are not asked for rewards"
    ),
    "critic_pretrain": Equivalent("", "the critic starts as a copy of the model"),
    "prompt_data": Equivalent("--task", "a file, a built-in task, or hf:REPOSITORY:CONFIG:SPLIT"),
    "eval_dataset": Equivalent("--eval-data", "data, as --task"),
    "eval_n_samples_per_prompt": Equivalent("--evaluation.samples-per-prompt"),
    "eval_steps": Equivalent("--evaluation.every", "in rollouts"),
    "save_path": Equivalent("--output"),
    "save_steps": Equivalent("--checkpoint.every", "in rollouts"),
    "max_ckpt_num": Equivalent("--checkpoint.keep"),
    "load_checkpoint": RESUME,
    "bf16": Equivalent("--learner.dtype bf16", "with fp32 master weights"),
    "gradient_checkpointing": Equivalent(
        "--learner.gradient-checkpointing", "a switch without a value, off by default"
    ),
    "vllm_num_engines": SERVERS,
    "use_wandb": TRACKER,
    "lora_rank": LORA,
}


# The same names where `policygrad sft` and `reward-model` say something else than `train`.

SUPERVISED = {  # where `policygrad sft` and `reward-model` say something else than `train`
    "num_train_epochs": Equivalent("--epochs"),
    "max_epochs": Equivalent("--epochs"),
    "per_device_train_batch_size": Equivalent(
        "--batch-size", "rows per update, over all passes; memory is set by --learner.micro-tokens"
    ),
    "train_batch_size": Equivalent("--batch-size", "rows per update"),
    "gradient_accumulation_steps": Equivalent(
        "--learner.micro-tokens", "tokens per pass: what does not fit is accumulated"
    ),
    "dataset_name": Equivalent("--data", "a file, or hf:REPOSITORY:CONFIG:SPLIT"),
    "dataset": Equivalent("--data", "a file, or hf:REPOSITORY:CONFIG:SPLIT"),
    "actor_learning_rate": Equivalent("--lr"),
    "save_steps": Equivalent("--checkpoint.every", "in updates"),
}


# TRL's options: GRPOConfig, RLOOConfig, PPOConfig (huggingface/trl, trl/trainer) and transformers' TrainingArguments.

TRL = {
    "num_generations": Equivalent("--samples-per-prompt"),
    "rloo_k": Equivalent("--samples-per-prompt"),
    "num_generations_eval": Equivalent("--evaluation.samples-per-prompt"),
    "max_completion_length": Equivalent("--max-tokens"),
    "response_length": Equivalent("--max-tokens"),
    "max_prompt_length": PROMPT_LENGTH,
    "epsilon": Equivalent(BOTH_CLIPS.flag, "two options here, and both are meant where TRL has no epsilon_high"),
    "epsilon_high": HIGH,
    "delta": DUAL_CLIP,
    "cliprange": BOTH_CLIPS,
    "cliprange_value": Equivalent("--algorithm.critic.clip"),
    "vf_coef": Equivalent(
        "--algorithm.critic.coefficient", "of the squared error, which TRL halves first: half of TRL's number"
    ),
    "gamma": Equivalent("--algorithm.advantage.gae.gamma"),
    "lam": Equivalent("--algorithm.advantage.gae.lam"),
    "whiten_rewards": Equivalent("", "rewards are not whitened; advantages are, by Whiten in --algorithm.advantage"),
    "beta": Equivalent(
        KL_IN_LOSS.flag,
        "off by default in TRL, the paper's 0.04 in grpo here; RLOO's is --algorithm.shaping.kl-in-reward.beta. "
        "--algorithm.terms KLToReference puts the term in where there is none, none takes it out",
    ),
    "kl_coef": KL_IN_REWARD,
    "init_kl_coef": KL_IN_REWARD,
    "kl_estimator": Equivalent(
        "--algorithm.shaping.kl-in-reward.form", "k1 only: k2 and k3 in the reward are not the KL's gradient"
    ),
    "num_iterations": Equivalent("--algorithm.update-rule.epochs"),
    "num_ppo_epochs": Equivalent("--algorithm.update-rule.epochs"),
    "ppo_epochs": Equivalent("--algorithm.update-rule.epochs"),
    "num_mini_batches": Equivalent("--algorithm.update-rule.minibatches", "shares of whole groups of one prompt"),
    "steps_per_generation": Equivalent(
        "--algorithm.update-rule.minibatches",
        "updates per rollout and epoch: TRL's number over gradient_accumulation_steps",
    ),
    "generation_batch_size": Equivalent(
        "--prompts-per-step", "in prompts, where TRL counts completions: divide by --samples-per-prompt"
    ),
    "per_device_train_batch_size": Equivalent(
        "--prompts-per-step",
        "in prompts per rollout, --samples-per-prompt completions each, where TRL counts completions per device and pass; "
        "memory is set by --learner.micro-tokens",
    ),
    "gradient_accumulation_steps": Equivalent(
        "--learner.micro-tokens",
        "tokens per pass: what does not fit is accumulated, and the batch stays --prompts-per-step",
    ),
    "learning_rate": Equivalent("--lr"),
    "lr_scheduler_type": SCHEDULE,
    "warmup_ratio": RATIO_WARMUP,
    "warmup_steps": WARMUP,
    "max_grad_norm": Equivalent("--optimizer.clip"),
    "weight_decay": Equivalent("--optimizer.weight-decay"),
    "adam_beta1": Equivalent("--optimizer.betas", "both at once: --optimizer.betas 0.9 0.99"),
    "adam_beta2": Equivalent("--optimizer.betas", "both at once: --optimizer.betas 0.9 0.99"),
    "adam_epsilon": Equivalent("--optimizer.eps"),
    "max_steps": STEPS,
    "num_train_epochs": EPOCHS_OF_DATA,
    "total_episodes": Equivalent("--steps", "in rollouts of --prompts-per-step prompts, where TRL counts completions"),
    "loss_type": Equivalent(
        "--algorithm.aggregation",
        "grpo is SequenceMean, dr_grpo FixedLength, dapo and bnpo TokenMean; cispo and sapo are algorithms here, and so is all "
        "of dapo: policygrad train dapo",
    ),
    "scale_rewards": Equivalent(
        "--algorithm.advantage",
        "group is GroupMean,GroupStd; none GroupMean; batch GroupMean,BatchStd with --algorithm.advantage.batch-std.of rewards, for "
        "TRL divides by the std of the rewards, not of the centred ones",
    ),
    "importance_sampling_level": Equivalent("--algorithm.ratio", "token is Token, sequence Sequence"),
    "mask_truncated_completions": Equivalent(
        "--algorithm.filters MaskTruncated",
        "TRL counts their rewards in the group's mean and std: --algorithm.filters.mask-truncated.keep-in-statistics",
    ),
    "sapo_temperature_pos": Equivalent("--algorithm.gate.tau-pos"),
    "sapo_temperature_neg": Equivalent("--algorithm.gate.tau-neg"),
    "sync_ref_model": Equivalent("--algorithm.reference.refresh-every", "in rollouts"),
    "ref_model_sync_steps": Equivalent(
        "--algorithm.reference.refresh-every", "in rollouts; the policy is taken over whole, not mixed in"
    ),
    "ref_model_mixup_alpha": Equivalent(
        "--algorithm.reference.refresh-every", "the policy is taken over whole, not mixed in"
    ),
    "vllm_importance_sampling_correction": CORRECTION,
    "vllm_importance_sampling_cap": Equivalent(
        "--algorithm.corrections TruncatedIS --algorithm.corrections.truncated-is.cap",
        "an upper bound alone, token by token: TRL's mode token_truncate without a minimum",
    ),
    "reward_funcs": Equivalent("--reward"),
    "reward_weights": Equivalent("--reward", "a weight stands with its reward: --reward math format*0.5"),
    "reward_model_path": REWARD_MODEL,
    "model_name_or_path": Equivalent("--model"),
    "sft_model_path": Equivalent("--model"),
    "dataset_name": Equivalent("--task", "a file, a built-in task, or hf:REPOSITORY:CONFIG:SPLIT"),
    "output_dir": Equivalent("--output"),
    "resume_from_checkpoint": Equivalent("--resume RUN", "the run's folder"),
    "save_steps": Equivalent("--checkpoint.every", "in rollouts"),
    "save_total_limit": Equivalent("--checkpoint.keep"),
    "eval_steps": Equivalent("--evaluation.every", "in rollouts"),
    "bf16": Equivalent("--learner.dtype bf16", "with fp32 master weights"),
    "gradient_checkpointing": Equivalent(
        "--learner.gradient-checkpointing", "a switch without a value, off by default"
    ),
    "logging_steps": Equivalent("", "every step is written to metrics.jsonl"),
    "report_to": TRACKER,
    "use_vllm": ENGINE,
    "vllm_mode": ENGINE,
    "vllm_server_base_url": SERVERS,
    "use_peft": LORA,
    "lora_r": LORA,
    "lora_alpha": LORA,
    "load_in_4bit": Equivalent(
        "--learner.lora bits=4", "the frozen weights under adapters in four bits, NF4 as in QLoRA; part of one option"
    ),
    "log_completions": Equivalent(
        "", "every completion is written to completions.jsonl, and `policygrad report RUN` shows them"
    ),
    "push_to_hub": Equivalent(
        "", "nothing is uploaded: the run's folder model/ is what `hf upload REPOSITORY RUN/model` takes"
    ),
}


# verl's options: ppo_trainer.yaml with its actor, rollout and critic (volcengine/verl, verl/trainer/config).

VERL = {
    "data.train_files": Equivalent("--task", "the same .parquet file, whose columns are read as verl does"),
    "data.val_files": Equivalent("--eval-data", "data, as --task"),
    "data.train_batch_size": Equivalent("--prompts-per-step"),
    "data.max_prompt_length": PROMPT_LENGTH,
    "data.max_response_length": Equivalent("--max-tokens"),
    "actor_rollout_ref.model.path": Equivalent("--model"),
    "actor_rollout_ref.model.enable_gradient_checkpointing": Equivalent("--learner.gradient-checkpointing"),
    "actor_rollout_ref.actor.ppo_mini_batch_size": Equivalent(
        "--algorithm.update-rule.minibatches",
        "how many there are, not how large: data.train_batch_size over verl's number",
    ),
    "actor_rollout_ref.actor.ppo_micro_batch_size": MICRO,
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": MICRO,
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": MICRO,
    "actor_rollout_ref.actor.ppo_epochs": Equivalent("--algorithm.update-rule.epochs"),
    "actor_rollout_ref.actor.clip_ratio": BOTH_CLIPS,
    "actor_rollout_ref.actor.clip_ratio_low": Equivalent("--algorithm.gate.low"),
    "actor_rollout_ref.actor.clip_ratio_high": HIGH,
    "actor_rollout_ref.actor.clip_ratio_c": Equivalent(DUAL_CLIP.flag, "verl always has it, at 3; Clip here has none"),
    "actor_rollout_ref.actor.loss_agg_mode": Equivalent(
        "--algorithm.aggregation",
        "token-mean is TokenMean, seq-mean-token-sum SequenceSum, seq-mean-token-mean SequenceMean; over the whole update here",
    ),
    "actor_rollout_ref.actor.policy_loss.loss_mode": METHOD,
    "actor_rollout_ref.actor.entropy_coeff": ENTROPY,
    "actor_rollout_ref.actor.use_kl_loss": Equivalent("--algorithm.terms KLToReference", "none is verl's False"),
    "actor_rollout_ref.actor.kl_loss_coef": KL_IN_LOSS,
    "actor_rollout_ref.actor.kl_loss_type": Equivalent(
        KL_FORM.flag, "low_var_kl is k3, mse k2; kl (k1) has no expected gradient in the loss and is refused"
    ),
    "actor_rollout_ref.actor.grad_clip": Equivalent("--optimizer.clip"),
    "actor_rollout_ref.actor.optim.lr": Equivalent("--lr"),
    "actor_rollout_ref.actor.optim.weight_decay": Equivalent("--optimizer.weight-decay"),
    "actor_rollout_ref.actor.optim.lr_warmup_steps": WARMUP,
    "actor_rollout_ref.actor.optim.lr_warmup_steps_ratio": RATIO_WARMUP,
    "actor_rollout_ref.actor.optim.warmup_style": SCHEDULE,
    "actor_rollout_ref.rollout.n": Equivalent("--samples-per-prompt"),
    "actor_rollout_ref.rollout.temperature": Equivalent("--temperature"),
    "actor_rollout_ref.rollout.top_p": Equivalent(
        "--top-p", "training takes 1 only: the ratio is of the whole distribution"
    ),
    "actor_rollout_ref.rollout.top_k": Equivalent(
        "--top-k", "training takes 0 only (verl's -1): the ratio is of the whole distribution"
    ),
    "actor_rollout_ref.rollout.response_length": Equivalent("--max-tokens"),
    "actor_rollout_ref.rollout.name": ENGINE,
    "actor_rollout_ref.rollout.val_kwargs.n": Equivalent("--evaluation.samples-per-prompt"),
    "critic.optim.lr": Equivalent("--algorithm.critic.lr"),
    "critic.cliprange_value": Equivalent("--algorithm.critic.clip"),
    "trainer.critic_warmup": Equivalent(
        "--algorithm.critic.pretrain", "rollouts, at most: it ends when the critic explains enough"
    ),
    "algorithm.adv_estimator": METHOD,
    "algorithm.gamma": Equivalent("--algorithm.advantage.gae.gamma"),
    "algorithm.lam": Equivalent("--algorithm.advantage.gae.lam"),
    "algorithm.norm_adv_by_std_in_grpo": Equivalent(
        "--algorithm.advantage",
        "False is GroupMean, True GroupMean,GroupStd, whose eps is 1e-6 in verl: --algorithm.advantage.group-std.eps 1e-6",
    ),
    "algorithm.use_kl_in_reward": Equivalent(
        "--algorithm.shaping KLInReward",
        "none is verl's False; where completions are compared, as in grpo, verl's is "
        "--algorithm.shaping.kl-in-reward.level sequence",
    ),
    "algorithm.kl_penalty": Equivalent("--algorithm.shaping.kl-in-reward.form", "k1 only, which is verl's kl"),
    "algorithm.kl_ctrl.kl_coef": KL_IN_REWARD,
    "algorithm.kl_ctrl.target_kl": TARGET_KL,
    "algorithm.filter_groups.enable": Equivalent("--algorithm.filters DropZeroVariance"),
    "algorithm.filter_groups.max_num_gen_batches": Equivalent("--algorithm.filters.drop-zero-variance.max-rounds"),
    "custom_reward_function.path": Equivalent("--reward verl:path/to/file.py", "calls its compute_score as verl does"),
    "custom_reward_function.name": Equivalent("--reward verl:path/to/file.py:function"),
    "reward_model.model.path": REWARD_MODEL,
    "trainer.total_epochs": EPOCHS_OF_DATA,
    "trainer.total_training_steps": Equivalent("--steps", "rollouts, as there"),
    "trainer.save_freq": Equivalent("--checkpoint.every"),
    "trainer.test_freq": Equivalent("--evaluation.every"),
    "trainer.default_local_dir": Equivalent("--output"),
    "trainer.resume_from_path": RESUME,
    "trainer.logger": TRACKER,
    "trainer.nnodes": DEVICES,
    "trainer.n_gpus_per_node": DEVICES,
}


# An option of another library is answered with ours: whoever comes from TRL, verl or OpenRLHF need not look for it.

_VERL = re.compile(
    r"\+{0,2}((?:actor_rollout_ref|algorithm|critic|custom_reward_function|data|reward_model|trainer)\.[\w.]+)=(.*)"
)
LIBRARIES = {"TRL": TRL, "verl": VERL, "OpenRLHF": OPENRLHF}
_NO_OPTION = Equivalent("", "`--help` lists what there is")


def reject_foreign_options(
    args: Sequence[str], known: Callable[[], Collection[str]], *, supervised: bool = False
) -> None:
    """Refuses the options of other libraries, all of them at once.

    known: the command's own options, asked for only where there is something to refuse.

    Raises:
        ConfigError: whose each is, what ours is called, and where its meaning differs.
    """
    found = [(word, value, look_up_option(name, supervised)) for word, name, value in _named(args)]
    found = [(word, value, said) for word, value, said in found if said]
    if not found:
        return
    own = known()
    told = [_told(word, value, said, own, supervised) for word, value, said in found]
    raise ConfigError(told[0] if len(told) == 1 else "options of other libraries:\n  " + "\n  ".join(told))


def look_up_option(name: str, supervised: bool = False) -> dict[Equivalent, list[str]]:
    """What is said to a name -> the libraries that have it. Empty for a name that none of them has."""
    found: dict[Equivalent, list[str]] = {}
    for library, names in LIBRARIES.items():
        if name in names:
            found.setdefault(names[name], []).append(library)
    if not found and "." in name and "=" not in name and _VERL.fullmatch(f"{name}="):
        found[_NO_OPTION] = ["verl"]
    if supervised and name in SUPERVISED:
        return {SUPERVISED[name]: [library for libraries in found.values() for library in libraries] or ["TRL"]}
    return found


def _named(args: Sequence[str]) -> list[tuple[str, str, str]]:
    """(as written, name in the libraries' spelling, value) of everything that may be an option."""
    found = []
    for i, word in enumerate(args):
        if overridden := _VERL.fullmatch(word):
            found.append((overridden[1], overridden[1], overridden[2]))
        elif word.startswith("--") and not word.startswith("--algorithm."):
            flag, equals, value = word.partition("=")
            after = args[i + 1] if i + 1 < len(args) and not args[i + 1].startswith("--") else ""
            found.append((flag, flag[2:].replace("-", "_"), value if equals else after))
    return found


def _told(word: str, value: str, said: dict[Equivalent, list[str]], own: Collection[str], supervised: bool) -> str:
    return "; ".join(_answer(word, value, ours, libraries, own, supervised) for ours, libraries in said.items())


def _answer(
    word: str, value: str, ours: Equivalent, libraries: list[str], own: Collection[str], supervised: bool
) -> str:
    whose = f"{word} is {' and '.join(libraries)}'s"
    note = f" ({ours.note})" if ours.note else ""
    flags = re.findall(r"--[a-z][\w.-]*[a-z]", ours.flag)
    lacks = [flag for flag in flags if flag not in own]
    if not ours.flag:
        return f"{whose}, and there is no such option here{note}"
    if supervised and (lacks or not flags):
        return f"{whose}, and means nothing here: it is of reinforcement learning, `policygrad train`"
    one = ours.flag == "".join(flags)  # an option alone, which takes the value as it is
    same = one and not ours.note and value and value.lower() not in ("true", "false")
    parts = [flag for flag in lacks if flag.count(".") > 1]
    without = f"; the algorithm as it is has no part with {' or '.join(parts)}" if parts and one else ""
    return f"{whose}; here it is {ours.flag}{f' {value}' if same else ''}{note}{without}"
