"""The server's folder: sessions, the requests of each model in their order, its state, and what clients have saved.

    SESSION/session.json                      who it belongs to
    SESSION/train/N/model.json                the base model and its adapter
    SESSION/train/N/log/00000012.request      a request that was accepted, and .result, what it computed
    SESSION/train/N/state/step-00000012/      the state after request 12; earlier requests need not be computed again
    SESSION/train/N/weights/NAME/             a client's checkpoint; sampler_weights and external_weights likewise
    SESSION/sample/N.json                     what a sampling session samples from

A request is written before it is accepted, and a state says which request it is after. After a crash the server computes again what
the state does not contain, in the same order, so that every request counts once. Names come from clients, so each is checked before
it is part of a path.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import time
from collections.abc import Mapping
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
_NUMBER = re.compile(r"[0-9]{1,12}")
SEQUENCE = re.compile(r"[0-9]{1,8}")
"""The number of a model's request, as it is in names of files."""
MAX_SEQUENCE = 10**8 - 1
META = "checkpoint.json"
OLD = ".old"
"""Ends the name of saved weights that are being replaced (`install_folder`)."""
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
    """Metadata, written beside saved weights."""

    created: float
    """Seconds since 1970."""
    request: int
    """The model's request that saved them."""
    size: int = 0
    """Bytes."""
    expires: float | None = None
    """Seconds since 1970; None = never."""
    user_metadata: dict[str, str] | None = None
    sampling_session: str | None = None
    """The one for which weights without a name were saved, of which only the latest are kept; None = they have a name."""

    @property
    def has_expired(self) -> bool:
        return self.expires is not None and self.expires < time.time()


