"""Reward models: how they read, how they are trained, how they score in the pool, and what is refused."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

import policygrad as pg
from doubles.counted import counted
from doubles.files import write_rows
from doubles.models import changed_copy
from policygrad.errors import DataError, ModelError, PolicygradError, RunError
from policygrad.models.classifier import (
    encode_for_scoring,
    forward,
    load_classifier,
    load_classifier_tokenizer,
    micro_batches,
    score,
)
from policygrad.models.tokenizer import Tokenizer
from policygrad.rewards.resolve import resolve_reward
from policygrad.rewards.reward_model import ModelReward
from policygrad.rewards.workers.pool import RewardPool
from policygrad.rewards.workers.worker import RewardCaller
from policygrad.tasks.preferences import group_by_prompt, read_preferences
from policygrad.training.reward_model import (
    PreferenceBatch,
    PreferenceObjective,
    bradley_terry_loss,
    compute_accuracy,
    compute_rewards,
)
from policygrad.training.supervised import BatchSchedule, LocalSupervisedLearner

PAIRS = [
    {"prompt": f"{a} + {b} =\n", "chosen": str(a + b), "rejected": str(a + b + wrong)}
    for a in range(7)
    for b in range(6)
    for wrong in (1, 3)[: 1 + (a + b) % 2]
]


@pytest.fixture(scope="module")
def judge(random_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random reward model with the embedded tokenizer."""
    folder = tmp_path_factory.mktemp("judge")
    torch.manual_seed(1)
    AutoModelForSequenceClassification.from_pretrained(random_model, num_labels=1).save_pretrained(folder)
    AutoTokenizer.from_pretrained(random_model).save_pretrained(folder)
    return folder


@pytest.fixture
def changed(judge: Path, tmp_path: Path) -> Callable[..., Path]:
    """A copy of the reward model whose JSON files say something else."""

    def change(**files: dict[str, Any]) -> Path:
        return changed_copy(judge, tmp_path / "changed", **files)

    return change


@pytest.fixture(scope="module")
def config(random_model: Path, tmp_path_factory: pytest.TempPathFactory) -> pg.RewardModelConfig:
    data = write_rows(tmp_path_factory.mktemp("pairs") / "pairs.jsonl", PAIRS)
    return pg.RewardModelConfig(data=data, model=str(random_model), batch_size=16, epochs=2, lr=3e-3)


# --- reading


def test_text_is_prompt_and_completion_closed_by_the_end_token(judge: Path) -> None:
    tokenizer = load_classifier_tokenizer(str(judge))
    ids = encode_for_scoring(tokenizer, "2 + 3 =\n", "5")
    assert tokenizer.hf.decode(ids) == "2 + 3 =\n5<eos>"
    assert encode_for_scoring(tokenizer, "2 + 3 =\n", "5<eos>") == ids  # closed already


def test_chat_messages_go_through_the_reward_models_own_template(judge: Path) -> None:
    tokenizer = load_classifier_tokenizer(str(judge))
    tokenizer.hf.chat_template = "{% for m in messages %}[{{ m.role }}]{{ m.content }};{% endfor %}"
    ids = encode_for_scoring(tokenizer, ({"role": "user", "content": "2 + 3 ="},), "5")
    assert tokenizer.hf.decode(ids) == "[user]2 + 3 =;[assistant]5;"
    tokenizer.hf.chat_template = "{{ raise_exception('no') }}"
    with pytest.raises(ModelError, match=r"chat template of .*\(roles: user, assistant\): no"):
        encode_for_scoring(tokenizer, ({"role": "user", "content": "2 + 3 ="},), "5")
    tokenizer.hf.chat_template = None
    with pytest.raises(ModelError, match="no chat template: set `chat_template`"):
        encode_for_scoring(tokenizer, ({"role": "user", "content": "2 + 3 ="},), "5")


def test_a_tokenizer_that_closes_texts_itself_closes_them_once() -> None:
    class Bert:
        eos_token_id, sep_token_id = 9, 3

        def __call__(self, text: str) -> dict[str, list[int]]:
            return {"input_ids": [2, *map(ord, text), 3]}

    assert encode_for_scoring(Tokenizer(Bert(), frozenset(), "bert", None), "a", "b") == [2, 97, 98, 3]


