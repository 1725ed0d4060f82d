"""Groups that wait for the next step, as a checkpoint holds them: tensors, and values that JSON can hold."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from policygrad.core import metrics
from policygrad.core.batch import Batch
from policygrad.core.metrics import Metric, Metrics
from policygrad.rollout.rollouter import Rollout
from policygrad.rollout.trajectory import EpisodeGroup, EpisodeSpec, Segment, StepMarks, Trajectory
from policygrad.tasks.base import Example

PLAIN_FIELDS = (
    "text",
    "truncated",
    "turn_rewards",
    "reward",
    "metrics",
    "states",
    "parts",
    "demonstration",
    "ended",
    "failed",
)
"""Fields of a trajectory that come back as they were written."""


def pack_groups(groups: Sequence[EpisodeGroup]) -> tuple[dict[str, Tensor], list[dict[str, Any]]]:
    """(tensors by name, a value per group); an example is told by its index, the fourth entry of its start's key."""
    if not groups:
        return {}, []
    segments = [s for g in groups for t in g.trajectories for s in t.segments]
    drawn = [(s, s.logp) for s in segments if s.logp is not None]
    tensors = {
        "prompts": torch.cat([g.prompt_ids for g in groups]),
        "tokens": torch.cat([s.tokens for s in segments]),
        "logp": torch.cat([torch.empty(0), *(logp.float() for _, logp in drawn)]),  # as a batch takes it
        "version": torch.cat([torch.empty(0, dtype=torch.int64), *(s.tokens * 0 + s.version for s, _ in drawn)]),
    }
    prefixes = [g.spec.prefix for g in groups if g.spec.prefix is not None]
    tensors |= {"prefixes": torch.cat(prefixes)} if prefixes else {}
    routes = [
        s.routed_experts for g in groups for t in g.trajectories for s in t.branch_ends if s.routed_experts is not None
    ]
    tensors |= {"routes": torch.cat(routes)} if routes else {}
    news = [s.new_tokens for s in segments if s.new_tokens is not None]
    tensors |= {"news": torch.cat(news)} if news else {}
    return tensors, [_group(g) for g in groups]


def unpack_groups(
    tensors: Mapping[str, Tensor], values: Sequence[Mapping[str, Any]], example: Callable[[int], Example]
) -> tuple[EpisodeGroup, ...]:
    """The groups; `example(i)` is the task's i-th."""
    left = dict(tensors)

    def take(name: str, n: int) -> Tensor:
        head, left[name] = left[name][:n].clone(), left[name][n:]
        return head

    def segment(said: Mapping[str, Any]) -> Segment:
        n, tokens = said["tokens"], take("tokens", said["tokens"])
        if not said["sampled"]:
            news = said.get("news")
            return Segment(
                tokens, prefix_length=said.get("keeps"), new_tokens=None if news is None else take("news", news)
            )
        version = take("version", n)
        routes = take("routes", said["routes"]) if said["routes"] else None
        return Segment(tokens, take("logp", n), version if said["version"] is None else said["version"], routes)

    def trajectory(said: Mapping[str, Any]) -> Trajectory:
        segments, marks = tuple(segment(s) for s in said["segments"]), said["marks"]
        plain = {name: said[name] for name in PLAIN_FIELDS if name in said}  # an older checkpoint has no `failed`
        return Trajectory(segments, step_marks=None if marks is None else StepMarks(*marks), **plain)

    def start(said: Mapping[str, Any]) -> EpisodeSpec:
        prefix = None if said["prefix"] is None else take("prefixes", said["prefix"])
        return EpisodeSpec(example(said["key"][3]), said["key"], said["max_tokens"], prefix)

    return tuple(
        EpisodeGroup(
            start(said),
            take("prompts", said["prompt"]),
            tuple(trajectory(t) for t in said["trajectories"]),
            said["rewards"],
        )
        for said in values
    )


def _group(group: EpisodeGroup) -> dict[str, Any]:
    known: dict[Hashable, int] = {}  # of a state only what it is equal to matters, and not all of them can be written
    return {
        "key": group.spec.key,
        "max_tokens": group.spec.max_tokens,
        "prefix": None if group.spec.prefix is None else len(group.spec.prefix),
        "prompt": len(group.prompt_ids),
        "trajectories": [_trajectory(t, known) for t in group.trajectories],
        "rewards": tuple((name, float(weight)) for name, weight in group.reward_weights),
    }


def _trajectory(row: Trajectory, known: dict[Hashable, int]) -> dict[str, Any]:
    readers = row.branch_ends  # their routes are those of all before them
    return {
        "segments": [_segment(s, s.routed_experts if s in readers else None) for s in row.segments],
        "text": row.text,
        "truncated": row.truncated,
        "turn_rewards": _numbers(row.turn_rewards),
        "reward": None if row.reward is None else float(row.reward),
        "marks": None if row.step_marks is None else (row.step_marks.ends, tuple(map(float, row.step_marks.scores))),
        "metrics": {name: float(value) for name, value in row.metrics.items()},
        "states": tuple(known.setdefault(state, len(known)) for state in row.turn_states),
        "parts": _numbers(row.reward_parts),
        "demonstration": row.demonstration,
        "ended": row.stop_reason,
        "failed": row.failure,
    }


