"""The report of a verification: as text, as Markdown, as JSON, and as a page."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict
from importlib.resources import files
from pathlib import Path

from policygrad.pages.render import render_page
from policygrad.trackers.jsonl import convert_write_errors
from policygrad.utils.filesystem import write_atomically
from policygrad.verification.checks import Check
from policygrad.verification.verify import Verification

MARKDOWN, PAGE, JSON = "verify.md", "verify.html", "verify.json"
MARKS = {"holds": "✓", "fails": "✗", "not checked": "–"}
SECTIONS = {"fails": "What does not hold", "holds": "What holds", "not checked": "What was not checked, and why"}


def summarise(result: Verification) -> str:
    """Return the outcome as a sentence."""
    steps = sorted({check.step for check in result.checks if check.step is not None and check.status != "not checked"})
    repeated = f", step{'s' * (len(steps) > 1)} {', '.join(map(str, steps))} repeated" if steps else ""
    number = {status: sum(check.status == status for check in result.checks) for status in SECTIONS}
    if number["fails"]:
        first = min(result.failures, key=lambda check: check.step or 0)
        where = f" in step {first.step}" if first.step else ""
        return (
            f"{number['fails']} of {number['fails'] + number['holds']} checks fail{repeated}. The first{where}, "
            f"{first.subject}: {first.message}."
        )
    return f"All {number['holds']} checks hold{repeated}; {number['not checked']} could not be made."


def format_text(result: Verification) -> str:
    """Return lines for a terminal."""
    width = max((len(check.subject) for check in result.checks), default=0)
    lines = list[str]()
    for group, checks in group_by_step(result.checks).items():
        lines.append(group)
        lines += [f"  {MARKS[check.status]} {check.subject:<{width}}  {check.message}" for check in checks]
    return "\n".join([*lines, "", summarise(result)])


def format_markdown(result: Verification) -> str:
    """Return the report as Markdown."""
    lines = [f"# Verification of {result.folder.name}", "", summarise(result)]
    for status, heading in SECTIONS.items():
        checks = [check for check in result.checks if check.status == status]
        if checks:
            lines += ["", f"## {heading}"]
        for group, members in group_by_step(checks).items():
            lines += ["", f"**{group}**", ""]
            lines += [f"- {check.subject}: {check.message}" for check in members]
    return "\n".join(lines) + "\n"


def format_json(result: Verification) -> str:
    """Return the report as JSON; see docs/trust.md."""
    checks = [asdict(check) for check in result.checks]
    report = {"run": str(result.folder), "status": result.status, "summary": summarise(result), "checks": checks}
    return json.dumps(report, ensure_ascii=False, indent=1) + "\n"


def format_page(result: Verification) -> str:
    """Return the report as one HTML file."""
    sections = {
        heading: group_by_step([check for check in result.checks if check.status == status])
        for status, heading in SECTIONS.items()
    }
    web = files("policygrad.verification") / "web"
    return render_page(
        web / "verify.html",
        {},
        styles=(web / "verify.css",),
        title=f"Verification of {result.folder.name}",
        summary=summarise(result),
        sections={heading: groups for heading, groups in sections.items() if groups},
        marks=MARKS,
    )


def group_by_step(checks: Iterable[Check]) -> dict[str, list[Check]]:
    """Group checks under "The run's files" and "Step N"."""
    groups: dict[str, list[Check]] = {}
    for check in checks:
        groups.setdefault("The run's files" if check.step is None else f"Step {check.step}", []).append(check)
    return groups


def write_reports(result: Verification, folder: Path) -> Path:
    """Write verify.md, verify.html and verify.json into a folder; return the path of the first.

    Raises:
        RunError: They cannot be written.
    """
    texts = {
        MARKDOWN: format_markdown(result),
        PAGE: format_page(result),
        JSON: format_json(result),
    }
    for name, text in texts.items():
        with convert_write_errors(folder / name, result.folder):
            folder.mkdir(parents=True, exist_ok=True)
            write_atomically(folder / name, text)
    return folder / MARKDOWN
