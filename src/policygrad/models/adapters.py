"""Adapters in a model, by PEFT; the one file that imports it, and only where there are any (that takes seconds)."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from policygrad.errors import ConfigError, ModelError, install_command
from policygrad.models.lora_config import DEFAULT_ALPHA, DEFAULT_RANK, DEFAULT_TARGETS, Lora

ADAPTER_WEIGHTS = "adapter_model.safetensors"
PEFT_PREFIX = "base_model.model."
"""Of names in an adapter's file, and in a model of PEFT's own."""


def adapter_configs(model: nn.Module) -> dict[str, Any]:
    """PEFT's configurations by name, in a model of PEFT's own and in one of transformers that has adapters; {} of any other."""
    return dict(getattr(model, "peft_config", None) or {})


def describe_adapters(model: nn.Module) -> str:
    """What trains of a model with adapters, for people; "" without any."""
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    said = [
        ", ".join(
            f"{name} {getattr(config, key)}"
            for name, key in (("rank", "r"), ("alpha", "lora_alpha"))
            if hasattr(config, key)
        )
        for config in adapter_configs(model).values()
    ]
    return f"{'; '.join(said)}: {trained:,} parameters train".lstrip(": ") if said else ""


def require_peft(what: str, extra: str = "lora") -> None:
    """Raises ConfigError where PEFT is not installed. extra: which brings it."""
    if find_spec("peft") is None:
        raise ConfigError(f"{what} needs peft, which is not installed: {install_command(extra)}")


def add_adapters(
    model: nn.Module, lora: Lora, *, base: str = "", seed: int = 0, modules_to_save: tuple[str, ...] = ()
) -> nn.Module:
    """The model with new adapters, in place; they train, and nothing else but the modules `whole`. It says what it said before.

    base: the folder or hub id that the adapters' own folder is to name. seed: of A. whole: modules that train whole, by name (a
    new head).

    Raises:
        ConfigError: no PEFT; a model that has adapters already, or is none of transformers'; targets that it does not have.
    """
    require_peft("learner.lora")
    from peft import LoraConfig
    from transformers.integrations.peft import PeftAdapterMixin

    if adapter_configs(model):
        raise ConfigError(
            "learner.lora would put adapters into a model that has some, which train already: leave it empty"
        )
    if not isinstance(model, PeftAdapterMixin):
        raise ConfigError(
            f"learner.lora: {type(model).__name__} is no model of transformers': put adapters into it yourself "
            "(peft.get_peft_model), and leave learner.lora empty"
        )
    unfit, targets = find_unadaptable_layers(model), lora.targets or DEFAULT_TARGETS
    _check_rank(model, lora.rank or DEFAULT_RANK)
    config = LoraConfig(
        r=lora.rank or DEFAULT_RANK,
        lora_alpha=_whole(lora.alpha or DEFAULT_ALPHA),
        target_modules=_targets(model, targets, unfit, modules_to_save),
        modules_to_save=list(modules_to_save) or None,
        task_type="SEQ_CLS" if modules_to_save else "CAUSAL_LM",
    )
    devices = {p.device for p in model.parameters() if p.device.type == "cuda"}
    with torch.random.fork_rng(devices=list(devices)):
        torch.manual_seed(seed)
        with _quiet():
            model.add_adapter(config)
    config.base_model_name_or_path = base
    config.target_modules = sorted(config.target_modules or ())  # a set, whose order is another in every process
    train_only_adapters(model)
    _check_runs(model.eval())
    return model


def _whole(alpha: float) -> Any:
    """As an integer where it is one: some engines read no other."""
    return int(alpha) if alpha == int(alpha) else alpha


@contextmanager
def _quiet() -> Iterator[None]:
    """Without PEFT's warning of patterns for stacked experts, which transformers adds to a configuration that adapts no experts."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The following (rank|alpha)_pattern keys did not match")
        yield


