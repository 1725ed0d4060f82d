"""Preregistered comparisons: what is written, what is refused by name, and which sentences the intervals allow."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from doubles.comparison import StubRunner, plan, row
from doubles.files import write_rows
from policygrad.commands import compare as command
from policygrad.compare.page import render_comparison
from policygrad.compare.preregistration import (
    Preregistration,
    list_deviations,
    preregister,
    read_preregistration,
    record_deviations,
    write_preregistration,
)
from policygrad.compare.report import (
    METRICS,
    ComparisonReport,
    PreregistrationNote,
    build_report,
    describe_claims,
    describe_preregistration,
)
from policygrad.compare.runner import ComparisonRun
from policygrad.compare.statistics import iqm_difference
from policygrad.errors import ConfigError, RunError

OPTIONS = (
    "--",
    "--prompts-per-step",
    "2",
    "--samples-per-prompt",
    "2",
    "--evaluation.problems",
    "2",
    "--max-tokens",
    "6",
)


def reported(folder: Path, seeds: int = 8, *, metric: str = "tokens", **changes: Any) -> ComparisonReport:
    """A comparison of high, low and same, which is as high as high."""
    runner = StubRunner({"high": 0.8, "low": 0.5, "same": 0.8})
    made = plan(row("high"), row("low"), row("same"), seeds=seeds)
    results = ComparisonRun(made, folder, runner, 1, lambda text: None).run()
    return build_report(made, replace(results, **changes), metric=metric)


def test_only_a_difference_that_both_intervals_show_is_allowed(tmp_path: Path) -> None:
    report = reported(tmp_path)
    claims = {frozenset((claim.higher, claim.lower)): claim for claim in report.claims}
    clear = claims[frozenset(("high", "low"))]
    assert (clear.higher, clear.allowed) == ("high", True)
    assert clear.difference.low > 0
    assert clear.text.startswith("high scores higher than low at equal tokens (difference 0.297")
    assert f"95% interval {clear.difference.low:.3f} to {clear.difference.high:.3f}" in clear.text
    assert clear.text.endswith("P(above) 1.00, 8 seeds)")
    equal = claims[frozenset(("high", "same"))]
    assert not equal.allowed
    assert "holds" in equal.reason
    for pair, claim in zip(report.pairs, report.claims, strict=True):
        assert claim.allowed is pair.separated["tokens"]


@pytest.mark.parametrize("metric", METRICS)
def test_claims_are_about_one_metric(metric: str, tmp_path: Path) -> None:
    for claim in reported(tmp_path, metric=metric).claims:
        assert claim.metric == metric
        assert METRICS[metric].format(claim.lower) in claim.text


def test_too_few_or_missing_seeds_allow_nothing(tmp_path: Path) -> None:
    few = reported(tmp_path / "few", seeds=3)
    assert not any(claim.allowed for claim in few.claims)
    assert few.claims[0].reason == "with 3 and 3 seeds equal rows are completely separated in 10% of cases"
    complete = reported(tmp_path / "all")
    assert complete.claims[0].allowed
    made = plan(row("high"), row("low"), row("same"), seeds=8)
    results = ComparisonRun(made, tmp_path / "all", StubRunner(), 1, lambda text: None).run()
    outcomes = {job: outcome for job, outcome in results.outcomes.items() if (job.row, job.seed) != ("low", 7)}
    partial = build_report(made, replace(results, outcomes=outcomes))
    assert not partial.claims[0].allowed
    assert partial.claims[0].reason == "of 8 planned seeds these are finished: low 7"
    assert partial.pairs[0].separated["tokens"]  # so that it is the missing run that decides


def test_page_terminal_and_json_have_the_same_sentences(tmp_path: Path) -> None:
    report = reported(tmp_path)
    page, printed = render_comparison(report), list(describe_claims(report))
    for claim, data in zip(report.claims, report.to_dict()["claims"], strict=True):
        assert (data["text"], data["allowed"], data["reason"]) == (claim.text, claim.allowed, claim.reason)
        part = page.partition("Sentences that they do not allow")[not claim.allowed and 2]
        assert claim.text.partition(" (")[0] in part
        assert (f"{claim.text}." in printed) is claim.allowed
    assert printed[-1].startswith("Not allowed: a sentence about 1 of 3 pairs")


def test_deviations_are_told_with_every_conclusion(tmp_path: Path) -> None:
    note = PreregistrationNote("abc", "2026-01-01", ("code: policygrad has changed",))
    made = plan(row("high"), row("low"), seeds=5)
    results = ComparisonRun(made, tmp_path, StubRunner({"high": 0.8, "low": 0.5}), 1, lambda text: None).run()
    report = build_report(made, results, preregistration=note)
    assert report.claims[0].reason.endswith("; not as preregistered")
    sentence = describe_preregistration(report)
    assert sentence == "Preregistered on 2026-01-01, sha256 abc; with deviations: code: policygrad has changed."
    assert "with deviations" in render_comparison(report)
    assert describe_preregistration(replace(report, preregistration=None)) == ""


def test_the_difference_of_means_has_the_interval_of_independent_resamples() -> None:
    estimate = iqm_difference([1.0, 1.0, 1.0], [0.25, 0.25])
    assert (estimate.value, estimate.low, estimate.high) == (0.75, 0.75, 0.75)
    x, y = [0.0, 1.0], [0.0, 1.0]  # the difference of two resampled means is ±1 with probability 1/16 each
    estimate = iqm_difference(x, y)
    assert (estimate.value, estimate.low, estimate.high) == (0.0, -1.0, 1.0)


def registered(**changes: Any) -> Preregistration:
    made = preregister(plan(row("high"), row("low"), seeds=5), [], "tokens", 0.8)
    return replace(made, data={"rows.jsonl": "1"}, **changes)


@pytest.mark.parametrize(
    ("changes", "deviation"),
    [
        ({}, None),
        ({"date": "later"}, None),
        ({"plan": plan(row("high"), row("low"), seeds=6)}, "seeds: (0, 1, 2, 3, 4) registered, (0, 1, 2, 3, 4, 5) now"),
        ({"plan": plan(row("high"), seeds=5)}, "the row low is left out"),
        ({"plan": plan(row("high"), row("low"), row("new"), seeds=5)}, "the row new is added"),
        (
            {"plan": plan(row("high"), row("low", argv=("low", "--lr", "1")), seeds=5)},
            "the row low differs in its argv",
        ),
        ({"plan": plan(row("high"), row("low", grid=(0.1, 1.0)), seeds=5)}, "the row low differs in its tuned_option"),
        ({"metric": "area"}, "metric: tokens registered, area now"),
        ({"threshold": 0.5}, "threshold: 0.8 registered, 0.5 now"),
        ({"code": {"policygrad": "1"}}, "code: policygrad has changed"),
        ({"decision_rule": "another"}, None),
    ],
)
def test_deviations_are_named(changes: dict[str, Any], deviation: str | None) -> None:
    deviations = list_deviations(registered(), registered(**changes))
    if "decision_rule" in changes:
        assert len(deviations) == 1
        assert deviations[0].startswith("decision rule: ")
    else:
        assert deviations == ([] if deviation is None else [deviation])


def test_changed_data_is_named() -> None:
    assert list_deviations(registered(), replace(registered(), data={"rows.jsonl": "2"})) == [
        "data: rows.jsonl has changed"
    ]
    assert list_deviations(registered(), replace(registered(), data={})) == ["data: rows.jsonl has changed"]


def test_recorded_deviations_stay(tmp_path: Path) -> None:
    assert record_deviations(tmp_path, []) == ()
    assert record_deviations(tmp_path, ["a"]) == ("a",)
    assert record_deviations(tmp_path, ["b", "a"]) == ("a", "b")
    assert record_deviations(tmp_path, []) == ("a", "b")


def test_a_preregistration_is_read_back_and_never_replaced(tmp_path: Path) -> None:
    made, path = registered(), tmp_path / "plan.json"
    sha256 = write_preregistration(made, path)
    assert sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    assert read_preregistration(path) == made
    with pytest.raises(ConfigError, match="a preregistration is not replaced"):
        write_preregistration(made, path)
    for change in ({"metric": "x"}, {"threshold": 2}, {"plan": {}}, {"data": []}, {"more": 1}):
        path.write_text(json.dumps(made.to_dict() | change))
        with pytest.raises(RunError, match="is not a preregistration"):
            read_preregistration(path)
    with pytest.raises(RunError, match="cannot be read"):
        read_preregistration(tmp_path / "none.json")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with data, a reward, and a runner without models."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "plans").mkdir()
    write_rows(tmp_path / "rows.jsonl", [{"prompt": f"{i} =\n", "answer": str(i)} for i in range(40)])
    (tmp_path / "mine.py").write_text(
        "def one(prompts, completions, **columns):\n    return [1.0 for _ in completions]\n"
    )
    heights = {"grpo": 0.8, "dapo": 0.5}
    monkeypatch.setattr(command, "SubprocessRunner", lambda threads, allow=(): StubRunner(heights))
    return tmp_path


ROWS = ("grpo", "dapo", "--seeds", "5")
TASK = (*OPTIONS, "--task", "rows.jsonl", "--reward", "mine.py:one")


def test_a_preregistered_comparison_is_carried_out_as_written(here: Path, run_command: Any) -> None:
    code, out, err = run_command(
        "compare", *ROWS, "--metric", "area", "--preregister", "plans/plan.json", "--json", *TASK
    )
    assert code == 0, err
    written = json.loads(out)
    assert not Path("comparisons").exists()
    data = json.loads(Path("plans/plan.json").read_text(encoding="utf-8"))
    assert [*data["data"]] == ["rows.jsonl"]
    assert data["code"].keys() == {"policygrad", "mine.py"}
    assert data["plan"]["seeds"] == [0, 1, 2, 3, 4]
    code, out, err = run_command("compare", "--preregistered", "plans/plan.json", "--output", "c", "--json")
    assert code == 0, err
    report = json.loads(out)
    assert report["preregistration"] == {"sha256": written["sha256"], "date": written["date"], "deviations": []}
    assert report["metric"] == report["claims"][0]["metric"] == "area"
    assert report["claims"][0]["allowed"]
    assert written["sha256"] in (here / "c" / "comparison.html").read_text(encoding="utf-8")
    assert (here / "c" / "preregistration.json").read_bytes() == Path("plans/plan.json").read_bytes()
    assert (
        json.loads(run_command("compare", "--resume", "c", "--json")[1])["preregistration"] == report["preregistration"]
    )


def test_what_deviates_is_refused_by_name_or_listed(here: Path, run_command: Any) -> None:
    assert run_command("compare", *ROWS, "--preregister", "plans/plan.json", *TASK)[0] == 0
    (here / "rows.jsonl").write_text((here / "rows.jsonl").read_text().replace("39", "40"))
    (here / "mine.py").write_text((here / "mine.py").read_text().replace("1.0", "0.5"))
    code, _, err = run_command("compare", "--preregistered", "plans/plan.json", "--output", "c")
    assert code == 2
    assert "deviates from plans/plan.json: code: mine.py has changed; data: rows.jsonl has changed. Restore that" in err
    assert not Path("c").exists()
    code, out, _ = run_command("compare", "--preregistered", "plans/plan.json", "--output", "c", "--deviate", "--json")
    assert code == 0
    assert json.loads(out)["preregistration"]["deviations"] == [
        "code: mine.py has changed",
        "data: rows.jsonl has changed",
    ]
    code, _, err = run_command("compare", "--resume", "c")  # which has the same promise
    assert code == 2
    assert "deviates from c/preregistration.json" in err


@pytest.mark.full
def test_a_plan_in_a_file_cannot_be_changed_by_options_beside_it(here: Path, run_command: Any) -> None:
    assert run_command("compare", *ROWS, "--preregister", "plans/plan.json", *TASK)[0] == 0
    for more, named in (
        (("gspo",), "rows"),
        (("--seeds", "9"), "--seeds"),
        (("--metric", "area"), "--metric"),
        (("--threshold", "0.5"), "--threshold"),
        (("--", "--lr", "1"), "options of train"),
    ):
        code, _, err = run_command("compare", "--preregistered", "plans/plan.json", *more)
        assert code == 2
        assert f"and {named} would" in " ".join(err.split())


@pytest.mark.full
def test_seeds_added_later_are_a_deviation(here: Path, run_command: Any) -> None:
    assert run_command("compare", *ROWS, "--preregister", "plans/plan.json", *TASK)[0] == 0
    assert run_command("compare", "--preregistered", "plans/plan.json", "--output", "c")[0] == 0
    more = ("compare", "grpo", "dapo", "--seeds", "6", "--output", "c")
    code, _, err = run_command(*more, *TASK)
    assert code == 2
    assert "seeds: (0, 1, 2, 3, 4) registered, (0, 1, 2, 3, 4, 5) now" in err
    assert json.loads((here / "c" / "plan.json").read_text())["seeds"] == [0, 1, 2, 3, 4]
    assert run_command(*more, "--deviate", *TASK)[0] == 0
    assert len(json.loads((here / "c" / "comparison.json").read_text())["preregistration"]["deviations"]) == 1


@pytest.mark.full
def test_runs_from_before_cannot_be_preregistered(here: Path, run_command: Any) -> None:
    assert run_command("compare", *ROWS, "--output", "c", *TASK)[0] == 0
    assert run_command("compare", *ROWS, "--preregister", "plans/plan.json", *TASK)[0] == 0
    code, _, err = run_command("compare", "--preregistered", "plans/plan.json", "--output", "c")
    assert code == 2
    assert "holds runs of something other than this preregistered comparison" in err


def test_a_file_from_others_names_no_code_without_permission(
    here: Path, run_command: Any, tmp_path_factory: pytest.TempPathFactory
) -> None:
    other = tmp_path_factory.mktemp("other") / "mine.py"
    other.write_text((here / "mine.py").read_text())
    argv = (*TASK[:-1], f"{other}:one")
    assert run_command("compare", *ROWS, "--preregister", "plans/plan.json", *argv)[0] == 0
    code, _, err = run_command("compare", "--preregistered", "plans/plan.json", "--output", "c")
    assert code == 2
    assert "--allow-code" in err
    assert (
        run_command("compare", "--preregistered", "plans/plan.json", "--output", "c", "--allow-code", str(other))[0]
        == 0
    )


@pytest.mark.full
def test_a_file_beside_the_code_that_it_names_needs_permission_too(here: Path, run_command: Any) -> None:
    """Both may have come from somebody else, in one folder."""
    assert run_command("compare", *ROWS, "--preregister", "plan.json", *TASK)[0] == 0
    code, _, err = run_command("compare", "--preregistered", "plan.json", "--output", "c")
    assert code == 2
    assert "add --allow-code mine.py" in err
    assert run_command("compare", "--preregistered", "plan.json", "--output", "c", "--allow-code", "mine.py")[0] == 0