@pytest.mark.parametrize("padding", [0, 1, None])
def test_a_padded_batch_scores_like_each_text_alone(judge: Path, padding: int | None) -> None:
    """The pad token, the end token as padding, and no padding token at all; by transformers one text at a time."""
    model = load_classifier(str(judge))
    model.config.pad_token_id = padding
    generator = torch.Generator().manual_seed(0)
    texts = [torch.randint(2, 400, (n,), generator=generator).tolist() + [1] * (padding != 1) for n in (3, 9, 1, 5, 9)]
    alone = torch.stack([model(input_ids=torch.tensor([text])).logits[0, 0] for text in texts])
    assert torch.allclose(forward(model, texts), alone, atol=1e-5)
    assert torch.allclose(score(model, texts, tokens=12), alone, atol=1e-5)
    assert model.config.pad_token_id == padding
    if padding is None:  # no id is free to pad with: one by one
        model.config.vocab_size = 200
        texts = [list(range(200)), list(range(10))]
        alone = torch.stack([model(input_ids=torch.tensor([text])).logits[0, 0] for text in texts])
        assert torch.allclose(forward(model, texts), alone, atol=1e-5)


def test_micro_batches_hold_every_text_once_within_the_budget() -> None:
    lengths = [5, 1, 30, 7, 7, 2, 12]
    batches = list(micro_batches(lengths, 16))
    assert sorted(i for batch in batches for i in batch) == list(range(7))
    assert all(len(b) == 1 or len(b) * max(lengths[i] for i in b) <= 16 for b in batches)
    assert batches[0] == [2]
    assert list(micro_batches([], 16)) == []


# --- as a reward


SCORED = ["2 + 3 =\n", "7 - 1 =\n", "1 + 1 =\n"] * 3
TEXTS = ["5", "", "a longer answer: 2", "6", "<answer>5</answer>", "x", "5" * 40, "z", "5 5 5 5"]
TOO_LONG = "tokens, and the reward model reads 40: lower --max-tokens"


def score_by_transformers(judge: Path) -> list[float | None]:
    """The scores of `TEXTS`, one at a time; None: the one that is too long."""
    model, tokenizer = load_classifier(str(judge)), load_classifier_tokenizer(str(judge))
    return [
        model(torch.tensor([encode_for_scoring(tokenizer, p, c)])).logits.item() if c != "5" * 40 else None
        for p, c in zip(SCORED, TEXTS, strict=True)
    ]


def test_scores_are_transformers_own_and_what_is_too_long_is_told(changed: Callable[..., Path]) -> None:
    judge = changed(config={"max_position_embeddings": 40})
    results = RewardCaller("it", ModelReward.from_name(str(judge)))(SCORED, TEXTS, {})
    expected = score_by_transformers(judge)
    for result, score_alone in zip(results, expected, strict=True):
        assert result.value == (None if score_alone is None else pytest.approx(score_alone, abs=1e-5))
    assert [i for i, result in enumerate(results) if result.reason] == [6]
    assert TOO_LONG in results[6].message
    known = [x for x in expected if x is not None]
    assert max(known) - min(known) > 0.01


@pytest.mark.full
def test_the_reward_model_scores_in_a_dedicated_worker(changed: Callable[..., Path]) -> None:
    """The weighted score is transformers' own, and the other workers do not load the model. (test_rlhf.py has a run with one.)"""
    judge = changed(config={"max_position_embeddings": 40})
    expected, prompts, completions = score_by_transformers(judge), SCORED, TEXTS
    with RewardPool([f"model:{judge}*0.5", "format"], num_workers=2) as pool:
        loads = [tuple(code is not None for _, code, _ in slot.start.functions) for slot in pool._slots]
        assert loads == [(True, False), (False, True), (False, True)]
        scores = pool.score(prompts, completions, {})
        rerun = pool.score(prompts, completions, {})
    results = scores.parts[f"model:{judge}"]
    assert results[6] is scores.total[6] is None
    assert scores.failures == {"raised": 1}
    assert TOO_LONG in scores.messages[0]
    assert scores.parts == rerun.parts
    known = [(x, y) for x, y in zip(results, expected, strict=True) if x is not None and y is not None]
    assert len(known) == 8
    assert all(x == pytest.approx(y, abs=1e-5) for x, y in known)
    assert results[4] is not None
    assert scores.total[4] == pytest.approx(0.5 * results[4] + 1.0)
    assert resolve_reward(f"0.25*model:{judge}").weight == 0.25
    assert resolve_reward(f"model:{judge}").batched


