"""Checkpoints that several processes write, a share each: read whole, or a box at a time; cut short, damaged, beside training."""

from __future__ import annotations

import errno
import json
import os
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from doubles.checkpoints import Stages, in_child, names, silent
from policygrad.checkpoint.format import CheckpointWriter, load_checkpoint, load_latest, open_tensors, save_checkpoint
from policygrad.checkpoint.manager import Checkpointer, ShardedState
from policygrad.checkpoint.manifest import dump_json, seal, shard_name
from policygrad.checkpoint.shards import (
    DTYPES,
    ShardFile,
    TensorShard,
    build_shard_index,
    write_shard_file,
)
from policygrad.errors import CheckpointError

WHOLE = {
    "weights": torch.arange(15.0).reshape(5, 3),
    "moments": torch.arange(10, dtype=torch.float64).reshape(5, 2),
    "few": torch.tensor([7.0, 8.0]),
}
"""The third has fewer rows than there are processes."""
OTHERS = {"rng": torch.tensor([1, 2, 3], dtype=torch.uint8)}


def cut(tensors: dict[str, torch.Tensor], ends: list[int], rank: int) -> dict[str, TensorShard]:
    """The rows of a process of several: those between two ends, as many as there are."""
    pieces = {}
    for name, x in tensors.items():
        low, high = (min(end, len(x)) for end in (ends[rank], ends[rank + 1]))
        if low < high:
            pieces[name] = TensorShard(tuple(x.shape), (low, *[0] * (x.ndim - 1)), x[low:high].clone())
    return pieces


def saved(directory: Path, step: int, tensors: dict[str, torch.Tensor] = WHOLE, keep: int = 2) -> Path:
    """By three processes: two rows, one row, two rows."""
    saving = CheckpointWriter(directory, step, OTHERS, {"save": step}, keep, "-mark")
    saving.begin()
    ends = [0, 2, 3, 5]
    shares = [write_shard_file(saving.folder / shard_name(rank), cut(tensors, ends, rank)) for rank in range(3)]
    return saving.finish(lambda: shares)


def content(step: int) -> dict[str, torch.Tensor]:
    return {name: x + step for name, x in WHOLE.items()}


def bits(x: torch.Tensor) -> tuple[torch.dtype, tuple[int, ...], list[int]]:
    return x.dtype, tuple(x.shape), x.contiguous().reshape(-1).view(torch.uint8).tolist()


# --- the files


def test_a_share_is_a_file_that_safetensors_reads(tmp_path: Path) -> None:
    special = torch.tensor([0x7FC00001, -0x80000000, 0x7F800000], dtype=torch.int32).view(torch.float32)
    tensors = {str(kind): (torch.arange(3) % 2).to(kind) for kind in DTYPES.values()}
    tensors |= {
        "special": special,
        "count": torch.tensor(4),
        "odd": torch.ones(3, dtype=torch.uint8),
        "none": torch.ones(0, 4),
    }
    pieces = {name: TensorShard(tuple(x.shape), (0,) * x.ndim, x) for name, x in tensors.items()}
    share = write_shard_file(tmp_path / "x.safetensors", pieces)
    result = load_file(tmp_path / "x.safetensors")
    assert result.keys() == tensors.keys()
    assert all(bits(result[name]) == bits(tensors[name]) for name in tensors)
    assert share.entry["bytes"] == (tmp_path / "x.safetensors").stat().st_size
    assert share.tensors["special"] == ["F32", [3], [0], [3]]
    with pytest.raises(FileExistsError):
        write_shard_file(tmp_path / "x.safetensors", pieces)
    with pytest.raises(CheckpointError, match=r"'c' is torch\.complex64: convert it"):
        write_shard_file(
            tmp_path / "y.safetensors", {"c": TensorShard((1,), (0,), torch.ones(1, dtype=torch.complex64))}
        )


def test_it_comes_back_whole(tmp_path: Path) -> None:
    result = load_checkpoint(saved(tmp_path, 3))
    assert result.step == 3
    assert result.state == {"save": 3}
    assert result.tensors.keys() == (WHOLE | OTHERS).keys()
    assert all(bits(result.tensors[name]) == bits(x) for name, x in (WHOLE | OTHERS).items())


