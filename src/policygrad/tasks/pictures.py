"""Pictures in prompts: parts of chat messages, decoded when a model reads them."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any

from policygrad.errors import DataError

MAX_PIXELS = 2**25
"""Pixels of the largest picture that is decoded (32 million, 100 MB); a small file may claim more, to fill the memory."""


@dataclass(frozen=True)
class Picture:
    """A picture in a prompt: a file or its contents. It is decoded when it is needed, and again the next time."""

    path: str = ""
    """The file; "" if `data` has its contents."""
    data: bytes = field(default=b"", repr=False)
    source: str = field(default="", compare=False)
    """Location in the data, e.g. `rows.jsonl:12`, for error messages."""

    @cached_property
    def digest(self) -> str:
        """The sha256 of the file's contents, in hexadecimal."""
        return sha256(self.read()).hexdigest()

    def read(self) -> bytes:
        """Return the file's contents.

        Raises:
            DataError: There is no such file.
        """
        if self.data:
            return self.data
        try:
            return Path(self.path).read_bytes()
        except OSError as error:
            raise DataError(f"{self.source}: the picture {self.path!r} cannot be read: {error.strerror}") from error

    def decode(self) -> Any:
        """Return a PIL image in RGB.

        Raises:
            DataError: Not a picture, a truncated one, or one of more than MAX_PIXELS.
        """
        from PIL import Image, ImageOps

        try:
            with Image.open(io.BytesIO(self.read())) as image:
                width, height = image.size
                if width * height > MAX_PIXELS:
                    raise DataError(
                        f"{self.source}: a picture of {width} × {height} pixels, the most is {MAX_PIXELS:,} pixels"
                    )
                return ImageOps.exif_transpose(image).convert("RGB")
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
            raise DataError(
                f"{self.source}: the picture {self.path or 'of this row'} cannot be decoded: {error}"
            ) from error


def list_pictures(prompt: str | Iterable[Mapping[str, Any]]) -> Iterator[Picture]:
    """Yield the pictures of a prompt in order."""
    messages: Iterable[Mapping[str, Any]] = () if isinstance(prompt, str) else prompt
    for message in messages:
        content = message.get("content")
        for part in content if isinstance(content, (list, tuple)) else ():
            if part["type"] == "image":
                yield part["image"]


def content_text(content: str | Iterable[Mapping[str, Any]]) -> str:
    """Return a message's content as text, each picture as `[image]`."""
    if isinstance(content, str):
        return content
    return "".join(part["text"] if part["type"] == "text" else "[image]" for part in content)
