"""`learner.compile = auto`: when a run compiles, and that its folder keeps the choice."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from torch import nn

import policygrad as pg
from policygrad.commands.train import parse_run
from policygrad.learners.local import compilation
from policygrad.serve.config import ServeConfig
from policygrad.training import compile_choice
from policygrad.training.compile_choice import GAINS, choose_compile, decide_compile
from policygrad.training.config.serialization import load_config

LONG, SHORT = 1e20, 1e9


@pytest.mark.parametrize(
    ("kind", "flops", "facts", "use", "reason"),
    [
        ("cpu fp32", LONG, {}, True, "s saved for 24 s of compiling"),
        ("cpu fp32", SHORT, {}, False, "about 0 s saved"),
        ("cpu bf16", LONG, {}, True, "s saved for 47 s"),
        ("cuda", LONG, {}, True, "s saved for 20 s"),
        ("cuda", SHORT, {}, False, "about 0 s saved"),
        ("mps", LONG, {}, False, "on mps it was not measured"),
        ("cuda", LONG, {"has_compiler": False}, False, "there is no compiler"),
        ("cpu fp32", LONG, {"has_blocks": False}, False, "blocks cannot be compiled"),
        ("cpu fp32", LONG, {"fits": False}, False, "read no segments"),
    ],
)
def test_it_is_on_where_the_saving_is_worth_the_compiling(
    kind: str, flops: float, facts: dict[str, bool], use: bool, reason: str
) -> None:
    choice = decide_compile(kind, flops, **{"has_compiler": True, **facts})
    assert choice.use is use
    assert reason in choice.note
    assert choice.note.startswith(f"learner.compile = auto: {'on' if use else 'off'}, ")


def test_twice_what_compiling_takes_must_be_saved() -> None:
    gain = GAINS["cuda"]
    needed = 2 * gain.seconds / gain.share * gain.flops
    assert decide_compile("cuda", needed * 1.01, has_compiler=True).use
    assert not decide_compile("cuda", needed * 0.99, has_compiler=True).use


@pytest.mark.parametrize(
    ("words", "value"),
    [
        ([], False),
        (["--learner.compile"], True),
        (["--learner.compile", "grpo"], True),
        (["--learner.compile", "on"], True),
        (["--learner.compile=true"], True),
        (["--learner.compile", "off"], False),
        (["--learner.compile", "auto", "grpo"], "auto"),
        (["--learner.compile=auto", "--lr", "1e-3"], "auto"),
        (["--learner.no-compile"], False),
    ],
)
def test_it_is_written_as_a_word_or_alone(words: list[str], value: object) -> None:
    assert parse_run(words)[0].learner.compile == value


def test_files_have_true_and_false_as_before_or_a_word(tmp_path: Path) -> None:
    values = {"true": True, "false": False, "'auto'": "auto", "'on'": True, "'off'": False}
    for text, value in values.items():
        (tmp_path / "run.toml").write_text(f"[learner]\ncompile = {text}\n", encoding="utf-8")
        assert load_config(tmp_path / "run.toml", pg.Run()).learner.compile == value
    with pytest.raises(
        pg.ConfigError, match=r"learner\.compile must be auto, on \(True\) or off \(False\), not 'maybe'"
    ):
        pg.LearnerConfig(compile="maybe")


def test_several_processes_are_off_without_a_note() -> None:
    run = pg.Run(learner=pg.LearnerConfig(compile="auto", world_size=2))
    learner, note = choose_compile(run, nn.Linear(1, 1))
    assert (learner.compile, note) == (False, None)


@pytest.mark.parametrize("use", [True, False])
def test_a_resumed_run_has_the_choice_of_the_first_process(
    tmp_path: Path, use: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "compile", lambda call, **options: call)
    monkeypatch.setattr(
        compile_choice, "decide_compile", lambda *_, **__: compile_choice.CompileChoice(use, "as asked")
    )
    run = pg.Run(
        algorithm=pg.GRPO,
        steps=2,
        prompts_per_step=2,
        samples_per_prompt=2,
        sampling=pg.SamplingParams(max_tokens=4),
        evaluation=pg.EvaluationConfig(problems=0),
        learner=pg.LearnerConfig(compile="auto"),
        output=str(tmp_path / "run"),
    )
    pg.train(run, display=False, stop_after=1)
    assert (
        f"learner.compile = auto: {'on' if use else 'off'}, as asked" in (tmp_path / "run" / "notes.jsonl").read_text()
    )
    monkeypatch.setattr(compile_choice, "decide_compile", None)  # nothing is decided again
    assert f"compile = {str(use).lower()}\n" in (tmp_path / "run" / "run.toml").read_text()
    assert pg.train(resume=str(tmp_path / "run"), display=False).steps == 2


def test_compiled_code_is_kept_in_the_users_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "mine")
    compilation.keep_compiled_code()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "mine"
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    compilation.keep_compiled_code()
    kept = os.environ["TORCHINDUCTOR_CACHE_DIR"]
    assert kept == str(tmp_path / "policygrad" / "compiled")
    assert Path(kept).is_dir()


def test_what_does_not_compile_refuses_it() -> None:
    with pytest.raises(pg.ConfigError, match="is for policygrad train, not serve"):
        ServeConfig(learner=pg.LearnerConfig(compile="auto"))
    with pytest.raises(pg.ConfigError, match="are for policygrad train, not sft"):
        pg.LearnerConfig(compile="auto").check_supervised("sft")
