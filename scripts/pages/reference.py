"""docs/reference/*.md: every public name of the package on one of a few pages, and an index of them."""

from __future__ import annotations

import policygrad
from pages.described import section
from pages.markdown import page, table
from policygrad.algorithms import ALGORITHMS
from policygrad.core.validation import ROLES
from policygrad.training.base_trainer import TrainingResult

PAGES = {
    "training": (
        "Training",
        "A run, its options, and what follows it. On the command line an option is its field with dashes, "
        "`--learner.micro-tokens`; in a file of options a key in a table, `micro_tokens` in `[learner]`.",
        "train Run RunOptions SamplingParams SamplerConfig LearnerConfig OptimizerConfig RewardConfig EvaluationConfig "
        "CheckpointConfig GuardConfig Result get_algorithm Trainer Callback Tracker RunInfo evaluate collect",
    ),
    "supervised": (
        "Fine-tuning and reward models",
        "Demonstrations and preferences, before reinforcement: [the whole path](../rlhf.md).",
        "train_sft SFTConfig train_reward_model RewardModelConfig SupervisedGuardConfig",
    ),
    "equation": (
        "The equation",
        "What the gradient is made of, on plain tensors. [Your own algorithm](../your-own-algorithm.md) puts parts into it.",
        "Algorithm Batch Forward surrogate objective gate_weight",
    ),
    "advantages": ("Advantages", "Links of the chain that makes Ψ: an algorithm's `advantage`.", "advantage"),
    "gates": (
        "Ratios, gates, corrections",
        "What the importance ratio lets through: an algorithm's `ratio`, `gate` and `corrections`.",
        "ratio gate corrections",
    ),
    "terms": (
        "Averages and terms",
        "How tokens are averaged, and what is added: an algorithm's `aggregation` and `terms`.",
        "aggregation terms",
    ),
    "filters": (
        "Filters and shaping",
        "Which answers take part, and what they are worth: an algorithm's `filters` and `shaping`.",
        "filters shaping",
    ),
    "steps": (
        "Steps, critics, references",
        "How the weights move, and the models besides the policy: `update_rule`, `critic`, `reward_model`, `reference`.",
        "update_rule critic reward_model reference GradientProblem CurvatureProblem AdaptiveProblem",
    ),
    "roles": (
        "What a part may declare",
        "The bases of an algorithm's parts. A part of your own inherits one and overrides what is different.",
        "Part Advantage Ratio Gate Correction Aggregation Term LossTerm Shaping Filter UpdateRule",
    ),
    "rollouts": (
        "Tasks, rewards, environments",
        "What is asked, what plays, what judges, and what comes of it.",
        "load_task Example reward RewardPool Environment SingleTurn ToolUse ToolCall GymnasiumText OpenEnv TextArena Verifiers "
        "Action Observation Step Rollouter Rollout Trajectory Segment",
    ),
    "models": (
        "Samplers and learners",
        "What draws completions, and what owns the weights. [One file each](../extending.md), if they are yours.",
        "Sampler Request Generation LocalSampler EngineSampler PublishedWeights Learner LocalLearner "
        "make_local_learner load_reference clone_model",
    ),
    "errors": (
        "Errors",
        "Every refusal that is meant for you is a `PolicygradError`. [What to do about which](../troubleshooting.md).",
        "PolicygradError ConfigError DataError ModelError RewardError EngineError CheckpointError RunError HangError "
        "NumericsError",
    ),
}
"""File -> its title, what stands on top, and its names; a field of an algorithm stands for all parts that go into it."""
OTHERS = {"Result": TrainingResult}
"""What public names hold or return, by its own."""
CONSTANTS = {"ALGORITHMS", *(name.upper() for name in ALGORITHMS)}
"""Public names with pages of their own."""


def reference_pages() -> dict[str, str]:
    """File name -> text, with the index.

    Raises:
        SystemExit: a public name is on no page, or on two.
    """
    named = {file: _names(words) for file, (_, _, words) in PAGES.items()}
    every = [name for there in named.values() for name in there]
    odd = {*policygrad.__all__, *OTHERS} ^ CONSTANTS ^ {*every} | {name for name in every if every.count(name) > 1}
    if odd:
        raise SystemExit(f"PAGES of {__file__} must have each of {', '.join(sorted(odd))} once")
    return {
        "index.md": _index(named),
        **{
            f"{file}.md": page(f"# {title}", top, *map(_section, named[file]))
            for file, (title, top, _) in PAGES.items()
        },
    }


def _section(name: str) -> str:
    return section(name, OTHERS[name] if name in OTHERS else getattr(policygrad, name))


def _names(words: str) -> list[str]:
    return [name for word in words.split() for name in (_parts(word) if word in ROLES else [word])]


def _parts(place: str) -> list[str]:
    """What goes into a field of an algorithm, but for the base of its role."""
    kinds = ((name, getattr(policygrad, name)) for name in policygrad.__all__)
    return [
        name
        for name, kind in kinds
        if isinstance(kind, type) and issubclass(kind, ROLES[place].bases) and kind.__module__ != "policygrad.core.base"
    ]


def _index(named: dict[str, list[str]]) -> str:
    rows = [
        (f"[{PAGES[file][0]}]({file}.md)", " ".join(f"[`{n}`]({file}.md#{n.lower()})" for n in there))
        for file, there in named.items()
    ]
    constants = " ".join(f"[`{a.name.upper()}`](../algorithms/{a.name}.md)" for a in ALGORITHMS.values())
    return page(
        "# Reference",
        "`import policygrad as pg` knows all of these names, and imports what stands behind one when it is first used.",
        table(("page", "names"), rows),
        f"`pg.ALGORITHMS`, a dict by name, holds an [`Algorithm`](equation.md#algorithm) each:\n\n{constants}",
        "The command line's options are the fields of [`Run`](training.md#run): `policygrad train --help` lists them, with the "
        "parts of the algorithm at hand. What a run measures is a page of its own: [metrics](../metrics.md).",
    )
