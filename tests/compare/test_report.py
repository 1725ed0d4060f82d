"""What a comparison reports: figures at equal points, thresholds, pairs, and the sentences about what it cannot tell."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from doubles.comparison import MEASURE, StubRunner, plan, row
from policygrad.commands.compare import format_comparison
from policygrad.compare.figures import build_export
from policygrad.compare.page import render_comparison
from policygrad.compare.plan import FIRST_TUNING_SEED, Job
from policygrad.compare.report import ComparisonReport, RowReport, build_report, format_learning_rate
from policygrad.compare.runner import ComparisonRun, Results, RunOutcome
from policygrad.errors import ConfigError
from policygrad.pages.export import render_export

GRID = (1e-4, 1e-3)


def outcome(after: float, tokens: float = 100.0, updates: float = 10.0, seconds: float = 20.0) -> RunOutcome:
    """A curve that is 0.2 before, and half of the way at half of everything."""
    half = (0.2 + after) / 2
    score = (0.2, half, after)
    return RunOutcome(
        (0.0, tokens / 2, tokens), (0.0, updates / 2, updates), (0.0, seconds / 2, seconds), score, 0.01, 5
    )


def by_hand(
    rows: dict[str, list[RunOutcome]], share: float = 0.8, ladder: dict[str, str] | None = None, **changes: Any
) -> ComparisonReport:
    result = plan(
        *(row(label, **changes.get(label, {})) for label in rows), seeds=max(map(len, rows.values())), ladder=ladder
    )
    outcomes = {Job(label, None, seed): o for label, runs in rows.items() for seed, o in enumerate(runs)}
    return build_report(result, Results(outcomes, {}, dict.fromkeys(rows)), share)


def row_of(report: ComparisonReport, label: str) -> RowReport:
    return next(row for row in report.rows if row.label == label)


def carried_out(folder: Path, **fails: Any) -> ComparisonReport:
    result = plan(row("grpo", GRID), row("ppo", updates=4), row("slow"), seeds=3)
    runner = StubRunner({"grpo": 0.9, "ppo": 0.8, "slow": 0.4}, **fails)
    return build_report(result, ComparisonRun(result, folder, runner, 1, lambda text: None).run())


def text(result: ComparisonReport, width: int = 100) -> list[str]:
    return ["".join(piece for piece, _ in line) for line in format_comparison(result, width)]


def test_counts_use_singular_and_plural() -> None:
    runs = {"short": [outcome(0.6, updates=1.0, seconds=1.0)], "long": [outcome(1.0, updates=1.0, seconds=2.5)]}
    output = by_hand(runs).ranking
    assert [argv.split(", ")[0] for argv in output[:3]] == ["At 100 tokens", "At 1 update", "At 1 second"]
    other = {label: [replace(x, seconds=(0.0, 0.6, 1.2))] for label, (x,) in runs.items()}
    assert by_hand(other).ranking[2].startswith("At 1.2 seconds, which every run reaches")
    one, several = by_hand(runs), by_hand({label: result * 3 for label, result in runs.items()})
    assert "over 1 seed of" in one.caveats[0]
    assert "over 3 seeds of" in several.caveats[0]
    assert 'title="At 1 second, which' in render_comparison(one)


def test_equal_tokens_updates_and_seconds_by_hand() -> None:
    result = by_hand({"short": [outcome(0.6)], "long": [outcome(1.0, tokens=400.0, updates=40.0, seconds=10.0)]})
    (kind,) = result.kinds
    assert kind.equal == {"tokens": 100.0, "updates": 10.0, "seconds": 10.0}
    short, long = (row_of(result, label).summary for label in ("short", "long"))
    assert short is not None
    assert long is not None
    assert short.equal["tokens"].value == pytest.approx(0.6)
    assert long.equal["tokens"].value == pytest.approx(0.4)  # a quarter of its way from 0.2 to 1.0
    assert long.equal["updates"].value == pytest.approx(0.4)
    assert long.equal["seconds"].value == pytest.approx(1.0)
    assert short.equal["seconds"].value == pytest.approx(0.4)
    assert long.final.value == 1.0
    assert short.area.value == pytest.approx(0.4)
    assert long.area.value == pytest.approx(0.3)
    above = result.pairs[0].probability
    assert (above["tokens"].value, above["seconds"].value, above["area"].value) == (1.0, 0.0, 1.0)


def test_the_threshold_by_hand() -> None:
    result = by_hand({"a": [outcome(1.0)] * 3, "b": [outcome(0.6), outcome(0.9), outcome(0.9)]})
    assert result.kinds[0].threshold == pytest.approx(0.2 + 0.8 * 0.8)
    a, b = (row_of(result, label).summary for label in ("a", "b"))
    assert a is not None
    assert b is not None
    assert a.reach["tokens"].median == pytest.approx(80.0)
    assert a.reach["updates"].median == pytest.approx(8.0)
    assert b.reach["tokens"].each[0] is None
    assert b.reach["tokens"].num_reached == 2
    assert b.reach["tokens"].median == pytest.approx(
        100 * 0.64 / 0.7
    )  # the middle of two that arrive and one that does not
    assert "2 of 3" in "\n".join(text(result))
    flat = by_hand({"a": [outcome(0.2)]})
    assert flat.kinds[0].threshold is None
    assert "No row's score rose" in "\n".join(text(flat))
    with pytest.raises(ConfigError, match="share of the way"):
        by_hand({"a": [outcome(0.6)]}, share=1.5)


def test_rows_on_other_problems_are_not_compared() -> None:
    other = {"measure": MEASURE | {"task": "embedded_steps"}}
    result = by_hand({"a": [outcome(0.6)], "b": [outcome(0.9)], "c": [outcome(0.8)]}, c=other)
    assert [kind.labels for kind in result.kinds] == [("a", "b"), ("c",)]
    assert [(pair.first, pair.second) for pair in result.pairs] == [("a", "b")]
    assert result.kinds[0].threshold != result.kinds[1].threshold
    assert any("compared only among their own kind" in text and "embedded_steps" in text for text in result.differences)


def test_identical_runs_are_reported() -> None:
    result = by_hand({"gspo": [outcome(0.6)], "sapo": [outcome(0.6)], "dapo": [outcome(0.7)]})
    assert any("to the digit" in text and "gspo = sapo." in text for text in result.caveats)


def test_sentences_of_the_report(tmp_path: Path) -> None:
    result = carried_out(tmp_path)
    differs, limits = " ".join(result.differences), " ".join(result.caveats)
    assert "At 12,000 tokens, which every run reaches, grpo is highest, 0." in result.ranking[0]
    assert result.ranking[0].endswith("not told apart from it: ppo, slow.")  # three seeds cannot do it
    assert "With 3 seeds each, equal rows are completely separated in 10% of cases" in limits
    assert "Updates per rollout: 1 (grpo, slow), 4 (ppo)." in differs
    assert (
        "Learning rates, where there was a choice each row's best on the tuning seeds: 0.001 (grpo), 0.0003 (ppo, slow)."
        in differs
    )
    assert "Intervals are over 3 seeds" in limits
    assert "arXiv:2603.19335" in limits
    assert "Best at the edge of its grid, so that a wider one might do better: grpo (largest)." in limits
    assert "Not tuned, for it has no such option or its options set it: ppo, slow." in limits
    assert "not whole" not in limits
    assert result.tuning_seeds == (FIRST_TUNING_SEED, FIRST_TUNING_SEED + 1)
    untuned = by_hand({"a": [outcome(0.6)], "b": [outcome(0.7)]})
    assert "No learning rate was chosen" in " ".join(untuned.caveats)
    assert untuned.tuning_seeds == ()


def test_reversed_rankings_are_reported() -> None:
    """Ahead at equal tokens, behind at equal updates: nine runs each, so that both are apart."""
    many = [outcome(0.8 + i / 1000, updates=40.0) for i in range(9)]
    result = by_hand({"many": many, "few": [outcome(0.6 + i / 1000) for i in range(9)]})
    assert "Of 1 pair apart at equal tokens and at equal updates, 1 is in the opposite order" in result.ranking[-1]
    assert "many and few" in result.ranking[-1]


def test_a_ladder_is_reported_rung_by_rung() -> None:
    rungs = {"a": {"change": "the base"}, "b": {"change": "adds a mask"}}
    result = by_hand({"a": [outcome(0.6)] * 4, "b": [outcome(0.9)] * 4}, ladder={"source": "x", "why": "y"}, **rungs)
    assert result.ranking[-1] == "b (adds a mask): +0.300 at equal tokens, apart from a."
    assert result.differences[-1] == "y"


def test_failures_are_reported(tmp_path: Path) -> None:
    result = carried_out(tmp_path, fails=lambda argv: argv[1] == "ppo" or (argv[1] == "grpo" and argv[-1] == "2"))
    ppo, grpo = row_of(result, "ppo"), row_of(result, "grpo")
    assert ppo.summary is None
    assert len(ppo.failed) == 3
    assert len(grpo.runs) == 2
    assert "of 3 seeds these are finished: grpo 2, ppo 0" in " ".join(result.caveats)
    assert not any("ppo" in (pair.first, pair.second) for pair in result.pairs)
    shown = "\n".join(text(result))
    assert "failed  ppo, seed 0: NaN in the loss" in shown
    assert "failed  grpo at 0.001, seed 2" in shown


def test_a_row_whose_tuning_failed_completely(tmp_path: Path) -> None:
    result = carried_out(tmp_path, fails=lambda argv: "--lr" in argv)
    assert row_of(result, "grpo").summary is None
    assert row_of(result, "grpo").option_value is None
    assert all(tried.mean is None for tried in row_of(result, "grpo").tuning)
    assert "\n".join(text(result))


@pytest.mark.parametrize("width", [50, 80, 100, 200])
def test_the_table_fits_the_terminal(tmp_path: Path, width: int) -> None:
    result = carried_out(tmp_path)
    assert max(map(len, text(result, width))) <= width
    full = "\n".join(text(result, width))
    for word in (
        "grpo",
        "ppo",
        "slow",
        "equal tokens",
        "equal seconds",
        "entropy",
        "KL",
        "length",
        "P(row above column)",
        "What cannot be concluded",
    ):
        assert word in full


def test_the_report_is_json(tmp_path: Path) -> None:
    result = carried_out(tmp_path)
    reported = json.loads(json.dumps(result.to_dict(), allow_nan=False))
    (grpo, *_) = reported["rows"]
    assert grpo["command"] == "grpo --lr 0.001"
    assert grpo["runs"][0]["command"] == "policygrad train grpo --lr 0.001 --tokens 12000 --seed 0"
    assert len(grpo["summary"]["curves"]["tokens"]["value"]) == len(reported["axes"]["tokens"])
    assert {pair["first"] for pair in reported["pairs"]} == {"grpo", "ppo"}
    assert 0 <= reported["pairs"][0]["probability"]["area"]["low"] <= 1


def test_a_curve_ends_where_its_shortest_run_does() -> None:
    result = by_hand({"a": [outcome(0.6), outcome(0.6, tokens=60.0)], "b": [outcome(0.7)]})
    summary = row_of(result, "a").summary
    assert summary is not None
    there = [
        x for x, value in zip(result.axes["tokens"], summary.curves["tokens"].value, strict=True) if value is not None
    ]
    assert max(there) == 60.0
    assert result.axes["tokens"][-1] == 100.0


def test_curves_have_the_points_of_evaluations_and_the_ends_of_rows() -> None:
    result = by_hand(
        {"near": [outcome(0.6, tokens=99.0)], "short": [outcome(0.6, tokens=80.0)], "long": [outcome(0.6)]}
    )
    assert result.axes["tokens"] == (0.0, 50.0, 80.0, 99.0, 100.0)
    assert result.axes["updates"] == (0.0, 5.0, 10.0)


def test_the_learning_rate_is_the_one_that_runs_logged() -> None:
    logged = [replace(outcome(0.6), lr=3e-4 / 4**0.5)]
    result = by_hand({"logged": logged, "planned": [outcome(0.6)]})
    assert [format_learning_rate(row) for row in result.rows] == ["0.00015", "0.0003"]


def test_an_export_has_curves_scores_and_each_claim() -> None:
    result = by_hand(
        {"high": [outcome(0.8 + i / 100) for i in range(5)], "low": [outcome(0.5 + i / 100) for i in range(5)]}
    )
    export = build_export(result)
    assert [figure.name for figure in export.figures] == ["curves-tokens", "curves-updates", "curves-seconds"]
    assert [table.name for table in export.tables] == ["scores", "effort", "claims"]
    assert export.sentences[0].startswith("Allowed: high scores higher than low at equal tokens")
    assert export.command == result.command
    render_export(export)
