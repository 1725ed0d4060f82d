"""`policygrad compare` as it is typed: rows, layers of options, what is tuned, what is refused; and one comparison for real."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import policygrad as pg
from doubles import comparison
from doubles.comparison import forking_runs, plan
from doubles.comparison import row as planned
from doubles.files import write_rows
from policygrad.algorithms import ALGORITHMS
from policygrad.commands.compare import EVAL_FRACTION, CompareOptions, build_rows, resolve_row, run_comparison
from policygrad.compare.plan import LADDERS, OVERRIDES, ComparisonRow, read_plan
from policygrad.compare.runner import ComparisonRun
from policygrad.errors import ConfigError
from policygrad.utils.argv import merge_argv, option_names


def rows(
    *specs: str, common: tuple[str, ...] = (), options: tuple[str, ...] = (), **changes: Any
) -> dict[str, ComparisonRow]:
    given = {"lr_grid": (), "delta_grid": (), "tokens": 250_000, "overrides": True} | changes
    ladder = given.pop("ladder", None)
    return {row.label: row for row in build_rows(specs, ladder, common, options, **given)}


def words(run_command: Any, *args: str) -> list[str]:
    code, out, err = run_command("compare", *args, "--dry-run")
    assert code == 0, err
    return [line for line in out.splitlines() if not line.startswith("#")]


def test_later_options_replace_earlier_ones() -> None:
    assert merge_argv(("grpo", "--a", "1", "--b"), ("--a=2",), ("--c", "x", "y")) == (
        "grpo",
        "--a=2",
        "--b",
        "--c",
        "x",
        "y",
    )
    assert merge_argv(("--max_tokens", "5"), ("--max-tokens", "6")) == ("--max-tokens", "6")
    assert option_names(("grpo", "--a_b=1", "--c", "-1")) == {"--a-b", "--c"}


def test_rows_are_parsed_into_labels_and_options() -> None:
    result = rows(
        "grpo",
        "tight=grpo --algorithm.gate.high 0.1",
        common=("--prompts-per-step", "16"),
        options=("grpo=--samples-per-prompt 4", "grpo=--temperature 0.9"),
    )
    assert list(result) == ["grpo", "tight"]
    assert result["tight"].argv[0] == "grpo"
    assert "--algorithm.gate.high" in result["tight"].argv
    assert result["grpo"].settings["samples_per_prompt"] == 4
    assert result["tight"].settings["samples_per_prompt"] == 8
    assert {row.settings["prompts_per_step"] for row in result.values()} == {16}
    assert result["grpo"].measure["temperature"] == 0.9
    assert result["grpo"].measure != result["tight"].measure


@pytest.mark.full
def test_evaluations_cost_at_most_their_share() -> None:
    for row in rows("grpo", "vapo", "rloo", "ppo").values():
        run = resolve_row(row.label, row.argv)
        evaluated = run.evaluation.problems * run.evaluation.samples_per_prompt
        trained = run.prompts_per_step * run.effective_samples_per_prompt * run.evaluation.every
        assert evaluated <= EVAL_FRACTION * trained
        assert run.steps >= 1000
    assert resolve_row("own", rows("grpo", common=("--evaluation.every", "1"))["grpo"].argv).evaluation.every == 1


@pytest.mark.full
def test_the_tuned_option_follows_the_algorithm() -> None:
    grids = {"lr_grid": (1e-4, 1e-3), "delta_grid": (0.01, 0.03)}
    result = rows("grpo", "trpo", "fixed=grpo --lr 1e-3", **grids)
    assert (result["grpo"].tuned_option, result["grpo"].grid) == ("--lr", (1e-4, 1e-3))
    assert (result["trpo"].tuned_option, result["trpo"].grid) == ("--algorithm.update-rule.delta", (0.01, 0.03))
    assert (result["fixed"].tuned_option, result["fixed"].grid) == ("", ())
    assert not rows("trpo", lr_grid=(1e-4, 1e-3))["trpo"].is_tuned
    with pytest.raises(ConfigError, match="--lr for all rows leaves nothing for --lr-grid to choose"):
        rows("grpo", common=("--lr", "1e-3"), **grids)


@pytest.mark.full
def test_overrides_for_short_answers_are_printed_and_can_be_disabled() -> None:
    result = rows("vapo", "grpo")
    assert result["vapo"].reason == OVERRIDES["vapo"].reason
    assert set(OVERRIDES["vapo"].options) <= set(result["vapo"].argv)
    assert result["grpo"].reason == ""
    for plain in (rows("vapo", overrides=False), rows("vapo", common=("--task", "embedded_steps"))):
        assert plain["vapo"].reason == ""
        assert "0.5" not in plain["vapo"].argv
    assert set(OVERRIDES) <= set(ALGORITHMS)


def test_a_row_can_be_a_custom_algorithm() -> None:
    result = rows("soft=dr_grpo --algorithm.gate SigmoidGate --algorithm.gate.tau-pos 2", lr_grid=(1e-3,))
    run = resolve_row("soft", (*result["soft"].argv, "--lr", "1e-3"))
    assert run.algorithm.gate == pg.SigmoidGate(2.0, 1.05)


@pytest.mark.parametrize(
    ("args", "reason"),
    [
        ((), "nothing to compare"),
        (("grpo", "grpo"), "two rows are called 'grpo'"),
        (("grpoo",), "the row grpoo: unknown algorithm 'grpoo': did you mean 'grpo'?"),
        (
            ("grpo", "--", "--seed", "3"),
            "the row grpo has --seed, which the comparison sets for every run; use --seeds",
        ),
        (
            ("grpo", "--", "--evaluation.problems", "0"),
            "the row grpo has no evaluation problems. Set --evaluation.problems above 0",
        ),
        (("grpo", "--", "dapo"), "'dapo' is no option"),
        (("a b",), "'b' is no option"),
        (("../x=grpo",), "names a folder"),
        (("grpo", "--options", "ppo=--lr 1"), "where LABEL is grpo"),
        (("grpo", "--lr-grid", "1e-3;1e-4"), "--lr-grid must be numbers separated by commas"),
        (("grpo", "--lr-grid", "0,1e-4"), "every value must be above 0"),
        (("grpo", "--seeds", "0"), "--seeds must be at least 1"),
        (("grpo", "--seeds", "1001"), "at most 1000"),
        (("grpo", "--threshold", "1.5"), "--threshold must be above 0 and at most 1, not 1.5"),
        (("--ladder", "gspo"), "unknown ladder 'gspo'; available: dapo"),
        (("grpo", "--resume", "x"), "--resume continues plan.json in the folder"),
        (("--resume", "x", "--seeds", "3", "--no-overrides"), "--seeds and --no-overrides would change it"),
        (("--resume", "nowhere"), "holds no comparison"),
        (("grpo", "fixed=rloo --tokens 5"), "--tokens of compare"),
    ],
)
def test_invalid_comparisons_are_refused(run_command: Any, args: tuple[str, ...], reason: str) -> None:
    code, _, err = run_command("compare", *args)
    assert code == 2
    assert reason in " ".join(err.replace("│", " ").split())


def test_dry_run_prints_every_command(run_command: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    report = words(run_command, "grpo", "trpo", "--seeds", "2", "--lr-grid", "1e-4,1e-3", "--budget-tokens", "1000")
    assert len(report) == 2 * 2 + 2 * 2
    assert all("--tokens 1000" in line for line in report)
    assert sum("the best of 0.0001, 0.001" in line for line in report) == 2
    assert not Path("comparisons").exists()


@pytest.mark.full
def test_seeds_that_can_tell_no_rows_apart_are_announced_before_the_runs(
    run_command: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of wholly separated equal rows at most 5 % may be chance."""
    monkeypatch.chdir(tmp_path)
    _, out, _ = run_command("compare", "grpo", "rloo", "--seeds", "3", "--dry-run")
    assert out.startswith("# --seeds 3 cannot distinguish any two rows")
    assert "10% of cases" in out
    assert "Use --seeds 4 or more" in out
    assert "#" not in run_command("compare", "grpo", "rloo", "--seeds", "4", "--dry-run")[1]
    assert "#" not in run_command("compare", "grpo", "--seeds", "1", "--dry-run")[1]  # nothing to tell it from


