"""A recording: one optimizer update of any trainer as tensors in a file, under this library's names.

A file is a mapping from names to tensors (safetensors, .pt, .npz) or nested lists (JSON). Names of TRL, verl, OpenRLHF and prime-rl
are known; others are mapped with `--map THEIRS=OURS`. Numbers that are no tensors are settings, such as epsilon or beta.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from policygrad.errors import ConfigError, DataError

FIELDS = {
    "mask": "[B, T] 1 for tokens that the policy sampled",
    "group": "[B] integers, the prompt of each completion",
    "reward": "[B] reward of each completion",
    "rewards": "[B, K] rewards of K functions, before they are summed",
    "advantage": "[B] or [B, T]",
    "logp": "[B, T] log π_θ of the sampled tokens, at the update",
    "logp_old": "[B, T] log π_old, the ratio's denominator",
    "logp_ref": "[B, T] log π_ref",
    "logp_sampler": "[B, T] log μ, as the sampler reported it",
    "gradient": "[B, T] derivative of the loss in log π_θ",
    "loss": "[] the loss of the update",
    "tokens": "[B, T] token ids",
    "logits": "[B, T, V] logits before each token",
    "micro_batch": "[B] integers, the backward pass of each completion",
    "rank": "[B] integers, the process of each completion",
    "generation_tokens": "[B] tokens of the rollout that a completion was sampled in, where the loss divides by them",
    "rollout_reward": "[R] rewards of the full rollout, if the update is a part of it",
    "rollout_rewards": "[R, K] the same, of K functions",
    "rollout_group": "[R] prompts of the full rollout",
    "rollout_advantage": "[R] advantages of the full rollout",
}
"""Tensors of a recording, with their shapes: B completions, T tokens."""

KNOWN_NAMES = {
    "mask": "completion_mask response_mask action_mask action_masks loss_mask completion_masks",
    "group": "groups group_id group_ids uid uids prompt_index",
    "reward": "scores score returns_per_completion",
    "rewards": "rewards_per_func",
    "advantage": "advantages adv",
    "logp": "per_token_logps log_prob log_probs logprobs logps action_log_probs trainer_logprobs",
    "logp_old": "old_per_token_logps old_log_probs old_log_prob old_logprobs old_action_log_probs old_logps",
    "logp_ref": "ref_per_token_logps ref_log_prob ref_log_probs ref_logprobs ref_logps base_action_log_probs",
    "logp_sampler": "sampling_per_token_logps rollout_log_probs rollout_log_prob inference_logprobs vllm_logprobs",
    "gradient": "grad grads logp_grad",
    "loss": "policy_loss pg_loss actor_loss",
    "tokens": "completion_ids responses action_ids",
    "micro_batch": "micro_batches micro_batch_id",
    "rank": "ranks dp_rank",
}
"""Other frameworks' names of the same tensors. A name that is a field here means that field."""
_THEIRS = {theirs: ours for ours, names in KNOWN_NAMES.items() for theirs in names.split()}
_PER_TOKEN = ("logp", "logp_old", "logp_ref", "logp_sampler", "gradient", "tokens")
_PER_COMPLETION = ("group", "reward", "micro_batch", "rank", "generation_tokens")
_INTEGERS = ("group", "micro_batch", "rank", "tokens", "rollout_group")
_DECIDES_PRECISION = ("logp", "gradient", "advantage", "logp_old", "loss")
FORMATS = (".safetensors", ".pt", ".pth", ".npz", ".json")


