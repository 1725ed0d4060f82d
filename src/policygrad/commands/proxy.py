"""`policygrad proxy`: a model behind OpenAI's and Anthropic's API, as a program meets it in training."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Annotated, Any

import tyro

from policygrad.commands.json_output import print_json
from policygrad.commands.options import parse_arguments
from policygrad.errors import ConfigError
from policygrad.training.config.run import optional_arg

HELP = (
    "Serve a model to a program, to try it before it is trained with train --environment program:COMMAND. The program finds the "
    "model by the printed variables.",
    "Answered are /v1/chat/completions, /v1/completions, /v1/responses and /v1/messages, with streams, tools, stop texts, n and "
    "seed. In training the run's temperature is used, here the request's.",
)
KEY = "policygrad"
MAX_TURNS = 10_000
"""Completions whose tokens are kept, so that later requests continue them."""


@dataclass(frozen=True)
class ProxyOptions:
    """Options of `policygrad proxy`."""

    model: str = "tiny"
    """A run, a model's folder, a hub id, or an embedded model."""
    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = 0
    """Port; 0 = any that is free."""
    max_tokens: int = 512
    """Tokens of a completion whose request names no limit."""
    record: Annotated[Path | None, optional_arg("FILE", "nothing is written")] = None
    """Append every completion as a line of JSON: prompt_ids, token_ids, logp, text."""
    template_options: Annotated[
        tuple[str, ...],
        tyro.conf.arg(name="tokenizer.template-options"),
        optional_arg("NAME=VALUE", "the template's own"),
    ] = ()
    """Variables of the chat template: enable_thinking=false. One that the template does not read is refused."""
    trust_remote_code: bool = False
    """Let Python code in the model's folder run."""
    json: bool = False
    """Print the address, and at the end that it stopped, as JSON lines (docs/json.md)."""


def proxy(args: list[str]) -> int:
    """Run `policygrad proxy [--model M] [--port P]`."""
    options = parse_arguments(ProxyOptions, args, "proxy", *HELP)
    if not 0 <= options.port < 65536:
        raise ConfigError(f"--port must be from 0 to 65535, not {options.port}")
    from policygrad.proxy.server import ANY_KEY, Proxy

    with contextlib.ExitStack() as stack:
        file = None
        if options.record is not None:
            try:
                file = stack.enter_context(options.record.open("a", encoding="utf-8"))
            except OSError as error:
                raise ConfigError(f"--record {options.record} cannot be written ({error.strerror})") from error
        model = _Model(options, file)
        server = Proxy(options.host, options.port, options.model)
        server.add(ANY_KEY, model.submit)
        variables = server.environment(KEY)
        threading.Thread(target=model.run, name="sampling", daemon=True).start()
        with contextlib.suppress(KeyboardInterrupt):
            if options.json:
                print_json({"event": "serving", "url": server.url, "models": [options.model], "api_key": KEY})
            else:
                print(f"serving {options.model} at {server.url}", flush=True)
                print(
                    "programs: export " + " ".join(f"{name}={value}" for name, value in variables.items()), flush=True
                )
            server.wait()
        server.close()
    if options.json:
        print_json({"event": "stopped"})
    return 0


class _Model:
    """Samples for the requests that wait, those of equal sampling together."""

    def __init__(self, options: ProxyOptions, record: Any) -> None:
        from policygrad.models.loading import load_model
        from policygrad.models.tokenizer import load_tokenizer
        from policygrad.rollout.conversation_tree import ConversationTree
        from policygrad.samplers.local.sampler import LocalSampler

        model = load_model(options.model, trust_remote_code=options.trust_remote_code)
        self.options, self.record = options, record
        loaded = load_tokenizer(options.model, model, trust_remote_code=options.trust_remote_code)
        self.encoder = loaded.with_template_options(options.template_options)
        self.sampler = LocalSampler.from_tokenizer(model, self.encoder)
        self.tree = ConversationTree(self.encoder, "a request")
        self.count = 0
        self.queue: SimpleQueue[tuple[Any, Future[Any]]] = SimpleQueue()

    def submit(self, request: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self.queue.put((request, future))
        return future

    def run(self) -> None:
        """Answer requests for ever."""
        while True:
            waiting = [self.queue.get()]
            with contextlib.suppress(Empty):
                while True:
                    waiting.append(self.queue.get_nowait())
            for request, future in waiting:
                try:
                    future.set_result(self._answer(request))
                except Exception as error:  # the server answers with it, and goes on
                    future.set_exception(error)

    def _answer(self, request: Any) -> Any:
        from policygrad.proxy.formats import ApiError, ChatReply
        from policygrad.rollout.conversation_tree import ConversationTree
        from policygrad.samplers.base import Request, SamplingParams

        if self.tree.num_turns >= MAX_TURNS:
            self.tree = ConversationTree(self.encoder, "a request")
        turn = self.tree.open_turn(request)
        limit = request.max_tokens or self.options.max_tokens
        if self.encoder.context_length is not None:
            limit = min(limit, self.encoder.context_length - len(turn.context_ids))
        if limit < 1:
            raise ApiError(
                f"the prompt has {len(turn.context_ids)} tokens, and the model reads {self.encoder.context_length}",
                400,
                "context_length_exceeded",
            )
        temperature = 1.0 if request.temperature is None else request.temperature
        sampling = SamplingParams(
            temperature, request.top_p or 1.0, max(0, request.top_k or 0), limit, stop=tuple(request.stop)
        )
        requests = []
        for number in range(request.num_choices):
            self.count += 1
            key = (0, self.count) if request.seed is None else (1, request.seed % 2**63, number)
            requests.append(Request(turn.context_ids, key, sampling, limit))
        choices = tuple(self.tree.add_reply(turn, g) for g in asyncio.run(self.sampler.generate(requests)))
        if self.record is not None:
            for choice in choices:
                values = {"prompt_ids": turn.context_ids.tolist(), "token_ids": choice.token_ids, "logp": choice.logp}
                self.record.write(json.dumps({**values, "text": choice.text}) + "\n")
            self.record.flush()
        return ChatReply(choices, tuple(turn.context_ids.tolist()))
