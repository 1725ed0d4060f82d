"""A model card: what was trained, on which data, and how it was evaluated. Metadata: huggingface.co/docs/hub/model-cards."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any

from policygrad import __version__
from policygrad.trackers.console import format_count
from policygrad.training.config.serialization import format_option, format_parts

MODEL_CARD_FILE = "README.md"  # name in the model's folder, where PEFT leaves a form to fill in
HUB_TAGS = {"train": "reinforcement-learning", "sft": "sft", "reward-model": "reward-model"}
SHOWN_OPTIONS = (
    *("task", "data", "eval_data", "reward", "steps", "epochs", "prompts_per_step", "samples_per_prompt"),
    *("batch_size", "lr", "seed", "sampling.max_tokens", "sampling.temperature", "learner.dtype", "learner.lora"),
)
"""What readers ask for first. run.toml has every option, but names folders of the machine and is not part of the model."""
MIXED_OPTIONS = ("task", "eval_data")  # options that may name several files joined by +
GGUF_NOTE = (
    "`policygrad export FOLDER --format gguf` writes this model, its tokenizer and its chat template as one file, where llama.cpp "
    "has names for both architecture and tokenizer."
)


def render_model_card(
    kind: str,
    name: str,
    config: Mapping[str, Any],
    summary: Mapping[str, str],
    values: Mapping[str, Any],
    eval_description: str = "",
    changes: Sequence[Mapping[str, Any]] = (),
    reads_pictures: bool = False,
) -> str:
    """Return the text of `README.md`. Files appear by name only, and reward functions without folders.
    `config`: as its TOML has it; `values`: the contents of result.json; `eval_description`: the evaluation data, if other than
    usual; `changes`: options that a resumed run changed, by step; `reads_pictures`: the model has a processor of pictures."""
    algorithm = config.get("algorithm", {})
    method = f"by `{algorithm['name']}`" if algorithm else {"sft": "on demonstrations"}.get(kind, "on preferences")
    base = str(config.get("model", ""))
    rows = {"base model": _format_value(base)}
    for key in SHOWN_OPTIONS:
        value = _get_option(config, key)
        if value in (None, "", []):
            continue
        if key in MIXED_OPTIONS:
            rows[key] = "+".join(_format_value(part.strip()) for part in str(value).split("+"))
        else:
            rows[key] = ", ".join(map(_format_value, value)) if isinstance(value, list) else _format_value(value)
    rows |= {"tokens sampled": format_count(values["tokens"])} if values.get("tokens") else {}
    header = [f"base_model: {base}"] if re.fullmatch(r"[\w.-]+/[\w.-]+", base) and not Path(base).exists() else []
    header += [f"library_name: {'peft' if _get_option(config, 'learner.lora') else 'transformers'}"]
    written = "image-text-to-text" if reads_pictures else "text-generation"
    header += [f"pipeline_tag: {'text-classification' if kind == 'reward-model' else written}"]
    sections = [
        "\n".join(["---", *header, "tags:", "- policygrad", f"- {HUB_TAGS[kind]}", "---"]),
        f"# {name}",
        f"{_format_value(base)}, trained {method}, with policygrad {__version__} (`policygrad {kind}`).",
        "## What was trained, and on what",
        _render_table(("", ""), rows),
    ]
    if changes:
        by_step = {f"after step {change['step']}": ", ".join(map(str, change["options"])) for change in changes}
        sections += ["## Changed during training", _render_table(("when", "option"), by_step)]
    if algorithm:
        parts = {label: f"`{part}`" for label, part in format_parts(algorithm).items()}
        sections += ["## The algorithm's parts", _render_table(("where", "part"), parts)]
    sections.append("## Evaluation")
    if summary:
        evaluation = config.get("evaluation", {})
        own = evaluation.get("temperature")
        temperature = _get_option(config, "sampling.temperature") if own is None else own
        method = (
            f"Mean reward on at most {evaluation.get('problems')} problems, {evaluation.get('samples_per_prompt')} samples each at "
            f"temperature {format_option(temperature)}, scored as in training. "
            if kind == "train"
            else ""
        )
        data = eval_description or "problems of the task"
        sections += [
            _render_table(("", "before -> after"), summary),
            f"{method}Held-out data: {data}. Nothing else was evaluated.",
        ]
    else:
        sections.append("The model was not evaluated.")
    if kind != "reward-model" and not reads_pictures:
        sections += ["## For llama.cpp, Ollama, LM Studio", GGUF_NOTE]
    return "\n\n".join(sections) + "\n"


def as_merged_card(text: str) -> str:
    """Turn an adapter's card into that of the model with the adapter merged into its weights."""
    return text.replace("library_name: peft", "library_name: transformers", 1)


def _get_option(config: Mapping[str, Any], key: str) -> Any:
    value: Any = config
    for name in key.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


def _format_value(value: Any) -> str:
    """Return a value as text, a path without its folders: 0.5*/home/me/mine.py:f is 0.5*mine.py:f."""
    text = format_option(value)
    weight, star, path = text.rpartition("*")
    return weight + star + PurePath(path).name if path.startswith(("/", ".", "~")) else text


def _render_table(head: tuple[str, str], rows: Mapping[str, str]) -> str:
    cells = [(key.replace("_", " "), text.replace("|", "\\|")) for key, text in rows.items()]
    return "\n".join([f"| {head[0]} | {head[1]} |", "| --- | --- |", *(f"| {key} | {text} |" for key, text in cells)])
