"""`policygrad engine`: start a server of an engine, show how it is started, install one, or check a running one."""

from __future__ import annotations

import asyncio
import os
import shlex
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from operator import attrgetter
from pathlib import Path
from typing import Annotated, TypedDict

import tyro

from policygrad.commands.json_output import print_json, prints
from policygrad.commands.parsing import parse_arguments
from policygrad.errors import ConfigError, EngineError
from policygrad.models.lora_config import adapter_base, parse_lora, read_lora
from policygrad.rewards.config import VARIABLE_NAMES
from policygrad.samplers.config import FOLDER, NCCL, WEIGHT_TRANSPORTS, SamplerConfig
from policygrad.samplers.engines.factory import build_engine_sampler, detect_engine
from policygrad.samplers.engines.installation import find_installation, install, is_installed_here
from policygrad.samplers.engines.llama_server import KEY_VARIABLE
from policygrad.samplers.engines.probe import ProbeResult
from policygrad.samplers.engines.registry import ENGINES, list_engines, load_engine_class
from policygrad.samplers.engines.server_process import LaunchCommand
from policygrad.training.config.optional_arg import optional_arg
from policygrad.utils.child_environment import check_variable_names, filter_environment
from policygrad.utils.http_limits import is_loopback

CHECK, INSTALL = ACTIONS = ("check", "install")
HELP = (
    f"Start a server of an engine ({', '.join(ENGINES)}), or with --print show the command; check compares a running server with a "
    "model; install makes an environment that has an engine. A run starts its servers itself: train --sampler.engine vllm.",
    "policygrad engine install vllm --into DIR  makes a virtual environment, for train --sampler.python DIR",
    "policygrad engine vllm --model M --print  shows the environment and the command that start a server",
    "policygrad engine check URL --model M  compares what a server samples with the model's distribution",
)
DTYPES = {"fp32": "float32", "bf16": "bfloat16"}