class Store:
    """Reads and writes the folder. One server uses it at a time."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.owners = folder, dict[str, str]()
        folder.mkdir(parents=True, exist_ok=True)
        for kind in KINDS:  # a killed server may have been replacing saved weights
            for old in folder.glob(f"*/train/*/{kind}/*{OLD}"):
                if not old.with_name(old.name.removesuffix(OLD)).exists():
                    os.replace(old, old.with_name(old.name.removesuffix(OLD)))

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

    def _part(self, full_id: str, kind: str) -> Path:
        session_id, part, number = (*full_id.split(":", 2), "", "")[:3]
        if part != kind or not _NUMBER.fullmatch(number):
            raise UnknownIdError(f"{full_id!r} is no id of this server: it is SESSION:{kind}:N")
        return self.session(session_id) / kind / number

    def models(self, session_id: str) -> list[str]:
        """Return the ids of a session's models."""
        folder = self.session(session_id) / "train"
        files = folder.glob("*/model.json") if folder.is_dir() else []  # not of one that could not be created
        numbers = sorted(int(p.parent.name) for p in files if _NUMBER.fullmatch(p.parent.name))
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

    def list_requests(self, model_id: str) -> list[int]:
        """Return the numbers of the requests that are kept, in order."""
        folder = self.model(model_id) / "log"
        return sorted(int(p.stem) for p in folder.glob(NUMBERED + ".request")) if folder.is_dir() else []

    def read_request(self, model_id: str, sequence: int) -> LoggedRequest:
        header, _, body = self._log(model_id, sequence, "request").read_bytes().partition(b"\n")
        values = json.loads(header)
        return LoggedRequest(sequence, values["kind"], body, values["content_type"])

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

    def count_attempt(self, model_id: str, sequence: int) -> int:
        """Count that a request is about to be computed once more after a restart; return how often it has been."""
        path = self.model(model_id) / "attempts.json"
        before = json.loads(path.read_bytes()) if path.exists() else {"sequence": -1}
        count = before["count"] + 1 if before["sequence"] == sequence else 1
        self.write(path, {"sequence": sequence, "count": count})
        return count

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

    def find_saved(self, path: SavedPath) -> Path:
        """Return the folder of saved weights. Raises UnknownIdError if there is none, or it has expired."""
        folder = self.model(path.model_id) / path.kind / path.name
        if not (folder / META).is_file():
            raise UnknownIdError(f"there are no saved weights {path}: list_checkpoints shows those of a model")
        if self.saved_info(path).has_expired:
            raise UnknownIdError(f"the saved weights {path} have expired")
        return folder

    def saved_info(self, path: SavedPath) -> SavedInfo:
        """Return what is written beside saved weights."""
        return SavedInfo(**self.read(self.model(path.model_id) / path.kind / path.name / META, f"checkpoint {path}"))

    def set_expiry(self, path: SavedPath, expires: float | None) -> None:
        values = asdict(self.saved_info(path)) | {"expires": expires}
        self.write(self.find_saved(path) / META, values)

    def check_name(self, path: SavedPath, request: int, *, overwrite: bool = False) -> bool:
        """Return True if this request has saved these weights already, before a crash.

        Args:
            overwrite: Whether another request's may be replaced.

        Raises:
            ConfigError: An invalid name, or another request's.
        """
        if not _NAME.fullmatch(path.name) or path.name.endswith(OLD):
            raise ConfigError(
                f"{path.name!r} is no name for saved weights: use letters, digits, '_', '-' and '.', at most 200, no '/' and no "
                f"'{OLD}' at the end"
            )
        folder = self.model(path.model_id) / path.kind / path.name
        if not (folder / META).is_file():
            return False
        info = self.saved_info(path)
        if info.request == request:
            return True
        if info.has_expired:
            shutil.rmtree(folder, ignore_errors=True)
        elif not overwrite:
            remedy = ", or save with overwrite=True" if path.kind == "weights" else ""
            raise ConfigError(f"{path} exists already: choose another name{remedy}")
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

    def make_temporary(self, path: SavedPath) -> Path:
        """Make an empty folder to write saved weights to."""
        folder = self.model(path.model_id) / path.kind / f".tmp-{path.name}"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        return folder

    def delete(self, path: SavedPath) -> None:
        """Delete saved weights: at once for all who look for them, and then their files."""
        folder = self.find_saved(path)
        (folder / META).unlink()
        shutil.rmtree(folder, ignore_errors=True)

    def list_saved(self, model_id: str) -> list[tuple[SavedPath, SavedInfo]]:
        """Return what a model has saved under a name and has not expired, oldest first."""
        weights = self._list(model_id)
        return [(path, info) for path, info in weights if info.sampling_session is None and not info.has_expired]

    def prune(self, model_id: str, keep: int) -> None:
        """Delete saved weights that have expired, and all but the newest `keep` without a name, with their sampling sessions."""
        weights = self._list(model_id)
        unnamed = [path for path, info in weights if info.sampling_session and not info.has_expired]
        outdated = unnamed[: max(0, len(unnamed) - keep)]
        for path, info in weights:
            if info.has_expired or path in outdated:
                shutil.rmtree(self.model(model_id) / path.kind / path.name, ignore_errors=True)
                if info.sampling_session:
                    self.sampling_session(info.sampling_session).unlink(missing_ok=True)

    def _list(self, model_id: str) -> list[tuple[SavedPath, SavedInfo]]:
        weights = list[tuple[SavedPath, SavedInfo]]()
        for kind in KINDS:
            folder = self.model(model_id) / kind
            for child in folder.iterdir() if folder.is_dir() else []:
                path = SavedPath(model_id, kind, child.name)
                if _NAME.fullmatch(child.name) and not child.name.endswith(OLD):
                    with contextlib.suppress(UnknownIdError):  # just deleted, or being written
                        weights.append((path, self.saved_info(path)))
        return sorted(weights, key=lambda item: (item[1].created, str(item[0])))


def _write_bytes(path: Path, data: bytes) -> None:
    """Write a file completely or not at all. A killed process loses nothing; a power cut may, as the disk is not waited for."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".tmp-{path.name}")
    temporary.write_bytes(data)
    os.replace(temporary, path)
