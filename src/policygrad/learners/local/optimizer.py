"""AdamW with warm-up, a schedule, gradient clipping and, for bf16 models, fp32 master weights."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from policygrad.errors import CheckpointError, ConfigError, ModelError, NumericsError
from policygrad.learners.config import OptimizerConfig
from policygrad.models.replica import full_tensor, local_tensor, redistribute_like
from policygrad.models.traits import picture_parameters

if TYPE_CHECKING:
    from policygrad.learners.local.host_memory import HostMemory


class Optimizer:
    """Steps on `masters`: the model's own parameters in fp32, or fp32 copies of bf16 ones.

    A bf16 weight changes in steps of 1/256 of itself, far more than a policy-gradient step; the masters keep the rest.
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
        full_precision = (torch.float32, torch.float64)
        self.masters = {n: p if p.dtype in full_precision else p.detach().float() for n, p in self.parameters.items()}
        masters = list(self.masters.values())
        self.is_fused = all(master.device.type == "cuda" for master in masters)
        """AdamW is one kernel, which needs no second copy of the weights; its counter is then on the device."""
        self.adam = torch.optim.AdamW(
            masters,
            lr=lr,
            betas=config.betas,
            eps=config.eps,
            weight_decay=config.weight_decay,
            fused=self.is_fused or None,
        )
        self.host: HostMemory | None = None
        if offload:
            from policygrad.learners.local.host_memory import HostMemory

            self.host = HostMemory()
        self.unload()

    def load(self) -> None:
        """Move masters and moments back to their device; nothing if they are not offloaded."""
        if self.host is not None:
            self.host.move_back()

    def unload(self) -> None:
        """Move masters and moments to the host's memory, if they are offloaded. Weights that the model computes with stay."""
        if self.host is not None:
            copies = (m for n, m in self.masters.items() if m is not self.parameters[n])
            self.host.move_out([*copies, *self._moments()])

    def _moments(self) -> list[Tensor]:
        return [x for state in self.adam.state.values() for x in state.values() if isinstance(x, Tensor) and x.ndim]

    def _values(self, x: Tensor) -> Tensor:
        """Return a master's or a moment's values, on the host if it is there."""
        return x if self.host is None else self.host.find(x)

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
        """Take an AdamW step; return (gradient norm before clipping, learning rate), or None as norm without any gradient.

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
            where = describe_nonfinite(gradients, self.masters)
            self.clear_gradients()
            part, cause = explain()
            raise NumericsError(
                f"the gradient's norm is {norm} at update {self.num_updates + 1}{where}: the weights are unchanged. "
                + (cause or "Lower --lr or optimizer.clip, or use learner.dtype fp32"),
                part=part,
            )
        for group in group_by_mesh(masters):
            nn.utils.clip_grads_with_norm_(group, limit, total)
        for settings in self.adam.param_groups:
            settings["lr"] = rate
        self.num_updates, self.consistent = self.num_updates + 1, False
        self.adam.step()
        self.clear_gradients()
        self.sync_to_model()
        self.consistent = True
        return norm, rate

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
            if self.masters[name] is not parameter:
                parameter.copy_(self._values(self.masters[name]))

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return master weights, AdamW's moments and the number of updates.

        Raises:
            CheckpointError: An error has interrupted a step, so that only some weights have changed.
        """
        if not self.consistent:
            raise CheckpointError("an error interrupted an update, so the weights belong to no single step")
        tensors = {f"weights/{name}": self._values(master).detach() for name, master in self.masters.items()}
        for name, master in self.masters.items():
            for key, value in self.adam.state.get(master, {}).items():
                tensors[f"adam/{name}/{key}"] = (
                    self._values(value) if isinstance(value, Tensor) else torch.tensor(value)
                )
        moments = sum(name.startswith("adam/") for name in tensors)
        return tensors, {"taken": self.num_updates, "moments": moments}

    def restore(self, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
        """Load the state of a checkpoint, bit for bit.

        Raises:
            KeyError: The checkpoint is of another model.
            CheckpointError: AdamW's moments are missing, or shapes differ.
        """
        check_moments(tensors, values)
        for name, master in self.masters.items():  # copying would broadcast
            for key in (f"weights/{name}", f"adam/{name}/exp_avg", f"adam/{name}/exp_avg_sq"):
                if key in tensors and tensors[key].shape != master.shape:
                    raise CheckpointError(
                        f"{key} is {list(tensors[key].shape)} and the model's is {list(master.shape)}"
                    )
        with torch.no_grad():
            for name, master in self.masters.items():
                self._values(master).copy_(tensors[f"weights/{name}"])
        self.sync_to_model()
        self.clear_moments()
        for key, tensor in tensors.items():
            if key.startswith("adam/"):
                name, moment = key.removeprefix("adam/").rsplit("/", 1)
                master = self.masters[name]
                on_host = moment == "step" and not self.is_fused  # AdamW keeps its counter on the CPU
                value = tensor.clone() if on_host else tensor.to(master.device, copy=True)
                self.adam.state[master][moment] = value
                if self.host is not None and value.ndim:  # one at a time: a server may have the memory of the rest
                    self.host.move_out([value])
        self.num_updates = values["taken"]

    def clear_moments(self) -> None:
        """Let AdamW start anew."""
        if self.host is not None:
            self.host.forget(self._moments())
        self.adam.state.clear()


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
    """Raise CheckpointError if some of AdamW's moments are missing; AdamW would silently start anew without them."""
    present = sum(name.startswith(f"{prefix}adam/") for name in tensors)
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