def find_unadaptable_layers(model: nn.Module) -> dict[str, str]:
    """The linear layers that no adapter fits, by full name, each with the reason.

    A state-space (Mamba) layer computes with the weights of its projections directly, in its fused kernels and in part outside of
    them: an adapter there is skipped or, for some model types, refused by PEFT. Only `in_proj` is always called as a module. Some
    architectures derive other layers from `nn.Linear`: routers that return several tensors, products in groups.
    """
    found: dict[str, str] = {}
    for full, module in model.named_modules():
        if hasattr(module, "A_log") and hasattr(module, "D"):
            skipped = [
                name for name, part in module.named_modules() if isinstance(part, nn.Linear) and name != "in_proj"
            ]
            found |= {
                f"{full}.{name}": "the Mamba layer around it computes with its weights directly" for name in skipped
            }
        if isinstance(module, nn.Linear) and not _is_linear(module):
            found[full] = f"{type(module).__name__} computes something else than a product with its weights"
    return found


def _is_linear(module: nn.Linear) -> bool:
    """Whether it maps [1, in] to [1, out]. Layers in four bits are PEFT's to adapt."""
    kind = type(module)
    if kind.forward is nn.Linear.forward or kind.__module__.startswith("bitsandbytes"):
        return True
    try:
        with torch.no_grad():
            out: object = module(module.weight.new_zeros(1, module.in_features))
    except Exception:  # of which class depends on the architecture's code
        return False
    return isinstance(out, Tensor) and out.shape == (1, module.out_features)


@torch.no_grad()
def _check_runs(model: nn.Module) -> None:
    """Raises ConfigError where the model no longer runs with its adapters, which code of another's may not be made for."""
    weight = next(model.parameters())
    if weight.is_meta:
        return
    try:
        model(input_ids=torch.zeros(1, 2, dtype=torch.int64, device=weight.device), use_cache=False)
    except torch.OutOfMemoryError:
        raise
    except (AttributeError, IndexError, NotImplementedError, RuntimeError, TypeError, ValueError) as error:
        raise ConfigError(
            f"learner.lora: {type(model).__name__} does not run with adapters on the layers chosen "
            f"({type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no message'}): name others, as in "
            "targets=q_proj+v_proj, or leave learner.lora empty to train all weights"
        ) from error


def _targets(model: nn.Module, targets: str, unfit: Mapping[str, str], whole: tuple[str, ...]) -> str | list[str]:
    known = [
        n for n, m in model.named_modules() if isinstance(m, nn.Linear | nn.Embedding) or type(m).__name__ == "Conv1D"
    ]
    if targets == DEFAULT_TARGETS:
        if not unfit:
            return targets
        head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None  # type: ignore[operator]
        fit = [n for n in known if n not in unfit and n.rpartition(".")[2] not in whole]
        return [n for n in fit if not isinstance(m := model.get_submodule(n), nn.Embedding) and m is not head]
    names = targets.split("+")
    for name in names:
        if not any(full == name or full.endswith(f".{name}") for full in known):
            some = sorted({full.rpartition(".")[2] for full in known})
            raise ConfigError(f"learner.lora: the model has no layer {name!r} to adapt: it has {', '.join(some[:12])}")
        if odd := next((full for full in unfit if full.endswith(f".{name}")), None):
            raise ConfigError(
                f"learner.lora: no adapter fits the layer {name!r} of {type(model).__name__} ({odd}): {unfit[odd]}. Leave it out: "
                f"targets={DEFAULT_TARGETS} takes every layer that can be adapted"
            )
    embedding = model.get_input_embeddings().weight  # type: ignore[operator]
    for full, module in model.named_modules():
        if full.rpartition(".")[2] in names and isinstance(module, nn.Linear) and module.weight is embedding:
            raise ConfigError(
                f"learner.lora: {full!r} shares the embedding's weights, so that an adapter on it could not be merged: leave it out"
            )
    return names


def _check_rank(model: nn.Module, rank: int) -> None:
    """Raises ConfigError for a rank beyond that of every matrix: such adapters can do no more, and may fill all memory."""
    most = max((min(p.shape) for p in model.parameters() if p.dim() > 1), default=rank)
    if rank > most:
        raise ConfigError(
            f"learner.lora: rank must be at most {most:,}, as no matrix of the model has a higher one, not {rank:,}"
        )


def train_only_adapters(model: nn.Module) -> None:
    """The active adapters train, in float32 also beside bf16 weights, and the base does not."""
    model.requires_grad_(False)
    for module in iter_peft_modules(model):
        module.set_adapter(module.active_adapters if hasattr(module, "active_adapters") else module.active_adapter)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and "lora_" in name and parameter.dtype in (torch.bfloat16, torch.float16):
            parameter.data = parameter.data.float()


