"""OpenRLHF: the arguments of `python3 -m openrlhf.cli.train_ppo_ray`, under their present names and those before 0.10.2.

Defaults are those of OpenRLHF at 3c3be62 (openrlhf/cli/train_ppo_ray.py).
"""

from __future__ import annotations

from collections.abc import Iterator

from policygrad.commands.converters.base import (
    Left,
    Library,
    Line,
    Need,
    Options,
    Outcome,
    Rule,
    list_lora,
    name_data,
    ratio_up,
)
from policygrad.errors import ConfigError

DEFAULTS = {
    "algo.advantage.estimator": "gae",
    "algo.advantage.gamma": 1.0,
    "algo.advantage.lambd": 1.0,
    "algo.advantage.no_std_norm": False,
    "algo.advantage.is_correction_threshold": [0.5, 5.0],
    "algo.dynamic_filtering_range": [0, 1],
    "algo.advantage.is_correction_type": "tis",
    "algo.kl.init_coef": 0.01,
    "algo.kl.estimator": "k1",
    "actor.eps_clip": 0.2,
    "actor.policy_loss_type": "ppo",
    "actor.adam.lr": 1e-6,
    "actor.adam.betas": [0.9, 0.95],
    "actor.adam.weight_decay": 0.0,
    "actor.max_norm": 1.0,
    "actor.lr_scheduler": "cosine_with_min_lr",
    "actor.lr_warmup_ratio": 0.03,
    "actor.num_nodes": 1,
    "actor.num_gpus_per_node": 8,
    "critic.adam.lr": 9e-6,
    "critic.value_clip": 0.5,
    "rollout.batch_size": 1024,
    "rollout.n_samples_per_prompt": 1,
    "train.batch_size": 128,
    "train.max_epochs": 1,
    "train.num_episodes": 1,
    "train.seed": 42,
    "data.max_len": 2048,
    "data.input_key": "input",
    "reward.overlong_penalty_factor": 1.0,
    "ckpt.max_num": 3,
    "eval.temperature": 0.6,
    "eval.n_samples_per_prompt": 4,
    "ds.param_dtype": "bf16",
    "ds.lora.rank": 0,
}
ESTIMATORS = {  # --algo.advantage.estimator -> the algorithm here
    "gae": "ppo",
    "reinforce": "reinforce_pp",
    "rloo": "rloo",
    "reinforce_baseline": "reinforce_pp_baseline",
    "group_norm": "grpo",
    "dr_grpo": "dr_grpo",
}
WHITENED = ("gae", "reinforce", "reinforce_baseline")
RENAMED = {  # before 0.10.2 -> now
    "advantage_estimator": "algo.advantage.estimator",
    "gamma": "algo.advantage.gamma",
    "lambd": "algo.advantage.lambd",
    "no_advantage_std_norm": "algo.advantage.no_std_norm",
    "enable_vllm_is_correction": "algo.advantage.is_correction_enable",
    "vllm_enable_is_correction": "algo.advantage.is_correction_enable",
    "vllm_is_truncated_threshold": "algo.advantage.is_correction_threshold",
    "vllm_is_correction_type": "algo.advantage.is_correction_type",
    "init_kl_coef": "algo.kl.init_coef",
    "kl_target": "algo.kl.target",
    "kl_horizon": "algo.kl.horizon",
    "kl_estimator": "algo.kl.estimator",
    "use_kl_loss": "algo.kl.use_loss",
    "dynamic_filtering": "algo.dynamic_filtering_enable",
    "dynamic_filtering_reward_range": "algo.dynamic_filtering_range",
    "eps_clip": "actor.eps_clip",
    "eps_clip_low_high": "actor.eps_clip_low_high",
    "dual_clip": "actor.dual_clip",
    "policy_loss_type": "actor.policy_loss_type",
    "entropy_loss_coef": "actor.entropy_coef",
    "actor_learning_rate": "actor.adam.lr",
    "adam_betas": "actor.adam.betas",
    "l2": "actor.adam.weight_decay",
    "max_norm": "actor.max_norm",
    "lr_scheduler": "actor.lr_scheduler",
    "lr_warmup_ratio": "actor.lr_warmup_ratio",
    "pretrain": "actor.model_name_or_path",
    "gradient_checkpointing": "actor.gradient_checkpointing_enable",
    "freeze_visual_encoder": "actor.freeze_visual_encoder",
    "actor_num_nodes": "actor.num_nodes",
    "actor_num_gpus_per_node": "actor.num_gpus_per_node",
    "critic_learning_rate": "critic.adam.lr",
    "critic_pretrain": "critic.model_name_or_path",
    "critic_num_nodes": "critic.num_nodes",
    "critic_num_gpus_per_node": "critic.num_gpus_per_node",
    "value_clip": "critic.value_clip",
    "freezing_actor_steps": "critic.freezing_steps",
    "save_value_network": "critic.save_value_network",
    "ref_num_nodes": "ref.num_nodes",
    "ref_num_gpus_per_node": "ref.num_gpus_per_node",
    "ref_reward_offload": "ref.offload",
    "reward_num_nodes": "reward.num_nodes",
    "reward_num_gpus_per_node": "reward.num_gpus_per_node",
    "reward_pretrain": "reward.model_name_or_path",
    "remote_rm_url": "reward.remote_url",
    "normalize_reward": "reward.normalize_enable",
    "reward_clip_range": "reward.clip_range",
    "overlong_buffer_len": "reward.overlong_buffer_len",
    "overlong_penalty_factor": "reward.overlong_penalty_factor",
    "stop_properly_penalty_coef": "reward.stop_properly_penalty_coef",
    "rollout_batch_size": "rollout.batch_size",
    "micro_rollout_batch_size": "rollout.micro_batch_size",
    "n_samples_per_prompt": "rollout.n_samples_per_prompt",
    "generate_max_len": "rollout.max_new_tokens",
    "max_new_tokens": "rollout.max_new_tokens",
    "temperature": "rollout.temperature",
    "top_p": "rollout.top_p",
    "rollout_max_tokens_per_gpu": "rollout.max_tokens_per_gpu",
    "vllm_generate_batch_size": "rollout.vllm_generate_batch_size",
    "train_batch_size": "train.batch_size",
    "micro_train_batch_size": "train.micro_batch_size",
    "train_max_tokens_per_gpu": "train.max_tokens_per_gpu",
    "use_dynamic_batch": "train.dynamic_batch_enable",
    "max_epochs": "train.max_epochs",
    "num_episodes": "train.num_episodes",
    "seed": "train.seed",
    "colocate_all_models": "train.colocate_all",
    "colocate_actor_ref": "train.colocate_actor_ref",
    "colocate_critic_reward": "train.colocate_critic_reward",
    "async_train": "train.async_enable",
    "async_queue_size": "train.async_queue_size",
    "partial_rollout": "train.partial_rollout_enable",
    "agent_func_path": "train.agent_func_path",
    "prompt_data": "data.prompt_dataset",
    "prompt_data_probs": "data.prompt_probs",
    "prompt_split": "data.prompt_split",
    "input_key": "data.input_key",
    "label_key": "data.label_key",
    "input_template": "data.input_template",
    "apply_chat_template": "data.apply_chat_template",
    "max_samples": "data.max_samples",
    "max_len": "data.max_len",
    "prompt_max_len": "data.max_prompt_len",
    "image_key": "data.image_key",
    "max_images_per_prompt": "data.max_images_per_prompt",
    "eval_dataset": "eval.dataset",
    "eval_split": "eval.split",
    "eval_steps": "eval.steps",
    "eval_temperature": "eval.temperature",
    "eval_n_samples_per_prompt": "eval.n_samples_per_prompt",
    "save_path": "ckpt.output_dir",
    "ckpt_path": "ckpt.path",
    "save_steps": "ckpt.save_steps",
    "save_hf_ckpt": "ckpt.save_hf",
    "disable_ds_ckpt": "ckpt.disable_ds",
    "max_ckpt_num": "ckpt.max_num",
    "max_ckpt_mem": "ckpt.max_mem",
    "load_checkpoint": "ckpt.load_enable",
    "logging_steps": "logger.logging_steps",
    "use_wandb": "logger.wandb.key",
    "wandb_project": "logger.wandb.project",
    "wandb_run_name": "logger.wandb.run_name",
    "use_tensorboard": "logger.tensorboard_dir",
    "vllm_num_engines": "vllm.num_engines",
    "vllm_tensor_parallel_size": "vllm.tensor_parallel_size",
    "vllm_gpu_memory_utilization": "vllm.gpu_memory_utilization",
    "vllm_sync_backend": "vllm.sync_backend",
    "vllm_enable_sleep": "vllm.enable_sleep",
    "enforce_eager": "vllm.enforce_eager",
    "enable_prefix_caching": "vllm.enable_prefix_caching",
    "zero_stage": "ds.zero_stage",
    "ds_tensor_parallel_size": "ds.tensor_parallel_size",
    "bf16": "ds.param_dtype",
    "param_dtype": "ds.param_dtype",
    "adam_offload": "ds.adam_offload",
    "deepspeed_enable_sleep": "ds.enable_sleep",
    "packing_samples": "ds.packing_samples",
    "flash_attn": "ds.attn_implementation",
    "attn_implementation": "ds.attn_implementation",
    "ring_attn_size": "ds.ring_attn_size",
    "ring_head_stride": "ds.ring_attn_head_stride",
    "lora_rank": "ds.lora.rank",
    "lora_alpha": "ds.lora.alpha",
    "target_modules": "ds.lora.target_modules",
    "lora_dropout": "ds.lora.dropout",
    "load_in_4bit": "ds.load_in_4bit",
}


