"""The page of `policygrad chat --page`: each model's conversation beside the others'."""

from __future__ import annotations

import json
from collections.abc import Sequence
from http import HTTPStatus
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from policygrad.errors import DataError, PolicygradError
from policygrad.pages.render import render_page
from policygrad.utils.page_server import PageServer, Response

if TYPE_CHECKING:
    from policygrad.commands.chat import Speaker

WEB = files("policygrad.commands") / "web"
MAX_TEMPERATURE = 5.0


def create_chat_server(speakers: Sequence[Speaker], host: str, port: int) -> PageServer:
    """Create a server that listens and responds once `serve_forever` is called. port: 0 = a free one.

    `POST /reply` takes {"model": number, "messages": [{"role", "content"}, …], "temperature"} and returns {"answer", "reasoning",
    "text", "tokens", "finish_reason"}, or {"error"}: conversations are kept by the page.

    Raises:
        ConfigError: The address cannot be used.
    """
    options = speakers[0].options
    page = render_page(
        WEB / "chat.html",
        {
            "models": [speaker.label for speaker in speakers],
            "system": options.system or "",
            "temperature": options.temperature,
        },
        styles=(WEB / "chat.css",),
        scripts=(WEB / "chat.js",),
        live=True,
    )
    return PageServer.create(
        host,
        port,
        {
            ("GET", "/"): lambda body: Response(page, "text/html"),
            ("POST", "/reply"): lambda body: reply(speakers, body),
        },
    )


def reply(speakers: Sequence[Speaker], body: bytes) -> Response:
    """Answer the page's request for one model's reply."""
    from policygrad.proxy.requests import ApiError

    try:
        number, messages, temperature = parse_request(body, len(speakers))
        choice = speakers[number].request(messages, temperature).choices[0]
    except (ApiError, PolicygradError) as error:
        return Response(json.dumps({"error": str(error)}), "application/json", HTTPStatus.BAD_REQUEST)
    values: dict[str, Any] = {
        "answer": choice.content or choice.text,
        "reasoning": choice.reasoning,
        "text": choice.text,
    }
    values |= {"tokens": len(choice.token_ids), "finish_reason": choice.finish_reason}
    return Response(json.dumps(values), "application/json")


def parse_request(body: bytes, num_models: int) -> tuple[int, list[dict[str, Any]], float]:
    """Return the model's number, the messages and the temperature. Raises DataError for anything else."""
    try:
        request = json.loads(body)
        number, temperature = int(request["model"]), float(request["temperature"])
        messages = [{"role": str(m["role"]), "content": str(m["content"])} for m in request["messages"]]
    except (ValueError, TypeError, KeyError) as error:
        raise DataError(f"a request is JSON with model, messages and temperature ({error!r})") from error
    if not 0 <= number < num_models:
        raise DataError(f"model is {number}, and there are {num_models}, from 0")
    if not 0 <= temperature <= MAX_TEMPERATURE:
        raise DataError(f"temperature is {temperature}; it is from 0 to {MAX_TEMPERATURE:g}")
    if not messages or messages[-1]["role"] != "user":
        raise DataError("the last message must be the user's")
    return number, messages, temperature
