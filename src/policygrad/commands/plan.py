"""`policygrad plan`: memory, time and cost of a run, before any machine exists for it."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypedDict

import tyro

from policygrad.commands.json_output import print_json, prints
from policygrad.commands.options import check_at_least_1, check_writable, write_text_file
from policygrad.commands.parsing import parse_arguments
from policygrad.commands.styled import HEAD, NAME, QUIET, StyledLine, get_terminal_width, print_lines, wrap_styled
from policygrad.errors import ConfigError
from policygrad.learners.optimizers import ADAMW
from policygrad.planning.cost_model import DTYPE_BYTES, MICRO_TOKENS, MICRO_TOKENS_CPU, ParallelLayout, Workload
from policygrad.planning.fit import choose_fit, find_fits
from policygrad.planning.hardware import DEVICES, Efficiency, load_calibration, parse_devices
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
    PlanTable,
    describe_shape,
    fit_summary,
    fit_table,
    fit_title,
    list_assumptions,
    plan_summary,
    plan_tables,
    plan_title,
    render_plan_page,
)
from policygrad.planning.shapes import CountedShape
from policygrad.samplers.config import FOLDER, LOCAL, NCCL, WEIGHT_TRANSPORTS
from policygrad.samplers.engines.registry import ENGINES, list_engines
from policygrad.training.config.optional_arg import optional_arg

if TYPE_CHECKING:
    from policygrad.models.lora_config import Lora

HELP = (
    "Estimate memory, time and cost of a run from its model's shape, a device's published figures and stated assumptions, without "
    "loading a model. If the run does not fit, suggest what to change. The last line is the command of train.",
    "The first argument may name the algorithm, as for train: policygrad plan grpo --model Qwen3.5-35B-A3B --gpus H200:64.",
    "--fit finds the longest text and the largest group that fit instead, and prints the command of train: policygrad plan grpo "
    "--model Qwen3.5-4B --gpus RTX-4090 --fit.",
    "--calibrate measures this machine for about a minute instead, and writes a file for --calibration.",
)
CALIBRATION_FILE = "calibration.json"


@dataclass(frozen=True)
class PlanOptions:
    """Options of `policygrad plan`."""

    model: Annotated[str, tyro.conf.arg(metavar="SHAPE")] = "Qwen3.5-9B"
    """A name such as Qwen3.5-35B-A3B, gpt-oss-20b or Gemma-4-31B, any causal language model's config.json, or a folder with one."""
    gpus: Annotated[str, tyro.conf.arg(metavar="DEVICE:COUNT")] = "H100:8"
    """Device and count, such as H200:8, RTX-4090 or cpu; a name without figures is answered with those there are."""
    algorithm: Annotated[str, tyro.conf.arg(metavar="NAME")] = "grpo"
    """Algorithm, as for `policygrad train`; also the first argument."""
    context: int = 4096
    """Maximum tokens of a prompt and its completion together."""
    prompt: int = 256
    """Mean tokens of a prompt."""
    max_tokens: Annotated[int | None, optional_arg("INT", "what --context leaves after --prompt")] = None
    """Maximum sampled tokens per completion, in place of --context."""
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
    sampler_engine: Annotated[str, tyro.conf.arg(name="sampler.engine", metavar="|".join((LOCAL, *ENGINES)))] = LOCAL
    """An engine samples and holds the policy; with local every learner also keeps the full policy."""
    engine: bool = False
    """Short for --sampler.engine vllm."""
    beside: bool = False
    """An engine on the learners' devices keeps its memory while they learn, instead of sleeping (without --sampler.colocate)."""
    tensor_parallel: int = 1
    """Devices per sampler."""
    weight_transport: Annotated[
        str,
        tyro.conf.arg(
            name="sampler.weight-transport", aliases=("--weight-transport",), metavar="|".join(WEIGHT_TRANSPORTS)
        ),
    ] = FOLDER
    """How an engine on other devices gets the weights."""
    dtype: Annotated[
        str | None,
        tyro.conf.arg(name="learner.dtype", aliases=("--dtype",)),
        optional_arg("bf16|fp32", "bf16, on a cpu, T4 or M4-Max fp32"),
    ] = None
    """Compute precision."""
    lora: Annotated[str, tyro.conf.arg(name="learner.lora", aliases=("--lora",), metavar="SETTINGS")] = ""
    """Train adapters: rank=16,targets=all-linear, and bits=4 for frozen weights in four bits."""
    optimizer: Annotated[str, tyro.conf.arg(name="optimizer.name", aliases=("--optimizer",), metavar="NAME")] = ADAMW
    """Optimizer: adamw, adamw8bit, muon, sgd."""
    masters: Annotated[str, tyro.conf.arg(name="optimizer.masters", aliases=("--masters",), metavar="fp32|none")] = (
        "fp32"
    )
    """What bf16 weights are trained on."""
    learner_offload: Annotated[bool, tyro.conf.arg(name="learner.offload")] = False
    """Moments and masters are in the host's memory while completions are sampled."""
    optimizer_offload: Annotated[bool, tyro.conf.arg(name="optimizer.offload")] = False
    """They are there always."""
    offload: Annotated[str, tyro.conf.arg(metavar="none|sampling|always")] = "none"
    """The same in a word: sampling = --learner.offload, always = --optimizer.offload."""
    gradient_checkpointing: Annotated[
        bool, tyro.conf.arg(name="learner.gradient-checkpointing", aliases=("--gradient-checkpointing",))
    ] = False
    """Recompute activations in the backward pass."""
    micro_tokens: Annotated[
        int | None,
        tyro.conf.arg(name="learner.micro-tokens", aliases=("--micro-tokens",)),
        optional_arg("INT", f"{MICRO_TOKENS}, on a cpu {MICRO_TOKENS_CPU}"),
    ] = None
    """Tokens per forward and backward pass; a single learner reads longer texts in segments."""
    context_parallel: Annotated[
        int, tyro.conf.arg(name="learner.context-parallel", aliases=("--context-parallel",))
    ] = 1
    """Learners that share each text."""
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
    fit: bool = False
    """Find the longest text and the largest group that fit, and print the command of train."""
    calibrate: bool = False
    """Measure this machine in --dtype, on its GPU if it has one."""
    json: bool = False
    """Print one JSON object instead of tables."""
    output: Annotated[Path | None, optional_arg("FILE.html", "none")] = None
    """Also write a page with plots over the number of devices."""

    def __post_init__(self) -> None:
        if self.dtype is not None and self.dtype not in DTYPE_BYTES:
            raise ConfigError(f"--learner.dtype must be one of {', '.join(DTYPE_BYTES)}, not {self.dtype!r}")
        if self.beside and not self.has_engine:
            raise ConfigError(
                "--beside says where an engine keeps its memory: add --sampler.engine vllm, or leave it out"
            )
        if self.sampler_engine not in (LOCAL, *ENGINES):
            raise ConfigError(
                f"--sampler.engine must be one of {', '.join((LOCAL, *ENGINES))}, not {self.sampler_engine!r}"
            )
        if self.weight_transport not in WEIGHT_TRANSPORTS:
            raise ConfigError(
                f"--sampler.weight-transport must be one of {', '.join(WEIGHT_TRANSPORTS)}, not {self.weight_transport!r}"
            )
        if self.learner_offload and self.optimizer_offload:
            raise ConfigError("--optimizer.offload does all that --learner.offload does: leave one of them out")
        if self.offload != "none" and (self.learner_offload or self.optimizer_offload):
            raise ConfigError(
                "--offload is the same in a word as --learner.offload and --optimizer.offload: give one of them"
            )
        if self.max_tokens is not None:
            if self.context != PlanOptions.context:
                raise ConfigError(
                    "--context is --prompt and --max-tokens together: give one of --context and --max-tokens"
                )
            if self.max_tokens < 1:
                raise ConfigError(f"--max-tokens must be at least 1, not {self.max_tokens}")
            object.__setattr__(self, "context", self.prompt + self.max_tokens)
        check_at_least_1(self, "steps")
        if self.price is not None and not 0 <= self.price < float("inf"):
            raise ConfigError(f"--price must be at least 0 and finite, not {self.price:g}")
        if self.context <= self.prompt:
            raise ConfigError(
                f"--context {self.context} leaves no room for a completion after prompts of {self.prompt} tokens. Raise it, or "
                "lower --prompt."
            )

    @property
    def has_engine(self) -> bool:
        """True if an engine samples."""
        return self.engine or self.sampler_engine != LOCAL

    @property
    def offload_state(self) -> str:
        """When moments and masters are in the host's memory: none, sampling, always."""
        return "sampling" if self.learner_offload else "always" if self.optimizer_offload else self.offload


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
    command: str | None
    """The command of train of the plan, or of the last change; null = neither fits."""


