"""Training prompts that say what a held-out prompt says: the same words, or n of them in a row."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from policygrad.tasks.types import Prompt

_WORD = re.compile(r"\w+|[-+*/^=<>%]")  # 3 + 4 is not 3 * 4
TEMPLATE = 0.1
"""What more than this share of the held-out prompts have in common, and more than one, is how they ask and not what."""


@dataclass(frozen=True)
class Overlap:
    """What held-out prompts say. Case, punctuation but signs of arithmetic, and system messages do not count.

    n-grams of words are what Brown et al. 2020 (GPT-3, arXiv:2005.14165, app. C) look for between training data and benchmarks,
    with n from 8 to 13; what the prompts share as a template is left out here, since every training prompt may have it too.
    """

    n: int
    grams: frozenset[str]
    wholes: frozenset[str]

    @classmethod
    def of(cls, prompts: Iterable[Prompt], n: int) -> Overlap:
        """Of these held-out prompts."""
        said = [_words(prompt) for prompt in prompts]
        often = Counter(gram for words in said for gram in set(_grams(words, n)))
        most = max(1.0, TEMPLATE * len(said))
        return cls(
            n,
            frozenset(gram for gram, count in often.items() if count <= most),
            frozenset(map(" ".join, filter(None, said))),
        )

    def __contains__(self, prompt: Prompt) -> bool:
        """Whether a prompt has the words of a held-out one, or n of them in a row."""
        words = _words(prompt)
        return " ".join(words) in self.wholes or any(gram in self.grams for gram in _grams(words, self.n))


def _words(prompt: Prompt) -> list[str]:
    said = [prompt] if isinstance(prompt, str) else [m["content"] for m in prompt if m["role"] != "system"]
    return _WORD.findall(" ".join(said).casefold())


def _grams(words: list[str], n: int) -> Iterator[str]:
    return (" ".join(words[i : i + n]) for i in range(len(words) - n + 1))