def test_what_is_left_where_it_is_says_its_shape(tmp_path: Path) -> None:
    for path in (saved(tmp_path / "shares", 1), save_checkpoint(tmp_path / "one", 1, WHOLE | OTHERS, {})):
        result = load_checkpoint(path, keep_on_meta=lambda name: name in WHOLE).tensors
        assert torch.equal(result["rng"], OTHERS["rng"])
        assert all(result[name].is_meta for name in WHOLE)
        assert all((result[name].shape, result[name].dtype) == (x.shape, x.dtype) for name, x in WHOLE.items())


@settings(max_examples=30)
@given(st.data())
def test_any_box_of_any_cut(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """Cut into boxes along rows and columns, and read at any place, also of what one process has saved."""
    uninterrupted = torch.arange(42.0).reshape(6, 7)
    rows, columns = (sorted({0, n, *data.draw(st.lists(st.integers(0, n), max_size=2))}) for n in uninterrupted.shape)
    boxes = [(a, b, c, d) for a, b in pairwise(rows) for c, d in pairwise(columns)]
    folder = tmp_path_factory.mktemp("boxes")
    saving = CheckpointWriter(folder, 1, {}, {})
    saving.begin()
    shares = [
        write_shard_file(
            saving.folder / shard_name(i), {"x": TensorShard((6, 7), (a, c), uninterrupted[a:b, c:d].contiguous())}
        )
        for i, (a, b, c, d) in enumerate(boxes)
    ]
    low = [data.draw(st.integers(0, n)) for n in uninterrupted.shape]
    size = [data.draw(st.integers(0, n - a)) for n, a in zip(uninterrupted.shape, low, strict=True)]
    expected = uninterrupted[low[0] : low[0] + size[0], low[1] : low[1] + size[1]]
    for path in (saving.finish(lambda: shares), save_checkpoint(folder, 2, {"x": uninterrupted}, {})):
        with open_tensors(path) as pieces:
            assert torch.equal(pieces.read("x", (low, size)), expected)
            assert torch.equal(pieces.read("x"), uninterrupted)


def test_pieces_that_make_no_whole_are_refused() -> None:
    def share(*box: list[int]) -> ShardFile:
        return ShardFile({}, {"x": ["F32", [4, 2], *box]})

    assert build_shard_index([share([0, 0], [3, 2]), share([3, 0], [1, 2])])["x"]["shards"] == [
        [0, [0, 0], [3, 2]],
        [1, [3, 0], [1, 2]],
    ]
    for wrong in (
        [share([0, 0], [3, 2])],
        [share([0, 0], [4, 2]), share([3, 0], [1, 2])],
        [share([1, 0], [4, 2])],
        [share([0, 0], [2, 2]), share([1, 0], [2, 2])],  # as many numbers, and the last row is nowhere
        [share([0, 0], [4, 1]), share([0, 0], [4, 1])],
    ):
        with pytest.raises(CheckpointError, match="shards of 'x' do not make up the complete"):
            build_shard_index(wrong)
    with pytest.raises(CheckpointError, match="disagree on the shape or dtype of 'x'"):
        build_shard_index([share([0, 0], [3, 2]), ShardFile({}, {"x": ["F64", [4, 2], [3, 0], [1, 2]]})])


def test_one_process_s_format_is_what_it_was(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, 1, WHOLE, {"a": 1})
    assert json.loads((path / "manifest.json").read_bytes())["format"] == 2
    assert json.loads((path / "state.json").read_bytes()).keys() == {"aliases", "state", "step", "tensors"}
    assert json.loads((saved(tmp_path, 2) / "manifest.json").read_bytes())["format"] == 3


# --- damage

FILES = ["shard-00000.safetensors", "shard-00002.safetensors", "tensors.safetensors", "state.json", "manifest.json"]


@pytest.mark.parametrize("name", FILES)
def test_every_flipped_byte_is_noticed(tmp_path: Path, name: str) -> None:
    folder = saved(tmp_path, 1, {"w": torch.ones(5)})
    good = (folder / name).read_bytes()
    for position in range(len(good)):
        bad = bytearray(good)
        bad[position] ^= 1
        (folder / name).write_bytes(bad)
        with pytest.raises(CheckpointError):
            load_checkpoint(folder)
    (folder / name).write_bytes(good)
    assert load_checkpoint(folder).step == 1


def swap(path: Path) -> None:
    one, other = path / shard_name(0), path / shard_name(2)
    kept = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(kept)


def pipe(path: Path) -> None:
    (path / shard_name(1)).unlink()
    os.mkfifo(path / shard_name(1))


def crafted(change: Callable[[dict], object]) -> Callable[[Path], None]:  # type: ignore[type-arg]
    """Sealed anew."""

    def harm(path: Path) -> None:
        record = json.loads((path / "state.json").read_bytes())
        change(record["shards"])
        (path / "state.json").write_bytes(dump_json(record))
        entries = json.loads((path / "manifest.json").read_bytes())["files"]
        seal(path, ["state.json", "tensors.safetensors"], {n: e for n, e in entries.items() if n.startswith("shard")})

    return harm


HARMS: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (lambda path: (path / shard_name(1)).unlink(), "shard-00001.safetensors is missing"),
    "cut off": (lambda path: os.truncate(path / shard_name(1), 9), "shard-00001.safetensors is damaged: 9 bytes"),
    "two swapped": (swap, "shard-0000[02].safetensors is damaged"),
    "a pipe": (pipe, "it is no regular file"),
    "a piece less": (
        crafted(lambda spread: spread["weights"]["shards"].pop()),
        "'weights' do not make up the complete",
    ),
    "a piece on another": (
        crafted(lambda s: s["weights"]["shards"][1].__setitem__(1, s["weights"]["shards"][0][1])),
        "'weights'",
    ),
    "a shape that is not there": (
        crafted(lambda s: s["few"].update(shape=[10**12], shards=[[0, [0], [10**12]]])),
        "contains another shard of 'few' than state.json says",
    ),
    "a file that is not there": (
        crafted(lambda s: s["few"]["shards"][0].__setitem__(0, 7)),
        "fewer shard files than 'few'",
    ),
    "a name that is none": (
        crafted(lambda s: s["few"]["shards"][0].__setitem__(0, "../x")),
        "fewer shard files than 'few'",
    ),
    "twice": (crafted(lambda s: s.update(rng=s["few"])), "'rng' twice"),
    "no shape": (crafted(lambda s: s["few"].pop("shape")), "KeyError"),
}


