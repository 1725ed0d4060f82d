"""Pictures in data: every convention gives the same prompt, late decoding, and an error for what is not a picture."""

from __future__ import annotations

import base64
import contextlib
import io
import json
import pickle
import struct
import warnings
import zlib
from functools import partial
from hashlib import sha256
from http.client import HTTPMessage
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from random import Random
from threading import Thread
from typing import Any

import pytest
from PIL import Image

from doubles.vision_models import make_picture
from policygrad.errors import DataError
from policygrad.tasks import load_task
from policygrad.tasks.base import prompt_key
from policygrad.tasks.pictures import _read_reply
from policygrad.tasks.preferences import read_demonstrations, read_preferences
from policygrad.tasks.rows import RowOptions, load_examples, open_rows
from policygrad.tasks.sources import digest_data
from policygrad.utils import pictures
from policygrad.utils.message_parts import content_text, list_pictures, to_plain
from policygrad.utils.pictures import Picture, from_pil

RED = make_picture(32, 24, 1).data
BLUE = make_picture(16, 16, 2).data
_JPEG = io.BytesIO()
Image.open(io.BytesIO(RED)).save(_JPEG, "JPEG")
JPEG = _JPEG.getvalue()  # decoded and written again it has other bytes
DATA_URI = "data:image/png;base64," + base64.b64encode(RED).decode()
EXPECTED = ({"role": "user", "content": ({"type": "image"}, {"type": "text", "text": "how many?"})},)


def shape(prompt: Any) -> Any:
    """The prompt with pictures left out of its parts."""
    return tuple(
        message
        if isinstance(message["content"], str)
        else {
            **message,
            "content": tuple(part if part["type"] == "text" else {"type": "image"} for part in message["content"]),
        }
        for message in prompt
    )


