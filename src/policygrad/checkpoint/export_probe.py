"""Check that what was written for others computes what it was written from, before the file is called done.

A few fixed texts of random tokens go through the source and through what was read back. A wrong name, a missing sum or a weight
that is tied again changes all of their log-probabilities; rounding changes them a little, and an expert that rounding chose
otherwise changes a few.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from policygrad.errors import ModelError

NUM_TEXTS, LENGTH = 6, 32
TOLERANCE = 2e-3
"""Nats that a text's log-probabilities may be off. Sums in another order are off by 1e-5 to 1e-4 in float32."""
QUANTILE = 0.75
"""The share of positions that is compared: in a mixture of experts rounding may choose another expert at a few."""
_STREAM = 0x6578706F


@dataclass(frozen=True, eq=False)
class Probe:
    """What a model computes for the fixed texts."""

    ids: Tensor
    """[R, T]"""
    outputs: Tensor
    """[N, V] nats in float32, log π at each position; of a classifier [R, K], its scores."""


@torch.no_grad()
def take_probe(model: Any, ids: Tensor | None = None) -> Probe:
    """Return what a model computes for texts, which are chosen for it unless they are given."""
    ids = _choose_texts(model) if ids is None else ids
    logits = model(input_ids=ids.to(next(model.parameters()).device), use_cache=False).logits.float().cpu()
    return Probe(ids, logits.log_softmax(-1).flatten(0, 1) if logits.dim() == 3 else logits)


def compare_probes(source: Probe, result: Probe, what: str, remedy: str) -> float:
    """Return the difference between two models' probes in nats.

    Args:
        what: What was written, for the error message.
        remedy: What to use instead.

    Raises:
        ModelError: It is more than rounding, or not finite.
    """
    if source.outputs.shape != result.outputs.shape:
        raise ModelError(
            f"{what} was not written: read back, it has {result.outputs.shape[-1]:,} outputs, and its source has "
            f"{source.outputs.shape[-1]:,}; {remedy}"
        )
    gaps = (source.outputs - result.outputs).abs().nan_to_num(0.0)  # where both are -inf: tokens that are never written
    gaps[source.outputs.isfinite() != result.outputs.isfinite()] = torch.inf
    difference = float(gaps.amax(-1).quantile(QUANTILE, interpolation="higher"))
    if not difference <= TOLERANCE:
        raise ModelError(
            f"{what} was not written: read back, its log-probabilities are {difference:.2g} nats off those of its source, and "
            f"rounding explains {TOLERANCE:g}; {remedy}. Please report which model this is"
        )
    return difference


def check_file(
    source: Probe, load: Callable[[str], nn.Module], what: str, remedy: str, release: nn.Module | None = None
) -> Callable[[Path], None]:
    """Return what reads a written model back and compares it with its source; it raises ModelError if they differ.

    Args:
        load: Reads a model from where it was written.
        release: The source, which is not needed any more: its memory is free for what is read.
    """

    def check(path: Path) -> None:
        if release is not None:
            release.to("meta")
        try:
            result = load(str(path))
        except Exception as error:  # the class depends on what cannot be read
            raise ModelError(f"{what} was not written: it cannot be read back ({error}); {remedy}") from error
        compare_probes(source, take_probe(result, source.ids), what, remedy)

    return check


@torch.no_grad()
def round_weights(model: nn.Module, dtype: torch.dtype, *, least_dim: int = 0) -> None:
    """Round what a model's file contains to a precision, in place, and keep it in the precision that it has.

    Args:
        least_dim: Tensors of fewer dimensions stay as they are.
    """
    for x in model.state_dict().values():
        if x.is_floating_point() and x.dim() >= least_dim:
            x.copy_(x.to(dtype))


def _choose_texts(model: Any) -> Tensor:
    """Return ids [R, T] without the special tokens of the configuration, some of which only pictures or sounds may stand for."""
    size = int(model.get_input_embeddings().weight.shape[0])
    values = model.config.to_dict()
    texts = (values, values.get("text_config") or {})
    special = {
        x for v in texts for name, x in v.items() if name.endswith(("_token_id", "_token_index")) and isinstance(x, int)
    }
    allowed = torch.tensor([i for i in range(size) if i not in special])
    generator = torch.Generator().manual_seed(_STREAM)
    return allowed[torch.randint(len(allowed), (NUM_TEXTS, LENGTH), generator=generator)]
