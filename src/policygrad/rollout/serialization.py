"""Convert the groups and rollouts that wait for a later step to tensors and plain values for a checkpoint, and back."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from policygrad.core import metrics
from policygrad.core.batch import Batch, SamplingMask
from policygrad.core.media import Media, TextMedia
from policygrad.core.metrics import Metrics
from policygrad.rollout.rollouter import Rollout
from policygrad.rollout.trajectory import EpisodeGroup, EpisodeSpec, Segment, StepMarks, Trajectory
from policygrad.tasks.base import Example

LEFTOVER_PREFIX, QUEUED_PREFIX = "leftover/", "queued/"
"""First part of the names of tensors that belong to leftover groups, and to queued rollouts."""
# batch fields that are tuples of tensors
RAGGED_FIELDS = (
    *("prompts", "reference_prompts", "reference_tokens", "reference_places"),
    *("prompt_routed_experts", "sampling_mask_ids"),
)
MEDIA_PREFIX = "media/"
MEDIA_FIELDS = ("prompt_media", "completion_media")  # batch fields with the pictures of texts
PackedState = tuple[dict[str, Tensor], dict[str, Any]]  # (tensors by name, plain values)


def pack_rollouts(groups: Sequence[EpisodeGroup], rollouts: Sequence[Rollout]) -> PackedState:
    """Pack the leftover groups and the rollouts queued for later steps."""
    group_tensors, group_values = pack_groups(groups)
    tensors = {LEFTOVER_PREFIX + name: tensor for name, tensor in group_tensors.items()}
    queued = []
    for i, rollout in enumerate(rollouts):
        packed, batch_values = dict[str, Tensor](), dict[str, Any]()
        for field in fields(Batch):
            value = getattr(rollout.batch, field.name)
            if isinstance(value, Tensor):
                packed[f"batch/{field.name}"] = value
            elif field.name in RAGGED_FIELDS and value:
                packed[f"batch/{field.name}"] = torch.cat(value)
                batch_values[field.name] = tuple(map(len, value))
            elif value is not None and field.name not in (*RAGGED_FIELDS, *MEDIA_FIELDS):
                batch_values[field.name] = value
        media_tensors, batch_media = pack_media([*rollout.batch.prompt_media, *rollout.batch.completion_media])
        for name, tensor in media_tensors.items():
            packed["batch/" + name] = tensor
        batch_media["prompts"] = len(rollout.batch.prompt_media)
        if media_tensors:
            batch_values["media"] = batch_media
        values: dict[str, Any] = {"batch": batch_values, "position": rollout.position, "messages": rollout.messages}
        for name in ("groups", "leftover_groups"):
            group_tensors, values[name] = pack_groups(getattr(rollout, name))
            packed |= {f"{name}/{tensor}": x for tensor, x in group_tensors.items()}
        values["metrics"] = {
            name: (type(metric).__name__, tuple(float(getattr(metric, field.name)) for field in fields(metric)))
            for name, metric in rollout.metrics.items()
        }
        tensors |= {f"{QUEUED_PREFIX}{i}/{name}": tensor for name, tensor in packed.items()}
        queued.append(values)
    return tensors, {"leftover_groups": group_values, "queued_rollouts": queued}


def split_tensors(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Separate a checkpoint's tensors into those of rollouts and the remaining ones."""
    packed = {name: x for name, x in tensors.items() if name.startswith((LEFTOVER_PREFIX, QUEUED_PREFIX))}
    return packed, {name: x for name, x in tensors.items() if name not in packed}