def answer_algorithm(options: Options) -> Iterator[Outcome]:
    """The algorithm, by its estimator, with ratio, gate and aggregation."""
    name = "algo.advantage.estimator"
    estimator = options.text(name)
    if estimator not in ESTIMATORS:
        raise ConfigError(f"--{name} {estimator} has no equivalent here: known are {', '.join(ESTIMATORS)}")
    yield Line("algorithm.name", ESTIMATORS[estimator], (name,))
    yield from _answer_advantage(options, estimator)
    loss = "actor.policy_loss_type"
    is_sequence = options.text(loss) == "gspo"
    yield Line("algorithm.ratio", "Sequence" if is_sequence else "Token", (loss,))
    yield Line("algorithm.aggregation", "SequenceMean" if is_sequence else "TokenMean", (loss,))
    yield Line("algorithm.gate", "Clip", (loss,))
    both = "actor.eps_clip_low_high"
    if options.get(both) is not None:
        low, high = options.pair(both)
        yield Line("algorithm.gate.low", low, (both,))
        yield Line("algorithm.gate.high", high, (both,))
    else:
        yield options.number_line("algorithm.gate.low", "actor.eps_clip")
        yield options.number_line("algorithm.gate.high", "actor.eps_clip")
    if options.get("actor.dual_clip") is not None:
        yield options.number_line("algorithm.gate.c", "actor.dual_clip")


