"""Checkpoints: bitwise round trips, every kind of damage, and what is kept."""

import json
import math
import os
import random
import shutil
import struct
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from doubles.checkpoints import content, names, silent
from policygrad.checkpoint import manifest
from policygrad.checkpoint.format import load_checkpoint, load_latest, parse_step, prune_quietly, save_checkpoint
from policygrad.checkpoint.manifest import decode_json, encode_json
from policygrad.errors import CheckpointError


def bits(tensor: torch.Tensor) -> tuple:
    return tensor.dtype, tuple(tensor.shape), tensor.contiguous().reshape(-1).view(torch.uint8).tolist()


def equal(a, b) -> bool:
    """Same types, same order of keys, same bits."""
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and bits(a) == bits(b)
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return all(equal(x, y) for x, y in zip(a.items(), b.items(), strict=True)) and len(a) == len(b)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(equal(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, float):
        return (math.isnan(a) and math.isnan(b)) or struct.pack("d", a) == struct.pack("d", b)
    return a == b


DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (5,), (2, 3, 4)], ids=str)
def test_tensors_come_back_bitwise(tmp_path, dtype, shape):
    tensor = (torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 5).to(dtype)
    loaded = load_checkpoint(save_checkpoint(tmp_path, 1, {"x": tensor}, {}))
    assert bits(loaded.tensors["x"]) == bits(tensor)


def test_special_floats_views_and_ties(tmp_path):
    base = torch.arange(12.0).reshape(3, 4)
    special = torch.tensor([0x7FC00001, -0x80000000, 0x7F800000, 1], dtype=torch.int32).view(torch.float32)
    tensors = {
        "special": special,  # a NaN with a payload, -0.0, inf, the smallest subnormal
        "transposed": base.T,
        "part": base[1:],
        "whole": base,
        "flat": base.view(-1),
        "expanded": torch.ones(1).expand(4),
        "tied": special,
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "conjugate": torch.tensor([1 + 2j]).conj(),
    }
    loaded = load_checkpoint(save_checkpoint(tmp_path, 3, tensors, {})).tensors
    assert loaded.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert bits(loaded[name]) == bits(tensor.detach().resolve_conj()), name
    assert loaded["tied"] is loaded["special"]
    loaded["whole"].zero_()  # owns its memory: neither the file nor another view feels it
    assert bits(load_checkpoint(tmp_path / "step-000003").tensors["whole"]) == bits(base)


def test_a_mapping_that_makes_tensors_on_the_fly(tmp_path):
    class Fresh(Mapping):
        def __getitem__(self, key):
            return torch.full((1000,), float(key))

        def __iter__(self):
            return iter("123")

        def __len__(self):
            return 3

    loaded = load_checkpoint(save_checkpoint(tmp_path, 1, Fresh(), {})).tensors
    assert [loaded[k][0].item() for k in "123"] == [1, 2, 3]


def test_state_comes_back_exactly_and_the_file_is_strict_json(tmp_path):
    state = {
        "float": [0.1, -0.0, 5e-324, 1e308, math.nan, math.inf, -math.inf],
        "int": [0, -1, 2**64, 3**5000, True, None],
        "rng": random.Random(0).getstate(),
        "by index": {0: "a", "0": "b", (1, None): "c", True: 1.0},
        "$float": "nan",
        "$$": {"$items": []},
        "text": "\ud800 \x00 ☃ \n",
        "empty": [{}, [], ()],
    }
    path = save_checkpoint(tmp_path, 7, {}, state)
    assert equal(load_checkpoint(path).state, state)

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    json.loads((path / "state.json").read_text("utf-8"), parse_constant=refuse)


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"a": {"rng": [0, random.Random()]}}, r"state\.a\.rng\.1 is a Random"),
        ({"a": torch.ones(1)}, r"state\.a is a Tensor.*put it among the tensors"),
        ({"a": {1: {2}}}, r"state\.a\.1 is a set"),
        ({"a": {b"k": 1}}, r"a key of state\.a is a bytes"),
    ],
)
def test_what_json_cannot_hold_is_named(tmp_path, state, message):
    with pytest.raises(CheckpointError, match=message):
        save_checkpoint(tmp_path, 1, {}, state)
    assert names(tmp_path) == []


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"x": torch.eye(2).to_sparse()}, "'x' is sparse"),
        ({"x": torch.empty(2, device="meta")}, "'x' is sparse or holds no data"),
        ({"__metadata__": torch.ones(1)}, "reserved"),
        ({"x": torch.ones(1, dtype=torch.complex128)}, "complex128"),
    ],
)
def test_tensors_that_cannot_be_stored_are_refused(tmp_path, tensors, message):
    with pytest.raises(CheckpointError, match=message):
        save_checkpoint(tmp_path, 1, tensors, {})
    assert names(tmp_path) == []


# --- trees ---

scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from(["$tensor", "$tuple", "$$"])
)
keys = st.text(max_size=4) | st.integers() | st.sampled_from(["0", "$int", "$items", "a.b", "a"]) | st.booleans()
trees = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=3) | st.lists(inner, max_size=3).map(tuple) | st.dictionaries(keys, inner, max_size=4)
    ),
    max_leaves=12,
)


@settings(max_examples=60)
@given(trees)
def test_trees_round_trip(tree):
    encoded = json.loads(json.dumps(encode_json(tree, "state"), allow_nan=False))
    assert equal(decode_json(encoded), tree)


# --- damage ---


