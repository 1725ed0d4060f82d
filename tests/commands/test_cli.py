"""The command line in-process; a subprocess only where what is imported, or a pipe, is the point."""

from __future__ import annotations

import ast
import functools
import itertools
import json
import re
import signal
import subprocess
import sys
import threading
import tomllib
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import policygrad as pg
from policygrad import __version__, cli
from policygrad.algorithms import ALGORITHMS, get_algorithm
from policygrad.catalog import CATALOG
from policygrad.commands import STOPPED, render
from policygrad.commands.compare import CompareOptions
from policygrad.commands.engine import EngineOptions
from policygrad.commands.evaluate import EvalOptions
from policygrad.commands.lab import ControlOptions, LabOptions
from policygrad.commands.options import pop_algorithm
from policygrad.commands.plan import PlanOptions
from policygrad.commands.train import TrainOptions, get_switches, parse_run
from policygrad.errors import RunError
from policygrad.training.config.run import Run, RunOptions
from policygrad.training.config.serialization import list_parts, load_config


def imported(*args: str) -> set[str]:
    """The modules that a command has loaded when it is done."""
    code = (
        "import sys; from policygrad.cli import main; code = main(sys.argv[1:]); "
        "print('\\n' + '\\n'.join(sys.modules)); sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", code, *args], capture_output=True, text=True, check=True)
    return set(done.stdout.split("\n"))


def dry_run(run_command: Any, folder: Path, *args: str) -> Run:
    code, out, err = run_command("train", *args, "--dry-run")
    assert code == 0, err
    (folder / "dry.toml").write_text(out, encoding="utf-8")
    return load_config(folder / "dry.toml", Run())


def test_help_and_version_import_nothing_heavy() -> None:
    for args in ((), ("--version",)):
        assert not {"torch", "tyro", "rich", "transformers", "policygrad.algorithms"} & imported(*args)