@pytest.mark.parametrize("how", HARMS)
def test_what_is_not_as_it_was_written_falls_back(tmp_path: Path, how: str) -> None:
    saved(tmp_path, 1, content(1))
    harm, reason = HARMS[how]
    harm(saved(tmp_path, 2, content(2)))
    received: list[str] = []
    result = load_latest(tmp_path, warn=received.append)
    assert result is not None
    assert result.step == 1
    assert torch.equal(result.tensors["weights"], WHOLE["weights"] + 1)
    (output,) = received
    assert "using the one before it, step-000001" in output
    with pytest.raises(pytest.fail.Exception, match=reason):
        load_latest(tmp_path, warn=pytest.fail)


# --- cut short


@pytest.mark.parametrize(
    "step", [pytest.param(2, id="next step"), pytest.param(1, id="same step", marks=pytest.mark.full)]
)
def test_kill_at_every_stage_of_a_save_in_shares(tmp_path: Path, step: int) -> None:
    """The second save is killed before each call that changes the disk, which is after the one before it, and the next save puts
    everything in order."""

    def second(directory: Path, kill_at: int) -> None:
        count = 0

        def hook() -> None:
            nonlocal count
            count += 1
            if count == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)

        Stages(hook).install()
        saved(directory, step, content(2), keep=1)

    survived, stage = False, -1  # odd: a hook is called before and after each call
    while not survived:
        stage += 2
        directory = tmp_path / str(stage)
        saved(directory, 1, content(1), keep=1)
        status = in_child(lambda at=stage, d=directory: second(d, at))
        survived = os.WIFEXITED(status)
        assert survived or os.WTERMSIG(status) == signal.SIGKILL
        assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
        result = load_latest(directory, warn=silent)
        assert result is not None
        assert any(torch.equal(result.tensors["weights"], content(n)["weights"]) for n in (1, 2))
        saved(directory, 3, content(3), keep=1)
        assert names(directory) == ["step-000003"]
    assert stage > 25


