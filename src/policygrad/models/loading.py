"""Loading a causal language model."""

from __future__ import annotations

import json
import logging
import os
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from fnmatch import fnmatchcase
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from policygrad.errors import ConfigError, ModelError
from policygrad.models.adapters import (
    adapter_configs,
    add_adapters,
    check_4bit_gradients,
    quantization_kwargs,
    reload_saved_precision,
    require_peft,
    train_only_adapters,
)
from policygrad.models.lora_config import (
    ADAPTER_FILE,
    Lora,
    adapter_base,
    check_same_adapter,
    is_model_folder,
    read_lora,
)
from policygrad.planning.model_shapes import check_sizes
from policygrad.utils.filesystem import parse_json

# Whether a model's file has every weight that its configuration asks for: what it lacks, transformers would draw at random.

MAX_NAMES_SHOWN = 5
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


def check_missing_weights(
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
    more = f" and {len(names) - MAX_NAMES_SHOWN} more" if len(names) > MAX_NAMES_SHOWN else ""
    return f"{len(names)} tensor{'s' * (len(names) > 1)} ({', '.join(names[:MAX_NAMES_SHOWN])}{more})"


def _way_out(model: nn.Module, missing: list[str], unknown: list[str]) -> str:
    head = getattr(model, "get_output_embeddings", lambda: None)()
    names = {name for name, module in model.named_modules() if head is not None and module is head}
    if missing and all(name.rpartition(".")[0] in names for name in missing):
        return "If its head shares the embedding's weights, set tie_word_embeddings to true in config.json; else get the whole file"
    if unknown:
        return f"The file has {_named(unknown)} instead: give it the config.json that it was saved with"
    return "Give it the config.json that it was saved with, or get the whole file again"


@contextmanager
def silence_load_report() -> Iterator[None]:
    """Without transformers' own table of such tensors, which `check_missing_weights` says in fewer words."""

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


# Where a model is: a folder, or a hub id. What is neither is refused at once, and without a network only the cache is asked.

HUB_TIMEOUT = 5.0  # seconds for the hub's first answer; transformers alone would try for half a minute
MAX_NAME_BYTES = 255  # bytes of a name
_HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")


def check_model_name(model: str) -> None:
    """Raises ModelError for what no system takes for a folder's name."""
    if any(len(part.encode(errors="replace")) > MAX_NAME_BYTES for part in Path(model).parts):
        raise ModelError(
            f"there is no model {model[:40]!r}…: a name has at most {MAX_NAME_BYTES} bytes, this has {len(model)} characters"
        )


def locate_model(model: str) -> str:
    """A folder as it is; a hub id, or the folder of the cache that holds it when the hub cannot be reached.

    Raises:
        ModelError: neither a folder nor a hub id; a hub id that nobody has.
    """
    path = Path(model)
    if path.is_dir():
        return model
    if path.exists():
        raise ModelError(f"the model {model!r} is a file: give the folder that holds config.json and safetensors")
    if not _HUB_ID.fullmatch(model):
        raise ModelError(
            f"there is no model folder {model!r}: a relative path starts at {Path.cwd().name!r}, the current folder"
        )
    return _on_hub(model)[0]


def list_hub_files(model: str) -> frozenset[str]:
    """Names of what a hub's repository holds, as the hub says, or of what the cache has of it; empty of a folder.

    Raises:
        ModelError: neither a folder nor a hub id that somebody has.
    """
    return frozenset() if Path(model).exists() or not _HUB_ID.fullmatch(model) else _on_hub(model)[1]


@lru_cache(maxsize=8)
def _on_hub(model: str) -> tuple[str, frozenset[str]]:
    """(what to load it by, the names of its files)."""
    from huggingface_hub import HfApi, try_to_load_from_cache
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, RepositoryNotFoundError

    try:
        found = HfApi().model_info(model, timeout=HUB_TIMEOUT)
    except RepositoryNotFoundError:
        raise ModelError(
            f"{model!r} is neither a folder here nor a model on the hub. A private one needs `hf auth login`; 'tiny' is the "
            "model inside the package"
        ) from None
    except HFValidationError as error:
        raise ModelError(f"{model!r} is neither a folder here nor a hub id: {str(error).partition('. ')[0]}") from None
    except HfHubHTTPError:
        return model, frozenset()  # the hub is there: let it say to transformers what is the matter
    except Exception as error:  # no network; of which class depends on the hub client's version
        known = [try_to_load_from_cache(model, name) for name in ("config.json", ADAPTER_FILE)]
        cached = next((Path(path).parent for path in known if isinstance(path, str)), None)
        if cached is None:
            raise ModelError(
                f"there is no folder {model!r}, the hub cannot be reached ({type(error).__name__}), and its cache does not have "
                "the model. Give a folder with config.json and safetensors, or 'tiny', the model inside the package"
            ) from None
        return str(cached), frozenset(file.name for file in cached.iterdir())
    return model, frozenset(file.rfilename for file in found.siblings or ())


def push_to_hub(folder: Path, repo: str, public: bool = False) -> str:
    """The folder's files as one commit on the hub; where it then is. public: for everybody, where the repository is new.

    repo: OWNER/NAME. The hub is that of HF_ENDPOINT, the token that of HF_TOKEN or `hf auth login`.

    Raises:
        ModelError: no such name, no token, or what the hub or the way to it refuses.
    """
    from huggingface_hub import HfApi, get_token
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    check_hub_repo(repo)
    if get_token() is None:
        raise ModelError(
            f"to push to {repo} the hub asks who you are: `hf auth login`, or set HF_TOKEN to a token that may write"
        )
    try:
        hub = HfApi()
        hub.create_repo(repo, private=not public, exist_ok=True)
        hub.upload_folder(repo_id=repo, folder_path=folder, commit_message="Trained with policygrad")
        return f"{hub.endpoint}/{repo}"
    except (HfHubHTTPError, HFValidationError) as error:
        said = " ".join(str(error).split())
        raise ModelError(
            f"the hub refuses {repo}: {said}; look at the name, and whether the token may write there"
        ) from error
    except OSError as error:
        raise ModelError(f"{folder} cannot be read: {error.strerror or error}") from error
    except Exception as error:  # no network; of which class depends on the hub client's version
        why = f"{type(error).__name__}: {error}"
        raise ModelError(f"the hub cannot be reached ({why}); the model stays in {folder}, push again later") from error


def check_hub_repo(repo: str) -> None:
    """Raises ModelError for what is no OWNER/NAME."""
    if not re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", repo):
        raise ModelError(f"{repo!r} is no repository of the hub: OWNER/NAME, such as me/my-model")


# Floating-point formats by name, and the one that sums are taken in.

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
ONEDNN_CACHE = "ONEDNN_PRIMITIVE_CACHE_CAPACITY", "64"
"""oneDNN's variable for how many compiled operations it keeps, 1024 without it; and how many are enough."""


def limit_onednn_cache() -> None:
    """oneDNN compiles an operation for every shape that it meets, in bfloat16 on a CPU, and micro-batches have ever new ones:
    400 of the 1,900 MiB of a run, which takes as long without. It reads the variable at its first operation; one's own stays."""
    os.environ.setdefault(*ONEDNN_CACHE)


def at_least_float32(x: Tensor) -> Tensor:
    """bfloat16 and float16 in float32; float32 and float64 as they are."""
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


# What of a model's folder is believed: configuration, tokenizer and safetensors. Code and pickles are programs.

TRUST_FLAG = "--trust-remote-code"
ADAPTER, SAFE_ADAPTER = "adapter_model.bin", "adapter_model.safetensors"
_PICKLES = ("pytorch_model*.bin", "model*.bin", "*.pt", "*.pth", "*.pkl", "*.ckpt")


def pretrained_kwargs(trust: bool) -> dict[str, Any]:
    """How `from_pretrained` and `from_config` are called: never a question on the terminal. trust: run the folder's own code."""
    return {"trust_remote_code": trust}


def weight_kwargs(trust: bool) -> dict[str, Any]:
    """`reading`, for what also has weights: those of safetensors only."""
    return {**pretrained_kwargs(trust), "use_safetensors": True}


def reject_pickle_files(path: str, what: str) -> None:
    """Raises ModelError where a folder has its weights as pickles only, or an adapter on the hub has. A whole model on the hub is
    transformers' to find, which is asked for safetensors; of an adapter it would take what there is."""
    folder = Path(path)
    there = {file.name for file in folder.iterdir() if file.is_file()} if folder.is_dir() else list_hub_files(path)
    if ADAPTER in there and SAFE_ADAPTER not in there:  # whatever stands beside it
        raise ModelError(f"{_pickled(what, ADAPTER)}. {_adapter_as_safe(path)}")
    safe = not folder.is_dir() or any(name.endswith(".safetensors") for name in there)
    found = [] if safe else sorted(name for name in there for kind in _PICKLES if fnmatchcase(name, kind))
    if found:
        raise ModelError(f"{_pickled(what, found[0])}. {_as_safe(path)}")


def _pickled(what: str, file: str) -> str:
    return f"{what} has its weights in {file}, a pickle, which can run any program when it is read"


def _as_safe(path: str) -> str:
    return (
        'If you trust whoever made it, write it as safetensors beside it: python -c "from transformers import '
        f'AutoModelForCausalLM as M; M.from_pretrained({path!r}, use_safetensors=False).save_pretrained({path!r})"'
    )


def _adapter_as_safe(path: str) -> str:
    """torch reads the tensors of such a file alone, and refuses whatever else is in it."""
    folder = path if Path(path).is_dir() else path.rpartition("/")[2]
    here = "" if folder == path else f"fetch it, `hf download {path} --local-dir {folder}`, and "
    old, new = (str(Path(folder) / name) for name in (ADAPTER, SAFE_ADAPTER))
    command = f"import torch; from safetensors.torch import save_file as f; f(torch.load({old!r}, weights_only=True), {new!r})"
    end = "" if folder == path else f", and give {folder}"
    return f'Have its tensors written as safetensors, which runs nothing: {here}python -c "{command}"{end}'


def read_config(path: str, what: str) -> dict[str, Any]:
    """Read config.json; {} where there is none that transformers could read either, which says why.

    Raises:
        ModelError: a size that no model has, of which building one layer after the other would take hours, or all memory.
    """
    from transformers.utils.hub import cached_file

    try:  # on the hub too
        config = parse_json(Path(str(cached_file(path, "config.json"))).read_bytes())
    except (OSError, ValueError):
        return {}
    if not isinstance(config, dict):
        return {}
    try:
        for part in (config, config.get("text_config")):
            check_sizes(part if isinstance(part, dict) else {})
    except ValueError as error:
        raise ModelError(f"{what} has a config.json in which {error}; put the model's own back") from error
    return config


def load_error(what: str, error: Exception, needs: str, path: str = "") -> ModelError:
    """What transformers says, as a refusal with a way out. path: the folder, whose files may tell more."""
    text = str(error)
    if "trust_remote_code" in text:
        return ModelError(
            f"{what} brings code of its own along, which is not run unless you say so: read it, then give {TRUST_FLAG} (from Python "
            "trust_remote_code=True), or take a model whose architecture transformers has"
        )
    lines = [line.strip().rstrip(" .") for line in text.strip().splitlines()] or [""]
    first = " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]
    said = _malformed(path) or (f"{first[:-1]} …" if first.endswith(":") else first) or repr(error)
    return ModelError(f"cannot load {what}, whose folder needs {needs}: {said}")


def _malformed(path: str) -> str:
    """Which of a folder's configuration files is no JSON object, in words; "" where all are, or it is no folder."""
    for file in sorted(Path(path).glob("*config.json")) if path else ():
        try:
            if not isinstance(json.loads(file.read_bytes()), dict):
                return f"{file.name} holds no JSON object; put the model's own back"
        except (ValueError, RecursionError, OSError) as error:
            return f"{file.name} is no JSON ({error}); put the model's own back"
    return ""


EMBEDDED_MODEL = "tiny"
LoadingInfo = Mapping[str, Any]
"""Names of tensors by what became of them, as transformers tells."""


def resolve_model(model: str) -> str:
    """A directory or hub id; `tiny` is the base model inside the package, a run's folder the model it trained."""
    if model == EMBEDDED_MODEL:
        return str(Path(__file__).parents[1] / "models" / EMBEDDED_MODEL)
    check_model_name(model)
    trained = Path(model) / "model"
    return str(trained) if is_model_folder(trained) else locate_model(model)


def load_model(
    model: str | nn.Module,
    *,
    dtype: str = "fp32",
    device: str = "cpu",
    trust_remote_code: bool = False,
    lora: Lora | None = None,
    seed: int = 0,
) -> nn.Module:
    """The model without dropout, in evaluation mode, so that an unchanged policy's ratio is 1.

    A module in a name's place is used as it is, in its own precision and with the parameters that require a gradient in it. Of
    the folder of an adapter, the model that it adapts with the adapter in it, which alone trains.
    trust_remote_code: whether Python code in the model's folder or repository may run. lora: adapters to put in, where there are
    none; their A is drawn by `seed`.

    Raises:
        ModelError: no such model, one that is a pickle or needs code that is not trusted, or an object that is no causal language
            model of transformers' kind.
        ConfigError: adapters that cannot be put in, or are others than those that are there.
    """
    if DTYPES[dtype] == torch.bfloat16 and device == "cpu":
        limit_onednn_cache()
    if isinstance(model, str):
        loaded = _load(model, dtype, device, trust_remote_code, lora)
    else:
        loaded = _checked(model)
        if lora is not None and lora.bits is not None:
            raise ConfigError(
                "learner.lora bits=4 reads the weights in four bits, and the model is an object: leave bits out"
            )
    if not getattr(loaded, "is_quantized", False):
        loaded = loaded.to(device)
    if lora is not None and not (isinstance(model, str) and adapter_configs(loaded)):
        loaded = add_adapters(loaded, lora, base=model_origin(model), seed=seed)
    for module in loaded.modules():
        disable_dropout(module)
    return loaded.eval()


def model_origin(model: str | nn.Module) -> str:
    """What an adapter's folder is to name as the model it adapts: a hub id, or a folder wherever it is read from."""
    name = resolve_model(model) if isinstance(model, str) else str(getattr(model, "name_or_path", ""))
    return str(Path(name).resolve()) if name and Path(name).is_dir() else name


def _load(model: str, dtype: str, device: str, trust: bool, lora: Lora | None) -> nn.Module:
    from transformers.utils import logging

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    path = resolve_model(model)
    reject_pickle_files(path, f"the model {model!r}")
    _refuse_encoder_decoder(read_config(path, f"the model {model!r}"), model)
    adapted = adapter_base(path)
    if adapted is not None:
        require_peft(f"the model {model!r}, which is an adapter,")
        check_same_adapter(lora or Lora(), read_lora(path), model)
        reject_pickle_files(adapted, f"the model {adapted!r}, which {model!r} adapts,")
        read_config(adapted, f"the model {adapted!r}, which {model!r} adapts,")
    bits = quantization_kwargs(lora, DTYPES[dtype])
    try:
        loaded, info, base = _pretrained(
            path, DTYPES[dtype], trust, adapted, bits | ({"device_map": device} if bits else {})
        )
    except Exception as error:  # of which class depends on what is wrong with which file
        lost = adapted is not None and not Path(adapted).is_dir() and Path(adapted).is_absolute()
        if lost:
            raise ModelError(
                f"{model!r} is an adapter of {adapted!r}, and there is no such folder: write where it is now into "
                f"{Path(path) / ADAPTER_FILE}, as base_model_name_or_path"
            ) from error
        raise load_error(f"the model {model!r}", error, "config.json and safetensors", path) from error
    if base is not None:
        check_missing_weights(*base, f"the model {model!r} adapts")
    check_missing_weights(loaded, info, f"the model {model!r}")
    if bits:
        check_4bit_gradients(loaded)
    if not adapter_configs(loaded):
        return loaded.requires_grad_(True) if not bits else loaded
    train_only_adapters(loaded)
    reload_saved_precision(loaded, path)
    return loaded


def _refuse_encoder_decoder(config: Mapping[str, Any], model: str) -> None:
    """Half of such a model can be loaded as a causal one, and would read nothing of what its other half says."""
    if config.get("is_encoder_decoder") is True:
        raise ModelError(
            f"the model {model!r} ({config.get('model_type')}) is an encoder with a decoder, which reads its prompt apart: take a "
            "causal language model, a decoder alone"
        )


def _checked(model: object) -> nn.Module:
    if not isinstance(model, nn.Module):
        raise ModelError(f"a model is a folder, a hub id or a torch module, not {type(model).__name__}")
    if not hasattr(getattr(model, "config", None), "get_text_config"):
        raise ModelError(
            f"{type(model).__name__} has no `config` as a causal language model of transformers has: give one of those, or "
            "the folder it was saved in"
        )
    return model


def _pretrained(
    path: str, dtype: torch.dtype, trust: bool, adapted: str | None, options: Mapping[str, Any]
) -> tuple[nn.Module, LoadingInfo, tuple[nn.Module, LoadingInfo] | None]:
    """The model and what was loaded of it; of an adapter alone also its base, without weights, and what would be loaded.

    With SDPA where the architecture has it, else (Gemma 2, BLOOM, Mamba) with what transformers chooses.
    """
    from transformers import AutoModelForCausalLM

    load: Any = partial(
        AutoModelForCausalLM.from_pretrained,
        dtype=dtype,
        output_loading_info=True,
        ignore_mismatched_sizes=True,
        **weight_kwargs(trust),
        **options,
    )
    with silence_load_report():  # sizes that mismatch are refused by name, and not by transformers, which names none
        base = None
        if adapted is not None and not options:  # transformers tells of the adapter only
            base = load(adapted, device_map="meta")
        try:
            loaded, info = load(path, attn_implementation="sdpa")
        except ValueError as error:
            if "attention implementation" not in str(error):
                raise
            loaded, info = load(path)
    return loaded, info, base


def disable_dropout(module: nn.Module) -> None:
    """Modules and plain numbers (`attention_dropout`, `resid_pdrop`, `layerdrop`): recomputed activations are in training mode."""
    if isinstance(module, nn.modules.dropout._DropoutNd):
        module.p = 0.0
    for name, value in list(vars(module).items()):
        if "drop" in name and isinstance(value, float):
            setattr(module, name, 0.0)


def context_length(model: nn.Module) -> int | None:
    """Positions the model was made for, in tokens; None when its configuration does not say."""
    config: Any = model.config
    config = config.get_text_config()  # that of the language model, where there is a vision tower beside it
    return getattr(config, "max_position_embeddings", None)