def test_module_runs_and_survives_a_closed_pipe() -> None:
    done = subprocess.run([sys.executable, "-m", "policygrad", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"policygrad {__version__}\n"
    with subprocess.Popen(
        [sys.executable, "-m", "policygrad", "algorithms", "--json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""


def test_help_of_every_command(run_command: Any) -> None:
    for command in cli.COMMANDS:
        code, out, _ = run_command(command, "--help")
        assert code == 0
        assert f"policygrad {command}" in out
    assert all(command in cli.HELP for command in cli.COMMANDS)
    out = run_command("train", "dapo", "--help", "all")[1]
    for flag in ("--algorithm.gate.high", "--samples-per-prompt", "--stop-after", "--learner.device"):
        assert flag in out
    assert "(default: the algorithm's own)" in " ".join(out.split())


def test_help_fits_80_columns(run_command: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert max(map(len, cli.HELP.splitlines())) <= 80
    for words in (*((command,) for command in cli.COMMANDS), ("lab", "control")):
        lines = run_command(*words, "--help", "all")[1].splitlines()
        assert max(map(len, lines)) <= 80, words


def test_help_wraps_without_breaking_words() -> None:
    """tyro keeps the line breaks of a field's text: each is the end of a sentence."""
    kinds = [
        RunOptions,
        *TrainOptions.__mro__[:2],
        CompareOptions,
        ControlOptions,
        EngineOptions,
        EvalOptions,
        LabOptions,
    ]
    kinds += [PlanOptions]
    kinds += [
        *pg.SFTConfig.__mro__[:2],
        pg.RewardModelConfig,
        pg.SamplingParams,
        pg.SamplerConfig,
        pg.OptimizerConfig,
        pg.LearnerConfig,
    ]
    kinds += [pg.RewardConfig, pg.EvaluationConfig, pg.CheckpointConfig, *(getattr(pg, name) for name in list_parts())]
    texts = [(kind.__name__, text) for kind in kinds for text in field_texts(kind)]
    assert len(texts) > 150
    for name, text in texts:
        lines = [line.strip() for line in text.splitlines()]
        assert all(line.endswith(".") for line in lines[:-1]), (name, text)


def field_texts(kind: type) -> list[str]:
    """What stands below the fields of a class: its help."""
    [body] = [node.body for node in parse_module(kind.__module__).body if getattr(node, "name", "") == kind.__name__]
    pairs = [(a, b) for a, b in itertools.pairwise(body) if isinstance(a, ast.AnnAssign) and isinstance(b, ast.Expr)]
    return [b.value.value for a, b in pairs if "ClassVar" not in ast.unparse(a.annotation)]  # type: ignore[attr-defined]


@functools.cache
def parse_module(name: str) -> ast.Module:
    return ast.parse(Path(str(sys.modules[name].__file__)).read_text(encoding="utf-8"))


# --- algorithms and show


def test_algorithms_plain_and_json(run_command: Any) -> None:
    code, out, _ = run_command("algorithms")
    assert code == 0
    assert len(out.splitlines()) == 1 + len(ALGORITHMS)
    rows = json.loads(run_command("algorithms", "--json")[1])
    assert list(rows) == list(ALGORITHMS)
    assert all(row["departs"] == CATALOG[name].deviations for name, row in rows.items())
    assert rows["dapo"]["gate"] == {"part": "Clip", "low": 0.2, "high": 0.28, "c": "none"}


def test_show_explains_every_algorithm_on_80_columns(run_command: Any) -> None:
    for name in ALGORITHMS:
        code, out, _ = run_command("show", name)
        assert code == 0, name
        assert max(map(len, out.splitlines())) <= 80, name
        for word in ("∇J = Σ", "Parts", "Fixes", "Fails", "completions per prompt", *get_algorithm(name).equation()):
            assert word in out, name
        assert "Raises" not in out, name


def test_diff_is_complete() -> None:
    changed = render.diff_algorithms(get_algorithm("rloo"), get_algorithm("grpo"))
    assert set(changed) == {"advantage", "ratio", "gate", "aggregation", "terms", "shaping", "samples"}
    assert render.diff_algorithms(get_algorithm("grpo"), get_algorithm("grpo")) == {}


def test_output_on_a_terminal_that_is_not_utf8() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "policygrad", "show", "grpo"],
        capture_output=True,
        env={"PYTHONIOENCODING": "ascii", "PATH": ""},
        check=True,
    )
    assert b"?J = ? (" in done.stdout


# --- train: what wins over what


def test_dry_run_output_is_a_valid_configuration(run_command: Any, tmp_path: Path) -> None:
    made = dry_run(run_command, tmp_path, "dapo", "--steps", "7", "--reward", "math", "format*0.5", "--seed", "3")
    assert (made.algorithm.name, made.steps, made.seed, made.reward) == ("dapo", 7, 3, ("math", "format*0.5"))
    assert made == made.resolve()
    out = run_command("train", "dapo", "--dry-run")[1]
    assert "∇J = Σ" in out
    assert tomllib.loads(out)["algorithm"]["name"] == "dapo"
    assert tomllib.loads(out)["algorithm"]["update_rule"]["minibatches"] == 16
    out = run_command("train", "dapo", "--prompts-per-step", "4", "--dry-run")[1]
    assert out.startswith(
        "# dapo splits a rollout into 16 minibatches of whole groups, but 4 prompts per step make only 4"
    )
    assert tomllib.loads(out)["algorithm"]["update_rule"]["minibatches"] == 4


def test_precedence(run_command: Any, tmp_path: Path) -> None:
    config = tmp_path / "my.toml"
    config.write_text('steps = 5\nlr = 1e-3\nalgorithm = "rloo"\n[sampling]\nmax_tokens = 9\n')
    made = dry_run(run_command, tmp_path, "--config", str(config), "--steps", "6")
    assert (made.algorithm.name, made.steps, made.lr, made.sampling.max_tokens) == ("rloo", 6, 1e-3, 9)
    assert made.samples_per_prompt == 4
    assert dry_run(run_command, tmp_path, "gspo", "--config", str(config)).algorithm.name == "gspo"
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "run.toml").write_text('steps = 50\nseed = 7\nalgorithm = "dapo"\n')
    made = dry_run(run_command, tmp_path, "--resume", str(folder), "--config", str(config))
    assert (made.steps, made.seed, made.algorithm.name) == (5, 7, "rloo")
    assert dry_run(run_command, tmp_path, "--resume", str(folder), "--steps", "60").steps == 60


def test_only_the_final_configuration_is_checked(run_command: Any, tmp_path: Path) -> None:
    """One sample per prompt is nothing for grpo, the default that a file starts from, and fine for reinforce."""
    config = tmp_path / "my.toml"
    config.write_text("samples_per_prompt = 1\n")
    assert dry_run(run_command, tmp_path, "reinforce", "--config", str(config)).samples_per_prompt == 1
    assert (
        dry_run(run_command, tmp_path, "grpo", "--config", str(config), "--samples-per-prompt", "4").samples_per_prompt
        == 4
    )
    code, _, err = run_command("train", "--config", str(config))
    assert code == 2
    assert "set samples_per_prompt to 2 or more" in err


@pytest.mark.full
def test_max_tokens_on_the_command_line_changes_a_files_aggregation_length(run_command: Any, tmp_path: Path) -> None:
    written = tmp_path / "run.toml"
    written.write_text(run_command("train", "dr_grpo", "--max-tokens", "40", "--dry-run")[1], encoding="utf-8")
    assert load_config(written, Run()).algorithm.aggregation.length == 40
    made = dry_run(run_command, tmp_path, "--config", str(written), "--max-tokens", "90")
    assert made.algorithm.aggregation.length == 90
    made = dry_run(run_command, tmp_path, "--config", str(written), "--algorithm.aggregation.length", "55")
    assert made.algorithm.aggregation.length == 55


def test_config_of_a_run_gets_a_new_output_folder(run_command: Any, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(f"steps = 3\noutput = {json.dumps(str(tmp_path))}\n")
    assert dry_run(run_command, tmp_path, "--config", str(tmp_path / "run.toml")).output is None
    assert dry_run(run_command, tmp_path, "--resume", str(tmp_path)).output == str(tmp_path)


def test_parts_by_flag(run_command: Any, tmp_path: Path) -> None:
    gate = ("--algorithm.gate", "ClippedImportance", "--algorithm.gate.high", "4")
    made = dry_run(
        run_command, tmp_path, "grpo", *gate, "--algorithm.advantage=GroupMean", "--algorithm.terms", "none"
    ).algorithm
    assert [type(p).__name__ for p in made.advantage] == ["GroupMean"]
    assert (made.terms, type(made.gate).__name__, made.gate.high) == ((), "ClippedImportance", 4.0)
    twice = ("--algorithm.terms", "KLToReference,KLToReference", "--algorithm.terms.kl-to-reference-2.beta", "0.1")
    assert [t.beta for t in dry_run(run_command, tmp_path, "grpo", *twice).algorithm.terms] == [0.04, 0.1]


@pytest.mark.parametrize(
    ("args", "name", "rest"),
    [
        ("dapo --steps 3", "dapo", "--steps 3"),
        ("--steps 3 dapo", "dapo", "--steps 3"),
        ("--dry-run DR-GRPO", "DR-GRPO", "--dry-run"),
        ("--output dapo --steps 3", None, "--output dapo --steps 3"),
        ("--reward math gspo", "gspo", "--reward math"),
        ("--algorithm gspo --plain", "gspo", "--plain"),
        ("--plain --algorithm=gspo", "gspo", "--plain"),
        ("", None, ""),
        ("--task.fetch grpo", "grpo", "--task.fetch"),
        (
            "--rewards.show-output --sampler.no-cuda-graphs grpo",
            "grpo",
            "--rewards.show-output --sampler.no-cuda-graphs",
        ),
        ("--algorithm.advantage.turn-group-std.no-std grpo", "grpo", "--algorithm.advantage.turn-group-std.no-std"),
        ("--algorithm.reference.live grpo", "grpo", "--algorithm.reference.live"),
        ("--algorithm.reference.model grpo", None, "--algorithm.reference.model grpo"),
    ],
)
def test_the_algorithm_may_be_anywhere_on_the_command_line(args: str, name: str | None, rest: str) -> None:
    assert pop_algorithm(args.split(), get_switches()) == (name, rest.split())


def test_a_term_has_an_average_of_its_own_by_flag() -> None:
    flag = "--algorithm.terms.kl-to-reference.aggregation"
    for words, average in (
        (["TokenMean"], pg.TokenMean()),
        (["none"], None),
        (["FixedLength(length=7)", "--max-tokens", "9"], pg.FixedLength(7)),
    ):
        assert parse_run(["grpo", flag, *words])[0].algorithm.terms[0].aggregation == average
    assert parse_run(["grpo", f"{flag}=TokenMean"])[0].algorithm.aggregation == pg.SequenceMean()
    for command, says in (
        (["grpo", flag, "Clip"], "Clip goes into 'gate', not 'aggregation'"),
        (["grpo", "--algorithm.terms.entropy.aggregation", "TokenMean"], "its terms are kl-to-reference"),
    ):
        with pytest.raises(pg.ConfigError, match=says):
            parse_run(command)


def test_values(run_command: Any, tmp_path: Path) -> None:
    words = "--samples-per-prompt None --lr 1e-5 --learner.gradient-checkpointing --optimizer.betas 0.8 0.95"
    made = dry_run(run_command, tmp_path, "rloo", *words.split(), "--stop_after", "2", "--prompts_per_step=8")
    assert (made.samples_per_prompt, made.lr, made.prompts_per_step) == (4, 1e-5, 8)
    assert made.learner.gradient_checkpointing
    assert made.optimizer.betas == (0.8, 0.95)


# --- what cannot be done: exit code 2, one message, no traceback


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("trian", "did you mean 'train'"),
        ("nosuch", "available: train, sft"),
        ("train gprpo", "did you mean 'grpo'"),
        ("train --dry-run gprpo", "did you mean 'grpo'"),
        ("train grpo dapo", "one algorithm too many"),
        ("train --step-s 4", "--steps"),
        ("train --steps x", "--steps"),
        ("train --steps 0", "steps must be at least 1"),
        ("train --lr -1", "lr must be at least 0"),
        ("train --lr nan", "lr must be at least 0"),
        ("train --temperature -1", "sampling.temperature must be finite and at least 0, not -1"),
        ("train --stop-after 0", "--stop-after must be at least 1"),
        ("train --checkpoint.every 0", "checkpoint.every"),
        ("train --evaluation.samples-per-prompt 0", "evaluation.samples_per_prompt"),
        ("train --optimizer.schedule slow", "constant, linear, cosine"),
        ("train --algorithm.gate.hgh 0.3", "--algorithm.gate.high"),
        ("train --algorithm.gate Clipp", "did you mean 'Clip'"),
        ("train --algorithm.gate xyz", "ClippedImportance"),
        ("train --algorithm.gate GroupMean", "GroupMean goes into 'advantage'"),
        ("train --algorithm.gate none", "cannot be none"),
        ("train --algorithm.gate", "needs the name of a part"),
        ("train --algorithm.advantage no.such:Part", "cannot import the part"),
        ("train --samples-per-prompt 1", "set samples_per_prompt to 2 or more"),
        ("train --temperature 0", "set sampling.temperature above 0"),
        ("train reinforce --temperature 0", "set --temperature above 0"),
        ("train --top-p 0.9 --sampler.engine llama_cpp", "which llama_cpp does not tell"),
        ("train trpo --top-k 5", "evaluates the policy over the whole vocabulary"),
        ("train grpo --algorithm.reference none", "needs a reference, and reference is None"),
        ("train reinforce --algorithm.update-rule.epochs 2", "one update per rollout"),
        ("train grpo --algorithm.terms.kl-to-reference.form k1", "zero expected gradient"),
        ("train rloo --algorithm.shaping.kl-in-reward.form k3", "KLInReward takes k1 only"),
        ("train --resume no/such/run", "holds no run of `policygrad train`"),
        ("train --config no/such.toml", "no/such.toml"),
        ("show Clipp", "did you mean 'Clip'"),
        ("show zzz", "`policygrad show` lists them"),
        ("algorithms --width 20", "--width must be at least 40"),
        ("algorithms --jsn", "--json"),
        ("completion tcsh", "bash"),
        ("engine", "ENGINE|check"),
        ("engine check", "policygrad engine check http://127.0.0.1:8000 --model M"),
        ("engine check http://127.0.0.1:1", "http://127.0.0.1:1 does not answer"),
        ("engine llama_cpp --print", "--folder DIR"),
        ("engine llama_cpp --folder x --weight-transport nccl", "a server of llama.cpp loads no weights over NCCL"),
        (
            "train --sampler.engine llama_cpp --sampler.weight-transport nccl",
            "or set --sampler.weight-transport folder",
        ),
        ("engine vllm --dtype fp16", "--dtype must be fp32 or bf16"),
        ("train --sampler.engine llama", "sampler.engine must be one of local, llama_cpp, vllm, sglang"),
        ("train --sampler.urls http://a", "Choose --sampler.engine"),
        ("train --sampler.engine vllm", "`policygrad engine install vllm --into DIR` makes an environment"),
        ("eval", "MODEL"),
        ("eval tiny --samples 0", "--samples must be at least 1"),
        ("eval tiny --task gdc", "did you mean gcd"),
        ("eval tiny --task no/such.jsonl", "no/such.jsonl: no such file"),
        ("eval no/such/model", "there is no model folder"),
        ("eval tiny --reward exactmatch", "did you mean 'exact_match'"),
        ("eval tiny --eval-data x.jsonl", "needs a task made of data"),
    ],
)
def test_refused(run_command: Any, command: str, says: str) -> None:
    code, out, err = run_command(*command.split())
    assert code == 2
    assert says in " ".join(err.replace("│", " ").split())
    assert "Traceback" not in out + err


def test_resume_refuses_options_it_would_ignore(run_command: Any, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(f"steps = 3\noutput = {json.dumps(str(tmp_path))}\n")
    code, _, err = run_command("train", "--resume", str(tmp_path), "--model", "elsewhere")
    assert code == 2
    assert "--model has no effect" in err
    for flag, value in (("--task", "gcd"), ("--reward", "math"), ("--eval-data", "other.jsonl")):
        code, _, err = run_command("train", "--resume", str(tmp_path), flag, value)
        assert code == 2
        assert f"with another {flag} would make evaluations before and after incomparable" in err


def test_eval_of_an_unfinished_run(run_command: Any, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text("steps = 3\n")
    code, _, err = run_command("eval", str(tmp_path))
    assert code == 2
    assert f"policygrad train --resume {tmp_path}" in err


def test_bugs_show_their_traceback(monkeypatch: pytest.MonkeyPatch, run_command: Any, tmp_path: Path) -> None:
    """A library's error, or an operation of ours that fails, is not passed off as the user's mistake."""

    def fails(args: list[str]) -> int:
        return int(args[0])

    monkeypatch.setattr("policygrad.commands.show.show", fails)
    with pytest.raises(ValueError, match="invalid literal"):
        cli.main(["show", "x"])

    def interrupted(args: list[str]) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("policygrad.commands.show.show", interrupted)
    assert run_command("show", "x")[0] == 130

    def missing(args: list[str]) -> int:
        return len((tmp_path / "gone").read_text())

    monkeypatch.setattr("policygrad.commands.show.show", missing)
    with pytest.raises(FileNotFoundError, match="gone"):
        cli.main(["show", "x"])

    def refused(args: list[str]) -> int:
        raise RunError("no place left")

    monkeypatch.setattr("policygrad.commands.show.show", refused)
    code, _, err = run_command("show", "x")
    assert (code, err) == (2, "error: no place left\n")


def test_ctrl_c_during_an_import_is_not_swallowed(
    monkeypatch: pytest.MonkeyPatch, run_command: Any, tmp_path: Path
) -> None:
    """Python 3.11 makes a RuntimeError of what is raised here, and libraries an ImportError of that."""
    (tmp_path / "interrupted_import.py").write_text(
        """
import os, signal

class Interrupted:
    def __set_name__(self, owner, name):
        os.kill(os.getpid(), signal.SIGINT)
        self.name = [name for _ in range(1000)][-1]

class Whole:
    part = Interrupted()
"""
    )
    monkeypatch.syspath_prepend(tmp_path)
    seen: list[str] = []

    def show(args: list[str]) -> int:
        seen.append(import_module("interrupted_import").Whole.part.name)
        threading.Event().wait(60)  # which Ctrl-C ends
        return 0

    monkeypatch.setattr("policygrad.commands.show.show", show)
    before = signal.getsignal(signal.SIGINT)
    assert run_command("show", "x")[0] == 130
    assert (seen, signal.getsignal(signal.SIGINT)) == (["part"], before)


def test_exit_codes_are_documented() -> None:
    """In the help and in the documentation, the same ones."""
    said = cli.HELP.partition("Exit codes: ")[2].partition("Documentation:")[0]
    page = (Path(__file__).parents[2] / "docs" / "own-model-and-data.md").read_text(encoding="utf-8")
    table = page.partition("| exit code | |")[2].partition("\n\n")[0]
    codes = {0, 1, 2, STOPPED, 130}
    assert {int(code) for code in re.findall(r"(?:^|; )(\d+) ", said.replace("\n", " "))} == codes
    assert {int(code) for code in re.findall(r"^\| (\d+) \|", table, re.MULTILINE)} == codes


def test_debug_shows_the_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLICYGRAD_DEBUG", "1")
    with pytest.raises(ValueError, match="did you mean 'grpo'"):
        cli.main(["train", "gprpo"])


def test_an_evaluation_without_any_score_fails(run_command: Any, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def broken(prompts, completions, **columns):\n    raise KeyError('label')\n")
    words = ("--reward", f"{tmp_path / 'mine.py'}:broken", "--problems", "2", "--samples", "2", "--max-tokens", "4")
    code, out, err = run_command("eval", "tiny", *words, "--json")
    assert code == 2
    assert json.loads(out)["error"]["kind"] == "RewardError"
    assert "none of the 4 completions has a reward" in err
    assert "KeyError: 'label'" in err


@pytest.mark.parametrize("is_json", [False, True])
def test_an_option_of_another_command_is_answered_with_its_name(run_command: Any, is_json: bool) -> None:
    code, out, err = run_command("serve", "--output", "runs/a", *["--json"] * is_json)
    assert code == 2
    hint = "--output is an option of `policygrad train`, `policygrad sft`"
    assert hint in (json.loads(out)["error"]["message"] if is_json else err)


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (
            "--task a.jsonl b.jsonl",
            "mixed as one word, --task a.jsonl+b.jsonl, or read together as a folder or a pattern",
        ),
        ("grpo --task=a.jsonl b.jsonl", "--task takes one value, and 'b.jsonl' follows 'a.jsonl'"),
        ("grpo --algorithm.advantage GroupMean GroupStd", "joined by commas, --algorithm.advantage GroupMean,GroupStd"),
        ("grpo --lr 1e-3 1e-4", "--lr takes one value, and '1e-4' follows '1e-3'"),
        ("--steps 3 gpro", "unknown algorithm 'gpro': did you mean 'grpo'"),
        ("grpo --json b.jsonl", "unknown algorithm 'b.jsonl'"),
        ("grpo --steps 3 dapo", "one algorithm too many"),
    ],
)
def test_a_second_value_of_an_option_is_not_read_as_an_algorithm(run_command: Any, argv: str, says: str) -> None:
    code, _, error = run_command("train", *argv.split())
    assert code == 2
    assert says in error