def _answer_advantage(options: Options, estimator: str) -> Iterator[Outcome]:
    source, plain = ("algo.advantage.estimator",), "algo.advantage.no_std_norm"
    if estimator == "gae":
        for key, name in (("gamma", "gamma"), ("lam", "lambd")):
            value = float(options.number(f"algo.advantage.{name}"))
            yield Line(f"algorithm.advantage.GAE.{key}", value, (f"algo.advantage.{name}",))
            yield Line(f"algorithm.critic.{key}", value, (f"algo.advantage.{name}",))
    elif "algo.advantage.gamma" in options:
        why = "rewards are not discounted here without a critic"
        yield Left("algo.advantage.gamma", why if options.number("algo.advantage.gamma") != 1 else "1, as here")
    if estimator == "reinforce_baseline":
        yield Line("algorithm.advantage.GroupMean", None, source)
    if estimator in WHITENED and options.flag(plain):
        if estimator == "reinforce":
            yield Line("algorithm.advantage", [], (plain,), "OpenRLHF still subtracts the mean over all tokens")
    elif estimator in WHITENED:
        yield Line("algorithm.advantage.Whiten", None, source)
    elif plain in options:
        yield Left(plain, f"{estimator} is not whitened")


_GROUPED = ("rloo", "reinforce_baseline", "group_norm", "dr_grpo")
"""Estimators whose baseline comes before the bounds of rewards and the KL."""


