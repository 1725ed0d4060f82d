"""`policygrad proxy`: a model behind OpenAI's and Anthropic's API, as a program meets it in training."""

from __future__ import annotations

import contextlib
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from policygrad.commands.json_output import print_json, prints
from policygrad.commands.options import check_at_least_1, check_writable
from policygrad.commands.parsing import parse_arguments
from policygrad.commands.serve import ServerStopped, Serving
from policygrad.commands.served_model import MAX_TOKENS, ServedModel
from policygrad.errors import ConfigError
from policygrad.training.config.optional_arg import optional_arg
from policygrad.utils.http_limits import is_loopback

HELP = (
    "Serve a model to a program, to try it before it is trained with train --environment program:COMMAND. The program finds the "
    "model by the printed variables.",
    "Answered are /v1/chat/completions, /v1/completions, /v1/responses, /v1/messages and its count_tokens, with streams, tools, "
    "stop texts, n, seed, top_logprobs, and echo for the log-probabilities of given text. In training the run's temperature is "
    "used, here the request's.",
)
KEY = "policygrad"


@dataclass(frozen=True)
class ProxyOptions:
    """Options of `policygrad proxy`."""

    model: str = "tiny"
    """A run, a model's folder, a hub id, or an embedded model."""
    host: str = "127.0.0.1"
    """Address to listen on. From other machines than this one it takes the key that is printed."""
    port: int = 0
    """Port; 0 = any that is free."""
    max_tokens: int = MAX_TOKENS
    """Tokens of a completion at most; a request may ask for fewer."""
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
    """Print the address, and at the end that it stopped, as JSON lines."""


@prints(Serving, ServerStopped)
def proxy(args: list[str]) -> int:
    """Run `policygrad proxy [--model M] [--port P]`."""
    options = parse_arguments(ProxyOptions, args, "proxy", *HELP)
    if not 0 <= options.port < 65536:
        raise ConfigError(f"--port must be from 0 to 65535, not {options.port}")
    check_at_least_1(options, "max_tokens")
    if options.record is not None:
        check_writable(options.record, "--record")
        if options.record.exists() and not options.record.is_file():
            raise ConfigError(f"--record {options.record} is not a regular file; choose another")
    from policygrad.proxy.server import ANY_KEY, Proxy

    with contextlib.ExitStack() as stack:
        file = None
        if options.record is not None:
            try:
                file = stack.enter_context(options.record.open("a", encoding="utf-8"))
            except OSError as error:
                raise ConfigError(f"--record {options.record} cannot be written ({error.strerror})") from error
        model = ServedModel(
            options.model,
            max_tokens=options.max_tokens,
            template_options=options.template_options,
            trust_remote_code=options.trust_remote_code,
            record=file,
        )
        # whoever reaches the address from another machine needs the key that is printed
        is_local = is_loopback(options.host)
        key = KEY if is_local else f"pg-{secrets.token_hex(16)}"
        server = Proxy(options.host, options.port, options.model, needs_keys=not is_local)
        server.add(ANY_KEY if is_local else key, model.submit, model.note_error)
        variables = server.environment(key)
        model.start()
        with contextlib.suppress(KeyboardInterrupt):
            if options.json:
                print_json({"event": "serving", "url": server.url, "models": [options.model], "api_key": key})
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