@torch.no_grad()
def reload_saved_precision(model: nn.Module, folder: str) -> None:
    """Gives adapters in float32 what their file holds, where loading has rounded it to the base's precision."""
    file = Path(folder) / ADAPTER_WEIGHTS
    own = dict(model.named_parameters())
    names = {
        name.replace(f".{adapter}.", "."): name for adapter in adapter_configs(model) for name in own if "lora_" in name
    }
    from safetensors.torch import load_file

    for name, tensor in load_file(file).items() if file.is_file() else ():
        target = own.get(names.get(name.removeprefix(PEFT_PREFIX), ""))
        if target is not None and target.shape == tensor.shape:
            target.copy_(tensor)


def saved_head_dtype(folder: str) -> torch.dtype | str:
    """Of what is in an adapter's file beside its low ranks, a head say, which trained in the precision of the whole."""
    file = Path(folder) / ADAPTER_WEIGHTS
    from safetensors.torch import load_file

    kinds = {t.dtype for name, t in load_file(file).items() if "lora_" not in name} if file.is_file() else set()
    return kinds.pop() if len(kinds) == 1 else "auto"


def rebuild_with_adapters(model: Any, build: Callable[[Any], nn.Module]) -> nn.Module:
    """A second one with the same adapters, on what `build` makes of the model without them.

    Raises:
        ModelError: adapters that are merged into the weights.
    """
    if any(getattr(module, "merged", False) for module in model.modules()):
        raise ModelError("the model's adapters are merged into its weights: call unmerge_adapter() first")
    configs = adapter_configs(model)
    if hasattr(model, "get_base_model"):
        from peft import get_peft_model

        first, *rest = configs
        made: Any = get_peft_model(build(model.get_base_model()), copy.deepcopy(configs[first]), adapter_name=first)
        for name in rest:
            made.add_adapter(name, copy.deepcopy(configs[name]))
        if rest:
            made.base_model.set_adapter(list(model.active_adapters))
        return made  # type: ignore[no-any-return]
    made = build(model)
    with _quiet():
        for name, config in configs.items():
            made.add_adapter(copy.deepcopy(config), name)
    made.set_adapter(model.active_adapters())
    return made  # type: ignore[no-any-return]


def is_initial_adapter(model: nn.Module) -> bool:
    """Whether the adapters add nothing yet: every B is 0, so that without them the model says the same, bit for bit."""
    found = [p for name, p in model.named_parameters() if "lora_B." in name or "lora_embedding_B." in name]
    lora = all(getattr(config.peft_type, "value", "") == "LORA" for config in adapter_configs(model).values())
    return bool(found) and lora and not any(bool(p.any()) for p in found)


def set_adapters_enabled(model: nn.Module, on: bool) -> None:
    """Lets the model speak with its adapters, or without; what trains stays as it is."""
    trained = {name: p.requires_grad for name, p in model.named_parameters()}
    for module in iter_peft_modules(model):
        module.enable_adapters(on)
    for name, p in model.named_parameters():
        p.requires_grad_(trained[name])


def iter_peft_modules(model: nn.Module) -> Iterator[Any]:
    """PEFT's own modules: layers with adapters, and what trains whole."""
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils import ModulesToSaveWrapper

    return (m for m in model.modules() if isinstance(m, BaseTunerLayer | ModulesToSaveWrapper))


def shareable_parameter_ids(model: nn.Module) -> set[int]:
    """ids of the parameters that a second model may have in common with this one: under adapters, the weights that stand still."""
    if not adapter_configs(model):
        return set()
    beside = {
        id(p)
        for module in iter_peft_modules(model)
        for name, p in module.named_parameters()
        if not name.startswith(("base_layer.", "original_module."))
    }
    return {id(p) for p in model.parameters() if not p.requires_grad} - beside


def copy_with_shared_weights(model: nn.Module, shared: set[int]) -> nn.Module:
    """A deep copy but for the shared tensors: of a quantised model, which no configuration builds."""
    memo: dict[int, Tensor] = {id(p): p for p in model.parameters() if id(p) in shared}
    return copy.deepcopy(model, memo)


# A model's adapters in its weights, W + (α/r)·B·A for W, for whatever knows no adapters.


