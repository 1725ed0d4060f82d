"""TRL: the command line of its scripts and of `trl grpo`, the YAML of `--config`, and a script's own `GRPOConfig(…)`.

Defaults are those of TRL at f2cd577 (trl/trainer/grpo_config.py, rloo_config.py, trl/experimental/ppo and gold), and those of
transformers' TrainingArguments.
"""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

from policygrad.commands.converters.base import (
    IMPLIED,
    Left,
    Library,
    Line,
    Need,
    Options,
    Outcome,
    Rule,
    Setting,
    as_list,
    list_lora,
    name_data,
    ratio_up,
)
from policygrad.errors import ConfigError

TRAINER = IMPLIED  # the script, or the class of the configuration
PROCESSES = "num_processes"  # of accelerate
REPLAY, REPLAY_SIZE = "replay_buffer_size", 64
GOLD = "gold"
TEACHER, TEACHER_TOKENIZER = "teacher_model_name_or_path", "teacher_tokenizer_name_or_path"
_SHARED = {
    "learning_rate": 1e-6,
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "num_iterations": 1,
    "lr_scheduler_type": "linear",
    "max_grad_norm": 1.0,
    "weight_decay": 0.0,
    "adam_beta1": 0.9,
    "adam_beta2": 0.999,
    "num_train_epochs": 3,
    "max_steps": -1,
    "seed": 42,
    "save_strategy": "steps",
    "save_steps": 500,
    "lora_r": 16,
    "lora_alpha": 32,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "use_vllm": False,
    "vllm_mode": "colocate",
    "vllm_importance_sampling_correction": True,
    "vllm_importance_sampling_mode": "sequence_mask",
    "epsilon": 0.2,
    PROCESSES: 1,
}
_GRPO = {
    **_SHARED,
    "num_generations": 8,
    "max_completion_length": 512,
    "beta": 0.0,
    "loss_type": "dapo",
    "scale_rewards": "group",
    "importance_sampling_level": "token",
    "sapo_temperature_pos": 1.0,
    "sapo_temperature_neg": 1.05,
    "top_entropy_quantile": 1.0,
    "entropy_coef": 0.0,
    "ref_model_sync_steps": 512,
}
_PPO = {
    **_SHARED,
    "learning_rate": 3e-6,
    "num_generations": 1,
    "response_length": 53,
    "temperature": 0.7,
    "num_mini_batches": 1,
    "num_ppo_epochs": 4,
    "kl_coef": 0.05,
    "cliprange": 0.2,
    "cliprange_value": 0.2,
    "vf_coef": 0.1,
    "gamma": 1.0,
    "lam": 0.95,
}
_ALONE = {**_SHARED, "num_generations": 1, "max_completion_length": 512}
DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "grpo": _GRPO,
    "rloo": {
        **_SHARED,
        "num_generations": 2,
        "max_completion_length": 512,
        "beta": 0.05,
        "vllm_importance_sampling_correction": False,
    },
    "ppo": _PPO,
    "sdpo": {**_GRPO, "temperature": 1.0},
    "sdft": {**_ALONE, "learning_rate": 2e-5},
    "distill": {**_ALONE, "teacher_model_name_or_path": None},
    GOLD: {
        **_ALONE,
        "learning_rate": 1e-7,
        "max_completion_length": 128,
        "temperature": 0.9,
        "top_p": 0.95,
        "lmbda": 0.5,
        "beta": 0.5,
        "use_uld_loss": False,
        "seq_kd": False,
        "vllm_server_port": 8001,
        TEACHER: None,
        TEACHER_TOKENIZER: None,
    },
}
SCRIPTS = {  # what a script's or a configuration's name begins with -> the trainer
    "async_grpo": "grpo",
    "gspo": "grpo",
    "grpo": "grpo",
    "rloo": "rloo",
    "ppo": "ppo",
    "sdpo": "sdpo",
    "sdft": "sdft",
    "distillation": "distill",
    "gold": GOLD,
}
ELSEWHERE = {  # … -> what does it here
    "sft": "policygrad sft --data FILE trains on demonstrations",
    "reward": "policygrad reward-model --data FILE trains a reward model",
    **dict.fromkeys(
        ("dpo", "kto", "orpo", "cpo", "bco", "tpo", "mpo", "online_dpo", "nash_md", "xpo"),
        "methods that learn from preferences are not included: use TRL, whose models policygrad reads",
    ),
    "gkd": "policygrad train distill --teacher MODEL distils on samples of the student's own",
    "prm": "process reward models are not trained here",
    "ssd": "self-distillation is policygrad train sdft or sdpo",
}