def unpack_rollouts(
    tensors: Mapping[str, Tensor], values: Mapping[str, Any], example: Callable[[int], Example]
) -> tuple[tuple[EpisodeGroup, ...], tuple[Rollout, ...]]:
    """Return (leftover groups, queued rollouts). `example(i)` is the task's i-th example."""
    groups = unpack_groups(_strip_prefix(tensors, LEFTOVER_PREFIX), values.get("leftover_groups", ()), example)
    rollouts = []
    for i, queued in enumerate(values.get("queued_rollouts", ())):
        packed = _strip_prefix(tensors, f"{QUEUED_PREFIX}{i}/")
        batch: dict[str, Any] = _strip_prefix(packed, "batch/")
        batch_values = dict(queued["batch"])
        if media := batch_values.pop("media", None):
            texts, n = unpack_media(batch, media), media["prompts"]
            batch = {name: x for name, x in batch.items() if not name.startswith(MEDIA_PREFIX)}
            batch |= {"prompt_media": texts[:n], "completion_media": texts[n:]}
        for name, value in batch_values.items():
            ragged = name in RAGGED_FIELDS
            batch[name] = tuple(x.clone() for x in batch[name].split(list(value))) if ragged else tuple(value)
        measured: Metrics = {name: getattr(metrics, kind)(*args) for name, (kind, args) in queued["metrics"].items()}
        rollout_groups, leftover_groups = (
            unpack_groups(_strip_prefix(packed, f"{name}/"), queued[name], example)
            for name in ("groups", "leftover_groups")
        )
        rollouts.append(
            Rollout(
                Batch(**batch), rollout_groups, queued["position"], measured, tuple(queued["messages"]), leftover_groups
            )
        )
    return groups, tuple(rollouts)


def pack_groups(groups: Sequence[EpisodeGroup]) -> tuple[dict[str, Tensor], list[dict[str, Any]]]:
    """Return (tensors by name, one value per group). An example is stored as its index, the fourth entry of the spec's key."""
    if not groups:
        return {}, []
    trajectories = [t for g in groups for t in g.trajectories]
    segments = [s for t in trajectories for s in t.segments]
    sampled = [(s, s.logp) for s in segments if s.logp is not None]
    tensors = {
        "prompts": torch.cat([g.prompt_ids for g in groups]),
        "tokens": torch.cat([s.tokens for s in segments]),
        "logp": torch.cat([torch.empty(0), *(logp.float() for _, logp in sampled)]),  # the dtype of a batch
        "version": torch.cat([torch.empty(0, dtype=torch.int64), *(s.tokens * 0 + s.version for s, _ in sampled)]),
    }
    optional = {
        "prefixes": [g.spec.prefix for g in groups if g.spec.prefix is not None],
        "routed_experts": [
            s.routed_experts for t in trajectories for s in t.branch_ends if s.routed_experts is not None
        ],
        "observation": [s.observation for s in segments if s.observation is not None],
        "new_tokens": [s.new_tokens for s in segments if s.new_tokens is not None],
        "mask_ids": [s.sampling_mask.ids for s in segments if s.sampling_mask is not None],
        "mask_counts": [s.sampling_mask.counts for s in segments if s.sampling_mask is not None],
    }
    tensors |= {name: torch.cat(parts) for name, parts in optional.items() if parts}
    media_tensors, media = pack_media([*(g.media for g in groups), *(s.media for s in segments)])
    tensors |= media_tensors
    values: list[dict[str, Any]] = []
    for g in groups:
        state_ids: dict[Hashable, int] = {}  # only equality of states matters, and not every state can be written
        values.append(
            {
                "key": g.spec.key,
                "max_tokens": g.spec.max_tokens,
                "prefix": None if g.spec.prefix is None else len(g.spec.prefix),
                "prompt": len(g.prompt_ids),
                "trajectories": [_pack_trajectory(t, state_ids) for t in g.trajectories],
                "reward_weights": tuple((name, float(weight)) for name, weight in g.reward_weights),
            }
        )
    if media_tensors:
        values[0]["media"] = media  # of all groups
    return tensors, values


def _pack_trajectory(row: Trajectory, state_ids: dict[Hashable, int]) -> dict[str, Any]:
    def floats(values: Sequence[float | None]) -> tuple[float | None, ...]:
        return tuple(None if x is None else float(x) for x in values)

    ends, marks = row.branch_ends, row.step_marks
    segments = []
    for s in row.segments:
        # the last turn of a branch has the experts of everything before it
        experts = s.routed_experts if s in ends else None
        value = {
            "tokens": len(s.tokens),
            "sampled": s.is_sampled,
            "version": s.version if isinstance(s.version, int) else None,  # None: it changed within the segment
            "routed_experts": 0 if experts is None else len(experts),
            "mask_ids": None if s.sampling_mask is None else len(s.sampling_mask.ids),
        }
        if s.observation is not None:
            value["observation"] = True
        if s.prefix_length is not None:
            num_new = None if s.new_tokens is None else len(s.new_tokens)
            value |= {"prefix_length": s.prefix_length, "new_tokens": num_new}
        segments.append(value)
    return {field.name: getattr(row, field.name) for field in fields(Trajectory)} | {
        "segments": segments,
        "turn_rewards": floats(row.turn_rewards),
        "reward": None if row.reward is None else float(row.reward),
        "step_marks": None if marks is None else (marks.ends, tuple(map(float, marks.scores))),
        "metrics": {name: float(value) for name, value in row.metrics.items()},
        "turn_states": tuple(state_ids.setdefault(state, len(state_ids)) for state in row.turn_states),
        "reward_parts": floats(row.reward_parts),
    }


