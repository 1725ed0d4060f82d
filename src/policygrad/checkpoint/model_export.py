"""Writes the trained model in the format that other programs load."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch import nn

from policygrad.errors import ModelError, RunError
from policygrad.utils.filesystem import apply_default_permissions, explain_write_error, fsync_path, install_folder

ModelWriter = Callable[[Path], None]  # writes a model into a folder, which may not exist yet


def save_model(
    folder: Path, model: nn.Module | ModelWriter, tokenizer: Any, resume_command: str = "", card: str = ""
) -> Path:
    """Write `folder/model` atomically, for the model's AutoModel class and AutoTokenizer; of adapters these alone, in
    PEFT's format. Raises RunError, for example if the disk is full; the last step's checkpoint still has the weights.

    `resume_command` is for messages, and `card` the text of README.md.
    """
    command = resume_command or f"policygrad train --resume {folder}"
    hints = ("the trained weights are in the last checkpoint: ", f"then {command}")
    return write_model(folder / "model", model, tokenizer, hints, card)


def write_model(
    final: Path,
    model: nn.Module | ModelWriter,
    tokenizer: Any,
    hints: tuple[str, str] = ("", "then try again"),
    card: str = "",
    check: Callable[[Path], None] = lambda folder: None,
) -> Path:
    """Write the folder `final` atomically. Raises RunError, for example if the disk is full.

    An error message has `hints` before and after the remedy. `check` is given the folder before it has its name, and raises
    ModelError to discard it.
    """
    temporary = final.with_name(f".tmp-{final.name}")
    shutil.rmtree(temporary, ignore_errors=True)
    from transformers.utils import logging

    try:
        logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        write: Any = model.save_pretrained if isinstance(model, nn.Module) else model
        write(temporary)
        tokenizer.save_pretrained(temporary)
        if card:  # replaces PEFT's, which is a template
            (temporary / "README.md").write_text(card, encoding="utf-8")
        apply_default_permissions(temporary)
        for path in (*temporary.rglob("*"), temporary):
            fsync_path(path)
        check(temporary)
        old = install_folder(temporary, final)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        reason, remedy = explain_write_error(error)
        raise RunError(f"{final} was not written: {reason}; {hints[0]}{remedy}, {hints[1]}") from error
    except ModelError:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    shutil.rmtree(old, ignore_errors=True)
    return final
