"""verl: hydra overrides of `python3 -m verl.trainer.main_ppo`, or the YAML of its configuration. Algorithms: verl_algorithm.py.

Defaults are those of verl at b178a3c (verl/trainer/config: ppo_trainer.yaml, actor.yaml, rollout.yaml, optim/fsdp.yaml).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
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
    flatten,
    parse_value,
    ratio_up,
)
from policygrad.commands.converters.verl_algorithm import (
    ACTOR,
    OVERLONG,
    ROLLOUT,
    answer_algorithm,
    answer_filters,
    answer_kl,
    answer_shaping,
)
from policygrad.commands.converters.verl_corrections import CORRECTION, answer_corrections, expand_presets
from policygrad.errors import ConfigError

MODEL = "actor_rollout_ref.model"
OPTIM = f"{ACTOR}.optim"
DEFAULTS = {
    "algorithm.adv_estimator": "gae",
    "algorithm.gamma": 1.0,
    "algorithm.lam": 1.0,
    "algorithm.norm_adv_by_std_in_grpo": True,
    "algorithm.use_kl_in_reward": False,
    "algorithm.kl_penalty": "kl",
    "algorithm.kl_ctrl.type": "fixed",
    "algorithm.kl_ctrl.kl_coef": 0.001,
    "algorithm.kl_ctrl.target_kl": 0.1,
    "data.train_batch_size": 1024,
    "data.max_response_length": 512,
    f"{ACTOR}.ppo_mini_batch_size": 256,
    f"{ACTOR}.ppo_epochs": 1,
    f"{ACTOR}.clip_ratio": 0.2,
    f"{ACTOR}.clip_ratio_c": 3.0,
    f"{ACTOR}.tau_pos": 1.0,
    f"{ACTOR}.tau_neg": 1.05,
    f"{ACTOR}.policy_loss.loss_mode": "vanilla",
    f"{ACTOR}.policy_loss.clip_cov_ratio": 0.0002,
    f"{ACTOR}.policy_loss.clip_cov_lb": 1.0,
    f"{ACTOR}.policy_loss.clip_cov_ub": 5.0,
    f"{ACTOR}.policy_loss.kl_cov_ratio": 0.0002,
    f"{ACTOR}.policy_loss.ppo_kl_coef": 0.1,
    f"{ACTOR}.loss_agg_mode": "token-mean",
    f"{ACTOR}.entropy_coeff": 0,
    f"{ACTOR}.use_kl_loss": False,
    f"{ACTOR}.kl_loss_coef": 0.001,
    f"{ACTOR}.kl_loss_type": "low_var_kl",
    f"{OPTIM}.lr": 1e-6,
    f"{OPTIM}.lr_warmup_steps": -1,
    f"{OPTIM}.lr_warmup_steps_ratio": 0.0,
    f"{OPTIM}.weight_decay": 0.01,
    f"{OPTIM}.betas": [0.9, 0.999],
    f"{OPTIM}.clip_grad": 1.0,
    f"{OPTIM}.lr_scheduler_type": "constant",
    "critic.cliprange_value": 0.5,
    "critic.optim.lr": 1e-5,
    f"{ROLLOUT}.n": 1,
    f"{ROLLOUT}.name": "",
    f"{ROLLOUT}.top_k": -1,
    f"{ROLLOUT}.top_p": 1.0,
    f"{ROLLOUT}.free_cache_engine": True,
    f"{ROLLOUT}.val_kwargs.n": 1,
    f"{ROLLOUT}.val_kwargs.do_sample": False,
    f"{ROLLOUT}.val_kwargs.temperature": 0,
    f"{ROLLOUT}.val_kwargs.top_k": -1,
    "trainer.total_epochs": 30,
    "trainer.nnodes": 1,
    "trainer.n_gpus_per_node": 8,
    "trainer.save_freq": -1,
    "trainer.test_freq": -1,
    "trainer.val_before_train": True,
    "trainer.logger": ["console", "wandb"],
    "reward_model.enable": False,
    "custom_reward_function.name": "compute_score",
    f"{OVERLONG}.penalty_factor": 1.0,
    f"{CORRECTION}.rollout_is_threshold": 2.0,
    f"{CORRECTION}.loss_type": "ppo_clip",
}


def read_overrides(words: Sequence[tuple[str, int]]) -> list[Setting]:
    """Return the options of a command's overrides, (text, line) each. Raises ConfigError for one that is none."""
    settings: list[Setting] = []
    skips = False
    for word, line in words:
        place = f"line {line}: " if line else ""
        if (
            skips or not word.strip() or word.startswith("$")
        ):  # the value of --config-name NAME; arguments that are passed on
            skips = False
        elif word.startswith("--"):
            name, equals, value = word.partition("=")
            skips = not equals
            settings.append(Setting(f"--{name[2:]}", value, word, line))
        elif word.startswith("~"):
            name = word[1:].partition("=")[0]
            settings = [setting for setting in settings if setting.name != name]
        elif found := re.fullmatch(r"\+{0,2}([\w@/-]+(?:\.[\w@-]+)*)=(.*)", word, re.DOTALL):
            settings.append(Setting(found[1], parse_value(found[2]), word.strip("+"), line))
        elif word != ";":
            raise ConfigError(f"{place}{word!r} is not an override of verl: write it as name.of.option=value")
        else:
            break
    return expand_presets(settings)