def unpack_groups(
    tensors: Mapping[str, Tensor], values: Sequence[Mapping[str, Any]], example: Callable[[int], Example]
) -> tuple[EpisodeGroup, ...]:
    """Return the groups. `example(i)` is the task's i-th example."""
    unread = dict(tensors)
    media = iter(unpack_media(tensors, values[0]["media"]) if values and "media" in values[0] else ())
    prompt_media = [next(media, ()) for _ in values]

    def take(name: str, n: int | None) -> Any:
        if n is None:
            return None
        head, unread[name] = unread[name][:n].clone(), unread[name][n:]
        return head

    def segment(value: Mapping[str, Any]) -> Segment:
        n, tokens = value["tokens"], take("tokens", value["tokens"])
        if not value["sampled"]:
            new_tokens = take("new_tokens", value.get("new_tokens"))
            return Segment(
                tokens,
                prefix_length=value.get("prefix_length"),
                new_tokens=new_tokens,
                media=next(media, ()),
                observation=take("observation", n) if value.get("observation") else None,
            )
        next(media, ())  # a policy shows no pictures
        version = take("version", n)
        experts = take("routed_experts", value["routed_experts"] or None)
        num_ids = value.get("mask_ids")
        left = None if num_ids is None else SamplingMask(take("mask_ids", num_ids), take("mask_counts", n))
        version = version if value["version"] is None else value["version"]
        return Segment(tokens, take("logp", n), version, experts, sampling_mask=left)

    def trajectory(value: Mapping[str, Any]) -> Trajectory:
        segments, marks = tuple(map(segment, value["segments"])), value["step_marks"]
        marks = None if marks is None else StepMarks(*marks)
        return Trajectory(**dict(value) | {"segments": segments, "step_marks": marks})

    def group(value: Mapping[str, Any], shown: TextMedia) -> EpisodeGroup:
        prefix = take("prefixes", value["prefix"])
        spec = EpisodeSpec(example(value["key"][3]), value["key"], value["max_tokens"], prefix)
        prompt_ids = take("prompts", value["prompt"])
        trajectories = tuple(trajectory(t) for t in value["trajectories"])
        return EpisodeGroup(spec, prompt_ids, trajectories, value["reward_weights"], shown)

    return tuple(map(group, values, prompt_media))


# Pictures: each one's tensors once, however many texts show it.


def pack_media(texts: Sequence[TextMedia]) -> PackedState:
    """Pack the pictures of texts; no tensors if there are none."""
    numbers = dict[str, int]()
    tensors, slots, shown = dict[str, Tensor](), list[Tensor](), list[tuple[tuple[int, int], ...]]()
    for text in texts:
        for m in text:
            if m.digest not in numbers:
                numbers[m.digest] = len(numbers)
                tensors |= {f"{MEDIA_PREFIX}{numbers[m.digest]}/{name}": x for name, x in m.tensors.items()}
            slots.append(m.slots)
        shown.append(tuple((numbers[m.digest], len(m.slots)) for m in text))
    if slots:
        tensors[f"{MEDIA_PREFIX}slots"] = torch.cat(slots)
    return tensors, {"digests": tuple(numbers), "texts": tuple(shown)}


def unpack_media(tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> tuple[TextMedia, ...]:
    """Return the pictures of texts."""
    digests = list(values["digests"])
    pictures = [_strip_prefix(tensors, f"{MEDIA_PREFIX}{i}/") for i in range(len(digests))]
    counts = [n for text in values["texts"] for _, n in text]
    slots = iter(torch.split(tensors[f"{MEDIA_PREFIX}slots"], counts))
    return tuple(
        tuple(Media(next(slots).clone(), pictures[i], digests[i]) for i, _ in text) for text in values["texts"]
    )


def _strip_prefix(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
