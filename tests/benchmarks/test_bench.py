"""The benchmarks' own arithmetic: medians and spread, what counts as done, what is kept, and the page."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import make_work
import ours
import pytest
import torch

from bench import clock, drafts, operations, rewards
from bench.lengths import EndAt
from bench.models import rollout
from bench.options import COMPONENTS, parse
from bench.page import page
from bench.profiling import kind
from bench.savings import groups
from bench.store import Store, Task, fingerprint, in_words, remaining
from bench.summary import Estimate, linearity, per_step, reached, rows, short
from bench.targets import learning
from bench.works import GSM8K, SEVEN, WORKS, Shape, chosen, from_dict, geometric, part_of, quick
from doubles.files import write_rows

FACTS: dict[str, Any] = {
    "completions": [16, 16],
    "prompt_tokens": [988, 1736],
    "tokens": [240, 240],
    "loss": [0.1, 0.0],
    "grad_norm": [0.2, 0.3],
    "moved": 1e-5,
    "updates": 2,
}


def record(*cpu: float, peak: float = 100.0) -> dict[str, Any]:
    """A worker's result with these CPU seconds per step, and twice as many on the wall."""
    steps = [{"cpu": c, "wall": 2 * c} for c in cpu]
    return {
        "steps": steps,
        "peak_mib": peak,
        "children_mib": 46.0,
        "data": "GSM8K",
        "facts": FACTS,
        "taken": "2026-11-22 at abc",
        "command": "python benchmarks/ours.py x",
        "seconds": sum(cpu),
        "fingerprint": "f",
    }


def test_a_step_is_the_median_without_the_first() -> None:
    assert per_step(record(9.0, 1.0, 2.0, 4.0), "cpu") == 2.0
    assert per_step(record(9.0, 1.0, 2.0), "wall") == 3.0


def test_an_estimate_has_its_least_and_largest() -> None:
    results = Estimate.of([3.0, 1.0, 2.0])
    assert (results.median, results.low, results.high, results.count) == (2.0, 1.0, 3.0, 3)
    assert str(results) == "2.00 (1.00–3.00)"
    assert str(Estimate.of([2.0])) == "2.00"
    with pytest.raises(ValueError, match="at least one"):
        Estimate.of([])


@pytest.mark.parametrize(
    ("value", "message"),
    [(0.01234, "0.0123"), (1.234, "1.23"), (12.34, "12.3"), (1234.0, "1,234"), (0.0, "0"), (math.inf, "inf")],
)
def test_three_digits(value: float, message: str) -> None:
    assert short(value) == message


def test_repeats_of_a_side_are_one_row() -> None:
    measured = {
        "7m/trl-fp32/1/0": record(0.0, 8.0),
        "7m/trl-fp32/1/1": record(0.0, 10.0, peak=300.0),
        "7m/policygrad-fp32/1/0": record(0.0, 3.0),
        "7m/policygrad-fp32/2/0": record(0.0, 4.0),
        "25m/trl-fp32/1/0": record(0.0, 99.0),
    }
    results = rows(measured, "7m")
    assert [(r.side, r.threads) for r in results] == [("policygrad-fp32", 1), ("trl-fp32", 1), ("policygrad-fp32", 2)]
    assert results[1].cpu == Estimate(9.0, 8.0, 10.0, 2)
    assert results[1].wall.median == 18.0
    assert results[1].memory == Estimate(200.0, 100.0, 300.0, 2)


def test_linearity_is_the_distance_from_the_line_through_0() -> None:
    slope, off = linearity([1, 2, 4], [3.0, 6.0, 12.0])
    assert slope == pytest.approx(3.0)
    assert off == pytest.approx([0.0, 0.0, 0.0])
    slope, off = linearity([1, 2], [1.0, 2.42])  # 1 and 1.21 a unit: the line has their geometric mean
    assert slope == pytest.approx(1.1)
    assert off == pytest.approx([1 / 1.1 - 1, 0.1])