@dataclass(frozen=True, kw_only=True, eq=False)
class AuditBatch:
    """The tensors of one update, in float64; shapes in `FIELDS`. Everything but the mask is optional."""

    mask: Tensor
    group: Tensor | None = None
    reward: Tensor | None = None
    rewards: Tensor | None = None
    advantage: Tensor | None = None
    logp: Tensor | None = None
    logp_old: Tensor | None = None
    logp_ref: Tensor | None = None
    logp_sampler: Tensor | None = None
    gradient: Tensor | None = None
    loss: Tensor | None = None
    tokens: Tensor | None = None
    logits: Tensor | None = None
    micro_batch: Tensor | None = None
    rank: Tensor | None = None
    generation_tokens: Tensor | None = None
    rollout_reward: Tensor | None = None
    rollout_rewards: Tensor | None = None
    rollout_group: Tensor | None = None
    rollout_advantage: Tensor | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    """The trainer's settings, as far as they are known: epsilon, epsilon_high, beta, max_length, temperature, …"""
    precision: float = torch.finfo(torch.float64).eps
    """Relative rounding of the least precise of the recorded numbers."""
    source: str = "recording"
    """The file, for messages."""

    @property
    def tolerance(self) -> float:
        """Largest relative error of gradients that count as equal: some hundred roundings.

        At least 1e-8, because verl adds that to a completion's number of tokens.
        """
        return max(1e-8, self.advantage_tolerance)

    @property
    def advantage_tolerance(self) -> float:
        """The same for advantages, of which an epsilon of 1e-8 is a visible part."""
        return max(1e-9, min(2e-2, 170 * self.precision))

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors that are present, by field."""
        return {name: value for name in FIELDS if isinstance(value := getattr(self, name), Tensor)}

    def setting(self, *names: str) -> float | None:
        """Return the first of these settings that is a number."""
        for name in names:
            value = self.settings.get(name)
            if isinstance(value, int | float) and not isinstance(value, bool):
                return float(value)
        return None


def make_batch(
    values: Mapping[str, Any], settings: Mapping[str, Any] | None = None, source: str = "recording"
) -> AuditBatch:
    """Make a recording from tensors, arrays or lists by name; names of other frameworks are translated.

    Raises:
        DataError: a field that is missing, unknown, not numeric or of the wrong shape; the message names it.
    """
    tensors, notes = dict[str, Tensor](), dict(settings or {})
    for name, value in values.items():
        ours = name if name in FIELDS else _THEIRS.get(name)
        if ours is None:
            if isinstance(value, int | float | str | bool):
                notes[name] = value
                continue
            raise DataError(
                f"{source}: {name} is no field of a recording: add --map {name}=FIELD with one of {', '.join(FIELDS)}, or "
                f"--map {name}= to leave it out"
            )
        if ours in tensors:
            raise DataError(f"{source}: {name} and another name both mean {ours}: leave one out with --map {name}=")
        tensors[ours] = _to_tensor(value, name, source)
    if "reward" not in tensors and (rewards := tensors.get("rewards")) is not None and rewards.ndim == 1:
        tensors["reward"] = tensors.pop("rewards")
    precision = _measure_precision(tensors)
    return _check(tensors, notes, precision, source)


def _to_tensor(value: Any, name: str, source: str) -> Tensor:
    try:
        tensor = value.detach().cpu() if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float64)
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(
            f"{source}: {name} is not an array of numbers ({error}): every row needs the same length; pad the shorter rows"
        ) from error
    if tensor.is_complex() or tensor.layout != torch.strided:
        raise DataError(f"{source}: {name} is {tensor.dtype} {tensor.layout}; save it as a dense real tensor")
    return tensor


def _measure_precision(tensors: Mapping[str, Tensor]) -> float:
    """Return the rounding of the least precise floating tensor that the search reads."""
    precisions = [torch.finfo(torch.float64).eps]
    for name in _DECIDES_PRECISION:
        tensor = tensors.get(name)
        if tensor is None or not tensor.is_floating_point():
            continue
        kind = tensor.dtype
        if kind == torch.float64 and len(torch.unique(tensor)) >= 8:  # float32 numbers that were written as decimals
            finite = tensor[tensor.isfinite()]
            kind = torch.float32 if torch.equal(finite.float().double(), finite) else kind
        precisions.append(torch.finfo(kind).eps)
    return max(precisions)


def _check(tensors: dict[str, Tensor], settings: dict[str, Any], precision: float, source: str) -> AuditBatch:
    if "mask" not in tensors:
        widths = [name for name in ("logp", "gradient", "logp_old") if name in tensors]
        hint = f", such as ones where {widths[0]} is a sampled token" if widths else ""
        raise DataError(
            f"{source}: mask is missing: a recording needs [B, T] with 1 for sampled tokens{hint}; if it has another name, add "
            "--map THEIRS=mask"
        )
    mask = tensors["mask"]
    if mask.ndim != 2 or not bool(((mask == 0) | (mask == 1)).all()):
        raise DataError(f"{source}: mask has shape {list(mask.shape)}; it must be [B, T] of 0 and 1")
    if not bool(mask.any()):
        raise DataError(f"{source}: mask is 0 everywhere, so no token was sampled: record the mask of the completions")
    rows, width = mask.shape
    shapes = dict.fromkeys(_PER_TOKEN, (rows, width)) | dict.fromkeys(_PER_COMPLETION, (rows,)) | {"loss": ()}
    for name, shape in shapes.items():
        value = tensors.get(name)
        if value is not None and name == "loss" and value.numel() == 1:
            tensors[name] = value.reshape(())
        elif value is not None and name == "reward" and value.shape == mask.shape:  # verl's token_level_scores
            tensors[name] = torch.where(mask.bool(), value, 0).sum(1)
        elif value is not None and tuple(value.shape) != shape:
            raise DataError(
                f"{source}: {name} has shape {list(value.shape)}, expected {list(shape)} as in mask {list(mask.shape)} "
                f"({FIELDS[name]}); cut or pad it to the completions"
            )
    advantage = tensors.get("advantage")
    if advantage is not None:
        if advantage.shape == (rows, 1):
            advantage = tensors["advantage"] = advantage[:, 0]
        if advantage.shape not in ((rows,), (rows, width)):
            raise DataError(
                f"{source}: advantage has shape {list(advantage.shape)}, expected [{rows}] or [{rows}, {width}] as in mask"
            )
        if advantage.ndim == 1:
            tensors["advantage"] = advantage[:, None].expand(rows, width).clone()
    _check_wide_fields(tensors, rows, width, source)
    for name, value in tensors.items():
        if name in _INTEGERS:
            if value.is_floating_point() and not bool((value == value.round()).all()):
                raise DataError(f"{source}: {name} must hold integers ({FIELDS[name]})")
            tensors[name] = value.long()
        elif name == "mask":
            tensors[name] = value.bool()
        else:
            tensors[name] = value.double()
    mask = tensors["mask"]
    for name in ("logp", "logp_old", "logp_ref", "gradient", "advantage"):
        value = tensors.get(name)
        if value is not None and not bool(value[mask].isfinite().all()):
            row, column = (mask & ~value.isfinite()).nonzero()[0].tolist()
            raise DataError(
                f"{source}: {name} is {value[row, column].item()} at row {row}, column {column}, where mask is 1: record it before "
                "the update, or set mask to 0 there"
            )
    return AuditBatch(**tensors, settings=settings, precision=precision, source=source)


def _check_wide_fields(tensors: Mapping[str, Tensor], rows: int, width: int, source: str) -> None:
    logits, rewards = tensors.get("logits"), tensors.get("rewards")
    if logits is not None and (logits.ndim != 3 or logits.shape[:2] != (rows, width)):
        raise DataError(f"{source}: logits has shape {list(logits.shape)}, expected [{rows}, {width}, V]")
    if rewards is not None and (rewards.ndim != 2 or len(rewards) != rows):
        raise DataError(f"{source}: rewards has shape {list(rewards.shape)}, expected [{rows}, K]")
    rollout = {name: len(value) for name, value in tensors.items() if name.startswith("rollout_") and value.ndim}
    if len(set(rollout.values())) > 1:
        raise DataError(
            f"{source}: {', '.join(rollout)} have {', '.join(map(str, rollout.values()))} rows; they must agree"
        )


def read(path: str | Path, names: Mapping[str, str] | None = None) -> AuditBatch:
    """Read a recording from a file.

    Args:
        names: the file's names of fields, {theirs: ours}; "" leaves a tensor out.

    Raises:
        DataError: a file that cannot be read, or that holds no recording.
        ConfigError: a name in `names` that the file lacks, or no field.
    """
    path = Path(path)
    if not path.is_file():
        raise DataError(f"{path}: no such file: give a recording in one of {', '.join(FORMATS)}")
    values, settings = _load(path)
    for theirs, ours in (names or {}).items():
        if theirs not in values:
            raise ConfigError(
                f"--map {theirs}={ours}: {path} has no {theirs}; it has {', '.join(sorted(values)) or 'nothing'}"
            )
        if ours and ours not in FIELDS:
            raise ConfigError(
                f"--map {theirs}={ours}: {ours} is no field of a recording; fields are {', '.join(FIELDS)}"
            )
    mapping = names or {}
    renamed = {mapping.get(name, name): value for name, value in values.items() if mapping.get(name, name)}
    return make_batch(renamed, settings, str(path))


def _load(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return (values by name, settings) of a file, without running anything that it holds."""
    try:
        if path.suffix == ".safetensors":
            from safetensors import safe_open

            with safe_open(path, framework="pt") as file:
                metadata = file.metadata() or {}
                return {name: file.get_tensor(name) for name in file.keys()}, json.loads(metadata.get("settings", "{}"))  # noqa: SIM118
        if path.suffix in (".pt", ".pth"):
            values = torch.load(path, map_location="cpu", weights_only=True)
        elif path.suffix == ".npz":
            import numpy as np

            with np.load(path, allow_pickle=False) as arrays:
                loaded = {name: arrays[name] for name in arrays.files}
            values = {
                name: str(array) if array.dtype.kind in "US" else torch.from_numpy(array.copy())
                for name, array in loaded.items()
            }
        elif path.suffix == ".json":
            values = json.loads(path.read_text(encoding="utf-8"))
        else:
            raise DataError(
                f"{path}: the ending {path.suffix or 'of the name'} is not known: use one of {', '.join(FORMATS)}"
            )
    except DataError:
        raise
    except Exception as error:  # each reader has exceptions of its own
        raise DataError(
            f"{path}: cannot be read as {path.suffix}: {str(error).splitlines()[0] if str(error) else type(error).__name__}. "
            "Write it again with policygrad.audit.record, or as a plain mapping of names to tensors"
        ) from error
    if not isinstance(values, dict) or not all(isinstance(name, str) for name in values):
        raise DataError(f"{path}: holds {type(values).__name__}, not a mapping of names to tensors: save a dict")
    settings = values.pop("settings", {})
    if isinstance(settings, str):
        settings = json.loads(settings)
    if not isinstance(settings, dict):
        raise DataError(f"{path}: settings must be a mapping of names to values, not {type(settings).__name__}")
    return {name: value for name, value in values.items() if value is not None}, settings


