"""Pictures in rows of data: every convention that data uses for them, as parts of chat messages."""

from __future__ import annotations

import base64
import binascii
import os
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from http.client import HTTPException
from pathlib import Path
from typing import Any

from policygrad.errors import DataError
from policygrad.utils.filesystem import write_atomically
from policygrad.utils.pictures import Picture, from_pil, is_pil

COLUMNS = ("images", "image")
MARK = "<image>"  # what text has in a picture's place, in data for TRL and verl
CONVERSATIONS = ("prompt", "messages")
MAX_FILE_BYTES = 2**26  # 64 MiB
FETCH_TIMEOUT = 30.0  # seconds without an answer
MAX_FETCH_SECONDS = 300.0  # for one picture
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
    """Return a row with its pictures in the messages of its prompt, and without the columns that held them or are empty.

    A content is then text, or a tuple of parts: `{"type": "text", "text": ...}` and `{"type": "image", "image": Picture}`. Pictures
    are parts of messages that name their file, or the row's column `images` or `image`: in the places of parts without a file, or
    of `<image>` in text, or before the first user message's text. Of two columns with pictures, `image` stays a column.

    Raises:
        DataError: Not as many places as pictures, a picture that is not there, or a URL without permission to fetch it.
    """
    listed = {name: _list_values(columns[name]) for name in COLUMNS if name in columns}
    name = next((name for name, values in listed.items() if values), None)
    key = next((key for key in CONVERSATIONS if key in columns), None)
    if key is None:
        return columns
    # a row without pictures has the same columns as the rows with some
    columns = {column: x for column, x in columns.items() if column != name and listed.get(column) != []}
    if name is None and not _has_parts(columns[key]):
        return columns
    values = [] if name is None else listed[name]
    pictures = [parse_picture(value, f"{where}: column {name!r}", options) for value in values]
    conversation = columns[key]
    messages = [{"role": "user", "content": conversation}] if isinstance(conversation, str) else conversation
    if not isinstance(messages, (list, tuple)):
        return columns  # `parse_prompt` says what is wrong
    return {**columns, key: _place(messages, pictures, f"{where}: {key!r}", options)}


def _list_values(value: Any) -> list[Any]:
    """Return the pictures of a column, which has one, a list of them, or none."""
    return list(value) if isinstance(value, (list, tuple)) else [] if value is None else [value]


def _has_parts(messages: Any) -> bool:
    return isinstance(messages, (list, tuple)) and any(
        isinstance(message, Mapping) and isinstance(message.get("content"), (list, tuple)) for message in messages
    )


def _place(
    messages: Sequence[Any], pictures: Sequence[Picture], where: str, options: PictureOptions
) -> list[Mapping[str, Any]]:
    """Return messages with pictures in the places for them, which are parts, marks in text, or before the first user message."""
    contents = [_parse_content(message, f"{where}: message {i}", options) for i, message in enumerate(messages, 1)]
    users = [i for i, message in enumerate(messages) if isinstance(message, Mapping) and message.get("role") == "user"]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    places, marked = sum(map(_is_place, parts)), [i for i in users if isinstance(contents[i], str)]
    if pictures and not places:
        places = sum(contents[i].count(MARK) for i in marked)
        if places == len(pictures):
            for i in marked:
                contents[i] = list(_split_marks(contents[i]))
        elif not places and users and not any(part["type"] == "image" for part in parts):
            first, places = users[0], len(pictures)
            content = contents[first]
            text = [{"type": "text", "text": content}] if isinstance(content, str) else content or []
            contents[first] = [{"type": "image", "image": None}] * places + text
    if places != len(pictures):
        raise DataError(
            f"{where} has {places} places for pictures, and the row has {len(pictures)} pictures: give one part "
            f'{{"type": "image"}} or one {MARK} for each, or no place and no picture in the messages, to show them before the '
            "first user message; rename the column if it is for reward functions"
        )
    unplaced = iter(pictures)
    return [
        {**message, "content": _join_text([_fill(part, unplaced) for part in content])}
        if isinstance(content, list)
        else message
        for message, content in zip(messages, contents, strict=True)
    ]


