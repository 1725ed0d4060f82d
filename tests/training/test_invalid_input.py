"""Everything that goes wrong from outside: each is said in one message with the way out, or the run goes on and counts it."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

import policygrad as pg
from doubles.algorithms import SINGLE_TURN, runnable
from doubles.files import rows, write_rows
from doubles.models import changed_copy
from doubles.trackers import Record
from policygrad.algorithms import ALGORITHMS
from policygrad.core.advantages import ConstantBaseline
from policygrad.errors import CheckpointError, ConfigError, DataError, ModelError, RunError
from policygrad.learners.config import LearnerConfig
from policygrad.models.loading import locate_model, resolve_model
from policygrad.rewards.config import RewardConfig
from policygrad.samplers.base import SamplingParams
from policygrad.training.config.checkpoint import CheckpointConfig
from policygrad.training.config.evaluation import EvaluationConfig
from policygrad.training.config.run import Run
from policygrad.training.trainer import train

REWARDS = """
import math, os, time
from policygrad import reward

def odd(completion): return len(completion.encode()) % 2

def fine(prompts, completions, **columns): return [float(odd(c)) for c in completions]
def equal(prompts, completions, **columns): return [1.0 for c in completions]
def raises(prompts, completions, **columns): return [1.0 / odd(c) for c in completions]
def hangs(prompts, completions, **columns):
    while "2" in prompts[0]: time.sleep(0.05)
    return fine(prompts, completions)
def dies(prompts, completions, **columns):
    if "2" in prompts[0]: os._exit(3)
    return fine(prompts, completions)
