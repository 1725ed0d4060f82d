"""The configurations of TRL's online trainers: their fields, with TRL's defaults and checks.

They extend transformers' `TrainingArguments`, as TRL's do, so that scripts, command lines and YAML files are accepted as they are.
What each field does here is in `fields.toml`.
"""

# No `from __future__ import annotations`: transformers' argument parser reads the types themselves.
from dataclasses import dataclass, field
from typing import Any

from transformers import TrainingArguments

from policygrad.errors import import_optional
from policygrad.utils.devices import pick_device


def _option(default: Any, text: str) -> Any:
    """Return a field with its help. `%` has a meaning in the help of argparse."""
    return field(default=default, metadata={"help": text})


@dataclass
class _BaseConfig(TrainingArguments):
    """What TRL changes in transformers' defaults."""

    logging_steps: float = _option(10, "Log every this many optimizer steps; below 1, a fraction of all.")
    gradient_checkpointing: bool = _option(True, "Recompute activations in the backward pass.")
    bf16: bool | None = _option(  # type: ignore[assignment]
        None, "Compute in bfloat16. None: on a GPU, unless fp16 is set."
    )
    lr_scheduler_kwargs: dict[str, Any] | str | None = _option(None, "Further arguments of the schedule.")
    use_liger_kernel: bool = _option(False, "Without effect: the passes here have kernels of their own.")
    torch_empty_cache_steps: int | None = _option(None, "Without effect.")

    def __post_init__(self) -> None:
        what = f"{type(self).__name__}, which extends transformers' TrainingArguments,"
        import_optional("accelerate", what, "trl")
        if self.bf16 is None:  # without a GPU transformers would refuse it
            self.bf16 = not self.fp16 and not self.use_cpu and pick_device("auto") != "cpu"
        super().__post_init__()  # type: ignore[no-untyped-call]


