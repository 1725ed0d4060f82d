"""Whether a model's file has every weight that its configuration asks for: what it lacks, transformers would draw at random."""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn

from policygrad.errors import ModelError

NAMED = 5
"""Tensors that a message names; it counts the others."""
_COMPUTED = re.compile(
    r"(^|\.)(inv_freq|original_inv_freq|position_ids|token_type_ids|num_batches_tracked|masked_bias|attn\.bias"
    r"|attention\.bias|_extra_state)$"
)
"""Buffers that older versions wrote and newer ones compute."""
_OF_ANOTHER_TASK = re.compile(
    r"^(lm_head|embed_out|score|classifier|classification_head|regression_head|reward_head|value_head|v_head|qa_outputs|cls|mtp)\."
    r"|(^|\.)pooler\."
)
"""Heads that a model trained for something else has."""


def check_complete(
    model: nn.Module,
    info: Mapping[str, Any],
    what: str,
    *,
    new: Callable[[str], bool] = lambda name: False,
) -> None:
    """Refuses a model of which transformers has drawn weights at random; warns of tensors that it left out.

    info: as `from_pretrained(output_loading_info=True, ignore_mismatched_sizes=True)` gives it, which knows of tied weights.
    what: the model, for messages. new: whether a tensor is meant to be drawn, by its name.

    Raises:
        ModelError: tensors that the file lacks, or has in another shape; with the way out.
    """
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    missing = sorted(n for n in info["missing_keys"] if not new(n) and (n in parameters or not _COMPUTED.search(n)))
    others = sorted((str(n), tuple(has), tuple(asks)) for n, has, asks in info["mismatched_keys"] if not new(n))
    unknown = sorted(n for n in info["unexpected_keys"] if not (_COMPUTED.search(n) or _OF_ANOTHER_TASK.search(n)))
    said = []
    if missing:
        said.append(f"its file lacks {_named(missing)}")
    if others:
        shapes = [f"{name} {list(has)} instead of {list(asks)}" for name, has, asks in others]
        said.append(f"its file has another shape than config.json asks for of {_named(shapes)}")
    if said:
        raise ModelError(
            f"{what} would have random weights: {', and '.join(said)}. {_way_out(model, missing, unknown)}"
        )
    if unknown:
        warnings.warn(
            f"{what}: {type(model).__name__} has no place for {_named(unknown)} of its file, and leaves that out: is its "
            "config.json the file's own?",
            stacklevel=3,
        )


def _named(names: Iterable[str]) -> str:
    names = list(names)
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return f"{len(names)} tensor{'s' * (len(names) > 1)} ({', '.join(names[:NAMED])}{more})"


def _way_out(model: nn.Module, missing: list[str], unknown: list[str]) -> str:
    head = getattr(model, "get_output_embeddings", lambda: None)()
    names = {name for name, module in model.named_modules() if head is not None and module is head}
    if missing and all(name.rpartition(".")[0] in names for name in missing):
        return "If its head shares the embedding's weights, set tie_word_embeddings to true in config.json; else get the whole file"
    if unknown:
        return f"The file has {_named(unknown)} instead: give it the config.json that it was saved with"
    return "Give it the config.json that it was saved with, or get the whole file again"


@contextmanager
def unreported() -> Iterator[None]:
    """Without transformers' own table of such tensors, which `check_complete` says in fewer words."""

    def keep(record: logging.LogRecord) -> bool:
        said = record.getMessage()
        return "LOAD REPORT" not in said or "CONVERSION" in said  # of the latter its error says nothing

    loggers = [logging.getLogger(f"transformers.{name}") for name in ("modeling_utils", "integrations.peft")]
    for logger in loggers:
        logger.addFilter(keep)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(keep)