@dataclass(frozen=True)
class EngineOptions:
    """Options of `policygrad engine`."""

    target: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="ENGINE|check|install")]
    """The engine; check, for the server at URL; or install, for the engine after it."""
    subject: Annotated[tyro.conf.Positional[str | None], tyro.conf.arg(metavar="[URL|ENGINE]")] = None
    """check: the server, http://host:port; install: the engine."""
    model: Annotated[str, tyro.conf.arg(metavar="ID|DIR")] = "tiny"
    """Directory or hub id; tiny = the embedded base model; a run's folder = the model that it trained."""
    print: bool = False
    """Show the command instead of running it."""
    python: Annotated[str | None, optional_arg("PATH", "this environment")] = None
    """Virtual environment, or its Python, that has the engine."""
    env: Annotated[tuple[str, ...], VARIABLE_NAMES] = ()
    """Environment variables that the server gets besides the default ones (docs/isolation.md), such as a key."""
    into: Annotated[Path | None, optional_arg("DIR", "none")] = None
    """install: the virtual environment to make."""
    requirements: Annotated[tuple[str, ...], optional_arg("SPEC", "the tested version")] = ()
    """install: what pip installs instead, such as vllm==0.33.0."""
    folder: Annotated[str | None, tyro.conf.arg(metavar="DIR")] = None
    """llama_cpp: the folder of weights that the server follows, the run's --sampler.folder."""
    host: str = "127.0.0.1"
    """Address to listen at. On other engines than llama_cpp anyone who can reach it can replace the weights.
    llama_cpp asks who calls from other machines for the key in SAMPLER_API_KEY, which runs send too."""
    port: int = 8000
    """Port to listen at."""
    dtype: str = "fp32"
    """fp32 or bf16: the learner's precision."""
    context_length: int = 4096
    """Maximum tokens of prompt and completion, up to the model's limit."""
    max_concurrency: int = 16
    """Maximum concurrent requests: --sampler.max-concurrency."""
    lora: Annotated[str, tyro.conf.arg(metavar="rank=…")] = ""
    """The run's --learner.lora, whose adapter is sent alone; empty = all weights are sent."""
    routing_replay: bool = False
    """The run's --learner.routing-replay: completions come with the experts of each token."""
    sampling_mask: bool = False
    """The run's --top-p or --top-k is set: completions come with the tokens that these left."""
    threads: int = 0
    """llama_cpp: threads; 0 = one per core."""
    weight_transport: Annotated[str, tyro.conf.arg(metavar="|".join(WEIGHT_TRANSPORTS))] = FOLDER
    """The run's --sampler.weight-transport."""
    temperature: float = 1.0
    """check: the run's temperature."""
    logprob_tolerance: float = 0.0
    """check: largest accepted difference of log-probabilities in nats; 0 = 1e-4 in fp32, 0.2 in bf16."""
    json: bool = False
    """Print one JSON object."""

    def __post_init__(self) -> None:
        if self.target not in (*ENGINES, *ACTIONS):
            raise ConfigError(f"ENGINE must be one of {', '.join((*ENGINES, *ACTIONS))}, not {self.target!r}")
        if self.dtype not in DTYPES:
            raise ConfigError(f"--dtype must be fp32 or bf16, not {self.dtype!r}")
        if self.weight_transport not in WEIGHT_TRANSPORTS:
            raise ConfigError(f"--weight-transport must be {FOLDER} or {NCCL}, not {self.weight_transport!r}")
        check_variable_names(self.env, "--env")
        if self.env and (self.target in ACTIONS or self.print):
            raise ConfigError(
                "--env is for a server that is started here: leave it out with check, install and --print"
            )
        if (self.target in ACTIONS) is not (self.subject is not None):
            raise ConfigError(
                "check takes an address, policygrad engine check http://127.0.0.1:8000 --model M, and install an engine, "
                "policygrad engine install vllm --into DIR; nothing else takes a second word"
            )
        if self.target == INSTALL and (self.subject not in ENGINES or self.into is None):
            raise ConfigError(
                f"install takes one of {', '.join(ENGINES)} and a folder for its virtual environment: policygrad engine install "
                "vllm --into DIR"
            )
        if self.target != INSTALL and (self.into is not None or self.requirements):
            raise ConfigError(f"--into and --requirements are for install: leave them out for {self.target}")
        if (lora := parse_lora(self.lora)) is not None and lora.bits is not None:
            raise ConfigError(
                "--lora: bits are the learner's; the precision of a server's weights is set by its own options. Leave bits out."
            )
        engine = None if self.target in ACTIONS else load_engine_class(self.target)
        for option, is_set, fact in (
            ("--lora", bool(self.lora), "supports_lora"),
            ("--routing-replay", self.routing_replay, "returns_routed_experts"),
            ("--sampling-mask", self.sampling_mask, "returns_sampling_masks"),
        ):
            if is_set and not getattr(engine, fact, False):
                supported = " and ".join(list_engines(attrgetter(fact)))
                raise ConfigError(f"{option} is for servers of {supported}. Leave it out for {self.target}.")
        if getattr(engine, "asks_for_key", False) and not (
            is_loopback(self.host) or self.print or os.environ.get(KEY_VARIABLE)
        ):
            raise ConfigError(
                f"--host {self.host} can be reached from other machines, and {KEY_VARIABLE} is not set, so that whoever reaches it "
                f"may sample: set it to a secret here and where the run is, export {KEY_VARIABLE}=$(openssl rand -hex 32), or "
                "listen at 127.0.0.1"
            )
        if self.weight_transport == NCCL and engine is not None and engine.transfer_class is None:
            raise ConfigError(f"a server of {engine.name} loads no weights over NCCL. Leave --weight-transport out.")


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


@prints(EngineCommand, EngineInstalled, EngineCheck)
def engine(args: list[str]) -> int:
    """Run `policygrad engine ENGINE|check …`."""
    options = parse_arguments(EngineOptions, args, "engine", *HELP)
    if options.target == CHECK:
        return _check(options)
    if options.target == INSTALL:
        return _install(options)
    kind = load_engine_class(options.target)
    environment, argv = build_launch_command(options)
    if not options.print or options.python is not None or is_installed_here(kind):
        argv = find_installation(kind, options.target, options.python, "--python").resolve(argv)
    if options.json:
        print_json({"environment": environment, "argv": argv})  # before the server starts; its output goes to stderr
    if options.print:
        if not options.json:
            print(format_command(environment, argv))
        return 0
    # PYTHONSAFEPATH: for processes that the server starts too, whose Python may be another one
    inherited = filter_environment(os.environ, (*kind.variables, *options.env))
    try:
        os.execvpe(argv[0], [*argv], {**inherited, "PYTHONSAFEPATH": "1", **environment})
    except OSError as error:
        raise EngineError(f"{argv[0]} cannot be started ({error}). Install the engine, or run it elsewhere.") from error


