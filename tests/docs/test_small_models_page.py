"""scripts/measure_smollm2.py: its problems, what it tells of a run, and what the page makes of that."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

import measure_smollm2 as train_smollm2
from doubles.runs import row, run_folder
from pages import blocks as real_model
from policygrad.commands.train import parse_run

STEPS = [
    (0, {"eval/reward": 0.25, "eval/reward_stderr": 0.02}),
    (1, {"reward": 0.2, "completions/mean_length": 7.0}),
    (2, {"reward": 0.6, "completions/mean_length": 3.0}),
    (2, {"eval/reward": 0.5, "eval/reward_stderr": 0.01}),
]


@pytest.fixture
def results(tmp_path: Path) -> dict[str, Any]:
    prompt = [{"role": "user", "content": "What is 4 + 7? Reply with the number only."}]
    output = [(1, [row(prompt, f"4 | 7 = 1{i}", 0.0) for i in range(8)]), (2, [row(prompt, "11", 1.0)])]
    result = {"steps": 2, "tokens": 90}
    folder = run_folder(tmp_path / "run", STEPS, output, name="dr_grpo", result=result)
    report = train_smollm2.told(folder, "policygrad train dr_grpo")
    return report | {
        "made_by": "python scripts/measure_smollm2.py --steps 2",
        "weights": "",
        "problems": {"trained_on": 800, "eval/reward": 200},
        "versions": {"torch": "2.0"},
        "machine": "one",
        "processor_seconds": 600,
    }


def test_no_question_is_both_trained_on_and_held_out() -> None:
    trained, held_out = train_smollm2.problems()
    questions = [r["prompt"][0]["content"] for r in (*trained, *held_out)]
    assert len(set(questions)) == len(questions) == 1000
    assert 150 < len(held_out) < 250
    for r in held_out:
        a, b = (int(word.strip("?")) for word in r["prompt"][0]["content"].split() if word.strip("?").isdigit())
        assert r["answer"] == str(a + b)


def test_the_command_is_one_that_can_be_given() -> None:
    run, _ = parse_run(train_smollm2.words("tiny", 20)[1:])
    assert (run.algorithm.name, run.prompts_per_step, run.effective_samples_per_prompt, run.steps) == (
        "dr_grpo",
        16,
        8,
        20,
    )
    assert (run.lr, run.sampling.max_tokens, run.reward) == (1e-5, 12, ("gsm8k:last",))


def test_what_is_told_of_a_run_and_the_page_of_it(results: dict[str, Any]) -> None:
    assert results["eval/reward"] == [[0, 0.25, 0.02], [2, 0.5, 0.01]]
    assert results["curve"] == [[1, 0.2], [2, 0.6]]
    assert [(a["step"], a["completion"]) for a in results["answers"]] == [
        *((1, f"4 | 7 = 1{i}") for i in (0, 2, 4, 6)),
        (2, "11"),
    ]
    block = real_model.real_model_block(results)
    assert "**0.250 ± 0.020 before, 0.500 ± 0.010 after** 2 steps" in block
    assert "10 minutes of processor time" in block
    assert "| 1 | What is 4 + 7? Reply with the number only. | `'4 \\| 7 = 10'` | 0 |" in block


def test_the_picture_has_every_step_and_both_measurements(results: dict[str, Any]) -> None:
    svg = ElementTree.fromstring(real_model.real_model_picture(results))
    space = "{http://www.w3.org/2000/svg}"
    (line,) = svg.iter(f"{space}polyline")
    heights = [float(point.split(",")[1]) for point in line.attrib["points"].split(" ")]
    assert heights == pytest.approx([180.0, 100.0])  # 0.2 and 0.6 of the way from 220 up to 20
    assert [float(c.attrib["cy"]) for c in svg.iter(f"{space}circle")] == pytest.approx([170.0, 120.0])
