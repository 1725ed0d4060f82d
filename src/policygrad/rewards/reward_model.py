"""A reward model as a reward: any AutoModelForSequenceClassification with one label scores prompt and completion as text.

The policy's token ids never come here: the reward model reads the text with its own tokenizer, so the two may be of different
families.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from policygrad.errors import ConfigError, ModelError
from policygrad.models.classifier import (
    encode_for_scoring,
    load_classifier,
    load_classifier_tokenizer,
    read_num_labels,
    score,
)
from policygrad.models.loading import check_model_name, context_length, locate_model
from policygrad.models.lora_config import is_model_folder
from policygrad.models.tokenizer import check_vocabulary

SCORING_TIMEOUT = 600.0
"""Seconds for one batch of completions."""


@dataclass(frozen=True)
class ModelReward:
    """`model:PATH` as a reward function: a batch of completions at a time, in a worker of its own that loads it once."""

    path: str
    threads: int = 1

    @classmethod
    def from_name(cls, model: str) -> ModelReward:
        """Checked, not loaded.

        Raises:
            ConfigError, ModelError: what is no reward model.
        """
        path = find_reward_model(model)
        check_reward_model(path)
        given = os.environ.get("OMP_NUM_THREADS", "")
        return cls(path, int(given) if given.isdigit() and int(given) > 0 else os.cpu_count() or 1)

    @property
    def reward_options(self) -> dict[str, Any]:
        return {"batched": True, "budget": SCORING_TIMEOUT, "alone": True}

    def reward_prepare(self) -> None:
        """Loads it, outside of any budget; on the GPU where there is one."""
        torch.set_num_threads(self.threads)
        _loaded(self.path)

    def __call__(self, prompts: Sequence[Any], completions: Sequence[str], **_: Any) -> Sequence[float | Exception]:
        """r per completion; in the place of one that cannot be scored, the reason."""
        model, tokenizer = _loaded(self.path)
        context = context_length(model)
        texts: dict[int, list[int]] = {}
        out: list[float | Exception] = [0.0] * len(completions)
        for i, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
            try:
                ids = encode_for_scoring(tokenizer, prompt, completion)
            except ModelError as error:
                out[i] = error
                continue
            if context is not None and len(ids) > context:
                out[i] = ModelError(
                    f"prompt and completion have {len(ids)} tokens, and the reward model reads {context}: lower --max-tokens, "
                    "or shorten the prompts"
                )
            else:
                texts[i] = ids
        for i, value in zip(texts, score(model, list(texts.values())).tolist(), strict=True):
            out[i] = value
        return out


@lru_cache(maxsize=2)
def _loaded(path: str) -> tuple[Any, Any]:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model, tokenizer = load_classifier(path, device=device), load_classifier_tokenizer(path)
    check_vocabulary(tokenizer.hf, model, path)
    return model, tokenizer


def find_reward_model(model: str) -> str:
    """The folder of the model that a run trained, any other folder, or a hub id.

    Raises:
        ConfigError: no name; ModelError: none of those.
    """
    if not model:
        raise ConfigError("reward 'model:' names no model: model:DIR or model:HUB_ID, e.g. model:runs/reward-model-1")
    trained = Path(model) / "model"
    try:
        check_model_name(model)
        if model == "tiny" and not Path(model).is_dir():
            raise ModelError(
                "tiny, the model inside the package, is a causal language model and gives no reward: `policygrad reward-model "
                "--data pairs.jsonl` makes a reward model of it"
            )
        path = str(trained) if is_model_folder(trained) else locate_model(model)
    except ModelError as error:
        raise ModelError(f"reward 'model:{model}': {error}") from error
    return str(Path(path).resolve()) if Path(path).is_dir() else path


def check_reward_model(path: str) -> None:
    """Reads configuration and tokenizer, no weights.

    Raises:
        ModelError: no reward model, more than one label, no tokenizer; with the way out.
    """
    count, kinds = read_num_labels(path)
    if count == 0:
        raise ModelError(
            f"{path!r} is no reward model: it is a {', '.join(kinds)}, which has no head that scores "
            "(needed: …ForSequenceClassification with one label). `policygrad reward-model --data pairs.jsonl --model "
            f"{path}` makes one of it"
        )
    if count != 1:
        raise ModelError(
            f"{path!r} is a classifier with {count} labels; a reward model has one, the score. Choose another, or "
            "write a reward function that makes one number of them"
        )
    load_classifier_tokenizer(path)
