"""`policygrad plan`: memory, time and cost of a run, before any machine exists for it."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, TypedDict

import tyro

from policygrad.commands.json_output import print_json, prints
from policygrad.commands.options import check_at_least_1, check_writable, write_text_file
from policygrad.commands.parsing import parse_arguments
from policygrad.commands.styled import HEAD, NAME, QUIET, StyledLine, get_terminal_width, print_lines, wrap_styled
from policygrad.errors import ConfigError
from policygrad.planning.cost_model import DTYPE_BYTES, MICRO_TOKENS, MICRO_TOKENS_CPU, ParallelLayout, Workload
from policygrad.planning.hardware import Efficiency, load_calibration, parse_devices
from policygrad.planning.model_shapes import load_shape
from policygrad.planning.planner import (
    CapacityPlan,
    PlanRequest,
    device_counts,
    find_best_split,
    plan_device_counts,
    suggest_changes,
)
from policygrad.planning.render import (
    PlanReport,
    list_assumptions,
    plan_summary,
    plan_tables,
    plan_title,
    render_plan_page,
)
from policygrad.training.config.optional_arg import optional_arg

HELP = (
    "Estimate memory, time and cost of a run from its model's shape, a device's published figures and stated assumptions, without "
    "loading a model. If the run does not fit, suggest what to change.",
    "The first argument may name the algorithm, as for train: policygrad plan grpo --model Qwen3-8B --gpus H200:64.",
    "--calibrate measures this machine for about a minute instead, and writes a file for --calibration.",
)
CALIBRATION_FILE = "calibration.json"


@dataclass(frozen=True)
class PlanOptions:
    """Options of `policygrad plan`."""

    model: Annotated[str, tyro.conf.arg(metavar="SHAPE")] = "Qwen3-8B"
    """A name such as Qwen3-8B or Llama-3.1-70B, a config.json, or a folder with one."""
    gpus: Annotated[str, tyro.conf.arg(metavar="DEVICE:COUNT")] = "H100:8"
    """Device and count; the device is A100, H100, H200, B200 or cpu."""
    algorithm: Annotated[str, tyro.conf.arg(metavar="NAME")] = "grpo"
    """Algorithm, as for `policygrad train`; also the first argument."""
    context: int = 4096
    """Maximum tokens of a prompt and its completion together."""
    prompt: int = 256
    """Mean tokens of a prompt."""
    completion: Annotated[int | None, optional_arg("INT", "a third of what the context leaves")] = None
    """Mean tokens of a completion."""
    prompts_per_step: int = 64
    """Prompts per rollout."""
    samples_per_prompt: Annotated[int | None, optional_arg("INT", "the algorithm's own")] = None
    """G, completions per prompt."""
    max_staleness: int = 0
    """Rollouts by which samplers may be ahead; above 0, samplers have devices of their own."""
    samplers: Annotated[int | None, optional_arg("INT", "the best number with --max-staleness, else none")] = None
    """Devices that only sample."""
    engine: bool = False
    """An engine samples (--sampler.engine of train) and holds the policy; without it every learner also keeps the full policy."""
    tensor_parallel: int = 1
    """Devices per sampler."""
    dtype: Annotated[str | None, optional_arg("bf16|fp32", "bf16, on a cpu fp32")] = None
    """Compute precision."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass."""
    micro_tokens: Annotated[int | None, optional_arg("INT", f"{MICRO_TOKENS}, on a cpu {MICRO_TOKENS_CPU}")] = None
    """Tokens per forward and backward pass."""
    decode_rows: int = 512
    """Maximum completions that a sampler generates at once."""
    steps: int = 1000
    """Steps for which hours and costs are reported."""
    price: Annotated[float | None, optional_arg("FLOAT", "no costs")] = None
    """Price of one device hour."""
    calibration: Annotated[Path | None, optional_arg("FILE", "assumptions; with --calibrate " + CALIBRATION_FILE)] = (
        None
    )
    """Measurements of the device by --calibrate."""
    calibrate: bool = False
    """Measure this machine in --dtype, on its GPU if it has one."""
    json: bool = False
    """Print one JSON object instead of tables."""
    output: Annotated[Path | None, optional_arg("FILE.html", "none")] = None
    """Also write a page with plots over the number of devices."""

    def __post_init__(self) -> None:
        if self.dtype is not None and self.dtype not in DTYPE_BYTES:
            raise ConfigError(f"--dtype must be one of {', '.join(DTYPE_BYTES)}, not {self.dtype!r}")
        check_at_least_1(self, "steps")
        if self.price is not None and not 0 <= self.price < float("inf"):
            raise ConfigError(f"--price must be at least 0 and finite, not {self.price:g}")
        if self.context <= self.prompt:
            raise ConfigError(
                f"--context {self.context} leaves no room for a completion after prompts of {self.prompt} tokens. Raise it, or "
                "lower --prompt."
            )


class PlanOutput(TypedDict):
    """The capacity plan."""

    model: Mapping[str, Any]
    device: Mapping[str, Any]
    algorithm: Mapping[str, Any]
    workload: Mapping[str, Any]
    efficiency: Mapping[str, Any]
    plan: Mapping[str, Any]
    """fits, memory in bytes, seconds, tokens_per_second, gpu_hours, cost."""
    gpus: list[Mapping[str, Any]]
    """The same for other numbers of devices."""
    changes: list[Mapping[str, Any]]
    """The same for changed options, with `option` and `description`."""


class Calibrated(TypedDict):
    """--calibrate: the file that was written."""

    calibration: str


