"""Ladders: a method taken apart, its parts added one at a time in the order in which its paper did."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from policygrad.compare.words import layered


@dataclass(frozen=True)
class Rung:
    """A row of a ladder."""

    label: str
    change: tuple[str, ...]
    """Options of `policygrad train` that it adds to the rung below, or sets anew."""
    says: str
    """What it adds, in words."""
    published: str = ""
    """The figure that the paper gives for it."""


@dataclass(frozen=True)
class Ladder:
    """A method's parts in order."""

    title: str
    source: str
    setting: tuple[str, ...]
    """Options that all rungs share: a task on which the parts matter."""
    why: str
    """Why this setting, and in what it differs from the paper's."""
    base: str
    """The algorithm that the ladder stands on."""
    rungs: tuple[Rung, ...]

    def rows(self) -> list[tuple[str, tuple[str, ...], str]]:
        """(label, words of `policygrad train`, what is added) of every rung, each with all that is below it."""
        words: tuple[str, ...] = ()
        found = []
        for rung in self.rungs:
            words = layered(words, rung.change)
            figure = f"; published: {rung.published}" if rung.published else ""
            found.append((rung.label, (self.base, *words), rung.says + figure))
        return found

    def to_dict(self) -> dict[str, Any]:
        return {"title": self.title, "source": self.source, "why": self.why}


LADDERS: dict[str, Ladder] = {
    "dapo": Ladder(
        title="DAPO, part by part",
        source="Yu et al. 2025 (DAPO, arXiv:2503.14476), table 1: AIME 2024, avg@32, Qwen2.5-32B",
        setting=("--task", "embedded_steps", "--max-tokens", "20"),
        why="Answers that the base model works out take 15 to 24 tokens here, and the budget is 20: the more it works "
        "out, the more is cut off, so that how cut-off answers count, and how lengths weigh, matters. The paper's "
        "model is some 45,000 times as large, its budget a thousand times as long. As there (sec. 4.1), a rollout "
        "feeds 16 updates; an update sees 32 answers of 4 prompts here, 512 answers of 32 prompts there. Naive "
        "GRPO is without its KL penalty, which DAPO drops before its ladder begins (sec. 2.3).",
        base="grpo",
        rungs=(
            Rung(
                "naive_grpo",
                ("--algorithm.terms", "none", "--algorithm.step.minibatches", "16"),
                "GRPO, symmetric clip, mean per answer, no KL, 16 updates per rollout",
                "30",
            ),
            Rung(
                "overlong_mask",
                ("--algorithm.filters", "MaskTruncated"),
                "answers that were cut off do not move the policy",
                "36",
            ),
            Rung("clip_higher", ("--algorithm.gate.high", "0.28"), "the upper clip bound 0.28 for 0.2", "38"),
            Rung(
                "soft_penalty",
                ("--algorithm.shaping", "SoftOverlong"),
                "a penalty over the last fifth of the budget",
                "41",
            ),
            Rung("token_mean", ("--algorithm.aggregate", "TokenMean"), "the mean over all tokens of an update", "42"),
            Rung(
                "dynamic_sampling",
                ("--algorithm.filters", "DropNoSpread,MaskTruncated"),
                "all-right and all-wrong groups are replaced: DAPO",
                "50",
            ),
        ),
    )
}
