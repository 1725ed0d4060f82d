"""How a local learner computes and steps: data only, so that the command line can show it without loading a model."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from typing import Self

from policygrad.errors import ConfigError
from policygrad.models.lora_config import LORA_LR_FACTOR, Lora, parse_lora

SMALL_MODEL_PARAMETERS = 5_000_000
"""Parameters; below, a model is small: a matrix product of it is over before a second thread has woken up."""
SCHEDULES = ("constant", "linear", "cosine")


AUTO = "auto"


def _pick_dtype(device: str) -> str:
    """The format that a run on a device computes in, where none is named."""
    import torch  # only where a run begins

    on_gpu = device.startswith("cuda") or (device == AUTO and torch.cuda.is_available())
    return "bf16" if on_gpu and torch.cuda.is_bf16_supported(including_emulation=False) else "fp32"


@dataclass(frozen=True)
class OptimizerConfig:
    """How a gradient becomes a step."""

    betas: tuple[float, float] = (0.9, 0.99)
    """AdamW's decay rates."""
    eps: float = 1e-8
    """AdamW's epsilon."""
    weight_decay: float = 0.0
    """AdamW's decoupled weight decay."""
    clip: float = 1.0
    """Largest gradient norm; 0 = no clipping."""
    warmup: int = 0
    """Optimiser steps of linear warm-up."""
    schedule: str = "constant"
    """constant, linear or cosine, down to 0 at the run's last update."""

    def __post_init__(self) -> None:
        if self.schedule not in SCHEDULES:
            raise ConfigError(f"optimizer.schedule must be one of {', '.join(SCHEDULES)}, not {self.schedule!r}")
        for name in ("eps", "weight_decay", "clip", "warmup"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"optimizer.{name} must be at least 0, not {getattr(self, name)}")
        for name in ("eps", "weight_decay"):
            if not math.isfinite(getattr(self, name)):
                raise ConfigError(f"optimizer.{name} must be finite, not {getattr(self, name)}")
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ConfigError(f"optimizer.betas must be two numbers, at least 0 and below 1, not {self.betas}")

    def lr_factor(self, step: int, total: int) -> float:
        """Factor on the learning rate at update `step` of `total`, from 0: a pure function, so a checkpoint needs
        only the count."""
        if step < self.warmup:
            return (step + 1) / self.warmup
        if self.schedule == "constant":
            return 1.0
        progress = min(1.0, (step - self.warmup) / max(1, total - self.warmup))
        return 1 - progress if self.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * progress))


@dataclass(frozen=True)
class LearnerConfig:
    """How the local learner computes."""

    dtype: str = "auto"
    """fp32, or bf16 with fp32 master weights; auto = bf16 on a GPU that computes in it, else fp32."""
    device: str = "auto"
    """cpu, cuda, cuda:1, …; auto = cuda where there is one."""
    micro_tokens: int = 0
    """Tokens per forward and backward pass, shared ones once; 0 = 16384 on a GPU, 1024 on a CPU, there 2048 of a small model."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, more time."""
    world_size: int = 1
    """Processes that learn together, weights, gradients and moments spread over them (FSDP2); on GPUs each has one of its own."""
    tensor_parallel: int = 1
    """Of these, how many share each layer's matrices and compute the same texts (tensor parallel, by transformers' plan)."""
    hang_timeout: float = 45.0
    """Seconds that one of several processes may stand still in what all do together, before the run ends resumably; 0 = any."""
    trainable: str = ""
    """Regular expression: the parameters that train, by name; empty = all."""
    lora: str = ""
    """Adapters train, not the weights: rank=16,alpha=32,targets=all-linear (or q_proj+v_proj), bits=4; empty = none."""
    routing_replay: bool = False
    """A mixture of experts sends every token to the experts that sampled it, also when it learns."""
    score_parameters: str = ""
    """Regular expression: the parameters whose gradients make OptimalBaseline's exact norms; empty = all that train."""

    def __post_init__(self) -> None:
        for name in ("trainable", "score_parameters"):
            try:
                re.compile(getattr(self, name))
            except re.error as error:
                raise ConfigError(
                    f"learner.{name} {getattr(self, name)!r} is no regular expression: {error}"
                ) from error
        if parse_lora(self.lora) is not None and self.trainable:
            raise ConfigError(
                "learner.lora says what trains, the adapters, and learner.trainable says it too: leave one of them empty"
            )
        if self.dtype not in (AUTO, "fp32", "bf16"):
            raise ConfigError(f"learner.dtype must be fp32 or bf16, or auto, not {self.dtype!r}")
        if self.world_size < 1:
            raise ConfigError(f"learner.world_size must be at least 1, not {self.world_size}")
        if self.tensor_parallel < 1:
            raise ConfigError(f"learner.tensor_parallel must be at least 1, not {self.tensor_parallel}")
        if not 0 <= self.hang_timeout < math.inf:
            raise ConfigError(
                f"learner.hang_timeout must be at least 0, and finite, not {self.hang_timeout}: 0 waits for ever"
            )
        if self.micro_tokens < 0:
            raise ConfigError(
                f"learner.micro_tokens must be at least 1, or 0 to leave it open, not {self.micro_tokens}"
            )

    def resolve(self) -> Self:
        """With `dtype` chosen. On a CPU bf16 makes large matrix products faster and a small model slower, and takes more memory:
        docs/benchmarks.md has both."""
        return replace(self, dtype=_pick_dtype(self.device)) if self.dtype == AUTO else self

    @property
    def adapters(self) -> Lora | None:
        """`lora`, read."""
        return parse_lora(self.lora)

    @property
    def lora_lr_multiplier(self) -> float:
        """What the default learning rate of a large model is multiplied by."""
        return LORA_LR_FACTOR if self.lora else 1.0

    def resolve_micro_tokens(self, device: object, parameters: int) -> int:
        """`micro_batch_tokens`, or what suits a torch device and a model's size where that is left open: on a CPU 1024 tokens of a larger
        model take no longer than 2048, in two thirds of the memory."""
        if not str(device).startswith("cpu"):
            return self.micro_tokens or 16384
        return self.micro_tokens or (2048 if parameters < SMALL_MODEL_PARAMETERS else 1024)