def test_chat_prompts_without_a_template_have_no_reward(changed: Callable[..., Path]) -> None:
    folder = changed()
    (folder / "chat_template.jinja").unlink()
    prompt = ({"role": "user", "content": "2 + 3 ="},)
    first, second = RewardCaller("it", ModelReward.from_name(str(folder)))([prompt, "2 + 3 =\n"], ["5", "5"], {})
    assert (first.reason, second.reason) == ("raised", None)
    assert "has no chat template" in first.message


def test_an_invalid_reward_model_is_refused(
    judge: Path, random_model: Path, changed: Callable[..., Path], tmp_path: Path
) -> None:
    def refused(name: str, says: str) -> None:
        with pytest.raises(PolicygradError, match=says):
            resolve_reward(name)

    refused("model:", "names no model: model:DIR or model:HUB_ID")
    refused("model:no/such/dir", "reward 'model:no/such/dir': there is no model folder")
    refused(f"model:{tmp_path}", "whose folder needs config.json")
    refused(f"model:{random_model}", "not a reward model: it is a LlamaForCausalLM.*`policygrad reward-model")
    two = {"id2label": {"0": "bad", "1": "good"}, "label2id": {"bad": 0, "good": 1}}
    refused(f"model:{changed(config=two)}", "a classifier with 2 labels; a reward model has one")
    folder = changed(config={"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}})
    resolve_reward(f"model:{folder}")
    for path in folder.glob("*token*"):
        path.unlink()
    refused(f"model:{folder}", "cannot load the tokenizer of")


def test_weights_without_a_head_are_refused(random_model: Path, changed: Callable[..., Path]) -> None:
    folder = changed()
    shutil.copy(random_model / "model.safetensors", folder / "model.safetensors")
    with pytest.raises(ModelError, match=r"would have random weights: its file lacks 1 tensor \(score\.weight\)"):
        load_classifier(str(folder))


# --- the loss


def test_bradley_terry_by_hand() -> None:
    margin = torch.tensor([0.0, math.log(3), -math.log(3), 60.0], dtype=torch.float64)
    expected = [math.log(2), math.log(4 / 3), math.log(4), 0.0]
    assert torch.allclose(bradley_terry_loss(margin), torch.tensor(expected, dtype=torch.float64), atol=1e-12)
    assert compute_accuracy(margin).tolist() == [0.5, 1.0, 0.0, 1.0]


def test_the_gradient_counts_every_prompt_once_whatever_the_micro_batches(
    config: pg.RewardModelConfig, tmp_path: Path
) -> None:
    """Against Ouyang et al. 2022, eq. 1, written out: per prompt the mean over its pairs, then the mean over prompts."""
    small = replace(config, learner=pg.LearnerConfig(micro_tokens=64)).resolve()
    torch.manual_seed(0)
    objective = PreferenceObjective(small)
    rows = [0, 1, 2, 3, 4, 5]
    groups = group_by_prompt(objective.pairs, rows)
    assert sorted(map(len, groups)) == [1, 1, 2, 2]
    learner = LocalSupervisedLearner(objective.model, small, 1, causal=False)
    calls = counted(learner.optimizer)
    metrics = objective.accumulate(learner, rows)
    assert len(calls) > 1
    results = {n: p.grad.clone() for n, p in objective.model.named_parameters() if p.grad is not None}
    objective.model.zero_grad()
    tokenizer = objective.tokenizer.hf

    def reward(prompt: Any, completion: str) -> torch.Tensor:
        ids = tokenizer(prompt + completion)["input_ids"] + [tokenizer.eos_token_id]
        return objective.model(input_ids=torch.tensor([ids])).logits[0, 0]

    each = []
    for group in groups:
        pairs = [objective.pairs[i] for i in group]
        losses = [-(reward(p.prompt, p.chosen) - reward(p.prompt, p.rejected)).sigmoid().log() for p in pairs]
        each.append(torch.stack(losses).mean())
    loss = torch.stack(each).mean()
    loss.backward()
    assert metrics["loss"] == pytest.approx(float(loss.detach()), abs=1e-6)
    for name, parameter in objective.model.named_parameters():
        assert parameter.grad is not None, name
        assert torch.allclose(results[name], parameter.grad, atol=1e-6), name


def test_the_pairs_of_a_prompt_stay_together(config: pg.RewardModelConfig) -> None:
    pairs = read_preferences(config.data)
    units = group_by_prompt(pairs, range(len(pairs)))
    steps = BatchSchedule(units, epochs=3, batch_size=8, seed=5)
    assert sorted(i for step in steps for i in step) == sorted(list(range(len(pairs))) * 3)
    assert all(len(step) <= 8 for step in steps)
    for unit in units:
        assert sum(set(unit) <= set(step) for step in steps) == 3
    assert list(BatchSchedule(units, 3, 8, seed=5)) == list(steps)
    assert list(BatchSchedule(units, 3, 8, seed=6)) != list(steps)
    assert [len(s) for s in BatchSchedule([(0, 1, 2), (3,)], 1, 2, seed=0)] in (
        [3, 1],
        [1, 3],
    )  # one prompt is never split


# --- a run


def test_training_learns_resumes_bitwise_and_loads_elsewhere(config: pg.RewardModelConfig, tmp_path: Path) -> None:
    """Stopped twice and taken up again; and the saved model scores as the trained one."""
    uninterrupted = pg.train_reward_model(replace(config, output=str(tmp_path / "whole")))
    assert uninterrupted.after is not None
    assert uninterrupted.model is not None
    assert uninterrupted.after["eval/loss"] < uninterrupted.before["eval/loss"]
    pieces = tmp_path / "pieces"
    result = pg.train_reward_model(replace(config, output=str(pieces)), stop_after=3)
    while result.model is None:
        result = pg.train_reward_model(resume=pieces, stop_after=4)
    assert result.steps == uninterrupted.steps
    assert result.after == uninterrupted.after
    one, other = (load_file(run / "model" / "model.safetensors") for run in (uninterrupted.output, pieces))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
    first, second = (
        [{k: v for k, v in json.loads(line).items() if "time" not in k and "per_second" not in k} for line in file]
        for file in ((run / "metrics.jsonl").read_text().splitlines() for run in (uninterrupted.output, pieces))
    )
    assert first == second
    assert {"loss", "accuracy", "margin", "grad_norm", "lr"} <= first[1].keys()
    saved = AutoModelForSequenceClassification.from_pretrained(uninterrupted.model)
    assert saved.config.num_labels == 1
    assert saved.config.pad_token_id == 0
    rerun = pg.train_reward_model(resume=uninterrupted.output)  # a finished run says the same, once
    assert rerun.after == uninterrupted.after
    assert len((uninterrupted.output / "metrics.jsonl").read_text().splitlines()) == len(first)
    more = pg.train_reward_model(  # from the reward model itself: its head is kept
        replace(config, model=str(uninterrupted.output), epochs=1, lr=0.0, output=str(tmp_path / "more"))
    )
    assert more.before["eval/loss"] == pytest.approx(uninterrupted.after["eval/loss"], abs=1e-6)


def test_eval_data_prompts_are_excluded_from_training(config: pg.RewardModelConfig, tmp_path: Path) -> None:
    other = write_rows(tmp_path / "other.jsonl", PAIRS[:4])
    objective = PreferenceObjective(replace(config, eval_data=other).resolve())
    trained = {objective.pairs[i].prompt for unit in objective.units for i in unit}
    measured = {objective.pairs[i].prompt for unit in objective.eval_units for i in unit}
    assert measured == {row["prompt"] for row in PAIRS[:4]}
    assert not trained & measured
    assert objective.run_facts["left out"].startswith("4 pairs")
    with pytest.raises(DataError, match="contains every prompt"):
        PreferenceObjective(replace(config, eval_data=config.data).resolve())


def test_a_model_without_a_padding_token_gets_one(config: pg.RewardModelConfig, tmp_path: Path) -> None:
    """No unknown token, no beginning: the end token; then the last token before it is scored."""
    folder = tmp_path / "bare"
    shutil.copytree(config.model, folder)
    for name in ("config", "tokenizer_config", "generation_config"):
        path = folder / f"{name}.json"
        values = json.loads(path.read_text())
        path.write_text(json.dumps({k: v for k, v in values.items() if not k.startswith("pad_token")}))
    bare = replace(config, model=str(folder)).resolve()
    objective = PreferenceObjective(bare)
    assert objective.tokenizer.hf.pad_token == "<eos>"
    assert objective.model.config.pad_token_id == 1  # type: ignore[union-attr]
    learner = LocalSupervisedLearner(objective.model, bare, 1, causal=False)
    batch, alone = (
        torch.cat(
            [
                learner.run_on_all(compute_rewards, PreferenceBatch(objective.texts[i : i + size], []))
                for i in range(0, 3, size)
            ]
        )
        for size in (3, 1)
    )
    assert torch.allclose(batch, alone, atol=1e-5)
    assert float((batch[:, 0] - batch[:, 1]).abs().min()) > 0  # the answers' last digits are read


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"prompt": "a", "chosen": "b"}, r"bad.jsonl:3: no column 'rejected' \(it has 'prompt', 'chosen'\)"),
        ({"chosen": "b", "rejected": "c"}, "bad.jsonl:3: no column 'prompt'"),
        ({"prompt": "a", "chosen": "b", "rejected": "b"}, "bad.jsonl:3: 'chosen' and 'rejected' are equal"),
        ({"prompt": "a", "chosen": "b", "rejected": 3}, "bad.jsonl:3: 'rejected' must be text or .* got int"),
        ({"prompt": "", "chosen": "b", "rejected": "c"}, "bad.jsonl:3: 'prompt' is empty"),
        ({"prompt": "a", "chosen": "b", "rejected": ""}, "bad.jsonl:3: 'rejected' is empty; give its text"),
        ({"prompt": "a", "chosen": " \n", "rejected": "c"}, "bad.jsonl:3: 'chosen' is empty"),
        ({"prompt": "a", "chosen": [{"role": "assistant", "content": "b"}], "rejected": "c"}, "give both in one form"),
        (
            {
                "prompt": [{"role": "user", "content": "a"}],
                "chosen": [{"role": "user", "content": "b"}],
                "rejected": "c",
            },
            "must be one assistant message, not user",
        ),
        ({"prompt": "a", "chosen": "b\ud800", "rejected": "c"}, "half a surrogate pair"),
        ([1], r"bad.jsonl:3: every line must be a JSON object, got a list; write \{\"prompt\""),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, row: Any, says: str) -> None:
    path = write_rows(tmp_path / "bad.jsonl", [PAIRS[0]])
    with Path(path).open("a") as file:
        file.write("\n" + json.dumps(row) + "\n")
    with pytest.raises(DataError, match=says):
        read_preferences(path)


