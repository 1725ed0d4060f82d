"""`policygrad engine`: how a server has to be started, and whether one that runs draws from a model."""

from __future__ import annotations

import asyncio
import os
import shlex
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from policygrad.commands.render import wrap_paragraphs
from policygrad.errors import ConfigError, EngineError
from policygrad.models.lora_config import adapter_base, parse_lora, read_lora
from policygrad.samplers.config import TAKE_ADAPTERS, SamplerConfig

HELP = (
    "A server that completions are drawn by: ENGINE is llama_cpp, vllm or sglang, whose program is started here, or with --print "
    "shown; check is for one that runs already.",
    "policygrad engine vllm --model M --print  says the environment and the words that a server has to be started with",
    "policygrad engine check URL --model M  compares what a server draws with the model's own distribution",
)
_CONFIG = (tyro.conf.FlagCreatePairsOff, tyro.conf.AvoidSubcommands)
DTYPES = {"fp32": "float32", "bf16": "bfloat16"}


@dataclass(frozen=True)
class EngineOptions:
    """Options of `policygrad engine`."""

    target: Annotated[
        tyro.conf.Positional[Literal["llama_cpp", "vllm", "sglang", "check"]], tyro.conf.arg(metavar="ENGINE|check")
    ]
    """Which engine; or check, for the server at URL."""
    url: Annotated[tyro.conf.Positional[str | None], tyro.conf.arg(metavar="[URL]")] = None
    """check: the server, http://host:port."""
    model: Annotated[str, tyro.conf.arg(metavar="ID|DIR")] = "tiny"
    """Directory or hub id; tiny = the base model inside the package; a run's folder = the model it trained."""
    print: bool = False
    """Only say how it is started."""
    folder: Annotated[str | None, tyro.conf.arg(metavar="DIR")] = None
    """llama_cpp: the folder that the server follows, the run's --sampler.folder."""
    host: str = "127.0.0.1"
    """Where it listens; whoever reaches it can give it weights."""
    port: int = 8000
    """At which port."""
    dtype: str = "fp32"
    """fp32 or bf16: the learner's precision."""
    context_length: int = 4096
    """Tokens of a prompt and its completion, at most as many as the model reads."""
    max_concurrency: int = 16
    """Requests at a time: --sampler.max-concurrency."""
    lora: Annotated[str, tyro.conf.arg(metavar="rank=…")] = ""
    """vllm, sglang: the run's --learner.lora, whose adapter is sent alone; empty = whole weights are."""
    threads: int = 0
    """llama_cpp: threads; 0 = as many as there are cores."""
    weight_transport: Literal["folder", "nccl"] = "folder"
    """vllm: how the run sends weights: --sampler.weight-transport."""
    temperature: float = 1.0
    """check: the run's."""
    logprob_tolerance: float = 0.0
    """check: nats by which log-probabilities may differ; 0 = 1e-4 in fp32, 0.2 in bf16."""

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ConfigError(f"--dtype must be fp32 or bf16, not {self.dtype!r}")
        if (self.target == "check") is not (self.url is not None):
            raise ConfigError(
                "a server's address is for check: policygrad engine check http://127.0.0.1:8000 --model M"
            )
        if self.weight_transport == "nccl" and self.target == "llama_cpp":
            raise ConfigError(
                "a server of llama.cpp takes no weights over NCCL: leave --transfer away, or take vllm or sglang"
            )
        if self.lora and self.target not in TAKE_ADAPTERS:
            raise ConfigError(f"--lora is for servers of {' and '.join(TAKE_ADAPTERS)}: leave it out for {self.target}")
        if (lora := parse_lora(self.lora)) is not None and lora.bits is not None:
            raise ConfigError(
                "--lora: bits are the learner's, and a server's weights are as its own options say: leave bits out"
            )
        if self.target == "llama_cpp" and self.folder is None:
            raise ConfigError(
                "a server of llama.cpp follows a folder of weights: --folder DIR, and DIR for --sampler.folder of the run"
            )


def engine(args: list[str]) -> int:
    """`policygrad engine ENGINE|check …`."""
    options = tyro.cli(
        EngineOptions, args=args, prog="policygrad engine", description=wrap_paragraphs(*HELP), config=_CONFIG
    )
    if options.target == "check":
        return _check(options)
    environment, words = build_launch_command(options)
    if options.print:
        print(" ".join([*(f"{name}={value}" for name, value in environment.items()), shlex.join(words)]))
        return 0
    os.environ |= environment | {
        "PYTHONSAFEPATH": "1"
    }  # for the server's own processes too, whose Python may be another
    try:
        os.execvp(words[0], words)
    except OSError as error:
        raise EngineError(f"{words[0]} cannot be started ({error}): install the engine, or run it elsewhere") from error


def build_launch_command(options: EngineOptions) -> tuple[dict[str, str], list[str]]:
    """The environment and the words that start a server."""
    from policygrad.models.loading import resolve_model
    from policygrad.samplers.engines.launch import COMMANDS, LaunchOptions

    model, lora = resolve_model(options.model), parse_lora(options.lora)
    base = adapter_base(model)
    if (
        base is not None and options.target in TAKE_ADAPTERS
    ):  # an adapter's folder, and servers begin with what it adapts
        model, lora = base, lora or read_lora(model)
    context = min(options.context_length, _reads(model) or options.context_length)
    start = LaunchOptions(
        model=model,
        folder=str(Path(options.folder or ".").expanduser().resolve()),
        host=options.host,
        port=options.port,
        dtype=DTYPES[options.dtype],
        context_length=context,
        max_concurrency=options.max_concurrency,
        threads=options.threads or os.cpu_count() or 1,
        nccl=options.weight_transport == "nccl",
        lora=lora,
    )
    return COMMANDS[options.target](start)


def _reads(model: str) -> int | None:
    """Tokens that a model reads at most, as its configuration says."""
    from transformers import AutoConfig

    from policygrad.models.loading import load_error, pretrained_kwargs, read_config

    read_config(model, f"the model {model!r}")
    try:
        config = AutoConfig.from_pretrained(model, **pretrained_kwargs(False))
    except (OSError, ValueError) as error:
        raise load_error(f"the model {model!r}", error, "config.json and safetensors", model) from error
    return getattr(config, "max_position_embeddings", None)


def _check(options: EngineOptions) -> int:
    from policygrad.models.loading import load_model, resolve_model
    from policygrad.models.tokenizer import load_tokenizer
    from policygrad.samplers.engines.registry import build_engine_sampler, detect_engine

    url = str(options.url).rstrip("/")
    name = asyncio.run(detect_engine(url))
    config = SamplerConfig(
        engine=name, urls=(url,), max_concurrency=options.max_concurrency, logprob_tolerance=options.logprob_tolerance
    )
    named = (
        adapter_base(resolve_model(options.model)) or options.model
    )  # an adapter is sent to it, beside what it draws from now
    model = load_model(named, dtype=options.dtype)
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = load_tokenizer(named, model)
        sampler = build_engine_sampler(config, model, tokenizer, Path(folder) / "weights", options.temperature)

        async def probed() -> str:
            try:
                await sampler.handshake(url)
                found = await sampler.probe(url)
            finally:
                await sampler.close()
            return f"{found.tokens} tokens, log-probabilities within {found.difference:.2g} nats of the model's own"

        print(f"{sampler.name} at {url} draws from {named}: {asyncio.run(probed())}")
    return 0
