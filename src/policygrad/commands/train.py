"""`policygrad train`. Precedence of options: defaults < resumed run < TOML file < named algorithm < flags."""

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
    "Every field of the algorithm's parts is an option, listed last. --algorithm.FIELD Part[,Part] replaces parts: "
    "--algorithm.gate ClippedImportance, --algorithm.advantage GroupMean, --algorithm.terms none. "
    "--algorithm.old-policy sampler uses the sampler's log-probabilities as π_old, even if its weights are older.",
)
_FLAT = tyro.conf.arg(name="")
_NAMES = {"skip_bad_rows": "task.skip-bad-rows", "decontaminate": "task.decontaminate"}
"""Flags with a name other than their field's."""
_CONFIG = (tyro.conf.FlagCreatePairsOff, tyro.conf.AvoidSubcommands, tyro.conf.SuppressFixed)


@dataclass(frozen=True)
class TrainOptions(CommandOptions):
    """Options of `policygrad train` that are not part of the run itself."""

    algorithm: Annotated[tyro.conf.Positional[str | None], optional_arg("[ALGORITHM]", "dapo")] = None
    """Algorithm: a name, or your own as module:NAME or path/to/file.py:NAME."""
    allow_code: Annotated[tuple[str, ...], optional_arg("MODULE|FILE", "what is in the current folder")] = ()
    """Code that the file of --resume or --config may import; code named on the command line needs no permission."""
    teacher: Annotated[str | None, optional_arg("ID|DIR", "none")] = None
    """Model to learn from (required by distill): a folder, a hub id or a run's folder. Short for --algorithm.reference.model."""
    cluster: Annotated[str | None, optional_arg("ADDRESS", "none")] = None
    """Run on actors of a Ray cluster: ray://HOST:PORT, HOST:PORT, auto or local (docs/ray.md)."""
    cluster_samplers: Annotated[
        int | None,
        tyro.conf.arg(name="cluster.samplers", metavar="INT", help_behavior_hint="(default: 1; with an engine 0)"),
    ] = ClusterConfig.samplers
    """Actors that sample; 0 = the learners sample."""
    cluster_rewards: Annotated[int, tyro.conf.arg(name="cluster.rewards")] = ClusterConfig.rewards
    """Actors that compute rewards, each with --rewards.num-workers processes; 0 = rank 0's machine computes them."""
    cluster_environments: Annotated[int, tyro.conf.arg(name="cluster.environments")] = ClusterConfig.environments
    """Actors that run episodes of --environment; 0 = rank 0's process runs them."""
    cluster_cpus: Annotated[float, tyro.conf.arg(name="cluster.cpus")] = ClusterConfig.cpus
    """CPUs that Ray reserves for each actor."""
    cluster_restarts: Annotated[int, tyro.conf.arg(name="cluster.restarts")] = ClusterConfig.restarts
    """Restarts of each failed actor before the run fails."""
    cluster_timeout: Annotated[float, tyro.conf.arg(name="cluster.timeout")] = ClusterConfig.timeout
    """Seconds to wait until the cluster has room for all actors, or until a failed actor is back."""

    def build_cluster_config(self) -> ClusterConfig | None:
        """Return the cluster options; None without --cluster. Raises ConfigError if one is given without --cluster."""
        given = {name: getattr(self, f"cluster_{name}") for name in CLUSTER_OPTIONS}
        if self.cluster is not None:
            return ClusterConfig(self.cluster, **given)
        if extra := [name for name, value in given.items() if value != getattr(ClusterConfig, name)]:
            raise ConfigError(f"--cluster.{extra[0]} needs a Ray cluster: add --cluster ADDRESS, or omit it")
        return None


