"""JSON Schemas of what --json prints, derived from types; docs/json.md lists them, and `COMMAND --json-schema` prints them.

Fields may be added to an output later: readers ignore those that they do not know.
"""

from __future__ import annotations

import types
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, TypedDict, Union, get_args, get_origin, get_type_hints, is_typeddict

from policygrad.commands.render import read_field_docs
from policygrad.errors import ConfigError

Metrics = Mapping[str, float | None]
Schema = dict[str, Any]


class ErrorDetails(TypedDict):
    """What failed."""

    kind: str
    """Class of the error, such as ConfigError; UsageError for options that cannot be parsed."""
    message: str
    """The sentence on standard error: option, value, reason and remedy."""
    exit_code: int
    """The command's exit code."""


class Error(TypedDict):
    """The last line of a command that fails."""

    error: ErrorDetails


class Started(TypedDict):
    """The run begins, or continues at `first_step`."""

    event: Literal["started"]
    run: str | None
    """The run's folder."""
    title: str
    facts: Mapping[str, str]
    """Names and values, such as the model."""
    first_step: int
    steps: int
    """Number of the last step."""
    token_budget: int | None
    """Sampled tokens after which the run ends."""


class Step(TypedDict):
    """A step is done."""

    event: Literal["step"]
    step: int
    metrics: Metrics
    """As in metrics.jsonl (docs/metrics.md); null = not finite."""


class Evaluation(TypedDict):
    """An evaluation of the weights after `step` steps; 0 = before training."""

    event: Literal["evaluation"]
    step: int
    metrics: Metrics
    """eval/reward, eval/reward_stderr and so on."""


class Note(TypedDict):
    """A warning or remark."""

    event: Literal["note"]
    text: str


class Phase(TypedDict):
    """What the run does now, where that takes long."""

    event: Literal["phase"]
    text: str


class Finished(TypedDict):
    """The last line: the run is complete, or stopped and can be resumed."""

    event: Literal["finished", "stopped"]
    run: str
    """The run's folder."""
    steps: int
    """Steps done."""
    model: str | None
    """Folder of the trained model; null if the run stopped."""
    result: Mapping[str, Any] | None
    """The content of result.json; null if the run stopped."""
    resume: list[str] | None
    """The command that continues a stopped run."""
    exit_code: int


class Configuration(TypedDict):
    """--dry-run: the configuration, the only line."""

    event: Literal["configuration"]
    toml: str
    """For --config."""


class Estimate(TypedDict):
    """A value and its 95 % bootstrap interval."""

    value: float
    low: float
    high: float


_EvalPass = TypedDict("_EvalPass", {"pass": Mapping[str, float]})  # a keyword, so that a class cannot have it


class EvalRow(_EvalPass):
    """One model: mean@k, `pass` (k -> pass@k) and maj@k."""

    model: str
    task: str
    eval_data: str | None
    problems: int
    samples: int
    """Completions per problem, k."""
    mean: float
    """mean@k."""
    stderr: float
    """Its standard error over problems."""
    majority: float
    """maj@k."""
    failed: int
    """Completions without a reward."""
    truncated: int
    """Completions cut off."""
    tokens: int
    notes: list[str]


class EvalBenchmarks(TypedDict):
    """With --benchmark: an object for each, or with `list` what is known of each."""

    benchmarks: list[Mapping[str, Any]]
    """docs/known-benchmarks.md lists the fields."""


_DifferencePass = TypedDict("_DifferencePass", {"pass": Mapping[str, Estimate]})


class EvalDifference(_DifferencePass):
    """The first model less another one, over the same problems."""

    model: str
    less: str
    mean: Estimate
    majority: Estimate


class EvalModels(TypedDict):
    """Several models."""

    models: list[EvalRow]
    differences: list[EvalDifference]
    level: float
    """Of the intervals."""


class Serving(TypedDict):
    """The server listens."""

    event: Literal["serving"]
    url: str
    models: list[str]
    api_key: str
    """What clients set TINKER_API_KEY to, or a hint at it."""


class ServerStopped(TypedDict):
    """The server has stopped."""

    event: Literal["stopped"]


class EngineCommand(TypedDict):
    """The command that starts the server; without --print it is started after this line."""

    environment: Mapping[str, str]
    argv: list[str]


class EngineInstalled(TypedDict):
    """install: what was installed."""

    engine: str
    version: str
    folder: str
    train: list[str]
    """The command of a run that uses it."""


class EngineCheck(TypedDict):
    """check: the server samples from the model."""

    engine: str
    url: str
    model: str
    tokens: int
    """Tokens compared."""
    difference: float
    """Largest difference of log-probabilities, nats."""


