"""A model card: what was trained, on what, how it was measured. Its metadata: huggingface.co/docs/hub/model-cards."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path, PurePath
from typing import Any

from policygrad.trackers.console import format_count
from policygrad.training.config.serialization import format_option, format_parts

MODEL_CARD_FILE = "README.md"
"""In the model's folder, where PEFT leaves a form to fill in."""
HUB_TAGS = {"train": "reinforcement-learning", "sft": "sft", "reward-model": "reward-model"}
SHOWN_OPTIONS = (
    "task",
    "data",
    "eval/reward",
    "reward",
    "steps",
    "epochs",
    "prompts_per_step",
    "samples_per_prompt",
    "batch_size",
    "lr",
    "seed",
    "sampling.max_tokens",
    "sampling.temperature",
    "learner.dtype",
    "learner.lora",
)
"""What a reader asks first; the whole is in run.toml, which names folders of the machine and is no part of the model."""

MIXED_OPTIONS = ("task", "eval/reward")
"""What may be several files with + between them."""
GGUF_NOTE = (
    "`policygrad export FOLDER --format gguf` writes this model, its tokenizer and its chat template as one file, where llama.cpp "
    "has names for both architecture and tokenizer."
)


def render_model_card(
    kind: str,
    name: str,
    config: Mapping[str, Any],
    measured: Mapping[str, str],
    numbers: Mapping[str, Any],
    eval_description: str = "",
    changes: Sequence[Mapping[str, Any]] = (),
) -> str:
    """The text of `README.md`.

    kind: train, sft, reward-model. name: of the run. config: as its TOML has it. measured: before and after, in words.
    numbers: what result.json holds. held_out: what it was measured on, where that is not the usual. changes: options that a
    resumed run changed, by step.
    Of a file only its name is told, and of reward functions no folder.
    """
    algorithm = config.get("algorithm", {})
    what = f"by `{algorithm['name']}`" if algorithm else {"sft": "on demonstrations"}.get(kind, "on preferences")
    base = str(config.get("model", ""))
    rows = {"base model": _told(base)} | {key: text for key in SHOWN_OPTIONS if (text := _option(config, key))}
    rows |= {"tokens sampled": format_count(numbers["tokens"])} if numbers.get("tokens") else {}
    pieces = [
        _metadata(kind, base, bool(_at(config, "learner.lora"))),
        f"# {name}",
        f"{_told(base)}, trained {what}, with policygrad {version('policygrad')} (`policygrad {kind}`).",
        "## What was trained, and on what",
        _table(("", ""), rows),
    ]
    if changes:
        steps = {f"after step {each['step']}": ", ".join(map(str, each["options"])) for each in changes}
        pieces += ["## Changed on the way", _table(("when", "option"), steps)]
    if algorithm:
        pieces += [
            "## The algorithm's parts",
            _table(("where", "part"), {k: f"`{v}`" for k, v in format_parts(algorithm).items()}),
        ]
    pieces += ["## How it was measured", *_measured(kind, config, measured, eval_description)]
    if kind != "reward-model":
        pieces += ["## For llama.cpp, Ollama, LM Studio", GGUF_NOTE]
    return "\n\n".join(pieces) + "\n"


def as_merged_card(text: str) -> str:
    """The card of an adapter, as that of the model with the adapter in its weights."""
    return text.replace("library_name: peft", "library_name: transformers", 1)


def _metadata(kind: str, base: str, adapter: bool) -> str:
    """YAML between two rules; the base model only where it is one of the hub's."""
    lines = [f"base_model: {base}"] if re.fullmatch(r"[\w.-]+/[\w.-]+", base) and not Path(base).exists() else []
    lines += [f"library_name: {'peft' if adapter else 'transformers'}"]
    lines += [f"pipeline_tag: {'text-classification' if kind == 'reward-model' else 'text-generation'}"]
    return "\n".join(["---", *lines, "tags:", "- policygrad", f"- {HUB_TAGS[kind]}", "---"])


def _measured(kind: str, config: Mapping[str, Any], measured: Mapping[str, str], held_out: str) -> list[str]:
    """Before and after in words, and on what."""
    if not measured:
        return ["It was not measured."]
    evaluation, temperature = config.get("evaluation", {}), format_option(_at(config, "sampling.temperature"))
    how = (
        f"Mean reward on at most {evaluation.get('problems')} problems, {evaluation.get('samples')} samples each at temperature "
        f"{temperature}, judged as in training. "
    )
    said = f"{how if kind == 'train' else ''}Held out: {held_out or 'problems of the task'}. Nothing else was measured."
    return [_table(("", "before -> after"), measured), said]


def _option(config: Mapping[str, Any], key: str) -> str:
    """In words; "" where it is not set."""
    value = _at(config, key)
    if value in (None, "", []):
        return ""
    if key in MIXED_OPTIONS:
        return "+".join(_told(part.strip()) for part in str(value).split("+"))
    return ", ".join(map(_told, value)) if isinstance(value, list) else _told(value)


def _at(config: Mapping[str, Any], key: str) -> Any:
    found: Any = config
    for name in key.split("."):
        found = found.get(name) if isinstance(found, Mapping) else None
    return found


def _told(value: Any) -> str:
    """A value, without the folders of a path: 0.5*/home/me/mine.py:f is 0.5*mine.py:f."""
    text = format_option(value)
    weight, star, path = text.rpartition("*")
    return weight + star + PurePath(path).name if path.startswith(("/", ".", "~")) else text


def _table(head: tuple[str, str], rows: Mapping[str, str]) -> str:
    cells = [(key.replace("_", " "), text.replace("|", "\\|")) for key, text in rows.items()]
    return "\n".join([f"| {head[0]} | {head[1]} |", "| --- | --- |", *(f"| {key} | {text} |" for key, text in cells)])