def record(path: str | Path, settings: Mapping[str, Any] | None = None, /, **tensors: Any) -> Path:
    """Write a recording from a training loop.

    For example `record("update.safetensors", {"epsilon": 0.2}, mask=mask, logp=logp, logp_old=old, advantage=adv, loss=loss,
    gradient=logp.grad)`. Names of `FIELDS` and of other frameworks are accepted; None is left out.

    Returns:
        The file, in the format of its ending.
    """
    path = Path(path)
    if path.suffix not in FORMATS:
        raise ConfigError(f"record: {path.name} must end in one of {', '.join(FORMATS)}")
    present = {name: value for name, value in tensors.items() if value is not None}
    batch = make_batch(present, settings, str(path))  # refuse at the loop, not at the audit
    tensors_by_name = {
        name: (value.detach().cpu() if isinstance(value, Tensor) else torch.tensor(value))
        for name, value in present.items()
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    notes = json.dumps(dict(batch.settings))
    if path.suffix == ".safetensors":
        from safetensors.torch import save_file

        save_file(
            {name: value.contiguous().clone() for name, value in tensors_by_name.items()}, path, {"settings": notes}
        )
    elif path.suffix in (".pt", ".pth"):
        torch.save({**tensors_by_name, "settings": notes}, path)
    elif path.suffix == ".npz":
        import numpy as np

        arrays: dict[str, Any] = {
            name: (x.float() if x.dtype == torch.bfloat16 else x).numpy() for name, x in tensors_by_name.items()
        }
        np.savez(path, **arrays, settings=np.array(notes))
    else:
        lists = {name: value.tolist() for name, value in tensors_by_name.items()}
        path.write_text(json.dumps({**lists, "settings": dict(batch.settings)}), encoding="utf-8")
    return path


def as_batch(value: AuditBatch | Mapping[str, Any] | str | Path, source: str) -> AuditBatch:
    """Return a recording from itself, from tensors by name, or from a file."""
    if isinstance(value, AuditBatch):
        return value
    if isinstance(value, str | Path):
        return read(value)
    values = dict(value)
    settings = values.pop("settings", None)
    return make_batch(values, settings, source)


def join_ranks(batches: Sequence[AuditBatch]) -> AuditBatch:
    """Join the recordings of one update by several processes; the gradients of the ranks are averaged, as by DDP."""
    if len(batches) == 1:
        return batches[0]
    names = [set(batch.tensors()) for batch in batches]
    if any(other_names != names[0] for other_names in names):
        differing = sorted(set().union(*names) - set[str].intersection(*names))
        raise DataError(f"{batches[1].source}: its fields differ from {batches[0].source} in {', '.join(differing)}")
    width = max(batch.mask.shape[1] for batch in batches)
    tensors = dict[str, Tensor]()
    for item in fields(AuditBatch):
        values = [value for batch in batches if isinstance(value := getattr(batch, item.name), Tensor)]
        if not values or item.name == "logits":
            continue
        if values[0].ndim == 0:
            tensors[item.name] = torch.stack(values).mean()
            continue
        if item.name.startswith("rollout_"):  # advantages are computed over all processes, and each records all
            tensors[item.name] = values[0]
            continue
        padded = [_pad(value, width) if value.ndim == 2 and item.name != "rewards" else value for value in values]
        tensors[item.name] = torch.cat(padded)
    tensors["rank"] = torch.cat([torch.full((len(batch.mask),), i) for i, batch in enumerate(batches)])
    if "gradient" in tensors:
        tensors["gradient"] = tensors["gradient"] / len(batches)
    return replace(batches[0], **tensors)  # type: ignore[arg-type]


def _pad(value: Tensor, width: int) -> Tensor:
    return torch.nn.functional.pad(value, (0, width - value.shape[1]))
