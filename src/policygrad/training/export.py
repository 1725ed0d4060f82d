"""What a run has trained, in another form: an adapter in the weights of the model that it adapts, for whatever reads whole models
only; the model of a run that was stopped, which has none in its folder yet; one GGUF file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from policygrad.checkpoint import format as checkpoints
from policygrad.checkpoint.model_export import write_model
from policygrad.errors import ConfigError, EngineError, ModelError, RunError
from policygrad.models.adapters import merge_adapters
from policygrad.models.classifier import load_classifier, read_num_labels
from policygrad.models.classifier import load_classifier_tokenizer as classifier_tokenizer
from policygrad.models.loading import DTYPES, TRUST_FLAG, load_model, resolve_model
from policygrad.models.lora_config import adapter_base, parse_lora
from policygrad.models.tokenizer import load_tokenizer
from policygrad.training.config.paths import resolve_directory, with_full_paths
from policygrad.training.config.run import OBJECT_PREFIX
from policygrad.training.config.serialization import read_config
from policygrad.training.model_card import MODEL_CARD_FILE, as_merged_card, render_model_card
from policygrad.training.run_folder import check_resumable
from policygrad.utils.filesystem import is_disk_full
from policygrad.weight_sync.gguf import GGUF_FILE as GGUF
from policygrad.weight_sync.gguf import (
    count_embedding_rows,
    explain_unsupported_model,
    extract_byte_pairs,
    import_gguf,
    write_gguf,
)

CONVERTER_HINT = "take llama.cpp's own convert_hf_to_gguf.py, which knows more kinds"
"""The way out of what is not written here."""


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
    path = resolve_model(model)
    base = adapter_base(path)
    if base is None:
        raise ModelError(f"{model!r} is a whole model, in {path}, so there is nothing to merge: use that folder")
    final = Path(output) if output is not None else Path(model) / "merged"
    if final.exists() and (not final.is_dir() or any(final.iterdir())):
        raise RunError(f"{final} is not empty: choose another --output")
    phase("loading the model")
    whole: nn.Module
    if read_num_labels(path, trust_remote_code)[0]:
        whole = load_classifier(path, torch.float32, trust_remote_code=trust_remote_code)
        tokenizer = classifier_tokenizer(path, trust_remote_code).hf
    else:
        whole = load_model(model, trust_remote_code=trust_remote_code)
        tokenizer = load_tokenizer(model, whole, trust_remote_code=trust_remote_code).hf
    phase("merging")
    whole = merge_adapters(whole).to(DTYPES[dtype or _own(Path(model))])
    phase("writing")
    final.parent.mkdir(parents=True, exist_ok=True)
    told = Path(path) / MODEL_CARD_FILE
    return write_model(
        final, whole, tokenizer, card=as_merged_card(told.read_text(encoding="utf-8")) if told.is_file() else ""
    )


def export_stopped(
    run: Path, *, trust_remote_code: bool = False, phase: Callable[[str], None] = lambda text: None
) -> Path:
    """`RUN/model-step-N`: the model as the newest intact checkpoint of a run of `train` or `sft` has it. The run goes on as before.

    Raises:
        RunError: no such run, no checkpoint, one of another model; ConfigError: a model with code of its own that is not allowed;
        ModelError: the model that the run began with is not there.
    """
    kind = "sft" if (run / "sft.toml").is_file() else "train"
    file = check_resumable(run, kind) / ("run.toml" if kind == "train" else "sft.toml")
    settings = read_config(file)
    if not isinstance(settings.get("learner"), dict):
        raise RunError(f"{file} has no table learner, which a run writes: put a copy of the whole file there")
    there = with_full_paths(resolve_directory(settings, file))
    name, tokens, learner = there["model"], there.get("tokenizer"), settings["learner"]
    if any(str(given).startswith(OBJECT_PREFIX) for given in (name, tokens)):
        raise RunError(
            f"{run} was begun from Python with a model or tokenizer in memory: finish it there, pg.train(run, resume=folder)"
        )
    saved = checkpoints.load_latest(run / "checkpoints", warn=phase)
    if saved is None:
        raise RunError(f"{run} has no checkpoint yet: go on with it, policygrad {kind} --resume {run}")
    phase("loading the model")
    if settings["trust_remote_code"] and not trust_remote_code:
        raise ConfigError(
            f"{file}: trust_remote_code lets Python in the model's folder run, which a file cannot say for you: give {TRUST_FLAG} too"
        )
    model = load_model(
        name,
        dtype=learner["dtype"],
        trust_remote_code=trust_remote_code,
        lora=parse_lora(learner["lora"]),
        seed=settings["seed"],
    )
    _put(saved, model, name)
    told = render_model_card(
        kind,
        run.name,
        settings | {"steps": saved.step},
        {},
        {"tokens": saved.state.get("tokens")},
        changes=saved.state.get("changes", ()),
    )
    phase("writing")
    tokenizer = load_tokenizer(tokens or name, model, trust_remote_code=trust_remote_code).hf
    return write_model(run / f"model-step-{saved.step}", model, tokenizer, card=told)


@torch.no_grad()
def _put(saved: checkpoints.Checkpoint, model: nn.Module, name: str) -> None:
    """The checkpoint's weights into the model that they were trained in. Raises RunError where they are another's."""
    own = dict(model.named_parameters())
    trained = {key.removeprefix("weights/"): t for key, t in saved.tensors.items() if key.startswith("weights/")}
    odd = [key for key, tensor in trained.items() if key not in own or own[key].shape != tensor.shape]
    if odd or not trained:
        raise RunError(f"{saved.path} does not fit the model {name!r} ({min(odd, default='it has no weights')})")
    for key, tensor in trained.items():
        own[key].copy_(tensor)


def export_gguf(
    model: str,
    output: str | None = None,
    *,
    dtype: str | None = None,
    trust_remote_code: bool = False,
    phase: Callable[[str], None] = lambda text: None,
) -> Path:
    """One file with weights, vocabulary and chat template, which llama.cpp, Ollama and LM Studio load; adapters are merged.

    model: a run's folder, a model's or an adapter's, or a hub id. output: None = `model.gguf` in that folder. dtype: fp32, bf16;
    None = what the run computed in, and fp32 of what is no run's.

    Raises:
        ModelError: an architecture, or a tokenizer, that llama.cpp has no name for, or a reward model; EngineError: the package
            `gguf` is missing; RunError: the file is there already, or cannot be written.
    """
    path = resolve_model(model)
    final = Path(output) if output is not None else Path(model) / GGUF
    if final.exists():
        raise RunError(f"{final} is there already: choose another --output")
    if output is None and not Path(model).is_dir():
        raise RunError(f"{model!r} is no folder here, where the file could go: add --output FILE.gguf")
    if read_num_labels(path, trust_remote_code)[0]:
        raise ModelError(f"{model!r} scores texts and writes none: GGUF is for models that do")
    import_gguf()  # before the work, not after it
    phase("loading the model")
    whole = load_model(model, trust_remote_code=trust_remote_code)
    tokenizer = load_tokenizer(model, whole, trust_remote_code=trust_remote_code)
    whole = merge_adapters(whole) if adapter_base(path) is not None else whole
    try:
        if reason := explain_unsupported_model(whole):
            raise ModelError(reason)
        words = extract_byte_pairs(tokenizer, count_embedding_rows(whole))
    except ModelError as error:
        raise ModelError(f"{error}: {CONVERTER_HINT}") from error
    phase("writing")
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        write_gguf(final, whole, words, name=_called(model), dtype=dtype or _own(Path(model)))
    except EngineError as error:
        raise ModelError(f"{error}: {CONVERTER_HINT}") from error
    except OSError as error:
        reason, way_out = (
            ("the disk is full", "free some space") if is_disk_full(error) else (str(error), "see to the cause")
        )
        raise RunError(f"{final} was not written: {reason}; {way_out}, then again") from error
    return final


def _called(model: str) -> str:
    """A model's name for people: of a path the last part, and of a run's `model` the run's."""
    path = Path(model)
    return (path.resolve().parent if path.name == "model" else path.resolve() if path.is_dir() else path).name


def _own(run: Path) -> str:
    """The precision that a run computed in, as its model would have without adapters; float32 of an adapter alone."""
    for file in (run / "run.toml", run / "sft.toml", run / "reward-model.toml"):
        try:
            return str(read_config(file)["learner"]["dtype"])
        except (ConfigError, KeyError, TypeError):
            continue
    return "fp32"
