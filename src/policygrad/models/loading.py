"""Loading a causal language model, which may also see."""

from __future__ import annotations

import json
import logging
import os
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from policygrad.errors import ConfigError, ModelError
from policygrad.models.lora_config import (
    ADAPTER_FILE,
    Lora,
    adapter_base,
    check_same_adapter,
    is_model_folder,
    read_lora,
    suppress_pattern_warning,
)
from policygrad.models.traits import ADAPTER_WEIGHTS, adapter_configs
from policygrad.planning.model_sizes import EMBEDDED_MODELS, check_sizes
from policygrad.utils.filesystem import UnusableDataError, open_regular, parse_json, read_json

if TYPE_CHECKING:
    from policygrad.models.releases import ReleaseForm

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
ONEDNN_CACHE = "ONEDNN_PRIMITIVE_CACHE_CAPACITY", "64"
"""oneDNN's variable for the number of compiled operations it caches (1024 by default), and a sufficient value."""
HUB_TIMEOUT = 5.0  # seconds for the hub's first answer; transformers alone would try for half a minute
MAX_NAME_BYTES = 255
MAX_NAMES_SHOWN = 5  # tensors named in a message; the others are counted
TRUST_FLAG = "--trust-remote-code"
ADAPTER = "adapter_model.bin"
LoadingInfo = Mapping[str, Any]  # transformers' lists of missing, unexpected and mismatched tensors
_HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")
_PICKLES = ("pytorch_model*.bin", "model*.bin", "*.pt", "*.pth", "*.pkl", "*.ckpt")
_COMPUTED = re.compile(  # buffers that older versions saved and newer ones compute
    r"(^|\.)(inv_freq|original_inv_freq|position_ids|token_type_ids|num_batches_tracked|masked_bias|attn\.bias"
    r"|attention\.bias|_extra_state)$"
)
_OTHER_HEADS = re.compile(  # of a model trained for another task
    r"^(lm_head|embed_out|score|classifier|classification_head|regression_head|reward_head|value_head|v_head|qa_outputs|cls|mtp)\."
    r"|(^|\.)pooler\."
)


def load_model(
    model: str | nn.Module,
    *,
    dtype: str = "fp32",
    device: str = "cpu",
    trust_remote_code: bool = False,
    lora: Lora | None = None,
    seed: int = 0,
    dequantise: bool = False,
) -> nn.Module:
    """Load a model in evaluation mode, without dropout, so that the ratio of an unchanged policy is 1.

    Args:
        model: A name, or a module, which keeps its precision and its trainable parameters. For an adapter's folder, the base
            model with the adapter, which alone is trained.
        trust_remote_code: Allow Python code from the model's folder or repository to run.
        lora: Adapters to add, unless the folder contains some.
        seed: For the random initialisation of new adapters.
        dequantise: Dequantise the base of an adapter that was trained on a release in 4 or 8 bits.

    Raises:
        ModelError: No such model, one that is a pickle or needs untrusted code, or an object that is not a causal language model
            of transformers.
        ConfigError: Adapters that cannot be added, or that contradict those in the folder.
    """
    if DTYPES[dtype] == torch.bfloat16 and device == "cpu":
        if not has_bf16_products():
            warnings.warn(
                "this processor has no instructions for bfloat16, so its products take tens of times as long as float32's: use "
                "--learner.dtype fp32",
                stacklevel=2,
            )
        # oneDNN compiles an operation for every new shape, and micro-batches keep having new ones: without the limit they take
        # 400 of a run's 1,900 MiB, and no time is saved. oneDNN reads the variable at its first operation.
        os.environ.setdefault(*ONEDNN_CACHE)
    if isinstance(model, str):
        loaded = _load(model, DTYPES[dtype], device, trust_remote_code, lora, dequantise)
    else:
        if not isinstance(model, nn.Module):
            raise ModelError(f"a model is a folder, a hub id or a torch module, not {type(model).__name__}")
        if not hasattr(getattr(model, "config", None), "get_text_config"):
            raise ModelError(
                f"{type(model).__name__} has no `config` like that of a causal language model of transformers: give such a model, "
                "or the folder it was saved in"
            )
        loaded = model
        if lora is not None and lora.bits is not None:
            raise ConfigError(
                "learner.lora bits=4 loads the weights in four bits, but the model is an object: leave bits out"
            )
    if not getattr(loaded, "is_quantized", False):
        move_model(loaded, device)
    if lora is not None and not (isinstance(model, str) and adapter_configs(loaded)):
        from policygrad.models.adapters import add_adapters

        loaded = add_adapters(loaded, lora, base=model_origin(model), seed=seed)
    leave_out_zero_padding(loaded)
    disable_dropout(loaded).eval()
    config: Any = loaded.config
    if config.get_text_config()._attn_implementation == "eager":
        from policygrad.models.attention import use_fused_attention

        use_fused_attention(loaded)
    return loaded


