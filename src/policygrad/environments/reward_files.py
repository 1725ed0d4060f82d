"""Rewards that a program or a verifier writes to a file: a number, or a JSON object with `reward`, and what else is in it."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from policygrad.rewards.workers.messages import MAX_ABS_REWARD, MAX_FEEDBACK, replace_control_characters, to_number
from policygrad.rollout.environment import is_finite_number
from policygrad.utils.filesystem import parse_json

MAX_BYTES = 64 * 1024
"""Larger reward files are refused."""
MAX_METRICS, MAX_NAME = 64, 100
_SHOWN = 60  # characters of a file that a message shows


@dataclass(frozen=True)
class WrittenReward:
    """What a reward file says."""

    reward: float
    feedback: str = ""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Its other numbers, by name."""


def read_reward_file(top: Path, name: str) -> WrittenReward:
    """Read the reward file `name` below the folder `top`, where a program may have put anything.

    Raises:
        FileNotFoundError: It is not there.
        ValueError: It is a link or no file, is reached by a link, is too large, or has no reward.
    """
    try:
        data = read_below(top, name, MAX_BYTES)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise ValueError(f"its reward file {name} cannot be read: {error.strerror}") from error
    return parse_reward(data, name)


def parse_reward(data: bytes, name: str) -> WrittenReward:
    """Return what the bytes of a reward file say. Raises ValueError, with the beginning of it, where that is no reward."""
    text = data.decode("utf-8", "replace").strip()
    if not text.startswith("{"):
        try:
            number, _ = to_number(float(text))
        except ValueError:
            number = None
        if number is None:
            raise ValueError(
                f"its reward file {name} has {_quote(text)}, which is no finite number up to {MAX_ABS_REWARD:g} in size"
            )
        return WrittenReward(number)
    try:
        values = parse_json(data)
    except ValueError as error:
        raise ValueError(f"its reward file {name} is no JSON: {error}") from error
    if "reward" not in values:
        names = replace_control_characters(", ".join(values)[:MAX_NAME]) or "nothing"
        raise ValueError(f"its reward file {name} has no field reward (it has {names})")
    reward, _ = to_number(values["reward"])
    if reward is None:
        raise ValueError(
            f"its reward file {name} has the reward {_quote(repr(values['reward']))}, which is no finite number"
        )
    feedback = values.get("feedback") or ""
    if not isinstance(feedback, str):
        raise ValueError(f"its reward file {name} has a feedback that is no text")
    feedback = replace_control_characters(feedback.encode("utf-8", "replace").decode()[:MAX_FEEDBACK])
    return WrittenReward(reward, feedback, _select_metrics(values))


def _select_metrics(values: Mapping[str, Any]) -> dict[str, float]:
    """Return the other numbers, those beyond the limits left out."""
    others = {name: value for name, value in values.items() if name not in ("reward", "feedback")}
    numbers = {
        name: float(value)
        for name, value in others.items()
        if is_finite_number(value) and 0 < len(name) <= MAX_NAME and name.isprintable()
    }
    return dict(list(numbers.items())[:MAX_METRICS])


def read_below(top: Path, name: str, max_bytes: int) -> bytes:
    """Read a regular file below a folder, following no link on the way to it.

    Raises:
        FileNotFoundError: It is not there.
        OSError: It is a link, also a hard one, a pipe, a device or a folder, or larger than `max_bytes`; or a link leads to it.
    """
    *folders, last = PurePosixPath(name).parts
    current = os.open(top, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        for folder in folders:
            below = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=current)
            os.close(current)
            current = below
        file = os.open(last, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=current)
    finally:
        os.close(current)
    with os.fdopen(file, "rb") as stream:
        status = os.fstat(stream.fileno())
        if not stat.S_ISREG(status.st_mode) or status.st_nlink != 1:
            raise OSError(errno.EINVAL, "it is not a regular file of its own", name)
        data = stream.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise OSError(errno.EFBIG, f"it is larger than {max_bytes:,} bytes", name)
    return data


def _quote(text: str) -> str:
    return repr(replace_control_characters(text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"))