@dataclass
class OnlineConfig(_BaseConfig):
    """The fields that both trainers have."""

    _VALID_DICT_FIELDS = [  # noqa: RUF012  transformers parses these from text
        *TrainingArguments._VALID_DICT_FIELDS,
        *("model_init_kwargs", "generation_kwargs", "chat_template_kwargs", "transformers_continuous_batching_config"),
    ]

    learning_rate: float = _option(1e-6, "Initial learning rate of AdamW.")
    remove_unused_columns: bool | None = _option(  # type: ignore[assignment]
        False, "Keep the column `prompt` alone (and images)."
    )
    model_init_kwargs: dict[str, Any] | str | None = _option(None, "Arguments of from_pretrained, for a model by name.")
    trust_remote_code: bool = _option(False, "Run Python code from the folder or repository of the model.")
    router_aux_loss_coef: float | None = _option(None, "Coefficient of the load-balancing loss of experts.")
    disable_dropout: bool = _option(False, "Without effect: there is no dropout here.")
    num_generations: int | None = _option(8, "Completions per prompt, G.")
    num_generations_eval: int | None = _option(None, "Completions per prompt in evaluations; None: num_generations.")
    max_completion_length: int | None = _option(512, "Tokens sampled per completion at most.")
    ds3_gather_for_generation: bool = _option(True, "Without effect: DeepSpeed is not used.")
    shuffle_dataset: bool | None = _option(True, "Shuffle the training prompts in every epoch.")
    pad_to_multiple_of: int | str | None = _option("auto", "Without effect: texts are packed, not padded.")
    generation_batch_size: int | None = _option(None, "Completions per generation; or give steps_per_generation.")
    steps_per_generation: int | None = _option(None, "Micro-batches per generation; None: gradient_accumulation_steps.")
    temperature: float = _option(1.0, "Temperature of sampling.")
    top_p: float = _option(1.0, "Sample from the smallest set of tokens with at least this probability.")
    top_k: int = _option(0, "Sample from the most probable tokens; 0 = all.")
    min_p: float | None = _option(None, "Sample from tokens with at least this fraction of the largest probability.")
    generation_kwargs: dict[str, Any] | str | None = _option(None, "Further arguments of transformers' generate.")
    chat_template_kwargs: dict[str, Any] | str | None = _option(None, "Variables of the chat template.")
    repetition_penalty: float = _option(1.0, "Penalty on tokens that the text has already.")
    cache_implementation: str | None = _option(None, "Without effect, unless generate is called.")
    use_vllm: bool = _option(False, "Sample with vLLM.")
    vllm_mode: str = _option("colocate", "colocate: a server on the learner's GPU; server: yours.")
    vllm_model_impl: str = _option("vllm", "Without effect.")
    vllm_enable_sleep_mode: bool = _option(False, "Without effect: a colocated server always sleeps during updates.")
    vllm_structured_outputs_regex: str | None = _option(None, "Refused.")
    vllm_server_base_url: str | None = _option(None, "Address of your vLLM server.")
    vllm_server_host: str = _option("0.0.0.0", "Its host, without an address.")
    vllm_server_port: int = _option(8000, "Its port, without an address.")
    vllm_server_timeout: float = _option(240.0, "Seconds that a server may take to answer.")
    vllm_group_port: int = _option(51216, "Without effect: weights go another way.")
    vllm_gpu_memory_utilization: float = _option(0.3, "Share of the GPU's memory for a colocated server.")
    vllm_max_model_length: int | None = _option(None, "Context of a colocated server.")
    vllm_tensor_parallel_size: int = _option(1, "GPUs of a colocated server.")
    beta: float = _option(0.0, "Coefficient of the KL to the reference.")
    num_iterations: int = _option(1, "Passes over each generation's completions.")
    epsilon: float = _option(0.2, "The ratio is clipped below 1 - epsilon.")
    epsilon_high: float | None = _option(None, "The ratio is clipped above 1 + epsilon_high; None: epsilon.")
    reward_weights: list[float] | None = _option(None, "Weight of each reward function; None: 1.")
    mask_truncated_completions: bool = _option(False, "Leave truncated completions out of the loss.")
    sync_ref_model: bool = _option(False, "Move the reference towards the policy.")
    ref_model_mixup_alpha: float = _option(0.6, "Share of the policy in the reference after a move.")
    ref_model_sync_steps: int = _option(512, "Optimizer steps between two moves.")
    log_completions: bool = _option(False, "Write each generation's completions to a parquet file, and show some.")
    log_multimodal: bool = _option(True, "Without effect: pictures are in the run's folder.")
    num_completions_to_print: int | None = _option(None, "Completions shown; None: all.")
    log_unique_prompts: bool = _option(False, "Show one completion of each prompt.")
    use_transformers_continuous_batching: bool = _option(False, "Without effect: sampling refills its batch already.")
    transformers_continuous_batching_config: dict[str, Any] | str | None = _option(None, "Without effect.")
    use_transformers_paged: bool = _option(False, "Without effect.")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.auto_find_batch_size:
            raise ValueError(
                "auto_find_batch_size=True is not supported, because a smaller batch would split groups of completions: leave it "
                "out. A pass that runs out of memory is repeated in smaller ones anyway"
            )
        per_step = self.per_device_train_batch_size * self.world_size
        if self.generation_batch_size is not None and self.steps_per_generation is not None:
            raise ValueError(
                "'generation_batch_size' and 'steps_per_generation' can not be both configured at the same time"
            )
        if self.generation_batch_size is not None:
            if self.generation_batch_size % per_step:
                raise ValueError(
                    f"generation_batch_size ({self.generation_batch_size}) must be divisible by the global batch size ({per_step})"
                )
            self.steps_per_generation = self.generation_batch_size // per_step
        else:
            self.steps_per_generation = self.steps_per_generation or self.gradient_accumulation_steps
            self.generation_batch_size = per_step * self.steps_per_generation
        self._check_groups()

    def _check_groups(self) -> None:
        """Refuse batches that split groups."""
        assert self.num_generations is not None
        assert self.generation_batch_size is not None
        if self.do_eval and self.eval_strategy != "no":
            num_samples = self.num_generations_eval or self.num_generations
            batch = self.per_device_eval_batch_size * self.world_size
            if batch % num_samples:
                raise ValueError(
                    f"The global eval batch size ({self.per_device_eval_batch_size} * {self.world_size}) must be divisible by the "
                    f"number of generations used for evaluation ({num_samples})."
                )
        if self.generation_batch_size % self.num_generations:
            raise ValueError(
                f"generation_batch_size ({self.generation_batch_size}) must be divisible by num_generations "
                f"({self.num_generations})."
            )
        if self.num_generations < 2:
            raise ValueError(
                f"num_generations={self.num_generations} leaves nothing to compare a completion with: at least 2 generations per "
                "prompt are required"
            )


LOSS_TYPES = ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo")
IMPORTANCE_MODES = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")


