"""`policygrad sft` and `policygrad reward-model`. Precedence of options: defaults < resumed run < TOML file < flags."""

from __future__ import annotations

from dataclasses import fields, make_dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, TypeVar

import tyro

from policygrad.commands import STOPPED
from policygrad.commands.foreign_options import reject_foreign_options
from policygrad.commands.options import CommandOptions, drop_trust_flag, list_help_flags, reject_cluster_flags
from policygrad.commands.render import wrap_paragraphs
from policygrad.errors import ConfigError
from policygrad.learners.fsdp.torchrun import resolve_world_size, torchrun_rank
from policygrad.models.loading import TRUST_FLAG
from policygrad.training.config.paths import find_changed_options, is_own_config
from policygrad.training.config.serialization import dump_config, load_config
from policygrad.training.config.supervised import RewardModelConfig, SFTConfig, SupervisedConfig
from policygrad.training.config.trust import CodePermissions, code_in_argv
from policygrad.training.run_folder import check_resumable

AnyConfig = TypeVar("AnyConfig", bound=SupervisedConfig)
_FLAT = tyro.conf.arg(name="")
_CONFIG = (tyro.conf.FlagCreatePairsOff, tyro.conf.AvoidSubcommands)
_FIXED = ("data", "row_map", "skip_bad_rows", "eval_data", "model", "epochs", "batch_size", "seed")
"""Options that a resumed run cannot change: rows, their order, weights."""


def parse_supervised(
    kind: type[AnyConfig], args: list[str], help_texts: tuple[str, ...]
) -> tuple[AnyConfig, CommandOptions]:
    """Return the resolved configuration and the command's own options.

    Raises:
        ConfigError: a file cannot be read, a key is unknown, or a flag would have no effect on a resumed run.
    """
    reject_cluster_flags(
        args, kind.kind, "trains in several processes with --learner.world-size N or torchrun (docs/many-processes.md)"
    )
    reject_foreign_options(args, lambda: list_supervised_flags(kind), supervised=True)
    _, command = _parse(kind(), args, help_texts)  # to find the configuration files
    base, allowed = kind(), CodePermissions(tuple(code_in_argv(args)), TRUST_FLAG in args)
    if command.resume is not None:
        base = load_config(check_resumable(Path(command.resume), kind.kind) / f"{kind.kind}.toml", base, allowed)
    if command.config is not None:
        base = load_config(command.config, base, allowed)
        if is_own_config(base, Path(command.config)):
            base = replace(base, output=None)  # a finished run's own file starts a new run in a new folder
    config, command = _parse(base, drop_trust_flag(base, args), help_texts)
    if command.resume is not None:
        _check_resumable(base, config, command.resume)
        config = config if "output" in find_changed_options(base, config) else replace(config, output=command.resume)
    return config.resolve(), command


def run_supervised(kind: type[AnyConfig], args: list[str], help_texts: tuple[str, ...], trainer: str) -> int:
    """Parse the options and call `trainer` (module:function), which is imported only then."""
    config, options = parse_supervised(kind, args, help_texts)
    if (rank_and_size := torchrun_rank()) is not None:
        config = replace(
            config, learner=replace(config.learner, world_size=resolve_world_size(config.learner.world_size))
        )
        if rank_and_size[0] > 0:
            return 0 if options.dry_run else _follow()
    if options.dry_run:
        print(dump_config(config).rstrip())
        return 0
    from policygrad.trackers import default_tracker
    from policygrad.training.run_folder import resolve_resume_folder

    module, _, function = trainer.partition(":")
    display = default_tracker(plain=options.plain or None)
    result = getattr(import_module(module), function)(
        config,
        resume=resolve_resume_folder(options.resume, kind.kind, config),
        stop_after=options.stop_after,
        time_limit=options.time_limit,
        overwrite=options.overwrite,
        display=display,
    )
    return STOPPED if result.interrupted else 0


def _follow() -> int:
    """Serve as a torchrun process above rank 0, which executes the commands of rank 0."""
    from policygrad.learners.fsdp.worker import join_torchrun

    return join_torchrun()


def list_supervised_flags(kind: type[SupervisedConfig]) -> list[str]:
    """Return every flag of the command."""
    return list_help_flags(lambda: _parse(kind(), ["--help"], ()))


def _parse(base: AnyConfig, args: list[str], help_texts: tuple[str, ...]) -> tuple[AnyConfig, CommandOptions]:
    columns = [("command", Annotated[CommandOptions, _FLAT]), ("run", Annotated[type(base), _FLAT])]
    shape: Any = make_dataclass("Command", columns, frozen=True)
    parsed = tyro.cli(
        shape,
        args=args,
        prog=f"policygrad {base.kind}",
        description=wrap_paragraphs(*help_texts),
        default=shape(CommandOptions(), base),
        config=_CONFIG,
    )
    return parsed.run, parsed.command


def _check_resumable(before: SupervisedConfig, config: SupervisedConfig, folder: str) -> None:
    changed = find_changed_options(before, config)
    for f in fields(before):
        if f.name in _FIXED and f.name in changed:
            raise ConfigError(
                f"--resume {folder} continues with the run's own weights and rows, so --{f.name.replace('_', '-')} cannot change. "
                f"Omit it, or start a new run with "
                f"--config {folder}/{config.kind}.toml --output DIR"
            )


SFT_HELP = (
    "Fine-tune a causal language model on demonstrations: a .jsonl file whose lines have `prompt` and `completion`, or "
    "`messages` of a chat, whose assistant turns are learned.",
)


def sft(args: list[str]) -> int:
    """Run `policygrad sft --data FILE [options]`."""
    return run_supervised(SFTConfig, args, SFT_HELP, "policygrad.training.sft:train_sft")


REWARD_MODEL_HELP = (
    "Train a reward model on preferences: a .jsonl file whose lines have `prompt`, `chosen` and `rejected`.",
    "`policygrad train --reward model:RUN` then trains a policy against it.",
)


def reward_model(args: list[str]) -> int:
    """Run `policygrad reward-model --data FILE [options]`."""
    return run_supervised(
        RewardModelConfig, args, REWARD_MODEL_HELP, "policygrad.training.reward_model:train_reward_model"
    )
