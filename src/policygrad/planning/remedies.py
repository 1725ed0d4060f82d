"""What to change where a plan does not fit: one thing after another, each kept where it takes less memory, until it fits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from policygrad.planning.devices import DEVICES
from policygrad.planning.layout import Layout
from policygrad.planning.plan import Plan, best

MOST = 4096
"""Devices that are looked for."""
ROWS = 16
"""Completions drawn at once, at least."""

TENSORS = (2, 4, 8)
"""Devices of one sampler that are tried."""


@dataclass(frozen=True)
class Remedy:
    """A change, and the plan with it and with those before it."""

    option: str
    """As it is written on the command line of plan."""
    what: str
    """In words."""
    plan: Plan


def remedies(plan: Plan) -> list[Remedy]:
    """In the order in which they cost least; empty where the plan fits, or nothing helps. The last fits, unless nothing does."""
    found, now = list[Remedy](), plan
    for try_ in (_checkpointed, _smaller_passes, _narrow, _fewer_rows, _engine, _apart, _spread):
        if now.fits:
            break
        for remedy in try_(now):
            if remedy.plan.peak < now.peak:
                found.append(remedy)
                now = remedy.plan
                break
    if not now.fits:
        found += [*_other_device(now), *_more(now)]
    return found


def _with(plan: Plan, option: str, what: str, layout: Layout) -> Remedy:
    return Remedy(option, what, Plan(plan.question, layout))


def _checkpointed(plan: Plan) -> Iterator[Remedy]:
    if not plan.layout.checkpointing:
        layout = replace(plan.layout, checkpointing=True)
        yield _with(plan, "--gradient-checkpointing", "activations are computed again on the way back", layout)


def _smaller_passes(plan: Plan) -> Iterator[Remedy]:
    least = plan.question.work.context
    if plan.layout.micro_tokens > least:
        layout = replace(plan.layout, micro_tokens=least)
        yield _with(plan, f"--micro-tokens {least}", "micro-batches of one text at a time", layout)


def _narrow(plan: Plan) -> Iterator[Remedy]:
    if plan.layout.dtype == "fp32":
        yield _with(plan, "--dtype bf16", "computing in bfloat16", replace(plan.layout, dtype="bf16"))


def _engine(plan: Plan) -> Iterator[Remedy]:
    if plan.layout.whole:
        layout = replace(plan.layout, whole=False)
        yield _with(plan, "--engine", "an engine has the policy, a learner only its share", layout)


def _apart(plan: Plan) -> Iterator[Remedy]:
    """The first division that fits: of the plan's own samplers, of an engine's, over more devices each."""
    layout = plan.layout
    if layout.apart:
        return
    for whole in dict.fromkeys((layout.whole, False)):
        for tensor in (layout.tensor, *(t for t in TENSORS if t > layout.tensor)):
            if layout.gpus <= tensor:
                continue
            divided = best(plan.question, replace(layout, whole=whole, tensor=tensor))
            if divided.fits:
                words = ["--engine"] * (layout.whole and not whole) + [f"--samplers {divided.layout.samplers}"]
                words += [f"--tensor-parallel {tensor}"] * (tensor > layout.tensor)
                yield Remedy(" ".join(words), "samplers on devices of their own", divided)
                return


def _fewer_rows(plan: Plan) -> Iterator[Remedy]:
    """The most that fit, in powers of two; where drawing takes more than learning."""
    rows, tried = plan.rows if _drawing_most(plan) else 0, list[Remedy]()
    while rows > ROWS:
        rows = 1 << ((rows - 1).bit_length() - 1)
        tried.append(
            _with(plan, f"--decode-rows {rows}", "fewer completions at once", replace(plan.layout, decode_rows=rows))
        )
    yield from ([remedy for remedy in tried if remedy.plan.fits] or tried[::-1])[:1]


def _spread(plan: Plan) -> Iterator[Remedy]:
    """A sampler on several devices, where one does not hold the policy."""
    layout = plan.layout
    if plan.sampler is None or plan.sampler.peak <= plan.usable:
        return
    for tensor in TENSORS:
        if tensor > layout.tensor and layout.samplers % tensor == 0:
            remedy = _with(
                plan, f"--tensor-parallel {tensor}", "each sampler on several devices", replace(layout, tensor=tensor)
            )
            if remedy.plan.sampler is not None and remedy.plan.sampler.peak <= plan.usable:
                yield remedy
                return


def _drawing_most(plan: Plan) -> bool:
    """Of a device that does both."""
    return sum(plan.learner.drawing.values()) > sum(plan.learner.learning.values())


def _other_device(plan: Plan) -> Iterator[Remedy]:
    """The smallest of those that hold it."""
    larger = [d for d in DEVICES.values() if d.memory > plan.question.device.memory and d.name != "cpu"]
    for device in sorted(larger, key=lambda d: d.memory):
        found = Plan(replace(plan.question, device=device), plan.layout)
        if found.fits:
            yield Remedy(f"--gpus {device.name}:{plan.layout.gpus}", "devices with more memory", found)
            return


def _more(plan: Plan) -> Iterator[Remedy]:
    """The fewest that hold it, twice as many each time."""
    gpus = plan.layout.gpus * 2
    while gpus <= MOST:
        layout = replace(plan.layout, gpus=gpus)
        found = best(plan.question, layout) if layout.apart else Plan(plan.question, layout)
        if found.fits:
            yield Remedy(f"--gpus {plan.question.device.name}:{gpus}", "more devices", found)
            return
        gpus *= 2
