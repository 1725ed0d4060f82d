"""`policygrad verify`: check a run's files, repeat steps of it, and report what holds."""

from __future__ import annotations

import os
import sys
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, TypedDict

import tyro

from policygrad.commands.json_output import print_json, prints
from policygrad.commands.parsing import parse_arguments
from policygrad.errors import ConfigError
from policygrad.findings import FindingOutput
from policygrad.training.config.optional_arg import optional_arg
from policygrad.training.config.run import Run
from policygrad.training.config.serialization import load_config
from policygrad.training.config.trust import CodePermissions
from policygrad.training.run_folder import check_resumable, open_run_folder

HELP = (
    "Check a finished or stopped run of train. Its files are compared with each other: groups, counts, checkpoints, versions, "
    "hashes. Then steps are repeated from the state before them, and every stage is compared with what the run recorded: prompts, "
    "tokens, rewards (called again), batch, advantages, the gradient with the paper's formula in float64, weights and moments.",
    "On a CPU with the sampler of this process the comparison is bit for bit; elsewhere within stated bounds. What could not be "
    "checked is listed with the reason.",
    "Training records --verify N steps for this; any other step is repeated from the last checkpoint before it. The report is "
    "written to verify.md, verify.html and verify.json. Exit code: 0 everything that was checked holds, 1 "
    "something does not.",
)


@dataclass(frozen=True)
class VerifyOptions:
    """Options of `policygrad verify`."""

    run: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="RUN")]
    """Folder of the run."""
    steps: Annotated[str | None, optional_arg("N,N,…", "those that the run has recorded")] = None
    """Steps to repeat, such as 3,40."""
    output: Annotated[Path | None, optional_arg("DIR", "the run's folder")] = None
    """Folder for the report, such as for a run that may not be written to."""
    json: bool = False
    """Print one JSON object."""
    allow_code: Annotated[tuple[str, ...], optional_arg("MODULE|FILE", "what is in the current folder")] = ()
    """Code that the run's file may import."""
    trust_remote_code: bool = False
    """Allow Python code in the model's folder or repository to run."""


class NoteOutput(TypedDict):
    """What the run noted while it trained."""

    text: str
    count: int
    """Number of steps with a note of this kind."""
    last_step: int


class VerifyOutput(TypedDict):
    """The checks of a run; exit code 1 if one differs."""

    run: str
    status: Literal["holds", "differs", "not checked"]
    summary: str
    notes: list[NoteOutput]
    """The most frequent first."""
    findings: list[FindingOutput]


@prints(VerifyOutput)
def verify(args: list[str]) -> int:
    """Run `policygrad verify RUN [--steps N,N] [--json]`."""
    options = parse_arguments(VerifyOptions, args, "verify", *HELP)
    folder = check_resumable(Path(options.run), "train")
    permissions = CodePermissions(options.allow_code, options.trust_remote_code)
    run = load_config(folder / "run.toml", Run(), permissions)
    steps = None if options.steps is None else parse_steps(options.steps)
    from policygrad.verification.report import format_text, write_reports
    from policygrad.verification.verify import verify_run

    with check_idle(folder):
        result = verify_run(folder, run, steps, _show_progress)
        report = write_reports(result, options.output or folder)
    if options.json:
        print_json(result.as_dict())
    else:
        print(format_text(result))
        print(f"report: {report}")
    return 1 if result.status == "differs" else 0


def check_idle(folder: Path) -> AbstractContextManager[object]:
    """Return a context that holds the run's lock, so that no process trains it meanwhile; nothing where files are read-only.

    Raises:
        RunError: A process is training the run.
    """
    return open_run_folder(folder, "train", _show_note) if os.access(folder, os.W_OK) else nullcontext()


def _show_note(text: str) -> None:
    print(text, file=sys.stderr)


def parse_steps(text: str) -> list[int]:
    """Parse `3,40`. Raises ConfigError for anything but numbers of steps."""
    try:
        steps = sorted({int(number) for number in text.split(",")})
    except ValueError:
        raise ConfigError(f"--steps {text!r}: give numbers of steps with commas between them, such as 3,40") from None
    return steps


def _show_progress(text: str, done: int, total: int) -> None:
    if text and (sys.stderr.isatty() or not done):
        print(f"{text} {done + 1}/{total}" if total else text, file=sys.stderr, flush=True)
