"""Options of learners: data only, so that the command line can show them without loading a model."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Protocol, Self

from policygrad.errors import ConfigError
from policygrad.learners.fsdp.torchrun import ONE_PROCESS_HINT, resolve_world_size
from policygrad.learners.optimizers import ADAMW, OPTIONS, OptimizerRow, find_optimizer
from policygrad.models.lora_config import LORA_LR_FACTOR, Lora, parse_lora
from policygrad.planning.model_sizes import SMALL_MODEL_PARAMETERS
from policygrad.utils.field_types import check_field_types, describe_idle, list_changed

if TYPE_CHECKING:  # torch, which is slow
    from policygrad.core.algorithm import Algorithm
    from policygrad.core.base import UpdateRule
    from policygrad.planning.cost_model import OptimizerState

SCHEDULES = ("constant", "linear", "cosine")
MASTERS = ("fp32", "none")
AUTO = "auto"
VISION = (AUTO, "trained", "projector", "frozen")
HEADS = (AUTO, "model", "fp32")


class ExpertSource(Protocol):
    """A sampler's options, as far as the learner's depend on them."""

    @property
    def engine(self) -> str: ...

    @property
    def returns_routed_experts(self) -> bool:
        """True if it reports which experts each token of a mixture used."""
        ...


@dataclass(frozen=True)
class OptimizerConfig:
    """Options of the optimizer and the learning-rate schedule."""

    betas: tuple[float, float] = (0.9, 0.99)
    """AdamW's decay rates."""
    eps: float = 1e-8
    """AdamW's epsilon."""
    weight_decay: float = 0.0
    """Decoupled weight decay; sgd adds it to the gradient."""
    clip: float = 1.0
    """Maximum gradient norm; 0 = no clipping."""
    warmup: int = 0
    """Optimizer steps of linear warm-up."""
    schedule: str = "constant"
    """constant, linear or cosine, down to 0 at the run's last update."""
    name: str = ADAMW
    """adamw; adamw8bit = its moments in 8 bits; muon for hidden matrices, with AdamW for the rest; sgd (docs/memory.md)."""
    momentum: float = 0.95
    """Momentum of muon and sgd; 0 = none."""
    masters: str = "fp32"
    """What a bf16 model is trained on: fp32 copies of its weights, or none. Without them updates are rounded stochastically."""
    offload: bool = False
    """Keep moments and fp32 masters in this machine's memory also during updates; the GPU has those of one parameter at a time."""

    def __post_init__(self) -> None:
        check_field_types(self, "optimizer")
        row, usual = self.row, {field.name: field.default for field in fields(self)}
        for name in OPTIONS:
            if name not in row.options and getattr(self, name) != usual[name]:
                raise ConfigError(
                    f"optimizer.{name}={getattr(self, name)} does not act in optimizer.name={self.name}: leave it out"
                )
        if self.schedule not in SCHEDULES:
            raise ConfigError(f"optimizer.schedule must be one of {', '.join(SCHEDULES)}, not {self.schedule!r}")
        if self.masters not in MASTERS:
            raise ConfigError(f"optimizer.masters must be {' or '.join(MASTERS)}, not {self.masters!r}")
        for name in ("eps", "weight_decay", "clip", "warmup"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"optimizer.{name} must be at least 0, not {getattr(self, name)}")
        for name in ("eps", "weight_decay"):
            if not math.isfinite(getattr(self, name)):
                raise ConfigError(f"optimizer.{name} must be finite, not {getattr(self, name)}")
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ConfigError(f"optimizer.betas must be two numbers, at least 0 and below 1, not {self.betas}")
        if not 0 <= self.momentum < 1:
            raise ConfigError(f"optimizer.momentum must be at least 0 and below 1, not {self.momentum}")

    @property
    def row(self) -> OptimizerRow:
        """What is known of the optimizer. Raises ConfigError for an unknown name."""
        return find_optimizer(self.name)

    def describe_state(self, *, offload_sampling: bool = False) -> OptimizerState:
        """Return what it keeps of each parameter.

        Args:
            offload_sampling: `LearnerConfig.offload`.
        """
        from policygrad.planning.cost_model import OptimizerState

        return OptimizerState(
            name=self.name,
            moment_bytes=self.row.count_moment_bytes(self.momentum),
            outer_moment_bytes=self.row.count_moment_bytes(self.momentum, hidden=False),
            masters=self.masters,
            offload="always" if self.offload else "sampling" if offload_sampling else "none",
        )

    def check(self, algorithm: Algorithm, learner: LearnerConfig, lr: float | None) -> None:
        """Raise ConfigError for options that act on nothing that the algorithm updates, or that do not fit the learner."""
        rule = algorithm.update_rule
        if not rule.uses_lr and algorithm.critic is None and self != OptimizerConfig():
            raise ConfigError(
                f"optimizer.* sets the optimizer, which {type(rule).__name__} does not use, and there is no critic: "
                f"{explain_step_size(rule)}. Leave these options out"
            )
        for name in ("masters", "offload"):
            if not rule.uses_lr and getattr(self, name) != getattr(OptimizerConfig(), name):
                raise ConfigError(
                    f"optimizer.{name}={getattr(self, name)} is for gradient steps, and {type(rule).__name__} moves all "
                    "weights at once: leave it out"
                )
        others = {"a critic": algorithm.critic, "a reward model": algorithm.reward_model}
        if self.masters == "none" and learner.world_size > 1 and any(others.values()):
            trained = " and ".join(name for name, part in others.items() if part is not None)
            raise ConfigError(
                f"optimizer.masters=none shards the weights of a policy, and {algorithm.name} trains {trained} too: leave it out, "
                f"or {ONE_PROCESS_HINT}"
            )
        if rule.uses_lr:
            self.check_lr(lr)
        self.check_learner(learner)

    def find_idle(self, updates: int) -> Iterator[str]:
        """Yield options that cannot act as they say in a run of so many updates, each with a remedy."""
        if self.warmup >= updates:
            yield (
                f"optimizer.warmup = {self.warmup} is not over at the run's end: it has {updates:,} optimizer steps at most, and "
                f"the learning rate does not reach its peak. Set it below {updates:,}, or more --steps"
            )

    def check_lr(self, lr: float | None) -> None:
        """Raise ConfigError if there is no learning rate and no usual one."""
        if lr is None and not self.row.has_adamw_lr:
            raise ConfigError(
                f"optimizer.name={self.name} needs --lr: the default learning rates are AdamW's, which are far too small for it"
            )

    def check_learner(self, learner: LearnerConfig) -> None:
        """Raise ConfigError for options that do not fit the learner's."""
        if self.masters == "none" and (learner.dtype == "fp32" or learner.lora):
            option = "learner.lora trains adapters in fp32" if learner.lora else "learner.dtype is fp32"
            raise ConfigError(
                f"optimizer.masters=none updates bf16 weights without fp32 masters, and {option}: leave it out"
                + ("" if learner.lora else ", or set learner.dtype=bf16")
            )
        if self.offload and learner.offload:
            raise ConfigError(
                "optimizer.offload does all that learner.offload does, and keeps the state on the host during updates too: leave "
                "one of them out"
            )
        if learner.tensor_parallel > 1 and not self.row.splits_layers:
            raise ConfigError(
                f"optimizer.name={self.name} needs rows of matrices in one piece, and learner.tensor_parallel is "
                f"{learner.tensor_parallel}: set it to 1, or use adamw"
            )

    def lr_factor(self, step: int, total: int) -> float:
        """Return the factor on the learning rate at update `step` (from 0) of `total`; no other state is needed."""
        if step < self.warmup:
            return (step + 1) / self.warmup
        if self.schedule == "constant":
            return 1.0
        progress = min(1.0, (step - self.warmup) / max(1, total - self.warmup))
        return 1 - progress if self.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * progress))


