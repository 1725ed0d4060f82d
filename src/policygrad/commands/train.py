"""`policygrad train`: defaults < the run to resume < a TOML file < the algorithm named < flags."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, fields, make_dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import tyro

from policygrad.algorithms import ALGORITHMS
from policygrad.cluster.config import CLUSTER_OPTIONS, ClusterConfig
from policygrad.commands import STOPPED
from policygrad.commands.foreign_options import reject_foreign_options
from policygrad.commands.options import (
    TYRO_REGISTRY,
    CommandOptions,
    apply_options,
    build_option_type,
    choose_parts,
    drop_trust_flag,
    list_help_flags,
    merge_repeated_flags,
    pop_algorithm,
    reject_empty_values,
    reopen_lengths,
)
from policygrad.commands.render import describe_algorithm, get_page_width, wrap_paragraphs
from policygrad.core.algorithm import Algorithm
from policygrad.errors import ConfigError
from policygrad.learners.fsdp.torchrun import resolve_world_size, torchrun_rank
from policygrad.models.loading import TRUST_FLAG
from policygrad.training.config.paths import find_changed_options, is_own_config
from policygrad.training.config.run import Run, RunOptions, UncheckedRun, describe_idle_schedules, optional_arg
from policygrad.training.config.run_name import name_run
from policygrad.training.config.serialization import dump_config, load_algorithm, load_config
from policygrad.training.config.trust import CodePermissions, code_in_argv, overridden_in_argv
from policygrad.training.run_folder import check_resumable

HELP = (
    "Train a causal language model by policy gradient.",
    "ALGORITHM is a name that `policygrad algorithms` lists (`policygrad show NAME` explains it), or one of your own: "
    "mine.py:NAME, mine:NAME.",
    "Every field of the algorithm's parts is an option, listed last. --algorithm.FIELD Part[,Part] puts other parts in "
    "their place: --algorithm.gate ClippedImportance, --algorithm.advantage GroupMean, --algorithm.terms none. "
    "--algorithm.old-policy sampler takes what the sampler says for π_old, also where it is behind the weights.",
)
_FLAT = tyro.conf.arg(name="")
_NAMES = {"skip_bad_rows": "task.skip-bad-rows", "decontaminate": "task.decontaminate"}
"""Flags that are called otherwise than their option."""
_CONFIG = (tyro.conf.FlagCreatePairsOff, tyro.conf.AvoidSubcommands, tyro.conf.SuppressFixed)


@dataclass(frozen=True)
class TrainOptions(CommandOptions):
    """Options of `policygrad train` that are not part of the run itself."""

    algorithm: Annotated[tyro.conf.Positional[str | None], optional_arg("[ALGORITHM]", "dapo")] = None
    """The method: a name, or one of your own, module:NAME or path/to/file.py:NAME."""
    allow_code: Annotated[tuple[str, ...], optional_arg("MODULE|FILE", "what is in the current folder")] = ()
    """Code that the file of --resume or --config may name and have imported; what the command names itself needs no leave."""
    teacher: Annotated[str | None, optional_arg("ID|DIR", "none")] = None
    """A model to learn from (distill needs one), short for --algorithm.reference.model: a folder, a hub id, a run's folder."""
    cluster: Annotated[str | None, optional_arg("ADDRESS", "none")] = None
    """Let actors of a Ray cluster do the work: ray://HOST:PORT, HOST:PORT, auto or local (docs/ray.md)."""
    cluster_samplers: Annotated[
        int | None,
        tyro.conf.arg(name="cluster.samplers", metavar="INT", help_behavior_hint="(default: 1; beside an engine 0)"),
    ] = ClusterConfig.samplers
    """Actors that draw completions; 0 = those that learn do."""
    cluster_rewards: Annotated[int, tyro.conf.arg(name="cluster.rewards")] = ClusterConfig.rewards
    """Actors that judge, each with --rewards.num-workers processes; 0 = rank 0's machine does."""
    cluster_environments: Annotated[int, tyro.conf.arg(name="cluster.environments")] = ClusterConfig.environments
    """Actors that episodes of --environment take place in; 0 = rank 0's process."""
    cluster_cpus: Annotated[float, tyro.conf.arg(name="cluster.cpus")] = ClusterConfig.cpus
    """CPUs that Ray sets aside for each actor."""
    cluster_restarts: Annotated[int, tyro.conf.arg(name="cluster.restarts")] = ClusterConfig.restarts
    """Times that Ray starts an actor again which has died, before the run ends."""
    cluster_timeout: Annotated[float, tyro.conf.arg(name="cluster.timeout")] = ClusterConfig.timeout
    """Seconds that a cluster may take to have room for all actors, or an actor to come back."""

    def build_cluster_config(self) -> ClusterConfig | None:
        """The cluster's options. Raises ConfigError for some without --cluster."""
        given = {name: getattr(self, f"cluster_{name}") for name in CLUSTER_OPTIONS}
        if self.cluster is not None:
            return ClusterConfig(self.cluster, **given)
        if odd := [name for name, value in given.items() if value != getattr(ClusterConfig, name)]:
            raise ConfigError(
                f"--cluster.{odd[0]} is of a Ray cluster, and none is named: --cluster ADDRESS, or leave it away"
            )
        return None


