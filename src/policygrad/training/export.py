"""Export what a run has trained: an adapter merged into its model, the model of a stopped run, or one GGUF file."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

import torch
from torch import nn

from policygrad.checkpoint import format as checkpoints
from policygrad.checkpoint.export_probe import Probe, check_file, compare_probes, round_weights, take_probe
from policygrad.checkpoint.model_export import write_model
from policygrad.errors import ConfigError, EngineError, ModelError, RunError
from policygrad.models.adapters import merge_adapters
from policygrad.models.classifier import load_classifier, load_classifier_tokenizer, read_num_labels
from policygrad.models.loading import DTYPES, TRUST_FLAG, load_model, resolve_model
from policygrad.models.lora_config import adapter_base, parse_lora
from policygrad.models.tokenizer import load_tokenizer
from policygrad.models.traits import adapter_configs
from policygrad.training.config.paths import resolve_directory, with_full_paths
from policygrad.training.config.run import OBJECT_PREFIX
from policygrad.training.config.serialization import read_config_file
from policygrad.training.model_card import MODEL_CARD_FILE, as_merged_card, render_model_card
from policygrad.training.run_folder import CONFIG_FILES, check_resumable, config_file
from policygrad.utils.filesystem import is_disk_full
from policygrad.weight_sync.gguf import (
    GGUF_FILE,
    count_embedding_rows,
    explain_unsupported_model,
    extract_byte_pairs,
    import_gguf,
    load_gguf,
    write_gguf,
)

USE_ADAPTER = "use the adapter itself, with PEFT"
CONVERTER_HINT = "use llama.cpp's own convert_hf_to_gguf.py, which supports more kinds"


def export_merged(
    model: str,
    output: str | None = None,
    *,
    dtype: str | None = None,
    trust_remote_code: bool = False,
    phase: Callable[[str], None] = lambda text: None,
) -> Path:
    """Write W + (α/r)·B·A in place of each adapted W, added in float32 and rounded once; the result loads without PEFT.

    Args:
        model: A run's folder, or an adapter's.
        output: None = `merged` in the run's folder.
        dtype: fp32 or bf16; None = the run's.

    The result is read back, and must compute what model and adapter compute (`checkpoint.export_probe`).

    Raises:
        ModelError: There is no adapter, it cannot be merged, or the result is another model.
        RunError: The folder is not empty.
    """
    path = resolve_model(model)
    if adapter_base(path) is None:
        raise ModelError(f"{model!r} is a complete model, in {path}, so there is nothing to merge: use that folder")
    folder = Path(output) if output is not None else Path(model) / "merged"
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise RunError(f"{folder} is not empty: choose another --output")
    phase("loading the model")
    load: Callable[[str], nn.Module] = partial(load_model, trust_remote_code=trust_remote_code)
    if read_num_labels(path, trust_remote_code)[0]:
        load = partial(load_classifier, dtype=torch.float32, trust_remote_code=trust_remote_code)
        network, tokenizer = load(path), load_classifier_tokenizer(path, trust_remote_code)
    else:
        network = load_model(model, trust_remote_code=trust_remote_code, dequantise=True)
        tokenizer = load_tokenizer(model, network, trust_remote_code=trust_remote_code)
    precision = DTYPES[dtype or _read_dtype(Path(model))]
    network, probe = _merge(network, precision, str(folder), phase)
    network = network.to(precision)
    phase("writing")
    folder.parent.mkdir(parents=True, exist_ok=True)
    card = Path(path) / MODEL_CARD_FILE
    text = as_merged_card(card.read_text(encoding="utf-8")) if card.is_file() else ""
    check = check_file(probe, load, str(folder), USE_ADAPTER, release=network)
    return write_model(folder, network, tokenizer, card=text, check=check)


def _merge(
    network: nn.Module, dtype: torch.dtype, what: str, phase: Callable[[str], None], *, least_dim: int = 0
) -> tuple[nn.Module, Probe]:
    """Merge a model's adapters, if it has any, and round the weights; return the model and what it then computes.

    Raises:
        ModelError: It computes something else than before, apart from rounding to `dtype`.
    """
    probe = take_probe(network)
    if adapter_configs(network):
        phase("merging")
        network = merge_adapters(network)
        compare_probes(probe, take_probe(network, probe.ids), what, USE_ADAPTER)
    round_weights(network, dtype, least_dim=least_dim)
    return network, take_probe(network, probe.ids)


def export_stopped(
    run: Path, *, trust_remote_code: bool = False, phase: Callable[[str], None] = lambda text: None
) -> Path:
    """Write `RUN/model-step-N`, the model in the newest intact checkpoint of a run of `train` or `sft`, and leave the run as it is.

    Raises:
        RunError: There is no such run or no checkpoint, or the checkpoint belongs to another model.
        ConfigError: The model needs code of its own, without permission.
        ModelError: The run's initial model cannot be found.
    """
    kind = "sft" if (run / "sft.toml").is_file() else "train"
    file = config_file(check_resumable(run, kind), kind)
    config = read_config_file(file)
    if not isinstance(config.get("learner"), dict):
        raise RunError(f"{file} has no table `learner`, which every run writes: restore a copy of the complete file")
    options = with_full_paths(resolve_directory(config, file))
    name, tokenizer_name, learner = options["model"], options.get("tokenizer"), config["learner"]
    if any(str(value).startswith(OBJECT_PREFIX) for value in (name, tokenizer_name)):
        raise RunError(
            f"{run} was started from Python with a model or tokenizer in memory: finish it there, pg.train(run, resume=folder)"
        )
    saved = checkpoints.load_latest(run / "checkpoints", warn=phase)
    if saved is None:
        raise RunError(f"{run} has no checkpoint yet: resume it with policygrad {kind} --resume {run}")
    phase("loading the model")
    if config["trust_remote_code"] and not trust_remote_code:
        raise ConfigError(
            f"{file}: trust_remote_code lets Python code in the model's folder run, which a file cannot allow: add {TRUST_FLAG}"
        )
    load: Callable[[str], nn.Module] = partial(
        load_model,
        dtype=learner["dtype"],
        trust_remote_code=trust_remote_code,
        lora=parse_lora(learner["lora"]),
        seed=config["seed"],
    )
    model = load(name)
    parameters = dict(model.named_parameters())
    trained = {key.removeprefix("weights/"): t for key, t in saved.tensors.items() if key.startswith("weights/")}
    wrong = [key for key, x in trained.items() if key not in parameters or parameters[key].shape != x.shape]
    if wrong or not trained:
        raise RunError(f"{saved.path} does not fit the model {name!r} ({min(wrong, default='it has no weights')})")
    with torch.no_grad():
        for key, tensor in trained.items():
            parameters[key].copy_(tensor)
    phase("writing")
    tokenizer = load_tokenizer(tokenizer_name or name, model, trust_remote_code=trust_remote_code)
    card = render_model_card(
        kind,
        run.name,
        config | {"steps": saved.step},
        {},
        {"tokens": saved.state.get("tokens")},
        changes=saved.state.get("option_changes", ()),
        reads_pictures=tokenizer.pictures is not None,
    )
    final = run / f"model-step-{saved.step}"
    remedy = f"resume the run with policygrad {kind} --resume {run}"
    check = check_file(take_probe(model), load, str(final), remedy, release=model)
    return write_model(final, model, tokenizer, card=card, check=check)


def export_gguf(
    model: str,
    output: str | None = None,
    *,
    dtype: str | None = None,
    trust_remote_code: bool = False,
    phase: Callable[[str], None] = lambda text: None,
) -> Path:
    """Write one file with weights, vocabulary and chat template, for llama.cpp, Ollama and LM Studio; adapters are merged.

    Args:
        model: A run's, a model's or an adapter's folder, or a hub id.
        output: None = `model.gguf` in that folder.
        dtype: fp32 or bf16; None = the run's, and fp32 for a model of no run.

    Raises:
        ModelError: llama.cpp has no name for the architecture or tokenizer, this is a reward model, or the file, as transformers
            reads it, is another model.
        EngineError: The package `gguf` is missing.
        RunError: The file exists, or cannot be written.
    """
    path = resolve_model(model)
    file = Path(output) if output is not None else Path(model) / GGUF_FILE
    if file.exists():
        raise RunError(f"{file} exists: choose another --output")
    if output is None and not Path(model).is_dir():
        raise RunError(f"{model!r} is no folder here to write the file into: add --output FILE.gguf")
    if read_num_labels(path, trust_remote_code)[0]:
        raise ModelError(f"{model!r} scores texts and writes none: GGUF is for models that generate text")
    import_gguf()  # fails now rather than after the work
    phase("loading the model")
    network = load_model(model, trust_remote_code=trust_remote_code, dequantise=True)
    tokenizer = load_tokenizer(model, network, trust_remote_code=trust_remote_code)
    try:
        if reason := explain_unsupported_model(network):
            raise ModelError(reason)
        vocabulary = extract_byte_pairs(tokenizer, count_embedding_rows(network))
    except ModelError as error:
        raise ModelError(f"{error}: {CONVERTER_HINT}") from error
    folder = Path(model)
    precision = dtype or _read_dtype(folder)
    # vectors stay in float32
    network, probe = _merge(network, DTYPES[precision], str(file), phase, least_dim=2)
    check = check_file(probe, partial(load_gguf, model=network), str(file), CONVERTER_HINT, release=network)
    phase("writing")
    named = folder.resolve().parent if folder.name == "model" else folder.resolve() if folder.is_dir() else folder
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_gguf(file, network, vocabulary, name=named.name, dtype=precision, check=check)
    except EngineError as error:
        raise ModelError(f"{error}: {CONVERTER_HINT}") from error
    except OSError as error:
        reason = ", the disk is full: free some space and try again" if is_disk_full(error) else f": {error}"
        raise RunError(f"{file} was not written{reason}") from error
    return file


def _read_dtype(run: Path) -> str:
    """Return the precision that a run computed in; float32 for an adapter without a run."""
    for name in CONFIG_FILES:
        with suppress(ConfigError, KeyError, TypeError):
            return str(read_config_file(run / name)["learner"]["dtype"])
    return "fp32"