class FitOutput(TypedDict):
    """--fit: what fits, with more and more savings."""

    model: Mapping[str, Any]
    device: Mapping[str, Any]
    algorithm: Mapping[str, Any]
    fits: list[Mapping[str, Any]]
    """option, description, context (tokens of the longest text), group (completions of a prompt at once with it), group_at_context
    (with --context), command, and the plan of the longest text and its largest group as in PlanOutput."""
    command: str | None
    """The first of `fits` that holds --context, or the one with the longest text; null = nothing fits."""


class Calibrated(TypedDict):
    """--calibrate: the file that was written."""

    calibration: str


@prints(PlanOutput, FitOutput, Calibrated)
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
    if options.fit:
        return print_fit(options)
    result = make_plan(options)
    alternatives = plan_device_counts(result.request, result.layout, device_counts(result.layout.gpus))
    alternatives = [result if other.layout.gpus == result.layout.gpus else other for other in alternatives]
    report = PlanReport(result, alternatives, suggest_changes(result), options.steps, options.price)
    if options.output is not None:
        write_text_file(options.output, render_plan_page(report), "--output")
        print(options.output, file=sys.stderr)
    fitting = next((p for p in (result, *(change.plan for change in report.changes[::-1])) if p.fits), None)
    command = None if fitting is None else write_train_command(fitting, options)
    if options.json:
        print_json({**report.to_dict(), "command": command})
        return 0
    print_lines(format_plan(report, get_terminal_width()))
    if command is not None:
        changed = "" if fitting is result else "  # with the changes above"
        print(f"\n{command}{changed}")
    return 0