def test_when_a_curve_comes_to_an_accuracy() -> None:
    run = {**record(1.0, 2.0, 3.0, 4.0), "curve": [[0, 0.2], [2, 0.6], [4, 1.0]]}
    assert reached(run, 0.4, "cpu") == pytest.approx(1.5)  # half way through the first two steps' 3 seconds
    assert reached(run, 0.8, "wall") == pytest.approx(6.0 + 7.0)
    assert reached(run, 1.0, "cpu") == pytest.approx(10.0)
    assert reached({**run, "curve": [[0, 0.2], [4, 0.7]]}, 0.8, "cpu") is None


def test_what_is_left_out_is_no_part_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([10.0, 11.0, 14.0, 20.0])
    monkeypatch.setattr(clock.time, "perf_counter", lambda: next(times))
    monkeypatch.setattr(clock, "cpu_seconds", lambda: 0.0)
    timer = clock.Clock()
    timer.mark()
    with timer.apart():
        pass
    timer.mark()
    assert timer.steps() == [{"wall": 7.0, "cpu": 0.0}]


def test_geometric_lengths_are_in_equal_ratios_and_mixed() -> None:
    lengths = geometric(16, 1024, 128)
    ordered = sorted(lengths)
    assert (len(lengths), ordered[0], ordered[-1]) == (128, 16, 1024)
    assert ordered[64] / ordered[32] == pytest.approx(ordered[96] / ordered[64], rel=0.05)
    assert list(lengths) != ordered
    assert sum(lengths[:64]) == pytest.approx(sum(lengths[64:]), rel=0.1)


@pytest.mark.parametrize("work", [*WORKS, *map(quick, WORKS)], ids=lambda w: f"{w.name}-{w.completions}")
def test_every_work_can_be_done_by_both_sides(work: Any) -> None:
    assert from_dict(json.loads(json.dumps(work.as_dict()))) == work
    assert work.lengths is None or max(work.lengths) <= work.max_tokens
    part = part_of(work)
    for micro in (m for m in work.grid if m <= part.completions):
        assert work.completions % micro == part.completions % micro == 0  # TRL accumulates whole micro-batches
    assert any(m <= part.completions for m in work.grid)


def test_tokens_of_a_step() -> None:
    assert {w.name: w.tokens() for w in WORKS if w.scale or w.name == "7m"} == {
        "7m": 128 * 252,
        **{f"linear-{k}": k * 16 * 252 for k in (1, 2, 4, 8, 16)},
    }
    assert next(w for w in WORKS if w.name == "embedded").tokens() is None
    assert replace(WORKS[1], prompts=1, samples=3, lengths=(2, 5)).tokens() == 2 + 5 + 2


def test_works_are_chosen_by_name() -> None:
    assert [w.name for w in chosen(["linear", "7m"])] == ["7m", *(f"linear-{k}" for k in (1, 2, 4, 8, 16))]
    assert chosen(["head"]) == ()
    assert chosen([]) == WORKS


def test_options_refuse_what_they_do_not_know(capsys: pytest.CaptureFixture[str]) -> None:
    assert parse("", ["--quick", "--only", "head"]).repeats == 1
    assert not parse("", ["--only", "head"]).wants("packing")
    for arguments, message in ((["--only", "heads"], "invalid choice"), (["--repeats", "0"], "at least 1")):
        with pytest.raises(SystemExit):
            parse("", arguments)
        assert message in capsys.readouterr().err


def test_a_run_that_has_done_the_work_has_no_problems() -> None:
    assert clock.problems(FACTS, 2, 16, 240) == []
    assert clock.problems({**FACTS, "tokens": [230, 251]}, 2, 16, None) == []


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"completions": [16, 8]}, "completions per step"),
        ({"tokens": [240, 239]}, "tokens per step"),
        ({"loss": [0.1]}, "1 steps have loss"),
        ({"grad_norm": [0.1, math.nan]}, "grad_norm is not finite"),
        ({"updates": 4}, "4 optimiser steps, not 2"),
        ({"moved": 0.0}, "moved by 0.0"),
        ({"moved": math.nan}, "moved by nan"),
    ],
)
def test_a_run_that_has_not_done_the_work_says_what_is_wrong(wrong: dict[str, Any], message: str) -> None:
    results = clock.problems({**FACTS, **wrong}, 2, 16, 240)
    assert len(results) == 1
    assert message in results[0]


