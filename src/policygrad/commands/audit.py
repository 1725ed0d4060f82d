"""`policygrad audit`: name the formulas that reproduce another trainer's numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, TypedDict

import tyro

from policygrad.audit.findings import audit as audit_recording
from policygrad.audit.findings import render_markdown, render_text
from policygrad.audit.recording import join_ranks, read
from policygrad.commands.json_output import print_json, prints
from policygrad.commands.parsing import parse_arguments
from policygrad.errors import ConfigError
from policygrad.findings import FindingOutput
from policygrad.training.config.optional_arg import optional_arg

HELP = (
    "Read one recorded update of any trainer (mask, rewards, groups, advantages, log-probabilities, loss and its gradient) and say "
    "which advantage, ratio, gate, KL and aggregation reproduce it, and to what error; or what is nearest and what differs.",
    "FILE is .safetensors, .pt, .npz or .json; nothing in it is run. policygrad.audit.trl, .verl and .record write such files. "
    "Several files are the ranks of one update.",
    "Exit code 0: everything compared is reproduced; 1: something differs; 2: the file cannot be used.",
)


@dataclass(frozen=True)
class AuditOptions:
    """Options of `policygrad audit`."""

    files: Annotated[tyro.conf.Positional[tuple[str, ...]], tyro.conf.arg(metavar="FILE [FILE ...]")] = ()
    """The recording; with several processes one file of each rank."""
    map: Annotated[tuple[str, ...], tyro.conf.arg(metavar="THEIRS=OURS [THEIRS=OURS ...]", help_behavior_hint="")] = ()
    """Names of the file that are not known: mask, logp, logp_old, advantage, gradient, …; THEIRS= leaves a tensor out."""
    expect: Annotated[str | None, optional_arg("ALGORITHM", "none")] = None
    """Compare with this algorithm as well, such as grpo or dapo."""
    json: bool = False
    """Print one JSON object."""
    markdown: bool = False
    """Print the findings as a table for an issue."""

    def __post_init__(self) -> None:
        if not self.files:
            raise ConfigError(
                "name the file of a recording: policygrad audit update.safetensors; docs/trust.md says how to make one"
            )
        if self.json and self.markdown:
            raise ConfigError("--json and --markdown are two forms of the same findings; give only one of them")
        for pair in self.map:
            if not pair.partition("=")[1] or not pair.partition("=")[0]:
                raise ConfigError(f"--map {pair}: write THEIRS=OURS, such as --map resp_mask=mask")


class AuditOutput(TypedDict):
    """What reproduces a recording; exit code 1 if `agrees` is false."""

    source: str
    agrees: bool
    findings: list[FindingOutput]


@prints(AuditOutput)
def audit(args: list[str]) -> int:
    """Run `policygrad audit FILE... [--map THEIRS=OURS] [--expect ALGORITHM] [--json | --markdown]`."""
    options = parse_arguments(AuditOptions, args, "audit", *HELP)
    names = {theirs: ours for theirs, _, ours in (pair.partition("=") for pair in options.map)}
    recording = join_ranks([read(file, names) for file in options.files])
    result = audit_recording(recording, options.expect)
    if options.json:
        print_json(result.as_dict())
    else:
        print(render_markdown(result) if options.markdown else render_text(result))
    return 0 if result.agrees else 1