def answer_kl(options: Options) -> Iterator[Outcome]:
    """The KL, in the loss or in the reward, and the entropy."""
    use, coefficient, kind = "algo.kl.use_loss", "algo.kl.init_coef", "algo.kl.estimator"
    beta, in_loss = float(options.number(coefficient)), options.flag(use)
    terms, shaping = False, False
    if beta > 0 and in_loss and options.text(kind) == "k1":
        yield Left(
            kind,
            "k1 in the loss has an expected gradient of 0, and is refused here: the loss has no KL; k2 has its gradient",
        )
    elif beta > 0 and in_loss:
        terms = True
        yield Line("algorithm.terms.KLToReference", None, (use,))
        yield Line("algorithm.terms.KLToReference.beta", beta, (coefficient,))
        yield Line("algorithm.terms.KLToReference.form", options.text(kind), (kind,))
    elif beta > 0:
        shaping = True
        grouped = options.text("algo.advantage.estimator") in _GROUPED
        note = "OpenRLHF subtracts it after the groups' baseline" if grouped else ""
        yield Line("algorithm.shaping.KLInReward", None, (coefficient,), note)
        yield Line("algorithm.shaping.KLInReward.beta", beta, (coefficient,))
        if options.get("algo.kl.target") is not None:
            note = "changes by at most 2 % per rollout, as with a horizon of ten rollouts' samples"
            yield Line(
                "algorithm.shaping.KLInReward.target",
                float(options.number("algo.kl.target")),
                ("algo.kl.target",),
                note,
            )
        if options.text(kind) != "k1":
            yield Left(kind, "k1 in the reward: other forms are not the KL's gradient")
    entropy = "actor.entropy_coef"
    if options.get(entropy) and options.number(entropy) > 0:
        terms = True
        yield Line("algorithm.terms.ExactEntropy", None, (entropy,))
        yield options.number_line("algorithm.terms.ExactEntropy.eta", entropy)
    elif entropy in options:
        yield Left(entropy, "no entropy bonus, as here")
    if not terms:
        yield Line("algorithm.terms", [], (coefficient,) if beta == 0 else (use,))
    buffer = "reward.overlong_buffer_len"
    if options.get(buffer):
        shaping = True
        name, length = _find_length(options)
        yield Line("algorithm.shaping.SoftOverlong", None, (buffer,))
        cache = float(f"{min(1.0, options.number(buffer) / length):.6g}")
        yield Line("algorithm.shaping.SoftOverlong.cache", cache, (buffer, name), f"a fraction of {length} tokens")
        factor = "reward.overlong_penalty_factor"
        yield options.number_line("algorithm.shaping.SoftOverlong.scale", factor)
    if (bounds := "reward.clip_range") in options:
        low, high = options.pair(bounds)
        if options.text("algo.advantage.estimator") in _GROUPED:
            yield Left(
                bounds,
                f"bounds what the group's baseline leaves, there: add ClipAdvantage(low={low:g}, high={high:g}) after it",
            )
        else:
            shaping = True
            yield Line("algorithm.shaping.ClipReward", None, (bounds,))
            yield Line("algorithm.shaping.ClipReward.low", low, (bounds,))
            yield Line("algorithm.shaping.ClipReward.high", high, (bounds,))
    if not shaping:
        yield Line("algorithm.shaping", [], (use,) if in_loss else (coefficient,))


def answer_filters(options: Options) -> Iterator[Outcome]:
    """Dynamic sampling, and weights for the difference between engine and learner."""
    filters, own = "algo.dynamic_filtering", "algo.advantage.is_correction"
    if options.flag(f"{filters}_enable"):
        low, high = options.pair(f"{filters}_range")
        yield Line("algorithm.filters.RewardRange", None, (f"{filters}_enable",))
        yield Line("algorithm.filters.RewardRange.low", low, (f"{filters}_range",))
        yield Line("algorithm.filters.RewardRange.high", high, (f"{filters}_range",))
    else:
        yield Line("algorithm.filters", [], ())
    yield from _answer_corrections(options, own)


def _answer_corrections(options: Options, own: str) -> Iterator[Outcome]:
    kind, source = options.text(f"{own}_type"), (f"{own}_threshold",)
    if not options.flag(f"{own}_enable"):
        yield Line("algorithm.corrections", [], ())
        return
    low, high = options.pair(f"{own}_threshold")
    part = {"tis": "TruncatedIS", "icepop": "MaskedIS"}.get(kind, "MismatchMask")
    key = f"algorithm.corrections.{part}"
    yield Line(key, None, (f"{own}_enable", f"{own}_type"))
    yield Line(f"{key}.{'cap' if kind == 'tis' else 'high'}", high, source)
    yield Line(f"{key}.low", low, source)
    if part == "MismatchMask":  # seq-mask-tis weighs the tokens of the completions that it keeps, without a bound
        yield Line("algorithm.corrections.TruncatedIS", None, (f"{own}_type",))
        yield Line("algorithm.corrections.TruncatedIS.cap", float("inf"), (f"{own}_type",))