def test_a_worker_is_heard(capsys: pytest.CaptureFixture[str]) -> None:
    timer = clock.Clock([(1.0, 10.0), (3.0, 11.0), (6.0, 11.5)])
    print("something else")
    clock.say(timer, "GSM8K", FACTS, {"torch": "2"})
    results = clock.heard(capsys.readouterr().out)
    assert results is not None
    assert results["steps"] == [{"wall": 2.0, "cpu": 1.0}, {"wall": 3.0, "cpu": 0.5}]
    assert (results["facts"], results["data"]) == (FACTS, "GSM8K")
    assert results["peak_mib"] > 10
    assert clock.heard("nothing") is None


def test_what_is_kept_is_known_again(tmp_path: Path) -> None:
    store, task = Store(tmp_path / "a" / "bench.json"), Task("7m/trl-fp32/1/0", "f", ("true",))
    assert store.known("measurements", task) is None
    store.put("measurements", task.key, record(1.0, 2.0))
    second = Store(store.file)
    assert second.known("measurements", task) == record(1.0, 2.0)
    assert second.known("measurements", replace(task, fingerprint="g")) is None
    second.forget("measurements", {"7m/trl-bf16/1": "g"})
    assert second.known("measurements", task) is not None
    second.forget("measurements", {"7m/trl-fp32/1": "g"})
    assert second.section("measurements") == {}
    clone = Store(tmp_path / "b" / "bench.json", published=store.file)
    assert clone.known("measurements", task) == record(1.0, 2.0)
    clone.put("measurements", task.key, record(2.0, 2.0))
    assert Store(clone.file, published=store.file).known("measurements", task) == record(2.0, 2.0)


def test_a_fingerprint_is_of_values_and_files(tmp_path: Path) -> None:
    file = tmp_path / "code.py"
    file.write_text("1")
    first = fingerprint({"a": 1, "b": 2}, [file])
    assert first == fingerprint({"b": 2, "a": 1}, [file])
    assert first != fingerprint({"a": 2, "b": 2}, [file])
    file.write_text("2")
    assert first != fingerprint({"a": 1, "b": 2}, [file])


def test_how_long_it_will_take() -> None:
    tasks = [Task(key, "f", ()) for key in ("a/1/0", "a/1/1", "b/1/0")]
    assert remaining(tasks, {"a/1": [10.0, 12.0, 20.0], "b/1": [5.0]}) == (29.0, False)
    assert remaining(tasks, {"a/1": [10.0]}) == (30.0, True)
    assert remaining(tasks, {}) == (0.0, True)
    assert (in_words(89.6), in_words(3723)) == ("1:30", "1:02:03")


def test_rewards() -> None:
    message = ["7", "It is <answer> 7 </answer>", "<answer>7</answer> or <answer>8</answer>", "It is 7"]
    assert rewards.exact(message, message, answer=["7"] * 4) == [1.0, 1.0, 0.0, 0.0]
    results = rewards.spread(message, message)
    assert len(set(results)) == 4
    assert all(0 <= x < 1 for x in results)


def test_rows_end_where_they_should() -> None:
    ends = EndAt((1, 3), rows=2, width=4, end=0)
    first = ends(torch.zeros(2, 4), torch.ones(2, 3))
    assert first.tolist() == [[0.0, -math.inf, -math.inf], [-math.inf, 1.0, 1.0]]
    third = ends(torch.zeros(2, 6), torch.ones(2, 3))
    assert third[1].tolist() == [0.0, -math.inf, -math.inf]


def test_operations_of_a_gradient() -> None:
    shape = Shape(hidden=2, intermediate=3, layers=5, heads=4, kv_heads=1, head_dim=7, vocabulary=11)
    batch = rollout(11, prompts=1, samples=2, lengths=(2, 3), prompt=2)
    nodes, pairs, reading = (
        2 + 1 + 2,
        (1 + 2) + 3 + (3 + 4),
        1 + 1 + 2,
    )  # the last token of a completion predicts nothing
    weights = 2 * (4 + 1 + 1 + 4) * 7 + 3 * 2 * 3
    assert groups(batch) == [(2, [2, 3])]
    expected = 5 * (6 * weights * nodes + 12 * 4 * 7 * pairs) + 6 * 2 * 11 * reading
    assert operations.gradient(shape, groups(batch)) == expected
    assert operations.step(shape, groups(batch)) == expected * 4 / 3


