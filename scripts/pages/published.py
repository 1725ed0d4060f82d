"""Parts of docs/large-runs.md and docs/planning.md: the plan beside what others published, and what very large runs would need."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import ceil
from statistics import median

from plan_published import (
    ALLOWED,
    FITS,
    UTILISED,
    Figure,
    compare_runs,
    list_sources,
    load_failures,
    load_misses,
    load_runs,
)

from pages.markdown import table
from policygrad.commands.parsing import parse_arguments
from policygrad.commands.plan import PlanOptions, make_plan
from policygrad.planning.hardware import DEVICES, Efficiency
from policygrad.planning.model_sizes import GRADIENT_BYTES
from policygrad.planning.planner import CapacityPlan
from policygrad.planning.render import format_gib, format_seconds
from policygrad.planning.time_model import BACKWARD_PASSES
from policygrad.samplers.config import WEIGHT_TRANSPORTS

TITLES = {
    "memory": "Memory of a learner, GiB",
    "learning": "A learner's step, seconds",
    "scoring": "Scoring, seconds",
    "sampling": "Sampling by an engine, seconds",
    "publishing": "Publishing weights, seconds",
    "step": "A whole step, seconds",
}
UNITS = {
    "training": ("efficiency of learning", "{:.0%}"),
    "engine_sampling": ("efficiency of an engine that samples", "{:.0%}"),
    "engine_overhead": ("an engine's seconds per layer and token besides", "{:.3g}"),
    "storage": ("bytes per second through a folder", "{:.2g}"),
    "engine_load": ("bytes per second and device until an engine that slept has its weights", "{:.2g}"),
    "broadcast": ("bytes per second by NCCL to other machines", "{:.2g}"),
    "allreduce_network": ("seconds of a small all-reduce between machines", "{:.3g}"),
}


@cache
def figures() -> tuple[Figure, ...]:
    """Compare all runs."""
    return tuple(compare_runs(load_runs()))


def summary_block() -> str:
    """Write how many figures of each kind are within what is allowed, of the half that constants were not fitted to."""
    rows = list[tuple[str, ...]]()
    for kind, title in TITLES.items():
        fitted, judged = (select(kind, is_judged) for is_judged in (False, True))
        ratios = [figure.ratio for figure in judged]
        rows.append(
            (
                title.partition(",")[0],
                f"{ALLOWED[kind]:.0%}",
                count_within(fitted),
                count_within(judged),
                f"{median(ratios):.2f}",
                f"{min(ratios):.2f} to {max(ratios):.2f}",
            )
        )
    judged = [figure for figure in figures() if figure.run.is_judged]
    runs = {figure.run.name for figure in figures()}
    head = (
        "figures of",
        "allowed",
        "within, fitted half",
        "within, judged half",
        "median ratio, judged",
        "lowest and highest, judged",
    )
    return (
        f"{len(figures())} figures of {len(runs)} runs, from {len(list_sources())} sources; a ratio is the plan's figure over the "
        f"measured one. Of the judged half {count_within(judged)} are within what is allowed.\n\n{table(head, rows)}"
    )


def select(kind: str, is_judged: bool) -> list[Figure]:
    return [figure for figure in figures() if figure.kind == kind and figure.run.is_judged == is_judged]


def count_within(some: Sequence[Figure]) -> str:
    return f"{sum(figure.is_within for figure in some)} of {len(some)}"


def constants_block() -> str:
    """Write the constants that were fitted, and their values."""
    rows = [
        (
            UNITS[name][0],
            f"`{name}`",
            UNITS[name][1].format(getattr(Efficiency(), name)),
            f"{fit.kind}: {', '.join(fit.runs)}",
        )
        for fit in FITS
        for name in fit.names
    ]
    factor = DEVICES[UTILISED].utilisation
    rows.append(
        (
            f"efficiency of learning and scoring on an {UTILISED}, as a multiple of others'",
            "`utilisation`",
            f"{factor:g}",
            "learning: learner",
        )
    )
    return table(("constant", "name", "value", "fitted to figures of"), rows)


def misses_block() -> str:
    """Write which figures the plan misses, and why."""
    rows = list[tuple[str, ...]]()
    for miss in load_misses():
        missed = [figure for figure in figures() if not figure.is_within and miss.explains(figure)]
        for figure in missed:
            rows.append((figure.run.name, figure.kind, f"{figure.ratio:.2f}", _half(figure), miss.why))
    return table(("run", "figure", "ratio", "half", "why"), rows)


def figures_block() -> str:
    """Write a table of each kind's figures, and the sources."""
    parts = list[str]()
    for kind, title in TITLES.items():
        rows = [
            (figure.run.name, _short(figure.measured), _short(figure.planned), f"{figure.ratio:.2f}", _half(figure))
            for figure in figures()
            if figure.kind == kind
        ]
        parts.append(f"### {title}\n\n{table(('run', 'measured', 'planned', 'ratio', 'half'), rows)}")
    notes = [f"- {run.name}: {run.note}" for run in load_runs() if run.note]
    return "\n\n".join(
        [
            *parts,
            "### Notes\n\n" + "\n".join(notes),
            "### Sources\n\n" + "\n".join(_cite(x) for x in list_sources().values()),
        ]
    )


