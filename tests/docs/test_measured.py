"""scripts/measure_algorithms.py, a caller of compare; and the pages that are made of what it leaves."""

from __future__ import annotations

import copy
import json
import math
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest

import measure_algorithms
import measure_control
from doubles.comparison import MEASURE, StubRunner, plan, row
from pages import markdown as reports
from pages import measured
from pages.measured import curves
from policygrad.algorithms import ALGORITHMS
from policygrad.compare.plan import LADDERS
from policygrad.compare.report import build_report
from policygrad.compare.runner import ComparisonRun
from results import load_result, read_result

ROOT = Path(__file__).resolve().parents[2]
GRID = (3e-4, 1e-3)


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A comparison of some rows of the matrix, one on another task and one that failed."""
    rows = [row("grpo", GRID), row("ppo", GRID), row("trpo"), row("vapo", GRID)]
    rows.append(row("vineppo", GRID, measure=MEASURE | {"task": "embedded_steps"}))
    runner = StubRunner({"grpo": 0.9, "ppo": 0.7, "trpo": 0.5}, fails=lambda argv: argv[1] == "vapo")
    made = plan(*rows, seeds=5)
    done = build_report(
        made, ComparisonRun(made, tmp_path_factory.mktemp("c"), runner, 1, lambda text: None).run()
    ).to_dict()
    return done | {"measured_by": "python scripts/measure_algorithms.py -- --jobs 1"}


@pytest.fixture(scope="module")
def ladder(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    rungs = LADDERS["dapo"].rows()
    made = plan(*(row(label, change=says) for label, _, says in rungs), seeds=5, ladder=LADDERS["dapo"].to_dict())
    runner = StubRunner({label: 0.5 + 0.05 * i for i, (label, _, _) in enumerate(rungs)})
    done = build_report(
        made, ComparisonRun(made, tmp_path_factory.mktemp("l"), runner, 1, lambda text: None).run()
    ).to_dict()
    return done | {"measured_by": "python scripts/measure_algorithms.py --ladder dapo -- --jobs 1"}


def test_the_page_has_every_algorithm_measured_or_not(result: dict[str, Any], ladder: dict[str, Any]) -> None:
    text = measured.measured_page(result | {"left_out": {"prorl": "it needs more"}}, {"dapo": ladder})
    for name in ALGORITHMS:
        assert f"[`{name}`](algorithms/{name}.md)" in text
    grpo, *_ = re.findall(r"^\| \[`grpo`\].*\[0\..*$", text, re.MULTILINE)
    assert "0.001\\*" in grpo
    assert "2 / 0 / 0" in grpo
    assert "- [`prorl`](algorithms/prorl.md): it needs more" in text
    assert "- [`dapo`](algorithms/dapo.md): not measured yet" in text
    assert "- [`vapo`](algorithms/vapo.md): every run failed: NaN in the loss" in text
    assert "On the task `embedded_steps`; all rows are compared at 12,000 tokens" in text
    assert "| `naive_grpo` |" in text
    assert "| 50 |" in text  # the published figure of the last rung
    assert all(sentence in text for sentence in [*result["ranking"], *result["caveats"], *ladder["ranking"]])
    assert "Not measured yet" not in text
    assert "measure_algorithms.py -- --jobs 1" in text
    assert "--ladder dapo -- --jobs 1" in text


def test_the_rank_correlation_is_spearmans() -> None:
    assert measured.rank_correlation([1, 2, 3, 4], [10, 20, 40, 80]) == pytest.approx(1.0)
    assert measured.rank_correlation([1, 2, 3, 4], [4, 3, 2, 1]) == pytest.approx(-1.0)
    assert measured.rank_correlation([1, 2, 2, 3], [1, 2, 3, 4]) == pytest.approx(3 / math.sqrt(10))  # ties share 2.5
    assert measured.rank_correlation([1, 1, 1], [1, 2, 3]) == 0.0


def test_the_page_says_that_scores_follow_the_number_of_updates() -> None:
    text = measured.measured_page()
    (message,) = re.findall(r"rank correlation is (0\.\d\d) at equal tokens and (-0\.\d\d) at equal updates", text)
    assert float(message[0]) > 0.5
    assert float(message[1]) < -0.85


def test_the_page_says_which_row_does_not_learn(result: dict[str, Any]) -> None:
    assert "does not learn here" not in measured.measured_page(result)
    changed = copy.deepcopy(result)
    summary = next(row["summary"] for row in changed["rows"] if row["label"] == "ppo")
    summary["equal"]["tokens"] = {"value": 0.25, "low": 0.2, "high": 0.3}
    summary["before"] = 0.21
    text = measured.measured_page(changed)
    assert "- ppo does not learn here: its score is 0.250 [0.200, 0.300], and 0.210 before training ([`ppo`]" in text


def test_the_page_shows_on_how_many_tokens_gates_acted() -> None:
    """At their own settings hardly any, in the regime that is there for it some; the row without a gate has no such share."""
    section = measured.measured_page().split("## Where gates act")[1].split("## ")[0]
    for name in ("dppo", "m2po", "cispo", "gmpo", "scale_rl"):
        (row,) = re.findall(rf"^\| \[`{name}`\].*\| ([\d.e-]+) % \| ([\d.e-]+) % \|", section, re.MULTILINE)
        assert float(row[0]) < 0.2
        assert float(row[1]) > 0.5
    assert re.search(rf"^\| `{measure_algorithms.UNGATED}` \| – \| – \|", section, re.MULTILINE)
    assert "measure_algorithms.py --gates" in section


def test_the_regime_is_handed_to_every_row(tmp_path: Path, result: dict[str, Any]) -> None:
    asked: list[list[str]] = []

    def compare(argv: list[str]) -> int:
        asked.append(argv)
        folder = Path(argv[argv.index("--output") + 1])
        folder.mkdir(parents=True)
        (folder / "comparison.json").write_text(json.dumps(result))
        (folder / "comparison.html").write_text("<!doctype html>")
        return 0

    measure_algorithms.main(["--gates", "--", "--threads", "1"], compare, tmp_path / "results", tmp_path / "work")
    (argv,) = asked
    rows = argv[: argv.index("--budget-tokens")]
    assert [row.partition("=")[0] for row in rows] == [*measure_algorithms.GATED, measure_algorithms.UNGATED]
    assert all("--max-staleness 4" in row and "--algorithm.update-rule.minibatches 16" in row for row in rows)
    assert load_result("gates", tmp_path / "results") is not None


def test_before_anything_was_measured_the_page_says_how(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(reports, "RESULTS", tmp_path)
    text = measured.measured_page()
    assert "Not measured yet" in text
    assert "python scripts/measure_algorithms.py --ladder dapo" in text
    assert measured.row_of("grpo") is None
    assert "Not measured yet" in curves(None)


def test_a_sentence_for_an_algorithms_page(result: dict[str, Any]) -> None:
    reported = measured.summary_sentence(result["rows"][0])
    assert "(5 seeds, lr 0.001, 12k sampled tokens in 12 updates" in reported


def test_standings_count_every_other_row_once(result: dict[str, Any]) -> None:
    counts = {label: measured.count_pairs(result, label) for label in ("grpo", "ppo", "trpo", "vineppo")}
    assert counts == {"grpo": "2 / 0 / 0", "ppo": "1 / 0 / 1", "trpo": "0 / 0 / 2", "vineppo": "0 / 0 / 0"}


def test_rows_measured_later_are_put_among_the_others(result: dict[str, Any]) -> None:
    """Taken apart and put together it is the same report, and the caveat says which rows are of another day."""
    result = {key: value for key, value in result.items() if key != "measured_by"}
    earlier = {**result, "rows": [row for row in result["rows"] if row["label"] not in ("ppo", "trpo", "vapo")]}
    later = {**result, "rows": [row for row in result["rows"] if row["label"] in ("grpo", "ppo", "trpo")]}
    merged, page = measure_algorithms.merge_reports(earlier, later)
    order = sorted((row["label"] for row in merged["rows"]), key=list(ALGORITHMS).index)
    assert [row["label"] for row in merged["rows"]] == order
    assert {row["label"] for row in merged["rows"]} == {"grpo", "ppo", "trpo", "vineppo"}
    whole = {row["label"]: row for row in result["rows"]}
    for now in merged["rows"]:
        before = whole[now["label"]]
        assert {**now, "kind": 0, "summary": 0} == {**before, "kind": 0, "summary": 0}
        for axis, score in now["summary"]["equal"].items():  # scores between the ends are rounded in a report
            assert score["value"] == pytest.approx(before["summary"]["equal"][axis]["value"], abs=1e-4)

    def find_pair(report: dict[str, Any]) -> dict[str, Any]:
        (pair,) = (pair for pair in report["pairs"] if {pair["first"], pair["second"]} == {"grpo", "ppo"})
        return pair

    assert find_pair(merged)["separated"] == find_pair(result)["separated"]
    assert merged["caveats"][-1].endswith("grpo was measured then and now; the final scores of its seeds are the same.")
    assert "had a processor for 95% of a run's time, those before for 95%" in merged["caveats"][-1]  # 20 of 21 seconds
    assert "ppo" in page
    (grpo,) = (row for row in later["rows"] if row["label"] == "grpo")
    settings = grpo["settings"] | {"updates_per_rollout": grpo["settings"]["updates_per_rollout"] + 7}
    again, _ = measure_algorithms.merge_reports(merged, {**later, "rows": [{**grpo, "settings": settings}]})
    assert again["caveats"][-2] == merged["caveats"][-1]  # what was measured on the day before is still told
    assert "grpo was measured then (updates per rollout 1, now 8) and now; the final scores" in again["caveats"][-1]
    with pytest.raises(ValueError, match="seeds of the rows before are"):
        measure_algorithms.merge_reports(earlier, {**later, "seeds": [7]})


def test_the_curves_are_a_picture_of_its_own(result: dict[str, Any]) -> None:
    svg = ElementTree.fromstring(curves(result))
    names = [node.text for node in svg.iter("{http://www.w3.org/2000/svg}text")]
    assert {"grpo", "ppo", "trpo", "vineppo"} <= set(names)
    paths = [node.get("class") for node in svg.iter("{http://www.w3.org/2000/svg}path")]
    assert (paths.count("curve"), paths.count("band"), paths.count("baseline")) == (4, 4, 3)
    assert "href" not in curves(result)


@pytest.mark.full
def test_every_algorithm_is_measured_or_left_out_with_its_reason() -> None:
    there, left_out = measure_algorithms.measurable(tuple(ALGORITHMS))
    assert set(there) | set(left_out) == set(ALGORITHMS)
    assert all(left_out.values())


def test_the_script_hands_every_row_on_and_keeps_the_report(
    tmp_path: Path, result: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("grpo", "ppo", "sdft")
    monkeypatch.setattr(measure_algorithms, "ALGORITHMS", {name: ALGORITHMS[name] for name in names})
    asked: list[list[str]] = []

    def compare(argv: list[str]) -> int:
        asked.append(argv)
        folder = Path(argv[argv.index("--output") + 1])
        folder.mkdir(parents=True)
        (folder / "comparison.json").write_text(json.dumps(result))
        (folder / "comparison.html").write_text("<!doctype html>")
        return 1  # some runs failed: what there is counts

    code = measure_algorithms.main(["--", "--jobs", "2"], compare, tmp_path / "results", tmp_path / "work")
    assert code == 1
    (argv,) = asked
    assert argv[:3] == ["grpo", "ppo", "--budget-tokens"]
    left_out = {"sdft": measure_algorithms.describe_lack("sdft")}
    assert left_out["sdft"]
    assert argv[-2:] == ["--jobs", "2"]
    assert argv[argv.index("--lr-grid") + 1] == measure_algorithms.LR_GRID
    text = read_result("algorithms.json", tmp_path / "results") or ""
    kept = json.loads(text)
    without_claims = {key: value for key, value in result.items() if key != "claims"}
    assert kept == without_claims | {
        "measured_by": "python scripts/measure_algorithms.py -- --jobs 2",
        "left_out": left_out,
    }
    assert sum(line.startswith('{"label"') for line in text.splitlines()) == 5
    assert read_result("algorithms.html", tmp_path / "results") == "<!doctype html>"
    measure_algorithms.main(["--ladder", "dapo"], compare, tmp_path / "results", tmp_path / "work")
    assert asked[1][:2] == ["--ladder", "dapo"]
    assert load_result("ladder-dapo", tmp_path / "results") is not None


def test_a_try_or_a_stop_leaves_the_results_alone(tmp_path: Path) -> None:
    def compare(argv: list[str]) -> int:
        Path(argv[argv.index("--output") + 1]).mkdir(parents=True)
        return 75

    assert measure_algorithms.main(["--only", "grpo"], compare, tmp_path / "results", tmp_path / "work") == 75
    assert not (tmp_path / "results").exists()


def test_a_refused_row_is_left_out_with_its_reason() -> None:
    there, left_out = measure_algorithms.measurable(("grpo", "no_such"))
    assert there == ["grpo"]
    assert left_out["no_such"].startswith("unknown algorithm 'no_such'")


def test_results_of_control_runs_are_appended_and_removed(tmp_path: Path) -> None:
    path = tmp_path / "new" / "results.jsonl"
    assert measure_control.read_results(path) == []
    for name in ("ppo", "trpo"):
        measure_control.append_result({"name": name, "seed": 0}, path)
    assert [r["name"] for r in measure_control.read_results(path)] == ["ppo", "trpo"]
    measure_control.remove_results(["ppo"], path)
    assert [r["name"] for r in measure_control.read_results(path)] == ["trpo"]
    path.write_text(path.read_text() + '{"name": "gr')
    with pytest.raises(measure_control.MeasureError, match=r"line 2 is not JSON"):
        measure_control.read_results(path)


def test_readmes_figures_of_a_gpu_are_those_that_were_measured() -> None:
    results = json.loads((ROOT / "docs" / "results" / "gpu.json").read_text(encoding="utf-8"))
    readme = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    parts = {name: part["result"] for name, part in results["parts"].items()}
    speed = int(parts["learner 16k compiled"]["text tokens/s"] // 1000)
    device, updates = results["parts"]["algorithms"]["device"].removeprefix("NVIDIA "), parts["algorithms"]
    count, error = updates["algorithms"], updates["cuda float64"]["error"]
    told = f"the update of each of {count} algorithms equals the CPU's ({error:.0e}, in float64)"
    assert f"On an {device} {told}" in readme
    assert f"learns from {speed},000 tokens a second with `--learner.compile`" in readme
