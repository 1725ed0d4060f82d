"""`policygrad doctor`: what this machine is, what of policygrad works on it, and what would make the rest work."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import socket
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Final, Literal, TypedDict
from urllib.parse import urlsplit, urlunsplit

from policygrad.commands.json_output import print_json, prints
from policygrad.commands.parsing import parse_arguments
from policygrad.commands.styled import HEAD, NAME, QUIET, StyledLine, get_terminal_width, print_lines, wrap_styled
from policygrad.errors import ConfigError, PolicygradError, install_command
from policygrad.rewards.workers.limits import format_size
from policygrad.training.config.optional_arg import optional_arg
from policygrad.utils.memory import read_meminfo
from policygrad.utils.plugins import KINDS, Plugin, list_plugins

HELP = (
    "Show what this machine is and what works on it, a line each, with what to do about the rest. Nothing is changed, and nothing "
    "is sent anywhere, except that the hub is asked whether it answers.",
    "policygrad doctor --model Qwen3-0.6B  also tells whether a model can be trained here",
)
OK: Final = "ok"
ABSENT: Final = "--"
PROBLEM: Final = "!!"
"""It works; it is not there, and only needed by what its line names; it does not work, or will fail."""
MIN_SHM, MIN_DISK, MIN_FILES = 2**30, 10 * 2**30, 4096
"""Bytes of /dev/shm and of a disk, and open files, below which a run may fail."""
TOKENS = ("HF_TOKEN", "WANDB_API_KEY", "MLFLOW_TRACKING_TOKEN", "OPENAI_API_KEY", "ANTHROPIC_API_KEY", "TINKER_API_KEY")
RECURRENT_KERNELS = {"flash-linear-attention": "fla", "causal-conv1d": "causal_conv1d"}
"""Packages that transformers uses on a GPU where they are installed, and their modules."""
_HUB_TIMEOUT = 3.0  # seconds


@dataclass(frozen=True)
class DoctorOptions:
    """Options of `policygrad doctor`."""

    model: Annotated[str | None, optional_arg("SHAPE", "none")] = None
    """Also tell whether this model fits: a name such as Qwen3-0.6B, a config.json, or a folder with one."""
    python: Annotated[str | None, optional_arg("PATH", "this environment")] = None
    """Look for engines in this virtual environment, or that of this Python (--sampler.python of train)."""
    json: bool = False
    """Print one JSON object instead of lines."""


@dataclass(frozen=True)
class MachineCheck:
    """One line."""

    group: str
    name: str
    value: str
    status: Literal["ok", "--", "!!"] = OK
    """ok, -- absent, or !! a problem."""
    remedy: str = ""


class DoctorOutput(TypedDict):
    """The machine."""

    findings: list[MachineCheck]


@prints(DoctorOutput)
def doctor(args: list[str]) -> int:
    """Run `policygrad doctor [options]`."""
    options = parse_arguments(DoctorOptions, args, "doctor", *HELP)
    findings = [*examine_machine(), *examine_torch(), *examine_engines(options.python), *examine_packages()]
    findings += [*examine_hub(os.environ)]
    if options.model is not None:
        findings += examine_model(options.model)
    if options.json:
        print_json({"findings": [asdict(finding) for finding in findings]})
    else:
        print_lines(format_findings(findings, get_terminal_width()))
    return 0


def examine_machine() -> Iterator[MachineCheck]:
    """System, memory, disks, limits, the sandbox."""
    yield MachineCheck(
        "Machine", "system", f"{platform.system()} {'.'.join(platform.release().split('.')[:2])}, {platform.machine()}"
    )
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    yield MachineCheck("Machine", "processor", f"{cores} cores, {'bf16' if has_bf16() else 'no bf16'} products")
    memory = read_meminfo()
    if memory:
        total, free = memory["MemTotal"], memory["MemAvailable"]
        yield MachineCheck("Machine", "memory", f"{format_size(total)}, {format_size(free)} of it free")
    shm = Path("/dev/shm")
    if shm.is_dir():
        yield _judge_room("/dev/shm", shm, MIN_SHM, "in a container: docker run --shm-size 8g, or --ipc=host")
    yield _judge_room("disk of runs", Path.cwd(), MIN_DISK, "a run writes here: choose another disk with --output DIR")
    yield _judge_room("disk of temporary files", Path(tempfile.gettempdir()), MIN_DISK, "TMPDIR names another one")
    yield _examine_open_files()
    try:
        with socket.socket() as free_port:
            free_port.bind(("127.0.0.1", 0))
        yield MachineCheck("Machine", "ports", "servers can listen on 127.0.0.1")
    except OSError as error:
        remedy = "engines, judges and several learners need local ports: allow them to this user or container"
        yield MachineCheck("Machine", "ports", f"none can be opened: {error}", PROBLEM, remedy)
    yield _examine_sandbox()
    yield _examine_containers()


def examine_torch() -> Iterator[MachineCheck]:
    """Python, torch and its build, GPUs, precision, compilers, attention kernels."""
    import torch

    from policygrad.learners.local.compilation import COMPILERS
    from policygrad.utils.devices import choose_device, multiplies_in_bf16

    python = f"{platform.python_version()} in {_shorten(Path(sys.prefix))}"
    yield MachineCheck("Learner", "python", python)
    for package in ("policygrad", "transformers"):
        yield MachineCheck("Learner", package, importlib.metadata.version(package))
    build = (
        f"CUDA {torch.version.cuda}" if torch.version.cuda else f"HIP {torch.version.hip}" if torch.version.hip else ""
    )
    build = build or "for the CPU"
    yield MachineCheck("Learner", "torch", f"{torch.__version__}, built {build}, {torch.get_num_threads()} threads")
    count = torch.cuda.device_count()
    if not count:
        has_driver = shutil.which("nvidia-smi") is not None
        remedy = "torch is built for the CPU: install a build for CUDA" if has_driver and not torch.version.cuda else ""
        remedy = remedy or ("torch does not find it: is its driver newer than torch's CUDA?" if has_driver else "")
        value = (
            "a driver, but none that torch can use"
            if has_driver
            else "none: models of some million parameters learn on a CPU"
        )
        yield MachineCheck("Learner", "gpu", value, PROBLEM if has_driver else ABSENT, remedy)
    for index in range(count):
        properties = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        capability = f"compute capability {properties.major}.{properties.minor}"
        value = f"{properties.name}, {format_size(total)}, {format_size(free)} of it free, {capability}"
        is_taken = free < total / 2
        remedy = "another process holds most of it: nvidia-smi names it" if is_taken else ""
        yield MachineCheck("Learner", f"gpu {index}", value, PROBLEM if is_taken else OK, remedy)
    for kind, maker in (("xpu", "Intel"), ("mps", "Apple")):
        if getattr(torch, kind).is_available():
            remedy = f"--learner.device {kind} uses it, which was not tested on one"
            yield MachineCheck("Learner", f"gpu {kind}", f"of {maker}", OK, remedy)
    on_gpu = multiplies_in_bf16(choose_device())
    precision = "bf16, as the GPU multiplies in it" if on_gpu else "fp32"
    yield MachineCheck("Learner", "--learner.dtype auto", precision)
    compiler = next(filter(shutil.which, COMPILERS), None)
    needed = "" if compiler else "it is needed by --learner.compile and by torch's own kernels: apt install g++"
    yield MachineCheck("Learner", "C++ compiler", compiler or "none", OK if compiler else ABSENT, needed)
    kernel = "scaled_dot_product_attention"
    yield MachineCheck(
        "Learner", "attention", f"FlexAttention where texts share prefixes, else {kernel}" if count else kernel
    )
    if count:
        yield examine_recurrent_kernels()


def examine_recurrent_kernels() -> MachineCheck:
    """Check whether delta rules and Mamba have kernels on a GPU."""
    missing = [package for package, module in RECURRENT_KERNELS.items() if importlib.util.find_spec(module) is None]
    if not missing:
        return MachineCheck("Learner", "recurrent layers", " and ".join(RECURRENT_KERNELS))
    remedy = f"Qwen 3.5, Nemotron and others with delta rules or Mamba are faster with: pip install {' '.join(missing)}"
    return MachineCheck("Learner", "recurrent layers", "transformers' own operations", ABSENT, remedy)


def examine_engines(python: str | None) -> Iterator[MachineCheck]:
    """Each engine: where it is, and which version.

    Args:
        python: `sampler.python`.
    """
    from policygrad.samplers.engines.installation import find_installation, find_python
    from policygrad.samplers.engines.registry import ENGINES, load_engine_class

    find_python(python)  # an error, if it is none
    yield MachineCheck("Sampler", "local", "this process")
    for name in ENGINES:
        engine = load_engine_class(name)
        if importlib.util.find_spec("httpx") is None:
            yield MachineCheck("Sampler", name, "its client needs httpx", ABSENT, install_command("engines"))
            continue
        installation = None
        for place in dict.fromkeys((python, None)):
            with suppress(ConfigError):  # it is not there
                installation = installation or find_installation(engine, name, place)
        if installation is None:
            remedy = (
                f"`policygrad engine install {name} --into DIR`, then --python DIR here, --sampler.python DIR in a run"
            )
            yield MachineCheck("Sampler", name, f"{engine.name} is not found", ABSENT, remedy)
        else:
            environment = _shorten(Path(installation.python).parent.parent)
            yield MachineCheck("Sampler", name, f"{engine.name} {installation.version} in {environment}")


def examine_packages() -> Iterator[MachineCheck]:
    """The extras of the package that are installed, and what installs each of the others."""
    extras = {extra: missing for extra, missing in find_extras().items() if extra not in ("dev", "docs")}
    installed = [extra for extra, missing in extras.items() if not missing]
    yield MachineCheck("Extras", "installed", ", ".join(installed) or "none", OK if installed else ABSENT)
    for extra, missing in extras.items():
        if missing:
            yield MachineCheck("Extras", extra, f"without {', '.join(missing)}", ABSENT, install_command(extra))
    for plugin in list_plugins():
        yield _examine_plugin(plugin)


def _examine_plugin(plugin: Plugin) -> MachineCheck:
    """MachineCheck what another package adds, without importing it."""
    name, what = f"{plugin.kind} {plugin.name}", f"{plugin.target} of {plugin.package}"
    if plugin.kind not in KINDS:
        return MachineCheck("Plugins", name, f"{what}: it adds nothing, the kinds are {', '.join(KINDS)}", ABSENT)
    return MachineCheck("Plugins", name, what)


def examine_hub(environment: Mapping[str, str]) -> Iterator[MachineCheck]:
    """Check whether models can be downloaded, which are here already, and which keys are set: their names, never their values."""
    from huggingface_hub import constants, scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    endpoint, shown = constants.ENDPOINT, hide_password(constants.ENDPOINT)
    if constants.HF_HUB_OFFLINE:
        yield MachineCheck("Hub", shown, "not asked, as HF_HUB_OFFLINE is set", ABSENT, "unset it to download models")
    else:
        answer = ask_hub(endpoint)
        remedy = "" if not answer else "models come from folders and the cache: --model DIR. HF_ENDPOINT names a mirror"
        yield MachineCheck("Hub", shown, answer or "answers", ABSENT if answer else OK, remedy)
    cache = Path(constants.HF_HUB_CACHE)
    try:
        cached = scan_cache_dir(cache)
        value = f"{len(cached.repos)} repositories, {format_size(cached.size_on_disk)}"
    except (CacheNotFound, ValueError):
        value = "empty"
    yield MachineCheck("Hub", "cache", f"{_shorten(cache)}: {value}")
    names = [name for name in TOKENS if environment.get(name)]
    yield MachineCheck("Hub", "keys that are set", ", ".join(names) or "none", OK if names else ABSENT)


def examine_model(model: str) -> list[MachineCheck]:
    """Estimate whether a model can be trained by GRPO on this machine's device, and what to change if it cannot.

    A step has 128 completions of up to 1,792 tokens.
    """
    import torch

    from policygrad.commands.plan import count_layers
    from policygrad.planning.cost_model import MICRO_TOKENS, MICRO_TOKENS_CPU, ParallelLayout, Workload
    from policygrad.planning.hardware import DEVICES, Efficiency
    from policygrad.planning.model_shapes import load_shape
    from policygrad.planning.planner import CapacityPlan, PlanRequest, suggest_changes
    from policygrad.training.config.serialization import load_algorithm
    from policygrad.training.cost_estimate import compute_plannable_cost

    shape, on_gpu = load_shape(model, count_layers), torch.cuda.device_count() > 0
    device = DEVICES["H100" if on_gpu else "cpu"]  # of which only the memory matters here
    if on_gpu:
        device = replace(device, memory=torch.cuda.get_device_properties(0).total_memory)
    elif meminfo := read_meminfo():
        device = replace(device, memory=meminfo["MemAvailable"])
    workload = Workload(
        prompts=16, samples_per_prompt=8, prompt_tokens=256, completion_tokens=512, max_completion_tokens=1792
    )
    layout = ParallelLayout(
        gpus=1,
        dtype="bf16" if on_gpu else "fp32",
        micro_tokens=MICRO_TOKENS if on_gpu else MICRO_TOKENS_CPU,
        decode_rows=workload.num_completions,
    )
    cost = compute_plannable_cost(load_algorithm("grpo"))
    plan = CapacityPlan(PlanRequest(shape, device, workload, cost, Efficiency()), layout)
    size = f"{shape.parameters / 1e9:.2f}B parameters in {layout.dtype}"
    need = f"{format_size(int(plan.peak_bytes))} of {format_size(int(plan.usable_bytes))} that can be used"
    if plan.fits:
        return [MachineCheck("Model", shape.name, f"{size}: fits, {need}")]
    changes = "; ".join(change.description for change in suggest_changes(plan)) or "adapters, --learner.lora rank=16"
    remedy = f"{changes}. `policygrad plan --model {model}` has the details, and counts other devices"
    return [MachineCheck("Model", shape.name, f"{size}: does not fit, {need}", PROBLEM, remedy)]


def format_findings(findings: list[MachineCheck], width: int) -> list[StyledLine]:
    """Format the lines by group, each remedy below its line."""
    lines: list[StyledLine] = []
    names = max(len(finding.name) for finding in findings)
    text, group = max(60, min(width, 120)), ""
    for finding in findings:
        if finding.group != group:
            lines += [()] * bool(group) + [((finding.group, HEAD),)]
            group = finding.group
        style = {OK: "green", ABSENT: QUIET, PROBLEM: "bold red"}[finding.status]
        start = ((f"  {finding.status}  ", style), (f"{finding.name.ljust(names)}  ", NAME))
        lines += wrap_styled(start, finding.value, text)
        if finding.remedy:
            lines += wrap_styled(((" " * (names + 8), ""),), finding.remedy, text, QUIET)
    return lines


def find_extras() -> dict[str, list[str]]:
    """Return the extras of the package by name, each with the packages that it lacks."""
    extras: dict[str, list[str]] = {}
    for requirement in importlib.metadata.requires("policygrad") or ():
        match = re.match(r"([\w.-]+)(?:\[[^]]*\])?.*;.*extra == ['\"]([\w-]+)['\"]", requirement)
        if match is None:
            continue
        package, extra = match.groups()
        missing = extras.setdefault(extra, [])
        try:
            importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            missing.append(package)
    return dict(sorted(extras.items()))


def hide_password(url: str) -> str:
    """Return an address without the user and password that it may hold."""
    parts = urlsplit(url)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2])) if "@" in parts.netloc else url


def ask_hub(endpoint: str) -> str:
    """Ask whether the hub answers.

    Returns:
        Why it does not; "" if it does.
    """
    import httpx

    try:
        httpx.head(endpoint, timeout=_HUB_TIMEOUT)
    except httpx.HTTPError as error:
        return f"does not answer ({type(error).__name__})"
    return ""


def has_bf16() -> bool:
    """Return whether the processor multiplies in bfloat16."""
    from policygrad.models.loading import has_bf16_products

    return has_bf16_products()


def _judge_room(name: str, path: Path, least: int, remedy: str) -> MachineCheck:
    free = shutil.disk_usage(path).free
    is_short = free < least
    return MachineCheck(
        "Machine", name, f"{format_size(free)} free", PROBLEM if is_short else OK, remedy if is_short else ""
    )


def _examine_open_files() -> MachineCheck:
    try:
        import resource
    except ImportError:  # Windows
        return MachineCheck("Machine", "open files", "no limit is known", ABSENT)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    is_short = soft < MIN_FILES
    remedy = f"ulimit -n {min(hard, 65536)}: engines and environments open one per connection" if is_short else ""
    return MachineCheck("Machine", "open files", f"up to {soft:,}", PROBLEM if is_short else OK, remedy)


def _examine_sandbox() -> MachineCheck:
    from policygrad.sandbox.backends import find_backend

    try:
        return MachineCheck("Machine", "sandbox for programs", find_backend().name)
    except PolicygradError as error:
        reason, _, remedy = str(error).partition(". ")
        return MachineCheck("Machine", "sandbox for programs", reason, ABSENT, remedy)


def _examine_containers() -> MachineCheck:
    from policygrad.sandbox.containers import ENGINES, explain_engine, find_engine

    if engine := find_engine():
        return MachineCheck("Machine", "container engine", engine)
    reason = "; ".join(f"{name}: {explain_engine(name)}" for name in ENGINES)
    remedy = (
        "tasks in Harbor's format whose Dockerfile installs something need one: install podman, or docker and start it"
    )
    return MachineCheck("Machine", "container engine", f"none works: {reason}", ABSENT, remedy)


def _shorten(path: Path) -> str:
    """Return a path relative to the current folder or the home directory, if it is in one of them."""
    for base, prefix in ((Path.cwd(), ""), (Path.home(), "~/")):
        if path.is_relative_to(base):
            return prefix + str(path.relative_to(base))
    return str(path)
