"""What an algorithm refuses of a batch: roles compared with each other, demonstrations that no part reads, broken rewards."""

from __future__ import annotations

from typing import TYPE_CHECKING

from policygrad.core import masked
from policygrad.core.batch import Batch
from policygrad.core.masked import Groups
from policygrad.errors import ConfigError

if TYPE_CHECKING:
    from policygrad.core.algorithm import Algorithm


def find_mixed_roles(algorithm: Algorithm) -> str:
    """Return why an algorithm does not fit batches of several roles, with a remedy; "" if it does."""
    names = [
        type(part).__name__
        for part in algorithm.parts()
        if ("baseline" in part.needs or part.uses_group_statistics) and "peers" not in part.needs
    ]
    if not names:
        return ""
    return (
        f"{' and '.join(names)} of {algorithm.name} would compare all players of a prompt's games with each other, and the rewards "
        "of a zero-sum game add up to 0 whatever the policy does: use algorithm spiral, which compares each role with its own "
        "past, or compare players of one role, --algorithm.advantage GroupMean --algorithm.advantage.group-mean.within peers "
        "(LeaveOneOut and GroupStd have it too; --algorithm.filters none removes filters)"
    )


def reject_mixed_roles(algorithm: Algorithm, batch: Batch) -> None:
    """Raise ConfigError for a part that compares the completions of a group, where these are of several roles."""
    if batch.role is None or len(batch.role_names) < 2:
        return
    roles = Groups(batch.group, batch.counted)
    if bool((~roles.is_constant(batch.role.to(batch.reward.dtype)) & batch.counted).any()) and (
        reason := find_mixed_roles(algorithm)
    ):
        raise ConfigError(reason)


def reject_unread_demonstrations(algorithm: Algorithm, batch: Batch) -> None:
    """Raise ConfigError for demonstrations that no part reads, which would count as the policy's samples."""
    if batch.demonstration is None or "demonstration" in algorithm.all_needs:
        return
    rows = (batch.demonstration & batch.mask.any(1)).nonzero().flatten().tolist()
    if rows:
        raise ConfigError(
            f"row {rows[0]} is a demonstration (Batch.demonstration), which {algorithm.name} would treat as a sample of the "
            "policy: remove it, set gate=PolicyShaping(), or add DemonstrationNLL() to terms"
        )


def check_rewards(batch: Batch) -> None:
    """Raise ConfigError for non-finite rewards of completions that count or are trained on."""
    total = batch.reward
    if batch.token_reward is not None:
        total = total + masked.apply_mask(batch.token_reward, batch.mask).sum(1)
    bad = ~total.isfinite() & (batch.mask.any(1) | batch.counted)
    if bool(bad.any()):
        rows = bad.nonzero().squeeze(1).tolist()
        listed = ", ".join(map(str, rows[:8])) + (", …" if len(rows) > 8 else "")
        raise ConfigError(
            f"Batch.reward or token_reward is NaN or infinite in row{'s' * (len(rows) > 1)} {listed}: set a number, or exclude "
            "the completion (mask all False), since a NaN would spread to the advantages of its group"
        )