def user(content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


def parts(**picture: Any) -> list[dict[str, Any]]:
    return user([{"type": "image", **picture}, {"type": "text", "text": "how many?"}])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures" / "red.png").write_bytes(RED)
    (tmp_path / "blue.png").write_bytes(BLUE)
    return tmp_path


def read_jsonl(folder: Path, row: dict[str, Any], **options: Any) -> Any:
    file = folder / "rows.jsonl"
    file.write_text(json.dumps(row) + "\n", encoding="utf-8")
    source = open_rows(str(file))
    assert source is not None
    return load_examples(source, RowOptions(**options), "rows.jsonl")[0]


FILE = "pictures/red.png"
CONVENTIONS: dict[str, dict[str, Any]] = {
    "a part without a file, and a column": {"prompt": parts(), "images": [FILE]},
    "a column with one": {"prompt": parts(), "image": FILE},
    "a part with a path": {"prompt": parts(image=FILE)},
    "path": {"prompt": parts(path=FILE)},
    "url, which is data": {"prompt": parts(url=DATA_URI)},
    "base64": {"prompt": parts(base64=base64.b64encode(RED).decode())},
    "OpenAI": {
        "prompt": user([{"type": "image_url", "image_url": {"url": DATA_URI}}, {"type": "text", "text": "how many?"}])
    },
    "text and a column": {"prompt": "how many?", "images": [FILE]},
    "messages and a column": {"prompt": user("how many?"), "images": [FILE]},
    "a mark in the text": {"prompt": user("<image>how many?"), "images": [FILE]},
    "a table's None for what a part lacks": {
        "prompt": user(
            [{"type": "image", "text": None, "image": FILE}, {"type": "text", "text": "how many?", "image": None}]
        )
    },
    "datasets' object": {"prompt": parts(), "image": {"bytes": None, "path": FILE}},
}


@pytest.mark.parametrize("name", CONVENTIONS)
def test_every_convention_gives_the_same_prompt(name: str, folder: Path) -> None:
    example = read_jsonl(folder, {**CONVENTIONS[name], "answer": "1"})
    assert shape(example.prompt) == EXPECTED
    (picture,) = list_pictures(example.prompt)
    assert picture.read() == RED
    assert example.columns == {"answer": "1"}


@pytest.mark.parametrize(
    "value",
    [RED, Image.open(io.BytesIO(RED)), {"bytes": RED, "path": None}, Picture(data=RED)],
    ids=["contents", "PIL", "datasets", "picture"],
)
def test_rows_in_memory_have_contents_images_or_pictures(value: Any) -> None:
    task = load_task([{"prompt": "how many?", "image": value, "answer": "1"}])
    (picture,) = list_pictures(task.train_example(0).prompt)
    assert picture.decode().tobytes() == Image.open(io.BytesIO(RED)).tobytes()


def test_several_pictures_are_placed_in_order(folder: Path) -> None:
    content = [{"type": "image"}, {"type": "text", "text": " or "}, {"type": "image"}]
    for prompt in (user(content), user("<image> or <image>")):
        example = read_jsonl(folder, {"prompt": prompt, "images": [FILE, "blue.png"]})
        assert [p.read() for p in list_pictures(example.prompt)] == [RED, BLUE]
        assert content_text(example.prompt[0]["content"]) == "[image] or [image]"


def test_a_mark_is_text_where_the_row_has_no_picture_or_parts_for_them(folder: Path) -> None:
    assert read_jsonl(folder, {"prompt": "What is <image> in HTML?"}).prompt == "What is <image> in HTML?"
    messages = [{"role": "user", "content": "write <image>"}, *user([{"type": "image"}])]
    assert read_jsonl(folder, {"prompt": messages, "images": [FILE]}).prompt[0] == messages[0]


@pytest.mark.parametrize("empty", [None, []])
def test_rows_without_pictures_are_mixed_with_rows_that_have_some(empty: Any, folder: Path) -> None:
    for rows in ([FILE, empty], [empty, FILE]):
        text = "".join(json.dumps({"prompt": f"{i}?", "image": x, "answer": "1"}) + "\n" for i, x in enumerate(rows))
        (folder / "rows.jsonl").write_text(text, encoding="utf-8")
        source = open_rows(str(folder / "rows.jsonl"))
        assert source is not None
        examples = load_examples(source, RowOptions(), "rows.jsonl")
        assert [len(list(list_pictures(e.prompt))) for e in examples] == [int(x == FILE) for x in rows]
        assert [e.columns for e in examples] == [{"answer": "1"}] * 2


def test_an_empty_column_hides_no_other_and_a_second_one_stays(folder: Path) -> None:
    assert any(list_pictures(read_jsonl(folder, {"prompt": "?", "images": [], "image": FILE}).prompt))
    assert read_jsonl(folder, {"prompt": "?", "images": [FILE], "image": "blue.png"}).columns == {"image": "blue.png"}


def test_base64_may_have_line_breaks(folder: Path) -> None:
    text = base64.encodebytes(RED * 2).decode()
    assert next(list_pictures(read_jsonl(folder, {"prompt": parts(base64=text)}).prompt)).read() == RED * 2


def test_parts_of_text_alone_are_text(folder: Path) -> None:
    content = [{"type": "text", "text": "1 + "}, {"type": "text", "text": "1 ="}]
    assert read_jsonl(folder, {"prompt": user(content)}).prompt == tuple(user("1 + 1 ="))


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "fewer pictures": (
        {"prompt": user([{"type": "image"}, {"type": "image"}]), "images": [FILE]},
        r"rows.jsonl:1: 'prompt' has 2 places for pictures, and the row has 1 pictures: give one part",
    ),
    "no such file": (
        {"prompt": parts(), "image": "nowhere.png"},
        r"rows.jsonl:1: column 'image': there is no picture 'nowhere.png'; a relative path starts at .*rename it",
    ),
    "fewer marks": (
        {"prompt": "<image> or?", "images": [FILE, FILE]},
        r"'prompt' has 1 places for pictures, and the row has 2 pictures: give one part",
    ),
    "more marks": (
        {"prompt": "<image> or <image>?", "images": [FILE]},
        r"'prompt' has 2 places for pictures, and the row has 1 pictures: give one part",
    ),
    "a column beside pictures of the messages": (
        {"prompt": parts(image=FILE), "images": [FILE]},
        r"'prompt' has 0 places for pictures, and the row has 1 pictures: .*rename the column if it is for reward",
    ),
    "a URL": (
        {"prompt": parts(url="https://example.com/x.png")},
        r"part 1: the picture 'https://example.com/x.png' is on the network, .* unless --task.fetch says so",
    ),
    "a number": ({"prompt": "?", "images": [3]}, r"column 'images': a picture is a path, .* got int"),
    "bad base64": ({"prompt": parts(base64="*")}, r"message 1, part 1: a picture's base64 cannot be decoded"),
    "an unknown part": ({"prompt": user([{"type": "video"}])}, r"part 1 must be an object with \"type\": text, image"),
    "text that is none": ({"prompt": user([{"type": "text", "text": 3}])}, r"part 1: 'text' must be text, got int"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_picture_is_refused_with_its_place(name: str, folder: Path) -> None:
    row, message = REFUSED[name]
    with pytest.raises(DataError, match=message):
        read_jsonl(folder, row)


def test_completions_may_be_parts_of_text_and_have_no_pictures(folder: Path) -> None:
    file = folder / "rows.jsonl"

    def answer(*content: dict[str, Any]) -> list[dict[str, Any]]:
        return [{"role": "assistant", "content": list(content)}]

    one, two = answer({"type": "text", "text": "1"}), answer({"type": "text", "text": "2", "image": None})
    file.write_text(json.dumps({"prompt": parts(image=FILE), "chosen": one, "rejected": two}))
    (pair,) = read_preferences(str(file))
    assert (pair.chosen, pair.rejected, shape(pair.prompt)) == ("1", "2", EXPECTED)
    file.write_text(json.dumps({"prompt": parts(image=FILE), "completion": one}))
    (demonstration,) = read_demonstrations(str(file))
    assert demonstration.completion == ({"role": "assistant", "content": "1"},)
    file.write_text(json.dumps({"prompt": parts(image=FILE), "completion": answer({"type": "image", "image": FILE})}))
    with pytest.raises(
        DataError, match=r"rows.jsonl:1: 'completion': message 1, part 1 is a picture, .* put it into the prompt"
    ):
        read_demonstrations(str(file))


def test_keys_of_text_are_what_they_were() -> None:
    assert prompt_key("1 + 1 =") == "1 + 1 ="
    messages = ({"role": "system", "content": "é"}, {"role": "user", "content": "1 + 1 ="})
    digest = "7939ab4516b66ca02f637b81fd9d77a0bd0b746ca35cdff5fc874d2c3c141798"
    assert sha256(prompt_key(messages).encode()).hexdigest() == digest
    assert prompt_key(messages) == '[{"content": "é", "role": "system"}, {"content": "1 + 1 =", "role": "user"}]'


def test_a_picture_is_part_of_its_prompts_key(folder: Path) -> None:
    red, blue = (read_jsonl(folder, {"prompt": "?", "image": name}) for name in (FILE, "blue.png"))
    assert prompt_key(red.prompt) != prompt_key(blue.prompt)
    again = load_task([{"prompt": "?", "image": RED}]).train_example(0)
    assert prompt_key(red.prompt) == prompt_key(again.prompt)
    (picture,) = list_pictures(red.prompt)
    assert to_plain(red.prompt)[0]["content"][0] == {"type": "image", "sha256": picture.digest}
    json.dumps(to_plain(red.prompt))


def test_pictures_go_to_reward_workers(folder: Path) -> None:
    example = read_jsonl(folder, {"prompt": "?", "image": FILE})
    (picture,) = list_pictures(pickle.loads(pickle.dumps(example.prompt)))
    assert picture.decode().size == (32, 24)


@pytest.mark.parametrize("kind", ["parquet", "folder"])
def test_tables_hold_pictures_undecoded(kind: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    rows = {
        "prompt": [user([{"type": "image"}, {"type": "text", "text": "how many?"}])] * 2,
        "images": [[{"bytes": RED, "path": None}], [{"bytes": BLUE, "path": None}]],
        "answer": ["1", "2"],
    }
    data = datasets.Dataset.from_dict(rows).cast_column("images", datasets.List(datasets.Image()))
    name = str(folder / ("rows.parquet" if kind == "parquet" else "saved"))
    if kind == "parquet":
        data.to_parquet(name)
    else:
        data.save_to_disk(name)
    decoded = list[Picture]()
    monkeypatch.setattr(Picture, "decode", lambda self: decoded.append(self))
    source = open_rows(name)
    assert source is not None
    examples = load_examples(source, RowOptions(), name)
    assert [next(list_pictures(e.prompt)).read() for e in examples] == [RED, BLUE]
    assert shape(examples[0].prompt) == EXPECTED
    assert not decoded


@pytest.mark.parametrize("place", ["column", "list", "list of two", "parts"])
def test_opening_a_saved_dataset_writes_nothing_beside_it(place: str, folder: Path) -> None:
    """A second copy of the pictures would also change the digest that a resumed run compares."""
    import datasets

    file = {"bytes": JPEG, "path": None}
    image = datasets.Image()
    message = {
        "role": datasets.Value("string"),
        "content": datasets.List({"type": datasets.Value("string"), "image": image}),
    }
    feature, value = {
        "column": (image, file),
        "list": (datasets.List(image), [file]),
        "list of two": (datasets.List(image, length=2), [file, file]),
        "parts": (datasets.List(message), user([{"type": "image", "image": file}])),
    }[place]
    name = "prompt" if place == "parts" else "images"
    columns = {
        "answer": (datasets.Value("string"), "1"),
        "prompt": (datasets.Value("string"), "?"),
        name: (feature, value),
    }
    data = datasets.Dataset.from_dict(
        {column: [x] * 3 for column, (_, x) in columns.items()},
        features=datasets.Features({column: kind for column, (kind, _) in columns.items()}),
    )
    saved = folder / "saved"
    data.save_to_disk(str(saved))
    files, digest = sorted(saved.iterdir()), digest_data(str(saved))
    source = open_rows(str(saved))
    assert source is not None
    examples = load_examples(source, RowOptions(), "saved")
    assert [picture.read() for picture in list_pictures(examples[2].prompt)] == [JPEG] * (1 + (place == "list of two"))
    assert examples[2].columns == {"answer": "1"}
    assert sorted(saved.iterdir()) == files
    assert digest_data(str(saved)) == digest


def test_a_transform_of_a_dataset_gives_the_pictures_that_it_makes() -> None:
    import datasets

    data = datasets.Dataset.from_dict(
        {"prompt": ["?"], "image": [{"bytes": RED, "path": None}]},
        features=datasets.Features({"prompt": datasets.Value("string"), "image": datasets.Image()}),
    )
    data.set_transform(
        lambda rows: {**rows, "image": [image.transpose(Image.Transpose.ROTATE_90) for image in rows["image"]]}
    )
    source = open_rows(data)
    assert source is not None
    (picture,) = list_pictures(load_examples(source, RowOptions(), "rows")[0].prompt)
    assert picture.size == (24, 32)


def test_a_picture_is_fetched_once_when_that_is_allowed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = list[str]()

    class Server(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            requests.append(self.path)
            self.send_response(200 if self.path == "/red.png" else 404)
            self.end_headers()
            self.wfile.write(RED)

        def log_message(self, *args: Any) -> None:
            pass

    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    with HTTPServer(("127.0.0.1", 0), Server) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        for _ in range(2):
            example = read_jsonl(folder, {"prompt": "?", "image": f"{url}/red.png"}, fetch_images=True)
            assert next(list_pictures(example.prompt)).read() == RED
        with pytest.raises(DataError, match=r"column 'image': the picture 'http.*/none.png' cannot be fetched: .*404"):
            read_jsonl(folder, {"prompt": "?", "image": f"{url}/none.png"}, fetch_images=True)
        server.shutdown()
    assert requests == ["/red.png", "/none.png"]


def test_a_reply_that_is_no_picture_is_refused_and_not_cached(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begin = b"HTTP/1.0 200 OK\r\n"
    replies = {
        "short": begin + b"Content-Length: %d\r\n\r\n" % len(RED) + RED[:-20],
        "cut": begin + b"\r\n" + RED[:-40],
        "empty": begin + b"\r\n",
        "page": begin + b"\r\n<html>log in</html>",
        "status": b"nonsense\r\n\r\n",
        "chunk": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n50\r\nabc",
    }

    class Server(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.wfile.write(replies[self.path[1:]])

        def log_message(self, *args: Any) -> None:
            pass

    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    with HTTPServer(("127.0.0.1", 0), Server) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        for name in replies:
            url = f"http://127.0.0.1:{server.server_port}/{name}"
            with pytest.raises(
                DataError, match=f"rows.jsonl:1: column 'image': .*'?{url}'?.* cannot be (fetched|decoded)"
            ):
                read_jsonl(folder, {"prompt": "?", "image": url}, fetch_images=True)
        server.shutdown()
    assert not (folder / "cache").exists()


@pytest.mark.parametrize("url", ["http://\ud800/x", "http://a:b c/", "http://127.0.0.1:1/a b\n"])
def test_what_is_no_url_is_refused(url: str, folder: Path) -> None:
    with pytest.raises(DataError, match=r"rows.jsonl:1: column 'image': the picture 'http.* cannot be fetched"):
        read_jsonl(folder, {"prompt": "?", "image": url}, fetch_images=True)


def test_a_slow_reply_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    class Reply:
        headers = HTTPMessage()

        def read1(self, size: int) -> bytes:
            return b"x"

    monkeypatch.setattr("policygrad.tasks.pictures.MAX_FETCH_SECONDS", 0.01)
    with pytest.raises(TimeoutError, match="it takes more than"):
        _read_reply(Reply())


# Decoding.


def save(image: Image.Image, kind: str = "PNG", **options: Any) -> Picture:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return Picture(data=file.getvalue(), source="rows.jsonl:3")


def test_a_picture_is_upright_opaque_and_in_8_bits() -> None:
    wide = Image.new("RGB", (4, 2), (10, 20, 30))
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by a quarter
    assert save(wide, "JPEG", exif=exif).decode().size == (2, 4)
    assert save(Image.new("RGBA", (1, 1), (255, 0, 0, 0))).decode().getpixel((0, 0)) == (255, 255, 255)
    assert save(Image.new("I;16", (1, 1), 0x8000)).decode().getpixel((0, 0)) == (128, 128, 128)
    frames = [Image.new("P", (1, 1), 0), Image.new("P", (1, 1), 1)]
    for frame in frames:
        frame.putpalette([0, 0, 0, 9, 9, 9])
    animation = save(frames[0], "GIF", save_all=True, append_images=frames[1:])
    assert animation.decode().getpixel((0, 0)) == (0, 0, 0)


def test_images_of_pil_are_read_as_their_files_would_be() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    files = [
        save(Image.new("CMYK", (4, 2), (10, 20, 30, 40)), "JPEG").data,
        save(Image.new("RGB", (4, 2), (10, 20, 30)), "JPEG", exif=exif).data,
        save(Image.new("F", (2, 2), 7.0), "TIFF").data,
        save(Image.new("I;16", (1, 1), 0x8000)).data,
        save(Image.new("RGBA", (1, 1), (255, 0, 0, 9))).data,
    ]
    for file in files:
        picture, expected = from_pil(Image.open(io.BytesIO(file))).decode(), Picture(data=file).decode()
        assert (picture.size, picture.tobytes()) == (expected.size, expected.tobytes())
    with pytest.raises(DataError, match=r"rows.jsonl:3: the image of PIL cannot be read: .*truncated"):
        from_pil(Image.open(io.BytesIO(save(Image.effect_noise((64, 64), 50)).data[:-60])), "rows.jsonl:3")


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF"])
def test_damaged_files_are_read_or_refused(kind: str) -> None:
    random, file = Random(kind), save(Image.open(io.BytesIO(RED)), kind).data
    for _ in range(200):
        damaged = bytearray(file[: random.randrange(1, len(file))] if random.random() < 0.25 else file)
        for _ in range(random.choice([1, 2, 16])):
            damaged[random.randrange(min(len(damaged), random.choice([64, len(damaged)])))] = random.randrange(256)
        with contextlib.suppress(DataError), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PIL's, of metadata that it skips
            Picture(data=bytes(damaged)).decode()


def claim(width: int, height: int) -> bytes:
    """The beginning of a PNG that claims a size, and a little data."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\0" * 64)) + chunk(b"IEND", b"")
    )


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (claim(8000, 8000), "has 8,000 × 8,000 pixels, and the most is 33,554,432"),
        (claim(2**16, 2**16), "cannot be decoded as PNG"),
        (RED[:-40], "cannot be decoded as PNG"),
        (b"<svg/>", "cannot be decoded as PNG, JPEG"),
    ],
)
def test_a_file_that_claims_too_much_or_ends_early_is_refused(data: bytes, message: str) -> None:
    with pytest.raises(DataError, match=f"rows.jsonl:3: the picture {message}"):
        Picture(data=data, source="rows.jsonl:3").decode()


def test_a_thumbnail_is_small() -> None:
    thumbnail = Picture(data=make_picture(600, 300, 3).make_thumbnail())
    assert thumbnail.size == (128, 64)
    assert pictures.THUMBNAIL_SIDE == 128


def test_a_size_is_read_without_decoding() -> None:
    assert Picture(data=claim(7, 5)).size == (7, 5)
    read = partial(Picture, path="nowhere.png", source="rows.jsonl:4")
    with pytest.raises(DataError, match=r"rows.jsonl:4: the picture 'nowhere.png' cannot be read: No such file"):
        _ = read().size