def print_fit(options: PlanOptions) -> int:
    """Run `policygrad plan --fit`."""
    if options.samplers or options.max_staleness:
        raise ConfigError(
            "--fit is for devices that sample and learn in turns. Leave out --samplers and --max-staleness, and read `policygrad "
            "plan` with them."
        )
    plan = make_plan(options)
    fits = find_fits(plan, options.context, micro_tokens=options.micro_tokens)
    commands = [write_train_command(fit.plan, options) for fit in fits]
    chosen = choose_fit(fits, options.context)
    command = None if chosen is None else commands[fits.index(chosen)]
    if options.json:
        request, cost = plan.request, (options.steps, options.price)
        print_json(
            {
                "model": describe_shape(request.shape),
                "device": asdict(request.device),
                "algorithm": asdict(request.algorithm),
                "fits": [
                    {**fit.to_dict(), "command": text, **fit.plan.to_dict(*cost)}
                    for fit, text in zip(fits, commands, strict=True)
                ],
                "command": command,
            }
        )
        return 0
    print_lines(
        format_tables(
            fit_title(plan),
            fit_summary(plan, chosen, options.context),
            [fit_table(fits, options.context)],
            list_assumptions(plan if chosen is None else chosen.plan),
            get_terminal_width(),
        )
    )
    if command is not None:
        print(f"\n{command}")
    return 0


def write_train_command(plan: CapacityPlan, options: PlanOptions) -> str:
    """Return the command of train for a plan that fits."""
    request, layout = plan.request, plan.layout
    shape, work, state = request.shape, request.workload, layout.optimizer
    path = Path(options.model).expanduser()
    model = shape.hub or (str(path.parent) if path.is_file() else options.model)
    argv = ["policygrad", "train", request.algorithm.name, "--model", model]
    argv += ["--prompts-per-step", str(work.prompts), "--samples-per-prompt", str(work.samples_per_prompt)]
    argv += ["--max-tokens", str(work.max_completion_tokens)]
    if layout.is_disaggregated:
        servers = layout.sampling_devices // layout.tensor_parallel
        argv += ["--max-staleness", str(layout.max_staleness), "--sampler.engine", choose_engine(options)]
        argv += ["--sampler.servers", str(servers), "--sampler.max-concurrency", str(layout.decode_rows)]
        argv += ["--sampler.weight-transport", layout.weight_transport] * (layout.weight_transport != FOLDER)
    elif layout.keeps_full_policy:
        argv += ["--decode-rows", str(layout.decode_rows)]
    else:
        share = 1.0 if layout.engine_sleeps else plan.engine_bytes / request.device.memory
        memory = (
            ["--sampler.colocate"] if layout.engine_sleeps else ["--sampler.gpu-memory", f"{ceil(100 * share) / 100:g}"]
        )
        argv += [
            "--sampler.engine",
            choose_engine(options),
            *memory,
            "--sampler.max-concurrency",
            str(layout.decode_rows),
        ]
    argv += ["--learner.dtype", layout.dtype, "--learner.micro-tokens", str(layout.micro_tokens)]
    argv += ["--learner.world-size", str(layout.learning_devices)] * (layout.learning_devices > 1)
    argv += ["--learner.context-parallel", str(layout.context_parallel)] * (layout.context_parallel > 1)
    argv += ["--learner.gradient-checkpointing"] * layout.checkpointing
    argv += ["--optimizer.name", state.name] * (state.name != ADAMW)
    argv += ["--optimizer.masters", state.masters] * (state.masters != "fp32")
    argv += {"none": [], "sampling": ["--learner.offload"], "always": ["--optimizer.offload"]}[state.offload]
    if layout.only_adapters:
        given = options.lora or f"rank={layout.adapter_rank}"
        bits = f",bits={layout.base_bits}" * (layout.base_bits is not None and "bits" not in given)
        argv += ["--learner.lora", given + bits]
    return shlex.join(argv)


