"""A server that answers in the form of vLLM's and draws from the weights that it is given, one token after the other: for a machine
without an accelerator, on which vLLM is not at hand. It needs transformers, and nothing of policygrad's. Prints its address.
"""

from __future__ import annotations

import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Lock
from typing import Any

import torch
from transformers import AutoModelForCausalLM

ANSWERS = ("/pause", "/reset_prefix_cache", "/resume")


class Engine:
    """The model, and the version of its weights."""

    def __init__(self) -> None:
        self.model: Any = None
        self.version, self.lock = "default", Lock()

    def load(self, folder: str) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    @torch.no_grad()
    def draw(self, prompt: list[int], most: int, temperature: float, seed: int) -> tuple[list[int], list[float]]:
        """(ids, their log-probabilities at the temperature)."""
        generator, ids, logp = torch.Generator().manual_seed(seed), list(prompt), list[float]()
        for _ in range(most):
            logits = self.model(input_ids=torch.tensor([ids])).logits[0, -1]
            said = (logits / temperature).log_softmax(-1)
            token = int(torch.multinomial(said.exp(), 1, generator=generator))
            ids, logp = [*ids, token], [*logp, float(said[token])]
            if token == self.model.config.eos_token_id:
                break
        return ids[len(prompt) :], logp

    def answer(self, path: str, body: Any) -> Any:
        if path == "/v1/completions":
            ids, logp = self.draw(body["prompt"], body["max_tokens"], body["temperature"], body["seed"])
            return {"choices": [{"token_ids": ids, "logprobs": {"token_logprobs": logp}}]}
        if path == "/v1/models":
            return {"data": [{"id": "policy"}]}
        if path == "/weight_info":
            return {"weight_version": self.version}
        if path == "/collective_rpc":
            self.load(body["kwargs"]["weights_path"])
            return {"results": [None]}
        if path == "/update_weight_version":
            self.version = body["new_version"]
            return {"success": True}
        return {"status": "done"} if path.startswith(ANSWERS) else None


def main() -> None:
    engine = Engine()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.do_POST()

        def do_POST(self) -> None:
            read = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            with engine.lock:
                told = engine.answer(self.path, json.loads(read) if read else None)
            text = json.dumps(told).encode()
            self.send_response(404 if told is None else 200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *words: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    print(f"http://127.0.0.1:{server.server_address[1]}", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