def test_the_page_says_how_many_times_faster() -> None:
    measured = {
        "7m/trl-fp32/1/0": record(0.0, 9.0, peak=400.0),
        "7m/policygrad-fp32/1/0": record(0.0, 3.0),
        "linear-1/policygrad-fp32/1/0": {**record(0.0, 1.0), "facts": {**FACTS, "tokens": [100]}},
        "linear-2/policygrad-fp32/1/0": {**record(0.0, 2.42), "facts": {**FACTS, "tokens": [200]}},
    }
    slow, fast = ({**record(0.0, n, n), "curve": [[0, 0.2], [1, 0.2], [2, 0.9]]} for n in (6.0, 2.0))
    measured |= {"learning/trl-fp32/1/0": slow, "learning/policygrad-fp32/1/0": fast}
    measured["learning/policygrad-fp32/1/1"] = {**fast, "curve": [[0, 0.2], [1, 0.2], [2, 0.7]]}
    grid = {"7m/trl-fp32/1/4": record(0.0, 2.0), "7m/trl-fp32/1/8": record(0.0, 1.0)}
    table = {
        "title": "Head",
        "note": "Note.",
        "threads": "1",
        "taken": "2026-11-22 at abc",
        "command": "c",
        "columns": ["a", "b"],
        "rows": [["x", 0.5]],
    }
    text = page(
        {"about": {"machine": {"cores": "2"}}, "measurements": measured, "grid": grid, "components": {"h": table}}
    )
    assert " | policygrad-fp32, 1 thread | 3.00 | 6.00 | 100 | 3.00 | 3.00 | 4.00 | 1 |" in text
    assert "| 7m/trl-fp32/1 | 2.00 (100 MiB) | **1.00 (100 MiB)** |" in text
    assert "| 2× | 200 | 2.42 | +10.0 % |" in text
    assert "| x | 0.500 |" in text
    assert "| policygrad-fp32, 1 thread | 0.20 | 0.20 | 0.80 | 2 |" in text
    assert "| policygrad-fp32, 1 thread | 1.86 | 3.71 | 3.00 | 3.00 | 1 of 2 |" in text
    assert "| cores | 2 |" in text
    assert "python benchmarks/ours.py x" in text
    assert "--quick" not in text


def test_a_page_of_nothing_claims_nothing() -> None:
    text = page({"quick": True})
    assert "Not measured yet." in text
    assert "--quick" in text


def test_a_page_says_which_targets_are_reached_and_why_others_are_not() -> None:
    facts = {**FACTS, "completions": [128], "prompt_tokens": [7680], "tokens": [32256]}
    taken = {
        "7m/trl-fp32/1/0": {**record(0.0, 60.0, peak=3000.0), "facts": facts},
        "7m/policygrad-fp32/1/0": {**record(0.0, 30.0, peak=700.0), "facts": facts},
    }
    columns = ["model", "Gflop", "CPU s", "Gflop/s", "matrix product, Gflop/s", "share"]
    made = {"title": "M", "note": "n", "threads": "1", "command": "c", "taken": "today", "columns": columns}
    components = {
        "matmul": made | {"rows": [["7M, fp32", 380.0, 6.0, 60.0, 100.0, 0.6], ["25M, fp32", 1.0, 1.0, 1.0, 1.0, 0.59]]}
    }
    text = page({"measurements": taken, "components": components})
    assert "| TRL ÷ ours, CPU seconds per step, 7M | ≥ 3 | 2.00 | no |" in text
    assert "| TRL ÷ ours, peak memory, 7M | ≥ 4 | 4.29 | yes |" in text
    assert "| learner's share of the matrix-multiply rate, 7M | ≥ 0.6 | 0.600 | yes |" in text
    assert "| the same, 25M | ≥ 0.6 | 0.590 | no |" in text
    assert "embedded task | ≥" not in text  # of which nothing was measured
    needed = operations.step(SEVEN, [(60, [252] * 8)] * 16) / 1e9
    assert 1900 < needed < 1960
    assert f"{needed / 100 / 30:.0%} of that rate" in text
    assert "Memory of the 7M work" not in text  # reached


