"""How a run is spread over devices, and in what precision."""

from __future__ import annotations

from dataclasses import dataclass

from policygrad.errors import ConfigError

WEIGHT = {"bf16": 2, "fp32": 4}
"""Bytes of a number."""
MICRO = 16384
"""Tokens of a micro-batch on a GPU, as `--learner.micro-tokens` leaves it."""
MICRO_CPU = 1024


@dataclass(frozen=True)
class Layout:
    """Learners spread weights, gradients and moments among them (FSDP2); samplers have the policy whole, or a share of each layer.

    Raises:
        ConfigError: what does not go together.
    """

    gpus: int
    samplers: int = 0
    """Devices of these that only draw; 0 = all draw and learn, in turns."""
    tensor: int = 1
    """Devices that a sampler's layers are spread over (tensor parallel)."""
    staleness: int = 0
    """Rollouts that the samplers may be ahead, where they are apart."""
    dtype: str = "bf16"
    """That is computed in; masters, gradients and moments are float32."""
    checkpointing: bool = False
    """Activations are computed once more on the way back (`--learner.gradient-checkpointing`)."""
    micro_tokens: int = MICRO
    """Of a forward and backward pass of a learner; a text is never split."""
    decode_rows: int = 512
    """Completions that one sampler draws at once, at most."""
    shared: bool = True
    """A prompt is computed once for its group, as this library does."""
    whole: bool = True
    """A learner has the policy whole beside its share, to draw with, as this library's own sampler does; False = an engine draws,
    which alone has it."""

    def __post_init__(self) -> None:
        for name in ("gpus", "tensor", "micro_tokens", "decode_rows"):
            if getattr(self, name) < 1:
                raise ConfigError(f"--{name.replace('_', '-')} must be at least 1, not {getattr(self, name)}")
        if self.dtype not in WEIGHT:
            raise ConfigError(f"--dtype must be one of {', '.join(WEIGHT)}, not {self.dtype!r}")
        if self.samplers < 0 or self.staleness < 0:
            raise ConfigError(f"--samplers and --staleness are at least 0, not {self.samplers} and {self.staleness}")
        if self.samplers >= self.gpus:
            raise ConfigError(
                f"--samplers {self.samplers} of {self.gpus} devices leave none to learn: give at most {self.gpus - 1}"
            )
        if self.drawing % self.tensor:
            raise ConfigError(
                f"--tensor-parallel {self.tensor} does not divide the {self.drawing} devices that draw: give a divisor of it"
            )

    @property
    def apart(self) -> bool:
        """Whether samplers have devices of their own."""
        return self.samplers > 0

    @property
    def learners(self) -> int:
        """Devices that learn."""
        return self.gpus - self.samplers

    @property
    def drawing(self) -> int:
        """Devices that draw."""
        return self.samplers or self.gpus

    @property
    def engines(self) -> int:
        """Samplers, of `tensor` devices each."""
        return self.drawing // self.tensor

    @property
    def weight(self) -> int:
        """Bytes of a number that is computed with."""
        return WEIGHT[self.dtype]
