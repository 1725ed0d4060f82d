"""Every command on every page has the options that it names."""

from __future__ import annotations

import contextlib
import functools
import io
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

from policygrad import cli
from policygrad.commands import COMMANDS

ROOT = Path(__file__).parents[2]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "src").rglob("SKILL.md")))


@functools.cache
def list_flags(*command: str) -> frozenset[str]:
    """Return the flags that a command's help names."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
        cli.main([*command, "--help", "all"])
    return frozenset(re.findall(r"--[a-z][\w.-]*[a-z0-9]", out.getvalue()))


def iter_commands(text: str) -> Iterator[list[str]]:
    """Yield the argv of each command that a page shows on a line of its own, continued lines joined."""
    for line in re.sub(r"\\\n\s*", "", text).splitlines():
        if match := re.match(r"(?:    |\$ )?(?:[A-Z_]+=\S+ )*policygrad (.*)", line):
            with contextlib.suppress(ValueError):  # a sentence with an apostrophe
                yield shlex.split(match[1].split(" | ")[0], comments=True)


def test_commands_on_pages_have_the_options_that_they_name() -> None:
    unknown, count = list[str](), 0
    for page in PAGES:
        for argv in iter_commands(page.read_text(encoding="utf-8")):
            if not argv or argv[0] not in COMMANDS:
                continue
            sub = argv[:2] if argv[:2] in (["lab", "control"], ["engine", "install"], ["engine", "check"]) else argv[:1]
            flags = {word.partition("=")[0] for word in argv if re.match("--[a-z]", word)}
            flags = {flag for flag in flags if not flag.startswith("--algorithm.")}
            count += 1
            known = list_flags(*sub) | list_flags(*argv[:1]) | {"--json-schema", "--help"}
            known |= list_flags("train") if argv[0] == "compare" else set()
            unknown += [
                f"{page.relative_to(ROOT)}: policygrad {' '.join(argv)}: {flag}" for flag in sorted(flags - known)
            ]
    assert count > 100
    assert not unknown, "\n".join(unknown)