def _cite(source: dict[str, str]) -> str:
    if "url" in source:
        link = source["url"]
    else:
        link = f"https://github.com/{source['repository']}/blob/{source['commit']}/{source['path']}"
    return f"- [{source['title']}]({link}){', ' + source['date'] if 'date' in source else ''}"


def _half(figure: Figure) -> str:
    return "judged" if figure.run.is_judged else "fitted"


# Very large runs.

WORK = "--context 32768 --prompt 1000 --completion 8000 --samples-per-prompt 16 --micro-tokens 32768 --max-staleness 1"


@dataclass(frozen=True)
class LargeRun:
    """A run that nobody has made with this library: options of plan, and what they change."""

    options: str
    text: str

    @property
    def plan(self) -> CapacityPlan:
        return make_plan(parse_arguments(PlanOptions, self.options.split(), "plan"))


DENSE = f"--model Llama-3.1-70B --gpus H100:256 --engine --tensor-parallel 8 --gradient-checkpointing --prompts-per-step 256 {WORK}"
EXPERTS = f"--model Kimi-K2 --gpus H100:4096 --engine --tensor-parallel 32 --gradient-checkpointing --prompts-per-step 1024 {WORK}"
SHARED = "--context-parallel 8"
LARGER = EXPERTS.replace("H100:4096", "H200:4096").replace("--tensor-parallel 32", "--tensor-parallel 16")
DENSE_RUNS = (
    LargeRun(DENSE, "each learner reads whole texts"),
    LargeRun(f"{DENSE} {SHARED}", "8 learners share each text"),
    LargeRun(f"{DENSE} {SHARED} --weight-transport nccl", "and weights by NCCL"),
)
EXPERT_RUNS = (
    LargeRun(EXPERTS, "each learner reads whole texts"),
    LargeRun(f"{EXPERTS} {SHARED}", "8 learners share each text"),
    LargeRun(f"{LARGER} {SHARED}", "the same on H200, 16 devices a sampler"),
    LargeRun(f"{LARGER} {SHARED} --weight-transport nccl", "and weights by NCCL"),
)


def dense_block() -> str:
    """Write what 70B on 256 devices would need."""
    return _describe(DENSE_RUNS, DENSE_RUNS[1])


def experts_block() -> str:
    """Write what a mixture of 1T on 4,096 devices would need."""
    return _describe(EXPERT_RUNS, EXPERT_RUNS[2])


def _describe(runs: Sequence[LargeRun], chosen: LargeRun) -> str:
    rows = list[tuple[str, ...]]()
    for run in runs:
        plan = run.plan
        rows.append(
            (
                run.text,
                "yes" if plan.fits else "no",
                f"{format_gib(plan.learner.peak_bytes)} of {format_gib(plan.usable_bytes)}",
                f"{plan.layout.samplers:,}, {plan.layout.learning_devices:,}",
                format_seconds(plan.step_seconds),
                f"{plan.tokens_per_second:,.0f}",
                f"{plan.mfu:.1%}",
            )
        )
    head = ("", "fits", "GiB of a learner", "sample, learn", "a step", "sampled tokens/s", "of the peak rate")
    plan = chosen.plan
    parts = [
        f"    policygrad plan grpo {runs[0].options}",
        table(head, rows),
        f"Where the time goes ({chosen.text}; {plan.layout.samplers:,} devices sample, {plan.layout.learning_devices:,} learn):",
        _phases(plan),
        "What breaks, in the order in which a run meets it:",
        _limits(runs[0].plan, plan),
    ]
    return "\n\n".join(parts)


