"""Decide `learner.compile = auto` for a run: on where what it saves is more than what compiling takes."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

from policygrad.learners.config import AUTO, LearnerConfig
from policygrad.learners.local.compilation import COMPILERS, can_compile
from policygrad.training.config.run import Run

_DRAWN = 0.25  # of the longest completion: how long they are in the mean is not known before


@dataclass(frozen=True)
class DeviceGain:
    """What compiled blocks were measured to save on a kind of device: the least of docs/benchmarks.md, on two processors, and of
    docs/gpu.md."""

    share: float
    """Of the time of learning."""
    seconds: float
    """That compiling takes, with nothing in the cache on the disk."""
    flops: float
    """Floating-point operations per second of a fast learner: a run on a slower machine is on later than it could be."""


GAINS = {
    "cpu fp32": DeviceGain(0.04, 24.0, 200e9),
    "cpu bf16": DeviceGain(0.07, 47.0, 300e9),
    "cuda": DeviceGain(0.27, 20.0, 250e12),
}
"""By device and, on a CPU, precision."""
_MARGIN = 2.0  # what is saved must be so many times what compiling takes, as the saving is an estimate


@dataclass(frozen=True)
class CompileChoice:
    """Whether blocks are compiled, and why."""

    use: bool
    reason: str

    @property
    def note(self) -> str:
        """One line for the run's log."""
        return f"learner.compile = auto: {'on' if self.use else 'off'}, {self.reason}"


def choose_compile(run: Run, model: nn.Module) -> tuple[LearnerConfig, str | None]:
    """Return the learner's options with `compile` decided where it is auto, and what to say of it; None = nothing.

    The run's folder keeps what was decided (run.toml), so that a resumed run and `verify` compute the same.
    """
    learner = run.learner
    if learner.compile != AUTO:
        return learner, None
    if max(learner.world_size, learner.tensor_parallel, learner.context_parallel) > 1:
        return replace(learner, compile=False), None
    weight = next(model.parameters())
    device = weight.device.type
    size = sum(p.numel() for p in model.parameters())
    choice = decide_compile(
        f"{device} {'bf16' if weight.dtype == torch.bfloat16 else 'fp32'}" if device == "cpu" else device,
        estimate_flops(run, size),
        has_compiler=any(map(shutil.which, COMPILERS)) and (device == "cpu" or find_spec("triton") is not None),
        has_blocks=can_compile(model),
        fits=run.sampling.max_tokens < learner.resolve_micro_tokens(weight.device, size),
    )
    return replace(learner, compile=choice.use), choice.note


def estimate_flops(run: Run, parameters: int) -> float:
    """Return the floating-point operations of learning in all steps: forward and backward of the completions' tokens."""
    rule: Any = run.algorithm.update_rule
    passes = getattr(rule, "epochs", 1)
    tokens = run.prompts_per_step * run.effective_samples_per_prompt * run.sampling.max_tokens * _DRAWN * run.steps
    if run.tokens is not None:
        tokens = min(tokens, run.tokens)
    return 6.0 * parameters * tokens * passes


def decide_compile(
    kind: str, flops: float, *, has_compiler: bool, has_blocks: bool = True, fits: bool = True
) -> CompileChoice:
    """Return the choice for so many operations on a kind of device, a row of GAINS."""
    if kind not in GAINS:
        return CompileChoice(False, f"on {kind} it was not measured")
    if not has_compiler:
        return CompileChoice(False, "there is no compiler: a C++ compiler, and triton on a GPU")
    if not has_blocks:
        return CompileChoice(False, "this model's blocks cannot be compiled")
    if not fits:
        return CompileChoice(
            False, "texts may be longer than learner.micro_tokens, and compiled blocks read no segments"
        )
    gain = GAINS[kind]
    saved = flops / gain.flops * gain.share
    text = f"about {saved:,.0f} s saved for {gain.seconds:.0f} s of compiling"
    return CompileChoice(saved >= _MARGIN * gain.seconds, text)
