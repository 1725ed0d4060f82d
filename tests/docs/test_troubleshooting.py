"""docs/troubleshooting.md says what the program says; docs/from-other-libraries.md has every option that is answered."""

from __future__ import annotations

import re

import pytest

import make_docs
from policygrad.cli import HELP
from policygrad.commands.foreign_options import LIBRARIES, load_foreign_options
from policygrad.trackers.glossary import load_glossary

PAGE = (make_docs.DOCS / "troubleshooting.md").read_text(encoding="utf-8")
NOT_OURS = ("policygrad: command not found", "KeyError: 'OPENAI_API_KEY'", "MemoryError")
"""What a shell and Python say."""


def list_quoted() -> list[str]:
    """What stands between backticks in the first column of the tables, word for word; of two parts each."""
    tables = re.findall(r"^\| (?:message|symptom).*?\n\| --- .*?\n((?:\|.*\n)+)", PAGE, re.MULTILINE)
    cells = [row.split(" | ")[0] for table in tables for row in table.splitlines()]
    return [part.strip() for cell in cells for words in re.findall(r"`([^`]+)`", cell) for part in words.split(";")]


def test_each_quoted_message_is_in_the_source() -> None:
    source = "\n".join(path.read_text(encoding="utf-8") for path in (make_docs.ROOT / "src").rglob("*.py"))
    known = {metric.name for chapter in load_glossary() for metric in chapter.metrics}
    known |= {"rewards/NAME", "/high", "metrics.jsonl", *NOT_OURS}
    messages = list_quoted()
    assert len(messages) > 40
    assert [words for words in messages if words not in known and words not in source] == []


def test_exit_codes_are_those_of_the_help() -> None:
    codes = set(re.findall(r"^\| (\d+) \|", PAGE, re.MULTILINE))
    report = HELP.partition("Exit codes: ")[2].partition("Documentation")[0]
    assert codes == set(re.findall(r"\b(\d+) ", report))


@pytest.mark.parametrize("library", LIBRARIES)
def test_every_option_of_another_library_is_in_its_table(library: str) -> None:
    text = (make_docs.DOCS / "from-other-libraries.md").read_text(encoding="utf-8")
    block = text.partition(f"<!-- {library.lower()}: begin -->")[2].partition(f"<!-- {library.lower()}: end -->")[0]
    for name, ours in load_foreign_options()[0][library].items():
        (row,) = (row for row in block.splitlines() if f"`{name}`" in row.split(" | ")[0])
        assert (ours.flag or ours.note).split(" ")[0] in row