@prints(PlanOutput, Calibrated)
def plan(args: list[str]) -> int:
    """Run `policygrad plan [ALGORITHM] [options]`."""
    if args and not args[0].startswith("-"):
        name, *args = args
        if any(arg.partition("=")[0] == "--algorithm" for arg in args):
            raise ConfigError(f"the algorithm is given twice, as {name!r} and by --algorithm; give it once")
        args = ["--algorithm", name, *args]
    options = parse_arguments(PlanOptions, args, "plan", *HELP)
    if options.calibrate:
        import torch

        from policygrad.training.calibration import calibrate

        path = options.calibration or Path(CALIBRATION_FILE)
        check_writable(path, "--calibration")
        device = "cuda:0" if torch.cuda.is_available() else "cpu"
        dtype = options.dtype or ("fp32" if device == "cpu" else "bf16")
        calibrate(dtype, device, lambda text: print(text, file=sys.stderr, flush=True)).write(path)
        if options.json:
            print_json({"calibration": path})
        else:
            print(path)
        return 0
    if options.output is not None:
        check_writable(options.output, "--output")
    result = make_plan(options)
    alternatives = plan_device_counts(result.request, result.layout, device_counts(result.layout.gpus))
    alternatives = [result if other.layout.gpus == result.layout.gpus else other for other in alternatives]
    report = PlanReport(result, alternatives, suggest_changes(result), options.steps, options.price)
    if options.output is not None:
        write_text_file(options.output, render_plan_page(report), "--output")
        print(options.output, file=sys.stderr)
    if options.json:
        print_json(report.to_dict())
    else:
        print_lines(format_plan(report, get_terminal_width()))
    return 0


def make_plan(options: PlanOptions) -> CapacityPlan:
    """Make the plan of these options, with the best split of devices if they leave it open."""
    from policygrad.training.config.option_checks import check_completion_count
    from policygrad.training.config.serialization import load_algorithm
    from policygrad.training.cost_estimate import compute_plannable_cost

    calibration = None if options.calibration is None else load_calibration(options.calibration)
    device, gpus = parse_devices(options.gpus, None if calibration is None else calibration.device)
    cpu, efficiency = device.name == "cpu", Efficiency()
    dtype = options.dtype or ("fp32" if cpu else "bf16")
    if calibration is not None:
        device, efficiency = calibration.apply(device, dtype)
    algorithm = compute_plannable_cost(load_algorithm(options.algorithm))
    max_completion = options.context - options.prompt
    samples = algorithm.samples_per_prompt if options.samples_per_prompt is None else options.samples_per_prompt
    workload = Workload(
        prompts=options.prompts_per_step,
        samples_per_prompt=samples,
        prompt_tokens=options.prompt,
        completion_tokens=max(1, max_completion // 3) if options.completion is None else options.completion,
        max_completion_tokens=max_completion,
    )
    check_completion_count("--prompts-per-step", workload.prompts, "--samples-per-prompt", samples)
    # Minibatches consist of complete groups.
    algorithm = replace(algorithm, updates=min(algorithm.updates, algorithm.epochs * workload.prompts))
    find_split = options.samplers is None and options.max_staleness > 0
    samplers = options.tensor_parallel if find_split and gpus > options.tensor_parallel else options.samplers or 0
    layout = ParallelLayout(
        gpus=gpus,
        samplers=samplers,
        tensor_parallel=options.tensor_parallel,
        max_staleness=options.max_staleness,
        dtype=dtype,
        checkpointing=options.gradient_checkpointing,
        micro_tokens=options.micro_tokens or (MICRO_TOKENS_CPU if cpu else MICRO_TOKENS),
        decode_rows=options.decode_rows,
        keeps_full_policy=not options.engine,
    )
    request = PlanRequest(load_shape(options.model), device, workload, algorithm, efficiency)
    if options.max_staleness and options.samplers == 0:
        raise ConfigError("--max-staleness needs separate samplers, but --samplers is 0. Omit one of them.")
    if options.tensor_parallel > 1 and not layout.is_disaggregated and layout.keeps_full_policy:
        raise ConfigError(
            f"--tensor-parallel {options.tensor_parallel} needs an engine or separate samplers, but all devices sample and learn "
            "in turns. Add --samplers, --max-staleness or --engine."
        )
    return find_best_split(request, layout) if find_split else CapacityPlan(request, layout)


def format_plan(report: PlanReport, width: int) -> list[StyledLine]:
    """Format the plan for a terminal, with running text within `width`."""
    plan = report.plan
    text = max(40, min(width, 100))
    lines: list[StyledLine] = [
        *wrap_styled((), plan_title(plan), text, HEAD),
        *wrap_styled((), plan_summary(plan, report.steps, report.price), text),
        (),
    ]
    for table in plan_tables(report):
        # Names and texts are aligned to the left, figures to the right.
        lines.append(((table.title, HEAD),))
        has_head = any(table.head)
        cells = [table.head, *table.rows] if has_head else list(table.rows)
        widths = [max(len(row[i]) for row in cells) for i in range(len(table.head))]
        is_text = [  # columns without a heading and without figures in the first row
            i == 0 or not (title or any(c.isdigit() or c == "–" for c in table.rows[0][i]))
            for i, title in enumerate(table.head)
        ]
        for number, row in enumerate(cells):
            style = QUIET if has_head and number == 0 else ""
            columns = zip(row, widths, is_text, strict=True)
            first, *figures = [cell.ljust(w) if left else cell.rjust(w) for cell, w, left in columns]
            lines.append(((f"  {first}", style or NAME), ("  " + "  ".join(figures), style)))
        if table.note:
            lines += wrap_styled((("  ", ""),), table.note, text, QUIET)
        lines.append(())
    lines.append((("Assumptions", HEAD),))
    for sentence in list_assumptions(plan):
        lines += wrap_styled((("  · ", QUIET),), sentence, text)
    return lines