def move_model(model: nn.Module, device: str) -> None:
    """Move a model, whose tied parameters stay tied: torch makes new ones where a device's tensors are of another kind."""
    before = list(model.named_parameters(remove_duplicate=False))
    model.to(device)
    first = dict[int, nn.Parameter]()
    for name, parameter in before:
        path, _, last = name.rpartition(".")
        module = model.get_submodule(path)
        setattr(module, last, first.setdefault(id(parameter), getattr(module, last)))


def _load(model: str, dtype: torch.dtype, device: str, trust: bool, lora: Lora | None, dequantise: bool) -> nn.Module:
    from transformers.utils import logging

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    path, what = resolve_model(model), f"the model {model!r}"
    reject_pickle_files(path, what)
    config = read_config(path, what)
    if config.get("is_encoder_decoder") is True:  # half of it can be loaded as a causal model, without the encoder
        raise ModelError(
            f"{what} ({config.get('model_type')}) is an encoder-decoder, which reads its prompt separately: use a causal "
            "language model (decoder-only)"
        )
    base, base_config = adapter_base(path), dict[str, Any]()
    if base is not None:
        from policygrad.models.adapters import require_peft

        require_peft(f"{what}, which is an adapter,")
        check_same_adapter(lora or Lora(), read_lora(path), model)
        reject_pickle_files(base, f"the model {base!r}, which {model!r} adapts,")
        base_config = read_config(base, f"the model {base!r}, which {model!r} adapts,")
    quantization, release = dict[str, Any](), config if base is None else base_config
    form: ReleaseForm | None = None
    if "quantization_config" in release:
        from policygrad.models.releases import read_release_form

        form = read_release_form(release, lora, dtype, what, has_adapter=base is not None)
    if lora is not None and not (form and form.stays_quantised):
        from policygrad.models.adapters import quantization_kwargs

        quantization = quantization_kwargs(lora, dtype)
    is_quantised = bool(quantization or (form and form.stays_quantised))
    load: Any = partial(
        auto_class(config if base is None else base_config).from_pretrained,
        dtype=dtype,
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # they are refused by check_missing_weights, which names them
        use_safetensors=True,
        trust_remote_code=trust,
        **quantization,
        **(form.options if form else {}),
        **({"device_map": device} if is_quantised else {}),
    )
    loaded: nn.Module
    base_info: tuple[nn.Module, LoadingInfo] | None = None
    try:
        with silence_load_report(), suppress_pattern_warning():
            if dequantise and base is not None and form and form.stays_quantised:
                from policygrad.models.releases import load_dequantised

                dequantised: nn.Module = load_dequantised(load, base, path, dtype)
                return dequantised
            if base is not None and not is_quantised:  # for an adapter, transformers reports the adapter's tensors only
                base_info = load(base, device_map="meta")
            try:
                loaded, info = load(path, attn_implementation="sdpa")
            except ValueError as error:
                if "attention implementation" not in str(error):
                    raise
                loaded, info = load(path)  # Gemma 2, BLOOM, Mamba: transformers' default
    except Exception as error:  # the class depends on what is wrong with which file
        if base is not None and not Path(base).is_dir() and Path(base).is_absolute():
            raise ModelError(
                f"{model!r} is an adapter of {base!r}, and there is no such folder: write its present location into "
                f"{Path(path) / ADAPTER_FILE}, as base_model_name_or_path"
            ) from error
        raise load_error(what, error, "config.json and safetensors", path) from error
    if base_info is not None:
        check_missing_weights(*base_info, f"{what} adapts")
    check_missing_weights(loaded, info, what)
    if form and form.is_dequantised:
        from policygrad.models.releases import forget_quantisation

        forget_quantisation(loaded, dtype)
    return _set_trained(loaded, path, is_quantised)


