"""What tests share: a tiny random model on disk with the embedded tokenizer, a run of seconds, the command line."""

from __future__ import annotations

import ast
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from functools import wraps
from importlib.util import find_spec
from pathlib import Path
from typing import Any

# before torch, and for what tests start: beside other tests a second thread only takes their core
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("OMP_NUM_THREADS", "1" if "PYTEST_XDIST_WORKER" in os.environ else "2")

import pytest
import torch

import policygrad as pg
import screenshots
from doubles.files import write_rows
from doubles.forked import Forked, forking
from policygrad import cli


def make_exclusive(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function for one thread at a time."""
    lock = threading.RLock()

    @wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        with lock:
            return function(*args, **options)

    return call


pytest_plugins = ["test_costs"]  # in scripts/
torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
if find_spec("hypothesis") is not None:  # a busy machine is no failure; others' environments do without it
    from hypothesis import settings

    settings.register_profile("patient", deadline=None)
    settings.load_profile("patient")
if sys.version_info < (3, 11, 9):
    # A thread that parses while another one does, as formatting a traceback does, makes either fail: python/cpython#106905.
    ast.parse = make_exclusive(ast.parse)
# ignored below a shell's `&` and below nohup: tests send both signals to this process
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def build_model(folder: Path, *, hidden: int = 32, layers: int = 2, seed: int = 0) -> Path:
    """A random Llama of some 30k parameters, saved with the embedded model's tokenizer."""
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    from policygrad.models.loading import resolve_model

    tokenizer = AutoTokenizer.from_pretrained(resolve_model("tiny"))
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        initializer_range=0.2,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def random_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny random model."""
    return build_model(tmp_path_factory.mktemp("model"))


REWARDS = """
import policygrad as pg

def starts_with_a_digit(prompts, completions, **columns):
    return [float(c[:1].isdigit()) for c in completions]

def letters(prompts, completions, **columns):
    '''Another for every other text, so that each step moves the weights.'''
    return [sum(map(ord, c)) % 7 / 7 for c in completions]

@pg.reward(process=True)
def digits(prompts, completions, **columns):
    '''A step per third of the text, worth 1 where it holds a digit.'''
    found = []
    for c in completions:
        ends = sorted({len(c) * k // 3 for k in (1, 2, 3)} - {0})
        found.append([(b, float(any(x.isdigit() for x in c[a:b]))) for a, b in zip([0, *ends], ends)])
    return found
"""


@pytest.fixture(scope="module")
def small(random_model: Path, tmp_path_factory: pytest.TempPathFactory) -> pg.Run:
    """A run of seconds: a random model, sums, rewards of our own in mine.py beside them."""
    folder = tmp_path_factory.mktemp("task")
    (folder / "mine.py").write_text(REWARDS)
    sums = [{"prompt": f"{i} + {j} =\n", "answer": str(i + j)} for i in range(6) for j in range(8)]
    return pg.Run(
        algorithm=pg.DR_GRPO,
        model=str(random_model),
        task=write_rows(folder / "sums.jsonl", sums),
        reward=(f"{folder / 'mine.py'}:starts_with_a_digit",),
        steps=5,
        prompts_per_step=4,
        samples_per_prompt=8,
        lr=3e-3,
        sampling=pg.SamplingParams(max_tokens=8),
        rewards=pg.RewardConfig(num_workers=1),
        evaluation=pg.EvaluationConfig(problems=0),
        checkpoint=pg.CheckpointConfig(every=1, keep=3),
    )


@pytest.fixture
def run_command(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """`run_command("show", "grpo")` -> (exit code, standard output, standard error)."""

    def call(*args: str) -> tuple[int, str, str]:
        code = cli.main(args)
        message = capsys.readouterr()
        return code, message.out, message.err

    return call


@pytest.fixture
def short_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have an engine's server compared with the learner on 6 completions instead of 48, wherever it gets weights."""
    monkeypatch.setattr("policygrad.samplers.engines.probe.NUM_PROMPTS", 2)


@pytest.fixture
def few_attempts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a server that does not fit refused after it was tried, and so compared with the learner, twice instead of ten times."""
    monkeypatch.setattr("policygrad.samplers.engines.server_pool.MAX_ATTEMPTS", 2)


@pytest.fixture
def forked() -> Iterator[Forked]:
    """Calls functions in processes of their own, which need not import torch again."""
    with forking() as processes:
        yield processes


@pytest.fixture(scope="module")
def forked_ranks() -> Iterator[None]:
    """Ranks above 0 are forks of this process meanwhile, which need not import torch again; all compute with one thread."""
    from doubles.forked_ranks import forking_ranks

    with forking_ranks():
        yield


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    """A browser. Where there is none the test is skipped, or fails if POLICYGRAD_NEEDS_BROWSER is set."""
    if (reason := screenshots.why_no_browser()) and not os.environ.get("POLICYGRAD_NEEDS_BROWSER"):
        pytest.skip(reason)
    with screenshots.open_browser() as browser:
        new_page = browser.new_page

        def open_patient_page(**options: Any) -> Any:
            page = new_page(**options)
            page.set_default_timeout(300_000)  # milliseconds: a busy machine is no failure
            return page

        browser.new_page = open_patient_page
        yield browser