def find_trainer(name: str) -> str | None:
    """Return the trainer of a script, a subcommand or a class of configurations; None if it is none of TRL's.

    Raises:
        ConfigError: It trains without a policy gradient.
    """
    stem = re.sub(r"config$", "", name.rpartition("/")[2].removesuffix(".py").lower())
    names = {"asyncgrpo": "async_grpo", "onlinedpo": "online_dpo", "nashmd": "nash_md", "grpowithreplaybuffer": "grpo"}
    stem = names.get(stem, stem)
    for beginning, trainer in SCRIPTS.items():
        if re.match(rf"{beginning}(_|$)", stem):
            return trainer
    for beginning, answer in ELSEWHERE.items():
        if re.match(rf"{beginning}(_|$)", stem):
            raise ConfigError(f"{name} is not a policy gradient: {answer}")
    return None


def parse_script(text: str) -> ast.Module:
    """Parse a Python script. Raises ConfigError, with the line, if it is not Python."""
    try:
        with warnings.catch_warnings():  # about the script's texts
            warnings.simplefilter("ignore")
            return ast.parse(text)
    except SyntaxError as error:
        raise ConfigError(f"line {error.lineno}: not Python: {error.msg}") from error
    except (ValueError, RecursionError, MemoryError) as error:
        raise ConfigError(f"not Python: {error}") from error


def read_script(tree: ast.Module, given: list[Setting] | None = None) -> list[Setting]:
    """Return the options that a Python script gives to a configuration of TRL, such as GRPOConfig(…); empty if it has none.

    Args:
        given: Options on its command line, which fill in what is read from `args`.
    """
    defaults = {**read_own_arguments(tree), **{setting.name: setting.value for setting in given or ()}}
    calls = sorted((node for node in ast.walk(tree) if isinstance(node, ast.Call)), key=lambda node: node.lineno)
    for call in calls:
        name = ast.unparse(call.func).rpartition(".")[2]
        if not name.endswith("Config") or not re.match(r"(Async)?GRPO|RLOO|PPO|SDPO|SDFT|Distillation|GOLD", name):
            continue
        trainer = find_trainer(name)
        settings = [Setting(TRAINER, trainer, f"{name}(…)", call.lineno)]
        for word in call.keywords:
            if word.arg is not None:
                value = _read_argument(word.value, defaults, tree)
                settings.append(Setting(word.arg, value, f"{word.arg}={ast.unparse(word.value)}", word.value.lineno))
        if "ReplayBuffer" in name and REPLAY not in {setting.name for setting in settings}:
            settings.append(Setting(REPLAY, REPLAY_SIZE, f"{name}(…)", call.lineno))
        return settings
    return []


def read_own_arguments(tree: ast.Module) -> dict[str, Any]:
    """Return the options that a script adds to its command line, with their defaults."""
    arguments = {}
    for call in ast.walk(tree):
        if isinstance(call, ast.Call) and ast.unparse(call.func).endswith(".add_argument") and call.args:
            name = ast.unparse(call.args[0]).strip("'\"").lstrip("-").replace("-", "_")
            value = next((word.value for word in call.keywords if word.arg == "default"), None)
            arguments[name] = None if value is None else _read_literal(value, tree)
    return arguments


def _read_argument(node: ast.expr, defaults: Mapping[str, Any], tree: ast.Module) -> Any:
    if isinstance(node, ast.Attribute) and ast.unparse(node.value) in ("args", "cli_args", "script_args"):
        return defaults.get(node.attr, "$COMMAND")
    return _read_literal(node, tree)


def _read_literal(node: ast.expr, tree: ast.Module) -> Any:
    """Return a value that is written out, or that of a name at the script's top."""
    try:
        return ast.literal_eval(node)
    except ValueError:
        pass
    if isinstance(node, ast.Name):
        for statement in tree.body:
            if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == node.id:
                return _read_literal(statement.value, tree) if not isinstance(statement.value, ast.Name) else "$COMMAND"
    return "$COMMAND"


