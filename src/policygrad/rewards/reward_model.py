"""A reward model as a reward: any AutoModelForSequenceClassification with one label scores prompt and completion as text.

It reads the text with its own tokenizer and never gets the policy's token ids, so the two models may be of different families.
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
from policygrad.models.loading import context_length, locate_model
from policygrad.models.tokenizer import check_vocabulary
from policygrad.planning.model_sizes import EMBEDDED_MODELS
from policygrad.utils.devices import choose_device

SCORING_TIMEOUT = 600.0  # seconds for one batch of completions


@dataclass(frozen=True)
class ModelReward:
    """`model:PATH` as a reward function: scores a batch at a time, in a dedicated worker that loads the model once."""

    path: str
    threads: int = 1

    @classmethod
    def from_name(cls, model: str) -> ModelReward:
        """Check configuration and tokenizer without loading weights.

        Raises:
            ConfigError: No name.
            ModelError: No model, not a reward model, more than one label, or no tokenizer; with the remedy.
        """
        if not model:
            raise ConfigError("reward 'model:' names no model: model:DIR or model:HUB_ID, such as model:runs/rm-1")
        try:
            if model in EMBEDDED_MODELS and not Path(model).is_dir():
                raise ModelError(
                    f"{model}, a model inside the package, is a causal language model and not a reward model: "
                    "`policygrad reward-model --data pairs.jsonl` trains a reward model from it"
                )
            path = locate_model(model)
        except ModelError as error:
            raise ModelError(f"reward 'model:{model}': {error}") from error
        path = str(Path(path).resolve()) if Path(path).is_dir() else path
        count, kinds = read_num_labels(path)
        if count == 0:
            raise ModelError(
                f"{path!r} is not a reward model: it is a {', '.join(kinds)}, which has no head that scores "
                "(needed: …ForSequenceClassification with one label). `policygrad reward-model --data pairs.jsonl --model "
                f"{path}` trains one from it"
            )
        if count != 1:
            raise ModelError(
                f"{path!r} is a classifier with {count} labels; a reward model has one, the score. Choose another, or "
                "write a reward function that makes one number of them"
            )
        load_classifier_tokenizer(path)
        threads = os.environ.get("OMP_NUM_THREADS", "")
        return cls(path, int(threads) if threads.isdigit() and int(threads) > 0 else os.cpu_count() or 1)

    @property
    def reward_options(self) -> dict[str, Any]:
        return {"batched": True, "timeout": SCORING_TIMEOUT, "dedicated_worker": True}

    def reward_prepare(self) -> None:
        """Load the model, without a timeout; on the GPU where there is one."""
        torch.set_num_threads(self.threads)
        _load_model(self.path)

    def __call__(self, prompts: Sequence[Any], completions: Sequence[str], **_: Any) -> Sequence[float | Exception]:
        """Return a score per completion, or the error in place of one that cannot be scored."""
        model, tokenizer = _load_model(self.path)
        context = context_length(model)
        texts: dict[int, list[int]] = {}
        scores: list[float | Exception] = [0.0] * len(completions)
        for i, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
            try:
                ids = encode_for_scoring(tokenizer, prompt, completion)
                if context is not None and len(ids) > context:
                    raise ModelError(
                        f"prompt and completion have {len(ids)} tokens, and the reward model reads {context}: lower --max-tokens, "
                        "or shorten the prompts"
                    )
                texts[i] = ids
            except ModelError as error:
                scores[i] = error
        for i, value in zip(texts, score(model, list(texts.values())).tolist(), strict=True):
            scores[i] = value
        return scores


@lru_cache(maxsize=2)
def _load_model(path: str) -> tuple[Any, Any]:
    device = choose_device()
    model, tokenizer = load_classifier(path, device=device), load_classifier_tokenizer(path)
    check_vocabulary(tokenizer.hf, model, path)
    return model, tokenizer
