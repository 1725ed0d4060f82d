"""Groups and rollouts that wait for their step, as a checkpoint holds them: tensors, and values that JSON can hold."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from policygrad.core import metrics
from policygrad.core.batch import Batch
from policygrad.core.metrics import Metric, Metrics
from policygrad.rollout import carried
from policygrad.rollout.rollouter import Rollout
from policygrad.rollout.trajectory import Group
from policygrad.tasks.types import Example

CARRIED, AHEAD = "carried/", "ahead/"
"""Begin the names of the tensors of groups, and of rollouts, then their number."""
ROWS = ("prompts", "prompt_experts")
"""Fields of a batch that are tuples of tensors."""
Saved = tuple[dict[str, Tensor], dict[str, Any]]


def pack(groups: Sequence[Group], rollouts: Sequence[Rollout]) -> Saved:
    """(tensors by name, values) of groups that are carried over, and of whole rollouts."""
    found, said = carried.pack(groups)
    tensors = {CARRIED + name: tensor for name, tensor in found.items()}
    values: dict[str, Any] = {"carried": said, "ahead": []}
    for i, rollout in enumerate(rollouts):
        found, told = _rollout(rollout)
        tensors |= {f"{AHEAD}{i}/{name}": tensor for name, tensor in found.items()}
        values["ahead"].append(told)
    return tensors, values


def split(tensors: Mapping[str, Tensor]) -> Saved:
    """(what waits, the others) of a checkpoint's tensors."""
    own = {name: tensor for name, tensor in tensors.items() if name.startswith((CARRIED, AHEAD))}
    return own, {name: tensor for name, tensor in tensors.items() if name not in own}


def unpack(
    tensors: Mapping[str, Tensor], values: Mapping[str, Any], example: Callable[[int], Example]
) -> tuple[tuple[Group, ...], tuple[Rollout, ...]]:
    """(groups, rollouts); `example(i)` is the task's i-th."""
    groups = _within(tensors, CARRIED)
    ahead = (
        _unpacked(_within(tensors, f"{AHEAD}{i}/"), told, example) for i, told in enumerate(values.get("ahead", ()))
    )
    return carried.unpack(groups, values.get("carried", ()), example), tuple(ahead)


def _within(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def _rollout(rollout: Rollout) -> Saved:
    parts = {"groups": rollout.groups, "surplus": rollout.surplus}
    tensors, values = _batch(rollout.batch)
    for name, groups in parts.items():
        found, values[name] = carried.pack(groups)
        tensors |= {f"{name}/{tensor}": x for tensor, x in found.items()}
    values |= {"position": rollout.position, "messages": rollout.messages}
    return tensors, values | {"metrics": {name: _metric(metric) for name, metric in rollout.metrics.items()}}


def _unpacked(tensors: Mapping[str, Tensor], values: Mapping[str, Any], example: Callable[[int], Example]) -> Rollout:
    groups, surplus = (
        carried.unpack(_within(tensors, f"{name}/"), values[name], example) for name in ("groups", "surplus")
    )
    measured: Metrics = {name: getattr(metrics, kind)(*of) for name, (kind, of) in values["metrics"].items()}
    batch = _unpacked_batch(tensors, values["batch"])
    return Rollout(batch, groups, values["position"], measured, tuple(values["messages"]), surplus)


def _batch(batch: Batch) -> Saved:
    tensors, told = dict[str, Tensor](), dict[str, Any]()
    for field in fields(Batch):
        value = getattr(batch, field.name)
        if isinstance(value, Tensor):
            tensors[f"batch/{field.name}"] = value
        elif field.name in ROWS and value:
            tensors[f"batch/{field.name}"] = torch.cat(value)
            told[field.name] = tuple(map(len, value))
        elif value is not None and field.name not in ROWS:
            told[field.name] = value
    return tensors, {"batch": told}


def _unpacked_batch(tensors: Mapping[str, Tensor], told: Mapping[str, Any]) -> Batch:
    found: dict[str, Any] = dict(_within(tensors, "batch/"))
    lengths = {name: told[name] for name in ROWS if name in told}
    rows = {name: tuple(x.clone() for x in found[name].split(list(of))) for name, of in lengths.items()}
    plain = {name: tuple(value) for name, value in told.items() if name not in ROWS}
    return Batch(**found | rows | plain)


def _metric(metric: Metric) -> tuple[str, tuple[float, ...]]:
    return type(metric).__name__, tuple(float(getattr(metric, field.name)) for field in fields(metric))