def answer_algorithm(options: Options) -> Iterator[Outcome]:
    """The algorithm of the trainer."""
    trainer = options.text(TRAINER)
    source = (TRAINER,)
    if trainer == GOLD:
        yield from _answer_gold(options)
        return
    yield Line("algorithm.name", trainer, source)
    if trainer in ("grpo", "sdpo"):
        if trainer == "grpo":
            yield from _answer_grpo(options)
    elif trainer == "rloo":
        yield from _answer_rloo(options)
    elif trainer == "ppo":
        yield from _answer_ppo(options)
    elif trainer == "distill":
        yield _name_teacher(options)


def _name_teacher(options: Options) -> Outcome:
    if options.text(TEACHER):
        return Line("algorithm.reference.model", options.text(TEACHER), (TEACHER,))
    return Need("the teacher: --teacher MODEL")


def _answer_gold(options: Options) -> Iterator[Outcome]:
    """GOLD: a divergence over the vocabulary from a teacher with the same tokenizer; with `use_uld_loss` one with another."""
    share, beta = options.number("lmbda"), options.number("beta")
    for name, value in (("lmbda", share), ("beta", beta)):
        if not 0 <= value <= 1:
            raise ConfigError(f"{name}={value:g} must be between 0 and 1: correct it there")
    if share == 0:
        raise ConfigError(
            "lmbda=0 learns from the data's completions alone, which is no policy gradient: policygrad sft --data FILE does that"
        )
    source = "the teacher's" if options.flag("seq_kd") else "the data's"
    note = f"as with lmbda = 1: TRL takes {1 - share:.0%} of the completions from {source}" if share < 1 else ""
    yield Line("algorithm.name", "distill", (TRAINER, "lmbda"), note)
    yield _name_teacher(options)
    if options.flag("use_uld_loss"):
        name = TEACHER_TOKENIZER if options.text(TEACHER_TOKENIZER) else TEACHER
        note = "log-ratios of spans, over all tokens (top_p = 1); TRL compares sorted probabilities, without end tokens"
        if options.text(name):
            yield Line("algorithm.reference.tokenizer", options.text(name), (name, "use_uld_loss"), note)
        else:
            yield Need("the teacher's tokenizer: --algorithm.reference.tokenizer MODEL", ("use_uld_loss",))
        if "beta" in options:
            yield Left("beta", "of the hybrid loss, or without effect: spans are compared by their log-ratio")
        return
    term = "algorithm.terms.ExactKLToReference"
    yield Line("algorithm.advantage.TeacherLogRatio", None, (TRAINER,))
    yield Line("algorithm.advantage.TeacherLogRatio.coefficient", 0.0, (TRAINER,), "the divergence is in the term")
    yield Line(term, None, ("beta",))
    yield Line(f"{term}.alpha", float(beta), ("beta",))
    if options.number("top_p") < 1 or options.number("top_k") > 0:
        yield Line(f"{term}.over", "vocabulary", ("top_p", "top_k"))
    if TEACHER_TOKENIZER in options:
        yield Left(TEACHER_TOKENIZER, "without use_uld_loss both models have the policy's tokenizer")
    if "seq_kd" in options:
        yield Left("seq_kd", "every completion is sampled by the policy")