def test_a_curve_that_does_not_come_there_has_no_ratio() -> None:
    there, short_of_it = ({**record(1.0, 1.0), "curve": [[0, 0.2], [1, 0.5], [2, last]]} for last in (0.9, 0.8))
    both = {"learning/trl-fp32/1/0": there, "learning/policygrad-fp32/1/0": there}
    assert learning({"measurements": both}) == 1.0
    assert learning({"measurements": {**both, "learning/policygrad-fp32/1/1": short_of_it}}) is None


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("aten::mm", "matrix products"),
        ("aten::_scaled_dot_product_flash_attention_for_cpu", "attention"),
        ("aten::log_softmax", "softmax, exponentials, draws"),
        ("aten::index_put_", "copies, gathers, conversions"),
        ("aten::exp_", "softmax, exponentials, draws"),
        ("aten::expand", "element by element"),
        ("aten::logical_not", "element by element"),
        ("aten::mul", "element by element"),
        ("aten::rsqrt", "element by element"),
    ],
)
def test_operations_are_of_a_kind(name: str, message: str) -> None:
    assert kind(name) == message


def test_drafts_pay_from_where_they_give_as_many_tokens_as_they_cost() -> None:
    assert drafts.needed(1.5, 1) == pytest.approx(0.5)  # 1 + a tokens
    assert drafts.needed(1.0, 7) == pytest.approx(0.0, abs=1e-9)
    assert drafts.needed(1.75, 2) == pytest.approx(0.5)  # 1 + a + a²
    assert drafts.needed(2.0, 1) is None


def test_what_siblings_say_behind_the_same_tokens_is_a_draft() -> None:
    group = [[5, 6, 7], [5, 6, 8], [5, 6, 7], [5, 6, 7], [9]]  # all drafts are right but those of 8 and 9
    assert drafts.agreement([group]) == (1.0, pytest.approx(11 / 13))
    assert drafts.agreement([[[5, 6, 7, 8], [5, 1, 7, 8]]]) == (pytest.approx(4 / 8), pytest.approx(2 / 4))
    assert drafts.agreement([[[3]]]) == (0.0, 0.0)


def test_turns_of_a_step_are_summed_and_its_conversations_counted_once() -> None:
    facts = {"completions": [4, 4, 4, 4], "tokens": [1, 2, 3, 4], "prompt_tokens": [10, 20, 30, 40]}
    assert clock.sum_turns(facts, 2) == {"completions": [4, 4], "tokens": [3, 7], "prompt_tokens": [30, 70]}
    assert clock.sum_turns(facts, 1) == facts


@pytest.mark.full
@pytest.mark.parametrize("name", ["conversations", "geometric"])
def test_a_small_work_is_measured_whole(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the names that the library has now: the steps, and the completions and tokens that the work says."""
    work = quick(next(w for w in WORKS if w.name == name))
    sums = [{"question": f"What are {i} and {i + 1} together?", "answer": str(2 * i + 1)} for i in range(40)]
    (tmp_path / GSM8K).parent.mkdir()
    write_rows(tmp_path / GSM8K, sums)
    enter(make_work, monkeypatch, name, tmp_path / name, "--quick", "--data", tmp_path)
    enter(ours, monkeypatch, tmp_path / name)
    found = clock.heard(capsys.readouterr().out)
    assert found is not None
    assert len(found["steps"]) == work.steps + 1
    assert found["facts"]["completions"] == [work.completions] * (work.steps + 1)
    assert found["facts"]["tokens"] == [work.tokens()] * (work.steps + 1)
    assert found["facts"]["updates"] == work.steps + 1


def enter(script: ModuleType, monkeypatch: pytest.MonkeyPatch, *words: object) -> None:
    """Do what the script does when it is started with these words."""
    monkeypatch.setattr(sys, "argv", [str(script.__file__), *map(str, words)])
    script.main()


@pytest.mark.full
def test_every_component_runs_in_small(tmp_path: Path) -> None:
    """With the names that the library has now. Run on a copy: results are written beside the scripts."""
    root = Path(__file__).parents[2]
    shutil.copytree(root / "benchmarks", tmp_path / "benchmarks")
    command = [sys.executable, "benchmarks/speed.py", "--quick", "--repeats", "1"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count("`python benchmarks/speed.py --only") >= len(COMPONENTS)