def train(args: list[str]) -> int:
    """Run `policygrad train [ALGORITHM] [options]`."""
    run, command = parse_run(args)
    cluster = command.build_cluster_config()
    if (rank_and_size := torchrun_rank()) is not None:
        if cluster is not None:
            raise ConfigError(
                "--cluster lets Ray start the processes, but torchrun has already started several. Run `policygrad train "
                "--cluster …` as one process."
            )
        run = replace(run, learner=replace(run.learner, world_size=resolve_world_size(run.learner.world_size)))
        if rank_and_size[0] > 0:
            return 0 if command.dry_run else _follow()
    if command.dry_run:
        print(format_configuration(run))
        print(format_memory_note(run))
        return 0
    if cluster is not None:
        from policygrad.cluster.launch import train_on_cluster

        done = train_on_cluster(
            run,
            cluster,
            resume=command.resume,
            stop_after=command.stop_after,
            time_limit=command.time_limit,
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
    """Serve as a torchrun process above rank 0, which executes the commands of rank 0."""
    from policygrad.learners.fsdp.processes import WorkerGroup
    from policygrad.learners.fsdp.worker import serve_controller

    return serve_controller(WorkerGroup.from_torchrun())


def parse_run(args: list[str]) -> tuple[Run, TrainOptions]:
    """Parse the arguments of `policygrad train`."""
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
    """Give a changed user-defined algorithm a name that says so; for named algorithms the comparison is made when displaying."""
    if base.name in ALGORITHMS:
        return run
    name = name_run(run.algorithm, run.sampling.max_tokens, base).name
    return replace(run, algorithm=replace(run.algorithm, name=name))


def format_configuration(run: Run) -> str:
    """Return the configuration as TOML for --config, with the equation in comments above it."""
    warning = [run.minibatch_warning, ""] if run.minibatch_warning else []
    run = run.resolve()
    description = describe_algorithm(run.algorithm, get_page_width() - 2, run.sampling.max_tokens)
    lines = ["".join(text for text, _ in line) for line in description]
    for text in describe_idle_schedules(run):
        lines += ["", *textwrap.wrap(f"Note: {text}", get_page_width() - 2)]
    return "\n".join([*(f"# {line}".rstrip() for line in [*warning, *lines]), "", dump_config(run).rstrip()])


def format_memory_note(run: Run) -> str:
    """Return the estimated memory as a comment, or the reason why there is no estimate."""
    from policygrad.training.cost_estimate import estimate_memory

    try:
        note = str(estimate_memory(run.resolve()))
    except Exception as error:  # any failure to read the model, which the run itself would report
        note = f"memory: unknown, {error}"
    return "\n".join(f"# {line}" for line in textwrap.wrap(note, get_page_width() - 2))


def list_train_flags(name: str) -> list[str]:
    """Return every flag of `policygrad train ALGORITHM`."""
    return list_help_flags(lambda: _parse(UncheckedRun(algorithm=load_algorithm(name)), ["--help"]))


def _parse(base: UncheckedRun, args: list[str]) -> tuple[Run, TrainOptions]:
    parts = build_option_type(base.algorithm)
    columns = [("command", Annotated[TrainOptions, _FLAT]), ("run", Annotated[RunOptions, _FLAT]), ("algorithm", parts)]
    shape: Any = make_dataclass("Train", columns, frozen=True)
    defaults = RunOptions(**{f.name: getattr(base, f.name) for f in fields(RunOptions)})
    parsed = tyro.cli(
        shape,
        args=args,
        prog="policygrad train",
        description=wrap_paragraphs(*HELP),
        default=shape(TrainOptions(), defaults, parts()),
        config=_CONFIG,
        registry=TYRO_REGISTRY,
    )
    if parsed.command.algorithm is not None:
        load_algorithm(parsed.command.algorithm)  # raises for an unknown name, with the nearest
        raise ConfigError(f"{parsed.command.algorithm!r} is one algorithm too many; give one")
    options = {f.name: getattr(parsed.run, f.name) for f in fields(RunOptions)}
    chosen = set_teacher(apply_options(base.algorithm, parsed.algorithm), parsed.command.teacher)
    return Run(**options, algorithm=chosen), parsed.command


def set_teacher(algorithm: Algorithm, name: str | None) -> Algorithm:
    """Return the algorithm with this model as its reference."""
    if name is None:
        return algorithm
    if algorithm.reference is None:
        raise ConfigError(f"--teacher {name} sets a reference, but algorithm.reference is none; omit one of them")
    return replace(algorithm, reference=replace(algorithm.reference, model=name))


def _flag(args: Sequence[str], name: str) -> str | None:
    """Return the value of a flag that is needed before the others can be parsed."""
    value = None
    for i, word in enumerate(args):
        if word == name and i + 1 < len(args):
            value = args[i + 1]
        elif word.startswith(f"{name}="):
            value = word.partition("=")[2]
    return value


def _base(name: str | None, args: Sequence[str]) -> UncheckedRun:
    """Return the configuration before flags: defaults < resumed run < TOML file < named algorithm."""
    run = UncheckedRun()
    resumed, config = _flag(args, "--resume"), _flag(args, "--config")
    if resumed is not None:
        run = load_config(check_resumable(Path(resumed), "train") / "run.toml", run, _allowed(args))
    if config is not None:
        run = load_config(config, run, _allowed(args))
        if is_own_config(run, Path(config)):
            run = replace(run, output=None)  # a finished run's run.toml starts a new run in a new folder
    return run if name is None else replace(run, algorithm=load_algorithm(name))


def _allowed(args: Sequence[str]) -> CodePermissions:
    """Return the permissions that the flags give to a configuration file."""
    merged = merge_repeated_flags(list(args), "--allow-code")
    names = merged[merged.index("--allow-code") + 1 :] if "--allow-code" in merged else []
    return CodePermissions((*names, *code_in_argv(args)), TRUST_FLAG in args, overridden_in_argv(args))


def _check_resumable(before: UncheckedRun, run: UncheckedRun, folder: str) -> None:
    """Raise ConfigError for options that a resumed run would ignore, or that would make its metrics incomparable."""
    changed = find_changed_options(before, run)
    if "model" in changed:
        raise ConfigError(
            f"--resume {folder} continues with the run's own weights, so --model has no effect. Omit it, or start a new run "
            f"with  --config {folder}/run.toml --model {folder}/model --output DIR"
        )
    for name in (
        "tokenizer",
        "task",
        "row_map",
        "skip_bad_rows",
        "decontaminate",
        "eval_data",
        "reward",
        "environment",
    ):
        if name in changed:
            flag = _NAMES.get(name, name.replace("_", "-"))
            raise ConfigError(
                f"--resume {folder} with another --{flag} would make evaluations before and after incomparable. Omit it, or start "
                f"a new run with --config {folder}/run.toml --model {folder}/model --output DIR"
            )
