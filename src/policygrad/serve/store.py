"""The server's folder: sessions, the requests of each model in their order, its state, and what clients have saved.

    SESSION/session.json                      who it belongs to
    SESSION/train/N/model.json                the base model and its adapter
    SESSION/train/N/log/00000012.request      a request that was accepted, and .result, what it computed
    SESSION/train/N/state/step-00000012/      the state after request 12; earlier requests need not be computed again
    SESSION/train/N/weights/NAME/             a client's checkpoint; sampler_weights and external_weights likewise
    SESSION/sample/N.json                     what a sampling session samples from
    SESSION/loss/N.json                       an uploaded loss

A request is written before it is accepted, and a state says which request it is after. After a crash the server computes again what
the state does not contain, in the same order, so that every request counts once. Names come from clients, so each is checked before
it is part of a path.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from policygrad.checkpoint.format import load_latest, save_checkpoint
from policygrad.errors import ConfigError, DataError
from policygrad.utils.filesystem import fsync_path, install_folder, write_atomically

SCHEME = "tinker://"
Kind = Literal["weights", "sampler_weights", "external_weights"]
KINDS: tuple[Kind, ...] = ("weights", "sampler_weights", "external_weights")
KEEP_RESULTS = 1024
"""Results of a model that are kept for clients that ask again."""
_SESSION = re.compile(r"[A-Za-z0-9][\w-]{0,79}")
_NAME = re.compile(r"[A-Za-z0-9_][\w.-]{0,199}")
_NUMBER = re.compile(r"\d{1,12}")
META = "checkpoint.json"
NUMBERED = "[0-9]" * 8
"""Names of a log's files, and not of those that a killed server left half written."""


class UnknownIdError(DataError):
    """An id that names nothing here, or nothing of this user."""


@dataclass(frozen=True)
class LoggedRequest:
    """A request as it arrived."""

    sequence: int
    kind: str
    """The last part of its URL."""
    body: bytes
    content_type: str


@dataclass(frozen=True)
class SavedPath:
    """A checkpoint that a client has saved: tinker://MODEL/KIND/NAME."""

    model_id: str
    kind: Kind
    name: str

    @classmethod
    def parse(cls, text: str) -> SavedPath:
        """Raises UnknownIdError for anything else."""
        parts = text.removeprefix(SCHEME).split("/") if text.startswith(SCHEME) else []
        if len(parts) != 3 or parts[1] not in KINDS or not _NAME.fullmatch(parts[2]):
            raise UnknownIdError(
                f"{text!r} is no path of saved weights: it is tinker://MODEL/weights/NAME, as saving returned it"
            )
        return cls(parts[0], parts[1], parts[2])

    def __str__(self) -> str:
        return f"{SCHEME}{self.model_id}/{self.kind}/{self.name}"


@dataclass(frozen=True)
class SavedInfo:
    """What is written beside saved weights."""

    created: float
    """Seconds since 1970."""
    request: int
    """The model's request that saved them."""
    size: int = 0
    """Bytes."""
    expires: float | None = None
    """Seconds since 1970; None = never."""
    user_metadata: dict[str, str] | None = None
    is_temporary: bool = False
    """Saved for a sampling client and without a name: only the latest ones are kept."""


