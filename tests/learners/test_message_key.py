"""The key of processes that learn together: how it reaches them, and that nothing without its signature is executed."""

from __future__ import annotations

import os
import pickle
import stat
from pathlib import Path
from typing import Any

import pytest

from policygrad.errors import ConfigError, RunError
from policygrad.learners.fsdp import message_key
from policygrad.learners.fsdp.message_key import (
    make_key,
    read_local_key,
    read_sent_key,
    read_shared_key,
    remove_local_key,
    send_key,
    sign,
    verify,
    write_local_key,
)
from policygrad.learners.fsdp.processes import WorkerGroup
from policygrad.utils.rendezvous import find_address

KEY = b"k" * 32


def test_a_message_is_that_of_its_key_and_place() -> None:
    message = sign(KEY, "message 1", b"content")
    assert verify(KEY, "message 1", message) == b"content"
    for key, place, sent in (
        (b"s" * 32, "message 1", message),
        (KEY, "message 2", message),  # one that was recorded
        (KEY, "message 1", message + b"!"),
        (KEY, "message 1", b""),
    ):
        with pytest.raises(RunError, match="not signed with their key: it is not executed"):
            verify(key, place, sent)


class Executed:
    """A pickle that runs code when it is read."""

    def __reduce__(self) -> Any:
        return os._exit, (7,)


def test_what_rank_0_has_not_signed_is_not_unpickled(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stranger who connects in rank 0's place sends a pickle that would end this process."""
    group = WorkerGroup.__new__(WorkerGroup)
    group._key, group._count, group._control = KEY, 0, None  # type: ignore[assignment]
    sent = sign(b"s" * 32, "message 1", pickle.dumps(Executed()))

    def broadcast(tensor: Any, src: int, group: object) -> None:
        if tensor.numel() == 1:
            tensor.fill_(len(sent))
        else:
            tensor.numpy()[:] = list(sent)

    monkeypatch.setattr("torch.distributed.broadcast", broadcast)
    with pytest.raises(RunError, match="message 1 between the processes"):
        group.receive_object()


def test_a_key_is_sent_through_a_pipe() -> None:
    reader, writer = os.pipe()
    key = make_key()
    send_key(writer, key)
    assert read_sent_key(reader) == key
    os.close(writer)
    assert os.read(reader, 1) == b""
    os.close(reader)


def test_processes_of_one_machine_find_the_key_in_a_file_of_this_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    write_local_key(b"of a process that was killed")
    write_local_key(KEY)
    assert read_local_key() == KEY
    (file,) = tmp_path.iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    file.chmod(0o644)
    with pytest.raises(RunError, match="can be read by one"):
        read_local_key()
    file.chmod(0o600)
    monkeypatch.setattr(message_key.os, "geteuid", lambda: file.stat().st_uid + 1)
    with pytest.raises(RunError, match="belongs to another user"):
        read_local_key()
    remove_local_key()
    remove_local_key()
    assert not list(tmp_path.iterdir())


def test_several_machines_need_a_key_of_the_user() -> None:
    assert read_shared_key({"POLICYGRAD_KEY": "k" * 16}) == b"k" * 16
    with pytest.raises(ConfigError, match=r"POLICYGRAD_KEY is not set: .*openssl rand"):
        read_shared_key({})
    with pytest.raises(ConfigError, match="POLICYGRAD_KEY has 5 letters, and 16 are the fewest"):
        read_shared_key({"POLICYGRAD_KEY": "short"})


def test_rank_0_serves_at_the_address_by_which_the_others_know_it() -> None:
    assert find_address("host0", ["127.0.1.1", "10.0.0.1"]) == "10.0.0.1"  # Debian's name for itself
    assert find_address("host0", ["10.0.0.1", "10.0.0.2"]) == "10.0.0.1"
    assert find_address("host0", ["", "10.0.0.1"]) == "10.0.0.1"
    assert find_address("localhost", ["127.0.0.1", "127.0.0.1"]) == "127.0.0.1"
    with pytest.raises(ConfigError, match="'nowhere', the first machine, has no address"):
        find_address("nowhere", ["", ""])
