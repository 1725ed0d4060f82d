"""`policygrad train`. Precedence of options: defaults < resumed run < TOML file < named algorithm < flags."""

from __future__ import annotations

import functools
import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, fields, make_dataclass, replace
from difflib import get_close_matches
from typing import Annotated, Any

import tyro

from policygrad.algorithms import ALGORITHMS
from policygrad.cluster.config import CLUSTER_OPTIONS, ClusterConfig
from policygrad.commands.foreign_options import reject_foreign_options
from policygrad.commands.help import list_flags, load_page
from policygrad.commands.json_output import prints
from policygrad.commands.options import (
    RUN_EVENTS,
    TYRO_REGISTRY,
    CommandOptions,
    apply_options,
    build_option_type,
    choose_parts,
    drop_trust_flag,
    list_switches,
    load_base,
    pop_algorithm,
    reject_empty_values,
    reopen_lengths,
    report_end,
    resume_in_folder,
    run_training,
)
from policygrad.commands.parsing import list_help_flags, parse_arguments
from policygrad.commands.styled import get_page_width, wrap_rows
from policygrad.errors import ConfigError
from policygrad.learners.fsdp.torchrun import torchrun_rank
from policygrad.models.loading import TRUST_FLAG
from policygrad.training.config.optional_arg import optional_arg
from policygrad.training.config.run import Run, RunOptions, UncheckedRun, find_idle_settings
from policygrad.training.config.run_name import name_run
from policygrad.training.config.serialization import dump_config, load_algorithm
from policygrad.training.config.trust import CodePermissions, code_in_argv, overridden_in_argv
from policygrad.utils.argv import option_values

HELP = (
    "Train a causal language model by policy gradient.",
    "ALGORITHM is a name that `policygrad algorithms` lists (`policygrad show NAME` explains it), or one of your own: "
    "mine.py:NAME, mine:NAME.",
    "Every field of the algorithm's parts is an option (--help algorithm). --algorithm.FIELD Part[,Part] replaces parts: "
    "--algorithm.gate ClippedImportance, --algorithm.gate 'Clip(low=0.1)', --algorithm.advantage GroupMean, --algorithm.terms "
    "none. --algorithm.old-policy sampler uses the sampler's log-probabilities as π_old, even if its weights are older.",
)
_FLAT = tyro.conf.arg(name="")
_NAMES = {
    "skip_bad_rows": "task.skip-bad-rows",
    "fetch_images": "task.fetch",
    "decontaminate": "task.decontaminate",
    "template_options": "tokenizer.template-options",
}
"""Flags with a name other than their field's."""
_MEASURED = (
    "tokenizer",
    "template_options",
    "task",
    "row_map",
    "skip_bad_rows",
    "decontaminate",
    "eval_data",
    "reward",
    "environment",
)
# Options that a resumed run cannot change, and why.
_FIXED = {
    "model": "continues with the run's own weights, so --model has no effect",
    **{
        name: f"with another --{_NAMES.get(name, name.replace('_', '-'))} would make evaluations before and after incomparable"
        for name in _MEASURED
    },
}


@dataclass(frozen=True)
class TrainOptions(CommandOptions):
    """Options of `policygrad train` that are not part of the run itself."""

    algorithm: Annotated[tyro.conf.Positional[str | None], optional_arg("[ALGORITHM]", "dapo")] = None
    """Algorithm: a name, or your own as module:NAME or path/to/file.py:NAME."""
    allow_code: Annotated[tuple[str, ...], optional_arg("MODULE|FILE", "what is in the current folder")] = ()
    """Code that the file of --resume or --config may import; code named on the command line needs no permission."""
    teacher: Annotated[tuple[str, ...], optional_arg("ID|DIR|URL", "none")] = ()
    """Model to learn from (required by distill): a folder, a hub id, a run's folder, or a server of vLLM or SGLang.
    Several are NAME=MODEL each, and the data's column `teacher` names one. Short for --algorithm.reference.model or .teachers."""
    cluster: Annotated[str | None, optional_arg("ADDRESS", "none")] = None
    """Run on actors of a Ray cluster: ray://HOST:PORT, HOST:PORT, auto or local (docs/scaling.md)."""
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


@prints(*RUN_EVENTS)
def train(args: list[str]) -> int:
    """Run `policygrad train [ALGORITHM] [options]`."""
    run, command = parse_run(args)
    cluster = command.build_cluster_config()
    if cluster is not None and torchrun_rank() is not None:
        raise ConfigError(
            "--cluster lets Ray start the processes, but torchrun has already started several. Run `policygrad train "
            "--cluster …` as one process."
        )
    if cluster is None or command.dry_run:
        return run_training("policygrad.training.trainer:train", run, "train", command, format_configuration)
    from policygrad.cluster.launch import train_on_cluster

    done = train_on_cluster(
        run,
        cluster,
        resume=command.resume,
        stop_after=command.stop_after,
        time_limit=command.time_limit,
        overwrite=command.overwrite,
    )
    return report_end(done, "train", is_json=command.json)


