"""docs/reference/reliability.md: every item has its lines, and a line without its test is found."""

from __future__ import annotations

from pathlib import Path

import pytest

from pages import reliability
from pages import reliability as faults


def test_every_item_of_what_may_go_wrong_is_there() -> None:
    items = reliability.load_faults()
    assert len(items) == 23
    assert all(len(row) >= 3 for item in items for row in item["fault"])
    faults = [(item["title"], row[0]) for item in items for row in item["fault"]]
    assert len(faults) == len(set(faults)) > 90


def test_what_is_bitwise_and_what_is_code_is_written_down() -> None:
    root = reliability.TESTS.parent
    readme = " ".join((root / "README.md").read_text(encoding="utf-8").split())
    assert "a resumed run reproduces weights, optimizer state, completions and metrics bit for bit" in readme
    assert (
        "Times differ, and so may whatever a GPU's kernels, an engine, or your own reward or environment computes"
        in readme
    )
    isolation = (root / "docs" / "isolation.md").read_text(encoding="utf-8")
    assert "## A run folder with user code is code" in isolation


MODULE = """
import pytest
CASES = {"one": 1, "two": 2}
def helper(): return CASES
@pytest.fixture
def given(): return "by a fixture"
class test_class: pass
test_value = 1
@pytest.mark.parametrize("x", ["decorated"])
def test_there(x, given): assert helper()
@pytest.mark.skip(reason="not now")
def test_skipped(): pass
@pytest.mark.xfail
def test_failing(): pass
@pytest.mark.skipif(False, reason="elsewhere")
def test_on_linux(): pass
"""


@pytest.fixture
def tests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(reliability, "TESTS", tmp_path)
    (tmp_path / "test_it.py").write_text(MODULE)
    (tmp_path / "helpers.py").write_text("def test_there(): pass\n")
    return tmp_path


@pytest.mark.parametrize(
    "test", ["test_there", 'test_there["two": 2]', "test_there[decorated]", "test_there[by a fixture]", "test_on_linux"]
)
def test_what_holds_a_line(tests: Path, test: str) -> None:
    assert reliability.find_test(f"test_it.py::{test}") == (tests / "test_it.py", test.partition("[")[0])


@pytest.mark.parametrize(
    ("test", "says"),
    [
        ("test_it.py::test_renamed", "test_it.py has no test test_renamed"),
        ("test_it.py::helper", "has no test helper"),
        ("test_it.py::test_class", "has no test test_class"),
        ("test_it.py::test_value", "has no test test_value"),
        ("helpers.py::test_there", "helpers.py has no test"),
        ("test_gone.py::test_there", "there is no .*test_gone.py"),
        ("test_it.py::test_skipped", "is not run: skip"),
        ("test_it.py::test_failing", "is not run: xfail"),
        ("test_it.py::test_there[three]", "has no case with three"),
        ("test_it.py::test_on_linux[decorated]", "has no case with decorated"),
    ],
)
def test_what_holds_none_is_found(tests: Path, test: str, says: str) -> None:
    with pytest.raises(reliability.MissingTestError, match=says):
        reliability.find_test(test)


def test_a_line_that_has_lost_its_test_makes_no_page(tests: Path) -> None:
    (tests / "faults.toml").write_text('[[item]]\ntitle = "t"\nfault = [["f", "p", "test_it.py::test_gone"]]\n')
    with pytest.raises(SystemExit, match=r"test_it\.py has no test test_gone"):
        reliability.reliability_page()
    (tests / "faults.toml").write_text('[[item]]\ntitle = "t"\nfault = [["f", "p"]]\n')
    with pytest.raises(SystemExit, match="'f' has no test"):
        reliability.reliability_page()


def test_a_soak_that_broke_says_so() -> None:
    result = {
        "steps": 9,
        "command": "policygrad train",
        "machine": "a machine",
        "versions": {"torch": "2"},
        "broken": ["kill 3 (saving) lost 9 steps"],
    }
    assert "**Broken:** kill 3 (saving) lost 9 steps." in faults.soak_section(result)
    assert "Not measured yet" in faults.soak_section(None)
    both = faults.soak_section(result | {"broken": []}, result | {"steps": 5, "looks_every": 1})
    assert (
        both.index("9 steps of")
        < both.index("--steps 5 --watch 1")
        < both.index("5 steps of")
        < both.index("**Broken:**")
    )
