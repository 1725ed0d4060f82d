"""The task `shapes`: small pictures drawn by code, and questions about them. The shipped vision-language model learns from it.

A picture has 32 × 32 pixels and shows either two to four coloured shapes, at most one in each quarter, or three digits. All
is computed with integers and the PNG file is written here, so the bytes are the same on every machine and with every version
of Pillow and zlib.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import shake_256
from itertools import count as count_from
from typing import Any

from policygrad.errors import DataError
from policygrad.tasks.base import Example, is_eval_prompt
from policygrad.utils.pictures import Picture

SIDE = 32
"""Width and height of every picture, in pixels."""
FORMS = ("circle", "square", "triangle")
COLOURS = {"red": (224, 40, 40), "green": (40, 168, 72), "blue": (48, 80, 224), "yellow": (224, 200, 40)}
KINDS = ("count_form", "count_colour", "largest", "digits")
"""The kinds of questions, asked equally often."""
LARGEST = "Which shape is the largest?"
DIGITS = "Which digits are shown?"

_MIN_SHAPES, _MAX_SHAPES = 2, 4
_CELL = SIDE // 2  # a quarter's side
_SIZES = (6, 14)  # sides of the shapes' bounding boxes
_SMALL, _LARGE = (6, 8), (12, 14)  # where one is the largest: a triangle of 12 has more pixels than a square of 8
_DIGITS, _COLUMN = 3, 10  # digits in a picture, pixels for each
_SHADE = 24  # each channel of a colour varies by as much, up and down
_PAPER = 224  # the darkest background, a grey
_EVAL_SEED = "held-out"  # in place of the run's seed: every run is evaluated on the same pictures
_MAX_TRIES = 64  # pictures tried for one training example; all are held out with probability 16^-64

# Rows of three pixels, from the top.
_FONT = {
    "0": "111 101 101 101 111",
    "1": "010 110 010 010 111",
    "2": "111 001 111 100 111",
    "3": "111 001 111 001 111",
    "4": "101 101 111 001 001",
    "5": "111 100 111 001 111",
    "6": "111 100 111 101 111",
    "7": "111 001 001 001 001",
    "8": "111 101 111 101 111",
    "9": "111 101 111 001 111",
}


@dataclass(frozen=True)
class Mark:
    """One thing in a picture: a shape or a digit."""

    form: str
    """One of FORMS, or a digit."""
    colour: str
    """Name of its colour."""
    rgb: tuple[int, int, int]
    """The shade of that colour."""
    left: int
    top: int
    size: int
    """Side of a shape's bounding box, or pixels per dot of a digit's font."""

    @property
    def name(self) -> str:
        return self.form if self.form in _FONT else f"{self.colour} {self.form}"


@dataclass(frozen=True)
class Scene:
    """A picture's contents with a question about it."""

    kind: str
    question: str
    answer: str
    marks: tuple[Mark, ...]
    """Shapes by quarter (top left, top right, bottom left, bottom right), digits from the left."""
    paper: int
    """Grey level of the background."""


class Chances:
    """A sequence of random integers that depends on a text alone, on every machine and with every version of Python."""

    def __init__(self, text: str) -> None:
        self._bits = int.from_bytes(shake_256(text.encode()).digest(128), "big")  # a scene needs less than half of them

    def below(self, bound: int) -> int:
        """Return the next integer, in [0, bound)."""
        self._bits, value = divmod(self._bits, bound)
        return value

    def between(self, low: int, high: int) -> int:
        """Return the next integer, in [low, high]."""
        return low + self.below(high - low + 1)

    def choice(self, options: Sequence[str]) -> str:
        """Return one of the options."""
        return options[self.below(len(options))]

    def sample(self, options: Sequence[Any], count: int) -> list[Any]:
        """Return `count` different options, in random order."""
        remaining = list(options)
        return [remaining.pop(self.below(len(remaining))) for _ in range(count)]