def parse_run(args: list[str]) -> tuple[Run, TrainOptions]:
    """Parse the arguments of `policygrad train`."""
    reject_foreign_options(
        args,
        lambda: list_train_flags(
            pop_algorithm([w for w in args if not re.match(r"[\w.+]+=", w)], get_switches())[0] or "dapo"
        ),
    )
    reject_empty_values(args, "--reward", "--allow-code")
    name, args = pop_algorithm(args, get_switches())
    allowed = CodePermissions(
        (*option_values(args, "--allow-code"), *code_in_argv(args)), TRUST_FLAG in args, overridden_in_argv(args)
    )
    base = load_base(UncheckedRun(), "train", _flag(args, "--resume"), _flag(args, "--config"), allowed)
    base = base if name is None else replace(base, algorithm=load_algorithm(name))
    chosen, rest = choose_parts(reopen_lengths(base.algorithm, base.sampling.max_tokens), drop_trust_flag(base, args))
    run, command = _parse(replace(base, algorithm=chosen), rest, args)
    # a changed algorithm of the user's says so by its name; others when displayed
    if base.algorithm.name not in ALGORITHMS:
        name = name_run(run.algorithm, run.sampling.max_tokens, base.algorithm).name
        run = replace(run, algorithm=replace(run.algorithm, name=name))
    if (folder := command.resume) is not None:
        run = resume_in_folder(base, run, folder, _FIXED, f"--config {folder}/run.toml --model {folder}/model")
    return run, command


def format_configuration(run: Run) -> str:
    """Return the configuration as TOML for --config; comments above it show the equation, and below it the memory needed."""
    from policygrad.commands.render import describe_algorithm
    from policygrad.training.cost_estimate import estimate_memory

    warning = [run.minibatch_warning, ""] if run.minibatch_warning else []
    run, width = run.resolve(), get_page_width() - 2
    description = describe_algorithm(run.algorithm, run.sampling.max_tokens)
    lines = ["".join(text for text, _ in line) for line in wrap_rows(description, width)]
    for text in find_idle_settings(run):
        lines += ["", *textwrap.wrap(f"Note: {text}", width)]
    try:
        memory = str(estimate_memory(run))
    except Exception as error:  # any failure to read the model, which the run itself would report
        memory = f"memory: unknown, {error}"
    head = [f"# {line}".rstrip() for line in [*warning, *lines]]
    return "\n".join([*head, "", dump_config(run).rstrip(), *(f"# {line}" for line in textwrap.wrap(memory, width))])


def list_train_flags(name: str) -> list[str]:
    """Return every flag of `policygrad train ALGORITHM`."""
    if (page := load_page("train", name)) is not None:
        return list_flags(page)
    return list_help_flags(lambda: _parse(UncheckedRun(algorithm=load_algorithm(name)), ["--help"]))


@functools.cache
def get_switches() -> frozenset[str]:
    """Return the flags of `policygrad train` that take no value."""
    return list_switches(TrainOptions, RunOptions)


def _parse(base: UncheckedRun, args: list[str], given: Sequence[str] = ()) -> tuple[Run, TrainOptions]:
    """Parse the options. given: the arguments before some were taken out, for messages."""
    parts = build_option_type(base.algorithm)
    columns = [("command", Annotated[TrainOptions, _FLAT]), ("run", Annotated[RunOptions, _FLAT]), ("algorithm", parts)]
    shape: Any = make_dataclass("Train", columns, frozen=True)
    defaults = RunOptions(**{f.name: getattr(base, f.name) for f in fields(RunOptions)})
    default = shape(TrainOptions(), defaults, parts())
    parsed = parse_arguments(shape, args, "train", *HELP, default=default, registry=TYRO_REGISTRY)
    if parsed.command.algorithm is not None:
        reject_second_value(given, parsed.command.algorithm)
        load_algorithm(parsed.command.algorithm)  # raises for an unknown name, with the nearest
        raise ConfigError(f"{parsed.command.algorithm!r} is one algorithm too many; give one")
    options = {f.name: getattr(parsed.run, f.name) for f in fields(RunOptions)}
    chosen, teachers = apply_options(base.algorithm, parsed.algorithm), parsed.command.teacher
    if teachers:
        if chosen.reference is None:
            raise ConfigError(
                f"--teacher {' '.join(teachers)} sets a reference, but algorithm.reference is none: omit one"
            )
        is_named = len(teachers) > 1 or re.match(r"[\w-]+=", teachers[0])
        change = {"model": None, "teachers": teachers} if is_named else {"model": teachers[0], "teachers": ()}
        chosen = replace(chosen, reference=replace(chosen.reference, **change))
    return Run(**options, algorithm=chosen), parsed.command


def reject_second_value(args: Sequence[str], word: str) -> None:
    """Raise ConfigError if a word that belongs to no option stands behind the value of one, which takes one value alone."""
    i = args.index(word) if word in args else 0
    start = next((k for k in reversed(range(i)) if args[k].startswith("--")), None)
    if start is None:
        return
    flag, equals, first = args[start].partition("=")
    values = [*([first] if equals else []), *args[start + 1 : i + 1]]
    if len(values) < 2 or get_close_matches(word, ALGORITHMS):  # behind a switch; an algorithm's name in another place
        return
    several = "give each option its own"
    if flag == "--task":
        several = f"files are mixed as one word, {flag} {'+'.join(values)}, or read together as a folder or a pattern in quotes"
    elif flag.startswith("--algorithm."):
        several = f"parts are joined by commas, {flag} {','.join(values)}"
    raise ConfigError(f"{flag} takes one value, and {word!r} follows {first or values[0]!r}: {several}")


def _flag(args: Sequence[str], name: str) -> str | None:
    """Return the value of a flag that is needed before the others can be parsed."""
    value = None
    for i, word in enumerate(args):
        if word == name and i + 1 < len(args):
            value = args[i + 1]
        elif word.startswith(f"{name}="):
            value = word.partition("=")[2]
    return value