class Store:
    """Reads and writes the folder. One server uses it at a time."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.owners = folder, dict[str, str]()
        folder.mkdir(parents=True, exist_ok=True)

    # Sessions, and what is written once.

    def session(self, session_id: str) -> Path:
        """Return a session's folder. Raises UnknownIdError if there is none."""
        if not _SESSION.fullmatch(session_id) or not (self.folder / session_id / "session.json").is_file():
            raise UnknownIdError(f"there is no session {session_id!r}")
        return self.folder / session_id

    def create_session(self, session_id: str, values: Mapping[str, Any]) -> None:
        (self.folder / session_id).mkdir()
        self.write(self.folder / session_id / "session.json", values)

    def read_session(self, user: str, session_id: str) -> dict[str, Any]:
        """Return a session's values. Raises UnknownIdError if it is another user's."""
        values = self.read(self.session(session_id) / "session.json", f"session {session_id!r}")
        if values["user"] != user:
            raise UnknownIdError(f"there is no session {session_id!r}")
        return values

    def owner(self, full_id: str) -> str:
        """Return the user of an id SESSION:…. Raises UnknownIdError if there is no such session."""
        session_id = full_id.partition(":")[0]
        if session_id not in self.owners:
            self.owners[session_id] = self.read(self.session(session_id) / "session.json", session_id)["user"]
        return self.owners[session_id]

    def check_owner(self, user: str, full_id: str) -> None:
        """Raise UnknownIdError unless an id SESSION:… is this user's."""
        if self.owner(full_id) != user:
            raise UnknownIdError(f"there is no session {full_id.partition(':')[0]!r}")

    def sessions(self) -> list[str]:
        """Return the sessions' ids, newest first."""
        folders = [p for p in self.folder.iterdir() if _SESSION.fullmatch(p.name) and (p / "session.json").is_file()]
        return [p.name for p in sorted(folders, key=lambda p: p.stat().st_mtime, reverse=True)]

    def model(self, model_id: str) -> Path:
        """Return a model's folder, SESSION:train:N. Raises UnknownIdError if the id is malformed or its session unknown."""
        return self._part(model_id, "train")

    def sampling_session(self, sampler_id: str) -> Path:
        """Return a sampling session's file, SESSION:sample:N."""
        path = self._part(sampler_id, "sample")
        return path.with_name(f"{path.name}.json")

    def loss(self, loss_id: str) -> Path:
        """Return an uploaded loss's file, SESSION:loss:N."""
        path = self._part(loss_id, "loss")
        return path.with_name(f"{path.name}.json")

    def _part(self, full_id: str, kind: str) -> Path:
        session_id, part, number = (*full_id.split(":", 2), "", "")[:3]
        if part != kind or not _NUMBER.fullmatch(number):
            raise UnknownIdError(f"{full_id!r} is no id of this server: it is SESSION:{kind}:N")
        return self.session(session_id) / kind / number

    def models(self, session_id: str) -> list[str]:
        """Return the ids of a session's models."""
        folder = self.session(session_id) / "train"
        numbers = sorted(int(p.name) for p in folder.iterdir() if _NUMBER.fullmatch(p.name)) if folder.is_dir() else []
        return [f"{session_id}:train:{n}" for n in numbers]

    def samplers(self, session_id: str) -> list[str]:
        """Return the ids of a session's sampling sessions."""
        folder = self.session(session_id) / "sample"
        numbers = (
            sorted(int(p.stem) for p in folder.glob("*.json") if _NUMBER.fullmatch(p.stem)) if folder.is_dir() else []
        )
        return [f"{session_id}:sample:{n}" for n in numbers]

    @staticmethod
    def write(path: Path, values: Mapping[str, Any]) -> None:
        """Write a JSON file completely or not at all."""
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps(dict(values)) + "\n")

    @staticmethod
    def read(path: Path, what: str) -> dict[str, Any]:
        """Read a JSON file. Raises UnknownIdError if it does not exist."""
        try:
            values: dict[str, Any] = json.loads(path.read_bytes())
        except FileNotFoundError:
            raise UnknownIdError(f"there is no {what}") from None
        return values

    # Requests and their results.

    def log_request(self, model_id: str, request: LoggedRequest) -> None:
        """Write a request, unless it is there: a client that got no answer sends it again."""
        path = self._log(model_id, request.sequence, "request")
        if not path.exists() and not path.with_suffix(".result").exists():
            header = json.dumps({"kind": request.kind, "content_type": request.content_type})
            _write_bytes(path, header.encode() + b"\n" + request.body)

    def read_requests(self, model_id: str) -> Iterator[LoggedRequest]:
        """Iterate over the requests that are kept, in order."""
        folder = self.model(model_id) / "log"
        for path in sorted(folder.glob(NUMBERED + ".request")) if folder.is_dir() else []:
            header, _, body = path.read_bytes().partition(b"\n")
            values = json.loads(header)
            yield LoggedRequest(int(path.stem), values["kind"], body, values["content_type"])

    def write_result(self, model_id: str, sequence: int, content_type: str, body: bytes) -> None:
        _write_bytes(self._log(model_id, sequence, "result"), content_type.encode() + b"\n" + body)

    def read_result(self, model_id: str, sequence: int) -> tuple[str, bytes] | None:
        """Return (content type, body), or None while there is no result."""
        try:
            header, _, body = self._log(model_id, sequence, "result").read_bytes().partition(b"\n")
        except FileNotFoundError:
            return None
        return header.decode(), body

    def has_request(self, model_id: str, sequence: int) -> bool:
        return self._log(model_id, sequence, "request").exists()

    def _log(self, model_id: str, sequence: int, kind: str) -> Path:
        return self.model(model_id) / "log" / f"{sequence:08d}.{kind}"

    # States.

    def save_state(
        self, model_id: str, sequence: int, tensors: Mapping[str, Tensor], values: Mapping[str, Any]
    ) -> None:
        """Write the state after a request, and delete the requests that it contains and results that are old."""
        folder = self.model(model_id)
        save_checkpoint(folder / "state", sequence, tensors, values, keep=1)
        for path in (folder / "log").glob(NUMBERED + ".request"):
            if int(path.stem) <= sequence:
                path.unlink(missing_ok=True)
        for path in (folder / "log").glob(NUMBERED + ".result"):
            if int(path.stem) <= sequence - KEEP_RESULTS:
                path.unlink(missing_ok=True)

    def load_state(self, model_id: str) -> tuple[int, dict[str, Tensor], dict[str, Any]] | None:
        """Return (the request that it is after, tensors, values) of the newest state; None if there is none."""
        saved = load_latest(self.model(model_id) / "state", warn=lambda text: None)
        return None if saved is None else (saved.step, saved.tensors, saved.state)

    # What clients save.

    def saved(self, path: SavedPath) -> Path:
        """Return the folder of saved weights. Raises UnknownIdError if there is none, or it has expired."""
        folder = self.model(path.model_id) / path.kind / path.name
        if not (folder / META).is_file():
            raise UnknownIdError(f"there are no saved weights {path}: list_checkpoints shows those of a model")
        if self.saved_info(path).expires is not None and (self.saved_info(path).expires or 0) < time.time():
            shutil.rmtree(folder, ignore_errors=True)
            raise UnknownIdError(f"the saved weights {path} have expired")
        return folder

    def saved_info(self, path: SavedPath) -> SavedInfo:
        """Return what is written beside saved weights."""
        return SavedInfo(**self.read(self.model(path.model_id) / path.kind / path.name / META, f"checkpoint {path}"))

    def set_expiry(self, path: SavedPath, expires: float | None) -> None:
        values = asdict(self.saved_info(path)) | {"expires": expires}
        self.write(self.saved(path) / META, values)

    def check_name(self, path: SavedPath, request: int, *, overwrite: bool) -> bool:
        """Return True if this request has saved these weights already, before a crash.

        Raises:
            ConfigError: An invalid name, or another request's.
        """
        if not _NAME.fullmatch(path.name):
            raise ConfigError(
                f"{path.name!r} is no name for saved weights: use letters, digits, '_', '-' and '.', at most 200, no '/'"
            )
        if not (self.model(path.model_id) / path.kind / path.name / META).is_file():
            return False
        if self.saved_info(path).request == request:
            return True
        if not overwrite:
            raise ConfigError(f"{path} exists already: choose another name, or save with overwrite=True")
        return False

    def install(self, path: SavedPath, temporary: Path, info: SavedInfo) -> None:
        """Make a folder that was written under a temporary name the saved weights `path`; afterwards they are on the disk."""
        size = sum(p.stat().st_size for p in temporary.rglob("*") if p.is_file())
        self.write(temporary / META, asdict(info) | {"size": size})
        for file in temporary.rglob("*"):
            fsync_path(file)
        fsync_path(temporary)
        final = self.model(path.model_id) / path.kind / path.name
        shutil.rmtree(install_folder(temporary, final), ignore_errors=True)
        for folder in (final.parent, *final.parents[1:4]):
            fsync_path(folder)

    def temporary(self, path: SavedPath) -> Path:
        """Return an empty folder to write saved weights to."""
        folder = self.model(path.model_id) / path.kind / f".tmp-{path.name}"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        return folder

    def delete(self, path: SavedPath) -> None:
        shutil.rmtree(self.saved(path))

    def list_saved(self, model_id: str) -> list[SavedPath]:
        """Return what a model has saved and has not expired, oldest first, without what is temporary."""
        return [path for path in self._list(model_id, KINDS) if not self.saved_info(path).is_temporary]

    def prune_temporary(self, model_id: str, keep: int) -> None:
        """Delete all but the newest `keep` weights that were saved for sampling without a name."""
        paths = [p for p in self._list(model_id, ("sampler_weights",)) if self.saved_info(p).is_temporary]
        for path in paths[: max(0, len(paths) - keep)]:
            shutil.rmtree(self.model(model_id) / path.kind / path.name, ignore_errors=True)

    def _list(self, model_id: str, kinds: tuple[Kind, ...]) -> list[SavedPath]:
        dated = list[tuple[float, SavedPath]]()
        for kind in kinds:
            folder = self.model(model_id) / kind
            for child in folder.iterdir() if folder.is_dir() else []:
                if _NAME.fullmatch(child.name) and not child.name.endswith(".old") and (child / META).is_file():
                    path = SavedPath(model_id, kind, child.name)
                    info = self.saved_info(path)
                    if info.expires is None or info.expires > time.time():
                        dated.append((info.created, path))
        return [path for _, path in sorted(dated, key=lambda item: (item[0], str(item[1])))]


def _write_bytes(path: Path, data: bytes) -> None:
    """Write a file completely or not at all, as far as this machine goes on: a killed process loses nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".tmp-{path.name}")
    temporary.write_bytes(data)
    os.replace(temporary, path)