class Exported(TypedDict):
    """What was written."""

    path: str
    """The folder, or the GGUF file."""
    url: str | None
    """Where --push uploaded it."""


class PlannedCommand(TypedDict):
    """A run of a comparison."""

    row: str
    seed: int
    tuned_option: str
    """Option that is tuned; empty if none is."""
    best_of: list[float]
    """A reported run of a tuned row takes the best of these values; `argv` has the first."""
    argv: list[str]


class PlannedCommands(TypedDict):
    """--dry-run: every run's command."""

    commands: list[PlannedCommand]


class Preregistered(TypedDict):
    """--preregister: the file that was written."""

    preregistration: str
    sha256: str
    date: str


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


class MachineCheck(TypedDict):
    """One line."""

    group: str
    name: str
    value: str
    status: Literal["ok", "--", "!!"]
    """ok, -- absent, or !! a problem."""
    remedy: str


class DoctorOutput(TypedDict):
    """The machine."""

    findings: list[MachineCheck]


class FindingOutput(TypedDict):
    """What was compared, and how it came out."""

    subject: str
    status: Literal["holds", "differs", "not checked"]
    message: str
    step: int | None
    error: float | None
    """Largest difference, relative to the largest number."""
    factor: float | None
    """The value over the expected one, where they differ by a factor."""


class VerifyOutput(TypedDict):
    """The checks of a run; exit code 1 if one differs."""

    run: str
    status: Literal["holds", "differs", "not checked"]
    summary: str
    findings: list[FindingOutput]


class AuditOutput(TypedDict):
    """What reproduces a recording; exit code 1 if `agrees` is false."""

    source: str
    agrees: bool
    findings: list[FindingOutput]


class ReportOutput(TypedDict):
    """The page."""

    page: str | None
    """The file that was written; null with --watch."""
    url: str | None
    """The live page of --watch."""
    runs: list[str]
    """The runs' folders."""


class ShowList(TypedDict):
    """Without a name."""

    kind: Literal["list"]
    algorithms: Mapping[str, list[str]]
    """Family -> names."""
    parts: Mapping[str, list[str]]
    """Field of an algorithm -> names."""


class ShowAlgorithm(TypedDict):
    """An algorithm."""

    kind: Literal["algorithm"]
    name: str
    equation: Mapping[str, str]
    """Symbol -> formula."""
    parts: Mapping[str, Any]
    """Field -> the part and its settings."""
    info: Mapping[str, Any] | None
    """Title, source, what it addresses, failure modes; null for your own."""


class ShowPart(TypedDict):
    """A part."""

    kind: Literal["part"]
    name: str
    places: list[str]
    """Fields of an algorithm that it fits."""
    text: str
    settings: Mapping[str, str]
    """Setting -> its description."""
    used_by: list[str]


class ShowMetric(TypedDict):
    """A metric."""

    kind: Literal["metric"]
    name: str
    unit: str
    text: str
    interpretation: str


class ShowBenchmark(TypedDict):
    """A known benchmark: its data, prompt, sampling and graders, each with its source."""

    kind: Literal["benchmark"]
    name: str
    title: str
    repository: str
    revision: str
    sources: Mapping[str, str]
    """Choice -> where it is written."""


class LabRow(TypedDict):
    """An algorithm's estimator against the true gradient."""

    name: str
    on_policy: Mapping[str, Any]
    off_policy: Mapping[str, Any]


class LabFinding(TypedDict):
    """A claim from the literature, measured."""

    name: str
    claim: str
    holds: bool
    sentence: str
    numbers: Metrics
    error: float | None
    """Standard error of the decisive number; null = exact."""
    curves: Mapping[str, list[float | None]]


class LabOutput(TypedDict):
    """The measurements."""

    world: str
    parts: list[str]
    group_size: int
    off_policy_kl: float
    seed: int
    algorithms: list[LabRow]
    findings: list[LabFinding]


class LabExperiments(TypedDict):
    """--list-experiments: name -> what it measures."""

    experiments: Mapping[str, str]


class ControlOutput(TypedDict):
    """Training on a Gymnasium environment."""

    env: str
    algorithm: str
    equation: Mapping[str, str]
    settings: Mapping[str, Any]
    seed: int
    steps: int
    """Environment steps."""
    curve: list[Mapping[str, Any]]
    evaluation: Mapping[str, Any]
    """returns, mean, standard_error, greedy."""


AlgorithmMatrix = Mapping[str, Mapping[str, Any]]
"""Name -> its parts, with their settings."""


class SkillEntry(TypedDict):
    """A guide."""

    name: str
    description: str
    path: str | None
    """The file that was written."""