def flip(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1 << (position % 8)
    path.write_bytes(data)


FILES = ["tensors.safetensors", "state.json", "manifest.json"]


@pytest.mark.parametrize("name", FILES)
def test_every_flipped_byte_is_noticed(tmp_path, name):
    good = save_checkpoint(tmp_path / "good", 1, {"w": torch.ones(2)}, {"a": 1})
    for position in range((good / name).stat().st_size):
        shutil.copytree(good, tmp_path / "bad" / good.name)
        flip(tmp_path / "bad" / good.name / name, position)
        with pytest.raises(CheckpointError):
            load_checkpoint(tmp_path / "bad" / good.name)
        shutil.rmtree(tmp_path / "bad")


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize(
    ("harm", "reason"),
    [
        (lambda p: flip(p, 20), "damaged"),
        (truncate, "damaged"),
        (Path.unlink, "missing"),
        (lambda p: p.write_bytes(b""), "damaged"),
    ],
    ids=["flip", "truncate", "delete", "empty"],
)
def test_a_damaged_newest_falls_back(tmp_path, name, harm, reason):
    for step in (1, 2, 3):
        save_checkpoint(tmp_path, step, content(step), {"step": step}, keep=3)
    harm(tmp_path / "step-000003" / name)
    received: list[str] = []
    result = load_latest(tmp_path, warn=received.append)
    assert result is not None
    assert result.step == result.tensors["step"].item() == result.state["step"] == 2
    assert len(received) == 1
    assert str(tmp_path / "step-000003" / name) in received[0]
    assert reason in received[0]
    assert "using the one before it, step-000002" in received[0]


def test_empty_folders_and_strangers(tmp_path):
    assert load_latest(tmp_path / "nowhere", warn=silent) is None
    for name in (".tmp-step-000009", "step-000007.bak", "notes"):
        (tmp_path / name).mkdir()
    (tmp_path / "step-000008").write_text("a file")
    assert load_latest(tmp_path, warn=silent) is None
    (tmp_path / "step-000005").mkdir()
    with pytest.raises(
        CheckpointError, match=r"none of the 1 checkpoint.*manifest.json is missing.*move the directory"
    ):
        load_latest(tmp_path, warn=silent)
    save_checkpoint(tmp_path, 4, content(4), {})
    received: list[str] = []
    result = load_latest(tmp_path, warn=received.append)
    assert result is not None
    assert result.step == 4
    assert len(received) == 1


@pytest.mark.parametrize(("written", "way_out"), [(99, "upgrade"), (1, "train anew from its model")])
def test_another_format_says_what_to_do(tmp_path, monkeypatch, written, way_out):
    monkeypatch.setattr(manifest, "FORMAT", written)
    path = save_checkpoint(tmp_path, 1, {}, {})
    monkeypatch.undo()
    with pytest.raises(CheckpointError, match=rf"format {written}.*{way_out}"):
        load_checkpoint(path)


def test_a_folder_renamed_to_another_step_is_refused(tmp_path):
    path = save_checkpoint(tmp_path, 1, {}, {})
    assert load_checkpoint(path.rename(tmp_path / "best")).step == 1
    with pytest.raises(CheckpointError, match="is of step 1"):
        load_checkpoint((tmp_path / "best").rename(tmp_path / "step-000002"))


# --- what stays ---


@settings(max_examples=25)
@given(steps=st.lists(st.integers(0, 1_200_000), min_size=1, max_size=7), keep=st.integers(1, 3))
def test_keeps_the_last(tmp_path_factory, steps, keep):
    directory = tmp_path_factory.mktemp("keep")
    expected: set[int] = set()
    for i, step in enumerate(steps):
        path = save_checkpoint(directory, step, {}, {"save": i}, keep=keep)
        past = sorted(s for s in {*expected, step} if s <= step)
        expected = {*past[-keep:], *(s for s in expected if s > step)}
        assert names(directory) == sorted(f"step-{s:06d}" for s in expected)
        assert load_checkpoint(path).state == {"save": i}


def test_damaged_ones_do_not_count_as_kept(tmp_path):
    for step in (1, 2, 3):
        save_checkpoint(tmp_path, step, {}, {}, keep=3)
    truncate(tmp_path / "step-000003" / "state.json")
    save_checkpoint(tmp_path, 4, {}, {}, keep=2)
    assert names(tmp_path) == ["step-000002", "step-000004"]


def test_between_the_regular_ones_fills_up_and_goes_first(tmp_path):
    """Of every tenth step and stops at 13, 21 and 24: a fallback for as long as there is no other."""
    for step, kept in [(13, [13]), (20, [13, 20]), (21, [20, 21]), (24, [20, 24]), (30, [20, 30]), (35, [30, 35])]:
        save_checkpoint(tmp_path, step, {}, {}, keep=2, every=10)
        assert sorted(map(parse_step, tmp_path.iterdir())) == kept
    save_checkpoint(tmp_path, 36, {}, {}, keep=3, every=10)
    assert sorted(map(parse_step, tmp_path.iterdir())) == [30, 35, 36]
    prune_quietly(tmp_path, 36, 3, 10, finished=True)
    assert sorted(map(parse_step, tmp_path.iterdir())) == [30, 36]


@pytest.mark.parametrize("arguments", [{"step": -1}, {"step": 1, "keep": 0}])
def test_impossible_arguments_are_refused(tmp_path, arguments):
    with pytest.raises(CheckpointError, match="step must be >= 0 and keep >= 1"):
        save_checkpoint(tmp_path, tensors={}, state={}, **arguments)
