"""The right answers of a task's row, in the forms that data sets have them."""

from typing import Any

from policygrad.rewards.math.extraction import after_hashes, in_box


def references(answer: Any) -> tuple[str, ...]:
    """The answers that count as right: of a text or a number one, of a list each; what is null or empty is none.

    A worked solution stands for what follows its last `####` (GSM8K), or, over several lines, for its last `\\boxed{…}` (MATH).
    """
    if isinstance(answer, (list, tuple)):
        return tuple(text for each in answer for text in references(each))
    text = "" if answer is None else str(answer).strip()
    if "####" in text:
        text = (after_hashes(text) or "").strip()
    elif r"\boxed{" in text:
        text = (in_box(text) or text).strip()
    return (text,) if text else ()