def sometimes(value): return lambda prompts, completions, **columns: [1.0 if odd(c) else value for c in completions]
nan, inf, minus_inf = sometimes(math.nan), sometimes(math.inf), sometimes(-math.inf)
none, text, huge = sometimes(None), sometimes("1"), sometimes(10**400)
def length(prompts, completions, **columns): return [1.0] * (1 + odd(completions[0]))
def nothing(prompts, completions, **columns): return None
def always_nan(prompts, completions, **columns): return [math.nan for c in completions]
def halves(prompts, completions, **columns): return [[(k, 1.0) for k in {len(c) // 2} - {0}] for c in completions]
halves = reward(process=True)(halves)
"""


@dataclass
class Bench:
    """A task, rewards and a run of one step on the tiny random model."""

    folder: Path
    run: Run

    def reward(self, name: str) -> tuple[str, ...]:
        return (f"{self.folder / 'mine.py'}:{name}",)

    def task(self, *rows: Any) -> str:
        return write_rows(self.folder / "rows.jsonl", rows)

    def go(self, **changes: Any) -> tuple[list[dict[str, Any]], str]:
        """(rows of metrics.jsonl, all notes)."""
        display = Record()
        run = replace(self.run, **changes)
        result = train(run, display=display)
        assert "NaN" not in (result.output / "metrics.jsonl").read_text()
        return rows(result.output / "metrics.jsonl"), display.said


@pytest.fixture
def bench(random_model: Path, tmp_path: Path) -> Bench:
    (tmp_path / "mine.py").write_text(REWARDS)
    sums = [{"prompt": f"{i} + {i} =\n", "answer": str(2 * i), "demonstration": f"{i}!"} for i in range(4)]
    bench = Bench(tmp_path, Run())
    bench.run = Run(
        algorithm=ALGORITHMS["dr_grpo"],
        model=str(random_model),
        task=bench.task(*sums),
        reward=bench.reward("fine"),
        steps=1,
        prompts_per_step=4,
        samples_per_prompt=4,
        sampling=SamplingParams(max_tokens=8),
        evaluation=EvaluationConfig(problems=0),
        rewards=RewardConfig(num_workers=1, timeout=0.3),
        output=str(tmp_path / "run"),
    )
    return bench


@pytest.fixture
def changed_model(random_model: Path, tmp_path: Path) -> Callable[..., str]:
    """A copy of the random model with other entries in one of its JSON files."""

    def change(**files: dict[str, Any]) -> str:
        return str(changed_copy(random_model, tmp_path / "changed", **files))

    return change


# --- rewards


AT_ONCE = {
    "raises": ("raised", "raised ZeroDivisionError"),
    "nan": ("nan", "returned nan"),
    "inf": ("inf", "returned inf"),
    "minus_inf": ("inf", "returned -inf"),
    "huge": ("inf", "returned 1000"),
    "text": ("type", "returned '1'"),
    "length": ("length", "returned 2 rewards for 1 completion"),
    "nothing": ("type", "returned None"),
}


def test_failing_rewards_drop_their_samples(bench: Bench) -> None:
    """Each says what is wrong with it, and each failure is counted by its kind."""
    patient = replace(bench.run.rewards, max_failed_steps=0)  # one of them fails everywhere
    names = tuple(name for given in AT_ONCE for name in bench.reward(given))
    (row,), notes = bench.go(reward=names, rewards=patient)
    for name, (_, says) in AT_ONCE.items():
        assert re.search(rf"mine\.py:{name}\b[^\n]*{re.escape(says)}", notes), (name, notes)
    failed = {reason: row.get(f"rewards/failed_{reason}", 0) for reason, _ in AT_ONCE.values()}
    assert all(failed.values()), failed
    assert row["completions/failed_ratio"] == 1


@pytest.mark.parametrize(
    ("name", "reason", "says"),
    [
        ("hangs", "timeout", "took more than its timeout of 0.3 s"),
        ("dies", "crashed", "exit"),
        ("none", "none", "None"),
    ],
)
def test_a_failing_reward_drops_only_its_samples(bench: Bench, name: str, reason: str, says: str) -> None:
    """The first two fail for one prompt of four, one completion each, so that the test is short."""
    metrics, notes = bench.go(reward=bench.reward(name), samples_per_prompt=2)
    assert says in notes
    assert 0 < sum(row.get(f"rewards/failed_{reason}", 0) for row in metrics) <= 8
    assert all(0 < row["completions/failed_ratio"] < 1 for row in metrics)


def test_without_any_reward_the_weights_stay(bench: Bench) -> None:
    patient = replace(bench.run.rewards, max_failed_steps=0)
    metrics, notes = bench.go(reward=bench.reward("always_nan"), rewards=patient, steps=2)
    assert "no completion has a reward" in notes
    assert all(row["updates/skipped"] == 1 and row["completions/failed_ratio"] == 1 for row in metrics)


KINDS = {"reinforce", "remax", "grpo", "grpo_process", "ppo", "maxrl"}


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in KINDS else pytest.mark.full) for n in SINGLE_TURN])
def test_equal_rewards_leave_the_weights(bench: Bench, name: str) -> None:
    """Ψ is 0 for whatever compares a prompt's samples; counted, reported, and never NaN."""
    steps = bench.reward("halves") if "step_end" in ALGORITHMS[name].all_needs else ()  # each worth what the outcome is
    metrics, _ = bench.go(reward=bench.reward("equal") + steps, algorithm=runnable(name))
    assert all(row["frac_reward_zero_std"] == 1 and row["reward"] == 1 for row in metrics)
    completions = rows(bench.folder / "run" / "completions.jsonl")
    if any(getattr(link, "group_statistic", False) for link in ALGORITHMS[name].advantage):
        constant = sum(link.value for link in ALGORITHMS[name].advantage if isinstance(link, ConstantBaseline))
        assert all(row["advantage"] == pytest.approx(-constant, rel=1e-6, abs=0) for row in completions)


def test_fewer_prompts_than_minibatches_are_noted_once(bench: Bench) -> None:
    metrics, notes = bench.go(algorithm=ALGORITHMS["gspo"], prompts_per_step=2, steps=2)
    assert (
        notes.count("gspo splits a rollout into 4 minibatches of whole groups, but 2 prompts per step make only 2") == 1
    )
    assert all(row.get("updates/taken", 0) + row.get("updates/skipped", 0) == 2 for row in metrics)


def test_too_few_groups_after_filters_are_noted_once(bench: Bench) -> None:
    @dataclass(frozen=True)
    class First(pg.Filter):
        """The first prompt alone takes part."""

        def __call__(self, batch: pg.Batch) -> pg.Batch:
            return replace(batch, mask=batch.mask & (batch.group == 0)[:, None])

    few = replace(ALGORITHMS["dr_grpo"], filters=(First(),), update_rule=pg.GradientSteps(epochs=2, minibatches=4))
    metrics, notes = bench.go(algorithm=few, steps=2)
    assert notes.count("1 group left for 4 minibatches of whole groups: one update per group and epoch") == 1
    assert all(row.get("updates/taken", 0) + row.get("updates/skipped", 0) == 2 for row in metrics)


def test_dynamic_sampling_stops_when_every_prompt_is_solved(bench: Bench) -> None:
    metrics, notes = bench.go(reward=bench.reward("equal"), algorithm=ALGORITHMS["dapo"], steps=2)
    rounds = ALGORITHMS["dapo"].filters[0].max_rounds
    assert "dynamic sampling" in notes
    assert f"{rounds} rounds" in notes
    assert all(16 * rounds < row["tokens/sampled"] <= 16 * 8 * rounds for row in metrics)
    assert all(1 <= row["updates/skipped"] <= 4 for row in metrics)  # a minibatch for each that is not masked
    assert not any("updates/taken" in row for row in metrics)


@pytest.mark.parametrize(
    ("reward", "says"),
    [
        ("exactmatch", "did you mean 'exact_match'?"),
        ("no.such.module.function", "there is no module 'no'"),
        ("nosuch.py:function", "there is no file"),
        ("mine.py:fien", "did you mean 'fine'?"),
        ("unreadable.py:f", "raised SyntaxError"),
    ],
)
def test_a_missing_reward_is_refused(
    bench: Bench, reward: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "unreadable.py").write_text("def f(:\n")
    with pytest.raises(ConfigError) as caught:
        bench.go(reward=(reward,))
    assert says in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_a_task_without_a_reward_is_refused(bench: Bench) -> None:
    with pytest.raises(RunError, match=r"choose one, e\.g\. --reward exact_match"):
        bench.go(reward=())


# --- tasks


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "rows.jsonl: no rows"),
        (b"\n \n", "rows.jsonl: no rows"),
        (b'{"prompt": "1"}\n{"prompt": "2', "rows.jsonl:2: not JSON at column 12"),
        (b'{"prompt": "1"}\n\n{"prompt": "\xff"}', "rows.jsonl:3: byte 13 (0xff) is not UTF-8"),
        (b"\xff\xfe{\x00", "rows.jsonl:1: this is UTF-16 text"),
        (b'{"promt": "1"}', "rows.jsonl:1: no column 'prompt' (it has 'promt')"),
        (b'{"prompt": ""}', "rows.jsonl:1: 'prompt' is empty"),
        (b"[1]", "rows.jsonl:1: every line must be a JSON object"),
        (b'{"prompt": "1", "answer": "1"}\n{"prompt": "2"}', "rows.jsonl:2: no column 'answer'"),
    ],
)
def test_a_damaged_file_is_named_with_its_line(bench: Bench, data: bytes, says: str) -> None:
    Path(bench.run.task).write_bytes(data)
    with pytest.raises(DataError) as caught:
        bench.go()
    assert says in str(caught.value)


