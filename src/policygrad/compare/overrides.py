"""What a named algorithm needs on the embedded task, whose answers are some ten tokens long, and why."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Override:
    """Options of `policygrad train`, and why the row's own do not suit."""

    options: tuple[str, ...]
    reason: str


OVERRIDES: dict[str, Override] = {
    "distill": Override(
        ("--teacher", "runs/distill/teacher"),
        "it needs a teacher: the one that scripts/measure_distill.py makes, the base model with twice its layers, trained by grpo.",
    ),
    "vapo": Override(
        ("--algorithm.psi.length-adaptive-gae.alpha", "0.5"),
        "λ = max(0, 1 − 1/(α·l)) is 0 up to 20 tokens at the paper's α = 0.05; at 0.5 an answer of 10 tokens has λ = 0.8.",
    ),
    "iterative_grpo": Override(
        ("--algorithm.reference.every", "20"),
        "a run here has fewer rollouts than the default's 100, so that the reference would never be taken anew.",
    ),
    "prorl": Override(
        ("--algorithm.reference.every", "20"),
        "a run here has fewer rollouts than the default's 200, so that reference and optimiser would never be reset.",
    ),
    "grpo_process": Override(
        ("--task", "embedded_steps"),
        "a reward for every step says more only where an answer has several: this task is what of the embedded one does.",
    ),
    "vineppo": Override(
        (
            *("--task", "embedded_steps", "--prompts-per-step", "16", "--samples-per-prompt", "4"),
            *("--evaluation.every", "4"),
        ),
        "a value per step needs answers of several steps, as above; fresh completions of every step's prefix are most of the "
        "tokens, so that fewer answers a step leave as many steps as the others take (and evaluations as often).",
    ),
}