class ShapesTask:
    """An endless sequence of pictures with questions.

    Columns: `answer`, `demonstration` (a completion that names everything in the picture, then answers) and `kind`, one of
    KINDS.
    """

    name = "shapes"
    rewards: tuple[str, ...] = ("exact_match",)
    steps: tuple[str, ...] = ()
    eval_on_train = False
    rows: tuple[Example, ...] = ()

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed

    def train_example(self, index: int) -> Example:
        if index < 0:
            raise IndexError(f"training examples are numbered from 0, got {index}")
        first = index * _MAX_TRIES
        for number in range(first, first + _MAX_TRIES):
            scene = draw_scene(f"{self.seed}/{number}")
            png = encode_png(scene)
            if not is_eval_scene(png, scene.question):
                return make_example(scene, png)
        raise DataError(f"{_MAX_TRIES} pictures in a row belong to the evaluation split")  # practically impossible

    def eval_examples(self, count: int) -> list[Example]:
        """Return `count` different evaluation examples; a smaller count gives a prefix."""
        examples, seen = list[Example](), set[tuple[bytes, str]]()
        for number in count_from():
            if len(examples) == count:
                break
            scene = draw_scene(f"{_EVAL_SEED}/{number}")
            png = encode_png(scene)
            if is_eval_scene(png, scene.question) and (png, scene.question) not in seen:
                seen.add((png, scene.question))
                examples.append(make_example(scene, png))
        return examples


def is_eval_scene(png: bytes, question: str) -> bool:
    """Return True when a picture with a question belongs to the evaluation split; reads the file and the question only."""
    return is_eval_prompt(f"{Picture(data=png).digest} {question}")


def make_example(scene: Scene, png: bytes) -> Example:
    """Return the example of a scene, given its picture."""
    content = ({"type": "image", "image": Picture(data=png)}, {"type": "text", "text": scene.question})
    prompt: Any = ({"role": "user", "content": content},)
    columns = {"answer": scene.answer, "demonstration": worked_reply(scene), "kind": scene.kind}
    return Example(prompt, columns)


def worked_reply(scene: Scene) -> str:
    """Return the reply that names everything in the picture, then answers; at most 17 of the shipped model's tokens."""
    names = list_names([mark.name for mark in scene.marks], scene.question)
    return f"I see {names}. <answer>{scene.answer}</answer>"


def list_names(names: Sequence[str], question: str) -> str:
    """Join names by commas. Where a question asks how many, those that it asks for are counted: `red circle 1, blue square`."""
    counted, listed = 0, list[str]()
    subject = find_subject(question)
    for name in names:
        if subject in name.split():
            counted += 1
            listed.append(f"{name} {counted}")
        else:
            listed.append(name)
    return ", ".join(listed)


def find_subject(question: str) -> str:
    """Return the form or colour that a question wants counted, "" if it asks for something else."""
    words = question.removeprefix("How many ").split()
    return "" if question in (LARGEST, DIGITS) else words[0].removesuffix("s")


# Scenes.


def draw_scene(text: str) -> Scene:
    """Return the scene that belongs to a text."""
    chances = Chances(text)
    kind = KINDS[chances.below(len(KINDS))]
    paper = chances.between(_PAPER, 255)
    if kind == "digits":
        marks = _place_digits(chances)
        return Scene(kind, DIGITS, "".join(mark.form for mark in marks), marks, paper)
    if kind == "largest":
        count = chances.between(_MIN_SHAPES, _MAX_SHAPES)
        forms, colours = ([chances.choice(options) for _ in range(count)] for options in (FORMS, tuple(COLOURS)))
        sizes = [chances.between(*(_SMALL if shape else _LARGE)) for shape in range(count)]
        marks = _place_shapes(chances, forms, colours, sizes)
        return Scene(kind, LARGEST, max(marks, key=lambda mark: mark.size).name, marks, paper)
    wanted = chances.between(
        0, _MAX_SHAPES
    )  # each number equally often: a reply without a look is right one time in five
    count = chances.between(max(wanted, _MIN_SHAPES), _MAX_SHAPES)
    asked, other = (FORMS, tuple(COLOURS)) if kind == "count_form" else (tuple(COLOURS), FORMS)
    target = chances.choice(asked)
    rest = tuple(option for option in asked if option != target)
    values = [target if shape < wanted else chances.choice(rest) for shape in range(count)]
    others = [chances.choice(other) for _ in range(count)]
    forms, colours = (values, others) if kind == "count_form" else (others, values)
    marks = _place_shapes(chances, forms, colours, [chances.between(*_SIZES) for _ in range(count)])
    question = f"How many {target}s are there?" if kind == "count_form" else f"How many {target} shapes are there?"
    return Scene(kind, question, str(wanted), marks, paper)


