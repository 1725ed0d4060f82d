"""`policygrad export`: merge an adapter, export a stopped run's model, push a model to a hub, or write a GGUF file."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypedDict

import tyro

from policygrad.commands.json_output import print_json, prints
from policygrad.commands.parsing import parse_arguments
from policygrad.errors import ConfigError
from policygrad.models.loading import check_hub_repo, push_to_hub
from policygrad.models.lora_config import is_model_folder
from policygrad.training.config.optional_arg import optional_arg
from policygrad.training.run_folder import CONFIG_FILES

HELP = (
    "--merge adds the adapter of a run with --learner.lora to the weights of its base model: a folder that loads without peft. "
    "RUN/model is the adapter itself, as PEFT and engines read it.",
    "Without an option, write the model in the last checkpoint of a stopped run of train or sft to RUN/model-step-N. The run can "
    "still be resumed.",
    "--push OWNER/NAME uploads the folder with its model card to the hub: the one that --merge wrote, or RUN/model.",
    "--format gguf writes one file for llama.cpp, Ollama and LM Studio, with tokenizer and chat template: of a run, of a model's "
    "folder, or of a hub id.",
)


@dataclass(frozen=True)
class ExportOptions:
    """Options of `policygrad export`."""

    run: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="RUN|ADAPTER")]
    """A run's folder, or an adapter's; with --format gguf any model's."""
    merge: bool = False
    """Merge the adapter into a full model."""
    format: Annotated[str | None, optional_arg("gguf", "a folder, as transformers reads it")] = None
    """gguf = one file with weights, merged adapter, tokenizer and chat template."""
    push: Annotated[str | None, optional_arg("OWNER/NAME", "nowhere")] = None
    """Upload the model to the hub; a new repository is private."""
    public: bool = False
    """With --push: make a new repository public."""
    output: Annotated[str | None, optional_arg("FOLDER|FILE", "RUN/merged, or RUN/model.gguf")] = None
    """The new folder, or with --format gguf the file."""
    dtype: Annotated[str | None, optional_arg("fp32|bf16", "the run's precision")] = None
    """Precision of the written weights; adapters are merged in float32."""
    trust_remote_code: bool = False
    """Allow Python code in the model's folder or repository to run."""
    json: bool = False
    """Print one JSON object."""

    def __post_init__(self) -> None:
        if self.dtype not in (None, "fp32", "bf16"):
            raise ConfigError(f"--dtype must be fp32 or bf16, not {self.dtype!r}")
        if self.public and self.push is None:
            raise ConfigError("--public applies to --push: add --push OWNER/NAME")
        if self.format not in (None, "gguf"):
            raise ConfigError(f"--format must be gguf, or left out for a folder, not {self.format!r}")
        if self.format and (self.merge or self.push):
            raise ConfigError(
                "--format gguf writes one file, with an adapter in its weights, and the hub takes folders: omit --merge and "
                "--push; `hf upload OWNER/NAME FILE.gguf` adds the file to a repository"
            )
        if self.format and self.output and not self.output.endswith(".gguf"):
            raise ConfigError(f"--format gguf writes one file: --output NAME.gguf, not {self.output}")
        if not (self.merge or self.format) and (self.output or self.dtype):
            raise ConfigError("--output and --dtype are for --merge or --format gguf: add --merge or --format")


class Exported(TypedDict):
    """What was written."""

    path: str
    """The folder, or the GGUF file."""
    url: str | None
    """Where --push uploaded it."""


@prints(Exported)
def export(args: list[str]) -> int:
    """`policygrad export RUN [--merge [--output DIR]] [--push OWNER/NAME]`, or `… --format gguf [--output FILE]`."""
    options = parse_arguments(ExportOptions, args, "export", *HELP)
    folder, trained = Path(options.run), Path(options.run, "model")
    is_stopped = not is_model_folder(trained) and any((folder / name).is_file() for name in CONFIG_FILES)
    if not (options.merge or options.format or options.push is not None):
        if not is_stopped:
            raise ConfigError(
                f"the trained model is already in {trained}; --merge writes a model with the adapter in its weights, --format "
                "gguf one file for llama.cpp, --push OWNER/NAME uploads it to the hub"
            )
        from policygrad.training.export import export_stopped

        return _report(options, export_stopped(folder, trust_remote_code=options.trust_remote_code, phase=_say))
    if is_stopped:
        raise ConfigError(
            f"the run in {folder} has no model yet: finish it, with --resume {folder}, or name the folder that `policygrad export "
            f"{folder}` makes of its last checkpoint"
        )
    from policygrad.training.export import export_gguf, export_merged

    common: dict[str, Any] = {"dtype": options.dtype, "trust_remote_code": options.trust_remote_code, "phase": _say}
    if options.format is not None:
        return _report(options, export_gguf(options.run, options.output, **common))
    if options.push is not None:
        check_hub_repo(options.push)  # before the work, not after it
    written = trained if is_model_folder(trained) else folder
    if options.merge:
        written = export_merged(options.run, options.output, **common)
    if options.push is None:
        return _report(options, written)
    if not is_model_folder(written):
        raise ConfigError(
            f"{folder} holds no run and no model: give a folder that --output of train, sft or reward-model named"
        )
    print("pushing", file=sys.stderr)
    return _report(options, written, push_to_hub(written, options.push, options.public))


def _report(options: ExportOptions, path: Path, url: str | None = None) -> int:
    """Print what was written, and where it was uploaded; return the exit code."""
    if options.json:
        print_json({"path": path, "url": url})
    else:
        print(path if url is None else url)
    return 0


def _say(text: str) -> None:
    print(text, file=sys.stderr)
