"""What an estimate of memory has to know of a run's model and prompts: counted on them, or stored for the embedded model.

Counting loads transformers, the architecture and the task, which takes seconds. Of the embedded model on the embedded tasks, with
completions of the usual length, `embedded_memory.json` holds the result, which `scripts/make_docs.py` writes.
"""

from __future__ import annotations

import json
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from policygrad.errors import PolicygradError
from policygrad.models.loading import DTYPES, auto_class, read_config, resolve_model
from policygrad.models.lora_config import adapter_base, read_lora
from policygrad.planning.model_sizes import EMBEDDED_MODEL
from policygrad.rewards.workers.limits import get_resident_bytes
from policygrad.training.config.run import Run, RunOptions
from policygrad.training.memory_limits import count_segment_bytes

STORED_FILE = Path(__file__).with_name("embedded_memory.json")
NUM_PROBE_PROMPTS = 64  # prompts whose mean length stands for all
LIBRARY_BYTES = 168 * 2**20
"""Memory that transformers, the model's architecture and reasoning-gym add to a process with torch when a run loads them: 166 to
172 MiB were measured."""


@dataclass(frozen=True)
class ModelFacts:
    """A run's model and prompts in numbers."""

    parameters: int
    adapters: int | None  # parameters of adapters, if they alone train
    outer_parameters: int  # in embeddings and output head
    vocabulary: int
    cache_numbers: int  # of a token in the key-value cache
    context_length: int | None
    prompt: int  # mean tokens
    longest_prompt: int
    libraries: int  # bytes
    micro_tokens: int
    saved_bytes: int  # by one micro-batch, for its backward pass, and by what it follows


def probe_model(run: Run, device: str) -> ModelFacts:
    """Return the numbers of a run's model.

    Raises:
        PolicygradError: Something cannot be loaded, or the architecture cannot be counted.
    """
    return load_stored_facts(run, device) or count_model(run, device)


def load_stored_facts(run: Run, device: str) -> ModelFacts | None:
    """Return the stored numbers of the embedded model; None for another one, or if something changes them."""
    usual = RunOptions()
    changing = (
        "tokenizer",
        "template_options",
        "row_map",
        "skip_bad_rows",
        "decontaminate",
        "fetch_images",
        "eval_data",
    )
    if run.model != EMBEDDED_MODEL or run.learner.adapters is not None:
        return None
    if any(getattr(run, name) != getattr(usual, name) for name in changing):
        return None
    stored = json.loads(STORED_FILE.read_text(encoding="utf-8"))
    prompts = stored["prompts"].get(run.task)
    tokens = run.learner.resolve_micro_tokens(device, stored["model"]["parameters"])
    samples, completion = run.effective_samples_per_prompt, run.sampling.max_tokens
    if prompts is None:
        return None
    saved = stored["saved_bytes"].get(name_case(run.learner.dtype, tokens, prompts["prompt"], completion, samples))
    if saved is None:
        return None
    missing = 0 if "transformers.modeling_utils" in sys.modules else LIBRARY_BYTES
    libraries = get_resident_bytes() + missing if device == "cpu" else 0
    return ModelFacts(
        **stored["model"], **prompts, adapters=None, libraries=libraries, micro_tokens=tokens, saved_bytes=saved
    )


def name_case(dtype: str, tokens: int, prompt: int, completion: int, samples: int) -> str:
    """Return the name under which what a micro-batch saves is stored."""
    return f"{dtype}, {tokens} tokens, {prompt}+{completion}, groups of {samples}"


def count_model(run: Run, device: str) -> ModelFacts:
    """Count on the architecture and on the task's first prompts.

    Raises:
        PolicygradError: Something cannot be loaded, or the architecture cannot be counted.
    """
    from transformers import AutoConfig

    from policygrad.learners.local.activation_memory import saved_activation_bytes
    from policygrad.models.adapters import add_adapters
    from policygrad.tasks.registry import load_task
    from policygrad.training.policy_setup import load_policy_tokenizer
    from policygrad.training.setup import load_row_options

    if not isinstance(run.model, str):
        raise PolicygradError("the model is an object, whose memory is already in use")
    path = resolve_model(run.model)
    lora = run.learner.adapters or (read_lora(path) if adapter_base(path) is not None else None)
    read_config(adapter_base(path) or path, f"the model {run.model!r}")
    row_options = load_row_options(run.row_map, run.skip_bad_rows, run.decontaminate, fetch_images=run.fetch_images)
    task = load_task(run.task, seed=run.seed, eval_data=run.eval_data, row_options=row_options)
    trust = run.trust_remote_code
    config = AutoConfig.from_pretrained(adapter_base(path) or path, trust_remote_code=trust)
    with torch.device("meta"):
        model: Any = auto_class(config.to_dict()).from_config(config, trust_remote_code=trust)
        parameters = sum(p.numel() for p in model.parameters())
        outer = {*model.get_input_embeddings().parameters(), *model.get_output_embeddings().parameters()}
        adapters = None
        if lora is not None:
            adapters = sum(p.numel() for p in add_adapters(model, lora).parameters() if p.requires_grad)
    tokenizer = load_policy_tokenizer(run.model, run.tokenizer, model, trust, run.template_options)
    completion, samples = run.sampling.max_tokens, run.effective_samples_per_prompt
    examples = [task.train_example(i) for i in range(NUM_PROBE_PROMPTS)]
    lengths = [len(tokenizer.encode(e.prompt, completion, tools=e.tools).ids) for e in examples]
    prompt, libraries = round(statistics.fmean(lengths)), get_resident_bytes() if device == "cpu" else 0
    dtype, tokens = DTYPES[run.learner.dtype], run.learner.resolve_micro_tokens(device, parameters)
    text = config.get_text_config()  # of a model that sees, without the vision tower's
    behind = (
        0 if run.learner.compiles else max(0, prompt + completion - tokens)
    )  # a pass of a text that is read in segments
    leaves = count_segment_bytes(config, dtype.itemsize) if behind else None
    try:
        if leaves is None:
            saved = saved_activation_bytes(text, dtype, tokens, prompt, completion, samples, lora)
        else:
            saved = saved_activation_bytes(text, dtype, tokens, 1, tokens - 1, 1, lora) + int(leaves * behind)
    except Exception as error:  # an architecture may fail in any way on tensors without memory
        reason = str(error).partition("\n")[0][:200]
        raise PolicygradError(f"memory cannot be counted on {type(model).__name__}: {reason}") from error
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return ModelFacts(
        parameters=parameters,
        adapters=adapters,
        outer_parameters=sum(p.numel() for p in outer),
        vocabulary=int(model.get_output_embeddings().weight.shape[0]),
        cache_numbers=int(2 * text.num_hidden_layers * heads * width),
        context_length=tokenizer.context_length,
        prompt=prompt,
        longest_prompt=max(lengths),
        libraries=libraries,
        micro_tokens=tokens,
        saved_bytes=saved,
    )
