"""docs/reference: every public name, every field, and docstrings that come through Markdown as they are meant."""

from __future__ import annotations

from dataclasses import dataclass, is_dataclass
from pathlib import Path

import pytest

import policygrad as pg
from pages import reference
from pages.reference import escaped, section, settable, shown, signature
from policygrad.core.base import Gate

FOLDER = Path(__file__).parents[2] / "docs" / "reference"


@pytest.fixture(scope="module")
def pages() -> dict[str, str]:
    return reference.reference_pages()


@pytest.mark.full
def test_the_pages_are_up_to_date(pages: dict[str, str]) -> None:
    written = {path.name: path.read_text(encoding="utf-8") for path in FOLDER.glob("*.md")}
    assert {name: text for name, text in written.items() if name not in ("json.md", "reliability.md")} == pages


def list_sections(pages: dict[str, str]) -> list[tuple[str, str]]:
    """(name, text) of every section."""
    return [(part.partition("`")[0], part) for text in pages.values() for part in text.split("\n## `")[1:]]


def test_every_public_name_has_one_section(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "section", lambda name, thing: f"## `{name}`")  # the head alone takes no seconds
    pages = reference.reference_pages()
    sections = [name for name, _ in list_sections(pages)]
    public = {*pg.__all__, *pg.parts.__all__}
    assert sorted(sections) == sorted((public - reference.CONSTANTS) | {*reference.OTHERS})
    for name in public:
        assert f"[`{name}`](" in pages["index.md"] or name == "ALGORITHMS"


def check_fields(name: str, text: str) -> None:
    """Every field of a dataclass has its line in the section."""
    kind = reference.OTHERS.get(name) or getattr(pg, name)
    if name in reference.FIELDS_OF:
        assert f"those of [`{reference.FIELDS_OF[name]}`]" in text
        return
    for f in settable(kind) if is_dataclass(kind) else ():
        assert f"- `{f.name}: " in text, f"{name}.{f.name}"


@pytest.mark.full
def test_every_field_is_there(pages: dict[str, str]) -> None:
    for name, text in list_sections(pages):
        check_fields(name, text)


def test_every_field_of_a_run_and_of_a_part_is_there() -> None:
    for name in ("Run", "Clip"):
        check_fields(name, section(name, getattr(pg, name)))


def test_a_name_that_is_on_no_page_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(reference.PAGES, "models")
    with pytest.raises(SystemExit, match="EngineSampler, Generation"):
        reference.reference_pages()


@dataclass(frozen=True)
class Shown:
    """One sum*, of [n] terms, below x<y.

    A table:

        a  1
        b  2

    Raises:
        ConfigError: a width that is none, and a line
            that goes on.
        DataError: nothing.
    """

    width: float = 3e-4
    """How wide."""
    _hidden: int = 0

    def twice(self, other: int, *, by: float = 0.5) -> float:
        """Twice it."""
        return by * self.width * other


def test_a_class_as_markdown() -> None:
    text = section("Shown", Shown)
    assert "```python\nShown(width=3e-4)\n```" in text
    assert "[`test_public_reference`](../../tests/docs/test_public_reference.py)" in text
    assert "One sum\\*, of \\[n\\] terms, below x&lt;y." in text
    assert "```\n    a  1\n    b  2\n```" in text
    assert "- `ConfigError`: a width that is none, and a line that goes on.\n- `DataError`: nothing." in text
    assert "- `width: float`: How wide." in text
    assert "_hidden" not in text
    assert "- `twice(other: int, *, by: float = 0.5) -> float`: Twice it." in text


def test_signatures() -> None:
    assert signature("Clip", pg.Clip) == "Clip(low=0.2, high=0.2, c=None)"
    assert signature("Gate", Gate) == "class Gate(Part)"
    assert signature("algorithm", pg.get_algorithm) == "algorithm(name: str) -> Algorithm"
    assert "algorithm=pg.DAPO," in signature("Run", pg.Run)
    assert "sampling=SamplingParams()," in signature("Run", pg.Run)
    assert shown(("a", 1)) == "('a', 1)"
    assert shown(object()) == "object()"
    assert shown(pg.Clip(0.2, 0.28)) == "Clip(0.2, 0.28)"
    assert escaped("`a*b` and **bold** c*") == "`a*b` and **bold** c\\*"
