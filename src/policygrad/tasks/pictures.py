"""Pictures in rows of data: every convention that data uses for them, as parts of chat messages."""

from __future__ import annotations

import base64
import binascii
import io
import os
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from policygrad.errors import DataError
from policygrad.utils.filesystem import write_atomically
from policygrad.utils.pictures import Picture

COLUMNS = ("images", "image")
MARK = "<image>"  # what text has in a picture's place, in data for TRL and verl
CONVERSATIONS = ("prompt", "messages")
MAX_FILE_BYTES = 2**26  # 64 MiB
FETCH_TIMEOUT = 30.0  # seconds without an answer
Columns = Mapping[str, Any]
Part = dict[str, Any]


@dataclass(frozen=True)
class PictureOptions:
    """Where a row's pictures come from."""

    folder: str = ""
    """What relative paths start at: the data file's folder."""
    fetch: bool = False
    """Download pictures that are given by URL."""


def place_pictures(columns: Columns, where: str, options: PictureOptions) -> Columns:
    """Return a row with its pictures in the messages of its prompt, and without the columns that held them.

    A content is then text, or a tuple of parts: `{"type": "text", "text": ...}` and `{"type": "image", "image": Picture}`. Pictures
    are parts of messages that name their file, or the row's column `images` or `image`: in the places of parts without a file, or
    of `<image>` in text, or before the first user message's text.

    Raises:
        DataError: Not as many places as pictures, a picture that is not there, or a URL without permission to fetch it.
    """
    name = next((name for name in COLUMNS if columns.get(name) is not None), None)
    value = None if name is None else columns[name]
    listed = value if isinstance(value, (list, tuple)) else [] if value is None else [value]
    key = next((key for key in CONVERSATIONS if key in columns), None)
    if key is None or not (listed or _has_parts(columns[key])):
        return columns
    pictures = [parse_picture(picture, f"{where}: column {name!r}", options) for picture in listed]
    conversation = columns[key]
    messages = [{"role": "user", "content": conversation}] if isinstance(conversation, str) else conversation
    if not isinstance(messages, (list, tuple)):
        return columns  # `parse_prompt` says what is wrong
    placed = _place(messages, pictures, f"{where}: {key!r}", options)
    return {other: x for other, x in columns.items() if other != name} | {key: placed}


def _has_parts(messages: Any) -> bool:
    return isinstance(messages, (list, tuple)) and any(
        isinstance(message, Mapping) and isinstance(message.get("content"), (list, tuple)) for message in messages
    )


def _place(
    messages: Sequence[Any], pictures: Sequence[Picture], where: str, options: PictureOptions
) -> list[Mapping[str, Any]]:
    left, placed = iter(pictures), list[Mapping[str, Any]]()
    marks = sum(
        message["content"].count(MARK)
        for message in messages
        if isinstance(message, Mapping) and message.get("role") == "user" and isinstance(message.get("content"), str)
    )
    marks = marks if marks and marks == len(pictures) else 0
    places = 0
    for number, message in enumerate(messages, 1):
        if not isinstance(message, Mapping):
            placed.append(message)  # `parse_message` says what is wrong
            continue
        content, place = message.get("content"), f"{where}: message {number}"
        if isinstance(content, (list, tuple)):
            parts = [_parse_part(part, f"{place}, part {i}", options) for i, part in enumerate(content, 1)]
            places += sum(part["type"] == "image" and part["image"] is None for part in parts)
        elif marks and message.get("role") == "user" and isinstance(content, str):
            parts = list(_split_marks(content))
            places += content.count(MARK)
        else:
            placed.append(message)
            continue
        filled = [
            {**part, "image": next(left, None)} if part["type"] == "image" and part["image"] is None else part
            for part in parts
        ]
        placed.append({**message, "content": _join_text(filled)})
    if places != len(pictures):
        first = next((i for i, m in enumerate(placed) if isinstance(m, Mapping) and m.get("role") == "user"), None)
        if places or first is None:
            raise DataError(
                f"{where} has {places} places for pictures, and the row has {len(pictures)} pictures: give one part "
                f'{{"type": "image"}} or one {MARK} for each, or none to show them before the first user message'
            )
        content = placed[first].get("content")
        text = ({"type": "text", "text": content},) if isinstance(content, str) else tuple(content or ())
        shown = tuple({"type": "image", "image": picture} for picture in pictures)
        placed[first] = {**placed[first], "content": (*shown, *text)}
    return placed