def _phases(plan: CapacityPlan) -> str:
    times, model = plan.step_times, plan.time_model
    work, cost, ranks = plan.request.workload, plan.request.algorithm, plan.layout.learning_devices
    tokens = work.count_tokens(plan.layout.shares_prompts, plan.request.shape.windows)
    computing = cost.epochs * model.training_seconds(tokens, cost) / ranks
    speed = model.sampler_speed(work)
    longest = max(work.lengths) * speed.fixed
    without = replace(plan.request.efficiency, engine_overhead=0.0, allreduce=0.0, allreduce_network=0.0)
    overhead = longest - max(work.lengths) * replace(model, efficiency=without).sampler_speed(work).fixed
    rows = [
        ("sampling completions", format_seconds(times.generation), _share(times.generation, plan)),
        (
            "of it the longest completion alone, which more samplers do not shorten",
            format_seconds(longest),
            _share(longest, plan),
        ),
        ("of that overhead and all-reduces per layer and token", format_seconds(overhead), _share(overhead, plan)),
        ("scoring: log π_old, log π_ref", format_seconds(times.scoring), _share(times.scoring, plan)),
        ("forward and backward", format_seconds(times.learning), _share(times.learning, plan)),
        (
            "of it computing; the rest waits for weights and gradients on the links",
            format_seconds(computing),
            _share(computing, plan),
        ),
        ("publishing the weights", format_seconds(times.publishing), _share(times.publishing, plan)),
        ("a step: the longer of sampling and update, then publishing", format_seconds(plan.step_seconds), "100%"),
    ]
    return table(("phase", "time", "of a step"), rows)


def _share(seconds: float, plan: CapacityPlan) -> str:
    return f"{seconds / plan.step_seconds:.0%}"


def _limits(first: CapacityPlan, plan: CapacityPlan) -> str:
    """Write the limits that a run meets: memory of the first plan, at the start, and each step of the chosen plan."""
    shape, layout, number = plan.request.shape, plan.layout, plan.layout.bytes_per_number
    size, machines = shape.parameters * number, ceil(layout.gpus / plan.request.device.per_node)
    failures = load_failures()
    hours = failures["days"] * 24 / failures["interruptions"] * failures["devices"] / layout.gpus
    usable = f"of {format_gib(first.usable_bytes)} usable on an {first.request.device.name}"
    sending = [
        replace(plan, layout=replace(layout, weight_transport=way)).step_times.publishing for way in WEIGHT_TRANSPORTS
    ]
    by_folder, by_nccl = map(format_seconds, sending)
    free = replace(plan.request.efficiency, storage=1e18)
    without = CapacityPlan(replace(plan.request, efficiency=free), layout).step_seconds
    links = BACKWARD_PASSES * plan.time_model.gather_seconds(size, layout.learning_devices)
    links += plan.time_model.gather_seconds(shape.parameters * GRADIENT_BYTES, layout.learning_devices)
    rows = [
        (
            "a text is read whole by a learner",
            f"{format_gib(first.learner.training['activations'])} GiB of activations, {usable}",
            "here: `--learner.context-parallel`",
        ),
        (
            "two layers are gathered whole, and the embeddings",
            f"{format_gib(first.learner.static['gathered layers'])} GiB in each learner, {usable}, however many learn",
            "not here: experts divided between learners. A dense layer can be (`--learner.tensor-parallel`, not in plan)",
        ),
        (
            "rank 0 reads the model at the beginning",
            f"at least {format_gib(size)} GiB in one machine's memory",
            "not here: each process reads its own part",
        ),
        (
            "one process publishes",
            f"{by_folder} through a folder, {by_nccl} by NCCL to {layout.num_samplers} samplers; without it a step takes "
            f"{format_seconds(without)}",
            "not here: each learner sends its own part; one group of all samplers, or weights passed on between them",
        ),
        (
            "all learners gather weights for each micro-batch",
            f"{format_seconds(links)} on the links, {machines:,} machines",
            "not here: sharding within some machines and sums between them; stages of layers",
        ),
        (
            "a process that dies ends the run",
            f"every {hours:,.0f} hours, at the rate of {failures['interruptions']} interruptions in {failures['days']} days of "
            f"[{failures['devices']:,} devices]({failures['url']})",
            "here: `--resume` from a checkpoint. Not here: continuing with fewer learners",
        ),
    ]
    return table(("limit", "what the plan says", "what helps"), rows)


def _short(x: float) -> str:
    return f"{x:,.0f}" if x >= 1000 else f"{x:.3g}"
