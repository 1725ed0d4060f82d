"""AdamW with warm-up, a schedule, gradient clipping and, for bf16 models, fp32 master weights."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from policygrad.errors import CheckpointError, ConfigError, ModelError, NumericsError
from policygrad.learners.config import OptimizerConfig
from policygrad.models.replica import full_tensor, local_tensor, redistribute_like


class Optimizer:
    """Steps on `masters`: the model's own parameters in fp32, or fp32 copies of bf16 ones.

    A bf16 weight moves in steps of 1/256 of itself, far more than a policy-gradient step; the masters keep what is below.
    """

    def __init__(self, model: nn.Module, config: OptimizerConfig, lr: float, total: int) -> None:
        self.config, self.lr, self.total = config, lr, total
        self.num_updates = 0  # steps and moves: the version of the weights
        self.consistent = True  # not in the midst of a step
        self.not_finite = ""  # where a trust region's last gradient or product was not, in words
        unset_padding_index(model)
        self.parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}
        if not self.parameters:
            raise ModelError("the model has no parameter that requires a gradient")
        self.dtype = next(iter(self.parameters.values())).dtype
        full_precision = (torch.float32, torch.float64)
        self.masters = {n: p if p.dtype in full_precision else p.detach().float() for n, p in self.parameters.items()}
        self.adam = torch.optim.AdamW(
            list(self.masters.values()),
            lr=lr,
            betas=config.betas,
            eps=config.eps,
            weight_decay=config.weight_decay,
        )

    def accumulate_master_grads(self) -> None:
        """Moves a micro-batch's bf16 gradients onto the fp32 masters, so that their sum is taken in fp32."""
        for name, parameter in self.parameters.items():
            master = self.masters[name]
            if master is not parameter and parameter.grad is not None:
                gradient = parameter.grad.float()
                master.grad = gradient if master.grad is None else master.grad.add_(gradient)
                parameter.grad = None

    def step(self, explain: Callable[[], tuple[str, str]] = lambda: ("", "")) -> tuple[float | None, float]:
        """(gradient norm before clipping, learning rate); norm None and no step when there is no gradient at all.

        explain: (name of the part that made a gradient not finite, what to say of it), called only where it is not; ("", "") =
        no part did.

        Raises:
            NumericsError: a gradient that is not finite; the weights are as they were.
        """
        rate = self.lr * self.config.lr_factor(self.num_updates, self.total)
        masters = [m for m in self.masters.values() if m.grad is not None]
        if not masters:
            self.num_updates += 1
            return None, rate
        limit = self.config.clip or math.inf
        total = total_norm([m.grad for m in masters if m.grad is not None])
        norm = float(total)
        if not math.isfinite(norm):
            where = describe_nonfinite({n: m.grad for n, m in self.masters.items() if m.grad is not None}, self.masters)
            self.adam.zero_grad(set_to_none=True)
            part, cause = explain()
            raise NumericsError(
                f"the gradient's norm is {norm} at update {self.num_updates + 1}{where}: the weights were left as they were. "
                + (cause or "Lower --lr or optimizer.clip, or use learner.dtype fp32"),
                part=part,
            )
        for some in group_by_mesh(masters):
            nn.utils.clip_grads_with_norm_(some, limit, total)
        for group in self.adam.param_groups:
            group["lr"] = rate
        self.num_updates, self.consistent = self.num_updates + 1, False
        self.adam.step()
        self.adam.zero_grad(set_to_none=True)
        self.sync_to_model()
        self.consistent = True
        return norm, rate

    def split(self, v: Tensor) -> dict[str, Tensor]:
        """The share of every parameter in θ as one vector [P], the masters one after another: by name and in its shape. Of masters
        that are spread over processes, v holds this one's shares."""
        shares = torch.split(v, [local_tensor(m.detach()).numel() for m in self.masters.values()])
        named = zip(self.masters.items(), shares, strict=True)
        return {name: redistribute_like(share, master) for (name, master), share in named}

    def pop_flat_gradient(self) -> Tensor:
        """[P] the gradients that were added up, which are cleared; 0 where there is none. As `split` takes it."""
        gradients = [local_tensor(torch.zeros_like(m) if m.grad is None else m.grad) for m in self.masters.values()]
        flat = torch.cat([x.flatten() for x in gradients])
        self.adam.zero_grad(set_to_none=True)
        return flat

    @torch.no_grad()
    def move(self, delta: Tensor) -> None:
        """θ ← θ + delta [P], an update of its own."""
        for master, change in zip(self.masters.values(), self.split(delta).values(), strict=True):
            master.add_(change)
        self.sync_to_model()
        self.num_updates += 1

    @torch.no_grad()
    def sync_to_model(self) -> None:
        """Gives the model the masters' values, in its own precision."""
        for name, parameter in self.parameters.items():
            if self.masters[name] is not parameter:
                parameter.copy_(self.masters[name])

    def reset_moments(self) -> None:
        """AdamW's moments, as if no step had been taken; the schedule goes on."""
        self.adam.state.clear()

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Master weights, AdamW's moments and the step count.

        Raises:
            CheckpointError: a step that an error has cut short, so that some weights have moved and others have not.
        """
        if not self.consistent:
            raise CheckpointError("an update was cut short in its midst, so the weights are of no one step")
        tensors = {f"weights/{name}": master.detach() for name, master in self.masters.items()}
        for name, master in self.masters.items():
            for key, value in self.adam.state.get(master, {}).items():
                tensors[f"adam/{name}/{key}"] = value if isinstance(value, Tensor) else torch.tensor(value)
        moments = sum(name.startswith("adam/") for name in tensors)
        return tensors, {"taken": self.num_updates, "moments": moments}

    def restore(self, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
        """The state of a checkpoint, bit for bit.

        Raises:
            KeyError: a checkpoint of another model.
            CheckpointError: one without AdamW's moments, or of other shapes.
        """
        check_moments(tensors, values)
        for name, master in self.masters.items():  # copying would broadcast
            shapes = {k: t.shape for k, t in tensors.items() if k in (f"weights/{name}", *_moments(name))}
            if odd := [k for k, shape in shapes.items() if shape != master.shape]:
                raise CheckpointError(f"{odd[0]} is {list(shapes[odd[0]])} and the model's is {list(master.shape)}")
        with torch.no_grad():
            for name, master in self.masters.items():
                master.copy_(tensors[f"weights/{name}"])
        self.sync_to_model()
        self.adam.state.clear()
        for key, tensor in tensors.items():
            if key.startswith("adam/"):
                name, moment = key.removeprefix("adam/").rsplit("/", 1)
                master = self.masters[name]
                on_host = moment == "step"  # AdamW keeps its counter on the CPU
                self.adam.state[master][moment] = tensor.clone() if on_host else tensor.to(master.device, copy=True)
        self.num_updates = values["taken"]


def group_by_mesh(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """Those that are spread over the same processes together: an operation on a list takes no others."""
    groups: dict[Any, list[Tensor]] = {}
    for x in tensors:
        groups.setdefault(getattr(x, "device_mesh", None), []).append(x)
    return list(groups.values())


def total_norm(gradients: Sequence[Tensor]) -> Tensor:
    """[] the norm of all of them together."""
    norms = [full_tensor(nn.utils.get_total_norm(some)) for some in group_by_mesh(gradients)]
    return norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))


def describe_nonfinite(gradients: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> str:
    """In words, the first parameter, in the gradients' order, whose gradient is not finite; and whether the weight itself is."""
    for name, gradient in gradients.items():
        if not bool((full_gradient := full_tensor(gradient)).isfinite().all()):
            bad, finite = int((~full_gradient.isfinite()).sum()), bool(full_tensor(weights[name]).isfinite().all())
            weight_note = "" if finite else "; the weight itself is not finite"
            return f", first in {name} ({bad} of {full_gradient.numel()} numbers are not finite{weight_note})"
    return ", though every number in it is finite: their squares are not"


