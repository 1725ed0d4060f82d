"""A trained adapter put into the weights of the model that it adapts, for whatever reads whole models only."""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from policygrad.checkpoint.model_folder import write_model
from policygrad.errors import ModelError, RunError
from policygrad.models.adapters import merged
from policygrad.models.classifier import labels, load_classifier
from policygrad.models.classifier import load_tokenizer as classifier_tokenizer
from policygrad.models.loading import load_model, resolve
from policygrad.models.lora import base_of
from policygrad.models.precision import DTYPES
from policygrad.models.tokenizer import load_tokenizer
from policygrad.training.card import CARD, of_whole


def export_merged(
    model: str,
    output: str | None = None,
    *,
    dtype: str | None = None,
    trust_remote_code: bool = False,
    phase: Callable[[str], None] = lambda text: None,
) -> Path:
    """W + (α/r)·B·A for W, added in float32 and rounded once; the folder, which loads without PEFT.

    model: a run's folder, or an adapter's. output: None = `merged` in the run's folder. dtype: fp32, bf16;
    None = what the run computed in.

    Raises:
        ModelError: no adapter, or one that cannot be merged; RunError: there is something in the folder already.
    """
    path = resolve(model)
    base = base_of(path)
    if base is None:
        raise ModelError(f"{model!r} is a whole model, in {path}, so there is nothing to merge: use that folder")
    final = Path(output) if output is not None else Path(model) / "merged"
    if final.exists() and (not final.is_dir() or any(final.iterdir())):
        raise RunError(f"{final} is not empty: choose another --output")
    phase("loading the model")
    whole: nn.Module
    if labels(path, trust_remote_code)[0]:
        whole = load_classifier(path, torch.float32, trust_remote_code=trust_remote_code)
        tokenizer = classifier_tokenizer(path, trust_remote_code).hf
    else:
        whole = load_model(model, trust_remote_code=trust_remote_code)
        tokenizer = load_tokenizer(model, whole, trust_remote_code=trust_remote_code).hf
    phase("merging")
    whole = merged(whole).to(DTYPES[dtype or _own(Path(model))])
    phase("writing")
    final.parent.mkdir(parents=True, exist_ok=True)
    told = Path(path) / CARD
    return write_model(
        final, whole, tokenizer, card=of_whole(told.read_text(encoding="utf-8")) if told.is_file() else ""
    )


def _own(run: Path) -> str:
    """The precision that a run computed in, as its model would have without adapters; float32 of an adapter alone."""
    for file in (run / "run.toml", run / "sft.toml", run / "reward-model.toml"):
        try:
            return str(tomllib.loads(file.read_text(encoding="utf-8"))["learner"]["dtype"])
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return "fp32"