@pytest.mark.parametrize(("seeds", "share"), [(1, "100% of cases"), (2, "33% of cases"), (3, "10% of cases")])
def test_too_few_seeds_are_announced_before_the_first_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, seeds: int, share: str
) -> None:
    def begun(self: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(ComparisonRun, "run", begun)
    with pytest.raises(KeyboardInterrupt):
        run_comparison(plan(planned("grpo"), planned("ppo"), seeds=seeds), tmp_path / "c", CompareOptions())
    err = capsys.readouterr().err
    assert f"--seeds {seeds} cannot distinguish any two rows" in err
    assert share in err


@pytest.mark.full
@pytest.mark.parametrize("name", LADDERS)
def test_a_ladder_ends_at_its_method(name: str) -> None:
    """Every rung is another algorithm than the one below, and the last is the method itself."""
    ladder = LADDERS[name]
    result = list(rows(ladder=ladder).values())
    made = [resolve_row(row.label, row.argv).algorithm for row in result]
    assert len(made) == len(ladder.rungs) >= 2
    assert all(a != b for a, b in pairwise(made))
    own = resolve_row("own", (name, *ladder.setting)).algorithm
    assert replace(made[-1], name=own.name, update_rule=own.update_rule) == own
    assert {row.measure["task"] for row in result} == {"embedded_steps"}
    assert all(row.change for row in result)
    assert {row.settings["updates_per_rollout"] for row in result} == {16}


def test_the_dapo_ladder_is_in_the_published_order() -> None:
    labels = [rung.label for rung in LADDERS["dapo"].rungs]
    assert labels == ["naive_grpo", "overlong_mask", "clip_higher", "soft_penalty", "token_mean", "dynamic_sampling"]
    assert [rung.published for rung in LADDERS["dapo"].rungs] == ["30", "36", "38", "41", "42", "50"]


@pytest.mark.parametrize("start", [forking_runs, pytest.param(nullcontext, marks=pytest.mark.full)])
def test_a_real_comparison(
    run_command: Any,
    random_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    start: Callable[[], AbstractContextManager[None]],
) -> None:
    """Two rows, two seeds, a process each: forks, or programs. Then again, when nothing is left to do."""
    sums = [{"prompt": f"{i} + {j} =\n", "answer": str(i + j)} for i in range(6) for j in range(8)]
    (tmp_path / "mine.py").write_text(
        "def digits(prompts, completions, **columns):\n    return [float(c[:1].isdigit()) for c in completions]\n"
    )
    task = write_rows(tmp_path / "sums.jsonl", sums)
    monkeypatch.chdir(tmp_path)
    common = ["--", "--model", str(random_model), "--task", task, "--reward", f"{tmp_path / 'mine.py'}:digits"]
    common += ["--prompts-per-step", "4", "--max-tokens", "6", "--evaluation.problems", "3", "--evaluation.every", "1"]
    args = ["dr_grpo", "fixed=rloo --lr 1e-3", "--seeds", "2", "--lr-grid", "3e-3"]
    args += ["--tokens", "300", "--jobs", "2", "--threads", "1", "--output", "c"]
    with start():
        code, out, err = run_command("compare", *args, *common, "--rewards.num-workers", "1")
    assert code == 0, err
    report = json.loads((Path("c") / "comparison.json").read_text())
    assert [len(row["runs"]) for row in report["rows"]] == [2, 2]
    assert report["rows"][0]["option_value"] == 3e-3
    assert report["rows"][1]["tuned_option"] == ""
    run = report["rows"][0]["runs"][0]
    assert run["tokens"] >= 300
    assert run["updates"] >= 1
    assert run["cost"]["cpu_seconds"] > 0
    assert len(run["curve"]["score"]) >= 3
    assert "P(row above column)" in out
    assert (Path("c") / "comparison.html").stat().st_size > 10_000
    assert read_plan(Path("c")).seeds == (0, 1)
    assert not list(Path("c").rglob("checkpoints"))
    before = {path: path.stat().st_mtime_ns for path in Path("c").rglob("metrics.jsonl")}
    code, second, err = run_command("compare", "--resume", "c", "--json")
    assert code == 0, err
    assert "0 of 4 runs to do" in err
    assert json.loads(second)["rows"] == report["rows"]
    assert before == {path: path.stat().st_mtime_ns for path in Path("c").rglob("metrics.jsonl")}


PLANTED = """
from pathlib import Path
(Path(__file__).parent / "ran").write_text("")
raise SystemExit("planted")
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder."""
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    return work


def received(folder: Path, *words: str, **changes: Any) -> Path:
    """A comparison that somebody else sent, of one run, with a program beside it."""
    sent = comparison.plan(comparison.row("sent", argv=words or ("grpo",)), seeds=1).to_dict()
    sent["rows"][0] |= changes
    folder.mkdir(parents=True)
    (folder / "plan.json").write_text(json.dumps(sent))
    (folder / "planted.py").write_text(PLANTED)
    return folder


def naming(file: object) -> list[tuple[str, ...]]:
    """Rows that name code, in every way in which words of train can."""
    return [
        (f"{file}:ALGORITHM",),
        ("--algorithm", f"{file}:ALGORITHM"),
        (f"--algorithm={file}:ALGORITHM",),
        ("grpo", "--learner.gradient-checkpointing", f"{file}:ALGORITHM"),
        ("grpo", "--algorithm.gate", f"{file}:Gate"),
        ("grpo", f"--algorithm.gate={file}:Gate"),
        ("grpo", "--algorithm.terms", f"KL,{file}:Term"),
        ("grpo", "--algorithm.gate", f"{file}"),
        ("grpo", "--reward", "exact_match", f"{file}:score"),
        ("grpo", f"--reward={file}:score"),
        ("grpo", "--reward", f"math if {file}:score"),
        ("grpo", "--environment", f"{file}:World"),
        ("grpo", "--row-map", f"{file}:row"),
        ("grpo", "--allow-code", f"{file}", "--reward", f"{file}:score"),
        ("grpo", f"--allow-code={file}"),
    ]


@pytest.mark.parametrize("way", range(len(naming(""))))
@pytest.mark.parametrize(
    ("folder", "file"),
    [
        ("download/c", "download/c/planted.py"),
        pytest.param("../c", "../c/planted.py", marks=pytest.mark.full),
    ],
)
def test_resume_plan_that_names_code_is_refused_without_permission(
    run_command: Any, here: Path, folder: str, file: str, way: int
) -> None:
    for name in (file, str((here / file).resolve())):
        received(here / folder, *naming(name)[way])
        code, _, err = run_command("compare", "--resume", folder)
        assert code == 2, err
        assert f"--allow-code {name}" in err
        assert not (here / folder / "ran").exists()
        assert not (here / folder / "runs").exists()
        shutil.rmtree(here / folder)


def test_resume_in_the_comparisons_folder_takes_no_code_from_it(
    run_command: Any, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = received(here / "c", "grpo", "--reward", "planted.py:score")
    monkeypatch.chdir(folder)
    code, _, err = run_command("compare", "--resume", ".")
    assert (code, "--allow-code planted.py" in err) == (2, True), err
    assert not (folder / "ran").exists()


def test_resume_plan_that_names_an_installed_package_is_refused(run_command: Any, here: Path) -> None:
    received(here / "c", "grpo", "--reward", "shutil.rmtree")
    code, _, err = run_command("compare", "--resume", "c")
    assert (code, "--allow-code shutil" in err) == (2, True), err


def test_resume_plan_that_moves_names_by_directory_is_refused(run_command: Any, here: Path) -> None:
    """The current folder has a file of the same name, which would be permitted."""
    (here / "planted.py").write_text("")
    received(here / "c", "grpo", "--reward", "planted.py:score", "--directory", "c")
    code, _, err = run_command("compare", "--resume", "c")
    assert (code, "--allow-code c/planted.py" in err) == (2, True), err


@pytest.mark.parametrize(
    "words", [("--sampler.urls", "http://localhost:1", "http://a:8000"), ("--sampler.folder", "elsewhere")]
)
def test_resume_plan_that_sends_prompts_or_weights_elsewhere_is_refused(
    run_command: Any, here: Path, words: tuple[str, ...]
) -> None:
    received(here / "c", "grpo", "--sampler.engine", "vllm", *words)
    code, _, err = run_command("compare", "--resume", "c")
    assert (code, f"--allow-code {words[-1]}" in err, "localhost" in err) == (2, True, False), err
    assert run_command("compare", "--resume", "c", "--allow-code", words[-1], "--dry-run")[0] == 0


def test_resume_plan_of_code_in_the_current_folder_needs_no_permission(run_command: Any, here: Path) -> None:
    (here / "mine.py").write_text(PLANTED)
    received(here / "c", "grpo", "--reward", "mine.py:score")
    assert run_command("compare", "--resume", "c", "--dry-run")[0] == 0


def test_resume_plan_with_permission_passes_it_to_the_runs(
    run_command: Any, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[tuple[tuple[str, ...], Any]] = []

    class Recorded(comparison.StubRunner):
        def __init__(self, threads: int, **given: Any) -> None:
            started.append((tuple(given["allow"]), threads))
            super().__init__()

    monkeypatch.setattr("policygrad.commands.compare.SubprocessRunner", Recorded)
    received(here / "c", "grpo", "--reward", "c/planted.py:score")
    code, _, err = run_command("compare", "--resume", "c", "--allow-code", "c/planted.py")
    assert code == 0, err
    assert started[0][0] == ("c/planted.py",)
    assert not (here / "c" / "ran").exists()
    code, _, err = run_command("compare", "grpo", "--allow-code", "c/planted.py")
    assert (code, "--allow-code applies to --resume" in err) == (2, True), err


@pytest.mark.parametrize("flag", ["--trust-remote-code", "--trust_remote_code"])
def test_resume_plan_that_trusts_a_models_code_is_refused_without_the_flag(
    run_command: Any, here: Path, flag: str
) -> None:
    received(here / "c", "grpo", flag)
    code, _, err = run_command("compare", "--resume", "c")
    assert (code, "which a file cannot allow: add --trust-remote-code" in err) == (2, True), err
    assert run_command("compare", "--resume", "c", "--trust-remote-code", "--dry-run")[0] == 0


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("grpo", "--output", "elsewhere"), "has --output"),
        (("grpo", "--resume=elsewhere"), "has --resume"),
        (("grpo", "--cluster", "ray://elsewhere:10001"), "--cluster is an option of `policygrad train` only"),
        (
            ("grpo", "--tyro-write-completion", "bash", "file"),
            "has --tyro-write-completion, which is no option of train",
        ),
    ],
)
def test_resume_plan_with_options_that_no_row_has_is_refused(
    run_command: Any, here: Path, words: tuple[str, ...], reason: str
) -> None:
    received(here / "c", *words)
    code, _, err = run_command("compare", "--resume", "c")
    assert (code, reason in err) == (2, True), err


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("label", "../../../escaped", "the label '../../../escaped'"),
        ("label", "/escaped", "the label '/escaped'"),
        ("label", "..", "the label '..'"),
        ("label", 3, "the label 3"),
        ("tuned_option", "--reward", "tuned_option must be --lr or"),
        ("grid", ["evil.py:score"], "grid must be numbers"),
        ("argv", ["grpo", 3], "argv must be"),
        ("seeds", ["../../../escaped"], "must be whole numbers"),
        ("tuning_seeds", [True], "must be whole numbers"),
        ("tokens", "--reward", "must be whole numbers"),
    ],
)
def test_resume_plan_whose_values_name_other_folders_or_words_is_refused(
    run_command: Any, here: Path, field: str, value: Any, reason: str
) -> None:
    folder = received(
        here / "c", "grpo", **({field: value} if field in ("label", "tuned_option", "grid", "argv") else {})
    )
    if field in ("seeds", "tuning_seeds", "tokens"):
        sent = json.loads((folder / "plan.json").read_text())
        (folder / "plan.json").write_text(json.dumps(sent | {field: value}))
    code, _, err = run_command("compare", "--resume", "c")
    assert code != 0
    assert "is not a plan of a comparison" in err
    assert reason in err
    assert sorted(path.name for path in here.parent.iterdir()) == ["work"]
    assert not (folder / "runs").exists()


def test_resume_folder_with_a_link_that_leads_out_is_refused(run_command: Any, here: Path) -> None:
    folder = received(here / "c", "grpo")
    (here / "outside").mkdir()
    (folder / "runs").mkdir()
    (folder / "runs" / "sent").symlink_to(here / "outside")
    code, _, err = run_command("compare", "--resume", "c")
    assert (code, "leads out of" in err) == (2, True), err
    assert not list((here / "outside").iterdir())