def train(args: list[str]) -> int:
    """`policygrad train [ALGORITHM] [options]`."""
    run, command = parse_run(args)
    cluster = command.build_cluster_config()
    if (found := torchrun_rank()) is not None:
        if cluster is not None:
            raise ConfigError(
                "torchrun has started several processes, and --cluster has Ray start them: let one process run "
                "`policygrad train --cluster …`"
            )
        run = replace(run, learner=replace(run.learner, world_size=resolve_world_size(run.learner.world_size)))
        if found[0] > 0:
            return 0 if command.dry_run else _follow()
    if command.dry_run:
        print(format_configuration(run))
        print(format_memory_note(run))
        return 0
    if cluster is not None:
        from policygrad.cluster.launch import train_on_cluster as on_cluster

        done = on_cluster(
            run,
            cluster,
            resume=command.resume,
            stop_after=command.stop_after,
            stop_before=command.time_limit,
            overwrite=command.overwrite,
        )
        return STOPPED if done.interrupted else 0
    from policygrad.trackers import default_tracker
    from policygrad.training.run_folder import resolve_resume_folder
    from policygrad.training.trainer import train as start

    display = default_tracker(plain=command.plain or None)
    result = start(
        run,
        resume=resolve_resume_folder(command.resume, "train", run),
        stop_after=command.stop_after,
        time_limit=command.time_limit,
        overwrite=command.overwrite,
        display=display,
    )
    return STOPPED if result.interrupted else 0


def _follow() -> int:
    """One of torchrun's processes above rank 0, which does what that one says."""
    from policygrad.learners.fsdp.processes import WorkerGroup
    from policygrad.learners.fsdp.worker import serve_controller

    return serve_controller(WorkerGroup.from_torchrun())


def parse_run(args: list[str]) -> tuple[Run, TrainOptions]:
    """What `policygrad train ARGS` would do.

    Raises:
        ConfigError: what cannot be.
    """
    reject_foreign_options(
        args, lambda: list_train_flags(pop_algorithm([w for w in args if not re.match(r"[\w.+]+=", w)])[0] or "dapo")
    )
    reject_empty_values(args, "--reward", "--allow-code")
    name, args = pop_algorithm(args)
    base = _base(name, args)
    chosen, rest = choose_parts(reopen_lengths(base.algorithm, base.sampling.max_tokens), drop_trust_flag(base, args))
    run, command = _parse(replace(base, algorithm=chosen), rest)
    run = rename_custom_algorithm(run, base.algorithm)
    if command.resume is not None:
        _check_resumable(base, run, command.resume)
        run = run if "output" in find_changed_options(base, run) else replace(run, output=command.resume)
    return run, command


def rename_custom_algorithm(run: Run, base: Algorithm) -> Run:
    """With the name of what an algorithm of one's own was changed into: no row of the matrix tells later that it was changed."""
    if base.name in ALGORITHMS:
        return run
    name = name_run(run.algorithm, run.sampling.max_tokens, base).name
    return replace(run, algorithm=replace(run.algorithm, name=name))


def format_configuration(run: Run) -> str:
    """What would be done, as TOML that --config reads; the equation stands above it as comments."""
    said = [run.minibatch_warning, ""] if run.minibatch_warning else []
    run = run.resolve()
    described = describe_algorithm(run.algorithm, get_page_width() - 2, run.sampling.max_tokens)
    lines = ["".join(text for text, _ in line) for line in described]
    for text in describe_idle_schedules(run):
        lines += ["", *textwrap.wrap(f"Note: {text}", get_page_width() - 2)]
    return "\n".join([*(f"# {line}".rstrip() for line in [*said, *lines]), "", dump_config(run).rstrip()])


