"""Supervised fine-tuning: which tokens are learnt, the loss, a run that resumes, and what is refused."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import policygrad as pg
from doubles.counted import counted
from doubles.files import same, untimed, weights, write_rows
from doubles.trackers import Interrupting, Record
from policygrad.commands.completion import generate_script
from policygrad.errors import DataError, ModelError, RunError
from policygrad.models.loading import load_model
from policygrad.models.tokenizer import Tokenizer, load_tokenizer
from policygrad.tasks.preferences import Demonstration, read_demonstrations
from policygrad.training.config.checkpoint import CheckpointConfig
from policygrad.training.config.serialization import load_config
from policygrad.training.config.supervised import SFTConfig
from policygrad.training.sft import SFTObjective, tokenise_demonstration
from policygrad.training.supervised import LocalSupervisedLearner

ROWS: list[dict[str, Any]] = [
    {"prompt": f"{a} + {b} =\n", "completion": f"<answer>{a + b}</answer>"} for a in range(7) for b in range(6)
]
CHAT = [
    {"role": "system", "content": "Add."},
    {"role": "user", "content": "1 + 1 ="},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": "2 + 2 ="},
    {"role": "assistant", "content": "4"},
    {"role": "user", "content": "thanks"},
]
QWEN = (  # ChatML's shape: a newline behind each turn's end token
    "{% for m in messages %}<{{ m.role }}>\n{{ m.content }}<eos>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>\n{% endif %}"
)


@pytest.fixture(scope="module")
def config(random_model: Path, tmp_path_factory: pytest.TempPathFactory) -> SFTConfig:
    data = write_rows(tmp_path_factory.mktemp("demonstrations") / "sums.jsonl", ROWS)
    return SFTConfig(data=data, model=str(random_model), batch_size=16, epochs=2, lr=3e-3)


@pytest.fixture
def tokenizer(random_model: Path) -> Tokenizer:
    return load_tokenizer(str(random_model), load_model(str(random_model)))


def read(tmp_path: Path, row: Any) -> Demonstration:
    return read_demonstrations(write_rows(tmp_path / "one.jsonl", [row]))[0]


def learnt(row: Any, tokenizer: Tokenizer) -> list[str]:
    """The runs of tokens that carry a loss, as text."""
    [results] = tokenise_demonstration(row, tokenizer)
    runs: list[list[int]] = []
    for i, (token, said) in enumerate(zip(results.tokens.tolist(), results.loss_mask.tolist(), strict=True)):
        if said and (i == 0 or not results.loss_mask[i - 1]):
            runs.append([])
        if said:
            runs[-1].append(token)
    return [tokenizer.hf.decode(run) for run in runs]


# --- which tokens are learnt


def test_text_trains_completion_and_end_token(tokenizer: Tokenizer, tmp_path: Path) -> None:
    row = read(tmp_path, ROWS[9])
    assert learnt(row, tokenizer) == ["<answer>4</answer><eos>"]
    [results] = tokenise_demonstration(row, tokenizer)
    assert results.prompt_ids.tolist() == tokenizer.encode(row.prompt, 0).ids.tolist()
    assert learnt(read(tmp_path, {"prompt": "1 + 1 =\n", "completion": ""}), tokenizer) == ["<eos>"]


@pytest.mark.parametrize("template", [None, QWEN])
def test_chats_train_the_assistants_turns(tokenizer: Tokenizer, tmp_path: Path, template: str | None) -> None:
    """With their end tokens, without what the template writes behind those; the prompt is what sampling would see."""
    tokenizer.hf.chat_template = template or tokenizer.hf.chat_template
    row = read(tmp_path, {"messages": CHAT})
    [results] = tokenise_demonstration(row, tokenizer)
    assert learnt(row, tokenizer) == ["2<eos>", "4<eos>"]
    assert results.prompt_ids.tolist() == tokenizer.encode(CHAT[:2], 0).ids.tolist()
    text = tokenizer.hf.apply_chat_template(CHAT[:5], tokenize=False)
    assert tokenizer.hf.decode([*results.prompt_ids, *results.tokens]) == text
    equal = read(tmp_path, {"prompt": CHAT[:4], "completion": "4"})
    assert learnt(equal, tokenizer) == ["4<eos>"]  # an answer in the prompt is read, like one of weight 0
    unlearned = [CHAT[0], CHAT[1], CHAT[2] | {"weight": 0}, CHAT[3], CHAT[4] | {"weight": 1}]
    assert tokenise_demonstration(read(tmp_path, {"messages": unlearned}), tokenizer)[0].tokens.tolist() == (
        tokenise_demonstration(equal, tokenizer)[0].tokens.tolist()
    )
    equal = read(tmp_path, {"prompt": CHAT[:2], "completion": [CHAT[2]]})
    assert learnt(equal, tokenizer) == ["2<eos>"]


@pytest.mark.parametrize(
    ("template", "says"),
    [
        (
            "{% for m in messages %}{{ m.content }}\n{% endfor %}",
            r"does not close the assistant's turn with an end token",
        ),
        (  # what the turn answers is shortened once there is the turn
            "{% for m in messages %}{{ m.content if loop.last else m.content[:1] }}<eos>{% endfor %}",
            "begins the assistant's turn differently when it is sampled",
        ),
        ("{{ raise_exception('only one turn') }}", r"one.jsonl:1: the chat template .* refuses the messages"),
        (None, "has no chat template"),
    ],
)
def test_unsuitable_templates_are_refused(
    tokenizer: Tokenizer, tmp_path: Path, template: str | None, says: str
) -> None:
    tokenizer.hf.chat_template = template
    with pytest.raises(ModelError, match=says) as caught:
        tokenise_demonstration(read(tmp_path, {"messages": CHAT}), tokenizer)
    assert "one.jsonl:1" in str(caught.value)


def test_rows_beyond_the_context_are_skipped_and_counted_on_request(config: SFTConfig, tmp_path: Path) -> None:
    """A prompt, and a completion; neither is told of an option that fine-tuning lacks."""
    config = config.resolve()
    before = SFTObjective(config)
    rows = [*ROWS, {"prompt": "1 " * 300, "completion": "1"}, {"prompt": "1 =\n", "completion": "1 " * 300}]
    longer = replace(config, data=write_rows(tmp_path / "long.jsonl", rows))
    with pytest.raises(
        ModelError, match=r"long\.jsonl:43 has \d+ tokens: more than the 256 .*--skip-bad-rows"
    ) as error:
        SFTObjective(longer)
    assert "max-tokens" not in str(error.value)
    with pytest.warns(UserWarning, match=r"long\.jsonl: 2 of 44 rows skipped, the first: .*long\.jsonl:43 has"):
        after = SFTObjective(replace(longer, skip_bad_rows=True))
    assert (after.units, after.eval_rows, after.run_facts) == (before.units, before.eval_rows, before.run_facts)
    assert [row.tokens.tolist() for row in after.rows] == [row.tokens.tolist() for row in before.rows]
    only = write_rows(tmp_path / "only.jsonl", rows[-1:])
    with pytest.raises(DataError, match="no row is left to train on"):
        SFTObjective(replace(config, data=only, skip_bad_rows=True))
    held_out = replace(longer, data=config.data, eval_data=only, skip_bad_rows=True)
    with pytest.warns(UserWarning, match="1 of 43 rows skipped"):
        result = SFTObjective(held_out)
    assert tuple(result.eval_rows) == tuple(range(42))
    assert "too few" in result.run_facts["eval data"]


def test_a_prompt_that_joins_its_completion_is_refused(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """`The answer ` + `is` is one token where the prompt's end and the completion's beginning were to be two."""
    row = read(tmp_path, {"prompt": "The answer", "completion": " is 2"})
    with pytest.raises(ModelError, match=r"one.jsonl:1: .*'prompt'.*'The answer'"):
        tokenise_demonstration(row, tokenizer)
    with pytest.raises(ModelError, match=r"one.jsonl:1: \d+ tokens, more than the 256 positions"):
        tokenise_demonstration(read(tmp_path, {"prompt": "a", "completion": "b" * 2000}), tokenizer)


# --- the loss


def test_the_loss_is_independent_of_micro_batches(config: SFTConfig) -> None:
    """Loss and gradient against the model called directly, one demonstration at a time; long and short rows mixed."""
    rows = [*ROWS[:3], {"prompt": "1 + 1 =\n", "completion": "2 " * 40}, {"messages": CHAT}]
    data = write_rows(Path(config.data).parent / "mixed.jsonl", rows)
    small = replace(config, data=data, learner=pg.LearnerConfig(micro_tokens=60)).resolve()
    objective = SFTObjective(small)
    learner = LocalSupervisedLearner(objective.model, small, 1)
    calls = counted(learner.optimizer)
    metrics = objective.accumulate(learner, range(len(rows)))
    assert len(calls) > 1
    results = {n: p.grad.clone() for n, p in objective.model.named_parameters() if p.grad is not None}
    objective.model.zero_grad()
    total, tokens = torch.zeros(()), 0
    for row in objective.rows:
        ids = torch.cat([row.prompt_ids, row.tokens])[None]
        logp = objective.model(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
        said = torch.cat([torch.zeros(len(row.prompt_ids), dtype=torch.bool), row.loss_mask])[1:]
        total, tokens = total - logp[said].sum(), tokens + int(said.sum())
    (total / tokens).backward()
    assert metrics == {"loss": pytest.approx((total / tokens).item(), abs=1e-5), "tokens": tokens}
    for name, parameter in objective.model.named_parameters():
        assert parameter.grad is not None, name
        assert torch.allclose(results[name], parameter.grad, atol=1e-6), name
    measured = objective.evaluate(learner, lambda done, total: None)  # too few rows to hold any out: these
    assert measured["eval/loss"] == pytest.approx((total / tokens).item(), abs=1e-5)
    assert measured["eval/perplexity"] == pytest.approx(math.exp((total / tokens).item()), rel=1e-4)
    assert "too few to hold any out" in objective.run_facts["eval data"]


# --- a run


@pytest.mark.parametrize("changes", [{}, {"learner": pg.LearnerConfig(dtype="bf16", gradient_checkpointing=True)}])
def test_training_learns_and_resumes_bitwise(config: SFTConfig, tmp_path: Path, changes: dict[str, Any]) -> None:
    """Stopped by a signal, by --stop-after, and once by losing what was done since the last checkpoint."""
    config = replace(
        config,
        **changes,
        epochs=4,
        optimizer=pg.OptimizerConfig(warmup=2, schedule="linear"),
        checkpoint=CheckpointConfig(2),
    )
    record = Record()
    full = pg.train_sft(replace(config, output=str(tmp_path / "whole")), display=record)
    assert [step for step, _ in record.steps] == list(range(1, full.steps + 1))
    assert full.after is not None
    assert full.after["eval/loss"] < 0.8 * full.before["eval/loss"]
    assert "nats per token" in record.summary["held-out loss"]
    pieces = tmp_path / "pieces"
    stopped = pg.train_sft(replace(config, output=str(pieces)), display=Interrupting(3))
    assert (stopped.steps, stopped.model) == (3, None)
    stopped = pg.train_sft(resume=pieces, stop_after=2)
    for path in (pieces / "checkpoints" / "step-000005").iterdir():  # the newest is lost, as after a kill at step 5
        path.unlink()
    result = pg.train_sft(resume=pieces)
    assert result.after == full.after
    assert same(weights(full.output), weights(pieces))
    assert untimed(full.output / "metrics.jsonl") == untimed(pieces / "metrics.jsonl")
    assert json.loads((pieces / "result.json").read_text())["after"] == full.after
    assert load_config(pieces / "sft.toml", SFTConfig()) == replace(config, output=str(pieces)).resolve()
    AutoModelForCausalLM.from_pretrained(full.model)


def test_only_trainable_parameters_change(config: SFTConfig, tmp_path: Path) -> None:
    config = replace(config, learner=pg.LearnerConfig(trainable=r"layers\.1\."), output=str(tmp_path / "run"))
    pg.train_sft(config, stop_after=2)
    with pytest.raises(RunError, match=r"leave learner\.trainable as it was"):
        pg.train_sft(replace(config, learner=pg.LearnerConfig()), resume=tmp_path / "run")
    pg.train_sft(resume=tmp_path / "run")
    before, after = load_file(Path(config.model) / "model.safetensors"), weights(tmp_path / "run")
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved == {name for name in before if "layers.1." in name}


def test_a_resumed_run_refuses_other_data(config: SFTConfig, tmp_path: Path) -> None:
    data = write_rows(tmp_path / "data.jsonl", ROWS)
    pg.train_sft(replace(config, data=data, output=str(tmp_path / "run")), stop_after=1)
    write_rows(Path(data), ROWS[1:])
    with pytest.raises(RunError, match=r"is not what the run in .* started with: restore the old file"):
        pg.train_sft(resume=tmp_path / "run")
    with pytest.raises(RunError, match=r"no run of `policygrad reward-model`.*`policygrad sft --resume"):
        pg.train_reward_model(resume=tmp_path / "run")


# --- bad input


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"prompt": "a"}, r"bad.jsonl:2: no column 'messages', and no 'completion' \(it has 'prompt'\)"),
        ({"text": "a"}, r"bad.jsonl:2: no column 'messages', and no 'prompt'"),
        ({"prompt": "a", "completion": None}, "bad.jsonl:2: 'completion' must be text, got NoneType"),
        ({"prompt": "a", "completion": "b", "messages": CHAT}, "both 'messages' and 'completion'"),
        ({"messages": "hello"}, "'messages' must be a list of chat messages, got str"),
        ({"messages": CHAT[:2]}, r"no assistant turn to learn from \(roles: system, user\)"),
        ({"messages": CHAT[2:]}, "the conversation begins with the assistant"),
        ({"messages": [{"role": "user"}]}, "bad.jsonl:2: message 1 must be an object like"),
        ({"messages": [*CHAT, {"role": "tool", "content": "\ud800"}]}, "message 7 contains half a surrogate pair"),
        ("text", "bad.jsonl:2: every line must be a JSON object, got a str"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, row: Any, says: str) -> None:
    path = write_rows(tmp_path / "bad.jsonl", [ROWS[0], row])
    with pytest.raises(DataError, match=says):
        read_demonstrations(path)


@pytest.mark.parametrize("command", ["sft", pytest.param("reward-model", marks=pytest.mark.full)])
def test_the_command_line(run_command: Callable[..., tuple[int, str, str]], command: str, tmp_path: Path) -> None:
    """Defaults < the run to resume < a file < flags; what makes no sense is refused before anything is loaded."""

    def run(*args: str) -> tuple[int, str]:
        code, out, err = run_command(*args)
        return code, " ".join((out + err).split())

    file = tmp_path / "mine.toml"
    file.write_text('data = "a.jsonl"\nepochs = 3\n[optimizer]\nschedule = "linear"\n')
    code, out = run(command, "--config", str(file), "--epochs", "2", "--dry-run")
    assert code == 0
    for argv in ('data = "a.jsonl"', "epochs = 2", 'schedule = "linear"', "lr = 0.001"):
        assert argv in out
    assert "lr = 1e-05" in run(command, "--data", "a", "--model", "big", "--dry-run")[1]
    (tmp_path / f"{command}.toml").write_text(file.read_text())
    code, out = run(command, "--resume", str(tmp_path), "--dry-run")
    assert (code, "epochs = 3" in out) == (0, True)
    for args, says in (
        (("--resume", str(tmp_path), "--epochs", "5"), "continues with the run's own weights"),
        (("--resume", str(tmp_path / "nowhere")), f"holds no run of `policygrad {command}`"),
        ((), f"{command} needs data: --data FILE.jsonl"),
        (("--data", "a", "--batch-size", "0"), "batch_size must be at least 1, not 0"),
        (("--data", "a", "--lr", "-1"), "lr must be at least 0 and finite, not -1"),
        (("--data", "a", "--seed", "-1"), "seed must be at least 0"),
        (("--data", "a", "--stop-after", "0"), "--stop-after must be at least 1"),
        (("--data", "a", "--optimizer.schedule", "steps"), "must be one of constant, linear, cosine"),
        (("--data", "a", "--learner.score-parameters", "head"), "learner.score_parameters is for policy gradients"),
        (
            ("--data", "a", "--learner.compile"),
            "learner.compile, learner.offload and learner.head are for policygrad train",
        ),
        (
            ("--data", "a", "--learner.head", "fp32"),
            "learner.compile, learner.offload and learner.head are for policygrad train",
        ),
        (("--data", "a", "--task", "embedded"), "Unrecognized options: --task"),
        (("--data", str(tmp_path / "nosuch.jsonl")), "no such file"),
    ):
        code, out = run(command, *args)
        assert code == 2, args
        assert says in out.replace("│ ", ""), (args, out)
    file.write_text('data = "a.jsonl"\nepoch = 3\n')
    assert "--batch-size" in generate_script("bash")
    assert "unknown key 'epoch': did you mean 'epochs'?" in run(command, "--config", str(file))[1]
