"""What `policygrad sft` and `policygrad reward-model` need to know: frozen dataclasses, defaults < TOML file < flags."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Annotated, ClassVar, Self

import tyro

from policygrad.errors import ConfigError
from policygrad.learners.config import LearnerConfig, OptimizerConfig
from policygrad.learners.fsdp.controller import check_fsdp_options
from policygrad.models.lora_config import LORA_LR_FACTOR
from policygrad.trackers.services import check_services
from policygrad.training.config.run import (
    CheckpointConfig,
    SupervisedGuardConfig,
    check_folders,
    check_lr,
    check_seed,
    optional_arg,
)

MAX_EPOCHS = 10**9
"""Epochs: beyond any run, and what a step's number still counts exactly."""
TINY_MODEL_LR, DEFAULT_LR = 1e-3, 1e-5
"""Default learning rates: the embedded model of 0.7M parameters, and larger ones (Ouyang et al. 2022, appendix C: about 9e-6)."""


@dataclass(frozen=True)
class SupervisedConfig:
    """One training on labelled data. `KIND.toml` in its folder holds it whole.

    Raises:
        ConfigError: options that make no sense, with the way out.
    """

    kind: ClassVar[str] = ""
    """The command's name, which is also that of the configuration file in the folder."""

    data: Annotated[str, optional_arg("FILE", "required")] = ""
    """The training data, .jsonl, .jsonl.gz, .parquet or .arrow, a folder of `datasets`, or hf:REPOSITORY[:CONFIG[:SPLIT]]."""
    row_map: Annotated[str | None, optional_arg("FILE:NAME", "none")] = None
    """A function that is given each row, a dict, and returns the row to use, or None to leave it out: mine.py:f."""
    skip_bad_rows: bool = False
    """Leave out rows that cannot be used, and say how many; without it the first is refused, with file and line."""
    model: Annotated[str, tyro.conf.arg(metavar="ID|DIR")] = "tiny"
    """Directory or hub id of the model to start from; tiny = the base model inside the package."""
    trust_remote_code: bool = False
    """Let Python code in the model's folder or repository run; without it such a model is refused."""
    eval_data: Annotated[
        str | None, optional_arg("FILE", "a sixteenth of the data, chosen by a hash of the prompt")
    ] = None
    """Data to measure on; training leaves its prompts out."""
    epochs: int = 1
    """Passes over the data."""
    batch_size: int = 64
    """Rows per update."""
    lr: Annotated[
        float | None,
        optional_arg(
            "FLOAT",
            f"{TINY_MODEL_LR:g} for the tiny model, {DEFAULT_LR:g} for any other, of adapters {DEFAULT_LR * LORA_LR_FACTOR:g}",
        ),
    ] = None
    """Peak learning rate."""
    seed: int = 0
    """Of the order of the rows, and of what is drawn at random."""
    output: Annotated[str | None, optional_arg("DIR", "the next free runs/COMMAND-N")] = None
    """The run's folder."""
    directory: Annotated[str | None, optional_arg("DIR", "the current folder")] = None
    """Where relative names of files and folders begin; what is not there is looked for in the current folder.
    A run's own file says it, so that a run goes on from anywhere."""
    optimizer: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(schedule="cosine"))
    """AdamW, schedule, clipping."""
    learner: LearnerConfig = field(default_factory=LearnerConfig)
    """Precision, device, memory."""
    checkpoint: CheckpointConfig = field(default_factory=lambda: CheckpointConfig(every=100))
    """Checkpoints."""
    guard: SupervisedGuardConfig = field(default_factory=SupervisedGuardConfig)
    """Against divergence."""
    track: Annotated[tuple[str, ...], optional_arg("NAME", "none")] = ()
    """Services that follow the run too: wandb, tensorboard, trackio, mlflow. Each is an extra."""

    def __post_init__(self) -> None:
        for name in ("epochs", "batch_size"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.epochs > MAX_EPOCHS:
            raise ConfigError(f"epochs must be at most {MAX_EPOCHS:,}, not {self.epochs}")
        check_lr(self.lr)
        check_seed(self.seed)
        check_folders(self.output, self.directory)
        check_services(self.track)
        if self.learner.score_parameters:
            raise ConfigError(
                f"learner.score_parameters is for policy gradients; {self.kind} reads none: leave it empty"
            )
        if self.learner.routing_replay:
            raise ConfigError(
                f"learner.routing_replay replays the experts that sampled, and {self.kind} samples nothing: leave it out"
            )
        if self.learner.tensor_parallel > 1:
            raise ConfigError(
                f"learner.tensor_parallel is for policygrad train; {self.kind} spreads by learner.world_size: leave it out"
            )
        check_fsdp_options(self.learner)

    def resolve(self) -> Self:
        """With every open choice filled in.

        Raises:
            ConfigError: no data.
        """
        if not self.data:
            raise ConfigError(f"{self.kind} needs data: --data FILE.jsonl")
        lr = (
            self.lr
            if self.lr is not None
            else TINY_MODEL_LR
            if self.model == "tiny"
            else DEFAULT_LR * self.learner.lora_lr_multiplier
        )
        return replace(self, lr=lr, learner=self.learner.resolve())


@dataclass(frozen=True)
class SFTConfig(SupervisedConfig):
    """Supervised fine-tuning on demonstrations."""

    kind: ClassVar[str] = "sft"


@dataclass(frozen=True)
class RewardModelConfig(SupervisedConfig):
    """A reward model from preferences."""

    kind: ClassVar[str] = "reward-model"
