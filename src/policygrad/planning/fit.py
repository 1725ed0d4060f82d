"""The longest text and the largest group of completions that a device holds, as it is and with more and more savings."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from policygrad.planning.cost_model import SEGMENT_TOKENS, reads_segments, shrink_state
from policygrad.planning.planner import CapacityPlan

MAX_CONTEXT = 2**20  # tokens of the longest text to try, where a model's positions set no limit
MAX_GROUP = 1024  # completions of a prompt
STEP = 64  # tokens to which the longest text is rounded down
DEFAULT_ADAPTERS = 16  # rank of the adapters that are proposed


@dataclass(frozen=True)
class Fit:
    """What a device holds with some savings."""

    option: str  # options of `policygrad plan` that save memory, beside the given ones
    description: str
    context: int  # tokens of the longest text
    group: int  # completions of a prompt that are sampled at once, with the longest text
    group_at_context: int  # the same with texts of the given context; 0 = they do not fit
    plan: CapacityPlan  # of the longest text and its largest group

    def to_dict(self) -> dict[str, Any]:
        names = ("option", "description", "context", "group", "group_at_context")
        return {name: getattr(self, name) for name in names}


def find_fits(plan: CapacityPlan, context: int, micro_tokens: int | None = None) -> list[Fit]:
    """Return what fits with the plan's own layout and with more and more savings; without those with which nothing does.

    Args:
        context: Tokens of the texts for which the largest group is found too.
        micro_tokens: Tokens of a pass, beyond which texts are read in segments; None = texts are read whole, and in segments as a
            saving.
    """
    plan = replace(plan, layout=replace(plan.layout, micro_tokens=micro_tokens or MAX_CONTEXT))
    fits = list[Fit]()
    for option, description, changes in _list_savings(plan, can_cut=micro_tokens is None):
        saving = replace(plan, layout=replace(plan.layout, **changes))
        longest = _find_longest(saving)
        if longest is None:
            continue
        group = _find_group(saving, longest)
        at_context = _find_group(saving, context) if context <= longest else 0
        fits.append(Fit(option, description, longest, group, at_context, _with_texts(saving, longest, group)))
    return fits


def choose_fit(fits: Sequence[Fit], context: int) -> Fit | None:
    """Return the first that holds texts of this context, or else the one with the longest text; None if there is none."""
    for fit in fits:
        if fit.context >= context:
            return fit
    return max(fits, key=lambda fit: fit.context, default=None)


def _list_savings(plan: CapacityPlan, *, can_cut: bool) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Iterate over savings, each with those before it: options of plan, in words, and changes of the layout. Adapters have next to
    no state of the optimizer, so theirs are without savings of it."""
    layout, request = plan.layout, plan.request
    rank, options = layout.adapter_rank or DEFAULT_ADAPTERS, list[str]()
    changes: dict[str, Any] = {}
    on_gpu = request.device.per_node > 1
    yield "", "as it is", {}
    if not layout.checkpointing:
        options.append("--learner.gradient-checkpointing")
        changes["checkpointing"] = True
        yield " ".join(options), "recompute activations", dict(changes)
    if request.shape.has_states and can_cut:  # either of the two
        options, changes = [], {"checkpointing": False}
    shared = max((n for n in range(2, request.device.per_node + 1) if layout.learning_devices % n == 0), default=1)
    if layout.context_parallel == 1 < shared and not request.shape.has_states:  # in place of segments
        text = f"{' '.join(options)} --learner.context-parallel {shared}".strip()
        yield text, f"divide each text between {shared} devices", changes | {"context_parallel": shared}
    if can_cut and reads_segments(request.shape, replace(layout, **changes)):
        tokens = SEGMENT_TOKENS["gpu" if on_gpu else "cpu"]
        cut = changes | {"micro_tokens": tokens}
        yield " ".join([*options, f"--learner.micro-tokens {tokens}"]), "read longer texts in segments", cut
        uncut_layout, cut_layout = replace(layout, **changes), replace(layout, **cut)
        longest_whole, divided = (_find_longest(replace(plan, layout=x)) or 0 for x in (uncut_layout, cut_layout))
        if divided >= longest_whole:  # keys and values with their gradients may take more than what is recomputed
            options, changes = [*options, f"--learner.micro-tokens {tokens}"], cut
    if not layout.only_adapters:
        if layout.optimizer.name == "adamw":
            option, state = shrink_state(layout)
            yield " ".join([*options, option]), "moments in 8 bits", changes | {"optimizer": state}
            if on_gpu and state.offload == "none":
                state = replace(state, offload="always")
                text = "what is left of the optimizer's state in the host's memory"
                yield " ".join([*options, option, "--optimizer.offload"]), text, changes | {"optimizer": state}
        options.append(f"--learner.lora rank={rank}")
        changes |= {"adapter_rank": rank, "optimizer": replace(layout.optimizer, masters="fp32")}
        yield " ".join(options), "train adapters", dict(changes)
    if layout.base_bits is None and on_gpu:
        # bitsandbytes needs a GPU of NVIDIA, AMD or Intel
        given = [text for text in options if not text.startswith("--learner.lora")]
        option = " ".join([*given, f"--learner.lora rank={rank},bits=4"])
        yield option, "frozen weights in four bits", changes | {"adapter_rank": rank, "base_bits": 4}


def _find_longest(plan: CapacityPlan) -> int | None:
    """Return the tokens of the longest text that fits with the plan's group; None if a short one does not."""
    limit = min(plan.request.shape.context_length or MAX_CONTEXT, MAX_CONTEXT) // STEP
    least = plan.request.workload.prompt_tokens // STEP + 1
    group = plan.request.workload.samples_per_prompt
    units = _find_largest(lambda n: _with_texts(plan, n * STEP, group).fits, least, limit)
    return None if units is None else units * STEP


def _find_group(plan: CapacityPlan, context: int) -> int:
    """Return the completions of a prompt that fit at once with texts of this context, at least the plan's."""
    least = plan.request.workload.samples_per_prompt
    return _find_largest(lambda n: _with_texts(plan, context, n).fits, least, MAX_GROUP) or least


def _find_largest(fits: Callable[[int], bool], least: int, most: int) -> int | None:
    """Return the largest number that fits, where every smaller one does; None if `least` does not."""
    if most < least or not fits(least):
        return None
    while least < most:
        middle = (least + most + 1) // 2
        least, most = (middle, most) if fits(middle) else (least, middle - 1)
    return least


def _with_texts(plan: CapacityPlan, context: int, group: int) -> CapacityPlan:
    """Return a plan of texts of at most `context` tokens, at most one to a micro-batch, and groups that are sampled at once."""
    work = plan.request.workload
    longest = context - work.prompt_tokens
    share = work.completion_tokens / work.max_completion_tokens
    work = replace(
        work,
        samples_per_prompt=group,
        max_completion_tokens=longest,
        completion_tokens=max(1.0, min(longest, share * longest)),
    )
    layout = replace(plan.layout, micro_tokens=min(context, plan.layout.micro_tokens), decode_rows=group)
    return CapacityPlan(replace(plan.request, workload=work), layout)