def _numbers(said: Sequence[float | None]) -> tuple[float | None, ...]:
    return tuple(None if x is None else float(x) for x in said)


def _segment(segment: Segment, routes: Tensor | None) -> dict[str, Any]:
    version = segment.version if isinstance(segment.version, int) else None  # None: it changed on the way
    read = 0 if routes is None else len(routes)
    said = {"tokens": len(segment.tokens), "sampled": segment.is_sampled, "version": version, "routes": read}
    return (
        said
        if segment.prefix_length is None
        else said | {"keeps": segment.prefix_length, "news": _length(segment.new_tokens)}
    )


def _length(x: Tensor | None) -> int | None:
    return None if x is None else len(x)


# Groups and rollouts that wait for their step, as a checkpoint holds them: tensors, and values that JSON can hold.

LEFTOVER_PREFIX, QUEUED_PREFIX = "carried/", "ahead/"
"""Begin the names of the tensors of groups, and of rollouts, then their number."""
RAGGED_FIELDS = ("prompts", "prompt_routed_experts")
"""Fields of a batch that are tuples of tensors."""
PackedState = tuple[dict[str, Tensor], dict[str, Any]]


def pack_rollouts(groups: Sequence[EpisodeGroup], rollouts: Sequence[Rollout]) -> PackedState:
    """(tensors by name, values) of groups that are carried over, and of whole rollouts."""
    found, said = pack_groups(groups)
    tensors = {LEFTOVER_PREFIX + name: tensor for name, tensor in found.items()}
    values: dict[str, Any] = {"carried": said, "ahead": []}
    for i, rollout in enumerate(rollouts):
        found, told = _rollout(rollout)
        tensors |= {f"{QUEUED_PREFIX}{i}/{name}": tensor for name, tensor in found.items()}
        values["ahead"].append(told)
    return tensors, values


def split_tensors(tensors: Mapping[str, Tensor]) -> PackedState:
    """(what waits, the others) of a checkpoint's tensors."""
    own = {name: tensor for name, tensor in tensors.items() if name.startswith((LEFTOVER_PREFIX, QUEUED_PREFIX))}
    return own, {name: tensor for name, tensor in tensors.items() if name not in own}


def unpack_rollouts(
    tensors: Mapping[str, Tensor], values: Mapping[str, Any], example: Callable[[int], Example]
) -> tuple[tuple[EpisodeGroup, ...], tuple[Rollout, ...]]:
    """(groups, rollouts); `example(i)` is the task's i-th."""
    groups = _within(tensors, LEFTOVER_PREFIX)
    ahead = (
        _unpacked(_within(tensors, f"{QUEUED_PREFIX}{i}/"), told, example)
        for i, told in enumerate(values.get("ahead", ()))
    )
    return unpack_groups(groups, values.get("carried", ()), example), tuple(ahead)


def _within(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def _rollout(rollout: Rollout) -> PackedState:
    parts = {"groups": rollout.groups, "surplus": rollout.leftover_groups}
    tensors, values = _batch(rollout.batch)
    for name, groups in parts.items():
        found, values[name] = pack_groups(groups)
        tensors |= {f"{name}/{tensor}": x for tensor, x in found.items()}
    values |= {"position": rollout.position, "messages": rollout.messages}
    return tensors, values | {"metrics": {name: _metric(metric) for name, metric in rollout.metrics.items()}}


def _unpacked(tensors: Mapping[str, Tensor], values: Mapping[str, Any], example: Callable[[int], Example]) -> Rollout:
    groups, surplus = (
        unpack_groups(_within(tensors, f"{name}/"), values[name], example) for name in ("groups", "surplus")
    )
    measured: Metrics = {name: getattr(metrics, kind)(*of) for name, (kind, of) in values["metrics"].items()}
    batch = _unpacked_batch(tensors, values["batch"])
    return Rollout(batch, groups, values["position"], measured, tuple(values["messages"]), surplus)


def _batch(batch: Batch) -> PackedState:
    tensors, told = dict[str, Tensor](), dict[str, Any]()
    for field in fields(Batch):
        value = getattr(batch, field.name)
        if isinstance(value, Tensor):
            tensors[f"batch/{field.name}"] = value
        elif field.name in RAGGED_FIELDS and value:
            tensors[f"batch/{field.name}"] = torch.cat(value)
            told[field.name] = tuple(map(len, value))
        elif value is not None and field.name not in RAGGED_FIELDS:
            told[field.name] = value
    return tensors, {"batch": told}


def _unpacked_batch(tensors: Mapping[str, Tensor], told: Mapping[str, Any]) -> Batch:
    found: dict[str, Any] = dict(_within(tensors, "batch/"))
    lengths = {name: told[name] for name in RAGGED_FIELDS if name in told}
    rows = {name: tuple(x.clone() for x in found[name].split(list(of))) for name, of in lengths.items()}
    plain = {name: tuple(value) for name, value in told.items() if name not in RAGGED_FIELDS}
    return Batch(**found | rows | plain)


def _metric(metric: Metric) -> tuple[str, tuple[float, ...]]:
    return type(metric).__name__, tuple(float(getattr(metric, field.name)) for field in fields(metric))
