"""Programs that evaluate, each in a virtual environment of its own, with the commands of docs/evaluation.md: make test-agents."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import policygrad
from doubles.files import rows
from doubles.scripted_sampler import ScriptedSampler
from policygrad.commands.served_model import ServedModel
from policygrad.proxy.server import ANY_KEY, Proxy

HOME = os.environ.get("POLICYGRAD_EVALUATES", "")
"""The folder of the virtual environments `inspect-ai` and `lm-eval`."""
ENVIRONMENTS = Path(HOME).resolve()  # before a test changes the working directory
PAGE = (Path(__file__).parents[2] / "docs" / "evaluation.md").read_text(encoding="utf-8")
FOLDER = Path(policygrad.__file__).parent / "models" / "tiny"
BLOCKS: dict[str, str] = dict(re.findall(r"```(?:python|yaml) (\S+)\n(.*?)```", PAGE, re.DOTALL))
PENS = [
    {"question": f"Ann has {n // 2} pens and buys {n - n // 2}. How many?", "answer": f"#### {n}"} for n in range(1, 13)
]
TEXT = """
task: pens_text
dataset_path: json
dataset_kwargs:
  data_files: {test: pens.jsonl}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{question}} {{answer}}"
metric_list:
  - metric: byte_perplexity
"""
TOOLS = '''
from inspect_ai import Task, task
from inspect_ai.dataset import Sample
from inspect_ai.scorer import match
from inspect_ai.solver import generate, use_tools
from inspect_ai.tool import tool


@tool
def add():
    async def execute(x: int, y: int):
        """Add two numbers.

        Args:
            x: First number.
            y: Second number.
        """
        return x + y

    return execute


@task
def sums():
    samples = [Sample(input=f"What is {n} + 20?", target=str(n + 20)) for n in (3, 4)]
    return Task(dataset=samples, solver=[use_tools(add()), generate()], scorer=match(numeric=True))
'''
pytestmark = [
    pytest.mark.agents,
    pytest.mark.skipif(not HOME, reason="programs have environments of their own: make test-agents"),
]


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[ServedModel, Proxy]]:
    monkeypatch.chdir(tmp_path)
    Path("pens.jsonl").write_text("".join(json.dumps(row) + "\n" for row in PENS))
    for name in ("pens.yaml", "pens_choice.yaml", "pens_inspect.py"):
        Path(name).write_text(BLOCKS[name])
    model, server = ServedModel("tiny"), Proxy(model="tiny", needs_keys=False)
    server.add(ANY_KEY, model.submit, model.note_error)
    model.start()
    yield model, server
    server.close()


def shown(beginning: str) -> str:
    [command] = [line for line in re.findall(r"^    (.*)$", PAGE, re.MULTILINE) if beginning in line]
    return str(command)


def run(environment: str, server: Proxy, command: str) -> str:
    """Run a command of the page against the server, with the embedded model's folder. Return what it prints."""
    command = command.replace("http://127.0.0.1:8431", server.url).replace("runs/grpo-1/model", str(FOLDER))
    words = shlex.split(command)
    named = dict(words.pop(0).split("=", 1) for _ in range(len(words)) if re.match(r"[A-Z_]+=", words[0]))
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(Path("hub").resolve())}
    variables = {**os.environ, **server.environment("policygrad"), **offline, **named}
    variables.pop("PYTHONPATH", None)
    words[0] = str(ENVIRONMENTS / environment / "bin" / words[0])
    done = subprocess.run(words, env=variables, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def read_samples(task: str) -> list[dict[str, Any]]:
    """What lm-eval has written of a task, by problem, and remove it."""
    [file] = Path("out").rglob(f"samples_{task}_*.jsonl")
    samples = sorted(rows(file), key=lambda sample: sample["doc_id"])
    file.unlink()
    return samples


def test_lm_eval_gets_the_log_likelihoods_and_accuracies_that_its_own_type_hf_gives(
    served: tuple[ServedModel, Proxy],
) -> None:
    Path("pens_text.yaml").write_text(TEXT)
    command = shown("--model local-completions").replace("--tasks pens_choice", "--tasks pens_choice,pens_text")
    run("lm-eval", served[1], command)
    ours = {task: read_samples(task) for task in ("pens_choice", "pens_text")}
    args = re.search(r"--model_args \S+", command)
    assert args is not None
    own = command.replace("local-completions", "hf --device cpu").replace(
        args[0], "--model_args pretrained=runs/grpo-1/model,dtype=float32"
    )
    run("lm-eval", served[1], own)
    theirs = {task: read_samples(task) for task in ours}
    choices = list(zip(ours["pens_choice"], theirs["pens_choice"], strict=True))
    assert len(choices) == len(PENS)
    sums = [0.0, 0.0]
    for mine, other in choices:
        assert (mine["acc"], mine["acc_norm"]) == (other["acc"], other["acc_norm"])
        for (logp, is_greedy), (expected, expected_greedy) in zip(
            mine["filtered_resps"], other["filtered_resps"], strict=True
        ):
            assert float(logp) == pytest.approx(float(expected), abs=1e-4)
            assert is_greedy == expected_greedy
            sums = [sums[0] + float(logp), sums[1] + float(expected)]
    assert sums[0] == pytest.approx(sums[1], abs=1e-3)
    for mine, other in zip(ours["pens_text"], theirs["pens_text"], strict=True):
        assert float(mine["filtered_resps"][0]) == pytest.approx(float(other["filtered_resps"][0]), abs=1e-3)


def test_lm_eval_gets_the_same_greedy_answers_by_chat_as_from_the_folder(served: tuple[ServedModel, Proxy]) -> None:
    run("lm-eval", served[1], shown("--model local-chat-completions"))
    ours = [sample["resps"] for sample in read_samples("pens")]
    run("lm-eval", served[1], shown("lm_eval run --model hf").replace(" --limit 4", " --log_samples"))
    assert ours == [sample["resps"] for sample in read_samples("pens")]


def read_log() -> dict[str, Any]:
    """What inspect-ai has written, and remove it."""
    [file] = Path("logs").glob("*.json")
    log: dict[str, Any] = json.loads(file.read_text())
    file.unlink()
    assert log["status"] == "success", log.get("error")
    return log


def test_inspect_asks_the_policy_what_the_page_lets_it_ask(served: tuple[ServedModel, Proxy]) -> None:
    options = " --log-format json --display plain --logprobs --top-logprobs 3 --num-choices 2 --seed 1 --stop-seqs ."
    run("inspect-ai", served[1], shown("inspect eval pens_inspect.py --model openai-api") + options)
    log = read_log()
    assert len(log["samples"]) == len(PENS)
    for sample in log["samples"]:
        choices = sample["output"]["choices"]
        assert len(choices) == 2
        assert all(token["top_logprobs"] for choice in choices for token in choice["logprobs"]["content"])


@pytest.mark.parametrize("provider", ["openai-api/policy/policy", "openai/policy", "anthropic/policy"])
def test_a_policy_that_calls_the_tool_solves_inspects_task(served: tuple[ServedModel, Proxy], provider: str) -> None:
    model, server = served
    Path("sums_inspect.py").write_text(TOOLS)

    def say(key: tuple[int, ...], context: str) -> str:
        if found := re.findall(r"<tool_response>\n(\d+)", context):
            return f"ANSWER: {found[-1]}"
        number = re.search(r"What is (\d+) \+ 20", context)
        if number is None:  # inspect-ai tries the responses API before it uses it
            return "hello, world"
        return f'<tool_call>\n{{"name": "add", "arguments": {{"x": {number[1]}, "y": 20}}}}\n</tool_call>'

    model.sampler = ScriptedSampler(model.encoder, say)  # type: ignore[assignment]
    urls = f"POLICY_BASE_URL={server.url}/v1 POLICY_API_KEY=policygrad"
    run(
        "inspect-ai",
        server,
        f"{urls} inspect eval sums_inspect.py --model {provider} --log-format json --display plain",
    )
    log = read_log()
    [score] = log["results"]["scores"]
    assert score["metrics"]["accuracy"]["value"] == 1.0
    for sample in log["samples"]:
        assert [message["role"] for message in sample["messages"]] == ["user", "assistant", "tool", "assistant"]
