"""`policygrad report`: what runs have done, as a page to look at; --watch follows them."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from policygrad.commands.options import check_writable, write_text_file
from policygrad.commands.render import wrap_paragraphs
from policygrad.compare.plan import PLAN_FILE as PLAN
from policygrad.errors import ConfigError, RunError
from policygrad.training.config.run import optional_arg

HELP = (
    "What runs have done, as one HTML page that needs no network: curves, completions, costs. Runs that differ in their seed alone "
    "are one line with a band; others are lines of their own.",
    "RUN is a folder of train, sft or reward-model, finished or not, or one of compare, for the runs that it reports. "
    "Of several, as runs/* names them, those that are no run are left out. --watch serves the page as the runs go, at an address "
    "on this machine that holds a token; Ctrl-C ends it.",
)


@dataclass(frozen=True)
class ReportOptions:
    """Options of `policygrad report`."""

    runs: Annotated[tyro.conf.Positional[tuple[str, ...]], tyro.conf.arg(metavar="RUN [RUN ...]")] = ()
    """The folders of runs."""
    output: Annotated[Path | None, optional_arg("REPORT.html", "report.html in the first run's folder")] = None
    """Where the page is written."""
    watch: bool = False
    """Serve the page on this machine and renew it as the runs go, instead of writing it."""
    port: Annotated[int | None, optional_arg("PORT", "a free one")] = None
    """Of --watch."""
    host: Annotated[str | None, optional_arg("HOST-OR-ADDRESS", "127.0.0.1: this machine alone")] = None
    """Of --watch: the address to listen at. Others need the token, and http is not encrypted."""

    def __post_init__(self) -> None:
        if not self.runs:
            raise ConfigError("name the folder of a run, or several: policygrad report runs/dapo-1")
        if not self.watch and (self.port is not None or self.host is not None):
            raise ConfigError("--port and --host are where --watch serves the page: add --watch")
        if self.watch and self.output is not None:
            raise ConfigError("--watch serves the page and --output writes it: leave one of them out")
        if self.port is not None and not 0 <= self.port < 65536:
            raise ConfigError(f"--port must be from 0 to 65535, not {self.port}")


def report(args: list[str]) -> int:
    """`policygrad report RUN... [--output FILE | --watch]`."""
    config = (tyro.conf.FlagCreatePairsOff,)
    options = tyro.cli(
        ReportOptions, args=args, prog="policygrad report", description=wrap_paragraphs(*HELP), config=config
    )
    named = tuple(dict.fromkeys(Path(run) for run in options.runs))
    folders = find_runs(named)
    if options.watch:
        return _watch(folders, options)
    from policygrad.report.data import read_run
    from policygrad.report.page import render_report

    runs = [read_run(folder, empty=len(folders) > 1) for folder in folders]
    if not any(run.metrics for run in runs):
        read_run(folders[0])  # which refuses it, as all of them
    path = options.output or (named[0] if _is_comparison(named[0]) else folders[0]) / "report.html"
    check_writable(path, "--output")
    write_text_file(path, render_report(runs), "--output")
    print(path)
    return 0


def _is_comparison(folder: Path) -> bool:
    return (folder / PLAN).is_file()


def find_runs(named: Sequence[Path]) -> tuple[Path, ...]:
    """The runs in these folders: a run itself, and of a comparison those that it reports, row by row.

    What is neither is left out with a line on standard error, as `runs/*` names files and other folders too; alone, or where there
    is nothing at all, it is kept for `read` to refuse.

    Raises:
        RunError: none of several is a run; a comparison without any run yet, or whose plan cannot be read.
    """
    from policygrad.report.data import is_run

    found, left_out = list[Path](), list[str]()
    for folder in named:
        if _is_comparison(folder):
            found += _compared(folder)
        elif is_run(folder) or len(named) == 1 or not folder.exists():
            found.append(folder)
        else:
            left_out.append(str(folder))
    if not found:
        raise RunError(
            f"none of {', '.join(left_out)} is a run: give folders that --output of train, sft or reward-model named"
        )
    if left_out:
        print(f"left out, for they are no runs: {', '.join(left_out)}", file=sys.stderr)
    return tuple(dict.fromkeys(found))


def _compared(folder: Path) -> list[Path]:
    """The runs of a comparison that it reports; not those that its learning rates were chosen by."""
    from policygrad.compare.plan import read_plan
    from policygrad.report.data import is_run

    plan = read_plan(folder)
    places = [place for row in plan.rows for place in sorted((folder / "runs" / row.label).glob("*"))]
    found = [run for place in places for seed in plan.seeds if is_run(run := place / f"seed-{seed}")]
    if not found:
        raise RunError(
            f"{folder} is a comparison without a run yet: wait for its first, or begin it by policygrad compare --resume {folder}"
        )
    return found


def _watch(folders: tuple[Path, ...], options: ReportOptions) -> int:
    """Until Ctrl-C."""
    from policygrad.report.server import DEFAULT_HOST, create_server

    with create_server(folders, options.host or DEFAULT_HOST, options.port or 0) as serving:
        print(serving.url, flush=True)
        with suppress(KeyboardInterrupt):
            serving.serve_forever()
    return 0
