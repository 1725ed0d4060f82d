"""The request formats that the proxy answers, as one: a `ChatRequest` in, a `ChatReply` out.

What becomes of each of their fields is in `fields.py`; each format has a file: `chat.py`, `completions.py`, `responses.py`,
`messages.py`.
"""

from __future__ import annotations

from policygrad.proxy.chat import CHAT, parse_chat
from policygrad.proxy.completions import COMPLETIONS
from policygrad.proxy.messages import COUNT, MESSAGES
from policygrad.proxy.requests import (
    ApiError,
    ApiFormat,
    ChatChoice,
    ChatReply,
    ChatRequest,
    Event,
    Message,
    ScoredTokens,
)
from policygrad.proxy.responses import RESPONSES

FORMATS = (CHAT, COMPLETIONS, RESPONSES, MESSAGES, COUNT)
__all__ = [
    "CHAT",
    "COMPLETIONS",
    "COUNT",
    "FORMATS",
    "MESSAGES",
    "RESPONSES",
    "ApiError",
    "ApiFormat",
    "ChatChoice",
    "ChatReply",
    "ChatRequest",
    "Event",
    "Message",
    "ScoredTokens",
    "parse_chat",
]
