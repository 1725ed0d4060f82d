"""The one rule that separates held-out prompts from training prompts."""

from hashlib import sha256

HELD_OUT_ONE_IN = 16


def is_held_out(prompt: str) -> bool:
    """Say whether a question belongs to the held-out split.

    The rule looks only at the question's own text (without the newline that
    closes a model prompt), so the split needs no list on disk, does not depend
    on seeds or on the order of generation, and is the same for the text that
    the base model was trained on, for the RL prompts and for evaluation.
    """
    return int(sha256(prompt.encode("utf-8")).hexdigest(), 16) % HELD_OUT_ONE_IN == 0
