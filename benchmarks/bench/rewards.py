"""The rewards, for both sides alike: the standard library only."""

from __future__ import annotations

import re
import zlib
from collections.abc import Sequence
from typing import Any

_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


def exact(prompts: Any, completions: Sequence[str], answer: Sequence[str], **_: Any) -> list[float]:
    """1 where what stands between <answer> and </answer> is the answer, without them the whole completion."""
    said = [(_ANSWER.findall(text) or [text])[-1] for text in completions]
    return [float(text.strip() == str(right).strip()) for text, right in zip(said, answer, strict=True)]


def spread(prompts: Any, completions: Sequence[str], **_: Any) -> list[float]:
    """In [0, 1), another one for every text: a model that knows nothing has all of its completions to learn from."""
    return [zlib.crc32(text.encode()) / 2**32 for text in completions]