def _answer_grpo(options: Options) -> Iterator[Outcome]:
    loss, scale = options.text("loss_type"), options.text("scale_rewards").lower()
    scale = {"true": "group", "false": "none", "": "none"}.get(scale, scale)
    if scale not in ("group", "batch", "none"):
        raise ConfigError(f"scale_rewards={scale} is none of group, batch and none: correct it there")
    source = ("scale_rewards",)
    yield Line("algorithm.advantage.GroupMean", None, source)
    if scale == "group":
        yield Line("algorithm.advantage.GroupStd", None, source)
    elif scale == "batch":
        yield Line("algorithm.advantage.BatchStd", None, source)
        yield Line("algorithm.advantage.BatchStd.of", "rewards", source, "divided before they are centred, in TRL")
    aggregations = {"grpo": "SequenceMean", "sapo": "SequenceMean", "dr_grpo": "FixedLength", "luspo": "SequenceSum"}
    if loss not in (*aggregations, "dapo", "bnpo", "cispo", "vespo"):
        raise ConfigError(
            f"loss_type={loss} has no equivalent here: known are grpo, dr_grpo, dapo, bnpo, cispo, sapo, luspo, vespo"
        )
    yield Line("algorithm.aggregation", aggregations.get(loss, "TokenMean"), ("loss_type",))
    level = options.text("importance_sampling_level")
    ratio = (
        "SequenceProduct"
        if loss == "vespo"
        else "Sequence"
        if level.startswith("sequence") or loss == "luspo"
        else "Token"
    )
    yield Line("algorithm.ratio", ratio, ("importance_sampling_level",))
    yield from _answer_gate(options, loss)
    terms = False
    if (beta := float(options.number("beta"))) > 0:
        terms = True
        yield Line("algorithm.terms.KLToReference", None, ("beta",))
        yield Line("algorithm.terms.KLToReference.beta", beta, ("beta",))
        yield Line("algorithm.terms.KLToReference.form", "k3", ("beta",))
    if (eta := float(options.number("entropy_coef"))) > 0:
        terms = True
        yield Line("algorithm.terms.ExactEntropy", None, ("entropy_coef",))
        yield Line("algorithm.terms.ExactEntropy.eta", eta, ("entropy_coef",))
    if not terms:
        yield Line("algorithm.terms", [], ("beta",))
    yield Line("algorithm.shaping", [], ())
    yield from _answer_corrections(options)


def _answer_gate(options: Options, loss: str) -> Iterator[Outcome]:
    low, high = "epsilon", options.first("epsilon_high", "epsilon")
    if loss == "sapo":
        yield Line("algorithm.gate", "SigmoidGate", ("loss_type",))
        for side in ("pos", "neg"):
            name = f"sapo_temperature_{side}"
            yield options.number_line(f"algorithm.gate.tau_{side}", name)
    elif loss == "vespo":
        yield Line("algorithm.gate", "GammaKernel", ("loss_type",))
    elif loss == "cispo":
        yield Line("algorithm.gate", "ClippedImportance", ("loss_type",))
        yield Line("algorithm.gate.low", 0.0, ("loss_type",))
        bound = float(options.number(high))
        yield Line(
            "algorithm.gate.high", max(1.0, bound), (high,), "the bound itself" if bound >= 1 else "at least 1 here"
        )
    else:
        above, delta = float(options.number(high)), options.get("delta")
        yield Line("algorithm.gate", "Clip", ("loss_type",))
        yield options.number_line("algorithm.gate.low", low)
        if (
            delta is not None and options.number("delta") < 1 + above
        ):  # the cap is nearer than the clip: they change places
            yield Line("algorithm.gate.high", float(f"{options.number('delta') - 1:.12g}"), ("delta",), "delta − 1")
            yield Line("algorithm.gate.c", 1 + above, (high,), "1 + the clip's bound")
        else:
            yield Line("algorithm.gate.high", above, (high,))
            if delta is not None:
                yield options.number_line("algorithm.gate.c", "delta")


