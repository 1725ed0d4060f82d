"""Right answers to the problems of the embedded tasks, worked out the way the embedded model works: what a demonstration shows."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any


def plain_answer(entry: Mapping[str, Any]) -> str | None:
    """The reference answer of a reasoning-gym item where a reward looks for it; None where many answers are right."""
    return None if entry["answer"] is None else f"<answer>{entry['answer']}</answer>"


def worked_answer(dataset: str, entry: Mapping[str, Any]) -> str | None:
    """The same after its steps (tens and ones apart, the variable's term first, the word from its end), where they are known."""
    answer, steps = plain_answer(entry), _STEPS.get(dataset)
    return answer if answer is None or steps is None else f"Step by step: {', '.join(steps(entry))}. {answer}"


def _sum(entry: Mapping[str, Any]) -> list[str]:
    """90 - 10 = 80, 2 - 8 = -6: tens and ones, each added up."""
    first, *rest = entry["metadata"]["expression"].split()
    signs, numbers = rest[::2], [int(n) for n in (first, *rest[1::2])]
    said = []
    for digits in ([n - n % 10 for n in numbers], [n % 10 for n in numbers]):
        total = digits[0] + sum(n if sign == "+" else -n for sign, n in zip(signs, digits[1:], strict=True))
        left = " ".join([str(digits[0]), *(f"{sign} {n}" for sign, n in zip(signs, digits[1:], strict=True))])
        said.append(f"{left} = {total}")
    return said


def _equation(entry: Mapping[str, Any]) -> list[str]:
    """7*q = 35, q = 5: the variable's term, then the variable."""
    variable, solution = entry["metadata"]["variable"], int(entry["answer"])
    found = re.search(rf"(\d+)\*{variable}\b", entry["metadata"]["equation"])
    term = [f"{found.group(1)}*{variable} = {int(found.group(1)) * solution}"] if found else []
    return [*term, f"{variable} = {solution}"]


def _spelled(entry: Mapping[str, Any]) -> list[str]:
    """n-i-c-u-m: the word from its end."""
    return ["-".join(entry["answer"])]


_STEPS = {"chain_sum": _sum, "simple_equations": _equation, "spell_backward": _spelled}
