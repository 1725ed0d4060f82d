"""An adapter alone, as PEFT saves one: adapter_config.json and adapter_model.safetensors, which vLLM and SGLang load by a name.

Names and fields: vllm-project/vllm 0.32, vllm/lora/{peft_helper,lora_model,utils}.py; sgl-project/sglang 0.5,
python/sglang/srt/lora/{lora_config,lora}.py. Both take B·A times lora_alpha / r, without DoRA, trained biases or whole modules.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from policygrad.errors import EngineError
from policygrad.models.adapters import PREFIX, WEIGHTS, adapters_of
from policygrad.models.lora import FILE
from policygrad.weight_sync.folder import Write

_ODD = (
    "modules_to_save",
    "bias",
    "use_dora",
    "use_rslora",
    "rank_pattern",
    "alpha_pattern",
    "trainable_token_indices",
    "target_parameters",
    "layer_replication",
    "lora_bias",
)
"""Fields of PEFT's LoraConfig that make of an adapter more than B·A times lora_alpha / r for each module."""


def unfit(model: nn.Module) -> str:
    """Why no adapter of the model's can be given to an engine alone; "" = one can."""
    configs = adapters_of(model)
    if not configs:
        return "the model has no adapters, which --learner.lora puts in"
    if len(configs) > 1:
        return f"the model has {len(configs)} adapters, and an engine draws with one"
    [config] = configs.values()
    kind = str(getattr(config.peft_type, "value", config.peft_type))
    if kind != "LORA":
        return f"the model's adapters are of the kind {kind}, and engines serve LORA"
    odd = [name for name in _ODD if getattr(config, name, None) not in (None, False, "none", {}, [], ())]
    return f"the model's adapters have {', '.join(odd)}, which not every engine serves" if odd else ""


def adapter_writer(model: nn.Module) -> Write:
    """model: with one adapter that is fit; what is written are its tensors among those that are published.

    Raises:
        EngineError: when it writes, for a learner that publishes no adapter.
    """
    [(adapter, config)] = adapters_of(model).items()

    def write(tensors: Mapping[str, Tensor], folder: Path) -> None:
        from safetensors.torch import save_file

        found = {
            _name(name, adapter): tensors[name].detach().to("cpu", copy=True).contiguous()
            for name in tensors
            if ".lora_" in name
        }
        if not found:
            raise EngineError(
                "the learner publishes no adapter: let publish() name its parameters, or take --sampler.publish whole"
            )
        save_file(found, folder / WEIGHTS, metadata={"format": "pt"})
        (folder / FILE).write_text(json.dumps(_described(config, found), indent=2), encoding="utf-8")

    return write


def _name(name: str, adapter: str) -> str:
    """In PEFT's file: …q_proj.lora_A.weight for …q_proj.lora_A.default.weight."""
    plain = re.sub(rf"(\.lora_\w+)\.{re.escape(adapter)}(?=\.|$)", r"\1", name.removeprefix(PREFIX))
    return PREFIX + plain


def _described(config: Any, names: Iterable[str]) -> dict[str, Any]:
    """adapter_config.json. Modules are named as they are in the file: a pattern, or all-linear, is not for every engine."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": config.base_model_name_or_path or "",
        "r": config.r,
        "lora_alpha": config.lora_alpha,
        "target_modules": sorted({name.partition(".lora_")[0].rpartition(".")[2] for name in names}),
        "bias": "none",
        "use_dora": False,
        "use_rslora": False,
        "modules_to_save": None,
        "inference_mode": True,
    }