def _place_shapes(chances: Chances, forms: list[str], colours: list[str], sizes: list[int]) -> tuple[Mark, ...]:
    """Put each shape somewhere in a quarter of its own, without touching the quarter's edge, and order them by quarter."""
    placed = list[tuple[int, Mark]]()
    cells = chances.sample(range(_MAX_SHAPES), len(forms))
    for cell, form, colour, size in zip(cells, forms, colours, sizes, strict=True):
        row, column = divmod(cell, 2)
        left, top = (_CELL * place + chances.between(1, _CELL - 1 - size) for place in (column, row))
        placed.append((cell, Mark(form, colour, _shade(chances, colour), left, top, size)))
    return tuple(mark for _, mark in sorted(placed, key=lambda pair: pair[0]))


def _place_digits(chances: Chances) -> tuple[Mark, ...]:
    marks = list[Mark]()
    for column in range(_DIGITS):
        colour, size = chances.choice(tuple(COLOURS)), chances.between(2, 3)
        left = 1 + _COLUMN * column + chances.between(0, _COLUMN - 3 * size)
        top = (SIDE - 5 * size) // 2 + chances.between(-4, 4)
        marks.append(Mark(str(chances.below(10)), colour, _shade(chances, colour), left, top, size))
    return tuple(marks)


def _shade(chances: Chances, colour: str) -> tuple[int, int, int]:
    red, green, blue = (channel + chances.between(-_SHADE, _SHADE) for channel in COLOURS[colour])
    return red, green, blue


# Pixels and the file.


def paint(scene: Scene) -> list[bytearray]:
    """Return which mark each pixel belongs to, in SIDE rows from the top: 0 = background, 1 = the first mark, …"""
    rows = [bytearray(SIDE) for _ in range(SIDE)]
    for number, mark in enumerate(scene.marks, start=1):
        for x, y in _rasterise(mark.form, mark.size):
            rows[mark.top + y][mark.left + x] = number
    return rows


@lru_cache(maxsize=256)
def _rasterise(form: str, size: int) -> tuple[tuple[int, int], ...]:
    """Return the pixels (x, y) of a form, relative to the corner of its bounding box; edges are not smoothed."""
    if form in _FONT:
        width, height = 3 * size, 5 * size
        dots = _FONT[form].split()
        return tuple((x, y) for y in range(height) for x in range(width) if dots[y // size][x // size] == "1")
    box = [(x, y) for y in range(size) for x in range(size)]
    last = size - 1  # 2·x - last is twice the distance from the centre, an integer
    if form == "triangle":  # its tip is at the top, its base is the last row
        box = [(x, y) for x, y in box if abs(2 * x - last) <= y + 1]
    elif form == "circle":
        box = [(x, y) for x, y in box if (2 * x - last) ** 2 + (2 * y - last) ** 2 < size**2]
    return tuple(box)


def encode_png(scene: Scene) -> bytes:
    """Return the picture as a PNG file of some 700 bytes: a palette, four bits per pixel, not compressed.

    Compressed data would depend on the version of zlib, and with it the file's hash, which decides the split.
    """
    palette = [(scene.paper,) * 3, *(mark.rgb for mark in scene.marks)]
    lines = b"".join(  # each begins with its filter: 0, none
        bytes((0, *(left << 4 | right for left, right in zip(row[::2], row[1::2], strict=True))))
        for row in paint(scene)
    )
    stored = struct.pack("<BHH", 1, len(lines), 0xFFFF - len(lines)) + lines  # one final block of deflate, as it is
    chunks = (
        (b"IHDR", struct.pack(">IIBBBBB", SIDE, SIDE, 4, 3, 0, 0, 0)),  # 4 bits, palette
        (b"PLTE", bytes(channel for rgb in palette for channel in rgb)),
        (b"IDAT", b"\x78\x01" + stored + struct.pack(">I", zlib.adler32(lines))),
        (b"IEND", b""),
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data)) for name, data in chunks
    )
