"""The task `shapes`: the same pictures everywhere, answers that the pixels confirm, and an evaluation split of its own."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections import Counter
from hashlib import sha256
from itertools import pairwise

import numpy as np
import pytest

from policygrad.errors import DataError
from policygrad.rewards.builtin import exact_match
from policygrad.tasks import list_tasks, load_task
from policygrad.tasks.base import Example
from policygrad.tasks.shapes import (
    _FONT,
    COLOURS,
    DIGITS,
    FORMS,
    KINDS,
    LARGEST,
    SIDE,
    draw_scene,
    encode_png,
    is_eval_scene,
    make_example,
    paint,
)

Patch = tuple[str, str, int]


def picture_and_question(example: Example) -> tuple[bytes, str]:
    (message,) = example.prompt
    picture, question = message["content"]
    return picture["image"].data, question["text"]


def read_pixels(example: Example) -> np.ndarray:
    (message,) = example.prompt
    return np.asarray(message["content"][0]["image"].decode())


def trim(mask: np.ndarray) -> np.ndarray:
    rows, columns = mask.any(1).nonzero()[0], mask.any(0).nonzero()[0]
    return mask[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]


def look(pixels: np.ndarray) -> list[Patch]:
    """The shapes of a picture as (colour, form, number of pixels), by quarter, from the pixels alone."""
    half, result = SIDE // 2, list[Patch]()
    for top in (0, half):
        for left in (0, half):
            quarter = pixels[top : top + half, left : left + half].astype(int)
            mask = (quarter != pixels[0, 0]).any(2)
            assert mask.sum() == mask[1:-1, 1:-1].sum(), "a shape touches the quarter's edge"
            if not mask.any():
                continue
            shape = trim(mask)
            assert len({tuple(rgb) for rgb in quarter[mask]}) == 1
            rgb = quarter[mask][0]
            colour = min(COLOURS, key=lambda name: int(abs(rgb - np.array(COLOURS[name])).sum()))
            widths = shape.sum(1)
            if shape.all():
                form = "square"
            elif widths[0] == widths[-1]:
                form = "circle"
                assert (shape == shape[::-1]).all()
                assert (shape == shape.T).all()
            else:
                form = "triangle"
                assert all(0 <= below - above <= 2 for above, below in pairwise(widths))
            result.append((colour, form, int(mask.sum())))
    return result


def read_digits(pixels: np.ndarray) -> str:
    """The digits of a picture, from the left: each has a third of the width, and is five dots high."""
    glyphs = {rows.replace(" ", ""): digit for digit, rows in _FONT.items()}
    digits = ""
    for left in (1, 11, 21):
        dots = trim((pixels[:, left : left + 10] != pixels[0, 0]).any(2))
        size = len(dots) // 5
        small = dots[::size, ::size]
        assert (small.repeat(size, 0).repeat(size, 1) == dots).all()
        digits += glyphs["".join("01"[dot] for dot in small.ravel().astype(int))]
    return digits


def answer_from_pixels(pixels: np.ndarray, question: str) -> str:
    if question == DIGITS:
        return read_digits(pixels)
    shapes = look(pixels)
    if question == LARGEST:
        *_, second, first = sorted(shapes, key=lambda shape: shape[2])
        assert first[2] > 1.15 * second[2], "hardly larger"
        return f"{first[0]} {first[1]}"
    wanted = question.removeprefix("How many ").removesuffix(" are there?")
    if wanted.endswith(" shapes"):
        return str(sum(f"{colour} shapes" == wanted for colour, _, _ in shapes))
    return str(sum(f"{form}s" == wanted for _, form, _ in shapes))


def test_the_files_are_the_same_on_every_machine() -> None:
    data, question = picture_and_question(load_task("shapes", seed=0).train_example(0))
    assert question == "How many circles are there?"
    assert sha256(data).hexdigest() == "569d28b4f6e5c36ab9cfb75081bd6c788fa093c0edc13feb8aa47e9a91ab38b0"
    assert len(data) < 1024
    held_out = [picture_and_question(example)[0] for example in load_task("shapes").eval_examples(32)]
    assert sha256(b"".join(held_out)).hexdigest() == "4cd3549a53ab55a04eecbcf4456e9123921de7831e763dc0af0c941b1b7c5a49"


def test_training_is_a_pure_function_of_seed_and_index() -> None:
    first, second, other = load_task("shapes", seed=3), load_task("shapes", seed=3), load_task("shapes", seed=4)
    indices = [*range(12), 100_000]
    forward = {i: first.train_example(i) for i in indices}
    assert {i: second.train_example(i) for i in reversed(indices)} == forward
    assert all(other.train_example(i) != forward[i] for i in indices)
    assert pickle.loads(pickle.dumps(forward)) == forward
    with pytest.raises(IndexError, match="numbered from 0, got -1"):
        first.train_example(-1)


def test_another_process_draws_the_same_pictures() -> None:
    code = "from policygrad.tasks import load_task; t = load_task('shapes', seed=5)\n"
    code += "e = [t.train_example(7), *t.eval_examples(3)]\n"
    code += "print([(x.prompt[0]['content'][0]['image'].digest, x.columns) for x in e])"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, "PYTHONHASHSEED": "12345"}
    )
    task = load_task("shapes", seed=5)
    examples = [task.train_example(7), *task.eval_examples(3)]
    assert done.stdout == f"{[(sha256(picture_and_question(e)[0]).hexdigest(), e.columns) for e in examples]}\n"


def test_the_decoded_pixels_are_those_that_were_painted() -> None:
    for index in range(50):
        scene = draw_scene(f"any/{index}")
        palette = np.array([(scene.paper,) * 3, *(mark.rgb for mark in scene.marks)], np.uint8)
        expected = palette[np.array([list(row) for row in paint(scene)])]
        assert (read_pixels(make_example(scene, encode_png(scene))) == expected).all()


def test_answers_follow_from_the_pixels() -> None:
    task = load_task("shapes", seed=1)
    for example in (*(task.train_example(i) for i in range(600)), *task.eval_examples(200)):
        pixels, (_, question) = read_pixels(example), picture_and_question(example)
        assert pixels.shape == (SIDE, SIDE, 3)
        assert answer_from_pixels(pixels, question) == example.columns["answer"]


def test_demonstrations_name_what_the_picture_shows_and_are_scored_as_right() -> None:
    task = load_task("shapes", seed=2)
    examples = [task.train_example(i) for i in range(200)]
    for example in examples:
        pixels = read_pixels(example)
        if example.columns["kind"] == "digits":
            named = list(read_digits(pixels))
        else:
            subject = picture_and_question(example)[1].split()[2].removesuffix("s")
            shapes, count = look(pixels), iter("1234")
            named = [f"{c} {f} {next(count)}" if subject in (c, f) else f"{c} {f}" for c, f, _ in shapes]
        reply = f"I see {', '.join(named)}. <answer>{example.columns['answer']}</answer>"
        assert example.columns["demonstration"] == reply
    columns = {name: [example.columns[name] for example in examples] for name in examples[0].columns}
    assert exact_match(None, columns["demonstration"], **columns) == [1.0] * len(examples)
    assert task.rewards == ("exact_match",)


def test_eval_examples_are_fixed_distinct_and_never_trained_on() -> None:
    task = load_task("shapes", seed=1)
    held_out = task.eval_examples(64)
    assert len({picture_and_question(example) for example in held_out}) == 64
    assert all(is_eval_scene(*picture_and_question(example)) for example in held_out)
    assert not any(is_eval_scene(*picture_and_question(task.train_example(i))) for i in range(500))
    assert load_task("shapes", seed=2).eval_examples(8) == held_out[:8]
    assert not task.eval_on_train


def test_every_question_and_answer_occurs() -> None:
    task = load_task("shapes")
    columns = [(picture_and_question(e)[1], e.columns) for e in map(task.train_example, range(3000))]
    kinds = Counter(column["kind"] for _, column in columns)
    assert kinds.keys() == set(KINDS)
    assert min(kinds.values()) > 600
    seen = Counter((question, column["answer"]) for question, column in columns if question != DIGITS)
    subjects = (*(f"{form}s" for form in FORMS), *(f"{colour} shapes" for colour in COLOURS))
    counts = {(f"How many {subject} are there?", str(number)) for subject in subjects for number in range(5)}
    assert seen.keys() == counts | {(LARGEST, f"{colour} {form}") for colour in COLOURS for form in FORMS}
    for place in range(3):
        digits = Counter(column["answer"][place] for question, column in columns if question == DIGITS)
        assert digits.keys() == set("0123456789")


def test_the_task_is_listed_and_takes_no_settings() -> None:
    assert "shapes" in list_tasks()
    for name in ("shapes+gcd", "shapes:size=3", "curriculum:shapes"):
        with pytest.raises(DataError, match="'shapes' is a fixed mix"):
            load_task(name)
