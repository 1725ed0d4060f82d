"""What a model reads for a client: text and pictures, which become token ids and media where the model is at hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from policygrad.core.media import TextMedia, shift_media
from policygrad.errors import ConfigError, DataError, ModelError
from policygrad.models.chat.messages import EncodedText
from policygrad.models.tokenizer import Tokenizer
from policygrad.utils.pictures import Picture


@dataclass(frozen=True, eq=False)
class PictureChunk:
    """A picture of a request, which no model has read yet."""

    picture: Picture
    expected_tokens: int | None = None
    """How many tokens the client takes it for; None = the client does not say."""


@dataclass(frozen=True, eq=False)
class ModelInputParts:
    """The chunks of a text in their order: ids [n] int64, or a picture."""

    chunks: tuple[Tensor | PictureChunk, ...]

    @property
    def ids(self) -> Tensor | None:
        """[P] int64; None if there is a picture, so that only a model's processor tells them."""
        texts = [chunk for chunk in self.chunks if isinstance(chunk, Tensor)]
        if len(texts) < len(self.chunks):
            return None
        return torch.cat(texts) if texts else torch.zeros(0, dtype=torch.int64)

    def read(self, tokenizer: Tokenizer, name: str) -> EncodedText:
        """Return the text as a model reads it.

        Args:
            name: The model's, as clients call it.

        Raises:
            ConfigError: The model does not see; a picture cannot be read, or has more or fewer tokens than expected.
        """
        if (ids := self.ids) is not None:
            return EncodedText(ids)
        parts = [
            EncodedText(chunk) if isinstance(chunk, Tensor) else _read_picture(chunk, tokenizer, name)
            for chunk in self.chunks
        ]
        return _join(parts)


def _read_picture(chunk: PictureChunk, tokenizer: Tokenizer, name: str) -> EncodedText:
    picture, processor = chunk.picture, tokenizer.pictures
    where = picture.source
    if processor is None:
        raise ConfigError(
            f"{where} is an image, and {name!r} reads text alone: leave it out, or serve a model that sees"
        )
    try:
        ids = processor.picture_ids(picture)
        media, compact_ids = processor.media(ids, [picture], where), processor.mark_ids(picture)
    except (DataError, ModelError) as error:  # the client's own doing
        raise ConfigError(str(error)) from error
    if chunk.expected_tokens is not None and chunk.expected_tokens != len(ids):
        raise ConfigError(
            f"{where} is {len(ids)} tokens for {name!r}, and expected_tokens is {chunk.expected_tokens}: "
            f"give {len(ids)}, or leave it out"
        )
    return EncodedText(ids, media, compact_ids)


def _join(parts: Sequence[EncodedText]) -> EncodedText:
    media, length = list[TextMedia](), 0
    for part in parts:
        media.append(shift_media(part.media, length))
        length += len(part.ids)
    compact_ids = [part.ids if part.compact_ids is None else part.compact_ids for part in parts]
    return EncodedText(torch.cat([part.ids for part in parts]), sum(media, ()), torch.cat(compact_ids))
