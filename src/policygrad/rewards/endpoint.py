"""One chat completion of an OpenAI-compatible server: asked for again, after a while, where that may help."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from importlib.util import find_spec
from types import TracebackType
from typing import Any, Self

from policygrad.errors import ConfigError, RewardError, install_command
from policygrad.rewards.calls import quote

_LATER = (408, 409, 425, 429)
"""Answers that mean later, beside those from 500 on."""
_DENIED = (401, 403)
_LONGEST = 60.0
"""Seconds between two tries, whatever the server asks for."""


def check_installed() -> None:
    """Raises ConfigError, with the way out, where httpx is missing."""
    if find_spec("httpx") is None:
        raise ConfigError(f"reward 'judge' asks a server through httpx: {install_command('judge')}")


class _LaterError(Exception):
    """Ask again. `after`: seconds that the server wants to be left alone, None = it does not say."""

    def __init__(self, said: str, after: float | None = None) -> None:
        super().__init__(said)
        self.after = after


class Endpoint:
    """A pool of connections. key: the name of the environment variable that holds the key; where it is not set none is sent."""

    def __init__(self, url: str, key: str, seconds: float, retries: int, wait: float) -> None:
        import httpx

        self._url, self._key, self._retries, self._wait = f"{url.rstrip('/')}/chat/completions", key, retries, wait
        self._secret = os.environ.get(key, "")
        headers = {"Authorization": f"Bearer {self._secret}"} if self._secret else {}
        self._errors = (httpx.TransportError,)
        self._client = httpx.AsyncClient(timeout=seconds, headers=headers)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        await self._client.aclose()

    async def ask(self, body: dict[str, Any], spend: Callable[[], None]) -> str:
        """The text of the answer. spend: called before each request; what it raises is raised.

        Raises:
            RewardError: the server refuses, says nothing after all tries, or answers something else than a chat completion.
        """
        for tries in range(self._retries + 1):
            spend()
            try:
                return _text(await self._post(body))
            except _LaterError as error:
                if tries == self._retries:
                    raise RewardError(
                        f"the judge at {self._url} has not answered in {tries + 1} tries: {error}"
                    ) from error
                after = self._wait * 2**tries if error.after is None else error.after
                await asyncio.sleep(min(after, _LONGEST))
        raise AssertionError  # the last try returns or raises

    async def _post(self, body: dict[str, Any]) -> Any:
        try:
            answer = await self._client.post(self._url, json=body)
        except self._errors as error:
            raise _LaterError(f"{type(error).__name__} {error}".strip()) from error
        said = answer.text.replace(self._secret, "…") if self._secret else answer.text
        if answer.status_code in _LATER or answer.status_code >= 500:
            raise _LaterError(f"{answer.status_code} {quote(said)}", _seconds(answer.headers.get("retry-after")))
        if answer.status_code in _DENIED:
            way_out = "" if self._secret else f", which a worker has by --rewards.environment {self._key}"
            raise RewardError(
                f"the judge at {self._url} answers {answer.status_code}: its key is what {self._key} holds{way_out}: {quote(said)}"
            )
        if answer.status_code >= 300:
            raise RewardError(f"the judge at {self._url} answers {answer.status_code}: {quote(said)}")
        try:
            return answer.json()
        except ValueError:
            raise RewardError(f"the judge at {self._url} answers no JSON: {quote(said)}") from None


def _text(answer: Any) -> str:
    """The content of the first choice of a chat completion."""
    try:
        content = answer["choices"][0]["message"]["content"]
    except (KeyError, IndexError, TypeError):
        content = None
    if not isinstance(content, str):
        raise RewardError(f"the judge's answer is no chat completion: {quote(answer)}")
    return content


def _seconds(text: str | None) -> float | None:
    """Of a Retry-After header; a date is not waited for."""
    try:
        return max(0.0, float(text)) if text is not None else None
    except ValueError:
        return None