def merge_adapters(model: nn.Module) -> nn.Module:
    """The model with its adapters in its weights, W + (α/r)·B·A for W, and no longer one of PEFT's; in place.

    Raises:
        ModelError: a sum that is not finite.
    """
    for module in list(iter_peft_modules(model)):
        name = next(name for name, found in model.named_modules() if found is module)
        above, _, last = name.rpartition(".")
        found = unwrap_layer(module, name)
        setattr(model.get_submodule(above), last, found)
    model._hf_peft_config_loaded = False  # type: ignore[assignment]
    model._weight_conversions = None  # type: ignore[assignment]  # of an adapter's names, by which saving would go
    del model.peft_config
    return model


def unwrap_layer(module: Any, name: str) -> nn.Module:
    """What PEFT's module is without PEFT, in place. Raises ModelError: a sum that is not finite."""
    if not hasattr(module, "get_base_layer"):
        return module.modules_to_save[module.active_adapters[0]]  # type: ignore[no-any-return]
    try:
        module.merge(safe_merge=True)
    except ValueError as error:
        raise ModelError(f"{name} cannot be merged: {error}") from error
    return module.get_base_layer()  # type: ignore[no-any-return]


def iter_merged_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of each parameter that `merged` would leave, the model as it is: one layer's sum at a time.

    Raises:
        ModelError: a sum that is not finite.
    """
    inside = {id(module) for module in iter_peft_modules(model)}
    found = [(name, module) for name, module in model.named_modules() if id(module) in inside]
    beside = {id(p) for _, module in found for p in module.parameters()}
    for name, parameter in model.named_parameters():
        if id(parameter) not in beside:
            yield name.removeprefix(PEFT_PREFIX), parameter
    for name, module in found:
        with torch.no_grad():
            whole = unwrap_layer(copy.deepcopy(module), name)
        for key, parameter in whole.named_parameters():
            yield f"{name}.{key}".removeprefix(PEFT_PREFIX), parameter


# Frozen weights in four bits, under adapters (Dettmers et al. 2023, QLoRA), by bitsandbytes where it is installed.


def quantization_kwargs(lora: Lora | None, dtype: torch.dtype) -> dict[str, Any]:
    """What `from_pretrained` is told of four bits; {} where they are not asked for.

    Raises:
        ConfigError: bitsandbytes is not installed.
    """
    if lora is None or lora.bits is None:
        return {}
    require_peft("learner.lora bits=4", "qlora")
    if find_spec("bitsandbytes") is None:
        raise ConfigError(
            f"learner.lora bits=4 needs bitsandbytes, which is not installed: {install_command('qlora')}, or leave bits out "
            "for the weights as they are"
        )
    from transformers import BitsAndBytesConfig

    options = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True, "bnb_4bit_compute_dtype": dtype}
    return {"quantization_config": BitsAndBytesConfig(load_in_4bit=True, **options)}  # type: ignore[no-untyped-call]


def check_4bit_gradients(model: nn.Module) -> None:
    """Makes sure of four bits that gradients pass through them.

    bitsandbytes packs weights on some processors anew, for inference, when they are first read in evaluation mode, in which a
    policy always is here; and what was packed gives wrong gradients without a word (seen with 0.50.2).

    Raises:
        ModelError: a layer whose way back is not the transpose of its way there.
    """
    layer: Any = None
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False  # type: ignore[assignment]
            layer = layer or module
        layer = layer or (module if type(module).__name__ == "Linear4bit" else None)
    if layer is None:
        return
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    generator, device = torch.Generator().manual_seed(0), layer.weight.device
    x, y = (torch.randn(3, n, generator=generator).to(device, dtype) for n in (layer.in_features, layer.out_features))
    with torch.no_grad():
        there = float(((layer(x) - layer(torch.zeros_like(x))).double() * y.double()).sum())
    x.requires_grad_()
    (pulled,) = torch.autograd.grad((layer(x) * y).sum(), x)
    back = float((pulled.double() * x.detach().double()).sum())
    size = float(y.double().norm() * layer(x).detach().double().norm())
    if not abs(there - back) <= (0.02 if dtype == torch.bfloat16 else 1e-3) * size:
        raise ModelError(
            "learner.lora bits=4: this version of bitsandbytes gives wrong gradients on this device: take another one, or leave "
            "bits out"
        )
