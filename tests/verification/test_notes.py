"""What a run noted stands on top of its verification."""

from __future__ import annotations

from pathlib import Path

from policygrad.findings import holds
from policygrad.trackers.jsonl import RunNote
from policygrad.verification.report import format_markdown, format_page, format_text
from policygrad.verification.verify import Verification


def test_notes_come_before_the_checks(tmp_path: Path) -> None:
    result = Verification(tmp_path, (holds("log", "steps 1 to 9"),), (RunNote("<81%> were cut off", 3, 7),))
    said = "<81%> were cut off (3 times, last at step 7)"
    text = format_text(result)
    assert text.startswith(f"What to look at\n  {said}\n")
    markdown = format_markdown(result)
    assert markdown.index(said) < markdown.index("What holds")
    page = format_page(result)
    assert page.index("&lt;81%&gt; were cut off (3 times") < page.index("What holds")
    assert result.as_dict()["notes"] == [{"text": "<81%> were cut off", "count": 3, "last_step": 7}]
    assert "look at" not in format_text(Verification(tmp_path, result.findings))