@dataclass(frozen=True)
class LearnerConfig:
    """Options of the learner: precision, device, processes, what trains."""

    dtype: str = "auto"
    """fp32, or bf16 with fp32 master weights; auto = bf16 on a GPU of NVIDIA, AMD or Intel that supports it, else fp32."""
    head: str = AUTO
    """Precision of the output head's product in learner and local sampler: model, or fp32 whatever the weights are.
    auto = the algorithm's own: fp32 for scale_rl."""
    device: str = "auto"
    """cpu, cuda, cuda:1, xpu, mps; auto = cuda or xpu if available, else cpu."""
    micro_tokens: int = 0
    """Tokens per forward and backward pass, shared ones once; longer texts are read in segments.
    0 = 16384 on a GPU, 1024 on a CPU (2048 for a small model or bf16)."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, more time."""
    attention: str = AUTO
    """sdpa = scaled_dot_product_attention; auto = FlexAttention on a GPU where many texts share prefixes, else sdpa."""
    compile: bool | str = False
    """Compile the model's blocks with torch.compile: auto, on or off. On a GPU a third faster after some twenty seconds.
    On a CPU a few percent. auto = on where a run is long enough to pay (docs/scaling.md)."""
    offload: bool = False
    """Keep AdamW's moments and fp32 masters in this machine's memory while completions are sampled.
    That leaves more of the GPU to a server beside the learner (--sampler.colocate)."""
    world_size: int = 1
    """Processes that learn together, with weights, gradients and moments sharded over them (FSDP2); one GPU each."""
    tensor_parallel: int = 1
    """Processes that share each layer's matrices and compute the same texts (tensor parallelism, by transformers' plan)."""
    context_parallel: int = 1
    """Neighbouring processes that divide each pass's tokens between them, a long text's too (context parallelism).
    Each has 1/N of the activations."""
    hang_timeout: float = 45.0
    """Seconds without progress in a joint operation after which a run of several processes ends resumably; 0 = never."""
    trainable: str = ""
    """Regular expression of the names of the parameters to train; empty = all."""
    vision: str = AUTO
    """Of a model that sees, what trains beside the language model: trained = vision tower and projector, projector, or frozen.
    auto = trained, or frozen with learner.lora."""
    lora: str = ""
    """Train adapters instead of the weights: rank=16,alpha=32,targets=all-linear (or q_proj+v_proj), bits=4; empty = none."""
    routing_replay: bool = False
    """In a mixture of experts, learn with the experts that the sampler used for each token."""
    score_parameters: str = ""
    """Regular expression of the parameters whose gradients make OptimalBaseline's exact norms; empty = all trained ones."""

    def __post_init__(self) -> None:
        if (use := {"on": True, "off": False}.get(str(self.compile))) is not None:
            object.__setattr__(self, "compile", use)
        if not (isinstance(self.compile, bool) or self.compile == AUTO):
            raise ConfigError(f"learner.compile must be auto, on (True) or off (False), not {self.compile!r}")
        check_field_types(self, "learner")
        for name in ("trainable", "score_parameters"):
            try:
                re.compile(getattr(self, name))
            except re.error as error:
                raise ConfigError(
                    f"learner.{name}={getattr(self, name)!r} is not a regular expression: {error}"
                ) from error
        if parse_lora(self.lora) is not None and self.trainable:
            raise ConfigError("learner.lora and learner.trainable both select what trains: leave one of them empty")
        if self.vision not in VISION:
            raise ConfigError(f"learner.vision must be {', '.join(VISION[:-1])} or {VISION[-1]}, not {self.vision!r}")
        kind = "lora" if self.lora else "trainable"
        if self.vision not in (AUTO, "frozen") and (self.lora or self.trainable):
            raise ConfigError(
                f"learner.vision={self.vision} and learner.{kind} both select what trains: leave one of them out"
            )
        if self.dtype not in (AUTO, "fp32", "bf16"):
            raise ConfigError(f"learner.dtype must be fp32, bf16 or auto, not {self.dtype!r}")
        if self.head not in HEADS:
            raise ConfigError(f"learner.head must be {', '.join(HEADS[:-1])} or {HEADS[-1]}, not {self.head!r}")
        if self.attention not in (AUTO, "sdpa"):
            raise ConfigError(f"learner.attention must be auto or sdpa, not {self.attention!r}")
        is_shared = max(self.world_size, self.tensor_parallel, self.context_parallel) > 1
        if self.compiles and is_shared:
            raise ConfigError(
                f"learner.compile is for a learner in one process, and learner.world_size is {self.world_size}: leave it out"
            )
        if self.offload and is_shared:
            raise ConfigError(
                f"learner.offload is for a learner in one process, and learner.world_size is {self.world_size}: leave it out"
            )
        for name in ("world_size", "tensor_parallel", "context_parallel"):
            if getattr(self, name) < 1:
                raise ConfigError(f"learner.{name} must be at least 1, not {getattr(self, name)}")
        if self.tensor_parallel > 1 and self.context_parallel > 1:
            raise ConfigError(
                f"learner.tensor_parallel={self.tensor_parallel} and learner.context_parallel={self.context_parallel} do not go "
                "together: leave one of them out"
            )
        if not 0 <= self.hang_timeout < math.inf:
            raise ConfigError(f"learner.hang_timeout must be at least 0 and finite, not {self.hang_timeout}; 0 = off")
        if self.micro_tokens < 0:
            raise ConfigError(f"learner.micro_tokens must be at least 1, or 0 for the default, not {self.micro_tokens}")

    def find_idle(self) -> Iterator[str]:
        """Yield options that can have no effect, each with a remedy."""
        if self.world_size == 1:
            reason = "the run has one process. Leave it out, or set --learner.world-size"
            yield from describe_idle(list_changed("learner", self, ["hang_timeout"]), reason)

    def check(self, algorithm: Algorithm, experts: ExpertSource) -> None:
        """Raise ConfigError for options that do not fit the algorithm, the sampler or several processes."""
        self.check_processes()
        self.check_context(algorithm)
        if self.routing_replay and not experts.returns_routed_experts:
            raise ConfigError(
                f"learner.routing_replay replays the experts that the sampler used, which {experts.engine} does not report: set it "
                "to false, or use --sampler.engine local"
            )
        if self.score_parameters and "grad_logp_sq_norm" not in algorithm.needs:
            raise ConfigError(
                f"learner.score_parameters is {self.score_parameters!r}, but no part of {algorithm.name} reads score norms: put "
                "OptimalBaseline(norm='exact') into advantage, or leave it empty"
            )
        reference = algorithm.reference
        if self.world_size > 1 and reference is not None and reference.teachers and reference.num_in_memory:
            raise ConfigError(
                f"learner.world_size={self.world_size} shards one reference, and Reference.teachers has "
                f"{reference.num_in_memory} to load: serve them (NAME=http://HOST:PORT/v1), or set --learner.world-size 1"
            )

    def check_supervised(self, kind: str) -> None:
        """Raise ConfigError for options that training on labelled data does not have, or that do not fit several processes."""
        if self.score_parameters:
            raise ConfigError(
                f"learner.score_parameters is for policy gradients; {kind} does not use it: leave it empty"
            )
        if self.routing_replay:
            raise ConfigError(
                f"learner.routing_replay replays a sampler's experts, and {kind} samples nothing: leave it out"
            )
        if self.compile is not False or self.offload or self.head == "fp32":
            raise ConfigError(
                f"learner.compile, learner.offload and learner.head are for policygrad train, not {kind}: leave them out"
            )
        for name in ("tensor_parallel", "context_parallel"):
            if getattr(self, name) > 1:
                raise ConfigError(
                    f"learner.{name} is for policygrad train; {kind} uses learner.world_size: leave it out"
                )
        self.check_processes()

    def check_processes(self) -> None:
        """Raise ConfigError for the first option that several processes do not support."""
        size = resolve_world_size(self.world_size)
        for name in ("tensor_parallel", "context_parallel"):
            if size % (shared := getattr(self, name)):
                more = f", or set --learner.world-size {shared}" if size < shared else ""
                raise ConfigError(
                    f"learner.{name}={shared} does not divide learner.world_size={size}: choose a divisor{more}"
                )
        if self.world_size == 1:
            return
        has_bits = self.adapters is not None and self.adapters.bits is not None
        if has_bits and self.tensor_parallel > 1:
            raise ConfigError(
                f"learner.lora with bits=4 keeps the weights of a layer in one piece, and learner.tensor_parallel is "
                f"{self.tensor_parallel}: set it to 1, or leave bits out"
            )
        unsupported = {
            f"learner.device={self.device}, one GPU for all ranks,": self.device.startswith("cuda:"),
        }
        for option in (option for option, is_set in unsupported.items() if is_set):
            raise ConfigError(
                f"{option} does not work with learner.world_size={self.world_size}: omit it, or {ONE_PROCESS_HINT}"
            )

    def check_context(self, algorithm: Algorithm) -> None:
        """Raise ConfigError for a part whose own passes read whole texts, where `context_parallel` divides them."""
        unsupported = {
            type(algorithm.update_rule).__name__: not algorithm.update_rule.uses_lr,
            "OptimalBaseline(norm='exact')": "grad_logp_sq_norm" in algorithm.needs,
        }
        for part in (part for part, is_used in unsupported.items() if is_used and self.context_parallel > 1):
            raise ConfigError(
                f"learner.context_parallel={self.context_parallel}: {part} differentiates each text in one process: leave "
                "--learner.context-parallel out, or choose an algorithm of gradient steps, such as grpo"
            )

    def resolve(self, head: str = "model") -> Self:
        """Return the options with `dtype` and `head` chosen, the second as the algorithm has it.

        On a CPU bf16 makes large matrix products faster and small models slower, and takes more memory: see docs/benchmarks.md.
        """
        if self.head == AUTO:
            return replace(self, head=head).resolve()
        if self.dtype != AUTO:
            return self
        from policygrad.utils import devices  # imports torch, which is slow, and the command line does not need it

        device = devices.choose_device() if self.device == AUTO else self.device
        return replace(self, dtype="bf16" if devices.multiplies_in_bf16(device) else "fp32")

    @property
    def compiles(self) -> bool:
        """Whether blocks are compiled; not while `compile` is auto, which a run decides once its model is loaded."""
        return self.compile is True

    @property
    def adapters(self) -> Lora | None:
        """`lora`, parsed."""
        return parse_lora(self.lora)

    def scale_lr(self, lr: float) -> float:
        """Return the default learning rate of a large model, given that of all its weights: more for adapters."""
        return float(f"{lr * LORA_LR_FACTOR:.12g}") if self.lora else lr  # 1e-06 * 10 is 9.999999999999999e-06

    def resolve_micro_tokens(self, device: object, parameters: int) -> int:
        """Return `micro_tokens`, or the default for a torch device and a model's size.

        On a CPU a larger model in float32 takes no longer with 1024 tokens than with 2048, and two thirds of the memory.
        """
        on_cpu = 2048 if parameters < SMALL_MODEL_PARAMETERS or self.dtype == "bf16" else 1024
        return self.micro_tokens or (on_cpu if str(device).startswith("cpu") else 16384)


def check_offload(learner: LearnerConfig, optimizer: OptimizerConfig, device: str) -> None:
    """Raise ConfigError if the learner's device has no memory of its own to take the optimizer's state out of."""
    sections = {"learner": learner.offload, "optimizer": optimizer.offload}
    for section in (section for section, is_set in sections.items() if is_set and not device.startswith("cuda")):
        raise ConfigError(
            f"{section}.offload moves the optimizer's state from a GPU to this machine's memory, and the learner's device is "
            f"{device}: leave it out"
        )


def explain_step_size(rule: UpdateRule) -> str:
    """Return what sets the size of the steps of an update rule without a learning rate."""
    if rule.step_size is None:
        return "it has no such setting"
    setting, unit = rule.step_size
    return f"algorithm.update_rule.{setting}, {unit}, sets the size of its steps"
