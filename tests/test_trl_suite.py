"""What `make test-trl` is made of: TRL's names for ours, the table, a vocabulary from its ranks, data sets found by name."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from trl_suite import fixtures
from trl_suite.plugin import Alias

HERE = Path(__file__).parent
SUITE = """
import pytest
from unittest.mock import patch
from trl.import_utils import is_liger_kernel_available

needs_liger = pytest.mark.skipif(not is_liger_kernel_available(), reason="test requires liger-kernel")


class TestTrainer:
    @pytest.mark.parametrize("liger", [False, pytest.param(True, marks=needs_liger)])
    def test_trains(self, liger):
        assert not liger

    def test_patches(self):
        with patch.object(TestTrainer, "_generate"):
            pass

    def test_counts(self):
        assert 1 + 1 == 3, "not three"


class TestGRPORolloutDispatch:
    def test_dispatches(self):
        raise AttributeError("no such attribute")
"""


def test_names_of_trl_are_ours_and_one_that_is_missing_says_so() -> None:
    alias = Alias("trl.trainer", "json")
    assert alias.loads is json.loads
    with pytest.raises(ImportError, match=r"json has no 'GRPOTrainer', which TRL has as trl\.trainer\.GRPOTrainer"):
        _ = alias.GRPOTrainer


def test_the_table_says_why_a_test_does_not_pass(tmp_path: Path) -> None:
    (tmp_path / "test_suite.py").write_text(SUITE)
    (tmp_path / "test_broken.py").write_text("import no_such_module\n")
    argv = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "trl_suite.plugin",
        "-p",
        "no:cacheprovider",
        "--trl-table",
        "found",
    ]
    done = subprocess.run(
        [*argv, "--continue-on-collection-errors"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(HERE)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert "Of 5 test functions 1 pass in every case that runs here, 3 fail, 1 are out of scope" in done.stdout
    found = {row["name"]: row for row in json.loads((tmp_path / "found.json").read_text())["functions"]}
    assert found["TestTrainer.test_trains"]["cases"] == {"False": "passed", "True": "skipped"}
    assert found["TestTrainer.test_trains"]["reasons"] == {"True": "needs Liger"}
    assert found["TestTrainer.test_patches"]["reasons"] == {"": "uses a private name of TRL's (_generate)"}
    assert found["TestTrainer.test_counts"]["reasons"] == {"": "fails: AssertionError: not three"}
    assert found["TestGRPORolloutDispatch.test_dispatches"]["outcome"] == "declared"
    assert "No module named 'no_such_module'" in found["import"]["reasons"][""]
    rows = (tmp_path / "found.md").read_text().splitlines()[4:]
    assert [row.split(" | ")[1] for row in rows] == list(found)


def test_a_failure_that_is_declared_does_not_fail_the_run(tmp_path: Path) -> None:
    (tmp_path / "test_suite.py").write_text(SUITE)
    argv = [sys.executable, "-m", "pytest", "-q", "-p", "trl_suite.plugin", "-p", "no:cacheprovider", "-k", "Dispatch"]
    environment = os.environ | {"PYTHONPATH": str(HERE)}
    done = subprocess.run(argv, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_vocabulary_has_its_ranks_as_ids_and_writes_a_piece_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    letters = [bytes([byte]) for byte in range(256)]
    ranks = {piece: i for i, piece in enumerate([*letters, b"ab", b" c", b"cab", b"abab", b" cabab"])}
    monkeypatch.setattr(fixtures, "read_ranks", lambda: ranks)
    fixtures.list_merges.cache_clear()
    try:
        tokenizer = fixtures.make_tokenizer(len(ranks), ["<end>"], eos="<end>", pad="<end>")
    finally:
        fixtures.list_merges.cache_clear()
    assert tokenizer("ab cab abab<end>")["input_ids"] == [256, 257, 256, 32, 259, 261]
    assert tokenizer.decode([260, 10, 261]) == " cabab\n<end>"


def test_a_data_set_is_found_by_configuration_and_split(tmp_path: Path) -> None:
    from datasets import load_dataset

    fixtures.write_texts(tmp_path / "zen")
    fixtures.write_many_pictures(tmp_path / "pictures")
    zen, pictures, cache = str(tmp_path / "zen"), str(tmp_path / "pictures"), str(tmp_path / "cache")
    rows = load_dataset(zen, "standard_prompt_only", split="train", cache_dir=cache)
    assert (len(rows), rows[0]["prompt"]) == (17, "Beautiful is better than")
    streamed = load_dataset(zen, "conversational_prompt_only", split="test", streaming=True, cache_dir=cache)
    assert len(list(streamed)) == 2
    for row in load_dataset(pictures, "conversational_prompt_only", split="train", cache_dir=cache):
        marks = sum(part["type"] == "image" for part in row["prompt"][0]["content"])
        assert marks == len(row["images"]) <= 3
