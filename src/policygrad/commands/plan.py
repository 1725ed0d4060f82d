"""`policygrad plan`: what a run of some size takes, before there is any machine for it."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import tyro

from policygrad.commands import render as words
from policygrad.commands.options import check_writable, write_text_file
from policygrad.commands.render import HEAD, NAME, QUIET, StyledLine, wrap_paragraphs, wrap_styled
from policygrad.errors import ConfigError
from policygrad.planning.cost_model import DTYPE_BYTES, MICRO_TOKENS, MICRO_TOKENS_CPU, ParallelLayout, Workload
from policygrad.planning.hardware import Efficiency, load_calibration, parse_devices
from policygrad.planning.model_shapes import load_shape
from policygrad.planning.planner import (
    CapacityPlan,
    PlanRequest,
    Suggestion,
    device_counts,
    find_best_split,
    plan_device_counts,
    suggest_changes,
)
from policygrad.planning.render import PlanTable, list_assumptions, plan_summary, plan_tables, plan_title
from policygrad.training.config.run import optional_arg

HELP = (
    "Memory, seconds and money of a run, from the shape of its model, a device's published figures and stated assumptions; no "
    "model is loaded. Where it does not fit, what to change.",
    "The first word may name the algorithm, as for train: policygrad plan grpo --model Qwen3-8B --gpus H200:64.",
    "--calibrate measures this machine for about a minute instead, and writes what --calibration reads.",
)
CALIBRATION_FILE = "calibration.json"


@dataclass(frozen=True)
class PlanOptions:
    """Options of `policygrad plan`."""

    model: Annotated[str, tyro.conf.arg(metavar="SHAPE")] = "Qwen3-8B"
    """A name such as Qwen3-8B or Llama-3.1-70B, a config.json or a folder with one."""
    gpus: Annotated[str, tyro.conf.arg(metavar="DEVICE:COUNT")] = "H100:8"
    """A100, H100, H200, B200 or cpu, and how many."""
    algorithm: Annotated[str, tyro.conf.arg(metavar="NAME")] = "grpo"
    """As `policygrad train` takes it; also the first word."""
    context: int = 4096
    """Tokens of a prompt and its completion, at most."""
    prompt: int = 256
    """Mean tokens of a prompt."""
    completion: Annotated[int | None, optional_arg("INT", "a third of what the context leaves")] = None
    """Mean tokens of a completion."""
    prompts_per_step: int = 64
    """Prompts per rollout."""
    samples_per_prompt: Annotated[int | None, optional_arg("INT", "the algorithm's own")] = None
    """G, completions per prompt."""
    max_staleness: int = 0
    """Rollouts by which samplers may be ahead; above 0 they have devices of their own."""
    samplers: Annotated[int | None, optional_arg("INT", "with --max-staleness as many as are best, else none")] = None
    """Devices of these that only draw."""
    engine: bool = False
    """An engine draws (--sampler.engine of train) and has the policy; without it every learner has all of it beside its share."""
    tensor_parallel: int = 1
    """Devices that each sampler is spread over."""
    dtype: Annotated[str | None, optional_arg("bf16|fp32", "bf16, on a cpu fp32")] = None
    """What is computed in."""
    gradient_checkpointing: bool = False
    """Activations are computed again on the way back."""
    micro_tokens: Annotated[int | None, optional_arg("INT", f"{MICRO_TOKENS}, on a cpu {MICRO_TOKENS_CPU}")] = None
    """Tokens per forward and backward pass."""
    decode_rows: int = 512
    """Completions that a sampler draws at once, at most."""
    steps: int = 1000
    """That hours and costs are told of."""
    price: Annotated[float | None, optional_arg("FLOAT", "costs are left out")] = None
    """Of a device's hour."""
    calibration: Annotated[Path | None, optional_arg("FILE", "the assumptions; of --calibrate " + CALIBRATION_FILE)] = (
        None
    )
    """What --calibrate has measured on the device."""
    calibrate: bool = False
    """Measure this machine, in --dtype, on its GPU if it has one."""
    json: bool = False
    """One JSON object in place of the tables."""
    output: Annotated[Path | None, optional_arg("FILE.html", "none")] = None
    """Also write a page with plots over numbers of devices."""

    def __post_init__(self) -> None:
        if self.dtype is not None and self.dtype not in DTYPE_BYTES:
            raise ConfigError(f"--dtype must be one of {', '.join(DTYPE_BYTES)}, not {self.dtype!r}")
        if self.steps < 1:
            raise ConfigError(f"--steps must be at least 1, not {self.steps}")
        if self.price is not None and not 0 <= self.price < float("inf"):
            raise ConfigError(f"--price must be at least 0 and finite, not {self.price:g}")
        if self.context <= self.prompt:
            raise ConfigError(
                f"--context {self.context} has no room for a completion after prompts of {self.prompt} tokens: raise it, or lower "
                "--prompt"
            )


