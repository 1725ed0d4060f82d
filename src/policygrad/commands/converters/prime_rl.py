"""prime-rl: the TOML of `rl @ rl.toml`, or that of its trainer, orchestrator or inference alone.

Defaults are those of prime-rl at 559b447 (packages/prime-rl-configs).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from policygrad.commands.converters.base import (
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
    list_lora,
    ratio_up,
)
from policygrad.errors import ConfigError

ALGO, SOURCES, EVALS = "orchestrator.algo", "orchestrator.train.source", "orchestrator.eval.source"
LOSS, OPTIM, LORA = "trainer.loss", "trainer.optim", "trainer.model.lora"
DEFAULTS = {
    f"{ALGO}.type": "grpo",
    f"{ALGO}.decay": 0.95,
    f"{ALGO}.demo_key": "demonstration",
    f"{LOSS}.type": "default",
    f"{LOSS}.dppo_mask_low": 0.2,
    f"{LOSS}.dppo_mask_high": 0.2,
    f"{LOSS}.ipo_threshold": 0.1,
    f"{LOSS}.kl_tau": 1e-3,
    f"{LOSS}.adv_tau": 1.0,
    f"{OPTIM}.type": "adamw",
    f"{OPTIM}.lr": 1e-6,
    f"{OPTIM}.weight_decay": 0.01,
    f"{OPTIM}.max_norm": 1.0,
    f"{OPTIM}.betas1": 0.9,
    f"{OPTIM}.betas2": 0.999,
    f"{OPTIM}.mu": 0.95,
    f"{OPTIM}.momentum": 0.9,
    "trainer.scheduler.type": "constant",
    "trainer.scheduler.warmup_steps": 10,
    f"{LORA}.rank": 16,
    "model.name": "Qwen/Qwen3-0.6B",
    "orchestrator.batch_size": 128,
    "orchestrator.group_size": 1,
    "orchestrator.seq_len": 2048,
    "orchestrator.max_off_policy_steps": 8,
    "orchestrator.train.filter_zero_advantages": True,
    "orchestrator.eval.interval": 100,
    "orchestrator.eval.group_size": 1,
    "deployment.num_train_gpus": 1,
    "deployment.num_infer_gpus": 1,
    "inference.vllm.tensor_parallel_size": 1,
    "deployment.gpus_per_node": 8,
}
ALGORITHMS = {  # orchestrator.algo.type -> the algorithm here whose loss and data it has
    "grpo": "prime_rl",
    "max_rl": "prime_rl",
    "rae": "prime_rl",
    "echo": "prime_rl",
    "opd": "distill",
    "opsd": "opsd",
}
SHARED = (
    "model",
    "max_steps",
    "seq_len",
    "output_dir",
    "ckpt",
    "resume",
    "monitors",
    "tokenizer",
    "weight_broadcast",
    "log",
)
"""Tables of rl.toml that trainer and orchestrator share; in a file of one of them alone they stand at the top too."""

_RENAMED = tuple(
    (re.compile(pattern), name)
    for pattern, name in (
        (r"orchestrator\.(train\.)?env\.(\d+)\.id", r"orchestrator.train.source.\2.env.taskset.id"),
        (r"orchestrator\.(train\.)?env\.(\d+)\.args\.(.*)", r"orchestrator.train.source.\2.env.taskset.\3"),
        (r"orchestrator\.(train\.)?env\.(\d+)\.(name|ratio)", r"orchestrator.train.source.\2.\3"),
        (r"orchestrator\.eval\.env\.(\d+)\.id", r"orchestrator.eval.source.\1.env.taskset.id"),
        (r"orchestrator\.eval\.env\.(\d+)\.args\.(.*)", r"orchestrator.eval.source.\1.env.taskset.\2"),
        (r"orchestrator\.rollouts_per_example", "orchestrator.group_size"),
        (r"orchestrator\.sampling\.max_tokens", "orchestrator.train.sampling.max_completion_tokens"),
        (r"orchestrator\.sampling\.(.*)", r"orchestrator.train.sampling.\1"),
        (r"orchestrator\.val\.(.*)", r"orchestrator.eval.\1"),
        (r"orchestrator\.training_mode", "orchestrator.algo.type"),
        (r"orchestrator\.teacher\.(model|client)\.(name|base_url)", r"orchestrator.algo.teacher.\2"),
        (r"orchestrator\.lora_name", "orchestrator.model.lora.name"),
        (r"wandb\.(.*)", r"monitors.wandb.\1"),
        (r"(trainer|orchestrator)\.wandb\.(.*)", r"monitors.wandb.\2"),
    )
)
"""Names of before 0.8.1."""


def _rename(name: str) -> str:
    return next((found.expand(new) for pattern, new in _RENAMED if (found := pattern.fullmatch(name))), name)


def read_tables(data: Mapping[str, Any], texts: Mapping[str, int] | None = None) -> list[Setting]:
    """Return the options of a TOML file; those of a file for trainer, orchestrator or inference alone get its prefix.

    Args:
        texts: Line numbers by dotted name, where they are known.
    """
    prefix = _find_program(data)
    settings = []
    for name, value in flatten(data):
        own = f"{prefix}.{name}" if prefix and name.partition(".")[0] not in SHARED else name
        if name == "model.seq_len":
            own = "trainer.model.seq_len"
        if isinstance(value, list) and value and isinstance(value[0], Mapping):
            for i, table in enumerate(value):
                settings += [
                    Setting(_rename(f"{own}.{i}.{key}"), item, f"{name}[{i}].{key} = {_show(item)}")
                    for key, item in flatten(table)
                ]
        else:
            settings.append(Setting(_rename(own), value, f"{name} = {_show(value)}", (texts or {}).get(name, 0)))
    return settings


def _show(value: Any) -> str:
    from policygrad.commands.converters.render import format_value

    return "{}" if isinstance(value, Mapping) else format_value(value)


def _find_program(data: Mapping[str, Any]) -> str:
    if {"orchestrator", "trainer"} & {*data}:
        return ""
    if {"train", "eval", "batch_size", "group_size", "renderer", "algo"} & {*data}:
        return "orchestrator"
    return "trainer" if {"optim", "loss", "scheduler"} & {*data} else ""


def answer_algorithm(options: Options) -> Iterator[Outcome]:
    """The algorithm, by the orchestrator's advantage and the trainer's loss."""
    name = f"{ALGO}.type"
    kind = {"rl": "grpo"}.get(options.text(name), options.text(name))  # as it was called before
    if kind == "sft":
        raise ConfigError(
            f"{name} = sft trains on the teacher's completions: policygrad sft --data FILE does, with completions that you sample"
        )
    if kind not in ALGORITHMS:
        raise ConfigError(f"{name} = {kind} has no equivalent here: known are {', '.join(ALGORITHMS)}")
    yield Line("algorithm.name", ALGORITHMS[kind], (name,))
    if kind in ("opd", "opsd"):
        yield from _answer_distillation(options, kind)
        return
    yield from _answer_advantage(options, kind)
    yield from _answer_loss(options)
    if kind == "echo":
        roles = [key for key in options.given if key.startswith(f"{ALGO}.roles.")]
        alpha = float(options.number(roles[0])) if roles else 0.1
        yield Line("algorithm.terms.ObservationNLL", None, (name,))
        yield Line(
            "algorithm.terms.ObservationNLL.coefficient",
            alpha,
            tuple(roles),
            "all of an environment's texts, whatever the role",
        )
        yield Line("algorithm.terms.ObservationNLL.aggregation", "TokenMean", (name,))
    for key in options.given:
        if key.startswith(f"{ALGO}.length_penalty."):
            yield Left(
                key,
                "tokens and turns are penalised by a reward function of your own; SoftOverlong penalises long completions",
            )


def _answer_distillation(options: Options, kind: str) -> Iterator[Outcome]:
    teacher, url = f"{ALGO}.teacher.name", f"{ALGO}.teacher.base_url"
    if kind == "opd" and options.get(url):
        address = str((as_list(options.get(url)) or [""])[0])
        yield Line("algorithm.reference.model", address, (url, teacher), "the server's own model")
    elif kind == "opd" and options.get(teacher):
        yield Line("algorithm.reference.model", options.text(teacher), (teacher,))
    demo = f"{ALGO}.demo_key"
    if kind == "opsd":
        note = "the templates name the column"
        yield Need(
            f"the teacher's template reads {options.text(demo)}: policygrad show opsd, {note}",
            (demo,) if demo in options else (),
        )
    for key in options.given:
        if key.startswith(f"{LOSS}."):
            yield Left(key, f"{kind} has no such loss, in prime-rl too")


def _answer_advantage(options: Options, kind: str) -> Iterator[Outcome]:
    source = (f"{ALGO}.type",)
    if kind == "rae":
        yield Line("algorithm.advantage.RunningMean", None, source)
        yield options.number_line("algorithm.advantage.RunningMean.decay", f"{ALGO}.decay")
        yield Line("algorithm.advantage.RunningMean.by", "role", source)
        yield Line("algorithm.advantage.RunningMean.per", "sample", source)
        yield Line("algorithm.filters", [], source)
        return
    yield Line("algorithm.advantage.GroupMean", None, source)
    if kind == "max_rl":
        yield Line("algorithm.advantage.DivideByGroupMean", None, source)
    keep = "orchestrator.train.filter_zero_advantages"
    gates = tuple(name for name in options.given if name.startswith(SOURCES) and ".curriculum." in name)
    if options.flag(keep):
        yield Line("algorithm.filters.DropZeroVariance", None, (keep, *gates))
        yield Line("algorithm.filters.DropZeroVariance.mode", "refill" if gates else "drop", gates)
    else:
        yield Line("algorithm.filters", [], (keep,))


def _answer_loss(options: Options) -> Iterator[Outcome]:
    kind, tau = options.text(f"{LOSS}.type"), f"{LOSS}.kl_tau"
    if kind not in ("default", "ipo"):
        raise ConfigError(f"{LOSS}.type = {kind} is a function of your own: write it as a part (docs/extending.md)")
    bounds = [f"{LOSS}.ipo_threshold"] if kind == "ipo" else [f"{LOSS}.dppo_mask_high", f"{LOSS}.dppo_mask_low"]
    if kind == "ipo":  # a window without a side: whichever sign the advantage has
        yield Line("algorithm.gate", "Importance", (f"{LOSS}.type",))
        yield Line("algorithm.corrections.MismatchMask", None, (f"{LOSS}.type",))
        for key, value in (("measure", "tv"), ("level", "token"), ("of", "current")):
            yield Line(f"algorithm.corrections.MismatchMask.{key}", value, (f"{LOSS}.type",))
        yield options.number_line("algorithm.corrections.MismatchMask.high", bounds[0])
    else:
        yield Line("algorithm.gate", "DivergenceClip", (f"{LOSS}.type",))
        differ = len({options.number(bound) for bound in bounds}) > 1
        note = "one bound for both sides here, the upper one" if differ else ""
        yield Line("algorithm.gate.delta", float(options.number(bounds[0])), tuple(bounds), note)
    if (beta := options.number(tau)) > 0:
        yield Line("algorithm.terms.KLToOld", None, (tau,))
        yield Line(
            "algorithm.terms.KLToOld.beta",
            float(f"{2 * beta:.12g}"),
            (tau,),
            "twice: there of the square, here of half of it",
        )
        yield Line("algorithm.terms.KLToOld.form", "k2", (tau,))
    elif options.text(f"{ALGO}.type") != "echo":
        yield Line("algorithm.terms", [], (tau,))
    if options.number(f"{LOSS}.adv_tau") != 1:
        yield Left(f"{LOSS}.adv_tau", "advantages are not scaled: scale kl_tau and the learning rate instead")


def answer_batches(options: Options) -> Iterator[Outcome]:
    """Completions become prompts."""
    size, group = "orchestrator.batch_size", "orchestrator.group_size"
    samples = options.positive(group)
    prompts, rounded = ratio_up(options.count(size), samples)
    if "orchestrator.token_batch_size" in options:
        yield Need("prompts_per_step: a step is counted in prompts, not tokens", ("orchestrator.token_batch_size",))
    else:
        yield Line(
            "prompts_per_step",
            prompts,
            (size, group) if group in options else (size,),
            rounded or f"{options.count(size)} completions",
        )
    grouped = options.text(f"{ALGO}.type") in ("grpo", "max_rl", "echo")
    if samples == 1 and grouped:
        yield Need(
            "samples_per_prompt: prime-rl's group_size is 1, whose advantages are all 0: set 2 or more",
            (group,) if group in options else (),
        )
        yield Line("samples_per_prompt", 8, (), "the algorithm's")
    else:
        yield Line("samples_per_prompt", samples, (group,))
    steps = options.first("orchestrator.max_steps", "trainer.max_steps", "max_steps")
    if options.get(steps) is None:
        yield Need("steps: prime-rl runs until it is stopped")
    else:
        yield options.count_line("steps", steps)
    ahead = "orchestrator.max_off_policy_steps"
    yield options.count_line("max_staleness", ahead, "there the oldest that is used")


def answer_optimizer(options: Options) -> Iterator[Outcome]:
    """Optimizer and schedule."""
    kind = options.text(f"{OPTIM}.type")
    lr = f"{OPTIM}.lr"
    yield options.number_line("lr", lr)
    if kind in ("muon", "sgd"):
        yield Line("optimizer.name", kind, (f"{OPTIM}.type",))
        momentum = f"{OPTIM}.mu" if kind == "muon" else f"{OPTIM}.momentum"
        yield options.number_line("optimizer.momentum", momentum)
    elif kind != "adamw":
        yield Left(
            f"{OPTIM}.type", f"{kind} has no equivalent: adamw stands for it, and needs a learning rate of its own"
        )
    if kind != "sgd":
        second = 0.95 if kind == "muon" and f"{OPTIM}.betas2" not in options else options.number(f"{OPTIM}.betas2")
        betas = [float(options.number(f"{OPTIM}.betas1")), float(second)]
        yield Line("optimizer.betas", betas, (f"{OPTIM}.betas1", f"{OPTIM}.betas2"))
    yield options.number_line("optimizer.weight_decay", f"{OPTIM}.weight_decay")
    yield options.number_line("optimizer.clip", f"{OPTIM}.max_norm")
    schedule = "trainer.scheduler.type"
    yield Line(
        "optimizer.schedule",
        options.text(schedule),
        (schedule,),
        "over the whole run" if options.text(schedule) == "linear" else "",
    )
    if options.text(schedule) != "constant":
        warmup = "trainer.scheduler.warmup_steps"
        yield options.count_line("optimizer.warmup", warmup)
    for key in ("trainer.scheduler.decay_steps", "trainer.scheduler.min_lr"):
        if key in options:
            yield Left(key, "a schedule ends at 0, at the run's last update")


def answer_data(options: Options) -> Iterator[Outcome]:
    """Tasksets of verifiers, with their environments and rewards."""
    yield from _answer_sources(options, SOURCES, "task")
    if any(name.startswith(EVALS) for name in options.given):
        yield from _answer_sources(options, EVALS, "eval_data")
    problems = options.first(f"{EVALS}.0.num_examples", "orchestrator.eval.num_examples")
    if options.get(problems) is not None and options.count(problems) > 0:
        yield options.count_line("evaluation.problems", problems)
    if any(name.startswith("orchestrator.eval.") for name in options.given):
        interval, group = (
            options.first(f"{EVALS}.0.{key}", f"orchestrator.eval.{key}") for key in ("interval", "group_size")
        )
        yield options.count_line("evaluation.every", interval)
        yield options.count_line("evaluation.samples_per_prompt", group)


def _answer_sources(options: Options, prefix: str, key: str) -> Iterator[Outcome]:
    names = [name for name in options.given if name.startswith(f"{prefix}.") and name.endswith(".env.taskset.id")]
    if not names:
        if key == "task":
            yield Need("task: no taskset is named; --task verifiers:ID, a file, or hf:NAME")
        return
    first, *others = names
    if key == "task":
        yield Line("task", f"verifiers:{options.text(first)}", (first,))
        yield Line("environment", f"verifiers:{options.text(first)}", (first,))
        settings = [name for name in options.given if name.startswith(first.removesuffix("id")) and name != first]
        if settings:
            yield Need(
                "the taskset's own settings: verifiers:ID takes none; set them where the taskset is made",
                tuple(settings),
            )
    else:
        what = ", ".join(options.text(name) for name in names)
        yield Need(
            f"eval_data: {what} were evaluated; here a part of the task is held out, or --eval-data FILE", tuple(names)
        )
    if others and key == "task":
        more = ", ".join(options.text(name) for name in others)
        yield Need(
            f"further tasksets: {more}; a run has one, or rows that name their environment (--environment rows:…)",
            tuple(others),
        )


def answer_machines(options: Options) -> Iterator[Outcome]:
    """Model, lengths, engine and processes."""
    model = options.first("trainer.model.name", "orchestrator.model.name", "model.name")
    yield Line("model", options.text(model), (model,))
    tokens = "orchestrator.train.sampling.max_completion_tokens"
    total = options.first("orchestrator.seq_len", "seq_len", "trainer.model.seq_len", "orchestrator.seq_len")
    if options.get(tokens) is not None:
        yield options.count_line("sampling.max_tokens", tokens)
        if total in options:
            yield Left(
                total,
                "a completion is bounded by max_tokens, and texts that are too long for a pass are read in segments",
            )
    else:
        yield options.count_line("sampling.max_tokens", total, "there with the prompt's tokens, over all turns")
    yield Line("sampler.engine", "vllm", tuple(name for name in ("inference",) if name in options))
    train, infer = "deployment.num_train_gpus", "deployment.num_infer_gpus"
    nodes = "deployment.num_train_nodes"
    if options.get(nodes) is not None:
        yield Line(
            "learner.world_size",
            options.count("deployment.gpus_per_node"),
            (nodes, "deployment.gpus_per_node"),
            "of each machine",
        )
        if options.count(nodes) > 1:
            yield Need(
                f"{options.count(nodes)} machines that learn: start the run with torchrun on each (docs/scaling.md)",
                (nodes,),
            )
        if "deployment.num_infer_nodes" in options:
            yield Need("sampler.urls: the addresses of the servers on other machines", ("deployment.num_infer_nodes",))
    else:
        yield options.count_line("learner.world_size", train)
        servers = max(1, options.count(infer) // options.positive("inference.vllm.tensor_parallel_size"))
        yield Line("sampler.servers", servers, (infer,))
    if f"{LORA}.rank" in options or any(name.startswith(LORA) for name in options.given):
        given = [
            name
            for name in options.given
            if name.startswith(f"{LORA}.") and name.rpartition(".")[2] in ("rank", "alpha", "target_modules")
        ]
        alpha = options.count(f"{LORA}.alpha") if f"{LORA}.alpha" in options else None
        text = list_lora(options.positive(f"{LORA}.rank"), alpha, options.get(f"{LORA}.target_modules"))
        yield Line("learner.lora", text, tuple(given))
    if any(name.startswith("trainer.model.ac") and "offload" not in name for name in options.given):
        names = tuple(
            name for name in options.given if name == "trainer.model.ac" or name.startswith("trainer.model.ac.")
        )
        yield Line("learner.gradient_checkpointing", True, names)
    for name in ("trainer.model.optim_cpu_offload", "trainer.model.full_offload"):
        if name in options and options.get(name):
            yield Line("optimizer.offload", True, (name,))
    if options.flag("trainer.enable_router_replay"):
        yield Line("learner.routing_replay", True, ("trainer.enable_router_replay",))


def answer_reports(options: Options) -> Iterator[Outcome]:
    """Checkpoints and trackers."""
    for key, name in (("every", "interval"), ("keep", "keep_last")):
        option = options.first(f"trainer.ckpt.{name}", f"ckpt.{name}")
        if options.get(option) is not None:
            yield options.count_line(f"checkpoint.{key}", option)
    services = tuple(name for name in options.given if name.startswith(("monitors.wandb", "trainer.monitors.wandb")))
    if services:
        yield Line("track", ["wandb"], services[:1])
        for name in services[1:]:
            yield Left(name, "the project is the variable WANDB_PROJECT, the run's name that of its folder")


RULES = (
    Rule(
        "orchestrator.algo.* trainer.loss.* orchestrator.train.filter_zero_advantages "
        "orchestrator.train.source.*.curriculum.*",
        answer_algorithm,
    ),
    Rule(
        "orchestrator.batch_size orchestrator.token_batch_size orchestrator.group_size *max_steps "
        "orchestrator.max_off_policy_steps",
        answer_batches,
    ),
    Rule(
        "trainer.optim.* trainer.scheduler.*",
        answer_optimizer,
    ),
    Rule(
        "orchestrator.train.source.*.taskset.* orchestrator.eval.source.*.taskset.* "
        "orchestrator.eval.source.*.num_examples orchestrator.eval.source.*.group_size "
        "orchestrator.eval.source.*.interval orchestrator.eval.interval orchestrator.eval.num_examples "
        "orchestrator.eval.group_size",
        answer_data,
    ),
    Rule(
        "model.name trainer.model.name orchestrator.model.name seq_len orchestrator.seq_len trainer.model.seq_len "
        "orchestrator.train.sampling.max_completion_tokens inference deployment.num_* deployment.gpus_per_node "
        "trainer.model.lora* trainer.model.ac trainer.model.ac.* trainer.model.optim_cpu_offload "
        "trainer.model.full_offload trainer.enable_router_replay",
        answer_machines,
    ),
    Rule(
        "*ckpt.interval *ckpt.keep_last *monitors.wandb*",
        answer_reports,
    ),
)
PRIME_RL = Library("prime-rl", DEFAULTS, RULES)


def is_prime_rl(names: Sequence[str]) -> bool:
    """Return whether a TOML file's tables are those of prime-rl."""
    known = {"orchestrator", "trainer", "inference", "optim", "renderer", "monitors", "weight_broadcast", "deployment"}
    return bool(known & {*names}) or {"batch_size", "group_size"} <= {*names}