def test_a_byte_order_mark_and_blank_lines_are_no_error(bench: Bench) -> None:
    Path(bench.run.task).write_bytes(b'\xef\xbb\xbf{"prompt": "1"}\r\n\r\n{"prompt": "2"}\r\n')
    metrics, _ = bench.go()
    assert len(metrics) == 1


def test_a_prompt_longer_than_the_context_is_refused(bench: Bench) -> None:
    task = bench.task({"prompt": "1 + 1 ="}, {"prompt": "word " * 200})
    with pytest.raises(ModelError, match=r"rows\.jsonl:2 .*max_tokens is 8.* 256"):
        bench.go(task=task)


def test_a_prompt_without_room_for_the_completion_is_refused_before_there_is_a_folder(bench: Bench) -> None:
    with pytest.raises(ModelError, match="2048 positions"):
        bench.go(model="tiny", sampling=SamplingParams(max_tokens=5000))
    assert not (bench.folder / "run").exists()


def test_messages_without_a_chat_template_are_refused(bench: Bench, changed_model: Callable[..., str]) -> None:
    model = changed_model(tokenizer_config={"chat_template": None})
    (Path(model) / "chat_template.jinja").unlink(missing_ok=True)
    task = bench.task({"prompt": [{"role": "user", "content": "1 + 1"}]})
    with pytest.raises(ModelError, match=r"rows\.jsonl:1 .*chat template: set"):
        bench.go(model=model, task=task)


# --- models and tokenizers


def test_a_tokenizer_without_a_pad_token_works(bench: Bench, changed_model: Callable[..., str]) -> None:
    model = changed_model(tokenizer_config={"pad_token": None}, config={"pad_token_id": None}, generation_config={})
    metrics, _ = bench.go(model=model)
    assert metrics[-1]["updates/taken"] == 1


def test_a_tokenizer_without_an_end_token_is_refused(bench: Bench, changed_model: Callable[..., str]) -> None:
    model = changed_model(
        tokenizer_config={"eos_token": None}, config={"eos_token_id": None}, generation_config={"eos_token_id": None}
    )
    with pytest.raises(ModelError, match=r"end token.*set `eos_token`"):
        bench.go(model=model)


def test_a_missing_model_is_refused(bench: Bench, tmp_path: Path) -> None:
    for name in ("no/such/folder", "./nosuch", "/nosuch", "a b"):
        with pytest.raises(ModelError, match="there is no model folder"):
            bench.go(model=name)
    with pytest.raises(ModelError, match="is a file: give the folder"):
        bench.go(model=str(tmp_path / "mine.py"))
    assert not (tmp_path / "run").exists()


def test_a_hub_id_without_a_network_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """One request, one short message; the cache is used when it has the model."""
    import huggingface_hub

    def refused(*_: Any, **options: Any) -> None:
        assert 0 < options["timeout"] <= 10
        raise ConnectionRefusedError("no network")

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", refused)
    with pytest.raises(ModelError, match=r"no folder 'org/no-such-model', the hub cannot be reached \(Conn") as caught:
        resolve_model("org/no-such-model")
    assert "\n" not in str(caught.value)
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *_: str(tmp_path / "config.json"))
    assert locate_model("org/cached-model") == str(tmp_path)