def _answer_corrections(options: Options) -> Iterator[Outcome]:
    """Filters, and weights for the difference between engine and learner."""
    correction, mode = "vllm_importance_sampling_correction", "vllm_importance_sampling_mode"
    parts = 0
    if options.flag("use_vllm") and options.flag(correction):
        parts += 1
        level, _, kind = options.text(mode).partition("_")
        cap = options.first("vllm_importance_sampling_clip_max", "vllm_importance_sampling_cap")
        bound = float(options.number(cap)) if options.get(cap) is not None else 3.0
        part = "TruncatedIS" if kind == "truncate" else "MaskedIS"
        yield Line(f"algorithm.corrections.{part}", None, (correction,))
        yield Line(
            f"algorithm.corrections.{part}.{'cap' if kind == 'truncate' else 'high'}",
            bound,
            (cap,) if cap in options else (correction,),
        )
        least = "vllm_importance_sampling_clip_min"
        if kind != "truncate" or options.get(least) is not None:
            yield Line(
                f"algorithm.corrections.{part}.low",
                float(options.number(least)) if options.get(least) is not None else 0.0,
                (least,) if least in options else (correction,),
            )
        yield Line(f"algorithm.corrections.{part}.level", level, (mode,))
    if options.get("off_policy_mask_threshold") is not None:
        parts += 1
        name = "off_policy_mask_threshold"
        yield Line("algorithm.corrections.OffPolicySequenceMask", None, (name,))
        yield options.number_line("algorithm.corrections.OffPolicySequenceMask.delta", name)
    if (share := options.number("top_entropy_quantile")) < 1:
        parts += 1
        yield Line("algorithm.corrections.HighEntropy", None, ("top_entropy_quantile",))
        yield Line("algorithm.corrections.HighEntropy.fraction", float(share), ("top_entropy_quantile",))
    if not parts:
        yield Line("algorithm.corrections", [], ())
    masked = "mask_truncated_completions"
    replays = REPLAY in options and options.count(REPLAY) > 0
    if replays:
        note = "groups are kept for ReplayBuffer.max_age steps, and corrected for their age"
        yield Line("algorithm.filters.ReplayBuffer", None, (REPLAY,), note)
        yield options.count_line("algorithm.filters.ReplayBuffer.size", REPLAY)
    if options.flag(masked):
        note = "TRL goes on dividing by all completions with loss_type grpo, dr_grpo and sapo"
        yield Line("algorithm.filters.MaskTruncated", None, (masked,), note)
        yield Line("algorithm.filters.MaskTruncated.keep_in_statistics", True, (masked,))
    elif not replays:
        yield Line("algorithm.filters", [], tuple(name for name in (masked, REPLAY) if name in options))
    if options.flag("sync_ref_model") and options.number("beta") == 0:
        yield Left("sync_ref_model", "without a KL no reference is used")
    elif options.flag("sync_ref_model"):
        steps = "ref_model_sync_steps"
        updates = max(1, _count_updates(options))
        yield Line(
            "algorithm.reference.refresh_every",
            max(1, options.count(steps) // updates),
            (steps, "sync_ref_model"),
            "in rollouts",
        )


def _answer_rloo(options: Options) -> Iterator[Outcome]:
    if _count_updates(options) > 1:
        yield Line("algorithm.ratio", "SequenceProduct", (TRAINER,))
        yield Line("algorithm.gate", "Clip", (TRAINER,))
        yield options.number_line("algorithm.gate.low", "epsilon")
        high = options.first("epsilon_high", "epsilon")
        yield options.number_line("algorithm.gate.high", high)
    if options.flag("normalize_advantages"):
        yield Line("algorithm.advantage.LeaveOneOut", None, (TRAINER,))
        yield Line("algorithm.advantage.BatchMean", None, ("normalize_advantages",))
        yield Line("algorithm.advantage.BatchStd", None, ("normalize_advantages",))
    if (beta := float(options.number("beta"))) > 0:
        yield Line("algorithm.shaping.KLInReward", None, ("beta",))
        yield Line("algorithm.shaping.KLInReward.beta", beta, ("beta",))
        yield Line("algorithm.shaping.KLInReward.level", "sequence", ("beta",))
    else:
        yield Line("algorithm.shaping", [], ("beta",))
    if options.flag("mask_truncated_completions"):
        yield Line("algorithm.filters.MaskTruncated", None, ("mask_truncated_completions",))


def _answer_ppo(options: Options) -> Iterator[Outcome]:
    for key in ("gamma", "lam"):
        yield options.number_line(f"algorithm.advantage.GAE.{key}", key)
        yield options.number_line(f"algorithm.critic.{key}", key)
    yield Line("algorithm.advantage.Whiten", None, (TRAINER,))
    yield options.number_line("algorithm.gate.low", "cliprange")
    yield options.number_line("algorithm.gate.high", "cliprange")
    yield options.number_line("algorithm.critic.clip", "cliprange_value")
    yield Line(
        "algorithm.critic.coefficient",
        options.number("vf_coef") / 2,
        ("vf_coef",),
        "half: TRL halves the squared error",
    )
    if (beta := float(options.number("kl_coef"))) > 0:
        yield Line("algorithm.shaping.KLInReward", None, ("kl_coef",))
        yield Line("algorithm.shaping.KLInReward.beta", beta, ("kl_coef",))
    else:
        yield Line("algorithm.shaping", [], ("kl_coef",))


def _count_minibatches(options: Options) -> int:
    """Return optimizer steps per rollout and pass over it."""
    if options.text(TRAINER) == "ppo":
        return options.count("num_mini_batches")
    accumulated = options.positive("gradient_accumulation_steps")
    steps = "steps_per_generation"
    if options.get(steps) is not None:
        return max(1, options.count(steps) // accumulated)
    if options.get("generation_batch_size") is not None and options.text(TRAINER) != GOLD:
        batch = options.positive("per_device_train_batch_size") * options.positive(PROCESSES) * accumulated
        return max(1, options.count("generation_batch_size") // batch)
    return 1


def _count_updates(options: Options) -> int:
    epochs = "num_ppo_epochs" if options.text(TRAINER) == "ppo" else "num_iterations"
    return _count_minibatches(options) * options.count(epochs)


def answer_batches(options: Options) -> Iterator[Outcome]:
    """Completions per device and pass become prompts per rollout."""
    device, accumulated = "per_device_train_batch_size", "gradient_accumulation_steps"
    samples, minibatches = options.positive(options.first("rloo_k", "num_generations")), _count_minibatches(options)
    total, steps = "generation_batch_size", "steps_per_generation"
    if options.get(total) is not None and options.text(TRAINER) == GOLD:  # prompts of a process
        completions = options.positive(total) * samples * options.positive(PROCESSES)
        sources = [total, *([PROCESSES] if PROCESSES in options else [])]
    elif options.get(total) is not None:
        completions, sources = options.positive(total), [total]
    else:
        passes = (
            options.positive(steps) if options.get(steps) is not None else options.positive(accumulated) * minibatches
        )
        completions = options.positive(device) * passes * options.positive(PROCESSES)
        sources = [
            device,
            steps if options.get(steps) is not None else accumulated,
            *([PROCESSES] if PROCESSES in options else []),
        ]
    prompts, rounded = ratio_up(completions, samples)
    note = rounded or f"{completions} completions"
    yield Line("prompts_per_step", prompts, tuple(sources), note)
    if PROCESSES not in options:
        yield Need("prompts_per_step is that of one process: multiply it by accelerate's number of processes")
    yield Line("samples_per_prompt", samples, (options.first("rloo_k", "num_generations"),))
    has_updates = options.text(TRAINER) != "rloo" or _count_updates(options) > 1
    epochs = "num_ppo_epochs" if options.text(TRAINER) == "ppo" else "num_iterations"
    if has_updates:
        yield Line("algorithm.update_rule", "GradientSteps", ())
        named = [name for name in (steps, accumulated, "num_mini_batches") if name in options] or [accumulated]
        note = "" if minibatches <= prompts else f"{minibatches} of them, more than prompts: whole groups stay together"
        yield Line("algorithm.update_rule.minibatches", min(minibatches, prompts), tuple(named), note)
        yield Line("algorithm.update_rule.epochs", options.positive(epochs), (epochs,))
    for name in (device, accumulated):
        if name in options and name not in sources:
            yield Left(name, "memory only: learner.micro_tokens bounds the tokens of a pass")
    yield from _answer_length(options, prompts, samples)


def _answer_length(options: Options, prompts: int, samples: int) -> Iterator[Outcome]:
    updates = max(1, _count_updates(options))
    passes, episodes = "num_train_epochs", "total_episodes"
    length = None
    if options.count("max_steps") > 0:
        length, rounded = ratio_up(options.positive("max_steps"), updates)
        yield Line(
            "steps", length, ("max_steps",), f"optimizer steps / {updates} a rollout" if updates > 1 else rounded
        )
    elif options.get(episodes) is not None:
        length, rounded = ratio_up(options.positive(episodes), prompts * samples)
        yield Line("steps", length, (episodes,), f"episodes / {prompts * samples} a rollout")
    elif options.rows is not None:
        length = max(1, round(options.rows / prompts * options.number(passes)))
        yield Line("steps", length, (passes,), f"of {options.rows} rows, {prompts} a step")
    else:
        text = f"steps = {options.number(passes):g} × rows of the training data / {prompts}; --rows N tells the rows"
        yield Need(text, (passes,) if passes in options else ())
    if passes in options and length is not None and options.rows is None:
        yield Left(passes, "the number of steps is given")
    for name in ("warmup_steps", "warmup_ratio"):
        if name not in options or not options.get(name):
            continue
        warmup = options.number(name)
        if warmup >= 1:
            yield Line("optimizer.warmup", int(warmup), (name,))
        elif length is not None:
            yield Line(
                "optimizer.warmup", round(warmup * length * updates), (name,), f"of {length * updates} optimizer steps"
            )
        else:
            yield Need(f"optimizer.warmup = {warmup:g} × steps × {updates}, once you know the steps", (name,))


def answer_optimizer(options: Options) -> Iterator[Outcome]:
    """Learning rate, schedule, betas, and what is saved when."""
    yield options.number_line("lr", "learning_rate")
    schedule = options.text("lr_scheduler_type").removesuffix("_with_warmup")
    if schedule in ("constant", "linear", "cosine"):
        yield Line("optimizer.schedule", schedule, ("lr_scheduler_type",))
    else:
        yield Left("lr_scheduler_type", "constant, linear or cosine, down to 0")
    yield options.number_line("optimizer.clip", "max_grad_norm")
    yield options.number_line("optimizer.weight_decay", "weight_decay")
    yield Line(
        "optimizer.betas",
        [float(options.number("adam_beta1")), float(options.number("adam_beta2"))],
        ("adam_beta1", "adam_beta2"),
    )
    yield options.count_line("seed", "seed")
    updates = max(1, _count_updates(options))
    for name, key in (("save_steps", "checkpoint.every"), ("eval_steps", "evaluation.every")):
        if name in options and options.number(name) >= 1:
            yield Line(
                key,
                ratio_up(options.count(name), updates)[0],
                (name,),
                f"optimizer steps / {updates}" if updates > 1 else "",
            )
        elif name in options:
            yield Left(name, "a fraction of the run: counted in rollouts here")
    for name in ("save_strategy", "eval_strategy"):
        if name in options:
            yield Left(name, "a checkpoint is written at the end in any case, an evaluation made before and after")


def answer_model(options: Options) -> Iterator[Outcome]:
    """Model, precision, adapters."""
    model = options.first("model_name_or_path", "sft_model_path", "model_name_or_path")
    if options.get(model) is not None:
        yield Line("model", options.text(model), (model,))
    else:
        yield Need("model: the script names it")
    if "sft_model_path" in options and model != "sft_model_path":
        yield Left("sft_model_path", "model is both the policy and, at first, the reference")
    precision = options.first("bf16", "dtype", "torch_dtype", "fp16")
    if precision in options:
        is_bf16 = options.get(precision) in (True, "bfloat16", "bf16")
        note = "with fp32 master weights" if is_bf16 else ""
        yield Line("learner.dtype", "bf16" if is_bf16 or precision == "fp16" else "auto", (precision,), note)
    for name in ("bf16", "dtype", "torch_dtype", "fp16"):
        if name in options and name != precision:
            yield Left(name, f"learner.dtype is made of {precision}")
    if options.flag("use_peft"):
        names = [name for name in ("lora_r", "lora_alpha", "lora_target_modules", "load_in_4bit") if name in options]
        targets = options.get("lora_target_modules")
        bits = 4 if options.flag("load_in_4bit") else None
        yield Line(
            "learner.lora",
            list_lora(options.count("lora_r"), options.count("lora_alpha"), targets, bits),
            ("use_peft", *names),
        )


def answer_data(options: Options) -> Iterator[Outcome]:
    """Data and rewards, which scripts of TRL often name in their code."""
    name, config, split = "dataset_name", "dataset_config", "dataset_train_split"
    if options.get(name) is not None:
        parts = [name_data(options.text(name))]
        if parts[0].startswith("hf:") and (config in options or split in options):
            parts += [options.text(config), *([options.text(split)] if split in options else [])]
        yield Line("task", ":".join(parts), tuple(x for x in (name, config, split) if x in options))
    else:
        yield Need('task: the script loads its data itself; a dataset of the hub is task = "hf:NAME", a file its path')
    functions, model = "reward_funcs", options.first("reward_model_path", "reward_model_name_or_path")
    if options.get(functions) is not None:
        names = [str(function) for function in as_list(options.get(functions))]
        weights = as_list(options.get("reward_weights"))
        yield Line(
            "reward",
            [_name_reward(text, weights, i) for i, text in enumerate(names)],
            (functions, *(("reward_weights",) if weights else ())),
        )
        yield Need(
            "reward: TRL's functions are called as trl:FILE:NAME; of its own, accuracy_reward is math", (functions,)
        )
    elif options.get(model) is not None:
        yield Line("reward", [f"model:{options.text(model)}"], (model,), "trained by policygrad reward-model")
    elif options.text(TRAINER) not in ("distill", "sdft", GOLD):
        yield Need("reward: the script names it in its code; --reward trl:FILE:NAME calls that function")


def _name_reward(name: str, weights: list[Any], i: int) -> str:
    # the last is open-r1's
    replacements = {"accuracy_reward": "math", "think_format_reward": "format", "accuracy": "math"}
    text = replacements.get(name, name)
    if text == name and "." in name and not name.endswith(".py"):
        module, _, function = name.rpartition(".")
        text = f"trl:{module}:{function}"
    return f"{weights[i]}*{text}" if i < len(weights) else text


def answer_sampling(options: Options) -> Iterator[Outcome]:
    """Lengths and the engine."""
    tokens = (
        options.first("response_length", "max_completion_length")
        if options.text(TRAINER) != "ppo"
        else "response_length"
    )
    yield options.count_line("sampling.max_tokens", tokens)
    yield options.number_line("sampling.temperature", "temperature")
    if options.text(TRAINER) == GOLD and options.flag("use_uld_loss"):
        for name in ("top_p", "top_k"):
            if name in options:
                yield Left(name, "a teacher with another tokenizer is compared over all tokens, which are sampled from")
    else:
        if options.get("top_p") is not None and options.number("top_p") < 1:
            yield options.number_line("sampling.top_p", "top_p")
        if options.get("top_k") and options.number("top_k") > 0:
            yield options.count_line("sampling.top_k", "top_k")
    if options.flag("use_vllm"):
        yield Line("sampler.engine", "vllm", ("use_vllm",))
        mode, url = "vllm_mode", "vllm_server_base_url"
        if options.text(mode) == "server":
            address = (
                options.text(url)
                or f"http://{options.get('vllm_server_host') or '0.0.0.0'}:{options.get('vllm_server_port') or 8000}"
            )
            yield Line("sampler.urls", [address], (mode, *((url,) if url in options else ())))
        else:
            yield Line("sampler.colocate", True, (mode,))
            if "vllm_gpu_memory_utilization" in options:
                name = "vllm_gpu_memory_utilization"
                yield options.number_line("sampler.gpu_memory", name)
    services = [str(name) for name in as_list(options.get("report_to"))]
    services = [name for name in services if name in ("wandb", "tensorboard", "mlflow", "trackio")]
    if "report_to" in options:
        yield Line("track", services, ("report_to",))
    if PROCESSES in options:
        yield options.count_line("learner.world_size", PROCESSES)


RULES = (
    Rule(
        f"{TRAINER} loss_type scale_rewards importance_sampling_level beta epsilon* delta sapo_temperature_* "
        "entropy_coef top_entropy_quantile off_policy_mask_threshold vllm_importance_sampling_* "
        "mask_truncated_completions replay_buffer_size sync_ref_model ref_model_sync_steps normalize_advantages kl_coef cliprange* "
        "vf_coef gamma lam teacher_model_name_or_path teacher_tokenizer_name_or_path use_uld_loss lmbda seq_kd",
        answer_algorithm,
    ),
    Rule(
        "per_device_train_batch_size gradient_accumulation_steps generation_batch_size steps_per_generation "
        "num_generations rloo_k num_iterations num_ppo_epochs ppo_epochs num_mini_batches max_steps "
        "num_train_epochs total_episodes warmup_steps warmup_ratio",
        answer_batches,
    ),
    Rule(
        "learning_rate lr_scheduler_type max_grad_norm weight_decay adam_beta* seed save_steps eval_steps "
        "save_strategy eval_strategy",
        answer_optimizer,
    ),
    Rule(
        "model_name_or_path sft_model_path bf16 fp16 dtype torch_dtype use_peft lora_r lora_alpha "
        "lora_target_modules load_in_4bit",
        answer_model,
    ),
    Rule(
        "dataset_name dataset_config dataset_train_split reward_funcs reward_weights reward_model_path "
        "reward_model_name_or_path",
        answer_data,
    ),
    Rule(
        "max_completion_length response_length temperature top_p top_k use_vllm vllm_mode vllm_server_* "
        "vllm_gpu_memory_utilization report_to num_processes",
        answer_sampling,
    ),
)


def make_library(trainer: str) -> Library:
    """Return TRL with the defaults of a trainer."""
    return Library("TRL", {**DEFAULTS[trainer], TRAINER: trainer}, RULES, {"ppo_epochs": "num_ppo_epochs"})
