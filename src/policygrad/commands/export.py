"""`policygrad export`: a run's adapter merged into the model that it adapts."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from policygrad.commands.describe import paragraphs
from policygrad.errors import ConfigError
from policygrad.models.lora import holds_model
from policygrad.training.config.run import optional

HELP = (
    "Write the adapter that a run with --learner.lora trained into the weights of the model that it adapts: a folder that loads "
    "without peft.",
    "RUN/model is the adapter itself, as PEFT and engines read it; nothing has to be done for those.",
)


@dataclass(frozen=True)
class ExportOptions:
    """Options of `policygrad export`."""

    run: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="RUN|ADAPTER")]
    """A run's folder, or an adapter's."""
    merge: bool = False
    """Merge; there is nothing else to export, and it makes a whole model of a small file."""
    output: Annotated[str | None, optional("FOLDER", "RUN/merged")] = None
    """The new folder."""
    dtype: Annotated[str | None, optional("fp32|bf16", "what the run computed in")] = None
    """Of the merged weights, which are added up in float32."""
    trust_remote_code: bool = False
    """Let Python code in the model's folder or repository run."""

    def __post_init__(self) -> None:
        if self.dtype not in (None, "fp32", "bf16"):
            raise ConfigError(f"--dtype must be fp32 or bf16, not {self.dtype!r}")


def export(args: list[str]) -> int:
    """`policygrad export RUN --merge [--output DIR]`."""
    config = (tyro.conf.FlagCreatePairsOff,)
    options = tyro.cli(ExportOptions, args=args, prog="policygrad export", description=paragraphs(*HELP), config=config)
    folder = Path(options.run)
    trained, files = folder / "model", ("run.toml", "sft.toml", "reward-model.toml")
    if not options.merge:
        raise ConfigError(
            f"what a run has trained is in {trained}, as others load it; --merge writes a model with the adapter in its weights"
        )
    if not holds_model(trained) and any((folder / name).is_file() for name in files):
        raise ConfigError(f"the run in {folder} has no model yet: finish it first, with --resume {folder}")
    from policygrad.training.export import export_merged

    written = export_merged(
        options.run,
        options.output,
        dtype=options.dtype,
        trust_remote_code=options.trust_remote_code,
        phase=lambda text: print(text, file=sys.stderr),
    )
    print(written)
    return 0
