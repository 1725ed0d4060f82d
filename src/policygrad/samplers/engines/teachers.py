"""Teachers behind servers: the log-probabilities that another model gives to the policy's tokens, over HTTP.

Token ids go out and log-probabilities come back. Before the first request, and when a server comes back, it is checked that it is
an engine that scores tokens, that its tokenizer is the policy's, and that its log-probabilities are finite and of the tokens sent.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from policygrad.core.batch import TopTokens
from policygrad.errors import EngineError
from policygrad.models.tokenizer import Tokenizer
from policygrad.samplers.base import TokenScores
from policygrad.samplers.config import TeacherServerConfig
from policygrad.samplers.engines.base import REQUEST_TIMEOUT, EngineSampler
from policygrad.samplers.engines.http import HttpClient, RequestRefusedError
from policygrad.samplers.engines.registry import list_engines, load_engine_class
from policygrad.samplers.engines.server_pool import EngineServer, ServerPool
from policygrad.utils.async_runner import gather_or_cancel
from policygrad.utils.progress import ProgressCallback, ignore_progress

PROBE_TEXTS, PROBE_LENGTH = 16, 64
"""Texts of random tokens that the tokenizers are compared on, and the tokens of each; and as many added tokens at a time."""
MIN_LOGP, MAX_LOGP = -9000.0, 1e-4  # nats; vLLM sends -9999 for -inf, and rounding may exceed 0
_MAX_EXCESS = 1e-2  # of a sum of probabilities above 1, by the rounding of a served precision
_STREAM = 0x74656163
_UNAUTHORIZED = (401, 403)


@dataclass(frozen=True)
class ServedModel:
    """A model on a server."""

    engine: type[EngineSampler]
    name: str
    """Its name in requests."""
    context_length: int | None
    """Maximum tokens of a request, the one that it samples included; None = the server does not tell."""


class TeacherServer:
    """A frozen model behind a server, named by http://HOST:PORT/v1, or http://HOST:PORT/v1#MODEL where the server has several."""

    def __init__(
        self,
        address: str,
        tokenizer: Tokenizer,
        config: TeacherServerConfig,
        on_progress: ProgressCallback = ignore_progress,
        transport: Any = None,
        top_k: int = 0,
        tokenizer_of: str = "the policy",
    ) -> None:
        """
        Args:
            tokenizer: The one whose ids it is sent.
            on_progress: Called while the server is unavailable.
            transport: An httpx transport to use instead of the network.
            top_k: Likeliest tokens to ask for in place of each token.
            tokenizer_of: Whose tokenizer it is, for messages.

        Raises:
            EngineError: httpx is not installed.
        """
        url, _, self.model_name = address.partition("#")
        self.url, self.tokenizer, self.config = url.rstrip("/").removesuffix("/v1"), tokenizer, config
        self.served: ServedModel | None = None
        self.top_k, self.tokenizer_of = top_k, tokenizer_of
        self.http = HttpClient(config.timeout, transport, os.environ.get(config.api_key, ""))
        self._pool = ServerPool(
            [self.url],
            self._prepare,
            config.max_concurrency,
            config.recovery_timeout,
            on_progress,
            "--teacher-server.recovery-timeout",
        )

    async def connect(self, longest: int = 0) -> None:
        """Wait for the server and check it.

        Args:
            longest: Tokens of the longest text that it will be sent, as far as that is known.

        Raises:
            EngineError: It does not answer in time, or fails a check.
        """
        await self._pool.ready()
        self._check_length(longest)

    async def score(self, ids: Sequence[int], start: int) -> TokenScores:
        """Return the log-probability of each of the tokens ids[start:] at temperature 1, and the `top_k` likeliest in its place.

        Raises:
            EngineError: The server does not come back in time, refuses the request, or sends invalid replies.
        """
        self._check_length(len(ids))
        return await self._pool.call(partial(self._score_at, ids, start))

    def pop_retries(self) -> int:
        """Return how many requests were sent again since the last call."""
        retries, self._pool.num_retries = self._pool.num_retries, 0
        return retries

    async def close(self) -> None:
        """Close the connections."""
        await self._pool.close()
        await self.http.close()

    async def _score_at(self, ids: Sequence[int], start: int, server: EngineServer) -> TokenScores:
        assert self.served is not None  # a server is ready once it is prepared
        engine, k = self.served.engine, self.top_k
        try:
            values, likeliest = await engine.score(self.http, server.url, self.served.name, ids, start, k)
        except RequestRefusedError as error:
            if not k or error.status in _UNAUTHORIZED:
                raise
            option = engine.top_k_option.format(k=k)
            remedy = f": {option}, or lower top_k" if option else ": lower top_k"
            raise EngineError(
                f"the teacher at {server.url} was asked for its {k} likeliest tokens (ExactKLToReference.top_k): {error}. If it "
                f"does not tell so many{remedy}"
            ) from error
        if len(values) != len(ids) - start:
            raise EngineError(f"{server.url} returns {len(values)} log-probabilities for {len(ids) - start} tokens")
        if bad := [
            x for x in values if not (isinstance(x, float | int) and math.isfinite(x) and MIN_LOGP < x <= MAX_LOGP)
        ]:
            raise EngineError(
                f"{server.url} returns {bad[0]} as a log-probability of a given token: it is none. Start it with "
                "log-probabilities, not logits, in a precision that does not overflow"
            )
        top = _choose_top(likeliest, len(values), k, server.url, engine) if k else None
        return TokenScores(torch.tensor(values, dtype=torch.float32).clamp(max=0.0), top)

    async def _prepare(self, server: EngineServer) -> None:
        """Find the engine and its model, and check them."""
        try:
            self.served = self._choose_model(
                server.url, await self.http.get(f"{server.url}/v1/models", REQUEST_TIMEOUT)
            )
            await self._check_tokenizer(server.url, self.served)
            vocab_size = len(self.tokenizer.hf)
            ids = np.random.default_rng(_STREAM).integers(0, vocab_size, PROBE_LENGTH).tolist()
            await self._score_at([*ids, vocab_size - 1], 1, server)
        except RequestRefusedError as error:
            if error.status not in _UNAUTHORIZED:
                raise EngineError(f"the teacher at {server.url} fails its check: {error}") from error
            name = self.config.api_key
            state = "does not accept" if os.environ.get(name) else "is not set"
            reason = f"the key in {name}, which it {state}" if state != "is not set" else f"a key, and {name} {state}"
            raise EngineError(
                f"the teacher at {server.url} answers {error.status}: it needs {reason}. Set the environment variable {name} to "
                "its API key, or name another variable: --teacher-server.api-key NAME"
            ) from error

    def _choose_model(self, url: str, reply: Any) -> ServedModel:
        """Return the requested model of `/v1/models`, or the first. Raises EngineError if there is none that scores tokens."""
        try:
            cards = {str(card["id"]): card for card in reply["data"]}
            card = cards[self.model_name] if self.model_name else next(iter(cards.values()))
        except KeyError as error:
            if not self.model_name:
                raise EngineError(f"{url}/v1/models lists no models: is it a server of vLLM or SGLang?") from error
            raise EngineError(
                f"{url} has no model {self.model_name!r}, but {', '.join(cards)}: name one of them"
            ) from error
        except (TypeError, StopIteration, AttributeError) as error:
            raise EngineError(f"{url}/v1/models lists no models: is it a server of vLLM or SGLang?") from error
        owner, supported = str(card.get("owned_by")), list_engines(lambda engine: engine.scores_tokens)
        if owner not in supported:
            raise EngineError(
                f"the teacher at {url} is served by {owner}, which does not tell the log-probabilities of given tokens by their "
                f"ids: serve it with {' or '.join(supported)}, or let the run load it from a folder"
            )
        length = card.get("max_model_len")
        return ServedModel(load_engine_class(owner), str(card["id"]), length if isinstance(length, int) else None)

    def _check_length(self, length: int) -> None:
        limit = self.served.context_length if self.served is not None else None
        if limit is not None and length >= limit:
            raise EngineError(
                f"the teacher at {self.url} reads at most {limit - 1} tokens, and is to score a text of {length}: start it with a "
                f"context of at least {length + 1} (--max-model-len of vLLM, --context-length of SGLang), or lower --max-tokens"
            )

    async def _check_tokenizer(self, url: str, served: ServedModel) -> None:
        """Raise EngineError unless the server splits random texts, and all added tokens, as the policy's tokenizer does."""

        async def tokenize(text: str) -> list[int]:
            body = {"model": served.name, "prompt": text, "add_special_tokens": False}
            reply = await self.http.post(f"{url}/tokenize", body, REQUEST_TIMEOUT)
            try:
                return [int(token) for token in reply["tokens"]]
            except (KeyError, TypeError, ValueError) as error:
                raise EngineError(f"{url}/tokenize returns no tokens: is it a server of vLLM or SGLang?") from error

        hf = self.tokenizer.hf
        texts = make_probe_texts(hf)
        for text, theirs in zip(texts, await gather_or_cancel(map(tokenize, texts)), strict=True):
            ours = list(hf(text, add_special_tokens=False)["input_ids"])
            if ours != theirs:
                i = next(
                    (i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b),
                    min(len(ours), len(theirs)),
                )
                tokens = [f"{hf.convert_ids_to_tokens(ours[i])!r}, id {ours[i]}" if i < len(ours) else "its end"]
                tokens += [f"id {theirs[i]}" if i < len(theirs) else "its end"]
                raise EngineError(
                    f"the teacher {served.name!r} at {url} has another tokenizer than {self.tokenizer_of}: a text continues with "
                    f"{tokens[0]}, in that one's tokens and with {tokens[1]} in the teacher's. Use a teacher with that tokenizer, "
                    "for example of the same family, or name the teacher's own, to compare spans of text: "
                    "--algorithm.reference.tokenizer DIR"
                )


