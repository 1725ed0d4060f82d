"""Checks on what a part returns: its shape at every call, and its values once something is not finite."""

from __future__ import annotations

from torch import Tensor

from policygrad.core import masked
from policygrad.core.base import Part
from policygrad.core.batch import PER_COMPLETION, PER_TOKEN, Batch
from policygrad.errors import ConfigError

_CAUSES = {
    "values": "the critic has diverged: lower its learning rate, algorithm.critic.lr",
    "bootstrap": "the critic has diverged: lower its learning rate, algorithm.critic.lr",
    "implicit_reward": "the reward model has diverged: lower its learning rate, algorithm.reward_model.lr",
    "logp_ref": "the reference model's log-probabilities are the cause, not the part",
    "logp_old": "the policy's log-probabilities are the cause, not the part: lower lr, or use learner.dtype fp32",
}


def check_per_token(value: Tensor, part: object, mask: Tensor, method: str = "") -> Tensor:
    """Return `value`, the result of a part for a batch with this mask [B, T].

    Raises:
        ConfigError: not a tensor, or not of shape [B, T]; [B] would broadcast along the wrong axis where B = T.
    """
    call = type(part).__name__ + (f".{method}" if method else "")
    if not isinstance(value, Tensor):
        raise ConfigError(
            f"{call} returned {_describe(value)}, expected a tensor [B, T] = {list(mask.shape)}: return one number per token"
        )
    if value.shape != mask.shape:
        remedy = (
            "one number per completion is value[:, None].expand(mask.shape)"
            if value.shape == mask.shape[:1]
            else "return one number per token of the batch"
        )
        raise ConfigError(
            f"{call} returned shape {list(value.shape)}, expected [B, T] = {list(mask.shape)} as in Batch.mask: {remedy}"
        )
    return value


def check_same_batch(value: Batch, part: object, batch: Batch) -> Batch:
    """Return `value`, the result of a filter or of reward shaping for `batch`.

    Raises:
        ConfigError: not a batch, or one of a different shape.
    """
    name = type(part).__name__
    if not isinstance(value, Batch):
        raise ConfigError(
            f"{name} returned {_describe(value)}, expected a Batch: return dataclasses.replace(batch, reward=…)"
        )
    if value.mask.shape != batch.mask.shape:
        raise ConfigError(
            f"{name} returned a batch of shape {list(value.mask.shape)}, expected [B, T] = {list(batch.mask.shape)}: keep every "
            "row, and set its mask to False to leave a completion out"
        )
    return value


def _describe(value: object) -> str:
    return "None" if value is None else f"a {type(value).__name__}"


def is_finite(value: Tensor, mask: Tensor) -> bool:
    """Check that all values on the mask are finite. Synchronises with the device."""
    return bool(masked.apply_mask(value, mask).isfinite().all())


def explain_nonfinite(part: Part, place: str, batch: Batch, *more_reads: str) -> str:
    """Describe why a part returned NaN or infinity: the batch field that contained it, if any.

    Args:
        place: the algorithm's field that holds the part.
        more_reads: names of `Batch` fields that the part may have read beside its `needs`.
    """
    message = f"{type(part).__name__} in {place} returned NaN or infinite numbers"
    for name in sorted(part.needs.union(more_reads)):
        value = getattr(batch, name)
        if value is None or not value.is_floating_point():
            continue
        where = batch.mask if name in PER_TOKEN else batch.mask.any(1) if name in PER_COMPLETION else None
        if where is not None and not is_finite(value, where):
            cause = _CAUSES.get(name, "correct the code that fills it")
            return f"{message} because Batch.{name}, which it reads, contains such numbers: {cause}"
    return f"{message} although all its inputs are finite: check it for a division by 0, a log of 0 or an overflow"
