"""Configurations of `policygrad sft` and `policygrad reward-model`: frozen dataclasses, like a run's."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Annotated, ClassVar, Self

import tyro

from policygrad.errors import ConfigError
from policygrad.learners.config import LearnerConfig, OptimizerConfig
from policygrad.models.chat.template_options import parse_template_options
from policygrad.models.lora_config import LORA_LR_FACTOR
from policygrad.planning.model_sizes import EMBEDDED_MODELS
from policygrad.trackers.registry import DEFAULT_TRACE_MIB, check_tracking
from policygrad.training.config.checkpoint import CheckpointConfig
from policygrad.training.config.guard import SupervisedGuardConfig
from policygrad.training.config.option_checks import check_folders, check_lr, check_seed
from policygrad.training.config.optional_arg import optional_arg
from policygrad.utils.field_types import check_field_types

MAX_EPOCHS = 10**9  # more than any run has, and few enough for exact step numbers
TINY_MODEL_LR, DEFAULT_LR = 1e-3, 1e-5
"""Default learning rates: the embedded model of 0.7M parameters, and larger ones (Ouyang et al. 2022, appendix C: about 9e-6)."""


@dataclass(frozen=True)
class SupervisedConfig:
    """One training run on labelled data. `KIND.toml` in its folder holds all of it.

    Raises:
        ConfigError: The options contradict each other; the message says which to change.
    """

    kind: ClassVar[str] = ""
    """Name of the command and of the configuration file."""

    data: Annotated[str, optional_arg("FILE", "required")] = ""
    """Training data: .jsonl, .json, .csv, .parquet or .arrow, a folder or a quoted pattern of such files.
    Also a folder of `datasets`, or hf:REPOSITORY[:CONFIG[:SPLIT]]."""
    row_map: Annotated[str | None, optional_arg("FILE:NAME", "none")] = None
    """Function applied to each row, a dict; it returns the row to use, or None to drop it: mine.py:f."""
    fetch_images: bool = False
    """Download pictures that rows give by URL, each once; without it a row with a URL is refused."""
    skip_bad_rows: bool = False
    """Drop rows that cannot be used, and report how many; otherwise the first is an error, with file and line."""
    model: Annotated[str, tyro.conf.arg(metavar="ID|DIR")] = "tiny"
    """Directory or hub id of the initial model; tiny = the base model inside the package."""
    trust_remote_code: bool = False
    """Run Python code from the model's folder or repository; without it such a model is refused."""
    eval_data: Annotated[
        str | None, optional_arg("FILE", "a sixteenth of the data, chosen by a hash of the prompt")
    ] = None
    """Evaluation data; its prompts are excluded from training."""
    epochs: int = 1
    """Passes over the data."""
    batch_size: int = 64
    """Rows per update."""
    lr: Annotated[
        float | None,
        optional_arg(
            "FLOAT",
            f"{TINY_MODEL_LR:g} for the tiny model, {DEFAULT_LR:g} for others, {DEFAULT_LR * LORA_LR_FACTOR:g} for adapters",
        ),
    ] = None
    """Peak learning rate."""
    seed: int = 0
    """Seed of the order of the rows and of all random numbers."""
    output: Annotated[str | None, optional_arg("DIR", "the next free runs/COMMAND-N")] = None
    """Folder of the run."""
    directory: Annotated[str | None, optional_arg("DIR", "the current folder")] = None
    """Folder that relative file names refer to, and then the current one; the run records it, for a resume from elsewhere."""
    optimizer: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(schedule="cosine"))
    """Optimizer, schedule, clipping."""
    learner: LearnerConfig = field(default_factory=LearnerConfig)
    """Precision, device, memory."""
    checkpoint: CheckpointConfig = field(default_factory=lambda: CheckpointConfig(every=100))
    """Checkpoints."""
    guard: SupervisedGuardConfig = field(default_factory=SupervisedGuardConfig)
    """Detection of divergence."""
    track: Annotated[tuple[str, ...], optional_arg("NAME", "none")] = ()
    """Tracking services: wandb, tensorboard, trackio, mlflow. Each is an extra.
    Where the time goes: trace (a file for ui.perfetto.dev), otel (OpenTelemetry, an extra)."""
    trace_mib: int = DEFAULT_TRACE_MIB
    """MiB of disk that `--track trace` may take; beyond it the parts between the first and the newest are deleted."""
    metrics_port: Annotated[str | None, optional_arg("PORT or HOST:PORT", "no metrics")] = None
    """Serve metrics for Prometheus here: 9100 for this machine alone, 0.0.0.0:9100 for all.
    Needs the extra `prometheus`."""

    def __post_init__(self) -> None:
        check_field_types(self)
        for name in ("epochs", "batch_size"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.epochs > MAX_EPOCHS:
            raise ConfigError(f"epochs must be at most {MAX_EPOCHS:,}, not {self.epochs}")
        check_lr(self.lr)
        check_seed(self.seed)
        check_folders(self.output, self.directory)
        check_tracking(self.track, self.trace_mib, self.metrics_port)
        if self.checkpoint.keep_best is not None:
            raise ConfigError(
                f"checkpoint.keep_best compares evaluations during training, and {self.kind} evaluates only before and after: "
                "leave it out"
            )
        self.learner.check_supervised(self.kind)
        self.optimizer.check_lr(self.lr)
        self.optimizer.check_learner(self.learner)

    def resolve(self) -> Self:
        """Fill in every open choice. Raises ConfigError if there is no data."""
        if not self.data:
            raise ConfigError(f"{self.kind} needs data: --data FILE.jsonl")
        default = TINY_MODEL_LR if self.model in EMBEDDED_MODELS else self.learner.scale_lr(DEFAULT_LR)
        return replace(self, lr=default if self.lr is None else self.lr, learner=self.learner.resolve())


@dataclass(frozen=True)
class SFTConfig(SupervisedConfig):
    """Supervised fine-tuning on demonstrations."""

    kind: ClassVar[str] = "sft"

    template_options: Annotated[
        tuple[str, ...],
        tyro.conf.arg(name="tokenizer.template-options"),
        optional_arg("NAME=VALUE", "the template's own"),
    ] = ()
    """Variables of the chat template: enable_thinking=false. One that the template does not read is refused."""

    def __post_init__(self) -> None:
        super().__post_init__()
        parse_template_options(self.template_options)  # for its errors


@dataclass(frozen=True)
class RewardModelConfig(SupervisedConfig):
    """Training of a reward model on preferences."""

    kind: ClassVar[str] = "reward-model"
