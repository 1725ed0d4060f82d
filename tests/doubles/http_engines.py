"""Servers that reply in the form that vLLM and SGLang document, sampling from a table, without a network.

The form of vLLM's replies was recorded from a server of version 0.32; that of SGLang's is its documentation's, version 0.5.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import torch
from safetensors.torch import load_file
from torch import Tensor

from doubles.engine import walk
from policygrad.samplers.base import Request, SamplingParams
from policygrad.samplers.engines.base import EngineCompletion


class FormServer:
    """Keeps its requests. Tests may replace `tell`, which returns the reply."""

    def __init__(self, table: Tensor, end: frozenset[int]) -> None:
        self.table, self.end, self.version = table.detach().clone(), end, "default"
        self.asked: list[tuple[str, Any]] = []
        self.transport = httpx.MockTransport(self.answer)

    @property
    def paths(self) -> list[str]:
        """Routes of requests other than for completions."""
        completions = ("/v1/completions", "/generate", "/inference/v1/generate")
        return [path for path, _ in self.asked if path not in completions]

    def answer(self, request: httpx.Request) -> httpx.Response:
        path = request.url.raw_path.decode()
        body = json.loads(request.content) if request.content not in (b"", b"null") else None
        self.asked.append((path, body))
        report = self.tell(path, body)
        if isinstance(report, httpx.Response):
            return report
        return httpx.Response(404, json={"detail": "Not Found"}) if report is None else httpx.Response(200, json=report)

    def tell(self, path: str, body: Any) -> Any:
        raise NotImplementedError

    def load(self, folder: str) -> None:
        self.table = load_file(Path(folder) / "model.safetensors")["table"]

    def draw(self, tokens: list[int], temperature: float, max_tokens: int, seed: int) -> EngineCompletion:
        asked = Request(
            torch.tensor(tokens), (), SamplingParams(temperature=temperature, max_tokens=max_tokens), max_tokens
        )
        return walk(self.table, asked, seed, self.end)


class VllmForm(FormServer):
    """`vllm serve`, version 0.32; without --logprobs-mode if `raw`, with VLLM_SERVER_DEV_MODE=1 if `developing`."""

    raw, developing = False, True

    def tell(self, path: str, body: Any) -> Any:
        if path == "/v1/completions":
            drawn = self.draw(body["prompt"], body["temperature"], body["max_tokens"], body["seed"])
            logp = drawn.logp
            if self.raw:
                before = [body["prompt"][-1], *drawn.tokens[:-1]]
                logp = self.table[before].log_softmax(-1).gather(-1, torch.tensor(drawn.tokens)[:, None])[:, 0].tolist()
            ended = drawn.tokens[-1] in self.end
            choice = {
                "index": 0,
                "text": "said",
                "logprobs": {"text_offset": [], "token_logprobs": logp, "tokens": [], "top_logprobs": []},
                "finish_reason": "stop" if ended else "length",
                "stop_reason": None,
                "token_ids": drawn.tokens,
                "prompt_logprobs": None,
                "prompt_token_ids": body["prompt"],
            }
            return {"id": "cmpl-1", "object": "text_completion", "model": body["model"], "choices": [choice]}
        if path == "/v1/models":
            return {"object": "list", "data": [{"id": "served", "object": "model", "owned_by": "vllm"}]}
        if not self.developing:
            return None
        if path == "/collective_rpc":
            self.load(body["kwargs"]["weights_path"])
        if path == "/update_weight_version":
            self.version = body["new_version"]
        answers: dict[str, Any] = {
            "/weight_info": {"weight_version": self.version},
            "/pause?mode=keep": {"status": "paused"},
            "/collective_rpc": {"results": [None]},
            "/reset_prefix_cache": {"success": True},
            "/reset_encoder_cache": httpx.Response(200),
            "/resume": {"status": "resumed"},
            "/update_weight_version": {"success": True, "new_version": self.version},
        }
        return answers.get(path)


class SglangForm(FormServer):
    """`sglang.launch_server`, version 0.5; cannot read the weights if `broken`."""

    broken = False

    def tell(self, path: str, body: Any) -> Any:
        if path == "/generate":
            asked = body["sampling_params"]
            drawn = self.draw(body["input_ids"], asked["temperature"], asked["max_new_tokens"], asked["sampling_seed"])
            entries = [[logp, token, None] for logp, token in zip(drawn.logp, drawn.tokens, strict=True)]
            ended = drawn.tokens[-1] in self.end
            reason = (
                {"type": "stop", "matched": drawn.tokens[-1]} if ended else {"type": "length", "length": len(entries)}
            )
            about = {
                "id": "1",
                "finish_reason": reason,
                "prompt_tokens": len(body["input_ids"]),
                "weight_version": self.version,
                "output_token_logprobs": entries,
                "completion_tokens": len(entries),
            }
            return {"text": "said", "output_ids": drawn.tokens, "meta_info": about}
        if path == "/update_weights_from_disk":
            if self.broken:
                return {"success": False, "message": "Failed to get weights iterator", "num_paused_requests": 0}
            self.load(body["model_path"])
            self.version = body["weight_version"]
            return {"success": True, "message": "Succeeded to update model weights.", "num_paused_requests": 0}
        return None
