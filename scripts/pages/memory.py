"""The memory of the embedded model on the embedded tasks, which a dry run prints without loading either."""

from __future__ import annotations

from dataclasses import asdict
from itertools import product

from transformers import AutoConfig

import policygrad as pg
from pages.commands import format_json
from policygrad.algorithms import ALGORITHMS
from policygrad.learners.local.activation_memory import saved_activation_bytes
from policygrad.models.loading import DTYPES, resolve_model
from policygrad.planning.model_sizes import EMBEDDED_MODEL
from policygrad.tasks import EMBEDDED
from policygrad.training.memory_probe import count_model, name_case

MODEL = ("parameters", "outer_parameters", "vocabulary", "cache_numbers", "context_length")
PROMPTS = ("prompt", "longest_prompt")
DEVICES = (("fp32", "cpu"), ("bf16", "cuda"))
"""The precision that a run chooses by itself on a device."""


def embedded_memory_file() -> str:
    """Return the content of training/embedded_memory.json."""
    runs = {task: pg.Run(task=task, learner=pg.LearnerConfig(dtype="fp32")) for task in EMBEDDED}
    facts = {task: asdict(count_model(run, "cpu")) for task, run in runs.items()}
    model = next(iter(facts.values()))
    config = AutoConfig.from_pretrained(resolve_model(EMBEDDED_MODEL))
    completion = pg.Run().sampling.max_tokens
    groups = sorted({a.samples_per_prompt for a in ALGORITHMS.values()})
    saved = {}
    for prompt, (dtype, device), group in product(sorted({f["prompt"] for f in facts.values()}), DEVICES, groups):
        tokens = pg.LearnerConfig(dtype=dtype).resolve_micro_tokens(device, model["parameters"])
        case = name_case(dtype, tokens, prompt, completion, group)
        saved[case] = saved_activation_bytes(config, DTYPES[dtype], tokens, prompt, completion, group)
    content = {
        "model": {name: model[name] for name in MODEL},
        "prompts": {task: {name: f[name] for name in PROMPTS} for task, f in facts.items()},
        "saved_bytes": saved,
    }
    return format_json(content) + "\n"