def test_invalid_files_models_and_folders_are_refused(
    config: pg.RewardModelConfig, judge: Path, tmp_path: Path
) -> None:
    def refused(says: str, **changes: Any) -> None:
        with pytest.raises(PolicygradError, match=says):
            pg.train_reward_model(replace(config, output=str(tmp_path / "run"), **changes))
        assert not (tmp_path / "run").exists()

    empty = tmp_path / "empty.jsonl"
    empty.write_text("\n")
    refused("empty.jsonl: no rows; write one JSON object per line", data=str(empty))
    refused("no such file", data=str(tmp_path / "nosuch.jsonl"))
    refused("reward-model needs data: --data FILE.jsonl", data="")
    refused("there is no model folder", model="./nosuch")
    long = write_rows(tmp_path / "long.jsonl", [*PAIRS, {"prompt": "a" * 3000, "chosen": "b", "rejected": "c"}])
    refused(r"long.jsonl:\d+: prompt and 'chosen' have \d+ tokens, more than the 256", data=long)
    with pytest.warns(UserWarning, match=rf"long\.jsonl: 1 of {len(PAIRS) + 1} rows skipped"):
        skipping = PreferenceObjective(replace(config, data=long, skip_bad_rows=True).resolve())
    assert (skipping.units, skipping.eval_units) == ((o := PreferenceObjective(config.resolve())).units, o.eval_units)
    special = write_rows(tmp_path / "equal.jsonl", [*PAIRS, {"prompt": "a", "chosen": "b", "rejected": "b<eos>"}])
    refused(r"equal.jsonl:\d+: 'chosen' and 'rejected' are equal in token ids", data=special)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").write_text("")
    with pytest.raises(RunError, match="is not empty: resume the run in it by --resume"):
        pg.train_reward_model(replace(config, output=str(tmp_path / "full")))
    with pytest.raises(RunError, match="holds no run of `policygrad reward-model`"):
        pg.train_reward_model(resume=tmp_path / "full")


def test_the_initial_causal_model_is_unchanged(config: pg.RewardModelConfig, random_model: Path) -> None:
    """Its body's weights are taken over bit for bit; only the head is new."""
    body = AutoModelForCausalLM.from_pretrained(random_model).model.state_dict()
    taken = dict(PreferenceObjective(config.resolve()).model.state_dict())
    assert all(torch.equal(taken.pop(f"model.{name}"), value) for name, value in body.items())
    assert list(taken) == ["score.weight"]
