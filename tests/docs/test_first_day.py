"""docs/first-day.md is a script: its files are written and its commands entered from top to bottom, at a small size."""

from __future__ import annotations

import io
import json
import os
import re
import runpy
import shlex
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from doubles.files import rows
from doubles.forked import forking
from policygrad import cli

pytest.importorskip("peft")
pytest.importorskip("pyarrow")
pytest.importorskip("tensorboard")

PAGE = (Path(__file__).parents[2] / "docs" / "first-day.md").read_text(encoding="utf-8")
FILES: dict[str, str] = dict(re.findall(r"```python (\w+\.py)\n(.*?)```", PAGE, re.DOTALL))
SCRIPT = "".join(re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL)).replace("\\\n", " ")
COMMANDS = SCRIPT.splitlines()
SMALL = {  # what makes seconds of a minute; an option that is given twice is the last
    "train": "--prompts-per-step 2 --samples-per-prompt 4 --evaluation.problems 4 --evaluation.samples-per-prompt 1",
    "eval": "--problems 4 --samples 2",
}
Run = Callable[..., tuple[int, str, str]]


def small(argv: list[str]) -> list[str]:
    return [*argv, *SMALL.get(argv[0], "").split()]


def interrupt_run(argv: list[str]) -> str:
    """A run of a thousand steps, in a process of its own, that is sent Ctrl-C after its first; what it printed."""
    reading, writing = os.pipe()
    with forking() as processes:
        child = processes.start(cli.main, [*small(argv), "--steps", "1000"], stdout=writing)
        os.close(writing)
        output = list[str]()
        with open(reading, encoding="utf-8") as lines:
            for line in lines:
                output.append(line)
                if line.startswith("step") and not any(before.startswith("step") for before in output[:-1]):
                    os.kill(child.pid, signal.SIGINT)
        child.join()
    assert child.exitcode == 75, "".join(output)
    return "".join(output)


def steps() -> list[int]:
    return [row["step"] for row in rows(Path("first-day/metrics.jsonl")) if "reward" in row]


def entered(line: str, run_command: Run, typed: str = "1 + 1 =\n/again\n") -> str:
    """What the line prints; a line that the page has and this does not know fails. `chat` reads what is typed."""
    line, _, remark = line.partition("  # ")
    line, _, file = line.partition(" > ")
    program, *argv = shlex.split(line)
    if "Ctrl-C" in remark:
        return interrupt_run(argv)
    if program == "python":
        (name,) = argv
        runpy.run_path(name, run_name="__main__")
        return ""
    assert program == "policygrad"
    if "--resume" in argv:
        argv += ["--steps", str(steps()[-1] + 2)]  # of the thousand
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdin", io.StringIO(typed))
        code, out, err = run_command(*small(argv))
    assert code == 0, err
    if file:
        Path(file.strip()).write_text(out, encoding="utf-8")
    return out


@pytest.mark.full
def test_the_page_from_top_to_bottom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run_command: Run) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name, text in FILES.items():
        assert text.startswith(f"# {name}: ")
        Path(name).write_text(text, encoding="utf-8")
    heads = [shlex.split(line)[:2] for line in COMMANDS]
    assert heads == [
        ["python", "my_model.py"],
        ["python", "my_data.py"],
        ["policygrad", "train"],
        ["policygrad", "train"],
        ["policygrad", "train"],
        ["policygrad", "chat"],
        ["policygrad", "eval"],
        ["policygrad", "export"],
        ["python", "ask.py"],
        ["policygrad", "report"],
    ]
    output = [entered(line, run_command) for line in COMMANDS[:4]]
    assert 'lora = "rank=8"' in output[2]
    assert "policygrad train --resume first-day" in output[3]  # which is the page's next command
    begun = steps()
    output += [entered(line, run_command) for line in COMMANDS[4:]]
    assert steps() == [*range(1, begun[-1] + 3)]
    assert "lr = 0.003" in Path("first-day/run.toml").read_text(encoding="utf-8")
    asked = rows(Path("first-day/completions.jsonl"))[0]
    assert asked["prompt"][0]["role"] == "user"
    assert set(asked["rewards"]) == {"my_reward.py:right", "format"}
    assert output[5].count("before, my-model") == output[5].count("after, first-day") == 2
    assert "first-day − my-model" in output[6]
    assert "model.safetensors" in os.listdir("first-day/merged")
    assert "<|reply|>" in Path("first-day/merged/chat_template.jinja").read_text(encoding="utf-8")
    assert "first-day" in Path("first-day/report.html").read_text(encoding="utf-8")
    followed(begun[-1] + 2)


def followed(last: int) -> None:
    """TensorBoard has each step once, of both halves."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator("first-day/tensorboard")
    events.Reload()
    assert [point.step for point in events.Scalars("reward")] == [*range(1, last + 1)]


def test_the_model_asks_as_its_template_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page's model ends a question with its own token, and is closed by the end token."""
    from policygrad.models.loading import load_model
    from policygrad.models.tokenizer import load_tokenizer

    monkeypatch.chdir(tmp_path)
    Path("my_model.py").write_text(FILES["my_model.py"], encoding="utf-8")
    runpy.run_path("my_model.py")
    model = load_model("my-model")
    tokenizer = load_tokenizer("my-model", model)
    reply = tokenizer.hf.convert_tokens_to_ids("<|reply|>")
    ids = tokenizer.encode(({"role": "user", "content": "1 + 1 ="},), 0).ids.tolist()
    assert ids[-1] == reply == model.get_input_embeddings().weight.shape[0] - 1
    assert json.loads(Path("my-model/config.json").read_text())["vocab_size"] == reply + 1
