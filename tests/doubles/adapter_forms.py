"""Servers that load adapters by name, in the form that vLLM and SGLang document, and a model of one linear layer to adapt.

Forms and words: vLLM 0.32, vllm/entrypoints/openai/models/serving.py; SGLang 0.5, python/sglang/srt/managers/
{io_struct,tokenizer_control_mixin}.py and python/sglang/srt/lora/lora_manager.py.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

from doubles.http_engines import FormServer, SglangForm, VllmForm


class OneLayer(nn.Module):
    """A language model that depends on one token: logits [V] are the layer's column for it."""

    def __init__(self, vocabulary: int, spread: float = 3.0) -> None:
        super().__init__()
        self.layer = nn.Linear(vocabulary, vocabulary, bias=False)
        made = torch.randn(vocabulary, vocabulary, generator=torch.Generator().manual_seed(0))
        self.layer.weight = nn.Parameter(spread * made)

    def get_input_embeddings(self) -> None: ...

    def get_output_embeddings(self) -> None: ...

    def enable_input_require_grads(self) -> None:
        """PEFT needs it for a model without embeddings."""

    def forward(self, input_ids: Tensor, use_cache: bool = False) -> SimpleNamespace:
        return SimpleNamespace(logits=self.layer(F.one_hot(input_ids, self.layer.in_features).float()))


def adapted(table: Tensor, folder: str) -> Tensor:
    """Return the logits [V, V] with the adapter in a folder, in PEFT's format."""
    output = json.loads((Path(folder) / "adapter_config.json").read_text())
    result = load_file(Path(folder) / "adapter_model.safetensors")
    a, b = (result.pop(f"base_model.model.layer.lora_{part}.weight") for part in "AB")
    assert not result
    assert output["target_modules"] == ["layer"]
    return table + output["lora_alpha"] / output["r"] * (b @ a).T


class Adapters(FormServer):
    """Started with --enable-lora if `enabled`, and --max-lora-rank `most`."""

    enabled, most = True, 8

    def __init__(self, table: Tensor, end: frozenset[int]) -> None:
        super().__init__(table, end)
        self.adapters: dict[str, tuple[str, Tensor]] = {}
        """Name to (folder, logits)."""

    def under(self, name: str, path: str, body: Any) -> Any:
        """Return the reply with the adapter's logits instead of the model's own."""
        own = self.table
        self.table = self.adapters[name][1]
        try:
            return super().tell(path, body)
        finally:
            self.table = own

    def load_adapter(self, name: str, folder: str) -> None:
        self.adapters[name] = (folder, adapted(self.table, folder))


class VllmAdapters(Adapters, VllmForm):
    """Started with VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 if `updating`."""

    updating = True

    def tell(self, path: str, body: Any) -> Any:
        if path == "/v1/completions" and body["model"] != "served":
            if body["model"] not in self.adapters:
                return _error(404, f"The model `{body['model']}` does not exist.")
            return self.under(body["model"], path, body)
        if path == "/v1/models":
            cards = [{"id": name, "root": at, "parent": "served"} for name, (at, _) in self.adapters.items()]
            return {"object": "list", "data": [{"id": "served", "root": "/served", "parent": None}, *cards]}
        if path == "/v1/load_lora_adapter" and self.updating:
            return self._load(body["lora_name"], body["lora_path"])
        if path == "/v1/unload_lora_adapter" and self.updating:
            if body["lora_name"] not in self.adapters:
                return _error(404, f"The lora adapter '{body['lora_name']}' cannot be found.")
            del self.adapters[body["lora_name"]]
            return httpx.Response(200, text="Success: LoRA adapter removed successfully.")
        return super().tell(path, body)

    def _load(self, name: str, folder: str) -> httpx.Response:
        rank = json.loads((Path(folder) / "adapter_config.json").read_text())["r"]
        if not self.enabled:
            return _error(500, "LoRA is not enabled. Use --enable-lora to enable LoRA.")
        if rank > self.most:
            return _error(500, f"LoRA rank {rank} is greater than max_lora_rank {self.most}.")
        if name in self.adapters:
            return _error(400, f"The lora adapter '{name}' has already been loaded.")
        self.load_adapter(name, folder)
        return httpx.Response(200, text=f"Success: LoRA adapter '{name}' added successfully.")


class SglangAdapters(Adapters, SglangForm):
    """Lists its adapters only in replies to a load request."""

    def tell(self, path: str, body: Any) -> Any:
        if path == "/generate" and body.get("lora_path") is not None:
            if body["lora_path"] not in self.adapters:
                return _error(400, f"Got LoRA adapter that has never been loaded: {body['lora_path']}")
            return self.under(body["lora_path"], path, body)
        if path == "/load_lora_adapter":
            return self._load(body["lora_name"], body["lora_path"])
        if path == "/unload_lora_adapter":
            if self.adapters.pop(body["lora_name"], None) is None:
                return self._told(f"LoRA with name {body['lora_name']} does not exist")
            return self._told()
        return super().tell(path, body)

    def _load(self, name: str, folder: str) -> httpx.Response:
        rank = json.loads((Path(folder) / "adapter_config.json").read_text())["r"]
        if not self.enabled:
            return self._told("LoRA is not enabled. Please set `--enable-lora` to enable LoRA.")
        if rank > self.most:
            return self._told(
                f"LoRA adapter {name} with rank {rank} is incompatible with the current LoRA memory pool configuration."
            )
        if name in self.adapters:
            return self._told(f"LoRA with name {name} already exists")
        self.load_adapter(name, folder)
        return self._told()

    def _told(self, error: str | None = None) -> httpx.Response:
        loaded = {
            name: {"lora_id": "1", "lora_name": name, "lora_path": at, "pinned": False}
            for name, (at, _) in self.adapters.items()
        }
        report = {"success": error is None, "error_message": error, "loaded_adapters": loaded}
        return httpx.Response(200 if error is None else 400, json=report)


def _error(status: int, message: str) -> httpx.Response:
    return httpx.Response(status, json={"error": {"message": message, "type": "Error", "param": None, "code": status}})