def format_command(environment: Mapping[str, str], argv: Sequence[str]) -> str:
    """Return a command with its environment variables, for a shell."""
    return " ".join([*(f"{name}={shlex.quote(value)}" for name, value in environment.items()), shlex.join(argv)])


def build_launch_command(options: EngineOptions) -> LaunchCommand:
    """Return the environment variables and the argv that start a server."""
    import torch
    from transformers import AutoConfig

    from policygrad.models.loading import load_error, read_config, resolve_model
    from policygrad.samplers.engines.base import LaunchOptions

    engine = load_engine_class(options.target)
    model, lora = resolve_model(options.model), parse_lora(options.lora)
    base = adapter_base(model)
    if base is not None and engine.supports_lora:  # the folder of an adapter: servers start with its base model
        model, lora = base, lora or read_lora(model)
    what = f"the model {model!r}"
    read_config(model, what)
    try:
        config = AutoConfig.from_pretrained(model, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise load_error(what, error, "config.json and safetensors", model) from error
    max_positions = getattr(config.get_text_config(), "max_position_embeddings", None)  # None if it does not tell
    return engine.launch_command(
        LaunchOptions(
            model=model,
            folder=options.folder,
            host=options.host,
            port=options.port,
            dtype=DTYPES[options.dtype],
            context_length=min(options.context_length, max_positions or options.context_length),
            max_concurrency=options.max_concurrency,
            threads=options.threads or os.cpu_count() or 1,
            weight_transport=options.weight_transport,
            lora=lora,
            records_experts=options.routing_replay,
            returns_masks=options.sampling_mask,
            sees=getattr(config, "vision_config", None) is not None,
            on_cpu=not torch.cuda.is_available(),
        )
    )


def _install(options: EngineOptions) -> int:
    name, folder = str(options.subject), Path(str(options.into)).expanduser()
    engine = load_engine_class(name)
    installed = install(engine, folder, options.requirements, lambda text: print(text, file=sys.stderr, flush=True))
    train = ["policygrad", "train", "--sampler.engine", name, "--sampler.python", str(options.into)]
    if options.json:
        print_json({"engine": name, "version": installed.version, "folder": folder, "train": train})
    else:
        print(f"{engine.name} {installed.version} is in {folder}. A run starts its server:")
        print(f"  {shlex.join(train)}")
    return 0


def _check(options: EngineOptions) -> int:
    from policygrad.models.loading import load_model, resolve_model
    from policygrad.models.tokenizer import load_tokenizer

    url = str(options.subject).rstrip("/")
    config = SamplerConfig(
        engine=asyncio.run(detect_engine(url)),
        urls=(url,),
        max_concurrency=options.max_concurrency,
        logprob_tolerance=options.logprob_tolerance,
    )
    # A server samples from the base model until an adapter is loaded.
    name = adapter_base(resolve_model(options.model)) or options.model
    model = load_model(name, dtype=options.dtype)
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = load_tokenizer(name, model)
        sampler = build_engine_sampler(config, model, tokenizer, Path(folder) / "weights", options.temperature)

        async def probe() -> ProbeResult:
            try:
                await sampler.handshake(url)
                return await sampler.probe(url)
            finally:
                await sampler.close()

        result = asyncio.run(probe())
    if options.json:
        print_json({"engine": sampler.name, "url": url, "model": name, **asdict(result)})
    else:
        within = f"{result.tokens} tokens, log-probabilities within {result.difference:.2g} nats of the model's own"
        print(f"{sampler.name} at {url} samples from {name}: {within}")
    return 0
