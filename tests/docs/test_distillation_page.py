"""docs/distillation.md: its commands parse or run as they stand, against a server in the form of the engine that it names."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from doubles.files import rows
from doubles.teacher_forms import TeacherForm, serving
from policygrad.cli import main
from policygrad.models.loading import load_model
from policygrad.models.tokenizer import load_tokenizer
from policygrad.samplers.engines.registry import list_engines

PAGE = (Path(__file__).parents[2] / "docs" / "distillation.md").read_text(encoding="utf-8")
FILES: dict[str, str] = dict(re.findall(r"```jsonl (\S+)\n(.*?)```", PAGE, re.DOTALL))
SCRIPT = "".join(re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL))
COMMANDS = [shlex.split(line)[1:] for line in SCRIPT.splitlines() if line.startswith("policygrad ")]
SMALL = [
    *("--steps", "1", "--prompts-per-step", "4", "--samples-per-prompt", "2", "--max-tokens", "8"),
    *("--evaluation.problems", "0", "--rewards.num-workers", "1", "--plain"),
]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name, text in FILES.items():
        Path(name).write_text(text, encoding="utf-8")
    return tmp_path


def test_a_served_teacher_teaches(capsys: pytest.CaptureFixture[str]) -> None:
    """The page's commands with the embedded model in place of the large ones, which a server in vLLM's form has."""
    commands = [argv for argv in COMMANDS if any(word.startswith("http://") for word in argv)]
    model = load_model("tiny", dtype="fp32", device="cpu")
    with serving(TeacherForm(model, load_tokenizer("tiny", model).hf)) as form:
        small = {"http://127.0.0.1:8000/v1": form.url, "Qwen/Qwen3-0.6B-Base": "tiny", "prompts.jsonl": "both.jsonl"}
        for i, command in enumerate(commands):
            argv = [small.get(word, word) for word in command]
            assert main([*argv, *SMALL, "--output", f"served{i}"]) == 0, capsys.readouterr().err
            first = next(row for row in rows(Path(f"served{i}/metrics.jsonl")) if "teacher/kl" in row)
            assert abs(first["teacher/kl"]) < 1e-4  # the teacher is the policy's own model
    asked = {body["prompt_logprobs"] for path, body, _ in form.requests if path == "/v1/completions"}
    assert asked == {0, 20}
    assert len(form.scored) >= 4


@pytest.mark.full
def test_two_teachers_teach(capsys: pytest.CaptureFixture[str]) -> None:
    [command] = [argv for argv in COMMANDS if "math=tiny" in argv]
    assert main([*command, *SMALL]) == 0, capsys.readouterr().err
    metrics = [row for row in rows(Path("two-teachers/metrics.jsonl")) if "teacher/kl" in row]
    assert {"teacher/kl/math", "teacher/kl/words"} <= set().union(*metrics)


def test_the_page_names_the_engines_that_score_tokens() -> None:
    assert list_engines(lambda engine: engine.scores_tokens) == ["vllm", "sglang"]
    assert "served by vLLM or SGLang" in PAGE