def _choose_top(
    likeliest: list[dict[int, float]], number: int, k: int, url: str, engine: type[EngineSampler]
) -> TopTokens:
    """Return the k likeliest of the tokens that a server tells in place of each of `number` tokens; of equal ones the smaller ids.

    Raises:
        EngineError: It tells fewer, or what are no log-probabilities of one distribution.
    """
    fewest = min(map(len, likeliest), default=k)
    if len(likeliest) != number or fewest < k:
        count_text = f"{fewest}" if len(likeliest) == number else f"those of {len(likeliest)} tokens of {number}"
        option = engine.top_k_option.format(k=k)
        raise EngineError(
            f"the teacher at {url} was asked for its {k} likeliest tokens (ExactKLToReference.top_k) and tells {count_text}: "
            + (f"{option}, or " if option else "")
            + f"set top_k to {fewest or 1} at most"
        )
    chosen = [sorted(tokens.items(), key=lambda pair: (-pair[1], pair[0]))[:k] for tokens in likeliest]
    logp = torch.tensor([[x for _, x in row] for row in chosen], dtype=torch.float32).view(-1, k)
    if bool((logp.isnan() | (logp > MAX_LOGP)).any()) or bool((logp.double().exp().sum(1) > 1 + _MAX_EXCESS).any()):
        raise EngineError(
            f"the teacher at {url} tells likeliest tokens whose probabilities sum to more than 1: start it with log-probabilities, "
            "not logits"
        )
    return TopTokens(
        torch.tensor([[i for i, _ in row] for row in chosen], dtype=torch.int32).view(-1, k), logp.clamp(max=0)
    )


def make_probe_texts(hf: Any) -> list[str]:
    """Return fixed texts of random tokens, and texts of all tokens that were added to the vocabulary."""
    rng, size = np.random.default_rng(_STREAM), len(hf)
    samples = [rng.integers(0, size, PROBE_LENGTH).tolist() for _ in range(PROBE_TEXTS)]
    added = sorted(hf.get_added_vocab().values())
    samples += [added[i : i + PROBE_LENGTH] for i in range(0, len(added), PROBE_LENGTH)]
    return [hf.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False) for ids in samples]