def choose_engine(options: PlanOptions) -> str:
    """Return the engine that the options name, or else one whose servers can sleep."""
    if options.sampler_engine != LOCAL:
        return options.sampler_engine
    return list_engines(lambda kind: kind.can_sleep)[0]


def make_plan(options: PlanOptions) -> CapacityPlan:
    """Make the plan of these options, with the best split of devices if they leave it open."""
    from policygrad.learners.config import OptimizerConfig
    from policygrad.models.lora_config import DEFAULT_RANK, DEFAULT_TARGETS, parse_lora
    from policygrad.training.config.option_checks import check_completion_count
    from policygrad.training.config.serialization import load_algorithm
    from policygrad.training.cost_estimate import compute_plannable_cost

    calibration = None if options.calibration is None else load_calibration(options.calibration)
    device, gpus = parse_devices(options.gpus, None if calibration is None else calibration.device)
    cpu, efficiency = device.name == "cpu", Efficiency()
    dtype = options.dtype or DEVICES.get(device.name, device).dtype
    if dtype == "bf16" and not device.bf16:
        raise ConfigError(
            f"--learner.dtype bf16: the {device.name} has no bfloat16. Use --learner.dtype fp32, which train chooses there."
        )
    lora = parse_lora(options.lora)
    if options.offload_state != "none" and device.per_node == 1:
        section = "learner" if options.offload_state == "sampling" else "optimizer"
        raise ConfigError(
            f"--{section}.offload moves the optimizer's state from a GPU to the host's memory, and a {device.name} has no "
            "memory of its own: leave it out"
        )
    optimizer = OptimizerConfig(name=options.optimizer, masters=options.masters).describe_state()
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
        adapter_rank=0 if lora is None else lora.rank or DEFAULT_RANK,
        base_bits=None if lora is None else lora.bits,
        context_parallel=options.context_parallel,
        optimizer=replace(optimizer, offload=options.offload_state),
        engine_sleeps=not options.beside,
        weight_transport=options.weight_transport,
        keeps_full_policy=not options.has_engine,
    )
    has_targets = lora is not None and lora.targets not in (None, DEFAULT_TARGETS)
    shape = load_shape(options.model, partial(count_layers, lora=lora if has_targets else None), recount=has_targets)
    request = PlanRequest(shape, device, workload, algorithm, efficiency)
    if options.max_staleness and options.samplers == 0:
        raise ConfigError("--max-staleness needs separate samplers, but --samplers is 0. Omit one of them.")
    if options.tensor_parallel > 1 and not layout.is_disaggregated and layout.keeps_full_policy:
        raise ConfigError(
            f"--tensor-parallel {options.tensor_parallel} needs an engine or separate samplers, but all devices sample and learn "
            "in turns. Add --samplers, --max-staleness or --sampler.engine."
        )
    if options.weight_transport == NCCL:
        receiving = list_engines(lambda engine: engine.transfer_class is not None)
        is_refused = options.sampler_engine not in (LOCAL, *receiving)
        if is_refused or not layout.is_disaggregated or not options.has_engine or layout.only_adapters:
            raise ConfigError(
                f"--sampler.weight-transport {NCCL} sends all weights to {' or '.join(receiving)} on other devices: add "
                f"--sampler.engine {receiving[0]} and --samplers or --max-staleness, without --learner.lora, or leave it out."
            )
    return find_best_split(request, layout) if find_split else CapacityPlan(request, layout)


def count_layers(config: Mapping[str, Any], name: str, source: str, lora: Lora | None = None) -> CountedShape:
    """Count the layers of a config.json on its architecture, which imports transformers.

    Args:
        lora: Adapters with targets of their own.
    """
    from policygrad.training.shape_counting import count_shape

    return count_shape(config, name, source, lora)


def format_plan(report: PlanReport, width: int) -> list[StyledLine]:
    """Format the plan for a terminal, with running text within `width`."""
    plan = report.plan
    summary = plan_summary(plan, report.steps, report.price)
    return format_tables(plan_title(plan), summary, plan_tables(report), list_assumptions(plan), width)


def format_tables(
    title: str, summary: str, tables: Sequence[PlanTable], assumptions: Sequence[str], width: int
) -> list[StyledLine]:
    """Format a title, a summary, tables and assumptions for a terminal."""
    text = max(40, min(width, 100))
    lines: list[StyledLine] = [*wrap_styled((), title, text, HEAD), *wrap_styled((), summary, text), ()]
    for table in tables:
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
    for sentence in assumptions:
        lines += wrap_styled((("  · ", QUIET),), sentence, text)
    return lines
