"""Small servers that stand in for other projects' in tests: stand_in_servers.py judge|openenv|vllm

Each prints its address, then serves until it is killed. As vLLM it can be started by a run: of the words of `vllm serve` it reads
`--port N` and `--host ADDRESS`. `make test-environments` and `make test-vllm` use the real ones.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Lock
from typing import Any

Respond = Callable[[str, Any], Any]
"""`respond(path, JSON body)` returns the answer; None = there is no such path."""


def serve_judge() -> None:
    """A chat-completions server that gives every text the score 1. Needs only the standard library."""
    reply = {"choices": [{"message": {"content": json.dumps({"score": 1})}}]}
    serve_json(lambda path, body: reply)


def serve_openenv() -> None:
    """An OpenEnv server: episodes of one turn, reward 1. Needs websockets, which the extra brings."""
    from websockets.asyncio.server import ServerConnection, serve

    schema = json.dumps({"action": {"properties": {"text": {"type": "string"}}, "required": ["text"]}}) + "\n"

    def answer_http(connection: ServerConnection, request: Any) -> Any:
        return connection.respond(HTTPStatus.OK, schema) if request.path == "/schema" else None

    async def play_episodes(connection: ServerConnection) -> None:
        async for message in connection:
            kind = json.loads(message)["type"]
            if kind == "close":
                return
            done = kind == "step"
            data = {"observation": {"prompt": "Say anything."}, "reward": float(done), "done": done}
            await connection.send(json.dumps({"type": "observation", "data": data}))

    async def main() -> None:
        async with serve(play_episodes, "127.0.0.1", 0, process_request=answer_http) as server:
            print(f"http://127.0.0.1:{next(iter(server.sockets)).getsockname()[1]}", flush=True)
            await server.serve_forever()

    asyncio.run(main())


def serve_vllm() -> None:
    """A server with vLLM's routes that samples from the weights it is given. Needs transformers."""
    serve_json(make_vllm(), int(_read_option("--port", "0")), _read_option("--host", "127.0.0.1"))


def _read_option(name: str, default: str) -> str:
    return sys.argv[sys.argv.index(name) + 1] if name in sys.argv else default


def make_vllm(device: str = "cpu", dtype: str = "float32") -> Respond:
    """Return what a server like vLLM answers, which samples one token at a time."""
    import torch
    from transformers import AutoModelForCausalLM

    model: Any = None
    weight_version = "default"
    asleep: set[str] = set()  # parts of the memory that it has lent

    @torch.no_grad()
    def sample(prompt_ids: list[int], max_tokens: int, temperature: float, seed: int) -> tuple[list[int], list[float]]:
        generator, ids, logprobs = torch.Generator(device).manual_seed(seed), list(prompt_ids), list[float]()
        for _ in range(max_tokens):
            logits = model(input_ids=torch.tensor([ids], device=device)).logits[0, -1].float()
            logp = (logits / temperature).log_softmax(-1)
            token = int(torch.multinomial(logp.exp(), 1, generator=generator))
            ids, logprobs = [*ids, token], [*logprobs, float(logp[token])]
            if token == model.config.eos_token_id:
                break
        return ids[len(prompt_ids) :], logprobs

    def respond(path: str, body: Any) -> Any:
        nonlocal model, weight_version
        if path.startswith("/sleep"):
            model = None  # level 2: they are lost
            asleep.update({"weights", "kv_cache"})
            return {"status": "sleeping"}
        if path.startswith("/wake_up"):
            asleep.discard(path.partition("tags=")[2])
            return {"status": "awake"}
        if path == "/is_sleeping":
            return {"is_sleeping": bool(asleep)}
        if path == "/v1/completions":
            ids, logprobs = sample(body["prompt"], body["max_tokens"], body["temperature"], body["seed"])
            return {"choices": [{"token_ids": ids, "logprobs": {"token_logprobs": logprobs}}]}
        if path == "/v1/models":
            return {"data": [{"id": "policy"}]}
        if path == "/weight_info":
            return {"weight_version": weight_version}
        if path == "/collective_rpc":
            folder = body["kwargs"]["weights_path"]
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval().to(device)
            return {"results": [None]}
        if path == "/update_weight_version":
            weight_version = body["new_version"]
            return {"success": True}
        return {"status": "done"} if path.startswith(("/pause", "/reset_prefix_cache", "/resume")) else None

    return respond


def serve_json(respond: Respond, port: int = 0, host: str = "127.0.0.1") -> None:
    """Answer requests at a port, 0 = any, until the process is killed."""
    server = ThreadingHTTPServer((host, port), make_handler(respond, Lock()))
    print(f"http://{host}:{server.server_address[1]}", flush=True)
    server.serve_forever()


def make_handler(respond: Respond, lock: Lock) -> type[BaseHTTPRequestHandler]:
    """Return what answers GET and POST, one at a time, with `respond(path, JSON body)`; None is a 404."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.do_POST()

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            with lock:
                response = respond(self.path, json.loads(body) if body else None)
            text = json.dumps(response).encode()
            self.send_response(404 if response is None else 200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *_: object) -> None:
            pass

    return Handler


if __name__ == "__main__":
    {"judge": serve_judge, "openenv": serve_openenv, "vllm": serve_vllm}[sys.argv[1]]()