def _set_trained(loaded: nn.Module, path: str, is_quantised: bool) -> nn.Module:
    """Let a loaded model's adapters train, or all of its weights; quantised ones stay frozen."""
    if adapter_configs(loaded):
        from policygrad.models.adapters import reload_saved_precision, train_only_adapters

        train_only_adapters(loaded)
        reload_saved_precision(loaded, path)
    elif not is_quantised:
        loaded.requires_grad_(True)
    if is_quantised:
        from policygrad.models.adapters import check_4bit_gradients

        check_4bit_gradients(loaded)
    return loaded


def auto_class(config: Mapping[str, Any]) -> Any:
    """Return the class of transformers that loads a model: with its vision tower if the folder has one."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES as classes

    name = classes.get(str(config.get("model_type")))
    sees = config.get("vision_config") is not None and name in (config.get("architectures") or ())
    return AutoModelForImageTextToText if sees else AutoModelForCausalLM


def model_origin(model: str | nn.Module) -> str:
    """Return the name of a model for an adapter's configuration: a hub id, or an absolute folder."""
    name = resolve_model(model) if isinstance(model, str) else str(getattr(model, "name_or_path", ""))
    return str(Path(name).resolve()) if name and Path(name).is_dir() else name


def disable_dropout(model: nn.Module) -> nn.Module:
    """Set dropout to 0 in place, in modules and plain numbers (`attention_dropout`, `resid_pdrop`, `layerdrop`).

    Evaluation mode is not enough, because activations are recomputed in training mode.
    """
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
        for name, value in list(vars(module).items()):
            if "drop" in name and isinstance(value, float):
                setattr(module, name, 0.0)
    return model


def context_length(model: nn.Module) -> int | None:
    """Return the number of positions, in tokens; None if the configuration does not state it."""
    text = model.config.get_text_config()  # type: ignore[operator, union-attr]  # without the vision tower, if there is one
    return getattr(text, "max_position_embeddings", None)


_WINDOW = "sliding_window"
_OTHER_LIMITS = (
    "attention_chunk_size",
    "attention_window_size",
    "window_size",
    "index_topk",
    "compress_rates",
)


def attention_limits(model: nn.Module, *, windows: bool = True) -> list[int]:
    """Return the limits in a model's configuration, in tokens, beyond which attention is another than in a shorter text: windows,
    chunks, an indexer's top-k, compressed blocks.

    Args:
        windows: Sliding windows too, which layers tell their attention.
    """
    config: Any = getattr(model, "config", None)
    limits = list[int]()
    names = (*_OTHER_LIMITS, *((_WINDOW,) if windows else ()))
    for name in names if config is not None else ():
        value = getattr(config.get_text_config(), name, None)
        several = value.values() if isinstance(value, dict) else [value]
        limits += [limit for limit in several if isinstance(limit, int) and limit > 0]
    return limits


def leave_out_zero_padding(model: nn.Module) -> None:
    """Leave a padding token whose embedding is zero out of that embedding's gradient, as `padding_idx` does, in forward mode too.

    Normalisations of zeros multiply its gradient by eps^−½ each, which makes it up to 1e9 times that of all other weights; clipping
    then stops those.
    """
    for module in model.modules():
        if not isinstance(module, nn.Embedding) or module.padding_idx is None or module.weight.is_meta:
            continue
        if _ZERO_PADDING not in module.__dict__ and not module.weight.detach()[module.padding_idx].any():
            module.__dict__[_ZERO_PADDING] = module.padding_idx  # which an optimizer unsets
            module.register_forward_hook(_detach_padding)


_ZERO_PADDING = "_policygrad_zero_padding"


def _detach_padding(module: nn.Module, args: Any, out: Tensor) -> Tensor:
    is_padding = args[0] == module.__dict__[_ZERO_PADDING]
    return torch.where(is_padding[..., None], out.detach(), out)


def find_zero_embeddings(model: nn.Module) -> frozenset[int]:
    """Return the tokens that train although their embedding is zero; none where the weights are not here."""
    embeddings = model.get_input_embeddings()  # type: ignore[operator]
    weight = getattr(embeddings, "weight", None)
    if weight is None or weight.is_meta:
        return frozenset()
    zero = frozenset((~weight.detach().any(dim=1)).nonzero().flatten().tolist())
    return zero - {embeddings.__dict__.get(_ZERO_PADDING)}