def _split_marks(text: str) -> Iterator[Part]:
    for number, piece in enumerate(text.split(MARK)):
        if number:
            yield {"type": "image", "image": None}
        if piece:
            yield {"type": "text", "text": piece}


def _join_text(parts: Sequence[Part]) -> str | tuple[Part, ...]:
    """Return parts that are all text as one text."""
    if all(part["type"] == "text" for part in parts):
        return "".join(part["text"] for part in parts)
    return tuple(parts)


def _parse_part(part: Any, where: str, options: PictureOptions) -> Part:
    """Parse a part of a message. A picture without a file is None: it is in the row's column."""
    kinds = "text, image or image_url"
    if not isinstance(part, Mapping) or part.get("type") not in ("text", "image", "image_url"):
        raise DataError(f'{where} must be an object with "type": {kinds}, got {str(part)[:60]}')
    given = {name: value for name, value in part.items() if name != "type" and value is not None}
    if part["type"] == "text":
        if not isinstance(given.get("text"), str):
            raise DataError(f"{where}: 'text' must be text, got {type(given.get('text')).__name__}")
        return {"type": "text", "text": given["text"]}
    if part["type"] == "image_url":
        url = given.get("image_url")
        given = {"url": url.get("url") if isinstance(url, Mapping) else url}
    value = next((given[name] for name in ("image", "path", "url", "base64") if name in given), None)
    if "base64" in given:
        value = _decode_base64(given["base64"], where)
    if value is None:
        return {"type": "image", "image": None}
    return {"type": "image", "image": parse_picture(value, where, options)}


def parse_picture(value: Any, where: str, options: PictureOptions) -> Picture:
    """Return the picture that a value of a row is: a path, a URL, contents, a PIL image, or `datasets`' dict of those.

    Raises:
        DataError: None of these, no such file, or a URL without permission to fetch it.
    """
    if isinstance(value, Picture):
        return value
    if isinstance(value, Mapping) and {"bytes", "path"} & set(value):
        value = value.get("bytes") or value.get("path")
    if isinstance(value, (bytes, bytearray, memoryview)) and len(value):
        return Picture(data=bytes(value), source=where)
    if hasattr(value, "save") and hasattr(value, "size"):  # an image of PIL
        file = io.BytesIO()
        value.save(file, "PNG")
        return Picture(data=file.getvalue(), source=where)
    if not isinstance(value, str) or not value:
        raise DataError(
            f"{where}: a picture is a path, the file's bytes, a data: URI, an image of PIL or an object with 'bytes' or 'path', "
            f"got {type(value).__name__}"
        )
    if value.startswith("data:"):
        return Picture(data=_decode_base64(value.partition(",")[2], where), source=where)
    if value.startswith(("http://", "https://")):
        return Picture(path=str(_fetch(value, where, options)), source=where)
    path = value.removeprefix("file://")
    path = path if os.path.isabs(path) else os.path.join(options.folder, path)
    if not os.path.isfile(path):
        start = f"a relative path starts at {options.folder or 'the current folder'}"
        raise DataError(
            f"{where}: there is no picture {value[:200]!r}; {start}. If the column is no picture, rename it"
        )
    return Picture(path=path, source=where)


def _decode_base64(text: Any, where: str) -> bytes:
    try:
        return base64.b64decode(str(text), validate=True)
    except (binascii.Error, ValueError) as error:
        raise DataError(f"{where}: a picture's base64 cannot be decoded: {error}") from error


def _fetch(url: str, where: str, options: PictureOptions) -> Path:
    """Download a picture once, and return its file in the cache. Raises DataError."""
    if not options.fetch:
        raise DataError(
            f"{where}: the picture {url[:200]} is on the network, from which nothing is fetched unless --task.fetch says so"
        )
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "policygrad" / "pictures"
    path = cache / sha256(url.encode()).hexdigest()
    if path.is_file():
        return path
    try:
        with urllib.request.urlopen(url, timeout=FETCH_TIMEOUT) as reply:  # http or https, see above
            data = reply.read(MAX_FILE_BYTES + 1)
    except (OSError, ValueError) as error:
        raise DataError(f"{where}: the picture {url[:200]} cannot be fetched: {error}") from error
    if len(data) > MAX_FILE_BYTES:
        raise DataError(f"{where}: the picture {url[:200]} has more than {MAX_FILE_BYTES >> 20} MiB: make it smaller")
    cache.mkdir(parents=True, exist_ok=True)
    write_atomically(path, data)
    return path