def test_a_share_that_is_not_written_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    folder = tmp_path / "run" / "checkpoints"
    saved(folder, 1)
    saving = CheckpointWriter(folder, 2, OTHERS, {}, 2, "-mark")
    saving.begin()

    def full() -> list[ShardFile]:
        raise OSError(errno.ENOSPC, "rank 1: No space left on device")

    with pytest.raises(
        CheckpointError, match=r"disk is full; the previous checkpoint, step-000001, is intact.*--resume"
    ):
        saving.finish(full)
    assert names(folder) == ["step-000001"]


# --- beside training


@dataclass(frozen=True)
class Steps:
    step: int


class Slow:
    """A process that writes when it is let."""

    def __init__(self) -> None:
        self.let = threading.Event()
        self.fails: list[str] = []

    def begin(self, folder: Path) -> Callable[[], list[ShardFile]]:
        def written() -> list[ShardFile]:
            assert self.let.wait(600)
            if self.fails:
                raise OSError(self.fails.pop())
            return [write_shard_file(folder / shard_name(0), cut(WHOLE, [0, 5], 0))]

        return written


def checkpointer(folder: Path, slow: Slow, notes: list[str]) -> Checkpointer[Steps]:
    def gathers(progress: Steps) -> tuple[dict[str, torch.Tensor], dict[str, int]]:
        raise AssertionError("nobody gathers")

    result = Checkpointer[Steps](
        folder / "checkpoints",
        every=1,
        keep=2,
        pack=gathers,
        version=lambda: 0,
        sync=lambda: None,
        note=notes.append,
        resume_command="RESUME",
        max_snapshot_bytes=0,
        sharded=ShardedState(lambda progress: ({}, {"at": progress.step}), slow.begin, lambda name: name in WHOLE),
    )
    result.start(Steps(0))
    return result


def test_training_goes_on_while_shares_are_written_and_the_next_save_waits(tmp_path: Path) -> None:
    slow, notes = Slow(), list[str]()
    saves = checkpointer(tmp_path, slow, notes)
    saves.on_step(Steps(1), final=False)
    assert saves.saved == 0
    assert not list((tmp_path / "checkpoints").glob("step-*"))  # it is on its way, and we are here
    slow.let.set()
    saves.on_step(Steps(2), final=False)
    assert saves.saved == 1
    saves.on_step(Steps(3), final=True)
    assert saves.saved == 3
    assert names(tmp_path / "checkpoints") == ["step-000002", "step-000003"]
    result = saves.restore()
    assert result is not None
    assert result.state == {"at": 3}
    assert result.tensors["weights"].is_meta
    assert notes == []


def test_a_share_that_fails_is_a_note_and_the_final_one_an_error(tmp_path: Path) -> None:
    slow, notes = Slow(), list[str]()
    saves = checkpointer(tmp_path, slow, notes)
    slow.let.set()
    slow.fails.append("rank 1: broken")
    saves.on_step(Steps(1), final=False)
    saves.on_step(Steps(2), final=False)
    (output,) = notes
    assert "step-000001 was not written: rank 1: broken; there is no earlier checkpoint" in output
    assert "Training continues" in output
    saves.rewind()
    assert saves.saved == 2
    slow.fails.append("rank 1: broken")
    with pytest.raises(CheckpointError, match=r"step-000003 was not written: rank 1: broken; .*step-000002, is intact"):
        saves.on_step(Steps(3), final=True)
    assert names(tmp_path / "checkpoints") == ["step-000002"]


def test_an_error_waits_for_what_is_being_written(tmp_path: Path) -> None:
    slow, notes = Slow(), list[str]()
    saves = checkpointer(tmp_path, slow, notes)
    saves.on_step(Steps(1), final=False)
    threading.Timer(0.1, slow.let.set).start()
    with pytest.raises(ValueError, match="oh"), saves.save_on_error():
        raise ValueError("oh")
    assert "step 2 failed: RESUME resumes from step 1" in notes[0]
    assert names(tmp_path / "checkpoints") == ["step-000001"]
