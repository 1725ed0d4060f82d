"""The server's folder: what is written before it is accepted, what is deleted, and which names are refused."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from policygrad.errors import ConfigError
from policygrad.serve import store as stores
from policygrad.serve.store import LoggedRequest, SavedInfo, SavedPath, Store, UnknownIdError

MODEL = "session:train:0"


@pytest.fixture
def store(tmp_path: Path) -> Store:
    found = Store(tmp_path / "served")
    found.create_session("session", {"user": "local"})
    return found


def save(store: Store, path: SavedPath, request: int = 1, **info: object) -> None:
    folder = store.make_temporary(path)
    (folder / "weights").write_text("w" * 10)
    store.install(path, folder, SavedInfo(created=time.time() + request, request=request, **info))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "name",
    [
        "",
        "session",
        "session:train",
        "session:train:x",
        "session:sample:0",
        "../session:train:0",
        "session:train:0/..",
        "other:train:0",
    ],
)
def test_ids_that_name_no_model_are_unknown(store: Store, name: str) -> None:
    with pytest.raises(UnknownIdError):
        store.model(name)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "weights/x",
        "tinker://",
        f"tinker://{MODEL}/weights",
        f"tinker://{MODEL}/secret/x",
        f"tinker://{MODEL}/weights/..",
        f"tinker://{MODEL}/weights/a/b",
    ],
)
def test_paths_that_name_no_weights_are_unknown(text: str) -> None:
    with pytest.raises(UnknownIdError, match=r"tinker://MODEL/weights/NAME"):
        SavedPath.parse(text)


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "../x", "a\0", "x" * 201, ".tmp-x", "ä/"])
def test_names_for_weights_stay_in_their_folder(store: Store, name: str) -> None:
    with pytest.raises(ConfigError, match="is no name"):
        store.check_name(SavedPath(MODEL, "weights", name), 1)


def test_a_request_is_written_once(store: Store) -> None:
    store.log_request(MODEL, LoggedRequest(3, "optim_step", b"first\nline", "application/json"))
    store.log_request(MODEL, LoggedRequest(3, "optim_step", b"second", "application/json"))
    store.log_request(MODEL, LoggedRequest(1, "forward_backward", b"\x00\n\xff", "application/x-protobuf"))
    assert [store.read_request(MODEL, n) for n in store.list_requests(MODEL)] == [
        LoggedRequest(1, "forward_backward", b"\x00\n\xff", "application/x-protobuf"),
        LoggedRequest(3, "optim_step", b"first\nline", "application/json"),
    ]


def test_a_request_that_is_half_written_is_none(store: Store) -> None:
    """What a server leaves that is killed while it writes."""
    store.log_request(MODEL, LoggedRequest(1, "optim_step", b"", "x"))
    (store.model(MODEL) / "log" / ".tmp-00000002.request").write_bytes(b"{")
    assert store.list_requests(MODEL) == [1]
    store.save_state(MODEL, 1, {}, {})
    assert not store.list_requests(MODEL)


def test_a_state_replaces_the_requests_before_it(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stores, "KEEP_RESULTS", 2)
    for i in range(1, 7):
        store.log_request(MODEL, LoggedRequest(i, "optim_step", b"", "x"))
        store.write_result(MODEL, i, "application/json", b"%d" % i)
    store.save_state(MODEL, 5, {"w": torch.ones(2)}, {"a": 1})
    assert store.list_requests(MODEL) == [6]
    assert store.read_result(MODEL, 3) is None
    assert store.read_result(MODEL, 4) == ("application/json", b"4")
    saved = store.load_state(MODEL)
    assert saved is not None
    assert (saved[0], saved[1]["w"].tolist(), saved[2]) == (5, [1.0, 1.0], {"a": 1})


def test_weights_are_saved_once_by_each_request(store: Store) -> None:
    path = SavedPath(MODEL, "weights", "one")
    assert store.check_name(path, 4) is False
    save(store, path, request=4)
    assert store.check_name(path, 4) is True
    with pytest.raises(ConfigError, match="exists already"):
        store.check_name(path, 5)
    assert store.check_name(path, 5, overwrite=True) is False
    assert store.saved_info(path).size == 10
    assert (store.find_saved(path) / "weights").read_text() == "w" * 10


def test_weights_expire(store: Store) -> None:
    path, other = SavedPath(MODEL, "weights", "one"), SavedPath(MODEL, "weights", "two")
    save(store, path, expires=time.time() - 1)
    save(store, other, expires=time.time() + 1000)
    assert [path for path, _ in store.list_saved(MODEL)] == [other]
    with pytest.raises(UnknownIdError, match="have expired"):
        store.find_saved(path)
    store.set_expiry(other, None)
    assert store.saved_info(other).expires is None


def test_only_the_latest_unnamed_weights_are_kept(store: Store) -> None:
    paths = [SavedPath(MODEL, "sampler_weights", f"sampler-{i}") for i in range(5)]
    for i, path in enumerate(paths):
        save(store, path, request=i, sampling_session=None if i == 1 else f"session:sample:{i}")
    store.prune(MODEL, 2)
    assert [path for path, _ in store.list_saved(MODEL)] == [paths[1]]
    for path, is_kept in zip(paths, (False, True, False, True, True), strict=True):
        assert (store.model(MODEL) / "sampler_weights" / path.name).is_dir() is is_kept


def test_a_second_server_does_not_use_the_folder(tmp_path: Path) -> None:
    from policygrad.errors import RunError
    from policygrad.serve.config import ServeConfig
    from policygrad.serve.service import Service

    first = Service(ServeConfig(folder=tmp_path / "served"))
    with pytest.raises(RunError, match="another process is at work"):
        Service(ServeConfig(folder=tmp_path / "served"))
    first.stop()
    Service(ServeConfig(folder=tmp_path / "served")).stop()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"host": "0.0.0.0"}, "--api-keys FILE"),
        ({"model": ("tiny", "tiny")}, "names a model twice"),
        ({"max_models": 0}, "--max-models must be at least 1"),
        ({"port": 70000}, "--port must be"),
        ({"replay_seconds": -1.0}, "--replay-seconds"),
    ],
)
def test_options_that_cannot_be_are_refused(options: dict[str, object], message: str) -> None:
    from policygrad.serve.config import ServeConfig

    with pytest.raises(ConfigError, match=message):
        ServeConfig(**options)  # type: ignore[arg-type]