def test_a_damaged_model_is_refused(bench: Bench, changed_model: Callable[..., str]) -> None:
    model = Path(changed_model())
    weights = model / "model.safetensors"
    full = weights.read_bytes()
    weights.write_bytes(full[:1000])
    with pytest.raises(ModelError, match="cannot load the model"):
        bench.go(model=str(model))
    weights.unlink()
    with pytest.raises(ModelError, match="cannot load the model"):
        bench.go(model=str(model))
    weights.write_bytes(full)
    (model / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"config\.json is not JSON"):
        bench.go(model=str(model))


def test_a_missing_device_is_refused(bench: Bench) -> None:
    with pytest.raises(RunError, match=r"learner.device='nosuch' cannot be used here"):
        bench.go(learner=LearnerConfig(device="nosuch"))


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("dapo", "in every group all rewards are equal"),
        ("remax", "every completion has the reward of its prompt's greedy one"),
    ],
)
def test_empty_completions_leave_the_weights(
    bench: Bench, changed_model: Callable[..., str], name: str, why: str
) -> None:
    """A model that ends at once: one token per completion, nothing to compare, no crash."""
    from transformers import AutoModelForCausalLM

    folder = changed_model(config={"tie_word_embeddings": False})
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        model.model.embed_tokens.weight.fill_(1)
        model.model.norm.weight.fill_(1)
        model.lm_head.weight[model.config.eos_token_id] = 10
    model.save_pretrained(folder)
    metrics, notes = bench.go(model=folder, algorithm=ALGORITHMS[name])
    assert all(row["completions/mean_length"] == 1 and row["completions/truncated_ratio"] == 0 for row in metrics)
    shares = min(4, ALGORITHMS[name].update_rule.minibatches)  # whole groups, and there are four
    assert all(row["updates/skipped"] == shares for row in metrics)
    assert "nothing was learned" in notes
    assert why in notes


def test_truncated_and_masked_completions_leave_the_weights(bench: Bench) -> None:
    metrics, notes = bench.go(algorithm=ALGORITHMS["dapo"], sampling=SamplingParams(max_tokens=1))
    assert all(row["completions/truncated_ratio"] > 0.9 for row in metrics)
    assert "nothing was learned" in notes
    assert "cut off" in notes


# --- folders


def test_an_output_folder_that_is_not_empty_is_refused(bench: Bench) -> None:
    folder = bench.folder / "run"
    folder.mkdir()
    (folder / "precious").write_text("data")
    with pytest.raises(RunError, match="is not empty: resume the run in it by --resume"):
        bench.go()
    assert (folder / "precious").read_text() == "data"


def test_resuming_a_folder_without_a_run_is_refused(bench: Bench) -> None:
    for folder in (bench.folder, bench.folder / "nosuch"):
        with pytest.raises(RunError, match=r"holds no run of `policygrad train`, since there is no run.toml in it"):
            train(resume=folder)


def test_a_damaged_checkpoint_falls_back_to_the_one_before(bench: Bench) -> None:
    """The one before it is used, and that is said; when none is intact nothing is started over in silence."""
    bench.go(steps=2, checkpoint=CheckpointConfig(every=1, keep=2))
    folder = bench.folder / "run"
    newest, before = sorted((folder / "checkpoints").iterdir(), reverse=True)
    data = bytearray((newest / "tensors.safetensors").read_bytes())
    data[-1] ^= 1
    (newest / "tensors.safetensors").write_bytes(data)
    shutil.copytree(folder, bench.folder / "other")
    display = Record()
    assert train(resume=folder, display=display).steps == 2
    assert any(f"using the one before it, {before.name}" in text for text in display.notes)
    assert len((folder / "metrics.jsonl").read_text().splitlines()) == 2
    other = bench.folder / "other"
    (other / "checkpoints" / before.name / "state.json").write_text("{}")
    with pytest.raises(CheckpointError, match="none of the 2 checkpoint"):
        train(resume=other)
    assert len((other / "metrics.jsonl").read_text().splitlines()) == 2


def test_eval_counts_failed_rewards_as_zero(bench: Bench) -> None:
    """A completion without a reward counts as wrong, and is counted."""
    options = pg.RunOptions(
        model=bench.run.model,
        task=bench.run.task,
        reward=bench.reward("nan"),
        evaluation=pg.EvaluationConfig(problems=4, samples_per_prompt=2),
        sampling=pg.SamplingParams(max_tokens=8),
    )
    outcome = pg.evaluate(options)
    assert 0 < outcome.num_failed < 8
    assert outcome.mean == 1 - outcome.num_failed / 8
    assert any("returned nan" in message for message in outcome.messages)