def read_tables(data: Mapping[str, Any]) -> list[Setting]:
    """Return the options of verl's YAML. What follows another option, `${…}`, is left to it."""
    pairs = [
        (name, value) for name, value in flatten(data) if not re.search(r"(^|\.)_target_$|^defaults$|^hydra\.", name)
    ]
    pairs = [(name, value) for name, value in pairs if not (isinstance(value, str) and "${" in value)]
    pairs = [(name, parse_value(value) if isinstance(value, str) else value) for name, value in pairs]
    return expand_presets(
        [Setting(name, value, f"{name}={value}") for name, value in pairs if value is not None and value != {}]
    )


def answer_batches(options: Options) -> Iterator[Outcome]:
    """Prompts, completions, minibatches, steps and the schedule, which is counted in optimizer steps."""
    prompts, mini = options.positive("data.train_batch_size"), options.positive(f"{ACTOR}.ppo_mini_batch_size")
    minibatches, rounded = ratio_up(prompts, mini)
    epochs, samples = options.positive(f"{ACTOR}.ppo_epochs"), options.positive(f"{ROLLOUT}.n")
    yield Line("prompts_per_step", prompts, ("data.train_batch_size",))
    yield Line("samples_per_prompt", samples, (f"{ROLLOUT}.n",))
    sources = ("data.train_batch_size", f"{ACTOR}.ppo_mini_batch_size")
    yield Line("algorithm.update_rule", "GradientSteps", ())
    yield Line("algorithm.update_rule.minibatches", minibatches, sources, rounded)
    yield Line("algorithm.update_rule.epochs", epochs, (f"{ACTOR}.ppo_epochs",))
    steps, passes = "trainer.total_training_steps", "trainer.total_epochs"
    length = None
    if options.get(steps) is not None:
        length = options.count(steps)
        yield Line("steps", length, (steps,))
        if passes in options:
            yield Left(passes, "trainer.total_training_steps sets the length")
    elif options.rows is not None:
        length = max(1, options.rows // prompts * options.count(passes))
        yield Line("steps", length, (passes,), f"of {options.rows} rows, {prompts} a step")
    else:
        text = f"steps = {options.count(passes)} × rows of the training data / {prompts}; --rows N tells the rows"
        yield Need(text, (passes,))
    yield from _answer_warmup(options, length, minibatches * epochs)


def _answer_warmup(options: Options, length: int | None, updates: int) -> Iterator[Outcome]:
    name, ratio = f"{OPTIM}.lr_warmup_steps", f"{OPTIM}.lr_warmup_steps_ratio"
    style = options.first(f"{OPTIM}.warmup_style", f"{OPTIM}.lr_decay_style", f"{OPTIM}.lr_scheduler_type")
    if (warmup := options.count(name)) > 0:
        note = f"optimizer steps, {updates} a rollout" if updates > 1 else ""
        yield Line("optimizer.warmup", warmup * updates, (name,), note)
    elif (share := options.number(ratio)) > 0 and length is not None:
        yield Line(
            "optimizer.warmup", round(share * length * updates), (ratio,), f"of {length * updates} optimizer steps"
        )
    elif share > 0:
        yield Need(f"optimizer.warmup = {share:g} × steps × {updates}, once you know the steps", (ratio,))
    schedule = options.text(style)
    if schedule in ("constant", "cosine", "linear"):
        yield Line("optimizer.schedule", schedule, (style,))
    else:
        yield Left(style, f"{schedule} has no equivalent: constant, linear or cosine")
    for key in (
        f"{OPTIM}.min_lr_ratio",
        f"{OPTIM}.num_cycles",
        f"{OPTIM}.lr_decay_steps",
        f"{OPTIM}.total_training_steps",
    ):
        if key in options:
            yield Left(key, "a schedule ends at 0, at the run's last update")


def answer_optimizer(options: Options) -> Iterator[Outcome]:
    """Clipping, decay and betas, which differ from those here."""
    clip = options.first(f"{ACTOR}.grad_clip", f"{OPTIM}.clip_grad")
    yield options.number_line("lr", f"{OPTIM}.lr")
    yield options.number_line("optimizer.clip", clip)
    yield options.number_line("optimizer.weight_decay", f"{OPTIM}.weight_decay")
    yield Line("optimizer.betas", [*options.pair(f"{OPTIM}.betas")], (f"{OPTIM}.betas",))


def answer_program(options: Options) -> Iterator[Outcome]:
    """A program of its own beside verl's, such as a recipe's."""
    program = options.text(IMPLIED)
    if "one_step_off" in program or "fully_async" in program:
        yield Need(
            f"max_staleness: {program} samples while it learns; --max-staleness 1 is one step ahead, on GPUs of its own"
        )
    elif program and not re.search(r"(^|[./])main_(ppo|dapo)(\.py)?$", program):
        yield Need(f"{program} has code of its own beside verl's: only its options were converted")


def answer_critic(options: Options) -> Iterator[Outcome]:
    """The critic of gae; other estimators have none."""
    critic = [name for name in options.given if name.startswith("critic.") or name == "trainer.critic_warmup"]
    if options.text("algorithm.adv_estimator") != "gae":
        for name in critic:
            yield Left(name, f"{options.text('algorithm.adv_estimator')} has no critic")
        return
    yield options.number_line("algorithm.critic.lr", "critic.optim.lr")
    clip = "critic.cliprange_value"
    yield options.number_line("algorithm.critic.clip", clip)
    if "trainer.critic_warmup" in options:
        pretrain = options.count("trainer.critic_warmup")
        note = "at most; ends once the critic explains enough variance"
        yield Line("algorithm.critic.pretrain", pretrain, ("trainer.critic_warmup",), note if pretrain else "")
    for name in critic:
        if name == "critic.model.path":
            yield Left(name, "the critic starts as a copy of the policy")
        elif name not in ("critic.optim.lr", clip, "trainer.critic_warmup"):
            yield Left(name, "the critic is trained with the policy's batches, memory and schedule")


def answer_data(options: Options) -> Iterator[Outcome]:
    """Data and rewards."""
    for name, key in (("data.train_files", "task"), ("data.val_files", "eval_data")):
        files = [str(file) for file in as_list(options.get(name))]
        if files:
            note = "drawn from equally often; weights: 0.7*a+0.3*b" if len(files) > 1 else ""
            yield Line(key, "+".join(files), (name,), note)
    if f"{MODEL}.path" not in options:
        yield Need("model: none is named")
    if "data.train_files" not in options:
        yield Need('task: verl\'s own is ~/data/rlhf/gsm8k/train.parquet; a dataset of the hub is task = "hf:NAME"')
    path, function = "custom_reward_function.path", "custom_reward_function.name"
    if options.text(path):
        ending = f":{options.text(function)}" if function in options else ""
        yield Line("reward", [f"verl:{options.text(path)}{ending}"], (path, function) if ending else (path,))
    elif options.flag("reward_model.enable") and options.text("reward_model.model.path"):
        name = "reward_model.model.path"
        yield Line("reward", [f"model:{options.text(name)}"], (name, "reward_model.enable"))
        for other in options.given:
            if other.startswith("reward_model.") and other not in (
                name,
                "reward_model.enable",
                "reward_model.reward_manager",
            ):
                yield Left(other, "a reward model runs in a worker of its own; no placement is chosen")
    else:
        yield Line(
            "reward", ["math"], (), "verl chooses by the column data_source; math compares answers as mathematics"
        )
        yield Need(
            "reward: math is right for gsm8k and MATH; for other data name a function, --reward verl:FILE.py, or a built-in"
        )
    manager = "reward_model.reward_manager"
    if manager in options:
        yield Left(manager, "rewards are functions of whole batches: none is needed")


def answer_engine(options: Options) -> Iterator[Outcome]:
    """Engine, evaluation and machines."""
    name, memory = f"{ROLLOUT}.name", f"{ROLLOUT}.gpu_memory_utilization"
    engine = options.text(name)
    is_truncated = options.number(f"{ROLLOUT}.top_p") < 1 or options.count(f"{ROLLOUT}.top_k") > 0
    if engine in ("vllm", "sglang"):
        if engine == "sglang" and is_truncated:
            note = "sglang does not tell which tokens top_p and top_k left, and the learner needs them"
            yield Line("sampler.engine", "vllm", (name,), note)
        else:
            yield Line("sampler.engine", engine, (name,))
        if memory in options:
            yield options.number_line("sampler.gpu_memory", memory)
        if options.flag(f"{ROLLOUT}.free_cache_engine"):
            yield Line("sampler.colocate", True, (f"{ROLLOUT}.free_cache_engine",))
    elif name in options:
        yield Left(
            name,
            f"{engine} is not an engine here (vllm, sglang, llama_cpp): completions are sampled in the run's process",
        )
    tokens = options.first(f"{ROLLOUT}.response_length", "data.max_response_length")
    yield options.count_line("sampling.max_tokens", tokens)
    if (top_k := options.count(f"{ROLLOUT}.top_k")) > 0:
        yield Line("sampling.top_k", top_k, (f"{ROLLOUT}.top_k",))
    elif f"{ROLLOUT}.top_k" in options:
        yield Left(f"{ROLLOUT}.top_k", "all tokens, as here")
    nodes, gpus = "trainer.nnodes", "trainer.n_gpus_per_node"
    if nodes in options and options.count(nodes) > 1:
        yield Need(f"{options.count(nodes)} machines: start the run with torchrun on each (docs/scaling.md)", (nodes,))
    yield Line("learner.world_size", options.count(gpus), (gpus, nodes) if nodes in options else (gpus,))


def answer_evaluation(options: Options) -> Iterator[Outcome]:
    """Evaluations and checkpoints."""
    own = f"{ROLLOUT}.val_kwargs"
    samples, sampled = options.count(f"{own}.n"), options.flag(f"{own}.do_sample")
    temperature = float(options.number(f"{own}.temperature")) if sampled else 0.0
    yield Line("evaluation.samples_per_prompt", samples if temperature else 1, (f"{own}.n",))
    sources = (f"{own}.temperature", f"{own}.do_sample") if sampled else (f"{own}.do_sample",)
    yield Line("evaluation.temperature", temperature, sources, "" if sampled else "greedy")
    if f"{own}.top_p" in options:
        yield options.number_line("evaluation.top_p", f"{own}.top_p")
    if f"{own}.top_k" in options:
        yield Line("evaluation.top_k", max(0, options.count(f"{own}.top_k")), (f"{own}.top_k",))
    every, save = "trainer.test_freq", "trainer.save_freq"
    yield Line(
        "evaluation.every",
        max(0, options.count(every)),
        (every,),
        "" if options.count(every) > 0 else "before and after only",
    )
    if options.count(save) > 0:
        yield options.count_line("checkpoint.every", save)
    elif save in options:
        yield Left(save, "a checkpoint is written in any case, at the end and every checkpoint.every steps")
    if "trainer.val_before_train" in options:
        yield Left(
            "trainer.val_before_train", "evaluated before and after training; evaluation.problems = 0 for neither"
        )


def answer_tracking(options: Options) -> Iterator[Outcome]:
    """Trackers."""
    services = [
        name
        for name in map(str, as_list(options.get("trainer.logger")))
        if name in ("wandb", "tensorboard", "mlflow", "trackio")
    ]
    yield Line("track", services, ("trainer.logger",))


def answer_adapters(options: Options) -> Iterator[Outcome]:
    """Adapters: one option here."""
    rank = options.first(f"{MODEL}.lora.rank", f"{MODEL}.lora_rank")
    if not (options.get(rank) and options.count(rank) > 0):
        return
    alpha = options.first(f"{MODEL}.lora.alpha", f"{MODEL}.lora_alpha")
    targets = options.first(f"{MODEL}.lora.target_modules", f"{MODEL}.target_modules")
    text, sources = f"rank={options.count(rank)}", [rank]
    if alpha in options:
        text, sources = f"{text},alpha={options.count(alpha)}", [*sources, alpha]
    if targets in options:
        names = "+".join(map(str, as_list(options.get(targets))))
        if "linear_" in names:
            yield Left(targets, "names of Megatron's layers: all-linear here")
        else:
            text, sources = f"{text},targets={names}", [*sources, targets]
    yield Line("learner.lora", text, tuple(sources))


RULES = (
    Rule(
        "algorithm.adv_estimator algorithm.norm_adv_by_std_in_grpo algorithm.gamma algorithm.lam "
        "actor_rollout_ref.actor.policy_loss.loss_mode actor_rollout_ref.actor.loss_agg_mode "
        "actor_rollout_ref.actor.clip_ratio* actor_rollout_ref.actor.tau_* "
        "actor_rollout_ref.actor.policy_loss.clip_cov_*",
        answer_algorithm,
    ),
    Rule(
        "actor_rollout_ref.actor.use_kl_loss actor_rollout_ref.actor.kl_loss_* "
        "actor_rollout_ref.actor.entropy_coeff actor_rollout_ref.actor.policy_loss.*kl_*",
        answer_kl,
    ),
    Rule(
        "algorithm.use_kl_in_reward algorithm.kl_ctrl.* algorithm.kl_penalty "
        "reward_model.reward_kwargs.overlong_buffer_cfg.[elp]* reward_model.overlong_buffer.*",
        answer_shaping,
    ),
    Rule(
        "algorithm.filter_groups.enable algorithm.filter_groups.metric algorithm.filter_groups.max_num_gen_batches",
        answer_filters,
    ),
    Rule(
        "algorithm.rollout_correction.rollout_is algorithm.rollout_correction.rollout_is_threshold "
        "algorithm.rollout_correction.rollout_is_batch_normalize algorithm.rollout_correction.rollout_rs "
        "algorithm.rollout_correction.rollout_rs_threshold algorithm.rollout_correction.bypass_mode "
        "algorithm.rollout_correction.loss_type",
        answer_corrections,
    ),
    Rule(
        "data.train_batch_size actor_rollout_ref.actor.ppo_mini_batch_size actor_rollout_ref.actor.ppo_epochs "
        "actor_rollout_ref.rollout.n trainer.total_training_steps trainer.total_epochs "
        "actor_rollout_ref.actor.optim.lr_* actor_rollout_ref.actor.optim.warmup_style "
        "actor_rollout_ref.actor.optim.min_lr_ratio actor_rollout_ref.actor.optim.num_cycles "
        "actor_rollout_ref.actor.optim.total_training_steps",
        answer_batches,
    ),
    Rule(
        "actor_rollout_ref.actor.optim.lr actor_rollout_ref.actor.optim.weight_decay "
        "actor_rollout_ref.actor.optim.betas actor_rollout_ref.actor.optim.clip_grad "
        "actor_rollout_ref.actor.grad_clip",
        answer_optimizer,
    ),
    Rule(
        "critic.* trainer.critic_warmup",
        answer_critic,
    ),
    Rule(
        "data.train_files data.val_files custom_reward_function.* reward_model.enable reward_model.reward_manager "
        "reward_model.model.* reward_model.rollout.* reward_model.micro_batch_size* reward_model.num_workers",
        answer_data,
    ),
    Rule(
        "actor_rollout_ref.rollout.name actor_rollout_ref.rollout.gpu_memory_utilization "
        "actor_rollout_ref.rollout.free_cache_engine actor_rollout_ref.rollout.top_k trainer.nnodes "
        "trainer.n_gpus_per_node data.max_response_length actor_rollout_ref.rollout.response_length",
        answer_engine,
    ),
    Rule(
        "actor_rollout_ref.rollout.val_kwargs.* trainer.test_freq trainer.save_freq trainer.val_before_train",
        answer_evaluation,
    ),
    Rule(
        "trainer.logger",
        answer_tracking,
    ),
    Rule(
        "trainer",
        answer_program,
    ),
    Rule(
        "actor_rollout_ref.model.lora* actor_rollout_ref.model.target_modules",
        answer_adapters,
    ),
)
VERL = Library("verl", DEFAULTS, RULES)
