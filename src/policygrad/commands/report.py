"""`policygrad report`: an HTML page about runs; --watch follows them live."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, TypedDict

import tyro

from policygrad.commands.json_output import print_json, prints
from policygrad.commands.options import check_export_folder, check_writable, write_figures, write_text_file
from policygrad.commands.parsing import parse_arguments
from policygrad.compare.plan import PLAN_FILE as PLAN
from policygrad.errors import ConfigError, RunError
from policygrad.training.config.optional_arg import optional_arg

HELP = (
    "Write one self-contained HTML page with curves, completions and costs of runs. Runs that differ only in their seed share a "
    "line with a band.",
    "RUN is a folder of train, sft or reward-model, finished or not, or of compare. If several folders are given, as by runs/*, "
    "those that are not runs are skipped. --watch serves a live page on this machine, at an address with a token, until Ctrl-C.",
)


@dataclass(frozen=True)
class ReportOptions:
    """Options of `policygrad report`."""

    runs: Annotated[tyro.conf.Positional[tuple[str, ...]], tyro.conf.arg(metavar="RUN [RUN ...]")] = ()
    """Folders of runs."""
    output: Annotated[Path | None, optional_arg("REPORT.html", "report.html in the first run's folder")] = None
    """File to write."""
    watch: bool = False
    """Serve a live page on this machine instead of writing a file."""
    port: Annotated[int | None, optional_arg("PORT", "a free one")] = None
    """Port of --watch."""
    host: Annotated[str | None, optional_arg("HOST-OR-ADDRESS", "127.0.0.1, this machine only")] = None
    """Address that --watch listens on. Clients need the token; http is not encrypted."""
    export: Annotated[Path | None, optional_arg("FOLDER", "not written")] = None
    """Also write figures (SVG, CSV), a LaTeX table with intervals, and the sentences that the data allow into this folder."""
    json: bool = False
    """Print one JSON object."""

    def __post_init__(self) -> None:
        if not self.runs:
            raise ConfigError("name the folder of a run, or several: policygrad report runs/dapo-1")
        if not self.watch and (self.port is not None or self.host is not None):
            raise ConfigError("--port and --host apply to --watch: add --watch")
        if self.watch and self.output is not None:
            raise ConfigError("--watch serves the page and --output writes it; give only one of them")
        if self.watch and self.export is not None:
            raise ConfigError("--watch serves the page and --export writes figures of it; give only one of them")
        if self.port is not None and not 0 <= self.port < 65536:
            raise ConfigError(f"--port must be from 0 to 65535, not {self.port}")


class ReportOutput(TypedDict):
    """The page."""

    page: str | None
    """The file that was written; null with --watch."""
    url: str | None
    """The live page of --watch."""
    runs: list[str]
    """The runs' folders."""
    export: str | None
    """The folder of --export."""


@prints(ReportOutput)
def report(args: list[str]) -> int:
    """Run `policygrad report RUN... [--output FILE | --watch] [--export FOLDER]`."""
    options = parse_arguments(ReportOptions, args, "report", *HELP)
    folders_given = tuple(dict.fromkeys(Path(run) for run in options.runs))
    folders = find_runs(folders_given)
    if options.watch:
        from policygrad.report.server import DEFAULT_HOST, create_server

        with create_server(folders, options.host or DEFAULT_HOST, options.port or 0) as serving:
            if options.json:
                print_json({"page": None, "url": serving.url, "runs": folders, "export": None})
            else:
                print(serving.url, flush=True)
            with suppress(KeyboardInterrupt):
                serving.serve_forever()
        return 0
    from policygrad.report.data import read_run
    from policygrad.report.page import render_report
    from policygrad.report.timing import summarise_traces

    runs = [read_run(folder, empty=len(folders) > 1) for folder in folders]
    if not any(run.metrics for run in runs):
        read_run(folders[0])  # raises, as for all of them
    path = options.output or (folders_given[0] if _is_comparison(folders_given[0]) else folders[0]) / "report.html"
    check_writable(path, "--output")
    if options.export is not None:
        from policygrad.report.figures import build_export

        check_export_folder(options.export)
        command = shlex.join(["policygrad", "report", *args])
        write_figures(options.export, build_export([run for run in runs if run.metrics], command))
    write_text_file(path, render_report(runs, folder=path.parent), "--output")
    if options.json:
        print_json({"page": path, "url": None, "runs": folders, "export": options.export})
    else:
        print(path)
    for run in runs:
        if (summary := summarise_traces(run.folder)) is not None:
            for line in summary.describe():
                print(f"{run.folder}: {line}" if len(runs) > 1 else line, file=sys.stderr)
    return 0


def _is_comparison(folder: Path) -> bool:
    return (folder / PLAN).is_file()


def find_runs(named: Sequence[Path]) -> tuple[Path, ...]:
    """Return the runs in these folders: runs themselves, and the reported runs of comparisons, row by row.

    Other folders are skipped with a line on standard error, because `runs/*` matches them too; a single one is kept, so that
    reading it raises the error.
    """
    from policygrad.compare.plan import read_plan
    from policygrad.report.data import is_run

    runs, skipped = list[Path](), list[str]()
    for folder in named:
        if _is_comparison(folder):  # the runs that it reports, without those for tuning
            plan = read_plan(folder)
            places = [place for row in plan.rows for place in sorted((folder / "runs" / row.label).glob("*"))]
            reported = [run for place in places for seed in plan.seeds if is_run(run := place / f"seed-{seed}")]
            if not reported:
                raise RunError(
                    f"{folder} is a comparison without runs so far. Start it with policygrad compare --resume {folder}"
                )
            runs += reported
        elif is_run(folder) or len(named) == 1 or not folder.exists():
            runs.append(folder)
        else:
            skipped.append(str(folder))
    if not runs:
        raise RunError(
            f"none of {', '.join(skipped)} is a run. Give the folder of a run of train, sft or reward-model."
        )
    if skipped:
        print(f"skipped, not runs: {', '.join(skipped)}", file=sys.stderr)
    return tuple(dict.fromkeys(runs))
