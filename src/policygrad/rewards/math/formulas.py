"""Comparison of formulas by math-verify, which is imported here alone, when it is used; in any thread."""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import re
import select
import subprocess
import sys
import threading
from functools import lru_cache
from typing import Any

from policygrad.errors import ConfigError, install_command
from policygrad.rewards.workers.limits import raise_oom_score
from policygrad.utils.child_environment import filter_environment
from policygrad.utils.processes import python_command

PARSE_TIMEOUT = 3  # seconds, an integer; with the comparison's it stays within a pool's default timeout of 10 s
COMPARISON_TIMEOUT = 10.0  # seconds of a comparison in a process of its own, where the alarms did not get through
_START_TIMEOUT = 120.0  # seconds until that process has imported math-verify
# Parsing these computes what fills the machine: a tower of powers, a huge exponent or factorial. Anything else that takes long is
# stopped by math-verify's alarm or, where that does not get through, by the pool's timeout.
_COSTLY = re.compile(
    r"\d[\s)}]*(?:\^|\*\*)[\s{(]*-?\d[\d.]*[\s)}]*(?:\^|\*\*)|(?:\^|\*\*)[\s{(]*[-+]?\d{5,}|\d{5,}[\s)}]*!|!\s*[)}\]]*\s*!"
)


def compare_formulas(reference: str, given: str) -> bool:
    """Return whether math-verify takes two LaTeX formulas, without delimiters, to be equal; False for what it cannot parse.

    math-verify limits its time by SIGALRM, which works only in a process's main thread, such as a reward worker's. In any other
    thread, such as one that samples ahead of the learner, the comparison is made by a process beside this one.

    Raises:
        TimeoutError: That process took longer than COMPARISON_TIMEOUT.
    """
    if _COSTLY.search(given):
        return False
    if threading.current_thread() is threading.main_thread():
        return compare_here(reference, given)
    return _COMPARER(reference, given)


def check_math_verify_installed() -> None:
    """Raise ConfigError, with the remedy, where math-verify is missing."""
    if importlib.util.find_spec("math_verify") is None:
        raise ConfigError(
            f"reward 'math' needs the package math-verify: {install_command('math')}; for answers that are plain "
            "numbers, 'gsm8k' works without it"
        )


def compare_here(reference: str, given: str) -> bool:
    """Compare in this thread, the main one."""
    import math_verify
    import sympy

    expected, parsed = _parse_formula(reference), _parse_formula(given)
    if not expected or not parsed:
        return False
    both = isinstance(expected[0], sympy.Expr) and isinstance(parsed[0], sympy.Expr)
    if both and expected[0].free_symbols != parsed[0].free_symbols:  # not equal; simplifying the difference costs most
        return False
    return bool(math_verify.verify(list(expected), list(parsed), timeout_seconds=PARSE_TIMEOUT))


@lru_cache(maxsize=1024)  # a group of completions shares its reference
def _parse_formula(text: str) -> tuple[Any, ...]:
    """Parse all of a text as one formula: math-verify's search for expressions in a text would take one of several numbers."""
    import math_verify

    formula = (math_verify.LatexExtractionConfig(),)
    return tuple(math_verify.parse(f"${text}$", extraction_config=formula, parsing_timeout=PARSE_TIMEOUT))


# A process that compares for the threads of this one: a line of JSON with two formulas in, a line with true or false out.

_BOOT = "from policygrad.rewards.math.formulas import serve_comparisons; serve_comparisons()"


def serve_comparisons() -> None:
    """Answer the process that started this one, until it closes standard input."""
    raise_oom_score()
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what a library prints is no answer
    for line in sys.stdin:
        try:
            equal = compare_here(*json.loads(line))
        except Exception:  # as a reward worker would report it, without its text
            equal = None
        print(json.dumps(equal), file=answers, flush=True)


class _Comparer:
    """The process, which the first comparison starts; comparisons of several threads are made one after the other."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self._owner = 0  # id of the process that started it: a fork has a copy of the handle

    def __call__(self, reference: str, given: str) -> bool:
        with self._lock:
            if self._process is None or self._owner != os.getpid() or self._process.poll() is not None:
                self._owner, self._process = os.getpid(), _start_process()
                self._ask(self._process, "1", "1", _START_TIMEOUT)
            answer = self._ask(self._process, reference, given, COMPARISON_TIMEOUT)
        if not isinstance(answer, bool):
            raise ValueError(f"math-verify failed on {given[:100]!r} against {reference[:100]!r}")
        return answer

    def _ask(self, process: subprocess.Popen[str], reference: str, given: str, timeout: float) -> Any:
        """Return its answer. Without one it is killed, and the next comparison starts another."""
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            print(json.dumps([reference, given]), file=process.stdin, flush=True)
            if select.select([process.stdout], [], [], timeout)[0]:
                return json.loads(process.stdout.readline())
            error: Exception = TimeoutError(
                f"comparing {given[:100]!r} with {reference[:100]!r} took more than {timeout:g} seconds"
            )
        except (OSError, ValueError):
            error = RuntimeError(f"the process that compares formulas ended while it compared {given[:100]!r}")
        self._process = None
        process.kill()
        process.communicate()  # waits for it and closes its pipes
        raise error


def _start_process() -> subprocess.Popen[str]:
    return subprocess.Popen(
        python_command(_BOOT),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,  # Ctrl-C is for the trainer
        env=filter_environment(os.environ, ()),
    )


_COMPARER = _Comparer()
