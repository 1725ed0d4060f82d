"""Pictures in prompts: files or their contents, decoded when a model reads them."""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any

from policygrad.errors import DataError

MAX_PIXELS = 2**25
"""Pixels of the largest picture that is decoded (33 million, 100 MB): a small file may claim more than a machine's memory."""
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
PNG_MODES = ("1", "L", "LA", "I", "I;16", "P", "RGB", "RGBA")  # modes of PIL that PNG can hold
THUMBNAIL_SIDE = 128  # pixels


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

    @property
    def size(self) -> tuple[int, int]:
        """Width and height in pixels, from the file's header. Raises DataError."""
        with self._open() as image:
            width, height = image.size
            return int(width), int(height)

    def read(self) -> bytes:
        """Return the file's contents.

        Raises:
            DataError: There is no such file.
        """
        if self.data:
            return self.data
        try:
            return Path(self.path).read_bytes()
        except (OSError, ValueError) as error:  # the second: a NUL in its name
            reason = getattr(error, "strerror", None) or error
            raise DataError(f"{self.source}: the picture {self.path!r} cannot be read: {reason}") from error

    def decode(self) -> Any:
        """Return a PIL image in RGB: upright, the first of an animation, on white where it is transparent.

        Raises:
            DataError: Not a picture, a truncated one, or one of more than MAX_PIXELS.
        """
        from PIL import Image, ImageOps

        with self._open() as image:
            width, height = image.size
            if width * height > MAX_PIXELS:
                raise DataError(
                    f"{self.source}: {self.name} has {width:,} × {height:,} pixels, and the most is {MAX_PIXELS:,}: make it smaller"
                )
            try:
                upright = ImageOps.exif_transpose(image)
                if upright.mode.startswith("I"):  # 16 bits per pixel, which `convert` would clip
                    upright = upright.point(lambda value: value / 256).convert("L")
                if not upright.has_transparency_data:
                    return upright.convert("RGB")
                opaque = upright.convert("RGBA")
                return Image.alpha_composite(Image.new("RGBA", opaque.size, "white"), opaque).convert("RGB")
            except (OSError, ValueError, SyntaxError) as error:
                raise self._undecodable(error) from error

    def make_thumbnail(self) -> bytes:
        """Return the picture with at most `THUMBNAIL_SIDE` pixels a side, as PNG."""
        image, out = self.decode(), io.BytesIO()
        image.thumbnail((THUMBNAIL_SIDE, THUMBNAIL_SIDE))
        image.quantize(64).save(out, "PNG", optimize=True)
        return out.getvalue()

    @property
    def name(self) -> str:
        """How messages name it."""
        return f"the picture {self.path!r}" if self.path else "the picture"

    def _open(self) -> Any:
        """Return the file as PIL reads its header."""
        from PIL import Image

        try:
            return Image.open(io.BytesIO(self.read()), formats=FORMATS)
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
            raise self._undecodable(error) from error

    def _undecodable(self, error: Exception) -> DataError:
        reason = type(error).__name__ if "object at 0x" in str(error) else str(error)  # PIL names its own buffer
        return DataError(f"{self.source}: {self.name} cannot be decoded as {', '.join(FORMATS)}: {reason}")


def to_parts(value: Any) -> tuple[Mapping[str, Any], ...] | None:
    """Return what an environment or a tool shows as parts of a message; None if it has no picture.

    Args:
        value: A `Picture`, an image of PIL, an array [height, width, 3] of uint8, or a list of these and texts.
    """
    items = value if isinstance(value, (list, tuple)) else [value]
    pictures = [None if isinstance(item, str) else _to_picture(item) for item in items]
    if not any(pictures) or any(
        picture is None and not isinstance(item, str) for item, picture in zip(items, pictures, strict=True)
    ):
        return None
    return tuple(
        {"type": "text", "text": item} if picture is None else {"type": "image", "image": picture}
        for item, picture in zip(items, pictures, strict=True)
    )


def _to_picture(value: Any) -> Picture | None:
    if isinstance(value, Picture):
        return value
    if str(getattr(value, "dtype", "")) == "uint8" and len(getattr(value, "shape", ())) == 3 and value.shape[2] == 3:
        from PIL import Image

        value = Image.fromarray(value)
    return from_pil(value) if is_pil(value) else None


def is_pil(value: object) -> bool:
    """Return True for an image of PIL, without importing it."""
    return hasattr(value, "save") and hasattr(value, "getpixel")


def from_pil(image: Any, source: str = "") -> Picture:
    """Return an image of PIL as a picture, a PNG, which is upright: PNG as it is written here does not say how to turn it.

    Raises:
        DataError: More than MAX_PIXELS, or an image whose file is truncated.
    """
    from PIL import ImageOps

    width, height = image.size
    if width * height > MAX_PIXELS:
        raise DataError(
            f"{source}: the picture has {width:,} × {height:,} pixels, and the most is {MAX_PIXELS:,}: make it smaller"
        )
    try:
        upright, file = ImageOps.exif_transpose(image), io.BytesIO()
        if upright.mode not in PNG_MODES:
            upright = upright.convert("RGBA" if upright.has_transparency_data else "RGB")
        upright.save(file, "PNG")
    except (OSError, ValueError, SyntaxError) as error:
        raise DataError(f"{source}: the image of PIL cannot be read: {error}; is its file truncated?") from error
    return Picture(data=file.getvalue(), source=source)
