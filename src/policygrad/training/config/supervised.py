"""What `policygrad sft` and `policygrad reward-model` need to know: frozen dataclasses, defaults < TOML file < flags."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Annotated, ClassVar, Self

import tyro

from policygrad.errors import ConfigError
from policygrad.learners.config import LearnerConfig, OptimizerConfig
from policygrad.learners.fsdp.controller import check_ranks
from policygrad.models.lora_config import RATE
from policygrad.trackers.services import check_services
from policygrad.training.config.run import Checkpointing, RowsGuard, check_folders, check_lr, check_seed, optional

MOST = 10**9
"""Epochs: beyond any run, and what a step's number still counts exactly."""
LR_TINY, LR = 1e-3, 1e-5
"""Default learning rates: the embedded model of 0.7M parameters, and larger ones (Ouyang et al. 2022, appendix C: about 9e-6)."""


@dataclass(frozen=True)
class Supervised:
    """One training on labelled data. `KIND.toml` in its folder holds it whole.

    Raises:
        ConfigError: options that make no sense, with the way out.
    """

    kind: ClassVar[str] = ""
    """The command's name, which is also that of the configuration file in the folder."""

    data: Annotated[str, optional("FILE", "required")] = ""
    """The training data, .jsonl, .jsonl.gz, .parquet or .arrow, a folder of `datasets`, or hf:REPOSITORY[:CONFIG[:SPLIT]]."""
    map: Annotated[str | None, optional("FILE:NAME", "none")] = None
    """A function that is given each row, a dict, and returns the row to use, or None to leave it out: mine.py:f."""
    skip_bad_rows: bool = False
    """Leave out rows that cannot be used, and say how many; without it the first is refused, with file and line."""
    model: Annotated[str, tyro.conf.arg(metavar="ID|DIR")] = "tiny"
    """Directory or hub id of the model to start from; tiny = the base model inside the package."""
    trust_remote_code: bool = False
    """Let Python code in the model's folder or repository run; without it such a model is refused."""
    held_out: Annotated[str | None, optional("FILE", "a sixteenth of the data, chosen by a hash of the prompt")] = None
    """Data to measure on; training leaves its prompts out."""
    epochs: int = 1
    """Passes over the data."""
    batch_size: int = 64
    """Rows per update."""
    lr: Annotated[
        float | None,
        optional("FLOAT", f"{LR_TINY:g} for the tiny model, {LR:g} for any other, of adapters {LR * RATE:g}"),
    ] = None
    """Peak learning rate."""
    seed: int = 0
    """Of the order of the rows, and of what is drawn at random."""
    output: Annotated[str | None, optional("DIR", "the next free runs/COMMAND-N")] = None
    """The run's folder."""
    directory: Annotated[str | None, optional("DIR", "the current folder")] = None
    """Where relative names of files and folders begin; what is not there is looked for in the current folder.
    A run's own file says it, so that a run goes on from anywhere."""
    optimizer: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(schedule="cosine"))
    """AdamW, schedule, clipping."""
    learner: LearnerConfig = field(default_factory=LearnerConfig)
    """Precision, device, memory."""
    checkpoint: Checkpointing = field(default_factory=lambda: Checkpointing(every=100))
    """Checkpoints."""
    guard: RowsGuard = field(default_factory=RowsGuard)
    """Against divergence."""
    track: Annotated[tuple[str, ...], optional("NAME", "none")] = ()
    """Services that follow the run too: wandb, tensorboard, trackio, mlflow. Each is an extra."""

    def __post_init__(self) -> None:
        for name in ("epochs", "batch_size"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.epochs > MOST:
            raise ConfigError(f"epochs must be at most {MOST:,}, not {self.epochs}")
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
        if self.learner.tensor > 1:
            raise ConfigError(
                f"learner.tensor is for policygrad train; {self.kind} spreads by learner.ranks: leave it out"
            )
        check_ranks(self.learner)

    def resolved(self) -> Self:
        """With every open choice filled in.

        Raises:
            ConfigError: no data.
        """
        if not self.data:
            raise ConfigError(f"{self.kind} needs data: --data FILE.jsonl")
        lr = self.lr if self.lr is not None else LR_TINY if self.model == "tiny" else LR * self.learner.rate
        return replace(self, lr=lr, learner=self.learner.resolved())


@dataclass(frozen=True)
class SFTConfig(Supervised):
    """Supervised fine-tuning on demonstrations."""

    kind: ClassVar[str] = "sft"


@dataclass(frozen=True)
class RewardModelConfig(Supervised):
    """A reward model from preferences."""

    kind: ClassVar[str] = "reward-model"
