"""The report of a verification: as text, as Markdown, as JSON, and as a page."""

from __future__ import annotations

import json
from collections.abc import Iterable
from importlib.resources import files
from pathlib import Path

from policygrad.findings import Finding
from policygrad.pages.render import render_page
from policygrad.trackers.jsonl import convert_write_errors
from policygrad.utils.filesystem import write_atomically
from policygrad.verification.verify import Verification

MARKDOWN, PAGE, JSON = "verify.md", "verify.html", "verify.json"
LOOK_AT = "What to look at"
"""Heading of what the run noted while it trained."""
MARKS = {"holds": "✓", "differs": "✗", "not checked": "–"}
SECTIONS = {"differs": "What does not hold", "holds": "What holds", "not checked": "What was not checked, and why"}


def format_text(result: Verification) -> str:
    """Return lines for a terminal."""
    width = max((len(finding.subject) for finding in result.findings), default=0)
    lines = [LOOK_AT, *(f"  {note.describe()}" for note in result.notes), ""] if result.notes else []
    for group, findings in group_by_step(result.findings).items():
        lines.append(group)
        lines += [f"  {MARKS[finding.status]} {finding.subject:<{width}}  {finding.message}" for finding in findings]
    return "\n".join([*lines, "", result.summary])


def format_markdown(result: Verification) -> str:
    """Return the report as Markdown."""
    lines = [f"# Verification of {result.folder.name}", "", result.summary]
    if result.notes:
        lines += ["", f"## {LOOK_AT}", "", *(f"- {note.describe()}" for note in result.notes)]
    for status, heading in SECTIONS.items():
        findings = [finding for finding in result.findings if finding.status == status]
        if findings:
            lines += ["", f"## {heading}"]
        for group, members in group_by_step(findings).items():
            lines += ["", f"**{group}**", ""]
            lines += [f"- {finding.subject}: {finding.message}" for finding in members]
    return "\n".join(lines) + "\n"


def format_page(result: Verification) -> str:
    """Return the report as one HTML file."""
    sections = {
        heading: group_by_step([finding for finding in result.findings if finding.status == status])
        for status, heading in SECTIONS.items()
    }
    web = files("policygrad.verification") / "web"
    return render_page(
        web / "verify.html",
        {},
        styles=(web / "verify.css",),
        title=f"Verification of {result.folder.name}",
        summary=result.summary,
        look_at=LOOK_AT,
        notes=[note.describe() for note in result.notes],
        sections={heading: groups for heading, groups in sections.items() if groups},
        marks=MARKS,
    )


def group_by_step(findings: Iterable[Finding]) -> dict[str, list[Finding]]:
    """Group findings under "The run's files" and "Step N"."""
    groups: dict[str, list[Finding]] = {}
    for finding in findings:
        groups.setdefault("The run's files" if finding.step is None else f"Step {finding.step}", []).append(finding)
    return groups


def write_reports(result: Verification, folder: Path) -> Path:
    """Write verify.md, verify.html and verify.json into a folder; return the path of the first.

    Raises:
        RunError: They cannot be written.
    """
    texts = {
        MARKDOWN: format_markdown(result),
        PAGE: format_page(result),
        JSON: json.dumps(result.as_dict(), ensure_ascii=False, indent=1) + "\n",
    }
    for name, text in texts.items():
        with convert_write_errors(folder / name, result.folder):
            folder.mkdir(parents=True, exist_ok=True)
            write_atomically(folder / name, text)
    return folder / MARKDOWN