class SkillsOutput(TypedDict):
    """The guides."""

    skills: list[SkillEntry]


_THIS = "policygrad.commands.json_schemas"
RUN_EVENTS = tuple(
    f"{_THIS}:{name}" for name in ("Started", "Phase", "Evaluation", "Step", "Note", "Finished", "Configuration")
)
OUTPUTS: dict[str, tuple[str, ...]] = {
    "train": RUN_EVENTS,
    "sft": RUN_EVENTS,
    "reward-model": RUN_EVENTS,
    "eval": (f"{_THIS}:EvalRow", f"{_THIS}:EvalModels", f"{_THIS}:EvalBenchmarks"),
    "serve": (f"{_THIS}:Serving", f"{_THIS}:ServerStopped"),
    "proxy": (f"{_THIS}:Serving", f"{_THIS}:ServerStopped"),
    "engine": (f"{_THIS}:EngineCommand", f"{_THIS}:EngineInstalled", f"{_THIS}:EngineCheck"),
    "export": (f"{_THIS}:Exported",),
    "compare": ("policygrad.compare.report:ComparisonReport", f"{_THIS}:PlannedCommands", f"{_THIS}:Preregistered"),
    "plan": (f"{_THIS}:PlanOutput", f"{_THIS}:Calibrated"),
    "doctor": (f"{_THIS}:DoctorOutput",),
    "verify": (f"{_THIS}:VerifyOutput",),
    "report": (f"{_THIS}:ReportOutput",),
    "audit": (f"{_THIS}:AuditOutput",),
    "algorithms": (f"{_THIS}:AlgorithmMatrix",),
    "show": tuple(
        f"{_THIS}:{name}" for name in ("ShowList", "ShowAlgorithm", "ShowPart", "ShowMetric", "ShowBenchmark")
    ),
    "lab": (f"{_THIS}:LabOutput", f"{_THIS}:LabExperiments", f"{_THIS}:ControlOutput"),
    "skills": (f"{_THIS}:SkillsOutput",),
}
"""Command -> the types, as module:NAME, of what it prints. `completion` prints a script and has no --json."""
LINES = ("train", "sft", "reward-model", "serve", "proxy")
"""Commands that print several lines, an event each; the other ones print one object."""


def build_schema(command: str) -> Schema:
    """Return the JSON Schema (draft 2020-12) of each line that `policygrad COMMAND --json` prints.

    Raises:
        ConfigError: The command has no --json.
    """
    if command not in OUTPUTS:
        raise ConfigError(f"{command} has no --json: its output is a script. These have: {', '.join(OUTPUTS)}")
    forms = [to_schema(load_type(name)) for name in (*OUTPUTS[command], f"{_THIS}:Error")]
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"policygrad {command} --json" + (", each line" if command in LINES else ""),
        "anyOf": forms,
    }


def load_type(name: str) -> Any:
    """Return the type that `module:NAME` names."""
    module, _, attribute = name.partition(":")
    return getattr(import_module(module), attribute)


def to_schema(kind: Any) -> Schema:
    """Return the JSON Schema of a TypedDict, a dataclass, or a type that these consist of."""
    simple: dict[Any, Schema] = {
        Any: {},
        None: {"type": "null"},
        type(None): {"type": "null"},
        bool: {"type": "boolean"},
        int: {"type": "integer"},
        float: {"type": "number"},
        str: {"type": "string"},
        Path: {"type": "string"},
    }
    if kind in simple:
        return dict(simple[kind])
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return {"anyOf": [to_schema(argument) for argument in arguments]}
    if origin is Literal:
        return {"enum": list(arguments)}
    if origin in (list, tuple, Sequence):
        return {"type": "array", "items": to_schema(arguments[0])}
    if origin in (dict, Mapping):
        return {"type": "object", "additionalProperties": to_schema(arguments[1])}
    if not (is_typeddict(kind) or is_dataclass(kind)):
        raise TypeError(f"{kind!r} has no JSON Schema")
    hints, texts, properties = get_type_hints(kind), read_field_docs(kind, comments=True), dict[str, Schema]()
    for name in hints if is_typeddict(kind) else [f.name for f in fields(kind)]:
        schema, text = to_schema(hints[name]), texts.get(name)
        if text:  # an object keeps its own description inside
            schema = (
                {"allOf": [schema], "description": text} if "description" in schema else schema | {"description": text}
            )
        properties[name] = schema
    return {
        "title": kind.__name__,
        "description": " ".join((kind.__doc__ or "").split()),
        "type": "object",
        "properties": properties,
        "required": list(properties),
    }