def has_bf16_products(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Return whether the processor multiplies in bfloat16; True where that cannot be read."""
    try:
        flags = set(re.findall(r"[\w-]+", cpuinfo.read_text(encoding="utf-8")))
    except OSError:
        return True
    return bool(flags & {"avx512_bf16", "amx_bf16", "bf16"})


def at_least_float32(x: Tensor) -> Tensor:
    """Convert bfloat16 and float16 to float32; float32 and float64 stay as they are."""
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


class Float32Head(nn.Linear):
    """An output head that computes in float32 whatever its weights are, as ScaleRL's does (Khatri et al. 2025)."""

    def forward(self, states: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.float()
        return nn.functional.linear(states.float(), self.weight.float(), bias)


def compute_head_in_float32(model: Any) -> None:
    """Let a model's head compute in float32, in place; its parameters stay as they are.

    Raises:
        ModelError: The head is not a plain matrix: it has an adapter, say.
    """
    head = model.get_output_embeddings()
    half = (torch.bfloat16, torch.float16)
    if type(head) is Float32Head or all(p.dtype not in half for p in head.parameters()):
        return
    if type(head) is not nn.Linear:
        raise ModelError(
            f"learner.head=fp32 needs an output head that is a plain matrix, and this model's is a {type(head).__module__}."
            f"{type(head).__name__}: leave the head out of learner.lora's targets, or set learner.head=model"
        )
    head.__class__ = Float32Head


# Locating a model: a folder, or a hub id. Other names are refused at once; without a network only the cache is used.


def resolve_model(model: str) -> str:
    """Return a folder or hub id: `tiny` and `shapes` are inside the package, a run's folder stands for the model it trained."""
    return str(Path(__file__).with_name(model)) if model in EMBEDDED_MODELS else locate_model(model)


def locate_model(model: str) -> str:
    """Return the model that a run's folder contains, any other folder or hub id as it is, or the folder in the hub's cache if the
    hub cannot be reached.

    Raises:
        ModelError: Neither a folder nor an existing hub id.
    """
    if any(len(part.encode(errors="replace")) > MAX_NAME_BYTES for part in Path(model).parts):
        raise ModelError(
            f"there is no model {model[:40]!r}…: a name has at most {MAX_NAME_BYTES} bytes, this has {len(model)} characters"
        )
    path = Path(model)
    if is_model_folder(path / "model"):
        path = path / "model"
        reject_unusable_files(path, model)
        return str(path)
    if path.is_dir():
        reject_unusable_files(path, model)
        return model
    if path.exists():
        raise ModelError(f"the model {model!r} is a file: give the folder that contains config.json and safetensors")
    if not _HUB_ID.fullmatch(model):
        raise ModelError(
            f"there is no model folder {model!r}: a relative path starts at {Path.cwd().name!r}, the current folder"
        )
    return _query_hub(model)[0]


def reject_unusable_files(folder: Path, model: str) -> None:
    """Raise ModelError if a model's folder has a file that transformers would never finish reading (a pipe, a device), or a
    configuration that Python's parser gives up on."""
    for file in sorted(folder.iterdir()):
        if file.is_dir():
            continue
        try:
            if file.name.endswith("config.json"):
                read_json(file)
            else:
                open_regular(file).close()
        except (OSError, UnusableDataError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise ModelError(
                f"the model {model!r} cannot be read: {file.name}: {reason}; restore the model's own file"
            ) from error
        except ValueError:  # not JSON, or not UTF-8: transformers reports it
            continue


@lru_cache(maxsize=8)
def _query_hub(model: str) -> tuple[str, frozenset[str]]:
    """Return (the name or folder to load, its file names)."""
    from huggingface_hub import HfApi, try_to_load_from_cache
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, RepositoryNotFoundError

    try:
        info = HfApi().model_info(model, timeout=HUB_TIMEOUT)
    except RepositoryNotFoundError:
        raise ModelError(
            f"{model!r} is neither a folder here nor a model on the hub. A private one needs `hf auth login`; 'tiny' is the "
            "model inside the package"
        ) from None
    except HFValidationError as error:
        raise ModelError(f"{model!r} is neither a folder here nor a hub id: {str(error).partition('. ')[0]}") from None
    except HfHubHTTPError:
        return model, frozenset()  # the hub responds: transformers will report what is wrong
    except Exception as error:  # no network; the class depends on the hub client's version
        paths = [try_to_load_from_cache(model, name) for name in ("config.json", ADAPTER_FILE)]
        cached = next((Path(path).parent for path in paths if isinstance(path, str)), None)
        if cached is None:
            raise ModelError(
                f"there is no folder {model!r}, the hub cannot be reached ({type(error).__name__}), and its cache does not have "
                "the model. Give a folder with config.json and safetensors, or 'tiny', the model inside the package"
            ) from None
        return str(cached), frozenset(file.name for file in cached.iterdir())
    return model, frozenset(file.rfilename for file in info.siblings or ())


def push_to_hub(folder: Path, repo: str, public: bool = False) -> str:
    """Upload a folder to the hub as one commit, and return its URL.

    The hub is HF_ENDPOINT; the token is HF_TOKEN or that of `hf auth login`.

    Args:
        repo: OWNER/NAME.
        public: The visibility of a new repository.

    Raises:
        ModelError: An invalid name, no token, or a failed upload.
    """
    from huggingface_hub import HfApi, get_token
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    check_hub_repo(repo)
    if get_token() is None:
        raise ModelError(
            f"pushing to {repo} needs a token: run `hf auth login`, or set HF_TOKEN to a token with write permission"
        )
    try:
        hub = HfApi()
        hub.create_repo(repo, private=not public, exist_ok=True)
        hub.upload_folder(repo_id=repo, folder_path=folder, commit_message="Trained with policygrad")
        return f"{hub.endpoint}/{repo}"
    except (HfHubHTTPError, HFValidationError) as error:
        reason = " ".join(str(error).split())
        raise ModelError(f"the hub refuses {repo}: {reason}; check the name, and the token's permission") from error
    except OSError as error:
        raise ModelError(f"{folder} cannot be read: {error.strerror or error}") from error
    except Exception as error:  # no network; the class depends on the hub client's version
        reason = f"{type(error).__name__}: {error}"
        raise ModelError(f"the hub cannot be reached ({reason}); the model stays in {folder}, push it later") from error


def check_hub_repo(repo: str) -> None:
    """Raise ModelError unless the name is OWNER/NAME."""
    if "/" not in repo or not _HUB_ID.fullmatch(repo):
        raise ModelError(f"{repo!r} is not a hub repository: give OWNER/NAME, such as me/my-model")


# A model's file must contain every weight of its configuration: transformers would initialise missing ones randomly.


def check_missing_weights(
    model: nn.Module, info: LoadingInfo, what: str, *, new: Callable[[str], bool] = lambda name: False
) -> None:
    """Refuse a model with randomly initialised weights, and warn about tensors that were not loaded.

    Args:
        info: From `from_pretrained(output_loading_info=True, ignore_mismatched_sizes=True)`, which handles tied weights.
        what: The model, for messages.
        new: Returns True for the name of a tensor that may be randomly initialised.

    Raises:
        ModelError: Tensors that the file lacks, or that have another shape there; with a remedy.
    """
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    missing = sorted(n for n in info["missing_keys"] if not new(n) and (n in parameters or not _COMPUTED.search(n)))
    mismatched = sorted((str(n), tuple(has), tuple(asks)) for n, has, asks in info["mismatched_keys"] if not new(n))
    unknown = sorted(n for n in info["unexpected_keys"] if not (_COMPUTED.search(n) or _OTHER_HEADS.search(n)))
    problems = []
    if missing:
        problems.append(f"its file lacks {format_names(missing)}")
    if mismatched:
        shapes = [f"{name} {list(has)} instead of {list(asks)}" for name, has, asks in mismatched]
        problems.append(f"its file has another shape than config.json for {format_names(shapes)}")
    if problems:
        head = getattr(model, "get_output_embeddings", lambda: None)()
        heads = {name for name, module in model.named_modules() if head is not None and module is head}
        if missing and all(name.rpartition(".")[0] in heads for name in missing):
            hint = (
                "If its head shares the embedding's weights, set tie_word_embeddings to true in config.json; else get the complete "
                "file"
            )
        elif unknown:
            hint = f"The file has {format_names(unknown)} instead: use the config.json that it was saved with"
        else:
            hint = "Use the config.json that it was saved with, or get the complete file again"
        raise ModelError(f"{what} would have random weights: {', and '.join(problems)}. {hint}")
    if unknown:
        warnings.warn(
            f"{what}: {type(model).__name__} does not use {format_names(unknown)} of its file: is config.json the file's own?",
            stacklevel=3,
        )


def format_names(names: Sequence[str]) -> str:
    """Return the number of tensors with the first names."""
    more = f" and {len(names) - MAX_NAMES_SHOWN} more" if len(names) > MAX_NAMES_SHOWN else ""
    return f"{len(names)} tensor{'s' * (len(names) > 1)} ({', '.join(names[:MAX_NAMES_SHOWN])}{more})"


@contextmanager
def silence_load_report() -> Iterator[None]:
    """Hide transformers' own table of missing tensors, which `check_missing_weights` summarises."""

    def should_log(record: logging.LogRecord) -> bool:
        message = record.getMessage()  # the error does not describe a failed conversion
        return "LOAD REPORT" not in message or "CONVERSION" in message

    loggers = [logging.getLogger(f"transformers.{name}") for name in ("modeling_utils", "integrations.peft")]
    for logger in loggers:
        logger.addFilter(should_log)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(should_log)


# Only configuration, tokenizer and safetensors of a model's folder are trusted. Code and pickles can run any program. Every
# `from_pretrained` and `from_config` is given trust_remote_code: without it they ask on the terminal.


def reject_pickle_files(path: str, what: str) -> None:
    """Raise ModelError if a folder, or an adapter on the hub, has its weights as pickles only.

    A complete model on the hub needs no check, because transformers is asked for safetensors; for an adapter it would load
    whatever exists.
    """
    folder = Path(path)
    if folder.is_dir():
        names = frozenset(file.name for file in folder.iterdir() if file.is_file())
    else:
        names = _query_hub(path)[1] if _HUB_ID.fullmatch(path) and not folder.exists() else frozenset()
    if ADAPTER in names and ADAPTER_WEIGHTS not in names:
        # torch reads the tensors of the pickle only, and refuses anything else in it
        here = folder if folder.is_dir() else Path(folder.name)
        old, new = str(here / ADAPTER), str(here / ADAPTER_WEIGHTS)
        convert = f"import torch; from safetensors.torch import save_file as f; f(torch.load({old!r}, weights_only=True), {new!r})"
        fetch, end = "", ""
        if here != folder:
            fetch, end = f"fetch it, `hf download {path} --local-dir {here}`, and ", f", and give {here}"
        pickle = ADAPTER
        hint = f'Convert its tensors to safetensors, which runs none of its code: {fetch}python -c "{convert}"{end}'
    elif folder.is_dir() and not any(name.endswith(".safetensors") for name in names):
        pickle = min((name for name in names for kind in _PICKLES if fnmatchcase(name, kind)), default="")
        hint = (
            'If you trust its author, save it as safetensors too: python -c "from transformers import '
            f'AutoModelForCausalLM as M; M.from_pretrained({path!r}, use_safetensors=False).save_pretrained({path!r})"'
        )
    else:
        return
    if pickle:
        raise ModelError(
            f"{what} has its weights in {pickle}, a pickle, which can run any program when it is loaded. {hint}"
        )


def read_config(path: str, what: str) -> dict[str, Any]:
    """Read config.json, from the hub too; {} if it cannot be read, which transformers then reports.

    Raises:
        ModelError: An impossible size: building such a model would take hours, or all memory.
    """
    from transformers.utils.hub import cached_file

    try:
        config = parse_json(Path(str(cached_file(path, "config.json"))).read_bytes())
    except (OSError, ValueError):
        return {}
    if not isinstance(config, dict):
        return {}
    try:
        for section in (config, config.get("text_config")):
            if isinstance(section, dict):
                check_sizes(section)
    except ValueError as error:
        raise ModelError(f"{what} has a config.json in which {error}; restore the model's own file") from error
    return config


def load_error(what: str, error: Exception, needs: str, path: str = "") -> ModelError:
    """Convert an error of transformers to one with a remedy. path: the folder, whose files may explain it."""
    text = str(error)
    if "trust_remote_code" in text:
        return ModelError(
            f"{what} includes its own code, which runs only with your permission: read it, then give {TRUST_FLAG} (from Python "
            "trust_remote_code=True), or use a model whose architecture is in transformers"
        )
    lines = [line.strip().rstrip(" .") for line in text.strip().splitlines()] or [""]
    first = " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]
    reason = (f"{first[:-1]} …" if first.endswith(":") else first) or repr(error)
    for file in sorted(Path(path).glob("*config.json"), reverse=True) if path else ():
        try:
            if not isinstance(json.loads(file.read_bytes()), dict):
                reason = f"{file.name} is not a JSON object; restore the model's own file"
        except (ValueError, RecursionError, OSError) as malformed:
            reason = f"{file.name} is not JSON ({malformed}); restore the model's own file"
    return ModelError(f"cannot load {what}, whose folder needs {needs}: {reason}")
