"""A reward as one writes it: `0.5*math within 0..1 if format and mine.py:short`.

    SPEC = [WEIGHT*] NAME [*WEIGHT] [within LOW..HIGH] [if NAME [and NAME ...]]

A name may hold a pattern, which may hold anything: what looks like the end of a spec is the end, and never a part of the pattern. A
pattern that really ends so goes into brackets: `format:(?:a*2)`, `format:x[ ]if math`.
"""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass

from policygrad.errors import ConfigError

_NUMBER = r"[+-]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?"
_BEFORE = re.compile(rf"\s*({_NUMBER})\s*\*\s*(?=\S)")
_AFTER = re.compile(
    rf"(?<!\\)((?:\\\\)*)\s*\*\s*({_NUMBER})\s*\Z"
)  # a star behind a backslash is a letter of the pattern
_WITHIN = re.compile(rf"\s+within\s+({_NUMBER})?\.\.({_NUMBER})?\s*\Z")
_IF, _AND = re.compile(r"\s+if\s+"), re.compile(r"\s+and\s+")
_BRACKETS = "a pattern that ends so goes into brackets, format:(?:…)"
Known = Callable[[str], bool]
"""Whether a text may be the name of a reward; nothing is imported for that."""


@dataclass(frozen=True)
class Spec:
    """What a text says of a reward."""

    name: str
    weight: float = 1.0
    low: float = -math.inf
    high: float = math.inf
    gates: tuple[str, ...] = ()
    """Names of the rewards without which it does not count."""

    @property
    def names(self) -> tuple[str, ...]:
        """Of all functions that it takes."""
        return (self.name, *self.gates)

    @property
    def plain(self) -> bool:
        """Whether the function's own value is what counts."""
        return not self.gates and self.low == -math.inf and self.high == math.inf

    @property
    def title(self) -> str:
        """What it is called: all of it but its weight."""
        low, high = ("" if math.isinf(end) else f"{end:g}" for end in (self.low, self.high))
        within = f" within {low}..{high}" if low or high else ""
        return self.name + within + (f" if {' and '.join(self.gates)}" if self.gates else "")


def parse(text: str, known: Known) -> Spec:
    """Raises ConfigError for two weights, bounds that bound nothing, and gates with weights or gates of their own."""
    rest, gates = _gates(text.strip(), known)
    weights = []
    if found := _BEFORE.match(rest):
        rest, weights = rest[found.end() :], [float(found[1])]
    rest, after = _without(_AFTER, rest)
    rest, within = _without(_WITHIN, rest)
    if within and not after:
        rest, after = _without(_AFTER, rest)
    if after:
        rest, weights = rest + after[1], [*weights, float(after[2])]
    if len(weights) > 1:
        raise ConfigError(
            f"reward {text!r} has two weights, {weights[0]:g} and {weights[1]:g}: leave one away; {_BRACKETS}"
        )
    low, high = _bounds(text, within[1], within[2]) if within else (-math.inf, math.inf)
    return Spec(rest.strip(), weights[0] if weights else 1.0, low, high, gates)


def _gates(text: str, known: Known) -> tuple[str, tuple[str, ...]]:
    """(the text before them, the names): the first `if` behind which a reward is named."""
    for found in _IF.finditer(text):
        behind = text[found.end() :].strip()
        if not _begins(behind, known):
            continue
        names = _split(behind, known)
        for name in names:
            if _AFTER.search(name) or _BEFORE.match(name) or _WITHIN.search(name) or _splits(_IF, name, known):
                raise ConfigError(
                    f"reward {text!r}: a gate, {name!r}, holds or it does not, so it has no weight, bounds or gate of its own: "
                    f"write `NAME if GATE and GATE`; {_BRACKETS}"
                )
        return text[: found.start()], names
    return text, ()


def _split(text: str, known: Known) -> tuple[str, ...]:
    """`NAME and NAME` as names."""
    cuts = _splits(_AND, text, known)
    starts, ends = [0, *(end for _, end in cuts)], [*(start for start, _ in cuts), len(text)]
    return tuple(text[start:end].strip() for start, end in zip(starts, ends, strict=True))


def _splits(word: re.Pattern[str], text: str, known: Known) -> list[tuple[int, int]]:
    return [found.span() for found in word.finditer(text) if _begins(text[found.end() :].strip(), known)]


def _begins(text: str, known: Known) -> bool:
    """Whether a reward is named here, be it with a weight that it may not have."""
    text, _ = _without(_WITHIN, _without(_AFTER, _BEFORE.sub("", text, count=1))[0])
    text, _ = _without(_AFTER, text)
    return known(text) or known(_AND.split(text)[0])


def _without(end: re.Pattern[str], text: str) -> tuple[str, re.Match[str] | None]:
    found = end.search(text)
    return (text[: found.start()], found) if found else (text, None)


def _bounds(text: str, low: str | None, high: str | None) -> tuple[float, float]:
    least, most = float(low or -math.inf), float(high or math.inf)
    if not least < most or (low is None and high is None):
        raise ConfigError(f"reward {text!r}: within LOW..HIGH needs LOW below HIGH, or one of them: within ..1")
    return least, most
