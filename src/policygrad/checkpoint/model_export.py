"""The trained model as others load it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch import nn

from policygrad.errors import RunError
from policygrad.utils.filesystem import apply_default_permissions, fsync_path, install_folder, is_disk_full

ModelWriter = Callable[[Path], None]
"""Writes a model into a folder, which may not be there yet."""


def save_model(folder: Path, model: nn.Module | ModelWriter, tokenizer: Any, resume: str = "", card: str = "") -> Path:
    """`folder/model`, which the AutoModel class it came from and AutoTokenizer load; whole and on the disk, or as it was before.
    Of a model with adapters these alone, in PEFT's format.

    model: or what writes it. tokenizer: transformers' own. resume: what goes on with the run, for the message. card: README.md.

    Raises:
        RunError: a full disk, say; the checkpoint of the last step still holds the weights.
    """
    then = f"then {resume or f'policygrad train --resume {folder}'}"
    left = ("the trained weights are in the last checkpoint: ", then)
    return write_model(folder / "model", model, tokenizer, left, card)


def write_model(
    final: Path,
    model: nn.Module | ModelWriter,
    tokenizer: Any,
    hints: tuple[str, str] = ("", "then again"),
    card: str = "",
) -> Path:
    """The folder `final`, written as a whole. left: what stands before and behind the way out, for the message. card: README.md.

    Raises:
        RunError: a full disk, say.
    """
    temporary = final.with_name(f".tmp-{final.name}")
    shutil.rmtree(temporary, ignore_errors=True)
    from transformers.utils import logging

    try:
        logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        write: Any = model.save_pretrained if isinstance(model, nn.Module) else model
        write(temporary)
        tokenizer.save_pretrained(temporary)
        if card:  # in the place of PEFT's, which is a form
            (temporary / "README.md").write_text(card, encoding="utf-8")
        apply_default_permissions(temporary)
        for path in (*temporary.rglob("*"), temporary):
            fsync_path(path)
        old = install_folder(temporary, final)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        full = is_disk_full(error)
        reason, first = ("the disk is full", "free some space") if full else (str(error), "see to the cause")
        raise RunError(f"{final} was not written: {reason}; {hints[0]}{first}, {hints[1]}") from error
    shutil.rmtree(old, ignore_errors=True)
    return final