def answer_batches(options: Options) -> Iterator[Outcome]:
    """Prompts, completions, minibatches, steps and the schedule."""
    prompts, samples = options.positive("rollout.batch_size"), options.positive("rollout.n_samples_per_prompt")
    minibatches, rounded = ratio_up(prompts * samples, options.positive("train.batch_size"))
    epochs = options.count("train.max_epochs")
    yield Line("prompts_per_step", prompts, ("rollout.batch_size",))
    yield Line("samples_per_prompt", samples, ("rollout.n_samples_per_prompt",))
    yield Line("algorithm.update_rule", "GradientSteps", ())
    note = rounded or f"{prompts} × {samples} completions / {options.count('train.batch_size')}"
    yield Line("algorithm.update_rule.minibatches", min(minibatches, prompts), ("train.batch_size",), note)
    yield Line("algorithm.update_rule.epochs", epochs, ("train.max_epochs",))
    passes, limit = "train.num_episodes", "data.max_samples"
    rows = min(filter(None, (options.rows, options.count(limit) if limit in options else None)), default=None)
    steps = None if rows is None else max(1, rows // prompts) * options.count(passes)
    if steps is not None:
        note = f"of {rows} rows" if options.rows else f"if the data has {rows} rows; --rows N tells how many"
        yield Line("steps", steps, (passes, limit) if limit in options else (passes,), note)
    else:
        text = f"steps = {options.count(passes)} × rows of the training data / {prompts}; --rows N tells the rows"
        yield Need(text, (passes,) if passes in options else ())
    ratio, schedule = "actor.lr_warmup_ratio", options.text("actor.lr_scheduler")
    if (share := options.number(ratio)) > 0:
        updates = minibatches * epochs
        if steps is None:
            yield Need(
                f"optimizer.warmup = {share:g} × steps × {updates}, once you know the steps",
                (ratio,) if ratio in options else (),
            )
        else:
            yield Line(
                "optimizer.warmup", round(share * steps * updates), (ratio,), f"of {steps * updates} optimizer steps"
            )
    kind = schedule.split("_")[0]
    if kind in ("constant", "cosine", "linear"):
        note = "down to 0, there to a tenth" if "min_lr" in schedule else ""
        yield Line("optimizer.schedule", kind, ("actor.lr_scheduler",), note)
    else:
        yield Left("actor.lr_scheduler", "constant, linear or cosine")


def answer_optimizer(options: Options) -> Iterator[Outcome]:
    """Learning rates and the optimizer's settings."""
    if options.text("actor.optim") == "muon":
        yield Line("optimizer.name", "muon", ("actor.optim",))
        if "actor.muon.lr" in options:
            yield options.number_line("lr", "actor.muon.lr")
    yield options.number_line("lr", "actor.adam.lr")
    yield Line("optimizer.betas", [*options.pair("actor.adam.betas")], ("actor.adam.betas",))
    yield options.number_line("optimizer.weight_decay", "actor.adam.weight_decay")
    yield options.number_line("optimizer.clip", "actor.max_norm")


def answer_critic(options: Options) -> Iterator[Outcome]:
    """The critic of gae; other estimators have none."""
    critic = [name for name in options.given if name.startswith("critic.")]
    if options.text("algo.advantage.estimator") != "gae":
        for name in critic:
            yield Left(name, f"{options.text('algo.advantage.estimator')} has no critic")
        return
    yield options.number_line("algorithm.critic.lr", "critic.adam.lr")
    yield options.number_line("algorithm.critic.clip", "critic.value_clip")
    if "critic.freezing_steps" in options and options.count("critic.freezing_steps") > 0:
        note = "rollouts, at most; ends once the critic explains enough variance"
        yield options.count_line("algorithm.critic.pretrain", "critic.freezing_steps", note)
    for name in critic:
        if name not in ("critic.adam.lr", "critic.value_clip", "critic.freezing_steps"):
            yield Left(name, "the critic starts as a copy of the policy, in the same processes")


def answer_data(options: Options) -> Iterator[Outcome]:
    """Data and rewards."""
    name = "data.prompt_dataset"
    if options.text(name):
        sets, shares = options.text(name).split(","), options.text("data.prompt_probs")
        weights = shares.split(",") if shares else []
        split = options.text("data.prompt_split")
        parts = [name_data(part) for part in sets]
        parts = [
            f"{part}::{split}" if split and split != "train" and part.startswith("hf:") else part for part in parts
        ]
        joined = (
            [f"{weight}*{part}" for weight, part in zip(weights, parts, strict=True)]
            if len(weights) == len(parts)
            else parts
        )
        yield Line(
            "task", "+".join(joined), (name, *(x for x in ("data.prompt_probs", "data.prompt_split") if x in options))
        )
    if options.text("eval.dataset"):
        yield Line("eval_data", name_data(options.text("eval.dataset")), ("eval.dataset",))
    columns = {key: options.text(f"data.{key}_key") for key in ("input", "label")}
    if columns["input"] not in ("prompt", "") or columns["label"] not in ("answer", "label", ""):
        text = f"row_map: the prompt is in the column {columns['input']!r}" + (
            f", the label in {columns['label']!r}" if columns["label"] else ""
        )
        given = tuple(f"data.{key}_key" for key in columns if f"data.{key}_key" in options)
        yield Need(f"{text}; a function FILE:NAME makes rows with `prompt` (and `answer`) of them", given)
    else:
        for key in ("data.input_key", "data.label_key"):
            if key in options:
                yield Left(key, "the column's name here too")
    yield from _answer_reward(options)


def _answer_reward(options: Options) -> Iterator[Outcome]:
    url, model, agent = "reward.remote_url", "reward.model_name_or_path", "train.agent_func_path"
    if agent in options:
        text = (
            f"environment: {options.text(agent)} plays the episodes there; here it is a class, --environment mine.py:NAME, or "
            "agent:FILE.py:FUNCTION"
        )
        yield Need(text, (agent,))
    if options.text(url).endswith(".py"):
        yield Line("reward", [f"openrlhf:{options.text(url)}"], (url,))
    elif url in options:
        yield Need(f"reward: {options.text(url)} is a server; reward servers are not called: name a function", (url,))
    elif options.text(model):
        yield Line(
            "reward",
            [f"model:{path}" for path in options.text(model).split(",")],
            (model,),
            "trained by policygrad reward-model",
        )
    elif agent not in options:
        yield Need("reward: none is named; --reward FILE:NAME, openrlhf:FILE.py or a built-in")


def _find_length(options: Options) -> tuple[str, int]:
    """Return the option that bounds a completion, and its tokens."""
    name = "rollout.max_new_tokens" if options.get("rollout.max_new_tokens") is not None else "data.max_len"
    return name, options.positive(name)


def answer_machines(options: Options) -> Iterator[Outcome]:
    """Lengths, engines and machines."""
    if "actor.model_name_or_path" not in options:
        yield Need("model: none is named")
    name, length = _find_length(options)
    yield Line(
        "sampling.max_tokens", length, (name,), "there with the prompt's tokens" if name == "data.max_len" else ""
    )
    if name != "data.max_len" and "data.max_len" in options:
        yield Left("data.max_len", "prompts are never truncated; --max-tokens bounds the completion")
    engines, memory = "vllm.num_engines", "vllm.gpu_memory_utilization"
    colocated = [x for x in ("train.colocate_all", "vllm.enable_sleep") if options.flag(x)]
    is_async = options.flag("train.async_enable")
    if options.get(engines) and options.count(engines) > 0:
        yield Line("sampler.engine", "vllm", (engines,))
        yield options.count_line("sampler.servers", engines)
        if memory in options:
            yield options.number_line("sampler.gpu_memory", memory)
        if colocated and not is_async:
            yield Line("sampler.colocate", True, tuple(colocated))
    rows = "rollout.micro_batch_size"
    if options.get(engines) and rows in options:
        yield Left(rows, "the engine batches its requests: sampler.max_concurrency")
    elif rows in options:
        yield options.count_line("sampling.decode_rows", rows)
    if is_async:
        queue = "train.async_queue_size"
        ahead = options.count(queue) if queue in options else 1
        yield Line(
            "max_staleness", ahead, ("train.async_enable", queue) if queue in options else ("train.async_enable",)
        )
        for other in colocated:
            yield Left(other, "servers sample while the learner learns: each has GPUs of its own")
    nodes, gpus = "actor.num_nodes", "actor.num_gpus_per_node"
    yield Line("learner.world_size", options.count(gpus), (gpus, nodes) if nodes in options else (gpus,))
    if options.count(nodes) > 1:
        yield Need(f"{options.count(nodes)} machines: start the run with torchrun on each (docs/scaling.md)", (nodes,))
    dtype = options.text("ds.param_dtype")
    yield Line(
        "learner.dtype",
        "bf16" if dtype in ("bf16", "True") else "fp32",
        ("ds.param_dtype",),
        "" if dtype != "fp16" else "there is no fp16",
    )
    if options.count("ds.lora.rank") > 0:
        given = [x for x in ("ds.lora.alpha", "ds.lora.target_modules", "ds.load_in_4bit") if x in options]
        targets = options.get("ds.lora.target_modules")
        text = list_lora(
            options.count("ds.lora.rank"),
            options.count("ds.lora.alpha") if "ds.lora.alpha" in options else None,
            targets,
            4 if options.flag("ds.load_in_4bit") else None,
        )
        yield Line("learner.lora", text, ("ds.lora.rank", *given))
    if options.flag("ds.adam_offload"):
        yield Line("optimizer.offload", True, ("ds.adam_offload",))
    if options.flag("actor.gradient_checkpointing_enable"):
        yield Line("learner.gradient_checkpointing", True, ("actor.gradient_checkpointing_enable",))
    if options.flag("actor.freeze_visual_encoder"):
        yield Line("learner.vision", "frozen", ("actor.freeze_visual_encoder",))


def answer_reports(options: Options) -> Iterator[Outcome]:
    """Evaluations, checkpoints, trackers, the seed."""
    yield options.number_line("evaluation.temperature", "eval.temperature")
    yield options.count_line("evaluation.samples_per_prompt", "eval.n_samples_per_prompt")
    yield options.count_line("seed", "train.seed")
    for name, key in (("eval.steps", "evaluation.every"), ("ckpt.save_steps", "checkpoint.every")):
        if name in options and options.count(name) > 0:
            yield Line(key, options.count(name), (name,))
        elif name in options:
            yield Left(name, "before and after training, or at the end, only")
    if "ckpt.max_num" in options:
        yield options.count_line("checkpoint.keep", "ckpt.max_num")
    services = {"logger.wandb.key": "wandb", "logger.tensorboard_dir": "tensorboard"}
    given = [name for name in services if name in options]
    if given:
        yield Line("track", [services[name] for name in given], tuple(given))


RULES = (
    Rule(
        "algo.advantage.estimator algo.advantage.no_std_norm algo.advantage.gamma algo.advantage.lambd "
        "actor.policy_loss_type actor.eps_clip* actor.dual_clip",
        answer_algorithm,
    ),
    Rule(
        "algo.kl.* actor.entropy_coef reward.overlong_* reward.clip_range",
        answer_kl,
    ),
    Rule(
        "algo.dynamic_filtering* algo.advantage.is_correction*",
        answer_filters,
    ),
    Rule(
        "rollout.batch_size rollout.n_samples_per_prompt train.batch_size train.max_epochs train.num_episodes "
        "data.max_samples actor.lr_* actor.min_lr_ratio",
        answer_batches,
    ),
    Rule(
        "actor.optim actor.muon.* actor.adam.* actor.max_norm",
        answer_optimizer,
    ),
    Rule(
        "critic.*",
        answer_critic,
    ),
    Rule(
        "data.prompt_dataset data.prompt_probs data.prompt_split data.input_key data.label_key eval.dataset "
        "reward.remote_url reward.model_name_or_path train.agent_func_path",
        answer_data,
    ),
    Rule(
        "rollout.max_new_tokens rollout.micro_batch_size data.max_len vllm.num_engines vllm.gpu_memory_utilization "
        "vllm.enable_sleep train.colocate_all train.async_* actor.num_* ds.param_dtype ds.lora.* ds.load_in_4bit ds.adam_offload "
        "actor.gradient_checkpointing_enable actor.freeze_visual_encoder",
        answer_machines,
    ),
    Rule(
        "train.seed eval.steps eval.temperature eval.n_samples_per_prompt ckpt.save_steps ckpt.max_num "
        "logger.wandb.key logger.tensorboard_dir",
        answer_reports,
    ),
)
OPENRLHF = Library("OpenRLHF", DEFAULTS, RULES, RENAMED)
