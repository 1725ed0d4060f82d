"""Formulas compared by value; the one file that imports math-verify, and only when it is used."""

import importlib.util
import logging
import re
from functools import lru_cache
from typing import Any

from policygrad.errors import ConfigError, install_command

PARSE_LIMIT = 3  # seconds, whole ones; with the comparison's it stays within a pool's default budget of 10 s
_TOWER = re.compile(r"\d[\s)}]*(?:\^|\*\*)[\s{(]*-?\d[\d.]*[\s)}]*(?:\^|\*\*)")
_HUGE = re.compile(r"(?:\^|\*\*)[\s{(]*[-+]?\d{5,}")
_FACTORIAL = re.compile(r"\d{5,}[\s)}]*!|!\s*[)}\]]*\s*!")


def check_installed() -> None:
    """Raise ConfigError with the way out when math-verify is missing."""
    if importlib.util.find_spec("math_verify") is None:
        raise ConfigError(
            f"reward 'math' needs the package math-verify: {install_command('math')}; for answers that are plain "
            "numbers, 'gsm8k' does without"
        )


def prepare() -> None:
    """Import math-verify (about half a second) before the first sample's clock runs."""
    check_installed()
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    equal_formulas(r"\frac{1}{2}", "0.5")


def costly(text: str) -> bool:
    """Whether reading a text could compute what fills the machine: a tower of powers, a huge exponent or factorial.

    Only what is known to do harm is refused here; what else takes long is cut off by math-verify's alarm and, where that does
    not come through, by the pool's budget.
    """
    return any(pattern.search(text) for pattern in (_TOWER, _HUGE, _FACTORIAL))


def equal_formulas(right: str, said: str) -> bool:
    """Whether math-verify takes two LaTeX formulas, without delimiters, for equal; False for what it cannot read.

    It limits its time by SIGALRM, so this is for a process's main thread, as a reward worker's is.
    """
    if costly(said):
        return False
    import math_verify

    gold, found = list(_parsed(right)), _parse(said)
    if not gold or not found or _of_other_variables(gold[0], found[0]):
        return False
    return bool(math_verify.verify(gold, found, timeout_seconds=PARSE_LIMIT))


def _of_other_variables(right: Any, said: Any) -> bool:
    """Whether two expressions differ in their variables: they are not equal, and simplifying the difference costs most of all."""
    import sympy

    both = isinstance(right, sympy.Expr) and isinstance(said, sympy.Expr)
    return both and right.free_symbols != said.free_symbols


@lru_cache(maxsize=1024)
def _parsed(text: str) -> tuple[Any, ...]:
    """A reference, which a group of completions shares."""
    return tuple(_parse(text))


def _parse(text: str) -> list[Any]:
    """As one formula: math-verify's other way, looking for expressions in the text, would take one of several numbers."""
    import math_verify

    formula = (math_verify.LatexExtractionConfig(),)
    return list(math_verify.parse(f"${text}$", extraction_config=formula, parsing_timeout=PARSE_LIMIT))