@dataclass
class GRPOConfig(OnlineConfig):
    """The configuration of `GRPOTrainer`: TRL's fields and defaults, as of TRL 1.16."""

    cast_lm_head_to_fp32: bool = _option(False, "Compute the output head in float32.")
    delta: float | None = _option(None, "Upper bound of the ratio in both directions.")
    sapo_temperature_neg: float = _option(1.05, "Temperature of loss_type='sapo' where the advantage is not positive.")
    sapo_temperature_pos: float = _option(1.0, "Temperature of loss_type='sapo' where the advantage is positive.")
    vespo_k_pos: float = _option(2.0, "Exponent of loss_type='vespo', positive advantages.")
    vespo_lambda_pos: float = _option(3.0, "Decay of loss_type='vespo', positive advantages.")
    vespo_k_neg: float = _option(3.0, "Exponent of loss_type='vespo', negative advantages.")
    vespo_lambda_neg: float = _option(2.0, "Decay of loss_type='vespo', negative advantages.")
    importance_sampling_level: str = _option("token", "token or sequence: what the ratio is of.")
    multi_objective_aggregation: str = _option("sum_then_normalize", "Or normalize_then_sum (GDPO).")
    scale_rewards: str = _option("group", "Divide advantages by the std of the group, the batch, or none.")
    loss_type: str = _option("dapo", f"One of {', '.join(LOSS_TYPES)}.")
    top_entropy_quantile: float = _option(1.0, "Share of the tokens, those of highest entropy, that learn.")
    entropy_coef: float = _option(0.0, "Coefficient of the entropy bonus.")
    use_adaptive_entropy: bool = _option(False, "Adapt the coefficient to a target.")
    entropy_coef_min: float = _option(0.0, "Its lower bound.")
    entropy_coef_max: float = _option(1.0, "Its upper bound.")
    entropy_coef_delta: float = _option(0.005, "Its change per optimizer step.")
    entropy_target: float = _option(0.2, "Entropy below which the bonus acts, in nats per token.")
    max_tool_calling_iterations: int | None = _option(None, "Turns that may call tools; None: no limit.")
    vllm_importance_sampling_correction: bool = _option(True, "Correct for the difference between vLLM and learner.")
    vllm_importance_sampling_mode: str = _option("sequence_mask", f"One of {', '.join(IMPORTANCE_MODES)}.")
    vllm_importance_sampling_clip_max: float | None = _option(3.0, "Upper bound of the correction.")
    vllm_importance_sampling_clip_min: float | None = _option(None, "Lower bound of the correction.")
    off_policy_mask_threshold: float | None = _option(None, "Mask failures farther from the policy than this, in nats.")
    use_bias_correction_kl: bool = _option(True, "Multiply the KL by the importance ratio.")
    log_completions_hub_repo: str | None = _option(None, "Refused.")
    vllm_importance_sampling_cap: float | None = _option(None, "Older name of vllm_importance_sampling_clip_max.")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.scale_rewards = {True: "group", False: "none"}.get(self.scale_rewards, self.scale_rewards)  # type: ignore[call-overload]
        if self.vllm_importance_sampling_cap is not None:
            self.vllm_importance_sampling_clip_max = self.vllm_importance_sampling_cap
        low, high = self.vllm_importance_sampling_clip_min, self.vllm_importance_sampling_clip_max
        if low is not None and high is not None and low >= high:
            raise ValueError(
                f"vllm_importance_sampling_clip_min ({low}) must be less than vllm_importance_sampling_clip_max ({high})."
            )
        choices: dict[str, tuple[str, ...]] = {
            "loss_type": LOSS_TYPES,
            "importance_sampling_level": ("token", "sequence"),
            "scale_rewards": ("group", "batch", "none"),
            "multi_objective_aggregation": ("sum_then_normalize", "normalize_then_sum"),
            "vllm_importance_sampling_mode": IMPORTANCE_MODES,
            "vllm_mode": ("colocate", "server"),
        }
        check_choices(self, choices)


@dataclass
class RLOOConfig(OnlineConfig):
    """The configuration of `RLOOTrainer`: TRL's fields and defaults, as of TRL 1.16."""

    num_generations: int | None = _option(2, "Completions per prompt.")
    beta: float = _option(0.05, "Coefficient of the KL to the reference in the reward.")
    normalize_advantages: bool = _option(False, "Make the advantages of a generation have mean 0 and std 1.")
    reward_clip_range: tuple[float, float] | None = _option(None, "Bounds of the summed reward.")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choices(self, {"vllm_mode": ("colocate", "server")})


def check_choices(config: object, choices: dict[str, tuple[str, ...]]) -> None:
    """Raise ValueError that names every field with a value that it cannot have."""
    wrong = [
        f"{name}={getattr(config, name)!r} must be one of {', '.join(allowed)}"
        for name, allowed in choices.items()
        if getattr(config, name) not in allowed
    ]
    if wrong:
        raise ValueError("; ".join(wrong))
