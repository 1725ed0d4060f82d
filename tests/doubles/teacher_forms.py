"""A teacher's server: it scores given ids with a model, and replies in the form of vLLM or SGLang, with or without a network.

The form of vLLM's replies was recorded from a server of version 0.32; that of SGLang's is its documentation's, version 0.5.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import torch
from torch import nn

Reply = tuple[int, Any]
"""(status, JSON)."""


@dataclass(eq=False)
class TeacherForm:
    """Answers as `engine` does."""

    model: nn.Module
    hf: Any
    engine: str = "vllm"
    key: str = ""
    """API key that every request must have."""
    context_length: int = 512
    change: Callable[[str, Any, Reply], Reply] = lambda path, body, reply: reply
    """Replaces a reply: called with the route, the body and the reply."""
    requests: list[tuple[str, Any, str]] = field(default_factory=list)
    """(route, body, the header Authorization)."""
    url: str = ""
    """Where it is served."""

    @property
    def transport(self) -> httpx.MockTransport:
        def handle(request: httpx.Request) -> httpx.Response:
            body = json.loads(request.content) if request.content else None
            status, reply = self.answer(request.url.path, body, request.headers.get("Authorization", ""))
            return httpx.Response(status, json=reply)

        return httpx.MockTransport(handle)

    @property
    def scored(self) -> list[list[int]]:
        """The ids of each request for log-probabilities, without those of the check at first contact."""
        ids = [body.get("prompt", body.get("input_ids")) for path, body, _ in self.requests if path in _SCORING]
        return [x for x in ids if len(x) != PROBE_IDS]

    def answer(self, path: str, body: Any, authorization: str = "") -> Reply:
        self.requests.append((path, body, authorization))
        if self.key and authorization != f"Bearer {self.key}":
            reply: Reply = 401, {"error": f"Unauthorized: {authorization}"}
        else:
            found = self.tell(path, body)
            reply = (404, {"detail": "Not Found"}) if found is None else (200, found)
        return self.change(path, body, reply)

    def tell(self, path: str, body: Any) -> Any:
        if path == "/v1/models":
            card = {"object": "model", "owned_by": self.engine, "max_model_len": self.context_length}
            return {"object": "list", "data": [{"id": name, **card} for name in ("teacher", "second")]}
        if path == "/tokenize":
            ids = self.hf(body["prompt"], add_special_tokens=body["add_special_tokens"])["input_ids"]
            return {"count": len(ids), "max_model_len": self.context_length, "tokens": ids}
        if path == "/v1/completions" and self.engine == "vllm":
            ids = body["prompt"]
            likeliest = self.likeliest(ids, body["prompt_logprobs"])
            entries = [
                {str(j): {"logprob": y, "rank": 1, "decoded_token": "said"} for j, y in [(i, x), *top]}
                for (i, x), top in zip(self.logp(ids), likeliest, strict=True)
            ]
            choice = {"index": 0, "text": "said", "finish_reason": "length", "prompt_logprobs": [None, *entries]}
            return {"object": "text_completion", "model": body["model"], "choices": [choice]}
        if path == "/generate" and self.engine == "sglang":
            ids, start = body["input_ids"], body["logprob_start_len"]
            entries = [[None, ids[0], None], *([x, i, None] for i, x in self.logp(ids))]
            about = {"input_token_logprobs": entries[start:], "output_token_logprobs": [[-1.0, 0, None]]}
            if k := body.get("top_logprobs_num", 0):
                listed = [None, *([[x, i, None] for i, x in top] for top in self.likeliest(ids, k))]
                about["input_top_logprobs"] = listed[start:]
            return {"text": "said", "output_ids": [0], "meta_info": about}
        return None

    def logp(self, ids: list[int]) -> list[tuple[int, float]]:
        """(id, its log-probability) of each id but the first."""
        tokens = torch.tensor(ids)
        values = self.all_logp(ids).gather(-1, tokens[1:, None])[:, 0]
        return list(zip(ids[1:], values.tolist(), strict=True))

    def likeliest(self, ids: list[int], k: int) -> list[list[tuple[int, float]]]:
        """(id, its log-probability) of the k likeliest tokens in place of each id but the first."""
        top = self.all_logp(ids).topk(k)
        rows = zip(top.indices.tolist(), top.values.tolist(), strict=True)
        return [list(zip(*row, strict=True)) for row in rows]

    @torch.no_grad()
    def all_logp(self, ids: list[int]) -> torch.Tensor:
        logits: torch.Tensor = self.model(input_ids=torch.tensor([ids])).logits[0, :-1]
        return logits.double().log_softmax(-1)


_SCORING = ("/v1/completions", "/generate")
PROBE_IDS = 65
"""Ids of the request that is made at first contact."""


@contextmanager
def serving(form: TeacherForm) -> Iterator[TeacherForm]:
    """Serve it on this machine; `form.url` is its address."""
    lock = threading.Lock()  # the model is one

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self.reply(None)

        def do_POST(self) -> None:
            self.reply(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

        def reply(self, body: Any) -> None:
            with lock:
                status, answer = form.answer(self.path, body, self.headers.get("Authorization", ""))
            content = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *args: object) -> None:
            pass

    class Server(ThreadingHTTPServer):
        daemon_threads = True
        request_queue_size = 256

    server = Server(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    form.url = f"http://127.0.0.1:{server.server_address[1]}/v1"
    try:
        yield form
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
