"""Tiny models in the forms in which today's are released: experts of gpt-oss in MXFP4, matrices of Qwen 3 in FP8 blocks."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from policygrad.models.loading import resolve_model

BLOCK = 128
"""Rows and columns of a block that has one scale."""


def write_mxfp4(folder: Path) -> Path:
    """Write a model whose experts are random four-bit numbers, 32 of which share an exponent."""
    tensors = _write_plain(
        folder, "gpt_oss", intermediate_size=64, sliding_window=16, num_local_experts=4, num_experts_per_tok=2
    )
    generator = torch.Generator().manual_seed(0)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inner, outer = tensors.pop(name).shape
        shape = experts, outer, inner // 32
        tensors[f"{name}_blocks"] = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8, generator=generator)
        tensors[f"{name}_scales"] = torch.full(shape, 122, dtype=torch.uint8)  # 2^(122 − 127)
    kept = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    return _finish(folder, tensors, {"quant_method": "mxfp4", "modules_to_not_convert": kept})


def write_fp8(folder: Path) -> Path:
    """Write a model whose matrices are eight-bit floats, with a scale for each block."""
    tensors = _write_plain(folder, "qwen3", intermediate_size=256, hidden_size=128)
    for name in [name for name in tensors if name.endswith("proj.weight")]:
        weight = tensors[name].float()
        rows, columns = (-(-size // BLOCK) for size in weight.shape)
        padded = torch.zeros(rows * BLOCK, columns * BLOCK)
        padded[: weight.shape[0], : weight.shape[1]] = weight
        scale = padded.view(rows, BLOCK, columns, BLOCK).abs().amax((1, 3)) / 448
        spread = scale.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)[: weight.shape[0], : weight.shape[1]]
        tensors[name] = (weight / spread).to(torch.float8_e4m3fn)
        tensors[f"{name}_scale_inv"] = scale
    settings = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK]}
    return _finish(folder, tensors, settings)


def write_bitsandbytes(folder: Path) -> Path:
    """Write a model whose matrices are in four bits, as the library does."""
    from transformers import BitsAndBytesConfig

    _write_plain(folder, "qwen3", intermediate_size=256, hidden_size=128)
    options: Any = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32
    )
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, quantization_config=options)
    model.save_pretrained(folder)
    return folder


def _write_plain(folder: Path, kind: str, **options: int) -> dict[str, Tensor]:
    tokenizer = AutoTokenizer.from_pretrained(resolve_model("tiny"))
    sizes = {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
    }
    sizes |= {"vocab_size": len(tokenizer), "max_position_embeddings": 128} | options
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, "bos_token_id": None}
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes, **ends)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return {name: x.to(torch.bfloat16) for name, x in load_file(folder / "model.safetensors").items()}


def _finish(folder: Path, tensors: Mapping[str, Tensor], settings: Mapping[str, Any]) -> Path:
    save_file(
        {name: x.contiguous() for name, x in tensors.items()}, folder / "model.safetensors", metadata={"format": "pt"}
    )
    config = json.loads((folder / "config.json").read_text()) | {"quantization_config": settings, "dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(config))
    return folder