def _moments(name: str) -> tuple[str, str]:
    return f"adam/{name}/exp_avg", f"adam/{name}/exp_avg_sq"


def check_moments(tensors: Mapping[str, Tensor], values: Mapping[str, Any], prefix: str = "") -> None:
    """Raises CheckpointError where AdamW's moments are not all there: without them it would begin anew, and nobody would see it."""
    present = sum(name.startswith(f"{prefix}adam/") for name in tensors)
    expected = values.get(
        "moments", present or 1 if values["taken"] else present
    )  # not said before there was this check
    if not isinstance(values["taken"], int) or present != expected:
        raise CheckpointError(f"it holds {present} of the {expected} moments of the optimiser {prefix}".rstrip())


def unset_padding_index(model: nn.Module) -> None:
    """Lets the embedding of the padding token train like any other, wherever that token stands in a text (as it does where it
    is also an end token): what is padding is masked. With `padding_idx` its gradient would be 0 in reverse mode and whole in
    forward mode, so that a Fisher product would not be symmetric."""
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            module.padding_idx = None


def set_trainable(model: nn.Module, pattern: str) -> None:
    """Lets those parameters train whose name the regular expression is found in; an empty one leaves all as they are.

    Raises:
        ConfigError: it is found in none, with some of the names.
    """
    if not pattern:
        return
    chosen = {name: re.search(pattern, name) is not None for name, _ in model.named_parameters()}
    if not any(chosen.values()):
        some = ", ".join(list(chosen)[:: max(1, len(chosen) // 4)][:4])
        raise ConfigError(f"learner.trainable '{pattern}' is in no parameter's name; some of the {len(chosen)}: {some}")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(chosen[name])