def _parse_content(message: Any, where: str, options: PictureOptions) -> Any:
    """Return a message's parts, or its content as it is if it has none. What is wrong with that, `parse_message` says."""
    content = message.get("content") if isinstance(message, Mapping) else None
    if not isinstance(content, (list, tuple)):
        return content
    return [_parse_part(part, f"{where}, part {i}", options) for i, part in enumerate(content, 1)]


def parse_text_parts(content: Sequence[Any], where: str) -> str:
    """Return a content of parts as text. Raises DataError for a part that is not text: pictures are in prompts alone."""
    for number, part in enumerate(content, 1):
        if isinstance(part, Mapping) and part.get("type") in ("image", "image_url"):
            raise DataError(
                f"{where}, part {number} is a picture, which a completion cannot have: put it into the prompt"
            )
    return "".join(
        _parse_part(part, f"{where}, part {i}", PictureOptions())["text"] for i, part in enumerate(content, 1)
    )


def _is_place(part: Part) -> bool:
    return part["type"] == "image" and part["image"] is None


def _fill(part: Part, pictures: Iterator[Picture]) -> Part:
    return {**part, "image": next(pictures)} if _is_place(part) else part


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
    if is_pil(value):
        return from_pil(value, where)
    if not isinstance(value, str) or not value:
        raise DataError(
            f"{where}: a picture is a path, the file's bytes, a data: URI, an image of PIL or an object with 'bytes' or 'path', "
            f"got {type(value).__name__}"
        )
    scheme = value[:8].lower()
    if scheme.startswith("data:"):
        return Picture(data=_decode_base64(value.partition(",")[2], where), source=where)
    if scheme.startswith(("http://", "https://")):
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
        return base64.b64decode("".join(str(text).split()), validate=True)  # MIME's has line breaks
    except (binascii.Error, ValueError) as error:
        raise DataError(f"{where}: a picture's base64 cannot be decoded: {error}") from error


def _fetch(url: str, where: str, options: PictureOptions) -> Path:
    """Download a picture once, and return its file in the cache. Raises DataError."""
    if not options.fetch:
        raise DataError(
            f"{where}: the picture {url[:200]!r} is on the network, from which nothing is fetched unless --task.fetch says so"
        )
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "policygrad" / "pictures"
    path = cache / sha256(url.encode(errors="surrogatepass")).hexdigest()
    if path.is_file():
        return path
    try:
        with urllib.request.urlopen(url, timeout=FETCH_TIMEOUT) as reply:  # http or https, see above
            data = _read_reply(reply)
    except (OSError, ValueError, HTTPException) as error:
        raise DataError(f"{where}: the picture {url[:200]!r} cannot be fetched: {error}") from error
    if len(data) > MAX_FILE_BYTES:
        raise DataError(f"{where}: the picture {url[:200]!r} has more than {MAX_FILE_BYTES >> 20} MiB: make it smaller")
    # before it is in the cache, where nothing would replace it: it may be truncated, or a page that asks for a password
    Picture(data=data, source=f"{where}: {url[:200]!r}").decode()
    cache.mkdir(parents=True, exist_ok=True)
    write_atomically(path, data)
    return path


def _read_reply(reply: Any) -> bytes:
    """Return a reply's contents, at most MAX_FILE_BYTES and a little more. Raises OSError for one that is cut off or slow."""
    data, deadline = bytearray(), time.monotonic() + MAX_FETCH_SECONDS
    while len(data) <= MAX_FILE_BYTES and (piece := reply.read1(2**16)):
        data += piece
        if time.monotonic() > deadline:
            raise TimeoutError(f"it takes more than {MAX_FETCH_SECONDS:.0f} s")
    length = reply.headers.get("Content-Length", "")
    if not data or (length.isdecimal() and len(data) < min(int(length), MAX_FILE_BYTES)):
        raise ConnectionError(f"the server sent {len(data)} of {length or 'an unknown number of'} bytes")
    return bytes(data)
