"""Messages of a conversation, and a text in token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from policygrad.core.media import TextMedia
from policygrad.errors import ModelError

Message = Mapping[str, Any]
Tools = Sequence[Mapping[str, Any]]
MESSAGE_WEIGHT = "weight"
"""A message's key: 0 = fine-tuning reads the turn and does not learn it (OpenAI's format). No template reads it."""


class HistoryRewrittenError(ModelError):
    """The template renders earlier turns differently once there is another message."""

    messages: tuple[Message, ...] = ()
    """The reply and the new messages, as the template reads them."""


class LostMessageError(ModelError):
    """The template leaves out what a message says."""


@dataclass(frozen=True, eq=False)
class EncodedText:
    """A text as a model reads it."""

    ids: Tensor
    """[P] int64; of a picture, its placeholder tokens."""
    media: TextMedia = ()
    """The pictures."""
    compact_ids: Tensor | None = None
    """[P'] int64; the same text with one mark for each picture, for an engine that expands it. None = no pictures."""
    is_content: Tensor | None = None
    """[P] bool; the tokens of the messages' contents, without the chat template's and without pictures. None = not marked."""


@dataclass(frozen=True, eq=False)
class Continuation(EncodedText):
    """What stands between a sampled turn and the next."""

    messages: tuple[Message, ...] = ()
    """The reply and the new messages, as the template reads them; () = the conversation is text."""


ANY_END = -1
"""Stands for the end token of a turn whose own is not known."""