def format_memory_note(run: Run) -> str:
    """About how much it would take, as a comment; or why that cannot be said."""
    from policygrad.training.cost_estimate import estimate_memory

    try:
        said = str(estimate_memory(run.resolve()))
    except Exception as error:  # a model that cannot be read, in whatever way; the run itself will say so
        said = f"memory: not known, {error}"
    return "\n".join(f"# {line}" for line in textwrap.wrap(said, get_page_width() - 2))


def list_train_flags(name: str) -> list[str]:
    """Every flag of `policygrad train ALGORITHM`, for tab completion."""
    return list_help_flags(lambda: _parse(UncheckedRun(algorithm=load_algorithm(name)), ["--help"]))


def _shape(base: UncheckedRun) -> Any:
    """All options as one object that holds their defaults."""
    parts = build_option_type(base.algorithm)
    columns = [("command", Annotated[TrainOptions, _FLAT]), ("run", Annotated[RunOptions, _FLAT]), ("algorithm", parts)]
    shape = make_dataclass("Train", columns, frozen=True)
    options = RunOptions(**{f.name: getattr(base, f.name) for f in fields(RunOptions)})
    return shape(TrainOptions(), options, parts())


def _parse(base: UncheckedRun, args: list[str]) -> tuple[Run, TrainOptions]:
    shape = _shape(base)
    text = wrap_paragraphs(*HELP)
    parsed = tyro.cli(
        type(shape),
        args=args,
        prog="policygrad train",
        description=text,
        default=shape,
        config=_CONFIG,
        registry=TYRO_REGISTRY,
    )
    if parsed.command.algorithm is not None:
        load_algorithm(parsed.command.algorithm)  # unknown: it says which is near
        raise ConfigError(f"{parsed.command.algorithm!r} is one algorithm too many: give one")
    options = {f.name: getattr(parsed.run, f.name) for f in fields(RunOptions)}
    chosen = set_teacher(apply_options(base.algorithm, parsed.algorithm), parsed.command.teacher)
    return Run(**options, algorithm=chosen), parsed.command


def set_teacher(algorithm: Algorithm, name: str | None) -> Algorithm:
    """The algorithm with this model for its reference."""
    if name is None:
        return algorithm
    if algorithm.reference is None:
        raise ConfigError(f"--teacher {name} is a reference, and algorithm.reference is none: leave one of them away")
    return replace(algorithm, reference=replace(algorithm.reference, model=name))


def _flag(args: Sequence[str], name: str) -> str | None:
    """The value of a flag that has to be known before the others can be read."""
    found = None
    for i, word in enumerate(args):
        if word == name and i + 1 < len(args):
            found = args[i + 1]
        elif word.startswith(f"{name}="):
            found = word.partition("=")[2]
    return found


def _base(name: str | None, args: Sequence[str]) -> UncheckedRun:
    """Defaults < the run to resume < the TOML file < the algorithm named."""
    run = UncheckedRun()
    resumed, config = _flag(args, "--resume"), _flag(args, "--config")
    if resumed is not None:
        run = load_config(check_resumable(Path(resumed), "train") / "run.toml", run, _allowed(args))
    if config is not None:
        run = load_config(config, run, _allowed(args))
        if is_own_config(run, Path(config)):
            run = replace(run, output=None)  # a run's own run.toml: do it again, in a folder of its own
    return run if name is None else replace(run, algorithm=load_algorithm(name))


def _allowed(args: Sequence[str]) -> CodePermissions:
    """What the flags let a file have imported."""
    words = merge_repeated_flags(list(args), "--allow-code")
    names = words[words.index("--allow-code") + 1 :] if "--allow-code" in words else []
    return CodePermissions((*names, *code_in_argv(args)), TRUST_FLAG in args, overridden_in_argv(args))


def _check_resumable(before: UncheckedRun, run: UncheckedRun, folder: str) -> None:
    """Refuses flags that a resumed run would ignore, as its weights are the checkpoint's, and those that make it another run.

    Raises:
        ConfigError: with the way to start a new run from the model.
    """
    others = find_changed_options(before, run)
    if "model" in others:
        raise ConfigError(
            f"--resume {folder} goes on with the run's own weights, so --model would mean nothing: leave it out, or train anew "
            f"with --config {folder}/run.toml --model {folder}/model --output DIR"
        )
    for name in ("tokenizer", "task", "row_map", "skip_bad_rows", "decontaminate", "eval_data", "reward", "environment"):
        if name in others:
            flag = _NAMES.get(name, name.replace("_", "-"))
            raise ConfigError(
                f"--resume {folder} with another --{flag} would compare before and after on different things: leave it out, or "
                f"train anew with --config {folder}/run.toml --model {folder}/model --output DIR"
            )
