"""The key with which processes that learn together sign what they send each other, and how each gets it.

Rank 0 makes it for processes that it starts, and sends it through the pipe on their standard input (or Ray's call). torchrun gives
its processes nothing secret: on one machine rank 0 leaves it in a file that only this user can read, until all have read it;
processes of several machines share the variable POLICYGRAD_KEY, which the user sets.
"""

from __future__ import annotations

import hmac
import os
import secrets
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from policygrad.errors import ConfigError, RunError

KEY_VARIABLE = "POLICYGRAD_KEY"
MIN_KEY_LETTERS = 16
_SIGNATURE_BYTES = 32  # SHA-256


def make_key() -> bytes:
    """Return a key that nobody else has; it has no line break."""
    return secrets.token_hex(32).encode()


def sign(key: bytes, place: str, content: bytes) -> bytes:
    """Return the content behind its signature; `place` says which message it is, so that no other can take its place."""
    return hmac.digest(key, place.encode() + b"\0" + content, "sha256") + content


def verify(key: bytes, place: str, message: bytes) -> bytes:
    """Return the content. Raises RunError if it was not signed with this key for this place."""
    signature, content = message[:_SIGNATURE_BYTES], message[_SIGNATURE_BYTES:]
    if not hmac.compare_digest(signature, sign(key, place, content)[:_SIGNATURE_BYTES]):
        raise RunError(
            f"{place} between the processes that learn together is not signed with their key: it is not executed. Give every "
            f"process the same {KEY_VARIABLE}; if they have it, somebody else sends to their ports: learn in a network of their own"
        )
    return content


def send_key(descriptor: int, key: bytes) -> None:
    """Write the key to a pipe, as its first line."""
    with suppress(BrokenPipeError):  # the process has ended, which is reported where it is waited for
        os.write(descriptor, key + b"\n")


def read_sent_key(descriptor: int) -> bytes:
    """Return the key that `send_key` has written to the other end of a pipe."""
    key = b""
    while (letter := os.read(descriptor, 1)) not in (b"", b"\n"):
        key += letter
    return key


def read_shared_key(environment: Mapping[str, str]) -> bytes:
    """Return the key of processes on several machines. Raises ConfigError if there is none."""
    key = environment.get(KEY_VARIABLE, "")
    if len(key) < MIN_KEY_LETTERS:
        problem = f"has {len(key)} letters, and {MIN_KEY_LETTERS} are the fewest" if key else "is not set"
        raise ConfigError(
            f"{KEY_VARIABLE} {problem}: processes on several machines sign what they send each other, since it is executed. Make "
            f"one, and set the same on every machine before torchrun: export {KEY_VARIABLE}=$(openssl rand -hex 32)"
        )
    return key.encode()


def write_local_key(key: bytes) -> None:
    """Leave the key for the other processes of this machine's torchrun."""
    path = _local_path()
    with suppress(FileNotFoundError):
        path.unlink()  # of one that was killed; another user's stays, and the next line fails
    with open(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "wb") as file:
        file.write(key)


def read_local_key() -> bytes:
    """Return the key that `write_local_key` has left. Raises RunError if another user has left it."""
    path = _local_path()
    with path.open("rb") as file:
        status = os.fstat(file.fileno())
        if hasattr(os, "geteuid") and (status.st_uid != os.geteuid() or status.st_mode & 0o077):
            raise RunError(f"{path}, the key of this run's processes, belongs to another user, or can be read by one")
        return file.read()


def remove_local_key() -> None:
    """Remove the file, once all have read it."""
    with suppress(FileNotFoundError):
        _local_path().unlink()


def _local_path() -> Path:
    """Return the file of the processes that torchrun has started together, whose store has this port."""
    names = (os.environ.get(name, "0") for name in ("MASTER_PORT", "TORCHELASTIC_RESTART_COUNT"))
    return Path(tempfile.gettempdir()) / f"policygrad-key-{'-'.join(names)}"
