"""Adapters (PEFT). This module alone imports peft, and only for a model with adapters, because the import takes seconds."""

from __future__ import annotations

import copy
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from policygrad.core.precision import widen
from policygrad.errors import ConfigError, ModelError, install_command
from policygrad.models.lora_config import (
    DEFAULT_ALPHA,
    DEFAULT_RANK,
    DEFAULT_TARGETS,
    Lora,
    suppress_pattern_warning,
)
from policygrad.models.traits import (
    ADAPTER_WEIGHTS,
    PEFT_PREFIX,
    adapter_configs,
    is_language_module,
    placeholder_id,
)
from policygrad.utils.out_of_memory import is_out_of_memory

EXPERT_NAMES = frozenset({"gate", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"})
"""Names of layers that PEFT takes for parts of stacked experts, in architectures that have some."""


def describe_adapters(model: nn.Module) -> str:
    """Describe the adapters and the number of trainable parameters; "" for a model without adapters."""
    configs = adapter_configs(model)
    if not configs:
        return ""
    keys = {"rank": "r", "alpha": "lora_alpha"}
    settings = (
        ", ".join(f"{name} {getattr(config, key)}" for name, key in keys.items() if hasattr(config, key))
        for config in configs.values()
    )
    trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
    bare = "" if experts_are_adapted(model) else ", the stacked experts have no adapters"
    return f"{'; '.join(settings)}: {trainable:,} parameters train{bare}".lstrip(": ")


def experts_are_adapted(model: nn.Module) -> bool:
    """Return False if the model has stacked experts, a parameter [experts, in, out], and none has an adapter."""
    adapted = {id(part) for _, module in named_peft_modules(model) for part in module.modules()}
    stacked = find_stacked_experts(model)
    return not stacked or any(id(module) in adapted for module in stacked)


def find_stacked_experts(model: nn.Module) -> list[nn.Module]:
    """Return the modules that hold all experts of a layer in one parameter [experts, in, out]."""
    return [
        module
        for module in model.modules()
        if "Experts" in type(module).__name__ and any(p.dim() == 3 for p in module.parameters(recurse=False))
    ]


def require_peft(what: str, extra: str = "lora") -> None:
    """Raise ConfigError when PEFT is not installed. extra: the extra that installs it."""
    if find_spec("peft") is None:
        raise ConfigError(f"{what} needs peft, which is not installed: {install_command(extra)}")


def add_adapters(
    model: nn.Module, lora: Lora, *, base: str = "", seed: int = 0, modules_to_save: tuple[str, ...] = ()
) -> nn.Module:
    """Add new adapters to a model in place, and train only them. The model's output does not change yet.

    Args:
        base: The folder or hub id that the adapters' configuration names as the base model.
        seed: For the random initialisation of A.
        modules_to_save: Names of modules that are trained completely, such as a new head.

    Raises:
        ConfigError: PEFT is not installed; the model has adapters already or is not a transformers model; or it does not have the
            target layers.
    """
    require_peft("learner.lora")
    from peft import LoraConfig
    from transformers.integrations.peft import PeftAdapterMixin

    if adapter_configs(model):
        raise ConfigError(
            "learner.lora adds adapters, but the model has some, which are trained already: leave it empty"
        )
    if not isinstance(model, PeftAdapterMixin):
        raise ConfigError(
            f"learner.lora: {type(model).__name__} is not a transformers model: add adapters to it yourself "
            "(peft.get_peft_model), and leave learner.lora empty"
        )
    rank, alpha = lora.rank or DEFAULT_RANK, lora.alpha or DEFAULT_ALPHA
    limit = max((min(p.shape) for p in model.parameters() if p.dim() > 1), default=rank)
    if rank > limit:  # a higher rank adds nothing, and may fill all memory
        raise ConfigError(
            f"learner.lora: rank must be at most {limit:,}, the highest rank of the model's matrices, not {rank:,}"
        )
    config = LoraConfig(
        r=rank,
        lora_alpha=int(alpha) if alpha == int(alpha) else alpha,  # type: ignore[arg-type]  # some engines read integers only
        target_modules=_resolve_targets(model, lora.targets or DEFAULT_TARGETS, modules_to_save),
        modules_to_save=list(modules_to_save) or None,
        task_type="SEQ_CLS" if modules_to_save else "CAUSAL_LM",
    )
    own = _find_expert_weights(model, lora.targets or DEFAULT_TARGETS)
    config.target_parameters = [*_weights_beside_experts(model, config), *own] or None
    devices = {p.device for p in model.parameters() if p.device.type == "cuda"}
    with torch.random.fork_rng(devices=list(devices)):
        torch.manual_seed(seed)
        with suppress_pattern_warning():
            model.add_adapter(config)
    config.base_model_name_or_path = base
    config.target_modules = sorted(config.target_modules or ())  # a set, whose order differs between processes
    config.target_parameters = sorted(config.target_parameters or ()) or None  # likewise
    train_only_adapters(model)
    weight = next(model.eval().parameters())
    if weight.is_meta:
        return model
    try:  # the code of some models does not support adapters
        with torch.no_grad():
            model(input_ids=torch.zeros(1, 2, dtype=torch.int64, device=weight.device), use_cache=False)
    except (AttributeError, IndexError, NotImplementedError, RuntimeError, TypeError, ValueError) as error:
        if is_out_of_memory(error):
            raise
        raise ConfigError(
            f"learner.lora: {type(model).__name__} does not run with adapters on these layers "
            f"({type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no message'}): name others, as in "
            "targets=q_proj+v_proj, or leave learner.lora empty to train all weights"
        ) from error
    return model


def make_peft_config(**options: Any) -> Any:
    """Return peft's own description of adapters, for a caller that speaks in its terms."""
    from peft import LoraConfig

    return LoraConfig(**options)


def wrap_with_adapters(model: nn.Module, peft_config: Any) -> nn.Module:
    """Return the model with new adapters as peft's own description has them.

    Raises:
        TypeError: it is none.
        ValueError: it describes virtual tokens, or the model has adapters.
    """
    from peft import PeftConfig, get_peft_model

    if not isinstance(peft_config, PeftConfig):
        raise TypeError(
            f"peft_config must be a peft.PeftConfig, such as LoraConfig(), not {type(peft_config).__name__}"
        )
    if peft_config.is_prompt_learning:
        raise ValueError(
            "peft_config describes prompt-learning (virtual tokens before the prompt), which the passes here do not read: use "
            "adapters, such as LoraConfig()"
        )
    if adapter_configs(model):
        raise ValueError(
            "the model has adapters, and peft_config describes new ones: merge the first (model.merge_and_unload()), or leave "
            "peft_config out"
        )
    return get_peft_model(model, peft_config)


def find_unadaptable_layers(model: nn.Module) -> dict[str, str]:
    """Return the linear layers that do not support an adapter, by full name, with the reason.

    A state-space (Mamba) layer reads the weights of its projections directly, in its fused kernels and partly outside of them: an
    adapter there is skipped or, for some model types, refused by PEFT. Only `in_proj` is always called as a module. Some
    architectures derive other layers from `nn.Linear`: routers that return several tensors, products in groups.
    """
    layers: dict[str, str] = {}
    for full, module in model.named_modules():
        if hasattr(module, "A_log") and hasattr(module, "D"):
            layers |= {
                f"{full}.{name}": "the Mamba layer around it reads its weights directly"
                for name, part in module.named_modules()
                if isinstance(part, nn.Linear) and name != "in_proj"
            }
        kind = type(module)  # four-bit layers are adapted by PEFT
        if isinstance(module, nn.Linear) and not (
            kind.forward is nn.Linear.forward or kind.__module__.startswith("bitsandbytes")
        ):
            try:
                with torch.no_grad():
                    out: object = module(module.weight.new_zeros(1, module.in_features))
            except Exception:  # the class depends on the architecture's code
                out = None
            if not (isinstance(out, Tensor) and out.shape == (1, module.out_features)):
                layers[full] = f"{kind.__name__} computes more than a product with its weights"
    return layers


def _resolve_targets(model: nn.Module, targets: str, excluded: tuple[str, ...]) -> str | list[str]:
    """Return PEFT's target_modules. excluded: names of modules that are trained completely."""
    unsupported = find_unadaptable_layers(model)
    layers = [
        n for n, m in model.named_modules() if isinstance(m, nn.Linear | nn.Embedding) or type(m).__name__ == "Conv1D"
    ]
    sees = placeholder_id(model) is not None
    if sees:  # a path of several names may be anywhere, a name alone is the language model's
        language = {name for name in layers if is_language_module(model, name)}
        layers = [
            name for name in layers if name in language or any(name.endswith(t) for t in targets.split("+") if "." in t)
        ]
    if targets == DEFAULT_TARGETS:
        if not unsupported and not sees:
            return targets
        head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None  # type: ignore[operator]
        supported = [n for n in layers if n not in unsupported and n.rpartition(".")[2] not in excluded]
        return [n for n in supported if not isinstance(m := model.get_submodule(n), nn.Embedding) and m is not head]
    experts = {full.rpartition(".")[2] for full in _find_expert_weights(model, targets)}
    endings = {
        full.rpartition(".")[2] for full in layers
    }  # dense and shared layers may have the names of experts' tensors
    names = [name for name in targets.split("+") if name not in experts or name in endings]
    for name in names:
        if not any(full == name or full.endswith(f".{name}") for full in layers):
            if _names_experts(model, name):
                continue
            some = sorted({full.rpartition(".")[2] for full in layers})
            raise ConfigError(f"learner.lora: the model has no layer {name!r} to adapt: it has {', '.join(some[:12])}")
        if full := next((full for full in unsupported if full.endswith(f".{name}")), None):
            raise ConfigError(
                f"learner.lora: the layer {name!r} of {type(model).__name__} ({full}) does not support an adapter: "
                f"{unsupported[full]}. Leave it out: targets={DEFAULT_TARGETS} takes every layer that supports one"
            )
    embedding = model.get_input_embeddings().weight  # type: ignore[operator]
    for full, module in model.named_modules():
        if full.rpartition(".")[2] in names and isinstance(module, nn.Linear) and module.weight is embedding:
            raise ConfigError(
                f"learner.lora: {full!r} shares the embedding's weights, so an adapter on it could not be merged: leave it out"
            )
    if sees:
        return [full for full in layers if any(full == name or full.endswith(f".{name}") for name in names)]
    return names


def _names_experts(model: nn.Module, name: str) -> bool:
    """Return whether PEFT takes a name for a part of the model's stacked experts."""
    from peft import LoraConfig
    from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers

    config = LoraConfig(target_modules=[name])
    try:
        convert_peft_config_for_transformers(config, model, None)
    except ValueError:  # one of several parts of a tensor
        return True
    return bool(config.target_parameters)


def _weights_beside_experts(model: nn.Module, config: Any) -> list[str]:
    """Return the weights of linear layers that PEFT would leave without an adapter where the model's experts are stacked.

    For such architectures PEFT takes `gate_proj`, say, for the name of a part of the stacked experts alone. A linear layer of that
    name, in a dense or shared MLP, gets its adapter as a parameter, like the experts.

    Raises:
        ConfigError: Targets that are one tensor in the experts, and of which only some are named.
    """
    from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers

    converted, requested = copy.deepcopy(config), config.target_modules
    try:
        convert_peft_config_for_transformers(converted, model, None)
    except ValueError as error:  # only some parts of a tensor
        raise ConfigError(
            f"learner.lora targets={'+'.join(requested)}: the experts of {type(model).__name__} are stacked into tensors, one of "
            f"which has parts of several names and one adapter ({str(error).rstrip('.')}): add the missing name to targets"
        ) from error
    if not converted.target_parameters:
        return []
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None  # type: ignore[operator]
    kept = {str(name) for name in converted.target_modules}
    saved = {*(config.modules_to_save or ())}

    def has_name(full: str, names: Iterable[str]) -> bool:
        return any(full == name or full.endswith(f".{name}") for name in names)

    return [
        f"{full}.weight"
        for full, module in model.named_modules()
        if isinstance(module, nn.Linear)
        and module is not head
        and full.rpartition(".")[2] not in saved
        and (requested == DEFAULT_TARGETS or has_name(full, requested))
        and not has_name(full, kept)
    ]


def _find_expert_weights(model: nn.Module, targets: str) -> list[str]:
    """Return the tensors of stacked experts that the targets name, [experts, in, out] each, where PEFT does not know how the
    architecture stacks its experts."""
    stacked, names = {id(module) for module in find_stacked_experts(model)}, targets.split("+")
    if not stacked or any(_names_experts(model, name) for name in EXPERT_NAMES):
        return []
    return [
        f"{full}.{name}"
        for full, module in model.named_modules()
        if id(module) in stacked
        for name, p in module.named_parameters(recurse=False)
        if p.dim() == 3 and (targets == DEFAULT_TARGETS or name in names)
    ]


def train_only_adapters(model: nn.Module) -> None:
    """Train the active adapters, in float32 even with bf16 weights, and freeze the base model."""
    model.requires_grad_(False)
    for _, module in named_peft_modules(model):
        module.set_adapter(module.active_adapters if hasattr(module, "active_adapters") else module.active_adapter)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and "lora_" in name and parameter.dtype in (torch.bfloat16, torch.float16):
            parameter.data = parameter.data.float()


@torch.no_grad()
def reload_saved_precision(model: nn.Module, folder: str) -> None:
    """Restore float32 adapter weights from their file, because loading has rounded them to the base model's precision."""
    parameters = {
        name.replace(f".{adapter}.", "."): p
        for adapter in adapter_configs(model)
        for name, p in model.named_parameters()
        if "lora_" in name
    }
    for name, tensor in _read_adapter_tensors(folder).items():
        target = parameters.get(name.removeprefix(PEFT_PREFIX))
        if target is not None and target.shape == tensor.shape:
            target.copy_(tensor)


def saved_head_dtype(folder: str) -> torch.dtype | str:
    """Return the precision of an adapter file's other tensors, such as a head, which was trained in the model's precision."""
    dtypes = {t.dtype for name, t in _read_adapter_tensors(folder).items() if "lora_" not in name}
    return dtypes.pop() if len(dtypes) == 1 else "auto"


def _read_adapter_tensors(folder: str) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    file = Path(folder) / ADAPTER_WEIGHTS
    return load_file(file) if file.is_file() else {}


def rebuild_with_adapters(model: Any, build: Callable[[Any], nn.Module]) -> nn.Module:
    """Return a second model with equal adapters, on what `build` makes of the model without them.

    Raises:
        ModelError: The adapters are merged into the weights.
    """
    if any(getattr(module, "merged", False) for module in model.modules()):
        raise ModelError("the model's adapters are merged into its weights: call unmerge_adapter() first")
    configs = adapter_configs(model)
    if hasattr(model, "get_base_model"):
        from peft import get_peft_model

        first, *other_names = configs
        built: Any = get_peft_model(build(model.get_base_model()), copy.deepcopy(configs[first]), adapter_name=first)
        for name in other_names:
            built.add_adapter(name, copy.deepcopy(configs[name]))
        if other_names:
            built.base_model.set_adapter(list(model.active_adapters))
        return built  # type: ignore[no-any-return]
    built = build(model)
    with suppress_pattern_warning():
        for name, config in configs.items():
            built.add_adapter(copy.deepcopy(config), name)
    built.set_adapter(model.active_adapters())
    return built  # type: ignore[no-any-return]


def is_initial_adapter(model: nn.Module) -> bool:
    """Return True if every B is 0, so that the model without adapters gives the same output bit for bit."""
    b = [p for name, p in model.named_parameters() if "lora_B." in name or "lora_embedding_B." in name]
    lora = all(getattr(config.peft_type, "value", "") == "LORA" for config in adapter_configs(model).values())
    return bool(b) and lora and not any(bool(p.any()) for p in b)


def set_adapters_enabled(model: nn.Module, enabled: bool) -> None:
    """Enable or disable the adapters, without changing which parameters train."""
    trained = {name: p.requires_grad for name, p in model.named_parameters()}
    for _, module in named_peft_modules(model):
        module.enable_adapters(enabled)
    for name, p in model.named_parameters():
        p.requires_grad_(trained[name])


def named_peft_modules(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield PEFT's modules with their names: layers with adapters, and modules that are trained completely."""
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils import ModulesToSaveWrapper

    return ((n, m) for n, m in model.named_modules() if isinstance(m, BaseTunerLayer | ModulesToSaveWrapper))


def outermost_peft_modules(model: nn.Module) -> list[tuple[str, Any]]:
    """Return PEFT's modules that are in no other one, with the names that the layers without PEFT have."""
    outermost = list[tuple[str, Any]]()
    for name, module in named_peft_modules(model):
        if not outermost or not name.startswith(f"{outermost[-1][0]}."):
            outermost.append((name, module))
    return outermost


def added_parameter_ids(model: nn.Module) -> set[int]:
    """Return ids of the parameters that adapters have added to a model."""
    return {
        id(p)
        for _, module in named_peft_modules(model)
        for name, p in module.named_parameters()
        if not name.startswith(("base_layer.", "original_module."))
    }


def adapter_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return what an adapter computes with: its tensors, and the scale α/r of each layer, by names without PEFT's own."""
    adapter, added = f".{next(iter(adapter_configs(model)))}", added_parameter_ids(model)
    tensors = {name: p.detach() for name, p in model.named_parameters() if id(p) in added and adapter in name}
    for name, module in named_peft_modules(model):
        if (scale := getattr(module, "scaling", {}).get(adapter[1:])) is not None:
            tensors[f"{name}.scaling"] = torch.tensor(float(scale))
    return {name.removeprefix(PEFT_PREFIX).replace(adapter, ""): x for name, x in tensors.items()}


def read_adapter_tensors(folder: Path, network: nn.Module) -> dict[str, Tensor]:
    """Return the tensors and scales that PEFT reads from an adapter's folder. network: Without weights; it is changed."""
    from peft import PeftConfig, inject_adapter_in_model, load_peft_weights, set_peft_model_state_dict

    from policygrad.models.replica import replace_parameters

    with warnings.catch_warnings(action="ignore"), torch.device("meta"):  # shown when the adapter was made
        inject_adapter_in_model(PeftConfig.from_pretrained(str(folder)), network)
    added = added_parameter_ids(network)
    replace_parameters(network.modules(), lambda p: torch.empty_like(p, device="cpu") if id(p) in added else p)
    weights = load_peft_weights(str(folder), device="cpu")
    loaded: Any = set_peft_model_state_dict(network, {n.removeprefix(PEFT_PREFIX): x for n, x in weights.items()})
    missing = {*loaded.missing_keys}
    unread = {id(p) for name, p in network.named_parameters() if name in missing}
    replace_parameters(network.modules(), lambda p: p.to("meta") if id(p) in unread else p)
    return {name: x for name, x in adapter_tensors(network).items() if not x.is_meta}


# Merging: W + (α/r)·B·A in place of W, for code that does not support adapters.


def merge_adapters(model: nn.Module) -> nn.Module:
    """Merge the adapters into the weights in place, removing PEFT from the model.

    A weight that an adapted layer shares with another one becomes the layer's own, as the adapter changes one of them: an adapted
    head is then no longer tied to the embedding, and the configuration says so.

    Raises:
        ModelError: A sum that is not finite.
    """
    for name in find_adapted_shared_layers(model):
        base: Any = model.get_submodule(name).get_base_layer()  # type: ignore[operator]
        for key, parameter in base.named_parameters(recurse=False):
            base._parameters[key] = nn.Parameter(parameter.detach().clone(), parameter.requires_grad)
    for name, module in outermost_peft_modules(model):
        parent, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(parent), attribute, unwrap_layer(module, name))
    _mark_untied_head(model)
    model._hf_peft_config_loaded = False  # type: ignore[assignment]
    model._weight_conversions = None  # type: ignore[assignment]  # they rename an adapter's tensors when saving
    del model.peft_config
    return model


def find_adapted_shared_layers(model: nn.Module) -> list[str]:
    """Return the names of adapted layers that share a weight with another layer, such as a head that is tied to the embedding."""
    counts = Counter(id(p) for module in model.modules() for p in module._parameters.values() if p is not None)
    return [
        name
        for name, module in named_peft_modules(model)
        if hasattr(module, "get_base_layer")
        and any(counts[id(p)] > 1 for p in module.get_base_layer().parameters(recurse=False))
    ]


def find_adapted_tied_layer(model: Any) -> str:
    """Return the name of an adapted head or embedding that the configuration ties to the other one; "" if there is none."""
    if not hasattr(getattr(model, "config", None), "get_text_config") or not adapter_configs(model):
        return ""
    if not any(getattr(c, "tie_word_embeddings", False) for c in _text_configs(model)):
        return ""
    ends = [f() for f in (model.get_output_embeddings, model.get_input_embeddings)]
    return next((name for name, module in named_peft_modules(model) if any(module is end for end in ends)), "")


def _text_configs(model: Any) -> tuple[Any, Any]:
    return model.config, model.config.get_text_config()


def _mark_untied_head(model: Any) -> None:
    """Write into the configuration that the head has a matrix of its own, if it has, so that loading does not tie it again."""
    head, embedding = (getattr(f(), "weight", None) for f in (model.get_output_embeddings, model.get_input_embeddings))
    if head is not None and embedding is not None and head is not embedding:
        for config in _text_configs(model):
            if getattr(config, "tie_word_embeddings", False):
                config.tie_word_embeddings = False


def unwrap_layer(module: Any, name: str) -> nn.Module:
    """Merge one of PEFT's modules in place, and return the layer without PEFT. Raises ModelError if the sum is not finite.

    Of the parameters of one module, such as stacked experts, each has a module of PEFT's around that of the one before.
    """
    if not hasattr(module, "get_base_layer"):
        return module.modules_to_save[module.active_adapters[0]]  # type: ignore[no-any-return]
    layer = module
    while hasattr(layer, "base_layer"):
        try:
            layer.merge(safe_merge=True)
        except ValueError as error:
            raise ModelError(f"{name} cannot be merged: {error}") from error
        layer = layer.base_layer
    return layer  # type: ignore[no-any-return]


def iter_merged_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) of the parameters after `merge_adapters`, without changing the model: one layer at a time.

    Raises:
        ModelError: A sum that is not finite.
    """
    adapted = outermost_peft_modules(model)
    inside = {id(p) for _, module in adapted for p in module.parameters()}
    for name, parameter in model.named_parameters():
        if id(parameter) not in inside:
            yield name.removeprefix(PEFT_PREFIX), parameter
    for name, module in adapted:
        with torch.no_grad():
            merged = unwrap_layer(copy.deepcopy(module), name)
        for key, parameter in merged.named_parameters():
            yield f"{name}.{key}".removeprefix(PEFT_PREFIX), parameter


# Frozen weights in four bits under adapters (Dettmers et al. 2023, QLoRA), with bitsandbytes.


def quantization_kwargs(lora: Lora, dtype: torch.dtype) -> dict[str, Any]:
    """Return the arguments of `from_pretrained` for four-bit weights; {} without quantization.

    Raises:
        ConfigError: bitsandbytes is not installed.
    """
    if lora.bits is None:
        return {}
    require_bitsandbytes("learner.lora bits=4", ", or leave bits out for unquantized weights")
    from transformers import BitsAndBytesConfig

    options = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True, "bnb_4bit_compute_dtype": dtype}
    return {"quantization_config": BitsAndBytesConfig(load_in_4bit=True, **options)}  # type: ignore[no-untyped-call]


def require_bitsandbytes(what: str, otherwise: str = "") -> None:
    """Raise ConfigError unless what weights of four or eight bits take is installed."""
    require_peft(what, "qlora")
    if find_spec("bitsandbytes") is None:
        raise ConfigError(f"{what} needs bitsandbytes, which is not installed: {install_command('qlora')}{otherwise}")


def check_4bit_gradients(model: nn.Module) -> None:
    """Check that gradients through four-bit weights are correct.

    On some processors bitsandbytes repacks weights for inference when they are first used in evaluation mode, in which a policy
    always is here; gradients are then silently wrong (observed with 0.50.2). The repacking is switched off.

    Raises:
        ModelError: A layer whose backward pass is not the transpose of its forward pass.
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
        forward = float((widen(layer(x) - layer(torch.zeros_like(x))) * widen(y)).sum())
    x.requires_grad_()
    with torch.enable_grad():  # whoever loads it
        (gradient,) = torch.autograd.grad((layer(x) * y).sum(), x)
    backward = float((widen(gradient) * widen(x.detach())).sum())
    size = float(widen(y).norm() * widen(layer(x).detach()).norm())
    if not abs(forward - backward) <= (0.02 if dtype == torch.bfloat16 else 1e-3) * size:
        raise ModelError(
            "learner.lora bits=4: this version of bitsandbytes computes wrong gradients on this device: install another, or leave "
            "bits out"
        )
