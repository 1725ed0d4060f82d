"""`policygrad sft` and `policygrad reward-model`. Precedence of options: defaults < resumed run < TOML file < flags."""

from __future__ import annotations

from dataclasses import make_dataclass
from typing import Annotated, Any, TypeVar

import tyro

from policygrad.commands.foreign_options import reject_foreign_options
from policygrad.commands.help import list_command_flags
from policygrad.commands.json_output import prints
from policygrad.commands.options import (
    RUN_EVENTS,
    CommandOptions,
    drop_trust_flag,
    load_base,
    reject_cluster_flags,
    resume_in_folder,
    run_training,
)
from policygrad.commands.parsing import parse_arguments
from policygrad.models.loading import TRUST_FLAG
from policygrad.training.config.serialization import dump_config
from policygrad.training.config.supervised import RewardModelConfig, SFTConfig, SupervisedConfig
from policygrad.training.config.trust import CodePermissions, code_in_argv

AnyConfig = TypeVar("AnyConfig", bound=SupervisedConfig)
_FLAT = tyro.conf.arg(name="")
_NAMES = {"template_options": "tokenizer.template-options"}  # flags with a name other than their field's
_FIXED = {
    name: f"continues with the run's own weights and rows, so --{_NAMES.get(name, name.replace('_', '-'))} cannot change"
    for name in (
        "template_options",
        "data",
        "row_map",
        "skip_bad_rows",
        "eval_data",
        "model",
        "epochs",
        "batch_size",
        "seed",
    )
}


def parse_supervised(
    kind: type[AnyConfig], args: list[str], help_texts: tuple[str, ...]
) -> tuple[AnyConfig, CommandOptions]:
    """Return the resolved configuration and the command's own options.

    Raises:
        ConfigError: a file cannot be read, a key is unknown, or a flag would have no effect on a resumed run.
    """
    reject_cluster_flags(
        args, kind.kind, "trains in several processes with --learner.world-size N or torchrun (docs/scaling.md)"
    )
    reject_foreign_options(args, lambda: list_command_flags(kind.kind), supervised=True)
    _, command = _parse(kind(), args, help_texts)  # to find the configuration files
    allowed = CodePermissions(tuple(code_in_argv(args)), TRUST_FLAG in args)
    base = load_base(kind(), kind.kind, command.resume, command.config, allowed)
    config, command = _parse(base, drop_trust_flag(base, args), help_texts)
    if (folder := command.resume) is not None:
        config = resume_in_folder(base, config, folder, _FIXED, f"--config {folder}/{kind.kind}.toml")
    return config.resolve(), command


def _parse(base: AnyConfig, args: list[str], help_texts: tuple[str, ...]) -> tuple[AnyConfig, CommandOptions]:
    columns = [("command", Annotated[CommandOptions, _FLAT]), ("run", Annotated[type(base), _FLAT])]
    shape: Any = make_dataclass("Command", columns, frozen=True)
    parsed = parse_arguments(shape, args, base.kind, *help_texts, default=shape(CommandOptions(), base))
    return parsed.run, parsed.command


SFT_HELP = (
    "Fine-tune a causal language model on demonstrations: a .jsonl file whose lines have `prompt` and `completion`, or "
    "`messages` of a chat, whose assistant turns are learned.",
)


@prints(*RUN_EVENTS)
def sft(args: list[str]) -> int:
    """Run `policygrad sft --data FILE [options]`."""
    config, options = parse_supervised(SFTConfig, args, SFT_HELP)
    return run_training("policygrad.training.sft:train_sft", config, "sft", options, dump_config)


REWARD_MODEL_HELP = (
    "Train a reward model on preferences: a .jsonl file whose lines have `prompt`, `chosen` and `rejected`.",
    "`policygrad train --reward model:RUN` then trains a policy against it.",
)


@prints(*RUN_EVENTS)
def reward_model(args: list[str]) -> int:
    """Run `policygrad reward-model --data FILE [options]`."""
    config, options = parse_supervised(RewardModelConfig, args, REWARD_MODEL_HELP)
    trainer = "policygrad.training.reward_model:train_reward_model"
    return run_training(trainer, config, "reward-model", options, dump_config)