def plan(args: list[str]) -> int:
    """`policygrad plan [ALGORITHM] [options]`."""
    config = (tyro.conf.FlagCreatePairsOff,)
    if args and not args[0].startswith("-"):
        name, *args = args
        if any(word.partition("=")[0] == "--algorithm" for word in args):
            raise ConfigError(f"the algorithm is named twice, as {name!r} and by --algorithm: leave one of them out")
        args = ["--algorithm", name, *args]
    options = tyro.cli(
        PlanOptions, args=args, prog="policygrad plan", description=wrap_paragraphs(*HELP), config=config
    )
    if options.calibrate:
        return _calibrate(options)
    if options.output is not None:
        check_writable(options.output, "--output")
    found = make_plan(options)
    others = plan_device_counts(found.request, found.layout, device_counts(found.layout.gpus))
    others = [found if other.layout.gpus == found.layout.gpus else other for other in others]
    ways = suggest_changes(found)
    if options.output is not None:
        from policygrad.planning.render import render_plan_page

        write_text_file(options.output, render_plan_page(found, others, ways, options.steps, options.price), "--output")
        print(options.output, file=sys.stderr)
    if options.json:
        print(json.dumps(plan_to_dict(found, others, ways, options), ensure_ascii=False))
        return 0

    width = shutil.get_terminal_size((100, 24)).columns
    words.print_lines(format_plan(found, others, ways, options.steps, options.price, width))
    return 0


