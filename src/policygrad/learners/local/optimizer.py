"""The optimizer with warm-up, a schedule, gradient clipping and, for bf16 models, fp32 master weights."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from policygrad.errors import CheckpointError, ConfigError, ModelError, NumericsError
from policygrad.learners.config import OptimizerConfig
from policygrad.learners.optimizers import ADAMW
from policygrad.models.replica import full_tensor, local_tensor, redistribute_like
from policygrad.models.traits import picture_parameters
from policygrad.utils.user_code import load_object

if TYPE_CHECKING:
    from policygrad.learners.local.host_memory import HostMemory
    from policygrad.learners.local.stochastic_rounding import BareWeights

MOMENT_PREFIXES = ("adam/", "moments/")
"""Prefixes of moments in a checkpoint: those of `optimizer.name=adamw`, and those of others."""
FULL_PRECISION = (torch.float32, torch.float64)


class StepRule(Protocol):
    """What is used of a torch.optim.Optimizer."""

    param_groups: list[dict[str, Any]]
    state: Any  # by master: what it remembers, by name

    def step(self) -> Any:
        """Update the masters in `param_groups` that have a gradient."""


class Optimizer:
    """Steps on `masters`: the model's own parameters in fp32, or fp32 copies of bf16 ones.

    A bf16 weight changes in steps of 1/256 of itself, far more than a policy-gradient step; the masters keep the rest, or, with
    `optimizer.masters=none`, chance does: there masters have memory only during their own step.
    """

    def __init__(
        self, model: nn.Module, config: OptimizerConfig, lr: float, total: int, *, offload: bool = False
    ) -> None:
        """
        Args:
            total: Updates of the run, for the schedule.
            offload: Keep masters and moments in the host's memory except between `load` and `unload`.
        """
        self.config, self.lr, self.total = config, lr, total
        self.num_updates = 0  # steps and moves: the version of the weights
        self.consistent = True  # False during a step
        self.not_finite = ""  # where a trust region's last gradient or product was not finite, as text
        for module in model.modules():
            if isinstance(module, nn.Embedding):
                # The padding token may also be an end token, and padding itself is masked. With it the gradient would be 0 in
                # reverse mode but not in forward mode, so Fisher products would not be symmetric. One whose embedding is zero has
                # none in either (see `leave_out_zero_padding`).
                module.padding_idx = None
        self.parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}
        if not self.parameters:
            raise ModelError("the model has no parameter that requires a gradient")
        self.dtype = next(iter(self.parameters.values())).dtype
        self.host: HostMemory | None = None
        if offload or config.offload:
            from policygrad.learners.local.host_memory import HostMemory

            self.host = HostMemory()
        self.bare: BareWeights | None = None
        if config.masters == "none":
            from policygrad.learners.local.stochastic_rounding import BareWeights

            self.bare = BareWeights()
        self.is_streamed = config.offload or self.bare is not None
        """Steps are taken one parameter after another, each with its master and moments alone in the device's memory."""
        self.masters = {name: self._make_master(p) for name, p in self.parameters.items()}
        build: Callable[..., Sequence[StepRule]] = load_object(config.row.target, f"optimizer.name={config.name}")
        self.rules = list(build(model, self.masters, config, lr))
        self.rule_of = {m: rule for rule in self.rules for group in rule.param_groups for m in group["params"]}
        self.unload()

    def _make_master(self, p: nn.Parameter) -> Tensor:
        if p.dtype in FULL_PRECISION:
            return p
        if self.bare is not None:
            return self.bare.make_master(p)
        master = p.detach().float()
        if self.host is not None and self.config.offload:  # at once, as the device may not have room for all
            self.host.move_out([master])
        return master

    def check_masters(self) -> None:
        """Raise ConfigError if `optimizer.masters=none` has no weight to act on."""
        if self.bare is not None and all(m is self.parameters[n] for n, m in self.masters.items()):
            raise ConfigError(
                "optimizer.masters=none updates bf16 weights without fp32 masters, and all weights that train are fp32: leave it "
                "out, or load the model with learner.dtype=bf16"
            )

    def load(self) -> None:
        """Move masters and moments back to their device; nothing if they are not offloaded, or during updates too."""
        if self.host is not None and not self.config.offload:
            self.host.move_back()

    def unload(self) -> None:
        """Move masters and moments to the host's memory, if they are offloaded. Weights that the model computes with stay."""
        if self.host is not None:
            copies = (m for n, m in self.masters.items() if m is not self.parameters[n] and self.bare is None)
            self.host.move_out([*copies, *self._moments(self.masters.values())])

    @property
    def moment_bytes(self) -> int:
        """Bytes of the moments that there are, wherever they lie; none before the first update."""
        return sum(x.nbytes for x in self._moments(self.masters.values()))

    def _moments(self, masters: Iterable[Tensor]) -> list[Tensor]:
        states = (self.rule_of[master].state.get(master, {}) for master in masters)
        return [x for state in states for x in state.values() if isinstance(x, Tensor) and x.ndim]

    def _values(self, x: Tensor) -> Tensor:
        """Return a master's or a moment's values, on the host if it is there."""
        return x if self.host is None else self.host.find(x)

    def weight(self, name: str) -> Tensor:
        """Return where a trained weight is kept in its highest precision: a master, its copy on the host, or the model's own."""
        return self.parameters[name] if self.bare is not None else self._values(self.masters[name])

    def accumulate_master_grads(self) -> None:
        """Move a micro-batch's bf16 gradients to the fp32 masters, so that they are summed in fp32."""
        for name, parameter in self.parameters.items():
            master = self.masters[name]
            if master is not parameter and parameter.grad is not None:
                gradient = parameter.grad.float()
                master.grad = gradient if master.grad is None else master.grad.add_(gradient)
                parameter.grad = None

    def clear_gradients(self) -> None:
        """Forget what was accumulated."""
        for tensor in (*self.parameters.values(), *self.masters.values()):
            tensor.grad = None

    def step(self, explain: Callable[[], tuple[str, str]] = lambda: ("", "")) -> tuple[float | None, float]:
        """Take a step; return (gradient norm before clipping, learning rate), or None as norm without any gradient.

        Args:
            explain: Returns (the part that made a gradient not finite, a sentence about it), or ("", "").

        Raises:
            NumericsError: The gradient is not finite; the weights are unchanged.
        """
        rate = self.lr * self.config.lr_factor(self.num_updates, self.total)
        masters = [m for m in self.masters.values() if m.grad is not None]
        if not masters:
            self.num_updates += 1
            return None, rate
        limit = self.config.clip or math.inf
        groups = group_by_mesh([m.grad for m in masters if m.grad is not None])
        norms = [full_tensor(nn.utils.get_total_norm(group)) for group in groups]
        total = norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))
        norm = float(total)
        if not math.isfinite(norm):
            gradients = {n: m.grad for n, m in self.masters.items() if m.grad is not None}
            where = describe_nonfinite(gradients, {n: self.weight(n) for n in gradients})
            self.clear_gradients()
            part, cause = explain()
            raise NumericsError(
                f"the gradient's norm is {norm} at update {self.num_updates + 1}{where}: the weights are unchanged. "
                + (cause or "Lower --lr or optimizer.clip, or use learner.dtype fp32"),
                part=part,
            )
        for group in group_by_mesh(masters):
            nn.utils.clip_grads_with_norm_(group, limit, total)
        for rule in self.rules:
            for settings in rule.param_groups:
                settings["lr"] = rate
        self.num_updates, self.consistent = self.num_updates + 1, False
        if self.is_streamed:
            for name, master in self.masters.items():
                if master.grad is not None:
                    self._step_alone(name)
        else:
            for rule in self.rules:
                rule.step()
            self.sync_to_model()
        self.clear_gradients()
        self.consistent = True
        return norm, rate

    @torch.no_grad()
    def _step_alone(self, name: str) -> None:
        """Update one parameter, whose master and moments are in the device's memory meanwhile."""
        master, parameter = self.masters[name], self.parameters[name]
        rule, is_copy = self.rule_of[master], master is not parameter
        if self.host is not None:
            self.host.move_back(x for x in (master, *self._moments([master])))
        if self.bare is not None and is_copy:
            self.bare.fill(master, parameter)
        groups = rule.param_groups
        rule.param_groups = [
            {**group, "params": [master]} for group in groups if any(master is x for x in group["params"])
        ]
        rule.step()
        rule.param_groups, master.grad = groups, None
        if self.bare is not None and is_copy:
            self.bare.write(parameter, master, f"{name}/{self.num_updates}")
        elif is_copy:
            parameter.copy_(master)
        if self.host is not None:
            copies = [master] if is_copy and self.bare is None else []
            self.host.move_out([*copies, *self._moments([master])])

    def split(self, v: Tensor) -> dict[str, Tensor]:
        """Split a vector [P] (of this process's shards) into tensors by name, in the masters' shapes and placements."""
        shards = torch.split(v, [local_tensor(m.detach()).numel() for m in self.masters.values()])
        return {n: redistribute_like(x, m) for (n, m), x in zip(self.masters.items(), shards, strict=True)}

    def pop_flat_gradient(self) -> Tensor:
        """Return the accumulated gradients as one vector [P], as `split` takes it, and clear them."""
        gradients = (torch.zeros_like(m) if m.grad is None else m.grad for m in self.masters.values())
        flat = torch.cat([local_tensor(x).flatten() for x in gradients])
        self.clear_gradients()
        return flat

    @torch.no_grad()
    def move(self, delta: Tensor) -> None:
        """θ ← θ + delta [P], which counts as an update."""
        for master, change in zip(self.masters.values(), self.split(delta).values(), strict=True):
            master.add_(change)
        self.sync_to_model()
        self.num_updates += 1

    @torch.no_grad()
    def sync_to_model(self) -> None:
        """Copy the masters to the model, in its own precision."""
        for name, parameter in self.parameters.items():
            if (weight := self.weight(name)) is not parameter:
                parameter.copy_(weight)

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return master weights, moments and the number of updates.

        Raises:
            CheckpointError: An error has interrupted a step, so that only some weights have changed.
        """
        if not self.consistent:
            raise CheckpointError("an error interrupted an update, so the weights belong to no single step")
        tensors = {f"weights/{name}": self.weight(name).detach() for name in self.masters}
        prefix = MOMENT_PREFIXES[self.config.name != ADAMW]
        for name, master in self.masters.items():
            for key, value in self.rule_of[master].state.get(master, {}).items():
                tensors[f"{prefix}{name}/{key}"] = (
                    self._values(value) if isinstance(value, Tensor) else torch.tensor(value)
                )
        moments = sum(name.startswith(MOMENT_PREFIXES) for name in tensors)
        return tensors, {"taken": self.num_updates, "moments": moments} | self._describe()

    def _describe(self) -> dict[str, str]:
        """Return the options that a checkpoint's tensors depend on, if they are not the usual ones."""
        usual = OptimizerConfig()
        return {key: x for key in ("name", "masters") if (x := getattr(self.config, key)) != getattr(usual, key)}

    def restore(self, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
        """Load the state of a checkpoint, bit for bit.

        Raises:
            KeyError: The checkpoint is of another model.
            CheckpointError: Moments are missing or another optimizer's, or shapes differ.
        """
        check_moments(tensors, values)
        self._check_state(tensors, values)
        with torch.no_grad():
            for name in self.masters:
                self.weight(name).copy_(tensors[f"weights/{name}"])
        self.sync_to_model()
        self.clear_moments()
        for key, tensor in tensors.items():
            if key.startswith(MOMENT_PREFIXES):
                name, moment = key.partition("/")[2].rsplit("/", 1)
                master = self.masters[name]
                rule = self.rule_of[master]
                on_host = moment == "step" and not is_fused(rule)  # AdamW keeps its counter on the CPU
                value = tensor.clone() if on_host else tensor.to(master.device, copy=True)
                rule.state[master][moment] = value
                if self.host is not None and value.ndim:  # one at a time: a server may have the memory of the rest
                    self.host.move_out([value])
        self.num_updates = values["taken"]

    def _check_state(self, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
        """Raise CheckpointError for a state of another optimizer, or of other shapes, which copying would broadcast."""
        usual = OptimizerConfig()
        for key in ("name", "masters"):
            saved, current = values.get(key, getattr(usual, key)), getattr(self.config, key)
            if values["moments"] and saved != current:
                raise CheckpointError(
                    f"it was saved with optimizer.{key}={saved}, and this run has {current}: restore optimizer.{key}={saved}"
                )
        for name, master in self.masters.items():
            find_shape = getattr(self.rule_of[master], "shape_of", lambda key, master: master.shape)
            expected = {f"weights/{name}": master.shape}
            for key in (key for prefix in MOMENT_PREFIXES for key in tensors if key.startswith(f"{prefix}{name}/")):
                expected[key] = find_shape(key.rpartition("/")[2], master)
            for key, shape in expected.items():
                if key in tensors and tensors[key].ndim and tensors[key].shape != shape:
                    raise CheckpointError(f"{key} is {list(tensors[key].shape)} and the model's is {list(shape)}")

    def clear_moments(self) -> None:
        """Let the optimizer start anew."""
        if self.host is not None:
            self.host.forget(self._moments(self.masters.values()))
        for rule in self.rules:
            rule.state.clear()


def build_adamw(
    model: nn.Module, masters: Mapping[str, Tensor], config: OptimizerConfig, lr: float
) -> list[torch.optim.Optimizer]:
    """Return torch's AdamW on all masters."""
    return [make_adamw(list(masters.values()), config, lr)]


def make_adamw(masters: Sequence[Tensor], config: OptimizerConfig, lr: float) -> torch.optim.Optimizer:
    """Return AdamW, on GPUs as one kernel, which needs no second copy of the weights; its counter is then on the device."""
    on_gpu = all(master.device.type == "cuda" for master in masters)
    options: dict[str, Any] = {"betas": config.betas, "eps": config.eps, "weight_decay": config.weight_decay}
    return torch.optim.AdamW(masters, lr=lr, **options, fused=on_gpu or None)


def build_sgd(
    model: nn.Module, masters: Mapping[str, Tensor], config: OptimizerConfig, lr: float
) -> list[torch.optim.Optimizer]:
    """Return torch's gradient descent with momentum."""
    decay = config.weight_decay
    return [torch.optim.SGD(list(masters.values()), lr=lr, momentum=config.momentum, weight_decay=decay)]


def is_fused(rule: StepRule) -> bool:
    """Return whether an optimizer is a kernel on the GPU, which keeps its counter there."""
    return any(bool(group.get("fused")) for group in rule.param_groups)


def group_by_mesh(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """Group tensors by the processes that they are sharded over; PyTorch's list operations need one mesh."""
    groups: dict[Any, list[Tensor]] = {}
    for x in tensors:
        groups.setdefault(getattr(x, "device_mesh", None), []).append(x)
    return list(groups.values())


def describe_nonfinite(gradients: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> str:
    """Return as text the first parameter whose gradient is not finite, and whether its weight is."""
    for name, gradient in gradients.items():
        if bad := int((~full_tensor(gradient).isfinite()).sum()):
            note = "" if bool(full_tensor(weights[name]).isfinite().all()) else "; the weight itself is not finite"
            return f", first in {name} ({bad} of {gradient.numel()} numbers are not finite{note})"
    return ", though every number in it is finite: their squares are not"


def check_moments(tensors: Mapping[str, Tensor], values: Mapping[str, Any], prefix: str = "") -> None:
    """Raise CheckpointError if some moments are missing; the optimizer would silently start anew without them."""
    present = sum(name.startswith(tuple(prefix + kind for kind in MOMENT_PREFIXES)) for name in tensors)
    expected = values["moments"]
    if not isinstance(values["taken"], int) or present != expected:
        raise CheckpointError(f"it holds {present} of the {expected} moments of the optimiser {prefix}".rstrip())


def set_trainable(model: nn.Module, pattern: str, vision: str = "auto") -> None:
    """Train only the parameters whose name a regular expression matches; an empty one changes nothing.

    Args:
        vision: `LearnerConfig.vision`.

    Raises:
        ConfigError: It matches none; or `vision` is set for a model that does not see.
    """
    if vision in ("projector", "frozen"):
        pictures = picture_parameters(model)
        if not pictures:
            raise ConfigError(
                f"learner.vision={vision} is for models that see, and {type(model).__name__} does not: leave it out"
            )
        for name, parameter in model.named_parameters():
            if name in pictures and not (vision == "projector" and pictures[name]):
                parameter.requires_grad_(False)
    if not pattern:
        return
    trainable = {name: re.search(pattern, name) is not None for name, _ in model.named_parameters()}
    if not any(trainable.values()):
        examples = ", ".join(list(trainable)[:: max(1, len(trainable) // 4)][:4])
        raise ConfigError(
            f"learner.trainable={pattern!r} matches none of the {len(trainable)} parameter names, such as {examples}"
        )
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(trainable[name])