def make_plan(options: PlanOptions) -> CapacityPlan:
    """The plan of these options; where they leave it open, with the best division of the devices.

    Raises:
        ConfigError: what cannot be planned, with the way out.
    """
    from policygrad.training.config.run import check_completion_count
    from policygrad.training.config.serialization import load_algorithm
    from policygrad.training.cost_estimate import compute_plannable_cost as asked

    measured = None if options.calibration is None else load_calibration(options.calibration)
    device, gpus = parse_devices(options.gpus, None if measured is None else measured.device)
    cpu, reached = device.name == "cpu", Efficiency()
    dtype = options.dtype or ("fp32" if cpu else "bf16")
    if measured is not None:
        device, reached = measured.apply(device, dtype)
    asks = asked(load_algorithm(options.algorithm))
    budget = options.context - options.prompt
    work = Workload(
        prompts=options.prompts_per_step,
        samples_per_prompt=asks.samples_per_prompt
        if options.samples_per_prompt is None
        else options.samples_per_prompt,
        prompt_tokens=options.prompt,
        completion_tokens=max(1, budget // 3) if options.completion is None else options.completion,
        max_completion_tokens=budget,
    )
    check_completion_count("--prompts-per-step", work.prompts, "--samples-per-prompt", work.samples_per_prompt)
    asks = replace(asks, updates=min(asks.updates, asks.epochs * work.prompts))  # minibatches are of whole groups
    divide = options.samplers is None and options.max_staleness > 0
    layout = ParallelLayout(
        gpus=gpus,
        samplers=options.tensor_parallel if divide and gpus > options.tensor_parallel else options.samplers or 0,
        tensor_parallel=options.tensor_parallel,
        max_staleness=options.max_staleness,
        dtype=dtype,
        checkpointing=options.gradient_checkpointing,
        micro_tokens=options.micro_tokens or (MICRO_TOKENS_CPU if cpu else MICRO_TOKENS),
        decode_rows=options.decode_rows,
        keeps_full_policy=not options.engine,
    )
    question = PlanRequest(load_shape(options.model), device, work, asks, reached)
    if options.max_staleness and options.samplers == 0:
        raise ConfigError(
            "--max-staleness lets samplers be ahead, and --samplers 0 leaves none apart: leave one of them out"
        )
    if options.tensor_parallel > 1 and not layout.is_disaggregated and layout.keeps_full_policy:
        raise ConfigError(
            f"--tensor-parallel {options.tensor_parallel} is of an engine or of samplers apart, and here all devices draw and "
            "learn in turns: give --samplers or --max-staleness, or --engine"
        )
    return find_best_split(question, layout) if divide else CapacityPlan(question, layout)


def plan_to_dict(
    found: CapacityPlan, others: list[CapacityPlan], ways: list[Suggestion], options: PlanOptions
) -> dict[str, Any]:
    """For --json."""
    from dataclasses import asdict

    q, of = found.request, (options.steps, options.price)
    return {
        "model": asdict(q.shape) | {"parameters": q.shape.parameters},
        "device": asdict(q.device),
        "algorithm": asdict(q.algorithm),
        "work": {
            "prompts": q.workload.prompts,
            "samples": q.workload.samples_per_prompt,
            "prompt": q.workload.prompt_tokens,
            "completion": q.workload.completion_tokens,
            "budget": q.workload.max_completion_tokens,
            "sampled": q.workload.sampled_tokens,
        },
        "reached": asdict(q.efficiency),
        "plan": found.to_dict(*of),
        "gpus": [other.to_dict(*of) for other in others],
        "changes": [{"option": way.option, "what": way.description, **way.plan.to_dict(*of)} for way in ways],
    }


def _calibrate(options: PlanOptions) -> int:
    """Measures, and says where it is written."""
    path = options.calibration or Path(CALIBRATION_FILE)
    check_writable(path, "--calibration")
    import torch

    from policygrad.training.calibration import calibrate

    device = "cuda:0" if torch.cuda.is_available() else "cpu"
    dtype = options.dtype or ("fp32" if device == "cpu" else "bf16")
    found = calibrate(dtype, device, lambda text: print(text, file=sys.stderr, flush=True))
    found.write(path)
    print(path)
    return 0


# A plan in the terminal.


def format_plan(
    plan: CapacityPlan,
    others: Sequence[CapacityPlan],
    ways: Sequence[Suggestion],
    steps: int,
    price: float | None,
    width: int,
) -> list[StyledLine]:
    """The whole plan, running text within `width`."""
    text = max(40, min(width, 100))
    lines: list[StyledLine] = [
        *wrap_styled((), plan_title(plan), text, HEAD),
        *wrap_styled((), plan_summary(plan, steps, price), text),
        (),
    ]
    for part in plan_tables(plan, others, ways, steps, price):
        lines += [*_table(part, text), ()]
    lines.append((("Assumed", HEAD),))
    for sentence in list_assumptions(plan):
        lines += wrap_styled((("  · ", QUIET),), sentence, text)
    return lines


def _table(part: PlanTable, width: int) -> Iterator[StyledLine]:
    """Names to the left, figures to the right."""
    yield ((part.title, HEAD),)
    cells = [part.head, *part.rows] if any(part.head) else list(part.rows)
    widths = [max(len(row[i]) for row in cells) for i in range(len(part.head))]
    for number, row in enumerate(cells):
        style = QUIET if any(part.head) and number == 0 else ""
        first, *rest = row
        figures = [
            cell.ljust(w) if _is_text(part, i) else cell.rjust(w)
            for i, (cell, w) in enumerate(zip(rest, widths[1:], strict=True), 1)
        ]
        yield ((f"  {first.ljust(widths[0])}", style or NAME), ("  " + "  ".join(figures), style))
    if part.note:
        yield from wrap_styled((("  ", ""),), part.note, width, QUIET)


def _is_text(part: PlanTable, column: int) -> bool:
    """Whether a column has no figures, by its first row."""
    return bool(part.rows) and not any(c.isdigit() or c == "–" for c in part.rows[0][column]) and not part.head[column]
